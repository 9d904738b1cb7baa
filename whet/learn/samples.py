"""A batch in the form that the learner needs: judged rollouts with their tokens, advantage and weight in the loss.

The learner calls `make_samples` once per step, and sums up the metrics of its passes in `Sums`. What cannot be trained
on exactly (no trace, tokens drawn greedily or from a truncated distribution) is refused here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from whet.errors import WhetError
from whet.learn.losses import Estimator, overlong_penalty, token_weights
from whet.types import Batch, Key, Rollout

Encode = Callable[[str], Sequence[int]]  # the id of a prompt to its token ids

# Shapes: P tokens of a prompt, R tokens of its response; the metrics of a pass are [tokens of a pack].


@dataclass(slots=True)
class Sample:
    """One rollout to train on. The learner's step, which made it, may fill in what it computes."""

    key: Key
    prompt: np.ndarray  # [P] ids; the same object for all samples of a group
    response: np.ndarray  # [R] ids
    behaviour: np.ndarray  # [R] log-probs recorded when the tokens were drawn
    temperature: float
    advantage: float
    weight: float  # weight of each of its tokens in the loss of the batch
    # [R] log-probs under the policy before the first update; None if the batch takes one
    old: Tensor | None = None
    # optimiser step: the current pass gives them
    reference: Tensor | None = None  # [R] log-probs under the reference


def make_samples(
    batch: Batch, encode: Encode, estimator: Estimator, aggregate: str, overlong: int = 0
) -> tuple[list[Sample], int]:
    """(samples, groups with signal). Unjudged rollouts are left out; groups without signal count in the weights."""
    judged = [[r for r in group.judged if r.length > 0] for group in batch.groups]
    lengths = [np.array([r.length for r in rollouts]) for rollouts in judged]
    limits = [np.array([r.sampling.max_tokens for r in rollouts]) for rollouts in judged]
    rewards = [
        np.array([r.reward for r in rollouts], np.float64)
        + [overlong_penalty(r.length, r.sampling.max_tokens, overlong) for r in rollouts]
        for rollouts in judged
    ]
    if aggregate == "batch_tokens" and len({len(rollouts) for rollouts in judged}) > 1:
        message = "larger groups weigh more under batch_tokens; set learn.aggregate to group_tokens to weigh all alike"
        warnings.warn(message, stacklevel=2)
    advantages = estimator.advantage(rewards)
    weights = token_weights(aggregate, lengths, limits, [group.weight for group in batch.groups])
    samples = []
    for group, rollouts, a, w in zip(batch.groups, judged, advantages, weights, strict=True):
        prompt = (
            np.asarray(encode(group.prompt_id), np.int64) if rollouts else np.empty(0, np.int64)
        )
        samples += [_sample(r, prompt, float(a[i]), float(w[i])) for i, r in enumerate(rollouts)]
    return samples, sum(bool(a.any()) for a in advantages)


def _sample(rollout: Rollout, prompt: np.ndarray, advantage: float, weight: float) -> Sample:
    trace = rollout.trace
    how = rollout.sampling
    if trace is None:
        raise WhetError(
            f"Rollout {rollout.key} comes without its trace; the learner needs token ids and log-probs."
        )
    assert len(trace.ids) == rollout.length == len(trace.log_probs)
    if how.temperature <= 0 or how.top_k > 0 or how.top_p < 1:
        raise WhetError(
            f"Rollout {rollout.key} was drawn at temperature {how.temperature}, top_k {how.top_k}, top_p {how.top_p}; "
            "training needs a temperature above 0, top_k 0 and top_p 1."
        )
    return Sample(
        rollout.key, prompt, trace.ids, trace.log_probs, how.temperature, advantage, weight
    )


def minibatches(samples: list[Sample], count: int) -> list[list[Sample]]:
    """`count` parts of about equal size, in order. It scales the samples' weights: a part's gradient has full size."""
    for sample in samples:
        sample.weight *= count
    return [[samples[i] for i in part] for part in np.array_split(np.arange(len(samples)), count)]


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of a pass; they stay on the device until the metrics are read."""

    loss: Tensor | float = 0.0
    mismatch_max: Tensor | float = 0.0
    totals: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, loss: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Add the loss of a pack, and its metrics with one number per token."""
        totals = {name: values.detach().sum(dtype=torch.float64) for name, values in parts.items()}
        self.join(Sums(loss.detach(), parts["mismatch"].max(), totals, parts["mismatch"].numel()))

    def join(self, other: Sums, share: float = 1.0) -> None:
        """Add another pass; its loss counts by `share`."""
        self.loss = self.loss + share * other.loss
        self.tokens += other.tokens
        self.mismatch_max = torch.clamp(torch.as_tensor(other.mismatch_max), min=self.mismatch_max)
        self.totals |= {
            name: total + self.totals.get(name, 0.0) for name, total in other.totals.items()
        }

    def as_numbers(self) -> Sums:
        """The same off the device, so that it can be sent."""
        totals = {name: total.double().cpu() for name, total in self.totals.items()}
        return Sums(
            float(self.loss), torch.as_tensor(self.mismatch_max).double().cpu(), totals, self.tokens
        )

    def metrics(self) -> dict[str, float]:
        means = {f"learn/{name}": float(total) / self.tokens for name, total in self.totals.items()}
        means["learn/importance_mean"] = means.pop("learn/importance")
        return {
            "learn/loss": float(self.loss),
            "learn/mismatch_max": float(self.mismatch_max),
            **means,
        }
