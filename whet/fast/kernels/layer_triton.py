"""The Triton kernels of `kernels.layer`: rotation and KV write, and the gated product of few tokens.

`kernels.layer` imports this file at the first launch, since not every machine has Triton, and says what each kernel
computes. Launches follow from shapes alone. Places in the cache are 64-bit: a layer's pages may hold more than 2^31
numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.fast.kernels.layer import GatedTile

# ---- rotation and KV write: a program takes one head of a few tokens, rotates it and writes it to its place


def launch_rope_write(
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
    tokens, dim, rotary = len(qkv), keys.shape[3], cos.shape[1]
    query = qkv.new_empty(tokens, heads, dim)
    if tokens == 0:
        return query
    lines = heads + 2 * kv_heads
    block, warps = plan_tokens(tokens * lines)
    _rope_write[lines, triton.cdiv(tokens, block)](
        qkv,
        cos,
        sin,
        query,
        keys,
        values,
        table,
        row,
        position,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        tokens,
        len(keys) - 1,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        table.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE=keys.shape[2],
        DIM=dim,
        HALF=rotary // 2,
        LANES=triton.next_power_of_2(rotary // 2),
        REST=triton.next_power_of_2(dim - rotary) if dim > rotary else 0,
        NORM=q_norm is not None,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,  # a fused multiply-add would round once where eager torch rounds twice
    )
    return query


def launch_write_kv(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    row: Tensor,
    position: Tensor,
) -> None:
    tokens, heads = key.shape[:2]
    if tokens == 0:
        return
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    block, warps = plan_tokens(tokens * heads)
    _write_kv[heads, triton.cdiv(tokens, block)](
        key,
        value,
        keys,
        values,
        table,
        row,
        position,
        tokens,
        len(keys) - 1,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        table.stride(0),
        KV_HEADS=heads,
        PAGE=keys.shape[2],
        DIM=keys.shape[3],
        VALUE_DIM=values.shape[3],
        LANES=triton.next_power_of_2(keys.shape[3]),
        VALUE_LANES=triton.next_power_of_2(values.shape[3]),
        BLOCK=block,
        num_warps=warps,
    )


def plan_tokens(heads: int) -> tuple[int, int]:
    """Tokens and warps of a program, by how many heads of tokens there are: spread few, batch many. Untuned."""
    if heads <= 4096:
        return 1, 1
    return (4, 2) if heads <= 32768 else (16, 4)


@triton.jit(do_not_specialize=["tokens", "last_page"])
def _rope_write(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    query,
    keys,
    values,
    table,
    row,
    position,
    q_norm,
    k_norm,
    tokens,
    last_page,
    qkv_stride,
    cos_stride,
    sin_stride,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A head is three tiles: both halves of its rotated part, and the rest. Line = query, key or value head."""
    line = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    wide = token.to(tl.int64)
    lane = tl.arange(0, LANES)
    here = live[:, None] & (lane < HALF)[None, :]
    source = qkv + wide[:, None] * qkv_stride + line * DIM
    first = tl.load(source + lane[None, :], mask=here, other=0.0)
    second = tl.load(source + HALF + lane[None, :], mask=here, other=0.0)
    if REST > 0:
        spare = 2 * HALF + tl.arange(0, REST)
        there = live[:, None] & (spare < DIM)[None, :]
        rest = tl.load(source + spare[None, :], mask=there, other=0.0)
    if line < HEADS + KV_HEADS:
        if NORM:
            square = tl.sum(_wide(first) * _wide(first), 1) + tl.sum(
                _wide(second) * _wide(second), 1
            )
            if REST > 0:
                square += tl.sum(_wide(rest) * _wide(rest), 1)
            shrink = tl.rsqrt(square / DIM + eps)[:, None]
            weight = q_norm
            if line >= HEADS:
                weight = k_norm
            first = _scaled(first, shrink, tl.load(weight + lane, mask=lane < HALF, other=0.0))
            second = _scaled(
                second, shrink, tl.load(weight + HALF + lane, mask=lane < HALF, other=0.0)
            )
            if REST > 0:
                rest = _scaled(rest, shrink, tl.load(weight + spare, mask=spare < DIM, other=0.0))
        cosines = cos + wide[:, None] * cos_stride + lane[None, :]
        sines = sin + wide[:, None] * sin_stride + lane[None, :]
        left = _sum(
            _product(first, tl.load(cosines, mask=here, other=0.0)),
            _product(-_wide(second), tl.load(sines, mask=here, other=0.0)),
        )
        right = _sum(
            _product(second, tl.load(cosines + HALF, mask=here, other=0.0)),
            _product(first, tl.load(sines + HALF, mask=here, other=0.0)),
        )
        first, second = left, right
    target, place = query, wide * HEADS + line
    if line >= HEADS:
        head = (line - HEADS) % KV_HEADS
        target, place = (
            keys,
            _place(
                table, row, position, token, live, last_page, head, table_stride, KV_HEADS, PAGE
            ),
        )
        if line >= HEADS + KV_HEADS:
            target = values
    vector = target + place[:, None] * DIM
    tl.store(vector + lane[None, :], first, mask=here)
    tl.store(vector + HALF + lane[None, :], second, mask=here)
    if REST > 0:
        tl.store(vector + spare[None, :], rest, mask=there)


