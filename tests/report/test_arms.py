from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.errors import WhetError
from whet.report.arms import arm_name, common_evaluation, name_runs, number, read_arms, read_run
from whet.report.compare import settings_that_differ


def test_seeds_of_one_arm_are_recognised_by_their_names() -> None:
    names = [
        "speed-seed0",
        "speed_s1",
        "speed.seed=2",
        "speed seed 3",
        "runs/speed/4",
        "uniform-16",
        "uniform 48",
    ]
    assert [arm_name(n) for n in names] == [
        *["speed"] * 4,
        "runs/speed",
        "uniform-16",
        "uniform 48",
    ]


def test_equal_folder_names_are_distinguished_by_their_parents() -> None:
    paths = [
        Path("/a/x/run"),
        Path("/a/y/run"),
        Path("/a/other"),
        Path("/b/y/run"),
        Path("/a/other"),
    ]
    assert list(name_runs(paths)) == ["x/run", "a/y/run", "other", "b/y/run"]


def test_arms_keep_the_order_given(make_run: Callable[..., Path]) -> None:
    folders = [
        make_run(name, seed=i)
        for i, name in enumerate(("uniform-seed0", "speed-seed0", "uniform-seed1"))
    ]
    arms = read_arms(folders)
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("uniform", 2), ("speed", 1)]
    named = read_arms({"first": folders[1], "second": folders[0]})
    assert [arm.name for arm in named] == ["first", "second"]


def test_settings_that_differ_leave_out_what_is_shared(save_run: Callable[..., Path]) -> None:
    a = save_run("a-seed0", [{"step": 0}], seed=0, learn={"lr": 1e-4})
    b = save_run("a-seed1", [{"step": 0}], seed=1, learn={"lr": 2e-4})
    c = save_run("c-seed0", [{"step": 0}], seed=0, learn={"lr": 1e-4}, curriculum={"groups": 48})
    differ = dict(settings_that_differ(read_arms([a, b, c])))
    assert differ == {
        "seed": ["0, 1", "0"],
        "learn.lr": ["0.0001, 0.0002", "0.0001"],  # an arm that is no pure repetition shows it
        "curriculum.groups": ["16", "48"],
    }


def test_a_damaged_line_is_left_out_and_named(save_run: Callable[..., Path]) -> None:
    folder = save_run("run", [])
    for text, steps, says in (
        ('{"step": 0}\n{"step": 1}', [0, 1], ""),
        ('{"step": 0}\n{"step": 1, "rew', [0], ""),  # torn by a kill, or being written now
        (
            '{"step": 0}\n\x00\x00\n{"step": 2}\n',
            [0, 2],
            "Line 2 of metrics.jsonl is damaged and left out.",
        ),
        (
            '[1]\n\n{"step": 2}\n{',
            [2],
            "Line 1 and 1 more of metrics.jsonl are damaged and left out.",
        ),
    ):
        (folder / "metrics.jsonl").write_text(text)
        log = read_run("run", folder)
        assert ([row["step"] for row in log.rows], log.damage) == (steps, says)


def test_a_number_is_finite() -> None:
    row = {"a": 10**400, "b": -(10**400), "c": math.inf, "d": True, "e": "1", "f": 3}
    assert [number(row, key) for key in "abcdefg"] == [None, None, None, None, None, 3.0, None]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"holds no config\.toml"):
        read_arms([tmp_path])
    with pytest.raises(WhetError, match="at least one"):
        read_arms([])


def test_runs_are_compared_by_an_evaluation_they_share(save_run: Callable[..., Path]) -> None:
    a = save_run("a", [{"step": 0, "eval/easy/accuracy": 0.1, "eval/hard/accuracy": 0.1}])
    b = save_run("b", [{"step": 0, "eval/hard/accuracy": 0.1}])
    assert common_evaluation(read_arms([a, b])) == "hard"
    assert common_evaluation(read_arms([a])) == "easy"
    c = save_run("c", [{"step": 0, "eval/other/accuracy": 0.1}])
    assert common_evaluation(read_arms([a, c])) is None
