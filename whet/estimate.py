"""What a run will cost, roughly: tokens a step, seconds by part, hours in all; from constants that were measured.

`whet train --dry-run` prints it (`check.dry_run`). Pure arithmetic: a recipe's numbers, a model's sizes and a machine
in, seconds out; no device is asked and nothing is run. Judging, saving and evaluation are left out. Within a factor of
two it is right where it was measured (an H200; one CPU thread), and elsewhere only as good as the scaling by memory
bandwidth and arithmetic that takes it there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

# ---- roofline
#
# How fast a decode step can be on an H200: its kernels summed up, each at its limit of memory, compute or launch.
#
# Pure arithmetic, called by `whet.tools.bench.rollout` for the share of the attainable. For a step of B sequences, one
# token each, at a context of c tokens (bf16, weights [n, k] read once a step):
#
#     gemm(n, k) = max(2nk / (BW e), 2nkB / (F f), t)
#     attention  = max(4 B c Hkv d / (BW e), 4 B c Hq d / (F f / 2), t) + t
#     layer      = gemm((Hq + 2 Hkv) d, h) + gemm(h, Hq d) + gemm(2 I, h) + gemm(h, I) + attention + 5 t
#     step       = L layer + gemm(V, h) + max(14 B V / (BW e), 3 t) + 4 t
#
# that is fused QKV and gate/up, five small kernels a layer, 14 bytes a logit for the sampler (bf16 written, about three
# passes in fp32), and no gap for the host. `PAPER` has the constants first assumed, one floor t for every kernel, and
# is what shares are quoted of; `MEASURED` those found on the card: floors by kind of kernel, and a gap after each.


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


HOST = 1.18
"""A decode step by graphs against its kernels' sum (`whet.estimate`) on an H200: the median over all cells of
benchmarks/results/rollout_gpu.json, which lie between 0.96 (135M, few rows) and 1.36 (135M, 256 rows)."""
PLAIN_LAYER = 2e-3
"""Seconds a layer and step by plain calls on a GPU: the host's launches (135M, 512 slots: 60 ms for 30 layers)."""
PEAK = 0.8
"""Of a card's nominal operations a second, what its largest matrix products reach: 790 of 989 TFLOP/s."""
MFU = ((0.135e9, 0.24), (1.5e9, 0.56))
"""Of that, what the learner reaches, by parameters; between them along their logarithm. Packs of 16k tokens, compiled,
the smaller one replayed as graphs (learner_135m_16384.json, learner_1.5b_16384.json)."""
CPU_LAYER, CPU_RATE = 1e-3, 1e10
"""Seconds a layer and step, and operations a second and thread (tiny model, one thread: 64 rows in 4.8 ms)."""
SIGNAL = 0.5
"""Prompts with right and wrong rollouts, as a share of those asked: a guess, until `whet probe` measures it."""

KNOWN_CARDS: dict[str, tuple[float, float]] = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.0e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "A10": (0.6e12, 125e12),
    "L4": (0.3e12, 121e12),
    "RTX 4090": (1.008e12, 165e12),
    "RTX 3090": (0.936e12, 71e12),
}
"""Words of a card's name -> bytes and bf16 operations a second, by its maker; the first that is found counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    name: str
    card: Card | None = None
    """None is a CPU."""
    threads: int = 1


def card_of(name: str) -> Card | None:
    """As measured on an H200, with another card's bandwidth and arithmetic; None for one that is not known.

    >>> card_of("NVIDIA A100-SXM4-80GB").bandwidth, card_of("Voodoo 2")
    (2000000000000.0, None)
    """
    words = name.replace("-", " ").split()
    for known, (bandwidth, flops) in KNOWN_CARDS.items():
        if set(known.split()) <= set(words):
            return replace(MEASURED, bandwidth=bandwidth, flops=flops)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of one stage."""

    steps: float
    """So many of them."""
    prompts: float
    """Asked: each is read once for all of its rollouts."""
    generated: float
    """Rollouts."""
    trained: float
    prompt: float
    """Tokens, on average."""
    response: float
    limit: int
    """Tokens of the longest response."""
    slots: int
    stream: bool
    graphs: bool
    """Rollouts run by captured graphs (on a GPU)."""
    passes: float
    """Passes over the trained tokens: 3 for forward and backward, 1 more for each other forward."""


@dataclass(frozen=True, slots=True)
class Cost:
    tokens: float
    generate: float
    train: float

    @property
    def seconds(self) -> float:
        return self.generate + self.train


def cost(work: Workload, dims: Dims, machine: Machine) -> Cost:
    """Of one step: tokens generated, seconds of rollouts and of the update."""
    steps = decode_steps(work.generated, work.response, work.limit, work.slots, work.stream)
    batch = max(1, round(work.generated * work.response / steps))
    context = round(work.prompt + work.response / 2)
    generate = steps * step_seconds(dims, batch, context, machine, graphs=work.graphs)
    generate += forward_seconds(dims, work.prompts * work.prompt, machine)
    train = work.passes * forward_seconds(dims, work.trained * (work.prompt + work.response), machine)
    return Cost(work.generated * work.response, generate, train)


