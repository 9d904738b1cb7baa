"""Draws line charts as inline SVG with HTML labels: no script, no library, sharp at any width.

`page` calls `chart` for its figures and `tag` for everything else. The SVG is stretched to its box (its strokes are
not), and the labels are HTML placed in percent, so that text keeps its size on a phone. Colours are classes (c0, c1,
...) that page.css defines for light and dark; dashes distinguish the lines without colour.

The markup cannot be broken into: every string is escaped on its way in unless it is `Html` already, and tags are
closed by construction, so that no text, however hostile, can open or close one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from whet.report.curves import Curve, thin
from whet.text import printable

COLOURS = 6
SIZE = 1000  # the coordinates of an SVG run from 0 to SIZE in both directions
VOID = frozenset({"meta"})  # elements without content

Show = Callable[[float], str]


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Text as markup, with control characters spelled out by `printable` first.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def join(parts: Iterable[str], between: str = "") -> Html:
    return Html(between.join(escape(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | float) -> Html:
    """An element with its children.

    >>> tag("p", "a < b", class_="note", data_step=3)
    '<p class="note" data-step="3">a &lt; b</p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), str(value)) for key, value in attributes.items())
    opening = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    if name in VOID:
        assert not children
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")


@dataclass(frozen=True, kw_only=True)
class Line:
    label: str
    colour: int
    curve: Curve  # the line in front
    behind: tuple[Curve, ...] = ()  # faint lines: single seeds, or the values before smoothing
    dots: Curve = field(default_factory=list)  # single measurements that get a mark and a tooltip

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


@dataclass(frozen=True, slots=True)
class Box:
    """The part of the plane that a chart shows."""

    x0: float
    x1: float
    y0: float
    y1: float

    def right(self, x: float) -> float:
        """Position from the left edge, 0..1."""
        return (x - self.x0) / (self.x1 - self.x0)

    def up(self, y: float) -> float:
        """Position from the lower edge, 0..1."""
        return (y - self.y0) / (self.y1 - self.y0)

    def place(self, x: float, y: float) -> str:
        """Coordinates in the SVG, whose y axis points down."""
        return f"{SIZE * self.right(x):.1f} {SIZE * (1 - self.up(y)):.1f}"


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    x_show: Show,
    y_show: Show,
    from_zero: bool = False,
    note: str = "",
) -> Html:
    """A figure with title, legend, grid and labels; a sentence if there is nothing to draw."""
    drawn = [line for line in lines if line.curve or any(line.behind)]
    heading = tag("figcaption", tag("b", title), *([tag("span", note)] if note else []))
    if not drawn:
        return tag("figure", heading, tag("p", "Nothing was recorded for this.", class_="empty"), class_="chart")
    points = [p for line in drawn for curve in (line.curve, *line.behind) for p in curve]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = ticks(min(0.0, *xs), max(xs))
    y_ticks = ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    # The y axis ends at a tick, the x axis at the last point: a curve fills its chart to the right edge.
    box = Box(x_ticks[0], max(xs) or x_ticks[-1], y_ticks[0], y_ticks[-1])
    x_ticks = [x for x in x_ticks if x <= box.x1]
    grid = [tag("path", d=f"M{box.place(box.x0, y)}H{SIZE}", class_="grid") for y in y_ticks]
    grid += [tag("path", d=f"M{box.place(x, box.y1)}V{SIZE}", class_="grid") for x in x_ticks]
    behind = [_path(c, box, f"behind {line.style}") for line in drawn for c in line.behind if c]
    front = [_path(line.curve, box, f"line {line.style}") for line in drawn if line.curve]
    dots = [_dot(line, x, y, box, f"{y_show(y)} at {x_show(x)}") for line in drawn for x, y in line.dots]
    name = f"{title}: {', '.join(line.label for line in drawn)}"
    plot = tag(
        "div",
        *(tag("span", y_show(y), class_="y", style=f"bottom:{100 * box.up(y):.2f}%") for y in y_ticks),
        *(tag("span", x_show(x), class_="x", style=f"left:{100 * box.right(x):.2f}%") for x in x_ticks),
        _svg(*grid, *behind, *front, *dots, role="img", aria_label=name),
        class_="plot",
    )
    legend = [tag("ul", *map(_legend_entry, drawn), class_="legend")] if len(drawn) > 1 else []
    return tag("figure", heading, *legend, plot, tag("p", x_label, class_="axis"), class_="chart")


def _svg(*children: Html, **attributes: str) -> Html:
    return tag("svg", *children, viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", **attributes)


def _path(curve: Curve, box: Box, style: str) -> Html:
    return tag("path", d="M" + "L".join(box.place(x, y) for x, y in thin(curve)), class_=style)


def _dot(line: Line, x: float, y: float, box: Box, tooltip: str) -> Html:
    title = tag("title", f"{line.label}: {tooltip}")
    return tag("path", title, d=f"M{box.place(x, y)}h0", class_=f"dot {line.style}")


def _legend_entry(line: Line) -> Html:
    stroke = tag("path", d=f"M0 {SIZE // 2}H{SIZE}", class_=f"line {line.style}")
    return tag("li", _svg(stroke, aria_hidden="true"), line.label)
