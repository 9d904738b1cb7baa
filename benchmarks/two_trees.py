"""Seconds of a training step by two trees of whet, step beside step on one device: what a change costs.

    python benchmarks/two_trees.py --before OTHER/TREE --model models/smollm2 --data gsm8k.jsonl

Both trees are loaded in a process each, with the recipe and the sizes of engine_step.py, and start at the same time.
Then they take turns: while one makes a step the other waits, so both meet the same device in the same state. Two steps
warm up. It writes two_trees.json: the seconds of each step, the ratio of the medians, and a 95% bootstrap interval over
steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import RESULTS, Out, run_script, tell
from engine_step import WARM, Number, measure

from whet import files
from whet.errors import WhetError
from whet.loop import Log
from whet.tools.experiment import circumstances

app = typer.Typer(add_completion=False)
OWN = Path(__file__).resolve().parent.parent
DRAWS = 2_000


def take_turns() -> None:
    """Each step of this process waits for a word, and says afterwards how long it took."""
    plain = Log.step

    @contextlib.contextmanager
    def step(log: Log) -> Iterator[Any]:
        sys.stdin.readline()
        begun = time.perf_counter()
        with plain(log) as watch:
            yield watch
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(json.dumps(time.perf_counter() - begun), flush=True)

    Log.step = step  # type: ignore[method-assign]


def interval(before: list[float], after: list[float]) -> tuple[float, float]:
    """Of the ratio of the medians, by drawing steps anew."""
    draw = random.Random(0)
    found = sorted(
        statistics.median(draw.choices(after, k=len(after)))
        / statistics.median(draw.choices(before, k=len(before)))
        for _ in range(DRAWS)
    )
    return found[DRAWS // 40], found[-DRAWS // 40]


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face model.")],
    data: Annotated[Path, typer.Option(help="JSON lines with problem and answer.")],
    before: Annotated[Path | None, typer.Option(help="The root of the other tree.")] = None,
    prompts: Number = 64,
    completions: Number = 8,
    tokens: Number = 256,
    steps: Annotated[int, typer.Option(min=WARM + 3)] = 14,
    one: Annotated[
        bool, typer.Option(hidden=True, help="Train in this process, in turns.")
    ] = False,
    out: Out = RESULTS,
) -> None:
    """Let both trees train in turns."""
    sizes = {"prompts": prompts, "completions": completions, "tokens": tokens, "steps": steps}
    if one:
        take_turns()
        with tempfile.TemporaryDirectory() as name:
            rows = measure("native", model, data, Path(name), **sizes)
        print(json.dumps([row["rollout/tokens"] for row in rows if row["step"]]), flush=True)
        return
    if before is None or not (before / "whet").is_dir():
        raise WhetError(f"--before {before} has no folder whet.")
    given = [
        f"--{key}={value}"
        for key, value in {"model": model.resolve(), "data": data.resolve(), **sizes}.items()
    ]
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.ExitStack() as stack:
        running = {}
        for name, tree in (("before", before.resolve()), ("after", OWN)):
            paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))
            command = [sys.executable, str(Path(__file__).resolve()), "--one", *given]
            pipes = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
                "cwd": elsewhere,
            }
            process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, **pipes)
            running[name] = stack.enter_context(process)
            stack.callback(process.kill)
        for _ in range(steps):
            for name, process in running.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                if not (answer := process.stdout.readline()):
                    raise WhetError(f"The tree {name} ended early.")
                seconds[name].append(json.loads(answer))
        made = {name: json.loads(process.stdout.readline()) for name, process in running.items()}
    counted = {name: found[WARM:] for name, found in seconds.items()}
    ratio = statistics.median(counted["after"]) / statistics.median(counted["before"])
    low, high = interval(counted["before"], counted["after"])
    result = {
        **circumstances(),
        "model": model.name,
        "sizes": sizes,
        "seconds": seconds,
        "tokens": made,
    }
    result |= {"ratio": ratio, "interval": [low, high]}
    files.write_text(out / "two_trees.json", json.dumps(result, indent=1) + "\n")
    tell(f"A step takes {ratio:.3f} times as long as before ({low:.3f} to {high:.3f}).")
    for name, found in counted.items():
        rate = sum(made[name][WARM:]) / sum(found)
        tell(f"{name}: {statistics.median(found):.4f} s per step, {rate:,.0f} tokens per second")


if __name__ == "__main__":
    run_script(app)
