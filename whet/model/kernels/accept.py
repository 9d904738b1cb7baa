"""What of the drafts came true: one row's draws against what was drafted, and its state moved on by as many.

Called by the rollout's step that verifies drafts, after the draw, within its captured graph. Takes the Triton kernel of
`accept_triton` on CUDA (or under Triton's interpreter), else `reference`: thirty small launches instead of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.model.kernels.dispatch import takes_triton


@dataclass(frozen=True, slots=True)
class State:
    """Of B rows, int32 each, all of them lines of one tensor."""

    token: Tensor
    """The newest."""
    length: Tensor
    """Cached tokens; -1: nobody's row."""
    count: Tensor
    """Generated tokens."""
    limit: Tensor
    """And how many there may be."""
    stops: Tensor
    """Tokens that end the row, [S, B]; -1: none."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What rows have written, int32, for drafters on the device: a lane for each rollout."""

    history: Tensor
    """[lanes, context]."""
    written: Tensor
    """[lanes]: tokens of each, the newest included."""
    lane: Tensor
    """[B]: of each row."""


def accept(
    state: State, drafts: Tensor, token: Tensor, log_prob: Tensor, read: Tensor, texts: Texts | None = None
) -> None:
    """Moves `state` on, and writes to `read` [2 + 2 (K + 1), B] how many draws count, how many drafts there were, the
    draws, and the bits of their log-probs. What counts is written to the texts, too, if there are any.

    drafts int32 [B, K], -1 for none; token and log_prob [B (K + 1)], the target's draws after each of the fed tokens:
    the newest and its drafts. A draw counts as long as all draws before it are what was drafted: the target would have
    come this way by itself. The first that ends the row is the last that counts; the row is nobody's from then on.
    """
    batch, new = drafts.shape[0], drafts.shape[1] + 1
    if token.shape != (batch * new,) or read.shape != (2 + 2 * new, batch):
        raise ValueError(f"{batch} rows with {new - 1} drafts have {batch * new} draws")
    if takes_triton(log_prob):
        from whet.model.kernels.accept_triton import launch

        launch(state, drafts, token, log_prob, read, texts)
    else:
        reference(state, drafts, token, log_prob, read, texts)


def reference(
    state: State, drafts: Tensor, token: Tensor, log_prob: Tensor, read: Tensor, texts: Texts | None = None
) -> None:
    """`accept` in plain torch: the oracle, and the path without Triton."""
    batch, new = drafts.shape[0], drafts.shape[1] + 1
    drawn = token.to(torch.int32).view(batch, new)
    place = torch.arange(new, dtype=torch.int32, device=drafts.device)
    agreed = torch.where(drawn[:, :-1] == drafts, new - 1, place[:-1]).amin(1) if new > 1 else place.expand(batch)
    stops = (state.stops[:, :, None] == drawn).any(0)
    ends = (stops | (state.count[:, None] + place + 1 >= state.limit[:, None])) & (place <= agreed[:, None])
    first = torch.where(ends, place, new).amin(1)
    counted = torch.minimum(first, agreed) + 1
    going = (state.length >= 0) & (first == new)
    if texts is not None:
        _write(texts, state.length, drawn, counted)
    state.token.copy_(drawn.gather(1, (counted - 1)[:, None].long())[:, 0])
    state.length.copy_(torch.where(going, state.length + counted, -1))
    state.count.add_(counted)
    bits = log_prob.view(torch.int32).view(batch, new)
    proposed = (drafts >= 0).sum(1, keepdim=True, dtype=torch.int32)
    read.copy_(torch.cat((counted[:, None], proposed, drawn, bits), 1).T)


def _write(texts: Texts, length: Tensor, drawn: Tensor, counted: Tensor) -> None:
    """Draws that count go behind the newest token, which is at `length`."""
    row, i = torch.nonzero(
        (torch.arange(drawn.shape[1], device=drawn.device) < counted[:, None]) & (length >= 0)[:, None], as_tuple=True
    )
    texts.history[texts.lane[row].long(), (length[row] + 1 + i).long()] = drawn[row, i]
    some = torch.nonzero(length >= 0)[:, 0]
    texts.written[texts.lane[some].long()] = (length + 1 + counted)[some]
