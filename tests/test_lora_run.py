"""A run that trains adapters on a model folder: end to end, stopped and resumed, evaluated, continued."""

import os
import signal
from pathlib import Path

import pytest
import torch
from faults import Faults, Killed
from safetensors.torch import load_file
from small_run import Silent, even_digits, small_config, timeless

from whet import api, files
from whet.errors import WhetError
from whet.model.load import tiny_model, tiny_tokenizer
from whet.problems import load_problems
from whet.run import read_metrics
from whet.tools.measure import evaluate_model

LORA = ("model.lora.rank=4", "model.lora.alpha=16", "learn.kl_coef=0.1", "learn.lr=1e-2")
KINDS = {
    "barrier": (),
    "stream": ("rollout.mode=stream",),
    "bf16": ("model.dtype=bfloat16", "learn.updates=2", "learn.checkpoint_activations=true"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder such as anyone might bring; it speaks the task's characters."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = tiny_tokenizer(load_problems(small_config(), even_digits).alphabet)
    tiny_model(len(tokenizer), hidden=16, layers=1, heads=2, context=64, seed=5).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


def sets_of(base: Path, *more: str) -> tuple[str, ...]:
    return (f"model.name='{base}'", *LORA, *more)


def train(folder: Path, *sets: str, resume: bool = False, watcher: Silent | None = None) -> Silent:
    silent = watcher or Silent()
    api.run_recipe(small_config(*sets), folder, watcher=silent, reward=even_digits, resume=resume)
    return silent


class Stop(Silent):
    """Presses Ctrl-C after so many steps."""

    def update(self, metrics: dict[str, float], progress: float) -> None:
        super().update(metrics, progress)
        if metrics["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*"))


def assert_same_run(one: Path, other: Path) -> None:
    assert timeless(read_metrics(one)) == timeless(read_metrics(other))
    for name in (
        "adapter_model.safetensors",
        "state/optimizer.safetensors",
        "state/reference.safetensors",
    ):
        mine, theirs = load_file(newest(one) / name), load_file(newest(other) / name)
        assert mine.keys() == theirs.keys() and mine
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items()), name
    wrote, same = (
        {p.name: p.read_text() for p in (run / "rollouts").iterdir()} for run in (one, other)
    )
    assert wrote == same


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, base: Path, kind: str) -> None:
    sets = sets_of(base, *KINDS[kind])
    before = {p.name: p.read_bytes() for p in base.iterdir()}
    train(tmp_path / "whole", *sets)
    train(tmp_path / "parts", *sets, watcher=Stop())
    assert read_metrics(tmp_path / "parts")[-1]["step"] == 3
    resumed = train(tmp_path / "parts", *sets, resume=True)
    assert "Resuming after step 3." in resumed.messages
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert {p.name: p.read_bytes() for p in base.iterdir()} == before, "the base is only ever read"
    rows = read_metrics(tmp_path / "whole")
    assert max(row.get("learn/kl") or 0.0 for row in rows) > 0
    assert not (newest(tmp_path / "whole") / "model.safetensors").exists()


@pytest.mark.wide
@pytest.mark.parametrize("number", [9, 29])
def test_a_kill_in_the_midst_of_a_write_is_survived(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sets = sets_of(
        base, "steps=3", "save.every=1", "save.keep=1", "eval.0.limit=4", "curriculum.groups=2"
    )
    train(tmp_path / "whole", *sets)
    faults = Faults("half", number)
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", faults)
        patch.setattr(files, "shutil", faults)
        with pytest.raises(Killed):
            train(tmp_path / "killed", *sets)
    train(tmp_path / "killed", *sets, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_checkpoint_can_be_evaluated_and_trained_on(tmp_path: Path, base: Path) -> None:
    """The peft folder as model.name, without a word of LoRA in the recipe."""
    train(tmp_path / "first", *sets_of(base, "steps=2"))
    metrics = evaluate_model(str(tmp_path / "first"), sets=["eval.0.limit=4"])
    assert any(key.endswith("accuracy") for key in metrics)
    folder = newest(tmp_path / "first")
    train(tmp_path / "second", f"model.name='{folder}'", "steps=2")
    assert (newest(tmp_path / "second") / "adapter_config.json").read_text() == (
        folder / "adapter_config.json"
    ).read_text()


def test_a_lost_base_is_told_at_resume(tmp_path: Path, base: Path) -> None:
    train(tmp_path / "run", *sets_of(base, "steps=2"))
    hidden = base.rename(base.with_name("hidden"))
    try:
        with pytest.raises(WhetError, match="no model folder"):
            train(tmp_path / "run", *sets_of(base, "steps=4"), resume=True)
    finally:
        hidden.rename(base)
