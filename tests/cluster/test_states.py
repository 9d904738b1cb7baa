"""Rollouts under way go on with the same tokens, however many engines write a checkpoint and read it again."""

import json
from typing import Any

import numpy as np
import pytest
from slow_engine import ask, make_engine, sharp_model

from whet.cluster.fleet import divide_state, merge_states
from whet.rollout.engine import LocalEngine
from whet.types import Rollout

MODEL = sharp_model()
ASKED = [
    ask(i, n=1 + i % 3, max_tokens=6 + 3 * i, temperature=0.9, stop_ids=(3,)) for i in range(8)
]


def engine(**settings: Any) -> LocalEngine:
    return make_engine(
        MODEL, **{"slots": 5, "mode": "stream", "on_update": "recompute", **settings}
    )


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint keeps it: JSON for the values, arrays apart."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    return {
        **json.loads(
            json.dumps({name: value for name, value in state.items() if name not in arrays})
        ),
        **arrays,
    }


def drain(*engines: LocalEngine) -> dict[tuple[int, int], Rollout]:
    found: dict[tuple[int, int], Rollout] = {}
    for one in engines:
        while not one.idle:
            for rollout in one.collect():
                assert rollout.key not in found, "no rollout comes twice"
                found[rollout.key] = rollout
    return found


def begun(steps: int = 9) -> LocalEngine:
    """An engine with finished, running and waiting rollouts; some tokens are of an older version."""
    one = engine()
    one.submit(ASKED)
    for _ in range(steps):
        one.step()
    one.update(1)
    one.step()
    return one


def resumed(states: list[dict[str, Any]]) -> list[LocalEngine]:
    engines = [engine() for _ in states]
    for one, state in zip(engines, states, strict=True):
        one.load_state_dict(stored(state))
    return engines


def same(mine: dict[Any, Rollout], theirs: dict[Any, Rollout]) -> None:
    assert mine.keys() == theirs.keys() and len(mine) > 8
    for key, rollout in mine.items():
        other = theirs[key]
        assert (rollout.finish, rollout.first_version) == (other.finish, other.first_version)
        assert rollout.trace is not None and other.trace is not None
        assert rollout.trace.ids.tolist() == other.trace.ids.tolist()
        np.testing.assert_allclose(rollout.trace.log_probs, other.trace.log_probs, atol=1e-9)
        assert rollout.trace.versions.tolist() == other.trace.versions.tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_divided_among_engines_they_write_the_same(count: int) -> None:
    one = begun()
    engines = resumed(divide_state(stored(one.state_dict()), count))
    assert sum(other.free for other in engines) >= one.free
    same(drain(one), drain(*engines))


def test_from_two_engines_to_one_to_three() -> None:
    whole = begun()
    expected = drain(whole)
    two = resumed(divide_state(begun().state_dict(), 2))
    for one in two:
        for _ in range(2):
            one.step()
    (single,) = resumed([merge_states([one.state_dict() for one in two])])
    single.step()
    same(expected, drain(*resumed(divide_state(single.state_dict(), 3))))


def test_groups_stay_whole_and_loads_are_even() -> None:
    state = begun(steps=2).state_dict()
    parts = divide_state(state, 3)
    groups = [{flight["group_id"] for flight in part["flights"]} for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups)), "no group is in two engines"
    sizes = [len(part["flights"]) for part in parts]
    assert sum(sizes) == len(state["flights"]) and max(sizes) - min(sizes) <= 3
    assert [len(part["done"]) for part in parts[1:]] == [0, 0]


def test_merging_what_was_divided_brings_it_back() -> None:
    state = begun().state_dict()
    back = merge_states(divide_state(state, 3))
    keys = [
        [(row["group_id"], row["index"], row["tokens"]) for row in s["flights"]]
        for s in (state, back)
    ]
    assert (
        keys[0] == keys[1]
        and state["done"] == back["done"]
        and state["begun"].tolist() == back["begun"].tolist()
    )
    for name in ("ids", "log_probs", "versions"):
        np.testing.assert_array_equal(state[name], back[name])
    np.testing.assert_allclose(state["length_sums"], back["length_sums"])
    assert dict(zip(state["length_prompts"], state["length_means"].tolist(), strict=True)) == dict(
        zip(back["length_prompts"], back["length_means"].tolist(), strict=True)
    )


def test_engines_of_different_versions_are_not_joined() -> None:
    first, second = engine(), engine()
    second.update(1)
    with pytest.raises(AssertionError, match="different versions"):
        merge_states([first.state_dict(), second.state_dict()])


def test_another_engine_goes_on_with_what_one_gives_up() -> None:
    """It has rollouts of its own under way, and keeps them."""
    giver, taker = begun(), engine()
    taker.submit([ask(20 + i, max_tokens=8, temperature=0.9, stop_ids=(3,)) for i in range(4)])
    for _ in range(5):
        taker.step()
    taker.update(1)
    state = stored(giver.state_dict())
    assert sum(row["tokens"] for row in state["flights"]) > 0
    giver.drop()
    taker.take_on(state)
    found = drain(taker)
    assert giver.idle and {key for key in found if key[0] >= 120} == {
        (120 + i, 0) for i in range(4)
    }
    same({key: rollout for key, rollout in found.items() if key[0] < 120}, drain(begun()))


def test_flights_without_tokens_begin_anew() -> None:
    """A checkpoint does not wait for a member that is slow."""
    state = begun().state_dict()
    bare = [{**row, "tokens": 0} for row in state["flights"]]
    nothing = {
        **state,
        "flights": [],
        "done": [],
        **{name: state[name][:0] for name in ("ids", "log_probs", "versions")},
    }
    merged = merge_states([nothing], (), bare)
    assert len(merged["flights"]) == len(bare) and merged["ids"].size == 0
    (one,) = resumed([merged])
    assert drain(one).keys() == {(row["group_id"], row["index"]) for row in bare}
