"""Weight updates while rollouts run (cut, recompute, keep), and engines that resume from a state."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from slow_engine import PROMPTS, ask, by_key, expecting_short, make_engine, sharp_model
from transformers import PreTrainedModel

from whet.rollout.engine import LocalEngine
from whet.types import Rollout

FORMS = [{}, {"page": 4}]


def step(engine: LocalEngine, n: int) -> None:
    for _ in range(n):
        engine.step()


def drain(engine: LocalEngine) -> list[Rollout]:
    out = []
    while not engine.idle:
        out += engine.collect()
    return out


@torch.no_grad()
def change(model: PreTrainedModel, seed: int) -> None:
    for mine, new in zip(
        model.parameters(), sharp_model(seed, dtype=model.dtype).parameters(), strict=True
    ):
        mine.copy_(new)


@torch.no_grad()
def teacher(model: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    assert rollout.trace is not None
    prompt = PROMPTS[rollout.prompt_id]
    ids = torch.tensor([prompt + rollout.trace.ids.tolist()])
    lp = torch.log_softmax(model(ids, use_cache=False).logits[0].double(), -1)
    return lp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_rollouts_go_on_over_an_update(form: dict[str, int], on_update: str) -> None:
    model = sharp_model()
    engine = make_engine(model, mode="stream", on_update=on_update, version=3, **form)
    engine.submit([ask(i, n=2, max_tokens=12) for i in range(3)])
    step(engine, 5)
    change(model, seed=1)
    engine.update(4)
    rollouts = drain(engine)
    assert len(rollouts) == 6 and {r.finish for r in rollouts} == {"length"}
    before = {r.key: r for r in rollouts if r.first_version == 3}
    assert len(before) == 4  # as many as there are slots had begun
    for rollout in rollouts:
        assert rollout.trace is not None and rollout.last_version == 4
        split = 5 if rollout.key in before else 0
        assert rollout.trace.versions.tolist() == [3] * split + [4] * (12 - split)
        new = teacher(model, rollout)
        exact = np.abs(rollout.trace.log_probs - new)[split:] < 1e-9
        # Recomputed: from the update on as if the new weights had always been there. Kept: old keys and values remain.
        assert exact.all() if on_update == "recompute" or split == 0 else not exact.all()
    old = sharp_model()
    for rollout in before.values():
        assert rollout.trace is not None
        np.testing.assert_allclose(
            rollout.trace.log_probs[:5], teacher(old, rollout)[:5], rtol=0, atol=1e-9
        )


def test_the_trainer_trains_between_steps() -> None:
    """Generation leaves nothing on the shared weights that a backward pass would trip over."""
    model = sharp_model(dtype=torch.float32).train()
    engine = make_engine(model, mode="stream", on_update="recompute")
    engine.submit([ask(i, max_tokens=12) for i in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for version in (1, 2, 3):
        step(engine, 3)
        ids = torch.tensor([[4, 5, 6, 7]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.update(version)
    assert all(p.is_leaf and p.requires_grad and not p.is_inference() for p in model.parameters())
    rollouts = drain(engine)
    assert [r.trace.versions.tolist() for r in rollouts if r.trace] == [
        [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    ] * 4
    for rollout in rollouts:
        assert rollout.trace is not None
        np.testing.assert_allclose(
            rollout.trace.log_probs[9:], teacher(model.eval(), rollout)[9:], rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_recompute_with_unchanged_weights_changes_no_token(form: dict[str, int]) -> None:
    model = sharp_model()
    plain, updated = (make_engine(model, on_update="recompute", **form) for _ in range(2))
    for engine in (plain, updated):
        engine.submit([ask(i, n=2, max_tokens=15) for i in range(4)])
    for version in range(1, 6):
        step(updated, 4)
        updated.update(version)
    assert by_key(drain(updated)) == by_key(drain(plain))


def test_cut_delivers_what_has_begun_and_keeps_what_has_not() -> None:
    engine = make_engine(sharp_model(), mode="stream", on_update="cut", slots=3, version=8)
    engine.submit(
        [
            ask(0, n=2, max_tokens=3),
            ask(1, n=3, max_tokens=30),
            ask(2, n=2, max_tokens=4),
            ask(3, max_tokens=4),
        ]
    )
    assert {r.key for r in engine.collect()} == {(100, 0), (100, 1)}
    # One of group 101 runs since the start, two began when group 100 left; 102 and 103 wait.
    step(engine, 1)
    engine.submit([ask(0, first=2, n=2, max_tokens=3)])  # the group has begun (and finished) before
    engine.update(9)
    cut = engine.collect()
    assert [(r.key, r.finish, r.length) for r in cut] == [
        ((101, 0), "cut", 4),
        ((101, 1), "cut", 1),
        ((101, 2), "cut", 1),
        ((100, 2), "cut", 0),
        ((100, 3), "cut", 0),
    ]
    assert all((r.first_version, r.last_version) == (8, 8) for r in cut)
    rest = drain(engine)
    assert sorted((r.key, r.finish, r.first_version) for r in rest) == [
        ((102, 0), "length", 9),
        ((102, 1), "length", 9),
        ((103, 0), "length", 9),
    ]
    assert engine.stats()["rollout/cut"] == 5


def test_an_update_forgets_groups_that_are_over() -> None:
    """A continuation that waits when the next update comes has not begun since the last one, so it is not cut."""
    engine = make_engine(sharp_model(), mode="stream", on_update="cut", slots=1)
    engine.submit([ask(0, max_tokens=3)])
    assert [r.key for r in drain(engine)] == [(100, 0)]
    engine.update(1)
    assert engine.scheduler.begun == set()
    engine.submit([ask(1, max_tokens=30), ask(0, first=1, max_tokens=3)])
    step(engine, 2)  # group 101 has the slot, and the second rollout of group 100 waits
    engine.update(2)
    assert [(r.key, r.finish) for r in engine.collect()] == [((101, 0), "cut")]
    assert [(r.key, r.finish) for r in drain(engine)] == [((100, 1), "length")]


def test_cut_leaves_a_prefix_of_what_would_have_come() -> None:
    model = sharp_model()
    whole = by_key(make_engine(model).generate([ask(1, n=2)]))
    engine = make_engine(model, mode="stream")
    engine.submit([ask(1, n=2)])
    step(engine, 6)
    engine.update(1)
    assert by_key(engine.collect()) == {key: ids[:6] for key, ids in whole.items()}


def test_cut_waits_for_partly_begun_groups() -> None:
    """A group of four on three slots: the one that never got a slot is cut too, empty."""
    engine = make_engine(sharp_model(), mode="stream", slots=3)
    engine.submit([ask(1, n=4), ask(2)])
    step(engine, 2)
    engine.update(1)
    assert [(r.key, r.length) for r in engine.collect()] == [
        ((101, 0), 2),
        ((101, 1), 2),
        ((101, 2), 2),
        ((101, 3), 0),
    ]
    assert [r.key for r in drain(engine)] == [(102, 0)]


def test_cut_of_a_preempted_rollout_keeps_its_tokens() -> None:
    engine = expecting_short(make_engine(sharp_model(), mode="stream", page=4, pages=16))
    engine.submit([ask(i, max_tokens=40) for i in range(4)])
    while not any(f.trace.ids.size for f in engine.scheduler.waiting):
        engine.step()
    engine.update(1)
    cut = engine.collect()
    assert len(cut) == 4 and all(r.finish == "cut" and r.length > 0 for r in cut)
    assert engine.idle and engine.cache.free == 16


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint does: JSON for the values, arrays apart."""
    arrays = {k: v for k, v in state.items() if isinstance(v, np.ndarray)}
    return {**json.loads(json.dumps({k: v for k, v in state.items() if k not in arrays})), **arrays}


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("on_update", ["cut", "recompute"])
def test_a_resumed_engine_goes_on_exactly(
    on_update: str, form: dict[str, int], dtype: torch.dtype
) -> None:
    """State taken after an update: not only the same tokens but the same bits, order and end."""
    model = sharp_model(dtype=dtype)

    def begin() -> LocalEngine:
        return make_engine(model, mode="stream", on_update=on_update, **form)

    first = begin()
    first.submit(
        [ask(i, n=2, max_tokens=5 + 4 * i, temperature=0.9, stop_ids=(3,)) for i in range(6)]
    )
    found = first.collect()
    step(first, 3)
    first.update(1)
    second = begin()
    second.load_state_dict(round_trip(first.state_dict()))
    assert second.version == 1 and second.free == first.free
    a, b = drain(first), drain(second)
    assert len(a) + len(found) == 12
    for mine, theirs in zip(a, b, strict=True):
        assert mine.trace is not None and theirs.trace is not None
        assert (mine.key, mine.finish, mine.sampling, mine.phase) == (
            theirs.key,
            theirs.finish,
            theirs.sampling,
            theirs.phase,
        )
        for name in ("ids", "log_probs", "versions"):
            x, y = getattr(mine.trace, name), getattr(theirs.trace, name)
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def test_state_in_mid_stream_gives_the_same_tokens() -> None:
    """Running rollouts and uncollected ones: without an update before, the caches differ in rounding only."""
    model = sharp_model()
    whole = make_engine(model, mode="stream")
    whole.submit([ask(i, n=2, max_tokens=5 + 4 * i) for i in range(5)])
    step(whole, 7)
    assert whole.done
    resumed = make_engine(model, mode="stream")
    resumed.load_state_dict(round_trip(whole.state_dict()))
    assert by_key(drain(resumed)) == by_key(drain(whole))


