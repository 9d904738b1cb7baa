"""How fast a decode step can be on an H200: its kernels summed up, each at its limit of memory, compute or launch.

Pure arithmetic, called by `whet.bench.decode` for the share of the attainable. For a step of B sequences, one token
each, at a context of c tokens (bf16, weights [n, k] read once a step):

    gemm(n, k) = max(2nk / (BW e), 2nkB / (F f), t)
    attention  = max(4 B c Hkv d / (BW e), 4 B c Hq d / (F f / 2), t) + t
    layer      = gemm((Hq + 2 Hkv) d, h) + gemm(h, Hq d) + gemm(2 I, h) + gemm(h, I) + attention + 5 t
    step       = L layer + gemm(V, h) + max(14 B V / (BW e), 3 t) + 4 t

that is fused QKV and gate/up, five small kernels a layer, 14 bytes a logit for the sampler (bf16 written, about three
passes in fp32), and no gap for the host. `PAPER` has the constants first assumed, one floor t for every kernel, and is
what shares are quoted of; `MEASURED` those found on the card: floors by kind of kernel, and a gap after each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GEMMS, SMALL, ATTENTION = 4, 5, 2
"""Kernels a layer: matrix products; norms, RoPE with the KV write, SiLU; attention and the merge of its splits."""
OTHERS = 8
"""Kernels a step outside of the layers: the head, three of the sampler, four small ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """What of a model decides the bytes and operations of a step.

    >>> f"{SMOLLM2_135M.weights / 1e9:.3f} B read, {SMOLLM2_135M.kv_bytes / 1e3:.1f} kB a token"
    '0.134 B read, 23.0 kB a token'
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def weights(self) -> int:
        """Read in a step: the head once, of the embedding next to nothing."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Of keys and values in bf16, a token."""
        return 4 * self.layers * self.kv_heads * self.head_dim


SMOLLM2_135M = Dims(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152)
QWEN25_15B = Dims(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936)


def dims_of(config: Any) -> Dims:
    """Of a Hugging Face config of the Llama or Qwen2 family."""
    return Dims(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as the model above sees it. Seconds, bytes and operations a second."""

    bandwidth: float = 4.8e12
    bandwidth_share: float = 0.8
    busy_bandwidth_share: float = 0.8
    """Of attention once it reads `busy_tokens` or more."""
    busy_tokens: int = 256 * 1024
    flops: float = 989e12
    flops_share: float = 0.65
    gemm_floor: float = 2e-6
    narrow_gemm_floor: float = 2e-6
    """Where k <= 576."""
    small: float = 2e-6
    """A small kernel."""
    attention_floor: float = 4e-6
    """Attention and merge together."""
    merge: float = 2e-6
    """Added to attention where it is at a limit of memory or compute."""
    gap: float = 0.0
    """Between two kernels of a graph."""


PAPER = Card()
MEASURED = Card(
    busy_bandwidth_share=0.9,
    gemm_floor=5e-6,
    narrow_gemm_floor=3.5e-6,
    small=1.65e-6,
    attention_floor=4.5e-6,
    merge=1.65e-6,
    gap=0.3e-6,
)
CARDS = {"paper": PAPER, "measured": MEASURED}


def step_bytes(dims: Dims, batch: int, context: int) -> int:
    """Moved from memory at the least: every weight once, all keys and values once."""
    return 2 * dims.weights + dims.kv_bytes * batch * context


def ideal_rate(dims: Dims, batch: int, context: int, card: Card = PAPER) -> float:
    """Tokens a second at full bandwidth and full compute: weights and attention one after the other, no floors."""
    products = max(2 * dims.weights / card.bandwidth, 2 * dims.weights * batch / card.flops)
    operations = 4 * dims.layers * dims.heads * dims.head_dim * batch * context
    attention = max(dims.kv_bytes * batch * context / card.bandwidth, operations / card.flops)
    return batch / (products + attention)


def attainable_step(dims: Dims, batch: int, context: int, card: Card = PAPER) -> float:
    """Seconds of one decode step of `batch` sequences at `context` tokens; the sum in the head of this file."""
    d, h = dims.head_dim, dims.hidden
    rate = card.bandwidth * card.bandwidth_share
    products = (
        _gemm((dims.heads + 2 * dims.kv_heads) * d, h, batch, card)
        + _gemm(h, dims.heads * d, batch, card)
        + _gemm(2 * dims.intermediate, h, batch, card)
        + _gemm(h, dims.intermediate, batch, card)
    )
    layer = products + _attention(dims, batch, context, card) + SMALL * card.small
    sampler = max(14 * batch * dims.vocab / rate, 3 * card.small)
    kernels = dims.layers * (GEMMS + SMALL + ATTENTION) + OTHERS
    head = _gemm(dims.vocab, h, batch, card)
    return dims.layers * layer + head + sampler + 4 * card.small + kernels * card.gap


def attainable_rate(dims: Dims, batch: int, context: int, card: Card = PAPER) -> float:
    """Tokens a second, without a gap for the host.

    >>> round(attainable_rate(QWEN25_15B, 64, 512), -2), round(attainable_rate(SMOLLM2_135M, 64, 512), -3)
    (43800.0, 77000.0)
    """
    return batch / attainable_step(dims, batch, context, card)


def _gemm(n: int, k: int, batch: int, card: Card) -> float:
    floor = card.narrow_gemm_floor if k <= 576 else card.gemm_floor
    weights = 2 * n * k
    return max(
        weights / (card.bandwidth * card.bandwidth_share), weights * batch / (card.flops * card.flops_share), floor
    )


def _attention(dims: Dims, batch: int, context: int, card: Card) -> float:
    tokens = batch * context
    share = card.busy_bandwidth_share if tokens >= card.busy_tokens else card.bandwidth_share
    memory = 4 * tokens * dims.kv_heads * dims.head_dim / (card.bandwidth * share)
    compute = 4 * tokens * dims.heads * dims.head_dim / (card.flops * card.flops_share / 2)
    return max(max(memory, compute) + card.merge, card.attention_floor)
