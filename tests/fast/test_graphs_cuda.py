"""Captured graphs on a GPU emit what plain calls emit there, and what a CPU emits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_engine import ask, make_engine, sharp_model
from small_run import Silent, even_digits, small_config
from test_graphs import REQUESTS, adapted, gemma, llama, same
from transformers import PreTrainedModel

from whet.api import run_recipe
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunner
from whet.run import best_checkpoint

pytestmark = pytest.mark.gpu


def on_cuda(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Its projections side by side again, where they were: a move parts them."""
    shared = share_storage(model)
    model = model.to("cuda", dtype)
    assert not shared or share_storage(model)
    return model


@pytest.mark.parametrize(
    "settings", [{}, {"slots": 1}, {"slots": 5, "pages": 34}, {"page": 64}], ids=str
)
@pytest.mark.parametrize("make", [llama, gemma, adapted], ids=["fused", "plain", "adapted"])
def test_graphs_equal_plain_calls_on_a_cpu(make: Any, settings: dict[str, int]) -> None:
    settings = {"page": 16, **settings}
    plain = make_engine(make().float(), graphs=False, **settings)
    graph = make_engine(on_cuda(make(), torch.float32), graphs=True, **settings)
    results = []
    for engine in (plain, graph):
        engine.submit(REQUESTS)
        results.append(engine.collect())
    for a, b in zip(*[sorted(r, key=lambda r: r.key) for r in results], strict=True):
        assert a.trace is not None and b.trace is not None
        assert a.trace.ids.tolist() == b.trace.ids.tolist()
        np.testing.assert_allclose(a.trace.log_probs, b.trace.log_probs, rtol=0, atol=2e-3)
    assert isinstance(graph.runner, GraphRunner) and graph.runner.stats()["rollout/graphs"] > 0


def test_the_same_graph_serves_rows_of_any_length() -> None:
    """Captured over padding alone, replayed for short and long rows; a second round finds nothing of the first."""
    model = on_cuda(sharp_model(heads=6, kv_heads=2), torch.float32)
    first, second = (make_engine(model, graphs=True, slots=8) for _ in range(2))
    requests = [ask(i, n=2, max_tokens=45) for i in range(12)]
    first.submit(requests[6:])
    first.collect()
    for engine in (first, second):
        engine.submit(requests[:6])
    same(first.collect(), second.collect())


def test_evaluations_with_top_p_in_the_middle_of_a_stream() -> None:
    """`generate` while training rows run; one row that is drawn outside of the graph changes no other row's tokens."""
    train = [ask(i, n=2, max_tokens=9 + 4 * i) for i in range(4)]
    picky = [
        ask(9, n=2, phase="eval", temperature=0.5, top_p=0.7, max_tokens=9),
        ask(5, phase="eval", max_tokens=7),
    ]
    results = []
    for model, graphs in ((llama().float(), False), (on_cuda(llama(), torch.float32), True)):
        engine = make_engine(model, graphs=graphs, page=16, slots=6, mode="stream")
        engine.submit(train)
        for _ in range(5):
            engine.step()
        found = engine.generate(picky)
        while not engine.idle:
            found += engine.collect()
        results.append({r.key: r.trace.ids.tolist() for r in found if r.trace})
    assert results[0] == results[1]


def test_half_precision_stays_close_to_a_teacher_forced_forward() -> None:
    """Recorded log-probs beside those of the model's own forward over the same tokens."""
    torch.manual_seed(0)
    model = on_cuda(sharp_model(heads=6, kv_heads=2, dtype=torch.float32), torch.bfloat16)
    engine = make_engine(model, graphs=True, slots=8)
    engine.submit([ask(i, n=2, max_tokens=40) for i in range(8)])
    gaps = []
    for rollout in engine.collect():
        assert rollout.trace is not None
        prompt = list(engine.encode(rollout.prompt_id))
        ids = torch.tensor([[*prompt, *rollout.trace.ids.tolist()]], device="cuda")
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        want = (
            torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
        )
        gaps.append(np.abs(want - rollout.trace.log_probs))
    assert np.concatenate(gaps).mean() < 0.05


def test_weights_written_in_place_reach_the_graphs() -> None:
    model = on_cuda(sharp_model(heads=6, kv_heads=2), torch.float32)
    engine = make_engine(model, graphs=True, slots=8)
    engine.submit(REQUESTS)
    before = engine.collect()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    engine.update(1)
    fresh = make_engine(model, graphs=True, slots=8, version=1)
    for each in (engine, fresh):
        each.submit(REQUESTS)
    after = engine.collect()
    same(after, fresh.collect())
    assert [r.trace.ids.tolist() for r in before if r.trace] != [
        r.trace.ids.tolist() for r in after if r.trace
    ]


def test_a_run_by_graphs_trains(tmp_path: Path) -> None:
    """Engine, learner and checkpoints over weights that share storage: updates, evaluation, a checkpoint."""
    settings = small_config("rollout.graphs=true", 'model.device="cuda"', "steps=2")
    watcher = Silent()
    run_recipe(settings, tmp_path / "run", watcher=watcher, reward=even_digits)
    assert [row["step"] for row in watcher.rows] == [0, 1, 2] and best_checkpoint(
        tmp_path / "run"
    ) is not None
    assert watcher.rows[-1]["rollout/graphs"] > 0 and watcher.rows[-1]["learn/mismatch_max"] < 0.05


def test_bytes_are_what_the_graphs_memory_pool_grew_by() -> None:
    """Whatever is freed elsewhere meanwhile: here a piece that lies unused, which a capture gives back."""
    engine = make_engine(
        on_cuda(sharp_model(heads=6, kv_heads=2), torch.float32), graphs=True, slots=8
    )
    unused = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del unused
    engine.submit(REQUESTS)
    engine.collect()
    assert isinstance(engine.runner, GraphRunner)
    captures = engine.runner.captures
    assert captures.bytes.keys() == captures.graphs.keys()
    assert all(size >= 0 for size in captures.bytes.values())
    assert 0 < sum(captures.bytes.values()) == captures.stats()["rollout/graph_bytes"] < 2**28


def test_a_model_that_is_not_fused_is_named() -> None:
    with pytest.warns(
        UserWarning, match="Gemma2ForCausalLM decodes by its own modules, .* is not one of"
    ):
        make_engine(on_cuda(gemma(), torch.float32), graphs=True, page=16)
