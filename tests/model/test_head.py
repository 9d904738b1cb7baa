"""Chunked log-probs against the plain logits of Hugging Face models: values, gradients, memory."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from whet.errors import WhetError
from whet.model.head import Head, head_of, log_probs
from whet.model.tiny import tiny_model

SHAPE = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def small(family: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        models = {
            "llama": lambda: tiny_model(37, hidden=16, layers=2, heads=4),
            "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
            "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=2.0)),
            "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=0.25)),
            "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=3.0)),
        }
        model = models[family]().double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "granite", "cohere"])
@pytest.mark.parametrize("chunk", [2**20, 37 * 3])
def test_equals_the_models_own_logits(family, chunk):
    model = small(family)
    ids = torch.arange(2, 22)[None] * 7 % 35 + 2
    targets = ids[0].flip(0)
    own = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    lp, entropy = log_probs(hidden, head_of(model), targets, chunk=chunk)
    torch.testing.assert_close(lp, own.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(own.exp() * own).sum(-1))
    assert lp.dtype == torch.float64
    assert not entropy.requires_grad


def case(**changes: Any) -> tuple[Head, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    head = Head(draw(23, 6).requires_grad_(), draw(23).requires_grad_(), **changes)
    targets = torch.randint(23, (11,), generator=g)
    return head, draw(11, 6).requires_grad_(), targets, torch.rand(11, generator=g, dtype=torch.float64) + 0.5


def gradients(head: Head, hidden: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    weighted = sum((torch.randn(x.shape, generator=g, dtype=x.dtype) * x).sum() for x in parts)
    return list(torch.autograd.grad(weighted, [hidden, head.weight, head.bias]))


@pytest.mark.parametrize("changes", [{}, {"softcap": 1.5, "scale": 0.7}])
@pytest.mark.parametrize("rows", [1, 4, 10, 11])
def test_chunk_size_changes_neither_values_nor_gradients(changes, rows):
    """Temperature a token, bias, entropy with its gradient; the last chunk is a rest."""
    head, hidden, targets, heat = case(**changes)
    plain = (head.logits(hidden) / heat[:, None]).log_softmax(-1)
    want = plain.gather(1, targets[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    got = log_probs(hidden, head, targets, heat, entropy_grad=True, chunk=rows * 23)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(gradients(head, hidden, *got), gradients(head, hidden, *want), strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_without_the_entropys():
    head, hidden, targets, _ = case()
    plain = (head.logits(hidden) / 0.8).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    lp, entropy = log_probs(hidden, head, targets, 0.8, chunk=50)
    assert not entropy.requires_grad
    for a, b in zip(gradients(head, hidden, lp), gradients(head, hidden, plain), strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_head_gets_no_gradient():
    head, hidden, targets, _ = case()
    frozen = Head(head.weight.detach(), None)
    lp, _ = log_probs(hidden, frozen, targets, chunk=50)
    lp.sum().backward()
    assert hidden.grad is not None
    assert frozen.weight.grad is None


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operator gave back."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(entropy_grad):
    tokens, vocab, width, rows = 200, 1000, 8, 16
    head = Head(torch.randn(vocab, width, requires_grad=True))
    hidden = torch.randn(tokens, width, requires_grad=True)
    with Largest() as seen:
        lp, entropy = log_probs(
            hidden, head, torch.zeros(tokens, dtype=torch.long), entropy_grad=entropy_grad, chunk=rows * vocab
        )
        (lp.sum() + entropy.sum()).backward()
    assert rows * vocab <= seen.numel < 2 * rows * vocab
    assert tokens * vocab > 10 * seen.numel
    with Largest() as unbounded:
        log_probs(hidden, head, torch.zeros(tokens, dtype=torch.long))
    assert unbounded.numel == tokens * vocab  # the instrument does see it


def test_bf16_is_scored_in_fp32_and_its_head_gradient_summed_in_fp32():
    torch.manual_seed(0)
    head = Head(torch.randn(50, 8, dtype=torch.bfloat16, requires_grad=True))
    hidden = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50, (64,))
    own = (hidden @ head.weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    lp, _ = log_probs(hidden, head, targets, chunk=50 * 4)
    assert lp.dtype == torch.float32
    torch.testing.assert_close(lp, own)
    (one,) = torch.autograd.grad(lp.sum(), head.weight)
    (whole,) = torch.autograd.grad(own.sum(), head.weight)
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, whole, rtol=0.02, atol=0.05)


def test_scales_by_name():
    model = small("llama")
    for changes, scale in [
        ({"logits_scaling": 4.0}, 0.25),
        ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, 4.0),
        ({"lm_head_multiplier": FalconH1Config().lm_head_multiplier}, FalconH1Config().lm_head_multiplier),
    ]:
        for name, value in changes.items():
            setattr(model.config, name, value)
        assert head_of(model).scale == scale
        for name in changes:
            if name != "model_type":
                delattr(model.config, name)
        model.config.model_type = "llama"


def test_a_wrapped_head_is_refused():
    model = small("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(WhetError, match="plain linear head"):
        head_of(model)
