"""How many prompts would teach something: the chance that a group of m rollouts holds both right and wrong ones.

Pure maths on counts: c_i right of n_i judged rollouts of prompt i. Up to n rollouts a group it is counted, beyond it is
extrapolated by a beta-binomial. `spending` and `report` call it.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

ROUNDS = 2000
"""Of the fixed point at most; it gains a digit every few dozen, and is slow only where the fit hardly matters."""
TOLERANCE = 1e-6
"""A round that moves a + b by no more than this share of it was the last."""
LARGEST = 1e3
"""a + b from here on: the prompts do not differ, and the beta-binomial is a binomial."""
MISFIT = 0.05
"""A fit that misses the share of mixed groups at n by more than this, and by more than noise, is not used."""


def mixed(right: np.ndarray, judged: np.ndarray, size: int) -> np.ndarray:
    """For each prompt, the unbiased chance that `size` of its rollouts are not all of one verdict.

    1 - C(c, m) / C(n, m) - C(n - c, m) / C(n, m): the share of the subsets of m that hold both. NaN where n < m.

    >>> mixed(np.array([0, 1, 4]), np.array([8, 8, 8]), 4).round(4).tolist()
    [0.0, 0.5, 0.9714]
    """
    right, judged = np.asarray(right, np.float64), np.asarray(judged, np.float64)
    shares = 1.0 - _chosen(right, judged, size) - _chosen(judged - right, judged, size)
    return np.where(judged >= size, np.maximum(shares, 0.0), np.nan)


def _chosen(part: np.ndarray, whole: np.ndarray, size: int) -> np.ndarray:
    """C(part, size) / C(whole, size) = product over j < size of (part - j) / (whole - j)."""
    ratio = np.ones_like(whole)
    for j in range(size):
        ratio *= np.maximum(part - j, 0.0) / np.maximum(whole - j, 1.0)
    return ratio


class Beta(NamedTuple):
    """How pass rates are spread over the prompts: p ~ Beta(a, b). Arrays where several were fitted at once."""

    a: np.ndarray
    b: np.ndarray

    def mixed(self, size: int) -> np.ndarray:
        """1 - E[p^m] - E[(1-p)^m]; E[p^m] = product over j < m of (a + j) / (a + b + j).

        >>> round(float(Beta(np.array(1.0), np.array(1.0)).mixed(4)), 4)  # all pass rates alike: 1 - 2/5
        0.6
        """
        j = np.arange(size)
        total = np.asarray(self.a + self.b)[..., None] + j
        right = np.prod((np.asarray(self.a)[..., None] + j) / total, axis=-1)
        wrong = np.prod((np.asarray(self.b)[..., None] + j) / total, axis=-1)
        return 1.0 - right - wrong


def fit_beta(right: np.ndarray, judged: np.ndarray, weights: np.ndarray | None = None) -> Beta:
    """Maximum-likelihood beta-binomial; NaN where it has none (not one right rollout, or not one wrong).

    Minka's fixed point for the Polya distribution (Estimating a Dirichlet distribution, 2000), with the differences of
    digammas written as the sums they are: a <- a [sum_j K_j / (a + j)] / [sum_j M_j / (a + b + j)], and b likewise with
    L, where K_j, L_j and M_j count the prompts with more than j right, wrong and judged rollouts. `weights` (fits x
    prompts) fits many resamples at once.
    """
    right, judged = np.asarray(right), np.asarray(judged)
    weights = np.ones((1, right.size)) if weights is None else weights
    j = np.arange(int(judged.max()))
    hits, misses, seen = (weights @ (counts[:, None] > j) for counts in (right, judged - right, judged))
    a, b = np.full(len(weights), np.nan), np.full(len(weights), np.nan)
    going = np.flatnonzero((hits[:, 0] > 0) & (misses[:, 0] > 0))
    a[going] = b[going] = 1.0
    for _ in range(ROUNDS):
        old_a, old_b = a[going, None], b[going, None]
        total = (seen[going] / (old_a + old_b + j)).sum(axis=1)
        new_a = old_a[:, 0] * (hits[going] / (old_a + j)).sum(axis=1) / total
        new_b = old_b[:, 0] * (misses[going] / (old_b + j)).sum(axis=1) / total
        scale = np.minimum(1.0, LARGEST / (new_a + new_b))
        a[going], b[going] = new_a * scale, new_b * scale
        moved = np.abs(a[going] - old_a[:, 0]) + np.abs(b[going] - old_b[:, 0])
        going = going[moved > TOLERANCE * (a[going] + b[going])]
        if not going.size:
            break
    return Beta(a, b)


class Extrapolation(NamedTuple):
    """Share of mixed groups at a size; `how` it is known."""

    share: np.ndarray
    """One value for each row of weights."""
    how: str
    """counted: from the rollouts themselves; fitted: by the beta-binomial; at least: the share among as many as were
    counted, which a larger group can only exceed, because the fit failed or misses what was counted."""


def countable(judged: np.ndarray) -> int:
    """The largest group that can be counted: half of the prompts or more have so many judged rollouts.

    >>> countable(np.array([8, 8, 7, 8])), countable(np.array([8, 6, 7, 7]))
    (8, 7)
    """
    return int(np.sort(judged)[judged.size // 2])


class SignalCurve:
    """Mean over the prompts of the chance that a group is mixed, by its size, for each row of `weights`.

    The first row must weigh all prompts alike: it decides between fit and fallback for all.
    """

    def __init__(self, right: np.ndarray, judged: np.ndarray, weights: np.ndarray):
        self.right, self.judged, self.weights = right, judged, weights
        self.n = countable(judged)

    def counted(self, size: int) -> np.ndarray:
        return weighted_mean(mixed(self.right, self.judged, size), self.weights)

    def at(self, size: int) -> Extrapolation:
        if size <= self.n:
            return Extrapolation(self.counted(size), "counted")
        counted = self.counted(self.n)
        if not self._fits:
            return Extrapolation(counted, "at least")
        share = self._fit.mixed(size)
        return Extrapolation(np.where(np.isfinite(share), np.maximum(share, counted), counted), "fitted")

    @cached_property
    def _fit(self) -> Beta:
        return fit_beta(self.right, self.judged, self.weights)

    @cached_property
    def _fits(self) -> bool:
        """Whether the fit gives back the share that was counted; it cannot where nothing was."""
        share = float(self.counted(self.n)[0])
        if share == 0.0:
            return False
        noise = 2.0 * math.sqrt(share * (1.0 - share) / (self.judged >= self.n).sum())
        return abs(float(self._fit.mixed(self.n)[0]) - share) <= max(MISFIT, noise)


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Over the prompts that have a value, for each row of weights; 0 where no weight is left."""
    known = np.isfinite(values)
    total = weights[:, known].sum(axis=1)
    return np.divide(weights[:, known] @ values[known], total, out=np.zeros(len(weights)), where=total > 0)
