"""The parts of a run, built from its `RunPlan`: model, engine, judge, learner and curriculum.

`loop.py` moves them. The fast path (`whet.fast`) is handed in here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from whet import config
from whet.curriculum.base import Curriculum
from whet.errors import WhetError
from whet.eval import EvalSet, eval_sets
from whet.learn.base import Trainer
from whet.pictures import token_rows
from whet.resolve import Basis, RunPlan, training_sampling
from whet.rollout.base import Engine, RolloutStore
from whet.rollout.vllm_fit import speculation_of
from whet.tasks.judge import HOPELESS, Judge
from whet.types import Clock, Key, Report, Request, Rollout, rollout_to_json
from whet.watch import Guards, Stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from whet.cluster.crew import Crew
    from whet.draft.training import AdaptiveDrafter, SpotDrafter
    from whet.learn.learner import Learner, Passes
    from whet.model.memory import Room
    from whet.rollout.engine import LocalEngine
    from whet.rollout.vllm import VllmEngine
    from whet.tasks.worker import Worker


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
    # learns beside the policy, where the recipe drafts with eagle
    drafter: AdaptiveDrafter | None = None
    # sentences for the user: how memory is divided, why rollouts are slow
    notes: tuple[str, ...] = ()

    def rollout_rows(
        self,
        rollouts: Sequence[Rollout],
        entropies: Mapping[Key, np.ndarray] = MappingProxyType({}),
    ) -> list[dict[str, Any]]:
        """What the model wrote, for RUN/rollouts; entropies: of the tokens of those for which they are known."""
        rows = []
        for rollout, tokens in zip(
            rollouts, token_rows(rollouts, self.plan.codec, entropies), strict=True
        ):
            prompt = self.plan.problems.lookup(rollout.prompt_id)
            assert rollout.trace is not None
            row = rollout_to_json(rollout) | {
                "prompt": prompt.text or list(prompt.messages),
                "answer": prompt.answer,
            }
            del row["sampling"], row["drafted"]  # the marks of its tokens say which were drafted
            level = {"level": prompt.meta["level"]} if prompt.meta.get("level") is not None else {}
            rows.append(
                row
                | level
                | {"response": self.plan.codec.decode(rollout.trace.ids.tolist())}
                | tokens
            )
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
    # not restored from a checkpoint: the evaluation before the first step is still to come
    fresh: bool = True
    warm_start_s: float = 0.0
    ended: bool = False  # before its budget: nothing is left to learn

    def __post_init__(self) -> None:
        import torch

        from whet.model.ops import DeviceMeter

        # How long a GPU works for the learner; not measured where other processes do its work.
        self.meter = DeviceMeter(
            self.model.device if self.model is not None else torch.device("cpu")
        )

    @property
    def progress(self) -> float:
        if self.ended:
            return 1.0
        settings = self.plan.settings
        tally = self.tally
        # steps = 0 only evaluates
        shares = [tally.step / settings.steps if settings.steps else 1.0]
        budgets = (
            (tally.tokens_generated, settings.token_budget),
            (tally.time_s, settings.time_budget),
        )
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
        own
        if start is None
        else own.model_copy(update={"workers": own.workers or plan.settings.cluster.workers}),
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
        settings.model
        if weights is None
        else settings.model.model_copy(update={"name": str(weights)}),
        vocab_size=len(plan.codec.tokenizer),
        context=settings.rollout.context,
        seed=settings.seed,
        checked=plan.network if weights is None else None,
    )
    if model.device.type == "cuda" and (
        "eagle" in settings.draft.drafters or settings.rollout.graphs
    ):
        from whet.fast.fused import share_storage

        # the last time that weights move: before a drafter, graphs or an optimiser uses them
        share_storage(model)
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
    plan: Basis,
    model: PreTrainedModel,
    engine: Engine | None,
    kind: Callable[..., Learner] | None = None,
) -> Learner:
    """engine: that of this process, which lends its memory. kind: what makes a learner that trains with others."""
    from whet.learn.learner import Learner, Passes

    passes: Callable[[Any, config.Learn], Passes] = Passes
    if model.device.type == "cuda":
        from whet.fast.graphed import FastPasses

        # There are no graphs where the KV cache lends the memory of a pass.
        passes = partial(FastPasses, graphs=plan.room is None or plan.room.plan.replays > 0)
    if engine is not None:
        # fp32 masters and the compiler's trial need the memory that an update would have
        engine.release()
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
        shares = ", ".join(
            f"{name} took {seconds:.0f} s" for name, seconds in watch.seconds.items()
        )
        parts.notes = (*parts.notes, f"Ready after {watch.without():.0f} s: {shares}.")
    return parts


def refuse_unmet(parts: Parts) -> None:
    """Refuse a recipe that needs what the engine or the learner cannot do."""
    settings = parts.plan.settings
    name = parts.plan.settings.curriculum.name
    # without it a stream does not repeat
    exact = ["keyed_noise"] if settings.rollout.ordered else []
    wanted = {"stream", settings.on_update, *exact} if settings.rollout.mode == "stream" else set()
    if missing := frozenset(wanted) - parts.engine.can:
        raise WhetError(
            f"This engine cannot do {', '.join(sorted(missing))}, which the recipe's [rollout] asks for."
        )
    if missing := parts.curriculum.needs - parts.learner.can_signal:
        raise WhetError(
            f"The curriculum {name} needs {', '.join(sorted(missing))}, which the learner does not give."
        )


def build_engine(
    plan: Basis,
    model: PreTrainedModel,
    room: Room | None = None,
    drafter: AdaptiveDrafter | None = None,
) -> LocalEngine:
    """`room`: how a GPU is shared with a learner, if there is one. On a GPU the model's storage is shared already."""
    from whet.draft.speculation import build_speculation
    from whet.rollout.engine import LocalEngine

    settings = plan.settings
    rollout = plan.settings.rollout
    vocab = model.config.get_text_config().vocab_size
    runners = None
    sizes = list(range(1, rollout.slots + 1))
    weights = 0
    if rollout.graphs and model.device.type == "cuda":
        from whet.fast.graphs import GraphRunners, buckets

        runners = GraphRunners()
        sizes = buckets(rollout.slots)
        weights = model.num_parameters()
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
        speculation=build_speculation(
            settings.draft, vocab=vocab, sizes=sizes, seed=settings.seed, weights=weights
        ),
        eagle=drafter.live if drafter is not None else None,
        buffer=drafter.buffer if drafter is not None and drafter.share else None,
    )
    engine.begin()
    return engine


def build_vllm(
    plan: Basis, model: PreTrainedModel, room: Room | None, cards: int = 1
) -> VllmEngine:
    from whet.model.memory import pool_of
    from whet.rollout.vllm import VllmEngine

    settings = plan.settings
    rollout = plan.settings.rollout
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
