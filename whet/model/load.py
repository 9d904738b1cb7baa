"""From a recipe's [model] to a Hugging Face model and tokenizer on a device.

A name is a folder, a peft folder (adapters and the name of their base), a hub name, or "tiny". Only safetensors are
read and no code that comes with a model is run. What is wrong is said before any weight is loaded: `check_model`
builds the network without weights to find out. Adapters themselves are the matter of `lora.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as hf_logging

from whet import config
from whet.errors import WhetError
from whet.model.head import head_of
from whet.model.lora import add_lora, base_name, check_adapter, check_lora, is_peft_folder, load_lora, read_adapter
from whet.model.memory import cache_shapes
from whet.model.twin import refuse_unsupported

# ---- tiny
#
# The built-in model: a small Llama with a tokenizer of characters or bytes, made from a config on the spot.
#
# An ordinary Hugging Face model and tokenizer, so that its checkpoints are ordinary folders and every
# other file of whet treats it as it treats a model of seven billion.


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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
"""What is fetched of a repository: weights, configs, tokenizers and chat templates; nothing that holds code."""
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers raises over a folder that is not as it should be."""
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's files lie."""

    folder: Path
    """The full weights."""
    base: str
    """The same as a name that means these very weights tomorrow: an absolute path, or org/name@commit."""
    adapter: Path | None = None
    """The peft folder that stands on it."""


def resolve_model(name: str) -> Path:
    """The folder of a model: an existing one as it is, or the hub's, from the local cache or else the network.

    A cached snapshot is taken without asking whether the hub has a newer one, so that a run can be repeated and works
    offline; org/name@revision asks for another.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    match = HUB_NAME.fullmatch(name)
    if match is None:
        raise WhetError(
            f'There is no model folder at {name}; give a Hugging Face folder, a hub name (org/name), or "tiny".'
        )
    repo, revision = match.groups()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES, local_files_only=True))
        if _is_whole(cached):
            return cached
    except (LocalEntryNotFoundError, ValueError):
        pass
    with _hub_sentences(name, repo):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))


def locate_model(name: str) -> Place:
    """Weights and adapters of a name, each known to be there."""
    folder = resolve_model(name)
    if not is_peft_folder(folder):
        _check_weights(folder)
        return Place(folder, _pinned(name, folder))
    base = base_name(folder)
    try:
        under = resolve_model(base)
    except WhetError as error:
        raise WhetError(f"The adapter in {folder} stands on {base}, which is not to be had: {error}") from error
    if is_peft_folder(under):
        raise WhetError(f"The adapter in {folder} stands on another adapter, {base}; merge that one first.")
    _check_weights(under)
    return Place(under, _pinned(base, under), folder)


def check_model(settings: config.Model) -> PreTrainedModel | None:
    """The network without weights, None for the tiny one. Raises one sentence when it cannot be had or trained here."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise WhetError('model.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu".')
    if settings.name == "tiny":
        if settings.hidden % settings.heads or settings.hidden // settings.heads % 2:
            raise WhetError(
                f"model.hidden = {settings.hidden} must be model.heads = {settings.heads} times an even head size."
            )
        if settings.lora.rank:
            raise WhetError(
                'model.name = "tiny" has no trained weights to adapt; set model.lora.rank = 0 or name a model.'
            )
        return None
    place = locate_model(settings.name)
    skeleton = build_skeleton(place.folder)
    refuse_unsupported(skeleton)
    head_of(skeleton)
    cache_shapes(skeleton)  # refuses what its layers ask of the attention, where that is not known
    if place.adapter is not None:
        check_adapter(skeleton, place.adapter)
        _check_same_adapter(settings.lora, place.adapter)
    elif settings.lora.rank:
        check_lora(skeleton, settings.lora)
    return skeleton


def build_skeleton(folder: Path) -> PreTrainedModel:
    """The network of a folder without weights (on the meta device)."""
    with _one_sentence(folder), torch.device("meta"), no_init_weights():
        settings = AutoConfig.from_pretrained(folder, **LOCAL)
        if getattr(settings, "quantization_config", None):
            raise WhetError(
                f"{folder} holds quantised weights, which cannot be trained; give the model they came from."
            )
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        model.tie_weights()  # no_init_weights leaves a tied head untied
        return model


def pick_device(settings: config.Model) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def load_tokenizer(settings: config.Model, alphabet: str) -> Any:
    """A folder brings its own, a bare adapter that of its base; the tiny model reads the `alphabet`, "" is any text."""
    if settings.name != "tiny":
        folder = resolve_model(settings.name)
        if is_peft_folder(folder) and not (folder / "tokenizer_config.json").is_file():
            folder = locate_model(settings.name).folder
        with _one_sentence(folder):
            return AutoTokenizer.from_pretrained(folder, **LOCAL)
    return char_tokenizer(alphabet) if alphabet else byte_tokenizer()


