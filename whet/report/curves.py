"""Turns the metrics of a run into points and curves: evaluations, series over steps, moving means, medians of seeds.

Tables, levels and charts call these pure functions: rows of metrics.jsonl in, numbers out. Nothing here reads a file
or decides how a number looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

Row = Mapping[str, Any]  # one line of metrics.jsonl
Curve = list[tuple[float, float]]  # (x, y), x rising
Axis = Literal["tokens", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation.

    >>> Point(step=10, tokens=85_000, seconds=6.5, accuracy=0.598).tokens
    85000
    """

    step: int
    tokens: float  # generated for training so far
    seconds: float  # of training so far, without evaluation and saving
    accuracy: float


def number(row: Row, key: str) -> float | None:
    """A finite number, or None: an absent key, a null and a NaN all mean "not measured"."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def evaluation_names(rows: Sequence[Row]) -> list[str]:
    """The names in "eval/NAME/accuracy", in the order of their first appearance.

    >>> evaluation_names([{"eval/held_out/accuracy": 0.2}, {"eval/hard/accuracy": 0.1}])
    ['held_out', 'hard']
    """
    keys = (key.split("/") for row in rows for key in row)
    return list(dict.fromkeys(key[1] for key in keys if len(key) == 3 and (key[0], key[2]) == ("eval", "accuracy")))


def evaluations(rows: Sequence[Row], name: str) -> list[Point]:
    """One point for each row that holds this evaluation."""
    return [
        Point(
            step=int(number(row, "step") or 0),
            tokens=number(row, "tokens_generated") or 0.0,
            seconds=number(row, "time_s") or 0.0,
            accuracy=accuracy,
        )
        for row in rows
        if (accuracy := number(row, f"eval/{name}/accuracy")) is not None
    ]


def series(rows: Sequence[Row], key: str) -> Curve:
    """(step, value) of the rows that hold both."""
    pairs = ((number(row, "step"), number(row, key)) for row in rows)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def smooth(curve: Curve, window: int) -> Curve:
    """Moving mean over `window` points around each, over fewer at the ends.

    >>> smooth([(0, 0.0), (1, 6.0), (2, 3.0)], 3)
    [(0, 3.0), (1, 3.0), (2, 4.5)]
    """
    half = window // 2
    smoothed = []
    for i, (x, _) in enumerate(curve):
        near = [y for _, y in curve[max(0, i - half) : i + half + 1]]
        smoothed.append((x, sum(near) / len(near)))
    return smoothed


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


def thin(curve: Curve, most: int = 400) -> Curve:
    """About `most` points at most, first and last kept: a chart cannot show more than its pixels."""
    stride = math.ceil(len(curve) / most)
    return curve if stride <= 1 else [*curve[:-1:stride], curve[-1]]
