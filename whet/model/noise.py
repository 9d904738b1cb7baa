"""The random numbers of rollouts: one 32-bit hash of (seed, train or eval, group, index, position, token id).

Counter-based, so a token depends on its key alone: not on the batch, the slot or what ran before. The same bits
come out of torch here and of 32-bit unsigned arithmetic in a kernel. Everything modulo 2^32, >> a logical shift:

    row key   (k0, k1) = low and high half of a splitmix64 chain over seed, space, group, index (on the host)
    bits      x = k0 + position * 0x9E3779B9 + token * 0xC2B2AE35
              x ^= x >> 16;  x *= 0x7FEB352D;  x ^= k1 + position * 0x85EBCA6B
              x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

Shifts and multipliers are those of Wellons' lowbias32. The second word enters half way, so that the noise of two
positions or rollouts is never a shifted copy of the other, as it could be with 32 bits of key.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
STEP = (0x9E3779B9, 0x85EBCA6B)
TOKEN = 0xC2B2AE35
MUL1, MUL2 = 0x7FEB352D, 0x846CA68B


def row_key(seed: int, evaluation: bool, group_id: int, index: int) -> tuple[int, int]:
    """Two 32-bit words that name a rollout's noise, as signed integers (the bits an int32 tensor holds).

    >>> row_key(0, False, 7, 0) == row_key(0, True, 7, 0)
    False
    """
    state = 0
    for word in (seed, int(evaluation), group_id, index):
        state = _splitmix64(state ^ (word & MASK64))
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def noise_bits(keys: Tensor, position: Tensor, vocab: int) -> Tensor:
    """int32 [B, vocab] from row keys [2, B] and the index of the generated token [B], both int32."""
    c = _constants(keys.device)
    a, b = keys + position * c.step
    x = a[:, None] + _token_words(vocab, keys.device)
    x ^= (x >> c.n16).bitwise_and_(c.low16)  # int32 shifts keep the sign: the mask makes them logical
    x *= c.mul1
    x ^= b[:, None]
    x ^= (x >> c.n15).bitwise_and_(c.low17)
    x *= c.mul2
    x ^= (x >> c.n16).bitwise_and_(c.low16)
    return x


def uniform(bits: Tensor) -> Tensor:
    """u = (h >> 8) 2^-24 + 2^-25 in float32, in (0, 1): the one value that would round to 1 is kept below it.

    >>> uniform(torch.tensor([0, -1], dtype=torch.int32)).tolist() == [2.0**-25, 1 - 2.0**-24]
    True
    """
    c = _constants(bits.device)
    u = (bits >> c.n8).bitwise_and_(c.low24).to(torch.float32)
    return torch.minimum(u.mul_(c.ulp).add_(c.half_ulp), c.largest)


class _Constants(NamedTuple):
    """As tensors: an operation with a Python number costs twice as much on small rows."""

    n8: Tensor
    n15: Tensor
    n16: Tensor
    low16: Tensor
    low17: Tensor
    low24: Tensor
    mul1: Tensor
    mul2: Tensor
    step: Tensor
    ulp: Tensor
    half_ulp: Tensor
    largest: Tensor
    """The largest float32 below 1."""


@lru_cache(maxsize=8)
def _constants(device: torch.device) -> _Constants:
    def word(*numbers: int) -> Tensor:
        return torch.tensor([_signed(n) for n in numbers], dtype=torch.int32, device=device)

    return _Constants(
        n8=word(8)[0],
        n15=word(15)[0],
        n16=word(16)[0],
        low16=word(0xFFFF)[0],
        low17=word(0x1FFFF)[0],
        low24=word(0xFFFFFF)[0],
        mul1=word(MUL1)[0],
        mul2=word(MUL2)[0],
        step=word(*STEP)[:, None],
        ulp=torch.tensor(2.0**-24, device=device),
        half_ulp=torch.tensor(2.0**-25, device=device),
        largest=torch.tensor(1 - 2.0**-24, device=device),
    )


@lru_cache(maxsize=8)
def _token_words(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, dtype=torch.int32, device=device) * _signed(TOKEN)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _splitmix64(x: int) -> int:
    """Vigna's splitmix64 output function."""
    x = (x + GOLDEN64) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
