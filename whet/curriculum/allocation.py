"""CurES's formulas (arXiv 2510.01037) for dividing rollouts among prompts; `cures.py` calls them.

Neyman's rule gives each prompt rollouts in proportion to sigma, the standard deviation of one rollout's gradient.
sigma follows from the pass rate alone (`sigma_of`), or from the scores of right and wrong responses as well
(`sigma_gradient`, whose three moments `Moments` estimates). Pure maths: nothing here draws or counts rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from whet.curriculum.base import SPAN, Saved, rows_from_json, rows_to_json
from whet.errors import WhetError

# Shapes: scores are [responses, width]; moments are [prompts, 3] with the columns e1, e0, gap_sq.


def largest_remainder(shares: Sequence[float], total: int, minimum: int = 0) -> list[int]:
    """Whole numbers in proportion to `shares`, each at least `minimum`, that sum to exactly `total`.

    With sigmas as shares this is Neyman's rule, n_i = total * sigma_i / sum of sigma (eq. 20), which minimises the sum
    of sigma_i^2 / n_i. OURS are the minimum and the exact sum: the paper uses real numbers, and its released code
    rounds each of them and loses rollouts.

    Shares below the minimum get the minimum, and the rest is divided among the others (which also minimises
    sum share_i^2 / n_i under n_i >= minimum). Each then gets the floor of its part; what is left goes one by one to
    the largest fractions, ties to the lower index (Hamilton's method). Exact: rationals, no floats. Shares that are
    all zero count as equal.

    >>> largest_remainder([0.5, 0.433013, 0.433013, 0.3, 0.0], 40, minimum=2)
    [11, 10, 10, 7, 2]
    """
    if not all(math.isfinite(share) and share >= 0 for share in shares):
        raise ValueError(f"shares must be finite and not negative, got {list(shares)}")
    if total < minimum * len(shares) or (total > 0 and not shares):
        wanted = f"{len(shares)} prompts with at least {minimum} each; give more rollouts or take fewer prompts"
        raise WhetError(f"{total} rollouts cannot be divided among {wanted}.")
    exact = [Fraction(float(share)) for share in shares]
    if not any(exact):
        exact = [Fraction(1)] * len(exact)
    held: set[int] = set()  # those that get the minimum
    below: set[int] | None = None
    while below is None or below:
        held |= below or set()
        left = total - minimum * len(held)
        # never 0: never all are held
        weight = sum(share for i, share in enumerate(exact) if i not in held)
        parts = [
            Fraction(minimum) if i in held else share * left / weight
            for i, share in enumerate(exact)
        ]
        below = {i for i, part in enumerate(parts) if part < minimum}
    whole = [math.floor(part) for part in parts]
    by_fraction = sorted(range(len(parts)), key=lambda i: (whole[i] - parts[i], i))
    for i in by_fraction[: total - sum(whole)]:
        whole[i] += 1
    return whole


def sigma_of(p: ArrayLike) -> np.ndarray:
    """sqrt(p (1 - p)), the spread of a verdict at pass rate p.

    It has two uses. sqrt(2 delta) times it bounds what a trust-region step on the prompt can gain (eq. 11). And it is
    sigma of eq. 21 if every response has a score of norm one, and right and wrong responses have the same mean.
    """
    p = np.asarray(p, np.float64)
    return np.sqrt(p * (1.0 - p))


def sigma_gradient(p: ArrayLike, e1: ArrayLike, e0: ArrayLike, gap_sq: ArrayLike) -> np.ndarray:
    """sigma of eq. 21, the standard deviation of one rollout's gradient, from the scores s = grad log pi(y | x):

        sigma^2 = p (1-p)^2 e1 + p^2 (1-p) e0 - p^2 (1-p)^2 gap_sq

    e1 = E[|s|^2 | right], e0 = E[|s|^2 | wrong], gap_sq = |E[s | right] - E[s | wrong]|^2. Estimates of these can give
    a negative square, which counts as zero. Neyman's rule uses ratios of sigmas, so the scale of s does not matter.

    >>> sigma_gradient([0.25, 0.25], e1=[1.0, 4.0], e0=1.0, gap_sq=[0.0, 1.0]).round(6).tolist()
    [0.433013, 0.757772]
    """
    p = np.asarray(p, np.float64)
    q = 1.0 - p
    square = p * q * (q * np.asarray(e1) + p * np.asarray(e0) - p * q * np.asarray(gap_sq))
    return np.sqrt(np.maximum(square, 0.0))


# ---- moments of the scores

# Weight of one visit, a handful of responses, in the averages of its prompt, which start at the common ones. OURS:
# where prompts are alike, noise then costs little; where they differ, most of it is seen (docs/cures.md).
RATE = 0.3
COMMON_RATE = 2.0 / (SPAN + 1)  # weight of one update in the averages over all prompts. OURS


def moments_of(right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """(e1, e0, gap_sq) of the scores of right and of wrong responses; nan for what they cannot tell.

    e1 and e0 are mean squared norms. gap_sq is the squared distance of the two means without its bias: a mean of n
    scores is off by tr(C) / n in the mean square, C their covariance, so E|m1 - m0|^2 = gap_sq + tr(C1) / n1 +
    tr(C0) / n0. The last two are subtracted, with tr(C) estimated by sum |s - m|^2 / (n - 1), which takes two scores
    of each class. The result may be negative; it is clipped only where it is read, since clipping before averaging
    would bias it again.

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
        spreads = [
            np.sum((s - m) ** 2) / (len(s) - 1) / len(s)
            for s, m in zip(classes, means, strict=True)
        ]
        found[2] = between @ between - sum(spreads)
    return np.where(np.isfinite(found), found, np.nan)


class Moments(Saved):
    """The moments of each prompt, by row. A checkpoint holds about 22 bytes per visited prompt.

    The paper takes them from a probe of every prompt, with one backward pass per response. OURS: from the rollouts
    that train anyway, averaged over the visits of a prompt, and over all prompts where too little is known.
    """

    state_names = ("common",)

    def __init__(self, prompts: int):
        self.common = np.full(3, np.nan)  # over all prompts; nan where nothing is known
        self._own = np.empty((prompts, 3), np.float32)
        self.clear()

    def clear(self) -> None:
        """Forget every prompt. The common averages stay, since they belong to the policy."""
        self._own[:] = np.nan

    @property
    def visited(self) -> np.ndarray:
        """Rows of which something is known (no prompt has a gap without norms)."""
        return np.flatnonzero(~np.isnan(self._own[:, :2]).all(axis=1))

    def update(self, groups: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Learn from an update's groups: (row of the prompt, scores of its right responses, of its wrong ones)."""
        visits = [(row, moments_of(right, wrong)) for row, right, wrong in groups]
        if not visits:
            return
        found = np.array([moments for _, moments in visits])
        known = ~np.isnan(found)
        counts = known.sum(axis=0)
        sums = np.where(known, found, 0.0).sum(axis=0)
        means = np.divide(sums, counts, out=np.full(3, np.nan), where=counts > 0)
        moved = self.common + COMMON_RATE * (means - self.common)
        self.common = np.where(
            np.isnan(means), self.common, np.where(np.isnan(self.common), means, moved)
        )
        for row, moments in visits:
            before = self._full(np.array([row]))[0]
            self._own[row] = np.where(
                np.isnan(moments), self._own[row], before + RATE * (moments - before)
            )

    def of(self, rows: np.ndarray) -> np.ndarray:
        """[rows, 3]: e1, e0, gap_sq, none of them negative."""
        return np.maximum(self._full(rows), 0.0)

    @property
    def usual(self) -> np.ndarray:
        """The common averages, completed: an unseen class is like the other, an unseen gap is 0, norms start at 1."""
        right, wrong, gap = (None if np.isnan(value) else value for value in self.common.tolist())
        norm = next((value for value in (right, wrong) if value is not None), 1.0)
        return np.array(
            [norm if right is None else right, norm if wrong is None else wrong, gap or 0.0]
        )

    def _full(self, rows: np.ndarray) -> np.ndarray:
        """What a prompt lacks is the common value, times the ratio of its known norms to the common ones. Scores grow
        with the length of a response: the gap of long ones would swallow the sigma of a short one."""
        own = self._own[rows].astype(np.float64)
        usual = self.usual
        known = ~np.isnan(own[:, :2])
        norms = np.where(known, own[:, :2], 0.0).sum(axis=1)
        expected = (known * usual[:2]).sum(axis=1)
        scale = np.divide(norms, expected, out=np.ones(len(own)), where=expected > 0.0)
        return np.where(np.isnan(own), scale[:, None] * usual, own)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **rows_to_json(self.visited, {"own": self._own})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.clear()
        rows_from_json(state, {"own": self._own})
