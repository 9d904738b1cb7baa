"""Accuracy on held-out prompts: requests to the engine, verdicts from the judge, numbers with intervals.

Evaluation has its own limits and its own noise, never the stage's, and the same noise each time, so that two
evaluations differ by the weights alone. Unjudged rollouts count as wrong here: a model must not look better because its
answers cannot be judged. The upper end of the accuracy's interval counts them as right, and where most are unjudged
there is no accuracy at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from statistics import fmean
from typing import NamedTuple

import numpy as np

from whet import config
from whet.rollout.base import Engine
from whet.tasks.judge import Judge
from whet.types import Prompt, Request, Rollout, Sampling
from whet.watch import length_metrics

# The prompts are the sample: rollouts of one prompt resemble each other, and count for less than as many prompts.

Values = Sequence[float] | np.ndarray
Z95 = 1.959964  # standard deviations around the mean that hold 95% of a normal distribution


class Interval(NamedTuple):
    """A 95% interval: of a hundred such intervals, about 95 hold the truth."""

    low: float
    high: float


def wilson(share: float, size: float) -> Interval:
    """Wilson's score interval (1927) for a share seen in `size` independent draws.

    centre +- half, centre = (p + z^2/2n) / (1 + z^2/n), half = z/(1 + z^2/n) sqrt(p(1-p)/n + z^2/4n^2). Unlike
    p +- z sqrt(p(1-p)/n) it stays inside 0..1 and has a width at p = 0 and 1.

    >>> [round(x, 4) for x in wilson(0.0, 30)], [round(x, 4) for x in wilson(0.5, 100)]
    ([0.0, 0.1135], [0.4038, 0.5962])
    """
    z = Z95
    shrink = 1.0 + z * z / size
    centre = (share + z * z / (2.0 * size)) / shrink
    half = z / shrink * math.sqrt(share * (1.0 - share) / size + z * z / (4.0 * size * size))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Values, draws: float = 1.0) -> Interval:
    """The interval of the mean of one value in 0..1 per prompt, each obtained from `draws` independent rollouts.

    Wilson's interval at the effective number of draws, as for proportions in cluster samples (Korn and Graubard 1998):
    n_eff = p(1-p) / (s^2 / P) for P prompts whose values have variance s^2. It lies between P (a prompt's rollouts
    always agree) and P x draws (prompts do not differ), and is held there. With one draw it is P: plain Wilson.

    OURS: p and s^2 inside n_eff are taken with two more prompts, one all right and one all wrong (compare Agresti and
    Coull 1998). Few prompts with hardly a right rollout among them cannot show how alike rollouts are, and would pass
    for independent.
    """
    values = np.asarray(values, dtype=np.float64)
    widened = np.append(values, (0.0, 1.0))
    share = float(widened.mean())
    worth = float(share * (1.0 - share) / widened.var(ddof=1))
    return wilson(float(values.mean()), values.size * min(max(worth, 1.0), draws))


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased chance that k of n rollouts hold a right one: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    assert 0 <= right <= n and 1 <= k <= n
    return 1.0 - comb(n - right, k) / comb(n, k)


def maj_at_k(finals: Sequence[str], right: Sequence[bool], k: int) -> float:
    """Chance that the answer most of k rollouts give is right, over all C(n, k) choices of k among these n.

    "" abstains; if all do, the vote is wrong. Tied answers share the win, so half counts for a right and a wrong
    answer with two votes each. Rollouts that give the same answer are all right or all wrong where the judge reads
    what is voted on; where not, an answer is worth the share of its rollouts that are right.

    >>> maj_at_k(["7", "7", "9", ""], [True, True, False, False], 4)
    1.0
    >>> maj_at_k(["7", "9"], [True, False], 2)
    0.5
    """
    assert len(finals) == len(right) and 1 <= k <= len(finals)
    votes = Counter(finals)
    hits = Counter(final for final, good in zip(finals, right, strict=True) if good)
    abstain = votes.pop("", 0)
    answers = tuple(sorted((count, hits[final]) for final, count in votes.items()))
    return _won(answers, abstain, k)


@lru_cache(maxsize=4096)
def _won(answers: tuple[tuple[int, int], ...], abstain: int, k: int) -> float:
    """`answers`: (rollouts, right ones among them) of each. Prompts with the same counts share the result."""
    if k == sum(count for count, _ in answers) + abstain:
        most = max((count for count, _ in answers), default=0)
        return fmean(hits / count for count, hits in answers if count == most) if most else 0.0
    won = 0.0
    for i, (count, hits) in enumerate(answers):
        if hits:
            rest = [other for j, (other, _) in enumerate(answers) if j != i]
            ways = sum(
                comb(count, v) * _beaten(rest, abstain, v, k - v)
                for v in range(1, min(count, k) + 1)
            )
            won += hits / count * ways
    return won / comb(sum(count for count, _ in answers) + abstain, k)


def _beaten(rest: Sequence[int], abstain: int, votes: int, left: int) -> float:
    """Ways to take `left` of the other rollouts such that no other answer has more than `votes`.

    Each way counts 1 / (1 + answers that tie). Answers with fewer rollouts than `votes` cannot tie and are taken
    together with the abstentions.
    """
    harmless = abstain + sum(count for count in rest if count < votes)
    ways = {(0, 0): 1}  # (taken, tied) -> number of ways, over the answers that could tie
    for count in rest:
        if count >= votes:
            wider: Counter[tuple[int, int]] = Counter()
            for (taken, tied), number in ways.items():
                for more in range(min(votes, left - taken) + 1):
                    wider[taken + more, tied + (more == votes)] += number * comb(count, more)
            ways = wider
    return sum(
        number * comb(harmless, left - taken) / (1 + tied) for (taken, tied), number in ways.items()
    )


# rollouts generated and judged at once: bounds memory. Each slice waits for its longest response
SLICE = 2048
# rollouts per prompt up to which all maj@k are given: the exact sum grows steeply; beyond, only
# maj@n
VOTES = 64
MOST_UNJUDGED = 0.5  # share of the rollouts beyond which nothing is said of how many are right
OnProgress = Callable[[int, int], None]  # called with (rollouts finished, rollouts in all)


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A named set of prompts with the sampling it is evaluated under."""

    name: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: Sampling
    every: int


