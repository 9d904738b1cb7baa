"""Operators of the end of a decode step: the draw of a token, the acceptance of drafts, and the lookup of new ones.

The graph runner (`whet.fast.graphs`) calls them inside its captured step, so nothing is read on the host. Each has its
plain torch form here, named `*_reference`: the oracle of the tests, and the path without Triton.

Shapes: B rows, V tokens of vocabulary, K drafts per row, L lanes, S siblings of a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.draft.base import LONGEST, SHORTEST
from whet.fast.kernels import runs_triton, takes_triton
from whet.model.noise import noise_bits, uniform

# ---- race: one token per row by the exponential race with keyed noise
#
# Token i of a row arrives at E_i / p_i, E_i = -log1p(-u_i) with u_i from `whet.model.noise`; the first wins. The
# kernels race p_i / E_i itself where `whet.rollout.rows.sample` (the general form, with top-k and top-p) races
# log p_i - log E_i: one logarithm less, and nothing that could win is rounded to 0, since 2^-25 <= E < 17.4 keeps every
# winner within a factor of 6e8 of the likeliest token.
#
# Both draw the same token unless the two best of a row are closer than rounding: |log race_1 - log race_2| below about
# 4e-6 for |logits / T| up to 32 (a few units in the last place of float32), in proportion above. The gap of a race lies
# below x with probability at most x, so one token in about 250,000 may differ. Greedy rows compare logits as they are
# and never differ.


def race(
    logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and log-softmax(logits / T) of them, float32 [B].

    logits [B, V]; keys int32 [2, B] from `row_key`; position int32 [B], how many tokens the row has generated;
    temperature [B], 0 for greedy rows: the first of the largest logits, recorded at T = 1. A logit of NaN gives a
    log-prob of NaN, and still a token of the vocabulary.
    """
    batch = len(logits)
    if keys.shape != (2, batch) or position.shape != (batch,) or temperature.shape != (batch,):
        raise ValueError(f"{batch} rows of logits need two keys, a position and a temperature each")
    if keys.dtype != torch.int32 or position.dtype != torch.int32:
        raise ValueError("keys and positions are int32, the words of the hash")
    if takes_triton(logits):
        from whet.fast.kernels.decode_triton import race_launch

        return race_launch(logits, keys, position, temperature)
    return race_reference(logits, keys, position, temperature)


