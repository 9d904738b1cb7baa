"""Both arms see the same rollouts; only one goes on learning."""

import json
from pathlib import Path

from draft_over_steps import compare
from small_run import SMALL, even_digits


def test_a_frozen_drafter_beside_one_that_learns(tmp_path: Path) -> None:
    sets = [*SMALL, "steps=4", "rollout.max_tokens=12"]
    found = compare(sets, None, freeze=2, depth=2, out=tmp_path, reward=even_digits)
    trained, frozen = found["arms"]["trained"], found["arms"]["frozen"]
    assert [row["step"] for row in trained] == [row["step"] for row in frozen] == [0, 1, 2, 3, 4]
    assert all(row["accept_length"] >= 1 for row in trained[1:] + frozen[1:])
    assert [row.get("length/mean") for row in trained] == [row.get("length/mean") for row in frozen]
    assert ["draft/loss" in row for row in trained] == [False, True, True, True, True]
    assert ["draft/loss" in row for row in frozen] == [False, True, True, False, False]
    assert json.loads((tmp_path / "draft_over_steps.json").read_text())["arms"] == found["arms"]