def eval_sets(
    settings: config.Config, evals: Mapping[str, tuple[Prompt, ...]], training: Sampling
) -> tuple[EvalSet, ...]:
    """The recipe's evaluation sets, then the slice of the training data that was set aside, if any."""
    entries = list(settings.eval)
    if evals.keys() - {entry.name for entry in entries}:
        entries.append(config.Eval(name=config.HELD_OUT, every=settings.held_out.every))
    sets = []
    for entry in entries:
        limit = entry.max_tokens or training.max_tokens
        prompts = evals[entry.name]
        sampling = replace(
            training, max_tokens=limit, temperature=entry.temperature, top_p=entry.top_p
        )
        sets.append(
            EvalSet(
                name=entry.name, prompts=prompts, n=entry.n, sampling=sampling, every=entry.every
            )
        )
    return tuple(sets)


def evaluate(
    eval_set: EvalSet,
    engine: Engine,
    judge: Judge,
    seen: Callable[[Sequence[Rollout]], None] = lambda judged: None,
    *,
    on_progress: OnProgress = lambda done, total: None,
    full: bool = False,
) -> dict[str, float]:
    """`eval_metrics` of the set. To bound memory, prompts are taken in slices; `seen` gets each one once judged."""
    requests = [
        Request(prompt_id=p.id, group_id=i, n=eval_set.n, sampling=eval_set.sampling, phase="eval")
        for i, p in enumerate(eval_set.prompts)
    ]
    rollouts: list[Rollout] = []
    for judged in judged_slices(requests, engine, judge, on_progress):
        seen(judged)
        rollouts += (replace(r, trace=None) for r in judged)
    return eval_metrics(eval_set, rollouts, full=full)


