"""What a useful group costs under uniform, dapo and speed, from the counts and lengths of a probe. Pure maths.

A group of N rollouts is useful when it holds both right and wrong ones. With a_m the share of prompts whose m
rollouts are mixed (`signal`) and l the mean length of a response:

- uniform and dapo generate N rollouts a prompt and find a useful group in every 1 / a_N: N / a_N rollouts each.
  uniform trains on all of them, dapo on the N useful ones.
- speed screens with s = N_init rollouts, goes on with the other N - s where those are mixed, and trains on all N:
  s / a_s + N - s rollouts (SPEED-RL, arXiv 2506.09016; the paper was withdrawn, the count is plain arithmetic). It
  takes 1 / a_s prompts for a useful group, more than dapo: a group that is mixed over N may not be over its first s.

In tokens, screening costs what the average prompt costs and continuing what the accepted prompts cost, whose
responses may be longer or shorter: l_s = sum a_s(i) l_i / sum a_s(i). Ranges are a bootstrap over the prompts, which
are the sample; its seed is fixed, so that the same probe says the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whet.probe.signal import SignalCurve, mixed, weighted_mean

RESAMPLES = 1000
SEED = 20_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95% range. Infinite where nothing useful was found.

    >>> Estimate.of(np.array([2.0, 1.0, 3.0, math.inf]), level=0.5)
    Estimate(value=2.0, low=1.0, high=inf)
    """

    value: float
    low: float
    high: float

    @staticmethod
    def of(samples: np.ndarray, level: float = 0.95) -> Estimate:
        """The first is the value, the others its resamples: percentiles of them, and never beside the value."""
        value, rest = float(samples[0]), np.sort(samples[1:])
        tail = (1.0 - level) / 2.0
        low = float(rest[math.floor(tail * (rest.size - 1))])
        high = float(rest[math.ceil((1.0 - tail) * (rest.size - 1))])
        return Estimate(value, min(low, value), max(high, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """For one useful group."""

    curriculum: Literal["uniform", "dapo", "speed"]
    screen: int
    """N_init of speed, else 0."""
    prompts: Estimate
    """Taken from the data."""
    rollouts: Estimate
    """Generated."""
    tokens: Estimate
    """Generated."""
    trained: Estimate
    """Rollouts that go through the learner."""
    saving: Estimate
    """Tokens of uniform / tokens of this: 2 is half the price."""


def resamples(prompts: int) -> np.ndarray:
    """Weights of the prompts: all alike in the first row, then as often as each was drawn in a bootstrap."""
    drawn = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1.0 / prompts), size=RESAMPLES)
    return np.vstack([np.ones(prompts), drawn])


def spendings(curve: SignalCurve, lengths: np.ndarray, group: int) -> list[Spending]:
    """uniform, dapo, and speed for each N_init the probe can tell of (2 .. min(n, N - 1)); `lengths`: mean a prompt."""
    weights = curve.weights
    length = weighted_mean(lengths, weights)
    useful = _inverse(curve.at(group).share)
    whole = np.full_like(useful, group)
    base = group * useful * length
    found = [
        _spending("uniform", 0, useful, group * useful, base, group * useful, base),
        _spending("dapo", 0, useful, group * useful, base, whole, base),
    ]
    for screen in range(2, min(curve.n, group - 1) + 1):
        accepted = mixed(curve.right, curve.judged, screen)
        taken = _inverse(weighted_mean(accepted, weights))
        go_on = weighted_mean(accepted * lengths, weights) * np.where(np.isfinite(taken), taken, 0.0)
        rollouts = screen * taken + group - screen
        tokens = screen * taken * length + (group - screen) * go_on
        found.append(_spending("speed", screen, taken, rollouts, tokens, whole, base))
    return found


def cheapest(found: Sequence[Spending]) -> Spending | None:
    """speed with the N_init that generates the fewest tokens; None where no screening would ever accept."""
    possible = [s for s in found if s.curriculum == "speed" and math.isfinite(s.tokens.value)]
    return min(possible, key=lambda s: s.tokens.value, default=None)


def _inverse(share: np.ndarray) -> np.ndarray:
    return np.divide(1.0, share, out=np.full_like(share, np.inf), where=share > 0)


def _spending(
    curriculum: Literal["uniform", "dapo", "speed"],
    screen: int,
    prompts: np.ndarray,
    rollouts: np.ndarray,
    tokens: np.ndarray,
    trained: np.ndarray,
    base: np.ndarray,
) -> Spending:
    both = np.isfinite(tokens) & np.isfinite(base)
    ratio = np.divide(base, tokens, out=np.ones_like(base), where=both)
    return Spending(
        curriculum=curriculum,
        screen=screen,
        prompts=Estimate.of(prompts),
        rollouts=Estimate.of(rollouts),
        tokens=Estimate.of(tokens),
        trained=Estimate.of(trained),
        saving=Estimate.of(ratio),
    )
