"""What a run is made of: built from a recipe, saved to a checkpoint, restored from one.

The only file that knows every component. `loop.py` moves them; none of them knows another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import build_curriculum
from whet.draft.export import FOLDER, read_drafter, write_drafter
from whet.draft.speculation import build_speculation
from whet.draft.training import AdaptiveDrafter
from whet.errors import WhetError
from whet.eval import EvalSet
from whet.learn.checkpoint import Checkpoint, load_weights_into, save_checkpoint
from whet.learn.learner import Learner, Passes, warm_start
from whet.model.load import load_model, load_tokenizer, pick_device
from whet.model.memory import Room
from whet.model.meter import DeviceMeter
from whet.problems import Problems
from whet.rollout.base import Engine, RolloutStore
from whet.rollout.engine import LocalEngine
from whet.tasks.judge import Judge
from whet.text import Codec
from whet.tools.doctor import room_lines, room_on
from whet.types import Clock, Prompt, Request, Rollout, Sampling, rollout_from_json, rollout_to_json
from whet.watch import Stopwatch, ready_lines


@dataclass
class Progress:
    """How far a run is. Saved with it."""

    step: int = 0
    tokens_generated: int = 0
    """By training rollouts, cut ones included, evaluation excluded."""
    tokens_trained: int = 0
    rollouts: int = 0
    prompts_seen: int = 0
    """Visits: a prompt counts again each time it is asked."""
    time_s: float = 0.0
    """Without evaluation, saving and warm start."""

    def count(self, asked: Sequence[Request], finished: Sequence[Rollout]) -> None:
        self.prompts_seen += sum(r.first_index == 0 for r in asked)
        self.rollouts += len(finished)
        self.tokens_generated += sum(r.length for r in finished)

    def metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items() if name != "step"}


@dataclass(kw_only=True)
class Actor:
    """What makes judged rollouts: all that evaluating a model takes."""

    config: config.Config
    problems: Problems
    model: PreTrainedModel
    tokenizer: Any
    codec: Codec
    engine: Engine
    judge: Judge
    evals: tuple[EvalSet, ...]
    drafter: AdaptiveDrafter | None = None
    """Learns beside the policy, where the recipe drafts with eagle."""
    room: Room | None = None
    """On a card: how its memory is divided."""
    notes: tuple[str, ...] = ()
    """Sentences the user should hear once: how the memory of the card is divided, why rollouts are slow."""

    def rollout_rows(self, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        """What the model wrote, for RUN/rollouts."""
        rows = []
        for rollout in rollouts:
            prompt = self.problems.lookup(rollout.prompt_id)
            assert rollout.trace is not None
            row = rollout_to_json(rollout)
            del row["sampling"]
            row["prompt"] = prompt.text or list(prompt.messages)
            row["response"] = self.codec.decode(rollout.trace.ids.tolist())
            row["answer"] = prompt.answer
            rows.append(row)
        return rows

    def close(self) -> None:
        self.judge.close()


@dataclass(kw_only=True)
class Parts(Actor):
    """An actor, and what it takes to train it."""

    curriculum: Curriculum
    learner: Learner
    store: RolloutStore = field(default_factory=RolloutStore)
    tally: Progress = field(default_factory=Progress)
    fresh: bool = True
    """Not restored from a checkpoint: the evaluation before the first step is still to come."""
    warm_start_s: float = 0.0

    def __post_init__(self) -> None:
        self.meter = DeviceMeter(self.model.device)
        """Of the learner's work on a GPU."""

    @property
    def progress(self) -> float:
        shares = [self.tally.step / self.config.steps if self.config.steps else 1.0]
        if self.config.token_budget:
            shares.append(self.tally.tokens_generated / self.config.token_budget)
        if self.config.time_budget:
            shares.append(self.tally.time_s / self.config.time_budget)
        return min(1.0, max(shares))

    @property
    def done(self) -> bool:
        return self.progress >= 1.0

    def clock(self) -> Clock:
        return Clock(
            step=self.tally.step,
            version=self.learner.version,
            groups=self.config.curriculum.groups,
            free=self.engine.free,
            tokens=self.tally.tokens_generated,
            progress=self.progress,
            cut=self.config.rollout.mode == "stream" and self.config.on_update == "cut",
        )


