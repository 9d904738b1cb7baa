"""The rollout twin: a second Hugging Face module that holds the very Parameters and buffers of the trainer's model.

The trainer keeps its own attention; the twin attends over KV pages, by an attention of ours that is registered with
transformers under the name "whet". An in-place update of a weight is seen by both at once, so weights are never copied
between them. The engine calls `rollout_twin`; the learner calls `sharing_copy` for its reference. Every forward of the
twin receives a `ctx` that holds the pages and says where each new token goes (`rollout/pages.py` makes it). The plain
PyTorch attention here is the CPU path and the reference for the kernels. A model whose attention cannot be reproduced
is refused with one sentence: by what it declares, then by comparing both networks on a few tokens (`wide.py`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from whet.errors import WhetError
from whet.model.ops import visible
from whet.model.wide import WIDE, Wide, probe_logits

# Shapes: T new tokens of one forward, B rows with q new tokens each, H query heads, K heads of keys and values,
#         d size of a head, P pages of S tokens.

NAME = "whet"
PAGE = 64  # tokens per page where kernels read it: one tile of keys
# Prompt tokens that one step feeds at most, half of it where they are padded. It bounds the memory of the step, and its
# time, for which running rows wait. More prompt tokens are fed over several steps.
PREFILL = 16_384
# prompt tokens that go through a captured graph at most: more keep the device busy without one
GRAPHED = 2048
LAYER_TYPES = {"full_attention", "sliding_attention"}

ModelT = TypeVar("ModelT", bound=nn.Module)


# ---- attention over pages


class How(NamedTuple):
    """How a layer forms its attention scores."""

    scaling: float
    window: int | None = None  # keys that a query sees, itself included
    softcap: float | None = None  # scores become c tanh(scores / c)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    ctx: Any,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The signature that transformers calls. No mask arrives (the name has no mask function), dropout is never on.
    `ctx` comes from the model's forward; it attends from query [1, H, T, d] to [1, T, H, d]."""
    scaling = extra.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = How(scaling, extra.get("sliding_window"), extra.get("softcap"))
    return ctx.attend(module.layer_idx, query, key, value, how, extra), None


AttentionInterface.register(NAME, attention_forward)


@dataclass(slots=True)
class Block:
    """Rows of the cache that get q new tokens each: decoding rows (q = 1), or prompts padded on the left to one length.

    Example: with pages of 4 tokens, a row with 5 cached tokens on pages 7 and 2 decodes one token: position 5, written
    to page 2 at offset 1, attends over keys 0..5.
    """

    # [B, q]: place in the sequence; 0 for padding, which then attends to finite values
    position: Tensor
    longest: int  # keys of the longest row, the new ones included
    # rows of the cache; if a page is a whole slot, row i is page i: keys are read by slice, not
    # gathered
    rows: slice
    # small pages: [B, n], the pages of each row in order; beyond its length any page
    table: Tensor | None = None
    level: bool = False  # every query sees every key: one new token each, and all rows equally long
    _hidden: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, how: How) -> Tensor:
        """query [B * q, H, d] against the pages [P, K, S, d] of a layer; returns [B * q, H, d]."""
        scaling, window, softcap = how
        (batch, new), kv_heads, dtype = self.position.shape, keys.shape[1], query.dtype
        heads, dim = query.shape[1:]
        keys = self._read(keys)
        values = self._read(values)
        # Query heads of one kv head lie side by side, so any GQA ratio is more query rows of the same product.
        query = (
            (query * scaling)
            .view(batch, new, heads, dim)
            .transpose(1, 2)
            .reshape(batch * kv_heads, -1, dim)
        )
        # half-precision scores would round away small weights
        if dtype in (torch.bfloat16, torch.float16):
            query = query.float()
            keys = keys.float()
            values = values.float()
        scores = torch.bmm(query, keys.transpose(1, 2)).view(batch, heads, new, self.longest)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if not (self.level and (window is None or window >= self.longest)):
            scores.masked_fill_(self._hidden_keys(window), -torch.inf)
        weights = torch.softmax(scores, -1).view(batch * kv_heads, -1, self.longest)
        out = torch.bmm(weights, values).view(batch, heads, new, -1).transpose(1, 2)
        return out.reshape(batch * new, heads, -1).to(dtype)

    def _read(self, pages: Tensor) -> Tensor:
        """[B * K, longest, d]: the cached keys or values of the rows."""
        if self.table is None:
            heads = pages.shape[1]
            return pages.flatten(0, 1)[
                self.rows.start * heads : self.rows.stop * heads, : self.longest
            ]
        gathered = pages[self.table].transpose(1, 2)
        return gathered.reshape(gathered.shape[0] * gathered.shape[1], -1, gathered.shape[-1])[
            :, : self.longest
        ]

    def _hidden_keys(self, window: int | None) -> Tensor:
        """[B, 1, q, longest], true where a key lies after the query or before its window; made once per forward."""
        if window not in self._hidden:
            key = torch.arange(self.longest, device=self.position.device)
            query = self.position[:, None, :, None]
            hidden = key > query
            self._hidden[window] = hidden if window is None else hidden | (key <= query - window)
        return self._hidden[window]


