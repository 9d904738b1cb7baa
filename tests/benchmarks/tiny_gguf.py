"""Writes tiny GGUF files as llama.cpp's converters make them, for the tests of benchmarks/gguf_model.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH = 64, 2, 4, 2, 96
KV = HIDDEN // HEADS * KV_HEADS
SMOLLM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
OWN = "<tool_call>"
"""An added token that is text."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


MERGES = [
    ("Ġ", "Ġ"),  # two spaces
    (
        "Ċ",
        "Ġ",
    ),  # a newline with a space: only a tokenizer that splits digits first uses it before a number
    ("h", "i"),
    ("1", "2"),
    ("12", "3"),
    ("123", "4"),  # more digits than any rule keeps together, but GPT-2's
    ("'", "s"),
    ("Ã", "©"),  # the composed e with an acute accent
    (".", "Ċ"),
]


def write_tokenizer(
    writer: Any, pre: str, special: tuple[str, ...], ids: dict[str, int], template: str
) -> int:
    """Special tokens come first, fillings last; returns the number of all."""
    tokens = [*special, OWN, *byte_letters(), *("".join(pair) for pair in MERGES)]
    filling = [f"[PAD{i}]" for i in range(-len(tokens) % 32)]
    kinds = {**dict.fromkeys(special, 3), OWN: 4, **dict.fromkeys(filling, 5)}
    tokens += filling
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    for name, number in ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
    if template:
        writer.add_chat_template(template)
    return len(tokens)


TOKENIZERS: dict[str, tuple[tuple[str, ...], dict[str, int], str]] = {
    "smollm": (SMOLLM, {"bos": 1, "eos": 2, "unk": 0, "pad": 2}, TEMPLATE),
    "qwen2": (QWEN, {"bos": 0, "eos": 2, "pad": 0}, TEMPLATE),
    "llama-bpe": (LLAMA3, {"bos": 0, "eos": 2}, ""),
}


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    layers: str = "Q4_1",
    embedding: str = "Q8_0",
    head: str = "",
    one_matrix: bool = False,
    seed: int = 0,
    **ids: int,
) -> Path:
    """layers, embedding, head: types of weights; an empty one is left out. one_matrix: the head is the embedding,
    rounded for itself. ids: token ids in place of the usual ones."""
    writer = gguf.GGUFWriter(path, arch)
    special, usual, template = TOKENIZERS[pre]
    vocabulary = write_tokenizer(writer, pre, special, {**usual, **ids}, template)
    writer.add_name(f"Tiny {arch}")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    noise = np.random.default_rng(seed)

    def add(name: str, array: np.ndarray, kind: str) -> None:
        dtype = gguf.GGMLQuantizationType[kind]
        data = array if kind == "F32" else gguf.quants.quantize(array, dtype)
        writer.add_tensor(name, data, raw_dtype=dtype)

    def drawn(*shape: int, scale: float = 0.1) -> np.ndarray:
        return noise.normal(0, scale, shape).astype(np.float32)

    first, last = drawn(vocabulary, HIDDEN), drawn(vocabulary, HIDDEN)
    if embedding:
        add("token_embd.weight", first, embedding)
    if head:
        add("output.weight", first if one_matrix else last, head)
    add("output_norm.weight", 1 + drawn(HIDDEN), "F32")
    for i in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV, HIDDEN),
            "attn_v": (KV, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (WIDTH, HIDDEN),
            "ffn_up": (WIDTH, HIDDEN),
            "ffn_down": (HIDDEN, WIDTH),
        }
        for name, shape in shapes.items():
            add(f"blk.{i}.{name}.weight", drawn(*shape), layers)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", 1 + drawn(HIDDEN), "F32")
        if arch == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{i}.{name}.bias", drawn(shapes[name][0], scale=2.0), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
