"""The trained drafter as a folder that vLLM or SGLang load as an EAGLE drafter of the same target.

`write_drafter` is called where a checkpoint is written, `copy_drafter` where one is exported. The layout follows the
loaders, which both prepend "model." to every name; embedding and head are never written:

  vLLM    vllm/model_executor/models/llama_eagle.py, transformers_utils/configs/eagle.py. fc without bias and no norm
          before the attention; an unknown name is an error. The class is "Eagle" + architectures[0], so the config
          says LlamaForCausalLM. Embedding and head are the target's. It proposes from the whole vocabulary.
  SGLang  python/sglang/srt/models/llama_eagle.py, speculative/eagle_worker.py. fc with a bias, which keeps random
          numbers where the file has none: zeros are written. LlamaForCausalLMEagle by name. Tied embeddings must be
          off: a reduced head would else replace the embedding. It reads a draft vocabulary from a pickle
          (`--speculative-token-map`), and whet writes none: such a drafter is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from whet.draft.eagle import EagleHead
from whet.errors import WhetError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FOLDER = "drafter"  # in a checkpoint and in an export
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
BIAS = "fc.bias"
NAMES = (  # what both loaders read, in the order of `layout` and `named_weights`
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
)
# Settings of the target that the drafter has too.
SHARED = ("max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def layout(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the loader of the config's architecture expects, no more and no less."""
    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    attention = ((query, width), (key, width), (key, width), (width, query))
    shapes = ((width, 2 * width), *attention, (width,), (inner, width), (inner, width), (width, inner))
    table: dict[str, tuple[int, ...]] = dict(zip(NAMES, shapes, strict=True))
    if config["architectures"] == [ARCHITECTURES["sglang"]]:
        table[BIAS] = (width,)
    return table


def write_drafter(folder: Path, head: EagleHead, target_config: Any, *, engine: str = "vllm") -> None:
    """Write the weights, in the type of `head`, and the config, for "vllm" or "sglang"."""
    check_engine(engine)
    if engine == "sglang" and head.draft_ids is not None:
        ways = "write the drafter for vllm, or make it over the whole vocabulary"
        raise WhetError(f"SGLang reads a reduced draft vocabulary from a pickle, which whet does not write; {ways}.")
    tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in named_weights(head).items()}
    # A Llama config of one layer, with the rotary settings in the old and the new form of transformers.
    target, rope = head.target, dict(target_config.rope_parameters)
    scaled = {name: value for name, value in rope.items() if name != "rope_theta"}
    config = {
        "model_type": "llama",
        "hidden_size": target.hidden,
        "intermediate_size": target.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.eps,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaled,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **{name: getattr(target_config, name) for name in SHARED},
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    _write(folder, tensors, config, engine)


def copy_drafter(source: Path, folder: Path, *, engine: str = "vllm") -> None:
    """Copy a written drafter for the same engine or the other, with its weights bit by bit."""
    check_engine(engine)
    check_layout(source)
    tensors = load_file(source / WEIGHTS)
    if BIAS in tensors and tensors.pop(BIAS).any():
        raise WhetError(f"The drafter in {source} has a bias, which vLLM would not load; it is not one of whet's.")
    _write(folder, tensors, _read_config(source), engine)


def check_engine(engine: str) -> None:
    if engine not in ARCHITECTURES:
        raise WhetError(f"A drafter can be written for {' or '.join(ARCHITECTURES)}, not for {engine!r}.")


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], engine: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if engine == "sglang":
        tensors = {**tensors, BIAS: torch.zeros_like(tensors["fc.weight"][:, 0])}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    described = {**config, "architectures": [ARCHITECTURES[engine]]}
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")


def named_weights(head: EagleHead) -> dict[str, Tensor]:
    """The parameters by the loaders' names: views of them, without gradients."""
    target = head.target
    query, key, value = head.qkv.detach().split([target.heads * target.dim, *[target.kv_heads * target.dim] * 2])
    gate, up = head.gate_up.detach().chunk(2)
    parts = (head.fc, query, key, value, head.out, head.norm, gate, up, head.down)
    return {name: part.detach() for name, part in zip(NAMES, parts, strict=True)}


def check_layout(folder: Path) -> None:
    """Raise one sentence about the first thing in the folder that its engine would not load."""
    wanted = layout(_read_config(folder))
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WhetError(f"{folder / WEIGHTS} cannot be read: {error}.") from error
    wrong = {
        "lacks": [name for name in wanted if name not in shapes],
        "has, which the loader does not know,": [name for name in shapes if name not in wanted],
        "has in another shape": [n for n, s in shapes.items() if n in wanted and s != wanted[n]],
    }
    for what, names in wrong.items():
        if names:
            raise WhetError(f"The drafter in {folder} {what} {names[0]}; write it again.")


@torch.no_grad()
def read_drafter(folder: Path, head: EagleHead) -> None:
    """Read the weights of a written drafter into `head`, in place."""
    check_layout(folder)
    saved, mine = load_file(folder / WEIGHTS), named_weights(head)
    for name, tensor in mine.items():
        if saved[name].shape != tensor.shape:
            raise WhetError(f"The drafter in {folder} is of another target: {name} has another shape.")
    for name, tensor in mine.items():
        tensor.copy_(saved[name])
    head.version += 1


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
        known = config["architectures"] in [[name] for name in ARCHITECTURES.values()]
        sizes = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
        whole = known and config["num_hidden_layers"] == 1 and all(isinstance(config[name], int) for name in sizes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WhetError(f"{folder / CONFIG} is not the config of a drafter: {error!r}.") from error
    if "hot_vocab_size" in config:
        raise WhetError(f"The drafter in {folder} has a vocabulary of its own in a pickle, which whet does not read.")
    if not whole or config.get("tie_word_embeddings") is not False:
        raise WhetError(f"{folder / CONFIG} is not the config of an EAGLE drafter that vLLM or SGLang load.")
    assert isinstance(config, dict)
    return config
