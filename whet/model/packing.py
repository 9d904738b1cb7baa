"""Many sequences in one row: packing under a token budget, and the attention that keeps them apart.

The learner and the warm start call `make_packs`, then `hidden_states` inside `packed_attention(model)`, which plugs
the attention of `packed.py` into an unmodified Hugging Face model. Sequences may share a prompt, which is then fed
once: its keys and values are copied for each of them, and nothing else of it is computed again. The forward pass a user
makes outside the context is untouched.
`check_packing` proves on a few tokens that a model works so, instead of keeping a list of those that do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.errors import WhetError
from whet.model.head import head_of, log_probs

# ---- copied
#
# Rows of a tensor, copied: the keys and values of a prompt, once for each response that goes on from it.
#
# `packed.attention` calls `copied`. An operation of its own, since a compiler that looks into it makes of its backward
# pass an addition that sorts; here nothing is sorted, and eight numbers are added in fp32, without rounding after each.


NOBODYS = 1024
"""Rows for what is left out."""


@torch.library.custom_op("whet::copied", mutates_args=())
def copied(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of x [T, ...]; any where a row is -1, which is nobody's."""
    return x.index_select(0, rows.clamp(min=0))


@torch.library.custom_op("whet::added_up", mutates_args=())
def added_up(slope: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """For each row of `like` the sum of what its copies got. What nobody's got is left out, be it not a number: where
    no sequence lies a kernel writes nothing. It goes to many rows aside: added to one, each would wait for all."""
    wide = torch.float64 if slope.dtype == torch.float64 else torch.float32
    out = torch.zeros(len(like) + NOBODYS, *like.shape[1:], dtype=wide, device=slope.device)
    aside = torch.arange(len(rows), device=rows.device) % NOBODYS + len(like)
    out.index_add_(0, torch.where(rows < 0, aside, rows), slope.to(wide))
    return out[: len(like)].to(like.dtype)


@copied.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


@added_up.register_fake
def _(slope: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
    x, rows = ctx.saved_tensors
    return added_up(slope.contiguous(), rows, x), None


copied.register_autograd(_backward, setup_context=_remember)


# ---- packed
#
# Attention over packs: many sequences in one row of tokens, each by itself, some with a prompt in common.
#
# `packing.packed_attention` plugs it into a Hugging Face model; `packing.make_packs` says where sequences lie. On a GPU
# in half precision it is torch's variable-length flash attention; elsewhere (CPU, fp32, fp64, soft-capped scores)
# sequences of similar length are padded together for SDPA and gathered back, which is also the reference.


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


_WORTH = 0.9
"""Of the tokens, what is left where prompts are fed once, if it is to be worth the copies."""

Pair = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]
"""(prompt ids, response ids)."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch. The last token of a sequence predicts nothing and is left out of the input."""

    members: tuple[int, ...]
    """Which of the sequences, in the order they lie here."""
    counts: tuple[int, ...]
    """Response tokens of each member."""
    input_ids: Tensor
    """[1, T]."""
    position_ids: Tensor
    boundaries: Boundaries
    predict: Tensor
    """[R]: the positions whose hidden states predict the response tokens, member after member."""
    targets: Tensor
    """[R]."""
    owner: Tensor
    """[R]: which member (0, 1, ...) a response token belongs to."""


def divide(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices, longest first, cut wherever the next would pass the budget; one longer than the budget stands alone.

    Neighbours in length share a pack, so that padding in the reference attention is small.

    >>> divide([3, 9, 4, 2], budget=8)
    [[1], [2, 0], [3]]
    """
    packs: list[list[int]] = []
    room = -1
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > room:
            packs.append([])
            room = budget
        packs[-1].append(i)
        room -= lengths[i]
    return packs


def make_packs(
    pairs: Sequence[Pair], budget: int, device: torch.device | str = "cpu", share: bool = False
) -> list[Pack]:
    """Prompt and response of each pair, packed. Neither may be empty. share: equal prompts of a pack are fed once."""
    if any(len(prompt) == 0 or len(response) == 0 for prompt, response in pairs):
        raise WhetError("A sequence to train on has an empty prompt or response; give every prompt at least one token.")
    lengths = [len(prompt) + len(response) - 1 for prompt, response in pairs]
    if share:
        packs = divide_families(pairs, budget)
        if _cost(pairs, packs) < _WORTH * sum(lengths):
            return [_make_pack(pairs, families, device) for families in packs]
    return [_make_pack(pairs, [[i] for i in members], device) for members in divide(lengths, budget)]


def divide_families(pairs: Sequence[Pair], budget: int) -> list[list[list[int]]]:
    """Packs of families, whose members have the same prompt; a family beyond the budget is several.

    >>> divide_families([([1, 2], [3]), ([4], [5, 6]), ([1, 2], [7, 8])], budget=6)
    [[[0, 2], [1]]]
    """
    found: dict[bytes, list[int]] = {}
    before: Sequence[int] | np.ndarray | None = None
    for i, (prompt, _) in enumerate(pairs):
        if prompt is not before:  # the responses of a group mostly come together, with one and the same
            before, spelt = prompt, np.asarray(prompt, np.int64).tobytes()
        found.setdefault(spelt, []).append(i)
    families, costs = list[list[int]](), list[int]()
    for members in found.values():
        cost, room = len(pairs[members[0]][0]), -1
        for i in members:
            own = len(pairs[i][1]) - 1
            if own > room:
                families.append([])
                costs.append(cost)
                room = budget - cost
            families[-1].append(i)
            costs[-1] += own
            room -= own
    return [[families[i] for i in pack] for pack in divide(costs, budget)]


def _cost(pairs: Sequence[Pair], packs: list[list[list[int]]]) -> int:
    """Tokens that are fed."""
    prompts = sum(len(pairs[family[0]][0]) for families in packs for family in families)
    return prompts + sum(len(response) - 1 for _, response in pairs)


def _make_pack(pairs: Sequence[Pair], families: list[list[int]], device: torch.device | str) -> Pack:
    members = [i for family in families for i in family]
    first = np.array([place for family in families for place in range(len(family))]) == 0
    prompts = np.array([len(pairs[i][0]) for i in members])
    counts = np.array([len(pairs[i][1]) for i in members])
    fed = np.where(first, prompts, 0) + counts - 1
    starts = np.concatenate([[0], np.cumsum(fed)])
    base = starts[:-1][first][np.cumsum(first) - 1]  # where each one's prompt begins
    own = starts[:-1] + np.where(first, prompts, 0)  # and where its own tokens do
    predict = np.repeat(own - 1, counts) + ranges(counts)
    predict[np.cumsum(counts) - counts] = base + prompts - 1
    lengths = prompts + counts - 1
    arrays = {
        "ids": np.concatenate(
            [p for i, new in zip(members, first, strict=True) for p in (pairs[i][0] if new else (), pairs[i][1][:-1])]
        ),
        "position": ranges(fed) + np.repeat(np.where(first, 0, prompts), fed),
        "starts": starts,
        "predict": predict,
        "targets": np.concatenate([pairs[i][1] for i in members]),
        "owner": np.repeat(np.arange(len(members)), counts),
    }
    if not first.all():
        ends = np.cumsum(lengths)
        place = ranges(lengths)
        shared = place < np.repeat(prompts, lengths)
        arrays["rows"] = np.where(shared, np.repeat(base, lengths), np.repeat(own - prompts, lengths)) + place
        arrays["key_starts"] = np.concatenate([[0], ends])
        arrays["own"] = ranges(fed) + np.repeat(ends - lengths + np.where(first, 0, prompts), fed)
    at = dict(zip(arrays, put([*arrays.values()], device), strict=True))
    keys = None if first.all() else Keys(at["rows"].clone(), at["key_starts"].int(), at["own"])
    padding = Padding(lengths.tolist(), torch.device(device))
    return Pack(
        members=tuple(members),
        counts=tuple(counts.tolist()),
        input_ids=at["ids"][None],
        position_ids=at["position"][None],
        boundaries=Boundaries(at["starts"].int(), int(lengths.max()), has_flash(device), padding, keys),
        predict=at["predict"],
        targets=at["targets"],
        owner=at["owner"],
    )


def put(arrays: Sequence[np.ndarray], device: torch.device | str, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    """On the device by one copy that waits for nothing: each would cost a launch, and stop until the GPU is idle."""
    device = torch.device(device)
    whole = torch.as_tensor(np.concatenate(arrays), dtype=dtype)
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return list(whole.to(device).split([len(array) for array in arrays]))


def hidden_states(model: Any, pack: Pack) -> Tensor:
    """[R, width]: the last hidden states that predict the response tokens. Only inside `packed_attention(model)`."""
    out = model.get_decoder()(
        input_ids=pack.input_ids, position_ids=pack.position_ids, packed=pack.boundaries, use_cache=False
    )
    return out.last_hidden_state[0].index_select(0, pack.predict)


@contextmanager
def packed_attention(model: Any, checkpoint: bool = False) -> Iterator[None]:
    """The model takes packs (forward and backward) until the context ends; `checkpoint` computes activations again.

    transformers checkpoints a layer only in training mode. The layers alone are put into it, not what they hold:
    dropout stays off, as it was when the rollouts were drawn.
    """
    layers = [m for m in model.modules() if checkpoint and isinstance(m, GradientCheckpointingLayer)]
    before, flags = model.config._attn_implementation, [layer.training for layer in layers]
    model.config._attn_implementation = NAME
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for layer, flag in zip(layers, flags, strict=True):
            layer.training = flag


def check_packing(model: Any) -> None:
    """Three short sequences, two with a prompt in common, must get the same log-probs packed as alone; else the model
    is refused by name."""
    vocab = model.get_input_embeddings().num_embeddings
    device = model.get_input_embeddings().weight.device
    shapes = ((4, 3), (2, 3), (4, 5))
    pairs: list[Pair] = [([i % vocab for i in range(7, 7 + n)], [token % vocab] * 4) for n, token in shapes]
    (pack,) = make_packs(pairs, budget=64, device=device, share=True)
    with torch.no_grad():
        try:
            with packed_attention(model):
                ours, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise WhetError(f"{type(model).__name__} cannot be trained on packed sequences: {error}") from error
        theirs = torch.cat([_alone(model, *pairs[i]) for i in pack.members])
    gap = float((ours - theirs).abs().max())
    loose = model.dtype in (torch.bfloat16, torch.float16)
    if not gap < (0.3 if loose else 1e-3):
        raise WhetError(
            f"{type(model).__name__} cannot be trained here: packed sequences get other log-probs than single ones "
            f"(by {gap:.2g}), so it mixes tokens or shapes logits in a way whet does not know; choose another model."
        )


def _alone(model: Any, prompt: Any, response: Any) -> Tensor:
    ids = torch.tensor([[*prompt, *response]], device=model.get_input_embeddings().weight.device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]
