"""A run, checked once and then used: the one file that depends on every component.

`check_run` builds all that needs no weights, and refuses what is wrong before a run folder is made or a weight is
loaded. `build_actor` and `build_parts` turn its `RunPlan` into running parts, which `loop.py` moves; `save_parts` and
`restore_parts` carry them over a checkpoint. The fast path (`whet.fast`) is handed in here and nowhere else; functions
that need torch import it, so that a wrong path is found without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import build_curriculum, find_plan, notes_of, stages_of
from whet.errors import WhetError
from whet.estimate import Imitation, budget_lines, counted, dims_of, estimate_lines, workloads
from whet.eval import EvalSet, eval_sets
from whet.findings import machine_of, model_findings, size_up_here
from whet.learn.base import Trainer
from whet.learn.checkpoint import Checkpoint, load_arrays, save_checkpoint
from whet.model.names import check_name
from whet.pictures import token_rows
from whet.problems import (
    EncodedPrompts,
    JudgeFunction,
    Problems,
    anchor_paths,
    check_answers,
    check_judges,
    load_problems,
)
from whet.rollout.base import Engine, RolloutStore
from whet.rollout.vllm_fit import check_vllm, drafter_of, speculation_of
from whet.tasks.judge import HOPELESS, Judge
from whet.text import Codec
from whet.types import Clock, Key, Report, Request, Rollout, Sampling, rollout_from_json, rollout_to_json
from whet.watch import Guards, Stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from whet.cluster.crew import Crew
    from whet.draft.training import AdaptiveDrafter, SpotDrafter
    from whet.learn.learner import Learner, Passes
    from whet.learn.samples import Encode
    from whet.model.memory import Finding, Footprint, Room
    from whet.rollout.engine import LocalEngine
    from whet.rollout.vllm import VllmEngine
    from whet.tasks.worker import Worker

MEASURED = 64  # worked solutions whose mean length is that of a warm start
SHOWN = 600  # characters of the first prompt that a dry run shows


@dataclass(kw_only=True)
class Basis:
    """What a model, its engine and its learner are built from. A process that has no data needs no more."""

    settings: config.Config  # with rollout.context, learn.lr and data_folder filled in, and with absolute paths
    codec: Codec
    encoded: Encode
    network: PreTrainedModel  # without weights
    processes: int = 1  # that train it together
    role: str = "both"  # of this process: "worker", which only decodes, "learner", or both
    share: float = 1.0  # of a GPU, which others may use, too

    @cached_property
    def footprint(self) -> Footprint:
        return replace(size_up_here(self.network, self.settings), processes=self.processes, role=self.role)

    @cached_property
    def room(self) -> Room | None:
        """How rollouts and updates share the memory of a GPU; None on a CPU. A training that cannot fit is refused."""
        import torch

        from whet.model.memory import free_memory

        device = self.footprint.device
        if device.type != "cuda":
            return None
        return self.footprint.room(min(free_memory(device) or 0, int(self.share * torch.cuda.mem_get_info(device)[1])))


@dataclass(kw_only=True)
class RunPlan(Basis):
    """A run that is checked and not started: what `check_run` found and built, to be used by one run."""

    problems: Problems
    encoded: EncodedPrompts
    curriculum: Curriculum | None  # None where nothing is trained
    notes: tuple[str, ...]  # sentences for the user, each shown once

    @cached_property
    def imitations(self) -> list[Imitation]:
        """The work of each [[warm_start]] entry, by some of its solutions."""
        works = []
        for entry in self.settings.warm_start:
            pairs = self.problems.solutions(np.random.default_rng(0), MEASURED, entry.options)
            prompts = self.codec.encode_all([prompt for prompt, _ in pairs])
            solutions = [self.codec.encode_response(text) for _, text in pairs]
            tokens = sum(map(len, [*prompts, *solutions])) / len(pairs)
            works.append(Imitation(updates=entry.steps, batch=entry.batch, tokens=tokens))
        return works

    def findings(self, response: float | None = None) -> list[Finding]:
        """Model, path, memory and time on this machine; `response`: its mean tokens, where a run has measured them."""
        prompt = float(self.encoded.train_lengths.mean())
        works = workloads(self.footprint.settings, self.problems, prompt, response)
        machine = machine_of(self.footprint.device)
        dims = dims_of(self.footprint.shape)
        lines = estimate_lines(works, dims, machine, known=response is not None, imitations=self.imitations)
        return [*model_findings(self.network, self.footprint), *(("time", line, True) for line in lines)]

    def describe(self, response: float | None = None) -> list[str]:
        """What a run would do, in lines: problems, budget, cost, what the model reads, and what ends a response."""
        problems, codec, r = self.problems, self.codec, self.settings.rollout
        lengths = self.encoded.train_lengths
        low, high = np.percentile(lengths, (50, 99))
        stops = ", ".join(f"{number} {token}" for number, token in codec.stop_tokens()) or "none"
        first = codec.render(problems.train.at(0))
        return [
            f"{counted(len(problems.train), 'training prompt')}; "
            + ("; ".join(f"{len(p):,} in {name}" for name, p in problems.evals.items()) or "no evaluation set"),
            *budget_lines(self.settings),
            *(f"{what}: {found}" for what, found, _ in self.findings(response)),
            f"prompts of {low:,.0f} tokens (median), {high:,.0f} (99%), {lengths.max():,} (longest); "
            f"context {r.context:,}",
            f"a response ends at: {stops}" + "".join(f", {text!r}" for text in r.stop_strings),
            f"the first prompt as the model reads it: {first[:SHOWN]!r}" + (" ..." if len(first) > SHOWN else ""),
            *self.notes,
        ]


def check_run(settings: config.Config, reward: JudgeFunction | None = None, *, training: bool = True) -> RunPlan:
    """Check a recipe and its data, and fill in what the recipe left to be derived. `reward` judges every prompt."""
    if training and not settings.data:
        raise WhetError("There is nothing to train on: name the problems by [[data]] or --data.")
    find_plan(settings.curriculum.name)
    check_name(settings.model.name)  # before the data, which may come over the network
    settings = anchor_paths(settings)
    settings, vllm_notes = check_vllm(settings)
    problems = load_problems(settings, reward)
    tried = check_judges(settings, problems, given=reward is not None)
    for entry in settings.warm_start:
        problems.solutions(np.random.default_rng(0), 1, entry.options)
    from whet.model.load import check_model, eos_of, load_tokenizer

    network = check_model(settings.model)
    codec = Codec(load_tokenizer(settings.model, problems.alphabet), eos_of(settings.model), settings.text)
    check_drafter(settings, network or tiny_skeleton(settings, len(codec.tokenizer)))
    encoded = EncodedPrompts(problems, codec)
    problems, left_out = encoded.leave_out_long(problems, settings.text.max_prompt)
    notes = [*vllm_notes, *problems.notes, *check_answers(settings, problems), *tried, *left_out]
    built = None
    if training:  # refuses thresholds, budgets and subsets that cannot be met
        sampling, facts = training_sampling(settings, codec), problems.facts()
        built = build_curriculum(settings.curriculum, facts=facts, sampling=sampling, seed=settings.seed)
        notes += notes_of(settings.curriculum, facts)
    settings, chosen = _with_context(settings, problems, encoded, network)
    notes += chosen
    if training and not settings.learn.lr:
        settings, sentence = _with_lr(settings, network)
        notes.append(sentence)
    return RunPlan(
        settings=settings,
        problems=problems,
        codec=codec,
        encoded=encoded,
        network=network or tiny_skeleton(settings),
        curriculum=built,
        notes=tuple(notes),
    )


def check_drafter(settings: config.Config, network: PreTrainedModel) -> None:
    """Refuse a model that no EAGLE drafter can be made for, and a trained drafter of another model."""
    named = settings.draft.eagle
    if "eagle" not in settings.draft.drafters:
        if named:
            raise WhetError(f'draft.eagle = "{named}" has no use: draft.drafters does not name "eagle".')
        return
    from whet.draft.eagle import eagle_head, read_drafter, refuse_undraftable

    refuse_undraftable(network)
    if named or settings.rollout.engine == "vllm":
        read_drafter(drafter_of(settings), eagle_head(network))


def _with_context(
    settings: config.Config, problems: Problems, encoded: EncodedPrompts, network: PreTrainedModel | None
) -> tuple[config.Config, list[str]]:
    """rollout.context, by default just enough for the longest prompt of each kind with its response, where it fits."""
    r, name = settings.rollout, settings.model.name
    positions = getattr(network.config, "max_position_embeddings", None) if network is not None else None
    context, notes = r.context, []
    if not context:
        stages = stages_of(settings.curriculum, r.max_tokens)
        limits = {entry.name: entry.max_tokens or r.max_tokens for entry in settings.eval}
        wanted = max(encoded.train_lengths, default=0) + max([r.max_tokens, *(stage.max_tokens for stage in stages)])
        for kind, prompts in problems.evals.items():
            longest = max((len(encoded(p.id)) for p in prompts), default=0)
            wanted = max(wanted, longest + limits.get(kind, r.max_tokens))
        context = int(min(wanted, positions or wanted))
        if context < wanted:
            few = f"{name} has {context} positions, fewer than the {wanted} of the longest prompt with its response"
            remedy = "a lower rollout.max_tokens or text.max_prompt avoids it"
            notes.append(f"{few}: such responses are cut there; {remedy}.")
    elif positions and context > positions:
        raise WhetError(f"rollout.context = {context} is more than the {positions} positions of {name}; leave it out.")
    encoded.refuse_long(context)
    return settings.model_copy(update={"rollout": r.model_copy(update={"context": context})}), notes


def _with_lr(settings: config.Config, network: PreTrainedModel | None) -> tuple[config.Config, str]:
    from whet.learn.optimizer import TINY_MODEL, default_lr
    from whet.model.lora import is_peft_folder

    adapted = settings.model.lora.rank > 0 or is_peft_folder(Path(settings.model.name).expanduser())
    size = sum(p.numel() for p in network.parameters()) if network is not None and not adapted else 0
    learn = settings.learn.model_copy(update={"lr": default_lr(size)})
    trained = f"all {size / 1e6:,.0f}M weights" if size > TINY_MODEL else "adapters" if adapted else "a tiny model"
    return settings.model_copy(update={"learn": learn}), f"learn.lr = {learn.lr:g}, chosen for {trained}."


def tiny_skeleton(settings: config.Config, vocabulary: int = 64) -> PreTrainedModel:
    """The built-in model without weights; the vocabulary is of about the size that tasks need."""
    import torch

    from whet.model.load import tiny_model
    from whet.model.memory import CONTEXT

    model, context = settings.model, settings.rollout.context or CONTEXT
    with torch.device("meta"):
        return tiny_model(vocabulary, hidden=model.hidden, layers=model.layers, heads=model.heads, context=context)


# ---- the parts


@dataclass
class Tally:
    """How far a run is. It is saved with every checkpoint."""

    step: int = 0
    tokens_generated: int = 0  # by training rollouts, cut ones included, evaluation excluded
    tokens_trained: int = 0
    rollouts: int = 0
    prompts_seen: int = 0  # visits: a prompt counts again each time it is asked
    time_s: float = 0.0  # without evaluation, saving and warm start

    def generated(self, asked: Sequence[Request], finished: Sequence[Rollout]) -> None:
        self.prompts_seen += sum(r.first_index == 0 for r in asked)
        self.rollouts += len(finished)
        self.tokens_generated += sum(r.length for r in finished)

    def updated(self, report: Report) -> None:
        self.step += 1
        self.tokens_trained += int(report.metrics.get("learn/tokens", 0))

    def metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items() if name != "step"}


@dataclass(kw_only=True)
class Actor:
    """What makes judged rollouts: all that evaluating a model takes."""

    plan: RunPlan
    model: PreTrainedModel | None  # None where other processes hold it
    engine: Engine
    judge: Judge
    evals: tuple[EvalSet, ...]
    drafter: AdaptiveDrafter | None = None  # learns beside the policy, where the recipe drafts with eagle
    notes: tuple[str, ...] = ()  # sentences for the user: how memory is divided, why rollouts are slow

    def rollout_rows(
        self, rollouts: Sequence[Rollout], entropies: Mapping[Key, np.ndarray] = MappingProxyType({})
    ) -> list[dict[str, Any]]:
        """What the model wrote, for RUN/rollouts; entropies: of the tokens of those for which they are known."""
        rows = []
        for rollout, tokens in zip(rollouts, token_rows(rollouts, self.plan.codec, entropies), strict=True):
            prompt = self.plan.problems.lookup(rollout.prompt_id)
            assert rollout.trace is not None
            row = rollout_to_json(rollout) | {"prompt": prompt.text or list(prompt.messages), "answer": prompt.answer}
            del row["sampling"], row["drafted"]  # the marks of its tokens say which were drafted
            level = {"level": prompt.meta["level"]} if prompt.meta.get("level") is not None else {}
            rows.append(row | level | {"response": self.plan.codec.decode(rollout.trace.ids.tolist())} | tokens)
        return rows

    def close(self) -> None:
        self.judge.close()
        self.engine.close()


@dataclass(kw_only=True)
class Parts(Actor):
    """An actor, and what it takes to train it."""

    curriculum: Curriculum
    learner: Trainer
    store: RolloutStore = field(default_factory=RolloutStore)
    tally: Tally = field(default_factory=Tally)
    crew: Crew | None = None  # the processes that hold the model, where there are several
    spot: SpotDrafter | None = None  # the drafter that they train
    guards: Guards = field(default_factory=Guards)
    fresh: bool = True  # not restored from a checkpoint: the evaluation before the first step is still to come
    warm_start_s: float = 0.0
    ended: bool = False  # before its budget: nothing is left to learn

    def __post_init__(self) -> None:
        import torch

        from whet.model.ops import DeviceMeter

        # How long a GPU works for the learner; not measured where other processes do its work.
        self.meter = DeviceMeter(self.model.device if self.model is not None else torch.device("cpu"))

    @property
    def progress(self) -> float:
        if self.ended:
            return 1.0
        settings, tally = self.plan.settings, self.tally
        shares = [tally.step / settings.steps if settings.steps else 1.0]  # steps = 0 only evaluates
        budgets = ((tally.tokens_generated, settings.token_budget), (tally.time_s, settings.time_budget))
        return min(1.0, max(shares + [spent / budget for spent, budget in budgets if budget]))

    @property
    def done(self) -> bool:
        return self.progress >= 1.0

    def clock(self) -> Clock:
        settings = self.plan.settings
        return Clock(
            step=self.tally.step,
            version=self.learner.version,
            groups=settings.curriculum.groups,
            free=self.engine.free,
            tokens=self.tally.tokens_generated,
            progress=self.progress,
            cut=settings.rollout.mode == "stream" and settings.on_update == "cut",
        )


def build_actor(plan: RunPlan, weights: Path | None = None, *, room: Room | None = None) -> Actor:
    """`weights`: a checkpoint folder in place of the recipe's model. `room`: how a GPU is shared with a learner."""
    settings = plan.settings
    judge = build_judge(plan)
    model = build_model(plan, weights)
    drafter = build_drafter(settings, model)
    vllm = settings.rollout.engine == "vllm"
    engine = build_vllm(plan, model, room) if vllm else build_engine(plan, model, room, drafter)
    memory = plan.footprint.memory_lines(room) if room else []
    return Actor(
        plan=plan,
        model=model,
        engine=engine,
        judge=judge,
        evals=eval_sets(settings, plan.problems.evals, training_sampling(settings, plan.codec)),
        drafter=drafter,
        notes=(*(f"Memory: {line}." for line in memory), *engine.notes()),
    )