def build_actor(
    settings: config.Config, problems: Problems, weights: Path | None = None, *, alone: bool = True
) -> Actor:
    """`weights`: a checkpoint folder that stands in for the recipe's model (resume). `alone`: no learner beside it."""
    chosen = settings.model if weights is None else settings.model.model_copy(update={"name": str(weights)})
    room = None
    if not alone and pick_device(chosen).type == "cuda":
        room = room_on(pick_device(chosen), settings.model_copy(update={"model": chosen}))
    tokenizer = load_tokenizer(chosen, problems.alphabet)
    model = load_model(chosen, vocab_size=len(tokenizer), context=settings.rollout.context, seed=settings.seed)
    codec = Codec(tokenizer, getattr(model.generation_config, "eos_token_id", None), settings.text)
    codec.prepare(chain(problems.train, problems.eval_by_id.values()))
    judge = build_judge(settings, problems, codec)  # forks its workers: before the engine fills the card
    drafter = build_drafter(settings, model)
    engine = build_engine(settings, model, prompt_encoder(problems, codec), codec, room, drafter)
    return Actor(
        config=settings,
        problems=problems,
        model=model,
        tokenizer=tokenizer,
        codec=codec,
        engine=engine,
        judge=judge,
        evals=eval_sets(settings, problems, codec),
        drafter=drafter,
        room=room,
        notes=(*(room_lines(room, settings) if room else ()), *engine.notes()),
    )


def build_parts(settings: config.Config, problems: Problems, weights: Path | None = None) -> Parts:
    watch = Stopwatch()
    with watch.timing("model, judges and engine"):
        actor = build_actor(settings, problems, weights, alone=False)
    actor.engine.release()  # masters are made and the compiler tries its work with the memory of an update
    with watch.timing("the learner"):
        learner = Learner(
            actor.model,
            settings.learn,
            encode=prompt_encoder(problems, actor.codec),
            passes=learner_passes(actor.model, actor.room),
        )
    parts = Parts(
        **vars(actor),
        learner=learner,
        curriculum=build_curriculum(
            settings.curriculum,
            facts=problems.facts(),
            sampling=training_sampling(settings, actor.codec),
            seed=settings.seed,
        ),
    )
    parts.engine.take_back()
    with watch.timing("the learner"):
        learner.rehearse()
    refuse_unmet(parts)
    parts.notes = (*parts.notes, *ready_lines(watch.without(), watch.seconds))
    return parts


def learner_passes(model: PreTrainedModel, room: Room | None) -> Callable[[Any, config.Learn], Passes]:
    """On a GPU compiled and captured passes; no graphs where the memory of a pass is lent by the KV cache."""
    if model.device.type != "cuda":
        return Passes
    from whet.fast.graphed import FastPasses

    return partial(FastPasses, graphs=room is None or room.plan.replays > 0)


def refuse_unmet(parts: Parts) -> None:
    """What the recipe needs, the engine and the learner must be able to give."""
    rollout, name = parts.config.rollout, parts.config.curriculum.name
    wanted = {"stream", parts.config.on_update} if rollout.mode == "stream" else set()
    if missing := frozenset(wanted) - parts.engine.can:
        raise WhetError(f"This engine cannot do {', '.join(sorted(missing))}, which the recipe's [rollout] asks for.")
    if missing := parts.curriculum.needs - parts.learner.can_signal:
        raise WhetError(f"The curriculum {name} needs {', '.join(sorted(missing))}, which the learner does not give.")


