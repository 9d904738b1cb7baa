"""Accuracy against what it cost, all arms of a matrix with their seeds, as SVG files that stand alone.

    python benchmarks/matrix_figures.py benchmarks/maze_matrix.toml

Writes MATRIX_tokens.svg and MATRIX_seconds.svg from the stored cells. The standard library draws them, and the same
cells give the same bytes. The line is the median of the seeds, the band their range.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from curves import at, median_curve
from matrix import read_plan
from matrix_cells import COSTS, Arms, curve, read_arms, usable

from whet import files
from whet.report.arms import Curve

# Okabe and Ito's colours, which the colour-blind can tell apart; dashes tell the lines apart without colour.
COLOURS = ("#666666", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#000000")
DASHES = ("6 3", "", "", "2 2", "8 3 2 3", "5 2", "1 2", "10 3")
WIDTH, HEIGHT = 820, 400
LEFT, TOP, RIGHT, BOTTOM = 52, 34, 170, 44  # margins; the legend stands in the right one


@dataclass(frozen=True)
class FigureLine:
    label: str
    curves: Sequence[Curve]  # one per seed


@dataclass(frozen=True)
class Plane:
    """Maps values to places in the picture."""

    x1: float
    y0: float
    y1: float

    def place(self, x: float, y: float) -> str:
        """
        >>> Plane(x1=10, y0=0.0, y1=1.0).place(0, 0), Plane(x1=10, y0=0.0, y1=1.0).place(10, 1)
        ('52.0 356.0', '650.0 34.0')
        """
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / self.x1
        down = TOP + (HEIGHT - TOP - BOTTOM) * (self.y1 - y) / (self.y1 - self.y0)
        return f"{across:.1f} {down:.1f}"


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


def figure(
    lines: Sequence[FigureLine], *, title: str, x_label: str, x_show: Callable[[float | None], str]
) -> str:
    """The SVG file; "" where there is nothing to draw."""
    drawn = [line for line in lines if any(len(c) > 1 for c in line.curves)]
    if not drawn:
        return ""
    values = [point for line in drawn for c in line.curves for point in c]
    x_ticks = ticks(0.0, max(x for x, _ in values))
    y_ticks = ticks(min(y for _, y in values), max(y for _, y in values))
    plane = Plane(x1=max(x for x, _ in values), y0=y_ticks[0], y1=y_ticks[-1])
    parts = [_grid(plane, [x for x in x_ticks if x <= plane.x1], y_ticks, x_show)]
    parts += [_band(line.curves, plane, number) for number, line in enumerate(drawn)]
    parts += [_line(line.curves, plane, number) for number, line in enumerate(drawn)]
    parts += [_legend(line, number) for number, line in enumerate(drawn)]
    parts.append(f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    body = "\n".join(part for part in parts if part)
    style = 'font-family="sans-serif" font-size="11" fill="#333333"'
    return f'{head} {style}>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def _grid(
    plane: Plane, xs: Sequence[float], ys: Sequence[float], x_show: Callable[[float | None], str]
) -> str:
    parts = []
    for y in ys:
        across, down = plane.place(0, y).split()
        parts.append(f'<path d="M{across} {down}H{WIDTH - RIGHT}" stroke="#e6e6e6"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{float(down) + 4:.1f}" text-anchor="end">{y:.2f}</text>'
        )
    for x in xs:
        across, down = plane.place(x, plane.y0).split()
        parts.append(f'<path d="M{across} {down}v4" stroke="#888888"/>')
        parts.append(
            f'<text x="{across}" y="{float(down) + 16:.1f}" text-anchor="middle">{x_show(x)}</text>'
        )
    return "\n".join(parts)


def _band(curves: Sequence[Curve], plane: Plane, number: int) -> str:
    middle = median_curve(curves)
    if len(curves) < 2 or not middle:
        return ""
    xs = [x for x, _ in middle]
    low = [plane.place(x, min(at(c, x) for c in curves)) for x in xs]
    high = [plane.place(x, max(at(c, x) for c in curves)) for x in xs]
    return f'<path d="M{"L".join([*low, *reversed(high)])}Z" fill="{COLOURS[number % len(COLOURS)]}" opacity="0.13"/>'


def _line(curves: Sequence[Curve], plane: Plane, number: int) -> str:
    middle = median_curve(curves)
    return (
        f'<path d="M{"L".join(plane.place(x, y) for x, y in middle)}" {_stroke(number)}/>'
        if middle
        else ""
    )


def _legend(line: FigureLine, number: int) -> str:
    x, y = WIDTH - RIGHT + 14, TOP + 8 + 18 * number
    text = f'<text x="{x + 32}" y="{y + 4}">{escape(line.label)}</text>'
    return f'<path d="M{x} {y}h26" {_stroke(number)}/>{text}'


def _stroke(number: int) -> str:
    """No two of 24 alike: a colour that comes again has another dash."""
    dash = DASHES[(number + 3 * (number // len(COLOURS))) % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="1.8"{dashes}'


def write_figures(arms: Arms, baseline: str, name: str, folder: Path) -> list[Path]:
    written = []
    for cost in ("tokens", "seconds"):
        shown = usable(arms, baseline, cost)
        curves = {
            f"{arm} ({len(cells)})": [curve(cell, cost) for cell in cells]
            for arm, cells in shown.items()
        }
        lines = [FigureLine(label, own) for label, own in curves.items()]
        label = (
            "tokens generated for training"
            if cost == "tokens"
            else "seconds of training, cells that ran alone"
        )
        drawn = figure(
            lines,
            title="accuracy: median and range of the seeds",
            x_label=label,
            x_show=COSTS[cost],
        )
        if drawn:
            files.write_text(folder / f"{name}_{cost}.svg", drawn)
            written.append(folder / f"{name}_{cost}.svg")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    options = parser.parse_args()
    plan = read_plan(options.matrix)
    arms = read_arms(options.results / "train" / plan.name, [arm.name for arm in plan.matrix.arm])
    for path in write_figures(arms, plan.baseline, plan.name, options.out):
        print(f"Written: {path}")


if __name__ == "__main__":
    main()