def eos_of(settings: config.Model) -> int | list[int] | None:
    """The end tokens that the loaded model's generation settings will name."""
    if settings.name == "tiny":
        return SPECIAL.index("<eos>")
    folder = locate_model(settings.name).folder
    with _one_sentence(folder):
        path = folder / "generation_config.json"
        if path.is_file():
            return json.loads(path.read_bytes()).get("eos_token_id")
        return AutoConfig.from_pretrained(folder, **LOCAL).eos_token_id


def load_model(
    settings: config.Model, *, vocab_size: int, context: int, seed: int, checked: PreTrainedModel | None = None
) -> PreTrainedModel:
    """`vocab_size` and `context` shape the tiny model, `seed` its weights, or fresh adapters on a folder's.

    `checked`: what `check_model` has given for these settings, where it was called before.
    """
    network = checked or check_model(settings)
    dtype = DTYPES[settings.dtype]
    if settings.name == "tiny":
        shape = {"hidden": settings.hidden, "layers": settings.layers, "heads": settings.heads}
        model: Any = tiny_model(vocab_size, **shape, context=context, dtype=dtype, seed=seed)
        return model.to(pick_device(settings))
    place = locate_model(settings.name)
    assert network is not None
    _check_context(network, context, settings.name)
    model = load_weights(place.folder, dtype)
    if place.adapter is not None:
        load_lora(model, place.adapter)
    elif settings.lora.rank:
        add_lora(model, settings.lora, place.base, seed)
    return model.to(pick_device(settings))


def load_weights(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A plain folder's model on the CPU, with every weight it needs."""
    hf_logging.disable_progress_bar()
    with _one_sentence(folder):
        settings = AutoConfig.from_pretrained(folder, **LOCAL)
        # transformers' default attention leaves Gemma 2's soft-cap out without a word
        own = {"attn_implementation": "eager"} if getattr(settings, "attn_logit_softcapping", None) else {}
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **own, **LOCAL
        )
    if lacking := sorted(info["missing_keys"]):  # transformers would go on with random numbers in their place
        raise WhetError(f"The weights in {folder} are not whole: {lacking[0]} is not among them.")
    return model


@contextmanager
def _one_sentence(folder: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        first, *rest = str(error).strip().splitlines() or [type(error).__name__]
        why = f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
        raise WhetError(f"The model in {folder} cannot be loaded: {why}") from error


@contextmanager
def _hub_sentences(name: str, repo: str) -> Iterator[None]:
    import httpx
    from huggingface_hub import errors

    no_folder = f"There is no folder {name}, and as a hub name it"
    try:
        yield
    except errors.GatedRepoError as error:
        raise WhetError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then run `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise WhetError(
            f"{no_folder} is not known; check the spelling, or run `hf auth login` where it is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise WhetError(f"{repo} has no such revision as {name.partition('@')[2] or 'main'}.") from error
    except (errors.LocalEntryNotFoundError, ConnectionError, httpx.TransportError) as error:
        raise WhetError(
            f"{no_folder} is not (whole) in the local cache, while the hub cannot be reached; "
            f"run `hf download {repo}` where there is a network."
        ) from error
    except Exception as error:  # the network, the hub and its storage fail in many ways
        first = (str(error).strip().splitlines() or [""])[0]
        raise WhetError(f"{no_folder} could not be fetched: {type(error).__name__} {first}".rstrip()) from error


def _is_whole(folder: Path) -> bool:
    """Whether nothing of a snapshot was left out by an interrupted download, as far as its own files tell."""
    if is_peft_folder(folder):
        return any(folder.glob("*.safetensors"))
    wanted = ["config.json", "tokenizer_config.json"]
    index = folder / "model.safetensors.index.json"
    try:
        wanted += set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else []
    except (ValueError, LookupError, AttributeError):
        return False
    return all((folder / file).is_file() for file in wanted) and any(folder.glob("*.safetensors"))


def _check_weights(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise WhetError(f"{folder} is no Hugging Face folder: it holds no config.json.")
    if not any(folder.glob("*.safetensors")):
        raise WhetError(f"{folder} holds no *.safetensors; whet reads no pickled weights, save the model again.")


def _pinned(name: str, folder: Path) -> str:
    match = None if Path(name).expanduser().is_dir() else HUB_NAME.fullmatch(name)
    return f"{match[1]}@{folder.name}" if match else str(folder.resolve())


def _check_same_adapter(settings: config.Lora, folder: Path) -> None:
    told = read_adapter(folder)
    if settings.rank and (settings.rank, settings.alpha) != (told.get("r"), told.get("lora_alpha")):
        raise WhetError(
            f"model.lora.rank = {settings.rank} and alpha = {settings.alpha:g}, but the adapter in {folder} has "
            f"{told.get('r')} and {told.get('lora_alpha')}; leave model.lora out to train it on."
        )


def _check_context(skeleton: PreTrainedModel, context: int, name: str) -> None:
    limit = getattr(skeleton.config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise WhetError(f"rollout.context = {context} is more than the {limit} positions of {name}.")
