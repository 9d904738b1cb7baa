"""Drafts looked up on the device: what followed when a row's last tokens were seen before.

Called before the rollout's step that verifies drafts, within its captured graph, so that no draft waits for the host.
It keeps nothing: every call reads the texts as they are. Takes the Triton kernels of `lookup_triton` on CUDA (or under
Triton's interpreter), else `reference`. The host's drafters of `whet.draft` have the same idea and an index.

A row looks in its own text first, then in those of its kin: other lanes that write, or wrote, to the same prompt. In
front of a place p of a text, m(p) of the last LONGEST tokens agree with the row's own last ones, counted from the
newest back to the first that does not agree or is not there. The longest match wins if it has SHORTEST tokens; among
equals the earlier text, then the newest place. The draft is what stands at p and after it, m(p) tokens at most unless
all LONGEST agree. A kin's text ends where it ends; the row's own goes round and round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.model.kernels.dispatch import _interpreted, has_triton

LONGEST, SHORTEST = 12, 2
"""Tokens of context that are matched, as in `whet.draft.base`."""


def lookup(
    history: Tensor, written: Tensor, of: Tensor, kin: Tensor, lane: Tensor, most: Tensor, drafts: Tensor
) -> None:
    """Writes all of `drafts`, with -1 where there is no guess. All tensors are int32.

    history [L, context] and written [L]: lane i holds the text history[i, :written[i]], its newest token last
    of [L]: the number of the prompt a lane's text belongs to, -1 for none: such a text has no kin
    kin [L, S]: other lanes with texts of the same prompt, -1 for none; only those that still have one count
    lane [B]: the lane of each row, -1 for nobody's; most [B]: drafts it wants at most, none if not positive
    drafts [B, depth]: may be part of a wider tensor
    """
    lanes, batch = len(history), len(drafts)
    if written.shape != (lanes,) or of.shape != (lanes,) or kin.shape != (lanes, kin.shape[-1]):
        raise ValueError(f"{lanes} lanes need as many lengths, prompts and rows of kin")
    if lane.shape != (batch,) or most.shape != (batch,):
        raise ValueError(f"{batch} rows of drafts need a lane and a number of drafts each")
    if any(tensor.dtype != torch.int32 for tensor in (history, written, of, kin, lane, most, drafts)):
        raise ValueError("texts, lanes and drafts are int32")
    if (history.is_cuda or _interpreted()) and has_triton():
        from whet.model.kernels.lookup_triton import launch

        launch(history, written, of, kin, lane, most, drafts)
    else:
        reference(history, written, of, kin, lane, most, drafts)


def reference(
    history: Tensor, written: Tensor, of: Tensor, kin: Tensor, lane: Tensor, most: Tensor, drafts: Tensor
) -> None:
    """`lookup` in plain torch: the oracle, and the path without Triton."""
    context = history.shape[1]
    own = lane.clamp(min=0)
    newest = _newest(history, written, own)
    place = torch.arange(context, device=history.device)
    best = torch.zeros_like(own, dtype=torch.int64)  # a match and its place as one number
    source = own
    for nth, other in enumerate((own, *kin[own].T)):
        there = other.clamp(min=0)
        counts = lane >= 0
        if nth > 0:
            counts = counts & (other >= 0) & (other != own) & (of[there] == of[own]) & (of[own] >= 0)
        match = _agreeing(history[there], newest)
        match = match * (counts[:, None] & (match >= SHORTEST) & (place < written[there][:, None]))
        found = (match * context + place).amax(1)
        better = found // context > best // context
        best, source = torch.where(better, found, best), torch.where(better, there, source)
    match, first = best // context, best % context
    after = (written[source] - first).clamp(min=1)[:, None]
    step = torch.arange(drafts.shape[1], device=history.device)
    size = torch.minimum(most, torch.where(match < LONGEST, match, drafts.shape[1]))
    meant = (step < size[:, None]) & ((step < after) | (source == own)[:, None])
    guess = history[source[:, None], first[:, None] + step % after]
    drafts.copy_(torch.where(meant, guess, -1))


def _newest(history: Tensor, written: Tensor, own: Tensor) -> Tensor:
    """The last LONGEST tokens of each row, the newest first, [B, LONGEST]; before its start what no text holds."""
    at = written[own][:, None] - 1 - torch.arange(LONGEST, device=history.device)
    return torch.where(at >= 0, history[own[:, None], at.clamp(min=0)].long(), torch.iinfo(torch.int64).min)


def _agreeing(text: Tensor, newest: Tensor) -> Tensor:
    """In front of each place of text [B, context], how many tokens agree with `newest` without a gap."""
    context = text.shape[1]
    match = torch.zeros_like(text, dtype=torch.int64)
    agree = torch.ones_like(text, dtype=torch.bool)
    for back in range(min(LONGEST, context - 1)):
        agree = agree[:, 1:] & (text[:, : context - 1 - back] == newest[:, back : back + 1])
        match[:, back + 1 :] += agree
    return match
