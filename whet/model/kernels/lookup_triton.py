"""The Triton kernels of `lookup`: every text of a row by itself, then the best of them.

Imported when first launched, since not every machine has Triton. Launches follow from shapes alone; a program reads as
much of its text as is written. Nothing is kept between calls: comparing a text of thousands of tokens anew takes the
GPU microseconds, an index of it would have to be carried on at every token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.kernels.lookup import LONGEST, SHORTEST

BLOCK, WARPS = 1024, 4
"""Places a program compares at once, 8 to a thread."""
BITS = 27
"""Of a place; above them stands its match, so that the largest number is the longest match at the newest place."""


def launch(
    history: Tensor, written: Tensor, of: Tensor, kin: Tensor, lane: Tensor, most: Tensor, drafts: Tensor
) -> None:
    (batch, depth), sources = drafts.shape, 1 + kin.shape[1]
    if batch == 0 or depth == 0:
        return
    if history.shape[1] >= 1 << BITS:
        raise ValueError(f"texts of {history.shape[1]} tokens are too long to be looked up")
    if any(tensor.stride(1) != 1 for tensor in (history, drafts)):
        raise ValueError("the tokens of a text, and of a draft, must lie one after the other")
    written, lane, most, kin = written.contiguous(), lane.contiguous(), most.contiguous(), kin.contiguous()
    found = torch.empty(batch, sources, dtype=torch.int32, device=drafts.device)
    _find[batch, sources](
        history,
        written,
        of.contiguous(),
        kin,
        lane,
        most,
        found,
        history.stride(0),
        LONGEST=LONGEST,
        SHORTEST=SHORTEST,
        BITS=BITS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _write[batch,](
        history,
        written,
        kin,
        lane,
        most,
        found,
        drafts,
        sources,
        depth,
        history.stride(0),
        drafts.stride(0),
        LONGEST=LONGEST,
        BITS=BITS,
        SOURCES=triton.next_power_of_2(sources),
        DEPTH=triton.next_power_of_2(depth),
        num_warps=1,
    )


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    history,
    written,
    of,
    kin,
    lane,
    most,
    found,
    history_line,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The longest match of a row in one text, and its newest place; 0 for none."""
    row, source, sources = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own = tl.load(lane + row)
    there = own >= 0
    akin = tl.load(kin + own * (sources - 1) + source - 1, mask=there & (source > 0), other=-1)
    other = tl.where(source > 0, akin, own)
    prompt = tl.load(of + own, mask=there, other=-1)
    same = tl.load(of + other, mask=other >= 0, other=-1) == prompt
    counts = (source == 0) | (same & (prompt >= 0) & (other != own))
    end = tl.load(written + own, mask=there, other=0)
    size = tl.load(written + other, mask=other >= 0, other=0)
    size = tl.where(counts & (tl.load(most + row) > 0), size, 0)
    newest = history + tl.maximum(own, 0).to(tl.int64) * history_line
    text = history + tl.maximum(other, 0).to(tl.int64) * history_line
    best = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        last = tl.minimum(place, size - 1) - 1
        agree = place < size
        match = tl.zeros((BLOCK,), tl.int32)
        # Masked loads are compiled to wait for each other, these are not. Before a text's start its first token stands
        # in; the minimum below takes it out again.
        for back in tl.static_range(LONGEST):
            token = tl.load(text + tl.maximum(last - back, 0))
            agree = agree & (token == tl.load(newest + tl.maximum(end - 1 - back, 0)))
            match += agree.to(tl.int32)
        match = tl.minimum(match, tl.minimum(place, end))
        best = tl.maximum(best, tl.where(match >= SHORTEST, (match << BITS) | place, 0))
    tl.store(found + row * sources + source, tl.max(best, 0))


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    history,
    written,
    kin,
    lane,
    most,
    found,
    drafts,
    sources,
    depth,
    history_line,
    drafts_line,
    LONGEST: tl.constexpr,
    BITS: tl.constexpr,
    SOURCES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of a row: the first text with the longest match, and what followed there."""
    row = tl.program_id(0)
    own = tl.load(lane + row)
    nth = tl.arange(0, SOURCES)
    each = tl.load(found + row * sources + nth, mask=nth < sources, other=0)
    match = tl.max(each >> BITS, 0)
    source = tl.min(tl.where(each >> BITS == match, nth, SOURCES), 0)
    place = tl.sum(tl.where(nth == source, each, 0), 0) & ((1 << BITS) - 1)
    akin = tl.load(kin + own * (sources - 1) + source - 1, mask=(match > 0) & (source > 0), other=0)
    other = tl.where(source > 0, akin, own)
    after = tl.load(written + other, mask=match > 0, other=1) - place
    step = tl.arange(0, DEPTH)
    size = tl.minimum(tl.load(most + row), tl.where(match < LONGEST, match, depth))
    meant = (step < size) & ((source == 0) | (step < after))
    text = history + other.to(tl.int64) * history_line + place
    guess = tl.load(text + step % after, mask=meant & (step < depth), other=-1)
    tl.store(drafts + row * drafts_line + step, guess, mask=step < depth)
