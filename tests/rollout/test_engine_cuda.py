"""The engine on a GPU emits what it emits on a CPU, in both forms of the cache."""

import numpy as np
import pytest
import torch
from slow_engine import ask, make_engine, sharp_model

FORMS = [{}, {"page": 4}, {"page": 3, "pages": 24}]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cuda_equals_cpu(form: dict[str, int], dtype: torch.dtype) -> None:
    """RMSNorm and rotary angles are float32 in transformers whatever the model, so float64 agrees to 1e-6 only."""
    requests = [ask(i, n=3, temperature=(1.0, 0.0, 0.6)[i % 3], max_tokens=30) for i in range(8)]
    results = []
    for device in ("cpu", "cuda"):
        engine = make_engine(sharp_model(dtype=dtype).to(device), **form)
        engine.submit(requests)
        results.append({r.key: r for r in engine.collect()})
    here, there = results
    for key in here:
        a, b = here[key].trace, there[key].trace
        assert a is not None and b is not None
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_allclose(
            a.log_probs, b.log_probs, rtol=0, atol=1e-5 if dtype == torch.float64 else 1e-3
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forms_of_the_cache_agree_on_cuda(dtype: torch.dtype) -> None:
    requests = [ask(i, n=3, max_tokens=30) for i in range(8)]
    model = sharp_model(dtype=dtype).cuda()
    results = []
    for form in FORMS:
        engine = make_engine(model, **form)
        engine.submit(requests)
        results.append({r.key: r.trace for r in engine.collect()})
    for other in results[1:]:
        for key, trace in results[0].items():
            same = other[key]
            assert trace is not None and same is not None
            assert trace.ids.tolist() == same.ids.tolist()
            np.testing.assert_allclose(
                trace.log_probs,
                same.log_probs,
                rtol=0,
                atol=1e-5 if dtype == torch.float64 else 1e-3,
            )
