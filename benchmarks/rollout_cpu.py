"""Rollouts on one CPU thread: our engine beside transformers' `generate`, on requests of very different lengths.

    python benchmarks/rollout_cpu.py

64 requests with log-normal lengths (median 60, sigma 1, at most 512), beside `generate` in batches of 16 and of 64,
each of which runs until its longest request is done. It writes rollout.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from base import one_thread
from command_line import RESULTS, Out, run_script
from transformers import PreTrainedModel

from whet import files
from whet.model.load import tiny_model
from whet.rollout.engine import LocalEngine
from whet.tools.bench.peers import generate_batch, no_stop_strings, requests_of
from whet.tools.bench.rollout import spread
from whet.tools.experiment import circumstances

app = typer.Typer(add_completion=False)
Repeats = Annotated[int, typer.Option(min=1, help="Interleaved repeats.")]

VOCAB = 20
REQUESTS = 64
LONGEST = 512
CONTEXT = 544
FULL = 100  # new tokens per row where all 64 rows run throughout


def measure(out: Path, repeats: int = 3, seed: int = 0) -> dict[str, Any]:
    """Measure, write `rollout.json` into `out`, and return what it holds."""
    prompts, lengths = _work(seed)
    model = tiny_model(VOCAB, seed=seed).eval()
    engine = LocalEngine(
        model, encode=lambda i: prompts[int(i)], decode=no_stop_strings, seed=seed, slots=REQUESTS, context=CONTEXT
    )

    def write(lengths: list[int]) -> int:
        engine.submit(requests_of(lengths))
        return sum(rollout.length for rollout in engine.collect())

    def rate(run: Callable[[list[int]], int], lengths: list[int]) -> float:
        begun = time.perf_counter()
        made = run(lengths)
        seconds = time.perf_counter() - begun
        assert made == sum(lengths), "another number of tokens was made"
        return made / seconds

    ways: dict[str, Callable[[list[int]], int]] = {"engine": write}
    ways |= {f"generate_{batch}": partial(_generate, model, prompts, batch) for batch in (16, 64)}
    tokens = sum(lengths)
    with one_thread(), torch.random.fork_rng():
        torch.manual_seed(seed)
        rounds = [{name: rate(run, lengths) for name, run in ways.items()} for _ in range(1 + repeats)]
        full = [rate(write, [FULL] * REQUESTS) for _ in range(repeats)]
    # The first round warms up: it pays for lazy imports and thread pools.
    rates = {name: [found[name] for found in rounds[1:]] for name in ways}
    result = {
        "what": "tokens per second, one CPU thread, tiny model (hidden 96, 2 layers), float32, temperature 1",
        "requests": REQUESTS,
        "lengths": {"median": 60, "sigma": 1.0, "cap": LONGEST, "mean": tokens / REQUESTS, "max": max(lengths)},
        "tokens": tokens,
        "same_tokens": "every way generated the same number of requested tokens",
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "tokens_per_second_full_batch": spread(full),
        "ratio_to_generate": {
            name: spread([a / b for a, b in zip(rates["engine"], rates[name], strict=True)])
            for name in rates
            if name != "engine"
        },
        "repeats": repeats,
        "seed": seed,
        **circumstances(),
    }
    files.write_text(out / "rollout.json", json.dumps(result, indent=2) + "\n")
    return result


def _work(seed: int) -> tuple[list[list[int]], list[int]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB, rng.integers(8, 25)).tolist() for _ in range(REQUESTS)]
    lengths = np.clip(np.exp(np.log(60) + rng.standard_normal(REQUESTS)), 1, LONGEST).astype(int)
    return prompts, lengths.tolist()


def _generate(model: PreTrainedModel, prompts: list[list[int]], batch: int, lengths: list[int]) -> int:
    parts = [slice(first, first + batch) for first in range(0, len(prompts), batch)]
    return sum(generate_batch(model, prompts[part], lengths[part]) for part in parts)


@app.command()
def main(out: Out = RESULTS, repeats: Repeats = 3, seed: Annotated[int, typer.Option()] = 0) -> None:
    """Measure, and print what was written."""
    print(json.dumps(measure(out, repeats, seed), indent=2))


if __name__ == "__main__":
    run_script(app)
