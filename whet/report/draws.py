"""How sure a comparison of runs is: a bootstrap, in which seeds are drawn again and evaluations come out again.

`compare` asks `Redrawn` for the cost of a level and for the final accuracy in each of DRAWS draws of an arm; the middle
95% of them is the interval that it shows. An evaluation comes out again around the nearest curve that rises and then
may fall, as surely as its own interval says; of a run that recorded no such intervals only the seeds are drawn. The
interval of a single seed therefore knows the noise of its evaluations alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from whet.report.arms import Axis, Point
from whet.report.formats import LAST, TOLERANCE

DRAWS = 1000


def rising(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The rising sequence with the least sum of squared distances: falling parts are replaced by their mean.

    >>> rising([1.0, 3.0, 2.0, 2.0, 5.0]).round(6).tolist()
    [1.0, 2.333333, 2.333333, 2.333333, 5.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, m), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def peaked(values: Sequence[float]) -> np.ndarray:
    """The nearest sequence that rises up to some place and falls from there on, since a run may lose what it had.

    >>> peaked([1.0, 3.0, 2.0, 5.0, 2.0, 1.0]).tolist()
    [1.0, 2.5, 2.5, 5.0, 2.0, 1.0]
    """
    array = np.array(values, dtype=float)
    # about thirty places are enough to try
    peaks = [*range(1, len(array), 1 + len(array) // 30), len(array)]
    fits = (np.concatenate((rising(array[:k]), rising(array[k:][::-1])[::-1])) for k in peaks)
    return min(fits, key=lambda fit: float(((fit - array) ** 2).sum()), default=array)


class Redrawn:
    """An arm, drawn DRAWS times: by each run the curve of its evaluations, and which of the runs are in a draw."""

    def __init__(self, runs: Sequence[Sequence[Point]], seed: int) -> None:
        # those evaluated so far
        rng, runs = np.random.default_rng(seed), [points for points in runs if points] or [[]]
        self._seeds = rng.integers(len(runs), size=(DRAWS, len(runs)))
        self._runs = runs
        curves = [
            _again(points, peaked([point.accuracy for point in points]), rng) for points in runs
        ]
        self._pairs = [
            np.minimum(curve[:, :-1], curve[:, 1:]).astype(np.float32) for curve in curves
        ]
        self._found: dict[float, list[np.ndarray]] = {}
        ends = [points[-LAST:] for points in runs]
        self._ends = [_again(end, np.array([point.accuracy for point in end]), rng) for end in ends]

    def costs(self, level: float, axis: Axis) -> np.ndarray:
        """[DRAWS]: the median over the runs of a draw, infinite where it never crosses, as `first_crossing` has it."""
        if level not in self._found:
            above = [pairs >= level - TOLERANCE for pairs in self._pairs]
            # The place of the first pair, or -1: the last place, which is infinite.
            self._found[level] = [
                np.where(a.any(1), a.argmax(1), -1) if a.size else np.full(DRAWS, -1) for a in above
            ]
        spent = [
            np.array([*(float(getattr(p, axis)) for p in points[:-1]), math.inf])
            for points in self._runs
        ]
        return self._medians(
            [costs[found] for costs, found in zip(spent, self._found[level], strict=True)]
        )

    def finals(self) -> np.ndarray:
        """[DRAWS]: the final accuracy, or NaN if no run was evaluated."""
        return self._medians(
            [end.mean(1) if end.size else np.full(DRAWS, math.nan) for end in self._ends]
        )

    def _medians(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.median(np.take_along_axis(np.stack(columns, axis=1), self._seeds, axis=1), axis=1)


redraw = lru_cache(maxsize=64)(Redrawn)  # a live page asks again and again


def _again(points: Sequence[Point], expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[DRAWS, evaluations]: accuracies as they might have come out, or did, where nothing says how sure they are."""
    trials = np.array([round(point.trials) for point in points], dtype=int)
    drawn = rng.binomial(
        np.maximum(trials, 1), np.clip(expected, 0.0, 1.0), size=(DRAWS, len(points))
    )
    return np.where(trials > 0, drawn / np.maximum(trials, 1), [point.accuracy for point in points])


def middle_95(draws: np.ndarray) -> tuple[float, float]:
    """The ends of the middle 95%."""
    low, high = np.quantile(draws, (0.025, 0.975), method="nearest")
    return float(low), float(high)
