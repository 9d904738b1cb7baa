"""The Triton kernels of `kernels.decode`: the race of a draw, the acceptance of drafts, and the lookup of drafts.

`kernels.decode` imports this file at the first launch, since not every machine has Triton, and says what each kernel
computes. Launches follow from shapes alone, so that a captured graph serves any contents.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.draft.base import LONGEST, SHORTEST
from whet.fast.kernels.decode import State, Texts

# tokens per program, 16 per thread: within 1% of the best of seven on an H200 from 64 rows on
CHUNK, WARPS = 2048, 4
BLOCK = 1024  # places that a program of the lookup compares at once, 8 per thread
# bits of a place; its match stands above them, so that the largest number is the longest, newest
# match
BITS = 27


# ---- race: every chunk of a row by itself, then the chunks of a row together. There are fewer rows than processors, so
# a row is cut. The cut depends on CHUNK alone, so a row's token and log-prob are the same bits in any batch.


def race_launch(
    logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    batch, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    temperature = temperature.to(torch.float32).contiguous()
    chunks = triton.cdiv(vocab, CHUNK)
    token = torch.empty(batch, dtype=torch.int64, device=logits.device)
    log_prob = torch.empty(batch, dtype=torch.float32, device=logits.device)
    if batch == 0:
        return token, log_prob
    part = torch.empty(3, batch, chunks, dtype=torch.float32, device=logits.device)
    first = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    strides = logits.stride(0), keys.stride(0)
    _race_chunk[batch, chunks](
        logits,
        keys,
        position.contiguous(),
        temperature,
        part,
        first,
        vocab,
        *strides,
        CHUNK=CHUNK,
        num_warps=WARPS,
    )
    wide = triton.next_power_of_2(chunks)
    _race_merge[batch,](
        logits,
        temperature,
        part,
        first,
        token,
        log_prob,
        strides[0],
        chunks,
        CHUNKS=wide,
        num_warps=1,
    )
    return token, log_prob


@triton.jit
def _race_chunk(  # type: ignore[no-untyped-def]
    logits,
    keys,
    position,
    temperature,
    part,
    first,
    vocab,
    logits_stride,
    keys_stride,
    CHUNK: tl.constexpr,
):
    """Leaves for a chunk its largest logit / T, the sum of exp(logit / T - largest), its race's winner and speed."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    batch, chunks = tl.num_programs(0), tl.num_programs(1)
    greedy, scale = _scale(temperature + row)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    live = token < vocab
    x = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=live, other=-float("inf"))
    x = x.to(tl.float32) * scale
    peak = tl.max(x, 0)
    weight = tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak))
    bits = noise_word(
        tl.load(keys + row), tl.load(keys + keys_stride + row), tl.load(position + row), token
    )
    speed = tl.where(greedy, (x == peak).to(tl.float32), weight / delay(uniform_of(bits)))
    # the first of equals
    best, winner = tl.max(tl.where(live, speed, -1.0), 0, return_indices=True)
    place = row * chunks + chunk
    size = batch * chunks
    tl.store(part + place, peak)
    tl.store(part + size + place, tl.sum(weight, 0))
    tl.store(part + 2 * size + place, peak + tl.log(best))
    # not a number: any token
    tl.store(first + place, tl.minimum(chunk * CHUNK + winner, vocab - 1))


@triton.jit
def _race_merge(  # type: ignore[no-untyped-def]
    logits, temperature, part, first, token, log_prob, logits_stride, chunks, CHUNKS: tl.constexpr
):
    row = tl.program_id(0)
    size = tl.num_programs(0) * chunks
    _, scale = _scale(temperature + row)
    chunk = tl.arange(0, CHUNKS)
    live = chunk < chunks
    place = row * chunks + chunk
    peak = tl.load(part + place, mask=live, other=-float("inf"))
    total = tl.load(part + size + place, mask=live, other=0.0)
    race = tl.load(part + 2 * size + place, mask=live, other=-float("inf"))
    highest = tl.max(peak, 0)
    total = tl.sum(total * tl.exp(peak - highest), 0)
    winner = tl.argmax(race, 0)
    drawn = tl.load(first + row * chunks + tl.minimum(winner, chunks - 1))
    x = tl.load(logits + row.to(tl.int64) * logits_stride + drawn).to(tl.float32) * scale
    tl.store(token + row, drawn.to(tl.int64))
    tl.store(log_prob + row, x - highest - tl.log(total))


