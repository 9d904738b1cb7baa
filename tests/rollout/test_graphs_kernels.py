"""The whole step over the real kernels, under Triton's interpreter or on a GPU: the tokens of the plain step."""

import numpy as np
import pytest
import torch
from kernel_env import device, needs_triton
from slow_engine import ask, make_engine, sharp_model
from test_graphs import gemma
from transformers import PreTrainedModel

from whet.model.storage import share_storage


def model(kind: str) -> PreTrainedModel:
    made = sharp_model(heads=6, kv_heads=2, dtype=torch.float32) if kind == "fused" else gemma().float()
    made = made.to(device)
    assert share_storage(made)
    return made


@needs_triton
@pytest.mark.parametrize("kind", ["fused", "gemma"])
def test_kernels_emit_the_tokens_of_the_plain_step(kind: str) -> None:
    """Prefill, forks, rows that come and go, greedy and warm ones; soft-cap and windows in Gemma's case."""
    requests = [ask(i, n=1 + i % 2, temperature=(1.0, 0.0, 0.5)[i % 3], max_tokens=3 + i) for i in range(3)]
    results = []
    for graphs in (False, True):
        engine = make_engine(model(kind), graphs=graphs, page=16, slots=3)
        engine.submit(requests)
        results.append({r.key: r.trace for r in engine.collect()})
    plain, kernels = results
    assert plain.keys() == kernels.keys()
    for key, trace in plain.items():
        other = kernels[key]
        assert trace is not None and other is not None
        assert trace.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(trace.log_probs, other.log_probs, rtol=0, atol=2e-3)
