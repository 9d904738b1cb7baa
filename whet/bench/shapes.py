"""Models with the sizes of known ones and random weights: speed does not ask what the weights are.

SmolLM2-135M and Qwen2.5-1.5B as published but for the longest context, which is 32k for all, and a tiny one for
machines without a GPU. `whet.bench.decode` builds them on the device; nothing is read from disk or network.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from whet.errors import WhetError

CONTEXT = 32_768

SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, int]]] = {
    "135m": (
        LlamaConfig,
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "1.5b": (
        Qwen2Config,
        {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
    "tiny": (
        LlamaConfig,
        {
            "vocab_size": 64,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
}


def shape_config(name: str) -> PretrainedConfig:
    if name not in SHAPES:
        raise WhetError(f'There is no shape "{name}"; there are {", ".join(SHAPES)}.')
    family, sizes = SHAPES[name]
    settings: dict[str, Any] = {
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return family(**sizes, **settings)


def shape_model(name: str, device: torch.device | str) -> PreTrainedModel:
    """bf16 on a GPU, float32 on a CPU; the same weights every time."""
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape_config(name), dtype=dtype, attn_implementation="sdpa"
        )
        # a fresh model's padding token is a zero vector, whose slope grows at every norm until it is no number
        model.get_input_embeddings().weight.data[0].normal_(0, model.config.initializer_range)
    return model.eval().requires_grad_(False)
