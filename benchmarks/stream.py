"""Stream against barrier: how long the same groups take to train when some responses are far longer than most.

    python benchmarks/stream.py --device cuda --shape 135m [--learner] --out benchmarks/results
    python benchmarks/stream.py --train --seeds 0 1 --out benchmarks/results

Responses end at lengths drawn beforehand (log-normal, half of the variance the prompt's, half the rollout's own), so
that every arm does the same work, but for what an update cuts, which is drawn anew; the model's weights are random and
its tokens mean nothing. Curriculum, engine and weight updates are the real ones; verdicts cost no time and the learner
does nothing but count, so what is measured is generation alone. With --learner it trains on every group, and its
seconds are part of the makespan (stream_learner.json instead of stream.json). Every arm trains the same groups in the
same order, which is checked. An arm's makespan ends with the last update; what stream has begun beyond it by then is
given as `tokens_beyond`. Arms take turns, `repeats` times, and the median counts. The file is written after each arm.

With --train (`stream_train.py`) a real model is trained, learner, judges and all, with accuracy curves: stream_train_
and the device, .json. Its base is kept in --runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import Facts, build_curriculum
from whet.fast.fused import share_storage
from whet.fast.graphed import FastPasses
from whet.fast.graphs import GraphRunners
from whet.learn.learner import Learner
from whet.rollout.engine import LocalEngine
from whet.tools.bench.peers import shape_model
from whet.tools.experiment import circumstances
from whet.types import Batch, Clock, Report, Request, Rollout, Sampling

ROLLOUTS = 8
UPDATES = 40
"""Updates of --train."""
WARM_UP = 5
"""Updates before the clock runs: a size of pack is captured when it comes a second time."""


@dataclass(frozen=True)
class Work:
    groups: int
    updates: int
    slots: int
    median: int
    sigma: float
    cap: int
    prompt: int

    def length(self, prompt_id: str, group_id: int, index: int) -> int:
        """A prompt that is asked again is a new group, whose rollouts have lengths of their own, as with a model."""
        mine = np.random.default_rng([7, int(prompt_id)]).normal()
        own = np.random.default_rng([7, group_id, index + 1]).normal()
        return int(np.clip(self.median * math.exp(self.sigma * (mine + own) / math.sqrt(2)), 1, self.cap))

    def ids(self, prompt_id: str) -> list[int]:
        return np.random.default_rng([9, int(prompt_id)]).integers(1, 60, self.prompt).tolist()


WORK = {
    "cuda": Work(groups=64, updates=8, slots=512, median=256, sigma=1.0, cap=2048, prompt=64),
    "cpu": Work(groups=4, updates=6, slots=32, median=24, sigma=1.0, cap=192, prompt=8),
}


@dataclass(frozen=True)
class Arm:
    name: str
    mode: Literal["barrier", "stream"]
    on_update: Literal["cut", "recompute", "keep"] = "keep"
    look_ahead: int = 0

    @property
    def max_age(self) -> int:
        """What look-ahead takes: so many updates may pass between a group's first token and its turn."""
        return self.look_ahead


ARMS = [
    Arm("barrier", "barrier"),
    Arm("stream, keep, 1 ahead", "stream", "keep", 1),
    Arm("stream, recompute, 1 ahead", "stream", "recompute", 1),
    Arm("stream, cut", "stream", "cut"),
    Arm("stream, keep, 2 ahead", "stream", "keep", 2),
    Arm("stream, keep, 3 ahead", "stream", "keep", 3),
]