def build_engine(
    settings: config.Config,
    model: PreTrainedModel,
    encode: Callable[[str], Sequence[int]],
    codec: Codec,
    room: Room | None = None,
    drafter: AdaptiveDrafter | None = None,
) -> LocalEngine:
    """`room`: how the card is shared with a learner; None where there is none, or no card."""
    rollout = settings.rollout
    runners, sizes = None, list(range(1, rollout.slots + 1))
    if rollout.graphs and model.device.type == "cuda":
        from whet.fast.fused import share_storage
        from whet.fast.graphs import GraphRunners, buckets

        share_storage(model)  # before there is an optimiser: it is the last time that weights move
        runners, sizes = GraphRunners(), buckets(rollout.slots)
    engine = LocalEngine(
        model,
        encode=encode,
        decode=codec.decode,
        seed=settings.seed,
        slots=rollout.slots,
        context=rollout.context,
        page=rollout.page,
        pages=room.pages if room else rollout.pages,
        mode=rollout.mode,
        on_update=settings.on_update,
        runners=runners,
        releasable=room is not None and room.release,
        speculation=build_speculation(
            settings.draft,
            vocab=model.config.get_text_config().vocab_size,
            sizes=sizes,
            seed=settings.seed,
        ),
        eagle=drafter.live if drafter is not None else None,
        buffer=drafter.buffer if drafter is not None and drafter.share else None,
    )
    engine.begin()
    return engine


def build_drafter(settings: config.Config, model: PreTrainedModel) -> AdaptiveDrafter | None:
    if "eagle" not in settings.draft.drafters:
        return None
    if model.device.type != "cuda":
        return AdaptiveDrafter(model, settings.draft.train, settings.seed)
    from whet.fast.fused import KERNELS, share_storage

    share_storage(model)  # before the drafter looks at any weight: it is the last time that they move
    drafter = AdaptiveDrafter(model, settings.draft.train, settings.seed)
    drafter.live.ops = KERNELS
    return drafter


def build_judge(settings: config.Config, problems: Problems, codec: Codec) -> Judge:
    judge = settings.judge
    return Judge(
        problems.lookup,
        problems.judges,
        total=problems.rewards.total,
        truncated=judge.truncated,
        decode=codec.judged,
        workers=judge.workers or min(8, max(1, (os.cpu_count() or 2) - 1)),
        timeout_s=judge.timeout_s,
        memory_mb=judge.memory_mb,
        pass_at=judge.pass_at,
        ordered=settings.rollout.ordered,
    )


def prompt_encoder(problems: Problems, codec: Codec) -> Callable[[str], Sequence[int]]:
    return lambda prompt_id: codec.encode(problems.lookup(prompt_id))


def training_sampling(settings: config.Config, codec: Codec) -> Sampling:
    """No top-k or top-p: the learner could not follow the distribution they leave."""
    return Sampling(
        max_tokens=settings.rollout.max_tokens,
        temperature=settings.rollout.temperature,
        stop_ids=codec.stop_ids,
        stop_strings=settings.rollout.stop_strings,
    )


def eval_sets(settings: config.Config, problems: Problems, codec: Codec) -> tuple[EvalSet, ...]:
    """Those of the recipe, then the slice of the training data that was set aside, if any."""

    def eval_set(entry: config.Eval) -> EvalSet:
        sampling = Sampling(
            max_tokens=entry.max_tokens or settings.rollout.max_tokens,
            temperature=entry.temperature,
            top_p=entry.top_p,
            stop_ids=codec.stop_ids,
            stop_strings=settings.rollout.stop_strings,
        )
        return EvalSet(
            name=entry.name, prompts=problems.evals[entry.name], n=entry.n, sampling=sampling, every=entry.every
        )

    entries = list(settings.eval)
    if problems.evals.keys() - {entry.name for entry in entries}:
        entries.append(config.Eval(name=config.HELD_OUT, every=settings.held_out.every))
    return tuple(eval_set(entry) for entry in entries)


