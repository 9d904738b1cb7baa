"""The engine on real weights against Hugging Face's own forward and `generate`."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from real_parts import (
    LENGTH,
    ask,
    engine_of,
    gaps,
    ids_of,
    margins,
    model_of,
    own_gaps,
    plain,
    plan_of,
    rounding_of,
    run,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from whet.resolve import RunPlan
from whet.tools.export import export_model
from whet.types import Key, Rollout

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def limit_of(device: str) -> int:
    """A little more than usual, so that some replies end by themselves."""
    return max(48, LENGTH[device])


@lru_cache(maxsize=1)
def greedy(folder: Path, device: str) -> list[Rollout]:
    plan = plan_of(folder, device)
    return run(
        engine_of(plan, model_of(folder, device)),
        ask(plan, max_tokens=limit_of(device), temperature=0.0),
    )


def generated(
    model: PreTrainedModel, plan: RunPlan, rollouts: Sequence[Rollout]
) -> dict[Key, list[int]]:
    """What `generate` writes for their prompts, side by side with padding on the left. The model's own settings for
    drawing, such as a repetition penalty, are not whet's."""
    prompts = [list(plan.encoded(rollout.prompt_id)) for rollout in rollouts]
    width, stops = max(map(len, prompts)), plan.codec.stop_ids
    padded = [[stops[0]] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    out = model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=limit_of(model.device.type),
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=list(stops),
        pad_token_id=stops[0],
    )
    found = {}
    for rollout, ids in zip(rollouts, out[:, width:].tolist(), strict=True):
        ends = [place for place, token in enumerate(ids) if token in stops]
        found[rollout.key] = ids[: ends[0] + 1] if ends else ids
    return found


def test_greedy_text_is_that_of_generate(
    folder: Path, device: str, figures: Callable[..., None]
) -> None:
    """Except where two tokens are closer than the rounding of the type."""
    plan, done = plan_of(folder, device), greedy(folder, device)
    theirs = generated(plain(folder, device, plan.settings.model.dtype), plan, done)
    rounding = rounding_of(folder, device, plan, done)
    apart = margins(plain(folder, device), plan, done, theirs)
    figures(texts=len(done), differ=len(apart), margin=max(apart, default=0.0), rounding=rounding)
    assert len({tuple(ids_of(rollout)) for rollout in done}) == len(done)
    assert max(apart, default=0.0) <= 2 * rounding
    if device == "cpu":
        assert len(apart) <= 1, "in fp32 a tie is a rare thing"


def test_a_reply_ends_by_itself(folder: Path, device: str, figures: Callable[..., None]) -> None:
    """With an end of the list, which is no part of the text."""
    plan, done = plan_of(folder, device), greedy(folder, device)
    figures(ended=sum(rollout.finish == "stop" for rollout in done), of=len(done))
    assert {rollout.finish for rollout in done} == {"stop", "length"}, (
        "short questions and long ones"
    )
    for rollout in done:
        ids, text = ids_of(rollout), plan.codec.decode(ids_of(rollout))
        assert (ids[-1] in plan.codec.stop_ids) == (rollout.finish == "stop")
        assert not set(ids[:-1]) & set(plan.codec.stop_ids)
        assert not any(token in text for _, token in plan.codec.stop_tokens())
        assert text.strip()


def test_log_probs_of_drawn_tokens(folder: Path, device: str, figures: Callable[..., None]) -> None:
    """Against a forward in fp32. In half precision they may be as far from it as Hugging Face's own forward is."""
    plan = plan_of(folder, device)
    requests = [*ask(plan, 10), *ask(plan, 8, first=50, temperature=0.7)]
    done = run(engine_of(plan, model_of(folder, device)), requests)
    found = gaps(plain(folder, device), plan, done)
    figures(tokens=found.size, gap_mean=found.mean(), gap_max=found.max())
    assert found.size > 400
    if plan.settings.model.dtype == "float32":
        assert found.max() < 1e-3
        return
    own = own_gaps(folder, device, plan, done)
    figures(own_gap_mean=own.mean(), own_gap_max=own.max())
    assert found.mean() <= 1.25 * own.mean() + 1e-3
    assert np.quantile(found, 0.999) <= 2 * np.quantile(own, 0.999) + 1e-3


def test_an_export_is_the_model(folder: Path, device: str, tmp_path: Path) -> None:
    """Weights to the bit, the tokenizer's ids, and the ends of a response."""
    out = export_model(folder, tmp_path / "out")
    ids = torch.tensor([plan_of(folder, device).encoded("apples")], device=device)
    logits = []
    for place in (folder, out):
        model = AutoModelForCausalLM.from_pretrained(place, local_files_only=True, dtype="auto").to(
            device
        )
        with torch.no_grad():
            logits.append(model(ids).logits)
        ends = model.generation_config.eos_token_id
        logits.append(torch.tensor(ends))
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    ours, theirs = (
        AutoTokenizer.from_pretrained(place, local_files_only=True) for place in (out, folder)
    )
    text = Path(__file__).with_name("problems.jsonl").read_text()
    assert (
        ours(text).input_ids == theirs(text).input_ids
        and ours.chat_template == theirs.chat_template
    )
