"""A run under barrier without a model: how often the engine is called per update, and how many decode steps that takes.

Every call ends when its last response does, so a second call per update costs a second tail. Lengths are log-normal
with a median of 256 tokens and a limit of 2,048; 512 rollouts are decoded at once. A rollout's length and verdict
depend on its key alone. `python tests/curriculum/barrier_run.py` prints the table of docs/details/speed.md.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scripted import at

from whet.config import CurriculumSettings
from whet.curriculum.base import Curriculum
from whet.curriculum.build import Facts, build_curriculum
from whet.types import Report, Request, Rollout, Sampling

PROMPTS, GROUPS, ROLLOUTS = 4_000, 16, 16
SLOTS, LIMIT, MEDIAN = 512, 2_048, 256


def hard_pool(seed: int) -> np.ndarray:
    """A third is never solved, a quarter in less than a tenth of the tries; the mean pass rate is 0.15."""
    rng = np.random.default_rng(seed)
    kind = rng.random(PROMPTS)
    low, middle = rng.random(PROMPTS) * 0.1, 0.1 + rng.random(PROMPTS) * 0.46
    return np.where(kind < 1 / 3, 0.0, np.where(kind < 7 / 12, low, middle))


def few_pool(seed: int) -> np.ndarray:
    """12% of the prompts are solved every other time, 44% nearly always and 44% never."""
    kind = np.random.default_rng(seed).random(PROMPTS)
    return np.where(kind < 0.12, 0.5, np.where(kind < 0.56, 0.98, 0.0))


@dataclass
class Played:
    """Totals over the updates of a run."""

    updates: int = 0
    calls: int = 0
    decode_steps: int = 0
    tokens: int = 0
    informative: int = 0
    trained: int = 0
    ages: int = 0  # sum over the trained groups of the age of their oldest token
    metrics: dict[str, float] | None = None  # after the last update

    @property
    def calls_per_update(self) -> float:
        return self.calls / self.updates

    @property
    def steps_per_update(self) -> float:
        return self.decode_steps / self.updates


def answer(request: Request, index: int, rate: float, version: int, seed: int) -> Rollout:
    rng = np.random.default_rng((seed, request.group_id, index))
    limit = request.sampling.max_tokens
    whole = 1 + int(MEDIAN * np.exp(rng.normal()))
    passed = bool(rng.random() < rate) and whole <= limit
    return Rollout.of(
        request,
        index,
        length=min(whole, limit),
        finish="stop" if whole <= limit else "length",
        first_version=version,
        last_version=version,
        verdict="right" if passed else "wrong",
        score=float(passed),
        reward=float(passed),
    )


def decode_steps(lengths: Sequence[int]) -> int:
    """Steps until all are written: each takes the slot that falls free first."""
    ends = [0] * SLOTS
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def build(
    settings: dict[str, Any], rates: np.ndarray, levels: Sequence[float], seed: int
) -> Curriculum:
    ids = [f"p{row}" for row in range(len(rates))]
    facts = Facts(ids=ids, characters=np.arange(len(ids)) % 100, levels=levels)
    wanted = CurriculumSettings.model_validate({"groups": GROUPS, "rollouts": ROLLOUTS, **settings})
    return build_curriculum(wanted, facts=facts, sampling=Sampling(max_tokens=LIMIT), seed=seed)


def play(
    settings: dict[str, Any],
    rates: np.ndarray,
    updates: int = 60,
    seed: int = 0,
    levels: Sequence[float] = (),
) -> Played:
    """Drive the curriculum as a trainer does that finishes all requests before it judges."""
    curriculum, groups = build(settings, rates, levels, seed), settings.get("groups", GROUPS)
    found = Played()
    for step in range(updates):
        clock = at(step=step, groups=groups)
        while (batch := curriculum.emit(clock)) is None:
            requests = curriculum.plan(clock)
            came = [
                answer(
                    request,
                    request.first_index + i,
                    float(rates[int(request.prompt_id[1:])]),
                    step,
                    seed,
                )
                for request in requests
                for i in range(request.n)
            ]
            assert came, "nothing is asked, and no batch comes"
            found.calls += 1
            found.decode_steps += decode_steps([rollout.length for rollout in came])
            found.tokens += sum(rollout.length for rollout in came)
            curriculum.observe(came)
        found.updates += 1
        found.trained += len(batch.groups)
        found.informative += sum(group.spread > 0 for group in batch.groups)
        found.ages += sum(step - group.oldest_version for group in batch.groups)
        curriculum.updated(at(step=step + 1, groups=groups), Report(metrics={}))
    found.metrics = curriculum.metrics()
    return found


ARMS: dict[str, dict[str, Any]] = {
    "uniform": {"name": "uniform"},
    "speed": {"name": "speed"},
    "speed over cures": {"name": "speed", "source": "cures"},
    "all": {"name": "all"},
}
STRICT = {
    f"{name}, max_age 0": {**settings, "max_age": 0}
    for name, settings in ARMS.items()
    if name != "uniform"
}


def report() -> None:
    write, seeds = sys.stdout.write, range(3)
    write(
        f"{'pool':5} {'curriculum':28} {'calls':>6} {'steps':>7} {'tokens per informative group':>29} {'age':>5}\n"
    )
    for pool, rates_of in (("hard", hard_pool), ("few", few_pool)):
        for name, settings in (ARMS | STRICT).items():
            runs = [play(settings, rates_of(seed), seed=seed) for seed in seeds]
            calls = np.mean([run.calls_per_update for run in runs])
            steps = np.mean([run.steps_per_update for run in runs])
            each = sum(run.tokens for run in runs) / sum(run.informative for run in runs)
            age = sum(run.ages for run in runs) / sum(run.trained for run in runs)
            write(f"{pool:5} {name:28} {calls:6.2f} {steps:7.0f} {each:29.0f} {age:5.2f}\n")


if __name__ == "__main__":
    report()
