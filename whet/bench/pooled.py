"""The cost of an accuracy level by all evaluations of an arm together, whatever seed they are of. Pure.

One evaluation is as noisy as its problems are few, so where curves are flat a seed's own crossing (`results.py`) is
largely luck. Here all evaluations of an arm are put in the order of their cost and fitted by the rising step function
next to them (isotonic regression, by pooling adjacent violators); the level costs what the first step at or above it
does. How sure that is: the same with seeds drawn again and each evaluation drawn again from its fit (a bootstrap).

A level is one point of a curve; what a hundredth of accuracy costs by the straight line through all of it does not
depend on one (`gain_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from whet.bench.results import Arms, Log, curve, usable
from whet.report import formats

DRAWS = 400


def rising(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The rising sequence with the least sum of squared distances: what falls is joined to its mean.

    >>> rising([1.0, 3.0, 2.0, 2.0, 5.0]).round(6).tolist()
    [1.0, 2.333333, 2.333333, 2.333333, 5.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, m), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def crossing(costs: np.ndarray, fit: np.ndarray, level: float) -> float:
    """The cost of the first step at or above the level, but for the start, which costs nothing and is nobody's merit;
    infinite where there is none."""
    above = np.flatnonzero((fit >= level) & (costs > 0))
    return float(costs[above[0]]) if above.size else math.inf


def pooled_costs(cells: Sequence[Log], level: float, cost: str, seed: int = 0) -> np.ndarray:
    """[1 + DRAWS]: what the level costs, then the same in every draw of the bootstrap."""
    curves = [np.array(curve(cell, cost)) for cell in cells]
    if not curves:
        return np.full(1 + DRAWS, math.nan)
    rolls = [cell["evaluation"]["prompts"] * cell["evaluation"]["n"] for cell in cells]
    costs, fit, owner = _fit(curves)
    found, rng = [crossing(costs, fit, level)], np.random.default_rng(seed)
    mine = [fit[owner == number] for number in range(len(curves))]
    for _ in range(DRAWS):
        drawn = rng.integers(len(curves), size=len(curves))
        again = [np.column_stack((curves[i][:, 0], rng.binomial(rolls[i], mine[i]) / rolls[i])) for i in drawn]
        found.append(crossing(*_fit(again)[:2], level))
    return np.array(found)


def _fit(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(costs in order, the fit, the number of the curve that each is of)."""
    owner = np.repeat(range(len(curves)), [len(points) for points in curves])
    points = np.concatenate(curves)
    order = np.argsort(points[:, 0], kind="stable")
    return points[order, 0], rising(points[order, 1]), owner[order]


def pooled_shares(arms: Arms, baseline: str, level: float, cost: str) -> list[str]:
    """Of each arm: what part of the baseline's cost, and the middle 80% of the draws. None where the baseline does not
    get there. Where it does not in a draw, what it spent in all stands for what it would have taken: the share is no
    larger than told."""
    arms = usable(arms, baseline, cost)
    theirs = pooled_costs(arms[baseline], level, cost, seed=1)
    if not math.isfinite(theirs[0]):
        return []
    spent = max(curve(cell, cost)[-1][0] for cell in arms[baseline])
    shares = []
    for cells in arms.values():
        mine = pooled_costs(cells, level, cost)
        shares.append(_with_range(mine / np.minimum(theirs, spent), (0.1, 0.9)))
    return shares


def line(curves: Sequence[np.ndarray]) -> tuple[float, float]:
    """(height at no cost, slope) of the least-squares line through all points: slope = cov(cost, accuracy) / var(cost).

    >>> line([np.array([[0.0, 0.25], [16.0, 0.5]]), np.array([[0.0, 0.5], [16.0, 0.75]])])
    (0.375, 0.015625)
    """
    costs, values = np.concatenate(curves).T
    off = costs - costs.mean()
    slope = float((off * values).sum() / (off * off).sum())
    return float(values.mean() - slope * costs.mean()), slope


def gain_costs(cells: Sequence[Log], cost: str, seed: int = 0) -> np.ndarray:
    """[1 + DRAWS]: what a hundredth of accuracy costs, then the same in every draw; infinite where it does not rise."""
    curves = [np.array(curve(cell, cost)) for cell in cells]
    if not curves:
        return np.full(1 + DRAWS, math.nan)
    rolls = [cell["evaluation"]["prompts"] * cell["evaluation"]["n"] for cell in cells]
    start, slope = line(curves)
    slopes, rng = [slope], np.random.default_rng(seed)
    for _ in range(DRAWS):
        drawn = [(curves[i][:, 0], rolls[i]) for i in rng.integers(len(curves), size=len(curves))]
        expected = [np.clip(start + slope * costs, 0.0, 1.0) for costs, _ in drawn]
        again = zip(drawn, expected, strict=True)
        slopes.append(line([np.column_stack((costs, rng.binomial(n, p) / n)) for (costs, n), p in again])[1])
    return np.array([0.01 / slope if slope > 0 else math.inf for slope in slopes])


def gain_shares(arms: Arms, baseline: str, cost: str) -> list[str]:
    """Of each arm: what part of the baseline's cost a hundredth gained takes, with the middle 95% of the draws. None
    where the baseline gains nothing."""
    arms = usable(arms, baseline, cost)
    theirs = gain_costs(arms[baseline], cost, seed=1)
    if not math.isfinite(theirs[0]):
        return []
    shares = []
    for cells in arms.values():
        mine = gain_costs(cells, cost)
        shares.append(_with_range(mine / theirs, (0.025, 0.975)))
    return shares


def _with_range(shares: np.ndarray, ends: tuple[float, float]) -> str:
    """The first, and quantiles of the rest; a draw in which neither gets there counts as never."""
    if math.isnan(shares[0]):
        return formats.MISSING
    low, high = np.quantile(np.nan_to_num(shares[1:], nan=math.inf, posinf=math.inf), ends, method="nearest")
    return f"{_share(shares[0])} ({_share(low)}–{_share(high)})"


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "never"
