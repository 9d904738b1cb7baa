"""What a run will cost, roughly: tokens per step, seconds by part, hours in all; from constants that were measured.

`resolve` calls `estimate_lines` for the dry run and `whet doctor`; `whet bench rollout` calls `attainable_step` for
its share of the attainable. Everything here is arithmetic, and no device is queried. Judging, saving and evaluation are
left out. The estimate is right within a factor of two where it was measured (an H200; one CPU thread), and elsewhere as
good as its scaling by memory bandwidth and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from whet import config
from whet.curriculum.build import measures_stages
from whet.curriculum.measured import ENOUGH

if TYPE_CHECKING:
    from whet.model.memory import ModelShape
    from whet.problems import Problems

# ---- how fast one decode step can be
#
# The kernels of a step summed up, each at its limit of memory, compute or launch. For B sequences, one token each, at
# a context of c tokens (bf16, weights [n, k] read once per step):
#
#     gemm(n, k) = max(2nk / (BW e), 2nkB / (F f), t)
#     attention  = max(4 B c Hkv d / (BW e), 4 B c Hq d / (F f / 2), t) + t
#     layer      = gemm((Hq + 2 Hkv) d, h) + gemm(h, Hq d) + gemm(2 I, h) + gemm(h, I) + attention + 5 t
#     step       = L layer + gemm(V, h) + max(14 B V / (BW e), 3 t) + 4 t
#
# with fused QKV and gate/up, five small kernels per layer, 14 bytes per logit for the sampler (bf16 written, about
# three passes in fp32), and no gap for the host. Shares of the attainable are quoted of `PAPER`, the constants first
# assumed, with one floor t for every kernel; `MEASURED` has floors by kind of kernel and a gap after each.

# kernels per layer: products; norms, RoPE with KV write, SiLU; attention and merge
GEMMS, SMALL, ATTENTION = 4, 5, 2
# kernels per step outside of the layers: the head, three of the sampler, four small ones
OTHERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The sizes of a model that decide the bytes and operations of a step."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def weights(self) -> int:
        """Weights read in a step: the head once, of the embedding next to nothing."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return (
            self.layers * (attention + 3 * self.hidden * self.intermediate)
            + self.hidden * self.vocab
        )


