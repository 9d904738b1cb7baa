"""The RL step on one device: how idle it leaves the GPU, how soon new weights speak, and a step of very long responses.

    python benchmarks/rl_step.py --parts idle --model models/smollm2 --data DIR --out benchmarks/results
    python benchmarks/rl_step.py --parts update stage3 --out benchmarks/results
    python benchmarks/rl_step.py --tiny --device cpu --out DIR     # all of it with a toy, to see that it runs

idle    recipes/gsm8k.toml through `whet train`'s own loop, 64 prompts x 8 rollouts, uniform, no evaluation: 16 updates
        to warm up (graphs of new sizes are captured), 8 that count, one under the profiler. A base model without
        --warm-start hardly solves anything, and groups without signal are not trained on: see tokens_trained. The idle
        share is measured twice: by the run's own metric (time/gpu_idle, events around the device's work) and as what
        the kernels' spans leave of the wall; the gaps between them are given by size, by what the host did meanwhile,
        and the longest one by one. The profiler slows the host, so its kernels are also set against the wall of the
        updates without it.
update  the 1.5B shape: from the end of the optimiser's step to the first new token on the host, for rows that run on
        (keep), for a fresh request (release, take back, update, prefill), and for recomputed rows. Medians of 10.
stage3  stage 3 of FastCuRL's recipe (context 24,576) with the 1.5B shape, random weights and coin-toss verdicts, for
        three updates. Random weights hardly ever end a response, so each runs to its limit: 24,576 decode steps take
        most of a minute whatever the batch. The updates have the recipe's limit and one group of four rollouts each.

Each part writes rl_step_NAME.json as soon as it has something.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import gaps
import torch
import update_latency as latency
from transformers.utils import logging as hf_logging

from whet import api, loop
from whet.assembly import Parts, build_parts, check_run
from whet.fast.fused import share_storage
from whet.model.load import tiny_tokenizer
from whet.recipe import load_config, read_toml
from whet.tools.bench.peers import shape_model
from whet.tools.experiment import circumstances
from whet.types import Batch, Report
from whet.watch import Stopwatch, rollout_metrics

RECIPES = Path(__file__).parent.parent / "recipes"
ALPHABET = "abcdefghijklmnopqrstuvwxyzLW0123456789+-*=?!.,'{}\\ "
"""Text for the toy's tokenizer: the arithmetic problems, and FastCuRL's suffix."""
WARM, COUNTED = 16, 8
"""Updates of `idle`; one more is profiled."""
GIB = 2**30
SPLIT = ("generate", "judge", "log_probs", "train", "sync", "save", "eval", "idle", "total", "gpu_idle")


class Result:
    """One part's file, written anew with every figure that is added."""

    def __init__(self, out: Path, part: str, **known: Any) -> None:
        self.path = out / f"rl_step_{part}.json"
        self.figures: dict[str, Any] = {"circumstances": circumstances(), **known}

    def add(self, **figures: Any) -> None:
        self.figures |= figures
        self.path.write_text(json.dumps(self.figures, indent=1) + "\n")
        for name, value in figures.items():
            newest = value[-1:] if isinstance(value, list) and name == "steps" else value
            print(f"{name}: {json.dumps(newest)[:4000]}", flush=True)


# ---- idle


class Phases(Stopwatch):
    """The loop's stopwatch, which remembers when it ran, too."""

    seen: list[gaps.Span]

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        begin = time.time_ns()
        with super().timing(name):
            yield
        type(self).seen.append(gaps.Span(name, begin, time.time_ns()))


class Watch:
    """Sits in the run as its watcher: profiles the update after so many, and keeps what the run said."""

    def __init__(self, trace: gaps.Trace, after: int, result: Result) -> None:
        self.trace, self.after, self.result = trace, after, result
        self.rows: list[dict[str, float]] = []
        self.messages: list[str] = []

    def update(self, metrics: dict[str, float], progress: float) -> None:
        if metrics["step"] == self.after + 1:
            self.trace.stop()
        self.rows.append(metrics)
        self.result.add(steps=[split_of(row) for row in self.rows if row["step"] > 0])
        if metrics["step"] == self.after:
            self.trace.start()

    def message(self, text: str) -> None:
        self.messages.append(text)
        print(text, flush=True)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def idle(args: argparse.Namespace) -> None:
    result = Result(args.out, "idle", target={"idle_share": 0.15, "aim": 0.05})
    watch = Watch(gaps.Trace(torch.device(args.device)), WARM + COUNTED, result)
    with tempfile.TemporaryDirectory() as folder:
        sets = idle_sets(args, Path(folder))
        result.add(settings=[item for item in sets if not item.startswith(("model.name", "data"))])
        settings = load_config(RECIPES / "gsm8k.toml", [*sets, *args.sets])
        Phases.seen = []
        with mock.patch.object(loop, "Stopwatch", Phases):
            api.run_recipe(settings, Path(folder) / "run", watcher=watch)
    counted = [row for row in watch.rows if WARM < row["step"] <= WARM + COUNTED]
    result.add(notes=watch.messages)
    result.add(median={name: median(row.get(name) for row in map(split_of, counted)) for name in split_of(counted[0])})
    result.add(profiled=profiled(watch, result.figures["median"]["total"]))


