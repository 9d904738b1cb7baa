"""The whole step over the real kernels, under Triton's interpreter or on a GPU: the tokens of the plain step."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_env import device, needs_triton
from slow_engine import VOCAB, ask, make_engine, sharp_model
from test_graphs import gemma
from test_speculation import Whim
from transformers import PreTrainedModel

from whet.draft.base import DraftArm
from whet.draft.eagle import eagle_head
from whet.draft.speculation import Speculation
from whet.fast.fused import share_storage

from adversaries import adversaries  # isort: skip


def model(kind: str) -> PreTrainedModel:
    made = (
        sharp_model(heads=6, kv_heads=2, dtype=torch.float32)
        if kind == "fused"
        else gemma().float()
    )
    made = made.to(device)
    assert share_storage(made)
    return made


@needs_triton
@pytest.mark.parametrize("kind", ["fused", "gemma"])
def test_kernels_emit_the_tokens_of_the_plain_step(kind: str) -> None:
    """Prefill, forks, rows that come and go, greedy and warm ones; soft-cap and windows in Gemma's case."""
    requests = [
        ask(i, n=1 + i % 2, temperature=(1.0, 0.0, 0.5)[i % 3], max_tokens=3 + i) for i in range(3)
    ]
    results = []
    for graphs in (False, True):
        engine = make_engine(model(kind), graphs=graphs, page=16, slots=3)
        engine.submit(requests)
        results.append({r.key: r.trace for r in engine.collect()})
    same(*results)


@needs_triton
def test_kernels_verify_drafts() -> None:
    """Those that are mostly right and those of an untrained drafter, plain steps between: the same tokens."""
    requests = [ask(i, temperature=(0.5, 0.0)[i % 2], max_tokens=18) for i in range(3)]
    plain = make_engine(model("fused"), page=16, slots=3)
    plain.submit(requests)
    traces = {r.key: r.trace for r in plain.collect()}
    made, whim = model("fused"), Whim([DraftArm("half_wrong", 3), DraftArm("eagle", 2)])
    known = {
        d.name: d
        for d in adversaries(VOCAB, 3, {k: t.ids for k, t in traces.items() if t is not None})
    }
    speculation = Speculation([known["half_wrong"]], whim, vocab=VOCAB)
    engine = make_engine(
        made, graphs=True, page=16, slots=3, speculation=speculation, eagle=eagle_head(made)
    )
    engine.runner.burst = 4  # more turns, so that chance comes to both arms
    engine.submit(requests)
    same(traces, {r.key: r.trace for r in engine.collect()})
    assert engine.stats()["draft/failures"] == 0
    assert len(whim.used) == 2 and whim.accepted


def same(plain: dict[Any, Any], kernels: dict[Any, Any]) -> None:
    assert plain.keys() == kernels.keys()
    for key, trace in plain.items():
        other = kernels[key]
        assert trace is not None and other is not None
        assert trace.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(trace.log_probs, other.log_probs, rtol=0, atol=2e-3)
