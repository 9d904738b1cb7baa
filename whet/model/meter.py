"""How long a GPU worked: seconds between pairs of events on its stream. Off CUDA nothing is measured.

The rollout engine puts a pair around what it launches together, the loop puts one around the learner's step. The rest
of a step's wall time is the GPU's idle time (`whet.watch.gpu_idle`). Gaps inside a span, between kernels and between
the graphs of a burst, are not seen, so the idle share is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FOLD = 1024  # spans that are kept as events before they are summed up


class DeviceMeter:
    """
    >>> meter = DeviceMeter(torch.device("cpu"))
    >>> with meter.span():
    ...     pass
    >>> meter.seconds() is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._folded = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measures what is queued on the current stream inside it, without waiting for that work."""
        if not self.on:
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._spans.append((begin, end))
        if len(self._spans) >= FOLD:
            self._fold()

    def seconds(self) -> float | None:
        """Seconds of work since the last call, once all of it is done; None where there is no GPU."""
        if not self.on:
            return None
        self._fold()
        total, self._folded = self._folded, 0.0
        return total

    def _fold(self) -> None:
        if self._spans:
            self._spans[-1][1].synchronize()
        self._folded += sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000
        self._spans.clear()
