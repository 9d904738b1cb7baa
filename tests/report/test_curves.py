from __future__ import annotations

import math

from whet.report.arms import at, evaluation_names, evaluations, median_curve, number, series, smooth, thin


def test_number_takes_finite_numbers_only() -> None:
    row = {"a": 1, "b": 0.5, "nan": math.nan, "inf": math.inf, "none": None, "word": "3", "flag": True}
    assert [number(row, key) for key in (*row, "absent")] == [1.0, 0.5, None, None, None, None, None, None]


def test_evaluations_pass_over_rows_without_one() -> None:
    rows = [
        {"step": 0, "tokens_generated": 0, "time_s": 0.0, "eval/held_out/accuracy": 0.2, "eval/held_out/level/1": 0.9},
        {"step": 1, "tokens_generated": 500, "time_s": 1.5},
        {"step": 2, "tokens_generated": 1000, "time_s": 3.0, "eval/held_out/accuracy": None},
        {"step": 3, "tokens_generated": 1500, "time_s": 4.5, "eval/held_out/accuracy": 0.4, "eval/hard/accuracy": 0.1},
    ]
    points = evaluations(rows, "held_out")
    assert [(p.step, p.tokens, p.seconds, p.accuracy) for p in points] == [(0, 0, 0, 0.2), (3, 1500, 4.5, 0.4)]
    assert evaluation_names(rows) == ["held_out", "hard"]
    assert series(rows, "eval/hard/accuracy") == [(3.0, 0.1)]


def test_at_is_linear_between_points_and_flat_outside() -> None:
    curve = [(1.0, 2.0), (3.0, 6.0), (3.0, 8.0), (4.0, 8.0)]
    assert [at(curve, x) for x in (0, 1, 2, 3, 3.5, 9)] == [2, 2, 4, 6, 8, 8]


def test_median_curve_covers_only_what_all_curves_cover() -> None:
    short, long = [(0.0, 0.0), (2.0, 1.0)], [(1.0, 0.0), (4.0, 3.0)]
    assert median_curve([short, long], points=2) == [(1.0, 0.25), (2.0, 1.0)]
    assert median_curve([short, []]) == short
    assert median_curve([]) == []
    assert median_curve([[(0.0, 0.0), (1.0, 1.0)], [(2.0, 0.0), (3.0, 1.0)]]) == []


def test_smooth_keeps_a_constant_and_every_point() -> None:
    assert smooth([(x, 0.5) for x in range(7)], 5) == [(x, 0.5) for x in range(7)]
    assert smooth([(0, 1.0), (1, 2.0)], 1) == [(0, 1.0), (1, 2.0)]


def test_thin_keeps_both_ends() -> None:
    curve = [(float(x), 0.0) for x in range(1001)]
    thinned = thin(curve, 100)
    assert len(thinned) <= 102 and thinned[0] == curve[0] and thinned[-1] == curve[-1]
    assert thin(curve[:100], 100) == curve[:100]
