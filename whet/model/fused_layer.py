"""A layer of the fused stack as pure functions: what lies between two attentions, and the weights it takes.

`fused.py` compiles each of them once for all layers and runs them around its kernels. In order: `enter` the first
layer; of every layer `settle`, gate and up (`whet.model.kernels.gated`), `between`; after the last one `leave`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Projection(NamedTuple):
    """A norm and the linear map that reads it.

    Weights are frozen Parameters, because the compiler takes a Parameter's shape for a constant; eps is a tensor,
    because it takes a float that is an argument for something that may change.
    """

    norm: Tensor
    eps: Tensor
    weight: Tensor
    bias: Tensor | None


class Tail(NamedTuple):
    """A layer after its attention."""

    out: Tensor
    out_bias: Tensor | None
    gate_up: Projection
    down: Tensor
    down_bias: Tensor | None


class Heads(NamedTuple):
    """A layer's attention. The norms are those of single heads (Qwen 3)."""

    heads: int
    kv_heads: int
    scaling: float
    window: int | None
    softcap: float | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


class FusedLayer(NamedTuple):
    qkv: Projection
    attention: Heads
    tail: Tail


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in fp32 whatever x is, as in transformers, then cast, then times the weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def enter(x: Tensor, to: Projection) -> Tensor:
    """[T, q + k + v] of the first layer."""
    return F.linear(rms_norm(x, to.norm, to.eps), to.weight, to.bias)


def settle(mixed: Tensor, x: Tensor, tail: Tail) -> tuple[Tensor, Tensor]:
    """The residual stream after a layer's attention [T, heads * d], and what gate and up read."""
    x = _add(x, F.linear(mixed, tail.out, tail.out_bias))
    return x, rms_norm(x, tail.gate_up.norm, tail.gate_up.eps)


def between(inner: Tensor, x: Tensor, tail: Tail, to: Projection) -> tuple[Tensor, Tensor]:
    """From silu(gate) * up to the next layer's residual stream, and q, k, v."""
    x = _add(x, F.linear(inner, tail.down, tail.down_bias))
    return x, enter(x, to)


def leave(inner: Tensor, x: Tensor, tail: Tail, norm: Tensor, eps: Tensor) -> Tensor:
    """From the last layer's silu(gate) * up to what the head reads."""
    return rms_norm(_add(x, F.linear(inner, tail.down, tail.down_bias)), norm, eps)


def _add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, to the same bits. The casts keep the compiler from making it a part of the product before it: that
    copies x first, one more launch, where the norm that follows reads both anyway."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + y.to(wide)).to(x.dtype)
