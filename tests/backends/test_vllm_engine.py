"""The vLLM engine against the model whose weights it was sent: real vLLM, on a CPU."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from whet.rollout.vllm_fit import version_of_vllm

if version_of_vllm() is None:  # not importorskip: the import alone takes long
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from vllm_parts import (
    CLOSE,
    CONTEXT,
    PROMPTS,
    TOKENIZER,
    asked,
    change,
    drained,
    make_engine,
    new_family,
    new_model,
    off,
    open_engine,
)

from whet.errors import WhetError
from whet.model.load import tiny_model
from whet.rollout.engine import LocalEngine
from whet.rollout.vllm import BLOCK, first_difference, named_weights


def local(model: Any, **how: Any) -> LocalEngine:
    given: dict[str, Any] = {"seed": 1, "slots": 4, "context": CONTEXT, "mode": "stream"} | how
    return LocalEngine(model, encode=PROMPTS.__getitem__, decode=TOKENIZER.decode, **given)


@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_log_probs_are_the_learners_before_and_after_each_update(
    tied: bool, on_update: Any
) -> None:
    model = new_model(tied=tied)
    models = {0: copy.deepcopy(model)}
    with open_engine(model, on_update=on_update) as engine:
        rollouts = []
        for version in range(3):
            engine.submit([asked(10 * version + i) for i in range(4)])
            for _ in range(12):  # half way through the first four; four wait
                engine.step()
            if version == 2:
                break
            change(model)
            engine.update(version + 1)
            models[version + 1] = copy.deepcopy(model)
            rollouts += engine.collect() if engine.done else []
        rollouts += drained(engine)
    assert len(rollouts) == 24 and len({r.key for r in rollouts}) == 24
    assert off(rollouts, models, carried=on_update != "keep") < CLOSE
    assert off(rollouts, {0: models[1], 1: models[2], 2: models[0]}) > 100 * CLOSE, (
        "other weights would be noticed"
    )
    several = [r for r in rollouts if r.first_version < r.last_version]
    cut = [r for r in rollouts if r.finish == "cut"]
    if on_update == "cut":
        assert not several and len(cut) == 8, (
            "of two updates, each has ended the four rollouts that ran"
        )
        assert all(0 < r.length < 20 for r in cut)
    else:
        assert len(several) >= 8 and not cut
        assert all((np.diff(r.trace.versions) >= 0).all() for r in several if r.trace is not None)
    if on_update == "keep":  # what is cached for running rollouts stays as old weights made it
        assert off(several, models) > 10 * CLOSE


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "phi3"])
def test_other_families(family: str) -> None:
    """Biases, norms of heads, capped logits over a head that vLLM has no module for, matrices that are joined here."""
    model = new_family(family)
    with open_engine(model, on_update="cut") as engine:
        for version in range(2):
            if version:
                change(model)
                engine.update(version)
            engine.submit([asked(10 * version + i, n=1) for i in range(5)])
            assert off(drained(engine), {version: model}) < CLOSE


def test_a_family_whose_weights_have_other_names_is_refused() -> None:
    model = new_family("mixtral")
    with (
        open_engine(model) as engine,
        pytest.raises(
            WhetError,
            match=r"^vLLM does not take the weights of MixtralForCausalLM by their names here: ",
        ),
    ):
        engine.generate([asked(0)])


@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_rollouts_begin_and_end_as_in_the_native_engine(on_update: Any) -> None:
    """Nothing stops early, so that the order is that of the queue. An update finds a group of which one rollout runs
    and another waits, a group that has finished in part, and one that has not begun."""

    def script(engine: Any) -> list[tuple[Any, ...]]:
        engine.submit(
            [asked(0, n=2, max_tokens=4), asked(1, n=3, max_tokens=9), asked(2, n=2, max_tokens=7)]
        )
        rollouts, free = [], []
        for version in range(1, 4):
            for _ in range(5):
                engine.step()
            free.append(engine.free)
            change(model)
            engine.update(version)
            rollouts += engine.collect() if engine.done else []
            engine.submit([asked(10 * version, n=2, max_tokens=6)])
        rollouts += drained(engine)
        stats = engine.stats()
        counted = [stats[f"rollout/{name}"] for name in ("tokens", "steps", "finished", "cut")]
        return [(r.key, r.finish, tuple(r.trace.versions.tolist())) for r in rollouts] + [
            tuple(free),
            tuple(counted),
        ]

    model = new_model()
    with open_engine(model, on_update=on_update, slots=3) as engine:
        mine = script(engine)
    assert mine == script(local(model, on_update=on_update, slots=3))


def test_kept_prompts_of_old_weights_are_not_read_by_new_rollouts() -> None:
    """The prompt is in vLLM's cache and a rollout that runs holds it there: a new one must not find it."""
    model = new_model()
    with open_engine(model, on_update="keep", slots=8) as engine:
        assert len(PROMPTS["p4"]) > BLOCK
        engine.submit([asked(0, n=2, prompt="p4", max_tokens=60)])
        for _ in range(5):
            engine.step()
        change(model)
        engine.update(1)
        engine.submit([asked(1, n=4, prompt="p4")])
        rollouts = [r for r in drained(engine) if r.group_id == 1]
    assert len(rollouts) == 4 and {r.first_version for r in rollouts} == {1}
    assert off(rollouts, {1: model}) < CLOSE


