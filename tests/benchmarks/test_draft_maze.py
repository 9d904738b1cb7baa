"""Updates on mazes without drafts and with them, in one run: they take turns, and the policy is that of a plain run."""

import json
from pathlib import Path
from typing import Any

import pytest
from draft_maze import KINDS, settings_of, summary, take_turns
from draft_maze import app as maze_app
from typer.testing import CliRunner

SIZES = {"groups": 2, "rollouts": 2, "limit": 40, "steps": 6}
SETS = ('data.0.options={train_count=12, mix={"5-6"=1.0}}', 'draft.chooser="bandit"')
"""The bandit speculates from the eleventh step on, whatever a clock says."""


def row(kind: str, seconds: float, tokens: float, **more: Any) -> dict[str, Any]:
    of_tokens = {"rollout/tokens": tokens, "written": {"stop": int(tokens), "stop_drafted": int(tokens) // 2}}
    return {
        "kind": kind,
        "time/generate": seconds,
        "time/total": 2 * seconds + 1,
        "time/save": 1.0,
        **of_tokens,
        **more,
    }


def test_seconds_per_token_of_the_updates_that_count() -> None:
    """0.2 s per token against 0.1. Of two updates that are drawn again, either comes twice in every fourth draw, so the
    middle 95% of the ratios reach from (5 / 30) / (3 / 20) to (3 / 10) / (1 / 20)."""
    cut = {"length": 8, "length_drafted": 6, "stop": 12, "stop_drafted": 3}
    rows = [row("plain", 90, 1), row("drafted", 1, 90), row("plain", 3, 10), row("drafted", 1, 20, written=cut)]
    assert summary(rows[:3], warm=1) == {}, "no update with drafts counts yet"
    rows += [row("plain", 5, 30), row("drafted", 3, 20, **{"draft/accept_length": 2.5})]
    found = summary(rows, warm=1)
    assert found["faster"] == pytest.approx(2) and found["faster_interval"] == pytest.approx((10 / 9, 6))
    assert found["update_faster"] == pytest.approx(2), "files are no part of an update"
    assert [found[kind]["updates"] for kind in KINDS] == [2, 2]
    assert [found[kind]["seconds"] for kind in KINDS] == [4, 2]
    assert found["drafted"]["accept_length"] == 2.5 and "accept_length" not in found["plain"]
    assert found["drafted"]["copied"] == {"stop": (3 + 10) / (12 + 20), "length": 6 / 8}
    assert found["plain"]["copied"] == {"stop": 20 / 40}


def test_the_recipe_is_that_of_the_maze_runs() -> None:
    settings = settings_of(SIZES | {"limit": 384}, device="cuda", sets=["learn.lr=1e-6"])
    assert settings.data[0].options["mix"] == {"3": 0.3, "5-7": 0.4, "13-14": 0.3}
    assert settings.data[0].options["train_count"] == 12, "no grid comes twice"
    assert (settings.rollout.max_tokens, settings.rollout.slots, settings.eval) == (384, 4, ())
    assert settings.draft.drafters == ("suffix",) and settings.learn.lr == 1e-6 and settings.model.dtype == "bfloat16"


def test_updates_take_turns_and_no_token_changes(tmp_path: Path) -> None:
    sizes = ["--groups", "2", "--rollouts", "2", "--limit", "40", "--warm", "1", "--updates", "2"]
    sets = [part for one in SETS for part in ("--set", one)]
    ran = CliRunner().invoke(maze_app, ["--device", "cpu", *sizes, *sets, "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert "drafts make the rollouts" in ran.output and "2 plain and 2 drafted" in ran.output
    found = json.loads((tmp_path / "out" / "draft_maze.json").read_text())
    assert [one["kind"] for one in found["rows"]] == [*KINDS] * 3 and found["commit"]
    assert ["draft/saved" in one for one in found["rows"]] == [False, True] * 3, "one engine knows nothing of drafts"
    assert sum(one.get("draft/saved", 0) for one in found["rows"]) > 0
    assert list(found["by_batch"]) and len(found["chances"]["suffix"]) > 0
    assert found["summary"]["drafted"]["copied"] and not any(found["summary"]["plain"]["copied"].values())

    plain = take_turns(settings_of(SIZES, device="cpu", drafters=(), sets=SETS), warm=1, out=tmp_path / "plain")
    for name in ("rollout/tokens", "length/mean", "length/max", "reward/mean"):
        assert [one[name] for one in plain["rows"]] == [one[name] for one in found["rows"]], name
    steps = [[one["rollout/steps"] for one in of["rows"]] for of in (plain, found)]
    assert steps[0][::2] == steps[1][::2] and sum(steps[0][1::2]) > sum(steps[1][1::2]), "fewer steps with drafts alone"
