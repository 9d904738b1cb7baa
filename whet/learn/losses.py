"""The estimators: advantages from rewards, the loss of a token, and the weight of a token in the loss of a batch.

The learner adds up  sum over tokens of weight * (importance * surrogate + kl_coef * k3 - entropy_coef * entropy).
The weights are known before the first forward pass, so cutting a batch into micro-batches cannot change its gradient.
A surrogate returns the loss of each token, and whether clipping stopped its gradient. A new estimator is one function,
one line in ESTIMATORS, and its name in `config.Learn.estimator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Shapes: lp, lp_old, lp_behaviour, lp_reference, advantage: [R], one number per response token of a pack.
#         owner: [R] int64, the rollout (0, 1, ...) of the pack that a token belongs to.  low, high: clipping bounds.

# largest importance weight of a token: it bounds the variance, at a small bias of the few tokens
# above it
CAP = 2.0
TokenLoss = tuple[Tensor, Tensor]  # (loss [R], clipped [R] bool)
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], TokenLoss]
Groups = Sequence[np.ndarray]  # rewards of the judged rollouts of each group, of any size
Advantage = Callable[[Groups], list[np.ndarray]]


# ---- advantages
#
# A group whose rewards are all equal gets exactly 0 under every estimator with a group baseline; so does a batch of
# equal rewards under REINFORCE++. Subtracting a rounded mean would leave 1e-17, which AdamW turns into a full step.


def _zero_without_spread(
    rewards: np.ndarray, advantage: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    r = np.asarray(rewards, np.float64)
    return np.zeros(r.size) if r.size < 2 or r.min() == r.max() else advantage(r)


def reinforce(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i: no baseline (Williams 1992). Only this estimator learns from a group without spread on its own."""
    return [np.asarray(rewards, np.float64).copy() for rewards in groups]


def rloo(groups: Groups) -> list[np.ndarray]:
    """A_i = r_i - mean of the other rewards of the group (Kool et al. 2019; Ahmadian et al. 2024).

    >>> rloo([np.array([1.0, 0.0, 0.0])])[0].tolist()
    [1.0, -0.5, -0.5]
    """
    return [
        _zero_without_spread(rewards, lambda r: r - (r.sum() - r) / (r.size - 1))
        for rewards in groups
    ]


def grpo(groups: Groups, eps: float = 1e-6) -> list[np.ndarray]:
    """A_i = (r_i - mean) / (std + eps), std with n - 1 under the root.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, prints no correction; the sample deviation and eps = 1e-6 are those
    of verl. TRL differs in eps only.
    """
    return [
        _zero_without_spread(rewards, lambda r: (r - r.mean()) / (r.std(ddof=1) + eps))
        for rewards in groups
    ]


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
    """Added to the reward of a long response: 0 up to limit - window tokens, then linearly down to -1 at the limit. Yu
    et al. 2025 (DAPO), "soft overlong punishment". A window of 0 turns it off."""
    return max(min((limit - window - length) / window, 0.0), -1.0) if window > 0 else 0.0


# ---- losses


def plain(
    lp: Tensor, lp_old: Tensor, advantage: Tensor, owner: Tensor, low: float, high: float
) -> TokenLoss:
    """-A lp (REINFORCE). Nothing is clipped; more than one update per batch is off-policy without a correction."""
    return -advantage * lp, torch.zeros_like(lp, dtype=torch.bool)


