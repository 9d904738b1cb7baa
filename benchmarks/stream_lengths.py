"""Is what stream trains on as long as what the policy writes? Real engine, frozen weights.

    python benchmarks/stream_lengths.py --out benchmarks/results/stream_lengths.json

A tiny model whose weights never move writes responses that end by chance; curriculum, engine and the version that moves
with each update are the real ones, and verdicts depend on nothing. Noise is keyed by group and index, so what an update
cut is written to its end afterwards: the policy's mean is over everything that was asked. What trained is a part of
that, so the two share most of their noise; the interval is over seeds (Student's t, 95%).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from whet import config
from whet.curriculum.build import Facts, build_curriculum
from whet.model.load import tiny_model
from whet.rollout.engine import LocalEngine
from whet.tools.experiment import circumstances
from whet.types import Clock, Key, Report, Request, Rollout, Sampling

GROUPS, ROLLOUTS, SLOTS, VOCAB, LIMIT = 8, 6, 64, 64, 96
STOP = (1, 2)
"""Two tokens of 64 end a response: after some 30 tokens, by chance."""
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365}
"""Student's t for a mean of so many seeds."""

CASES = [(name, on_update) for on_update in ("cut", "keep") for name in ("uniform", "speed", "cures")]


def encode(prompt_id: str) -> list[int]:
    return np.random.default_rng([9, int(prompt_id)]).integers(3, VOCAB, 4).tolist()


def judged(rollout: Rollout, seed: int) -> Rollout:
    if rollout.finish == "cut":
        return rollout
    right = bool(np.random.default_rng([seed, *rollout.key]).random() < 0.5)
    return replace(rollout, verdict="right" if right else "wrong", score=float(right), reward=float(right))


def play(name: str, on_update: Literal["cut", "keep"], seed: int, updates: int) -> dict[str, float]:
    """Mean lengths of one run: trained, asked, and what came back and was not cut."""
    engine = LocalEngine(
        tiny_model(VOCAB, hidden=32, layers=1, heads=2, context=128),
        encode=encode,
        decode=lambda ids: "",
        seed=seed,
        slots=SLOTS,
        context=128,
        mode="stream",
        on_update=on_update,
    )
    curriculum = build_curriculum(
        config.CurriculumSettings(name=name, groups=GROUPS, rollouts=ROLLOUTS, max_age=1),
        facts=Facts(ids=[str(i) for i in range(200)]),
        sampling=Sampling(max_tokens=LIMIT, stop_ids=STOP),
        seed=seed,
    )
    version = 0

    def clock() -> Clock:
        share, cut = version / updates, on_update == "cut"
        return Clock(step=version, version=version, groups=GROUPS, free=engine.free, tokens=0, progress=share, cut=cut)

    asked: dict[Key, Request] = {}
    done: list[Rollout] = []
    trained: list[int] = []
    while version < updates:
        while (batch := curriculum.emit(clock())) is None:
            for request in (requests := curriculum.plan(clock())):
                for index in range(request.first_index, request.first_index + request.n):
                    asked[request.group_id, index] = replace(request, first_index=index, n=1)
            engine.submit(requests)
            came = engine.collect()
            done += came
            curriculum.observe([judged(rollout, seed) for rollout in came])
        trained += [rollout.length for group in batch.groups for rollout in group.rollouts]
        version += 1
        engine.update(version)
        curriculum.updated(clock(), Report(metrics={}))
    held = curriculum.holds()  # begun for updates that do not come
    finished = {rollout.key: rollout.length for rollout in done if rollout.finish != "cut"}
    due = {key: request for key, request in asked.items() if key[0] not in held}
    policy = [length for key, length in finished.items() if key in due]
    policy += [r.length for r in engine.generate([request for key, request in due.items() if key not in finished])]
    return {
        "trained": statistics.fmean(trained),
        "policy": statistics.fmean(policy),
        "came_back": statistics.fmean(finished.values()),
        "rollouts_trained": len(trained),
        "rollouts_asked": len(policy),
        "cut": sum(rollout.finish == "cut" for rollout in done),
    }


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    off = [100 * (run["trained"] / run["policy"] - 1) for run in runs]
    half = T95[len(off)] * statistics.stdev(off) / len(off) ** 0.5
    mean = statistics.fmean(off)
    return {"trained_against_policy_percent": mean, "low": mean - half, "high": mean + half, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, choices=sorted(T95))
    parser.add_argument("--cases", default="", help='those with this in their names alone: "speed, cut"')
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    for name, on_update in CASES:
        if args.cases not in f"{name}, {on_update}":
            continue
        found = summary([play(name, on_update, seed, args.updates) for seed in range(args.seeds)])
        cases[f"{name}, {on_update}"] = found
        off, low, high = (found[key] for key in ("trained_against_policy_percent", "low", "high"))
        print(f"{name}, {on_update}: trained {off:+.2f}% [{low:+.2f}, {high:+.2f}] against the policy", flush=True)
        args.out.write_text(json.dumps({"circumstances": circumstances(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
