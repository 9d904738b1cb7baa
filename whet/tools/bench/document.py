"""The report of a matrix: tables and figures in docs/evidence/results.md and the README, from the JSON of its cells alone.

`whet bench train MATRIX --report-only` calls `write_report`. It replaces what stands between the marks
`<!-- results: MATRIX -->` and `<!-- end: MATRIX -->` and leaves every other word alone. The numbers are `results.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

from whet import files
from whet.errors import WhetError
from whet.report import formats
from whet.report.chart import ticks
from whet.report.curves import Curve, at, median_curve
from whet.report.formats import median_reach
from whet.tools.bench.matrix import MatrixPlan
from whet.tools.bench.results import (
    Arms,
    Log,
    Show,
    at_equal_seconds,
    cost_text,
    curve,
    elsewhere,
    end,
    end_row,
    entropy_correlation,
    gain_shares,
    one_lower,
    pick_levels,
    pooled_shares,
    range_text,
    reaches,
    share,
    share_text,
    start_accuracy,
    target_level,
    usable,
)
from whet.tools.bench.start import read_outcome

# ---- figure
#
# Accuracy against what it cost, several arms with their seeds, as an SVG file that stands alone.
#
# `results.py` draws with it what docs/evidence/results.md shows. Standard library alone, so that a report needs nothing
# installed; the same curves give the same bytes. The line is the median of the seeds, the band their range.


COLOURS = ("#666666", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart; dashes tell the lines apart without colour."""
DASHES = ("6 3", "", "", "2 2", "8 3 2 3", "5 2", "1 2", "10 3")
WIDTH, HEIGHT = 820, 400
LEFT, TOP, RIGHT, BOTTOM = 52, 34, 170, 44
"""Margins; the legend stands in the right one."""


@dataclass(frozen=True)
class FigureLine:
    label: str
    curves: Sequence[Curve]
    """One a seed."""


@dataclass(frozen=True)
class Plane:
    """From values to places in the picture."""

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


def figure(lines: Sequence[FigureLine], *, title: str, x_label: str, x_show: Callable[[float | None], str]) -> str:
    """The SVG; "" where there is nothing to draw."""
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
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    body = "\n".join(part for part in parts if part)
    style = 'font-family="sans-serif" font-size="11" fill="#333333"'
    return f'{head} {style}>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def _grid(plane: Plane, xs: Sequence[float], ys: Sequence[float], x_show: Callable[[float | None], str]) -> str:
    parts = []
    for y in ys:
        across, down = plane.place(0, y).split()
        parts.append(f'<path d="M{across} {down}H{WIDTH - RIGHT}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(down) + 4:.1f}" text-anchor="end">{y:.2f}</text>')
    for x in xs:
        across, down = plane.place(x, plane.y0).split()
        parts.append(f'<path d="M{across} {down}v4" stroke="#888888"/>')
        parts.append(f'<text x="{across}" y="{float(down) + 16:.1f}" text-anchor="middle">{x_show(x)}</text>')
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
    return f'<path d="M{"L".join(plane.place(x, y) for x, y in middle)}" {_stroke(number)}/>' if middle else ""


def _legend(line: FigureLine, number: int) -> str:
    x, y = WIDTH - RIGHT + 14, TOP + 8 + 18 * number
    text = f'<text x="{x + 32}" y="{y + 4}">{escape(line.label)} ({len(line.curves)})</text>'
    return f'<path d="M{x} {y}h26" {_stroke(number)}/>{text}'