def race_reference(
    logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """`race` in plain torch, in float64 if the logits are: the oracle, and the path without Triton."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = (temperature == 0)[:, None]
    heated = logits / temperature.to(logits.dtype)[:, None].masked_fill(greedy, 1.0)
    # log_softmax adds up a long row less exactly on a CPU
    log_probs = heated - heated.logsumexp(-1, keepdim=True)
    u = uniform(noise_bits(keys, position, logits.shape[1])).to(logits.dtype)
    log_delay = (-torch.log1p(-u)).log().masked_fill(greedy, 0.0)
    token = torch.where(greedy, logits, log_probs - log_delay).argmax(-1)
    return token, log_probs.gather(1, token[:, None])[:, 0].float()


# ---- accept: a row's draws against its drafts; the kernel is one launch where the plain form is thirty


@dataclass(frozen=True, slots=True)
class State:
    """The state of B rows, int32 each, all of them lines of one tensor."""

    token: Tensor  # the newest
    length: Tensor  # cached tokens; -1: no row
    count: Tensor  # generated tokens
    limit: Tensor  # generated tokens at most
    stops: Tensor  # [S, B]: tokens that end the row; -1: none


@dataclass(frozen=True, slots=True)
class Texts:
    """What rows have written, int32, for drafters on the device: a lane for each rollout."""

    history: Tensor  # [L, context]
    written: Tensor  # [L]: tokens of each lane, the newest included
    lane: Tensor  # [B]: the lane of each row


def accept(
    state: State,
    drafts: Tensor,
    token: Tensor,
    log_prob: Tensor,
    read: Tensor,
    texts: Texts | None = None,
) -> None:
    """Moves `state` on, and writes to `read` [2 + 2 (K + 1), B] how many draws count, how many drafts there were, the
    draws, and the bits of their log-probs. Draws that count are also appended to the texts, if there are any.

    drafts int32 [B, K], -1 for none; token and log_prob [B (K + 1)], the target's draws after each of the fed tokens:
    the newest and its drafts. A draw counts as long as all draws before it equal their drafts: the target would have
    come this way by itself. The first that ends the row is the last that counts; the row is empty from then on.
    """
    batch = drafts.shape[0]
    new = drafts.shape[1] + 1
    if token.shape != (batch * new,) or read.shape != (2 + 2 * new, batch):
        raise ValueError(f"{batch} rows with {new - 1} drafts have {batch * new} draws")
    if takes_triton(log_prob):
        from whet.fast.kernels.decode_triton import accept_launch

        accept_launch(state, drafts, token, log_prob, read, texts)
    else:
        accept_reference(state, drafts, token, log_prob, read, texts)


def accept_reference(
    state: State,
    drafts: Tensor,
    token: Tensor,
    log_prob: Tensor,
    read: Tensor,
    texts: Texts | None = None,
) -> None:
    """`accept` in plain torch: the oracle, and the path without Triton."""
    batch = drafts.shape[0]
    new = drafts.shape[1] + 1
    drawn = token.to(torch.int32).view(batch, new)
    place = torch.arange(new, dtype=torch.int32, device=drafts.device)
    agreed = (
        torch.where(drawn[:, :-1] == drafts, new - 1, place[:-1]).amin(1)
        if new > 1
        else place.expand(batch)
    )
    stops = (state.stops[:, :, None] == drawn).any(0)
    ends = (stops | (state.count[:, None] + place + 1 >= state.limit[:, None])) & (
        place <= agreed[:, None]
    )
    first = torch.where(ends, place, new).amin(1)
    counted = torch.minimum(first, agreed) + 1
    going = (state.length >= 0) & (first == new)
    if texts is not None:  # draws that count go behind the newest token, which is at `length`
        alive = state.length >= 0
        row, i = torch.nonzero((place < counted[:, None]) & alive[:, None], as_tuple=True)
        texts.history[texts.lane[row].long(), (state.length[row] + 1 + i).long()] = drawn[row, i]
        texts.written[texts.lane[alive].long()] = (state.length + 1 + counted)[alive]
    state.token.copy_(drawn.gather(1, (counted - 1)[:, None].long())[:, 0])
    state.length.copy_(torch.where(going, state.length + counted, -1))
    state.count.add_(counted)
    bits = log_prob.view(torch.int32).view(batch, new)
    proposed = (drafts >= 0).sum(1, keepdim=True, dtype=torch.int32)
    read.copy_(torch.cat((counted[:, None], proposed, drawn, bits), 1).T)


# ---- lookup: drafts are what followed when a row's last tokens were seen before
#
# It keeps nothing: every call reads the texts as they are. The host's drafters (`whet.draft`) use the same rule, with
# an index. A row looks in its own text first, then in those of its siblings: other lanes with texts of the same prompt.
# In front of a place p of a text, m(p) of the last LONGEST tokens agree with the row's own last ones, counted from the
# newest back to the first that does not agree or is not there. The longest match wins if it has SHORTEST tokens; among
# equals the earlier text, then the newest place. The draft is what stands at p and after it, as far as is wanted. A
# sibling's draft stops at the end of its text; one from the row's own text repeats it.


def lookup(
    history: Tensor,
    written: Tensor,
    of: Tensor,
    siblings: Tensor,
    lane: Tensor,
    most: Tensor,
    drafts: Tensor,
) -> None:
    """Writes all of `drafts`, with -1 where there is no guess. All tensors are int32.

    history [L, context] and written [L]: lane i holds the text history[i, :written[i]], its newest token last
    of [L]: the number of the prompt that a lane's text belongs to, -1 for none: such a text has no siblings
    siblings [L, S]: other lanes with texts of the same prompt, -1 for none; only those that still have one count
    lane [B]: the lane of each row, -1 for no row; most [B]: drafts it wants at most, none if not positive
    drafts [B, depth]: may be part of a wider tensor
    """
    lanes = len(history)
    batch = len(drafts)
    if (
        written.shape != (lanes,)
        or of.shape != (lanes,)
        or siblings.shape != (lanes, siblings.shape[-1])
    ):
        raise ValueError(f"{lanes} lanes need as many lengths, prompts and rows of siblings")
    if lane.shape != (batch,) or most.shape != (batch,):
        raise ValueError(f"{batch} rows of drafts need a lane and a number of drafts each")
    if any(
        tensor.dtype != torch.int32
        for tensor in (history, written, of, siblings, lane, most, drafts)
    ):
        raise ValueError("texts, lanes and drafts are int32")
    if runs_triton(history):
        from whet.fast.kernels.decode_triton import lookup_launch

        lookup_launch(history, written, of, siblings, lane, most, drafts)
    else:
        lookup_reference(history, written, of, siblings, lane, most, drafts)


def lookup_reference(
    history: Tensor,
    written: Tensor,
    of: Tensor,
    siblings: Tensor,
    lane: Tensor,
    most: Tensor,
    drafts: Tensor,
) -> None:
    """`lookup` in plain torch: the oracle, and the path without Triton."""
    context = history.shape[1]
    own = lane.clamp(min=0)
    # The last LONGEST tokens of each row, the newest first, [B, LONGEST]; before its start a number no text holds.
    at = written[own][:, None] - 1 - torch.arange(LONGEST, device=history.device)
    newest = torch.where(
        at >= 0, history[own[:, None], at.clamp(min=0)].long(), torch.iinfo(torch.int64).min
    )
    place = torch.arange(context, device=history.device)
    best = torch.zeros_like(own, dtype=torch.int64)  # a match and its place as one number
    source = own
    for nth, other in enumerate((own, *siblings[own].T)):
        there = other.clamp(min=0)
        counts = lane >= 0
        if nth > 0:
            counts = (
                counts & (other >= 0) & (other != own) & (of[there] == of[own]) & (of[own] >= 0)
            )
            if not counts.any():
                continue
        # In front of each place of this text, how many tokens agree with `newest` without a gap.
        text = history[there]
        match = torch.zeros_like(text, dtype=torch.int64)
        agree = torch.ones_like(text, dtype=torch.bool)
        for back in range(min(LONGEST, context - 1)):
            agree = agree[:, 1:] & (text[:, : context - 1 - back] == newest[:, back : back + 1])
            match[:, back + 1 :] += agree
        match = match * (counts[:, None] & (match >= SHORTEST) & (place < written[there][:, None]))
        found = (match * context + place).amax(1)
        better = found // context > best // context
        best = torch.where(better, found, best)
        source = torch.where(better, there, source)
    match = best // context
    first = best % context
    after = (written[source] - first).clamp(min=1)[:, None]
    step = torch.arange(drafts.shape[1], device=history.device)
    meant = (
        (match > 0)[:, None] & (step < most[:, None]) & ((step < after) | (source == own)[:, None])
    )
    guess = history[source[:, None], first[:, None] + step % after]
    drafts.copy_(torch.where(meant, guess, -1))
