"""The signal-to-noise ratio of the RLOO gradient against the pass rate of the prompt, beside SPEED's bound.

    python benchmarks/snr.py --model RUN --out benchmarks/results                   # a run brings its recipe
    python benchmarks/snr.py --model DIR --recipe recipes/gsm8k.toml --data-folder DATA --out benchmarks/results
    python benchmarks/snr.py --check                                                # the maths alone, in seconds

A few rollouts for each of many prompts find some that are spread over pass rates; those get `--rollouts` fresh ones, so
that choosing them does not bias what is measured. Per prompt: inner products of the score gradients of all rollouts
over all trained weight matrices (norm weights and biases left out), in fp32, TF32 off, by an fp32 copy of the model;
from them unbiased moments, hence the ratio for every group size, with the jackknife's deviation over rollouts.
Rewards are verdicts, 0 or 1. The bound is taken at the measured pass rate, which is itself uncertain near 0 and 1 (its
interval is given), as is the ratio where few rollouts are right or few wrong. Written to snr.json after every prompt.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_scores import explicit_gram, score_gram
from snr_score import bernoulli_snr, bound, choose_spread, jackknife, moments

from whet import files
from whet.assembly import Actor, build_actor, check_run, training_sampling
from whet.errors import WhetError
from whet.eval import Z95, wilson
from whet.model.load import tiny_model
from whet.recipe import load_config, read_toml
from whet.tools.experiment import circumstances
from whet.tools.measure import weights_of
from whet.types import Prompt, Request, Rollout

TOLERANCE = 1e-5


def main() -> None:
    options = parse()
    if options.check:
        print(f"largest relative difference from a backward pass for each rollout: {check_gram():.1e}")
        return
    begun = time.monotonic()
    actor, prompts = prepare(options)
    try:
        result = measure(actor, prompts, options, begun)
    finally:
        actor.close()
    say(begun, f"{len(result['prompts'])} prompts in {options.out / 'snr.json'}; {result['summary']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A run, a checkpoint, a Hugging Face folder, or a hub name.")
    parser.add_argument("--data", help="Problems, where the recipe has none or others: gsm8k, a file, or chain.")
    parser.add_argument("--recipe", type=Path, help="Where the model is no run, or another recipe is wanted.")
    parser.add_argument("--data-folder", type=Path)
    parser.add_argument("--screened", type=int, default=300, help="prompts that are screened")
    parser.add_argument("--screen", type=int, default=16, help="rollouts of each to screen it")
    parser.add_argument("--prompts", type=int, default=40, help="prompts that are measured")
    parser.add_argument("--rollouts", type=int, default=128, help="rollouts of each")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16], help="group sizes N")
    parser.add_argument("--pack-tokens", type=int, default=8192, help="tokens of one forward and backward")
    parser.add_argument("--keep-gib", type=float, default=8, help="inputs and output gradients kept at once")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="Further settings of the recipe.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="Check the inner products on the tiny model and leave.")
    options = parser.parse_args()
    if not options.check and not (options.model and options.out):
        parser.error("--model and --out are needed (or --check)")
    if options.rollouts < 5 or min(options.sizes) < 2:
        parser.error("it takes --rollouts of at least 5 and --sizes of at least 2")
    return options


def prepare(options: argparse.Namespace) -> tuple[Actor, list[Prompt]]:
    """The model with engine and judge, and the prompts to screen: a random choice, in the data's order."""
    folder, own = weights_of(options.model)
    recipe = options.recipe or own
    if recipe is None and options.data is None:
        raise WhetError(f"{options.model} is no run, so it brings no recipe; give --recipe or --data.")
    tree = read_toml(recipe) if recipe is not None else {}
    tree |= {"eval": [], "held_out": {"size": 0}, "warm_start": []}
    if options.data is not None:
        tree["data"] = [{"task": "chain"} if options.data == "chain" else {"path": options.data}]
    place = [f"data_folder={json.dumps(str(options.data_folder))}"] if options.data_folder else []
    settings = load_config(None, [f"model.name={json.dumps(folder)}", *place, *options.sets], base=tree)
    plan = check_run(settings)
    table = plan.problems.train
    rng = np.random.default_rng((settings.seed, 15485863))
    rows = np.sort(rng.permutation(len(table))[: options.screened])
    return build_actor(plan), [table.at(int(row)) for row in rows]


