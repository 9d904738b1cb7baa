"""What a curriculum costs at a million prompts: to build, for an update, at a border, and to save.

    python benchmarks/million.py --out benchmarks/results

No model: verdicts are drawn from each prompt's pass rate. An update is every call the loop makes for it (plan, observe,
emit, updated, and metrics once). All repeats do the same work, so update i costs the least of its repeats; `first`,
`median` and `largest` are over the updates. "seen" does the same after every prompt was visited, and its state is what
a checkpoint then holds: its size as JSON and the seconds to write it. Memory is what was allocated to build it, beside
the ids themselves.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.neighbours import KimiSource
from whet.tools.experiment import circumstances
from whet.types import Clock, Report, Request, Rollout, Sampling

SAMPLING = Sampling(max_tokens=512)
BORDER = ({"subset": "short", "steps": 2}, {"subset": "all"})
ARMS: dict[str, dict[str, Any]] = {
    "uniform": {"name": "uniform"},
    "dapo": {"name": "dapo"},
    "speed": {"name": "speed"},
    "kimi": {"name": "uniform", "source": "kimi"},
    "cures": {"name": "cures"},
    "cures, memory 0.9": {"name": "cures", "cures": {"memory": 0.9}},
    "cures, 4 subsets of 3 steps": {"name": "cures", "cures": {"subsets": 4, "subset_steps": 3}},
    "scalingrl": {"name": "scalingrl"},
    "scalingrl, a set of 64": {"name": "scalingrl", "scalingrl": {"share": 64 / 1_000_000}},
    "stages": {"name": "stages"},
    "stages, a border": {"name": "stages", "stages": BORDER},
    "stages, a border by responses": {"name": "stages", "stages": (BORDER[0] | {"by": "responses"}, BORDER[1])},
    "all": {"name": "all"},
    "all, one stage of everything": {"name": "all", "stages": ({},)},
    "all, a set of 64": {"name": "all", "scalingrl": {"share": 64 / 1_000_000}},
    "all, memory 0.9": {"name": "all", "cures": {"memory": 0.9}},
    "all, a border": {"name": "all", "stages": BORDER},
    "all, sigma by gradients": {"name": "all", "cures": {"sigma": "gradient"}},
    "all, max_age 2, stream": {"name": "all", "max_age": 2},
    "uniform and all, half each": {"name": "uniform"},
}
OF_ENTRIES = {"uniform and all, half each": ({}, {"name": "all"})}
"""What the two halves of the data want other than the arm says."""
STREAMS = {"all, max_age 2, stream": 256}
"""Rollouts that run at once."""


def facts(prompts: int) -> Facts:
    rng = np.random.default_rng(0)
    return Facts(
        ids=[hashlib.blake2b(str(i).encode(), digest_size=8).hexdigest() for i in range(prompts)],
        characters=rng.integers(40, 600, prompts).tolist(),
        levels=[None] * prompts,
        tasks=["math"] * prompts,
        entries=[(prompts // 2, 1.0), (prompts - prompts // 2, 1.0)],
    )


def answer(request: Request, version: int, rng: random.Random) -> list[Rollout]:
    """Two fifths of the prompts are always solved, two fifths never, the rest as often as not; by their ids."""
    rate = (1.0, 1.0, 0.5, 0.0, 0.0)[int(request.prompt_id[:6], 16) % 5]
    rollouts = []
    for index in range(request.first_index, request.first_index + request.n):
        right = rng.random() < rate
        rollouts.append(
            Rollout(
                prompt_id=request.prompt_id, group_id=request.group_id, index=index, phase=request.phase,
                sampling=request.sampling, length=rng.randrange(20, 300), finish="stop", first_version=version,
                last_version=version, verdict="right" if right else "wrong", score=float(right), reward=float(right),
            )
        )  # fmt: skip
    return rollouts


class Loop:
    """The trainer's, without a model; `slots` is stream: half of what runs comes back at a time."""

    def __init__(self, curriculum: Curriculum, groups: int, slots: int | None, begin: int = 0):
        self.curriculum, self.groups, self.slots, self.step = curriculum, groups, slots, begin
        self.running: list[Rollout] = []
        self.score = np.random.default_rng(0).normal(size=1024).astype(np.float32)
        self.rng = random.Random(begin)
        self.spent = 0.0

    def update(self) -> float:
        """Processor seconds of one."""
        self.spent = 0.0
        while (batch := self.call("emit", self.clock)) is None:
            for request in self.call("plan", self.clock):
                self.running += answer(request, self.step, self.rng)
            count = len(self.running) if self.slots is None else -(-len(self.running) // 2)
            done, self.running = self.running[:count], self.running[count:]
            self.call("observe", done)
        self.step += 1
        keys = [r.key for group in batch.groups for r in group.rollouts] if "score" in self.curriculum.needs else []
        self.call("updated", self.clock, Report(metrics={}, signals={key: {"score": self.score} for key in keys}))
        self.call("metrics")
        return self.spent

    @property
    def clock(self) -> Clock:
        free = None if self.slots is None else max(0, self.slots - len(self.running))
        return Clock(step=self.step, version=self.step, groups=self.groups, free=free, tokens=0, progress=0.1)

    def call(self, name: str, *args: Any) -> Any:
        begun = time.process_time()
        result = getattr(self.curriculum, name)(*args)
        self.spent += time.process_time() - begun
        return result


def visit_all(curriculum: Any, step: int) -> None:
    """As if every prompt had been judged four times by now."""
    if members := getattr(curriculum, "parts", None):
        for member in members:
            visit_all(member.curriculum, step)
        return
    if inner := getattr(curriculum, "inner", None):
        return visit_all(inner, step)
    source = curriculum.source
    if isinstance(source, KimiSource):
        source.counts = {prompt_id: [row % 5, 4] for row, prompt_id in enumerate(source.ids)}
    if posterior := getattr(source, "posterior", None):
        rows = np.arange(len(posterior.ids))
        posterior.now = max(0, step - 1)
        posterior.add(rows, right=rows % 5, wrong=4 - rows % 5)
    history = getattr(getattr(source, "pool", None) or source, "history", None)
    if history is not None:
        rows = np.arange(len(history.visits))
        history.handed[:], history.visits[:], history.judged[:], history.tokens[:] = 1, 1, 4, 400
        history.right[:] = rows % 5
        history.rate[:] = rows % 5 / 4
        history.length[:] = 100.0 + rows % 97
        history.kind[:] = np.array([2, 1, 1, 1, 3])[rows % 5]
        history.solved[:] = rows % 5 > 0


def measure(arm: str, settings: Mapping[str, Any], known: Facts, updates: int, repeats: int) -> dict[str, Any]:
    section = config.CurriculumSettings.model_validate(settings)

    def build() -> Curriculum:
        mine = replace(known, settings=OF_ENTRIES.get(arm, ()))
        return build_curriculum(section, facts=mine, sampling=SAMPLING, seed=0)

    def runs(seen: bool) -> tuple[list[float], list[list[float]], Curriculum]:
        built, costs = [], []
        for _ in range(repeats):
            gc.collect()
            begun = time.process_time()
            curriculum = build()
            built.append(time.process_time() - begun)
            loop = Loop(curriculum, section.groups, STREAMS.get(arm))
            if seen:
                visit_all(curriculum, loop.step)
                saved = json.loads(json.dumps(curriculum.state_dict()))
                curriculum.load_state_dict(saved)
            costs.append([loop.update() for _ in range(updates)])
        return built, costs, curriculum

    built, fresh, _ = runs(seen=False)
    _, seen, curriculum = runs(seen=True)
    begun = time.process_time()
    size = len(json.dumps(curriculum.state_dict()))
    saving = time.process_time() - begun
    tracemalloc.start()
    whole = build()
    visit_all(whole, 0)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "arm": arm,
        "construction_s": round(min(built), 3),
        "fresh_ms": summary(fresh),
        "seen_ms": summary(seen),
        "state_mb": round(size / 1e6, 1),
        "save_s": round(saving, 2),
        "memory_mb": round(memory / 1e6),
    }


def summary(costs: Sequence[Sequence[float]]) -> dict[str, float]:
    each = [1000 * min(repeat) for repeat in zip(*costs, strict=True)]
    return {
        "first": round(each[0], 1),
        "median": round(statistics.median(each[1:]), 1),
        "largest": round(max(each[1:]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), metavar="ARM")
    options = parser.parse_args()
    known = facts(options.prompts)
    rows = []
    for arm in options.arms:
        rows.append(measure(arm, ARMS[arm], known, options.updates, options.repeats))
        print(json.dumps(rows[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(options, name) for name in ("prompts", "updates", "repeats")}
    result = {**circumstances(), "seed": 0, "settings": settings, "arms": rows}
    (options.out / "million.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
