"""Rows of a tensor, copied: the keys and values of a prompt, once for each response that goes on from it.

`packed.attention` calls `copied`. An operation of its own, since a compiler that looks into it makes of its backward
pass an addition that sorts; here nothing is sorted, and eight numbers are added in fp32, without rounding after each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NOBODYS = 1024
"""Rows for what is left out."""


@torch.library.custom_op("whet::copied", mutates_args=())
def copied(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of x [T, ...]; any where a row is -1, which is nobody's."""
    return x.index_select(0, rows.clamp(min=0))


@torch.library.custom_op("whet::added_up", mutates_args=())
def added_up(slope: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """For each row of `like` the sum of what its copies got. What nobody's got is left out, be it not a number: where
    no sequence lies a kernel writes nothing. It goes to many rows aside: added to one, each would wait for all."""
    wide = torch.float64 if slope.dtype == torch.float64 else torch.float32
    out = torch.zeros(len(like) + NOBODYS, *like.shape[1:], dtype=wide, device=slope.device)
    aside = torch.arange(len(rows), device=rows.device) % NOBODYS + len(like)
    out.index_add_(0, torch.where(rows < 0, aside, rows), slope.to(wide))
    return out[: len(like)].to(like.dtype)


@copied.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


@added_up.register_fake
def _(slope: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
    x, rows = ctx.saved_tensors
    return added_up(slope.contiguous(), rows, x), None


copied.register_autograd(_backward, setup_context=_remember)
