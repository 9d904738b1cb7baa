"""Where a peer is measured: seconds, memory, and how long the GPU was busy; in this process, or in one of its own.

`Here` and `Apart` take the same calls, so that `rollout.py` can ask peers of both kinds in turn. A process of
its own talks over a pipe, works only when asked, and times itself: what goes over the pipe is not counted.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch._C._autograd import DeviceType

import whet
from whet.tools.bench.peers import Peer, Prompts

# ---- circumstances
#
# Under what a benchmark was run: hardware, versions, commit, date. A figure without them is not a result.


OPTIONAL = ("triton", "vllm")
"""Packages whose versions are told where they are installed: a run may do without."""


def circumstances() -> dict[str, Any]:
    return {
        "hardware": {"cpu": _cpu_model(), "cores": os.cpu_count(), **_gpu(), **_machine()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "whet": whet.__version__,
            **installed(OPTIONAL),
        },
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Their versions, read from what the installer wrote: nothing is imported, as that may take a GPU's memory.

    >>> installed(["no-such-package"])
    {}
    """
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _gpu() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _machine() -> dict[str, str]:
    """Eight digits of the number that the system drew when it started: machines of one kind are told apart by it."""
    try:
        return {"machine": Path("/proc/sys/kernel/random/boot_id").read_text()[:8]}
    except OSError:
        return {}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _commit() -> str:
    """With "-dirty" when tracked files differ from it: the commit alone would then name other code. A copy without its
    history is given it as WHET_COMMIT."""
    if given := os.environ.get("WHET_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


ANSWER = 600.0
"""Seconds a process of its own may take for one answer."""
T = TypeVar("T")


class PeerFailed(Exception):
    """A peer could not do a piece of work; the text says why. The others go on."""


@dataclass(frozen=True, slots=True)
class Taken:
    seconds: float
    tokens: int
    peak: int | None
    """Bytes of GPU memory: what the peer holds, and what it took on top of all that was held."""
    stats: dict[str, float]


class Here:
    """A peer in this process. `weights`: bytes of the model it runs."""

    def __init__(self, peer: Peer, device: torch.device | str, weights: int = 0) -> None:
        self.peer, self.device, self.weights = peer, torch.device(device), weights
        self.name, self.note, self.sized = peer.name, peer.note, peer.sized
        self.held = 0
        self.sizes = (0, 0)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def prepare(self, batch: int, context: int) -> float:
        """Seconds until it was ready."""
        self.sizes = (batch, context)
        if self.peer.sized:
            self.peer.close()
        self._clear()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        begun = self._now()
        _or_failed(lambda: self.peer.prepare(batch, context))
        seconds = self._now() - begun
        if self.cuda:
            self.held = max(0, torch.cuda.memory_allocated() - before)
        return seconds

    def timed(self, prompts: Prompts, lengths: Sequence[int]) -> Taken:
        before = 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begun = self._now()
        tokens = self._run(prompts, lengths)
        seconds = self._now() - begun
        if tokens != sum(lengths):
            raise PeerFailed(f"{tokens} tokens were made where {sum(lengths)} were asked for")
        peak = self.weights + self.held + torch.cuda.max_memory_allocated() - before if self.cuda else None
        return Taken(seconds, tokens, peak, self.peer.stats())

    def busy(self, prompts: Prompts, lengths: Sequence[int]) -> float | None:
        """Seconds in which the GPU worked on this; None on a CPU. Profiled, so the run itself takes longer."""
        if not self.cuda:
            return None
        with torch.autograd.profiler.profile(use_device="cuda", use_cpu=False, use_kineto=True) as profile:
            self._run(prompts, lengths)
            torch.cuda.synchronize()
        self.peer.stats()
        events = profile.kineto_results.events()  # not profile.function_events, which takes a minute for 100k kernels
        ran = (e for e in events if e.device_type() == DeviceType.CUDA)
        spans = ((e.start_ns(), e.start_ns() + e.duration_ns()) for e in ran)
        return covered(spans) / 1e9

    def close(self) -> None:
        self.peer.close()
        self._clear()

    def _run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        """A peer that failed in the midst of a run is made anew: the next one must find nothing of it."""
        try:
            return _or_failed(lambda: self.peer.run(prompts, lengths))
        except PeerFailed as error:
            reason = str(error)
        self.peer.close()
        self.prepare(*self.sizes)
        raise PeerFailed(reason)

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


class Apart:
    """A peer in a process of its own, made there by `make(*arguments)`."""

    def __init__(self, make: Callable[..., Here], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments))
        self.process.start()
        theirs.close()
        try:
            self.name, self.note, self.sized = self._ask("who")
        except PeerFailed:
            self.close()
            raise

    def prepare(self, batch: int, context: int) -> float:
        return float(self._ask("prepare", batch, context))

    def timed(self, prompts: Prompts, lengths: Sequence[int]) -> Taken:
        taken: Taken = self._ask("timed", prompts, lengths)
        return taken

    def busy(self, prompts: Prompts, lengths: Sequence[int]) -> float | None:
        seconds: float | None = self._ask("busy", prompts, lengths)
        return seconds

    def close(self) -> None:
        """It is ended by force only if it does not go by itself."""
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self.pipe.send(("close", ()))
            self.process.join(30)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(10)
        self.pipe.close()

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            self.pipe.send((what, arguments))
            if not self.pipe.poll(ANSWER):
                raise PeerFailed(f"no answer in {ANSWER:.0f} s")
            kind, answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise PeerFailed("its process has died") from error
        if kind == "failed":
            raise PeerFailed(answer)
        return answer


def _serve(pipe: Connection, make: Callable[..., Here], arguments: tuple[Any, ...]) -> None:
    """The other end of `Apart`: answers until told to close, or until nobody is there any more."""
    stand: Here | None = None
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            break
        if what == "close":
            break
        try:
            stand = stand or _or_failed(lambda: make(*arguments))
            answer = (stand.name, stand.note, stand.sized) if what == "who" else getattr(stand, what)(*given)
            pipe.send(("done", answer))
        except PeerFailed as error:
            pipe.send(("failed", str(error)))
    if stand is not None:
        stand.close()


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union: kernels of two streams that run at once count once.

    >>> covered([(0, 4), (2, 5), (7, 8)])
    6
    """
    total, end = 0, -1
    for start, stop in sorted(intervals):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


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
    raise PeerFailed(reason)  # out here, so that it does not carry the tensors of the failed frames along
