"""When a GPU stood still: the spans of its kernels, the gaps between them, and what the host did meanwhile.

`Trace` profiles what is between `start` and `stop` (kernels only, no Python); the functions below are plain arithmetic
on its spans. Times are nanoseconds of the wall clock: a mark, launched on an idle device at a known time, says what the
profiler's clock reads then, whatever it counts from.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

SIZES = ((20_000, "to 20 us"), (100_000, "to 100 us"), (1_000_000, "to 1 ms"), (10_000_000, "to 10 ms"))
"""Classes of gaps, by nanoseconds."""
LONGER = "longer"


class Span(NamedTuple):
    name: str
    start: int
    stop: int


class Gap(NamedTuple):
    start: int
    stop: int
    before: str
    after: str

    @property
    def size(self) -> int:
        return self.stop - self.start


class Trace:
    """On a CPU it measures the wall alone."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device
        self.begin = self.end = self._marked = 0
        self.spans: list[Span] = []
        self._profile: Any = None

    def start(self) -> None:
        if self.cuda:
            mark = torch.zeros(1, device=self.device).add_(1)
            self._profile = torch.autograd.profiler.profile(use_device="cuda", use_cpu=False, use_kineto=True)
            self._profile.__enter__()
            torch.cuda.synchronize()
            self._marked = time.time_ns()
            mark.add_(1)
            torch.cuda.synchronize()
        self.begin = time.time_ns()

    def stop(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.end = time.time_ns()
        if self.cuda:
            self._profile.__exit__(None, None, None)
            events = self._profile.kineto_results.events()
            ran = [e for e in events if e.device_type() == DeviceType.CUDA and "Sync" not in e.name()]
            found = sorted((Span(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in ran), key=by_start)
            self.spans = shifted(found[1:], self._marked - found[0].start) if found else []


def by_start(span: Span) -> int:
    return span.start


def shifted(spans: Iterable[Span], by: int) -> list[Span]:
    return [Span(span.name, span.start + by, span.stop + by) for span in spans]


def gaps_between(spans: Sequence[Span], begin: int, end: int) -> list[Gap]:
    """Where none of the spans (sorted by start) runs, from begin to end.

    >>> gaps_between([Span("a", 2, 5), Span("b", 3, 4), Span("c", 7, 8)], 0, 9)
    [Gap(start=0, stop=2, before='', after='a'), Gap(start=5, stop=7, before='a', after='c'), \
Gap(start=8, stop=9, before='c', after='')]
    """
    out, at, last = [], begin, ""
    for name, start, stop in spans:
        if start > at:
            out.append(Gap(at, min(start, end), last, name))
        if stop > at:
            at, last = stop, name
    if at < end:
        out.append(Gap(at, end, last, ""))
    return [gap for gap in out if gap.size > 0]


def by_size(gaps: Iterable[Gap]) -> dict[str, dict[str, float]]:
    """Seconds and number of gaps in each class of SIZES."""
    out = {name: {"seconds": 0.0, "gaps": 0.0} for name in (*(name for _, name in SIZES), LONGER)}
    for gap in gaps:
        row = out[next((name for most, name in SIZES if gap.size <= most), LONGER)]
        row["seconds"] += gap.size / 1e9
        row["gaps"] += 1
    return out


def by_phase(gaps: Sequence[Gap], phases: Sequence[Span]) -> dict[str, float]:
    """Seconds of the gaps that fall into each phase (no two of which overlap); "none" is what falls into none.

    >>> by_phase([Gap(0, 10, "a", "b")], [Span("train", 2, 5), Span("judge", 6, 20)])
    {'train': 3e-09, 'judge': 4e-09, 'none': 3e-09}
    """
    out: dict[str, float] = defaultdict(float)
    rest = sum(gap.size for gap in gaps)
    ordered, first = sorted(phases, key=by_start), 0
    for gap in gaps:
        while first < len(ordered) and ordered[first].stop <= gap.start:
            first += 1
        for name, start, stop in ordered[first:]:
            if start >= gap.stop:
                break
            shared = min(stop, gap.stop) - max(start, gap.start)
            out[name] += shared / 1e9
            rest -= shared
    return {**out, "none": rest / 1e9}


def longest(gaps: Sequence[Gap], phases: Sequence[Span], begin: int, count: int = 10) -> list[dict[str, Any]]:
    """The longest gaps: milliseconds, when, what the host did in their midst, the kernels around them."""

    def phase(at: int) -> str:
        return next((name for name, start, stop in phases if start <= at < stop), "none")

    return [
        {
            "ms": gap.size / 1e6,
            "at_ms": (gap.start - begin) / 1e6,
            "phase": phase((gap.start + gap.stop) // 2),
            "before": gap.before[:120],
            "after": gap.after[:120],
        }
        for gap in sorted(gaps, key=lambda gap: -gap.size)[:count]
    ]


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
