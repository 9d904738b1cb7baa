"""Two processes on one device: on a CPU they write the rollouts of one."""

from pathlib import Path

import pytest
from small_run import SMALL
from two_workers import compare

from whet import processes
from whet.cluster import crew
from whet.recipe import dump_config, load_config


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    before = processes.check_gpus, crew.COMMAND
    recipe = tmp_path / "recipe.toml"
    warm = ("warm_start.steps=3", "warm_start.batch=5", "judge.workers=1", "model.device=cpu")
    rewards = ("data.0.reward=small_run:even_digits", "eval.0.reward=small_run:even_digits")
    recipe.write_text(dump_config(load_config(sets=[*SMALL, *warm, *rewards])))
    found = compare(recipe, tmp_path / "runs", [], steps=3)
    assert found["same"] == 1.0 and found["same_by_step"] == [1.0] * 3 and found["rollouts"] >= 36
    assert min(found[name][what] for name in ("one", "two") for what in ("tokens_per_s", "step_s")) > 0
    assert (processes.check_gpus, crew.COMMAND) == before