def build_judge(plan: RunPlan, start: Callable[[], Worker] | None = None) -> Judge:
    """It forks its workers: before weights fill this process, or other processes are started from it. start: makes them
    elsewhere."""
    own = plan.settings.judge
    return Judge(
        plan.problems.lookup,
        plan.problems.judges,
        own if start is None else own.model_copy(update={"workers": own.workers or plan.settings.cluster.workers}),
        start=start,
        decode=plan.codec.judged,
        ordered=plan.settings.rollout.ordered,
        total=plan.problems.rewards.total,
        hopeless=HOPELESS,
    )


def build_model(plan: Basis, weights: Path | None = None) -> PreTrainedModel:
    from whet.model.load import load_model

    settings = plan.settings
    model = load_model(
        settings.model if weights is None else settings.model.model_copy(update={"name": str(weights)}),
        vocab_size=len(plan.codec.tokenizer),
        context=settings.rollout.context,
        seed=settings.seed,
        checked=plan.network if weights is None else None,
    )
    if model.device.type == "cuda" and ("eagle" in settings.draft.drafters or settings.rollout.graphs):
        from whet.fast.fused import share_storage

        share_storage(model)  # the last time that weights move: before a drafter, graphs or an optimiser uses them
    return model


def build_drafter(settings: config.Config, model: PreTrainedModel) -> AdaptiveDrafter | None:
    """The drafter that learns, where the recipe drafts with one."""
    if "eagle" not in settings.draft.drafters or settings.rollout.engine == "vllm":
        return None
    from whet.draft.training import AdaptiveDrafter

    start = Path(settings.draft.eagle) if settings.draft.eagle else None
    drafter = AdaptiveDrafter(model, settings.draft.train, settings.seed, start=start)
    if model.device.type == "cuda":
        from whet.fast.fused import KERNELS

        drafter.live.ops = KERNELS
    return drafter


