"""Many sequences in one row: packing under a token budget, and the attention that keeps the sequences apart.

The learner and the warm start call `make_packs`, then `hidden_states` inside `packed_attention(model)`, which plugs the
attention below into an unmodified Hugging Face model. Sequences may share a prompt, which is then fed once: its keys
and values are copied for each of them, and nothing else of it is computed again. A forward pass that a user makes
outside the context is untouched. On a GPU in half precision the attention is torch's variable-length flash attention;
elsewhere (CPU, fp32, fp64, soft-capped scores) sequences of similar length are padded together for SDPA and gathered
back, which is also the reference. `check_packing` proves on a few tokens that a model can be trained on packs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.errors import WhetError
from whet.model.head import head_of, wide_type
from whet.model.ops import visible
from whet.model.twin import changed, sharing_copy
from whet.model.wide import WIDE, Wide, spread_ids

# Shapes: T tokens fed for a pack (a shared prompt once), N sequences, C keys (a shared prompt once per sequence),
#         R response tokens, H heads of queries or of keys and values, d size of a head.

NAME = "whet_packed"
APART = "whet_packed_apart"  # the same attention, kept out of the graph of a compiled layer
_GQA: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
_REFUSED = ("s_aux", "position_bias")  # attention sinks and score biases, which are not done here
# a sequence below this share of the longest one starts a new bucket: padding against calls
_FULLNESS = 0.75
# share of the tokens that may remain where prompts are fed once, to be worth the copies
_WORTH = 0.9
_ASIDE = 1024  # rows that take the gradients of unused copies

Device = torch.device | str
Pair = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]  # (prompt ids, response ids)
# (scaling, sliding window, soft-cap) of attention scores
Options = tuple[float | None, int | None, float | None]


# ---- copies of rows: the keys and values of a prompt, once for each response that continues it
#
# They are operators because a compiler that looks inside turns the backward pass into an addition that sorts. Here
# nothing is sorted, and the few gradients of a row are added in fp32, without rounding after each.


@torch.library.custom_op("whet::copy_rows", mutates_args=())
def copy_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of x [T, ...]; a row of -1 is unused and may hold anything."""
    return x.index_select(0, rows.clamp(min=0))


