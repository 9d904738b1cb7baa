"""Every curriculum on make-believe problems, or real runs beside a toy that is fitted to one of them.

    python benchmarks/curriculum_bench.py --mix few
    python benchmarks/curriculum_bench.py --like UNIFORM_RUN RUN ... --mix NAME

The toy is `toy.py`, its fit to a real run `likeness.py`. Minutes on a CPU. Writes curriculum_MIX.json or
curriculum_calibration_NAME.json.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import RESULTS, Out, run_script, tell
from likeness import likeness_bench
from rich.table import Table
from rich.text import Text
from toy import MIXES, Toy, play

from whet import config, files
from whet.curriculum.build import CURRICULA
from whet.errors import WhetError
from whet.terminal import out_console
from whet.text import printable
from whet.tools.experiment import circumstances

app = typer.Typer()
GROUPS, ROLLOUTS = 16, 16


def curriculum_bench(out: Path, *, mix: str = "few", seeds: int = 5, budget: int = 60_000) -> dict[str, Any]:
    """Every curriculum over several seeds at the same number of rollouts; written to curriculum_MIX.json."""
    runs = {name: [_played(name, Toy(mix, seed), budget) for seed in range(seeds)] for name in CURRICULA}
    start = Toy(mix, 0).accuracy
    levels = [round(start + share * (max(r["accuracy"] for r in runs["uniform"]) - start), 3) for share in (0.5, 0.8)]
    result = {
        "mix": mix,
        "seeds": seeds,
        "budget": budget,
        "accuracy_at_start": round(start, 4),
        "curricula": {name: _summary(found, levels) for name, found in runs.items()},
        **circumstances(),
    }
    files.make_folder(out)
    files.write_text(out / f"curriculum_{mix}.json", json.dumps(result, indent=1) + "\n")
    return result


def _played(name: str, toy: Toy, budget: int) -> dict[str, Any]:
    settings = config.CurriculumSettings(name=name, groups=GROUPS, rollouts=ROLLOUTS, starvation="partial")
    rows, spent = play(settings, toy, lambda: toy.rollouts / budget)
    signal = [row["learn/signal_share"] for row in rows[1:]]
    return {
        "accuracy": rows[-1]["accuracy"],
        "curve": [(row["rollouts"], row["accuracy"]) for row in rows],
        "updates": len(signal),
        "signal": statistics.mean(signal) if signal else 0.0,
        "ms_an_update": 1000 * spent / max(1, len(signal)),
    }


def rollouts_to(curve: Sequence[tuple[int, float]], level: float) -> int | None:
    """The rollouts after which the accuracy first reached a level; None if it never did."""
    return next((rollouts for rollouts, accuracy in curve if accuracy >= level), None)


def _summary(runs: Sequence[dict[str, Any]], levels: Sequence[float]) -> dict[str, Any]:
    def spread(values: Sequence[float | None]) -> list[float | None]:
        """[median, least, most]; a run that never got there counts as the worst."""
        known = sorted(v if v is not None else float("inf") for v in values)
        middle = statistics.median(known)
        return [None if v == float("inf") else round(v, 4) for v in (middle, known[0], known[-1])]

    return {
        "accuracy": spread([r["accuracy"] for r in runs]),
        **{f"rollouts_to_{level}": spread([rollouts_to(r["curve"], level) for r in runs]) for level in levels},
        "signal": spread([r["signal"] for r in runs]),
        "updates": spread([r["updates"] for r in runs]),
        "ms_an_update": spread([r["ms_an_update"] for r in runs]),
    }


# ---- the command line


@app.command()
def main(
    runs: Annotated[list[Path] | None, typer.Argument(help="More runs for --like.")] = None,
    like: Annotated[
        list[Path] | None,
        typer.Option(
            help="Finished runs from one start on one data set: fit the toy to the uniform one, foretell all."
        ),
    ] = None,
    out: Out = RESULTS,
    mix: Annotated[
        str | None,
        typer.Option(help="few (the default) or many prompts with signal at the start; with --like, a name."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    budget: Annotated[int, typer.Option(min=1000, help="Rollouts a run.")] = 30_000,
) -> None:
    """Every curriculum on make-believe problems, or real runs beside a toy that is fitted to one of them."""
    if like or runs:
        show_likeness(likeness_bench(out, [*(like or []), *(runs or [])], mix or ""))
        return
    mix = mix or "few"
    if mix not in MIXES:
        raise WhetError(f'There is no mix "{mix}"; there are {", ".join(MIXES)}.')
    result = curriculum_bench(out, mix=mix, seeds=seeds, budget=budget)
    measures = list(next(iter(result["curricula"].values())))
    table = Table("curriculum", *(name.replace("_", " ") for name in measures))
    for name, found in result["curricula"].items():
        cells = [[f"{v:,.4g}" if v is not None else "never" for v in found[measure]] for measure in measures]
        table.add_row(name, *(f"{middle}\n{least} to {most}" for middle, least, most in cells))
    out_console.print(table)


def show_likeness(result: Mapping[str, Any]) -> None:
    """Measured, simulated, and how many times too large the second is, for each quantity and run."""
    fitted = result["fitted"]
    runs = {name: printable(name, one_line=True) for name in result["runs"]}
    table = Table("quantity")
    for name, shown in runs.items():
        table.add_column(Text(f"{shown} (fitted)" if name == fitted else shown))
    for quantity in next(iter(result["runs"].values())):
        cells = [found[quantity] for found in result["runs"].values()]
        table.add_row(quantity.replace("_", " "), *map(likeness_cell, cells))
    out_console.print(table)
    first = f"Measured, then simulated (times the measured). The toy was fitted to {fitted} alone."
    for sentence in (first, *result["where_off"]):
        tell(sentence)


def likeness_cell(values: Mapping[str, float | None]) -> str:
    """
    >>> likeness_cell({"measured": 250000.0, "simulated": 200000.0, "off": 0.8})
    '250,000, 200,000 (0.80x)'
    """
    measured, simulated = (
        "never" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        for value in (values["measured"], values["simulated"])
    )
    return f"{measured}, {simulated}" + (f" ({values['off']:.2f}x)" if values["off"] is not None else "")


if __name__ == "__main__":
    run_script(app)
