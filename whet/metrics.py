"""What one step looked like: the rollouts' side of a line of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from whet.types import Group, Rollout

PASS_RATES = ("0", "to_25", "to_50", "to_75", "to_100", "100")
"""Classes of a group's pass rate in percent: never right, above the class before and up to 25, ..., always right."""


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """reward/*, verdict/* (shares) and length/* of the training rollouts judged during a step; {} for none.

    Each further reward has its mean under its own name, before its weight. Cut rollouts were never finished: they are
    counted by the engine, and left out here; so is, before, what finished beside them (`Hearing`).
    """
    done = [r for r in rollouts if r.finish != "cut"]
    if not done:
        return {}
    lengths = np.array([r.length for r in done], dtype=np.float64)
    metrics = {f"verdict/{v}": sum(r.verdict == v for r in done) / len(done) for v in ("right", "wrong", "unjudged")}
    rewards = [r.reward for r in done if r.reward is not None]
    if rewards:
        metrics["reward/mean"] = float(np.mean(rewards))
    for name in dict.fromkeys(name for r in done for name in r.terms):
        metrics[f"reward/{name}"] = float(np.mean([r.terms[name] for r in done if name in r.terms]))
    metrics["length/mean"] = float(lengths.mean())
    for share in (50, 90, 99):
        metrics[f"length/p{share}"] = float(np.percentile(lengths, share))
    metrics["length/max"] = float(lengths.max())
    metrics["length/truncated"] = sum(r.finish == "length" for r in done) / len(done)
    for verdict in ("right", "wrong"):
        mine = [r.length for r in done if r.verdict == verdict]
        if mine:
            metrics[f"length/{verdict}"] = float(np.mean(mine))
    return metrics


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """pass_rate/CLASS of `PASS_RATES`: the share of a batch's groups in each; groups without a verdict are left out."""
    rates = [group.pass_rate for group in groups if group.judged]
    classes = [pass_rate_class(rate) for rate in rates]
    return {f"pass_rate/{name}": classes.count(name) / len(rates) for name in PASS_RATES} if rates else {}


def pass_rate_class(rate: float) -> str:
    """
    >>> [pass_rate_class(k / 8) for k in (0, 1, 2, 3, 7, 8)]
    ['0', 'to_25', 'to_25', 'to_50', 'to_100', '100']
    """
    if rate in (0.0, 1.0):
        return f"{100 * rate:.0f}"
    return PASS_RATES[math.ceil(4 * rate)]


def gpu_idle(busy: float, seconds: float) -> float:
    """The share of a step's seconds in which the GPU did not work. `busy` is what `whet.model.meter` saw.

    >>> gpu_idle(4.5, 5.0), gpu_idle(5.1, 5.0)
    (0.1, 0.0)
    """
    return max(0.0, round(1.0 - busy / seconds, 6)) if seconds > 0 else 0.0


class Stopwatch:
    """Seconds by name, for the time/* metrics of a row: the time since the row before it.

    generate, judge, log_probs (under the policy before the update, and under the reference), train, sync (the engine
    lends and takes back memory and hears of the new weights), eval, save (rollouts, and the checkpoint after the row
    before), and idle: the curriculum, and whatever has no name.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def move(self, source: str, target: str, seconds: float) -> None:
        """So much of `source` was spent for `target`."""
        if seconds > 0:
            self.seconds[source] -= seconds
            self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def without(self, *names: str) -> float:
        """Seconds up to now, less those of these names."""
        return time.perf_counter() - self.start - sum(self.seconds.get(name, 0.0) for name in names)

    def metrics(self) -> dict[str, float]:
        """time/NAME, time/total, and time/idle: what no name accounts for."""
        total = time.perf_counter() - self.start
        named = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return {**named, "time/total": total, "time/idle": max(0.0, total - sum(self.seconds.values()))}


def ready_lines(seconds: float, named: Mapping[str, float]) -> list[str]:
    """Where the time before the first step went, if it was long enough to be noticed.

    >>> ready_lines(31.4, {"model, judges and engine": 16.2, "the learner": 14.0})
    ['Ready after 31 s: model, judges and engine took 16, the learner 14.']
    >>> ready_lines(2.0, {"the learner": 1.0})
    []
    """
    if seconds < 5:
        return []
    (first, took), *others = named.items()
    return [f"Ready after {seconds:.0f} s: {first} took {took:.0f}{''.join(f', {n} {s:.0f}' for n, s in others)}."]
