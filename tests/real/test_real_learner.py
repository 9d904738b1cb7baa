"""Gradients and adapters on real weights, against Hugging Face's eager attention and peft."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_batches import gradient_of
from real_parts import ask, engine_of, gaps, ids_of, model_of, plain, plan_of, run
from torch import Tensor
from transformers import PreTrainedModel

from whet.build import build_learner, build_model
from whet.model.lora import save_lora
from whet.resolve import RunPlan
from whet.types import Batch, Group, Rollout

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
TOKENS = 32


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """Groups as they were asked; every second rollout is right."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        reward = float(rollout.index % 2 == 0)
        verdict: Any = "right" if reward else "wrong"
        judged = replace(rollout, verdict=verdict, score=reward, reward=reward)
        groups.setdefault(rollout.group_id, []).append(judged)
    return Batch(
        groups=tuple(
            Group(prompt_id=g[0].prompt_id, group_id=i, rollouts=tuple(g))
            for i, g in groups.items()
        )
    )


def plain_gradient(model: PreTrainedModel, plan: RunPlan, batch: Batch) -> dict[str, Tensor]:
    """Of the mean over groups and rollouts of each one's mean token loss, -A log p with A by leave-one-out; one
    sequence at a time."""
    model.zero_grad()
    for group in batch.groups:
        rewards = [rollout.reward or 0.0 for rollout in group.rollouts]
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            others = (sum(rewards) - reward) / (len(rewards) - 1)
            assert rollout.trace is not None
            prompt, ids = list(plan.encoded(rollout.prompt_id)), ids_of(rollout)
            row = torch.tensor([prompt + ids], device=model.device)
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            said = torch.log_softmax(logits, -1).gather(1, row[0, len(prompt) :, None])[:, 0]
            drawn = torch.from_numpy(rollout.trace.log_probs).to(said)
            weight = torch.exp(said.detach() - drawn).clamp(max=2.0)
            loss = -(weight * (reward - others) * said).mean()
            (loss / len(group.rollouts) / len(batch.groups)).backward()
    return {
        name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None
    }


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """|a - b| / |b| over all weights."""
    assert found.keys() == wanted.keys()
    apart = sum(
        float((found[name].float().cpu() - wanted[name]).double().square().sum()) for name in wanted
    )
    size = sum(float(wanted[name].double().square().sum()) for name in wanted)
    return (apart / size) ** 0.5


def test_the_gradient_of_packs_is_hugging_faces(
    folder: Path, device: str, figures: Callable[..., None]
) -> None:
    """Packed, with shared prompts, and on a GPU compiled, against eager attention in fp32. In half precision it may be
    as far from it as Hugging Face's own gradient is."""
    plan = plan_of(folder, device, 'learn.aggregate="sequence"')
    model = build_model(plan)
    done = run(engine_of(plan, model_of(folder, device)), ask(plan, 2, n=4, max_tokens=TOKENS))
    batch = batch_of(done)
    found, _ = gradient_of(build_learner(plan, model, None), batch)
    found = {name: gradient.float().cpu() for name, gradient in found.items()}
    del model
    wanted = plain_gradient(plain(folder, device), plan, batch)
    off = distance(found, wanted)
    figures(tokens=sum(rollout.length for rollout in done), off=off)
    if plan.settings.model.dtype == "float32":
        assert off < 1e-3
        return
    own = distance(
        plain_gradient(plain(folder, device, plan.settings.model.dtype), plan, batch), wanted
    )
    figures(own_off=own)
    assert off <= 1.25 * own + 1e-3


def test_adapters_decode_and_train(
    folder: Path, device: str, tmp_path: Path, figures: Callable[..., None]
) -> None:
    """The engine's log-probs are those of peft's merged model, before and after an update, which leaves the weights
    below the adapters alone."""
    peft = pytest.importorskip("peft")
    plan = plan_of(folder, device, "model.lora.rank=8", "learn.lr=1e-3", "learn.warmup=0")
    model = build_model(plan)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # fresh adapters add nothing
                weight.normal_(0.0, 0.02)
    engine = engine_of(plan, model)
    learner = build_learner(plan, model, engine)
    frozen = {
        name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
    }
    biggest = []
    for version in range(2):
        done = run(engine, ask(plan, 2, n=4, first=100 * version, max_tokens=TOKENS))
        out = tmp_path / f"adapter{version}"
        out.mkdir()
        save_lora(model, out)
        base = plain.__wrapped__(folder, device)
        merged = peft.PeftModel.from_pretrained(base, out).merge_and_unload()
        biggest.append(float(gaps(merged, plan, done).max()))
        learner.step(batch_of(done))
        engine.update(version + 1)
    figures(gap_before=biggest[0], gap_after=biggest[1])
    assert max(biggest) < (2e-3 if plan.settings.model.dtype == "float32" else 0.5)
    for name, weight in model.named_parameters():
        assert name not in frozen or torch.equal(weight, frozen[name]), name
