"""A stream beside a worker that has a tenth of its time: how long a step takes, against fewer and as many healthy ones.

    python benchmarks/slow_worker.py --workers 3 --steps 30

Workers are Ray actors of this machine. Cores are fewer than workers here, so a forward of each engine also sleeps, as
if a device of its own worked so long (`--forward-ms`): what is measured is what waits for whom. The slow worker is
stopped by SIGSTOP for nine tenths of the time, from the first weights on to the end. W - 0.9 workers would have the
speed of W - 1 and a tenth of what one more brings. It writes slow_worker.json.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import RESULTS, Out, run_script, tell

from whet import api, files
from whet.recipe import load_config
from whet.run import read_metrics
from whet.tools.experiment import circumstances

app = typer.Typer(add_completion=False)
RECIPE = (
    "model.hidden=16",
    "model.layers=1",
    "model.heads=2",
    "model.device=cpu",
    "data.0.options={train_count=2000}",
    "eval.0.limit=2",
    "eval.0.max_tokens=4",
    "eval.0.every=1000",
    "rollout.mode=stream",
    "rollout.context=160",
    "rollout.max_tokens=100",
    "rollout.slots=8",
    "curriculum.groups=6",
    "curriculum.rollouts=4",
    "curriculum.max_age=2",
    "curriculum.patience=50",
    "judge.workers=1",
    "save.every=1000",
)
CYCLE_S, SHARE = 1.0, 0.1  # how often the slow worker is stopped, and the share of the time that it has
FIRST = 4  # the row of metrics after which steps count: the workers are full by then


def even_digits(prompt: Any, response: str) -> float:
    return float(sum(letter.isdigit() for letter in response) % 2 == 0)


class Told:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def update(self, metrics: dict[str, float], progress: float) -> None:
        pass

    def message(self, text: str) -> None:
        self.messages.append(text)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None:
        pass


def measure(folder: Path, workers: int, steps: int, forward_s: float, slow: bool) -> dict[str, Any]:
    """Seconds of a step, and what the run said."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when Ray is loaded: nobody else can reach it
    from whet.cluster import stations
    from whet.cluster.workers import Workers

    class Paced(stations.Station):
        def __init__(self, secret: bytes, build: Any, environment: Any) -> None:
            def built(order: Any, prompts: Any) -> Any:
                model, engine, *rest = build(order, prompts)
                if engine is not None:
                    advance = engine.runner.advance

                    def slept(*args: Any, **named: Any) -> Any:
                        time.sleep(forward_s)
                        return advance(*args, **named)

                    engine.runner.advance = slept
                return model, engine, *rest

            super().__init__(secret, built, environment)

    over, begun = threading.Event(), threading.Event()
    plain, publish = stations.Stations.actor, Workers._publish

    def hamper(pid: int) -> None:
        with suppress(ProcessLookupError):
            while not over.wait(SHARE * CYCLE_S):
                os.kill(pid, signal.SIGSTOP)
                over.wait((1 - SHARE) * CYCLE_S)
                os.kill(pid, signal.SIGCONT)

    def published(crew: Any, *args: Any, **named: Any) -> None:
        publish(crew, *args, **named)
        if slow and not begun.is_set():
            begun.set()
            threading.Thread(target=hamper, args=[crew.hands[0].dialled.pid], daemon=True).start()

    told, sets = Told(), [*RECIPE, f"steps={steps}", f"cluster.workers={workers}"]
    stations.Stations.actor, Workers._publish = Paced, published  # type: ignore[method-assign]
    try:
        api.run_recipe(load_config(sets=sets), folder, watcher=told, reward=even_digits)
    finally:
        over.set()
        stations.Stations.actor, Workers._publish = plain, publish  # type: ignore[method-assign]
    rows = read_metrics(folder)
    times = [round(after["time_s"] - before["time_s"], 3) for before, after in itertools.pairwise(rows)][FIRST:]
    return {
        "workers": workers,
        "slow": slow,
        "step_s": sum(times) / len(times),
        "steps_s": times,
        "tokens_per_s": sum(row["batch/tokens"] for row in rows[1 + FIRST :]) / sum(times),
        "said": [line for line in told.messages if "Worker" in line],
    }


@app.command()
def main(
    workers: Annotated[int, typer.Option(help="Workers of the run with a slow one.")] = 3,
    steps: Annotated[int, typer.Option(help="Updates of each run.")] = 30,
    forward_ms: Annotated[float, typer.Option(help="Milliseconds that each forward sleeps.")] = 30.0,
    out: Out = RESULTS,
) -> None:
    """Measure all three runs, and print the ratio."""
    base = Path(tempfile.mkdtemp(prefix="slow-"))
    plans = {"fewer": (workers - 1, False), "all": (workers, False), "one slow": (workers, True)}
    runs = {}
    for name, (count, slow) in plans.items():
        runs[name] = measure(base / name, count, steps, forward_ms / 1000, slow)
        tell(f"{name}: {runs[name]['step_s']:.3f} s a step")
    rate = {name: run["tokens_per_s"] for name, run in runs.items()}
    ratio = (rate["fewer"] + SHARE * (rate["all"] - rate["fewer"])) / rate["one slow"]
    tell(f"A step takes {ratio:.2f} times as long as with {workers - 0.9:g} workers, for as many tokens.")
    files.make_folder(out)
    result = {"circumstances": circumstances(), "forward_ms": forward_ms, "steps": steps, "ratio": ratio, "runs": runs}
    files.write_text(out / "slow_worker.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_script(app)
