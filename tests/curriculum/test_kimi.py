from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, answers, at

from whet.curriculum.gate import Dapo, Uniform
from whet.curriculum.neighbours import KimiSource, weight
from whet.errors import WhetError
from whet.testing.contract import check_contract, check_world, play
from whet.testing.simulator import World
from whet.types import Request


def make(ids: Sequence[str], seed: int, *, gate: Any = Uniform, **knobs: Any) -> Any:
    return gate(KimiSource(ids, seed), sampling=SAMPLING, **{"rollouts": 4, **knobs})


def seen(source: KimiSource, prompt_id: str, letters: str) -> None:
    request = Request(prompt_id=prompt_id, group_id=0, n=len(letters), sampling=SAMPLING)
    source.observe(answers(request, letters))


@pytest.mark.slow
@pytest.mark.parametrize("gate", [Uniform, pytest.param(Dapo, marks=pytest.mark.slow)])
def test_the_contract(gate: Any) -> None:
    check_contract(lambda ids, seed: make(ids, seed, gate=gate), epochs=False, rollouts=4, max_age=0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    prompts=st.integers(1, 30),
    slots=st.none() | st.integers(1, 40),
    cut=st.sampled_from([0.0, 0.4]),
    share=st.sampled_from([0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_world(prompts: int, slots: int | None, cut: float, share: float, seed: int) -> None:
    world = World(prompts=prompts, slots=slots, cut=cut, seed=seed, updates=5)
    check_world(make, world, save_share=share, epochs=False, max_age=0)


def test_weight() -> None:
    assert weight(0, 0) == 0.5
    assert weight(8, 8) == pytest.approx(0.1)
    assert weight(0, 8) == pytest.approx(0.9)
    assert weight(4, 8) == 0.5


def test_drawn_in_proportion() -> None:
    source = KimiSource(["easy", "hard", "new"], seed=3)
    seen(source, "easy", "r" * 8)
    seen(source, "hard", "w" * 8)
    drawn = Counter(source.pick(1, at())[0] for _ in range(3000))
    # 0.1 : 0.9 : 0.5; the widest standard error is 0.009
    assert drawn["easy"] / 3000 == pytest.approx(0.1 / 1.5, abs=0.03)
    assert drawn["hard"] / 3000 == pytest.approx(0.9 / 1.5, abs=0.03)
    assert source.metrics()["curriculum/success_mean"] == pytest.approx(0.5)


def test_the_prompts_of_a_pick_differ_as_long_as_there_are_enough() -> None:
    source = KimiSource("ABCD", seed=0)
    for _ in range(20):
        assert len(set(source.pick(4, at()))) == 4
    assert sorted(Counter(source.pick(6, at())).values()) == [1, 1, 2, 2]


def test_given_back_comes_first() -> None:
    source = KimiSource("ABCD", seed=0)
    source.give_back(["C", "A"])
    assert source.pick(3, at())[:2] == ["C", "A"]


def test_state_and_other_data() -> None:
    source, again = KimiSource("ABCD", seed=0), KimiSource("ABCD", seed=0)
    source.pick(3, at())
    seen(source, "B", "rrw")
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [again.pick(2, at()) for _ in range(9)] == [source.pick(2, at()) for _ in range(9)]
    with pytest.raises(WhetError, match="other prompts"):
        KimiSource("ABCE", seed=0).load_state_dict(source.state_dict())


def test_hard_prompts_come_up_more_often() -> None:
    world = World(prompts=20, pass_rates=(0.05, 0.95), updates=40)
    run = play(make, world, epochs=False)
    asked = Counter(event[2] for event in run.log if event[0] == "ask")
    hard = sum(count for prompt_id, count in asked.items() if int(prompt_id[1:]) % 2 == 0)
    assert hard > 0.75 * sum(asked.values())
