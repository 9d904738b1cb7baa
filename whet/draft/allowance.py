"""Seconds that a drafter's lessons may take: each step grants some, and what is overspent is owed.

Used by `adaptive.py`. Numbers alone: who measures them, and what share of a step is granted, is said elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping


class Allowance:
    """An update is the least that a lesson does, so it waits until there is more than the last one took; meanwhile what
    is left is kept. More than that lapses: a step that was slow for reasons of its own is not paid for by quick ones.
    All that is spent is thus at most all that is granted and one update. The first lesson is not counted: it makes
    kernels ready, which says nothing of those to come.

    >>> allowance = Allowance()
    >>> allowance.spend(2.0, updates=1)
    >>> for _ in range(4):
    ...     allowance.grant(0.03)
    ...     if allowance.allows():
    ...         allowance.spend(0.045, updates=1)
    ...     print(f"{allowance.left:.3f}")
    -0.015
    0.015
    0.045
    0.030
    """

    def __init__(self) -> None:
        self.left = 0.0
        self.each = 0.0
        """What an update took in the last lesson; nothing is known before the second."""
        self._begun = False

    def grant(self, seconds: float) -> None:
        self.left = min(self.left, self.each) + seconds

    def allows(self, spent: float = 0.0) -> bool:
        """One more update, in a lesson that has taken so long."""
        return spent + self.each < self.left

    def spend(self, seconds: float, updates: int) -> None:
        """A lesson of so many updates, over."""
        if updates and not self._begun:
            self._begun = True
            return
        self.left -= seconds
        if updates:
            self.each = seconds / updates

    def state_dict(self) -> dict[str, float]:
        """What the next grant would keep. A run that goes on makes its kernels ready again, so its first lesson is not
        counted either."""
        return {"left": min(self.left, self.each), "each": self.each}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.left, self.each = float(state["left"]), float(state["each"])
