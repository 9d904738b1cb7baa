"""The stages of a recipe that wants stages and names none: a short one, if measured lengths speak for it. OURS.

FastCuRL's authors chose the limit of their first stage for their model. Half of the limit may cut a third of another
model's right responses, so the limit is measured here: training begins on all prompts at the whole limit, and once
enough right responses have come, the short stage begins at the smallest limit that loses next to none of them. It ends
by signal: when few responses are truncated, or the reward stalls. Where such a limit would save little, it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whet.config import Stage
from whet.curriculum.base import SPAN, Saved, expect
from whet.curriculum.stages import Make, Stages
from whet.types import Batch, Clock, Rollout

# right responses, of which the limit is a quantile: what it really loses is then within 3 points
ENOUGH = 200
LOST = 0.05  # share of right responses that a short limit must stay under
SAVED = 0.10  # share of all tokens that it must save
# Measuring lasts `SPAN` updates at most. The references stay: a border a few updates after the start is no new run.
MEASURE = Stage(steps=SPAN)
SHORT = Stage(subset="short", truncated=0.10, plateau=SPAN, epochs=1.0, reset_reference=False)
WHOLE = Stage(reset_reference=False)


def shortest_limit(right: Sequence[int]) -> int:
    """The smallest limit that loses fewer than `LOST` of the right responses, given their lengths.

    >>> shortest_limit(range(1, 101)), shortest_limit([7])  # 97 to 100 are lost
    (96, 7)
    """
    lost = math.ceil(LOST * len(right)) - 1
    return sorted(right)[len(right) - 1 - lost]


def saving(every: Sequence[int], limit: int) -> float:
    """The share of the tokens of responses of these lengths that a limit would have saved.

    >>> saving([10, 30], 20)
    0.25
    """
    return sum(max(0, length - limit) for length in every) / max(1, sum(every))


class SettledLengths(Saved):
    """Lengths of responses, which count once a batch has passed their group: in the order of completion the short ones
    would come first. What an update drops does not count."""

    state_names = ("right", "every", "_waiting")

    def __init__(self) -> None:
        self.right: list[int] = []
        self.every: list[int] = []
        self._waiting: list[tuple[int, int, bool]] = []  # group, length, whether it is right

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        done = [rollout for rollout in rollouts if rollout.finish != "cut"]
        self._waiting += [
            (rollout.group_id, rollout.length, rollout.verdict == "right") for rollout in done
        ]

    def emitted(self, batch: Batch, clock: Clock) -> None:
        last = max(group.group_id for group in batch.groups)
        passed = [entry for entry in self._waiting if entry[0] <= last]
        self._waiting = [] if clock.cut else [entry for entry in self._waiting if entry[0] > last]
        self.every += [length for _, length, _ in passed]
        self.right += [length for _, length, right in passed if right]


class MeasuredStages(Stages):
    """All prompts at the whole limit, while lengths are measured; short prompts at a short limit; all as before.

    Where the short stage is left out, the first stage goes on to the end.
    """

    state_names = (*Stages.state_names, "lengths_seen", "measuring", "limit")

    def __init__(
        self,
        make: Make,
        *,
        max_tokens: int,
        enough: int = ENOUGH,
        saved: float = SAVED,
        **columns: Any,
    ):
        self.enough = enough
        self.saved = saved
        self.lengths_seen, self.measuring, self.limit = (
            SettledLengths(),
            True,
            0,
        )  # limit: of the short stage, once it is known
        self._said: list[str] = []
        super().__init__((MEASURE, SHORT, WHOLE), make, max_tokens=max_tokens, **columns)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        if self.measuring:
            self.lengths_seen.observe(rollouts)
        super().observe(rollouts)

    def emit(self, clock: Clock) -> Batch | None:
        batch = super().emit(clock)
        if batch is not None and self.measuring:
            self.lengths_seen.emitted(batch, clock)
        return batch

    def sentences(self) -> list[str]:
        said = self._said
        self._said = []
        return said

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expect(state, "limit")
        self._shorten(state["limit"])
        super().load_state_dict(state)

    def _over(self) -> bool:
        if self.number > 0:
            return super()._over()
        if not self.measuring:
            return False
        enough = len(self.lengths_seen.right) >= self.enough
        if enough or self.step >= MEASURE.steps:
            self._decide(enough)
        return not self.measuring and self.limit > 0

    def _decide(self, enough: bool) -> None:
        """End the measuring, and set the short stage's limit if it is worth having."""
        right = self.lengths_seen.right
        every = self.lengths_seen.every
        self.measuring, self.lengths_seen = False, SettledLengths()
        if not enough:
            self._said.append(
                f"No short stage: {len(right)} right responses in {self.step} updates do not tell its limit."
            )
            return
        limit = shortest_limit(right)
        share = saving(every, limit)
        losing = f"which loses under {LOST:.0%} of the right responses"
        about = f"{limit} tokens, {losing}, would save {share:.0%} of all tokens"
        if share < self.saved:
            self._said.append(f"No short stage: a limit of {about}.")
            return
        self._said.append(f"Stage 1 begins, of the shorter prompts: a limit of {about}.")
        self._shorten(limit)

    def _shorten(self, limit: int) -> None:
        self.limit = limit
        self.stages = (MEASURE, SHORT.model_copy(update={"max_tokens": limit}), WHOLE)
        self.limits[1] = limit or self.limits[0]
