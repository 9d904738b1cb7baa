"""The memory that a training needs, counted from the network's shape and the recipe before any weight is loaded.

`whet doctor` and the start of a run call `size_up`, whose `Footprint` plans the memory (bytes by kind), lays the plan
out within the memory of a GPU and names the settings that would make it fit. Weights, masters, moments and the KV cache
are exact; graphs, activations, logits and decoding are estimates, by the formula beside them. Nothing here queries a
device except `size_up` and `free_memory`.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from whet import config
from whet.errors import WhetError
from whet.model.head import CHUNK
from whet.model.lora import is_peft_folder, read_adapter
from whet.model.packing import has_flash
from whet.model.twin import GRAPHED, PAGE, PREFILL, kv_shapes

CONTEXT = 4096  # tokens of prompt and response together, where neither recipe nor data says it
SPARE = 0.1  # share of the free memory that is left to the allocator and other programs
# tokens whose hidden states a drafter keeps to learn from: 600 MB at 1,536 numbers in bfloat16
BUFFER = 200_000
RANK = 16  # rank of the adapters that are proposed where a full training does not fit

# (what was looked at, what was found, whether whet can work with it)
Finding = tuple[str, str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a network that determine its memory, in elements."""

    parameters: int  # a tied weight counts once
    # inputs + outputs, summed over the linear layers that LoRA would adapt: parameters per rank
    adapted: int
    layers: int
    hidden: int
    inner: int  # width of the feed-forward layers
    heads: int
    query: int  # width of the queries of a layer, all heads together
    # keys and values that a token leaves in the cache, all layers together, those with a window too
    cached: int
    vocab: int
    # attention scores are soft-capped; there is no flash kernel for that, so scores are kept
    softcap: bool
    flash: bool  # the flash kernel has this attention: not soft-capped, heads of 8, 16, ... 256
    ends: int = 0  # of the parameters, those outside the layers: embedding, last norm, head


def measure(model: Any, targets: tuple[str, ...] = ()) -> ModelShape:
    """The shape of a Hugging Face causal model, best on the meta device. `targets` is model.lora.targets."""
    settings = model.config
    kv = kv_shapes(model)
    head = model.get_output_embeddings()
    heads = settings.num_attention_heads
    softcap = getattr(settings, "attn_logit_softcapping", None) is not None
    linear = [
        (f".{name}", m)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m is not head
    ]
    inside = {
        p
        for m in model.modules()
        if isinstance(m, GradientCheckpointingLayer)
        for p in m.parameters()
    }
    adapted = [
        m
        for name, m in linear
        if not targets or any(name.endswith(f".{target}") for target in targets)
    ]
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        adapted=sum(sum(layer.weight.shape) for layer in adapted),
        layers=len(kv),
        hidden=settings.hidden_size,
        inner=inner_width(settings),
        heads=heads,
        query=heads * kv[0].key_dim,
        cached=sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in kv),
        vocab=head.weight.shape[0],
        softcap=softcap,
        flash=not softcap
        and all(s.key_dim == s.value_dim <= 256 and s.key_dim % 8 == 0 for s in kv),
        ends=sum(p.numel() for p in model.parameters() if p not in inside),
    )


