"""Attention of packed, ragged queries over KV pages: one call for decoding, verification and prompt chunks.

`paged_attention` is what the rollout calls. It is one operator to torch.compile, and runs the Triton kernels of
`attention_triton` on CUDA (or under Triton's interpreter), `reference` elsewhere. Launches follow from shapes and
from host numbers alone, never from lengths, so a captured graph serves rows of any length. Triton is imported when
a kernel is first launched, not here. Nothing is written to the cache: that is `rope`'s job.

Shapes, for B rows of Hkv heads and T new tokens of Hq heads (Hq a multiple of Hkv, any ratio):
    query [T, Hq, d]             the rows' queries one after the other
    keys, values                 [pages, Hkv, page, d] and [pages, Hkv, page, dv], the new tokens already written
    table int32 [B, width]       the pages of each row in order; entries beyond its length are never read
    length int32 [B]             keys of the row, the new ones included; 0 for padding, whose output is zeros
    starts int32 [B + 1]         row i's queries are starts[i] .. starts[i + 1]; every token belongs to a row
    tree int64 [T] or None       bit m: the query sees the m-th new key of its row (at most 64 new tokens a row)
Query j of a row with q new tokens sees keys < length - q + j + 1, of these the last `window`; with a tree it sees
all keys before the new ones and, of the new ones, those of its bits. A token of a tree lies where its ancestors put
it: the window counts set bits, not slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from whet.fast.kernels.dispatch import DTYPES, has_triton, takes_triton

PROCESSORS = 128
"""Programs that keep the memory bus busy: about one for each multiprocessor of an H100 or H200, which have 132."""
TREE = 64
"""Most new tokens of a row with a tree: the bits of one integer. Rows with more are prompts."""
LARGEST_HEAD = 256
LONG = 16
"""Pages from which on a row is long."""


def paged_attention(
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
    tree: Tensor | None = None,
) -> Tensor:
    """[T, Hq, dv]. `most` bounds the queries of any row; `splits` parts of a row's keys are read at once (0: planned).

    A row with more than `most` queries has those beyond it left undefined. `softcap` c makes a score c tanh(s / c).
    """
    # An operator is for the compiler alone: called directly, it costs the host more than the kernel the GPU.
    call = torch.ops.whet.paged_attention if torch.compiler.is_compiling() else _attend
    out: Tensor = call(
        query, keys, values, table, length, starts, most, scaling, window or 0, softcap or 0.0, splits, tree
    )
    return out


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    length: Tensor,
    starts: Tensor,
    most: int,
    scaling: float,
    window: int,
    softcap: float,
    splits: int,
    tree: Tensor | None,
) -> Tensor:
    """A window or soft-cap of 0 stands for none: an operator's schema has neither."""
    check(query, keys, values, table, length, starts, most, tree)
    chosen = reference
    if takes_triton(query) and kernel_lacks(query.dtype, query.shape[2], values.shape[3]) is None:
        from whet.fast.kernels.attention_triton import launch

        chosen = launch
    return chosen(
        query,
        keys,
        values,
        table,
        length,
        starts,
        most=most,
        scaling=scaling,
        window=window or None,
        softcap=softcap or None,
        splits=splits,
        tree=tree,
    )


_operator = torch.library.custom_op(
    "whet::paged_attention",
    _attend,
    mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, Tensor table, Tensor length, Tensor starts, SymInt most,"
    " float scaling, SymInt window, float softcap, SymInt splits, Tensor? tree) -> Tensor",
)


@_operator.register_fake
def _shape(query: Tensor, keys: Tensor, values: Tensor, *rest: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], values.shape[3])