def test_greedy_rollouts_are_those_of_the_native_engine() -> None:
    model = new_model()
    requests = [
        asked(i, n=1, temperature=0.0, max_tokens=30 + i, stop_ids=(7, 11)) for i in range(4)
    ]
    with open_engine(model, mode="barrier") as engine:
        mine = engine.generate(requests)
    theirs = local(model, mode="barrier").generate(requests)
    for one, other in zip(mine, theirs, strict=True):
        assert one.trace is not None and other.trace is not None
        assert (one.key, one.finish, one.length) == (other.key, other.finish, other.length)
        assert one.trace.ids.tolist() == other.trace.ids.tolist()
        np.testing.assert_allclose(one.trace.log_probs, other.trace.log_probs, atol=CLOSE)


def test_ends_of_rollouts() -> None:
    """A stop token is part of the trace, a stop string ends with the token that completes it, a limit is a limit, and
    the context is one, too."""
    model = new_model()
    stops = tuple(range(2, len(TOKENIZER), 3))
    full = CONTEXT - len(PROMPTS["p2"])
    with open_engine(model, mode="barrier") as engine:
        engine.submit(
            [
                asked(0, n=6, max_tokens=60, stop_ids=stops),
                asked(1, n=6, max_tokens=60, stop_strings=("a", "e", "7", "(", "Q")),
                asked(2, n=1, max_tokens=1000),
                asked(3, n=3, max_tokens=1, temperature=1.0),
            ]
        )
        assert not engine.idle and engine.free is None
        rollouts = engine.collect()
        assert engine.idle and len(rollouts) == 16
        stats = engine.stats()
    by = {g: [r for r in rollouts if r.group_id == g] for g in range(4)}
    for r in by[0]:
        assert r.trace is not None and r.finish == "stop"
        assert [token in stops for token in r.trace.ids.tolist()] == [False] * (r.length - 1) + [
            True
        ]
    for r in by[1]:
        assert r.trace is not None
        text = TOKENIZER.decode(r.trace.ids)
        assert r.finish == "stop" and any(s in text for s in "ae7(Q")
        assert not any(s in TOKENIZER.decode(r.trace.ids[:-1]) for s in "ae7(Q")
    assert [(r.finish, r.length) for r in by[2]] == [("length", full)]
    assert [(r.finish, r.length) for r in by[3]] == [("length", 1)] * 3
    assert off(rollouts, {0: model}) < CLOSE
    written = [r.trace.ids.tolist() for r in by[0] if r.trace is not None]
    assert len({tuple(ids) for ids in written}) > 1, "each rollout has its own seed"
    assert (
        stats["rollout/tokens"] == sum(r.length for r in rollouts)
        and stats["rollout/finished"] == 16
    )
    assert stats["rollout/prefill_tokens"] >= sum(len(p) for p in PROMPTS.values())
    assert stats.keys() < local(model).stats().keys(), "the names of the native engine"


