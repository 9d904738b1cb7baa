"""The sums of a matrix, on cells that are written by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matrix_document import document, fill, read_arms, share_table, short_table
from matrix_results import (
    at_equal_seconds,
    cost_text,
    drift,
    elsewhere,
    end,
    end_row,
    entropy_correlation,
    pick_levels,
    reaches,
    share,
    target_level,
    usable,
)
from train import read_outcome, rows_of, write_outcome

from whet.errors import WhetError
from whet.report import formats
from whet.report.formats import Reach, median_reach

COLUMNS = ["step", "tokens", "rollouts", "seconds", "signal", "entropy", "length", "accuracy"]


def cell(
    arm: str, seed: int, curve: list[tuple[float, float, float]], *, solo: bool = True, **more: Any
) -> dict[str, Any]:
    """curve: (tokens in thousands, seconds, accuracy); an update without evaluation lies between any two."""
    rows: list[list[Any]] = []
    for i, (tokens, seconds, accuracy) in enumerate(curve):
        if i:
            rows.append([2 * i - 1, tokens * 1000 - 1, tokens * 10 - 1, seconds - 0.5, 0.5, 1.0, 80, None])
        rows.append([2 * i, tokens * 1000, tokens * 10, seconds, 0.5, 1.0 - 0.1 * i, 80 - i, accuracy])
    return {
        "arm": arm,
        "seed": seed,
        "solo": solo,
        "columns": COLUMNS,
        "rows": rows,
        "wall_s": 60.0,
        "pool": 100,
        "distinct_prompts": 40 + seed,
        "distinct_is_least": False,
        "evaluation": {"name": "test", "prompts": 400, "n": 1},
        "start": {"weights": "a" * 64},
        "hardware": {"cpu": "an abacus"},
        "versions": {"torch": "2.0"},
        "commit": "c0ffee",
    }


UNIFORM = [
    cell("uniform", 0, [(0, 0, 0.10), (100, 10, 0.12), (200, 20, 0.13), (300, 30, 0.14)]),
    cell("uniform", 1, [(0, 0, 0.10), (100, 10, 0.13), (200, 20, 0.13), (300, 30, 0.13)]),
    cell("uniform", 2, [(0, 0, 0.10), (100, 10, 0.11), (200, 20, 0.11), (300, 30, 0.12)]),
]
SPEED = [
    cell("speed", 0, [(0, 0, 0.10), (50, 10, 0.14), (100, 20, 0.15), (150, 30, 0.20)]),
    cell("speed", 1, [(0, 0, 0.10), (50, 8, 0.13), (100, 16, 0.18), (150, 24, 0.18)], solo=False),
]
ARMS = {"uniform": UNIFORM, "speed": SPEED}


def test_a_level_is_the_first_of_two_evaluations_and_never_is_counted() -> None:
    assert reaches(UNIFORM, 0.13, "tokens") == [Reach(200e3, 200e3), Reach(100e3, 100e3), Reach(300e3, math.inf)]
    assert reaches(UNIFORM, 0.13, "rollouts")[0] == Reach(2000, 2000)
    assert reaches(UNIFORM, 0.13, "seconds")[0] == Reach(20, 20)
    assert cost_text(reaches(UNIFORM, 0.13, "tokens"), formats.count) == "200k (100k–never), 2 of 3"
    assert cost_text(reaches(UNIFORM, 0.15, "tokens"), formats.count) == "never (by 300k)"
    assert cost_text(reaches(UNIFORM[:1], 0.11, "tokens"), formats.count) == "100k"
    assert cost_text([Reach(1, 1), Reach(5, math.inf), Reach(7, math.inf)], formats.count) == ">5 (1–never), 1 of 3"
    assert cost_text([], formats.count) == formats.MISSING


def test_the_target_is_what_the_median_seed_of_the_baseline_reaches() -> None:
    assert target_level(UNIFORM) == 0.13
    assert target_level(SPEED) == 0.15, "0.16 is reached by one of two: the median is not known"
    assert target_level([cell("flat", 0, [(0, 0, 0.1), (9, 9, 0.1), (18, 18, 0.1)])]) is None
    assert pick_levels(ARMS, 0.13) == [0.105, 0.12, 0.13, 0.135, 0.15, 0.165, 0.18]


def test_shares_of_the_baseline_carry_what_is_not_known() -> None:
    baseline, mine = (median_reach(reaches(some, 0.13, "tokens")) for some in (UNIFORM, SPEED))
    assert share(baseline, mine) == Reach(0.25, 0.25)
    assert share(Reach(100, math.inf), Reach(50, 50)) == Reach(0.0, 0.5)
    text = share_table(ARMS, "uniform", 0.13).splitlines()
    assert text[2].startswith("| uniform | 200k (100k–never), 2 of 3 | 1.00 |")
    assert text[3] == "| speed | 50k (50k–50k) | 0.25 | 500 (500–500) | 0.25 | 10s | 0.50 |", "one seed was alone"


def test_seconds_come_from_cells_that_ran_alone() -> None:
    assert usable(ARMS, "uniform", "tokens") == ARMS
    assert usable(ARMS, "uniform", "seconds") == {"uniform": UNIFORM, "speed": SPEED[:1]}
    equal = at_equal_seconds(ARMS, "uniform")
    assert equal is not None and equal.seconds == 30
    assert equal.accuracy == {"uniform": 0.13, "speed": 0.20}
    assert [round(x, 4) for x in equal.interval] == [0.1005, 0.1665]  # Wilson's, of 0.13 among 400
    assert [equal.verdict(arm) for arm in ("uniform", "speed", "dapo")] == ["within", "better", formats.MISSING]
    shared = {"uniform": [{**one, "solo": False} for one in UNIFORM]}
    assert at_equal_seconds(shared, "uniform") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"commit": "decade"}, "commit decade"),
        pytest.param({"hardware": {"cpu": "a faster abacus"}}, "cpu a faster abacus", marks=pytest.mark.slow),
        pytest.param({"hardware": {"cpu": "an abacus", "machine": "2"}}, "machine 2", marks=pytest.mark.slow),
    ],
)
def test_seconds_of_another_machine_or_commit_are_left_out(changed: dict[str, Any], what: str) -> None:
    """Tokens may be compared; of seconds there is neither a number nor a ratio, and the page says why."""
    arms = {"uniform": UNIFORM, "speed": [{**one, "solo": True, **changed} for one in SPEED], "dapo": SPEED[:1]}
    row = share_table(arms, "uniform", 0.13).splitlines()[3]
    assert row == "| speed | 50k (50k–50k) | 0.25 | 500 (500–500) | 0.25 | – | – |"
    assert short_table(arms, "uniform").splitlines()[3].endswith("| 50k (50k–50k) | 0.25 | – | – |")
    text = document(arms, "uniform", {})
    assert f"Seconds of another machine or commit are left out: speed ({what})." in text
    table = text.partition("| seconds to |")[2].splitlines()
    assert table[2].startswith("| uniform | ") and table[3].startswith("| dapo | 10s"), "speed has no row"
    pooled = text.partition("| seconds, of uniform's, to |")[2].splitlines()
    assert pooled[2].startswith("| uniform | 1.00") and pooled[3].startswith("| dapo | ")
    equal = at_equal_seconds(arms, "uniform")
    assert equal is not None and set(equal.accuracy) == {"uniform", "dapo"}
    assert "Seconds of another" not in document(ARMS, "uniform", {})


def test_a_baseline_of_two_places_tells_seconds_of_one() -> None:
    """Two of three seeds of one commit: the third is left out."""
    mixed = [*UNIFORM[:2], {**UNIFORM[2], "commit": "decade"}]
    assert usable({"uniform": mixed}, "uniform", "seconds") == {"uniform": UNIFORM[:2]}
    assert elsewhere({"uniform": mixed}, "uniform") == {"commit decade": ["uniform"]}


@pytest.mark.slow
def test_a_level_is_shown_with_one_right_answer_fewer() -> None:
    """0.13 of 400 are 52; uniform's seed 0 has 52, so 51 of them reach it where 52 do."""
    text = document(ARMS, "uniform", {})
    after = text.partition("With one right answer fewer:")[2].splitlines()
    assert "tokens to 0.126" in after[2] and after[4].startswith("| uniform | 200k (100k–never), 2 of 3 | 1.00 |")