@cache
def kernel_lacks(dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why the Triton kernels cannot serve this, as one sentence, or None; the reference serves everything."""
    if dtype not in DTYPES:
        return f"the attention kernel has no {str(dtype).removeprefix('torch.')}"
    if max(dim, value_dim) > LARGEST_HEAD:
        return f"the attention kernel takes heads of at most {LARGEST_HEAD} numbers, not {max(dim, value_dim)}"
    return None if has_triton() else "Triton is not installed"


def check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    length: Tensor,
    starts: Tensor,
    most: int,
    tree: Tensor | None,
) -> None:
    """Shapes and types, which the host knows; a kernel would read past the end of a tensor that breaks them."""
    batch = table.shape[0]
    wrong = {
        "a multiple of the kv heads as query heads": query.shape[1] % keys.shape[1] != 0,
        "keys as wide as queries": keys.shape[3] != query.shape[2],
        "keys and values with the same pages": keys.shape[:3] != values.shape[:3],
        "one type for queries, keys and values": not query.dtype == keys.dtype == values.dtype,
        "keys and values whose last dimension is dense": keys.stride(3) != 1 or values.stride(3) != 1,
        "int32 tables, lengths and starts": {table.dtype, length.dtype, starts.dtype} != {torch.int32},
        "a length for each row and one start more": length.shape != (batch,) or starts.shape != (batch + 1,),
        "a tree of one int64 a token": tree is not None
        and (tree.dtype != torch.int64 or tree.shape != query.shape[:1]),
        f"at most {TREE} queries a row with a tree": tree is not None and most > TREE,
    }
    if broken := [rule for rule, is_broken in wrong.items() if is_broken]:
        raise ValueError(f"paged attention needs {'; '.join(broken)}")


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on. All numbers but warps and stages are powers of two of at least 16."""

    rows: int
    """(query, head of its group) pairs that share one read of the keys."""
    keys: int
    """Keys a turn of the loop."""
    warps: int
    stages: int
    """Turns under way at once: of the keys of all but one it holds copies in shared memory."""
    ahead: bool = True
    """Read a turn's page number a turn early. Else that read takes a stage of the pipeline and leaves one for keys."""


def plan_tile(most: int, group: int, dim: int, value_dim: int, itemsize: int) -> Tile:
    """Enough rows for all queries of a row, up to what registers hold, so that short q read each key once.

    Measured on an H200 for bf16 and one query: 64 keys, 3 stages, 2 warps at d 64 and 4 at d 128 (2 lose 14% at 512
    keys); 128 keys lose 40%. Not compared: 8 warps from 16384 on (prompts, d 128). float32 has no tensor cores at full
    precision: small tiles keep it in registers, and its compile time at a few seconds.

    >>> plan_tile(most=1, group=7, dim=64, value_dim=64, itemsize=2)
    Tile(rows=16, keys=64, warps=2, stages=3, ahead=True)
    >>> plan_tile(most=9, group=6, dim=128, value_dim=128, itemsize=2)
    Tile(rows=64, keys=64, warps=4, stages=3, ahead=True)
    """
    wide = padded(max(dim, value_dim))
    if itemsize == 4:
        return Tile(rows=16, keys=32 if wide <= 64 else 16, warps=4 if wide <= 128 else 8, stages=2)
    rows = min(padded(most * group), 128 if wide <= 128 else 64)
    warps = 8 if rows * wide >= 16384 else 4 if wide > 64 or rows > 64 else 2
    return Tile(rows, 64, warps, stages=3 if wide <= 128 else 2)


def plan_splits(batch: int, kv_heads: int, most: int, width: int, *, factor: int | None = None, limit: int = 32) -> int:
    """Parts to read each row's keys in, so that few rows still fill the device; a power of two.

    S = factor * 128 / (B * Hkv), rounded up, at most the pages of a row and `limit`; factor 2 where rows may be long
    and 1 where not, the best on an H200 at 4k and 512 keys for heads of 64 and 128; twice that from q 9 on. Rounding
    goes up since one long row among short ones is common: too many parts cost 20%, too few several times the call. So
    batches that fill the device by rows alone are still cut in two while rows may be long and programs are under
    eight a processor. Prompts (more than 64 queries) have tiles enough and are not split.

    >>> plan_splits(batch=64, kv_heads=3, most=1, width=64)
    2
    >>> plan_splits(batch=1, kv_heads=2, most=5, width=8)
    8
    """
    if most > TREE:
        return 1
    long = width >= LONG
    factor = factor or (2 if long else 1) * (2 if most > 8 else 1)
    programs = max(batch * kv_heads, 1)
    wanted = -(-factor * PROCESSORS // programs)
    if long and programs < 8 * PROCESSORS:
        wanted = max(wanted, 2)
    pages = 1 << max(width, 1).bit_length() - 1
    return min(1 << (wanted - 1).bit_length(), pages, limit)


def padded(size: int) -> int:
    """The next power of two from 16 on: sizes the tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


def reference(
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
    tree: Tensor | None = None,
) -> Tensor:
    """The same in plain torch, row by row: the oracle, and the path without Triton. Reads lengths on the host."""
    tokens, heads, _ = query.shape
    kv_heads, page = keys.shape[1:3]
    exact = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(tokens, heads, values.shape[3])
    edges = starts.tolist()
    for row, total in enumerate(length.tolist()):
        mine = slice(edges[row], edges[row + 1])
        new = mine.stop - mine.start
        if not new or not total:
            continue
        pages = table[row, : -(-total // page)].long()
        k, v = (kv[pages].transpose(0, 1).flatten(1, 2)[:, :total].to(exact) for kv in (keys, values))
        q = query[mine].to(exact).view(new, kv_heads, heads // kv_heads, -1)
        scores = torch.einsum("qhgd,hnd->qhgn", q, k) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = ~visible(total, new, window, None if tree is None else tree[mine], query.device)[:, None, None]
        # A query that sees nothing (only padding can) gets zeros: its softmax alone would be 0 / 0.
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
        out[mine] = torch.einsum("qhgn,hnd->qhgd", weights, v).flatten(1, 2).to(out.dtype)
    return out


def visible(total: int, new: int, window: int | None, tree: Tensor | None, device: torch.device) -> Tensor:
    """[new, total], true where a query sees a key, for a row of `total` keys of which the last `new` are the queries'.

    >>> visible(4, 2, 2, None, torch.device("cpu")).int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    key, base = torch.arange(total, device=device), total - new
    if tree is None:
        place = base + torch.arange(new, device=device)[:, None]
        seen, away = key <= place, place - key
    else:
        bits = tree[:, None] >> torch.arange(new, device=device) & 1
        later = bits.flip(1).cumsum(1).flip(1) - bits  # set bits above each: how far an ancestor lies behind
        old = base - key[:base] + bits.sum(1, keepdim=True) - 1
        seen = torch.cat([torch.ones_like(old, dtype=torch.bool), bits.bool()], 1)
        away = torch.cat([old, later], 1)
    return seen if window is None else seen & (away < window)
