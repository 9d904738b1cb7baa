"""Small targets and what they have written, for the tests of the drafter."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead
from whet.model.load import tiny_model

VOCABULARY = 23


def target(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """Two query heads a key head."""
    return tiny_model(
        VOCABULARY, hidden=32, layers=2, heads=4, kv_heads=2, context=128, dtype=dtype
    )


def qwen3_target() -> Qwen3ForCausalLM:
    """Heads that do not divide the width, and an untied head."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def hidden_of(model: Any, ids: Tensor) -> Tensor:
    """[T, width] after the final norm."""
    hidden: Tensor = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return hidden


def filled(model: Any, lengths: tuple[int, ...] = (9, 5, 17, 12), prompt: int = 3) -> DataBuffer:
    """Random tokens, read by the model; the last one is not."""
    buffer, random = DataBuffer(10_000), torch.Generator().manual_seed(5)
    for length in lengths:
        ids = torch.randint(VOCABULARY, (length,), generator=random)
        buffer.add(0, ids, hidden_of(model, ids)[:-1], prompt)
    return buffer


def attach_slots(head: EagleHead, slots: int, context: int) -> None:
    """Pages of its own, each a whole row, for use apart from an engine: the table of row i is [i]."""
    size = (slots + 1, head.target.kv_heads, context, head.target.dim)
    keys, values = (torch.zeros(size, dtype=head.dtype, device=head.fc.device) for _ in range(2))
    head.attach(keys, values, context)


def numbers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
