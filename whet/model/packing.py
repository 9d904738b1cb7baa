"""Many sequences in one row: packing under a token budget, and the attention that keeps them apart.

The learner and the warm start call `make_packs`, then `hidden_states` inside `packed_attention(model)`, which plugs
the attention of `packed.py` into an unmodified Hugging Face model. Sequences may share a prompt, which is then fed
once: its keys and values are copied for each of them, and nothing else of it is computed again. The forward pass a user
makes outside the context is untouched.
`check_packing` proves on a few tokens that a model works so, instead of keeping a list of those that do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.errors import WhetError
from whet.model.head import head_of, log_probs
from whet.model.packed import NAME, Boundaries, Keys, Padding, has_flash, ranges

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
