"""Runs that are alive at the same time and take their steps in turn, one at a time.

    python benchmarks/turns.py train RECIPE --out FOLDER      `whet train`, which waits for a line before each step

So each step has the machine to itself and a step of another run right beside it, and the processes start and compile
side by side. `cluster_step.py` and `seconds.py` build on it. No checkpoint is written.
"""

from __future__ import annotations

import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from engine_step import WARM

from whet.errors import WhetError

GATE, END = "#gate", "#end"
FEW = 5  # steps that count even where time is short
LEAVE_S = 30.0  # for a run to end in order


def go_step_by_step() -> None:
    """Before each step, say so and wait for a line. The step's stopwatch starts after the wait."""
    from whet.loop import Log
    from whet.watch import Stopwatch

    step = Log.step

    @contextmanager
    def gated(self: Log) -> Iterator[Any]:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what this run still computes must not disturb the next one
        print(GATE, flush=True)
        if not sys.stdin.readline():
            raise WhetError("The time was up.")
        self.watch = Stopwatch()
        with step(self) as watch:
            yield watch

    Log.step = gated  # type: ignore[method-assign]
    Log.save = lambda self, metrics: None  # type: ignore[method-assign]  # 20 GB at the start and at the end


class Runner:
    """A run in a process of its own, which waits before each of its steps."""

    def __init__(self, arm: str, folder: Path, command: Sequence[str]) -> None:
        self.arm, self.folder, self.over, self.why = arm, folder, False, ""
        folder.mkdir(parents=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
        own |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # actors find whet by it
        with (folder / "stderr").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.said: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.strip() in (GATE, END):
                    self.said.put(line.strip())

    def wait(self, until: float) -> None:
        """Until it stands before a step again, or has ended."""
        while not self.over:
            with suppress(queue.Empty):
                self.over = self.said.get(timeout=0.05) == END
                return
            if self.process.poll() is not None and self.said.empty():
                self.over, self.why = (
                    True,
                    self.last_words() or f"exit code {self.process.returncode}",
                )
            elif time.monotonic() > until:
                self.over, self.why = (
                    True,
                    f"it was not ready when its time was up; its last words: {self.last_words()}",
                )

    def last_words(self) -> str:
        lines = (self.folder / "stderr").read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[:500] if lines else ""

    def go(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """An end of its input ends the run in order, with the cluster that it started."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it may have left, or all of it
        self.process.wait()
        self.reader.join(LEAVE_S)


def take_turns(runners: Sequence[Runner], steps: int, until: float, last: float) -> None:
    """Steps in turn; in each round another run is the first. until: after it only as many as a median needs. last: for
    runs that are not ready by then it is too late."""
    for runner in runners:
        runner.wait(last)
    for number in range(steps):
        left = [runner for runner in runners if not runner.over]
        if not left or (number >= WARM + FEW and time.monotonic() > until):
            break
        for runner in (*left[number % len(left) :], *left[: number % len(left)]):
            runner.go()
            runner.wait(last + LEAVE_S)


if __name__ == "__main__":
    go_step_by_step()
    sys.argv[0] = "whet"
    try:
        runpy.run_module("whet", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    print(END, flush=True)
