"""A tiny model, prompts, and the log-probs that a learner gives them, for the tests of the vLLM engine."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from string import printable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from whet.model.load import tiny_model, tiny_tokenizer
from whet.rollout.vllm import VllmEngine
from whet.types import Request, Rollout, Sampling

TOKENIZER = tiny_tokenizer(printable)
PROMPTS: dict[str, list[int]] = {
    f"p{i}": TOKENIZER(f"What is {i} times {i + 3}? " * repeats, add_special_tokens=False)[
        "input_ids"
    ]
    for i, repeats in enumerate(
        (3, 3, 3, 3, 9)
    )  # the last is longer than a block of tokens that vLLM caches
}
CONTEXT = 256
CLOSE = 1e-4  # what log-probs of vLLM and of the learner may differ by in float32


def new_model(*, tied: bool = True) -> Any:
    """Weights large enough for log-probs to differ from those of other weights."""
    torch.manual_seed(0)
    model = tiny_model(len(TOKENIZER), hidden=64, layers=2, heads=2, context=CONTEXT)
    if not tied:
        settings = copy.deepcopy(model.config)
        settings.tie_word_embeddings = False
        model = type(model)(settings)
    for parameter in model.parameters():
        parameter.data.mul_(2.0 if parameter.ndim == 2 else 1.0)
    return model.eval()


def new_family(name: str) -> Any:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ids = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    given = {**shape, **ids, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}
    if name in ("qwen3", "gemma2"):
        given["head_dim"] = 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **given)).eval()
    change(model)  # norms and biases are no longer ones and zeros
    return model


@torch.no_grad()
def change(model: Any) -> None:
    """What an update does: every weight changes in place."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)


def make_engine(model: Any, **how: Any) -> VllmEngine:
    given: dict[str, Any] = {"seed": 1, "slots": 4, "context": CONTEXT, "mode": "stream"} | how
    return VllmEngine(model, encode=PROMPTS.__getitem__, decode=TOKENIZER.decode, **given)


@contextmanager
def open_engine(model: Any, **how: Any) -> Iterator[VllmEngine]:
    engine = make_engine(model, **how)
    try:
        yield engine
    finally:
        engine.close()


def asked(group: int, n: int = 2, prompt: str = "", **sampling: Any) -> Request:
    wanted = Sampling(**{"max_tokens": 20, "temperature": 0.8, **sampling})
    return Request(
        prompt_id=prompt or f"p{group % len(PROMPTS)}", group_id=group, n=n, sampling=wanted
    )


def drained(engine: Any) -> list[Rollout]:
    out = []
    while not engine.idle:
        out += engine.collect()
    return out


@torch.no_grad()
def off(rollouts: Sequence[Rollout], models: Mapping[int, Any], *, carried: bool = True) -> float:
    """The largest difference of a token's log-prob from that of the model of its version. carried: tokens count that
    follow tokens of older weights."""
    worst = 0.0
    for rollout in rollouts:
        prompt, trace = PROMPTS[rollout.prompt_id], rollout.trace
        assert trace is not None and bool((trace.log_probs <= 0).all()), (
            "not a number, or no log-prob"
        )
        ids = torch.tensor([[*prompt, *trace.ids.tolist()]])
        for version in set(trace.versions.tolist()):
            logits = models[version](ids).logits[0, len(prompt) - 1 : -1] / (
                rollout.sampling.temperature or 1.0
            )
            wanted = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            mine = torch.from_numpy(trace.versions == version)
            if carried or version == rollout.first_version:
                worst = max(
                    worst, float((wanted - torch.from_numpy(trace.log_probs))[mine].abs().max())
                )
    return worst
