from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import SAMPLING, at

from whet.curriculum.gate import Uniform
from whet.curriculum.source import MixedSource, UniformSource, build_source
from whet.errors import WhetError
from whet.testing.contract import check_contract

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
def test_a_saved_source_goes_on_as_if_never_interrupted(
    picks: list[int], save_at: int, back: int
) -> None:
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


PARTS = [(2, 1.0), (0, 9.0), (4, 3.0), (1, 0.5)]


def mixed(seed: int = 5) -> MixedSource:
    return MixedSource(IDS, seed, PARTS)


def part_of(prompt_id: str) -> int:
    return 0 if prompt_id in IDS[:2] else 1 if prompt_id in IDS[2:6] else 2


def test_a_mixture_picks_by_weight_times_size() -> None:
    """Shares 2 : 12 : 0.5 of 14.5."""
    picked = Counter(part_of(i) for i in mixed().pick(1450, at()))
    assert picked == {0: 200, 1: 1200, 2: 50}
    assert {Counter(mixed().pick(1450, at()))[i] for i in IDS[2:6]} == {300}


def test_no_part_of_a_mixture_runs_ahead() -> None:
    source, counts = mixed(), Counter()
    for drawn in range(1, 300):
        counts[part_of(*source.pick(1, at()))] += 1
        assert all(counts[part] < share * drawn + 1 for part, share in enumerate(source.shares))


def test_each_part_of_a_mixture_has_epochs_of_its_own() -> None:
    picked = mixed().pick(400, at())
    own = [i for i in picked if part_of(i) == 1]
    assert all(sorted(own[k : k + 4]) == IDS[2:6] for k in range(0, len(own) - 3, 4))
    assert mixed().pick(30, at()) == mixed().pick(30, at()) != mixed(seed=6).pick(30, at())


def test_a_mixture_gives_back_to_the_head() -> None:
    source, other = mixed(), mixed()
    first = source.pick(6, at())
    source.give_back([first[4], first[1]])
    assert source.pick(4, at()) == [first[4], first[1], *other.pick(8, at())[6:]]
    assert source.metrics()["curriculum/epoch"] == 8 / 7


def test_parts_of_one_size_are_not_shuffled_alike() -> None:
    ids = [f"{i}" for i in range(40)]
    picked = MixedSource(ids, 0, [(20, 1.0), (20, 1.5)]).pick(50, at())
    first, second = (
        [int(i) % 20 for i in picked if (int(i) < 20) == low][:20] for low in (True, False)
    )
    assert first != second


@given(st.lists(st.integers(0, 10), max_size=12), st.integers(0, 12), st.integers(1, 9))
def test_a_saved_mixture_goes_on_as_if_never_interrupted(
    picks: list[int], save_at: int, back: int
) -> None:
    def run(saving: bool) -> list[list[str]]:
        source, picked = mixed(), []
        for number, k in enumerate(picks):
            picked.append(source.pick(k, at()))
            source.give_back(picked[-1][::back])
            if saving and number == save_at:
                state = json.loads(json.dumps(source.state_dict()))
                source = mixed()
                source.load_state_dict(state)
        return picked

    assert run(True) == run(False)


def test_a_mixture_of_other_weights_is_refused() -> None:
    with pytest.raises(WhetError, match="other sizes or weights"):
        MixedSource(IDS, 5, [(2, 1.0), (4, 2.0), (1, 0.5)]).load_state_dict(mixed().state_dict())
    with pytest.raises(WhetError, match="other sizes or weights"):
        mixed().load_state_dict(UniformSource(IDS, 5).state_dict())
    with pytest.raises(WhetError, match="other prompts"):
        MixedSource(IDS[::-1], 5, PARTS).load_state_dict(mixed().state_dict())


def test_equal_weights_are_plain_epochs() -> None:
    for entries in ((), [(7, 1.0)], [(3, 2.0), (4, 2.0)], [(7, 1.0), (0, 3.0)]):
        source = build_source(IDS, 1, entries)
        assert isinstance(source, UniformSource) and source.pick(20, at()) == UniformSource(
            IDS, 1
        ).pick(20, at())
    assert isinstance(build_source(IDS, 1, PARTS), MixedSource)


def test_a_mixture_keeps_the_contract() -> None:
    def make(ids: Sequence[str], seed: int) -> Uniform:
        cut = (len(ids) + 1) // 2
        source = MixedSource(ids, seed, [(cut, 1.0), (len(ids) - cut, 2.5)])
        return Uniform(
            source,
            sampling=SAMPLING,
            rollouts=3,
            max_age=1,
            look_ahead=1.0,
            starvation="raise",
            patience=20,
        )

    check_contract(make, epochs=False, rollouts=3, max_age=1)
