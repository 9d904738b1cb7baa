"""The step over kernels and graphs emits what the plain step emits; here on a CPU, where a graph is a plain call."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from slow_engine import ask, make_engine, sharp_model, sharpen
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from whet.config import Lora
from whet.fast.fused import FusedStack, PlainNetwork, share_storage
from whet.fast.graphs import GraphRunner, buckets, capturing
from whet.model.lora import add_lora
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout


def gemma() -> PreTrainedModel:
    """A family that is not fused: soft-caps, and windows on every second layer."""
    config = Gemma2Config(
        vocab_size=23,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        sliding_window=7,
        max_position_embeddings=128,
        attn_implementation="eager",  # sdpa leaves out the soft-cap
    )
    torch.manual_seed(0)
    return sharpen(Gemma2ForCausalLM(config).double())


def llama(fused: bool = True) -> PreTrainedModel:
    model = sharp_model(heads=6, kv_heads=2)
    assert not fused or share_storage(model)
    return model


def engines(model: PreTrainedModel, **settings: Any) -> tuple[LocalEngine, LocalEngine]:
    settings = {"page": 4, **settings}
    return make_engine(model, graphs=False, **settings), make_engine(model, graphs=True, **settings)


def same(a: list[Rollout], b: list[Rollout]) -> None:
    here, there = {r.key: r for r in a}, {r.key: r for r in b}
    assert here.keys() == there.keys()
    for key, rollout in here.items():
        other = there[key]
        assert rollout.trace is not None and other.trace is not None
        assert (
            rollout.trace.ids.tolist() == other.trace.ids.tolist()
            and rollout.finish == other.finish
        )
        np.testing.assert_allclose(
            rollout.trace.log_probs, other.trace.log_probs, rtol=0, atol=1e-5
        )
        assert rollout.trace.versions.tolist() == other.trace.versions.tolist()


REQUESTS = [
    ask(i, n=1 + i % 3, temperature=(1.0, 0.0, 0.5)[i % 3], max_tokens=6 + 3 * i) for i in range(9)
]


MODELS = {"fused": llama, "plain": lambda: llama(fused=False), "gemma": gemma}


@pytest.mark.wide
@pytest.mark.parametrize(
    "settings", [{}, {"pages": 34}, {"slots": 1}, {"slots": 5, "page": 64}], ids=str
)
@pytest.mark.parametrize("model", ["fused", pytest.param("plain", marks=pytest.mark.slow), "gemma"])
def test_equals_the_plain_step(model: str, settings: dict[str, int]) -> None:
    """Slots that fall free and are filled again, forks, pages that run out, one row alone. Gemma's modules run as a
    Llama's do without a fused stack, so the latter is slow: redundant."""
    plain, graph = engines(MODELS[model](), **settings)
    for engine in (plain, graph):
        engine.submit(REQUESTS[: 9 if settings.get("slots") != 1 else 4])
    same(plain.collect(), graph.collect())


def test_which_network_is_taken() -> None:
    kinds = []
    for model in (llama(), llama(fused=False), gemma()):
        runner = make_engine(model, graphs=True).runner
        assert isinstance(runner, GraphRunner)
        kinds.append(type(runner.network))
    assert kinds == [FusedStack, PlainNetwork, PlainNetwork]


def test_evaluations_with_top_p_beside_training_rows() -> None:
    picky = [ask(9, n=2, phase="eval", temperature=0.5, top_p=0.7, max_tokens=9)]
    results = []
    for engine in engines(llama(), slots=6):
        engine.submit(REQUESTS[:3])
        results.append((engine.generate(picky), engine.collect()))
    (a, b), (c, d) = results
    same(a, c)
    same(b, d)


@pytest.mark.wide
@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_weights_that_change_in_place_are_seen(on_update: Any) -> None:
    """The fused weights are views: an optimiser's write reaches them without a word."""
    results = []
    for graphs in (False, True):
        model = llama()
        engine = make_engine(model, graphs=graphs, page=4, mode="stream", on_update=on_update)
        engine.submit([ask(i, n=2, max_tokens=30) for i in range(4)])
        done = engine.collect()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        engine.update(1)
        while not engine.idle:
            done += engine.collect()
        results.append(done)
    same(*results)


def test_stop_ids_end_a_row_and_its_place_is_taken() -> None:
    requests: list[Request] = [ask(i, n=2, max_tokens=40, stop_ids=(3, 7)) for i in range(8)]
    plain, graph = engines(llama(), slots=3)
    for engine in (plain, graph):
        engine.submit(requests)
    a, b = plain.collect(), graph.collect()
    same(a, b)
    assert any(r.finish == "stop" for r in a)


def test_sizes_reach_the_slots_and_no_further() -> None:
    assert buckets(1) == [2] and buckets(64)[-2:] == [48, 64] and buckets(300)[-2:] == [256, 300]
    assert buckets(2000)[-1] == 2000 and sorted(set(buckets(2000))) == buckets(2000)


def adapted() -> PreTrainedModel:
    """With adapters that are not merged: its own modules run, over our kernels."""
    pytest.importorskip("peft")
    model = sharp_model(heads=6, kv_heads=2)
    add_lora(model, Lora(rank=3), "base", seed=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(
                    torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
                    * 0.3
                )
    return model


def test_adapters_that_are_not_merged() -> None:
    plain, graph = engines(adapted(), slots=5)
    for engine in (plain, graph):
        engine.submit(REQUESTS)
    same(plain.collect(), graph.collect())
    assert isinstance(graph.runner, GraphRunner) and isinstance(graph.runner.network, PlainNetwork)


def test_garbage_waits_for_the_end_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own context is left out, since it needs a GPU; what Python does within it is what is tested."""
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with pytest.raises(ZeroDivisionError), capturing(None, (0, 0)):  # type: ignore[arg-type]
            cycle: list[Any] = [torch.zeros(1)]
            cycle.append(cycle)
            kept = weakref.ref(cycle[0])
            del cycle
            assert len([[] for _ in range(1000)]) == 1000 and kept() is not None, (
                "it would have been found by now"
            )
            raise ZeroDivisionError
        assert gc.isenabled()
        gc.disable()
        with capturing(None, (0, 0)):  # type: ignore[arg-type]
            pass
        assert not gc.isenabled(), "as it was before"
    finally:
        gc.set_threshold(*before)
        gc.enable()
