"""A batch as the learner wants it: judged rollouts with their tokens, advantage and weight in the loss.

The learner calls `make_samples` once a step. What cannot be trained on exactly (no trace, tokens drawn greedily or
from a cut-down distribution) is refused here. numpy only; the model comes later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from whet.errors import WhetError
from whet.learn.advantages import overlong_penalty
from whet.learn.losses import Estimator, token_weights
from whet.types import Batch, Key, Rollout, Trace

# ---- sums
#
# What a pass over a batch adds up for its metrics; the learner makes one for each update.


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of a pass; they stay on the device until the metrics are asked for."""

    loss: Tensor | float = 0.0
    mismatch_max: Tensor | float = 0.0
    totals: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, loss: Tensor, parts: Mapping[str, Tensor]) -> None:
        self.loss = self.loss + loss.detach()
        self.tokens += parts["mismatch"].numel()
        self.mismatch_max = torch.clamp(parts["mismatch"].max(), min=self.mismatch_max)
        for name, values in parts.items():
            total = values.detach().sum(dtype=torch.float64)
            self.totals[name] = self.totals[name] + total if name in self.totals else total

    def join(self, other: Sums, share: float) -> None:
        """Another pass, whose loss counts for so much."""
        self.loss = self.loss + share * other.loss
        self.tokens += other.tokens
        self.mismatch_max = torch.clamp(torch.as_tensor(other.mismatch_max), min=self.mismatch_max)
        self.totals = {name: total + self.totals.get(name, 0.0) for name, total in other.totals.items()}

    def metrics(self) -> dict[str, float]:
        means = {f"learn/{name}": float(total) / self.tokens for name, total in self.totals.items()}
        means["learn/importance_mean"] = means.pop("learn/importance")
        return {"learn/loss": float(self.loss), "learn/mismatch_max": float(self.mismatch_max), **means}


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout to train on."""

    key: Key
    prompt: np.ndarray
    """One and the same for the samples of a group."""
    response: np.ndarray
    behaviour: np.ndarray
    """Log-probs recorded when the tokens were drawn."""
    temperature: float
    advantage: float
    weight: float
    """Of each of its tokens in the loss of the batch."""


def make_samples(
    batch: Batch,
    encode: Callable[[str], Sequence[int]],
    estimator: Estimator,
    aggregate: str,
    overlong: int = 0,
) -> tuple[list[Sample], int]:
    """(samples, groups with signal). Unjudged rollouts count for nothing, groups without signal in the weights."""
    judged = [[r for r in group.judged if r.length > 0] for group in batch.groups]
    rewards = [np.array([_reward(r, overlong) for r in rollouts]) for rollouts in judged]
    lengths = [np.array([r.length for r in rollouts]) for rollouts in judged]
    limits = [np.array([r.sampling.max_tokens for r in rollouts]) for rollouts in judged]
    if aggregate == "batch_tokens" and len({len(rollouts) for rollouts in judged}) > 1:
        message = "larger groups weigh more under batch_tokens; set learn.aggregate to group_tokens to weigh all alike"
        warnings.warn(message, stacklevel=2)
    advantages = estimator.advantage(rewards)
    weights = token_weights(aggregate, lengths, limits, [group.weight for group in batch.groups])
    samples = []
    for group, rollouts, a, w in zip(batch.groups, judged, advantages, weights, strict=True):
        prompt = np.asarray(encode(group.prompt_id), np.int64) if rollouts else np.empty(0, np.int64)
        samples += [_sample(r, prompt, float(a[i]), float(w[i])) for i, r in enumerate(rollouts)]
    return samples, sum(bool(a.any()) for a in advantages)


def minibatches(samples: list[Sample], count: int) -> list[tuple[list[Sample], list[int]]]:
    """So many parts of about as many samples, one after the other, and their places; fewer where there are fewer
    samples. Weights are multiplied by the number of parts: each part's loss stands for the whole batch's."""
    count = max(1, min(count, len(samples)))
    places = [part.tolist() for part in np.array_split(np.arange(len(samples)), count)]
    if count == 1:
        return [(samples, places[0])]
    return [([replace(samples[i], weight=count * samples[i].weight) for i in part], part) for part in places]


def made_up(tokens: int, longest: int, share: bool = False) -> list[Sample]:
    """Samples that feed a model so many tokens in all, at most `longest` each; share: eight of them have a prompt in
    common, which is fed once.

    >>> [len(s.prompt) + s.response.size - 1 for s in made_up(600, 1024)]
    [256, 256, 88]
    >>> [(len(s.prompt), s.response.size - 1) for s in made_up(600, 1024, share=True)][-2:]
    [(64, 64), (12, 12)]
    """
    many, half = (8, min(longest, 128) // 2) if share else (1, min(longest, 256) // 2)
    sizes = [(half, half, i // many) for i in range(tokens // (half + many * half) * many)]
    tokens %= half + many * half
    while tokens > 0:
        prompt = min(half, -(-tokens // 2))
        sizes.append((prompt, min(half, tokens - prompt), len(sizes)))
        tokens -= sum(sizes[-1][:2])
    zeros = np.zeros(half + 1, np.int32), np.zeros(half + 1, np.float32)
    return [
        Sample((0, i), _named(family, n), zeros[0][: own + 1], zeros[1][: own + 1], 1.0, 1.0, 1.0)
        for i, (n, own, family) in enumerate(sizes)
    ]


def _named(number: int, length: int) -> np.ndarray:
    """A prompt of two kinds of tokens, another for each number."""
    return np.array([number >> place & 1 for place in range(length)])


def _reward(rollout: Rollout, overlong: int) -> float:
    assert rollout.reward is not None, "a judged rollout has a reward"
    return rollout.reward + overlong_penalty(rollout.length, rollout.sampling.max_tokens, overlong)


def _sample(rollout: Rollout, prompt: np.ndarray, advantage: float, weight: float) -> Sample:
    trace, how = _trace(rollout), rollout.sampling
    if how.temperature <= 0 or how.top_k > 0 or how.top_p < 1:
        raise WhetError(
            f"Rollout {rollout.key} was drawn at temperature {how.temperature}, top_k {how.top_k}, top_p {how.top_p}; "
            "training needs a temperature above 0, top_k 0 and top_p 1."
        )
    return Sample(rollout.key, prompt, trace.ids, trace.log_probs, how.temperature, advantage, weight)


def _trace(rollout: Rollout) -> Trace:
    if rollout.trace is None:
        raise WhetError(f"Rollout {rollout.key} comes without its trace; the learner needs token ids and log-probs.")
    assert len(rollout.trace.ids) == rollout.length == len(rollout.trace.log_probs)
    return rollout.trace
