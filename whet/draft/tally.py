"""What speculation did since it was last asked: a chooser's part of a step's metrics."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from whet.draft.base import OFF, Arm


class Tally:
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._rows = self._accepted = 0

    def add(self, arm: Arm, seconds: float, accepted: np.ndarray | None) -> None:
        self._seconds[arm.name] += seconds
        if arm != OFF and accepted is not None:
            self._rows += accepted.size
            self._accepted += int(accepted.sum())

    def take(self) -> dict[str, float]:
        """Each arm's share of the time, and the tokens that a row writes in a step that speculates: the one that it
        writes anyway where none did. Begins anew.

        >>> tally = Tally()
        >>> tally.add(OFF, 1.0, None)
        >>> tally.add(Arm("ngram", 2), 3.0, np.array([2, 1]))
        >>> tally.take()
        {'draft/share_off': 0.25, 'draft/share_ngram_2_1_3': 0.75, 'draft/accept_length': 2.5, 'draft/saved': 3.0}
        >>> tally.take()
        {'draft/accept_length': 1.0, 'draft/saved': 0.0}
        """
        total = sum(self._seconds.values())
        out = {f"draft/share_{name}": seconds / total for name, seconds in self._seconds.items() if total > 0}
        out["draft/accept_length"] = 1 + self._accepted / max(1, self._rows)
        out["draft/saved"] = float(self._accepted)
        self._begin()
        return out
