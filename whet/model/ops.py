"""Operations over KV pages in plain torch, the exact form of what `whet.fast.kernels` computes faster; and the device:
one copy for many arrays, and a meter of its work.

The EAGLE drafter (`whet.draft.eagle`) and its part of the engine (`whet.rollout.guesser`) call the operations through a
table, `Ops`, into which `whet.build` may put the kernels. The kernels' tests compare against the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Shapes, for B rows, T new tokens, H query heads over K key heads of d numbers, and P pages of `page` tokens:
#     query [T, H, d]                 the rows' queries one after the other; H is a multiple of K
#     keys, values [P, K, page, d]    the cache of one layer; values may be wider or narrower; the last page is spare
#     table int32 [B, width]          the pages of each row in order
#     row, position int32 [T]         token t lies in page table[row, position // page] at position % page;
#                                     row -1 is padding and goes to the spare page
#     length int32 [B]                keys of each row, the new ones included; 0 for padding, whose output is zeros
#     starts int32 [B + 1]            row i's queries are starts[i] .. starts[i + 1]

# Classes of transformers whose layer is x + attention(norm(x)), then x + down(silu(gate) * up) of norm(x).
FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
# numbers, 256 bytes: each uploaded array begins there, since kernels are compiled for such
# addresses
ALIGNED = 64
FOLD = 1024  # spans of work that are kept as events before they are summed up


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
    """Attention of packed, ragged queries over the pages of their rows: [T, H, d]. Reads lengths on the host.

    Query j of a row with q new tokens sees keys < length - q + j + 1, of these the last `window`. `softcap` c makes a
    score c tanh(s / c). `most`, the queries of any row at most, and `splits` only matter to a kernel.
    """
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
        k, v = (
            kv[pages].transpose(0, 1).flatten(1, 2)[:, :total].to(exact) for kv in (keys, values)
        )
        q = query[mine].to(exact).view(new, kv_heads, heads // kv_heads, -1)
        scores = torch.einsum("qhgd,hnd->qhgn", q, k) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = ~visible(total, new, window, query.device)[:, None, None]
        # A query that sees nothing (only padding can) gets zeros: its softmax alone would be 0 / 0.
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
        out[mine] = torch.einsum("qhgn,hnd->qhgd", weights, v).flatten(1, 2).to(out.dtype)
    return out


def visible(total: int, new: int, window: int | None, device: torch.device) -> Tensor:
    """[new, total], true where a query sees a key, for a row of `total` keys of which the last `new` are the queries'.

    >>> visible(4, 2, 2, torch.device("cpu")).int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    key = torch.arange(total, device=device)
    place = torch.arange(total - new, total, device=device)[:, None]
    seen = key <= place
    return seen if window is None else seen & (place - key < window)


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
    """Rotated queries [T, heads, d] of qkv [T, (heads + 2 kv_heads) d]; keys and values are written to their pages.

    cos and sin are [T, r], r at most d: the last d - r numbers of a head are not rotated. `q_norm` and `k_norm` [d],
    both or none: the weights of an RMSNorm over each head before the rotation (Qwen3). Each step rounds to the
    model's type as transformers does, so that rollouts see the numbers that the eager forward of training sees.
    """
    query, key, value = qkv.unflatten(1, (-1, keys.shape[-1])).split([heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        query = rms_norm(query, q_norm, eps)
        key = rms_norm(key, k_norm, eps)
    write_kv(_rotate(key, cos, sin), value, keys, values, table, row, position)
    return _rotate(query, cos, sin)


def write_kv(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    row: Tensor,
    position: Tensor,
) -> None:
    """Writes key [T, K, d] and value [T, K, dv] to the pages of their rows."""
    padding = row < 0
    size = keys.shape[2]
    position = position.masked_fill(padding, 0).long()
    page = (
        table[row.clamp(min=0).long(), position // size].masked_fill(padding, len(keys) - 1).long()
    )
    keys[page, :, position % size] = key
    values[page, :, position % size] = value


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, d] turned in its first r numbers, pairs r / 2 apart: transformers' half-split convention."""
    rotary = cos.shape[-1]
    turned = x[..., :rotary]
    rest = x[..., rotary:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return torch.cat((turned, rest), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor | float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in fp32 whatever x is, as in transformers, then cast, then times the weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Ops(NamedTuple):
    """One implementation of the three operations, with the signatures of the functions above."""

    paged_attention: Callable[..., Tensor]
    rope_write: Callable[..., Tensor]
    write_kv: Callable[..., None]


PLAIN = Ops(paged_attention, rope_write, write_kv)


def to_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Arrays of whole numbers on the device, as int32 and in one copy that the host does not wait for. A copy from
    ordinary memory would wait until the device has done all that was launched before it, and then the device would wait
    for the host. A copy from pinned memory takes its turn behind that work."""
    ends = list(accumulate(-(-array.size // ALIGNED) * ALIGNED for array in arrays))
    packed = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = packed.numpy()
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        numbers[start : start + array.size] = array.ravel()
    # torch keeps the pinned memory until the copy is done
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + a.size].view(a.shape) for start, a in zip(starts, arrays, strict=True)
    ]


class DeviceMeter:
    """How long a GPU worked: seconds between pairs of events on its stream. Off CUDA nothing is measured.

    The rollout engine puts a pair around what it launches together, the loop puts one around the learner's step. The
    rest of a step's wall time is the GPU's idle time (`whet.watch.gpu_metrics`). Gaps inside a span, between kernels
    and between the graphs of a burst, are not seen, so the idle share is a lower bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._folded = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measures what is queued on the current stream inside it, without waiting for that work."""
        if not self.on:
            yield
            return
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._spans.append((begin, end))
        if len(self._spans) >= FOLD:
            self._fold()

    def seconds(self) -> float | None:
        """Seconds of work since the last call, once all of it is done; None where there is no GPU."""
        self._fold()
        total = self._folded
        self._folded = 0.0
        return total if self.on else None

    def _fold(self) -> None:
        if self._spans:
            self._spans[-1][1].synchronize()
        self._folded += sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000
        self._spans.clear()
