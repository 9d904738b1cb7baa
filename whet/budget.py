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

from whet.bench.roofline import MEASURED, Card, Dims, attainable_step

HOST = 1.18
"""A decode step by graphs against its kernels' sum (`whet.bench.roofline`) on an H200: the median over all cells of
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

CARDS: dict[str, tuple[float, float]] = {
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
    for known, (bandwidth, flops) in CARDS.items():
        if set(known.split()) <= set(words):
            return replace(MEASURED, bandwidth=bandwidth, flops=flops)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
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


def cost(work: Work, dims: Dims, machine: Machine) -> Cost:
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

    >>> from whet.bench.roofline import QWEN25_15B
    >>> round(1000 * step_seconds(QWEN25_15B, 64, 192, Machine(name="H200", card=MEASURED), graphs=True), 2)
    1.78
    """
    if machine.card is None:
        return dims.layers * CPU_LAYER + 2 * dims.weights * batch / (CPU_RATE * machine.threads)
    seconds = HOST * attainable_step(dims, batch, context, machine.card)
    return seconds if graphs else max(seconds, dims.layers * PLAIN_LAYER)


def forward_seconds(dims: Dims, tokens: float, machine: Machine) -> float:
    """2 operations a weight and token at what the learner reaches; attention's own are left out.

    >>> from whet.bench.roofline import QWEN25_15B
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
    n_init (`whet.probe.spending` has the same sums from measured pass rates). The others train on what they ask.

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


def budget_lines(works: Sequence[Work], dims: Dims, machine: Machine | None, why: str) -> list[str]:
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
