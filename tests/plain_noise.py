"""The hash of `whet.model.noise` as its docstring says it, in plain Python integers."""

from __future__ import annotations

MASK = 0xFFFFFFFF


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def reference_bits(
    seed: int, evaluation: bool, group: int, index: int, position: int, token: int
) -> int:
    """The documented hash in plain Python integers."""
    state = 0
    for word in (seed, int(evaluation), group, index):
        state = splitmix64(state ^ word)
    k0, k1 = state & MASK, state >> 32
    x = (k0 + position * 0x9E3779B9 + token * 0xC2B2AE35) & MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= (k1 + position * 0x85EBCA6B) & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16