@torch.library.custom_op("whet::sum_copies", mutates_args=())
def sum_copies(gradient: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """For each row of `like`, the sum of the gradients of its copies. Gradients of unused copies are left out, even
    where they are not a number: a kernel writes nothing where no sequence lies. They go to many rows aside, since
    additions to one row would wait for each other."""
    wide = wide_type(gradient)
    out = torch.zeros(len(like) + _ASIDE, *like.shape[1:], dtype=wide, device=gradient.device)
    aside = torch.arange(len(rows), device=rows.device) % _ASIDE + len(like)
    out.index_add_(0, torch.where(rows < 0, aside, rows), gradient.to(wide))
    return out[: len(like)].to(like.dtype)


copy_rows.register_fake(lambda x, rows: x.new_empty((rows.shape[0], *x.shape[1:])))
sum_copies.register_fake(
    lambda gradient, rows, like: torch.empty_like(like, memory_format=torch.contiguous_format)
)
copy_rows.register_autograd(
    lambda ctx, gradient: (sum_copies(gradient.contiguous(), *reversed(ctx.saved_tensors)), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# ---- attention over a pack


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring sequences of a pack, padded to one length."""

    sequences: int
    longest: int
    rows: Tensor  # [tokens]: where each token lies in the padded [sequences * longest]


class Padding:
    """How sequences are padded together, worked out at the first access, which the flash kernel never makes. It is not
    a dataclass: the compiler would specialise a layer on the fields of one, and these change with each pack."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self._device = lengths, device  # lengths of whole sequences, prompts included

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        # Lengths fall from left to right, unless prompts are shared; the first sequence of a bucket is its longest.
        runs: list[list[int]] = []
        for n in self.lengths:
            if not runs or not _FULLNESS * runs[-1][0] <= n <= runs[-1][0]:
                runs.append([])
            runs[-1].append(n)
        places = [
            ranges(np.array(run)) + np.repeat(np.arange(len(run)) * run[0], run) for run in runs
        ]
        rows = [torch.as_tensor(place).to(self._device) for place in places]
        return tuple(Bucket(len(run), run[0], at) for run, at in zip(runs, rows, strict=True))


@dataclass(frozen=True, slots=True)
class Keys:
    """What each sequence of a pack attends to where some share a prompt: the prompt and its own tokens."""

    rows: Tensor  # [C]: which token of the pack each key is, sequence after sequence
    starts: Tensor  # int32 [N + 1]: where the keys of each sequence begin
    # [T]: where each token of the pack stands among the keys; a shared one, in the first sequence
    own: Tensor


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where the sequences of a pack lie, in the form that attention needs."""

    # int32 [N + 1]: where the fed tokens of each sequence begin; a shared prompt counts to the
    # first
    starts: Tensor
    longest: int  # tokens of the longest sequence, its prompt included
    flash: bool  # the device has the flash kernel: decided here, since a compiled layer cannot ask
    padding: Padding
    keys: Keys | None = None  # None: the fed tokens themselves


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    packed: Boundaries,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The signature that transformers calls: [1, H, T, d] in, [1, T, H, d] out. Causal within each sequence."""
    unknown = [name for name in _REFUSED if rest.get(name) is not None]
    if unknown or attention_mask is not None or rest.get("dropout"):
        what = (
            unknown[0]
            if unknown
            else "a mask of its own"
            if attention_mask is not None
            else "dropout"
        )
        raise WhetError(
            f"{type(module).__name__} attends with {what}, which packed training does not support."
        )
    scaling = rest.get("scaling")
    window = rest.get("sliding_window")
    softcap = rest.get("softcap")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not packed.flash or not can_varlen(q, v, softcap):
        return _reference(q, k, v, packed, (scaling, window, softcap))[None], None
    key_starts = packed.starts
    # queries and keys are aligned at their ends, so a prompt may have keys only
    if packed.keys is not None:
        k = copy_rows(k, packed.keys.rows)
        v = copy_rows(v, packed.keys.rows)
        key_starts = packed.keys.starts
    sizes = packed.starts, key_starts, packed.longest, packed.longest
    reach = -1 if window is None else window - 1  # a window of w keys counts the token itself
    out = varlen_attn(q, k, v, *sizes, scale=scaling, window_size=(reach, 0), **_GQA)
    assert isinstance(out, Tensor)
    return out[None], None


AttentionInterface.register(NAME, attention)
AttentionInterface.register(APART, torch.compiler.disable(attention))


def ranges(lengths: np.ndarray) -> np.ndarray:
    """0 .. n - 1 for each n, one after the other.

    >>> ranges(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def can_varlen(q: Tensor, v: Tensor, softcap: float | None) -> bool:
    """Whether the flash kernel computes this attention, given that the device has it."""
    d = q.shape[-1]
    fits = d == v.shape[-1] and d <= 256 and d % 8 == 0
    return fits and softcap is None and q.dtype in (torch.bfloat16, torch.float16)


def has_flash(device: Device) -> bool:
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.disable
def _reference(q: Tensor, k: Tensor, v: Tensor, packed: Boundaries, how: Options) -> Tensor:
    keys = packed.keys
    if keys is not None:
        q, k, v = (copy_rows(x, keys.rows) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    tokens = [bucket.rows.numel() for bucket in packed.padding.buckets]
    parts = zip(
        packed.padding.buckets, q.split(tokens), k.split(tokens), v.split(tokens), strict=True
    )
    out = [_attend_padded(*part, how) for part in parts]
    whole = out[0] if len(out) == 1 else torch.cat(out)
    return whole if keys is None else whole.index_select(0, keys.own)


def _attend_padded(bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, how: Options) -> Tensor:
    """Padding lies to the right, where no causal query looks; its own rows are not gathered back."""

    def pad(x: Tensor) -> Tensor:
        """[tokens, H, d] -> [sequences, H, longest, d]."""
        rows = x.new_zeros(bucket.sequences * bucket.longest, *x.shape[1:]).index_copy(
            0, bucket.rows, x
        )
        return rows.unflatten(0, (bucket.sequences, bucket.longest)).transpose(1, 2)

    q = pad(q)
    k = pad(k)
    v = pad(v)
    scaling, window, softcap = how
    plain = softcap is None and (window is None or window >= bucket.longest)
    mask = None if plain else visible(bucket.longest, bucket.longest, window, q.device)
    if softcap is None or mask is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, scale=scaling)
    else:  # Gemma 2: scores become c tanh(scores / c), for which SDPA has no argument
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
        out = torch.softmax(scores, dim=-1, dtype=wide_type(scores)).to(v.dtype) @ v
    return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.rows)


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch. The last token of a sequence predicts nothing and is left out of the input."""

    members: tuple[int, ...]  # which of the sequences, in the order they lie here
    counts: tuple[int, ...]  # response tokens of each member
    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    boundaries: Boundaries
    # [R]: the positions whose hidden states predict the response tokens, member after member
    predict: Tensor
    targets: Tensor  # [R]: the response tokens
    owner: Tensor  # [R]: the member (0, 1, ...) that a response token belongs to


def divide(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices, longest first, cut where the next one would exceed the budget; a longer one than that stands alone.
    Neighbours in length share a pack, so that padding in the reference attention is small."""
    return _cut(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)), lengths, budget)


def _cut(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Consecutive pieces of `order` within the budget; each holds at least one index."""
    pieces: list[list[int]] = []
    room = -1
    for i in order:
        if lengths[i] > room:
            pieces.append([])
            room = budget
        pieces[-1].append(i)
        room -= lengths[i]
    return pieces


def make_packs(
    pairs: Sequence[Pair], budget: int, device: Device = "cpu", share: bool = False
) -> list[Pack]:
    """Pack the prompt and response of each pair; neither may be empty. share: equal prompts of a pack are fed once."""
    if any(len(prompt) == 0 or len(response) == 0 for prompt, response in pairs):
        raise WhetError(
            "A sequence to train on has an empty prompt or response; give every prompt at least one token."
        )
    lengths = [len(prompt) + len(response) - 1 for prompt, response in pairs]
    if share:
        packs = divide_families(pairs, budget)
        prompts = sum(len(pairs[family[0]][0]) for families in packs for family in families)
        if prompts + sum(len(response) - 1 for _, response in pairs) < _WORTH * sum(lengths):
            return [_make_pack(pairs, families, device) for families in packs]
    return [
        _make_pack(pairs, [[i] for i in members], device) for members in divide(lengths, budget)
    ]


def idle_pack(device: Device) -> Pack:
    """Two made-up sequences, for a pass of a process that has nothing to run while the others do. One would not do: the
    compiler makes another graph for sizes of 1."""
    ids = [0] * 8
    (pack,) = make_packs([(ids, ids), (ids, ids[:5])], budget=64, device=device)
    return pack


def divide_families(pairs: Sequence[Pair], budget: int) -> list[list[list[int]]]:
    """Packs of families, whose members have the same prompt; a family that exceeds the budget becomes several.

    >>> divide_families([([1, 2], [3]), ([4], [5, 6]), ([1, 2], [7, 8])], budget=6)
    [[[0, 2], [1]]]
    """
    found: dict[bytes, list[int]] = {}
    before: Sequence[int] | np.ndarray | None = None
    for i, (prompt, _) in enumerate(pairs):
        # the responses of a group mostly come together and have one prompt object
        if prompt is not before:
            before = prompt
            spelling = np.asarray(prompt, np.int64).tobytes()
        found.setdefault(spelling, []).append(i)
    own = [len(response) - 1 for _, response in pairs]
    families = list[list[int]]()
    costs = list[int]()
    for members in found.values():
        prompt_cost = len(pairs[members[0]][0])
        pieces = _cut(members, own, budget - prompt_cost)
        families += pieces
        costs += [prompt_cost + sum(own[i] for i in piece) for piece in pieces]
    return [[families[i] for i in pack] for pack in divide(costs, budget)]


def _make_pack(pairs: Sequence[Pair], families: list[list[int]], device: Device) -> Pack:
    """One pack of families; the first member of each family brings the prompt, the others only their own tokens."""
    members = [i for family in families for i in family]
    first = np.array([place for family in families for place in range(len(family))]) == 0
    prompts = np.array([len(pairs[i][0]) for i in members])
    counts = np.array([len(pairs[i][1]) for i in members])
    fed = np.where(first, prompts, 0) + counts - 1
    starts = np.concatenate([[0], np.cumsum(fed)])
    base = starts[:-1][first][np.cumsum(first) - 1]  # where the prompt of each member begins
    own = starts[:-1] + np.where(first, prompts, 0)  # where its own tokens begin
    predict = np.repeat(own - 1, counts) + ranges(counts)
    # a first response token follows the (shared) prompt
    predict[np.cumsum(counts) - counts] = base + prompts - 1
    lengths = prompts + counts - 1
    pieces = [
        (pairs[i][0] if new else (), pairs[i][1][:-1])
        for i, new in zip(members, first, strict=True)
    ]
    arrays = [
        np.concatenate([part for piece in pieces for part in piece]),
        ranges(fed) + np.repeat(np.where(first, 0, prompts), fed),
        starts,
        predict,
        np.concatenate([pairs[i][1] for i in members]),
        np.repeat(np.arange(len(members)), counts),
    ]
    if not first.all():
        ends = np.cumsum(lengths)
        place = ranges(lengths)
        shared = place < np.repeat(prompts, lengths)
        arrays.append(
            np.where(shared, np.repeat(base, lengths), np.repeat(own - prompts, lengths)) + place
        )
        arrays.append(np.concatenate([[0], ends]))
        arrays.append(ranges(fed) + np.repeat(ends - lengths + np.where(first, 0, prompts), fed))
    ids, position, begins, predicting, targets, owner, *copies = upload(arrays, device)
    keys = Keys(copies[0].clone(), copies[1].int(), copies[2]) if copies else None
    padding = Padding(lengths.tolist(), torch.device(device))
    boundaries = Boundaries(begins.int(), int(lengths.max()), has_flash(device), padding, keys)
    sizes = tuple(members), tuple(counts.tolist())
    return Pack(*sizes, ids[None], position[None], boundaries, predicting, targets, owner)


def upload(
    arrays: Sequence[np.ndarray], device: Device, dtype: torch.dtype = torch.int64
) -> list[Tensor]:
    """Copy the arrays to the device in one transfer: each alone costs a launch, and waits until the GPU is idle."""
    device = torch.device(device)
    whole = torch.as_tensor(np.concatenate(arrays), dtype=dtype)
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return list(whole.to(device).split([len(array) for array in arrays]))


# ---- models on packs


def hidden_states(model: Any, pack: Pack) -> Tensor:
    """[R, width]: the last hidden states that predict the response tokens. Call it inside `packed_attention(model)`."""
    out = model.get_decoder()(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        packed=pack.boundaries,
        use_cache=False,
    )
    return out.last_hidden_state[0].index_select(0, pack.predict)


def packed_attention(model: Any, checkpoint: bool = False) -> AbstractContextManager[None]:
    """The model takes packs (forward and backward) until the context ends; `checkpoint` recomputes activations.
    transformers checkpoints a layer only in training mode. The layers are put into that mode, but not the modules
    inside them: dropout stays off, as it was when the rollouts were drawn."""
    layers = [
        m for m in model.modules() if checkpoint and isinstance(m, GradientCheckpointingLayer)
    ]
    return changed(
        (model.config, "_attn_implementation", NAME),
        *((layer, "training", True) for layer in layers),
    )


def check_packing(model: PreTrainedModel) -> None:
    """Refuse a model unless three short sequences, two of one prompt, get the same logits packed as alone."""
    wide = Wide(sharing_copy(model, model.parameters()))
    ids = spread_ids(model, 7).tolist()
    prompts = [ids[:4], ids[:2], ids[:4]]
    responses = [ids[4:5] * 3, ids[5:6] * 4, ids[6:7] * 5]
    (pack,) = make_packs(
        list(zip(prompts, responses, strict=True)), budget=64, device=model.device, share=True
    )
    texts = [[*prompts[i], *responses[i]] for i in pack.members]
    longest = max(map(len, texts))
    # Tokens that stand to the right of a text are not seen from within it.
    rows = torch.tensor(
        [text + ids[:1] * (longest - len(text)) for text in texts], device=model.device
    )
    predict = [
        slice(len(prompts[i]) - 1, len(text) - 1)
        for i, text in zip(pack.members, texts, strict=True)
    ]

    def alone(model: Any) -> Tensor:
        logits = model(input_ids=rows, use_cache=False).logits
        return torch.cat([row[place] for row, place in zip(logits, predict, strict=True)])

    def together(model: Any) -> Tensor:
        with packed_attention(model):
            hidden = hidden_states(model, pack)
        return head_of(model).to(hidden.dtype).logits(hidden)

    try:
        reference = wide.reference(alone)
        off = reference.off(wide.run(together, wide.own, WIDE))
        if off is None:  # the form that trains: on a GPU in half precision it is a kernel
            theirs = wide.run(alone, wide.own, None)
            off = reference.off_rounded(wide.run(together, wide.own, None), theirs)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise WhetError(
            f"{type(model).__name__} cannot be trained on packed sequences: {error}"
        ) from error
    if off is not None:
        raise WhetError(
            f"{type(model).__name__} cannot be trained here: packed sequences get other logits than single ones "
            f"({off}), so it mixes tokens or shapes logits in a way whet does not know; choose another model."
        )