@triton.jit
def _scale(temperature):  # type: ignore[no-untyped-def]
    """Whether the row is greedy, and 1 / T: a product per logit costs less than a division."""
    heat = tl.load(temperature).to(tl.float32)
    greedy = heat == 0.0
    return greedy, tl.div_rn(1.0, tl.where(greedy, 1.0, heat))


@triton.jit
def noise_word(k0, k1, position, token):  # type: ignore[no-untyped-def]
    """The hash of `whet.model.noise`, bit for bit, in unsigned arithmetic."""
    at = position.to(tl.uint32, bitcast=True)
    x = (
        k0.to(tl.uint32, bitcast=True)
        + at * 0x9E3779B9
        + token.to(tl.uint32, bitcast=True) * 0xC2B2AE35
    )
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= k1.to(tl.uint32, bitcast=True) + at * 0x85EBCA6B
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform_of(bits):  # type: ignore[no-untyped-def]
    """`whet.model.noise.uniform`, bit for bit: the product is exact, so a fused sum rounds alike."""
    u = (bits >> 8).to(tl.float32) * 5.9604644775390625e-08 + 2.98023223876953125e-08
    return tl.minimum(u, 0.999999940395355224609375)


@triton.jit
def delay(u):  # type: ignore[no-untyped-def]
    """E = -log1p(-u) to 2 parts in 10^7, with nothing but log (log1p is not in Triton's interpreter).

    w = fl(1 - u) is exact for u >= 1/2 and off by e = 2^-25 at most below, where u is an odd multiple of 2^-25. That is
    all of E for the smallest u: log(w) alone would be 0 for u = 2^-25, and its token would always win. But e =
    (w - 1) + u is computed exactly, and log(1 - u) = log(w - e) = log(w) - e / w - ..., with 1 / w = 1 + u + O(u^2):
    E = e + e u - log(w), where what is left out is below 2^-26 E.
    """
    w = 1.0 - u
    e = (w - 1.0) + u
    return e * u + e - tl.log(w)


# ---- accept: one program per row


def accept_launch(
    state: State, drafts: Tensor, token: Tensor, log_prob: Tensor, read: Tensor, texts: Texts | None
) -> None:
    batch, new = drafts.shape[0], drafts.shape[1] + 1
    if batch == 0:
        return
    bits = log_prob.contiguous().view(torch.int32)
    lanes = (read, read, read, 0)  # never read where there are no texts
    if texts is not None:
        lanes = (texts.history, texts.written, texts.lane, texts.history.stride(0))
    _accept[batch,](
        state.token,
        state.length,
        state.count,
        state.limit,
        state.stops,
        drafts,
        token.contiguous(),
        bits,
        read,
        *lanes,
        new,
        state.stops.stride(0),
        drafts.stride(0),
        read.stride(0),
        STOPS=state.stops.shape[0],
        WIDE=triton.next_power_of_2(max(2, new)),
        TEXTS=texts is not None,
        num_warps=1,
    )


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    newest,
    length,
    count,
    limit,
    stops,
    drafts,
    token,
    bits,
    read,
    history,
    text_sizes,
    lanes,
    history_line,
    new,
    stops_line,
    drafts_line,
    read_line,
    STOPS: tl.constexpr,
    WIDE: tl.constexpr,
    TEXTS: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.arange(0, WIDE)
    real = place < new
    drawn = tl.load(token + row * new + place, mask=real, other=0).to(tl.int32)
    guess = tl.load(drafts + row * drafts_line + place, mask=place < new - 1, other=-1)
    agreed = tl.min(tl.where((drawn != guess) | (place >= new - 1), place, WIDE), 0)
    kept, written = tl.load(length + row), tl.load(count + row)
    ends = written + place + 1 >= tl.load(limit + row)
    for stop in tl.static_range(STOPS):
        ends = ends | (drawn == tl.load(stops + stop * stops_line + row))
    first = tl.min(tl.where(ends & (place <= agreed), place, new), 0)
    last = tl.minimum(first, agreed)
    tl.store(newest + row, tl.sum(tl.where(place == last, drawn, 0), 0))
    tl.store(length + row, tl.where((kept >= 0) & (first == new), kept + last + 1, -1))
    tl.store(count + row, written + last + 1)
    tl.store(read + row, last + 1)
    tl.store(read + read_line + row, tl.sum((guess >= 0).to(tl.int32), 0))
    tl.store(read + (2 + place) * read_line + row, drawn, mask=real)
    drawn_bits = tl.load(bits + row * new + place, mask=real, other=0)
    tl.store(read + (2 + new + place) * read_line + row, drawn_bits, mask=real)
    if TEXTS:
        lane = tl.load(lanes + row)
        text = history + lane.to(tl.int64) * history_line + kept + 1
        tl.store(text + place, drawn, mask=(place <= last) & (kept >= 0))
        tl.store(text_sizes + lane, kept + last + 2, mask=kept >= 0)


