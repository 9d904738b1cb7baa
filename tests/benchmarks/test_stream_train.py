"""Stream against barrier with a real learner: every arm trains the same, and what is said of it is true."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stream import ARMS, WARM_UP, WORK, Arm, make_learner, measure
from stream_train import compare, demo_recipe

from whet.fast.fused import share_storage
from whet.tools.bench.peers import shape_model

TREE: dict[str, Any] = {
    "base": {
        "steps": 0,
        "model": {"hidden": 16, "layers": 1, "heads": 2},
        "data": [{"task": "chain", "options": {"train_count": 60}}],
        "warm_start": [{"steps": 60, "lr": 1e-2, "options": {"max_level": 3, "direct": 0.5}}],
        "eval": [{"task": "chain", "limit": 12, "max_tokens": 24}],
        "rollout": {"context": 64, "max_tokens": 24, "slots": 12},
    },
    "arm": {
        "data": [{"task": "chain", "options": {"train_count": 60}}],
        "eval": [{"task": "chain", "limit": 12, "max_tokens": 24}],
        "rollout": {"context": 64, "max_tokens": 24},
    },
    "mixes": {"most": {"mix": {"1": 0.5, "2-3": 0.5}}},
}


@pytest.mark.slow
def test_arms_of_a_seed(tmp_path: Path) -> None:
    recipe = demo_recipe(tmp_path / "runs", "cpu", groups=3, rollouts=4, updates=4, tree=TREE)
    arms = [ARMS[0], Arm("keep", "stream", "keep", 1), Arm("cut", "stream", "cut", 1)]
    compare(arms, recipe, [0, 1], updates=4, every=2, path=tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["circumstances"]["commit"] and result["work"]["slots"] == 12
    barrier, keep, cut = (result["arms"][arm.name] for arm in arms)
    assert [run["seed"] for run in barrier["runs"]] == [0, 1]
    for arm in (barrier, keep, cut):
        for run in arm["runs"]:
            assert run["groups"] == 12 and [point["update"] for point in run["curve"]] == [0, 2, 4]
            assert sum(run["split"].values()) == pytest.approx(run["seconds"], abs=0.01)
            assert 0 <= run["idle_share"] < 1
            seconds = [point["seconds"] for point in run["curve"]]
            assert seconds == sorted(seconds) and seconds[0] == 0
    first = [arm["runs"][0]["curve"][0]["accuracy"] for arm in (barrier, keep, cut)]
    assert len(set(first)) == 1, "all start from the same base"
    assert all(run["age_max"] == 0 and run["cut"] == 0 for run in barrier["runs"])
    assert any(run["age_max"] == 1 for run in keep["runs"]) and all(run["age_max"] <= 1 for run in keep["runs"])
    assert all(run["age_max"] == 0 and run["cut"] == 0 for run in cut["runs"]), "nothing is begun that could be cut"
    assert barrier["faster"] == barrier["fewer_steps"] == 1.0
    assert keep["fewer_steps"] == pytest.approx(barrier["steps"] / keep["steps"])


def test_a_learner_adds_its_time_and_nothing_else() -> None:
    work = replace(WORK["cpu"], groups=2, updates=2, slots=16, cap=24)
    model = shape_model("tiny", "cpu")
    share_storage(model)
    figures, prompts = measure(model, work, ARMS[1])
    before = [p.detach().clone() for p in model.parameters()]
    learner = make_learner(model, work)
    trained, same = measure(model, work, ARMS[1], learner)
    assert prompts == same and trained["tokens_trained"] == figures["tokens_trained"]
    assert trained["steps"] == figures["steps"], "lengths are drawn beforehand"
    assert 0 < trained["learner_seconds"] < trained["seconds"]
    assert learner.updates == WARM_UP + work.updates
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
