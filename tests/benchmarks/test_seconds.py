"""Seconds to a target: two cells of a matrix, step by step in turn, by real processes."""

import json
import time
from pathlib import Path

import proof
import pytest
import seconds
import turns
from matrix import read_plan
from test_train_bench import model, write_matrix

from whet.run import read_metrics

MATRIX = """
recipe = "recipe.toml"
seeds = [0]
start = "model"
target = 0.001
set = { steps = 8, token_budget = 100_000, "eval.0.every" = 1 }

[[arm]]
name = "uniform"

[[arm]]
name = "dapo"
set = { "curriculum.name" = "dapo", steps = 2 }
"""


@pytest.mark.slow
def test_cells_take_turns_until_the_target(tmp_path: Path) -> None:
    matrix = write_matrix(tmp_path, MATRIX)
    model(tmp_path / "model")
    seconds.main(
        matrix, "uniform,dapo", "0", tmp_path / "runs", "uniform=2", 300.0, tmp_path / "out"
    )
    for arm, ended_by, steps in (
        ("uniform", "target", 2 * (1 + seconds.AFTER)),
        ("dapo", "recipe", 2),
    ):
        found = json.loads((tmp_path / "out/train/small_seconds" / f"{arm}-seed0.json").read_text())
        assert (found["ended_by"], found["rows"][-1][0]) == (ended_by, steps), (
            "every answer of this model is right"
        )
        assert found["solo"] and found["startup_s"] > 0
    body = proof.alone_table(
        read_plan(matrix), proof.read_alone(read_plan(matrix), tmp_path / "out")
    )
    assert body.splitlines()[-2].startswith("| uniform | 0: ")


@pytest.mark.slow
def test_the_wait_for_a_turn_is_no_part_of_a_step(tmp_path: Path) -> None:
    write_matrix(tmp_path)
    model(tmp_path / "model")
    words = [
        "train",
        str(tmp_path / "recipe.toml"),
        "--model",
        str(tmp_path / "model"),
        "--set",
        "steps=3",
    ]
    runner = turns.Runner(
        "one", tmp_path / "one", [turns.__file__, *words, "--out", str(tmp_path / "one" / "run")]
    )
    until, steps = time.monotonic() + 300, 0.0
    runner.wait(until)
    while not runner.over:
        time.sleep(1.0)  # another run would have its turn now
        begun = time.monotonic()
        runner.go()
        runner.wait(until)
        steps += time.monotonic() - begun
    runner.close()
    rows = read_metrics(tmp_path / "one" / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3], runner.why
    assert 0 < rows[-1]["time_s"] <= steps
    assert sum(row["time/total"] for row in rows[1:]) <= steps
