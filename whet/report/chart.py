"""Line charts as inline SVG with HTML labels: no script, no library, sharp at any width.

The SVG is stretched to its box (strokes are not), and the labels are HTML placed in percent, so text keeps its size on
a phone. Colours are classes (c0, c1, ...) that page.css defines for light and dark; dashes tell lines apart
without colour. Pure: curves in, markup out.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from whet.report.curves import Curve, thin
from whet.text import printable

# ---- markup
#
# HTML that cannot be broken into: every string is escaped on its way in, unless it is `Html` already.
#
# Used by `chart`, `sections` and `page`. Tags are closed by construction, so no text, however hostile, can open or
# close one; control characters are made visible by `printable` before they are escaped.


VOID = frozenset({"meta"})
"""Elements without content."""


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def escape(text: str) -> Html:
    """
    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def join(parts: Iterable[str], between: str = "") -> Html:
    return Html(between.join(escape(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | float) -> Html:
    """
    >>> tag("p", "a < b", class_="note", data_step=3)
    '<p class="note" data-step="3">a &lt; b</p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), str(value)) for key, value in attributes.items())
    opening = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    if name in VOID:
        assert not children
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")


COLOURS = 6
SIZE = 1000
"""The SVG's own coordinates run from 0 to SIZE both ways."""


@dataclass(frozen=True, kw_only=True)
class Line:
    label: str
    colour: int
    curve: Curve
    """What the eye should follow."""
    behind: tuple[Curve, ...] = ()
    """Drawn faintly: single seeds, or what was smoothed."""
    dots: Curve = field(default_factory=list)
    """Single measurements worth a mark and a tooltip."""

    @property
    def style(self) -> str:
        return f"c{self.colour % COLOURS}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that span low..high, in steps of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(0, 0.83)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(0, 959_000)
    [0.0, 200000.0, 400000.0, 600000.0, 800000.0, 1000000.0]
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * m for m in (1, 2, 2.5, 5, 10, 20, 50)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    x_show: Callable[[float], str],
    y_show: Callable[[float], str],
    from_zero: bool = False,
    note: str = "",
) -> Html:
    """A figure with title, legend, grid and labels; a sentence instead when there is nothing to draw."""
    drawn = [line for line in lines if line.curve or any(line.behind)]
    heading = tag("figcaption", tag("b", title), *([tag("span", note)] if note else []))
    if not drawn:
        return tag("figure", heading, tag("p", "Nothing was recorded for this.", class_="empty"), class_="chart")
    points = [p for line in drawn for c in (line.curve, *line.behind) for p in c]
    x_ticks = ticks(min(0.0, *(x for x, _ in points)), max(x for x, _ in points))
    lowest = min(y for _, y in points)
    y_ticks = ticks(min(0.0, lowest) if from_zero else lowest, max(y for _, y in points))
    box = Box(x_ticks[0], max(x for x, _ in points) or x_ticks[-1], y_ticks[0], y_ticks[-1])
    x_ticks = [x for x in x_ticks if x <= box.x1]
    plot = tag(
        "div",
        *(tag("span", y_show(y), class_="y", style=f"bottom:{100 * box.up(y):.2f}%") for y in y_ticks),
        *(tag("span", x_show(x), class_="x", style=f"left:{100 * box.right(x):.2f}%") for x in x_ticks),
        _drawing(drawn, box, x_ticks, y_ticks, f"{title}: {', '.join(line.label for line in drawn)}", x_show, y_show),
        class_="plot",
    )
    legend = [_legend(drawn)] if len(drawn) > 1 else []
    return tag("figure", heading, *legend, plot, tag("p", x_label, class_="axis"), class_="chart")


@dataclass(frozen=True, slots=True)
class Box:
    """The part of the plane a chart shows."""

    x0: float
    x1: float
    y0: float
    y1: float

    def right(self, x: float) -> float:
        """0..1 from the left."""
        return (x - self.x0) / (self.x1 - self.x0)

    def up(self, y: float) -> float:
        """0..1 from below."""
        return (y - self.y0) / (self.y1 - self.y0)

    def place(self, x: float, y: float) -> str:
        return f"{SIZE * self.right(x):.1f} {SIZE * (1 - self.up(y)):.1f}"


def _drawing(
    lines: Sequence[Line],
    box: Box,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    name: str,
    x_show: Callable[[float], str],
    y_show: Callable[[float], str],
) -> Html:
    grid = [tag("path", d=f"M{box.place(box.x0, y)}H{SIZE}", class_="grid") for y in y_ticks]
    grid += [tag("path", d=f"M{box.place(x, box.y1)}V{SIZE}", class_="grid") for x in x_ticks]
    behind = [_path(c, box, f"behind {line.style}") for line in lines for c in line.behind if c]
    above = [_path(line.curve, box, f"line {line.style}") for line in lines if line.curve]
    dots = [
        tag(
            "path",
            tag("title", f"{line.label}: {y_show(y)} at {x_show(x)}"),
            d=f"M{box.place(x, y)}h0",
            class_=f"dot {line.style}",
        )
        for line in lines
        for x, y in line.dots
    ]
    return tag(
        "svg",
        *grid,
        *behind,
        *above,
        *dots,
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=name,
    )


def _path(curve: Curve, box: Box, style: str) -> Html:
    return tag("path", d="M" + "L".join(box.place(x, y) for x, y in thin(curve)), class_=style)


def _legend(lines: Sequence[Line]) -> Html:
    stroke = f"M0 {SIZE // 2}H{SIZE}"
    return tag(
        "ul",
        join(
            tag(
                "li",
                tag(
                    "svg",
                    tag("path", d=stroke, class_=f"line {line.style}"),
                    viewBox=f"0 0 {SIZE} {SIZE}",
                    preserveAspectRatio="none",
                    aria_hidden="true",
                ),
                line.label,
            )
            for line in lines
        ),
        class_="legend",
    )