def measure(actor: Actor, prompts: Sequence[Prompt], options: argparse.Namespace, begun: float) -> dict[str, Any]:
    say(begun, f"screening {len(prompts)} prompts with {options.screen} rollouts each")
    screened = [pass_rate(group) for group in roll_out(actor, prompts, options.screen, 0, begun)]
    chosen = choose_spread(screened, options.prompts)
    say(begun, f"{options.rollouts} rollouts for each of {len(chosen)} prompts")
    groups = roll_out(actor, [prompts[i] for i in chosen], options.rollouts, len(prompts), begun)
    rollouts_s = time.monotonic() - begun
    model = single_precision(actor.model)
    settings = actor.plan.settings
    result: dict[str, Any] = {
        "what": "SNR of the RLOO gradient, |E g|^2 / E|g - E g|^2, by prompt and group size N; see benchmarks/snr.py",
        "model": Path(options.model).name,
        "data": [entry.path or entry.kind for entry in settings.data],
        "seed": settings.seed,
        "temperature": settings.rollout.temperature,
        "max_tokens": settings.rollout.max_tokens,
        "rollouts": options.rollouts,
        "sizes": options.sizes,
        "weights": sum(p.numel() for p in model.parameters() if p.requires_grad and p.ndim >= 2),
        "screen": {
            "prompts": len(prompts),
            "rollouts": options.screen,
            "pass_rates": {str(rate): count for rate, count in sorted(Counter(screened).items())},
        },
        "curves": curves(options.sizes),
        "prompts": [],
        **circumstances(),
    }
    for number, (place, group) in enumerate(zip(chosen, groups, strict=True), 1):
        row = measure_prompt(actor, model, group, options)
        result["prompts"].append({"id": prompts[place].id, "screened": screened[place], **row})
        result["summary"] = summary(result["prompts"], options.sizes)
        result["seconds"] = {"rollouts": round(rollouts_s, 1), "all": round(time.monotonic() - begun, 1)}
        if torch.cuda.is_available():
            result["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        write(options.out, result)
        ratios = ", ".join(f"N={n}: {show(found['value'])}" for n, found in row["snr"].items())
        say(begun, f"{number}/{len(chosen)}: pass rate {row['pass_rate']:.3f}, SNR {ratios} ({row['seconds']} s)")
    return result


def roll_out(actor: Actor, prompts: Sequence[Prompt], n: int, first: int, begun: float) -> list[list[Rollout]]:
    """Judged rollouts by prompt, all from one call to the engine; other group ids mean other noise."""
    sampling = training_sampling(actor.plan.settings, actor.plan.codec)
    requests = [
        Request(prompt_id=prompt.id, group_id=first + i, n=n, sampling=sampling, phase="probe")
        for i, prompt in enumerate(prompts)
    ]
    total, heard = n * len(prompts), 0

    def on_progress(done: int) -> None:
        nonlocal heard
        if done * 10 // total > heard:
            heard = done * 10 // total
            say(begun, f"  {done}/{total} rollouts")

    judged = actor.judge.judge(actor.engine.generate(requests, on_progress))
    groups: list[list[Rollout]] = [[] for _ in prompts]
    for rollout in judged:
        groups[rollout.group_id - first].append(rollout)
    return groups


def measure_prompt(actor: Actor, model: Any, group: Sequence[Rollout], options: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    kept = [r for r in group if r.judged and r.length > 0 and r.trace is not None]
    rewards = np.array([r.verdict == "right" for r in kept], float)
    right, rate = int(rewards.sum()), float(rewards.mean()) if kept else 0.0
    low, high = wilson(rate, max(1, len(kept)))
    lengths = np.array([r.length for r in kept])
    row: dict[str, Any] = {
        "pass_rate": rate,
        "pass_rate_low": low,
        "pass_rate_high": high,
        "judged": len(kept),
        "right": right,
        "length": {
            "mean": mean(lengths),
            "right": mean(lengths[rewards == 1]),
            "wrong": mean(lengths[rewards == 0]),
            "most": int(lengths.max(initial=0)),
            "truncated": mean(np.array([r.finish == "length" for r in kept])),
        },
    }
    gram = np.zeros((len(kept), len(kept)))
    if min(right, len(kept) - right) >= 2:  # else every pair of disjoint pairs agrees somewhere: nothing to measure
        prompt = actor.plan.codec.encode(actor.plan.problems.lookup(group[0].prompt_id))
        responses = [r.trace.ids for r in kept if r.trace is not None]
        limits = {"pack": options.pack_tokens, "keep": int(options.keep_gib * 2**30)}
        gram = score_gram(model, prompt, responses, actor.plan.settings.rollout.temperature, **limits)
        found = moments(gram, rewards)
        row["moments"] = {"apart": found.apart, "one": found.one, "both": found.both}
        row["score_norm"] = float(np.sqrt(np.diag(gram).mean()))
    row["snr"] = {str(n): ratio(*found) for n, found in jackknife(gram, rewards, options.sizes).items()}
    row["bound"] = {str(n): bound(rate, n) for n in options.sizes}
    return {**row, "seconds": round(time.monotonic() - begun, 2)}


def ratio(value: float, deviation: float) -> dict[str, float | None]:
    """null where there was nothing to measure; low and high are 95% (normal), low may be negative."""
    if math.isnan(value):
        return {"value": None, "deviation": None, "low": None, "high": None}
    return {
        "value": value,
        "deviation": deviation,
        "low": value - Z95 * deviation,
        "high": value + Z95 * deviation,
    }


def summary(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Per size: prompts measured, those where the bound speaks, those above it, and those above it by their low end."""
    found = {}
    for n in map(str, sizes):
        measured = [(row["snr"][n], row["bound"][n]) for row in rows if row["snr"][n]["value"] is not None]
        bounded = [(snr, limit) for snr, limit in measured if limit is not None]
        found[n] = {
            "measured": len(measured),
            "bounded": len(bounded),
            "above": sum(snr["value"] > limit for snr, limit in bounded),
            "clearly_above": sum(snr["low"] > limit for snr, limit in bounded),
            "median_share_of_bound": mean(np.median([snr["value"] / limit for snr, limit in bounded] or [np.nan])),
        }
    return found


def curves(sizes: Sequence[int]) -> dict[str, Any]:
    """The theorem's bound, null where it says nothing, and the exact ratio of a one-parameter policy."""
    rates = [k / 200 for k in range(1, 200)]
    return {
        "pass_rate": rates,
        "bound": {str(n): [bound(p, n) for p in rates] for n in sizes},
        "bernoulli": {str(n): [bernoulli_snr(p, n) for p in rates] for n in sizes},
    }


def single_precision(model: Any) -> Any:
    """In half precision every gradient would carry rounding noise of its own; wider models stay as they are."""
    torch.set_float32_matmul_precision("highest")
    wide = model.dtype in (torch.float32, torch.float64)
    return (model if wide else copy.deepcopy(model).to(torch.float32)).eval()


def pass_rate(group: Sequence[Rollout]) -> float:
    judged = [r.verdict == "right" for r in group if r.judged]
    return sum(judged) / len(judged) if judged else 0.0


def check_gram() -> float:
    """The tiny model in fp64, ten random responses, against a backward pass for each."""
    rng = np.random.default_rng(0)
    model = tiny_model(20, dtype=torch.float64).eval()
    prompt, responses = rng.integers(2, 20, 9).tolist(), [rng.integers(0, 20, n) for n in range(3, 33, 3)]
    wanted = explicit_gram(model, prompt, responses, 0.8)
    off = max(
        float(np.abs(score_gram(model, prompt, responses, 0.8, **limits) - wanted).max() / np.abs(wanted).max())
        for limits in ({}, {"pack": 60, "keep": 2**16, "tile": 5000})
    )
    if not off < TOLERANCE:
        raise WhetError(f"The inner products are off by {off:.1e} of the largest; {TOLERANCE} is allowed.")
    return off


def mean(values: np.ndarray) -> float | None:
    return round(float(np.mean(values)), 4) if np.size(values) and np.isfinite(values).all() else None


def show(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def say(begun: float, sentence: str) -> None:
    print(f"[{time.monotonic() - begun:6.1f} s] {sentence}", flush=True)


def write(out: Path, result: dict[str, Any]) -> None:
    files.make_folder(out)
    files.write_text(out / "snr.json", json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    try:
        main()
    except WhetError as error:
        sys.exit(f"snr: {error}")
