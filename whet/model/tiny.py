"""The built-in model: a small Llama with a tokenizer of characters or bytes, made from a config on the spot.

An ordinary Hugging Face model and tokenizer, so that its checkpoints are ordinary folders and every
other file of whet treats it as it treats a model of seven billion.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>")
"""Ids 0 and 1."""


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token a character; text outside the alphabet is an error of the task, so there is no unknown token."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *dict.fromkeys(alphabet)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8: reads and writes any text, in some four times the tokens of a trained tokenizer."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])


def tiny_model(
    vocab_size: int,
    *,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 3,
    kv_heads: int | None = None,
    context: int = 1024,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LlamaForCausalLM:
    """235k parameters at the defaults; the same weights for the same seed, whatever else drew random numbers."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # not model.to(dtype): the rotary buffer stays float32, as in a loaded model
        parameter.data = parameter.data.to(dtype)
    return model
