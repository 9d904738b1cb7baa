"""Forecasts from a probe what training on these prompts would cost: signal, lengths, and the price of a useful group.

`probe` calls these pure functions on counts: c_i right of n_i judged rollouts of prompt i. A group of N rollouts is
useful if it holds both right and wrong ones. The share of useful groups is counted up to n rollouts per group, and
extrapolated beyond by a beta-binomial. Ranges are a bootstrap over the prompts, which are the sample; its seed is
fixed, so that the same probe gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from whet.curriculum.allocation import largest_remainder, sigma_of
from whet.types import Rollout

# Shapes: P prompts, W rows of weights (the sample itself, then its resamples).

ROUNDS = 2000  # of the fixed point at most; it is slow only where the fit hardly matters
TOLERANCE = 1e-6  # the fixed point ends when a round moves a + b by no more than this share
LARGEST = 1e3  # a + b from which the prompts do not differ and the beta-binomial is a binomial
# a fit that misses the counted share at n by more than this, and by more than noise, is not used
MISFIT = 0.05
LOST = 0.02  # share of the right responses that a suggested limit may lose
# share of all responses that it may cut: a response that is cut shows only that it was long
CUT = 0.1
ENOUGH = 20  # right responses that are needed to suggest a limit
RESAMPLES = 1000
# cures is played with a tenth of the prompts per update; plays of the sample itself
PARTS, PLAYS = 10, 20
TAU = 0.1  # the default of curriculum.cures.tau
SEED = 20_000

# ---- signal


def mixed(right: np.ndarray, judged: np.ndarray, size: int) -> np.ndarray:
    """For each prompt, the unbiased probability that `size` of its rollouts hold both right and wrong ones.

    1 - C(c, m) / C(n, m) - C(n - c, m) / C(n, m), the share of the subsets of m that are mixed; NaN where n < m.

    >>> mixed(np.array([0, 1, 4]), np.array([8, 8, 8]), 4).round(4).tolist()
    [0.0, 0.5, 0.9714]
    """
    right = np.asarray(right, np.float64)
    judged = np.asarray(judged, np.float64)
    shares = np.ones_like(judged)
    for part in (right, judged - right):
        # C(part, m) / C(n, m) = product over j < m of (part - j) / (n - j)
        factors = [np.maximum(part - j, 0.0) / np.maximum(judged - j, 1.0) for j in range(size)]
        shares -= np.prod(factors, axis=0)
    return np.where(judged >= size, np.maximum(shares, 0.0), np.nan)


class Beta(NamedTuple):
    """The distribution of pass rates over the prompts, p ~ Beta(a, b); arrays if several were fitted at once."""

    a: np.ndarray
    b: np.ndarray

    def mixed(self, size: int) -> np.ndarray:
        """1 - E[p^m] - E[(1-p)^m], where E[p^m] = product over j < m of (a + j) / (a + b + j).

        >>> round(float(Beta(np.array(1.0), np.array(1.0)).mixed(4)), 4)  # uniform pass rates: 1 - 2/5
        0.6
        """
        j = np.arange(size)
        a = np.asarray(self.a)[..., None]
        b = np.asarray(self.b)[..., None]
        right, wrong = (np.prod((shape + j) / (a + b + j), axis=-1) for shape in (a, b))
        return 1.0 - right - wrong


def fit_beta(right: np.ndarray, judged: np.ndarray, weights: np.ndarray | None = None) -> Beta:
    """Maximum-likelihood beta-binomial; NaN where there is none (no right rollout, or no wrong one).

    Minka's fixed point for the Polya distribution (Estimating a Dirichlet distribution, 2000), with the differences of
    digammas written as the sums they are: a <- a [sum_j K_j / (a + j)] / [sum_j M_j / (a + b + j)], and b likewise with
    L, where K_j, L_j and M_j count the prompts with more than j right, wrong and judged rollouts. `weights` (W, P) fits
    many resamples at once.
    """
    right = np.asarray(right)
    judged = np.asarray(judged)
    weights = np.ones((1, right.size)) if weights is None else weights
    j = np.arange(int(judged.max()))
    hits, misses, seen = (
        weights @ (counts[:, None] > j) for counts in (right, judged - right, judged)
    )
    a = np.full(len(weights), np.nan)
    b = np.full(len(weights), np.nan)
    going = np.flatnonzero((hits[:, 0] > 0) & (misses[:, 0] > 0))
    a[going] = b[going] = 1.0
    for _ in range(ROUNDS):
        old_a = a[going, None]
        old_b = b[going, None]
        total = (seen[going] / (old_a + old_b + j)).sum(axis=1)
        new_a = old_a[:, 0] * (hits[going] / (old_a + j)).sum(axis=1) / total
        new_b = old_b[:, 0] * (misses[going] / (old_b + j)).sum(axis=1) / total
        scale = np.minimum(1.0, LARGEST / (new_a + new_b))
        a[going] = new_a * scale
        b[going] = new_b * scale
        moved = np.abs(a[going] - old_a[:, 0]) + np.abs(b[going] - old_b[:, 0])
        going = going[moved > TOLERANCE * (a[going] + b[going])]
        if not going.size:
            break
    return Beta(a, b)


class SignalCurve:
    """Mean over the prompts of the probability that a group is mixed, by its size, for each row of `weights`.

    The first row must weigh all prompts equally: it decides between fit and fallback for all rows.
    """

    def __init__(self, right: np.ndarray, judged: np.ndarray, weights: np.ndarray):
        self.right = right
        self.judged = judged
        self.weights = weights
        # at least half of the prompts have so many judged rollouts
        self.n = int(np.sort(judged)[judged.size // 2])

    def counted(self, size: int) -> np.ndarray:
        return weighted_mean(mixed(self.right, self.judged, size), self.weights)

    def at(self, size: int) -> tuple[np.ndarray, str]:
        """The shares (W,) at a size, and how they are known: counted, fitted by the beta-binomial, or "at least".

        The last if the fit failed or misses what was counted: a larger group can only exceed the largest counted one.
        """
        counted = self.counted(min(size, self.n))
        if size <= self.n:
            return counted, "counted"
        if self._fit is None:
            return counted, "at least"
        # a resample without a fit keeps what was counted
        return np.fmax(self._fit.mixed(size), counted), "fitted"

    @cached_property
    def _fit(self) -> Beta | None:
        """None where the fit does not reproduce the counted share; it cannot if that is zero."""
        share = float(self.counted(self.n)[0])
        if share == 0.0:
            return None
        fit = fit_beta(self.right, self.judged, self.weights)
        noise = 2.0 * math.sqrt(share * (1.0 - share) / (self.judged >= self.n).sum())
        return fit if abs(float(fit.mixed(self.n)[0]) - share) <= max(MISFIT, noise) else None


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean over the prompts that have a value, for each row of weights; 0 where no weight is left."""
    known = np.isfinite(values)
    total = weights[:, known].sum(axis=1)
    return np.divide(
        weights[:, known] @ values[known], total, out=np.zeros(len(weights)), where=total > 0
    )


