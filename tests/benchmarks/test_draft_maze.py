"""Rollouts on mazes without drafts and with them: both engines of one run decode the same, and are compared."""

import json
from pathlib import Path
from typing import Any

import draft_maze
import pytest
from draft_maze import KINDS, Turns, settings_of, summary
from draft_maze import app as maze_app
from typer.testing import CliRunner

SIZES = {"groups": 2, "rollouts": 2, "limit": 40, "steps": 4}
SETS = ('data.0.options={train_count=8, mix={"5-6"=1.0}}', 'draft.chooser="bandit"')
"""The bandit speculates from the eleventh step on, whatever a clock says."""


def row(plain: float, drafted: float, **more: Any) -> dict[str, Any]:
    kinds = {
        "plain": {"seconds": plain, "steps": 8.0},
        "drafted": {"seconds": drafted, "steps": 4.0},
    }
    return {
        "same": 1.0,
        **kinds,
        "rest": 2.0,
        "lessons": 0.0,
        "written": {"stop": 10, "stop_drafted": 4},
        **more,
    }


def test_updates_are_compared_in_pairs() -> None:
    """Of two updates that are drawn again, either comes twice in every fourth draw, so the middle 95% of the ratios
    reach from 5 / 3 to 3 / 1. The rest of an update takes 2 s, and once the drafter takes a lesson of 1 s."""
    written = {"length": 8, "length_drafted": 6, "stop": 12, "stop_drafted": 3}
    second = row(5, 3, same=0.5, lessons=1.0, written=written, **{"length/p50": 40.0})
    second["drafted"]["accept_length"] = 2.5
    found = summary([row(3, 1), second])
    assert found["faster"] == 2 and found["faster_interval"] == pytest.approx((5 / 3, 3))
    assert found["faster_median"] == pytest.approx((3 / 1 + 5 / 3) / 2), "the ratio of each update"
    assert found["update_faster_median"] == pytest.approx((5 / 3 + 7 / 6) / 2)
    assert found["update_faster"] == 12 / 9 and found["update_faster_interval"] == pytest.approx(
        (7 / 6, 5 / 3)
    )
    assert (found["updates"], found["same"], found["length/p50"], found["length/max"]) == (
        2,
        0.75,
        40,
        None,
    )
    assert [found[kind]["seconds"] for kind in KINDS] == [4, 2] and [
        found[kind]["steps"] for kind in KINDS
    ] == [8, 4]
    assert [found[kind]["accept_length"] for kind in KINDS] == [None, 2.5]
    assert found["copied"] == {"stop": (4 + 3) / (10 + 12), "length": 6 / 8}
    assert summary([]) == {}


def test_the_recipe_is_that_of_the_maze_runs() -> None:
    settings = settings_of(SIZES | {"limit": 384}, device="cuda", sets=["learn.lr=1e-6"])
    assert settings.data[0].options["mix"] == {"3": 0.3, "5-7": 0.4, "13-14": 0.3}
    assert settings.data[0].options["train_count"] == 8, "no grid comes twice"
    assert (settings.rollout.max_tokens, settings.rollout.slots, settings.eval) == (384, 4, ())
    assert (
        settings.draft.drafters == ("suffix",)
        and settings.learn.lr == 1e-6
        and settings.model.dtype == "bfloat16"
    )


def test_updates_are_gentler_than_the_recipes() -> None:
    learn = settings_of(SIZES, device="cpu").learn
    assert (learn.lr, learn.minibatches) == (1e-5, 1)


class Slow:
    """An engine whose clock is told: submitting takes 1 s and collecting 10."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.idle = clock, True

    def submit(self, requests: list[int]) -> None:
        self.clock[0] += 1
        self.idle = False

    def collect(self, early: object = None) -> list[Any]:
        assert early is None
        self.clock[0] += 10
        self.idle = True
        return []


def test_neither_engine_pays_for_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, judged = [0.0], list[list[Any]]()
    monkeypatch.setattr(draft_maze.time, "perf_counter", lambda: clock[0])
    turns = Turns({kind: Slow(clock) for kind in KINDS})  # type: ignore[misc]
    turns.submit([])
    assert not turns.idle, "what was asked is under way"
    clock[0] += 100  # what the loop does meanwhile
    turns.collect(lambda done: (judged.append(done), clock.__setitem__(0, clock[0] + 1000))[0])
    assert turns.idle and judged == [[]] and turns.seconds == {"plain": 11, "drafted": 11}


def test_both_engines_decode_the_same_rollouts(tmp_path: Path) -> None:
    sizes = ["--groups", "2", "--rollouts", "2", "--limit", "40", "--warm", "1", "--updates", "3"]
    sets = [part for one in SETS for part in ("--set", one)]
    ran = CliRunner().invoke(maze_app, ["--device", "cpu", *sizes, *sets, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "The rollouts are" in ran.output and "100.0% of the rollouts are the same." in ran.output
    found = json.loads((tmp_path / "draft_maze.json").read_text())
    assert [one["first"] for one in found["rows"]] == [*KINDS] * 2 and found["commit"]
    assert all(
        one["same"] == 1 and one["plain"]["tokens"] == one["drafted"]["tokens"]
        for one in found["rows"]
    )
    assert all(one["plain"]["steps"] >= one["drafted"]["steps"] > 0 for one in found["rows"])
    assert not any("accept_length" in one["plain"] for one in found["rows"]), (
        "one engine knows nothing of drafts"
    )
    assert found["summary"]["updates"] == 3 and found["summary"]["drafted"]["accept_length"] > 1
    assert sum(found["summary"]["copied"].values()) > 0 and found["chances"]["suffix"]
    steps = sum(one["drafted"]["steps"] for one in found["rows"][1:])
    assert 0 < sum(one["steps"] for one in found["by_batch"].values()) <= steps, (
        "those that feed prompts are left out"
    )
