"""What the scripts with options share: where results go, lines for the terminal, and errors in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from whet.errors import WhetError
from whet.terminal import out_console, say
from whet.text import printable

RESULTS = Path("benchmarks/results")
Out = Annotated[Path, typer.Option(help="Folder for the JSON result.")]


def tell(line: str) -> None:
    """Print one line; escape codes in names of files and models are spelled out."""
    say(printable(line, one_line=True), out_console)


def run_script(app: Callable[[], object]) -> None:
    """Run the command. What a user can mend is printed as one sentence, and the exit code is 2."""
    try:
        app()
    except WhetError as error:
        say(str(error), style="red")
        sys.exit(2)
