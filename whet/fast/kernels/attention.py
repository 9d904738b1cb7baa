"""Attention of packed, ragged queries over KV pages: one call for decoding, verification and prompt chunks.

The network (`whet.fast.fused`) and the EAGLE drafter call `paged_attention`; `whet.model.ops` says what it computes,
gives the shapes and has the plain form, which is the path without Triton. Launches follow from shapes and from numbers
on the host alone, never from lengths, so a captured graph serves rows of any length. Nothing is written to the cache:
`kernels.layer` does that. Here B rows have Hkv key heads, and T new tokens Hq query heads, a multiple of Hkv.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from whet.fast.kernels import DTYPES, has_triton, require, takes_triton
from whet.model import ops

# programs that keep the memory bus busy: about one per multiprocessor of an H100 or H200 (132)
PROCESSORS = 128
SHORT = 64  # new tokens per row up to which a row's keys are split; rows with more are prompts
LARGEST_HEAD = 256
LONG = 16  # pages from which on a row is long


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
) -> Tensor:
    """[T, Hq, dv]. `most` bounds the queries of any row; `splits` parts of a row's keys are read at once (0: planned).

    The output of queries beyond the first `most` of a row is undefined. Shapes and types, all known to the host, are
    checked: a kernel would read past the end of a tensor that breaks them.
    """
    batch = table.shape[0]
    rules = {
        "a multiple of the kv heads as query heads": query.shape[1] % keys.shape[1] != 0,
        "keys as wide as queries": keys.shape[3] != query.shape[2],
        "keys and values with the same pages": keys.shape[:3] != values.shape[:3],
        "one type for queries, keys and values": not query.dtype == keys.dtype == values.dtype,
        "keys and values whose last dimension is dense": keys.stride(3) != 1
        or values.stride(3) != 1,
        "int32 tables, lengths and starts": {table.dtype, length.dtype, starts.dtype}
        != {torch.int32},
        "a length for each row and one start more": length.shape != (batch,)
        or starts.shape != (batch + 1,),
    }
    require("paged attention", rules)
    given: dict[str, Any] = {
        "most": most,
        "scaling": scaling,
        "window": window or None,
        "softcap": softcap or None,
    }
    if takes_triton(query) and kernel_lacks(query.dtype, query.shape[2], values.shape[3]) is None:
        from whet.fast.kernels.attention_triton import launch

        return launch(query, keys, values, table, length, starts, **given, splits=splits)
    return ops.paged_attention(query, keys, values, table, length, starts, **given)


@cache
def kernel_lacks(dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why the Triton kernels cannot serve this, as one clause, or None; the plain form serves everything."""
    if dtype not in DTYPES:
        return f"the attention kernel has no {str(dtype).removeprefix('torch.')}"
    if max(dim, value_dim) > LARGEST_HEAD:
        return f"the attention kernel takes heads of at most {LARGEST_HEAD} numbers, not {max(dim, value_dim)}"
    return None if has_triton() else "Triton is not installed"


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on. All numbers but warps and stages are powers of two of at least 16."""

    rows: int  # (query, head of its group) pairs that share one read of the keys
    keys: int  # keys per turn of the loop
    warps: int
    stages: int  # turns under way at once: shared memory holds copies of the keys of all but one
    # read the page number of a turn one turn early; else that read takes a stage of the pipeline
    ahead: bool = True


def plan_tile(most: int, group: int, dim: int, value_dim: int, itemsize: int) -> Tile:
    """Enough rows for all queries of a row, up to what registers hold, so that few queries read each key once.

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


def plan_splits(batch: int, kv_heads: int, most: int, width: int) -> int:
    """Parts in which each row's keys are read, so that few rows still fill the device; a power of two, at most 32.

    S = factor * 128 / (B * Hkv), rounded up, at most the pages of a row; factor 2 where rows may be long and 1 where
    not, the best on an H200 at 4k and 512 keys for heads of 64 and 128; twice that from q 9 on. Rounding goes up since
    one long row among short ones is common: too many parts cost 20%, too few several times the call. So batches that
    fill the device by rows alone are still cut in two while rows may be long and there are fewer than eight programs
    per processor. Prompts (more than 64 queries) have tiles enough and are not split.

    >>> plan_splits(batch=64, kv_heads=3, most=1, width=64)
    2
    >>> plan_splits(batch=1, kv_heads=2, most=5, width=8)
    8
    """
    if most > SHORT:
        return 1
    long = width >= LONG
    factor = (2 if long else 1) * (2 if most > 8 else 1)
    programs = max(batch * kv_heads, 1)
    wanted = -(-factor * PROCESSORS // programs)
    if long and programs < 8 * PROCESSORS:
        wanted = max(wanted, 2)
    pages = 1 << max(width, 1).bit_length() - 1
    return min(1 << (wanted - 1).bit_length(), pages, 32)


def padded(size: int) -> int:
    """The next power of two from 16 on: sizes the tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())
