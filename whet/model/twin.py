"""The rollout twin: a second Hugging Face module that holds the trainer's very Parameters and buffers.

The trainer keeps its own attention; the twin uses ours (`whet.model.attention`). An in-place update
of a weight is seen by both at once, so no weights are ever copied between them. `rollout_twin` is called by
the engine; `sharing_copy`, the trick behind it, also by the learner for its reference. Adapters are modules and
Parameters like any other. A model whose attention ours cannot reproduce is refused here, with one sentence, before
anything is generated: by what it declares, then by comparing both on a few tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.errors import WhetError
from whet.model.attention import NAME

ModelT = TypeVar("ModelT", bound=nn.Module)

LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer writes into the cache for each token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


def rollout_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same network with our attention, in eval mode, sharing every Parameter and buffer object of `model`."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise WhetError(f"{name} is no Hugging Face model; give a transformers causal language model.")
    refuse_unsupported(model)
    twin = sharing_copy(model, model.parameters())
    twin.config._attn_implementation = NAME
    twin.eval()
    _refuse_different(model, twin, name)
    return twin


def sharing_copy(model: ModelT, shared: Iterable[Tensor]) -> ModelT:
    """New modules and config around the buffers and the `shared` tensors of `model`; all else is copied.

    A deep copy that is told what it has copied already: tied weights stay one object, and what is shared takes no
    memory twice.
    """
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in (*shared, *model.buffers())})


def kv_shapes(twin: PreTrainedModel) -> list[KVShape]:
    """Heads and sizes of every layer's K and V, as they reach the attention."""
    probe = Probe()
    _run(twin, ctx=probe)
    _refuse_asked(probe, twin)
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]


def refuse_unsupported(model: PreTrainedModel) -> None:
    """By what the model declares; its weights may be on the meta device."""
    name, config = type(model).__name__, model.config
    if not model._supports_attention_backend:
        raise WhetError(
            f"{name} does not let its attention be replaced, which whet's engine needs; choose another model."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise WhetError(f"{name} has an encoder and a decoder; whet trains decoder-only models.")
    if config.get_text_config() is not config:
        raise WhetError(f"{name} reads more than text; whet trains text-only models, so give its language model alone.")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise WhetError(
            f"{name} has no language-model head that can be run on chosen tokens; give a causal language model."
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        raise WhetError(f"{name} has layers of type {', '.join(sorted(kinds))}, which whet's engine does not know.")
    rope = str(getattr(config, "rope_parameters", None) or "")
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in rope:  # its angles follow the longest row of a batch, and it rebinds its buffers
            raise WhetError(
                f"{name} uses {kind} rotary positions, which depend on the batch; whet's engine refuses them."
            )


@dataclass(slots=True)
class Probe:
    """A context without a cache: plain causal attention, and a note of what each layer asked for."""

    shapes: dict[int, KVShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    extras: set[str] = field(default_factory=set)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> Tensor:
        self.shapes[layer] = KVShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        self.windows[layer] = window
        self.extras |= {k for k in ("s_aux", "position_bias") if extra.get(k) is not None}
        ratio = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = F.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return (weights @ value).transpose(1, 2)


def _refuse_different(model: PreTrainedModel, twin: PreTrainedModel, name: str) -> None:
    """What a model does in its attention it need not declare, so both are run on three tokens and compared."""
    probe = Probe()
    got = _run(twin, ctx=probe)
    _refuse_asked(probe, model)
    with _eval_mode(model):
        want = _run(model)
    half = want.dtype in (torch.bfloat16, torch.float16)
    allowed = (0.05 if half else 1e-3) * (1.0 + want.abs().max().item())
    gap = (got - want).abs().max().item()
    if gap > allowed:
        raise WhetError(
            f"{name} gives other logits with whet's attention (off by {gap:.3g}), so its rollouts would be wrong."
        )


def _refuse_asked(probe: Probe, model: PreTrainedModel) -> None:
    """By what its layers ask of the attention; its weights may be on the meta device."""
    name, config = type(model).__name__, model.config
    if sorted(probe.shapes) != list(range(config.num_hidden_layers)):
        raise WhetError(f"{name} does not run all of its attention layers through transformers' attention interface.")
    if probe.extras:
        raise WhetError(
            f"{name} needs {', '.join(sorted(probe.extras))} in its attention, which whet's engine does not know."
        )
    windowed = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if windowed else ""] * config.num_hidden_layers
    if any(kind == "sliding_attention" and probe.windows[i] is None for i, kind in enumerate(kinds)):
        raise WhetError(f"{name} does not tell its attention the sliding window, so whet's engine cannot keep to it.")


@torch.no_grad()
def _run(model: PreTrainedModel, **kwargs: Any) -> Tensor:
    ids = torch.arange(3, device=model.device)[None] % model.config.vocab_size
    position = torch.arange(3, device=model.device)[None]
    logits: Tensor = model(input_ids=ids, position_ids=position, use_cache=False, **kwargs).logits
    return logits


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
