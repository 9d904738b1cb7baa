"""Runs with rollout.engine = "vllm" by two processes, each with a vLLM of its own: real vLLM, on a CPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from small_run import Silent, Stop, small_config

from whet.rollout.vllm_fit import version_of_vllm

if version_of_vllm() is None:  # not importorskip: the import alone takes long
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from test_deaths import Reaper

from whet.api import run_recipe
from whet.cluster import fleet
from whet.run import read_metrics

VLLM = (
    "rollout.engine=vllm",
    "model.device=cpu",
    "model.hidden=64",
    "judge.workers=1",
    "eval.0.every=100",
)
CLOSE = 1e-4


def digits(prompt: Any, response: str) -> float:
    return sum(c.isdigit() for c in response) / max(1, len(response))


def run(
    folder: Path, *sets: str, gpus: int = 2, resume: bool = False, silent: Silent | None = None
) -> Silent:
    silent = silent or Silent()
    settings = small_config(*VLLM, *sets)
    run_recipe(settings, folder, watcher=silent, reward=digits, gpus=gpus, resume=resume)
    return silent


def mismatch(folder: Path) -> float:
    """The largest difference of a log-prob of vLLM from the learner's."""
    return max(row["learn/mismatch_max"] for row in read_metrics(folder) if row.get("learn/tokens"))


def assert_all_decode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *sets: str, **given: Any
) -> Any:
    """Train; each member must decode for every step, the learner follow, and the reward rise. Returns what was said."""
    merge, tokens = fleet.merge_stats, list[list[float]]()

    def seen(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
        tokens.append([own["rollout/tokens"] for own in stats])
        return merge(stats)

    monkeypatch.setattr(fleet, "merge_stats", seen)
    small = (
        "steps=12",
        "learn.lr=5e-3",
        "curriculum.groups=6",
        "curriculum.rollouts=8",
        "rollout.slots=24",
    )
    said = run(folder, *small, *sets, "warm_start=[{steps=3, batch=4, lr=1e-2}]", **given)
    rows = read_metrics(folder)
    assert len(rows) == 13 and mismatch(folder) < CLOSE
    decoded = [own for own in tokens if any(own)]
    assert len(decoded) >= 12 and min(map(min, decoded)) > 0, "each member decodes for every step"
    rewards = [row["reward/mean"] for row in rows[1:]]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2, rewards
    return said


def test_both_processes_decode_what_the_learner_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_all_decode(tmp_path / "run", monkeypatch)


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced_and_a_stream_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keyed noise the rollouts that it had begun are written anew, with other tokens."""
    sets = ("rollout.mode=stream", "rollout.slots=6", "steps=6", "save.every=2")
    reaper = Reaper(monkeypatch, {30: (1, 0.01)})
    silent = run(tmp_path / "run", *sets, silent=Stop(4))
    reaper.finish()
    assert (
        sum("killed by signal 9; it is started again" in message for message in silent.messages)
        == 1
    )
    run(tmp_path / "run", *sets, gpus=1, resume=True)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(7)) and mismatch(tmp_path / "run") < CLOSE
    of = {
        name: int(rows[-1][f"curriculum/{name}"])
        for name in ("asked", "trained", "ready", "open", "cut", "expired")
    }
    assert of.pop("asked") == sum(of.values())
