"""The report of a matrix: its tables in results.md and the README, from the JSON of its cells alone.

    python benchmarks/matrix_document.py benchmarks/stack_matrix.toml

It replaces the text between the marks `<!-- results: MATRIX -->` and `<!-- end: MATRIX -->` and leaves every other word
alone; figures of `matrix_figures.py` in the page's folder are shown. `matrix_results.py` computes the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from command_line import RESULTS, Out, run_script, tell
from matrix import MatrixPlan, read_plan
from matrix_results import (
    Arms,
    Log,
    Show,
    at_equal_seconds,
    cost_text,
    elsewhere,
    end,
    end_row,
    entropy_correlation,
    gain_shares,
    one_lower,
    pick_levels,
    points,
    pooled_shares,
    range_text,
    reaches,
    share,
    share_text,
    start_accuracy,
    target_level,
    usable,
)
from train import read_outcome

from whet import files
from whet.errors import WhetError
from whet.report import formats
from whet.report.formats import median_reach

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
    """Write docs/evidence/results.md, and the README where it has the marks; returns the files that were written."""
    arms = read_arms(out / "train" / plan.name, [arm.name for arm in plan.matrix.arm])
    notes = {arm.name: arm.note for arm in plan.matrix.arm}
    page = docs / "results.md"
    text = page.read_text() if page.is_file() else "# Results\n"
    if marks(plan.name)[0] not in text:
        text = text.rstrip() + f"\n\n## {plan.name}\n" + "\n".join(marks(plan.name)) + "\n"
    figures = [f"figures/{plan.name}_{cost}.svg" for cost in ("tokens", "seconds")]  # by matrix_figures.py
    shown = [f"![Accuracy against its cost]({name})" for name in figures if (docs / name).is_file()]
    files.write_text(page, fill(text, plan.name, "\n\n".join([document(arms, plan.baseline, notes), *shown, RULE])))
    written = [page]
    if readme.is_file() and marks(plan.name)[0] in (text := readme.read_text()):
        files.write_text(readme, fill(text, plan.name, short_table(arms, plan.baseline)))
        written.append(readme)
    return written


def read_arms(folder: Path, order: Sequence[str]) -> dict[str, list[Log]]:
    """The stored cells by arm: first the arms of the matrix in its order, then those that it no longer names."""
    cells = [read_outcome(path) for path in sorted(folder.glob("*.json"))]
    cells = [cell for cell in cells if points(cell, "tokens")]  # one that was never evaluated says nothing
    if not cells:
        raise WhetError(f"There are no finished cells in {folder}.")
    arms: dict[str, list[Log]] = {name: [] for name in order}
    for cell in sorted(cells, key=lambda cell: cell["seed"]):
        arms.setdefault(cell["arm"], []).append(cell)
    return {name: some for name, some in arms.items() if some}


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
    """[what the level cost, its part of the baseline's cost]."""
    used = usable(arms, baseline, cost)
    mine, theirs = (reaches(used[name], level, cost) for name in (arm, baseline))
    ratio = share_text(share(median_reach(theirs), median_reach(mine))) if mine and theirs else formats.MISSING
    return [cost_text(mine, COSTS[cost]), ratio]


def share_table(arms: Arms, baseline: str, level: float) -> str:
    rows = [[arm, *(text for cost in COSTS for text in share_cells(arms, arm, baseline, level, cost))] for arm in arms]
    heads = [head for cost in COSTS for head in (f"{cost} to {formats.level(level)}", f"of {baseline}'s")]
    return table(["arm", *heads], rows)


def pooled_table(arms: Arms, baseline: str, levels: Sequence[float], cost: str) -> str:
    """Shares by the pooled fit; empty where the baseline reaches none of the levels, or no cell has the cost."""
    used = {arm: cells for arm, cells in usable(arms, baseline, cost).items() if cells}
    reached = {level: pooled_shares(used, baseline, level, cost) for level in levels if baseline in used}
    found = {level: shares for level, shares in reached.items() if shares}
    if not found:
        return ""
    heads = [f"{cost}, of {baseline}'s, to", *map(formats.level, found)]
    return table(heads, [*zip(used, *found.values(), strict=True)])


def gain_table(arms: Arms, baseline: str) -> str:
    """Shares of the cost of a hundredth gained; empty where the baseline gains nothing."""
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
        used = {cost: usable(arms, baseline, cost) for cost in COSTS}
        parts += [cost_table(some, cost, levels) for cost, some in used.items() if any(some.values())]
    parts.append("\n".join(f"- **{arm}**: {note}" for arm, note in notes.items() if arm in arms and note))
    return "\n\n".join(part for part in parts if part)


def short_table(arms: Arms, baseline: str) -> str:
    """The table of the README: where each arm ended, and its costs at the highest level that the baseline reaches."""
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


app = typer.Typer(add_completion=False)


@app.command()
def main(
    matrix: Annotated[Path, typer.Argument(help="The TOML matrix whose cells are stored.")],
    out: Out = RESULTS,
    docs: Annotated[Path, typer.Option(help="Folder of results.md.")] = Path("docs/evidence"),
    readme: Annotated[Path, typer.Option(help="Its table is replaced where it has the marks.")] = Path("README.md"),
) -> None:
    """Write the tables of a matrix from its stored cells."""
    for path in write_report(read_plan(matrix), out, docs, readme):
        tell(f"Written: {path}")


if __name__ == "__main__":
    run_script(app)
