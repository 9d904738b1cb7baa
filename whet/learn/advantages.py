"""Advantages from rewards: one function per estimator, on numpy arrays.

The learner calls them through the table in `losses.py`. Each takes the rewards of all groups of a batch (judged
rollouts only, groups of any size) and returns one array per group. A group whose rewards are all equal gets exactly 0
under every estimator with a group baseline; so does a batch of equal rewards under REINFORCE++. Subtracting a rounded
mean would leave 1e-17 instead, which AdamW turns into a full step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Groups = Sequence[np.ndarray]
Advantage = Callable[[Groups], list[np.ndarray]]


def reinforce(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i: no baseline (Williams 1992). Only this estimator learns from a group without spread on its own."""
    return [np.asarray(rewards, np.float64).copy() for rewards in groups]


def rloo(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i - mean of the other rewards of the group (Kool et al. 2019; Ahmadian et al. 2024).

    >>> rloo([np.array([1.0, 0.0, 0.0])])[0].tolist()
    [1.0, -0.5, -0.5]
    """
    return [_zero_without_spread(rewards, lambda r: r - (r.sum() - r) / (r.size - 1)) for rewards in groups]


def grpo(groups: Groups, eps: float = 1e-6) -> list[np.ndarray]:
    """A_i = (r_i - mean) / (std + eps), std with n - 1 under the root.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, prints no correction; the sample deviation and eps = 1e-6 are those
    of verl. TRL differs in eps only.
    """
    return [_zero_without_spread(rewards, lambda r: (r - r.mean()) / (r.std(ddof=1) + eps)) for rewards in groups]


def dr_grpo(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2): no division by std."""
    return [_zero_without_spread(rewards, lambda r: r - r.mean()) for rewards in groups]


def reinforce_pp(groups: Groups, eps: float = 1e-8) -> list[np.ndarray]:
    """A_i = (r_i - mean) / (std + eps), mean and std (n - 1 under the root) over all rollouts of the batch.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the baseline is the batch, not the group, so a group without spread
    learns too, from how it compares with the others. verl whitens over tokens; here it is over rollouts (OURS), so
    that long responses do not set baseline and scale.

    >>> [a.tolist() for a in reinforce_pp([np.array([1.0, 0.0]), np.array([0.0, 0.0])], eps=0.0)]
    [[1.5, -0.5], [-0.5, -0.5]]
    """
    if not groups:
        return []
    (whitened,) = grpo([np.concatenate(groups)], eps)
    return np.split(whitened, np.cumsum([np.size(rewards) for rewards in groups])[:-1])


def overlong_penalty(length: int, limit: int, window: int) -> float:
    """Added to the reward of a long response: 0 up to limit - window tokens, then linearly down to -1 at the limit.

    Yu et al. 2025 (DAPO), "soft overlong punishment". A window of 0 turns it off.

    >>> [overlong_penalty(n, limit=100, window=20) for n in (80, 90, 100)]
    [0.0, -0.5, -1.0]
    """
    return max(min((limit - window - length) / window, 0.0), -1.0) if window > 0 else 0.0


def _zero_without_spread(rewards: np.ndarray, advantage: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    r = np.asarray(rewards, np.float64)
    return np.zeros(r.size) if r.size < 2 or r.min() == r.max() else advantage(r)