def judged_slices(
    requests: Sequence[Request],
    engine: Engine,
    judge: Judge,
    on_progress: OnProgress = lambda done, total: None,
) -> Iterator[list[Rollout]]:
    """The requests' rollouts, generated and judged in slices, in order."""
    total = sum(r.n for r in requests)
    done = 0
    size = max(1, SLICE // max((r.n for r in requests), default=1))

    def finished(count: int) -> None:
        on_progress(done + count, total)

    for start in range(0, len(requests), size):
        judged = judge.judge(engine.generate(requests[start : start + size], finished))
        yield judged
        done += len(judged)


def eval_metrics(
    eval_set: EvalSet, rollouts: Sequence[Rollout], *, full: bool = False
) -> dict[str, float]:
    """eval/NAME/MEASURE from judged rollouts; rollout.group_id is the prompt's place in the set.

    Always: accuracy (the mean over prompts of right / n: pass@1, avg@n) with accuracy_low and accuracy_high (95%,
    `mean_interval`), length (mean), truncated, unjudged, level/L (accuracy of the prompts of level L), and for n > 1
    pass@n and maj@n. Where more than `MOST_UNJUDGED` have no verdict, only length, truncated and unjudged; a level of
    which that is true is left out.

    `full` adds prompts, n, pass@k and maj@k for k = 1, 2, 4, ..., n, both with _low and _high, length_right,
    length_wrong, length_p50, _p90 and _p99, no_answer (judged, but the judge read no answer), level_low/L and
    level_high/L. maj@k and no_answer are left out where the judge names no answers: some rollout is right, and none
    has a `final`.
    """
    groups: list[list[Rollout]] = [[] for _ in eval_set.prompts]
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    rates = np.array([sum(r.verdict == "right" for r in group) / eval_set.n for group in groups])
    unjudged = np.array([sum(not r.judged for r in group) / eval_set.n for group in groups])
    metrics: dict[str, float] = {}
    if unjudged.mean() <= MOST_UNJUDGED:
        metrics = _with_interval("accuracy", rates, rates + unjudged, eval_set.n)
        metrics |= _tries(groups, eval_set.n, full)
    lengths = length_metrics(rollouts)
    metrics |= {"length": lengths.pop("mean"), "truncated": lengths.pop("truncated")}
    metrics["unjudged"] = float(unjudged.mean())
    if full:
        metrics |= {"prompts": float(len(groups)), "n": float(eval_set.n)}
        metrics |= {f"length_{name}": value for name, value in lengths.items() if name != "max"}
        if names_answers(rollouts):
            metrics["no_answer"] = float(np.mean([r.judged and not r.final for r in rollouts]))
    levels = [p.meta.get("level") for p in eval_set.prompts]
    for level in sorted({x for x in levels if x is not None}, key=lambda x: (str(type(x)), x)):
        of_level = [x == level for x in levels]
        mine = rates[of_level]
        lacking = unjudged[of_level]
        if lacking.mean() > MOST_UNJUDGED:
            continue
        metrics[f"level/{level}"] = float(mine.mean())
        if full:  # intervals have a prefix of their own, since a level may have any name
            metrics[f"level_low/{level}"] = mean_interval(mine, eval_set.n).low
            metrics[f"level_high/{level}"] = mean_interval(mine + lacking, eval_set.n).high
    return {f"eval/{eval_set.name}/{name}": value for name, value in metrics.items()}


def powers_up_to(n: int) -> list[int]:
    """
    >>> powers_up_to(8), powers_up_to(6), powers_up_to(1)
    ([1, 2, 4, 8], [1, 2, 4, 6], [1])
    """
    return sorted({2**i for i in range(n.bit_length())} | {n})


def names_answers(rollouts: Sequence[Rollout]) -> bool:
    """Whether votes can be counted: a right rollout without a `final` shows that the judge names no answers."""
    return any(r.final for r in rollouts) or not any(r.verdict == "right" for r in rollouts)


def _tries(groups: Sequence[Sequence[Rollout]], n: int, full: bool) -> dict[str, float]:
    """pass@k and maj@k, for the largest k alone, or (`full`) for all k with intervals."""
    metrics: dict[str, float] = {}
    right = [[r.verdict == "right" for r in group] for group in groups]
    could_be = [[r.verdict != "wrong" for r in group] for group in groups]
    for k in powers_up_to(n) if full else [n] * (n > 1):
        passed, most = (
            [pass_at_k(n, sum(hits), k) for hits in counted] for counted in (right, could_be)
        )
        metrics |= _with_interval(f"pass@{k}", passed, most, n / k, full)
    if n > 1 and names_answers([r for group in groups for r in group]):
        finals = [[r.final for r in group] for group in groups]
        for k in powers_up_to(n)[1:] if full and n <= VOTES else [n]:
            won = [maj_at_k(answers, hits, k) for answers, hits in zip(finals, right, strict=True)]
            metrics |= _with_interval(f"maj@{k}", won, won, n / k, full)
    return metrics


def _with_interval(
    name: str, values: Values, most: Values, draws: float, wanted: bool = True
) -> dict[str, float]:
    """most: the values if all that was not judged were right."""
    metrics = {name: float(np.mean(values))}
    if wanted:
        metrics[f"{name}_low"] = mean_interval(values, draws).low
        metrics[f"{name}_high"] = mean_interval(most, draws).high
    return metrics
