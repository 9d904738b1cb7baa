"""From a recipe's [model] to a Hugging Face model and tokenizer on a device.

`resolve.py` and `build.py` call it, before a run and at its start. A name is a folder, a peft folder (adapters and the
name of their base; see `lora.py`), a hub name, or "tiny", the small Llama with a tokenizer of characters or bytes that
is built on the spot. Only safetensors are read, and no code that comes with a model is run. Whatever is wrong is
reported before any weight is loaded: `check_model` builds the network without weights to find out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
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
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from whet import config
from whet.errors import WhetError
from whet.model.head import head_of
from whet.model.lora import (
    add_lora,
    base_name,
    check_adapter,
    check_lora,
    is_peft_folder,
    load_lora,
)
from whet.model.names import HUB_NAME, find_folder, refuse_incomplete
from whet.model.twin import kv_shapes, refuse_unsupported

SPECIAL = ("<pad>", "<eos>")  # ids 0 and 1 of the tiny model
# What is fetched of a repository: weights, configs, tokenizers and chat templates; nothing that holds code.
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# What transformers raises over a folder that is not as it should be.
_WRONG_CONTENT = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
UNREADABLE = (*_WRONG_CONTENT, SafetensorError, StrictDataclassError)


def tiny_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character; text outside the alphabet is an error of the task, so there is no unknown token. Without
    an alphabet one token per byte of UTF-8: any text, with four times the tokens of a trained tokenizer."""
    letters = dict.fromkeys(alphabet) or sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *letters))}
    if alphabet:
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )


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
    """A Llama with 235k parameters at the defaults; the same seed gives the same weights, whatever ran before."""
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
    # not model.to(dtype): the rotary buffer stays float32, as in a loaded model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


# ---- names and folders


@dataclass(frozen=True, slots=True)
class Place:
    """Where the files of a model lie."""

    folder: Path  # where the full weights are
    base: str  # a name that will mean the same weights later: an absolute path, or org/name@commit
    adapter: Path | None = None  # the peft folder on top of them


def resolve_model(name: str) -> Path:
    """The folder of a model: an existing one as it is, or one of the hub, from the local cache or else the network. A
    cached snapshot is used even if the hub has a newer one, so that a run can be repeated and works offline;
    org/name@revision names another."""
    folder = find_folder(name)
    if folder is not None:
        return folder
    match = HUB_NAME.fullmatch(name)
    assert match is not None
    repo, revision = match.groups()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, ValueError):
        cached = Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=HUB_FILES, local_files_only=True
            )
        )
        if _is_whole(cached):
            return cached
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # the network, the hub and its storage fail in many ways
        raise WhetError(_hub_sentence(error, name, repo)) from error


def _hub_sentence(error: Exception, name: str, repo: str) -> str:
    """What an error of the hub or the network means, and what to do."""
    import httpx
    from huggingface_hub import errors

    no_folder = f"There is no folder {name}, and as a hub name it"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then run `hf auth login`."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{no_folder} is not known; check the spelling, or run `hf auth login` where it is private."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no such revision as {name.partition('@')[2] or 'main'}."
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | httpx.TransportError):
        unreachable = (
            f"{no_folder} is not (whole) in the local cache, while the hub cannot be reached"
        )
        return f"{unreachable}; run `hf download {repo}` where there is a network."
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{no_folder} could not be fetched: {type(error).__name__} {first}".rstrip()


def locate_model(name: str) -> Place:
    """The weights and adapters that a name stands for, each checked to be there."""
    folder = resolve_model(name)
    adapter = None
    if is_peft_folder(folder):
        adapter = folder
        name = base_name(folder)
        try:
            folder = resolve_model(name)
        except WhetError as error:
            raise WhetError(
                f"The adapter in {adapter} stands on {name}, which is not to be had: {error}"
            ) from error
        if is_peft_folder(folder):
            raise WhetError(
                f"The adapter in {adapter} stands on another adapter, {name}; merge that one first."
            )
    refuse_incomplete(folder)
    hub = None if Path(name).expanduser().is_dir() else HUB_NAME.fullmatch(name)
    return Place(folder, f"{hub[1]}@{folder.name}" if hub else str(folder.resolve()), adapter)


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot holds everything that its own files name: an interrupted download leaves some out."""
    if is_peft_folder(folder):
        return any(folder.glob("*.safetensors"))
    wanted = ["config.json", "tokenizer_config.json"]
    index = folder / "model.safetensors.index.json"
    try:
        wanted += (
            set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else []
        )
    except (ValueError, LookupError, AttributeError):
        return False
    return all((folder / file).is_file() for file in wanted) and any(folder.glob("*.safetensors"))


# ---- loading


def check_model(settings: config.Model) -> PreTrainedModel | None:
    """The network without weights, or None for the tiny one. Raises one sentence if it cannot be found or trained."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise WhetError(
            'model.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu".'
        )
    if settings.name == "tiny":
        hidden = settings.hidden
        heads = settings.heads
        if hidden % heads or hidden // heads % 2:
            raise WhetError(
                f"model.hidden = {hidden} must be model.heads = {heads} times an even head size."
            )
        if settings.lora.rank:
            sentence = 'model.name = "tiny" has no trained weights to adapt; set model.lora.rank = 0 or name a model.'
            raise WhetError(sentence)
        return None
    place = locate_model(settings.name)
    skeleton = build_skeleton(place.folder)
    lora = settings.lora
    if place.adapter is not None:
        stored = check_adapter(skeleton, place.adapter)
        rank = stored.get("r")
        alpha = stored.get("lora_alpha")
        if lora.rank and (lora.rank, lora.alpha) != (rank, alpha):
            raise WhetError(
                f"model.lora.rank = {lora.rank} and alpha = {lora.alpha:g}, but the adapter in {place.adapter} has "
                f"{rank} and {alpha}; leave model.lora out to train it on."
            )
    elif lora.rank:
        check_lora(skeleton, lora)
    return skeleton


