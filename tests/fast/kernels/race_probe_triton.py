"""Kernels that show the sampler's inner functions: the hash, the uniform and the delay."""

import triton
import triton.language as tl

from whet.fast.kernels.decode_triton import delay, noise_word, uniform_of


@triton.jit
def show_hash(words, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.arange(0, SIZE)
    bits = noise_word(tl.load(words), tl.load(words + 1), tl.load(words + 2), token)
    tl.store(out + token, bits.to(tl.int32, bitcast=True))


@triton.jit
def show_delay(bits, u, late, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    uniform = uniform_of(tl.load(bits + at).to(tl.uint32, bitcast=True))
    tl.store(u + at, uniform)
    tl.store(late + at, delay(uniform))