@dataclass(slots=True)
class PageContext:
    """One forward over T new tokens, block after block, and the cache that they are written to."""

    # per layer [P, K, S, d]; the last page belongs to no row: padding is written there
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    page: Tensor  # [T]: the page that the key and value of each token are written to
    offset: Tensor  # [T]: the place within that page
    position: Tensor  # [T]
    blocks: Sequence[Block]
    _entries: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How, extra: dict[str, Any]
    ) -> Tensor:
        keys = self.keys[layer]
        values = self.values[layer]
        entry = self._entry(keys.shape[1], keys.shape[2])
        keys.view(-1, keys.shape[3])[entry] = key[0].transpose(0, 1).flatten(0, 1)
        values.view(-1, values.shape[3])[entry] = value[0].transpose(0, 1).flatten(0, 1)
        query = query[0].transpose(0, 1)
        if len(self.blocks) == 1:
            return self.blocks[0].attend(query, keys, values, how)[None]
        parts = query.split([block.position.numel() for block in self.blocks])
        out = [
            block.attend(q, keys, values, how) for block, q in zip(self.blocks, parts, strict=True)
        ]
        return torch.cat(out)[None]

    def _entry(self, heads: int, size: int) -> Tensor:
        """[T * K]: where the heads of each token lie, with the pages seen as one list of vectors; once per forward."""
        if (heads, size) not in self._entries:
            head = torch.arange(heads, device=self.page.device)
            entry = (self.page[:, None] * heads + head) * size + self.offset[:, None]
            self._entries[heads, size] = entry.flatten()
        return self._entries[heads, size]


@dataclass(frozen=True, slots=True)
class KVShape:
    """The sizes of what one layer writes into the cache for each token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


def rollout_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same network with our attention, in eval mode, sharing every Parameter and buffer object of `model`."""
    refuse_unsupported(model)
    twin = sharing_copy(model, model.parameters())
    twin.config._attn_implementation = NAME
    twin.eval()
    probe = Probe()
    with torch.no_grad():
        probe_logits(twin, ctx=probe)
    _refuse_asked(probe, model)
    _refuse_other(model)
    return twin


