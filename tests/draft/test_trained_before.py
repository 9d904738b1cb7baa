"""A drafter that was trained before: another run starts from it, and one of another model is refused."""

import json
import shutil
from collections.abc import Set
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import Silent, even_digits, small_config

from whet.api import run_recipe
from whet.build import build_drafter, build_model
from whet.draft import training
from whet.draft.base import DraftArm
from whet.draft.controller import Controller
from whet.errors import WhetError
from whet.resolve import check_run
from whet.run import checkpoint_path
from whet.tools.export import export_model
from whet.tools.measure import evaluate_model

EAGLE = 'draft.drafters=["eagle"]'
# The policy writes what it was taught, and hardly changes any more.
TAUGHT = (
    EAGLE,
    "learn.lr=1e-9",
    "rollout.max_tokens=24",
    "rollout.context=64",
    "rollout.temperature=0.2",
)


class Fixed(Controller):
    """One arm at any time: what a clock would choose must not decide what is compared."""

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        return next(arm for arm in self.arms if arm.drafter == "eagle" and arm.depth == 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run in which a drafter has learnt."""
    folder, steps = tmp_path_factory.mktemp("trained") / "run", 60
    taught = ("warm_start.0.steps=200", "warm_start.0.lr=1e-2")
    sets = (*TAUGHT, *taught, f"steps={steps}", "save.every=100", "draft.train=1.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SMALL", 32)  # many small updates
        run_recipe(small_config(*sets), folder, watcher=Silent(), reward=even_digits)
    return checkpoint_path(folder, steps)


def first_batch(folder: Path, *sets: str) -> float:
    """Tokens that a row has written in a step of the first batch."""
    watcher = Silent()
    run_recipe(small_config(*TAUGHT, "steps=1", *sets), folder, watcher=watcher, reward=even_digits)
    return watcher.rows[1]["draft/accept_length"]


def test_its_first_batch_accepts_more_than_that_of_a_random_start(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.draft.speculation.Controller", Fixed)
    model = f"model.name={trained}"
    random = first_batch(tmp_path / "random", model)
    ready = first_batch(tmp_path / "ready", model, f"draft.eagle={trained / 'drafter'}")
    assert ready > random + 0.3


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_it_starts_from_an_export_for_either_engine(
    trained: Path, tmp_path: Path, layout: str
) -> None:
    export_model(trained, tmp_path / "export", drafter=layout)
    plan = check_run(
        small_config(*TAUGHT, f"draft.eagle={tmp_path / 'export/drafter'}"), even_digits
    )
    drafter = build_drafter(plan.settings, build_model(plan, trained))
    assert drafter is not None and not drafter.trainer.updates
    state = load_file(trained / "state/drafter.safetensors")
    for head in (drafter.live, drafter.trainer.head):
        for name, weight in head.named_parameters():
            assert torch.equal(weight, state[f"weight.{name}"]), "what drafts and what learns"


def test_it_drafts_with_few_words_where_the_target_has_many(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "WORDS", 6)
    plan = check_run(small_config(*TAUGHT, f"draft.eagle={trained / 'drafter'}"), even_digits)
    drafter = build_drafter(plan.settings, build_model(plan, trained))
    assert drafter is not None and drafter.live.draft_ids is not None
    assert drafter.live.draft_ids.tolist() == list(range(6))
    assert torch.equal(
        drafter.live.fc, load_file(trained / "drafter/model.safetensors")["fc.weight"]
    )


def test_what_cannot_be_started_from_is_one_sentence_before_weights_are_loaded(
    trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(trained / "drafter", folder)
    eagle = f"draft.eagle={folder}"

    def refused(sentence: str, *sets: str) -> None:
        with pytest.raises(WhetError, match=sentence):
            check_run(small_config(*TAUGHT, eagle, *sets), even_digits)

    refused('has no use: draft.drafters does not name "eagle"', "draft.drafters=[]")
    refused(
        "There is no drafter in .*nowhere: it holds no config.json",
        f"draft.eagle={tmp_path / 'nowhere'}",
    )
    refused("is of another target: fc.weight has another shape", "model.hidden=32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    refused("is of another target: it has 99 tokens, and this one [0-9]+\\.")
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLMEagle"]})
    )
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "fc.bias": torch.ones(16)}, folder / "model.safetensors")
    refused("has a bias")


def test_an_evaluation_drafts_with_what_lies_beside_the_weights(
    trained: Path, tmp_path: Path
) -> None:
    """The drafter that the run started from may be gone."""
    start, folder = tmp_path / "start", tmp_path / "run"
    shutil.copytree(trained / "drafter", start)
    sets = (*TAUGHT, "steps=1", f"draft.eagle={start}", "data.0.reward=small_run:even_digits")
    run_recipe(small_config(*sets, "eval.0.reward=small_run:even_digits"), folder, watcher=Silent())
    shutil.rmtree(start)
    assert "eval/held_out/accuracy" in evaluate_model(str(folder))