def build_learner(
    plan: Basis, model: PreTrainedModel, engine: Engine | None, kind: Callable[..., Learner] | None = None
) -> Learner:
    """engine: that of this process, which lends its memory. kind: what makes a learner that trains with others."""
    from whet.learn.learner import Learner, Passes

    passes: Callable[[Any, config.Learn], Passes] = Passes
    if model.device.type == "cuda":
        from whet.fast.graphed import FastPasses

        # There are no graphs where the KV cache lends the memory of a pass.
        passes = partial(FastPasses, graphs=plan.room is None or plan.room.plan.replays > 0)
    if engine is not None:
        engine.release()  # fp32 masters and the compiler's trial need the memory that an update would have
    learner = (kind or Learner)(model, plan.settings.learn, encode=plan.encoded, passes=passes)
    if engine is not None:
        engine.take_back()
    learner.rehearse()
    return learner


def build_parts(plan: RunPlan, weights: Path | None = None) -> Parts:
    """Load the weights and start the parts. The plan's curriculum becomes that of the run."""
    assert plan.curriculum is not None
    watch = Stopwatch()
    with watch.timing("model, judges and engine"):
        actor = build_actor(plan, weights, room=plan.room)
    with watch.timing("the learner"):
        assert actor.model is not None
        learner = build_learner(plan, actor.model, actor.engine)
    parts = Parts(**vars(actor), learner=learner, curriculum=plan.curriculum)
    refuse_unmet(parts)
    if watch.without() >= 5:  # long enough to be noticed
        shares = ", ".join(f"{name} took {seconds:.0f} s" for name, seconds in watch.seconds.items())
        parts.notes = (*parts.notes, f"Ready after {watch.without():.0f} s: {shares}.")
    return parts


