"""Training with speculation is training without it: the same rewards and losses, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import Restless, Silent, Stop, even_digits, newest_weights, small_config

from whet.api import run_recipe
from whet.draft.training import AdaptiveDrafter, DrafterTrainer

STEPS = 30
COMPARED = (
    "reward/mean",
    "learn/loss",
    "learn/grad_norm",
    "length/mean",
    "tokens_generated",
    "learn/entropy",
)


def rows(folder: Path, judge: Any, *sets: str) -> list[dict[str, float]]:
    watcher = Silent()
    run_recipe(small_config(f"steps={STEPS}", *sets), folder, watcher=watcher, reward=judge)
    return watcher.rows


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*")) / "state"


def same_steps(plain: list[dict[str, float]], drafted: list[dict[str, float]]) -> None:
    for a, b in zip(plain, drafted, strict=True):
        for name in COMPARED:
            assert (
                a.get(name) == pytest.approx(b.get(name), rel=1e-4, abs=1e-6)
                if name in a
                else name not in b
            )


@pytest.fixture(scope="module", params=["barrier", "stream"])
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, float]]]:
    """How it is set, and thirty steps without speculation."""
    mode = f'rollout.mode="{request.param}"'
    return mode, rows(tmp_path_factory.mktemp("plain") / "run", even_digits, mode)


@pytest.mark.slow
@pytest.mark.parametrize("drafters", ['["ngram"]', '["suffix"]', '["suffix", "eagle"]'])
def test_thirty_steps_are_the_same(
    tmp_path: Path,
    plain: tuple[str, list[dict[str, float]]],
    drafters: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whet.draft.speculation.Controller", Restless)
    mode, expected = plain
    drafted = rows(tmp_path / "drafted", even_digits, f"draft.drafters={drafters}", mode)
    assert len(drafted) == STEPS + 1
    same_steps(expected, drafted)
    assert sum(row["draft/saved"] for row in drafted[1:]) > 0, "some drafts were accepted"
    assert all(row["draft/accept_length"] >= 1 for row in drafted[1:])
    named = {key.split("_")[1] for row in drafted for key in row if key.startswith("draft/share_")}
    assert named == {"off", *json.loads(drafters)}, "all of them drafted"
    if "eagle" in drafters:
        assert all("draft/loss" in row for row in drafted[1:]), (
            "the drafter was trained after every step"
        )


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("of a lesson\nand more"),
        pytest.param(torch.OutOfMemoryError("no memory left"), marks=pytest.mark.slow),
    ],
)
def test_a_lesson_that_fails_is_the_last_and_the_run_goes_on(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.draft.speculation.Controller", Restless)
    lessons: list[int] = []
    right = DrafterTrainer._update

    def breaks(self: DrafterTrainer, pairs: Any) -> Any:
        lessons.append(self.updates)
        if len(lessons) > 2:
            raise error
        return right(self, pairs)

    monkeypatch.setattr(DrafterTrainer, "_update", breaks)
    plain, drafted = Silent(), Silent()
    run_recipe(small_config("steps=6"), tmp_path / "plain", watcher=plain, reward=even_digits)
    eagle = small_config("steps=6", 'draft.drafters=["eagle"]')
    run_recipe(eagle, tmp_path / "drafted", watcher=drafted, reward=even_digits)
    same_steps(plain.rows, drafted.rows)
    assert len(lessons) == 3, "none after the one that failed"
    said = [text for text in drafted.messages if "drafter" in text]
    assert len(said) == 1 and f"({type(error).__name__}: {str(error).splitlines()[0]})" in said[0]
    failures = [row["draft/failures"] for row in drafted.rows[1:]]
    assert failures[0] == 0 and failures[-1] == 1 and failures == sorted(failures)
    assert drafted.rows[-1]["draft/saved"] >= 0 and any(
        key.startswith("draft/share_eagle") for key in drafted.rows[-1]
    )
    assert (
        0 < json.loads((newest(tmp_path / "drafted") / "drafter.json").read_text())["updates"] < 3
    ), "it is saved"


def test_a_resumed_run_goes_on_with_its_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and counts; the policy's run is the uninterrupted one but for rounding, whatever is drafted."""
    sets = ['draft.drafters=["eagle"]', "steps=6", "save.every=3"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run_recipe(small_config(*sets), whole, watcher=Silent(), reward=even_digits)
    run_recipe(small_config(*sets), parted, watcher=Stop(after=3), reward=even_digits)
    state = load_file(newest(parted) / "drafter.safetensors")
    described = json.loads((newest(parted) / "drafter.json").read_text())
    assert described["updates"] > 0 and any(
        state[name].any() for name in state if name.startswith("exp_avg.")
    )
    found: list[tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]] = []
    lesson = AdaptiveDrafter.train

    def look(self: AdaptiveDrafter, *given: Any) -> dict[str, float]:
        found.append((self.tensors(), self.state_dict(), self.live.fc.detach().clone()))
        return lesson(self, *given)

    monkeypatch.setattr(AdaptiveDrafter, "train", look)
    run_recipe(small_config(*sets), parted, watcher=Silent(), reward=even_digits, resume=True)
    assert found[0][1] == described, "before its first lesson it has the counts of the saved one,"
    assert found[0][0].keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found[0][0].items()), (
        "its weights and moments,"
    )
    assert torch.equal(found[0][2], state["weight.fc"]), "and drafts with them"
    one, other = newest_weights(whole), newest_weights(parted)
    # the clock chooses how many tokens a forward verifies, and with them its rounding
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-3, atol=1e-5)
    counts = [json.loads((newest(run) / "drafter.json").read_text()) for run in (whole, parted)]
    assert min(count["updates"] for count in counts) > described["updates"]
