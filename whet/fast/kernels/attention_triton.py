"""Ragged paged attention as two Triton kernels; called by `whet.fast.kernels.attention`, which says what it computes.

One program takes a tile of rows, each a (query, head) pair of one kv head, so that any ratio of heads fills the
tile and the keys are read once for all of them. With few rows a program takes only a part of the keys and leaves its
share and its weight; `merge_kernel` adds the shares up. Lengths are read on the device: a program without work ends.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.fast.kernels.attention import Tile, padded, plan_splits, plan_tile

LOG2E = math.log2(math.e)


@triton.jit
def extent(  # type: ignore[no-untyped-def]
    total,
    count,
    tile,
    split,
    splits,
    window,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """First turn and end of a split: an equal share of the turns, N keys each, that any row of the tile sees."""
    base = total - count
    begin = base + tile * M // GROUP - window + 1
    end = tl.minimum(total, base + (tile * M + M - 1) // GROUP + 1)
    begin = tl.maximum(begin, 0) // N if WINDOW else 0
    turns = tl.maximum((end + N - 1) // N - begin, 0)
    share = (turns + splits - 1) // splits
    return begin + split * share, begin + tl.minimum((split + 1) * share, turns)


@triton.jit
def load_keys(  # type: ignore[no-untyped-def]
    pool,
    page,
    within,
    real,
    page_stride,
    token_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """[N, BLOCK] of one head's pool, from one page (ONE) or from a page per key.

    Keys that are not real are masked here, not merely hidden later: memory that was never written may hold NaN, and
    0 * NaN is NaN.
    """
    dims = tl.arange(0, BLOCK)
    start = page * page_stride if ONE else (page * page_stride)[:, None]
    mask = real[:, None] if SIZE == BLOCK else real[:, None] & (dims < SIZE)[None, :]
    kv = tl.load(
        pool + start + within[:, None] * token_stride + dims[None, :], mask=mask, other=0.0
    )
    return kv.to(tl.float32) if WIDEN else kv


@triton.jit(do_not_specialize=["splits", "tiles", "window"])
def attend_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    length,
    starts,
    out,
    weight,
    scale,
    cap,
    window,
    tiles,
    splits,
    query_token,
    query_head,
    keys_page,
    keys_head,
    keys_token,
    values_page,
    values_head,
    values_token,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    # The last queries see most keys: they go first, so that no long program is left at the end.
    tile = tiles - 1 - program % tiles
    head = program // tiles % HEADS
    split = program // (tiles * HEADS) % splits
    line = program // (tiles * HEADS * splits)
    first = tl.load(starts + line)
    count = tl.load(starts + line + 1) - first
    if tile * M >= count * GROUP:
        return
    total = tl.load(length + line)
    row = tile * M + tl.arange(0, M)
    place = row // GROUP
    alive = place < count
    token = (first + place).to(tl.int64)
    member = head * GROUP + row % GROUP
    spot = (token * (HEADS * GROUP) + member) * splits + split
    begin, end = extent(total, count, tile, split, splits, window, GROUP, M, N, WINDOW)
    if SPLIT and begin >= end:
        tl.store(weight + spot, float("-inf"), mask=alive)
        return

    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    at = query + token[:, None] * query_token + member[:, None] * query_head + dims[None, :]
    q = tl.load(at, mask=alive[:, None] & (dims < D)[None, :], other=0.0)
    q = q.to(tl.float32) if WIDEN else q
    ONE: tl.constexpr = PAGE % N == 0
    pages = table + line.to(tl.int64) * table_row
    next_page = tl.load(pages + begin * N // PAGE, mask=begin < end, other=0)
    highest = tl.full([M], float("-inf"), tl.float32)
    mass = tl.full([M], 0.0, tl.float32)
    acc = tl.full([M, BLOCK_DV], 0.0, tl.float32)
    for turn in range(begin, end):
        key = turn * N + tl.arange(0, N)
        real = key < total
        if not ONE:
            page = tl.load(pages + key // PAGE, mask=real, other=0)
        elif AHEAD:
            page = next_page
            next_page = tl.load(pages + (turn + 1) * N // PAGE, mask=turn + 1 < end, other=0)
        else:
            page = tl.load(pages + turn * N // PAGE)
        page = page.to(tl.int64)  # a cache may hold more than 2^31 numbers
        within = turn * N % PAGE + tl.arange(0, N) if ONE else key % PAGE
        k = load_keys(
            keys + head * keys_head,
            page,
            within,
            real,
            keys_page,
            keys_token,
            D,
            BLOCK_D,
            ONE,
            WIDEN,
        )
        v = load_keys(
            values + head * values_head,
            page,
            within,
            real,
            values_page,
            values_token,
            DV,
            BLOCK_DV,
            ONE,
            WIDEN,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # scale is scaling / c here and cap c * log2(e); tanh(x) = 1 - 2 / (1 + e^2x) holds at
        # infinity too
        if CAP:
            scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores)))
        latest = total - count + place[:, None]  # the last key that each row of the tile sees
        seen = (key[None, :] <= latest) & real[None, :]
        if WINDOW:
            seen = seen & (key[None, :] > latest - window)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        # nothing seen so far: -inf - -inf is no number
        anchor = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(highest - anchor)
        mass = mass * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        highest = top

    some = mass > 0.0
    mass = tl.where(some, mass, 1.0)
    if SPLIT:
        tl.store(weight + spot, tl.where(some, highest + tl.log2(mass), float("-inf")), mask=alive)
    acc = acc / mass[:, None]  # zeros for a row that saw nothing
    at = out + spot[:, None] * DV + value_dims[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=alive[:, None] & (value_dims < DV)[None, :])


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    shares,
    weight,
    out,
    S: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One (token, head): sum_s 2^w_s o_s / sum_s 2^w_s over the parts, whose w_s is the log2 of their softmax sum."""
    pair = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    w = tl.load(weight + pair * S + parts, mask=parts < S, other=float("-inf"))
    top = tl.max(w, 0)
    w = tl.exp2(w - tl.where(top == float("-inf"), 0.0, top))
    # A part without keys left its share unwritten.
    at = shares + (pair * S + parts[:, None]) * DV + dims[None, :]
    o = tl.load(at, mask=(w > 0.0)[:, None] & (dims < DV)[None, :], other=0.0)
    total = tl.sum(w, 0)
    o = tl.sum(o * w[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + pair * DV + dims, o.to(out.dtype.element_ty), mask=dims < DV)


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    length: Tensor,
    starts: Tensor,
    *,
    most: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 0,
    tile: Tile | None = None,
) -> Tensor:
    """`paged_attention` by the kernels, on tensors it has checked; `tile` replaces the planned one, for sweeps."""
    if query.stride(2) != 1:
        query = query.contiguous()
    (tokens, heads, dim), (batch, width) = query.shape, table.shape
    kv_heads, page, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    group = heads // kv_heads
    tile = tile or plan_tile(most, group, dim, value_dim, query.element_size())
    splits = splits or plan_splits(batch, kv_heads, most, width)
    out = query.new_empty(tokens, heads, value_dim)
    if not tokens or not batch or not most:
        return out
    shares = weight = out
    if splits > 1:
        shares = query.new_empty(tokens, heads, splits, value_dim, dtype=torch.float32)
        weight = query.new_empty(tokens, heads, splits, dtype=torch.float32)
    tiles = triton.cdiv(most * group, tile.rows)
    attend_kernel[(tiles * kv_heads * splits * batch,)](
        query,
        keys,
        values,
        table,
        length.contiguous(),
        starts.contiguous(),
        shares,
        weight,
        scaling / softcap if softcap else scaling * LOG2E,
        (softcap or 0.0) * LOG2E,
        window or 0,
        tiles,
        splits,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        table.stride(0),
        HEADS=kv_heads,
        GROUP=group,
        D=dim,
        DV=value_dim,
        PAGE=page,
        M=tile.rows,
        N=tile.keys,
        BLOCK_D=padded(dim),
        BLOCK_DV=padded(value_dim),
        WINDOW=window is not None,
        CAP=softcap is not None,
        SPLIT=splits > 1,
        AHEAD=tile.ahead,
        # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
        WIDEN=query.dtype == torch.bfloat16 and not query.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        parts, wide = triton.next_power_of_2(splits), padded(value_dim)
        merge_kernel[(tokens * heads,)](
            shares,
            weight,
            out,
            splits,
            value_dim,
            parts,
            wide,
            num_warps=1 if parts * wide <= 2048 else 4,
        )
    return out
