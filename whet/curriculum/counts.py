"""What a gate counts: since the start, since the last batch, and as a share of late.

The numbers behind "curriculum/..." metrics, the acceptance DAPO asks by, and the sentence a starving run
ends with. Counting only; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTERS = (
    "asked",
    "rollouts",
    "accepted",
    "rejected_easy",
    "rejected_hard",
    "unjudged_groups",
    "cut",
    "expired",
    "reasked",
    "trained",
    "relaxed",
    "starved",
    "tokens_kept",
    "tokens_dropped",
    "judged",
    "right",
)
"""All count groups, but for `rollouts` (asked), `judged` and `right` (rollouts of decided groups), the tokens,
and `starved` (batches)."""

MEMORY = 0.9
"""What a batch leaves of the evidence before it."""


class Share:
    """How often something was so, of late: counts that fade by `MEMORY` with every batch.

    >>> share = Share()
    >>> for hit in (True, False, False):
    ...     share.add(hit)
    >>> round(share.value(), 4), share.value(prior=0.5, weight=2)
    (0.3333, 0.4)
    """

    def __init__(self, hits: float = 0.0, seen: float = 0.0):
        self.hits, self.seen = hits, seen

    def add(self, hit: bool) -> None:
        self.hits, self.seen = self.hits + hit, self.seen + 1

    def fade(self) -> None:
        self.hits, self.seen = self.hits * MEMORY, self.seen * MEMORY

    def value(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """As if `weight` more had been seen, with a share of `prior`."""
        seen = self.seen + weight
        return (self.hits + prior * weight) / seen if seen else prior


class Counts:
    """Totals, what they were at the last batch, and two shares.

    >>> counts = Counts()
    >>> counts.add("asked", 3)
    >>> counts.batch()
    >>> counts.add("asked")
    >>> counts.total["asked"], counts.since("asked")
    (4, 1)
    """

    def __init__(self) -> None:
        self.total = dict.fromkeys(COUNTERS, 0)
        self._mark = dict(self.total)
        self.acceptance = Share()
        """Of complete groups, those admitted."""
        self.signal = Share()
        """Of judged groups, those with right and wrong rollouts."""

    def add(self, name: str, by: int = 1) -> None:
        self.total[name] += by

    def since(self, name: str) -> int:
        """Since the last batch."""
        return self.total[name] - self._mark[name]

    def batch(self) -> None:
        """A batch was emitted."""
        self._mark = dict(self.total)
        self.acceptance.fade()
        self.signal.fade()

    def metrics(self) -> dict[str, float]:
        shares = {"acceptance": self.acceptance.value(), "signal_share": self.signal.value()}
        return {f"curriculum/{name}": float(value) for name, value in (self.total | shares).items()}

    def why_starved(self, dry: bool, knob: str = "raise curriculum.rollouts") -> str:
        """The counts of the batch in vain, and what to do: half of a sentence. `knob`: what makes a gate admit more."""
        easy, hard = self.since("rejected_easy"), self.since("rejected_hard")
        unjudged, judged = self.since("unjudged_groups"), self.since("judged")
        passed = f"mean pass rate {self.since('right') / judged:.2f}" if judged else "none judged"
        if dry:
            cure = "the source has no more prompts, so give it more or lower curriculum.groups"
        elif unjudged > easy + hard:
            cure = "see why the judge gives no verdict (judge.timeout_s), or raise curriculum.patience"
        else:
            prompts = "harder" if easy > hard else "easier"
            cure = f"take {prompts} prompts, {knob} or raise curriculum.patience"
        return (
            f"after {self.since('asked')} groups were asked ({hard} too hard, {easy} too easy, {unjudged} unjudged, "
            f"{self.since('cut')} cut; {passed}); {cure}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": dict(self.total),
            "mark": dict(self._mark),
            "acceptance": [self.acceptance.hits, self.acceptance.seen],
            "signal": [self.signal.hits, self.signal.seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self._mark = dict(state["total"]), dict(state["mark"])
        self.acceptance, self.signal = Share(*state["acceptance"]), Share(*state["signal"])
