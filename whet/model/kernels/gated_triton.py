"""The Triton kernel of `gated`. Imported when first launched, since not every machine has Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.kernels.gated import Tile

WARPS = 4


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    n, k = len(weight) // 2, weight.shape[1]
    out = x.new_empty(len(x), n)
    if not len(x):
        return out
    x, weight = x.contiguous(), weight.contiguous()
    gated_kernel[triton.cdiv(n, tile.rows), triton.cdiv(len(x), tile.columns)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        len(x),
        N=n,
        K=k,
        BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
        WIDEN=x.dtype == torch.bfloat16 and not x.is_cuda,
        num_warps=WARPS,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def gated_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Rows n of gate and of up, N below them. N and K are constants: loops of known length need no masks where K is
    whole. Rows and columns too many repeat the last, unused."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, DEPTH)
    rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + lane[None, :]
    columns = x + tl.minimum(m, tokens - 1).to(tl.int64)[None, :] * K + lane[:, None]
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, K, DEPTH):
        part = load(columns + k, (k + lane < K)[:, None], K % DEPTH == 0, WIDEN, "")
        inside = (k + lane < K)[None, :]
        gate = tl.dot(load(rows + k, inside, K % DEPTH == 0, WIDEN, "evict_first"), part, gate)
        up = tl.dot(load(rows + N * K + k, inside, K % DEPTH == 0, WIDEN, "evict_first"), part, up)
    if BIAS:
        gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    live = (n < N)[:, None] & (m < tokens)[None, :]
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], y.to(out.dtype.element_ty), mask=live)


@triton.jit
def load(place, inside, WHOLE: tl.constexpr, WIDEN: tl.constexpr, EVICT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights are read once: the cache is for what is read again."""
    if WHOLE:
        values = tl.load(place, eviction_policy=EVICT)
    else:
        values = tl.load(place, mask=inside, other=0.0, eviction_policy=EVICT)
    return values.to(tl.float32) if WIDEN else values