def idle_sets(args: argparse.Namespace, folder: Path) -> list[str]:
    sets = [
        f"steps={WARM + COUNTED + 1}",
        warm_start_set(args.warm_start),
        "eval=[]",
        "held_out.size=0",
        "save.every=1000",
        "curriculum.name='uniform'",
        "curriculum.groups=64",
        "curriculum.rollouts=8",
        f"model.device='{args.device}'",
    ]
    if args.tiny:
        sets += [f"model.name='{toy_folder(folder / 'model', 'tiny', args.device)}'", "model.dtype='float32'"]
        sets += [f"data.0.path='{sums(folder / 'sums.jsonl', 64)}'", "rollout.max_tokens=8", "rollout.slots=8"]
        return [*sets, "curriculum.groups=4", "curriculum.rollouts=2", "learn.pack_tokens=256"]
    return [*sets, f"model.name='{args.model}'", f"data_folder='{args.data}'"]


def warm_start_set(steps: int) -> str:
    """The recipe's own warm start, but shorter; 0 is none."""
    if not steps:
        return "warm_start=[]"
    return f"warm_start.0.steps={steps}"


def split_of(row: Mapping[str, float]) -> dict[str, float]:
    """What is kept of an update: seconds by part, tokens and their rates."""
    found = {name: row.get(f"time/{name}", 0.0) for name in SPLIT if f"time/{name}" in row or name != "gpu_idle"}
    total = found["total"] or 1.0
    tokens = row.get("rollout/tokens", 0.0)
    found |= {name: row[name] for name in ("length/mean", "rollout/steps", "rollout/gpu_seconds") if name in row}
    found |= {
        name: row[name] for name in ("learn/gpu_seconds", "learn/memory_gib", "learn/signal_share") if name in row
    }
    found |= {"tokens": tokens, "tokens_trained": row.get("learn/tokens", 0.0), "tokens_per_s": tokens / total}
    return found


def profiled(watch: Watch, wall_s: float) -> dict[str, Any]:
    """Shares of the profiled update; `wall_s`: what one took without the profiler."""
    trace = watch.trace
    own_s = (trace.end - trace.begin) / 1e9
    found: dict[str, Any] = {"wall_s": own_s, "wall_without_profiler_s": wall_s, "kernels": len(trace.spans)}
    if not trace.spans:
        return found
    busy_s = gaps.covered((span.start, span.stop) for span in trace.spans) / 1e9
    phases = [span for span in Phases.seen if span.stop > trace.begin and span.start < trace.end]
    between = gaps.gaps_between(trace.spans, trace.begin, trace.end)
    return {
        **found,
        "busy_s": busy_s,
        "idle_share": 1 - busy_s / own_s,
        "idle_share_without_profiler": max(0.0, 1 - busy_s / wall_s),
        "idle_s_by_phase": gaps.by_phase(between, phases),
        "phase_s": phase_seconds(phases),
        "gaps_by_size": gaps.by_size(between),
        "longest_gaps": gaps.longest(between, phases, trace.begin),
    }


