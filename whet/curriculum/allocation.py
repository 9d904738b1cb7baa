"""CurES's two formulas (arXiv 2510.01037): which prompts to draw, and how to divide rollouts among those drawn.

Pure maths of pass rates and standard deviations, called by `cures.py`. Nothing here knows a prompt, counts
anything or draws: pass rates come from `posterior.py`, whole numbers from `budget.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from whet.curriculum.budget import largest_remainder


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
