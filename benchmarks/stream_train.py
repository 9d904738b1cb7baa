"""Stream against barrier with a real learner: a tiny model trained on chained arithmetic, arm by arm.

`stream.py --train` calls `compare`. Everything is as in a run (`whet.loop`): curriculum, engine, judges in their
processes, learner, weight updates. Arms of a seed train as many groups of the same prompts in the same order, which is
checked. Accuracy is measured by an engine of its own that shares the weights and off the clock, so that no rollout of
an arm gets on while it is. Beside seconds of the clock there are those of this process alone (`cpu_s`: without the
judges' processes and without waiting), for machines that do other work at the same time, and decode steps, which do
not depend on the machine at all.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from base import make_base
from curricula import read_ground
from rich.console import Console

from whet import config
from whet.assembly import Parts, build_engine, build_parts, check_run
from whet.config import merged as merge
from whet.eval import evaluate
from whet.loop import Log, train
from whet.recipe import parse_config
from whet.report.live import RunProgress
from whet.rollout.base import Engine
from whet.tools.demo import with_mix
from whet.tools.experiment import circumstances
from whet.types import Batch, Report, Rollout
from whet.watch import Stopwatch

if TYPE_CHECKING:
    from stream import Arm

MIX = "most"
"""Most prompts are neither trivial nor hopeless, so a short training learns."""


@dataclass
class Record:
    """What one arm did."""

    prompts: list[str] = field(default_factory=list)
    """Trained, in order."""
    returned: list[Rollout] = field(default_factory=list)
    """All rollouts that came back, cut ones included."""
    trained: list[Rollout] = field(default_factory=list)
    ages: list[np.ndarray] = field(default_factory=list)
    """Age of every trained token, in versions."""
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)

    def spend(self, watch: Stopwatch) -> None:
        for name, value in watch.metrics().items():
            key = name.removeprefix("time/")
            self.seconds[key] = self.seconds.get(key, 0.0) + value


def compare(
    arms: Sequence[Arm],
    recipe: Callable[[Arm, int], config.Config],
    seeds: Sequence[int],
    *,
    updates: int,
    every: int,
    path: Path,
) -> dict[str, Any]:
    """Every arm of every seed, the arms in turn; the file is written after each."""
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    result: dict[str, Any] = {}
    for seed in seeds:
        order: list[str] | None = None
        for arm in arms:
            settings = recipe(arm, seed)
            record, stats = train_arm(settings, updates, every)
            order = record.prompts if order is None else order
            assert record.prompts == order, "every arm trains the same groups, in the same order"
            runs[arm.name].append({"seed": seed, **figures(record, stats, settings)})
            found = {n: {**summary(r, runs[arms[0].name]), "runs": r} for n, r in runs.items() if r}
            work: dict[str, Any] = {
                "updates": updates,
                "groups": settings.curriculum.groups,
                "rollouts": settings.curriculum.rollouts,
            }
            work |= {"slots": settings.rollout.slots, "max_tokens": settings.rollout.max_tokens, "mix": MIX}
            result = {"circumstances": circumstances(), "work": work, "arms": found}
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"seed {seed}, {arm.name}: {line(runs[arm.name][-1])}", flush=True)
    return result


def train_arm(settings: config.Config, updates: int, every: int) -> tuple[Record, dict[str, float]]:
    """So many updates of a recipe, and an evaluation before the first, every so many, and after the last."""
    plan = check_run(settings)
    parts = build_parts(plan)
    try:
        barrier = plan.settings.rollout.model_copy(update={"mode": "barrier"})
        alone = replace(plan, settings=plan.settings.model_copy(update={"rollout": barrier}))
        second = build_engine(alone, parts.model)
        log = Recorder(parts, second, updates, every)
        train(parts, log)
        return log.record_of_arm, parts.engine.stats()
    finally:
        parts.close()


class Recorder(Log):
    """Follows the loop with a record and evaluations of its own, without a run folder."""

    def __init__(self, parts: Parts, second: Engine, updates: int, every: int) -> None:
        super().__init__(None, parts, RunProgress(quiet=True))  # type: ignore[arg-type]
        self.second, self.updates, self.every = second, updates, every
        self.record_of_arm = Record()

    @property
    def stopping(self) -> bool:
        return self.parts.tally.step >= self.updates

    def begin(self) -> None:
        measure(self.record_of_arm, self.parts, self.second)
        self.watch, self.cpu = Stopwatch(), time.process_time()

    def emitted(self, batch: Batch) -> None:
        record, version = self.record_of_arm, self.parts.learner.version
        self.rollouts = [r for group in self.parts.store.attach(batch).groups for r in group.rollouts]
        record.ages.append(np.concatenate([version - r.trace.versions for r in self.rollouts if r.trace]))

    def updated(self, batch: Batch, report: Report) -> None:
        record, update = self.record_of_arm, self.parts.tally.step
        self.watch.move("train", "log_probs", self.parts.learner.scored_s)
        record.spend(self.watch)
        record.cpu_s += time.process_time() - self.cpu
        record.returned += self.seen
        record.trained += self.rollouts
        record.prompts += [group.prompt_id for group in batch.groups]
        if update % self.every == 0 or update == self.updates:
            measure(record, self.parts, self.second)
        self.watch, self.cpu = Stopwatch(), time.process_time()


def measure(record: Record, parts: Parts, engine: Engine) -> None:
    (eval_set,) = parts.evals
    found = evaluate(eval_set, engine, parts.judge)
    parts.judge.stats()
    record.curve.append(
        {
            "update": float(parts.tally.step),
            "seconds": record.seconds.get("total", 0.0),
            "cpu_s": record.cpu_s,
            "tokens": float(parts.tally.tokens_generated),
            "accuracy": found[f"eval/{eval_set.name}/accuracy"],
        }
    )


def figures(record: Record, stats: Mapping[str, float], settings: config.Config) -> dict[str, Any]:
    """Lengths of the cut are what was there of them when they were."""
    ages = np.concatenate(record.ages)
    done = [r for r in record.returned if r.finish != "cut"]
    cut = [r for r in record.returned if r.finish == "cut"]
    tokens, steps = stats["rollout/tokens"], stats["rollout/steps"]
    return {
        "seconds": record.seconds["total"],
        "cpu_s": record.cpu_s,
        "split": {name: round(value, 3) for name, value in sorted(record.seconds.items()) if name != "total"},
        "steps": steps,
        "tokens": tokens,
        "prefill_tokens": stats["rollout/prefill_tokens"],
        "tokens_trained": sum(r.length for r in record.trained),
        "idle_share": 1 - tokens / (steps * settings.rollout.slots),
        "age_mean": float(ages.mean()),
        "age_max": int(ages.max()),
        "on_policy_share": float((ages == 0).mean()),
        "length_returned": mean_length(done),
        "length_trained": mean_length(record.trained),
        "length_cut": mean_length(cut),
        "cut": len(cut),
        "groups": len(record.prompts),
        "accuracy_mean": statistics.fmean(point["accuracy"] for point in record.curve),
        "accuracy_last": record.curve[-1]["accuracy"],
        "curve": record.curve,
    }


def mean_length(rollouts: Sequence[Rollout]) -> float | None:
    return statistics.fmean(r.length for r in rollouts) if rollouts else None


def summary(runs: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over seeds, and ratios to the first arm's of the same seeds."""
    first = first[: len(runs)]

    def mean(of: Sequence[Mapping[str, Any]], key: str) -> float:
        return statistics.fmean(run[key] for run in of)

    kept = ("seconds", "cpu_s", "steps", "idle_share", "age_mean", "accuracy_mean", "accuracy_last")
    return {
        "faster": mean(first, "seconds") / mean(runs, "seconds"),
        "less_cpu": mean(first, "cpu_s") / mean(runs, "cpu_s"),
        "fewer_steps": mean(first, "steps") / mean(runs, "steps"),
        **{key: mean(runs, key) for key in kept},
    }