def run_warm_start(parts: Parts, on_progress: Callable[[str, int, int, float], None]) -> None:
    """Every [[warm_start]] entry in turn; `told(name, step, steps, loss)` hears of each update."""
    begun = time.perf_counter()
    parts.engine.release()
    for number, entry in enumerate(parts.config.warm_start):
        rng = np.random.default_rng((parts.config.seed, 7919, number))

        def on_step(step: int, loss: float, number: int = number, entry: config.WarmStart = entry) -> None:
            on_progress(f"warm start {number + 1}", step + 1, entry.steps, loss)

        warm_start(
            parts.model,
            solution_batches(parts, entry, rng),
            steps=entry.steps,
            lr=entry.lr,
            pack_tokens=parts.config.learn.pack_tokens,
            on_step=on_step,
        )
    parts.engine.take_back()
    parts.warm_start_s = time.perf_counter() - begun


def solution_batches(
    parts: Parts, entry: config.WarmStart, rng: np.random.Generator
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Worked solutions as token ids. Those of a file come in epochs: all of them once before any comes again."""
    waiting: list[tuple[Prompt, str]] = []
    for _ in range(entry.steps):
        while len(waiting) < entry.batch:
            waiting += parts.problems.solutions(rng, max(entry.batch, parts.problems.worked), entry.options)
        pairs, waiting = waiting[: entry.batch], waiting[entry.batch :]
        yield [(parts.codec.encode(prompt), parts.codec.encode_response(text)) for prompt, text in pairs]


def save_parts(parts: Parts, folder: Path) -> None:
    engine = parts.engine.state_dict()
    drafter, waiting = parts.drafter, RolloutStore()
    pending = [rollout_to_json(r) for r in waiting.put(parts.judge.pending())]
    save_checkpoint(
        folder,
        model=parts.model,
        tokenizer=parts.tokenizer,
        tensors=parts.learner.tensors() | ({"drafter": drafter.tensors()} if drafter else {}),
        arrays={
            "traces": parts.store.arrays(),
            "judge": waiting.arrays(),
            "engine": {k: v for k, v in engine.items() if isinstance(v, np.ndarray)},
        },
        states={
            "tally": asdict(parts.tally),
            "learner": parts.learner.state_dict(),
            "curriculum": parts.curriculum.state_dict(),
            "drafter": drafter.state_dict() if drafter else None,
            "judge": pending,
            "engine": {k: v for k, v in engine.items() if not isinstance(v, np.ndarray)},
        },
        beside=(lambda path: write_drafter(path / FOLDER, drafter.live, parts.model.config)) if drafter else None,
    )


def load_drafter(actor: Actor, folder: Path) -> None:
    """The drafter beside the weights in `folder`, to draft with; what trains it further is in a checkpoint's state."""
    if actor.drafter is not None:
        read_drafter(folder / FOLDER, actor.drafter.live)


def restore_parts(parts: Parts, checkpoint: Checkpoint) -> None:
    """`parts` were built on the checkpoint's weights; everything else is put back here."""
    states, arrays = checkpoint.states, checkpoint.arrays
    try:
        load_weights_into(parts.model, checkpoint.folder)
        parts.learner.load(checkpoint.tensors, states["learner"])
        parts.curriculum.load_state_dict(states["curriculum"])
        parts.store.load(arrays["traces"])
        parts.engine.load_state_dict({**states["engine"], **arrays["engine"]})
        parts.tally = Progress(**states["tally"])
        if parts.drafter and states["drafter"]:
            parts.drafter.load(checkpoint.tensors["drafter"], states["drafter"])
    except KeyError as missing:
        raise WhetError(
            f"The checkpoint {checkpoint.folder} holds no {missing}; was it written by whet train?"
        ) from None
    waiting = RolloutStore()
    waiting.load(arrays["judge"])
    parts.judge.send(waiting.attach_rollouts([rollout_from_json(r) for r in states["judge"]]))
    parts.fresh = False
