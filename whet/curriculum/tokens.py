"""A token budget an update, after C3PO (Ring-lite, arXiv 2506.14731): a batch is as many groups as make up the budget.

Long responses then make few groups and short ones many, and an update costs the same throughout. C3PO cuts the set of
rollouts to exactly the budget; OURS keeps groups whole: in the order of first ask, up to the one that reaches it. The
surplus stays for the next batch, as far as `max_age` allows. Wraps any gate, whose `groups` an update no longer count;
to weigh every token alike, as C3PO does, set learn.aggregate = "batch_tokens".

A group weighs 1 / (groups a batch has of late), not 1 / (groups of this batch): where long responses make a batch of
few groups, each of those would weigh more than a short one among many. How many groups reach the budget is a stopping
time, so with a weight fixed beforehand groups of any length count alike (Wald's equation: E[sum to G] = E[G] E[one]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import Any

from whet.curriculum.gate import Gate
from whet.curriculum.progress import smoothed
from whet.types import Batch, Clock, Group, Report, Request, Rollout


def groups_within(tokens: Sequence[int], budget: int) -> int | None:
    """How many of the groups, from the first on, reach the budget; None if all together do not.

    >>> groups_within([300, 500, 400, 100], 1000), groups_within([300, 500], 1000)
    (3, None)
    """
    return next((i + 1 for i, total in enumerate(accumulate(tokens)) if total >= budget), None)


class TokenBudget:
    def __init__(self, inner: Gate, *, tokens: int):
        assert tokens > 0, "a budget is at least one token"
        self.inner, self.needs = inner, inner.needs
        self.tokens = tokens
        self.mean: float | None = None
        """Tokens a trained group has of late."""
        self.count: float | None = None
        """Groups a batch has of late, before the next one is known."""
        self.last = (0, 0)  # groups and tokens of the last batch

    def plan(self, clock: Clock) -> list[Request]:
        while self.inner.settle(self._clock(clock).groups):  # what is decided may move the end of the batch
            pass
        return self.inner.plan(self._clock(clock))

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.inner.observe(rollouts)

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(self._clock(clock))
        if batch is None:
            return None
        tokens, groups = sum(group.tokens for group in batch.groups), len(batch.groups)
        weight = 1 / (self.count or groups)
        self.last = (groups, tokens)
        self.mean, self.count = smoothed(self.mean, tokens / groups), smoothed(self.count, groups)
        return replace(batch, groups=tuple(replace(group, weight=weight) for group in batch.groups))

    def updated(self, clock: Clock, report: Report) -> None:
        self.inner.updated(self._clock(clock), report)

    def holds(self) -> set[int]:
        return self.inner.holds()

    def _clock(self, clock: Clock) -> Clock:
        """With the groups of the next batch: known once the budget is reached, else by what a group has of late."""
        tokens = [group.tokens for group in self._in_line(clock)]
        if (count := groups_within(tokens, self.tokens)) is not None:
            return replace(clock, groups=count)
        mean = self.mean or (sum(tokens) / len(tokens) if tokens else 0.0)
        if not mean:
            return clock
        return replace(clock, groups=len(tokens) + max(1, ceil((self.tokens - sum(tokens)) / mean)))

    def _in_line(self, clock: Clock) -> list[Group]:
        """The ready groups with nothing open before them, without those too old by now."""
        oldest = clock.version - self.inner.max_age
        return [g for g in self.inner.book.first_ready(self.inner.book.ready) if g.oldest_version >= oldest]

    def metrics(self) -> dict[str, float]:
        """`groups` and `batch_tokens` are the last batch's."""
        groups, tokens = self.last
        return {
            **self.inner.metrics(),
            "curriculum/groups": float(groups),
            "curriculum/batch_tokens": float(tokens),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "mean": self.mean, "count": self.count, "last": list(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.mean, self.count = state["mean"], state.get("count")
        groups, tokens = state["last"]
        self.last = (groups, tokens)