def test_where_an_arm_ended() -> None:
    assert end(UNIFORM[0]) == 0.14
    assert drift(SPEED[0], "entropy") == pytest.approx((1.0, (0.8 + 1.0 + 0.7) / 3))
    row = end_row("speed", SPEED, SPEED[:1], at_equal_seconds(ARMS, "uniform"))
    assert row["seeds"] == "2 (few)" and row["accuracy at the end (95%)"].startswith("0.190 (0.15")
    assert (row["tokens"], row["rollouts"], row["updates"], row["seconds"]) == ("150k", "1.5k", "6", "30s")
    assert (row["informative"], row["prompts used"], row["at 30s"]) == ("50%", "40.5", "0.200, better")
    least = end_row("speed", [{**SPEED[0], "distinct_is_least": True}], [], None)
    assert least["prompts used"] == "≥40" and "at 30s" not in least


def test_a_further_evaluation_is_shown_at_the_start_and_at_the_end_where_there_was_one() -> None:
    whole, short = ({**one, "also": {"greedy": [[0, 0.1], [6, 0.15]]}} for one in SPEED)
    short = {**short, "also": {"greedy": [[0, 0.1], [4, 0.3]]}}
    assert end_row("speed", [whole, short], [], None)["greedy"] == "0.100 → 0.150", "the other was cut short"
    assert end_row("speed", [short], [], None)["greedy"] == "0.100 → –"