# ---- lookup: every text of a row by itself, then the best of them. Nothing is kept between calls: comparing a text of
# thousands of tokens anew takes the GPU microseconds, while an index of it would have to be updated at every token.


def lookup_launch(
    history: Tensor,
    written: Tensor,
    of: Tensor,
    siblings: Tensor,
    lane: Tensor,
    most: Tensor,
    drafts: Tensor,
) -> None:
    (batch, depth), sources = drafts.shape, 1 + siblings.shape[1]
    if batch == 0 or depth == 0:
        return
    if history.shape[1] >= 1 << BITS:
        raise ValueError(f"texts of {history.shape[1]} tokens are too long to be looked up")
    if any(tensor.stride(1) != 1 for tensor in (history, drafts)):
        raise ValueError("the tokens of a text, and of a draft, must lie one after the other")
    written, lane, most, siblings = (
        written.contiguous(),
        lane.contiguous(),
        most.contiguous(),
        siblings.contiguous(),
    )
    found = torch.empty(batch, sources, dtype=torch.int32, device=drafts.device)
    _find[batch, sources](
        history,
        written,
        of.contiguous(),
        siblings,
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
        siblings,
        lane,
        most,
        found,
        drafts,
        sources,
        depth,
        history.stride(0),
        drafts.stride(0),
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
    siblings,
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
    sibling = tl.load(
        siblings + own * (sources - 1) + source - 1, mask=there & (source > 0), other=-1
    )
    other = tl.where(source > 0, sibling, own)
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
    siblings,
    lane,
    most,
    found,
    drafts,
    sources,
    depth,
    history_line,
    drafts_line,
    BITS: tl.constexpr,
    SOURCES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Takes the first text with the longest match, and drafts what followed there."""
    row = tl.program_id(0)
    own = tl.load(lane + row)
    nth = tl.arange(0, SOURCES)
    each = tl.load(found + row * sources + nth, mask=nth < sources, other=0)
    match = tl.max(each >> BITS, 0)
    source = tl.min(tl.where(each >> BITS == match, nth, SOURCES), 0)
    place = tl.sum(tl.where(nth == source, each, 0), 0) & ((1 << BITS) - 1)
    sibling = tl.load(
        siblings + own * (sources - 1) + source - 1, mask=(match > 0) & (source > 0), other=0
    )
    other = tl.where(source > 0, sibling, own)
    after = tl.load(written + other, mask=match > 0, other=1) - place
    step = tl.arange(0, DEPTH)
    meant = (match > 0) & (step < tl.load(most + row)) & ((source == 0) | (step < after))
    text = history + other.to(tl.int64) * history_line + place
    guess = tl.load(text + step % after, mask=meant & (step < depth), other=-1)
    tl.store(drafts + row * drafts_line + step, guess, mask=step < depth)
