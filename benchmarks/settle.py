"""Settles a matrix before its first counted cell: learning rates and the target, from stored tuning cells.

    python benchmarks/settle.py benchmarks/operations_tuning.toml benchmarks/operations_matrix.toml

The tuning matrix has arms like uniform and uniform-slow, all and all-slow. Of each name the one wins whose accuracy,
averaged over the budget of tokens and over seeds, is higher. The target lies halfway between the start of the baseline
that won and its end (the mean of its last evaluations), averaged over seeds. It writes them into the lines of the
matrix that end with "# target", "# rate of uniform" and "# rate of all".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from command_line import RESULTS, Out, run_script, tell
from matrix import read_plan
from matrix_cells import Log, curve, read_arms
from proof import mean_height, start_and_end

from whet import files
from whet.errors import WhetError

app = typer.Typer(add_completion=False)


def best(arms: Mapping[str, Sequence[Log]], name: str, budget: float) -> str:
    """The arm with the highest mean accuracy among `name` and its variants."""
    variants = [arm for arm in arms if arm == name or arm.startswith(f"{name}-")]
    if not variants:
        raise WhetError(f'There are no tuning cells of "{name}".')
    return max(
        variants,
        key=lambda arm: fmean(mean_height(curve(cell, "tokens"), budget) for cell in arms[arm]),
    )


def target_of(cells: Sequence[Log]) -> float:
    """Halfway from start to end, averaged over seeds, to four digits."""
    return round(fmean(fmean(start_and_end(curve(cell, "tokens"))) for cell in cells), 4)


def put(text: str, mark: str, value: float) -> str:
    """The text with the value in the line that ends with the mark.

    >>> put('a = 1\\n"learn.lr" = 3e-5 # rate of all\\n', "rate of all", 1e-5)
    'a = 1\\n"learn.lr" = 1e-05 # rate of all\\n'
    """
    found, times = re.subn(
        rf"(?m)^(.* = )\S+( # {re.escape(mark)})$", rf"\g<1>{value:g}\g<2>", text
    )
    if times != 1:
        raise WhetError(f'{times} lines of the matrix end with "# {mark}", and there must be one.')
    return found


@app.command()
def main(
    tuning: Annotated[Path, typer.Argument(help="The TOML matrix whose cells were run.")],
    matrix: Annotated[Path, typer.Argument(help="The TOML matrix to write into.")],
    out: Out = RESULTS,
) -> None:
    """Write rates and target into a matrix that has no counted cell yet."""
    plan, text = read_plan(tuning), matrix.read_text()
    if list((out / "train" / matrix.stem).glob("*.json")):
        raise WhetError(f"{matrix} has counted cells already, so its rules stay as they are.")
    arms = read_arms(out / "train" / plan.name, [arm.name for arm in plan.matrix.arm])
    settings = {cell.arm: cell.settings for cell in plan.cells}
    missing = [
        f"{c.arm}, seed {c.seed}"
        for c in plan.cells
        if c.seed not in {cell["seed"] for cell in arms.get(c.arm, [])}
    ]
    if missing:
        raise WhetError(f"Tuning cells are missing: {'; '.join(missing)}.")
    for name in (plan.baseline, "all"):
        won = best(arms, name, plan.cells[0].settings.token_budget)
        text = put(text, f"rate of {name}", settings[won].learn.lr)
        tell(f"{name}: {won} won, with a rate of {settings[won].learn.lr:g}.")
        if name == plan.baseline:
            target = target_of(arms[won])
            text = put(text, "target", target)
            tell(f"The target is {target:g}.")
    files.write_text(matrix, text)


if __name__ == "__main__":
    run_script(app)
