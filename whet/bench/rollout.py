"""How fast rollouts are generated: our engine beside transformers' `generate`, the same work on the same model.

64 requests with log-normal lengths (median 60, sigma 1, at most 512) on one CPU thread; `generate` takes them in the
given order in batches of 16 and of 64, each batch running until its longest request is done. Only asked-for tokens
count, and all ways must have produced the same number. Repeats are interleaved, so that a busy machine slows all
alike. `whet bench rollout` prints what this returns; nothing is printed here.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from whet.bench.circumstances import circumstances
from whet.model.tiny import tiny_model
from whet.rollout.engine import LocalEngine
from whet.threads import one_thread
from whet.types import Request, Sampling

VOCAB = 20
REQUESTS = 64
LONGEST = 512
CONTEXT = 544


def rollout_bench(out: Path, repeats: int = 3, seed: int = 0) -> dict[str, Any]:
    """Measures, writes `rollout.json` into `out`, and returns what it wrote."""
    prompts, lengths = _work(seed)
    model = tiny_model(VOCAB, seed=seed).eval()
    engine = _make_engine(model, prompts, seed)  # made once, as a run makes it
    ways: dict[str, Callable[[], int]] = {
        "engine": lambda: _engine(engine, lengths),
        "generate_16": lambda: _generate(model, prompts, lengths, 16),
        "generate_64": lambda: _generate(model, prompts, lengths, 64),
    }
    tokens = sum(lengths)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with one_thread(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, run in ways.items():  # warm: the first call pays for lazy imports and thread pools
            assert run() == tokens, f"{name} made another number of tokens"
        for _ in range(repeats):
            for name, run in ways.items():
                begin = time.perf_counter()
                made = run()
                rates[name].append(tokens / (time.perf_counter() - begin))
                assert made == tokens, f"{name} made another number of tokens"
        full = [_full_batch(engine) for _ in range(repeats)]
    result = {
        "what": "tokens a second, one CPU thread, tiny model (hidden 96, 2 layers), float32, temperature 1",
        "requests": REQUESTS,
        "lengths": {"median": 60, "sigma": 1.0, "cap": LONGEST, "mean": tokens / REQUESTS, "max": max(lengths)},
        "tokens": tokens,
        "same_tokens": "every way generated the same number of asked-for tokens",
        "tokens_per_second": {name: _summary(values) for name, values in rates.items()},
        "tokens_per_second_full_batch": _summary(full),
        "ratio_to_generate": {
            name: _summary([a / b for a, b in zip(rates["engine"], rates[name], strict=True)])
            for name in rates
            if name != "engine"
        },
        "repeats": repeats,
        "seed": seed,
        **circumstances(),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "rollout.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _work(seed: int) -> tuple[list[list[int]], list[int]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB, rng.integers(8, 25)).tolist() for _ in range(REQUESTS)]
    lengths = np.clip(np.exp(np.log(60) + rng.standard_normal(REQUESTS)), 1, LONGEST).astype(int)
    return prompts, lengths.tolist()


def _make_engine(model: PreTrainedModel, prompts: list[list[int]], seed: int) -> LocalEngine:
    def decode(ids: Any) -> str:
        raise AssertionError("no stop strings here")

    return LocalEngine(model, encode=lambda i: prompts[int(i)], decode=decode, seed=seed, slots=64, context=CONTEXT)


def _engine(engine: LocalEngine, lengths: list[int]) -> int:
    engine.submit([_request(i, n) for i, n in enumerate(lengths)])
    return sum(r.length for r in engine.collect())


def _request(i: int, tokens: int) -> Request:
    return Request(prompt_id=str(i), group_id=i, n=1, sampling=Sampling(max_tokens=tokens))


def _full_batch(engine: LocalEngine, tokens: int = 100) -> float:
    """All 64 rows running throughout: what a batch that is kept full gives."""
    begin = time.perf_counter()
    made = _engine(engine, [tokens] * REQUESTS)
    return made / (time.perf_counter() - begin)


def _generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> int:
    """Left-padded batches in the given order; what a row writes beyond its own length is thrown away."""
    made = 0
    for first in range(0, REQUESTS, batch):
        rows, wanted = prompts[first : first + batch], lengths[first : first + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(wanted),
            eos_token_id=None,
            pad_token_id=0,
        )
        made += sum(row[width : width + n].numel() for row, n in zip(out, wanted, strict=True))
    return made


def _summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}
