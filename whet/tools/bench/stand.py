"""Where things are measured: the machine a result comes from, and a peer in this process or in one of its own.

`circumstances` goes into every JSON result, here and in benchmarks/. `Here` and `Apart` take the same calls, so that
`rollout.py` can measure peers of both kinds in turn. A process of its own works only on request and times itself: what
is sent to it and back is not counted.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import multiprocessing
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

import whet
from whet.tools.bench.peers import Peer, Prompts

OPTIONAL = ("triton", "vllm")  # packages whose versions are recorded where they are installed
ANSWER = 600.0  # seconds that a process of its own may take for one answer
T = TypeVar("T")

# ---- the machine


def circumstances() -> dict[str, Any]:
    """Hardware, versions, commit and date. A figure without them is not a result."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "hardware": {"cpu": _cpu_model(), "cores": os.cpu_count(), **gpu, **_machine()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "whet": whet.__version__,
            **_installed(OPTIONAL),
        },
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions as the installer wrote them: nothing is imported, because that may take a GPU's memory."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _machine() -> dict[str, str]:
    """Eight digits of the number that the system drew when it started; they tell machines of one kind apart."""
    with contextlib.suppress(OSError):
        return {"machine": Path("/proc/sys/kernel/random/boot_id").read_text()[:8]}
    return {}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    """The commit, with "-dirty" where tracked files differ from it: the commit alone would then name other code.

    A copy without its history is given the commit as WHET_COMMIT.
    """
    if given := os.environ.get("WHET_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


# ---- a peer that is measured


class PeerFailed(Exception):
    """A peer could not do a piece of work; the text says why. The others go on."""


class Here:
    """A peer in this process."""

    def __init__(self, peer: Peer, device: torch.device | str) -> None:
        self.peer, self.cuda = peer, torch.device(device).type == "cuda"
        self.sizes = (0, 0)

    def prepare(self, batch: int, context: int) -> float:
        """Seconds until the peer was ready."""
        self.sizes = (batch, context)
        self.close()
        begun = self._now()
        _or_failed(lambda: self.peer.prepare(batch, context))
        return self._now() - begun

    def timed(self, prompts: Prompts, lengths: Sequence[int]) -> float:
        """Seconds that the peer took to continue all prompts to their lengths."""
        begun = self._now()
        try:
            tokens = _or_failed(lambda: self.peer.run(prompts, lengths))
        except PeerFailed as error:
            reason = str(error)
        else:
            seconds = self._now() - begun
            if tokens != sum(lengths):
                raise PeerFailed(f"{tokens} tokens were made where {sum(lengths)} were asked for")
            return seconds
        self.prepare(*self.sizes)  # made anew, so that the next run finds nothing of the one that failed
        raise PeerFailed(reason)

    def close(self) -> None:
        self.peer.close()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class Apart:
    """A peer in a process of its own, made there by `make(*arguments)`."""

    def __init__(self, make: Callable[..., Here], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.worker = ProcessPoolExecutor(1, mp_context=spawn)
        self.process = 0
        try:
            self.process = self._ask(_open_stand, make, *arguments)
        except PeerFailed:
            self.close()
            raise

    def prepare(self, batch: int, context: int) -> float:
        return self._ask(_call_stand, "prepare", batch, context)

    def timed(self, prompts: Prompts, lengths: Sequence[int]) -> float:
        return self._ask(_call_stand, "timed", prompts, lengths)

    def close(self) -> None:
        """End the process, by force where it does not answer."""
        with contextlib.suppress(PeerFailed):
            self._ask(_call_stand, "close", seconds=30)
        self.worker.shutdown()

    def _ask(self, function: Callable[..., T], *arguments: Any, seconds: float = ANSWER) -> T:
        try:
            return self.worker.submit(function, *arguments).result(seconds)
        except TimeoutError:
            if self.process:
                os.kill(self.process, signal.SIGKILL)
            raise PeerFailed(f"no answer in {seconds:.0f} s") from None
        except BrokenProcessPool:
            raise PeerFailed("its process has died") from None


_stands: list[Here] = []  # in the process of `Apart`: the one that it serves


def _open_stand(make: Callable[..., Here], *arguments: Any) -> int:
    _stands.append(_or_failed(lambda: make(*arguments)))
    return os.getpid()


def _call_stand(what: str, *arguments: Any) -> Any:
    return getattr(_stands[0], what)(*arguments)


def _or_failed(work: Callable[[], T]) -> T:
    """Foreign code may fail in any way; whatever it is, it is that peer's failure and not the benchmark's."""
    try:
        return work()
    except PeerFailed:
        raise
    except torch.OutOfMemoryError:
        reason = "out of GPU memory"
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        reason = f"{type(error).__name__}: {first[:200]}"
    raise PeerFailed(reason)  # outside of the handler, so that it does not keep the tensors of the failed frames
