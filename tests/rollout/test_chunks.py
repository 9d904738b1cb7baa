"""Long prompts and long flights are fed in chunks: the same tokens, while the rows that run go on."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_lengths import ScriptedRunner, scripted, want
from slow_engine import (
    PROMPTS,
    ask,
    by_key,
    check_against_slow,
    expecting_short,
    make_engine,
    sharp_model,
)
from test_engine import windowed_models
from test_engine_update import drain, step
from test_graphs import engines, llama, same

from whet.rollout import scheduler

MODEL = sharp_model(heads=6, kv_heads=2)
FORMS = [{}, {"page": 4}, {"page": 3, "pages": 24}, {"graphs": True, "page": 4}]


@pytest.fixture(params=[1, 5], ids=lambda n: f"chunks of {n}")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scheduler, "PREFILL", request.param)
    return int(request.param)


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_chunks_change_no_token(form: dict[str, Any], chunks: int) -> None:
    """Prompts of 1 to 13 tokens, forked; slots that fall free beside a row that is half fed."""
    requests = [
        ask(i, n=1 + i % 3, temperature=(1.0, 0.0)[i % 2], max_tokens=4 + i) for i in range(6)
    ]
    engine = make_engine(MODEL, slots=5, **form)
    engine.submit(requests)
    tolerance = 1e-5 if form.get("graphs") else 1e-9  # the race's log-probs are of 32 bits
    check_against_slow(MODEL, requests, engine.collect(), tolerance=tolerance)
    assert engine.stats()["rollout/steps"] > 15


@pytest.mark.wide
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_and_soft_caps(name: str, chunks: int) -> None:
    model = windowed_models()[name]
    requests = [ask(i, n=2, max_tokens=12) for i in range(5)]
    for form in ({}, {"page": 4}):
        engine = make_engine(model, **form)
        engine.submit(requests)
        check_against_slow(
            model, requests, engine.collect(), tolerance=1e-9 if name == "mistral" else 1e-5
        )


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_preempted_and_recomputed_flights_are_fed_in_chunks(
    form: dict[str, Any], chunks: int
) -> None:
    """Known tokens are prompt and response then; updates come while a row is half fed, too."""
    requests = [ask(i, n=2, max_tokens=24) for i in range(4)]
    plain = make_engine(MODEL, slots=8)
    plain.submit(requests)
    engine = make_engine(MODEL, slots=4, on_update="recompute", **form)
    if "pages" in form:
        expecting_short(engine)
    engine.submit(requests)
    for version in range(1, 6):
        step(engine, 9)
        engine.update(version)
    assert by_key(drain(engine)) == by_key(plain.collect())
    if "page" in form:
        assert engine.cache.free == len(engine.cache.owners)  # type: ignore[union-attr]


WANTED: dict[tuple[int, int], list[int]] = {}


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(1, 9),
    slots=st.integers(1, 6),
    page=st.sampled_from([0, 1, 4]),
    spare=st.integers(0, 12),
    updates=st.lists(st.integers(1, 9), max_size=4),
    graphs=st.booleans(),
)
def test_tokens_depend_on_the_key_alone(
    size: int, slots: int, page: int, spare: int, updates: list[int], graphs: bool
) -> None:
    requests = [ask(i, n=1 + i % 3, max_tokens=3 + (5 * i) % 11) for i in range(6)]
    if not WANTED:
        WANTED.update(by_key(make_engine(MODEL, slots=1).generate(requests)))
    form: dict[str, Any] = {"page": page or 4 * graphs, "graphs": graphs}
    if form["page"]:
        form["pages"] = -(-64 // form["page"]) + spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "PREFILL", size)
        engine = make_engine(MODEL, slots=slots, on_update="recompute", **form)
        engine.submit(requests)
        for version, steps in enumerate(updates, 1):
            step(engine, steps)
            engine.update(version)
        assert by_key(drain(engine)) == WANTED
    if page:
        assert engine.cache.free == form["pages"]


def test_rows_that_run_go_on_while_a_prompt_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PREFILL", 4)
    long = next(i for i in range(40) if len(PROMPTS[f"p{i}"]) == 11)
    engine = make_engine(MODEL, slots=3)
    engine.submit([ask(0, max_tokens=9), ask(long, n=2, max_tokens=2)])  # p0 has one token
    step(engine, 1)
    assert engine.rows.size == 1  # the long one begins alone
    for fed in (4, 8):
        step(engine, 1)
        assert (engine.rows.size, engine.rows.ready, engine.rows.fed) == (2, 1, fed)
        assert engine.rows.count[0] == 1 + fed // 4 and engine.rows.count[1] == 0
    step(engine, 1)
    assert (engine.rows.size, engine.rows.ready) == (3, 3)  # whole, and forked
    assert engine.rows.count[:3].tolist() == [4, 1, 1]
    assert engine.stats()["rollout/prefill_tokens"] == 12


def test_no_step_feeds_more_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PREFILL", 50)
    engine = scripted(lambda f: 150, slots=6, page=16, on_update="recompute")
    engine.submit([want(f"q{i}", i, n=2) for i in range(4)])
    for version in range(1, 4):
        step(engine, 60)
        engine.update(version)
    assert {r.length for r in drain(engine)} == {150}
    assert isinstance(engine.runner, ScriptedRunner) and 25 < engine.runner.widest <= 50


def test_cut_of_a_row_that_is_half_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PREFILL", 4)
    engine = make_engine(MODEL, slots=3, mode="stream", page=4)
    engine.submit([ask(2, n=2), ask(0)])  # 11 tokens
    step(engine, 2)
    assert engine.rows.fed == 8
    engine.update(1)
    assert [(r.key, r.length) for r in engine.collect()] == [((102, 0), 0), ((102, 1), 0)]
    assert [r.key for r in drain(engine)] == [(100, 0)]
    assert engine.cache.free == len(engine.cache.owners)  # type: ignore[union-attr]


def test_state_of_a_row_that_is_half_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PREFILL", 4)
    first, second = (make_engine(MODEL, mode="stream") for _ in range(2))
    first.submit([ask(0, max_tokens=9), ask(2, n=2)])
    step(first, 2)
    assert first.rows.fed == 4
    second.load_state_dict(first.state_dict())
    assert by_key(drain(second)) == by_key(drain(first))


def test_evaluations_beside_training_rows_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` in the middle of a stream, one row of it with top-p: no row's tokens change."""
    monkeypatch.setattr(scheduler, "PREFILL", 5)
    train = [ask(i, n=2, max_tokens=9 + 4 * i) for i in range(4)]
    picky = [
        ask(9, n=2, phase="eval", temperature=0.5, top_p=0.7, max_tokens=9),
        ask(5, phase="eval", max_tokens=7),
    ]
    alone = make_engine(llama(), page=4, slots=8)
    alone.submit(train)
    wanted = alone.collect()
    evaluated = alone.generate(picky)
    for engine in engines(llama(), slots=6, mode="stream"):
        engine.submit(train)
        step(engine, 5)
        same(engine.generate(picky), evaluated)
        same(drain(engine), wanted)


@pytest.mark.gpu
def test_chunks_by_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole long flight in one forward against 16 tokens a step, forked and recomputed."""
    from test_graphs_cuda import on_cuda

    requests = [ask(i, n=2, max_tokens=40) for i in range(6)]
    results = []
    for size in (8192, 16, 3):
        monkeypatch.setattr(scheduler, "PREFILL", size)
        engine = make_engine(
            on_cuda(llama(), torch.float32), graphs=True, page=16, slots=8, on_update="recompute"
        )
        engine.submit(requests)
        step(engine, 20)
        engine.update(1)
        results.append({r.key: r.trace for r in drain(engine)})
    for other in results[1:]:
        for key, trace in results[0].items():
            assert trace is not None and other[key] is not None
            assert trace.ids.tolist() == other[key].ids.tolist()  # type: ignore[union-attr]
            np.testing.assert_allclose(trace.log_probs, other[key].log_probs, rtol=0, atol=2e-3)  # type: ignore[union-attr]
