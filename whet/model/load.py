"""From a recipe's [model] to a Hugging Face model and tokenizer on a device.

Only safetensors are read. What is wrong with a folder is said before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from whet import config
from whet.errors import WhetError
from whet.model.tiny import char_tokenizer, tiny_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def check_model(settings: config.Model) -> None:
    """Raises one sentence when the model cannot be had; loads nothing."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise WhetError('model.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu".')
    if settings.name == "tiny":
        if settings.hidden % settings.heads or settings.hidden // settings.heads % 2:
            raise WhetError(
                f"model.hidden = {settings.hidden} must be model.heads = {settings.heads} times an even head size."
            )
        return
    folder = Path(settings.name)
    if not folder.is_dir():
        raise WhetError(f'There is no model folder at {folder}; give a Hugging Face folder, or "tiny".')
    if not (folder / "config.json").is_file():
        raise WhetError(f"{folder} is no Hugging Face folder: it holds no config.json.")
    if not any(folder.glob("*.safetensors")):
        raise WhetError(f"{folder} holds no *.safetensors; whet reads no pickled weights, save the model again.")


def pick_device(settings: config.Model) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def load_tokenizer(settings: config.Model, alphabet: str) -> Any:
    """`alphabet` makes the tiny model's tokenizer; a folder brings its own."""
    if settings.name != "tiny":
        with _one_sentence(settings.name):
            return AutoTokenizer.from_pretrained(settings.name, local_files_only=True)
    if not alphabet:
        raise WhetError('model.name = "tiny" has no tokenizer for this data; give a Hugging Face folder.')
    return char_tokenizer(alphabet)


def load_model(settings: config.Model, *, vocab_size: int, context: int, seed: int) -> PreTrainedModel:
    """`vocab_size`, `context` and `seed` shape the tiny model; a folder brings its own weights."""
    check_model(settings)
    dtype = DTYPES[settings.dtype]
    if settings.name == "tiny":
        shape = {"hidden": settings.hidden, "layers": settings.layers, "heads": settings.heads}
        model: Any = tiny_model(vocab_size, **shape, context=context, dtype=dtype, seed=seed)
    else:
        hf_logging.disable_progress_bar()
        with _one_sentence(settings.name):
            model = AutoModelForCausalLM.from_pretrained(
                settings.name, dtype=dtype, use_safetensors=True, local_files_only=True
            )
        _check_context(model, context, settings.name)
    return model.to(pick_device(settings))


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise WhetError(f"The model in {name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def _check_context(model: PreTrainedModel, context: int, name: str) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise WhetError(f"rollout.context = {context} is more than the {limit} positions of {name}.")
