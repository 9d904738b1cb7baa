"""What a curriculum is: it decides which prompts, how many rollouts, and which groups train.

The loop calls `plan`, `observe` and `emit` until a batch is there, then `updated`. A `Source`
hands out prompt ids; gates (plain groups, DAPO, SPEED) stand over a source. Nothing here or
below reads `Rollout.trace` or imports torch. `whet.testing.contract` tests every line of the
contract for any implementation, also yours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from whet.types import Batch, Clock, Report, Request, Rollout, rollout_from_json, rollout_to_json


class Curriculum(Protocol):
    needs: frozenset[str]
    """Signals wanted in `Report.signals`; the learner fills them or refuses at start."""

    def plan(self, clock: Clock) -> list[Request]:
        """Ask. Every request comes back rollout by rollout through `observe`, cut ones too."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Judged rollouts, each delivered once, a group's possibly over several calls and versions."""

    def emit(self, clock: Clock) -> Batch | None:
        """The next batch, its groups in the order of first ask; None while it is not full."""

    def updated(self, clock: Clock, report: Report) -> None:
        """After the optimiser step on the last emitted batch; `clock` is already the next one."""

    def holds(self) -> set[int]:
        """Group ids whose rollouts may still be trained: the traces of all others can be freed."""

    def metrics(self) -> dict[str, float]:
        """Counters since the start and gauges, named "curriculum/..."."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. With it, the sequence of plans goes on as if never interrupted."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Source(Protocol):
    def pick(self, k: int, clock: Clock) -> list[str]:
        """The next k prompt ids; fewer only when nothing more can be had."""

    def give_back(self, ids: Sequence[str]) -> None:
        """Ids that got no verdict (cut, expired): handed out again first, in the order given."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """All judged rollouts, also of groups that will be dropped."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# ---- progress
#
# How a run is getting on: reward and share of truncated responses, smoothed over updates, and whether it has stalled.
#
# What stages (`stages.py`) end by and a reset of the reference (`reset.py`) begins by. Fed with rollouts as they
# come; `update` once an optimiser step.


SPAN = 20
"""Updates an average reaches back."""

GAIN = 0.01
"""Less than this is no progress. OURS, like the span (FastCuRL and ProRL give no rule a program could follow)."""


def smoothed(before: float | None, value: float, span: int = SPAN) -> float:
    """Exponential moving average, m + 2 / (span + 1) * (x - m), which begins with its first value.

    >>> smoothed(None, 0.4), round(smoothed(0.4, 0.61), 6)  # 0.4 + 2/21 * 0.21
    (0.4, 0.42)
    """
    return value if before is None else before + 2.0 / (span + 1) * (value - before)


class Hearing:
    """Rollouts since the last update, which count at the next one: all of them or, where an update cuts what runs
    (`Clock.cut`), those of groups that were decided. Of what is left over, the short ones are finished and the long
    ones are not, so none of it may count.
    """

    def __init__(self, rollouts: Sequence[Rollout] = ()) -> None:
        self.rollouts = list(rollouts)

    def emitted(self, clock: Clock) -> None:
        """A batch is there. What comes after its group was let go says nothing."""
        if clock.cut:
            self.rollouts = [rollout for rollout in self.rollouts if rollout.first_version >= clock.version]

    def updated(self, clock: Clock, held: Collection[int]) -> list[Rollout]:
        """What counts; `held`: groups that are not decided."""
        heard, self.rollouts = self.rollouts, []
        return [rollout for rollout in heard if not (clock.cut and rollout.group_id in held)]

    def state_dict(self) -> list[dict[str, Any]]:
        return [rollout_to_json(rollout) for rollout in self.rollouts]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.rollouts = [rollout_from_json(row) for row in state]


class Progress:
    """`keep`: over how many updates `stalled` may be asked.

    >>> progress = Progress(keep=2)
    >>> progress.truncated is None, progress.stalled(2)
    (True, False)
    """

    def __init__(self, keep: int = 0):
        self.keep = keep
        self.reward: float | None = None
        self.truncated: float | None = None
        """Share of responses that the limit ended; None before the first update with responses."""
        self._past: list[float] = []  # smoothed rewards of the last `keep` updates and the one before them
        self._clear()

    def _clear(self) -> None:
        self._responses = self._long = self._judged = 0
        self._sum = 0.0

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Since the last update; cut rollouts say nothing, unjudged ones nothing of the reward."""
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
        """The smoothed reward gained less than `GAIN` over the last so many updates."""
        if not 0 < updates < len(self._past):
            return False
        return self._past[-1] - self._past[-1 - updates] < GAIN

    def forget(self) -> None:
        """`stalled` begins anew."""
        self._past = self._past[-1:]

    def state_dict(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "truncated": self.truncated,
            "past": list(self._past),
            "now": [self._responses, self._long, self._judged, self._sum],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reward, self.truncated = state["reward"], state["truncated"]
        self._past = list(state["past"])
        self._responses, self._long, self._judged, self._sum = state["now"]
