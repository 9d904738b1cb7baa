"""Resets of reference and optimiser where CurES goes on to another subset of the data."""

from __future__ import annotations

from dataclasses import replace

from whet.curriculum.base import Curriculum, Wrapper
from whet.curriculum.rho import CuresSource
from whet.types import Batch, Clock, Report


class Reset(Wrapper):
    """Mark the first batch of each subset but the first, so that reference and optimiser start anew with it.

    The subsets of CurES (arXiv 2510.01037) are runs of their own that begin with the weights of the last one.
    """

    state_names = ("inner", "resets", "turn")

    def __init__(self, inner: Curriculum, subset: CuresSource):
        super().__init__(inner)
        self.subset = subset
        self.resets = 0
        self.turn = 0  # turn of the subset at the last batch

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(clock)
        if batch is None:
            return None
        is_new = self.subset.turn > self.turn
        self.turn = max(self.subset.turn, 0)
        if not is_new:
            return batch
        self.resets += 1
        return replace(batch, reset_reference=True, reset_optimizer=True)

    def updated(self, clock: Clock, report: Report) -> None:
        self.inner.updated(clock, report)

    def metrics(self) -> dict[str, float]:
        metrics = self.inner.metrics()
        return {**metrics, "curriculum/resets": metrics.get("curriculum/resets", 0.0) + self.resets}