def phase_seconds(phases: Sequence[gaps.Span]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, start, stop in phases:
        out[name] = out.get(name, 0.0) + (stop - start) / 1e9
    return out


# ---- update

WAYS: list[tuple[str, Any, Callable[..., dict[str, float]]]] = [
    ("keep", "keep", latency.keep_ms),
    ("fresh", "cut", latency.fresh_ms),
    ("recompute", "recompute", latency.recompute_ms),
]


def update(args: argparse.Namespace) -> None:
    shape, rows, known, context = ("tiny", 4, 24, 128) if args.tiny else ("1.5b", 64, 512, 1024)
    repeats = 3 if args.tiny else 10
    result = Result(args.out, "update", shape=shape, rows=rows, known=known, target_ms={"at_least": 50, "aim": 15})
    model = shape_model(shape, args.device).requires_grad_(True)
    share_storage(model)
    weights = latency.Weights(model)
    for name, on_update, measure in WAYS:
        engine = latency.engine_for(model, on_update, rows, context, known)
        taken = [measure(engine, weights, rows, known) for _ in range(repeats + 2)][2:]  # the first two compile
        figures = {key: latency.spread([one[key] for one in taken]) for key in taken[0]}
        result.add(**{name: figures})
        del engine
        gc.collect()


# ---- stage3


def stage3(args: argparse.Namespace) -> None:
    limits = [(8, 2, 2), (16, 2, 2), (48, 1, 4)] if args.tiny else [(24_576, 1, 4)] * 3
    result = Result(args.out, "stage3", limits=limits)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        settings = load_config(None, args.sets, base=stage3_tree(args, Path(folder), limits))
        plan = check_run(settings, coin)
        parts = build_parts(plan)
    try:
        result.add(start_s=time.perf_counter() - begun, memory_plan=[*plan.notes, *parts.notes])
        log = Stage3Log(parts, result)
        loop.train(parts, log)
    finally:
        parts.close()
    longest = max(row["longest_trained"] for row in log.rows)
    result.add(longest_trained=longest, seconds=time.perf_counter() - begun)


def stage3_tree(args: argparse.Namespace, folder: Path, limits: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """The recipe with its third stage alone, once for each of the limits, and other weights and problems."""
    tree = read_toml(RECIPES / "papers" / "fastcurl-preview.toml")
    third = tree["curriculum"]["stages"][2]
    assert third["max_tokens"] == tree["rollout"]["max_tokens"] == 24_576 and third["subset"] == "long"
    stages = [{**third, "max_tokens": most, "groups": g, "rollouts": r, "steps": 1} for most, g, r in limits]
    name = toy_folder(folder / "model", "tiny" if args.tiny else "1.5b", args.device)
    tree["model"] |= {"name": name, "device": args.device}
    tree |= {"steps": len(limits), "eval": [], "held_out": {"size": 0}}
    tree["data"] = [{"path": sums(folder / "sums.jsonl", 64)}]
    tree["curriculum"]["stages"] = stages
    tree["rollout"]["max_tokens"] = limits[-1][0]
    if args.tiny:
        tree["model"]["dtype"] = "float32"
        tree["rollout"] |= {"slots": 8, "page": 16}
        tree["learn"]["pack_tokens"] = 512
    return tree


class Stage3Log(loop.Log):
    """Follows the loop without checkpoints, which would be 24 GiB each, and reads the memory of every step."""

    stopping = False  # type: ignore[assignment]

    def __init__(self, parts: Parts, result: Result) -> None:
        super().__init__(None, parts, Watch(gaps.Trace(parts.model.device), -1, result))  # type: ignore[arg-type]
        self.result, self.cuda = result, parts.model.device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        """Before each step."""
        self.watch = Stopwatch()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def emitted(self, batch: Batch) -> None:
        super().emitted(batch)
        self.generating = used_gib(self.cuda)

    def updated(self, batch: Batch, report: Report) -> None:
        metrics = rollout_metrics(self.seen) | self.step_metrics(batch, report) | self.watch.metrics()
        limit = batch.groups[0].rollouts[0].sampling.max_tokens
        row: dict[str, Any] = {"limit": limit, "rollouts": len(self.seen)}
        row |= split_of(metrics)
        row["longest_trained"] = max(r.length for group in batch.groups for r in group.rollouts)
        row["truncated"] = metrics.get("length/truncated")
        kept = ("learn/grad_norm", "learn/kl", "learn/mismatch", "learn/oom")
        row |= {name: metrics[name] for name in kept if name in metrics}
        if self.cuda:
            row |= {"used_generating_gib": self.generating, "used_after_gib": used_gib(self.cuda)}
            row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        self.rows.append(row)
        self.result.add(steps=self.rows)
        self.begin()


def used_gib(cuda: bool) -> float | None:
    """GPU memory in use by any process: a KV pool that is lent does not belong to torch."""
    if not cuda:
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def coin(prompt: Any, response: str) -> float:
    """A verdict with spread, whatever random weights write."""
    return float(random.random() < 0.5)


# ---- what the parts share


def toy_folder(folder: Path, shape: str, device: str) -> str:
    """Random weights in a known shape, with a tokenizer of characters, which are its first tokens."""
    hf_logging.disable_progress_bar()
    shape_model(shape, device).save_pretrained(folder)
    tiny_tokenizer(ALPHABET).save_pretrained(folder)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return str(folder)


def sums(path: Path, count: int) -> str:
    """Arithmetic problems, half of them longer."""
    rows = [
        {"prompt": f"What is {a}+{a % 7}{'+1' * (8 * (a % 2))}?", "answer": str(a + a % 7 + 8 * (a % 2))}
        for a in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"idle": idle, "update": update, "stage3": stage3}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="SmolLM2's folder, of idle")
    parser.add_argument("--data", type=Path, default=Path("data"), help="a folder with gsm8k's files, of idle")
    parser.add_argument("--warm-start", type=int, default=0, help="its updates before idle; 0 is none")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="further settings of the recipes")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        begun = time.perf_counter()
        PARTS[part](args)
        print(f"{part}: {time.perf_counter() - begun:.0f} s", flush=True)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
