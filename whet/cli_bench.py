"""The commands of `whet bench`: what is measured on this machine, written as JSON and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from whet.errors import WhetError
from whet.terminal import out_console
from whet.text import printable

bench_app = typer.Typer(no_args_is_help=True, help="Measure whet against its peers on this machine.")

Out = Annotated[Path, typer.Option(help="Folder for the JSON result.")]
RESULTS = Path("benchmarks/results")


@bench_app.command("rollout")
def bench_rollout(
    out: Out = RESULTS,
    repeats: Annotated[int, typer.Option(help="Interleaved repeats.")] = 3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """The engine against transformers' generate, on this machine."""
    from whet.bench.rollout import rollout_bench

    result = rollout_bench(out, repeats=repeats, seed=seed)
    out_console.print(json.dumps(result, indent=2), markup=False, highlight=False)


@bench_app.command("curriculum")
def bench_curriculum(
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
    from whet.bench.curriculum import MIXES, curriculum_bench
    from whet.bench.likeness import likeness_bench

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
    told = f"Measured, then simulated (times the measured). The toy was fitted to {fitted} alone."
    for sentence in (told, *result["where_off"]):
        out_console.print(printable(sentence, one_line=True), markup=False, highlight=False, soft_wrap=True)


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
