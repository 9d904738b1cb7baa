"""Builders for the learner's tests: a tiny model in exact fp64, and batches of made-up rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from whet.model.load import tiny_model
from whet.types import Batch, Group, Rollout, Sampling, Trace

VOCAB = 19


def exact_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Two layers, grouped heads, lively weights. transformers' norm rounds to fp32 on the way: here it does not."""
    model = tiny_model(
        VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, dtype=torch.float64, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.25)
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, LlamaRMSNorm):
                    norm = nn.RMSNorm(
                        child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64
                    )
                    norm.weight = child.weight
                    setattr(parent, name, norm)
    return model.to(dtype)


def encode(prompt_id: str) -> list[int]:
    """Prompts of different lengths: "p3" has 2 + 3 tokens."""
    n = int(prompt_id[1:])
    return [(5 * i + n) % (VOCAB - 2) + 2 for i in range(2 + n)]


def make_batch(
    rewards: Sequence[Sequence[float | None]],
    *,
    seed: int = 0,
    temperature: float = 1.0,
    weights: Sequence[float | None] | None = None,
    log_prob: float | None = None,
    **flags: object,
) -> Batch:
    """A group for each list of rewards; None is an unjudged rollout."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, row in enumerate(rewards):
        rollouts = []
        for i, reward in enumerate(row):
            n = int(rng.integers(2, 12))
            drawn = rng.normal(-2.5, 0.4, n)
            behaviour = drawn if log_prob is None else np.full(n, log_prob)
            trace = Trace(
                ids=rng.integers(2, VOCAB, n).astype(np.int32),
                log_probs=behaviour.astype(np.float32),
                versions=np.zeros(n, np.int32),
            )
            rollouts.append(
                Rollout(
                    prompt_id=f"p{g}",
                    group_id=g,
                    index=i,
                    phase="train",
                    sampling=Sampling(max_tokens=16, temperature=temperature),
                    length=n,
                    finish="stop",
                    first_version=0,
                    last_version=0,
                    verdict="unjudged" if reward is None else "right" if reward > 0.5 else "wrong",
                    score=reward,
                    reward=reward,
                    trace=trace,
                )
            )
        weight = weights[g] if weights is not None else None
        groups.append(Group(prompt_id=f"p{g}", group_id=g, rollouts=tuple(rollouts), weight=weight))
    return Batch(groups=tuple(groups), **flags)  # type: ignore[arg-type]


def gradient_of(learner: Any, batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient that the optimiser is handed in `step`; the weights stay."""
    grads: dict[str, Tensor] = {}

    def record(lr: float, norm: float) -> None:
        grads.update({n: p.grad.clone() for n, p in learner.optimizer.masters.items()})
        learner.optimizer.zero_grad()

    learner.optimizer.step = record
    report = learner.step(batch)
    del learner.optimizer.step
    return grads, report.metrics


@pytest.fixture
def model() -> nn.Module:
    return exact_model()


@pytest.fixture
def model_of() -> Callable[..., nn.Module]:
    return exact_model


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def encoder() -> Callable[[str], list[int]]:
    return encode
