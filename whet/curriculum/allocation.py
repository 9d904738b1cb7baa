"""CurES's two formulas (arXiv 2510.01037): which prompts to draw, and how to divide rollouts among those drawn.

Pure maths of pass rates and standard deviations, called by `cures.py`. Nothing here knows a prompt, counts
anything or draws: pass rates come from `posterior.py`, whole numbers from `budget.py`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from whet.curriculum.base import SPAN
from whet.errors import WhetError

# ---- budget
#
# Dividing a whole number of rollouts by shares, so that nothing is lost to rounding.
#
# Pure maths, exact (rationals, no floats): called wherever a budget is divided among prompts.


def largest_remainder(shares: Sequence[float], total: int, minimum: int = 0) -> list[int]:
    """Whole numbers proportional to `shares`, each at least `minimum`, that sum to exactly `total`.

    Who would fall below the minimum gets the minimum, and the rest is divided among the others (which is
    also what minimises sum share_i^2 / n_i under n_i >= minimum). Each then gets the floor of its part;
    what is left goes one by one to the largest fractions, ties to the lower index (Hamilton's method).
    Shares that are all zero count as equal.

    >>> largest_remainder([1, 1, 1], 8)
    [3, 3, 2]
    >>> largest_remainder([0.5, 0.433013, 0.433013, 0.3, 0.0], 40, minimum=2)
    [11, 10, 10, 7, 2]
    """
    if not all(math.isfinite(share) and share >= 0 for share in shares):
        raise ValueError(f"shares must be finite and not negative, got {list(shares)}")
    if total < minimum * len(shares) or (total > 0 and not shares):
        raise WhetError(
            f"{total} rollouts cannot be divided among {len(shares)} prompts with at least {minimum} each; "
            "give more rollouts or take fewer prompts."
        )
    parts = _ideal(shares, total, minimum)
    whole = [math.floor(part) for part in parts]
    by_fraction = sorted(range(len(parts)), key=lambda i: (whole[i] - parts[i], i))
    for i in by_fraction[: total - sum(whole)]:
        whole[i] += 1
    return whole


def _ideal(shares: Sequence[float], total: int, minimum: int) -> list[Fraction]:
    """The exact parts before rounding: proportional, but for those held at the minimum.

    Since the total covers every minimum, never all are held, so `weight` is never zero.
    """
    exact = [Fraction(float(share)) for share in shares]
    if not any(exact):
        exact = [Fraction(1)] * len(exact)
    held: set[int] = set()
    while True:
        left = total - minimum * len(held)
        weight = sum(share for i, share in enumerate(exact) if i not in held)
        parts = [Fraction(minimum) if i in held else share * left / weight for i, share in enumerate(exact)]
        below = {i for i, part in enumerate(parts) if part < minimum}
        if not below:
            return parts
        held |= below


def sigma_of(p: ArrayLike) -> np.ndarray:
    """sqrt(p (1 - p)), the spread of a verdict of pass rate p.

    Twice useful. sqrt(2 delta) times it bounds what a trust-region step on the prompt can gain (eq. 11). And it is
    sigma of eq. 21 where every response has a score of norm one and right and wrong have the same mean.

    >>> sigma_of([0.5, 0.25, 0.0]).round(6).tolist()
    [0.5, 0.433013, 0.0]
    """
    p = np.asarray(p, np.float64)
    return np.sqrt(p * (1.0 - p))


def sampling_weights(p: ArrayLike, tau: float) -> np.ndarray:
    """rho*(x) = exp(sigma(p_x) / tau) / sum of that over all prompts (eq. 14).

    The distribution that maximises E[sigma] + tau H: a large tau is uniform, a small one takes the prompts nearest
    to half solved. The largest exponent is subtracted first, so no tau overflows.

    >>> sampling_weights([0.5, 0.1, 0.9, 0.0, 1.0], tau=0.1).round(6).tolist()
    [0.778727, 0.105389, 0.105389, 0.005247, 0.005247]
    """
    sigma = sigma_of(p)
    weights = np.exp((sigma - sigma.max(initial=0.0)) / tau)
    return weights / weights.sum()


def sigma_gradient(p: ArrayLike, e1: ArrayLike, e0: ArrayLike, gap_sq: ArrayLike) -> np.ndarray:
    """sigma of eq. 21, the standard deviation of one rollout's gradient, from the scores s = grad log pi(y | x):

        sigma^2 = p (1-p)^2 e1 + p^2 (1-p) e0 - p^2 (1-p)^2 gap_sq

    e1 = E[|s|^2 | right], e0 = E[|s|^2 | wrong], gap_sq = |E[s | right] - E[s | wrong]|^2: estimates of them are in
    `moments.py`. They can give a negative square, which counts as zero. Neyman's rule takes ratios of sigmas, so the
    scale of s is of no account.

    >>> sigma_gradient([0.25, 0.25], e1=[1.0, 4.0], e0=1.0, gap_sq=[0.0, 1.0]).round(6).tolist()
    [0.433013, 0.757772]
    """
    p = np.asarray(p, np.float64)
    q = 1.0 - p
    square = p * q * (q * np.asarray(e1) + p * np.asarray(e0) - p * q * np.asarray(gap_sq))
    return np.sqrt(np.maximum(square, 0.0))


def neyman(sigmas: Sequence[float], total: int, minimum: int = 0) -> list[int]:
    """n_i = total * sigma_i / sum of sigma (eq. 20), which minimises sum sigma_i^2 / n_i, in whole numbers.

    Each gets `minimum` at least and the sum is `total` exactly; all-zero sigmas divide it evenly (both OURS: the
    paper's real numbers sum by themselves, the released code rounds each and loses rollouts).

    >>> neyman([0.5, 0.25, 0.25], 16)
    [8, 4, 4]
    """
    return largest_remainder(sigmas, total, minimum)


# ---- moments
#
# What the scores of right and wrong responses are like: the three numbers of a prompt that sigma of eq. 21 needs.
#
# CurES (arXiv 2510.01037) takes them from a probe of every prompt, one backward pass a response. OURS: from the
# rollouts that train anyway, averaged over a prompt's visits, and over all prompts for those of which too little is
# known. `sigma.py` feeds it what the learner reports. Averages only: nothing here knows a pass rate, and no vector is
# kept.


RATE = 0.3
"""What a visit, a handful of responses, weighs in its prompt's averages, which begin at the common ones. OURS: where
prompts are alike noise costs little then, and where they differ most of the difference is seen (docs/cures.md)."""

COMMON_RATE = 2.0 / (SPAN + 1)
"""What an update weighs in those over all prompts: they reach back some 20 updates. OURS."""


def moments_of(right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """(e1, e0, gap_sq) of scores [responses, width]; nan for what they cannot tell, or if they are not finite.

    e1 and e0 are the mean squared norms. gap_sq is the squared distance of the two means without its bias: a mean of n
    scores lies off by tr(C) / n in the mean square, C their covariance, so that E|m1 - m0|^2 = gap_sq + tr(C1) / n1 +
    tr(C0) / n0. The last two are subtracted, tr(C) estimated by sum |s - m|^2 / (n - 1), which takes two of each class.
    The rest may be negative: it is clipped where it is read, since what is clipped before averaging is biased again.

    >>> moments_of(np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([[0.0, 1.0], [0.0, 3.0]])).tolist()  # 8 - 2/2 - 2/2
    [5.0, 5.0, 6.0]
    """
    found = np.full(3, np.nan)
    classes = [np.asarray(scores, np.float64) for scores in (right, wrong)]
    for i, scores in enumerate(classes):
        if len(scores):
            found[i] = np.mean(np.sum(scores * scores, axis=1))
    if min(map(len, classes)) > 1:
        means = [scores.mean(axis=0) for scores in classes]
        between = means[0] - means[1]
        spreads = [np.sum((s - m) ** 2) / (len(s) - 1) / len(s) for s, m in zip(classes, means, strict=True)]
        found[2] = between @ between - sum(spreads)
    return np.where(np.isfinite(found), found, np.nan)


class Moments:
    """Of each prompt, by row. Only visited ones take room in a checkpoint, some 22 bytes each.

    >>> moments = Moments(prompts=2)
    >>> moments.of(np.array([0])).tolist()  # nothing known: sigma is that of the pass rate
    [[1.0, 1.0, 0.0]]
    >>> moments.update([(0, np.array([[2.0], [4.0]]), np.array([[1.0]]))])
    >>> moments.of(np.array([0, 1])).tolist()
    [[10.0, 1.0, 0.0], [10.0, 1.0, 0.0]]
    """

    def __init__(self, prompts: int):
        self.common = np.full(3, np.nan)
        """Over all prompts; nan where nothing is known."""
        self._own = np.empty((prompts, 3), np.float32)
        self.clear()

    def clear(self) -> None:
        """Forgets every prompt. What is common to them is the policy's, and stays."""
        self._own[:] = np.nan

    @property
    def visited(self) -> np.ndarray:
        """Rows of which something is known; whoever has a gap has norms."""
        return np.flatnonzero(~np.isnan(self._own[:, :2]).all(axis=1))

    def update(self, groups: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """After an optimiser step: (row of the prompt, scores of the right, of the wrong) of its groups."""
        visits = [(row, moments_of(right, wrong)) for row, right, wrong in groups]
        if not visits:
            return
        means = _means(np.array([found for _, found in visits]))
        moved = self.common + COMMON_RATE * (means - self.common)
        self.common = np.where(np.isnan(means), self.common, np.where(np.isnan(self.common), means, moved))
        for row, found in visits:
            before = self._full(np.array([row]))[0]
            self._own[row] = np.where(np.isnan(found), self._own[row], before + RATE * (found - before))

    def of(self, rows: np.ndarray) -> np.ndarray:
        """[rows, 3]: e1, e0, gap_sq, none of them negative."""
        return np.maximum(self._full(rows), 0.0)

    @property
    def usual(self) -> np.ndarray:
        """What is common, complete: a class never seen is like the other, a gap never seen none, norms 1 at first."""
        right, wrong, gap = (None if np.isnan(value) else value for value in self.common.tolist())
        norm = next((value for value in (right, wrong) if value is not None), 1.0)
        return np.array([norm if right is None else right, norm if wrong is None else wrong, gap or 0.0])

    def _full(self, rows: np.ndarray) -> np.ndarray:
        """What a prompt lacks is common to all, times how its norms, as far as known, compare with the common ones:
        scores grow with the length of responses, and a gap of the long ones would swallow the sigma of a short one."""
        own, usual = self._own[rows].astype(np.float64), self.usual
        known = ~np.isnan(own[:, :2])
        norms, expected = np.where(known, own[:, :2], 0.0).sum(axis=1), (known * usual[:2]).sum(axis=1)
        scale = np.divide(norms, expected, out=np.ones(len(own)), where=expected > 0.0)
        return np.where(np.isnan(own), scale[:, None] * usual, own)

    def state_dict(self) -> dict[str, Any]:
        rows = self.visited
        return {
            "rows": base64.b64encode(rows.astype("<i4").tobytes()).decode(),
            "own": base64.b64encode(self._own[rows].astype("<f4").tobytes()).decode(),
            "common": [value if value == value else None for value in self.common.tolist()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        rows = np.frombuffer(base64.b64decode(state["rows"]), "<i4")
        self._own[rows] = np.frombuffer(base64.b64decode(state["own"]), "<f4").reshape(-1, 3)
        self.common = np.array([np.nan if value is None else value for value in state["common"]])


def _means(found: np.ndarray) -> np.ndarray:
    """Of each column, without nan; nan where there is nothing else."""
    known = ~np.isnan(found)
    counts, sums = known.sum(axis=0), np.where(known, found, 0.0).sum(axis=0)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
