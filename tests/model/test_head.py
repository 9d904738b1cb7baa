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
from whet.model.head import Head, head_of, log_probs, score_sums
from whet.model.load import tiny_model

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
    return (
        head,
        draw(11, 6).requires_grad_(),
        targets,
        torch.rand(11, generator=g, dtype=torch.float64) + 0.5,
    )


def gradients(head: Head, hidden: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    weighted = sum((torch.randn(x.shape, generator=g, dtype=x.dtype) * x).sum() for x in parts)
    return list(torch.autograd.grad(weighted, [hidden, head.weight, head.bias]))


@pytest.mark.parametrize("changes", [{}, {"softcap": 1.5, "scale": 0.7}])
@pytest.mark.parametrize("rows", [1, 4, 10, 11])
def test_chunk_size_changes_neither_values_nor_gradients(changes, rows):
    """One temperature per token, bias, entropy with its gradient; the last chunk is a rest."""
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
        self.numel = max(
            [self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))]
        )
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(entropy_grad):
    tokens, vocab, width, rows = 200, 1000, 8, 16
    head = Head(torch.randn(vocab, width, requires_grad=True))
    hidden = torch.randn(tokens, width, requires_grad=True)
    with Largest() as seen:
        lp, entropy = log_probs(
            hidden,
            head,
            torch.zeros(tokens, dtype=torch.long),
            entropy_grad=entropy_grad,
            chunk=rows * vocab,
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
        (
            {"lm_head_multiplier": FalconH1Config().lm_head_multiplier},
            FalconH1Config().lm_head_multiplier,
        ),
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


# Scores of whole responses


def by_autograd(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, counts: list[int], heat: Any = 1.0
) -> torch.Tensor:
    lp, _ = log_probs(hidden, head, targets, heat)
    (gradient,) = torch.autograd.grad(lp.sum(), hidden)
    return torch.stack([piece.sum(0) for piece in gradient.split(counts)])


@pytest.mark.parametrize("changes", [{}, {"scale": 0.7}, {"softcap": 1.5, "scale": 0.7}])
@pytest.mark.parametrize("rows", [1, 2, 4, 10, 11])
def test_scores_are_the_gradient_of_each_responses_log_prob(changes, rows):
    """Bias and one temperature per token; responses that end inside a chunk and ones that fill several."""
    head, hidden, targets, heat = case(**changes)
    counts = [1, 6, 3, 1]
    want = by_autograd(head, hidden, targets, counts, heat)
    got = score_sums(hidden, head, targets, counts, heat, chunk=rows * 23)
    assert not got.requires_grad
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        score_sums(hidden, head, targets, counts, 0.8, chunk=rows * 23),
        by_autograd(head, hidden, targets, counts, 0.8),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "granite", "cohere"])
def test_scores_equal_those_of_the_models_own_logits(family):
    model = small(family)
    ids = torch.arange(2, 22)[None] * 7 % 35 + 2
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    # one bias per response
    shift = torch.zeros(2, hidden.shape[-1], dtype=hidden.dtype, requires_grad=True)
    shifted = hidden[0].detach() + shift.repeat_interleave(torch.tensor([8, 12]), 0)
    targets = ids[0].flip(0)
    own = model.lm_head(shifted) * head_of(model).scale
    if cap := head_of(model).softcap:
        own = torch.tanh(own / cap) * cap
    torch.testing.assert_close(own.detach(), head_of(model).logits(shifted).detach())
    (want,) = torch.autograd.grad(own.log_softmax(-1).gather(1, targets[:, None]).sum(), shift)
    torch.testing.assert_close(
        score_sums(hidden[0], head_of(model), targets, [8, 12], chunk=37 * 5), want
    )


def test_scores_by_hand():
    """Two words of even odds, W = [[1, 0], [0, 2]]: (onehot - 1/2) W is (1/2, -1) for the first, (-1/2, 1) else.

    At temperature 2 half of that. A response of both words scores zero.
    """
    head, hidden, targets = (
        Head(torch.tensor([[1.0, 0.0], [0.0, 2.0]])),
        torch.zeros(4, 2),
        torch.tensor([0, 0, 0, 1]),
    )
    assert score_sums(hidden, head, targets, [1, 1, 2]).tolist() == [
        [0.5, -1.0],
        [0.5, -1.0],
        [0.0, 0.0],
    ]
    assert score_sums(hidden, head, targets, [2, 1, 1], 2.0).tolist() == [
        [0.5, -1.0],
        [0.25, -0.5],
        [-0.25, 0.5],
    ]


def test_scores_never_make_tokens_times_vocabulary():
    tokens, vocab, width, rows = 200, 1000, 8, 16
    head, hidden = (
        Head(torch.randn(vocab, width, requires_grad=True)),
        torch.randn(tokens, width, requires_grad=True),
    )
    with Largest() as seen:
        score_sums(
            hidden, head, torch.zeros(tokens, dtype=torch.long), [1] * tokens, chunk=rows * vocab
        )
    assert rows * vocab <= seen.numel < 2 * rows * vocab


def test_scores_of_bf16_are_fp32():
    torch.manual_seed(0)
    head = Head(torch.randn(50, 8, dtype=torch.bfloat16), scale=0.5)
    hidden, targets = torch.randn(64, 8, dtype=torch.bfloat16), torch.randint(50, (64,))
    got = score_sums(hidden, head, targets, [32, 32], chunk=50 * 5)
    assert got.dtype == torch.float32
    exact = score_sums(hidden.double(), Head(head.weight.double(), scale=0.5), targets, [32, 32])
    torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