@triton.jit(do_not_specialize=["tokens", "last_page"])
def _write_kv(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    table,
    row,
    position,
    tokens,
    last_page,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    wide = token.to(tl.int64)[:, None]
    place = _place(
        table, row, position, token, live, last_page, head, table_stride, KV_HEADS, PAGE
    )[:, None]
    lane = tl.arange(0, LANES)[None, :]
    here = live[:, None] & (lane < DIM)
    k = tl.load(key + wide * key_stride + head.to(tl.int64) * key_head_stride + lane, mask=here)
    tl.store(keys + place * DIM + lane, k, mask=here)
    lane = tl.arange(0, VALUE_LANES)[None, :]
    here = live[:, None] & (lane < VALUE_DIM)
    v = tl.load(
        value + wide * value_stride + head.to(tl.int64) * value_head_stride + lane, mask=here
    )
    tl.store(values + place * VALUE_DIM + lane, v, mask=here)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    table,
    row,
    position,
    token,
    live,
    last_page,
    head,
    table_stride,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Where each token's head lies in the pages seen as a list of vectors."""
    own = tl.load(row + token, mask=live, other=-1)
    at = tl.load(position + token, mask=live, other=0)
    at = tl.where(own < 0, 0, at)
    page = tl.load(table + own.to(tl.int64) * table_stride + at // PAGE, mask=own >= 0, other=0)
    page = tl.where(own < 0, last_page, page)
    return (page.to(tl.int64) * KV_HEADS + head) * PAGE + at % PAGE


@triton.jit
def _wide(x):  # type: ignore[no-untyped-def]
    return x.to(tl.float32)


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    """The product, rounded to y's type, as torch does between two operations."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(y.dtype)


@triton.jit
def _sum(x, y):  # type: ignore[no-untyped-def]
    return (x.to(tl.float32) + y.to(tl.float32)).to(y.dtype)


@triton.jit
def _scaled(x, shrink, weight):  # type: ignore[no-untyped-def]
    """The last two steps of RMSNorm, each rounded."""
    return _product((x.to(tl.float32) * shrink).to(x.dtype), weight[None, :])


# ---- gated product


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, tile: GatedTile) -> Tensor:
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
        num_warps=4,
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
    """Rows n of gate and of up, the latter N rows further down. N and K are constants: loops of known length need no
    masks where K is a multiple of DEPTH. Rows and columns beyond the end repeat the last and are not stored."""
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
    """Weights are read once, so they are the first to leave the cache."""
    if WHOLE:
        values = tl.load(place, eviction_policy=EVICT)
    else:
        values = tl.load(place, mask=inside, other=0.0, eviction_policy=EVICT)
    return values.to(tl.float32) if WIDEN else values