def refuse_unmet(parts: Parts) -> None:
    """Refuse a recipe that needs what the engine or the learner cannot do."""
    settings, name = parts.plan.settings, parts.plan.settings.curriculum.name
    exact = ["keyed_noise"] if settings.rollout.ordered else []  # without it a stream does not repeat
    wanted = {"stream", settings.on_update, *exact} if settings.rollout.mode == "stream" else set()
    if missing := frozenset(wanted) - parts.engine.can:
        raise WhetError(f"This engine cannot do {', '.join(sorted(missing))}, which the recipe's [rollout] asks for.")
    if missing := parts.curriculum.needs - parts.learner.can_signal:
        raise WhetError(f"The curriculum {name} needs {', '.join(sorted(missing))}, which the learner does not give.")


def build_engine(
    plan: Basis, model: PreTrainedModel, room: Room | None = None, drafter: AdaptiveDrafter | None = None
) -> LocalEngine:
    """`room`: how a GPU is shared with a learner, if there is one. On a GPU the model's storage is shared already."""
    from whet.draft.speculation import build_speculation
    from whet.rollout.engine import LocalEngine

    settings, rollout, vocab = plan.settings, plan.settings.rollout, model.config.get_text_config().vocab_size
    runners, sizes, weights = None, list(range(1, rollout.slots + 1)), 0
    if rollout.graphs and model.device.type == "cuda":
        from whet.fast.graphs import GraphRunners, buckets

        runners, sizes, weights = GraphRunners(), buckets(rollout.slots), model.num_parameters()
    engine = LocalEngine(
        model,
        encode=plan.encoded,
        decode=plan.codec.decode,
        seed=settings.seed,
        **rollout.model_dump(include={"slots", "context", "page", "mode"}),
        pages=room.pages if room else rollout.pages,
        on_update=settings.on_update,
        runners=runners,
        releasable=room is not None and room.release,
        speculation=build_speculation(settings.draft, vocab=vocab, sizes=sizes, seed=settings.seed, weights=weights),
        eagle=drafter.live if drafter is not None else None,
        buffer=drafter.buffer if drafter is not None and drafter.share else None,
    )
    engine.begin()
    return engine