def _stroke(number: int) -> str:
    """No two of 24 alike: a colour that comes again has another dash."""
    dash = DASHES[(number + 3 * (number // len(COLOURS))) % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="1.8"{dashes}'


COSTS: dict[str, Show] = {"tokens": formats.count, "rollouts": formats.count, "seconds": formats.duration}
RULE = (
    "Median over the seeds, and their range. A level is reached at the first of two consecutive evaluations at or "
    "above it; the number of seeds that did is given where not all did. Tokens and rollouts are those generated for "
    "training, seconds those of training: what evaluation and saving take is in neither. Seconds are of cells that "
    "ran alone, on one machine and at one commit. The interval of an accuracy is Wilson's 95% over the test problems; "
    "it does not hold what another seed would change. Informative: groups with right and wrong "
    "answers, of those asked. Entropy and length: in the first update, and over the last three."
)

GAINED = (
    "A level is one point of a noisy curve. By the straight line through all evaluations of an arm, a hundredth of "
    "accuracy gained costs, of the baseline's (in brackets 95% of a bootstrap):"
)
POOLED = "By all evaluations of an arm together (a rising fit through them; in brackets the middle 80% of a bootstrap):"


def write_report(plan: MatrixPlan, out: Path, docs: Path, readme: Path) -> list[Path]:
    """docs/evidence/results.md, docs/evidence/figures/MATRIX_*.svg, and the README where it has the marks; gives what was written."""
    arms = read_arms(out / "train" / plan.name, [arm.name for arm in plan.matrix.arm])
    notes = {arm.name: arm.note for arm in plan.matrix.arm}
    page = docs / "results.md"
    text = page.read_text() if page.is_file() else "# Results\n"
    if marks(plan.name)[0] not in text:
        text = text.rstrip() + f"\n\n## {plan.name}\n" + "\n".join(marks(plan.name)) + "\n"
    figures = write_figures(arms, plan.baseline, plan.name, docs / "figures")
    shown = [f"![Accuracy against its cost](figures/{path.name})" for path in figures]
    files.write_text(page, fill(text, plan.name, "\n\n".join([document(arms, plan.baseline, notes), *shown, RULE])))
    written = [page, *figures]
    if readme.is_file() and marks(plan.name)[0] in (text := readme.read_text()):
        files.write_text(readme, fill(text, plan.name, short_table(arms, plan.baseline)))
        written.append(readme)
    return written


def read_arms(folder: Path, order: Sequence[str]) -> dict[str, list[Log]]:
    """The cells that are there, arms in the order of the matrix, then those that it no longer names."""
    cells = [read_outcome(path) for path in sorted(folder.glob("*.json"))]
    cells = [cell for cell in cells if any(accuracy is not None for accuracy in _accuracies(cell))]
    if not cells:
        raise WhetError(f"There are no finished cells in {folder}.")
    arms: dict[str, list[Log]] = {name: [] for name in order}
    for cell in sorted(cells, key=lambda cell: cell["seed"]):
        arms.setdefault(cell["arm"], []).append(cell)
    return {name: some for name, some in arms.items() if some}


def _accuracies(cell: Log) -> list[float | None]:
    place = cell["columns"].index("accuracy")
    return [row[place] for row in cell["rows"]]


def write_figures(arms: Arms, baseline: str, name: str, folder: Path) -> list[Path]:
    written = []
    for cost in ("tokens", "seconds"):
        told = usable(arms, baseline, cost)
        lines = [FigureLine(arm, [curve(cell, cost) for cell in cells]) for arm, cells in told.items()]
        label = "tokens generated for training" if cost == "tokens" else "seconds of training, cells that ran alone"
        drawn = figure(lines, title="accuracy: median and range of the seeds", x_label=label, x_show=COSTS[cost])
        if drawn:
            files.write_text(folder / f"{name}_{cost}.svg", drawn)
            written.append(folder / f"{name}_{cost}.svg")
    return written


def marks(name: str) -> tuple[str, str]:
    return f"<!-- results: {name} -->", f"<!-- end: {name} -->"


def fill(text: str, name: str, body: str) -> str:
    """The text with `body` between the marks of `name`, and all else as it was.

    >>> fill("a\\n<!-- results: m -->\\nold\\n<!-- end: m -->\\nb", "m", "new").split("\\n")
    ['a', '<!-- results: m -->', 'new', '<!-- end: m -->', 'b']
    """
    opening, closing = marks(name)
    before, found, rest = text.partition(opening)
    _, ended, after = rest.partition(closing)
    if not found or not ended:
        raise WhetError(f"The mark {closing if found else opening} is missing.")
    return f"{before}{opening}\n{body}\n{closing}{after}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def cost_table(arms: Arms, cost: str, levels: Sequence[float]) -> str:
    rows = [
        [arm, *(cost_text(reaches(cells, level, cost), COSTS[cost]) for level in levels)]
        for arm, cells in arms.items()
        if cells
    ]
    return table([f"{cost} to", *map(formats.level, levels)], rows)


def share_cells(arms: Arms, arm: str, baseline: str, level: float, cost: str) -> list[str]:
    """[what the level cost, what part of the baseline's that is]."""
    told = usable(arms, baseline, cost)
    mine, theirs = (reaches(told[name], level, cost) for name in (arm, baseline))
    ratio = share_text(share(median_reach(theirs), median_reach(mine))) if mine and theirs else formats.MISSING
    return [cost_text(mine, COSTS[cost]), ratio]


def share_table(arms: Arms, baseline: str, level: float) -> str:
    rows = [[arm, *(text for cost in COSTS for text in share_cells(arms, arm, baseline, level, cost))] for arm in arms]
    heads = [head for cost in COSTS for head in (f"{cost} to {formats.level(level)}", f"of {baseline}'s")]
    return table(["arm", *heads], rows)


def pooled_table(arms: Arms, baseline: str, levels: Sequence[float], cost: str) -> str:
    """Empty where the baseline reaches none of the levels, or no cell tells the cost."""
    told = {arm: cells for arm, cells in usable(arms, baseline, cost).items() if cells}
    reached = {level: pooled_shares(told, baseline, level, cost) for level in levels if baseline in told}
    found = {level: shares for level, shares in reached.items() if shares}
    if not found:
        return ""
    heads = [f"{cost}, of {baseline}'s, to", *map(formats.level, found)]
    return table(heads, [*zip(told, *found.values(), strict=True)])


def gain_table(arms: Arms, baseline: str) -> str:
    """Empty where the baseline gains nothing."""
    found = {cost: shares for cost in ("tokens", "seconds") if (shares := gain_shares(arms, baseline, cost))}
    return table(["arm", *found], [*zip(arms, *found.values(), strict=True)]) if found else ""


def elsewhere_lines(arms: Arms, baseline: str) -> list[str]:
    found = [f"{', '.join(some)} ({what})" for what, some in elsewhere(arms, baseline).items()]
    return [f"Seconds of another machine or commit are left out: {'; '.join(found)}."] if found else []


def circumstances_lines(arms: Arms) -> list[str]:
    """Start, machine, versions and commits of all cells."""
    cells = [cell for some in arms.values() for cell in some]
    evaluation, best, start = cells[0]["evaluation"], max(cells, key=end), start_accuracy(arms)

    def all_of(what: Callable[[Log], str]) -> str:
        return ", ".join(dict.fromkeys(what(cell) for cell in cells))

    starts = all_of(lambda cell: cell["start"]["weights"][:12])
    machines = all_of(lambda cell: cell["hardware"].get("gpu") or cell["hardware"]["cpu"])
    versions = all_of(lambda cell: f"torch {cell['versions']['torch']}")
    alone, minutes = sum(cell["solo"] for cell in cells), sum(cell["wall_s"] for cell in cells) / 60
    lines = [
        f"{len(cells)} cells, {alone} of them alone on their machine, {minutes:.0f} minutes in all; evaluated on "
        f"{evaluation['prompts']:,} problems ({evaluation['name']}), trained on a pool of {cells[0]['pool']:,}. They "
        f"began from weights {starts} with an accuracy of {start:.3f}; the best ended at {end(best):.3f} "
        f"({best['arm']}, seed {best['seed']}), {end(best) / max(start, 1e-9):.2f} times the start.",
        f"{machines}; {versions}; commit {all_of(lambda cell: cell['commit'][:12])}.",
    ]
    if ", " in starts:
        lines.append("**The cells did not begin from the same bytes**, so their costs are not to be compared.")
    return lines


def document(arms: Arms, baseline: str, notes: Mapping[str, str]) -> str:
    """All tables of a matrix, as Markdown."""
    target = target_level(arms[baseline]) if baseline in arms else None
    levels = pick_levels(arms, target)
    equal = at_equal_seconds(arms, baseline)
    timed = usable(arms, baseline, "seconds")
    ends = {arm: end_row(arm, cells, timed[arm], equal) for arm, cells in arms.items()}
    heads = list(next(iter(ends.values())))
    parts = [*circumstances_lines(arms), *elsewhere_lines(arms, baseline)]
    parts.append(table(["arm", *heads], [[arm, *row.values()] for arm, row in ends.items()]))
    if (alike := entropy_correlation(arms)) is not None:
        parts.append(
            f"Over all cells accuracy at the end (mean of the last three evaluations) and entropy (of the last three "
            f"updates) have a correlation of {alike:.2f}."
        )
    fallen = {arm: sum(cell.get("ended_by") == "collapse" for cell in cells) for arm, cells in arms.items()}
    if any(fallen.values()):
        seeds = ", ".join(f"{arm} ({n} of {len(arms[arm])})" for arm, n in fallen.items() if n)
        parts.append(f"Stopped by the guard against collapse: {seeds}.")
    if equal is not None:
        low, high = equal.interval
        parts.append(
            f"The last column: accuracy after {formats.duration(equal.seconds)} of training, against {baseline}'s "
            f"interval ({low:.3f}–{high:.3f})."
        )
    if target is not None:
        parts += [
            f"The highest level that {baseline} reaches is {formats.level(target)}:",
            share_table(arms, baseline, target),
            "With one right answer fewer:",
            share_table(arms, baseline, one_lower(target, arms[baseline][0])),
        ]
    elif baseline in arms:
        parts.append(f"{baseline} reaches no level above its start, so no share of its cost can be given.")
    gained = gain_table(arms, baseline) if baseline in arms else ""
    parts += [GAINED, gained] if gained else []
    pooled = [pooled_table(arms, baseline, levels, cost) for cost in ("tokens", "seconds") if baseline in arms]
    parts += [POOLED, *pooled] if any(pooled) else []
    if levels:
        told = {cost: usable(arms, baseline, cost) for cost in COSTS}
        parts += [cost_table(some, cost, levels) for cost, some in told.items() if any(some.values())]
    parts.append("\n".join(f"- **{arm}**: {note}" for arm, note in notes.items() if arm in arms and note))
    return "\n\n".join(part for part in parts if part)


def short_table(arms: Arms, baseline: str) -> str:
    """For the README: where each arm ended, and its costs at the highest level that the baseline reaches."""
    target = target_level(arms[baseline]) if baseline in arms else None
    costs = ("tokens", "seconds")
    heads, rows = ["arm", "seeds", "accuracy at the end"], []
    for arm, cells in arms.items():
        ends = [*map(end, cells)]
        row = [arm, f"{len(cells)}", f"{median(ends):.3f}" + (f" ({range_text(ends)})" if len(ends) > 1 else "")]
        if target is not None:
            row += [text for cost in costs for text in share_cells(arms, arm, baseline, target, cost)]
        rows.append(row)
    if target is not None:
        heads += [head for cost in costs for head in (f"{cost} to {formats.level(target)}", f"of {baseline}'s")]
    return table(heads, rows)
