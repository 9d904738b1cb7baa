"""What an engine says before it starts: that it is slow, and why."""

from collections.abc import Iterator

import pytest
import torch
from slow_engine import ask, by_key, make_engine, sharp_model

from whet.fast import graphs
from whet.fast.fused import graphs_lack, share_storage
from whet.fast.kernels import attention
from whet.rollout.runner import EagerRunner


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What the kernels lack is remembered, but not what a test makes up."""
    attention.kernel_lacks.cache_clear()
    yield
    attention.kernel_lacks.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_without_triton_a_gpu_decodes_slowly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which need not be here: the kernels are asked for, and are not to be had."""
    model = sharp_model(dtype=torch.float32)
    share_storage(model)
    fast = make_engine(model, graphs=True, page=4)
    assert fast.notes() == [] and not isinstance(fast.runner, EagerRunner)
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    monkeypatch.setattr(
        graphs, "graphs_lack", lambda shapes, device: graphs_lack(shapes, torch.device("cuda"))
    )
    slow = make_engine(model, graphs=True, page=4)
    assert isinstance(slow.runner, EagerRunner)
    (note,) = slow.notes()
    assert note.startswith(
        "Rollouts are decoded by plain calls of the model's own layers, more slowly than by graphs"
    )
    assert note.endswith(", since Triton is not installed.")
    assert make_engine(model, graphs=False).notes() == [], "no graphs were asked for"
    requests = [ask(i, n=2, max_tokens=6) for i in range(3)]
    assert by_key(slow.generate(requests)) == by_key(fast.generate(requests))
