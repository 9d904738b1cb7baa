"""Measures what an accuracy level cost, and writes numbers in one way for tables, charts and the terminal.

A run reaches a level at the first of two consecutive evaluations at or above it: one lucky evaluation does not count,
and neither does the last one alone. A run that ends before is not thrown away. It is known to need more than it
spent, so every cost is an interval (`Reach`), and medians and ratios carry the interval through. `compare`, `page`,
the demo and the benchmarks call these pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from whet.report.arms import Axis, Point

TOLERANCE = 1e-6  # an accuracy that is 0.7 up to rounding is 0.7; real accuracies differ by more
LAST = 3  # evaluations averaged into the final accuracy, because a single one is noisy
MISSING = "–"

# ---- levels


def first_crossing(points: Sequence[Point], level: float) -> Point | None:
    """The first of two consecutive evaluations at or above the level; None when there are no such two."""
    return next(
        (a for a, b in pairwise(points) if min(a.accuracy, b.accuracy) >= level - TOLERANCE), None
    )


@dataclass(frozen=True, slots=True)
class Reach:
    """The cost of a level, between low and high: both are equal if it was measured, high is infinite if not reached."""

    low: float
    high: float

    @property
    def known(self) -> bool:
        return math.isfinite(self.high) and self.low == self.high


def reach(points: Sequence[Point], level: float, axis: Axis) -> Reach:
    """The cost of a level; a run that never crosses needs more than it had spent at its last evaluation below it."""
    crossing = first_crossing(points, level)
    if crossing is not None:
        value = float(getattr(crossing, axis))
        return Reach(value, value)
    below = [p for p in points if p.accuracy < level - TOLERANCE]
    return Reach(float(getattr(below[-1], axis)) if below else 0.0, math.inf)


def median_reach(reaches: Sequence[Reach]) -> Reach:
    """The median of the seeds, as an interval: a median can only rise if the value of a seed rises.

    >>> median_reach([Reach(3, 3), Reach(5, 5), Reach(9, math.inf)])
    Reach(low=5, high=5)
    >>> median_reach([Reach(3, 3), Reach(9, math.inf)])
    Reach(low=6.0, high=inf)
    """
    return Reach(median(r.low for r in reaches), median(r.high for r in reaches))


def saving(baseline: Reach, other: Reach) -> Reach:
    """How many times cheaper than the baseline the other is: baseline / other, as an interval.

    >>> saving(Reach(600, 600), Reach(300, 300))
    Reach(low=2.0, high=2.0)
    >>> saving(Reach(600, math.inf), Reach(300, 300))  # the baseline never reached it: at least twice
    Reach(low=2.0, high=inf)
    """
    low = baseline.low / other.high if other.high > 0 else 0.0
    high = baseline.high / other.low if other.low > 0 else math.inf
    return Reach(low, high)


def final_accuracy(points: Sequence[Point]) -> float | None:
    """Mean of the last three evaluations, or of all if there are fewer."""
    return fmean(p.accuracy for p in points[-LAST:]) if points else None


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the seeds that have a value."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def pick_levels(curves: Sequence[Sequence[Point]]) -> list[float]:
    """Levels for the columns of a table, rising: the highest that some run reaches and some below, above every start.

    From the top 0, 1, 2, 4 and 6 steps of 0.05 down (0.8, 0.75, 0.7, 0.6, 0.5); steps of 0.01 where the range is too
    small for two of these.
    """
    curves = [c for c in curves if c]
    if not curves:
        return []
    start = max(c[0].accuracy for c in curves)
    for per_unit in (20, 100):
        reached = [
            k
            for k in range(1, per_unit + 1)
            if any(first_crossing(c, k / per_unit) for c in curves)
        ]
        levels = [(reached[-1] - down) / per_unit for down in (6, 4, 2, 1, 0)] if reached else []
        levels = [x for x in levels if x > start + TOLERANCE]
        if len(levels) >= 2:
            break
    return levels


# ---- numbers


def count(value: float | None) -> str:
    """Three digits and a unit.

    >>> [count(v) for v in (0, 950, 4360, 43_600, 436_000, 999_600, 1_240_000, 2.5e9)]
    ['0', '950', '4.36k', '43.6k', '436k', '1M', '1.24M', '2.5G']
    """
    if value is None:
        return MISSING
    scaled = float(f"{value:.3g}")
    units = ["", "k", "M", "G", "T"]
    while abs(scaled) >= 1000 and len(units) > 1:
        scaled /= 1000
        del units[0]
    return f"{scaled:.3g}{units[0]}"


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours.

    >>> [duration(v) for v in (0, 0.4, 47.04, 200, 5400, 360_000)]
    ['0s', '0.4s', '47s', '3m20s', '1h30m', '100h']
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 6000 else f"{minutes // 60}h"


def accuracy(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def unjudged(share_unjudged: float | None) -> str:
    """What stands behind an accuracy of which some responses, or all, have no verdict.

    >>> unjudged(0.389), unjudged(0.0), unjudged(None)
    (' (39% unjudged)', '', '')
    """
    return f" ({share(share_unjudged)} unjudged)" if share_unjudged else ""


def level(value: float) -> str:
    """Two decimals, or three if the third is not zero.

    >>> level(0.5), level(0.75), level(0.065)
    ('0.50', '0.75', '0.065')
    """
    return f"{value:.3f}".removesuffix("0")


def share(value: float | None) -> str:
    """A share as a percentage.

    >>> share(0.417), share(0.004), share(0)
    ('42%', '0.4%', '0%')
    """
    if value is None:
        return MISSING
    return f"{100 * value:.0f}%" if value == 0 or value >= 0.01 else f"{100 * value:.1f}%"


def percent(progress: float) -> str:
    """Progress, rounded down: it is 100% only at the end.

    >>> percent(0.29), percent(0.9999), percent(1.0)
    ('29%', '99%', '100%')
    """
    return f"{math.floor(100 * progress + 1e-9)}%"


def factor(value: float) -> str:
    if value < 0.95:
        return f"{value:.2g}"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def times(ratio: Reach) -> str:
    """A ratio, as a bound where it is known from one side only."""
    if ratio.known:
        return f"{factor(ratio.low)}×"
    if ratio.low > 0:
        return f">{factor(ratio.low)}×"
    return f"<{factor(ratio.high)}×" if math.isfinite(ratio.high) else MISSING


def times_range(ratio: Reach) -> str:
    """The interval of a ratio, as a bound where one end is open; "" where both are, or where it has no width."""
    if ratio.low > 0 and math.isfinite(ratio.high):
        ends = factor(ratio.low), factor(ratio.high)
        return f"{'–'.join(ends)}×" if ends[0] != ends[1] else ""
    return times(ratio).removesuffix(MISSING)


def setting(value: Any) -> str:
    """A setting as a recipe writes it.

    >>> [setting(v) for v in ("speed", True, 0.0002, "")]
    ['speed', 'true', '0.0002', '""']
    """
    if value is None:
        return MISSING
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
