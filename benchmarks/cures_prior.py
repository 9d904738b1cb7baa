"""What a prior from the pool saves CurES, and `all` over it, where few prompts can be solved: simulated, no model.

    python benchmarks/cures_prior.py --out benchmarks/results

A pool of 1,536 prompts whose pass rates are drawn from Beta(0.146, 3.34), mean 4%, as measured with SmolLM2 on GSM8K,
and stay what they are. Counted after so many rollouts: informative groups trained on (right and wrong answers among 8),
and of how many prompts they are. Means over seeds. Nothing is learnt here: what repetition costs a model is not seen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from whet import config
from whet.curriculum.build import Facts, build_curriculum
from whet.testing.simulator import Simulator, World
from whet.tools.bench.stand import circumstances
from whet.types import Batch, Clock, Report, Sampling

PROMPTS, ROLLOUTS = 1536, 8
MARKS = (3000, 5000, 8000, 12_000, 16_000)
STAGES = [{"subset": "short", "max_tokens": 128, "steps": 10}, {"subset": "all"}]
ARMS: dict[str, dict[str, Any]] = {
    "uniform": {"name": "uniform", "groups": 64},
    "speed": {"name": "speed"},
    "all, two stages": {"name": "all", "stages": STAGES, "cures": {"tau": 0.05}},
    **{
        f"{name}, {prior}, tau {tau}": {"name": name, "groups": groups, "cures": {"tau": tau, "prior": prior}}
        for name, groups in (("all", 16), ("cures", 32))
        for prior, tau in (("even", 0.05), ("pool", 0.05), ("pool", 0.1), ("pool", 0.2))
    },
}


def informative(batch: Batch) -> list[str]:
    """The prompts of its groups with right and wrong answers."""
    return [g.rollouts[0].prompt_id for g in batch.groups if len({r.verdict for r in g.rollouts}) > 1]


def run(arm: dict[str, Any], seed: int) -> list[tuple[int, int, int]]:
    """(informative groups, prompts, updates) at each of MARKS."""
    rng = np.random.default_rng(seed)
    rates = rng.beta(0.146, 3.34, PROMPTS)
    settings = config.Curriculum(**{"groups": 16, "rollouts": ROLLOUTS, "starvation": "partial", **arm})
    world = World(prompts=PROMPTS, pass_rates=tuple(rates), lengths=(90,), groups=settings.groups, seed=seed)
    facts = Facts(ids=world.ids, characters=(200 - 90 * np.sqrt(rates) + 60 * rng.standard_normal(PROMPTS)).astype(int))
    curriculum = build_curriculum(settings, facts=facts, sampling=Sampling(max_tokens=256), seed=seed)
    simulator, found, asked, step, trained = Simulator(world, sealed=False), [], 0, 0, list[str]()
    while len(found) < len(MARKS):
        now = Clock(step=step, version=step, groups=settings.groups, free=None, tokens=simulator.tokens, progress=0.0)
        batch = curriculum.emit(now)
        if batch is None:
            requests = curriculum.plan(now)
            asked += sum(request.n for request in requests)
            simulator.submit(requests)
            curriculum.observe(simulator.collect())
            continue
        trained += informative(batch)
        step += 1
        simulator.update(step)
        curriculum.updated(now, Report(metrics={}, signals={}))
        found += [(len(trained), len(set(trained)), step)] * (sum(mark <= asked for mark in MARKS) - len(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    result: dict[str, Any] = {**circumstances(), "seeds": options.seeds, "marks": MARKS, "arms": {}}
    for name, arm in ARMS.items():
        rows = np.array([run(arm, seed) for seed in range(options.seeds)]).mean(0).round().astype(int).tolist()
        result["arms"][name] = [dict(zip(("groups", "prompts", "updates"), row, strict=True)) for row in rows]
        print(f"{name:28}", "  ".join(f"{m}: {g} ({p})" for m, (g, p, _) in zip(MARKS, rows, strict=True)), flush=True)
    (options.out / "cures_prior.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
