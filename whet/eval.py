"""Accuracy on held-out prompts: requests to the engine, verdicts from the judge, numbers out.

Evaluation has its own limits and its own noise, never the stage's, and the same noise each time, so
that two evaluations differ by the weights alone. Unjudged rollouts count as wrong here: a model must not
look better because its answers cannot be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Protocol

import numpy as np

from whet.rollout.base import Engine
from whet.types import Prompt, Request, Rollout, Sampling


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A named set of prompts with the sampling it is evaluated under."""

    name: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: Sampling
    every: int


class Verdicts(Protocol):
    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]: ...


def evaluate(
    eval_set: EvalSet, engine: Engine, judge: Verdicts, seen: Callable[[Sequence[Rollout]], None] | None = None
) -> dict[str, float]:
    """eval/NAME/accuracy (pass@1), pass@n when n > 1, length, truncated, unjudged, and accuracy by level.

    Memory stays bounded: prompts go through in slices, each handed to `seen` once judged (traces and all).
    """
    rollouts: list[Rollout] = []
    slice_size = max(1, 2048 // eval_set.n)
    for start in range(0, len(eval_set.prompts), slice_size):
        part = eval_set.prompts[start : start + slice_size]
        requests = [
            Request(prompt_id=p.id, group_id=start + i, n=eval_set.n, sampling=eval_set.sampling, phase="eval")
            for i, p in enumerate(part)
        ]
        judged = judge.judge(engine.generate(requests))
        if seen is not None:
            seen(judged)
        rollouts += judged
    return eval_metrics(eval_set, rollouts)


def eval_metrics(eval_set: EvalSet, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """From judged rollouts to numbers; rollout.group_id is the prompt's place in the set."""
    right = np.zeros(len(eval_set.prompts), dtype=np.int64)
    for rollout in rollouts:
        right[rollout.group_id] += rollout.verdict == "right"
    rates = right / eval_set.n
    prefix = f"eval/{eval_set.name}"
    metrics = {
        f"{prefix}/accuracy": float(rates.mean()),
        f"{prefix}/length": float(np.mean([r.length for r in rollouts])),
        f"{prefix}/truncated": float(np.mean([r.finish == "length" for r in rollouts])),
        f"{prefix}/unjudged": float(np.mean([not r.judged for r in rollouts])),
    }
    if eval_set.n > 1:
        hits = [pass_at_k(eval_set.n, int(c), eval_set.n) for c in right]
        metrics[f"{prefix}/pass@{eval_set.n}"] = float(np.mean(hits))
    levels = [p.meta.get("level") for p in eval_set.prompts]
    for level in sorted({x for x in levels if x is not None}, key=lambda x: (str(type(x)), x)):
        metrics[f"{prefix}/level/{level}"] = float(
            np.mean([r for r, x in zip(rates, levels, strict=True) if x == level])
        )
    return metrics


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased chance that k of n rollouts hold a right one: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    assert 0 <= right <= n and 1 <= k <= n
    return 1.0 - comb(n - right, k) / comb(n, k)