# ---- lengths


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    of: str  # all, right or wrong
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What another limit would have done to the responses."""

    limit: int
    cut: float  # share of all responses
    right_lost: float | None  # share of the right responses, if there are any
    tokens: float  # share of the generated tokens that would remain


def length_rows(rollouts: Sequence[Rollout]) -> list[ResponseLengths]:
    """All, right and wrong responses; a kind that does not occur is left out."""
    rows = []
    for kind in ("all", "right", "wrong"):
        if lengths := [r.length for r in rollouts if kind in ("all", r.verdict)]:
            p50, p90, p99 = map(float, np.percentile(lengths, (50, 90, 99)))
            rows.append(
                ResponseLengths(
                    kind, len(lengths), float(np.mean(lengths)), p50, p90, p99, max(lengths)
                )
            )
    return rows


def limit_rows(rollouts: Sequence[Rollout], limit: int, parts: int = 8) -> list[Limit]:
    """Every eighth of the limit up to it; nothing is known beyond."""
    return [
        limit_row(rollouts, at)
        for at in sorted({math.ceil(limit * i / parts) for i in range(1, parts + 1)})
    ]


def limit_row(rollouts: Sequence[Rollout], limit: int) -> Limit:
    """A response of exactly `limit` tokens is cut only if it did not end there by itself."""
    lengths = np.array([r.length for r in rollouts])
    cut = (lengths > limit) | (
        (lengths == limit) & np.array([r.finish == "length" for r in rollouts])
    )
    right = np.array([r.verdict == "right" for r in rollouts])
    return Limit(
        limit=limit,
        cut=float(cut.mean()),
        right_lost=float((lengths[right] > limit).mean()) if right.any() else None,
        tokens=float(np.minimum(lengths, limit).sum() / lengths.sum()),
    )


def enough(rollouts: Sequence[Rollout], limit: int) -> int | None:
    """The smallest limit, in 64ths of the one used, that loses under 2% of the right responses and cuts at most 10%.

    It is the one used if no smaller limit does, and None with fewer than 20 right responses: their tail is unknown.
    """
    if sum(r.verdict == "right" for r in rollouts) < ENOUGH:
        return None
    rows = limit_rows(rollouts, limit, 64)
    return next(
        (row.limit for row in rows if (row.right_lost or 0.0) < LOST and row.cut <= CUT), limit
    )


# ---- spending
#
# With a_m the share of prompts whose m rollouts are mixed and l the mean length of a response:
#
# - uniform and dapo generate N rollouts per prompt and find a useful group in every 1 / a_N: N / a_N rollouts each.
#   uniform trains on all of them, dapo on the N useful ones.
# - speed screens with s = N_init rollouts, continues with the other N - s where those are mixed, and trains on all N:
#   s / a_s + N - s rollouts (SPEED-RL, arXiv 2506.09016; the paper was withdrawn, the count is plain arithmetic). It
#   takes 1 / a_s prompts per useful group, more than dapo: a group that is mixed over N may not be over its first s.
#
# - cures comes back to prompts by what it saw of them, so it is played (`play_cures`): two passes over the prompts.
#
# In tokens, screening costs what the average prompt costs and continuing what the accepted prompts cost, whose
# responses may be longer or shorter: l_s = sum a_s(i) l_i / sum a_s(i).


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95% range; infinite if nothing useful was found.

    >>> Estimate.of(np.array([2.0, 1.0, 3.0, math.inf]))
    Estimate(value=2.0, low=1.0, high=inf)
    """

    value: float
    low: float
    high: float

    @staticmethod
    def of(samples: np.ndarray) -> Estimate:
        """The first sample is the value; the range covers it and 95% of the others, which are its resamples."""
        value = float(samples[0])
        rest = np.sort(samples[1:])
        tail = (1.0 - 0.95) / 2.0
        low = float(rest[math.floor(tail * (rest.size - 1))])
        high = float(rest[math.ceil((1.0 - tail) * (rest.size - 1))])
        return Estimate(value, min(low, value), max(high, value))