def build_vllm(plan: Basis, model: PreTrainedModel, room: Room | None, cards: int = 1) -> VllmEngine:
    from whet.model.memory import pool_of
    from whet.rollout.vllm import VllmEngine

    settings, rollout = plan.settings, plan.settings.rollout
    pages, page = pool_of(rollout)
    return VllmEngine(
        model,
        encode=plan.encoded,
        decode=plan.codec.decode,
        seed=settings.seed,
        **rollout.model_dump(include={"slots", "context", "mode"}),
        cached=(room.pages or pages) * page if room else rollout.pages * page,
        on_update=settings.on_update,
        releasable=room is not None and room.release,
        drafts=speculation_of(settings),
        cards=cards,
    )


def training_sampling(settings: config.Config, codec: Codec) -> Sampling:
    """No top-k or top-p: the learner could not follow the distribution they leave."""
    return Sampling(
        max_tokens=settings.rollout.max_tokens,
        temperature=settings.rollout.temperature,
        stop_ids=codec.stop_ids,
        stop_strings=settings.rollout.stop_strings,
    )


# ---- the checkpoint


def save_parts(parts: Parts, folder: Path) -> None:
    from whet.draft.eagle import FOLDER, copy_drafter

    engine = parts.engine.state_dict()
    drafter, waiting = parts.drafter or parts.spot, RolloutStore()
    pending = [rollout_to_json(r) for r in waiting.put(parts.judge.pending())]

    def write(path: Path) -> None:
        parts.learner.write(path)
        if drafter is not None:
            drafter.write(path / FOLDER)
        elif "eagle" in parts.plan.settings.draft.drafters:
            copy_drafter(drafter_of(parts.plan.settings), path / FOLDER)

    save_checkpoint(
        folder,
        model=None,  # the learner writes it
        tokenizer=parts.plan.codec.tokenizer,
        tensors={"drafter": drafter.tensors()} if drafter else {},
        arrays={
            "traces": parts.store.arrays(),
            "judge": waiting.arrays(),
            "prompts": {"marks": parts.plan.problems.marks},
            "engine": {k: v for k, v in engine.items() if isinstance(v, np.ndarray)},
        },
        states={
            "tally": asdict(parts.tally),
            "guards": parts.guards.state_dict(),
            "learner": parts.learner.state_dict(),
            "curriculum": parts.curriculum.state_dict(),
            "drafter": drafter.state_dict() if drafter else None,
            "judge": pending,
            "engine": {k: v for k, v in engine.items() if not isinstance(v, np.ndarray)},
        },
        beside=write,
    )


