"""From rewards to advantages: one function an estimator, on numpy arrays.

The learner calls them through the table in `losses.py`. Each takes the rewards of all groups of a batch (arrays of
any sizes, judged rollouts only) and gives an array a group. Groups whose rewards are all the same get exactly 0
under every estimator with a group baseline, and so does a whole batch of equal rewards under REINFORCE++: subtracting a
rounded mean would leave 1e-17, which AdamW turns into a full step. Rewards stay rewards: nothing here changes them but
`overlong_penalty`, which says what to add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Groups = Sequence[np.ndarray]
Advantage = Callable[[Groups], list[np.ndarray]]


def reinforce(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i: no baseline (Williams 1992). The only one that learns from a group without spread."""
    return [np.asarray(rewards, np.float64).copy() for rewards in groups]


def rloo(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i - mean of the other rewards of the group (Kool et al. 2019; Ahmadian et al. 2024).

    >>> rloo([np.array([1.0, 0.0, 0.0])])[0].tolist()
    [1.0, -0.5, -0.5]
    """
    return [_with_spread(rewards, _leave_one_out) for rewards in groups]


def grpo(groups: Groups, eps: float = 1e-6) -> list[np.ndarray]:
    """A_i = (r_i - mean) / (std + eps), std with n - 1 below the root.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, prints no correction; the sample deviation and eps = 1e-6 are
    verl's, TRL's differs in eps alone.
    """
    return [_with_spread(rewards, lambda r: (r - r.mean()) / (r.std(ddof=1) + eps)) for rewards in groups]


def dr_grpo(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2): no division by std."""
    return [_with_spread(rewards, lambda r: r - r.mean()) for rewards in groups]


def reinforce_pp(groups: Groups, eps: float = 1e-8) -> list[np.ndarray]:
    """A_i = (r_i - mean) / (std + eps), mean and std (n - 1 below the root) over all rollouts of the batch.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the batch is the baseline, not the group, so a group without
    spread does learn, from how it compares with the others. verl's form whitens over tokens; here it is over rollouts
    (OURS), so that long responses do not set baseline and scale.

    >>> [a.tolist() for a in reinforce_pp([np.array([1.0, 0.0]), np.array([0.0, 0.0])], eps=0.0)]
    [[1.5, -0.5], [-0.5, -0.5]]
    """
    sizes = [np.size(rewards) for rewards in groups]
    whitened = grpo([np.concatenate(groups)], eps)[0] if groups else np.zeros(0)
    return np.split(whitened, np.cumsum(sizes)[:-1]) if groups else []


def overlong_penalty(length: int, limit: int, window: int) -> float:
    """What DAPO adds to the reward of a long response: 0 up to limit - window, then linearly down to -1 at the limit.

    Yu et al. 2025, "soft overlong punishment". window 0 is off.

    >>> [overlong_penalty(n, limit=100, window=20) for n in (80, 90, 100)]
    [0.0, -0.5, -1.0]
    """
    if window <= 0:
        return 0.0
    return max(min((limit - window - length) / window, 0.0), -1.0)


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    return rewards - (rewards.sum() - rewards) / (rewards.size - 1)


def _with_spread(rewards: np.ndarray, advantage: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    r = np.asarray(rewards, np.float64)
    if r.size < 2 or r.min() == r.max():
        return np.zeros(r.size)
    return advantage(r)
