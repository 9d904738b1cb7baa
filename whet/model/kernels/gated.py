"""silu(x G^T) * (x U^T) of few tokens in one kernel: the widest product of a layer, read at the memory's speed.

With few tokens a product costs what reading its weights costs, of which a library's kernel leaves half: it has more
tokens in mind. On an H200 with 8 to 64 tokens this one takes 8% to 17% less for a 1.5B model and 17% to 31% less for
135M, the launch of silu that it spares included (`benchmarks/gated_kernel.py`); with two tokens they are even, and a 7B
model gains 1% to 4%. The other products of a layer are too small for it to matter, or no faster so.

x [T, K]; weight [2N, K], the rows of gate first, then those of up; bias [2N] or none; out [T, N]. Sums are in fp32, in
an order that follows from shapes alone; gate and up are rounded as a product of their own would be, then once more.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.model.kernels.dispatch import takes_triton

FEW = 64
"""Tokens up to which the kernel beats a library's product; half as many where the weight is LARGE."""
LARGE = 100_000_000
"""Bytes. A 1.5B model's has 55 million, a 7B model's 272."""
STAGES = 100_000
"""Bytes that a program has on their way: two programs fit on a multiprocessor."""


class Tile(NamedTuple):
    """A program has `rows` of gate and as many of up, all tokens (`columns`), and `depth` of K at a time."""

    rows: int
    columns: int
    depth: int
    stages: int


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is the better way. fp32 is wanted where it must be exact; the interpreter rounds no bf16."""
    half = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and x.is_cuda)
    most = FEW if weight.nbytes <= LARGE else FEW // 2
    return len(x) <= most and half and takes_triton(x)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By the kernel, which must be there (`takes`)."""
    from whet.model.kernels.gated_triton import launch

    return launch(x, weight, bias, plan(len(x), len(weight) // 2, weight.shape[1], _multiprocessors(x.device)))


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    return F.silu(gate) * up


@functools.cache
def plan(tokens: int, n: int, k: int, multiprocessors: int) -> Tile:
    """Programs for most multiprocessors, and all that they read on its way.

    Weights are the side of a tensor core's product that comes by 64 rows, tokens its few columns; rows are fewer only
    where there would be too few programs, as a sum over K cannot be split: silu needs the whole.

    >>> plan(64, 8960, 1536, 132), plan(2, 8960, 1536, 132)
    (Tile(rows=64, columns=64, depth=64, stages=4), Tile(rows=64, columns=16, depth=64, stages=5))
    >>> plan(64, 1536, 576, 132)
    Tile(rows=16, columns=64, depth=64, stages=6)
    """
    columns, depth, rows = 16 if tokens <= 16 else 32 if tokens <= 32 else 64, 64, 64
    while rows > 16 and n < rows * multiprocessors * 3 // 4:
        rows //= 2
    fit = STAGES // ((2 * rows + columns) * depth * 2)
    return Tile(rows, columns, depth, max(2, min(fit, -(-k // depth) + 1, 6)))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