def line(run: Mapping[str, Any]) -> str:
    numbers = {k: v for k, v in run.items() if isinstance(v, int | float) and k != "seed"}
    curve = " ".join(f"{point['accuracy']:.3f}" for point in run["curve"])
    return " ".join(f"{k} {v:.4g}" for k, v in numbers.items()) + f" | accuracy {curve}"


def demo_recipe(
    runs: Path, device: str, *, groups: int, rollouts: int, updates: int, tree: Mapping[str, Any] | None = None
) -> Callable[[Arm, int], config.Config]:
    """The base of curricula.toml, made once and kept in `runs`; then a uniform arm with the engine's settings of `Arm`.

    tree: other settings than those of curricula.toml, in the same layout.
    """
    tree = tree or read_ground()
    base = make_base(runs / "base", merge(tree["base"], {"model": {"device": device}}), Console())

    def recipe(arm: Arm, seed: int) -> config.Config:
        own: dict[str, Any] = {
            "seed": seed,
            "steps": updates,
            "token_budget": 0,
            "model": {"name": str(base), "device": device},
            "rollout": {"mode": arm.mode, "on_update": arm.on_update, "slots": groups * rollouts},
            "curriculum": {
                "name": "uniform",
                "groups": groups,
                "rollouts": rollouts,
                "max_age": arm.max_age,
                "look_ahead": arm.look_ahead,
            },
        }
        return parse_config(with_mix(merge(tree["arm"], own), tree["mixes"][MIX]["mix"]))

    return recipe
