from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import at

from whet.curriculum.source import UniformSource
from whet.errors import WhetError

IDS = [f"p{i}" for i in range(7)]


def test_every_epoch_is_the_whole_set_in_its_own_order() -> None:
    source = UniformSource(IDS, seed=3)
    epochs = [source.pick(7, at()) for _ in range(3)]
    assert all(sorted(epoch) == IDS for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seeds_give_different_orders_and_the_same_seed_the_same() -> None:
    orders = [tuple(UniformSource(IDS, seed).pick(7, at())) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_pick_may_cross_several_epochs() -> None:
    one, many = UniformSource(IDS, seed=1), UniformSource(IDS, seed=1)
    assert many.pick(18, at()) == [prompt for _ in range(18) for prompt in one.pick(1, at())]
    assert many.metrics() == {"curriculum/epoch": 2 + 4 / 7, "curriculum/prompts": 7.0}


def test_what_is_given_back_comes_first_and_in_the_order_given() -> None:
    source = UniformSource(IDS, seed=1)
    a, b, c, *_ = source.pick(3, at())
    expected = UniformSource(IDS, seed=1).pick(5, at())[3:]
    source.give_back([b, a])
    source.give_back([c])
    assert source.pick(1, at()) == [c]
    assert source.pick(4, at()) == [b, a, *expected]


@given(st.lists(st.integers(0, 10), max_size=12), st.integers(0, 12), st.integers(1, 9))
def test_a_saved_source_goes_on_as_if_never_interrupted(picks: list[int], save_at: int, back: int) -> None:
    def run(saving: bool) -> list[list[str]]:
        source, picked = UniformSource(IDS, seed=5), []
        for number, k in enumerate(picks):
            picked.append(source.pick(k, at()))
            source.give_back(picked[-1][::back])
            if saving and number == save_at:
                state = json.loads(json.dumps(source.state_dict()))
                source = UniformSource(IDS, seed=5)
                source.load_state_dict(state)
        return picked

    assert run(True) == run(False)


def test_the_state_is_small_and_names_ids_never_rows() -> None:
    source = UniformSource([f"id-{i}" for i in range(100_000)], seed=0)
    given_back = source.pick(3, at())[1]
    source.give_back([given_back])
    text = json.dumps(source.state_dict())
    assert len(text) < 200 and given_back in text


def test_a_state_over_other_prompts_is_refused() -> None:
    state = UniformSource(IDS, seed=0).state_dict()
    for other in (IDS[:6], [*IDS[:6], "q"], IDS[::-1]):
        with pytest.raises(WhetError, match="other prompts"):
            UniformSource(other, seed=0).load_state_dict(state)


def test_no_prompts_and_repeated_ids_are_refused() -> None:
    with pytest.raises(WhetError, match="no prompts"):
        UniformSource([], seed=0)
    with pytest.raises(WhetError, match='"b" occurs 3 times'):
        UniformSource(["a", "b", "b", "c", "b"], seed=0)


class CountedIds(Sequence[str]):
    """Counts how often an id is looked up."""

    def __init__(self, count: int):
        self.count, self.looked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: Any) -> Any:
        if row >= self.count:
            raise IndexError
        self.looked += 1
        return f"p{row}"


def test_a_pick_looks_at_no_more_ids_than_it_hands_out() -> None:
    for count in (100, 20_000):
        ids = CountedIds(count)
        source = UniformSource(ids, seed=0)
        ids.looked = 0
        source.pick(10, at())
        assert ids.looked == 10
