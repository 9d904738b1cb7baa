"""A matrix is settled by its tuning cells: the better rate of each side, and the target."""

import json
from pathlib import Path

import pytest
import settle
from test_train_bench import write_matrix

from whet.errors import WhetError

TUNING = """
recipe = "recipe.toml"
baseline = "uniform"
seeds = [100, 101]
start = "model"
set = { token_budget = 1000, "learn.lr" = 3e-5 }
[[arm]]
name = "uniform"
[[arm]]
name = "uniform-slow"
set = { "learn.lr" = 1e-5 }
[[arm]]
name = "all"
[[arm]]
name = "all-slow"
set = { "learn.lr" = 1e-5 }
"""
MATRIX = """target = 0.0 # target
[set]
"learn.lr" = 3e-5 # rate of all
[[arm]]
set = 1
"learn.lr" = 3e-5 # rate of uniform
"""
ENDS = {"uniform": 0.3, "uniform-slow": 0.5, "all": 0.6, "all-slow": 0.4}


def write_cells(folder: Path, seeds: tuple[int, ...] = (100, 101)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for arm, end in ENDS.items():
        for seed in seeds:
            late = end + (seed - 100) * 0.1
            rows = [
                [0, 0, 0.0, 0, 0.0, 0.1],
                [1, 500, 1.0, 0, 0.0, late],
                [2, 1000, 2.0, 0, 0.0, late],
            ]
            columns = ["step", "tokens", "seconds", "eval_tokens", "eval_seconds", "accuracy"]
            cell = {"arm": arm, "seed": seed, "columns": columns, "rows": rows}
            (folder / f"{arm}-seed{seed}.json").write_text(json.dumps(cell))


def test_the_better_rate_wins_and_the_target_is_halfway(tmp_path: Path) -> None:
    tuning, matrix = write_matrix(tmp_path, TUNING), tmp_path / "counted.toml"
    matrix.write_text(MATRIX)
    write_cells(tmp_path / "train" / "small")
    settle.main(tuning, matrix, tmp_path)
    # uniform-slow: the last three evaluations are 0.1, 0.5, 0.5 and 0.1, 0.6, 0.6, so it ends at 0.4 on average
    assert matrix.read_text().splitlines() == [
        "target = 0.25 # target",
        "[set]",
        '"learn.lr" = 3e-05 # rate of all',
        "[[arm]]",
        "set = 1",
        '"learn.lr" = 1e-05 # rate of uniform',
    ]


def test_a_matrix_with_counted_cells_and_tuning_without_a_seed_are_refused(tmp_path: Path) -> None:
    tuning, matrix = write_matrix(tmp_path, TUNING), tmp_path / "counted.toml"
    matrix.write_text(MATRIX)
    write_cells(tmp_path / "train" / "small", (100,))
    with pytest.raises(WhetError, match="missing: uniform, seed 101"):
        settle.main(tuning, matrix, tmp_path)
    write_cells(tmp_path / "train" / "counted")
    with pytest.raises(WhetError, match="counted cells already"):
        settle.main(tuning, matrix, tmp_path)
    assert matrix.read_text() == MATRIX
