"""The two protocols of this folder: a curriculum decides which prompts get rollouts, how many, and which groups train.

The training loop calls `plan`, `observe` and `emit` until it has a batch, and `updated` after the optimiser step.
Most curricula are a gate (`gate.py`: which groups train) over a source (`source.py`: which prompts come next), with
wrappers around them. Nothing in this folder reads `Rollout.trace` or imports torch. `whet.testing.check_contract`
tests every line of the contract for any implementation, also for yours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from whet.types import Batch, Clock, Report, Request, Rollout, rollout_from_json, rollout_to_json


class Curriculum(Protocol):
    needs: frozenset[str]  # signals wanted in `Report.signals`; a learner that cannot compute one is refused at start

    def plan(self, clock: Clock) -> list[Request]:
        """Request rollouts. Each of them comes back once through `observe`, also if a weight update cuts it."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Receive judged rollouts, each exactly once; those of one group may arrive over several calls and versions."""

    def emit(self, clock: Clock) -> Batch | None:
        """Return the next batch, its groups in the order of their first request, or None while it is not full."""

    def updated(self, clock: Clock, report: Report) -> None:
        """Take note of the optimiser step on the last emitted batch; `clock` is already the next one."""

    def holds(self) -> set[int]:
        """Return the ids of groups that may still train; the traces of all others can be freed."""

    def metrics(self) -> dict[str, float]:
        """Return counters since the start of the run, and gauges, named "curriculum/..."."""

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-able state, from which the sequence of plans continues as if it was never interrupted."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Source(Protocol):
    def pick(self, k: int, clock: Clock) -> list[str]:
        """Return the next k prompt ids; fewer only if no more are available."""

    def give_back(self, ids: Sequence[str]) -> None:
        """Take back ids that got no verdict (cut, expired); they are picked first, in the order given."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Learn from judged rollouts, also from those of groups that will be dropped."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# ---- progress of a run, by which stages end and resets begin

SPAN = 20  # updates that a moving average reaches back
GAIN = 0.01  # a smaller gain of the reward is no progress. OURS, like SPAN: FastCuRL and ProRL give no exact rule


def smoothed(before: float | None, value: float) -> float:
    """Exponential moving average m + 2 / (SPAN + 1) * (x - m), which starts with its first value.

    >>> smoothed(None, 0.4), round(smoothed(0.4, 0.61), 6)  # 0.4 + 2/21 * 0.21
    (0.4, 0.42)
    """
    return value if before is None else before + 2.0 / (SPAN + 1) * (value - before)


class Evidence:
    """The rollouts since the last update, as far as they may count at the next one.

    All of them count, unless an update cuts what runs (`Clock.cut`): then only those of decided groups do. Among the
    others the short rollouts are finished and the long ones are not, so their mean would be biased.
    """

    def __init__(self, rollouts: Sequence[Rollout] = ()) -> None:
        self.rollouts = list(rollouts)

    def emitted(self, clock: Clock) -> None:
        """Drop rollouts of older versions: their groups were let go before this batch."""
        if clock.cut:
            self.rollouts = [rollout for rollout in self.rollouts if rollout.first_version >= clock.version]

    def updated(self, clock: Clock, held: Collection[int]) -> list[Rollout]:
        """Return the rollouts that count and start anew; `held` are the groups that are not decided yet."""
        rollouts, self.rollouts = self.rollouts, []
        return [rollout for rollout in rollouts if not (clock.cut and rollout.group_id in held)]

    def state_dict(self) -> list[dict[str, Any]]:
        return [rollout_to_json(rollout) for rollout in self.rollouts]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.rollouts = [rollout_from_json(row) for row in state]


class Progress:
    """Reward and share of truncated responses, smoothed over updates, and whether the reward has stalled.

    `keep` is the largest number of updates that `stalled` can look back.

    >>> progress = Progress(keep=2)
    >>> progress.truncated is None, progress.stalled(2)
    (True, False)
    """

    def __init__(self, keep: int = 0):
        self.keep = keep
        self.reward: float | None = None
        self.truncated: float | None = None  # None before the first update with responses
        self._past: list[float] = []  # smoothed rewards of the last `keep` updates and the one before them
        self._clear()

    def _clear(self) -> None:
        self._responses = self._long = self._judged = 0
        self._sum = 0.0

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Count rollouts towards the next update; cut ones say nothing, unjudged ones say nothing about the reward."""
        for rollout in rollouts:
            if rollout.finish == "cut":
                continue
            self._responses += 1
            self._long += rollout.finish == "length"
            if rollout.judged and rollout.reward is not None:
                self._judged += 1
                self._sum += rollout.reward

    def update(self) -> None:
        if self._responses:
            self.truncated = smoothed(self.truncated, self._long / self._responses)
        if self._judged:
            self.reward = smoothed(self.reward, self._sum / self._judged)
        if self.reward is not None and self.keep:
            self._past = [*self._past, self.reward][-self.keep - 1 :]
        self._clear()

    def stalled(self, updates: int) -> bool:
        """True if the smoothed reward gained less than `GAIN` over the last so many updates."""
        if not 0 < updates < len(self._past):
            return False
        return self._past[-1] - self._past[-1 - updates] < GAIN

    def forget(self) -> None:
        """Let `stalled` start anew."""
        self._past = self._past[-1:]

    def state_dict(self) -> dict[str, Any]:
        now = [self._responses, self._long, self._judged, self._sum]
        return {"reward": self.reward, "truncated": self.truncated, "past": list(self._past), "now": now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reward, self.truncated = state["reward"], state["truncated"]
        self._past = list(state["past"])
        self._responses, self._long, self._judged, self._sum = state["now"]
