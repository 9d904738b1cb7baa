"""The model families whet promises, each as a small network with lively random weights; shared by the tests beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 37
WINDOW = 4
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "smollm2": (
        LlamaConfig,
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36},
    ),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 6.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": WINDOW}),
    "phi": (PhiConfig, {"partial_rotary_factor": 0.5}),
}


def small(
    family: str, dtype: torch.dtype = torch.float64, *, tied: bool = False, noise: float = 0.3
) -> Any:
    """Weights far from their small initial values, so that a leak between sequences shows."""
    kind, changes = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(
            kind(**{**SHAPE, "tie_word_embeddings": tied, **changes})
        )
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=noise)
    # not model.to(dtype): the rotary buffers stay float32, as in a loaded model
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model.eval()


def some_pairs(seed: int = 0, count: int = 7) -> list[tuple[list[int], np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 9)), int(rng.integers(1, 12))) for _ in range(count)]
    return [(rng.integers(2, VOCAB, p).tolist(), rng.integers(2, VOCAB, n)) for p, n in sizes]
