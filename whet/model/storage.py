"""Shared storage: projections that read the same input lie in one buffer, row after row.

q, k and v of a layer, and gate and up, keep their own Parameters (same objects, names, shapes), but each becomes a
row slice of one buffer, so that decoding can multiply by all of them at once (`whet.model.fused`) while training,
checkpoints and adapters see what they always saw. `share_storage` is called once, when a model is loaded: before the
optimiser and the rollout twin, for it is the last time that `.data` is rebound. Nothing is registered anywhere:
`joined` finds the buffer again from where the Parameters lie, and finds none after anything moved them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
"""Of a decoder layer: the part, and its projections in the order their rows take in the buffer."""


def share_storage(model: nn.Module, device: torch.device | None = None) -> bool:
    """Lays the projections of every layer into shared buffers, on `device` where one is given.

    False, and nothing is touched, where `unshareable` gives a reason. A model goes to its device through here first
    and then as a whole: `share_storage(model, device); model.to(device)`, since a later move would part the slices
    again, and an earlier one would leave holes in the device's memory.
    """
    if unshareable(model) is not None:
        return False
    for parts in _shares(model):
        to = parts[0].device if device is None else torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        if joined(parts) is None or parts[0].device != to:
            buffer = torch.cat([part.detach().to(to) for part in parts])
            for part, rows in zip(parts, buffer.split([len(part) for part in parts]), strict=True):
                part.data = rows
    return True


def is_shared(model: nn.Module) -> bool:
    """Whether every layer's projections lie in shared buffers now."""
    return unshareable(model) is None and all(joined(parts) is not None for parts in _shares(model))


def unshareable(model: nn.Module) -> str | None:
    """Why the projections of `model` cannot share storage, in a few words; None where they can."""
    layers = layers_of(model)
    if not layers:
        return "its layers are not where they are looked for (model.layers)"
    used = Counter(_owner(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for layer in layers:
        for part, names in GROUPS:
            linears: list[Any] = [getattr(getattr(layer, part, None), name, None) for name in names]
            for name, linear in zip(names, linears, strict=True):
                if why := _odd(linear):
                    return f"{part}.{name} {why}"
                if any(used[_owner(parameter)] > 1 for parameter in linear.parameters()):
                    return f"{part}.{name} is tied to another weight"
            if len({_form(linear) for linear in linears}) > 1:
                return f"{', '.join(names)} of {part} differ in type, place, width or bias"
    return None


def layers_of(model: nn.Module) -> list[Any]:
    """The decoder layers of a Hugging Face causal model with the usual names, else none."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The one tensor whose row slices, in order, the parts are; None where they do not lie so. No copy, no gradient.

    >>> both = torch.arange(6.0).view(3, 2)
    >>> joined([both[:1], both[1:]]).shape, joined([both[1:], both[:1]])
    (torch.Size([3, 2]), None)
    """
    first = parts[0]
    kind, end = _place(first), first.storage_offset()
    for part in parts:
        if _place(part) != kind or not part.is_contiguous() or part.storage_offset() != end:
            return None
        end += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype, tensor.shape[1:]


def _shares(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The Parameters of each buffer there is to be."""
    for layer in layers_of(model):
        for part, names in GROUPS:
            linears = [getattr(getattr(layer, part), name) for name in names]
            yield [linear.weight for linear in linears]
            if linears[0].bias is not None:
                yield [linear.bias for linear in linears]


def _owner(parameter: Tensor) -> int:
    """The same for weights tied as one object or through their data; weights on the meta device have no address."""
    return parameter.data_ptr() or id(parameter)


def _odd(linear: object) -> str | None:
    if linear is None:
        return "is missing"
    if type(linear) is not nn.Linear:  # an adapter, a quantised layer, a parametrised one
        return f"is a {type(linear).__name__}, not a plain linear layer"
    if any(type(p) is not nn.Parameter or not p.is_floating_point() for p in linear.parameters()):
        return "holds weights of a special kind"
    return None


def _form(linear: Any) -> tuple[object, ...]:
    return linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None