def decode_steps(rollouts: float, response: float, limit: int, slots: int, stream: bool) -> float:
    """Token by token: the full batch, and under barrier the tail in which the longest responses are waited for.

    >>> decode_steps(512, 100, 256, 64, stream=True), decode_steps(512, 100, 256, 64, stream=False)
    (800.0, 956.0)
    >>> decode_steps(32, 100, 256, 64, stream=False)
    256.0
    """
    full = rollouts * response / min(slots, rollouts)
    return full if stream else max(float(limit), full + limit - response)


def step_seconds(dims: Dims, batch: int, context: int, machine: Machine, *, graphs: bool) -> float:
    """Of one decode step.

    >>> from whet.estimate import QWEN25_15B
    >>> round(1000 * step_seconds(QWEN25_15B, 64, 192, Machine(name="H200", card=MEASURED), graphs=True), 2)
    1.78
    """
    if machine.card is None:
        return dims.layers * CPU_LAYER + 2 * dims.weights * batch / (CPU_RATE * machine.threads)
    seconds = HOST * attainable_step(dims, batch, context, machine.card)
    return seconds if graphs else max(seconds, dims.layers * PLAIN_LAYER)


def forward_seconds(dims: Dims, tokens: float, machine: Machine) -> float:
    """2 operations a weight and token at what the learner reaches; attention's own are left out.

    >>> from whet.estimate import QWEN25_15B
    >>> round(3 * forward_seconds(QWEN25_15B, 16384, Machine(name="H200", card=MEASURED)), 2)
    0.34
    """
    operations = 2 * dims.weights * tokens
    if machine.card is None:
        return operations / (CPU_RATE * machine.threads)
    return operations / (machine.card.flops * PEAK * learner_mfu(dims.weights))


def learner_mfu(parameters: float) -> float:
    """
    >>> learner_mfu(0.135e9), learner_mfu(7e9), round(learner_mfu(0.45e9), 2)
    (0.24, 0.56, 0.4)
    """
    (small, low), (large, high) = MFU
    place = (math.log(parameters) - math.log(small)) / (math.log(large) - math.log(small))
    return low + (high - low) * min(1.0, max(0.0, place))


def rollouts_asked(name: str, rollouts: int, n_init: int) -> float:
    """Rollouts generated for each group that is trained, if `SIGNAL` of the prompts have signal.

    dapo throws the other groups away: N / s. speed screens all with n_init and goes on with the rest: n_init / s + N -
    n_init (`whet.tools.forecast` has the same sums from measured pass rates). The others train on what they ask.

    >>> [rollouts_asked(name, 16, 4) for name in ("uniform", "dapo", "speed", "all")]
    [16.0, 32.0, 20.0, 20.0]
    """
    if name == "dapo":
        return rollouts / SIGNAL
    return n_init / SIGNAL + rollouts - n_init if name in ("speed", "all") else float(rollouts)


def stage_steps(total: int, limits: Sequence[int]) -> list[float]:
    """How a run's steps divide over its stages: as they say, else evenly; the last stage takes what is left.

    >>> stage_steps(100, [30, 0, 0]), stage_steps(100, [80, 80]), stage_steps(100, [10, 10])
    ([30.0, 35.0, 35.0], [80.0, 20.0], [10.0, 90.0])
    """
    left, out = float(total), []
    free = sum(limit == 0 for limit in limits[:-1]) + 1
    fixed = sum(limits[:-1])
    for limit in limits[:-1]:
        taken = min(left, float(limit) if limit else max(0.0, total - fixed) / free)
        out.append(taken)
        left -= taken
    return [*out, left]


def budget_lines(works: Sequence[Workload], dims: Dims, machine: Machine | None, why: str) -> list[str]:
    """Of all stages. `machine` is None where the card is not known; `why`: where the response length is from."""
    several = len(works) > 1
    lines = []
    hours = 0.0
    for number, work in enumerate(works, 1):
        tokens = work.generated * work.response
        words = f"{work.generated:,.0f} rollouts of {work.response:,.0f} tokens ({why}) are {tokens:,.0f} tokens a step"
        if machine is not None:
            spent = cost(work, dims, machine)
            hours += work.steps * spent.seconds / 3600
            words += f"; {_time(spent.seconds)} a step: generate {_time(spent.generate)}, train {_time(spent.train)}"
        lines.append(f"rough: stage {number}, {work.steps:.0f} steps: {words}" if several else f"rough: {words}")
    if machine is not None:
        steps = sum(work.steps for work in works)
        lines.append(f"rough: {steps:.0f} steps on {machine.name} take {_time(3600 * hours)}, without evaluation")
    return lines


def _time(seconds: float) -> str:
    """
    >>> [_time(s) for s in (0.0123, 4.2, 300, 36_000)]
    ['0.012 s', '4.2 s', '5 min', '10 h']
    """
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"