class Trainer:
    """The loop of `whet.loop` without a judge to wait for and, if no learner is given, with one that only counts."""

    def __init__(self, model: PreTrainedModel, work: Work, arm: Arm, learner: Learner | None = None) -> None:
        self.work, self.learner = work, learner
        self.cut = arm.mode == "stream" and arm.on_update == "cut"
        self.learner_s = 0.0
        self.engine = LocalEngine(
            model,
            encode=work.ids,
            decode=lambda ids: "",
            seed=0,
            slots=work.slots,
            context=-(-(work.prompt + work.cap) // 64) * 64,
            mode=arm.mode,
            on_update=arm.on_update,
            runners=GraphRunners() if model.device.type == "cuda" else None,
        )
        settings = config.CurriculumSettings(
            name="uniform", groups=work.groups, rollouts=ROLLOUTS, max_age=arm.max_age, look_ahead=arm.look_ahead
        )
        prompts = [str(i) for i in range(work.groups * (work.updates + 8))]
        self.curriculum: Curriculum = build_curriculum(
            settings, facts=Facts(ids=prompts), sampling=Sampling(max_tokens=work.cap), seed=0
        )
        self.version = 0
        self.asked: list[int] = []
        self.done: list[Rollout] = []
        self.trained: list[Batch] = []
        self.ages: list[np.ndarray] = []

    def warm_up(self) -> None:
        """Kernels are compiled and graphs captured before the clock runs: one prompt alone, then as many as fit."""
        short = Sampling(max_tokens=4)
        for count in (1, max(1, self.work.slots // ROLLOUTS)):
            self.engine.generate(
                [Request(prompt_id=str(i), group_id=i, n=ROLLOUTS, sampling=short, phase="eval") for i in range(count)]
            )
        self.engine.stats()

    def run(self) -> float:
        begin = time.perf_counter()
        for _ in range(self.work.updates):
            batch = self.gather()
            self.trained.append(batch)
            self.ages.append(
                np.concatenate([self.version - r.trace.versions for g in batch.groups for r in g.rollouts if r.trace])
            )
            self.learn(batch)
            self.version += 1
            self.engine.update(self.version)
            self.curriculum.updated(self.clock, Report(metrics={}))
        return time.perf_counter() - begin

    def learn(self, batch: Batch) -> None:
        begin = time.perf_counter()
        if self.learner is not None:
            self.learner.step(batch)
            if self.learner.device.type == "cuda":
                torch.cuda.synchronize()
        self.learner_s += time.perf_counter() - begin

    def gather(self) -> Batch:
        while (batch := self.curriculum.emit(self.clock)) is None:
            for request in (asked := self.curriculum.plan(self.clock)):
                self.asked += [self.work.length(request.prompt_id, request.group_id, k) for k in _indices(request)]
            self.engine.submit([self._sized(k, request) for request in asked for k in _indices(request)])
            done = self.engine.collect()
            self.done += done
            self.curriculum.observe([_judged(rollout) for rollout in done])
        return batch

    @property
    def clock(self) -> Clock:
        return Clock(
            step=self.version,
            version=self.version,
            groups=self.work.groups,
            free=self.engine.free,
            tokens=0,
            progress=self.version / self.work.updates,
            cut=self.cut,
        )

    def _sized(self, index: int, request: Request) -> Request:
        """One rollout of it, which ends at its own length; siblings are still prefilled once."""
        length = self.work.length(request.prompt_id, request.group_id, index)
        sampling = replace(request.sampling, max_tokens=length)
        return replace(request, first_index=index, n=1, sampling=sampling)


def _indices(request: Request) -> range:
    return range(request.first_index, request.first_index + request.n)


def _judged(rollout: Rollout) -> Rollout:
    if rollout.finish == "cut":
        return rollout
    right = rollout.index % 2 == 0
    return replace(rollout, verdict="right" if right else "wrong", score=float(right), reward=float(right))


def make_learner(model: PreTrainedModel, work: Work) -> Learner:
    """One for all arms: compiled once, its graphs captured by a few updates, and lengths do not ask what the weights
    are."""
    settings = config.Learn(estimator="rloo", lr=1e-6, pack_tokens=16_384)
    learner = Learner(model.requires_grad_(True), settings, encode=work.ids, passes=FastPasses)
    trainer = Trainer(model, replace(work, updates=WARM_UP), Arm("warm-up", "barrier"), learner)
    trainer.run()
    return learner


def measure(
    model: PreTrainedModel, work: Work, arm: Arm, learner: Learner | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Figures of one run of an arm, and the prompts it trained, in order."""
    trainer = Trainer(model, work, arm, learner)
    trainer.warm_up()
    seconds = trainer.run()
    stats = trainer.engine.stats()
    trained = [r for batch in trainer.trained for g in batch.groups for r in g.rollouts]
    cut = [work.length(r.prompt_id, r.group_id, r.index) for r in trainer.done if r.finish == "cut"]
    ages = np.concatenate(trainer.ages)
    tokens, steps = stats["rollout/tokens"], stats["rollout/steps"]
    figures = {
        "seconds": seconds,
        "learner_seconds": trainer.learner_s,
        "engine_seconds": stats["rollout/seconds"],
        "gpu_seconds": stats.get("rollout/gpu_seconds"),
        "steps": steps,
        "tokens": tokens,
        "tokens_trained": sum(r.length for r in trained),
        "tokens_beyond": tokens - sum(r.length for r in trained),
        "prefill_tokens": stats["rollout/prefill_tokens"],
        "idle_share": 1 - tokens / (steps * work.slots),
        "trained_tokens_per_s": sum(r.length for r in trained) / seconds,
        "age_mean": float(ages.mean()),
        "age_max": int(ages.max()),
        "on_policy_share": float((ages == 0).mean()),
        "length_asked": statistics.fmean(trainer.asked),
        "length_trained": statistics.fmean(r.length for r in trained),
        "length_cut": statistics.fmean(cut) if cut else None,
        "cut": len(cut),
    }
    return figures, [g.prompt_id for batch in trainer.trained for g in batch.groups]


def summary(runs: Sequence[dict[str, Any]], barrier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def median(of: Sequence[dict[str, Any]], key: str) -> float:
        return statistics.median(run[key] for run in of)

    return {
        "faster": median(barrier, "seconds") / median(runs, "seconds"),
        "fewer_steps": median(barrier, "steps") / median(runs, "steps"),
        "seconds": median(runs, "seconds"),
        "idle_share": median(runs, "idle_share"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(WORK), default="cpu")
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=[""], help='words in the names of those to run: "keep, 1" "cut"')
    parser.add_argument("--learner", action="store_true", help="train on the groups, too")
    parser.add_argument("--train", action="store_true", help="train a small model for real, with accuracy curves")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of --train")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="a group, of --train")
    parser.add_argument("--every", type=int, default=5, help="updates between evaluations, of --train")
    parser.add_argument("--runs", type=Path, default=Path("runs/stream"), help="where --train keeps its base")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.train:
        train_arms(args)
    else:
        generate_arms(args)


def train_arms(args: argparse.Namespace) -> None:
    from stream_train import compare, demo_recipe

    torch.set_num_threads(1)  # more are slower for a model of this size
    updates = args.updates or UPDATES
    recipe = demo_recipe(args.runs, args.device, groups=args.groups or 16, rollouts=args.rollouts, updates=updates)
    path = args.out / f"stream_train_{args.device}.json"
    compare(ARMS, recipe, args.seeds, updates=updates, every=args.every, path=path)


def generate_arms(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in ("updates", "groups", "slots") if getattr(args, name)}
    work = replace(WORK[args.device], **given)
    model = shape_model(args.shape, args.device)
    share_storage(model)
    learner = make_learner(model, work) if args.learner else None
    path = args.out / ("stream_learner.json" if args.learner else "stream.json")
    arms_run = [arm for arm in ARMS if arm.mode == "barrier" or any(word in arm.name for word in args.arms)]
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms_run}
    order: list[str] | None = None
    for _ in range(args.repeats):
        for arm in arms_run:
            figures, prompts = measure(model, work, arm, learner)
            order = prompts if order is None else order
            assert prompts == order, "every arm trains the same groups, in the same order"
            runs[arm.name].append(figures)
            arms = {n: {**summary(r, runs["barrier"]), "runs": r} for n, r in runs.items() if r}
            result = {"circumstances": circumstances(), "shape": args.shape, "work": vars(work), "arms": arms}
            path.write_text(json.dumps(result, indent=1) + "\n")
            line = " ".join(f"{k} {v:.3g}" for k, v in figures.items() if isinstance(v, int | float))
            print(f"{arm.name}: {arms[arm.name]['faster']:.2f}x | {line}", flush=True)
            gc.collect()  # the arm's engine, before the next one takes its memory
            if args.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