def test_accuracy_is_held_against_entropy() -> None:
    """Three cells on a falling line: entropy 0.9, 0.8, 0.7 at the end, accuracy 0.1, 0.2, 0.3."""
    arms = {"a": [cell("a", seed, [(0, 0, 0.0), *[(10, 10, 0.1 + 0.1 * seed)] * 3]) for seed in range(3)]}
    for seed, one in enumerate(arms["a"]):
        one["rows"] = [[*row[:5], 0.9 - 0.1 * seed, *row[6:]] for row in one["rows"]]
    assert entropy_correlation(arms) == pytest.approx(-1.0)
    assert "have a correlation of -1.00." in document(arms, "a", {})
    assert entropy_correlation({"a": arms["a"][:2]}) is None, "two points always lie on a line"


def test_evaluation_is_counted_apart() -> None:
    metrics = [
        {"step": 0, "tokens_generated": 0.0, "eval/a/accuracy": 0.1, "eval/a/length": 20.0, "eval/b/length": 5.0}
        | {"time/eval": 2.0},
        {"step": 1, "tokens_generated": 700.0, "time_s": 1.25},
        {"step": 2, "tokens_generated": 1400.0, "time_s": 2.5, "eval/a/accuracy": 0.2, "eval/a/length": 10.0}
        | {"time/eval": 1.5},
    ]
    rows = rows_of(metrics, "a", {"a": 100, "b": 10})
    assert [row[1] for row in rows] == [0, 700, 1400]
    assert [row[-4:] for row in rows] == [[2050, 2.0, 0.1, 20], [2050, 2.0, None, None], [3050, 3.5, 0.2, 10]]


@pytest.mark.slow
def test_a_document_says_what_was_measured(tmp_path: Path) -> None:
    for one in (*UNIFORM, *SPEED):
        write_outcome(tmp_path / f"{one['arm']}-seed{one['seed']}.json", one)
    arms = read_arms(tmp_path, ["uniform", "dapo", "speed"])
    assert list(arms) == ["uniform", "speed"] and arms["speed"][1] == SPEED[1], "what is written is read"
    text = document(arms, "uniform", {"speed": "screened", "dapo": "never run"})
    assert "5 cells, 4 of them alone" in text and "the best ended at 0.200 (speed, seed 0), 2.00 times" in text
    assert "The highest level that uniform reaches is 0.13" in text
    assert "**speed**: screened" in text and "never run" not in text
    assert "same bytes" not in text
    arms["speed"][0]["start"]["weights"] = "b" * 64
    assert "did not begin from the same bytes" in document(arms, "uniform", {})
    assert "| speed | 2 | 0.190 (0.180–0.200) | 50k (50k–50k) | 0.25 | 10s | 0.50 |" in short_table(arms, "uniform")
    assert "reaches no level" in document({"uniform": [cell("uniform", 0, [(0, 0, 0.5), (1, 1, 0.2)])]}, "uniform", {})


def test_only_what_is_between_the_marks_is_replaced() -> None:
    text = "mine\n<!-- results: m -->\nold\n<!-- end: m -->\nmine too\n<!-- results: n -->\n<!-- end: n -->\n"
    once = fill(text, "m", "new")
    assert once == text.replace("old", "new") and fill(once, "m", "new") == once
    with pytest.raises(WhetError, match="end: m"):
        fill("<!-- results: m -->", "m", "new")


def test_files_that_are_no_cells(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="no finished cells"):
        read_arms(tmp_path, [])
    for text in ("{", "[]", json.dumps({"arm": "a"})):
        (tmp_path / "a-seed0.json").write_text(text)
        with pytest.raises(WhetError, match=r"a-seed0.json cannot be used: .*move it away"):
            read_outcome(tmp_path / "a-seed0.json")
