"""The learner's step with a prompt fed once for all responses of its group, against once for each; in turn.

    python benchmarks/shared_prompts.py --shape 135m --out DIR
    python benchmarks/shared_prompts.py --shape 1.5b --groups 8 --rollouts 16 --out DIR

Random prompts of 60 to 150 tokens, responses of 20 to 110, as on GSM8K. A measurement is whole steps (packs, forward,
backward, optimiser) of one and the same learner, whose switch is turned between rounds; the first steps of each way,
which compile and capture, are not counted. Both ways see the same batch first, from the same weights: their loss,
gradient and entropy are told side by side. Without a GPU only `--shape tiny` is of use, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from learner import CUDA, batch_of, timed

from whet.config import Learn
from whet.fast.graphed import FastPasses
from whet.learn.learner import Learner
from whet.model.packing import make_packs
from whet.tools.bench.peers import shape_model
from whet.tools.bench.stand import circumstances
from whet.types import Batch, Group

ROUNDS = 5
WARM_UP = 3
PROMPT, RESPONSE = (60, 150), (20, 110)
WAYS = {"each": False, "once": True}
TOLD = ("learn/loss", "learn/grad_norm", "learn/entropy")


def batch(groups: int, rollouts: int, vocab: int, seed: int) -> tuple[Batch, dict[str, list[int]]]:
    """And the tokens of its prompts, by their ids. Two rollouts of a group are right."""
    rng = np.random.default_rng(seed)
    made, prompts = list[Group](), dict[str, list[int]]()
    for number in range(groups):
        drawn = [batch_of(1, int(n), vocab, int(rng.integers(2**31))) for n in rng.integers(*RESPONSE, rollouts)]
        ours = [replace(b.groups[0].rollouts[0], group_id=number, prompt_id=f"p{number}") for b in drawn]
        told = [replace(r, index=i, reward=float(i < 2), score=float(i < 2)) for i, r in enumerate(ours)]
        made.append(Group(prompt_id=f"p{number}", group_id=number, rollouts=tuple(told), weight=None))
        prompts[f"p{number}"] = rng.integers(1, vocab, int(rng.integers(*PROMPT))).tolist()
    return Batch(groups=tuple(made)), prompts


def fed(of: Batch, prompts: dict[str, list[int]], share: bool, budget: int) -> int:
    """Tokens."""
    pairs = [(prompts[g.prompt_id], r.trace.ids) for g in of.groups for r in g.rollouts if r.trace is not None]
    return sum(pack.input_ids.numel() for pack in make_packs(pairs, budget, share=share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="135m", choices=["135m", "1.5b", "tiny"])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--pack-tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=5, help="a round")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = shape_model(args.shape, "cuda" if CUDA else "cpu").requires_grad_(True)
    ours, tokens = batch(args.groups, args.rollouts, model.config.vocab_size, seed=0)
    settings = Learn(lr=1e-12, pack_tokens=args.pack_tokens)
    learner = Learner(model, settings, encode=tokens.__getitem__, passes=FastPasses)
    passes: Any = learner.passes
    result: dict[str, Any] = {"circumstances": circumstances(), "shape": args.shape, "groups": args.groups}
    result |= {"rollouts": args.rollouts, "compiled": passes.form, "graphed": passes.graphed is not None}
    result["first"], result["step_s"] = {}, {way: [] for way in WAYS}
    result["fed"] = {way: fed(ours, tokens, share, args.pack_tokens) for way, share in WAYS.items()}
    for turn in range(-WARM_UP, ROUNDS):
        for way, learner.share in WAYS.items():
            if turn == -WARM_UP:
                told = learner.step(ours).metrics
                result["first"][way] = {key: told[key] for key in TOLD}
                print(way, result["fed"][way], "tokens", result["first"][way], flush=True)
            took = timed(learner, ours, args.steps if turn >= 0 else 1)["step_s"]
            if turn >= 0:
                result["step_s"][way].append(took)
    ratios = sorted(a / b for a, b in zip(*result["step_s"].values(), strict=True))
    result["times_as_fast"] = {"median": statistics.median(ratios), "range": [ratios[0], ratios[-1]]}
    for way, seconds in result["step_s"].items():
        print(f"{way}: {1e3 * statistics.median(seconds):.1f} ms ({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f})")
    print(f"once is {statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    args.out.mkdir(parents=True, exist_ok=True)
    where = args.out / f"shared_prompts_{args.shape}_{args.groups}x{args.rollouts}.json"
    where.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
