"""The drafter beside the policy: the tokens it may propose are those that rollouts use, and a checkpoint has them."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from drafted import VOCABULARY, filled, target
from safetensors.torch import load_file
from small_run import Restless, Silent, even_digits, small_config

from whet.api import run_recipe
from whet.draft import training as adaptive
from whet.draft.training import AdaptiveDrafter

WORDS = VOCABULARY // 3


def drafter(share: float = 1.0) -> AdaptiveDrafter:
    model = target()
    made = AdaptiveDrafter(model, share)
    made.buffer = made.trainer.buffer = filled(model)
    return made


def rolled(turn: int, size: int) -> np.ndarray:
    return np.roll(np.arange(size), turn)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "WORDS", WORDS)


def test_the_words_are_the_most_frequent_of_the_rollouts_and_are_proposed_alone(few: None) -> None:
    made = drafter()
    assert made.live.draft_ids is not None and made.live.draft_ids.tolist() == list(range(WORDS)), (
        "nothing seen yet"
    )
    made.train(200)
    counts = made.buffer.counts(VOCABULARY)
    chosen = made.live.draft_ids.tolist()
    assert min(counts[chosen]) >= max(np.delete(counts, chosen)) and chosen != list(range(WORDS))
    rows = made.live.target.head.weight[made.live.draft_ids]
    assert torch.equal(made.live.draft_head.weight, rows), "the head's rows came along"
    assert made.trainer.head.draft_ids is made.live.draft_ids, "lessons are about the same words"
    proposed = made.live.choose(torch.randn(50, made.live.target.hidden, dtype=made.live.dtype))
    assert set(proposed.tolist()) <= set(chosen)


def test_they_last_for_some_lessons(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "LASTING", 3)
    made = drafter()
    seen = []
    for turn in range(5):
        monkeypatch.setattr(made.buffer, "counts", partial(rolled, turn))
        made.train(50)
        assert made.live.draft_ids is not None
        seen.append(tuple(made.live.draft_ids.tolist()))
    assert [a == b for a, b in pairwise(seen)] == [True, True, False, True]


def test_all_words_where_there_are_few_and_where_nothing_is_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert drafter().live.draft_ids is None, f"{VOCABULARY} are no more than {adaptive.WORDS}"
    monkeypatch.setattr(adaptive, "WORDS", WORDS)
    assert drafter(share=0.0).live.draft_ids is None, "there is no lesson that would choose them"


def test_rollouts_are_wanted_as_long_as_there_are_lessons() -> None:
    assert not AdaptiveDrafter(target(), 0.0).buffer.wants(0, 50)
    made = AdaptiveDrafter(target(), 0.2)
    assert made.buffer.share == 0.2 and made.buffer.wants(0, 50)
    made.give_up(ValueError("of a lesson"))
    assert not made.buffer.wants(0, 50) and not made.buffer.entries


def test_a_checkpoint_has_them(few: None) -> None:
    made, other = drafter(), drafter()
    made.train(200)
    tensors = {name: tensor.clone() for name, tensor in made.tensors().items()}
    other.load(tensors, made.state_dict())
    assert made.live.draft_ids is not None and other.live.draft_ids is not None
    assert torch.equal(other.live.draft_ids, made.live.draft_ids) and other.lessons == 1
    assert torch.equal(other.live.draft_head.weight, made.live.draft_head.weight)
    del tensors["words"]
    # an older checkpoint: they are chosen at the next lesson
    drafter().load(tensors, made.state_dict())


@pytest.mark.slow
def test_a_run_with_few_words_is_the_run_without(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.draft.speculation.Controller", Restless)
    monkeypatch.setattr(adaptive, "WORDS", 6)
    watched = []
    for name, sets in (("plain", ()), ("drafted", ('draft.drafters=["eagle"]',))):
        watcher = Silent()
        run_recipe(
            small_config("steps=6", *sets), tmp_path / name, watcher=watcher, reward=even_digits
        )
        watched.append([(row["reward/mean"], row["tokens_generated"]) for row in watcher.rows[1:]])
    assert watched[0] == watched[1]
    state = (
        max((tmp_path / "drafted" / "checkpoints").glob("step_*")) / "state" / "drafter.safetensors"
    )
    assert load_file(state)["words"].shape == (6,)
