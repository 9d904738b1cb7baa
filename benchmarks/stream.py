"""Stream against barrier: how long the same groups take to train when some responses are far longer than most.

    python benchmarks/stream.py --device cuda --shape 135m --out benchmarks/results

Responses end at lengths drawn beforehand (log-normal, half of the variance the prompt's, half the rollout's own), so
that every arm does the same work; the model's weights are random and its tokens mean nothing. Curriculum, engine and
weight updates are the real ones; verdicts cost no time and the learner does nothing but count, so what is measured is
generation alone: a learner's time comes on top for all arms alike. Every arm trains the same groups in the same order,
which is checked. An arm's makespan ends with the last update; what stream has begun beyond it by then is given as
`tokens_beyond`. Arms take turns, `repeats` times, and the median counts. One file, stream.json, written after each arm.
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
from whet.bench.circumstances import circumstances
from whet.bench.shapes import shape_model
from whet.curriculum.base import Curriculum
from whet.curriculum.build import Facts, build_curriculum
from whet.model.storage import share_storage
from whet.rollout.engine import LocalEngine
from whet.types import Batch, Clock, Report, Request, Rollout, Sampling

ROLLOUTS = 8


@dataclass(frozen=True)
class Work:
    groups: int
    updates: int
    slots: int
    median: int
    sigma: float
    cap: int
    prompt: int

    def length(self, prompt_id: str, index: int) -> int:
        mine = np.random.default_rng([7, int(prompt_id)]).normal()
        own = np.random.default_rng([7, int(prompt_id), index + 1]).normal()
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
    Arm("stream, cut, 1 ahead", "stream", "cut", 1),
    Arm("stream, keep, 2 ahead", "stream", "keep", 2),
    Arm("stream, keep, 3 ahead", "stream", "keep", 3),
]


class Trainer:
    """The loop of `whet.loop` without a judge to wait for and with a learner that only counts."""

    def __init__(self, model: PreTrainedModel, work: Work, arm: Arm) -> None:
        self.work = work
        self.engine = LocalEngine(
            model,
            encode=work.ids,
            decode=lambda ids: "",
            seed=0,
            slots=work.slots,
            context=-(-(work.prompt + work.cap) // 64) * 64,
            mode=arm.mode,
            on_update=arm.on_update,
            graphs=model.device.type == "cuda",
        )
        settings = config.Curriculum(
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
            self.version += 1
            self.engine.update(self.version)
            self.curriculum.updated(self.clock, Report(metrics={}))
        return time.perf_counter() - begin

    def gather(self) -> Batch:
        while (batch := self.curriculum.emit(self.clock)) is None:
            for request in (asked := self.curriculum.plan(self.clock)):
                self.asked += [self.work.length(request.prompt_id, k) for k in _indices(request)]
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
        )

    def _sized(self, index: int, request: Request) -> Request:
        """One rollout of it, which ends at its own length; siblings are still prefilled once."""
        sampling = replace(request.sampling, max_tokens=self.work.length(request.prompt_id, index))
        return replace(request, first_index=index, n=1, sampling=sampling)


def _indices(request: Request) -> range:
    return range(request.first_index, request.first_index + request.n)


def _judged(rollout: Rollout) -> Rollout:
    if rollout.finish == "cut":
        return rollout
    right = rollout.index % 2 == 0
    return replace(rollout, verdict="right" if right else "wrong", score=float(right), reward=float(right))


def measure(model: PreTrainedModel, work: Work, arm: Arm) -> tuple[dict[str, Any], list[str]]:
    """Figures of one run of an arm, and the prompts it trained, in order."""
    trainer = Trainer(model, work, arm)
    trainer.warm_up()
    seconds = trainer.run()
    stats = trainer.engine.stats()
    trained = [r for batch in trainer.trained for g in batch.groups for r in g.rollouts]
    cut = [work.length(r.prompt_id, r.index) for r in trainer.done if r.finish == "cut"]
    ages = np.concatenate(trainer.ages)
    tokens, steps = stats["rollout/tokens"], stats["rollout/steps"]
    figures = {
        "seconds": seconds,
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
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("updates", "groups", "slots") if getattr(args, name)}
    work = replace(WORK[args.device], **given)
    model = shape_model(args.shape, args.device)
    share_storage(model)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "stream.json"
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in ARMS}
    order: list[str] | None = None
    for _ in range(args.repeats):
        for arm in ARMS:
            figures, prompts = measure(model, work, arm)
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