@dataclass(frozen=True, slots=True)
class Spending:
    """The price of one useful group."""

    curriculum: str  # uniform, dapo, speed or cures
    screen: int  # N_init of speed, else 0
    prompts: Estimate  # taken from the data
    rollouts: Estimate  # generated
    tokens: Estimate  # generated
    trained: Estimate  # rollouts that go through the learner
    saving: Estimate  # tokens of uniform / tokens of this: 2 is half the price


def resamples(prompts: int) -> np.ndarray:
    """Weights of the prompts: equal in the first row, then how often each was drawn in a bootstrap."""
    drawn = np.random.default_rng(SEED).multinomial(
        prompts, np.full(prompts, 1.0 / prompts), size=RESAMPLES
    )
    return np.vstack([np.ones(prompts), drawn])


def spendings(curve: SignalCurve, lengths: np.ndarray, group: int) -> list[Spending]:
    """uniform, dapo, and speed for each N_init in 2 .. min(n, N - 1); `lengths` (P,): mean response length."""
    weights = curve.weights
    length = weighted_mean(lengths, weights)
    useful = _inverse(curve.at(group)[0])
    whole = np.full_like(useful, group)
    base = group * useful * length
    ways = [
        ("uniform", 0, useful, group * useful, base, group * useful),
        ("dapo", 0, useful, group * useful, base, whole),
    ]
    for screen in range(2, min(curve.n, group - 1) + 1):
        accepted = mixed(curve.right, curve.judged, screen)
        taken = _inverse(weighted_mean(accepted, weights))
        go_on = weighted_mean(accepted * lengths, weights) * np.where(
            np.isfinite(taken), taken, 0.0
        )
        tokens = screen * taken * length + (group - screen) * go_on
        ways.append(("speed", screen, taken, screen * taken + group - screen, tokens, whole))
    found = []
    for curriculum, screen, prompts, rollouts, tokens, trained in ways:
        both = np.isfinite(tokens) & np.isfinite(base)
        saving = np.divide(base, tokens, out=np.ones_like(base), where=both)
        found.append(
            Spending(
                curriculum, screen, *map(Estimate.of, (prompts, rollouts, tokens, trained, saving))
            )
        )
    return found


