"""Each part of the benchmark runs with a toy on a CPU and writes what it found."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import rl_step
import torch
import update_latency as latency
from gaps import Span, Trace

from whet.recipe import load_config
from whet.tools.bench.peers import shape_model


def run(part: str, out: Path, *words: str) -> dict[str, Any]:
    rl_step.main(["--tiny", "--device", "cpu", "--parts", part, "--out", str(out), *words])
    found: dict[str, Any] = json.loads((out / f"rl_step_{part}.json").read_text())
    assert found["circumstances"]["versions"]["torch"] == torch.__version__
    return found


@pytest.mark.slow
def test_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_step, "COUNTED", 2)
    found = run("idle", tmp_path)
    assert len(found["steps"]) == rl_step.WARM + 2 + 1
    named = ("generate", "judge", "log_probs", "train", "sync", "save", "eval", "idle")
    for row in found["steps"]:
        assert sum(row[name] for name in named) == pytest.approx(row["total"])
        assert row["tokens"] > 0
    assert found["median"]["total"] > 0 and "gpu_idle" not in found["median"], "there is no GPU here"
    assert found["profiled"]["wall_s"] > 0 and found["profiled"]["kernels"] == 0


def test_idle_profiled_by_hand() -> None:
    """Two kernels of 0.2 s in an update of a second; the host generates for 0.6 s of it, then trains."""
    second = 10**9
    trace = Trace(torch.device("cpu"))
    trace.begin, trace.end = 0, second
    trace.spans = [Span("decode", second // 10, 3 * second // 10), Span("backward", 7 * second // 10, 9 * second // 10)]
    rl_step.Phases.seen = [Span("generate", 0, 6 * second // 10), Span("train", 6 * second // 10, second)]
    found = rl_step.profiled(rl_step.Watch(trace, 1, rl_step.Result(Path("unused"), "idle")), wall_s=0.8)
    assert found["busy_s"] == pytest.approx(0.4)
    assert found["idle_share"] == pytest.approx(0.6)
    assert found["idle_share_without_profiler"] == pytest.approx(0.5)
    assert found["idle_s_by_phase"] == pytest.approx({"generate": 0.4, "train": 0.2, "none": 0.0})
    assert found["phase_s"] == pytest.approx({"generate": 0.6, "train": 0.4})
    assert found["longest_gaps"][0]["before"] == "decode" and found["longest_gaps"][0]["after"] == "backward"


def test_the_run_on_a_gpu_is_the_recipe_but_for_what_is_said() -> None:
    args = argparse.Namespace(device="cuda", tiny=False, model="m", data="d", warm_start=0)
    chosen = load_config(rl_step.RECIPES / "gsm8k.toml", rl_step.idle_sets(args, Path("unused")))
    recipe = load_config(rl_step.RECIPES / "gsm8k.toml")
    assert (chosen.curriculum.name, chosen.curriculum.groups, chosen.curriculum.rollouts) == ("uniform", 64, 8)
    assert not chosen.warm_start and not chosen.eval and chosen.model.dtype == "bfloat16"
    assert (chosen.rollout, chosen.learn, chosen.judge) == (recipe.rollout, recipe.learn, recipe.judge)
    args.warm_start = 40
    chosen = load_config(rl_step.RECIPES / "gsm8k.toml", rl_step.idle_sets(args, Path("unused")))
    (entry,) = chosen.warm_start
    assert entry == recipe.warm_start[0].model_copy(update={"steps": 40})


@pytest.mark.slow
def test_update(tmp_path: Path) -> None:
    found = run("update", tmp_path)
    for way in ("keep", "fresh", "recompute"):
        figures = found[way]
        assert 0 < figures["update_ms"]["median"] <= figures["first_token_ms"]["median"]
        assert all(one["min"] <= one["median"] <= one["max"] for one in figures.values())
    assert found["recompute"]["first_token_ms"]["min"] <= found["recompute"]["token_of_every_row_ms"]["max"]


def test_weights_change_and_rows_run_on() -> None:
    model = shape_model("tiny", "cpu").requires_grad_(True)
    before = model.model.embed_tokens.weight.detach().clone()
    weights, engine = latency.Weights(model), latency.engine_for(model, "keep", 4, 64, 24)
    latency.keep_ms(engine, weights, 4, 24)
    assert engine.version == weights.version == 1
    assert not torch.equal(before, model.model.embed_tokens.weight)
    assert engine.rows.ready == 4 and int(engine.rows.length[:4].min()) >= 24
    assert all(engine.rows.trace(row).versions[-2:].tolist() == [1, 1] for row in range(4)), "two tokens of the new"


def test_recomputed_rows_are_fed_again() -> None:
    model = shape_model("tiny", "cpu").requires_grad_(True)
    weights, engine = latency.Weights(model), latency.engine_for(model, "recompute", 4, 64, 24)
    latency.fill(engine, 4, 24)
    engine.stats()
    latency.recompute_ms(engine, weights, 4, 24)
    assert engine.stats()["rollout/prefill_tokens"] >= 4 * 24
    assert all(engine.rows.trace(row).versions[-1] == 1 for row in range(4))


def test_stage3(tmp_path: Path) -> None:
    found = run("stage3", tmp_path, "--set", "seed=3")
    assert [row["limit"] for row in found["steps"]] == [8, 16, 48]
    assert found["longest_trained"] == 48 == found["steps"][-1]["longest_trained"]
    assert all(row["tokens_trained"] > 0 and row["log_probs"] > 0 for row in found["steps"]), (
        "KL: a reference is scored"
    )


def test_stage3_on_a_gpu_is_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_step, "toy_folder", lambda *given: "folder")
    args = argparse.Namespace(device="cuda", tiny=False)
    tree = rl_step.stage3_tree(args, tmp_path, [(2048, 8, 4), (24_576, 1, 4)])
    chosen = load_config(None, base=tree)
    recipe = load_config(rl_step.RECIPES / "papers" / "fastcurl-preview.toml")
    assert (chosen.rollout, chosen.learn) == (recipe.rollout, recipe.learn)
    assert chosen.learn.checkpoint_activations and chosen.rollout.max_tokens == 24_576
    own = {"max_tokens": 24_576, "groups": 1, "rollouts": 4, "steps": 1}
    assert chosen.curriculum.stages[-1] == recipe.curriculum.stages[2].model_copy(update=own)
