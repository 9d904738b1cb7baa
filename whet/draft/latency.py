"""How long a step takes: measured per arm, batch size and bytes of KV; guessed from its neighbours where it was not.

A guess moves the nearest measurement of the same arm by the shape t ~ a + b * (rows * tokens to verify) + c * (KV),
fitted to all that was measured. Times come from the host's clock, a step late or not: nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from whet.draft.base import OFF, Arm

PRIOR_COST = 0.02
"""Of one more token to verify, in plain steps, as long as little was measured: low enough to be tried."""
ENOUGH = 4
"""Measured cells from which on the shape is fitted."""
STEADY = 16
"""Samples after which a mean becomes an exponential one of this length."""

Cell = tuple[int, int]
"""Rows a step is padded to, and bin of its KV: 0, or doublings of 64 MiB."""


class Latency:
    def __init__(self, arms: Iterable[Arm]) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.times: dict[str, dict[Cell, tuple[float, float]]] = {name: {} for name in self.arms}
        """Per arm and cell: seconds a step, samples."""
        self._shape: np.ndarray | None = None
        self._guesses: dict[tuple[str, Cell], float] = {}
        """Kept until a new cell is measured, or for so many records."""
        self._records = 0

    def record(self, arm: Arm, cell: Cell, seconds: float) -> None:
        mean, samples = self.times[arm.name].get(cell, (seconds, 0.0))
        self._records += 1
        if not samples or self._records % STEADY == 0:
            self._guesses.clear()
        if samples >= 3:
            seconds = min(seconds, 3 * mean)  # a hiccup of the host
        samples = min(samples + 1, STEADY)
        self.times[arm.name][cell] = (mean + (seconds - mean) / samples, samples)

    def known(self, arm: Arm, cell: Cell | None = None) -> bool:
        times = self.times[arm.name]
        return bool(times) if cell is None else cell in times

    def seconds(self, arm: Arm, cell: Cell) -> float:
        """As measured, else moved from the arm's nearest cell, else from the nearest of plain steps."""
        known = self.times[arm.name].get(cell)
        if known:
            return known[0]
        guess = self._guesses.get((arm.name, cell))
        if guess is None:
            if not self._guesses:
                self._fit()
            guess = self._guesses[arm.name, cell] = self._guess(arm, cell)
        return guess

    def _guess(self, arm: Arm, cell: Cell) -> float:
        times, like = self.times[arm.name], arm
        if not times:
            times, like = self.times[OFF.name], OFF
        near = min(times, key=lambda other: (distance(other, cell), other))
        return times[near][0] * self.shape(arm, cell) / self.shape(like, near)

    def shape(self, arm: Arm, cell: Cell) -> float:
        """Of the time, up to a factor."""
        if self._shape is None:
            return 1 + PRIOR_COST * (arm.tokens - 1)
        return float(self._shape @ features(arm, cell))

    def state(self) -> dict[str, Any]:
        return {arm: [[*cell, *t] for cell, t in cells.items()] for arm, cells in self.times.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Times of arms that still exist."""
        for name in self.times.keys() & state.keys():
            self.times[name] = {(int(b), int(k)): (float(t), float(n)) for b, k, t, n in state[name]}
        self._guesses.clear()

    def _fit(self) -> None:
        """Least squares of relative errors, no term below 0."""
        size, self._shape = sum(map(len, self.times.values())), None
        if size >= ENOUGH:
            seen = [(self.arms[name], cell, t) for name, cells in self.times.items() for cell, (t, _) in cells.items()]
            terms = np.array([features(arm, cell) / t for arm, cell, t in seen])
            found = np.maximum(np.linalg.lstsq(terms, np.ones(size), rcond=None)[0], 0)
            self._shape = found if found[0] > 0 else None  # a step that costs nothing when empty: not to be believed


def features(arm: Arm, cell: Cell) -> np.ndarray:
    return np.array([1.0, cell[0] * arm.tokens / 100, 2.0 ** cell[1] - 1])


def cell_of(rows: int, kv_bytes: float) -> Cell:
    """
    >>> cell_of(64, 0), cell_of(64, 2**26), cell_of(64, 2**30)
    ((64, 0), (64, 1), (64, 4))
    """
    return rows, int(math.log2(1 + kv_bytes / 2**26))


def distance(a: Cell, b: Cell) -> float:
    """Between cells: doublings of the rows and of the KV."""
    return abs(math.log2(a[0] / b[0])) + abs(a[1] - b[1])