class CuresPlay(NamedTuple):
    groups: float
    rollouts: float
    tokens: float
    useful: float  # groups with both right and wrong rollouts


def play_cures(
    rates: np.ndarray,
    lengths: np.ndarray,
    groups: int,
    rollouts: int,
    updates: int,
    tau: float,
    seed: int,
) -> CuresPlay:
    """What cures would generate where prompts have these pass rates and mean lengths, and none of them moves.

    Prompts are drawn without replacement by exp(sqrt(m (1 - m)) / tau), m = (1 + right) / (2 + judged), and get
    rollouts in proportion to sqrt(m (1 - m)), at least 2 (arXiv 2510.01037, eqs. 14, 20, 22; the rule of `cures.py`).
    """
    rng = np.random.default_rng(seed)
    right = np.zeros(len(rates))
    judged = np.zeros(len(rates))
    tokens = 0.0
    useful = 0
    for _ in range(updates):
        means = (1 + right) / (2 + judged)
        chances = np.exp((sigma_of(means) - 0.5) / tau)
        drawn = rng.choice(len(rates), groups, replace=False, p=chances / chances.sum())
        sizes = np.array(largest_remainder(sigma_of(means[drawn]).tolist(), rollouts * groups, 2))
        hits = rng.binomial(sizes, rates[drawn])
        right[drawn] += hits
        judged[drawn] += sizes
        tokens += float(sizes @ lengths[drawn])
        useful += int(((hits > 0) & (hits < sizes)).sum())
    return CuresPlay(groups * updates, rollouts * groups * updates, tokens, useful)


def cures_spending(
    right: np.ndarray, judged: np.ndarray, lengths: np.ndarray, uniform: Spending, group: int
) -> Spending:
    """The price of a useful group under cures: the mean of plays on the prompts, its range by plays on resamples."""
    groups = max(1, right.size // PARTS)

    def play(weights: np.ndarray, seed: int) -> CuresPlay:
        places = np.repeat(np.arange(right.size), weights.astype(int))
        rates = (right / judged)[places]
        return play_cures(
            rates, lengths[places], groups, group, 2 * right.size // groups, TAU, seed
        )

    drawn = resamples(right.size)
    mean = np.mean([play(drawn[0], seed) for seed in range(PLAYS)], axis=0)
    costs = np.array(
        [mean, *(play(row, seed) for seed, row in enumerate(drawn[1 : PLAYS * PARTS], PLAYS))]
    )
    prompts, rollouts, tokens = (costs[:, i] * _inverse(costs[:, 3]) for i in range(3))
    known = np.isfinite(tokens) & math.isfinite(uniform.tokens.value)
    saving = np.divide(uniform.tokens.value, tokens, out=np.ones_like(tokens), where=known)
    return Spending("cures", 0, *map(Estimate.of, (prompts, rollouts, tokens, rollouts, saving)))


def cheapest(found: Sequence[Spending]) -> Spending | None:
    """speed with the N_init that generates the fewest tokens; None if no screening would ever accept."""
    possible = [s for s in found if s.curriculum == "speed" and math.isfinite(s.tokens.value)]
    return min(possible, key=lambda s: s.tokens.value, default=None)


def _inverse(share: np.ndarray) -> np.ndarray:
    return np.divide(1.0, share, out=np.full_like(share, np.inf), where=share > 0)