def clipped(
    lp: Tensor, lp_old: Tensor, advantage: Tensor, owner: Tensor, low: float, high: float
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(lp - lp_old) (Schulman et al. 2017; two bounds as in DAPO)."""
    return _clip(torch.exp(lp - lp_old), advantage, low, high)


def gspo(
    lp: Tensor, lp_old: Tensor, advantage: Tensor, owner: Tensor, low: float, high: float
) -> TokenLoss:
    """The clipped surrogate with one ratio per rollout, s = exp(mean over its tokens of lp - lp_old).

    Zheng et al. 2025 (GSPO), in the token form of the paper: s_t = stop_grad(s) * exp(lp_t - stop_grad(lp_t)), so that
    under the `sequence` aggregate the gradient is s A (1/n) sum grad lp_t. s stays far closer to 1 than the ratio of a
    token: the paper clips at 3e-4 and 4e-4.
    """
    log_ratio = (lp - lp_old).detach()
    rollouts = int(owner.max()) + 1
    total = log_ratio.new_zeros(rollouts).index_add_(0, owner, log_ratio)
    mean = total / torch.bincount(owner, minlength=rollouts).clamp(min=1)
    return _clip(torch.exp(lp - lp.detach() + mean[owner]), advantage, low, high)


def cispo(
    lp: Tensor, lp_old: Tensor, advantage: Tensor, owner: Tensor, low: float, high: float
) -> TokenLoss:
    """-stop_grad(clip(r, 1 - low, 1 + high)) A lp (MiniMax-M1 2025, CISPO): no token ever loses its gradient. The paper
    leaves the lower bound open, which is low >= 1 here."""
    ratio = torch.exp(lp - lp_old).detach()
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    return -bounded * advantage * lp, bounded != ratio


def importance(lp_old: Tensor, lp_behaviour: Tensor) -> Tensor:
    """w = stop_grad(min(exp(lp_old - lp_behaviour), CAP)), truncated importance sampling (Yao et al. 2025). It corrects
    for rollouts drawn with slightly other numerics, or by older weights, than the learner's."""
    return torch.exp(lp_old - lp_behaviour).clamp(max=CAP).detach()


def k3(lp: Tensor, lp_reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = lp_reference - lp: estimates KL(policy, reference), never negative (Schulman 2020)."""
    difference = lp_reference - lp
    return torch.expm1(difference) - difference


def token_weights(
    aggregate: str,
    lengths: Sequence[np.ndarray],
    limits: Sequence[np.ndarray],
    group_weights: Sequence[float | None],
) -> list[np.ndarray]:
    """The weight of a token of each rollout, so that loss = sum over all tokens of weight * token loss.

    lengths[g][i] is the number of tokens of judged rollout i of group g, limits[g][i] the limit it was written under.
    loss = sum_g w_g agg_g, with w_g = group_weights[g], or 1 / number of groups where that is None. For n rollouts,
    - sequence (GRPO): agg_g = 1/n sum_i mean_t l. Groups of 2 and of 8 weigh the same.
    - group_tokens: agg_g = the mean over all tokens of the group.
    - constant (Dr.GRPO): agg_g = 1/n sum_i sum_t l / limit_i: no bias towards short right and long wrong answers.
    - batch_tokens (DAPO as released): the mean over all tokens of the batch, each counted w_g times. Only here a group
      weighs by its size, and only the ratios of w_g matter.
    """
    shares = [1.0 / len(lengths) if weight is None else weight for weight in group_weights]
    every = sum(int(n.sum()) * w for n, w in zip(lengths, shares, strict=True))

    weigh: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
        "sequence": lambda n, limit, w: w / (n.size * n),
        "group_tokens": lambda n, limit, w: np.full(n.size, w / n.sum()),
        "constant": lambda n, limit, w: w / (n.size * limit),
        "batch_tokens": lambda n, limit, w: np.full(n.size, w / every),
    }
    groups = zip(lengths, limits, shares, strict=True)
    return [weigh[aggregate](*group) if group[0].size else np.zeros(0) for group in groups]


def _clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    free = ratio * advantage
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage
    return -torch.minimum(free, bounded), bounded < free


class Estimator(NamedTuple):
    """How a value of `learn.estimator` trains; GSPO needs far smaller learn.clip_low and learn.clip_high."""

    advantage: Advantage
    surrogate: Surrogate
    aggregate: str  # how the paper, or its released code, makes one number of the token losses


# REINFORCE and RLOO sum the log-probs of a response; `constant` is that sum up to a factor. With one update per batch
# the ratio is 1, and the clipped surrogate has the gradient of the plain one.
ESTIMATORS = {
    "reinforce": Estimator(reinforce, plain, "constant"),
    "rloo": Estimator(rloo, clipped, "constant"),
    "grpo": Estimator(grpo, clipped, "sequence"),
    "dr_grpo": Estimator(dr_grpo, clipped, "constant"),
    "dapo": Estimator(grpo, clipped, "batch_tokens"),
    "reinforce_pp": Estimator(reinforce_pp, clipped, "batch_tokens"),
    "gspo": Estimator(grpo, gspo, "sequence"),
    "cispo": Estimator(grpo, cispo, "group_tokens"),
}