def _refuse_other(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are others with our attention: it need not declare all that it does in its own."""
    wide = Wide(sharing_copy(model, model.parameters()))
    reference = wide.reference(probe_logits)
    off = reference.off(wide.run(partial(probe_logits, ctx=Probe()), NAME, WIDE))
    if off is not None:
        other = f"{type(model).__name__} gives other logits with whet's attention ({off})"
        eager = "load it with attn_implementation = 'eager', or " if wide.own != "eager" else ""
        raise WhetError(f"{other}, so its rollouts would be wrong; {eager}choose another model.")


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes (object, name, value) have another value until the context ends."""
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def sharing_copy(model: ModelT, shared: Iterable[Tensor]) -> ModelT:
    """New modules and config around the buffers and the `shared` tensors of `model`; everything else is copied."""
    # The memo of the deep copy already holds the shared tensors, so they take no memory twice and tied ones stay tied.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*shared, *model.buffers())}
    copied = copy.deepcopy(
        model, memo=memo | {id(module.__dict__["forward"]): None for module in _hung(model)}
    )
    for module in _hung(copied):
        del module.__dict__["forward"]
    return copied


def _hung(model: nn.Module) -> list[nn.Module]:
    """Modules on which a trainer hung a `forward` (TRL's, accelerate's). It is bound to them, so no copy can use it."""
    return [module for module in model.modules() if "forward" in module.__dict__]


def kv_shapes(model: PreTrainedModel) -> list[KVShape]:
    """Sizes of the keys and values of every layer of a model, twin or not; its weights may be on the meta device."""
    # Without weights there are no values: experts must not be chosen by them, nor padding looked for among the tokens.
    meanwhile = {
        "_attn_implementation": NAME,
        "_experts_implementation": "batched_mm",
        "pad_token_id": None,
    }
    probe = Probe()
    with (
        torch.no_grad(),
        changed(*((model.config, name, value) for name, value in meanwhile.items())),
    ):
        probe_logits(model, ctx=probe)
    _refuse_asked(probe, model)
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse a model by what it declares; its weights may be on the meta device."""
    for reason in _declared_faults(model):
        raise WhetError(f"{type(model).__name__} {reason}.")


def _declared_faults(model: PreTrainedModel) -> Iterator[str]:
    if not isinstance(model, PreTrainedModel):
        yield "is no Hugging Face model; give a transformers causal language model"
    config = model.config
    if not model._supports_attention_backend:
        yield "does not let its attention be replaced, which whet's engine needs; choose another model"
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder and a decoder; whet trains decoder-only models"
    if config.get_text_config() is not config:
        yield "reads more than text; whet trains text-only models, so give its language model alone"
    if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        yield "has no language-model head that can be run on chosen tokens; give a causal language model"
    if kinds := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        yield f"has layers of type {', '.join(sorted(kinds))}, which whet's engine does not know"
    rope = str(getattr(config, "rope_parameters", None) or "")
    for kind in ("dynamic", "longrope"):
        # its angles follow the longest row of a batch, and it rebinds its buffers
        if f"'{kind}'" in rope:
            yield f"uses {kind} rotary positions, which depend on the batch; whet's engine refuses them"


@dataclass(slots=True)
class Probe:
    """A context without a cache: plain causal attention that records the arguments of each layer."""

    shapes: dict[int, KVShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    extras: set[str] = field(default_factory=set)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How, extra: dict[str, Any]
    ) -> Tensor:
        self.shapes[layer] = KVShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        self.windows[layer] = how.window
        self.extras |= {k for k in ("s_aux", "position_bias") if extra.get(k) is not None}
        ratio = query.shape[1] // key.shape[1]
        # In half precision scores as large as those of real models would be rounded by more than they differ.
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = (part.to(wide).repeat_interleave(ratio, 1) for part in (key, value))
        scores = query.to(wide) @ key.transpose(2, 3) * how.scaling
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        tokens = scores.shape[-1]
        seen = visible(tokens, tokens, how.window, scores.device)
        weights = F.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        return (weights @ value).transpose(1, 2).to(query.dtype)


def _refuse_asked(probe: Probe, model: PreTrainedModel) -> None:
    """Refuse a model by the arguments of its attention calls; its weights may be on the meta device."""
    name = type(model).__name__
    config = model.config
    if sorted(probe.shapes) != list(range(config.num_hidden_layers)):
        raise WhetError(
            f"{name} does not run all of its attention layers through transformers' attention interface."
        )
    if probe.extras:
        needs = ", ".join(sorted(probe.extras))
        raise WhetError(
            f"{name} needs {needs} in its attention, which whet's engine does not know."
        )
    windowed = getattr(config, "sliding_window", None) is not None
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if windowed else ""] * config.num_hidden_layers
    )
    if any(
        kind == "sliding_attention" and probe.windows[i] is None for i, kind in enumerate(kinds)
    ):
        raise WhetError(
            f"{name} does not tell its attention the sliding window, so whet's engine cannot keep to it."
        )
