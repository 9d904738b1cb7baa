"""LoRA: low-rank adapters on a frozen model (Hu et al. 2021), by peft inside an ordinary Hugging Face model.

A layer computes W x + (alpha / rank) B A x; only A and B are trained. `load.py` adds or loads them; the learner then
finds them as the parameters that require a gradient, and the rollout twin shares them like any other. The modules and
the file format (adapter_config.json, adapter_model.safetensors) are those of peft; what it offers beyond plain LoRA is
refused. There is no dropout: rollouts and learner must be one network.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet import config
from whet.errors import WhetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"
_PREFIX = "base_model.model."  # peft writes names as its own wrapper would see them
# The values that plain LoRA has for these keys of an adapter's config; other values train or change more than A and B.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", None),
}
# Keys that may have any value. All others (DoRA, extra modules, later variants) must be off.
_FREE = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    ]
)


def check_lora(model: PreTrainedModel, settings: config.Lora) -> list[str]:
    """The targets of the recipe, or the last names of all linear layers, as serving engines expect them. Targets that
    the model does not have are refused. Its weights may be on the meta device."""
    need_peft()
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    layers = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head
    ]
    known = sorted({name.rpartition(".")[2] for name in layers})
    targets = sorted(settings.targets or known)
    for target in targets:
        named = f'model.lora.targets names "{target}", but'
        if any(_matches(name, [target]) for name in _ends(model)):
            raise WhetError(f"{named} whet adapts neither embeddings nor the head; leave it out.")
        if not any(_matches(name, [target]) for name in layers):
            near = ", ".join(difflib.get_close_matches(target, known, n=3, cutoff=0.4) or known)
            raise WhetError(
                f"{named} {type(model).__name__} has no such linear layer; nearest are {near}."
            )
    return targets


def check_adapter(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Read a peft folder; refuse more than plain LoRA in this model, whose weights may be on the meta device."""
    need_peft()
    stored = read_adapter(folder)
    targets = stored.get("target_modules") or []
    if any(_matches(name, targets) for name in _ends(model)):
        raise WhetError(
            f"The adapter in {folder} adapts the embeddings or the head, which whet does not support."
        )
    return stored


def need_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        raise WhetError('LoRA needs peft; pip install "whet[lora]".') from None


def _ends(model: PreTrainedModel) -> list[str]:
    """Names of the embeddings and the head."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or module is head
    ]


def _matches(name: str, targets: str | list[str]) -> bool:
    """Match as peft does: a list holds whole dotted names or their ends, a string is a pattern."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


# ---- adapters


def add_lora(model: PreTrainedModel, settings: config.Lora, base: str, seed: int = 0) -> None:
    """Add fresh adapters in place: A drawn from the seed, B zero, so that nothing changes yet; all else is frozen.
    base: the folder or hub name ("org/name@revision") that a saved adapter names as its base."""
    targets = check_lora(model, settings)
    from peft import LoraConfig

    name, _, revision = (base, "", "") if Path(base).is_dir() else base.partition("@")
    plan = LoraConfig(
        r=settings.rank,
        lora_alpha=int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
        revision=revision or None,
    )
    _inject(model, plan, name, seed)


def load_lora(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters of a peft folder on their base model, ready to be trained further."""
    base = check_adapter(model, folder)["base_model_name_or_path"]
    from peft import LoraConfig

    try:
        plan = LoraConfig.from_pretrained(str(folder))
        plan.inference_mode, plan.lora_dropout = False, 0.0
        _inject(model, plan, base, seed=0)
    except (ValueError, TypeError) as error:
        sentence = str(error).strip().splitlines()[0]
        raise WhetError(
            f"The adapter in {folder} does not fit {type(model).__name__}: {sentence}"
        ) from error
    load_adapter_weights(model, folder)


def _inject(model: PreTrainedModel, plan: Any, base: str, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(plan, ADAPTER)
    plan.base_model_name_or_path = base  # add_adapter writes its own
    if isinstance(plan.target_modules, set):
        # so that the same adapter is the same file
        plan.target_modules = sorted(plan.target_modules)


@torch.no_grad()
def load_adapter_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy every A and B into the tensor that the model has; names and shapes must agree."""
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise WhetError(f"{folder} holds no {WEIGHTS}.")
    saved = load_file(folder / WEIGHTS)
    live = dict(adapter_tensors(model))
    other = f"The adapters in {folder} are those of another model"
    if odd := sorted(saved.keys() ^ live.keys()):
        raise WhetError(
            f"{other}: {odd[0]} is {'missing there' if odd[0] in live else 'unknown to this model'}."
        )
    for name, tensor in live.items():  # all are checked before the first is written
        if tensor.shape != saved[name].shape:
            there = tuple(saved[name].shape)
            here = tuple(tensor.shape)
            raise WhetError(f"{other}: {name} is {there} there and {here} in the model.")
    for name, tensor in live.items():
        tensor.copy_(saved[name])


def save_lora(model: PreTrainedModel, folder: Path) -> None:
    """Write a peft folder, as peft does. peft itself would query the hub about the base model at each save."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().contiguous() for name, tensor in adapter_tensors(model)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(str(folder))


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Fold the adapters into the weights in place, W + (alpha / rank) B A, which leaves a plain model. In bf16 the sum
    is rounded to bf16: load the model in float32 to merge without loss."""
    from peft.tuners.lora import LoraLayer

    for path, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            model.set_submodule(path, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model.requires_grad_(True)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, live tensor) of every A and B."""
    for name, parameter in model.named_parameters():
        if f".{ADAPTER}.weight" in name and "lora_" in name:
            yield _PREFIX + name.replace(f".{ADAPTER}.weight", ".weight"), parameter


def is_lora(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def is_peft_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json, refused where it is more than plain LoRA."""
    try:
        stored = json.loads((folder / CONFIG).read_bytes())
        odd = [key for key, plain in _PLAIN.items() if stored.get(key) not in plain]
        odd += [
            key for key, value in stored.items() if value and key not in _FREE and key not in _PLAIN
        ]
        base = stored.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise WhetError(f"{folder / CONFIG} is unreadable: {error}.") from error
    if odd:
        raise WhetError(
            f"The adapter in {folder} has {odd[0]} = {stored.get(odd[0])!r}; whet knows plain LoRA only."
        )
    if not isinstance(base, str) or not base:
        raise WhetError(
            f"{folder / CONFIG} names no base_model_name_or_path; write the base model's name there."
        )
    return stored


def base_name(folder: Path) -> str:
    """The base model that a peft folder names, in the form of `model.name`."""
    stored = read_adapter(folder)
    base = stored["base_model_name_or_path"]
    revision = stored.get("revision")
    return f"{base}@{revision}" if revision and not Path(base).is_dir() else base
