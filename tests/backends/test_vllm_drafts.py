"""Drafts by vLLM on a GPU: tokens and log-probs stay those of the policy, and what was accepted is counted.

Layers add little to the embedding, and the head that drafts passes it on as it is. So it often guesses what the model
writes, as long as vLLM holds its weights and shares the model's embedding and output head with it.
"""

import copy
import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.rollout.vllm_fit import version_of_vllm

if version_of_vllm() is None:  # not importorskip: the import alone takes long
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from vllm_parts import CONTEXT, PROMPTS, TOKENIZER, asked, drained, off, open_engine

from whet.draft.eagle import eagle_head, write_drafter
from whet.model.load import tiny_model
from whet.recipe import load_config
from whet.rollout.vllm_fit import drafter_of, speculation_of
from whet.types import Rollout

# what bfloat16 leaves between a log-prob of vLLM and that of the same weights in float32
CLOSE = 0.05
GUESSED = 1.3  # tokens per verified step, at least; with made-up weights a head has 1.07
DRAFTERS = ["ngram", "suffix", "eagle"]


@torch.no_grad()
def followed_model() -> Any:
    """A Llama in bfloat16 with heads of 64 numbers, whose next token depends mostly on the last one."""
    torch.manual_seed(0)
    tied = tiny_model(len(TOKENIZER), hidden=128, layers=2, heads=2, context=CONTEXT)
    shape = copy.deepcopy(tied.config)
    shape.tie_word_embeddings = False
    model = type(tied)(shape)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            small = (
                0.2
                if "o_proj" in name or "down_proj" in name
                else 1.5
                if "lm_head" in name
                else 1.0
            )
            parameter.normal_(0, 1.0 if "embed" in name else small * parameter.shape[1] ** -0.5)
    return model.to("cuda", torch.bfloat16).eval()


@torch.no_grad()
def learn(model: Any) -> None:
    """What an update does, to the output head alone: a drafter goes on guessing if it shares the new one."""
    model.lm_head.weight.copy_(model.lm_head.weight.roll(7, 0))


def wide(model: Any) -> Any:
    return copy.deepcopy(model).to("cpu", torch.float32)


def told(drafter: str, model: Any, folder: Path) -> dict[str, Any] | None:
    """What an engine is given for a recipe with this drafter, whose head lies beside the model."""
    if drafter == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("arctic-inference is not installed, without which vLLM has no suffix drafts")
    settings = load_config(
        sets=['rollout.engine="vllm"', f'model.name="{folder}"', f'draft.drafters=["{drafter}"]']
    )
    head = eagle_head(model)
    with torch.no_grad():
        for parameter in (head.fc, head.out, head.down):
            parameter.zero_()
        head.fc[:, : len(head.fc)] = torch.eye(len(head.fc))
    write_drafter(drafter_of(settings), head, model.config)
    return speculation_of(settings)


def greedy() -> list[Any]:
    return [asked(i, n=1, temperature=0.0, max_tokens=80) for i in range(len(PROMPTS))]


@torch.no_grad()
def gap(mine: Sequence[Rollout], plain: Sequence[Rollout], model: Any) -> tuple[int, float]:
    """How many rollouts part from plain ones, and how far apart the model sees the two tokens, at most: in bfloat16 the
    order of sums decides between tokens that are as good as equal."""
    parted, worst = 0, 0.0
    for one, other in zip(mine, plain, strict=True):
        assert one.trace is not None and other.trace is not None and one.key == other.key
        a, b = one.trace.ids.tolist(), other.trace.ids.tolist()
        if (
            place := next(
                (i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None
            )
        ) is not None:
            logits = model(torch.tensor([[*PROMPTS[one.prompt_id], *a[:place]]])).logits[0, -1]
            parted, worst = (
                parted + 1,
                max(worst, float((logits[a[place]] - logits[b[place]]).abs())),
            )
    return parted, worst


@pytest.fixture(scope="module")
def plain() -> list[Rollout]:
    with open_engine(followed_model(), mode="barrier", slots=8) as engine:
        assert "draft" not in engine.can
        rollouts = engine.generate(greedy())
        assert "draft/saved" not in engine.stats()
    return rollouts


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_and_log_probs_are_the_policys(
    drafter: str, plain: list[Rollout], tmp_path: Path
) -> None:
    model = followed_model()
    models = {0: wide(model)}
    drafts = told(drafter, model, tmp_path)
    with open_engine(model, on_update="recompute", slots=8, drafts=drafts) as engine:
        mine = engine.generate(greedy())
        stats = engine.stats()
        parted, worst = gap(mine, plain, models[0])
        assert worst < 2 * CLOSE and 2 * parted <= len(plain), (parted, worst)
        assert off(mine, models) < CLOSE
        assert stats["draft/accept_length"] > GUESSED, stats
        tokens, saved = (sum(getattr(r, name) for r in mine) for name in ("length", "accepted"))
        assert (stats["rollout/tokens"], stats["draft/saved"]) == (tokens, saved)
        verified = tokens - saved - len(mine)  # each wrote its first token without a draft
        assert stats["draft/accept_length"] == pytest.approx(1 + saved / verified)
        engine.submit([asked(10 + i, n=4, max_tokens=80) for i in range(4)])
        for _ in range(8):
            engine.step()
        learn(model)
        engine.update(1)
        models[1] = wide(model)
        sampled = drained(engine)
        again = engine.generate(
            [asked(20 + i, n=1, temperature=0.0, max_tokens=80) for i in range(4)]
        )
        later = engine.stats()
    assert len(sampled) == 16 and any(r.first_version < r.last_version for r in sampled)
    assert off(sampled, models) < CLOSE and off(again, models) < CLOSE
    assert off(sampled, {0: models[1], 1: models[0]}) > 10 * CLOSE, "other weights would be noticed"
    assert later["draft/saved"] == sum(r.accepted for r in (*sampled, *again))
    assert sum(r.accepted for r in again) > (GUESSED - 1) * sum(r.length for r in again) / GUESSED


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_after_a_sleep_log_probs_are_right_and_drafts_as_good_as_before(
    drafter: str, tmp_path: Path
) -> None:
    """Memory that is lent comes back with other numbers in it: the head has to be among what vLLM brings back."""
    model = followed_model()
    drafts = told(drafter, model, tmp_path)
    with open_engine(model, mode="barrier", slots=8, drafts=drafts, releasable=True) as engine:
        for version in range(3):
            if version:
                engine.release()
                assert engine.asleep
                lent = torch.full((2**29,), float("nan"), device="cuda")
                del lent
                torch.cuda.empty_cache()
                engine.take_back()
            # after the second sleep the same weights are sent again, by the next step
            if version == 1:
                learn(model)
                engine.update(1)
            models = {min(version, 1): wide(model)}
            sampled = engine.generate(
                [asked(100 * version + i, n=4, max_tokens=40) for i in range(4)]
            )
            engine.stats()
            mine = engine.generate(
                [
                    asked(100 * version + 50 + i, n=1, temperature=0.0, max_tokens=80)
                    for i in range(5)
                ]
            )
            stats = engine.stats()
            assert not engine.asleep
            assert off(sampled, models) < CLOSE and off(mine, models) < CLOSE, version
            assert stats["draft/accept_length"] > GUESSED, (version, stats)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_vllm_knows_what_it_is_told(drafter: str) -> None:
    from vllm.config import SpeculativeConfig

    drafts = speculation_of(
        load_config(sets=['rollout.engine="vllm"', f'draft.drafters=["{drafter}"]'])
    )
    assert drafts is not None
    assert drafts.keys() <= {field.name for field in fields(SpeculativeConfig)}