def inner_width(settings: Any) -> int:
    """Numbers per token inside a feed-forward layer; with experts, those of all experts that a token is sent to.

    >>> from types import SimpleNamespace as Settings
    >>> inner_width(Settings(hidden_size=8)), inner_width(Settings(hidden_size=8, intermediate_size=20))
    (32, 20)
    >>> inner_width(Settings(intermediate_size=20, num_experts_per_tok=2, moe_intermediate_size=6, n_shared_experts=1))
    18
    """

    def get(name: str) -> int:
        return getattr(settings, name, None) or 0

    width = get("intermediate_size") or get("ffn_dim") or 4 * get("hidden_size")
    if chosen := get("num_experts_per_tok"):
        own = get("moe_intermediate_size") or width
        return own * (chosen + get("n_shared_experts")) + get("shared_expert_intermediate_size")
    return width


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by kind. Rollouts and updates take turns, so only the larger of their own needs counts."""

    weights: int
    masters: int
    moments: int
    reference: int
    cache: int
    graphs: int = 0
    replays: int = 0  # the graphs of the learner keep the activations of a pack, and gradients
    drafter: int = 0
    gradients: int
    activations: int
    logits: int
    decoding: int

    @property
    def resident(self) -> int:
        return sum(astuple(self)) - self.learning - self.decoding

    @property
    def learning(self) -> int:
        return self.gradients + self.activations + self.logits

    @property
    def total(self) -> int:
        return self.resident + max(self.learning, self.decoding)

    @property
    def lent(self) -> int:
        """The total where the memory of the cache is lent to the learner during its step."""
        return self.resident - self.cache + max(self.learning, self.cache + self.decoding)

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of everything that exists at the peak, largest first."""
        left_out = (
            {"decoding"}
            if self.learning >= self.decoding
            else {"gradients", "activations", "logits"}
        )
        sizes = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in left_out]
        return sorted(((name, size) for name, size in sizes if size), key=lambda item: -item[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How a plan is laid out on one device."""

    plan: MemoryPlan  # with the cache as it will be
    # size of the pool, as in rollout.pages: fewer than in the recipe where those do not fit
    pages: int
    release: bool  # the memory of the cache is lent to the learner during its step
    # bytes that were free for it; the plan needs more where nothing helped
    within: int | None = None

    @property
    def total(self) -> int:
        return self.plan.lent if self.release else self.plan.total


def host_bound(parameters: int, layers: int, tokens: int) -> bool:
    """Whether the GPU would wait for the host in the forward and backward pass of a full pack.

    Work of 6 N T / 3e14 FLOP/s, the speed of a large GPU on small matrices, against 4 ms of launches per layer. 16,384
    tokens through 135M parameters in 30 layers: 44 ms of work, 120 ms of launches. Through 1.5B in 28: 505 ms of work,
    112 ms of launches, and graphs would hold 50 GiB of activations all the time.
    """
    return 6 * parameters * tokens / 3e14 < 4e-3 * layers


def pool_of(rollout: config.RolloutSettings) -> tuple[int, int]:
    """(pages of the pool, without the one that padding is written to; tokens per page)."""
    page = rollout.page or (PAGE if rollout.graphs else rollout.context)
    small = rollout.page or rollout.graphs
    return (rollout.pages if small else 0) or rollout.slots * -(-rollout.context // page), page


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a training takes of one device. `whet doctor`, the dry run and the start of a run all read this one."""

    shape: ModelShape
    # with rollout.context set, and rollout.graphs only where graphs can run
    settings: config.Config
    device: torch.device
    flash: bool  # whether updates run on the flash kernel, see `whet.model.packing`
    processes: int = 1  # that train together, with a device each
    role: str = "both"  # "worker": nothing is trained there; "learner": nothing is decoded there

    @property
    def shares(self) -> int:
        """Parts in which masters and moments are divided."""
        return self.processes if self.settings.learn.shard != "none" else 1

    @property
    def full(self) -> bool:
        """Gradients and the learner's weights are divided, too, and the engine has weights of its own."""
        return self.settings.learn.shard == "full"

    @property
    def size(self) -> int:
        """Bytes per weight."""
        return getattr(torch, self.settings.model.dtype).itemsize

    @property
    def cached(self) -> int:
        """Bytes that a token leaves in the cache; an EAGLE drafter adds the hidden state and one layer of its own."""
        shape = self.shape
        eagle = "eagle" in self.settings.draft.drafters
        return (
            shape.cached + (shape.hidden + 1 + shape.cached // shape.layers if eagle else 0)
        ) * self.size

    @property
    def pack_tokens(self) -> int:
        """Tokens of the largest micro-batch: a sequence longer than learn.pack_tokens stands alone."""
        return max(self.settings.learn.pack_tokens, self.settings.rollout.context)

    def plan(self) -> MemoryPlan:
        """The bytes of everything, on a device without limit.

        With N parameters of which n are trained (all of them, or adapters), b bytes per weight and w bytes per master
        (4; 8 for float64): weights N b; masters n w for bf16 only; moments 2 n w; gradients n w, and n b more for bf16,
        whose gradients are widened after each pack; a reference, under KL, n b.

        A full bf16 training: 2 + 4 + 8 + 6 = 20 bytes per parameter, an fp32 one 4 + 8 + 4 = 16. With learn.shard =
        "optimizer" each of P processes has 1/P of masters and moments. With "full" it has all weights for its engine,
        and 1/P of masters (of every type), moments, gradients (n w), frozen weights and the reference (all N b); beside
        them, what is whole for a moment, see `gathered`.
        """
        shape = self.shape
        size = self.size
        learn = self.settings.learn
        rollout = self.settings.rollout
        wide = max(4, size)
        half = size < 4
        adapters = self.settings.model.lora.rank * shape.adapted
        trained = adapters or shape.parameters
        pages, page = pool_of(rollout)
        activations = self.activations()
        captured = self.flash and half and learn.compile and not learn.checkpoint_activations
        captured = (
            captured
            and not self.full
            and host_bound(shape.parameters, shape.layers, learn.pack_tokens)
        )
        graphs = drafter = 0
        if rollout.graphs:
            # One pool for all graphs, an estimate: 18 bytes per logit of the largest batch (measured: 226 MiB for
            # 256 x 49,152, 686 MiB for 256 x 151,936), or what the most prompt tokens in a graph take, if more.
            prompts = min(GRAPHED, rollout.slots * rollout.context)
            graphs = max(18 * rollout.slots * shape.vocab, self.decoding(rollout.slots, prompts))
        if "eagle" in self.settings.draft.drafters:
            # One layer and the map into it, in use (b bytes) and with the trainer in fp32 (weights, two moments, a
            # gradient); and the hidden states that the drafter learns from. vLLM's does not learn.
            h = shape.hidden
            kv = shape.cached // shape.layers
            learns = rollout.engine == "native"
            drafter = 2 * h * h + 2 * h * shape.query + h * kv + 3 * h * shape.inner
            drafter = drafter * (size + 16 * learns) + learns * BUFFER * h * size
        weights = (shape.parameters + adapters) * size
        reference = trained * size
        gradients = trained * (wide + size if half else wide)
        if self.full:
            reference = weights // self.shares
            gradients = trained * wide // self.shares + self.gathered()
        plan = MemoryPlan(
            weights=weights * (2 if self.settings.rollout.engine == "vllm" else 1)
            + (shape.parameters * size // self.shares if self.full and adapters else 0),
            masters=trained * wide // self.shares if half or self.full else 0,
            moments=2 * trained * wide // self.shares,
            reference=reference if learn.kl_coef else 0,
            cache=(pages + 1) * page * self.cached,  # one page is for padding
            graphs=graphs,
            replays=activations + 2 * trained * size if captured else 0,
            drafter=drafter,
            gradients=gradients,
            activations=activations,
            # Four wide copies of the logits of a chunk: logits, log-probs, probabilities, their product.
            logits=4 * min(self.pack_tokens, max(1, CHUNK // shape.vocab)) * shape.vocab * wide,
            decoding=self.decoding(rollout.slots, PREFILL),
        )
        if self.role == "worker":
            return replace(
                plan,
                masters=0,
                moments=0,
                reference=0,
                replays=0,
                gradients=0,
                activations=0,
                logits=0,
            )
        if self.role == "learner":  # what is trained lies there twice: workers get it from the copy
            return replace(
                plan,
                weights=plan.weights + trained * size,
                cache=0,
                graphs=0,
                drafter=0,
                decoding=0,
            )
        return plan

    def gathered(self) -> int:
        """An estimate of what is whole on a GPU during a pass with learn.shard = "full": the weights outside the layers
        and those of two layers, one of which is gathered ahead; and, without adapters, the gradients of the former and
        of a layer, as they come and widened to be summed."""
        shape = self.shape
        size = self.size
        layer = (shape.parameters - shape.ends) // shape.layers
        slopes = (
            0 if self.settings.model.lora.rank else (shape.ends + layer) * (size + max(4, size))
        )
        return (shape.ends + 2 * layer) * size + slopes

    def activations(self) -> int:
        """An estimate of what a pack keeps for its backward pass, for a network like Llama.

        A layer keeps, per token: two norms of (input in fp32, normed, scaled) h each; q, k, v and the result of
        attention (flash), or five times the width of the queries where k and v are repeated for every head and padded;
        and four times the inner width. Soft-capped scores add 8 bytes x heads x context (tanh, softmax, narrow copies).
        With checkpoint_activations the layers keep only their input, and one layer at a time keeps all of this.
        """
        shape = self.shape
        size = self.size
        wide = max(4, size)
        norms = 2 * shape.hidden * (wide + 2 * size)
        attention = (
            2 * shape.query + shape.cached // shape.layers if self.flash else 5 * shape.query
        ) * size
        scores = 2 * shape.heads * self.settings.rollout.context * wide if shape.softcap else 0
        layer = norms + attention + scores + 4 * shape.inner * size
        again = self.settings.learn.checkpoint_activations
        return self.pack_tokens * (
            shape.layers * shape.hidden * size + layer if again else shape.layers * layer
        )

    def decoding(self, slots: int, wave: int) -> int:
        """An estimate. Graphs: the tensors of one layer for the prompts of one prefill, `wave` tokens. Plain calls:
        keys and values of one layer in fp32, the scores twice, six fp32 copies of the logits (noise)."""
        shape = self.shape
        rollout = self.settings.rollout
        if rollout.graphs:
            return wave * self.size * (4 * shape.hidden + 2 * shape.query + 3 * shape.inner)
        attention = rollout.context * (shape.cached // shape.layers + 2 * shape.heads)
        return slots * max(4, self.size) * (attention + 6 * shape.vocab)

    # ---- fitting the plan into a GPU

    def lay_out(self, within: int | None) -> Room:
        """The plan within so many bytes of a GPU, by the first of these that fits (a resident cache costs no time):

        everything at once; the same without graphs of the learner; the cache lent to the learner, unless rollouts may
        continue over an update (`keep`); a pool with fewer pages, as many as fit, at least one context. Whole slots
        cannot become fewer and stay as they are. On a CPU, or where no limit is known, the plan stays as it is.
        """
        whole = self.plan()
        r = self.settings.rollout
        lendable = not self.settings.runs_on
        if within is None or self.device.type != "cuda":
            return Room(plan=whole, pages=r.pages, release=False)
        if whole.total > within:
            whole = replace(whole, replays=0)
        fits = whole.total <= within
        if fits or not (r.page or r.graphs) or (lendable and whole.lent <= within):
            return Room(plan=whole, pages=r.pages, release=lendable and not fits, within=within)
        most, page = pool_of(r)
        beside = whole.decoding if lendable else max(whole.decoding, whole.learning)
        fitting = (within - (whole.resident - whole.cache) - beside) // (page * self.cached) - 1
        pages = max(-(-r.context // page), min(fitting, most))
        fewer = replace(whole, cache=(pages + 1) * page * self.cached)
        return Room(
            plan=fewer, pages=pages, release=lendable and fewer.total > within, within=within
        )

    def least(self) -> int:
        """Bytes that a run needs even after everything that becomes smaller on a full GPU has done so. One sequence per
        pack and no graphs of the learner; a pool of one context, lent if it may be (whole slots keep their number); and
        prompts fed one by one."""
        r = self.settings.rollout
        pooled = r.page or r.graphs
        one = _change(self.settings, "learn.pack_tokens", 1)
        if pooled:
            one = _change(one, "rollout.pages", -(-r.context // pool_of(r)[1]))
        decoding = self.decoding(1 if pooled else r.slots, min(PREFILL, r.context))
        bare = replace(replace(self, settings=one).plan(), replays=0, decoding=decoding)
        return bare.total if self.settings.runs_on else bare.lent

    def ways_to_fit(self, within: int) -> list[tuple[str, int]]:
        """(setting, bytes of the plan with it): first those that suffice alone, least costly first, else by effect."""

        def halves(value: int, least: int) -> list[int]:
            return [value >> n for n in range(1, value.bit_length()) if value >> n >= least]

        s = self.settings
        before = self.lay_out(within).total
        shards = ["none", "optimizer", "full"][: 2 if s.rollout.engine == "vllm" else 3]
        choices: list[tuple[str, list[Any]]] = [
            (
                "learn.shard",
                shards[shards.index(s.learn.shard) + 1 :] if self.processes > 1 else [],
            ),
            ("learn.pack_tokens", halves(s.learn.pack_tokens, max(16, s.rollout.context))),
            ("rollout.slots", halves(s.rollout.slots, 1)),
            ("learn.checkpoint_activations", [True]),
            ("model.dtype", ["bfloat16"]),
            ("model.lora.rank", [] if s.model.lora.rank else [RANK]),
            ("rollout.context", halves(s.rollout.context, s.rollout.max_tokens + 1)),
        ]
        found: list[tuple[str, int]] = []
        for path, values in choices:
            changed = [
                replace(self, settings=_change(s, path, value)).lay_out(within) for value in values
            ]
            ways = [
                (f"{path} = {json.dumps(v)}", room.total)
                for v, room in zip(values, changed, strict=True)
            ]
            found += [way for way in ways if way[1] <= within][:1] or ways[-1:]
        found = [way for way in found if way[1] < before]
        return [way for way in found if way[1] <= within] or sorted(found, key=lambda way: way[1])

    # ---- in words

    def path(self) -> str:
        """How updates attend, and why not faster."""
        if self.flash:
            return "fast path: updates run on flash attention over packed sequences"
        dtype = self.settings.model.dtype
        whys = (
            (
                self.device.type == "cpu",
                "on a CPU, good for small models and for trying things out",
            ),
            (
                self.shape.softcap,
                "soft-capped attention has no flash kernel: sequences are padded, their scores kept",
            ),
            (
                not self.shape.flash,
                "the flash kernel does not take heads of this size, so sequences are padded",
            ),
            (
                dtype != "bfloat16",
                f'sequences are padded in {dtype}; the fast path takes model.dtype = "bfloat16"',
            ),
            (
                True,
                "this GPU is older than the flash kernel (compute capability 8.0), so sequences are padded",
            ),
        )
        return "slow path: " + next(why for holds, why in whys if holds)

    def findings(self, free: int | None) -> list[Finding]:
        """The memory, and whether it fits into `free` bytes; None where that is not known."""
        within = None if free is None else int(free * (1 - SPARE))
        room = self.lay_out(within)
        lines: list[Finding] = [("memory", line, True) for line in self.memory_lines(room)]
        if free is None or within is None:
            return [
                *lines,
                ("fits", "unknown: this system does not say how much memory is free", True),
            ]
        if room.total <= within:
            return [
                *lines,
                ("fits", f"yes: {bytes_text(room.total)} of {bytes_text(free)} free", True),
            ]
        return [*lines, ("fits", f"no: {self._lacking(room.total, within)}", False)]

    def room(self, free: int) -> Room:
        """The layout within `free` bytes. Refused where the least that a run can shrink to is more."""
        within = int(free * (1 - SPARE))
        laid = self.lay_out(within)
        if self.least() > free:
            raise WhetError(
                f"This training does not fit on the GPU: it takes {self._lacking(laid.total, within)}."
            )
        return laid

    def memory_lines(self, room: Room) -> list[str]:
        """How memory is divided at the peak, and what is done where it would not suffice."""
        r = self.settings.rollout
        parts = " + ".join(
            f"{WORDS.get(name, name)} {bytes_text(size)}" for name, size in room.plan.parts()
        )
        work = f"{r.slots:,} rollouts of {r.context:,} tokens and packs of {self.settings.learn.pack_tokens:,}"
        lines = [f"{bytes_text(room.total)} at the peak for {work}: {parts}"]
        if room.release:
            lines.append(
                f"the KV cache ({bytes_text(room.plan.cache)}) is released for each update and taken back after it, "
                "since it does not fit beside what an update needs"
            )
        if room.pages != r.pages:
            pool = f"the KV pool is {room.pages} pages, as many as fit"
            lines.append(f"{pool}; when they are full, the youngest rollouts wait")
        if room.within is not None and room.total > room.within:
            lines.append(
                f"memory is tight: that is {_excess(room.total, room.within)}. Packs and waves of prompts are made "
                "smaller when the GPU is full, which takes time; whet doctor MODEL --recipe RECIPE names settings "
                "that fit"
            )
        return lines

    def _lacking(self, wanted: int, within: int) -> str:
        """How much is missing, and the settings that would help."""
        lacking = _excess(wanted, within)
        ways = self.ways_to_fit(within)
        if not ways:
            return (
                f"{lacking}; no setting makes it smaller, so take a smaller model or a larger GPU"
            )
        if ways[0][1] <= within:
            return f"{lacking}; enough would be {' or '.join(text for text, _ in ways)}"
        helpful = ", ".join(f"{text} (to {bytes_text(left)})" for text, left in ways[:4])
        return f"{lacking}; no one setting is enough, these help most: {helpful}"


WORDS = {
    "masters": "fp32 masters",
    "moments": "Adam moments",
    "reference": "reference for KL",
    "cache": "KV cache",
    "graphs": "graphs (estimate)",
    "replays": "graphs of updates (estimate)",
    "activations": "activations (estimate)",
    "logits": "logits (estimate)",
    "decoding": "decoding (estimate)",
}


def size_up(
    network: Any, settings: config.Config, device: torch.device, *, graphs: bool
) -> Footprint:
    """What training this network, which has no weights, takes of a device; `graphs`: whether graphs can run there."""
    model = settings.model
    r = settings.rollout
    if is_peft_folder(folder := Path(model.name).expanduser()):
        found = read_adapter(folder)
        targets = found["target_modules"]
        lora = {"rank": found["r"], "targets": () if isinstance(targets, str) else tuple(targets)}
        model = model.model_copy(update={"lora": model.lora.model_copy(update=lora)})
    positions = getattr(network.config, "max_position_embeddings", None) or CONTEXT
    context = r.context or min(CONTEXT, positions)
    if context > positions:
        raise WhetError(
            f"rollout.context = {context} is more than the {positions} positions of {model.name}."
        )
    shape = measure(network, model.lora.targets)
    flash = shape.flash and model.dtype == "bfloat16" and has_flash(device)
    rollout = r.model_copy(update={"context": context, "graphs": r.graphs and graphs})
    settings = settings.model_copy(update={"model": model, "rollout": rollout})
    return Footprint(shape=shape, settings=settings, device=device, flash=flash)


def _change(settings: Any, path: str, value: Any) -> Any:
    """The settings with another value for one of them, named as in a recipe."""
    name, _, rest = path.partition(".")
    return settings.model_copy(
        update={name: _change(getattr(settings, name), rest, value) if rest else value}
    )


def bytes_text(number: float) -> str:
    """
    >>> bytes_text(3 * 2**30), bytes_text(0.5 * 2**20)
    ('3.0 GiB', '0.5 MiB')
    """
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _excess(wanted: int, within: int) -> str:
    return f"{bytes_text(wanted - within)} more than the {bytes_text(within)} to be had (a tenth is left free)"


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a GPU, or of the main memory of this machine or container; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _field("/proc/meminfo", "MemAvailable:")
    free = None if available is None else 1024 * available
    limit = _field("/sys/fs/cgroup/memory.max")
    used = _field("/sys/fs/cgroup/memory.current")
    if limit is None or used is None:
        return free
    # file pages, which the system gives up first
    cached = _field("/sys/fs/cgroup/memory.stat", "inactive_file") or 0
    left = max(0, limit - used + cached)
    return left if free is None else min(free, left)


def limit_memory(device: torch.device, share: float) -> None:
    """Take no more than this share of a GPU, less a little for what CUDA itself takes beside."""
    torch.cuda.set_per_process_memory_fraction(share * (1 - SPARE / 2), device.index or 0)


def _field(path: str, name: str = "") -> int | None:
    """The number in a file of the system, or after `name` in it; None for "max", which stands for no limit."""
    try:
        words = Path(path).read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None