def test_a_stream_returns_what_has_finished_and_generate_runs_beside_it() -> None:
    model = new_model()
    with open_engine(model, slots=3) as engine:
        assert engine.free == 3
        engine.submit(
            [asked(0, n=1, max_tokens=3), asked(1, n=2, max_tokens=40), asked(2, n=1, max_tokens=5)]
        )
        assert engine.free == 0
        shown: list[int] = []
        (first,) = engine.collect(lambda found: shown.extend(r.group_id for r in found))
        assert first.group_id == 0 and shown == [0] and not engine.idle
        seen: list[int] = []
        found = engine.generate(
            [asked(90, n=2, max_tokens=4), asked(91, n=1, max_tokens=2)], seen.append
        )
        assert [r.key for r in found] == [(90, 0), (90, 1), (91, 0)] and seen[-1] == 3
        assert sorted(r.key for r in drained(engine)) == [(1, 0), (1, 1), (2, 0)]
        assert engine.collect() == []
        stats = engine.stats()
    assert 0 < stats["rollout/occupied"] <= 1 and stats["rollout/finished"] == 7


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_tensor_is_compared_after_an_update(tied: bool) -> None:
    model = new_model(tied=tied)
    with open_engine(model) as engine:
        engine.update(1)
        sent = {
            name: tensor.clone() for name, tensor in named_weights(model, engine.modules).items()
        }
        assert engine.core.apply_model(lambda theirs: first_difference(theirs, sent)) == [None]
        for name, tensor in sent.items():
            other = {**sent, name: tensor.clone()}
            other[name].view(-1)[-1] += 0.01  # one number of the last row
            (found,) = engine.core.apply_model(
                lambda theirs, other=other: first_difference(theirs, other)
            )
            assert found is not None and found.rpartition(".")[0].rpartition(".")[0] in name, name
        missing = {**sent, "model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
        (found,) = engine.core.apply_model(lambda theirs: first_difference(theirs, missing))
        assert found == "model.layers.9.mlp.up_proj.weight"


def test_an_update_that_does_not_arrive_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    with open_engine(model) as engine:
        engine.update(1)
        monkeypatch.setattr(engine.core, "collective_rpc", lambda *args, **how: [])
        engine.core.apply_model = lambda do: [
            do(engine.core.model_executor.driver_worker.model_runner.get_model())
        ]
        change(model)
        with pytest.raises(
            WhetError, match=r"vLLM does not hold the weights it was sent: model\.\S+ differs"
        ):
            engine.update(2)


@pytest.mark.parametrize("into", ["vllm", "native"])
def test_flights_go_on_after_a_checkpoint(into: str) -> None:
    """What ran is in the state with its tokens, and either engine goes on from there."""
    model = new_model()
    with open_engine(model, slots=3) as engine:
        engine.submit(
            [
                asked(0, n=3, max_tokens=30),
                asked(1, n=2, max_tokens=30),
                asked(2, n=1, max_tokens=4),
            ]
        )
        for _ in range(10):
            engine.step()
        state, running = (
            engine.state_dict(),
            {w.flight.arrival: list(w.ids) for w in engine.running.values()},
        )
        assert len(state["flights"]) == 6 and sorted(map(len, running.values())) == [10, 10, 10]
    if into == "native":
        other = local(model, slots=3)
        other.load_state_dict(state)
        rollouts = drained(other)
    else:
        with open_engine(model, slots=3) as again:
            again.load_state_dict(state)
            rollouts = drained(again)
            assert again.version == 0 and again.arrivals == 6
    assert sorted(r.key for r in rollouts) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    assert {r.length for r in rollouts if r.group_id < 2} == {30}
    begun = {f["arrival"]: (f["group_id"], f["index"]) for f in state["flights"]}
    whole = {r.key: r.trace.ids.tolist() for r in rollouts if r.trace is not None}
    assert all(whole[begun[arrival]][:10] == ids for arrival, ids in running.items())
    assert off(rollouts, {0: model}) < CLOSE


def test_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    with pytest.raises(
        WhetError, match=f"rollout.context = 999 is more than the {CONTEXT} positions"
    ):
        make_engine(model, context=999)
    narrow = tiny_model(len(TOKENIZER), hidden=16, layers=1, heads=2, context=CONTEXT)
    with pytest.raises(
        WhetError, match="vLLM on a CPU has no attention for heads of 8 numbers; it has 32, 64, "
    ):
        make_engine(narrow)
    with open_engine(model, context=64) as engine:
        monkeypatch.setitem(PROMPTS, "long", [5] * 64)
        with pytest.raises(
            WhetError, match=r'Prompt "long" has 64 tokens; rollout.context = 64 takes 1 to 63'
        ):
            engine.submit([asked(0), asked(1, prompt="long")])
        with pytest.raises(
            WhetError, match='Prompt "p0" was asked with max_tokens = 0; it takes 1 or more'
        ):
            engine.submit([asked(0, max_tokens=0)])
        assert engine.idle, "nothing of a refused request is left"