def test_a_resumed_engine_remembers_which_groups_began() -> None:
    model = sharp_model()
    engine = make_engine(model, mode="stream", slots=1)
    engine.submit([ask(0, max_tokens=2), ask(1, n=2)])
    engine.collect()
    step(engine, 2)
    resumed = make_engine(model, mode="stream", slots=1)
    resumed.load_state_dict(round_trip(engine.state_dict()))
    resumed.submit([ask(0, first=1), ask(2)])
    for e in (engine, resumed):
        e.update(1)
    assert [(r.key, r.length) for r in engine.collect()] == [((101, 0), 2), ((101, 1), 0)]
    assert [(r.key, r.length) for r in resumed.collect()] == [
        ((101, 0), 2),
        ((101, 1), 0),
        ((100, 1), 0),
    ]


def test_cut_ends_what_was_taken_on_from_another_engine() -> None:
    """What another has begun and this one has no slot for has old tokens: an update ends it, too."""
    model = sharp_model()
    leaving, staying = (make_engine(model, mode="stream", slots=2) for _ in range(2))
    leaving.submit([ask(0, n=3)])
    staying.submit([ask(1, n=2)])
    for engine in (leaving, staying):
        step(engine, 3)
    staying.take_on(round_trip(leaving.state_dict()))
    staying.submit([ask(2)])
    step(staying, 1)
    staying.update(1)
    cut = [((101, 0), 4), ((101, 1), 4), ((100, 0), 3), ((100, 1), 3), ((100, 2), 0)]
    assert [(r.key, r.length) for r in staying.collect()] == cut
    assert [(r.key, r.first_version) for r in drain(staying)] == [((102, 0), 1)]


def test_what_comes_from_an_engine_behind_an_update_is_cut() -> None:
    """It was given up before the update and is taken on after it; what has not begun is asked of the new weights."""
    model = sharp_model()
    leaving, staying = (make_engine(model, mode="stream", slots=2) for _ in range(2))
    leaving.submit([ask(0, n=3), ask(1)])
    step(leaving, 3)
    staying.update(1)
    staying.take_on(round_trip(leaving.state_dict()))
    assert [(r.key, r.length, r.finish, r.first_version) for r in staying.collect()] == [
        ((100, i), (3, 3, 0)[i], "cut", 0) for i in range(3)
    ]
    assert staying.stats()["rollout/cut"] == 3
    assert [(r.key, r.first_version) for r in drain(staying)] == [((101, 0), 1)]


def test_an_empty_state() -> None:
    engine, fresh = make_engine(sharp_model(), version=4), make_engine(sharp_model())
    fresh.load_state_dict(round_trip(engine.state_dict()))
    assert fresh.idle and fresh.version == 4 and fresh.collect() == []
