"""New weights to first new token: the pieces that `rl_step.py --parts update` times.

A real optimiser writes a model's weights in place; then the clock starts. Three ways on: rows that run on with the keys
and values they have (`keep_ms`), a fresh request where the cache's memory was lent meanwhile (`fresh_ms`), and rows
whose tokens are all fed again (`recompute_ms`). Each call is one update, in milliseconds by name.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from whet.fast.graphs import GraphRunners
from whet.learn.optimizer import AdamW
from whet.rollout.engine import LocalEngine
from whet.types import Request, Sampling

GROUPS = itertools.count()


class Weights:
    """A model under a real optimiser, whose steps change it in place."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = AdamW(model)
        self.version = 0
        self.device = model.device

    def change(self) -> int:
        """One optimiser step on made-up gradients, done when this returns; its version."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.accumulate()
        self.optimizer.step(1e-6, self.optimizer.grad_norm())
        self.wait()
        self.version += 1
        return self.version

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def engine_for(
    model: Any, on_update: Literal["cut", "recompute", "keep"], rows: int, context: int, known: int
) -> LocalEngine:
    vocab = model.config.vocab_size
    return LocalEngine(
        model,
        encode=lambda prompt: np.random.default_rng(int(prompt)).integers(2, vocab, known // 2).tolist(),
        decode=lambda ids: "",
        seed=0,
        slots=rows,
        context=context,
        mode="stream",
        on_update=on_update,
        runners=GraphRunners() if model.device.type == "cuda" else None,
        releasable=model.device.type == "cuda",
    )


def fill(engine: LocalEngine, rows: int, known: int) -> None:
    """So many rows of prompts of half of `known`, decoded until they have the other half; far from their end."""
    if engine.rows.size == rows and int(engine.rows.length[:rows].max()) < engine.context - 8:
        return
    while not engine.idle:  # what ran before has no room to go on: let it end
        engine.collect()
    sampling, each = Sampling(max_tokens=engine.context), 8 if rows % 8 == 0 else 2
    engine.submit(
        [
            Request(prompt_id=str(i), group_id=next(GROUPS), n=each, sampling=sampling, phase="train")
            for i in range(rows // each)
        ]
    )
    while engine.rows.ready < rows or int(engine.rows.length[:rows].min()) < known:
        engine.step()


def keep_ms(engine: LocalEngine, weights: Weights, rows: int, known: int) -> dict[str, float]:
    fill(engine, rows, known)
    version = weights.change()
    begun = time.perf_counter()
    engine.update(version)
    updated = time.perf_counter()
    engine.step()  # hands out a token of every row
    ended = time.perf_counter()
    engine.step()
    later = time.perf_counter()
    return ms(update=updated - begun, first_token=ended - begun, token_after=later - ended)


def fresh_ms(engine: LocalEngine, weights: Weights, rows: int, known: int) -> dict[str, float]:
    one = Request(prompt_id="7", group_id=0, n=1, sampling=Sampling(max_tokens=1), phase="eval")
    releasing = time.perf_counter()
    engine.release()
    weights.wait()
    released = time.perf_counter()
    version = weights.change()
    begun = time.perf_counter()
    engine.take_back()
    weights.wait()
    taken = time.perf_counter()
    engine.update(version)
    updated = time.perf_counter()
    engine.generate([one])
    ended = time.perf_counter()
    return ms(
        release=released - releasing,
        take_back=taken - begun,
        update=updated - taken,
        first_token=ended - begun,
        first_token_after_update=ended - taken,
    )


def recompute_ms(engine: LocalEngine, weights: Weights, rows: int, known: int) -> dict[str, float]:
    """From the update to the first new token of any row, and of every row."""
    fill(engine, rows, known)
    version = weights.change()
    begun = time.perf_counter()
    engine.update(version)
    updated = first = time.perf_counter()
    while engine.rows.ready < rows:
        none = engine.rows.ready == 0
        engine.step()
        first = time.perf_counter() if none else first
    ended = time.perf_counter()
    return ms(update=updated - begun, first_token=first - begun, token_of_every_row=ended - begun)


def ms(**seconds: float) -> dict[str, float]:
    return {f"{name}_ms": 1e3 * value for name, value in seconds.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
