"""Resets: reference and optimiser start anew every so many updates, on a plateau (ProRL, arXiv 2505.24864), or with
each subset of CurES (arXiv 2510.01037), whose subsets are runs of their own from the weights of the one before.

Under a KL term the reference holds the policy back once it has moved; making the policy of today the reference lets it
go on. Wraps any curriculum and marks a batch now and then; which groups are in it is the inner one's affair. ProRL
resets by hand when a validation score stalls; the plateau of the smoothed training reward is OURS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from whet.curriculum.base import Curriculum
from whet.curriculum.progress import Hearing, Progress
from whet.types import Batch, Clock, Report, Request, Rollout


class Subsets(Protocol):
    @property
    def turn(self) -> int:
        """Subsets begun, less one."""


class Reset:
    """every: updates between resets. plateau: updates over which a smoothed reward that gains less than 0.01 makes
    one. 0 turns either off. Both count from the last reset. subset: the first batch after each but its first makes
    one, too."""

    def __init__(
        self,
        inner: Curriculum,
        *,
        every: int = 0,
        plateau: int = 0,
        optimizer: bool = True,
        subset: Subsets | None = None,
    ):
        self.inner, self.needs = inner, inner.needs
        self.every, self.plateau, self.optimizer = every, plateau, optimizer
        self.progress = Progress(keep=plateau)
        self.hearing = Hearing()
        self.since = self.resets = 0
        self.due = False
        self.subset, self.turn = subset, 0  # of the last batch

    def plan(self, clock: Clock) -> list[Request]:
        return self.inner.plan(clock)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.hearing.rollouts += rollouts
        self.inner.observe(rollouts)

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(clock)
        if batch is not None:
            self.hearing.emitted(clock)
        if batch is not None and self.subset is not None:
            self.due, self.turn = self.due or self.subset.turn > self.turn, max(self.subset.turn, 0)
        if batch is None or not self.due:
            return batch
        self.due = False
        self.resets += 1
        return replace(batch, reset_reference=True, reset_optimizer=batch.reset_optimizer or self.optimizer)

    def updated(self, clock: Clock, report: Report) -> None:
        self.inner.updated(clock, report)
        self.progress.observe(self.hearing.updated(clock, self.inner.holds()))
        self.progress.update()
        self.since += 1
        if 0 < self.every <= self.since or self.progress.stalled(self.plateau):
            self.due, self.since = True, 0
            self.progress.forget()

    def holds(self) -> set[int]:
        return self.inner.holds()

    def metrics(self) -> dict[str, float]:
        metrics = self.inner.metrics()
        return {**metrics, "curriculum/resets": metrics.get("curriculum/resets", 0.0) + self.resets}

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "progress": self.progress.state_dict(),
            "hearing": self.hearing.state_dict(),
            "since": self.since,
            "resets": self.resets,
            "due": self.due,
            "turn": self.turn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.progress.load_state_dict(state["progress"])
        self.hearing.load_state_dict(state.get("hearing", ()))
        self.since, self.resets, self.due = state["since"], state["resets"], state["due"]
        self.turn = state.get("turn", 0)
