"""The cost of an accuracy level by all evaluations of an arm together, whatever seed they are of. Pure.

One evaluation is as noisy as its problems are few, so where curves are flat a seed's own crossing (`results.py`) is
largely luck. Here all evaluations of an arm are put in the order of their cost and fitted by the rising step function
next to them (isotonic regression, by pooling adjacent violators); the level costs what the first step at or above it
does. How sure that is: the same with seeds drawn again and each evaluation drawn again from its fit (a bootstrap).
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
    cells = usable(cells, cost)
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
    theirs = pooled_costs(arms[baseline], level, cost, seed=1)
    if not math.isfinite(theirs[0]):
        return []
    spent = max(curve(cell, cost)[-1][0] for cell in usable(arms[baseline], cost))
    shares = []
    for cells in arms.values():
        mine = pooled_costs(cells, level, cost)
        low, high = np.quantile(mine[1:] / np.minimum(theirs[1:], spent), [0.1, 0.9], method="nearest")
        known = not math.isnan(mine[0])
        shares.append(f"{_share(mine[0] / theirs[0])} ({_share(low)}–{_share(high)})" if known else formats.MISSING)
    return shares


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "never"
