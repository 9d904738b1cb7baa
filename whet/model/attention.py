"""Attention over KV pages: what the rollout twin uses in place of the trainer's attention.

Registered with transformers under the name "whet"; the model hands it one object, `ctx`, that holds
the pages and says where each new token goes. The plain PyTorch code here is the CPU path and the
reference for faster kernels. It builds no mask tensor outside its own scores, keeps no state of its
own, and decides nothing: pages are owned by `whet.rollout.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "whet"
PAGE = 64
"""Tokens a page where kernels read it: one tile of keys."""
PREFILL = 16_384
"""Known tokens that one step feeds at most, half of it where they are padded: bounds its memory, and its time, for
which running rows wait. A flight with more is fed over several steps."""
GRAPHED = 2048
"""Of them, so many at most go by a captured graph: more keep the device busy for as long as the host needs."""


class AttentionContext(Protocol):
    """What travels through the model's forward to every layer's attention, as `ctx`."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> Tensor:
        """query [1, heads, T, d], key and value [1, kv heads, T, d] of the T new tokens; returns [1, T, heads, d]."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ctx: AttentionContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls. No mask arrives (the name has no mask function) and dropout is never on."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return ctx.attend(layer, query, key, value, scaling, sliding_window, softcap, extra), None


AttentionInterface.register(NAME, attention_forward)


@dataclass(slots=True)
class Block:
    """Rows of the cache that get q new tokens each: decoding rows (q = 1), or prompts padded on the left to one length.

    Example: page size 4, a row with 5 cached tokens whose pages are 7 and 2 decodes one token: position 5,
    written to page 2 at offset 1, attends over keys 0..5.
    """

    position: Tensor
    """[B, q]: place in the sequence; 0 for padding, which then attends to something finite nobody reads."""
    longest: int
    """Keys of the longest row, the new ones included."""
    rows: slice
    """Which rows of the cache. With whole-slot pages row i is page i, so keys are read by slice, never gathered."""
    table: Tensor | None = None
    """Small pages: [B, n], the pages of each row in order; entries beyond a row's length are any page."""
    level: bool = False
    """Every query sees every key: one new token each and all rows equally long."""
    _hidden: dict[int, Tensor] = field(default_factory=dict)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """query [B * q, heads, d] against all pages of a layer; returns the like."""
        (batch, new), kv_heads = self.position.shape, keys.shape[1]
        heads, dim = query.shape[1:]
        dtype = query.dtype
        keys, values = self._read(keys), self._read(values)
        # Query heads of one kv head lie side by side, so any GQA ratio is more query rows of the same product.
        query = (query * scaling).view(batch, new, heads, dim).transpose(1, 2).reshape(batch * kv_heads, -1, dim)
        if dtype in (torch.bfloat16, torch.float16):  # half-precision scores would round away small weights
            query, keys, values = query.float(), keys.float(), values.float()
        scores = torch.bmm(query, keys.transpose(1, 2)).view(batch, heads, new, self.longest)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if not (self.level and (window is None or window >= self.longest)):
            scores.masked_fill_(self._hidden_keys(window), -torch.inf)
        weights = torch.softmax(scores, -1).view(batch * kv_heads, -1, self.longest)
        out = torch.bmm(weights, values).view(batch, heads, new, -1).transpose(1, 2)
        return out.reshape(batch * new, heads, -1).to(dtype)

    def _read(self, pages: Tensor) -> Tensor:
        """[B * kv heads, longest, d]."""
        if self.table is None:
            heads = pages.shape[1]
            return pages.flatten(0, 1)[self.rows.start * heads : self.rows.stop * heads, : self.longest]
        gathered = pages[self.table].transpose(1, 2)
        return gathered.reshape(gathered.shape[0] * gathered.shape[1], -1, gathered.shape[-1])[:, : self.longest]

    def _hidden_keys(self, window: int | None) -> Tensor:
        """[B, 1, q, longest], true where a key lies after the query or before its window; made once a forward."""
        kind = window or 0
        if kind not in self._hidden:
            key = torch.arange(self.longest, device=self.position.device)
            query = self.position[:, None, :, None]
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            self._hidden[kind] = hidden
        return self._hidden[kind]


@dataclass(slots=True)
class PageContext:
    """One forward over T new tokens, the blocks' tokens one after the other, and the cache they are written to."""

    keys: Sequence[Tensor]
    """One a layer, [pages, kv heads, page size, d]. The last page is nobody's: padding is written there."""
    values: Sequence[Tensor]
    page: Tensor
    """[T]: the page each token's K and V are written to, `offset` within it."""
    offset: Tensor
    position: Tensor
    """[T]."""
    blocks: Sequence[Block]
    _entries: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        entry = self._entry(keys.shape[1], keys.shape[2])
        keys.view(-1, keys.shape[3])[entry] = key[0].transpose(0, 1).flatten(0, 1)
        values.view(-1, values.shape[3])[entry] = value[0].transpose(0, 1).flatten(0, 1)
        query = query[0].transpose(0, 1)
        if len(self.blocks) == 1:
            return self.blocks[0].attend(query, keys, values, scaling, window, softcap)[None]
        parts = query.split([block.position.numel() for block in self.blocks])
        out = [b.attend(q, keys, values, scaling, window, softcap) for b, q in zip(self.blocks, parts, strict=True)]
        return torch.cat(out)[None]

    def _entry(self, heads: int, size: int) -> Tensor:
        """[T * kv heads]: where each token's heads lie in the pages seen as a list of vectors; once a forward."""
        if (heads, size) not in self._entries:
            head = torch.arange(heads, device=self.page.device)
            entry = (self.page[:, None] * heads + head) * size + self.offset[:, None]
            self._entries[heads, size] = entry.flatten()
        return self._entries[heads, size]
