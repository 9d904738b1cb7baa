from __future__ import annotations

import math

from whet.report.arms import evaluation_names, evaluations, number, series


def test_number_takes_finite_numbers_only() -> None:
    row = {
        "a": 1,
        "b": 0.5,
        "nan": math.nan,
        "inf": math.inf,
        "none": None,
        "word": "3",
        "flag": True,
    }
    assert [number(row, key) for key in (*row, "absent")] == [
        1.0,
        0.5,
        None,
        None,
        None,
        None,
        None,
        None,
    ]


def test_evaluations_pass_over_rows_without_one() -> None:
    rows = [
        {
            "step": 0,
            "tokens_generated": 0,
            "time_s": 0.0,
            "eval/held_out/accuracy": 0.2,
            "eval/held_out/level/1": 0.9,
        },
        {"step": 1, "tokens_generated": 500, "time_s": 1.5},
        {"step": 2, "tokens_generated": 1000, "time_s": 3.0, "eval/held_out/accuracy": None},
        {
            "step": 3,
            "tokens_generated": 1500,
            "time_s": 4.5,
            "eval/held_out/accuracy": 0.4,
            "eval/hard/accuracy": 0.1,
        },
    ]
    points = evaluations(rows, "held_out")
    assert [(p.step, p.tokens, p.seconds, p.accuracy) for p in points] == [
        (0, 0, 0, 0.2),
        (3, 1500, 4.5, 0.4),
    ]
    assert evaluation_names(rows) == ["held_out", "hard"]
    assert series(rows, "eval/hard/accuracy") == [(3.0, 0.1)]
