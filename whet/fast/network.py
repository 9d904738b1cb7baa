"""A model over KV pages, as the engine's graphs run it: new tokens in, hidden states out.

`PlainNetwork` runs the Hugging Face twin's own modules with our attention kernels: any family the twin allows.
`fused.py` has the faster form for the families it knows. Both write K and V to the pages as they go.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from whet.fast.fused import FusedStack, fused_stack, unfused
from whet.fast.kernels.attention import kernel_lacks, paged_attention
from whet.fast.kernels.layer import rope_write, write_kv
from whet.model.head import head_of
from whet.model.ops import Ops
from whet.model.twin import KVShape

KERNELS = Ops(paged_attention, rope_write, write_kv)  # the plain forms where Triton cannot run


class Network(Protocol):
    """What runs a model over pages. T new tokens: ids, positions and rows, all int32
    [T]; and of the rows they belong to the table, keys and queries, as `paged_attention` wants them."""

    def forward(
        self, ids: Tensor, position: Tensor, row: Tensor, table: Tensor, length: Tensor, starts: Tensor, most: int
    ) -> Tensor:
        """[T, width] after the last norm; writes K and V. `most`: new tokens of a row at most."""

    def logits(self, hidden: Tensor) -> Tensor: ...


def network_of(twin: PreTrainedModel, keys: Sequence[Tensor], values: Sequence[Tensor]) -> FusedStack | PlainNetwork:
    """The fastest form that computes what the twin does, over these pages; compiled where it runs on a GPU. There a
    warning says if that is the slow one."""
    stack = fused_stack(twin)
    if stack is None:
        if twin.device.type == "cuda":
            slow = f"{type(twin).__name__} decodes by its own modules, several times as slowly as it might"
            warnings.warn(f"{slow}: {unfused(twin)}.", stacklevel=2)
        return PlainNetwork(twin, keys, values)
    stack.attach(keys, values)
    if twin.device.type == "cuda":
        stack.compile()
    return stack


def graphs_lack(shapes: Iterable[KVShape], device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why the kernels cannot serve a model with this cache, in a few words; None where they can, as their plain form
    does off CUDA. dtype: of the weights, where they are not loaded yet."""
    if device.type != "cuda":
        return None
    lacks = (kernel_lacks(dtype or shape.dtype, shape.key_dim, shape.value_dim) for shape in shapes)
    return next((why for why in lacks if why), None)


class PlainNetwork:
    def __init__(self, twin: PreTrainedModel, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.decoder = twin.get_decoder()
        self.head = head_of(twin)
        self.keys, self.values = keys, values

    def forward(
        self, ids: Tensor, position: Tensor, row: Tensor, table: Tensor, length: Tensor, starts: Tensor, most: int
    ) -> Tensor:
        context = KernelContext(self.keys, self.values, position, row, table, length, starts, most)
        out = self.decoder(input_ids=ids[None], position_ids=position[None].long(), use_cache=False, ctx=context)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.narrow_logits(hidden)


@dataclass(slots=True)
class KernelContext:
    """An `AttentionContext` whose pages are read and written by kernels; see `kernels/attention.py` for the fields."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    position: Tensor
    row: Tensor
    table: Tensor
    length: Tensor
    starts: Tensor
    most: int

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
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        write_kv(key, value, keys, values, self.table, self.row, self.position)
        out = paged_attention(
            query,
            keys,
            values,
            self.table,
            self.length,
            self.starts,
            most=self.most,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
        return out[None]
