"""The learner's step with weights divided by FSDP2 (`learn.shard = "full"`) against the plain one, in turn.

    python benchmarks/full_mfu.py --shape 1.5b --tokens 16384 --out DIR [--packs 4] [--checkpoint] [--profile]

A group of one process: nothing is sent, but every weight goes through the gathering, widening and copying of FSDP2, and
after the step into the engine's copy. So the ratio is what `full` costs before any network. Random weights and
responses, MFU and rounds as in `learner.py`; the step of `full` includes the filling of the copy. `--packs` cuts the
tokens into so many passes, each of which gathers all layers anew. The first step of both must give the same loss and
gradient norm, up to rounding. Without a GPU only `--shape tiny` is of use, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from learner import CUDA, ROUNDS, WARM_UP, batch_of, kernels, now, summary, timed

from whet.cluster.shards import ShardedLearner
from whet.config import Learn
from whet.fast.graphed import FastPasses
from whet.learn.learner import Learner
from whet.tools.bench.peers import shape_model
from whet.tools.experiment import circumstances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.5b", choices=["135m", "1.5b", "tiny"])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--packs", type=int, default=1, help="passes that the tokens are cut into")
    parser.add_argument("--steps", type=int, default=5, help="a round")
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again")
    parser.add_argument("--profile", action="store_true", help="print the kernels that took most")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("nccl" if CUDA else "gloo", init_method=meeting, rank=0, world_size=1)
        measure(args)
        dist.destroy_process_group()


def measure(args: argparse.Namespace) -> None:
    settings = Learn(
        estimator="reinforce",
        pack_tokens=max(16, args.tokens // args.packs),
        lr=1e-6,
        checkpoint_activations=args.checkpoint,
    )
    learners: dict[str, Learner] = {}
    result: dict[str, Any] = {"circumstances": circumstances(), "runs": {}, "summary": {}, "compiled": {}, "first": {}}
    result["arguments"] = {name: str(value) for name, value in vars(args).items() if name != "out"}
    for name, kind in (("none", Learner), ("full", ShardedLearner)):
        begun = now()
        model = shape_model(args.shape, "cuda" if CUDA else "cpu").requires_grad_(True)
        learners[name] = kind(model, settings, encode=lambda prompt: [1], passes=FastPasses)
        passes: Any = learners[name].passes
        result["compiled"][name] = passes.form
        print(f"{name}: ready in {now() - begun:.1f} s, compiled: {passes.form or 'nothing'}", flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    batch = batch_of(args.responses, args.tokens // args.responses, model.config.vocab_size, seed=0)
    for name, learner in learners.items():
        metrics = learner.step(batch).metrics
        result["first"][name] = {key: metrics[f"learn/{key}"] for key in ("loss", "grad_norm", "entropy")}
        print(name, "first step:", result["first"][name], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    where = args.out / f"full_mfu_{args.shape}_{args.tokens}_{args.packs}{'_checkpoint' * args.checkpoint}.json"
    for turn in range(-WARM_UP, ROUNDS):
        for name, learner in learners.items():
            taken = timed(learner, batch, args.steps if turn >= 0 else 1)
            if turn < 0:
                print(f"{name}: warm-up step {taken['step_s']:.2f} s", flush=True)
                continue
            result["runs"].setdefault(name, []).append(taken)
            result["summary"][name] = summary(name, result["runs"][name], args.tokens, parameters)
            where.write_text(json.dumps(result, indent=1))
    if args.profile and CUDA:
        for name, learner in learners.items():
            found = result.setdefault("kernels", {})[name] = kernels(learner, batch)
            print(name, *(f"{ms:9.2f} ms {n:6} x {kernel[:110]}" for kernel, ms, n in found), sep="\n")
    result["ratio"] = result["summary"]["full"]["mfu"] / result["summary"]["none"]["mfu"]
    print(f"MFU of full / none: {result['ratio']:.3f}")
    where.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
