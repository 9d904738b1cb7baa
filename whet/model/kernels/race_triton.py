"""The Triton kernels of `race`: every chunk of a row by itself, then the chunks of a row together.

Imported when first launched, since not every machine has Triton. A row is cut into chunks because there are fewer rows
than processors. The cut depends on nothing but the constant below, so a row's token and log-prob are the same bits in
any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, WARPS = 2048, 4
"""Tokens of a program, 16 to a thread: within 1% of the best of seven on an H200 from 64 rows on."""


def launch(logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
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
    _race_chunk[batch, chunks](
        logits,
        keys,
        position.contiguous(),
        temperature,
        part,
        first,
        vocab,
        logits.stride(0),
        keys.stride(0),
        CHUNK=CHUNK,
        num_warps=WARPS,
    )
    _race_merge[batch,](
        logits,
        temperature,
        part,
        first,
        token,
        log_prob,
        vocab,
        logits.stride(0),
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return token, log_prob


@triton.jit
def _race_chunk(  # type: ignore[no-untyped-def]
    logits, keys, position, temperature, part, first, vocab, logits_stride, keys_stride, CHUNK: tl.constexpr
):
    """Of a chunk: its largest logit / T, the sum of exp(logit / T - largest), and who wins its race by how much."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    batch, chunks = tl.num_programs(0), tl.num_programs(1)
    greedy, scale = _scale(temperature + row)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    live = token < vocab
    x = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=live, other=-float("inf"))
    x = x.to(tl.float32) * scale
    peak = tl.max(x, 0)
    weight = tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak))
    bits = noise_word(tl.load(keys + row), tl.load(keys + keys_stride + row), tl.load(position + row), token)
    speed = tl.where(greedy, (x == peak).to(tl.float32), weight / delay(uniform_of(bits)))
    best, winner = tl.max(tl.where(live, speed, -1.0), 0, return_indices=True)  # the first of equals
    place = row * chunks + chunk
    size = batch * chunks
    tl.store(part + place, peak)
    tl.store(part + size + place, tl.sum(weight, 0))
    tl.store(part + 2 * size + place, peak + tl.log(best))
    tl.store(first + place, tl.minimum(chunk * CHUNK + winner, vocab - 1))  # not a number: any token


@triton.jit
def _race_merge(  # type: ignore[no-untyped-def]
    logits, temperature, part, first, token, log_prob, vocab, logits_stride, chunks, CHUNKS: tl.constexpr
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
    """Is the row greedy, and what its logits are multiplied by: 1 / T costs less than a division each."""
    heat = tl.load(temperature).to(tl.float32)
    greedy = heat == 0.0
    return greedy, tl.div_rn(1.0, tl.where(greedy, 1.0, heat))


@triton.jit
def noise_word(k0, k1, position, token):  # type: ignore[no-untyped-def]
    """The hash of `whet.model.noise`, bit for bit, in unsigned arithmetic."""
    at = position.to(tl.uint32, bitcast=True)
    x = k0.to(tl.uint32, bitcast=True) + at * 0x9E3779B9 + token.to(tl.uint32, bitcast=True) * 0xC2B2AE35
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
