"""The random numbers of rollouts: one 32-bit hash of (seed, train or eval, group, index, position, token id).

Sampling (`rollout/rows.py`) calls it for every drawn token. The hash is counter-based, so a token depends on its key
only: not on the batch, the slot or earlier work. torch here and 32-bit unsigned arithmetic in a kernel give the same
bits. Everything is modulo 2^32, >> is a logical shift:

    row key   (k0, k1) = low and high half of a splitmix64 chain over seed, space, group, index (on the host)
    bits      x = k0 + position * 0x9E3779B9 + token * 0xC2B2AE35
              x ^= x >> 16;  x *= 0x7FEB352D;  x ^= k1 + position * 0x85EBCA6B
              x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

Shifts and multipliers are those of Wellons' lowbias32. The second word enters half way, so that the noise of one
position or rollout is never a shifted copy of another's, which could happen with 32 bits of key.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
STEP = (0x9E3779B9, 0x85EBCA6B)
TOKEN = 0xC2B2AE35
MUL1 = 0x7FEB352D
MUL2 = 0x846CA68B


def row_key(seed: int, evaluation: bool, group_id: int, index: int) -> tuple[int, int]:
    """Two 32-bit words that name the noise of a rollout, as signed integers (the bits an int32 tensor holds)."""
    state = 0
    for word in (seed, int(evaluation), group_id, index):
        # the output function of Vigna's splitmix64
        x = ((state ^ (word & MASK64)) + GOLDEN64) & MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        state = x ^ (x >> 31)
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def noise_bits(keys: Tensor, position: Tensor, vocab: int) -> Tensor:
    """int32 [B, vocab] from row keys [2, B] and the index of the generated token [B], both int32."""
    n15, n16, low16, low17, mul1, mul2 = _words(keys.device, 15, 16, 0xFFFF, 0x1FFFF, MUL1, MUL2)
    a, b = keys + position * _steps(keys.device)
    x = a[:, None] + _token_words(vocab, keys.device)
    x ^= (x >> n16).bitwise_and_(low16)  # int32 shifts keep the sign: the mask makes them logical
    x *= mul1
    x ^= b[:, None]
    x ^= (x >> n15).bitwise_and_(low17)
    x *= mul2
    x ^= (x >> n16).bitwise_and_(low16)
    return x


def uniform(bits: Tensor) -> Tensor:
    """u = (h >> 8) 2^-24 + 2^-25 in float32, in (0, 1): the one value that would round to 1 is kept below it."""
    n8, low24 = _words(bits.device, 8, 0xFFFFFF)
    ulp, half_ulp, largest = _floats(bits.device, 2.0**-24, 2.0**-25, 1 - 2.0**-24)
    u = (bits >> n8).bitwise_and_(low24).to(torch.float32)
    return torch.minimum(u.mul_(ulp).add_(half_ulp), largest)


# Constants are tensors: an operation with a Python number costs twice as much on small rows.


@lru_cache(maxsize=16)
def _words(device: torch.device, *numbers: int) -> tuple[Tensor, ...]:
    return torch.tensor([_signed(n) for n in numbers], dtype=torch.int32, device=device).unbind()


@lru_cache(maxsize=8)
def _steps(device: torch.device) -> Tensor:
    return torch.tensor([[_signed(n)] for n in STEP], dtype=torch.int32, device=device)


@lru_cache(maxsize=8)
def _floats(device: torch.device, *numbers: float) -> tuple[Tensor, ...]:
    return torch.tensor(numbers, device=device).unbind()


@lru_cache(maxsize=8)
def _token_words(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, dtype=torch.int32, device=device) * _signed(TOKEN)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
