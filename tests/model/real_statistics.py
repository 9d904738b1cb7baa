"""Tiny models with the statistics of real ones, in which rounding to bfloat16 hides more than a wrong scale would.

Measured on Qwen2.5-0.5B: key biases up to 211, all in the numbers of a head that turn slowest; a residual stream of
1,000 in one channel at a few tokens, a thousand times its median, which the norms after it weigh down; a vocabulary of
151,936. Activations elsewhere are those of `families.small`.
"""

from __future__ import annotations

from typing import Any

import torch
from families import SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

VOCABULARY = 151_936
# the token at which a channel is loud; one of those that forms are compared on
LOUD = VOCABULARY * 4 // 9
CHANNEL, LOUDNESS = 3, 1_000.0
KEY_BIAS, QUERY_BIAS = 200.0, 15.0
SLOW = 2  # pairs of a head's numbers that have such biases
ROPE = {"rope_type": "default", "rope_theta": 1e6}
FORMS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2 untied": (Qwen2Config, {"tie_word_embeddings": False}),
    "llama untied": (LlamaConfig, {"tie_word_embeddings": False, "attention_bias": True}),
}


def real_like(form: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of three layers."""
    kind, changes = FORMS[form]
    shape = {
        **SHAPE,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "rope_parameters": ROPE,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(kind(**shape, **changes))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)
            for layer in model.model.layers:
                _bias(layer.self_attn)
            _make_loud(model)
    # not model.to(dtype): the rotary buffers stay float32, as in a loaded model
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model.eval()


def _bias(attention: Any) -> None:
    for linear, size in ((attention.k_proj, KEY_BIAS), (attention.q_proj, QUERY_BIAS)):
        # the halves of a pair lie half a head apart
        heads = linear.bias.view(-1, 2, attention.head_dim // 2)
        slow = heads[..., -SLOW:]
        slow.copy_(size * torch.randn_like(slow).sign())


def _make_loud(model: Any) -> None:
    """A neuron of the first layer answers to one token and writes to one channel."""
    first, *others = model.model.layers
    first.self_attn.o_proj.weight.mul_(0.05)  # the layer's neurons see the token itself
    token = torch.nn.functional.normalize(model.get_input_embeddings().weight[LOUD], dim=0)
    for linear in (first.mlp.gate_proj, first.mlp.up_proj):
        linear.weight[0] = 2.0 * token
    answer = (2.0 * len(token) ** 0.5) ** 2
    first.mlp.down_proj.weight[:, 0] = 0.0
    first.mlp.down_proj.weight[CHANNEL, 0] = LOUDNESS / answer
    norms = [layer.input_layernorm for layer in others] + [
        layer.post_attention_layernorm for layer in others
    ]
    for norm in (*norms, model.model.norm):
        norm.weight[CHANNEL] = 0.01
