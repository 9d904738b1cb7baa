"""Both arms see the same rollouts; only one goes on learning."""

import json
from pathlib import Path

import pytest
from draft_steps import app, steps_bench
from small_run import SMALL, even_digits, small_config
from typer.testing import CliRunner

from whet.errors import WhetError

SETS = ("steps=4", "rollout.max_tokens=12")


def test_a_frozen_drafter_beside_one_that_learns(tmp_path: Path) -> None:
    lines: list[str] = []
    found = steps_bench(
        small_config(*SETS),
        freeze=2,
        depth=2,
        out=tmp_path / "new",
        reward=even_digits,
        on_progress=lines.append,
    )
    trained, frozen = found["arms"]["trained"], found["arms"]["frozen"]
    assert [row["step"] for row in trained] == [row["step"] for row in frozen] == [0, 1, 2, 3, 4]
    assert [row["rows_drafted"] > 0 for row in trained] == [False, True, True, True, True], (
        "nothing is evaluated"
    )
    assert all(row["accept_length"] >= 1 for row in trained[1:] + frozen[1:])
    assert [row.get("length/mean") for row in trained] == [row.get("length/mean") for row in frozen]
    assert ["draft/loss" in row for row in trained] == [False, True, True, True, True]
    assert ["draft/loss" in row for row in frozen] == [False, True, True, False, False]
    assert [row.get("accept_length") for row in trained[:4]] == [
        row.get("accept_length") for row in frozen[:4]
    ]
    assert found["last_quarter"] == {
        "trained": trained[4]["accept_length"],
        "frozen": pytest.approx(frozen[4]["accept_length"]),
    }
    written = json.loads((tmp_path / "new" / "draft_over_steps.json").read_text())
    assert written["arms"] == found["arms"] and written["commit"] and '"eagle"' in written["recipe"]
    assert lines[-1].startswith("frozen: step 4, accept length ")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a judge that the recipe names: a function of a module where the user stands."""
    monkeypatch.chdir(tmp_path)
    Path("own_judge.py").write_text(
        "def judge(prompt, response):\n    return float(len(response) % 2)\n"
    )
    Path("recipe.toml").write_text('[[data]]\ntask = "chain"\nreward = "own_judge:judge"\n')
    sets = [part for one in (*SMALL, *SETS) for part in ("--set", one)]
    asked = ["recipe.toml", "--steps", "2", "--freeze", "1", "--depth", "2", "--out", "out", *sets]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert (
        "with drafts of 2; the lessons of the frozen one end at 1." in ran.output
        and "last quarter" in ran.output
    )
    found = json.loads(Path("out/draft_over_steps.json").read_text())
    assert [len(found["arms"][name]) for name in ("trained", "frozen")] == [3, 3] and found[
        "freeze"
    ] == 1


def test_it_is_frozen_before_the_end(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="frozen after 4 updates is no other one in a run of 4"):
        steps_bench(small_config(*SETS), freeze=4, depth=2, out=tmp_path, reward=even_digits)
