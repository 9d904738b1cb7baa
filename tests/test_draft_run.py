"""Training with speculation is training without it: the same rewards and losses, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import Restless, Silent, Stop, even_digits, newest_weights, small_config

from whet.api import run_recipe

STEPS = 30
COMPARED = ("reward/mean", "learn/loss", "learn/grad_norm", "length/mean", "tokens_generated", "learn/entropy")


def rows(folder: Path, judge: Any, *sets: str) -> list[dict[str, float]]:
    watcher = Silent()
    run_recipe(small_config(f"steps={STEPS}", *sets), folder, watcher=watcher, reward=judge)
    return watcher.rows


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*")) / "state"


@pytest.mark.parametrize("extra", [(), ('rollout.mode="stream"',)], ids=["barrier", "stream"])
@pytest.mark.parametrize("drafters", ['["ngram", "suffix"]', '["suffix", "eagle"]'])
def test_thirty_steps_are_the_same(
    tmp_path: Path, extra: tuple[str, ...], drafters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.draft.build.Controller", Restless)
    plain = rows(tmp_path / "plain", even_digits, *extra)
    drafted = rows(tmp_path / "drafted", even_digits, f"draft.drafters={drafters}", *extra)
    assert len(plain) == len(drafted) == STEPS + 1
    for a, b in zip(plain, drafted, strict=True):
        for name in COMPARED:
            assert a.get(name) == pytest.approx(b.get(name), rel=1e-4, abs=1e-6) if name in a else name not in b
    saved = [row.get("draft/saved", 0.0) for row in drafted]
    assert sum(saved) > 0, "some drafts were accepted"
    if "eagle" in drafters:
        assert all("draft/loss" in row for row in drafted[1:]), "the drafter was trained after every step"


def test_a_resumed_run_goes_on_with_its_drafter(tmp_path: Path) -> None:
    """Weights, moments and counts; the policy's run is the uninterrupted one but for rounding, whatever is drafted."""
    sets = ['draft.drafters=["eagle"]', "steps=6", "save.every=3"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run_recipe(small_config(*sets), whole, watcher=Silent(), reward=even_digits)
    run_recipe(small_config(*sets), parted, watcher=Stop(after=3), reward=even_digits)
    state = load_file(newest(parted) / "drafter.safetensors")
    assert any(name.startswith("exp_avg.") for name in state)
    run_recipe(small_config(*sets), parted, watcher=Silent(), reward=even_digits, resume=True)
    one, other = newest_weights(whole), newest_weights(parted)
    for name, weight in one.items():  # the clock chooses how many tokens a forward verifies, and with them its rounding
        torch.testing.assert_close(weight, other[name], rtol=1e-3, atol=1e-5)
    counts = [json.loads((newest(run) / "drafter.json").read_text()) for run in (whole, parted)]
    assert counts[1]["updates"] > 0
