"""Operators of a decoder layer: rotation with the KV write, and the gated product of few tokens.

The fused stack and the EAGLE drafter call `rope_write`, models that rotate by themselves call `write_kv`;
`whet.model.ops` says what both compute, gives the shapes and has the plain forms. A captured graph serves any
positions. The pages, which must be dense, are chosen by the caller: the table is given.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.fast.kernels import require, takes_triton
from whet.model import ops

WRITING = "writing to KV pages"


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    row: Tensor,
    position: Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotated queries [T, heads, d]; keys and values are written in place."""
    dim = keys.shape[-1]
    rotary = cos.shape[-1]
    _check_pages(keys, values, table, row, position, kv_heads, len(qkv))
    typed = [part for part in (cos, sin, keys, values, q_norm, k_norm) if part is not None]
    uneven = (
        cos.shape != (len(qkv), rotary) or sin.shape != cos.shape or rotary % 2 != 0 or rotary > dim
    )
    rules = {
        "a projection of (heads + 2 kv_heads) d": qkv.shape[1:] != ((heads + 2 * kv_heads) * dim,),
        "an even number of cosines and sines per token, at most d": uneven,
        "values as wide as keys": values.shape != keys.shape,
        "one type for projection, cosines, sines, norms and pages": any(
            part.dtype != qkv.dtype for part in typed
        ),
        "both head norms or none": (q_norm is None) != (k_norm is None),
        "dense rows": not qkv.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1,
    }
    require(WRITING, rules)
    given: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "eps": eps,
    }
    if takes_triton(qkv):
        from whet.fast.kernels.layer_triton import launch_rope_write

        return launch_rope_write(qkv, cos, sin, keys, values, table, row, position, **given)
    return ops.rope_write(qkv, cos, sin, keys, values, table, row, position, **given)


def write_kv(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    row: Tensor,
    position: Tensor,
) -> None:
    """Key [T, kv_heads, d] and value [T, kv_heads, dv], of any strides, into their pages; d and dv may differ."""
    _check_pages(keys, values, table, row, position, key.shape[1], len(key))
    rules = {
        "keys and values of every token": key.shape[:2] != value.shape[:2],
        "heads as wide as the pages'": key.shape[2] != keys.shape[3]
        or value.shape[2] != values.shape[3],
        "one type for tokens and pages": key.dtype != keys.dtype or value.dtype != values.dtype,
    }
    require(WRITING, rules)
    if takes_triton(key) and takes_triton(value):
        from whet.fast.kernels.layer_triton import launch_write_kv

        launch_write_kv(key, value, keys, values, table, row, position)
    else:
        ops.write_kv(key, value, keys, values, table, row, position)


def _check_pages(
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    row: Tensor,
    position: Tensor,
    kv_heads: int,
    tokens: int,
) -> None:
    """Checks shapes and types, all known to the host: a kernel would write past the end of what breaks them."""
    rules = {
        "pages of the tokens' heads": keys.shape[1] != kv_heads
        or keys.shape[:3] != values.shape[:3],
        "dense pages": not (keys.is_contiguous() and values.is_contiguous()),
        "int32 tables, rows and positions": {table.dtype, row.dtype, position.dtype}
        != {torch.int32},
        "a row and a position for every token": row.shape != (tokens,)
        or position.shape != (tokens,),
        "dense tables, rows and positions": not table.stride(-1)
        == row.stride(-1)
        == position.stride(-1)
        == 1,
    }
    require(WRITING, rules)


# ---- gated product: silu(x G^T) * (x U^T) of few tokens in one kernel, the widest product of a layer
#
# With few tokens a product costs what reading its weights costs, and a library's kernel, made for more tokens, reaches
# half of the memory's speed. On an H200 with 8 to 64 tokens this one takes 8% to 17% less for a 1.5B model and 17% to
# 31% less for 135M, the launch of silu that it spares included (`benchmarks/gated_kernel.py`); with two tokens they are
# even, and a 7B model gains 1% to 4%. The other products of a layer are too small to matter, or no faster this way.
#
# x [T, K]; weight [2N, K], the rows of gate first, then those of up; bias [2N] or none; out [T, N]. Sums are in fp32,
# in an order that follows from shapes alone; gate and up are rounded as separate products would be, then once more.

# tokens up to which the kernel beats a library's product; half as many where the weight is LARGE
FEW = 64
LARGE = 100_000_000  # bytes: a 1.5B model's weight has 55 million, a 7B model's 272
# bytes that a program has on their way, so that two programs fit on a multiprocessor
STAGES = 100_000


class GatedTile(NamedTuple):
    """A program takes `rows` of gate and as many of up, all tokens (`columns`), and `depth` of K at a time."""

    rows: int
    columns: int
    depth: int
    stages: int


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is the better way. fp32 is for exact results, and the interpreter rounds no bf16."""
    half = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and x.is_cuda)
    most = FEW if weight.nbytes <= LARGE else FEW // 2
    return len(x) <= most and half and takes_triton(x)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product by the kernel; `takes` must be true."""
    from whet.fast.kernels.layer_triton import launch

    return launch(
        x, weight, bias, plan(len(x), len(weight) // 2, weight.shape[1], _multiprocessors(x.device))
    )


def gated_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    return F.silu(gate) * up


@functools.cache
def plan(tokens: int, n: int, k: int, multiprocessors: int) -> GatedTile:
    """The tile with which there are programs for most multiprocessors, each with its reads under way.

    Weights are the side of a tensor core's product that comes by 64 rows, tokens its few columns. There are fewer rows
    only where there would be too few programs: a sum over K cannot be split, since silu needs the whole.

    >>> plan(64, 8960, 1536, 132), plan(2, 8960, 1536, 132)
    (GatedTile(rows=64, columns=64, depth=64, stages=4), GatedTile(rows=64, columns=16, depth=64, stages=5))
    >>> plan(64, 1536, 576, 132)
    GatedTile(rows=16, columns=64, depth=64, stages=6)
    """
    columns = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    depth = 64
    rows = 64
    while rows > 16 and n < rows * multiprocessors * 3 // 4:
        rows //= 2
    fit = STAGES // ((2 * rows + columns) * depth * 2)
    return GatedTile(rows, columns, depth, max(2, min(fit, -(-k // depth) + 1, 6)))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )
