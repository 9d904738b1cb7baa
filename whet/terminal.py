"""Terminal parts that the commands share: two consoles, common options, and a progress bar for long work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from whet.text import printable

out_console = Console()
err_console = Console(stderr=True)

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: --set learn.lr=1e-5. Repeatable."),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder in which short names of data are looked for first; default: $WHET_DATA."
    ),
]


def say(sentence: str, console: Console = err_console, style: str | None = None) -> None:
    """Print a sentence; escape codes in names of files, models, columns and prompts are spelled out."""
    console.print(printable(sentence), style=style, markup=False, highlight=False, soft_wrap=True)


def show(sentence: str) -> None:
    say(sentence, out_console)


def folder_set(folder: Path | None) -> list[str]:
    return [f"data_folder={json.dumps(str(folder))}"] if folder is not None else []


@contextmanager
def counting() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=err_console, transient=True, disable=not err_console.is_terminal
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(escape(printable(what, one_line=True)), total=total)
            bar.update(tasks[what], completed=done)

        yield on_progress
