"""The table of the proof, on cells that are written by hand."""

import math
from pathlib import Path
from typing import Any

import proof
from matrix import read_plan
from test_train_bench import write_matrix

MATRIX = """
recipe = "recipe.toml"
baseline = "uniform"
seeds = [0, 1, 2]
start = "model"
target = 0.3
set = { token_budget = 400 }
[[arm]]
name = "uniform"
[[arm]]
name = "all"
[[arm]]
name = "cures"
"""
COLUMNS = ["step", "tokens", "seconds", "eval_tokens", "eval_seconds", "entropy", "accuracy"]


def cell(arm: str, seed: int, *heights: float, ended_by: str = "recipe") -> dict[str, Any]:
    """Evaluated every 100 tokens."""
    rows = [[i, 100 * i, 1.0 * i, 0, 0.0, 0.5 - i / 10, height] for i, height in enumerate(heights)]
    greedy = [[100 * i, height] for i, height in enumerate(heights)]
    return {
        "arm": arm,
        "seed": seed,
        "solo": False,
        "ended_by": ended_by,
        "columns": COLUMNS,
        "rows": rows,
        "also": {"greedy": greedy},
        "start": {"weights": "a" * 64},
        "hardware": {"gpu": "an abacus"},
        "versions": {"torch": "2.0"},
        "commit": "c0ffee",
    }


UNIFORM = [cell("uniform", seed, 0.1, 0.1, 0.2, 0.3, 0.3) for seed in (0, 1, 2)]
ALL = [
    cell("all", 0, 0.1, 0.4, ended_by="time"),
    cell("all", 1, 0.1, 0.4, 0.5, 0.5, 0.5),
    cell("all", 2, 0.1, 0.2, ended_by="time"),
]


def test_a_cell_whose_time_was_up_counts_for_the_target_if_it_had_reached_it() -> None:
    arm = proof.Arm(ALL, (), 0.3, 400)
    assert arm.costs == {0: 100, 1: 100}, "seed 2 might have reached it"
    # (0.1 + 0.4) / 2, then (0.4 + 0.5) / 2, 0.5 and 0.5, over four quarters
    assert arm.means == [0.425]
    assert (
        list(arm.greedy) == list(arm.greedy_ends) == [1]
        and arm.drawn == [(0.1, 0.5)]
        and len(arm.entropy) == 1
    )
    never = cell("all", 2, 0.1, 0.2, 0.2, 0.2, 0.2)
    assert proof.Arm([*ALL[:2], never], (), 0.3, 400).costs[2] == math.inf, (
        "a whole run that stays below never does"
    )


def test_without_five_the_others_are_compared_with_all(tmp_path: Path) -> None:
    plan = read_plan(write_matrix(tmp_path, MATRIX))
    cells = {"uniform": UNIFORM, "all": ALL, "cures": [cell("cures", 1, 0.1, 0.1, 0.3, 0.3, 0.3)]}
    lines = proof.document(plan, cells, {}).splitlines()
    assert "| relative to uniform | all relative to it |" in lines[2]
    assert lines[5].startswith(
        "| all | 0: 100, 1: 100 | 0.33 (0.33 to 0.33), 2 seeds | – | 0.425 |"
    )
    assert lines[6].startswith("| cures | 1: 200 | – | – |"), "one seed says nothing about a ratio"
    late = "all seed 0 after 100 tokens, all seed 2 after 100 tokens"
    assert lines[-1] == f"Stopped when their time was up, last evaluated: {late}."


def test_a_cell_whose_time_was_up_is_not_drawn(tmp_path: Path) -> None:
    plan = read_plan(write_matrix(tmp_path, MATRIX))
    late = [cell("cures", 0, 0.1, 0.2, ended_by="time")]
    (figure,) = proof.draw(plan, {"uniform": UNIFORM, "all": ALL, "cures": late}, tmp_path)
    text = figure.read_text()
    assert "uniform (3)" in text and "all (1)" in text and "cures" not in text
