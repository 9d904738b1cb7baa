"""Curves over tokens or steps: read between their points, and the median of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from whet.report.arms import Curve


def at(curve: Curve, x: float) -> float:
    """The height of the curve at x: linear between points, flat outside."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def median_curve(curves: Sequence[Curve], points: int = 60) -> Curve:
    """The median of the curves at evenly spaced x, over the range that all of them cover.

    >>> median_curve([[(0, 0.0), (2, 2.0)], [(0, 1.0), (2, 1.0)], [(0, 4.0), (4, 4.0)]], points=3)
    [(0.0, 1.0), (1.0, 1.0), (2.0, 2.0)]
    """
    curves = [c for c in curves if c]
    if len(curves) < 2:
        return list(curves[0]) if curves else []
    low, high = max(c[0][0] for c in curves), min(c[-1][0] for c in curves)
    if high <= low:
        return []
    xs = [low + (high - low) * i / (points - 1) for i in range(points)]
    return [(x, median(at(c, x) for c in curves)) for x in xs]
