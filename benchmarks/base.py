"""The base of an experiment: a checkpoint from which all its arms start, trained on one thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from whet import api
from whet.recipe import dump_config, parse_config
from whet.report.live import RunProgress
from whet.resolve import check_run
from whet.run import CONFIG, best_checkpoint
from whet.tools.experiment import replace_run


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread: another number of threads rounds sums in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_base(folder: Path, tree: Mapping[str, Any], console: Console) -> Path:
    """The checkpoint from which all arms start; an earlier one of the same recipe is used again."""
    settings = check_run(parse_config(tree)).settings  # resolved, as a run keeps them
    done = best_checkpoint(folder) if folder.exists() else None
    if done is not None and (folder / CONFIG).read_text() == dump_config(settings):
        console.print(
            f"Starting from the base in {folder} (delete it to train it again).", highlight=False
        )
        return done
    replace_run(folder)
    console.print("Warm start on worked solutions: the base all arms share.")
    # as the arms have, and so that every machine makes the same
    with closing(RunProgress()) as watcher, one_thread():
        api.run_recipe(settings, folder, watcher=watcher)
    made = best_checkpoint(folder)
    assert made is not None
    return made
