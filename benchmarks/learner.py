"""The learner's step on a GPU: compiled and captured against plain, in one process, in turn.

    python benchmarks/learner.py --shape 1.5b --tokens 16384 --out DIR [--eager] [--checkpoint] [--profile]
    python benchmarks/learner.py --shape 1.5b --forms whole,split,head,graphed --out DIR
    python benchmarks/learner.py --shape 1.5b --long 24576 --out DIR

Random weights, random responses after a prompt of one token, so that every packed token is also predicted and 6 N is
the work of each: MFU = 6 N tokens/s / 790 TFLOP/s (N parameters, a tied embedding once, since it is used once as a
matrix). A measurement is whole steps (packs, forward, backward, optimiser) of one and the same learner, whose switch
is turned between rounds; two rounds come before. `--forms` measures these forms of compiling, whatever their trial
would say of them; "graphed" is whole layers compiled, and forward and backward as CUDA graphs, whose memory pool is
reported apart: the peak of a step that replays them does not show it. `--long` is one response of so many tokens, with
activations computed again. Without a GPU only `--shape tiny` is of use, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch._dynamo.utils import counters

from whet.config import Config, Learn, RolloutSettings
from whet.fast.compiled import FORMS
from whet.fast.graphed import FastPasses, Graphed
from whet.learn.learner import Learner
from whet.model.memory import Footprint, measure
from whet.tools.bench.peers import shape_model
from whet.tools.experiment import circumstances
from whet.types import Batch, Group, Rollout, Sampling, Trace

PEAK = 790e12
"""Dense bf16 of one H200, as its matrix products are measured to reach it; not the brochure's 989."""
ROUNDS = 3
WARM_UP = 2
"""Rounds of one step before: the second still compiles what the first could not know, and captures."""
GRAPHED = "graphed"
CUDA = torch.cuda.is_available()


