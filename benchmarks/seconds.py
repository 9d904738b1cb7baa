"""Seconds to the target of a matrix, from cells that have the machine to themselves in every step.

    python benchmarks/seconds.py benchmarks/maze_matrix.toml --arms uniform,five,cures --seeds 1,2,3 --every five=2

The arms of a seed are alive at the same time and take their steps in turn, one at a time (`turns.py`): a machine whose
speed changes changes it for all. Neither evaluations count nor what a process takes before its first step, which is
told as its start-up. An arm reaches the target at an evaluation, so one whose updates take longer would be found there
later; `--every` gives it evaluations after fewer updates. A cell ends when AFTER evaluations have followed the one that
reached the target, or with its recipe. It writes OUT/train/MATRIX_seconds/ARM-seedN.json, as `train.py` does, after
each seed; `proof.py` makes the table.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import turns
import typer
from command_line import RESULTS, Out, run_script, tell
from matrix import MatrixCell, MatrixPlan, Start, make_start, read_plan, read_seeds
from matrix_cells import curve
from proof import cost_of
from train import cell_settings, outcome, write_outcome

from whet import files
from whet.errors import WhetError
from whet.recipe import dump_config
from whet.report.arms import number
from whet.run import has_collapsed, read_metrics
from whet.tools.bench import names
from whet.tools.experiment import circumstances

AFTER = 2
"""Evaluations after the one that reached the target: a curve that falls again has reached it later."""


def reached(metrics: Sequence[Any], evaluation: str, target: float) -> bool:
    """Whether the target was reached, and AFTER evaluations ago still was.

    >>> rows = [{"tokens_generated": t, "eval/drawn/accuracy": a} for t, a in ((0, 0.1), (5, 0.4), (9, 0.5), (12, 0.3))]
    >>> reached(rows[:3], "drawn", 0.3), reached(rows, "drawn", 0.3), reached(rows, "drawn", 0.45)
    (False, True, False)
    """
    points = [
        (number(row, "tokens_generated") or 0.0, score)
        for row in metrics
        if (score := number(row, f"eval/{evaluation}/accuracy")) is not None
    ]
    cost = cost_of(points, target) if points else math.inf
    return sum(tokens > cost for tokens, _ in points) >= AFTER


def start_cell(cell: MatrixCell, start: Start, folder: Path) -> turns.Runner:
    recipe = folder / f"{cell.name}.toml"
    files.write_text(recipe, dump_config(cell_settings(cell, start)))
    words = ["train", str(recipe), "--out", str(folder / cell.name / "run")]
    return turns.Runner(cell.arm, folder / cell.name, [turns.__file__, *words])


def run_seed(
    cells: Sequence[MatrixCell], plan: MatrixPlan, start: Start, folder: Path, until: float
) -> dict[str, Any]:
    """The cells of a seed, step by step in turn, until all have reached the target; start-up and end of each."""
    begun = time.monotonic()
    runners = {cell.name: start_cell(cell, start, folder) for cell in cells}
    about = {}
    try:
        for name, runner in runners.items():
            runner.wait(until)
            about[name] = {"startup_s": round(time.monotonic() - begun, 1), "ended_by": "time"}
        left = dict(runners)
        while left and time.monotonic() < until:
            for name, runner in list(left.items()):
                runner.go()
                runner.wait(until + turns.LEAVE_S)
                # The row of a step is written before the run asks for the next one.
                if runner.over:
                    # it has not reached the target, and never will
                    collapsed = has_collapsed(runner.folder / "run")
                    about[name]["ended_by"] = "collapse" if collapsed else runner.why or "recipe"
                    del left[name]
                elif reached(
                    read_metrics(runner.folder / "run"), plan.evaluation, plan.matrix.target
                ):
                    about[name]["ended_by"] = "target"
                    runner.close()
                    del left[name]
    finally:
        for runner in runners.values():
            runner.close()
    return about


def read_every(text: str, arms: Sequence[str]) -> dict[str, int]:
    """
    >>> read_every("five=2,cures=10", ["uniform", "five", "cures"])
    {'five': 2, 'cures': 10}
    """
    found = {}
    for pair in names(text):
        arm, _, number = pair.partition("=")
        if arm not in arms or not number.isdecimal() or int(number) == 0:
            raise WhetError(
                f'--every "{pair}": write ARM=UPDATES, the arm being one of {", ".join(arms)}.'
            )
        found[arm] = int(number)
    return found


def cells_of(
    matrix: Path, arms: Sequence[str], seeds: Sequence[int], every: Mapping[str, int]
) -> list[MatrixCell]:
    """Seed by seed; every: updates between evaluations, where an arm has others than in the matrix."""
    found = []
    for arm in arms:
        sets = len(read_plan(matrix).cells[0].settings.eval) if arm in every else 0
        own = [f"eval.{i}.every={every[arm]}" for i in range(sets)]
        found += read_plan(matrix, own, [arm], seeds).cells
    return sorted(found, key=lambda cell: cell.seed)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    matrix: Annotated[Path, typer.Argument(help="A TOML matrix with a target.")],
    arms: Annotated[str, typer.Option(help="With commas between.")],
    seeds: Annotated[str, typer.Option(help="With commas between.")],
    runs: Annotated[Path, typer.Option(help="Folder for the runs, one per cell.")] = Path(
        "runs/seconds"
    ),
    every: Annotated[
        str, typer.Option(help="Updates between evaluations: ARM=UPDATES, with commas between.")
    ] = "",
    limit: Annotated[
        float, typer.Option(help="Seconds for all of it; what has not ended then is no result.")
    ] = 580.0,
    out: Out = RESULTS,
) -> None:
    """Arms in turn, seed by seed."""
    begun = time.monotonic()
    plan = read_plan(matrix, (), names(arms), read_seeds(seeds))
    if not plan.matrix.target:
        raise WhetError(f"{matrix} has no target.")
    chosen = cells_of(matrix, names(arms), read_seeds(seeds), read_every(every, names(arms)))
    start, around = make_start(plan, runs, tell), circumstances()
    for _, some in itertools.groupby(chosen, key=lambda cell: cell.seed):
        cells = list(some)
        about = run_seed(cells, plan, start, runs, begun + limit)
        for cell in cells:
            if about.get(cell.name, {}).get("ended_by") not in ("target", "recipe", "collapse"):
                tell(f"{cell.name} did not end: {about.get(cell.name)}")
                continue
            found = outcome(cell, runs / cell.name / "run", plan.evaluation)
            path = out / "train" / f"{plan.name}_seconds" / f"{cell.name}.json"
            head = {"matrix": plan.name, "solo": True, "start": dict(start.hashes)}
            write_outcome(path, {**around, **head, **about[cell.name], **found})
            spent = [
                cost_of(curve(found, what), plan.matrix.target) for what in ("tokens", "seconds")
            ]
            tell(
                f"{cell.name}: {spent[0]:.4g} tokens and {spent[1]:.4g} s to {plan.matrix.target:g}; {about[cell.name]}"
            )


if __name__ == "__main__":
    run_script(app)
