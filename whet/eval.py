"""Accuracy on held-out prompts: requests to the engine, verdicts from the judge, numbers out.

Evaluation has its own limits and its own noise, never the stage's, and the same noise each time, so
that two evaluations differ by the weights alone. Unjudged rollouts count as wrong here: a model must not
look better because its answers cannot be judged. `loop` calls it for a line of metrics, `whet eval` for all there
is to say (`full`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from whet.intervals import mean_interval
from whet.rollout.base import Engine
from whet.types import Prompt, Request, Rollout, Sampling
from whet.votes import maj_at_k, pass_at_k

SLICE = 2048
"""Rollouts that are generated and judged at once: bounds memory. Each slice waits for its longest response."""
VOTES = 64
"""maj@k is exact, and its sum grows steeply with the rollouts; of more than so many, only maj@n is given."""

Told = Callable[[int, int], None]
"""Called with (rollouts finished, rollouts in all)."""


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
    eval_set: EvalSet,
    engine: Engine,
    judge: Verdicts,
    seen: Callable[[Sequence[Rollout]], None] | None = None,
    *,
    told: Told | None = None,
    full: bool = False,
) -> dict[str, float]:
    """`eval_metrics` of the set.

    Memory stays bounded: prompts go through in slices, each handed to `seen` once judged (traces and all).
    """
    requests = [
        Request(prompt_id=p.id, group_id=i, n=eval_set.n, sampling=eval_set.sampling, phase="eval")
        for i, p in enumerate(eval_set.prompts)
    ]
    rollouts: list[Rollout] = []
    for judged in judged_slices(requests, engine, judge, told):
        if seen is not None:
            seen(judged)
        rollouts += (replace(r, trace=None) for r in judged)
    return eval_metrics(eval_set, rollouts, full=full)


def judged_slices(
    requests: Sequence[Request], engine: Engine, judge: Verdicts, told: Told | None = None
) -> Iterator[list[Rollout]]:
    """The requests' rollouts, generated and judged some at a time, in order."""
    total, done = sum(r.n for r in requests), 0
    size = max(1, SLICE // max((r.n for r in requests), default=1))

    def finished(count: int) -> None:
        if told is not None:
            told(done + count, total)

    for start in range(0, len(requests), size):
        judged = judge.judge(engine.generate(requests[start : start + size], finished))
        yield judged
        done += len(judged)


def eval_metrics(eval_set: EvalSet, rollouts: Sequence[Rollout], *, full: bool = False) -> dict[str, float]:
    """eval/NAME/MEASURE from judged rollouts; rollout.group_id is the prompt's place in the set.

    Always: accuracy (the mean over prompts of right / n: pass@1, avg@n) with accuracy_low and accuracy_high (95%,
    `mean_interval`), length (mean), truncated, unjudged, level/L (accuracy of the prompts of level L), and for n > 1
    pass@n and maj@n.

    `full` adds prompts, n, pass@k and maj@k for k = 1, 2, 4, ..., n, both with _low and _high, length_right,
    length_wrong, length_p50, _p90 and _p99, no_answer (judged, but the judge read no answer), level_low/L and
    level_high/L. maj@k and no_answer are left out where the judge names no answers: some rollout is right, and none
    has a `final`.
    """
    groups: list[list[Rollout]] = [[] for _ in eval_set.prompts]
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    rates = np.array([sum(r.verdict == "right" for r in group) / eval_set.n for group in groups])
    metrics = _with_interval("accuracy", rates, eval_set.n)
    metrics |= _tries(groups, eval_set.n, full)
    metrics |= {
        "length": float(np.mean([r.length for r in rollouts])),
        "truncated": float(np.mean([r.finish == "length" for r in rollouts])),
        "unjudged": float(np.mean([not r.judged for r in rollouts])),
    }
    if full:
        metrics |= {"prompts": float(len(groups)), "n": float(eval_set.n), **_more(rollouts)}
    metrics |= _levels([p.meta.get("level") for p in eval_set.prompts], rates, eval_set.n, full)
    return {f"eval/{eval_set.name}/{name}": value for name, value in metrics.items()}


def powers_up_to(n: int) -> list[int]:
    """
    >>> powers_up_to(8), powers_up_to(6), powers_up_to(1)
    ([1, 2, 4, 8], [1, 2, 4, 6], [1])
    """
    return sorted({2**i for i in range(n.bit_length())} | {n})


def names_answers(rollouts: Sequence[Rollout]) -> bool:
    """Whether answers can be counted: a right one without a name shows that the judge names none."""
    return any(r.final for r in rollouts) or not any(r.verdict == "right" for r in rollouts)


def _tries(groups: Sequence[Sequence[Rollout]], n: int, full: bool) -> dict[str, float]:
    """pass@k and maj@k: of the largest k alone, or of all with intervals."""
    metrics: dict[str, float] = {}
    right = [[r.verdict == "right" for r in group] for group in groups]
    for k in powers_up_to(n) if full else [n] * (n > 1):
        passed = [pass_at_k(n, sum(hits), k) for hits in right]
        metrics |= _with_interval(f"pass@{k}", passed, n / k, full)
    if n > 1 and names_answers([r for group in groups for r in group]):
        finals = [[r.final for r in group] for group in groups]
        for k in powers_up_to(n)[1:] if full and n <= VOTES else [n]:
            won = [maj_at_k(answers, hits, k) for answers, hits in zip(finals, right, strict=True)]
            metrics |= _with_interval(f"maj@{k}", won, n / k, full)
    return metrics


def _more(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths of right and wrong responses and their percentiles, and how many gave no answer."""
    lengths = [r.length for r in rollouts]
    metrics = {f"length_p{share}": float(np.percentile(lengths, share)) for share in (50, 90, 99)}
    for verdict in ("right", "wrong"):
        mine = [r.length for r in rollouts if r.verdict == verdict]
        if mine:
            metrics[f"length_{verdict}"] = float(np.mean(mine))
    if names_answers(rollouts):
        metrics["no_answer"] = float(np.mean([r.judged and not r.final for r in rollouts]))
    return metrics


def _levels(levels: Sequence[object], rates: np.ndarray, n: int, full: bool) -> dict[str, float]:
    """Their intervals have a name of their own in front: a level may be called anything."""
    metrics: dict[str, float] = {}
    for level in sorted({x for x in levels if x is not None}, key=lambda x: (str(type(x)), x)):
        mine = rates[[x == level for x in levels]]
        metrics[f"level/{level}"] = float(mine.mean())
        if full:
            metrics[f"level_low/{level}"], metrics[f"level_high/{level}"] = mean_interval(mine, n)
    return metrics


def _with_interval(
    name: str, values: Sequence[float] | np.ndarray, draws: float, wanted: bool = True
) -> dict[str, float]:
    metrics = {name: float(np.mean(values))}
    if wanted:
        metrics[f"{name}_low"], metrics[f"{name}_high"] = mean_interval(values, draws)
    return metrics
