"""How long a GPU worked: seconds between pairs of events on its stream. Off CUDA it measures nothing.

The rollout engine puts a pair around what it launches together, a step or a burst of steps, the loop one around the
learner's step; what is left of a step's wall time is the GPU's idle time (`whet.metrics.gpu_idle`). Gaps within a span,
between kernels and between the graphs of a burst, are not seen, so the idle share is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FOLD = 1024
"""Spans kept as events before they are summed up."""


class Meter:
    """
    >>> meter = Meter(torch.device("cpu"))
    >>> with meter.span():
    ...     pass
    >>> meter.seconds() is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self.device = device
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._folded = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Around what is queued on the current stream; it does not wait for it."""
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
        """Since the last call, once all of it is done; None where there is no GPU."""
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
