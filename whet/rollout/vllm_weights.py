"""The learner's weights as vLLM takes them, and whether vLLM holds them.

vLLM joins some matrices into one (q, k and v; gate and up) and on a CPU packs them into a form of its own, from which
they cannot be read back. Matrices that are there are compared number by number; of a packed one the product with a
fixed vector is, which every number of it enters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest product: what rounding may make


def named_weights(model: Any, modules: Set[str]) -> dict[str, Tensor]:
    """The weights by the names of a checkpoint. A tied head is among them under its own name, too, if it is one of
    vLLM's `modules`: vLLM may have packed it apart from the embedding."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        again = any(tensor is other for other in weights.values())
        if not again or name.rpartition(".")[0] in modules:
            weights[name] = tensor
    return {name: tensor.detach() for name, tensor in weights.items()}


def module_names(theirs: Any) -> set[str]:
    return {name for name, _ in theirs.named_modules()}


@torch.no_grad()
def first_difference(theirs: Any, ours: Mapping[str, Tensor]) -> str | None:
    """The first tensor of ours that vLLM's model does not hold as it is; None where it holds all of them."""
    joined = getattr(theirs, "packed_modules_mapping", {})
    left = dict(ours)
    for name, module in theirs.named_modules():
        above, _, own = name.rpartition(".")
        for kind, held in module.named_parameters(recurse=False):
            names = [f"{above}.{part}.{kind}".lstrip(".") for part in joined.get(own, [own])]
            pieces = [ours[piece] for piece in names if piece in ours]
            if len(pieces) == len(names) and not _holds(module, held, pieces):
                return names[0]
            for piece in names:
                left.pop(piece, None)
    tied = {tensor.data_ptr() for name, tensor in ours.items() if name not in left}
    return next((name for name, tensor in left.items() if tensor.data_ptr() not in tied), None)


def _holds(module: Any, held: Tensor, pieces: Sequence[Tensor]) -> bool:
    whole = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
    packed = getattr(module, "cpu_linear", None) if whole.ndim == 2 else None
    same = held.shape[1:] == whole.shape[1:] and torch.equal(held[: whole.shape[0]], whole)  # vocabularies are padded
    if packed is None or (held.numel() and not same):
        return same
    probe = torch.cos(torch.arange(whole.shape[1])).to(whole.dtype)
    product, wanted = packed(probe[None], held, None)[0, : whole.shape[0]].float(), (whole @ probe).float()
    return bool((product - wanted).abs().max() <= CLOSE[whole.dtype] * wanted.abs().max())
