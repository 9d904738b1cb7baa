"""What the engine's tests share: sharp little models, engines over them, and the slow decoder all must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from plain_noise import reference_bits
from transformers import PreTrainedModel

from whet.fast.graphs import GraphRunners
from whet.model.load import tiny_model
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout, Sampling

VOCAB = 23
PROMPTS = {
    f"p{i}": np.random.default_rng(i).integers(2, VOCAB, 1 + (5 * i) % 13).tolist()
    for i in range(40)
}


def sharpen(model: PreTrainedModel, factor: float = 12.0) -> PreTrainedModel:
    """Fresh weights give nearly uniform tokens, which would hide an error in attention."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model.eval()


def sharp_model(
    seed: int = 0, dtype: torch.dtype = torch.float64, heads: int = 3, kv_heads: int = 3
) -> PreTrainedModel:
    model = tiny_model(
        VOCAB, hidden=8 * heads, heads=heads, kv_heads=kv_heads, context=128, dtype=dtype, seed=seed
    )
    return sharpen(model)


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


def make_engine(model: PreTrainedModel, graphs: bool = False, **kwargs: Any) -> LocalEngine:
    """`graphs`: with the runner for CUDA, whose steps are plain calls on a CPU."""
    settings: dict[str, Any] = {"seed": 5, "slots": 4, "context": 64, **kwargs}
    runners = GraphRunners() if graphs else None
    return LocalEngine(
        model, encode=PROMPTS.__getitem__, decode=decode, runners=runners, **settings
    )


def expecting_short(engine: LocalEngine) -> LocalEngine:
    """After rollouts of two tokens it admits too many long ones, and must preempt."""
    engine.generate([ask(i, n=2, phase="eval", max_tokens=2) for i in range(30, 36)])
    engine.stats()
    return engine


def ask(
    prompt: int,
    n: int = 1,
    group: int | None = None,
    first: int = 0,
    phase: Any = "train",
    **sampling: Any,
) -> Request:
    return Request(
        prompt_id=f"p{prompt}",
        group_id=100 + prompt if group is None else group,
        first_index=first,
        n=n,
        sampling=Sampling(**{"max_tokens": 20, **sampling}),
        phase=phase,
    )


def by_key(rollouts: Sequence[Rollout]) -> dict[tuple[int, int], list[int]]:
    return {r.key: r.trace.ids.tolist() for r in rollouts if r.trace is not None}


def reference_race(
    log_probs: np.ndarray, seed: int, evaluation: bool, group: int, index: int, position: int
) -> np.ndarray:
    """log p - log E for every token: the largest wins."""
    bits = np.array(
        [reference_bits(seed, evaluation, group, index, position, t) for t in range(log_probs.size)]
    )
    u = np.minimum(np.float32((bits >> 8) * 2.0**-24 + 2.0**-25), np.float32(1 - 2.0**-24)).astype(
        np.float64
    )
    return log_probs - np.log(-np.log1p(-u))


@torch.no_grad()
def slow_decode(
    model: PreTrainedModel, request: Request, index: int, seed: int = 5, context: int = 64
) -> tuple[list[int], list[float]]:
    """One token at a time, the whole sequence through the trainer's own forward each time; no cache, no batch."""
    ids = list(PROMPTS[request.prompt_id])
    sampling, start = request.sampling, len(ids)
    log_probs = []
    while len(ids) - start < sampling.max_tokens and len(ids) < context:
        logits = (
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
            .logits[0, -1]
            .double()
        )
        lp = torch.log_softmax(logits / (sampling.temperature or 1.0), -1).cpu().numpy()
        race = lp
        if sampling.temperature:
            race = reference_race(
                lp, seed, request.phase == "eval", request.group_id, index, len(ids) - start
            )
        ids.append(int(race.argmax()))
        log_probs.append(float(lp[ids[-1]]))
        if ids[-1] in sampling.stop_ids:
            break
    return ids[start:], log_probs


def check_against_slow(
    model: PreTrainedModel,
    requests: Sequence[Request],
    rollouts: Sequence[Rollout],
    tolerance: float = 1e-9,
) -> None:
    found = {r.key: r for r in rollouts}
    assert len(found) == len(rollouts) == sum(r.n for r in requests)
    for request in requests:
        for index in range(request.first_index, request.first_index + request.n):
            trace = found[request.group_id, index].trace
            assert trace is not None
            ids, log_probs = slow_decode(model, request, index)
            assert trace.ids.tolist() == ids
            np.testing.assert_allclose(trace.log_probs, log_probs, rtol=0, atol=tolerance)