def dims_of(shape: ModelShape) -> Dims:
    """The sizes as `whet.model.memory` measures them on a network of any family."""
    size = shape.query // shape.heads
    return Dims(
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.inner,
        heads=shape.heads,
        kv_heads=max(1, shape.cached // (2 * shape.layers * size)),
        head_dim=size,
        vocab=shape.vocab,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU in seconds, bytes per second and operations per second; the defaults are those of the sum above."""

    bandwidth: float = 4.8e12
    bandwidth_share: float = 0.8
    busy_bandwidth_share: float = 0.8  # reached by attention once it reads `busy_tokens` or more
    busy_tokens: int = 256 * 1024
    flops: float = 989e12
    flops_share: float = 0.65
    gemm_floor: float = 2e-6
    narrow_gemm_floor: float = 2e-6  # where k <= 576
    small: float = 2e-6  # one small kernel
    attention_floor: float = 4e-6  # attention and merge together
    merge: float = 2e-6  # added to attention where it is at a limit of memory or compute
    gap: float = 0.0  # between two kernels of a graph


PAPER = Gpu()
MEASURED = Gpu(
    busy_bandwidth_share=0.9,
    gemm_floor=5e-6,
    narrow_gemm_floor=3.5e-6,
    small=1.65e-6,
    attention_floor=4.5e-6,
    merge=1.65e-6,
    gap=0.3e-6,
)


def attainable_step(dims: Dims, batch: int, context: int, gpu: Gpu = PAPER) -> float:
    """The sum above: seconds of a decode step of `batch` sequences at `context` tokens, without a gap for the host."""
    d = dims.head_dim
    h = dims.hidden
    tokens = batch * context
    kernels = GEMMS + SMALL + ATTENTION
    rate = gpu.bandwidth * gpu.bandwidth_share
    operations = gpu.flops * gpu.flops_share

    def gemm(n: int, k: int) -> float:
        floor = gpu.narrow_gemm_floor if k <= 576 else gpu.gemm_floor
        return max(2 * n * k / rate, 2 * n * k * batch / operations, floor)

    projections = gemm((dims.heads + 2 * dims.kv_heads) * d, h) + gemm(h, dims.heads * d)
    products = projections + gemm(2 * dims.intermediate, h) + gemm(h, dims.intermediate)
    share = gpu.busy_bandwidth_share if tokens >= gpu.busy_tokens else gpu.bandwidth_share
    memory = 4 * tokens * dims.kv_heads * d / (gpu.bandwidth * share)
    compute = 4 * tokens * dims.heads * d / (operations / 2)
    attention = max(max(memory, compute) + gpu.merge, gpu.attention_floor)
    layer = products + attention + SMALL * gpu.small
    sampler = max(14 * batch * dims.vocab / rate, 3 * gpu.small)
    gaps = (dims.layers * kernels + OTHERS) * gpu.gap
    return dims.layers * layer + gemm(dims.vocab, h) + sampler + 4 * gpu.small + gaps


# A decode step by graphs against its kernels' sum on an H200: the median over all cells of
# benchmarks/results/rollout_gpu.json, which lie between 0.96 (135M, few rows) and 1.36 (135M, 256 rows).
HOST = 1.18
# seconds per layer and step by plain calls on a GPU: the host's launches (135M: 60 ms, 30 layers)
PLAIN_LAYER = 2e-3
# share of a GPU's nominal operations that its largest matrix products reach: 790 of 989 TFLOP/s
PEAK = 0.8
# The share of that which the learner reaches, by parameters; between them along their logarithm. Packs of 16k tokens,
# compiled, the smaller model replayed as graphs (learner_135m_16384.json, learner_1.5b_16384.json).
MFU = ((0.135e9, 0.24), (1.5e9, 0.56))
CPU_LAYER = 1e-3  # seconds per layer and step on a CPU (tiny model, one thread: 64 rows in 4.8 ms)
CPU_RATE = 1e10  # operations per second and thread
# share of prompts with right and wrong rollouts: a guess, until `whet probe` measures it
SIGNAL = 0.5

KNOWN_GPUS: dict[str, tuple[float, float]] = {
    # words of a GPU's name -> bytes and bf16 operations per second, by its maker; the first that is found counts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a run takes place: threads of a CPU, or a GPU. `whet` does not know the speed of one that has neither."""

    name: str
    gpu: Gpu | None = None
    threads: int = 0


def gpu_of(name: str) -> Gpu | None:
    """The constants measured on an H200, with another GPU's bandwidth and arithmetic; None for one that is not known.

    >>> gpu_of("NVIDIA A100-SXM4-80GB").bandwidth, gpu_of("Voodoo 2")
    (2000000000000.0, None)
    """
    words = set(name.replace("-", " ").split())
    found = next(
        (speeds for known, speeds in KNOWN_GPUS.items() if words.issuperset(known.split())), None
    )
    return replace(MEASURED, bandwidth=found[0], flops=found[1]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of one stage. Lengths are in tokens, on average."""

    steps: float  # steps of this stage
    prompts: float  # prompts asked, each read once for all of its rollouts
    generated: float  # rollouts generated
    trained: float  # rollouts trained on
    prompt: float
    response: float
    limit: int  # tokens of the longest response
    rollout: config.RolloutSettings
    # passes over the trained tokens: 3 for forward and backward, 1 more for each other forward
    passes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """One [[warm_start]] entry."""

    updates: int
    batch: int  # worked solutions of an update
    tokens: float  # of a worked solution with its prompt, on average

    def seconds(self, dims: Dims, machine: Machine) -> float:
        passes = 3  # forward and backward
        return self.updates * passes * forward_seconds(dims, self.batch * self.tokens, machine)


def cost(work: Workload, dims: Dims, machine: Machine) -> tuple[float, float]:
    """Seconds of one step: to generate its rollouts, and to train on them."""
    steps = decode_steps(
        work.generated, work.response, work.limit, work.rollout.slots, work.rollout.mode == "stream"
    )
    batch = max(1, round(work.generated * work.response / steps))
    context = round(work.prompt + work.response / 2)
    generate = steps * step_seconds(dims, batch, context, machine, graphs=work.rollout.graphs)
    generate += forward_seconds(dims, work.prompts * work.prompt, machine)
    return generate, work.passes * forward_seconds(
        dims, work.trained * (work.prompt + work.response), machine
    )


def decode_steps(rollouts: float, response: float, limit: int, slots: int, stream: bool) -> float:
    """Decode steps: those of the full batch, and under barrier the tail in which the longest responses finish.

    >>> decode_steps(512, 100, 256, 64, stream=True), decode_steps(512, 100, 256, 64, stream=False)
    (800.0, 956.0)
    >>> decode_steps(32, 100, 256, 64, stream=False)
    256.0
    """
    full = rollouts * response / min(slots, rollouts)
    return full if stream else max(float(limit), full + limit - response)


def step_seconds(dims: Dims, batch: int, context: int, machine: Machine, *, graphs: bool) -> float:
    """Seconds of one decode step."""
    if machine.gpu is None:
        return dims.layers * CPU_LAYER + 2 * dims.weights * batch / (CPU_RATE * machine.threads)
    seconds = HOST * attainable_step(dims, batch, context, machine.gpu)
    return seconds if graphs else max(seconds, dims.layers * PLAIN_LAYER)


def forward_seconds(dims: Dims, tokens: float, machine: Machine) -> float:
    """Seconds of 2 operations per weight and token at the learner's rate; attention's own are left out."""
    operations = 2 * dims.weights * tokens
    if machine.gpu is None:
        return operations / (CPU_RATE * machine.threads)
    sizes, shares = zip(*MFU, strict=True)
    # constant beyond the two ends
    mfu = float(np.interp(math.log(dims.weights), np.log(sizes), shares))
    return operations / (machine.gpu.flops * PEAK * mfu)


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
    """The steps of each stage: as its limit says, else evenly; the last stage takes what is left.

    >>> stage_steps(100, [30, 0, 0]), stage_steps(100, [80, 80]), stage_steps(100, [10, 10])
    ([30.0, 35.0, 35.0], [80.0, 20.0], [10.0, 90.0])
    """
    *early, _ = limits
    even = max(0.0, total - sum(early)) / (early.count(0) + 1)
    ends = np.minimum(np.cumsum([limit or even for limit in early]), total)
    return np.diff([0.0, *ends, total]).tolist()


def workloads(
    settings: config.Config, problems: Problems, prompt: float, response: float | None
) -> list[Workload]:
    """A step of each stage."""
    r = settings.rollout
    learn = settings.learn
    c = settings.curriculum
    stages = c.stages or (config.Stage(),)
    works = []
    for stage, steps in zip(
        stages, stage_steps(settings.steps, [s.steps for s in stages]), strict=True
    ):
        groups = stage.groups or c.groups
        rollouts = stage.rollouts or c.rollouts
        limit = stage.max_tokens or r.max_tokens
        # scored under the policy before them all
        again = learn.updates * (stage.minibatches or learn.minibatches) > 1
        passes = (
            learn.updates * (4 if learn.checkpoint_activations else 3) + again + (learn.kl_coef > 0)
        )
        generated = groups * rollouts_asked(c.name, rollouts, c.speed.n_init)
        works.append(
            Workload(
                steps=steps,
                prompts=generated / rollouts,
                generated=generated,
                trained=groups * rollouts,
                prompt=prompt,
                response=min(limit, response) if response else limit / 2,
                limit=limit,
                rollout=r,
                passes=passes,
            )
        )
    return works


def budget_lines(settings: config.Config) -> list[str]:
    """What a step trains on at most, and the stages of the curriculum."""
    c = settings.curriculum
    r = settings.rollout
    tokens = c.groups * c.rollouts * r.max_tokens
    lines = [
        f"{counted(settings.steps, 'step')} of {counted(c.groups, 'group')} x {c.rollouts:,} rollouts ({c.name}), "
        f"at most {tokens:,} tokens trained per step"
    ]
    if measures_stages(c):
        sentence = f"begins when {ENOUGH} right responses speak for it"
        lines.append(f"a stage of short prompts under a shorter limit {sentence}")
    for number, stage in enumerate(c.stages, 1):
        lines.append(
            f"stage {number}: {stage.subset} prompts, {stage.groups or c.groups} x {stage.rollouts or c.rollouts} "
            f"rollouts of at most {stage.max_tokens or r.max_tokens:,} tokens"
        )
    return lines


def estimate_lines(
    works: Sequence[Workload],
    dims: Dims,
    machine: Machine,
    known: bool,
    imitations: Sequence[Imitation] = (),
) -> list[str]:
    """Tokens and seconds of a step of each stage, and the hours of the run; `known` responses were measured."""
    several = len(works) > 1
    source = "as in that run" if known else "half of the limit"
    timed = machine.gpu is not None or machine.threads > 0
    lines = []
    seconds = 0.0
    warm = 0.0
    for entry in imitations:
        words = (
            f"warm start: {counted(entry.updates, 'update')} of {entry.batch:,} worked solutions"
        )
        words += f" of {entry.tokens:,.0f} tokens"
        if timed:
            took = entry.seconds(dims, machine)
            warm += took
            words += f": {_time(took)}"
        lines.append(words)
    for number, work in enumerate(works, 1):
        tokens = f"{work.generated * work.response:,.0f} tokens per step"
        words = (
            f"{work.generated:,.0f} rollouts of {work.response:,.0f} tokens ({source}) are {tokens}"
        )
        if work.generated > work.trained:
            without = f"{1 - SIGNAL:.0%} of the prompts are taken to have no signal"
            words += f", of which {work.trained:,.0f} train: {without}"
        if timed:
            generate, train = cost(work, dims, machine)
            seconds += work.steps * (generate + train)
            words += f"; {_time(generate + train)} per step: generate {_time(generate)}, train {_time(train)}"
        lines.append(
            f"stage {number}, {counted(work.steps, 'step')}: {words}" if several else words
        )
    steps = counted(sum(work.steps for work in works), "step")
    total = f"{steps} on {machine.name}: {_time(seconds)}"
    total += f", with the warm start {_time(warm + seconds)}" if imitations else ""
    total += ", without evaluation"
    unknown = f"no estimate of the time, since whet does not know how fast {machine.name} is"
    return [*lines, total if timed else unknown]


def counted(number: float, noun: str) -> str:
    """
    >>> counted(1, "step"), counted(20_000, "step")
    ('1 step', '20,000 steps')
    """
    return f"{number:,.0f} {noun}{'' if round(number) == 1 else 's'}"


def _time(seconds: float) -> str:
    """
    >>> [_time(s) for s in (0.0123, 4.2, 300, 36_000, 750_000)]
    ['0.012 s', '4.2 s', '5 min', '10 h', '208 h']
    """
    unit, size = ("s", 1) if seconds < 100 else ("min", 60) if seconds < 5400 else ("h", 3600)
    return (
        f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    )
