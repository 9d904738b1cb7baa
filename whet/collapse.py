"""The guard against collapse: ends a run whose evaluations have fallen far below what they were, beyond chance.

A run that falls apart seldom comes back, and costs as much as one that learns. The loop asks after each evaluation; it
saves and leaves when told so. Nothing of it is saved: a resumed run is measured against itself from there on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FALL = 0.5
"""Of its best accuracy, what an evaluation must stay above, or within chance of the best."""
PATIENCE = 2
"""Evaluations in a row that must say so."""


@dataclass(slots=True)
class Level:
    """An evaluation set's best so far, how often it was evaluated, and how often in a row it was far below."""

    accuracy: float
    low: float
    step: int
    times: int = 0
    fallen: int = 0


class Guard:
    """
    >>> guard = Guard()
    >>> fine = {"eval/test/accuracy": 0.4, "eval/test/accuracy_low": 0.35, "eval/test/accuracy_high": 0.45}
    >>> worse = {"eval/test/accuracy": 0.1, "eval/test/accuracy_low": 0.08, "eval/test/accuracy_high": 0.13}
    >>> [guard.check(step, metrics) for step, metrics in ((0, fine), (10, worse))]
    ['', '']
    >>> guard.check(20, worse)
    'The accuracy on test fell from 0.400 after step 0 to 0.100'
    """

    def __init__(self) -> None:
        self.levels: dict[str, Level] = {}

    def check(self, step: int, metrics: Mapping[str, float]) -> str:
        """What has collapsed, if all sets have that were evaluated more than once; else ""."""
        told = ""
        for key in metrics:
            kind, _, rest = key.partition("/")
            name, _, what = rest.rpartition("/")
            if kind == "eval" and what == "accuracy":
                told = self._look_at(name, step, metrics) or told
        again = [level for level in self.levels.values() if level.times > 1]
        return told if again and all(level.fallen >= PATIENCE for level in again) else ""

    def _look_at(self, name: str, step: int, metrics: Mapping[str, float]) -> str:
        accuracy, low, high = (metrics[f"eval/{name}/accuracy{end}"] for end in ("", "_low", "_high"))
        level = self.levels.setdefault(name, Level(accuracy, low, step))
        if low > level.low:
            level.accuracy, level.low, level.step = accuracy, low, step
        level.times += 1
        level.fallen = level.fallen + 1 if high < level.low and accuracy < FALL * level.accuracy else 0
        if not level.fallen:
            return ""
        return f"The accuracy on {name} fell from {level.accuracy:.3f} after step {level.step} to {accuracy:.3f}"
