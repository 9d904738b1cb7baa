"""The table of a matrix that has a target, by the rules that stand in its file.

    python benchmarks/proof.py benchmarks/maze_matrix.toml

It replaces the text between the marks `<!-- results: MATRIX -->` and `<!-- end: MATRIX -->` in docs/evidence.md.

A run reaches the target at the first evaluation at which the nearest rising curve through its evaluations does; a seed
that never does counts as never. Of two arms the medians over those seeds are compared that both have, without seeds
that do not count (`counted`); the interval is the middle 95% of a bootstrap over these seeds. A ratio of zero means
that the other arm never reaches the target. A cell that was stopped when its time was up counts for the target if it
had reached it, and for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import numpy as np
import typer
from command_line import RESULTS, Out, run_script, tell
from matrix import MatrixPlan, read_plan
from matrix_cells import Log, Show, crossing, curve, drift, fill, read_arms, table
from matrix_figures import write_figures

from whet import files
from whet.errors import WhetError
from whet.report import formats
from whet.report.arms import Curve
from whet.report.draws import middle_95, rising

DRAWS = 4000
LAST = 3  # evaluations at the end of a run that are averaged
OURS = ("five", "all")  # the first of them that the matrix has is what the others are compared with
SHOWN = ("cures", "scalingrl", "speed", "stages")  # in the figure, beside the baseline and ours
BySeed = Mapping[int, float]


def cost_of(points: Curve, target: float) -> float:
    """The cost of the first evaluation at which the rising curve is at the target or above; infinite where none is.

    >>> cost_of([(0, 0.1), (10, 0.4), (20, 0.2), (30, 0.5)], 0.3), cost_of([(0, 0.1), (10, 0.2)], 0.3)
    (10.0, inf)
    """
    costs, heights = np.array(points).T
    return crossing(costs, rising(heights), target)


def mean_height(points: Curve, budget: float) -> float:
    """Mean accuracy over the budget, linear between evaluations; a run that ended before keeps its last.

    >>> mean_height([(0, 0.0), (10, 1.0)], 20)
    0.75
    """
    costs, heights = np.array([*points, (max(budget, points[-1][0]), points[-1][1])]).T
    xs = np.unique([*costs[costs < budget], budget])
    ys = np.interp(xs, costs, heights)
    return float((np.diff(xs) * (ys[1:] + ys[:-1]) / 2).sum() / budget)


def compare(
    mine: BySeed, theirs: BySeed, of: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, float, float, int] | None:
    """`of` the two medians, the ends of its middle 95% when the seeds that both have are drawn again, and their number.

    >>> compare({0: 1.0, 1: 2.0}, {0: 4.0, 1: 4.0, 2: 9.0}, np.divide)
    (0.375, 0.25, 0.5, 2)
    """
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return None
    values = np.array([[side[seed] for seed in seeds] for side in (mine, theirs)])
    drawn = np.random.default_rng(0).integers(len(seeds), size=(DRAWS, len(seeds)))
    with np.errstate(invalid="ignore"):
        draws = of(*np.median(values[:, drawn], axis=-1))
        found = float(of(*np.median(values, axis=-1)))
    # where both never do, nothing is won
    low, high = middle_95(np.nan_to_num(draws, nan=math.inf, posinf=math.inf))
    return (math.inf if math.isnan(found) else found), low, high, len(seeds)


def compared_text(found: tuple[float, float, float, int] | None, form: str = "{:.2f}") -> str:
    """
    >>> compared_text((0.21, 0.15, math.inf, 4))
    '0.21 (0.15 to never), 4 seeds'
    """
    if found is None or found[3] < 2:  # one seed says nothing about a ratio
        return formats.MISSING
    value, low, high = (form.format(x) if math.isfinite(x) else "never" for x in found[:3])
    return f"{value} ({low} to {high}), {found[3]} seeds"


def start_and_end(points: Curve) -> tuple[float, float]:
    """Accuracy before training, and the mean of the last evaluations."""
    return points[0][1], fmean(height for _, height in points[-LAST:])


def by_seed(costs: BySeed, show: Show) -> str:
    return ", ".join(
        f"{seed}: {show(cost) if math.isfinite(cost) else 'never'}" for seed, cost in costs.items()
    )


def not_late(cells: Sequence[Log]) -> list[Log]:
    """The cells that were not stopped when their time was up."""
    return [cell for cell in cells if cell["ended_by"] != "time"]


class Arm:
    """The cells of an arm, by their seeds."""

    def __init__(
        self, cells: Sequence[Log], counted: Sequence[int], target: float, budget: float
    ) -> None:
        curves = {cell["seed"]: curve(cell, "tokens") for cell in cells}
        whole = not_late(cells)
        late = curves.keys() - {cell["seed"] for cell in whole}
        costs = {seed: cost_of(points, target) for seed, points in curves.items()}
        self.costs = {
            seed: cost for seed, cost in costs.items() if cost < math.inf or seed not in late
        }
        self.means = [mean_height(curves[cell["seed"]], budget) for cell in whole]
        self.drawn = [start_and_end(curves[cell["seed"]]) for cell in whole]
        self.greedy = {cell["seed"]: start_and_end(cell["also"]["greedy"]) for cell in whole}
        self.entropy = [pair for cell in whole if (pair := drift(cell, "entropy")) is not None]
        seeds = counted or curves.keys()
        self.counted = {seed: cost for seed, cost in self.costs.items() if seed in seeds}
        self.greedy_ends = {seed: end for seed, (_, end) in self.greedy.items() if seed in seeds}

    def row(self, baseline: Arm, ours: Arm) -> list[str]:
        return [
            by_seed(self.costs, formats.count),
            formats.MISSING
            if self is baseline
            else compared_text(compare(self.counted, baseline.counted, np.divide)),
            formats.MISSING
            if self is ours
            else compared_text(compare(ours.counted, self.counted, np.divide)),
            f"{median(self.means):.3f}",
            *(
                " → ".join(f"{median(side):.2f}" for side in zip(*pairs, strict=True))
                for pairs in (self.drawn, self.greedy.values(), self.entropy)
            ),
        ]


def ours_of(plan: MatrixPlan, arms: Container[str]) -> str:
    """The name of the arm that the others are compared with."""
    return next((name for name in OURS if name in arms), plan.baseline)


def document(
    plan: MatrixPlan, cells: Mapping[str, Sequence[Log]], alone: Mapping[str, Sequence[Log]]
) -> str:
    """The tables and the line about the end of the budget."""
    target, budget = plan.matrix.target, plan.cells[0].settings.token_budget
    if not target or not budget:
        raise WhetError(f"{plan.name}.toml has no target, or its recipe no token_budget.")
    counted = {arm.name: arm.counted for arm in plan.matrix.arm}
    arms = {name: Arm(some, counted.get(name, ()), target, budget) for name, some in cells.items()}
    name = ours_of(plan, arms)
    baseline, ours = arms[plan.baseline], arms[name]
    heads = [
        "arm",
        f"tokens to {target:g}, by seed",
        f"relative to {plan.baseline}",
        f"{name} relative to it",
    ]
    heads += ["mean accuracy", "drawn", "greedy", "entropy"]
    rows = [[arm, *own.row(baseline, ours)] for arm, own in arms.items()]
    ends = compared_text(compare(ours.greedy_ends, baseline.greedy_ends, np.subtract), "{:+.3f}")
    every = [cell for some in cells.values() for cell in some]
    commits = ", ".join(dict.fromkeys(cell["commit"][:7] for cell in every))
    fallen = ", ".join(
        f"{cell['arm']} seed {cell['seed']}" for cell in every if cell["ended_by"] == "collapse"
    )
    late = ", ".join(
        f"{cell['arm']} seed {cell['seed']} after {formats.count(curve(cell, 'tokens')[-1][0])} tokens"
        for cell in every
        if cell["ended_by"] == "time"
    )
    lines = [
        f"{len(every)} cells of {budget / 1e6:g}M tokens, {every[0]['hardware'].get('gpu', 'CPU')}, torch "
        f"{every[0]['versions']['torch']}, commits {commits}, start weights {every[0]['start']['weights'][:12]}.",
        table(heads, rows),
        alone_table(plan, alone),
        f"Greedy accuracy at the end of the budget, {name} minus {plan.baseline}: {ends}.",
        f"Stopped by the guard against collapse: {fallen}." if fallen else "",
        f"Stopped when their time was up, last evaluated: {late}." if late else "",
        "\n".join(
            f"- **{arm.name}**: {arm.note}"
            for arm in plan.matrix.arm
            if arm.note and arm.name in arms
        ),
    ]
    return "\n\n".join(line for line in lines if line)


def read_alone(plan: MatrixPlan, out: Path) -> dict[str, list[Log]]:
    """The cells of `seconds.py`, if there are any."""
    folder = out / "train" / f"{plan.name}_seconds"
    return read_arms(folder, [arm.name for arm in plan.matrix.arm]) if folder.is_dir() else {}


def alone_table(plan: MatrixPlan, cells: Mapping[str, Sequence[Log]]) -> str:
    """Seconds of training to the target, of cells that had the machine to themselves; empty where there are none."""
    costs, tokens = (
        {
            name: {cell["seed"]: cost_of(curve(cell, what), plan.matrix.target) for cell in some}
            for name, some in cells.items()
        }
        for what in ("seconds", "tokens")
    )
    if plan.baseline not in costs:
        return ""
    rows = [
        [
            name,
            by_seed(mine, formats.duration),
            formats.MISSING
            if name == plan.baseline
            else compared_text(compare(mine, costs[plan.baseline], np.divide)),
            by_seed(tokens[name], formats.count),
            f"{median(cell['startup_s'] for cell in cells[name]):.0f} s",
        ]
        for name, mine in costs.items()
    ]
    heads = [
        "alone, in turn",
        f"seconds to {plan.matrix.target:g}, by seed",
        f"relative to {plan.baseline}",
        "tokens",
        "start-up",
    ]
    return table(heads, rows)


def draw(plan: MatrixPlan, cells: Mapping[str, Sequence[Log]], folder: Path) -> list[Path]:
    """Accuracy against tokens of the arms that are the main text: more lines than these cannot be told apart."""
    budget = plan.cells[0].settings.token_budget
    shown = {
        name: some
        for name, some in cells.items()
        if name in (plan.baseline, ours_of(plan, cells), *SHOWN)
    }
    lines = {
        name: [to_the_end(cell, budget) for cell in not_late(some)] for name, some in shown.items()
    }
    return write_figures(
        {name: some for name, some in lines.items() if some}, plan.baseline, plan.name, folder
    )


def to_the_end(cell: Log, budget: float) -> Log:
    """A run that was stopped keeps its last accuracy up to the end of the budget, as in `mean_height`."""
    row = dict(zip(cell["columns"], cell["rows"][-1], strict=True))
    if row["tokens"] >= budget:
        return cell
    last = {**row, "tokens": budget, "accuracy": curve(cell, "tokens")[-1][1]}
    return {**cell, "rows": [*cell["rows"], list(last.values())]}


app = typer.Typer(add_completion=False)


@app.command()
def main(
    matrix: Annotated[
        Path, typer.Argument(help="A TOML matrix with a target whose cells are stored.")
    ],
    out: Out = RESULTS,
    page: Annotated[Path, typer.Option(help="The page with the marks.")] = Path("docs/evidence.md"),
) -> None:
    """Write the table of a matrix from its stored cells."""
    plan = read_plan(matrix)
    cells = read_arms(out / "train" / plan.name, [arm.name for arm in plan.matrix.arm])
    files.write_text(
        page, fill(page.read_text(), plan.name, document(plan, cells, read_alone(plan, out)))
    )
    for path in [page, *draw(plan, cells, page.parent / "figures")]:
        tell(f"Written: {path}")


if __name__ == "__main__":
    run_script(app)
