"""What the scores of right and wrong responses are like: the three numbers of a prompt that sigma of eq. 21 needs.

CurES (arXiv 2510.01037) takes them from a probe of every prompt, one backward pass a response. OURS: from the rollouts
that train anyway, averaged over a prompt's visits, and over all prompts for those of which too little is known.
`sigma.py` feeds it what the learner reports. Averages only: nothing here knows a pass rate, and no vector is kept.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from whet.curriculum.progress import SPAN

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