def batch_of(responses: int, length: int, vocab: int, seed: int) -> Batch:
    """Groups of one rollout each; REINFORCE needs no second one."""
    rng = np.random.default_rng(seed)
    groups = []
    for i in range(responses):
        trace = Trace(
            ids=rng.integers(1, vocab, length).astype(np.int32),
            log_probs=np.full(length, -np.log(vocab), np.float32),
            versions=np.zeros(length, np.int32),
        )
        rollout = Rollout(
            prompt_id=f"p{i}",
            group_id=i,
            index=0,
            phase="train",
            sampling=Sampling(max_tokens=length, temperature=1.0),
            length=length,
            finish="stop",
            first_version=0,
            last_version=0,
            verdict="right",
            score=1.0,
            reward=1.0 if i % 2 else -1.0,
            trace=trace,
        )
        groups.append(Group(prompt_id=f"p{i}", group_id=i, rollouts=(rollout,), weight=None))
    return Batch(groups=tuple(groups))


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(learner: Learner, batch: Batch, steps: int) -> dict[str, float]:
    """Seconds a step, and of it those of the optimiser (one more step, with the GPU waited for on both sides)."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    begun = now()
    for _ in range(steps):
        learner.step(batch)
    seconds = (now() - begun) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    return {"step_s": seconds, "optimizer_s": optimizer_seconds(learner, batch), "peak_gib": peak}


def optimizer_seconds(learner: Learner, batch: Batch) -> float:
    spent, step = [0.0], learner.optimizer.step

    def watched(lr: float, norm: float) -> None:
        begun = now()
        step(lr, norm)
        spent[0] += now() - begun

    learner.optimizer.step = watched  # type: ignore[method-assign]
    learner.step(batch)
    del learner.optimizer.step
    return spent[0]


def kernels(learner: Learner, batch: Batch, top: int = 25) -> list[tuple[str, float, int]]:
    """(kernel, ms, calls) of one step, most time first, and "all" before them."""
    with torch.autograd.profiler.profile(
        use_device="cuda", use_cpu=False, use_kineto=True
    ) as profile:
        learner.step(batch)
        torch.cuda.synchronize()
    spent, calls = Counter[str](), Counter[str]()
    for event in profile.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            spent[event.name()] += event.duration_ns()
            calls[event.name()] += 1
    every = ("all", sum(spent.values()) / 1e6, sum(calls.values()))
    return [every, *((name, ns / 1e6, calls[name]) for name, ns in spent.most_common(top))]


def summary(
    name: str, runs: list[dict[str, float]], tokens: int, parameters: int
) -> dict[str, Any]:
    step = statistics.median(run["step_s"] for run in runs)
    optimizer = statistics.median(run["optimizer_s"] for run in runs)
    rates = sorted(tokens / run["step_s"] for run in runs)
    found = {
        "tokens_per_s": tokens / step,
        "range": [rates[0], rates[-1]],
        "mfu": 6 * parameters * tokens / step / PEAK,
        "step_ms": 1e3 * step,
        "gradient_ms": 1e3 * (step - optimizer),
        "optimizer_ms": 1e3 * optimizer,
        "peak_gib": max(run["peak_gib"] for run in runs),
    }
    print(
        f"{name:9} {found['tokens_per_s']:10,.0f} tok/s ({rates[0]:,.0f}..{rates[-1]:,.0f})  MFU {found['mfu']:.3f}  "
        f"{found['step_ms']:.1f} ms = gradient {found['gradient_ms']:.1f} + optimiser {found['optimizer_ms']:.1f}  "
        f"peak {found['peak_gib']:.1f} GiB",
        flush=True,
    )
    return found


def planned(shape: str, settings: Learn, tokens: int) -> dict[str, float]:
    """What the memory plan says of it, in GiB."""
    with torch.device("meta"):
        size = measure(shape_model(shape, "meta"))
    recipe = Config(
        learn=settings, rollout=RolloutSettings(slots=1, context=tokens + 1, max_tokens=tokens)
    )
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})}
    )
    footprint = Footprint(shape=size, settings=recipe, device=torch.device("cuda"), flash=True)
    return {name: size / 2**30 for name, size in footprint.plan().parts()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="135m", choices=["135m", "1.5b", "tiny"])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument(
        "--long", type=int, default=0, help="one response of so many tokens instead"
    )
    parser.add_argument("--steps", type=int, default=5, help="a round")
    parser.add_argument("--eager", action="store_true", help="only the plain learner")
    parser.add_argument(
        "--forms", default="", help=f"of {', '.join(FORMS)}, {GRAPHED}; whatever their trial says"
    )
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again")
    parser.add_argument("--profile", action="store_true", help="print the kernels that took most")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    responses, tokens = (1, args.long) if args.long else (args.responses, args.tokens)
    settings = Learn(
        estimator="reinforce",
        pack_tokens=max(16, tokens),
        lr=1e-6,
        checkpoint_activations=args.checkpoint or bool(args.long),
        compile=not args.eager and not args.forms,
    )
    model = shape_model(args.shape, "cuda" if CUDA else "cpu").requires_grad_(True)
    parameters = sum(p.numel() for p in model.parameters())
    begun = now()
    learner = Learner(model, settings, encode=lambda prompt: [1], passes=FastPasses)
    passes: Any = learner.passes
    result: dict[str, Any] = {
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "circumstances": circumstances(),
        "parameters": parameters,
        "tokens": tokens,
        "ready_s": now() - begun,
        "compiled": passes.form,
        "runs": {},
        "summary": {},
        "kernels": {},
    }
    if args.long:
        result["planned_gib"] = planned(args.shape, settings, tokens)
        print(
            "planned GiB:", {name: round(size, 1) for name, size in result["planned_gib"].items()}
        )
    print(
        f"{args.shape}: {parameters / 1e6:.0f}M parameters; ready (trial, compile) in {result['ready_s']:.1f} s"
    )
    kind = "_long" if args.long else "_checkpoint" if args.checkpoint else ""
    where = args.out / f"learner_{args.shape}_{tokens}{kind}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    forms = args.forms.split(",") if args.forms else [passes.form] if passes.form else []
    if passes.graphed is not None:
        forms.append(GRAPHED)
    graphed = (passes.graphed or Graphed(model, settings.pack_tokens)) if GRAPHED in forms else None
    form_of: dict[str, str] = {"plain": "", GRAPHED: passes.form or "whole"}
    ways = {
        name: (form_of.get(name, name), graphed if name == GRAPHED else None)
        for name in ("plain", *forms)
    }
    batch = batch_of(responses, tokens // responses, model.config.vocab_size, seed=0)
    for turn in range(-WARM_UP, ROUNDS):
        for name, (passes.form, passes.graphed) in ways.items():
            taken = timed(learner, batch, args.steps if turn >= 0 else 1)
            if turn < 0:
                print(f"{name}: warm-up step {taken['step_s']:.2f} s")
                result.setdefault(f"warm_up_{name}_s", []).append(taken["step_s"])
                continue
            result["runs"].setdefault(name, []).append(taken)
            result["summary"][name] = summary(name, result["runs"][name], tokens, parameters)
            where.write_text(json.dumps(result, indent=1))
    if args.profile and CUDA:
        for name, (passes.form, passes.graphed) in ways.items():
            result["kernels"][name] = kernels(learner, batch)
            print(
                name,
                *(
                    f"{ms:9.2f} ms {n:6} x {kernel[:110]}"
                    for kernel, ms, n in result["kernels"][name]
                ),
                sep="\n",
            )
    plain = result["summary"]["plain"]["tokens_per_s"]
    result["speedup"] = {form: result["summary"][form]["tokens_per_s"] / plain for form in forms}
    result["graphs"] = counters["stats"]["unique_graphs"]
    if graphed is not None:
        sizes = [list(size) for size in graphed.ready]
        result["captured"] = {
            "sizes": sizes,
            "stopped": graphed.stopped,
            "gib": graphed.bytes / 2**30,
        }
        print("captured:", result["captured"])
    print(
        "of plain:",
        {form: round(times, 2) for form, times in result["speedup"].items()},
        f"{result['graphs']} graphs",
    )
    where.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
