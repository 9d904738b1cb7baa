"""Attention over packs: many sequences in one row of tokens, each by itself, some with a prompt in common.

`packing.packed_attention` plugs it into a Hugging Face model; `packing.make_packs` says where sequences lie. On a GPU
in half precision it is torch's variable-length flash attention; elsewhere (CPU, fp32, fp64, soft-capped scores)
sequences of similar length are padded together for SDPA and gathered back, which is also the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from whet.errors import WhetError
from whet.model.copied import copied

NAME = "whet_packed"
APART = "whet_packed_apart"
"""The same attention, kept out of a compiled layer's graph."""
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_REFUSED = ("s_aux", "position_bias")
"""Attention sinks, score biases: what a model adds to its attention that is not done here."""
_FULLNESS = 0.75
"""Sequences shorter than this share of the longest one of their bucket start a new bucket: padding against calls."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of sequences padded to one length."""

    sequences: int
    longest: int
    rows: Tensor
    """[tokens]: where each token of the run lies in the padded [sequences * longest]."""


class Padding:
    """How sequences are padded together, worked out when first asked for, which the flash kernel never does. No
    dataclass: the compiler would hold a layer to the fields of one, and these change from pack to pack."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """`lengths`: of whole sequences, prompts included."""
        self.lengths = lengths
        self._device = device

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        found = []
        for run in _runs(self.lengths):
            rows = ranges(np.array(run)) + np.repeat(np.arange(len(run)) * run[0], run)
            found.append(Bucket(len(run), run[0], torch.as_tensor(rows).to(self._device)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Keys:
    """What each sequence of a pack attends to, where some share a prompt: it, and their own tokens."""

    rows: Tensor
    """[K]: which token of the pack each key is, sequence after sequence."""
    starts: Tensor
    """int32 [sequences + 1]."""
    own: Tensor
    """[T]: where each token of the pack stands among the keys; one of a shared prompt, in the first that has it."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where the sequences of a pack lie, in the forms that attention needs."""

    starts: Tensor
    """int32 [sequences + 1]: of the tokens that are fed; of those that share a prompt the first alone has it."""
    longest: int
    """Tokens of a sequence, its prompt included."""
    flash: bool
    """The device has the flash kernel. Asked here, since a compiled layer cannot ask."""
    padding: Padding
    keys: Keys | None = None
    """None: the tokens themselves."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Boundaries,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, d] in, [1, T, heads, d] out. Causal within each sequence."""
    unknown = [name for name in _REFUSED if rest.get(name) is not None]
    if unknown or attention_mask is not None or dropout:
        what = unknown[0] if unknown else "a mask of its own" if attention_mask is not None else "dropout"
        raise WhetError(f"{type(module).__name__} attends with {what}, which packed training does not support.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kernel = _varlen if packed.flash and can_varlen(q, v, softcap) else _reference
    return kernel(q, k, v, packed, scaling, sliding_window, softcap)[None], None


AttentionInterface.register(NAME, attention)
AttentionInterface.register(APART, torch.compiler.disable(attention))


def ranges(lengths: np.ndarray) -> np.ndarray:
    """0 .. n - 1 for each n, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def can_varlen(q: Tensor, v: Tensor, softcap: float | None) -> bool:
    d = q.shape[-1]
    fits = d == v.shape[-1] and d <= 256 and d % 8 == 0
    return fits and softcap is None and q.dtype in (torch.bfloat16, torch.float16)


def has_flash(device: torch.device | str) -> bool:
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packed: Boundaries, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """A window of w keys counts the token itself, so w - 1 to the left of it."""
    reach = -1 if window is None else window - 1
    keys = packed.keys
    if keys is not None:  # those before a sequence's first token that is fed are its prompt: aligned at their ends
        k, v = copied(k, keys.rows), copied(v, keys.rows)
    sizes = (packed.starts, packed.starts if keys is None else keys.starts, packed.longest, packed.longest)
    out = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(reach, 0), **_GQA)
    assert isinstance(out, Tensor)
    return out


@torch.compiler.disable
def _reference(
    q: Tensor, k: Tensor, v: Tensor, packed: Boundaries, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    keys = packed.keys
    if keys is not None:
        q, k, v = (copied(x, keys.rows) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    tokens = [bucket.rows.numel() for bucket in packed.padding.buckets]
    parts = zip(packed.padding.buckets, q.split(tokens), k.split(tokens), v.split(tokens), strict=True)
    out = [_in_bucket(*part, scale, window, softcap) for part in parts]
    whole = out[0] if len(out) == 1 else torch.cat(out)
    return whole if keys is None else whole.index_select(0, keys.own)


def _in_bucket(
    bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Padding lies to the right, where a causal query never looks; its own rows are not gathered back."""
    q, k, v = (_pad(x, bucket) for x in (q, k, v))
    if softcap is not None:
        out = _soft_capped(q, k, v, scale, window, softcap)
    elif window is not None and window < bucket.longest:
        mask = _mask(bucket.longest, window, q.device)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.rows)


def _pad(x: Tensor, bucket: Bucket) -> Tensor:
    """[tokens, heads, d] -> [sequences, heads, longest, d]."""
    rows = x.new_zeros(bucket.sequences * bucket.longest, *x.shape[1:]).index_copy(0, bucket.rows, x)
    return rows.unflatten(0, (bucket.sequences, bucket.longest)).transpose(1, 2)


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, cap: float) -> Tensor:
    """Gemma 2: scores become c tanh(scores / c) before the softmax, for which SDPA has no argument."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = _mask(q.shape[-2], window, q.device)
    scores = (torch.tanh(scores / cap) * cap).masked_fill(~mask, float("-inf"))
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=wide).to(v.dtype) @ v


def _mask(length: int, window: int | None, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    return (back >= 0) & (back < (length if window is None else window))


def _runs(lengths: Sequence[int]) -> list[list[int]]:
    """Of neighbours in a pack, the first of each the longest: lengths fall from left to right, unless they share."""
    runs: list[list[int]] = []
    for n in lengths:
        if not runs or not _FULLNESS * runs[-1][0] <= n <= runs[-1][0]:
            runs.append([])
        runs[-1].append(n)
    return runs