def build_skeleton(folder: Path) -> PreTrainedModel:
    """The network of a folder without weights (on the meta device), if it is one that can be trained."""
    with _one_sentence(folder), torch.device("meta"), no_init_weights():
        settings = AutoConfig.from_pretrained(folder, **LOCAL)
        if getattr(settings, "quantization_config", None):
            raise WhetError(
                f"{folder} holds quantised weights, which cannot be trained; give their original model."
            )
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        model.tie_weights()  # no_init_weights leaves a tied head untied
    refuse_unsupported(model)
    head_of(model)
    kv_shapes(model)  # refuses arguments of its attention calls that are not supported
    return model


def pick_device(settings: config.Model) -> torch.device:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(found if settings.device == "auto" else settings.device)


def load_tokenizer(settings: config.Model, alphabet: str) -> Any:
    """The tokenizer of the folder, or of the base of an adapter without one; of the `alphabet` for the tiny model."""
    if settings.name == "tiny":
        return tiny_tokenizer(alphabet)
    folder = resolve_model(settings.name)
    if is_peft_folder(folder) and not (folder / "tokenizer_config.json").is_file():
        folder = locate_model(settings.name).folder
    with _one_sentence(folder):
        return AutoTokenizer.from_pretrained(folder, **LOCAL)


def eos_of(settings: config.Model) -> int | list[int] | None:
    """The end tokens that the loaded model's generation settings will name."""
    if settings.name == "tiny":
        return SPECIAL.index("<eos>")
    folder = locate_model(settings.name).folder
    with _one_sentence(folder):
        if (path := folder / "generation_config.json").is_file():
            return json.loads(path.read_bytes()).get("eos_token_id")
        return AutoConfig.from_pretrained(folder, **LOCAL).eos_token_id


def load_model(
    settings: config.Model,
    *,
    vocab_size: int,
    context: int,
    seed: int,
    checked: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """`vocab_size` and `context` shape the tiny model, `seed` its weights, or fresh adapters on a folder's. `checked`:
    what `check_model` has given for these settings, where it was called before."""
    network = checked or check_model(settings)
    dtype = getattr(torch, settings.dtype)
    device = pick_device(settings)
    model: Any
    if settings.name == "tiny" or network is None:
        shape = {"hidden": settings.hidden, "layers": settings.layers, "heads": settings.heads}
        model = tiny_model(vocab_size, **shape, context=context, dtype=dtype, seed=seed)
        return model.to(device)
    place = locate_model(settings.name)
    limit = getattr(network.config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise WhetError(
            f"rollout.context = {context} is more than the {limit} positions of {settings.name}."
        )
    model = load_weights(place.folder, dtype)
    if place.adapter is not None:
        load_lora(model, place.adapter)
    elif settings.lora.rank:
        add_lora(model, settings.lora, place.base, seed)
    return model.to(device)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars, which would break the display of a run; afterwards it may draw again."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()


@no_progress_bars()
def load_weights(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a plain folder on the CPU, with every weight it needs."""
    with _one_sentence(folder):
        settings = AutoConfig.from_pretrained(folder, **LOCAL)
        # The default attention of transformers silently leaves out the soft-cap of Gemma 2.
        own = (
            {"attn_implementation": "eager"}
            if getattr(settings, "attn_logit_softcapping", None)
            else {}
        )
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **own, **LOCAL
        )
    # transformers would continue with random numbers instead
    if lacking := sorted(info["missing_keys"]):
        raise WhetError(f"The weights in {folder} are not whole: {lacking[0]} is not among them.")
    return model


@contextlib.contextmanager
def _one_sentence(folder: Path) -> Iterator[None]:
    """Turn the errors of transformers about a folder into one sentence."""
    try:
        yield
    except UNREADABLE as error:
        first, *rest = str(error).strip().splitlines() or [type(error).__name__]
        why = f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
        raise WhetError(f"The model in {folder} cannot be loaded: {why}") from error