def refuse_other_prompts(plan: RunPlan, checkpoint: Path) -> None:
    """Refuse to go on over problems that were changed since the checkpoint. Their number is compared with their ids, by
    the curriculum."""
    saved, now = load_arrays(checkpoint, "prompts").get("marks"), plan.problems.marks
    if saved is None or len(saved) != len(now):  # an older whet did not save them
        return
    changed = np.flatnonzero(saved != now)
    if len(changed):
        name = plan.problems.train.ids[changed[0]]
        what = f'The training problem "{name}" is not what it was when the checkpoint was written'
        count = f"{len(changed):,} of {len(now):,} have another text or answer"
        raise WhetError(f"{what} ({count}); resume with the same data, or start a new run.")


def restore_parts(parts: Parts, checkpoint: Checkpoint) -> None:
    """Put back everything that the checkpoint holds; `parts` were built on its weights."""
    states, arrays = checkpoint.states, checkpoint.arrays
    try:
        parts.learner.restore(checkpoint)
        parts.curriculum.load_state_dict(states["curriculum"])
        parts.store.load(arrays["traces"])
        parts.engine.load_state_dict({**states["engine"], **arrays["engine"]})
        parts.tally = Tally(**states["tally"])
        if "guards" in states:  # an older whet did not save them
            parts.guards.load_state_dict(states["guards"])
        if (drafter := parts.drafter or parts.spot) and states["drafter"]:
            drafter.load(checkpoint.tensors["drafter"], states["drafter"])
    except KeyError as missing:
        raise WhetError(f"{checkpoint.folder} holds no {missing}; was it written by whet train?") from None
    waiting = RolloutStore()
    waiting.load(arrays["judge"])
    parts.judge.send(waiting.attach_rollouts([rollout_from_json(r) for r in states["judge"]]))
    parts.fresh = False
