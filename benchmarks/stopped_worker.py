"""A worker that is stopped for good (SIGSTOP) in the middle of its work: after how many seconds is that found?

    python benchmarks/stopped_worker.py --stops 5 --timeout-s 12

Workers are Ray actors of this machine, in a stream. One after the other is stopped, some seconds after the last one was
found. The clock runs from the signal to the sentence that says that its place is taken, which must come within
`cluster.timeout_s`. It writes stopped_worker.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import RESULTS, Out, run_script, tell
from slow_worker import RECIPE, Told, even_digits

from whet import api, files
from whet.recipe import load_config
from whet.tools.experiment import circumstances

app = typer.Typer(add_completion=False)
BETWEEN_S = 4.0  # seconds at most between two stops, from when the last one was found


class Stopper(Told):
    """Stops one worker after the other, as the run says that the last one was found."""

    def __init__(self, stops: int, seed: int) -> None:
        super().__init__()
        self.left, self.rng, self.crew = stops, random.Random(seed), None
        self.since, self.found = 0.0, list[float]()

    def message(self, text: str) -> None:
        super().message(text)
        if self.since and "started again" in text:
            self.found.append(time.monotonic() - self.since)
            self.since = 0.0
            self.plan()

    def plan(self) -> None:
        if self.left:
            self.left -= 1
            threading.Timer(self.rng.uniform(1.0, BETWEEN_S), self.stop).start()

    def stop(self) -> None:
        hand = self.rng.choice([self.crew.hands[number] for number in self.crew.present])
        self.since = time.monotonic()
        os.kill(hand.dialled.pid, signal.SIGSTOP)


@app.command()
def main(
    workers: Annotated[int, typer.Option(help="Workers of the run.")] = 2,
    steps: Annotated[int, typer.Option(help="Updates of the run, which must be enough for all stops.")] = 400,
    stops: Annotated[int, typer.Option(help="How many workers are stopped, one after the other.")] = 5,
    timeout_s: Annotated[float, typer.Option(help="cluster.timeout_s.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Of the workers and moments.")] = 0,
    out: Out = RESULTS,
) -> None:
    """Stop workers, and print after how many seconds each was found."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when Ray is loaded: nobody else can reach it
    from whet.cluster.workers import Workers

    told, publish = Stopper(stops, seed), Workers._publish

    def published(crew: Any, *args: Any, **named: Any) -> None:
        publish(crew, *args, **named)
        if told.crew is None:
            told.crew = crew
            told.plan()

    Workers._publish = published  # type: ignore[method-assign]
    sets = [*RECIPE, f"steps={steps}", f"cluster.workers={workers}", f"cluster.timeout_s={timeout_s}"]
    folder = Path(tempfile.mkdtemp(prefix="stopped-"))
    try:
        api.run_recipe(load_config(sets=sets), folder / "run", watcher=told, reward=even_digits)
    finally:
        Workers._publish = publish  # type: ignore[method-assign]
    tell(f"Found after {', '.join(f'{seconds:.1f}' for seconds in told.found)} s, of {timeout_s:g}.")
    result = {
        "circumstances": circumstances(),
        "timeout_s": timeout_s,
        "workers": workers,
        "seed": seed,
        "asked": stops,
        "found_s": [round(seconds, 2) for seconds in told.found],
        "said": [line for line in told.messages if "Worker" in line],
    }
    files.make_folder(out)
    files.write_text(out / "stopped_worker.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_script(app)
