"""Whole runs by several processes. Starting one takes seconds, so that runs without a fault share their processes: each
run begins anew in them, with its own settings, model and group."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_run import Silent, even_digits, small_config, timeless

from whet import api
from whet.cluster import crew
from whet.cluster.crew import Crew, Hand
from whet.run import read_metrics

CPU = ("model.device=cpu", "model.dtype=float64", "judge.workers=1")
# by how rollouts share a forward
COUNTED = ("steps", "batch_mean", "prefill_tokens", "preempted", "occupied")


class Pool:
    """Processes that go from run to run."""

    def __init__(self) -> None:
        self.hands: dict[int, Hand] = {}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start, pool = Crew._start, self

        def start_or_take(self: Crew, number: int) -> Hand:
            if number not in pool.hands:
                pool.hands[number] = start(self, number)
            hand = pool.hands[number]
            hand.replies.clear()
            return hand

        def leave(self: Crew) -> None:
            for hand in self.hands:
                if hand.lost:
                    pool.hands.pop(hand.number, None)
            self._closing.detach()

        monkeypatch.setattr(Crew, "_start", start_or_take)
        monkeypatch.setattr(Crew, "close", leave)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    kept = Pool()
    yield kept
    for hand in kept.hands.values():
        hand.stop()


class Forked:
    """A process of a crew as a fork of this one, for tests that start many: a new interpreter would load torch and
    transformers for six seconds, which are loaded here. It has its own session, standard streams and environment, none
    of our handles but the one that it is given, and ends without our exit handlers. What a crew does with the object is
    what it does with a `subprocess.Popen`."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: dict[str, str],
        pass_fds: Sequence[int],
        stdout: Any,
        **_: Any,
    ) -> None:
        assert args[0] == sys.executable
        self.returncode: int | None = None
        ready, begun = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                os.write(begun, b".")
                self._become(args[1:], env, pass_fds[0], stdout.fileno())
                code = 0
            except SystemExit as left:  # as the interpreter does at its end
                code = left.code if isinstance(left.code, int) else int(left.code is not None)
                if isinstance(left.code, str):
                    sys.stderr.write(f"{left.code}\n")
                    sys.stderr.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(begun)
        # its session is its own from here on, so that it can be killed with what it starts
        os.read(ready, 1)
        os.close(ready)

    @staticmethod
    def _become(words: Sequence[str], env: dict[str, str], handle: int, log: int) -> None:
        for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, stream)
        os.closerange(3, handle)
        os.closerange(handle + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout, sys.stderr = (open(i, "rw"[i > 0], closefd=False) for i in range(3))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        warnings.resetwarnings()
        warnings.simplefilter("default")
        os.environ.clear()
        os.environ.update(env)
        program, sys.argv = words[0], list(words)
        if program == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_path(program, run_name="__main__")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crews of this process fork their members from now on."""
    stand_in = SimpleNamespace(
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(crew, "subprocess", stand_in)


@pytest.fixture
def pooled(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.patch(monkeypatch)


def run(
    folder: Path, *sets: str, gpus: int = 1, resume: bool = False, silent: Silent | None = None
) -> Silent:
    silent = silent or Silent()
    given: dict[str, Any] = {
        "watcher": silent,
        "reward": even_digits,
        "resume": resume,
        "gpus": gpus,
    }
    api.run_recipe(small_config(*CPU, *sets), folder, **given)
    return silent


def comparable(folder: Path) -> list[dict[str, Any]]:
    def shared(name: str) -> bool:  # how drafts are chosen is a matter of the clock
        return not name.startswith("draft/") and name.removeprefix("rollout/") not in COUNTED

    return [
        {name: row[name] for name in row if shared(name)} for row in timeless(read_metrics(folder))
    ]


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    newest = max((folder / "checkpoints").glob("step_*"))
    (path,) = newest.glob("*model.safetensors")
    return {name: tensor.double().numpy() for name, tensor in load_file(path).items()}


def written(folder: Path) -> dict[str, list[Any]]:
    files = sorted((folder / "rollouts").iterdir())
    rows = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files
    }
    for row in (row for found in rows.values() for row in found):
        # how they came, and rounded numbers
        for name in ("drafted", "accepted", "log_probs", "entropies"):
            row.pop(name, None)
    return rows


def assert_like(one: Path, other: Path, close: float = 1e-8, counters: bool = True) -> None:
    """The same tokens and verdicts, and numbers that differ by rounding alone. counters: those of the engine, too."""
    mine, theirs = comparable(one), comparable(other)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs] and len(mine) > 1
    for row, same in zip(mine, theirs, strict=True):
        assert row.keys() == same.keys()
        for name in row:
            if counters or not name.startswith(("rollout/", "judge/")):
                np.testing.assert_allclose(
                    same[name], row[name], rtol=close, atol=close, err_msg=name
                )
    assert written(one) == written(other), "tokens, exactly"
    weights = weights_of(other)
    for name, tensor in weights_of(one).items():
        np.testing.assert_allclose(weights[name], tensor, rtol=close, atol=close, err_msg=name)


__all__ = ["Pool", "assert_like", "crew", "fork_members", "pool", "pooled", "run"]
