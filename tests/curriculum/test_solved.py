from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, Listed, Once, answers, at

from whet.curriculum.gate import Dapo, Uniform
from whet.curriculum.neighbours import Unsolved
from whet.curriculum.source import UniformSource
from whet.testing.contract import check_contract, check_world, play
from whet.testing.simulator import World
from whet.types import Request


def make(ids: Sequence[str], seed: int, *, gate: Any = Uniform, **knobs: Any) -> Any:
    source = Unsolved(UniformSource(ids, seed), prompts=len(ids))
    return gate(source, sampling=SAMPLING, **{"rollouts": 4, **knobs})


def seen(source: Unsolved, prompt_id: str, letters: str) -> None:
    request = Request(prompt_id=prompt_id, group_id=0, n=len(letters), sampling=SAMPLING)
    source.observe(answers(request, letters))


@pytest.mark.wide
@pytest.mark.parametrize("gate", [Uniform, Dapo])
def test_the_contract(gate: Any) -> None:
    check_contract(lambda ids, seed: make(ids, seed, gate=gate), epochs=False, rollouts=4, max_age=0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    rates=st.sampled_from([(1.0,), (1.0, 0.5), (0.0, 1.0, 1.0)]),
    slots=st.none() | st.integers(1, 40),
    cut=st.sampled_from([0.0, 0.4]),
    share=st.sampled_from([0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_world(rates: tuple[float, ...], slots: int | None, cut: float, share: float, seed: int) -> None:
    world = World(prompts=12, pass_rates=rates, slots=slots, cut=cut, seed=seed, updates=6)
    check_world(make, world, save_share=share, epochs=False, max_age=0)


def test_nine_of_ten_is_solved() -> None:
    source = Unsolved(Listed("ABCD"), prompts=4)
    seen(source, "A", "r" * 9 + "w")
    seen(source, "B", "r" * 8 + "w")  # 0.889
    seen(source, "C", "rrrr")
    assert source.pick(3, at()) == ["B", "D", "B"]
    assert source.metrics()["curriculum/skipped_solved"] == 3  # A, C, A


def test_a_prompt_that_gets_worse_comes_back() -> None:
    source = Unsolved(Listed("AB"), prompts=2)
    seen(source, "A", "rrrr")
    assert source.pick(1, at()) == ["B"]
    seen(source, "A", "w")  # from a group that was still on its way
    assert source.pick(1, at()) == ["A"]


def test_a_prompt_without_verdict_is_asked_again_even_if_solved() -> None:
    source = Unsolved(Listed("AB"), prompts=2)
    seen(source, "A", "rrrr")
    source.give_back(["A"])
    assert source.pick(2, at()) == ["A", "B"]


def test_all_solved_is_dry_and_a_source_that_ends_ends() -> None:
    source = Unsolved(Listed("AB"), prompts=2)
    seen(source, "A", "r")
    seen(source, "B", "r")
    assert source.pick(3, at()) == []
    assert Unsolved(Once("AB"), prompts=2).pick(3, at()) == ["A", "B"]
    run = play(make, World(prompts=4, pass_rates=(1.0,), updates=4), epochs=False)
    assert run.batches == 1 and ("starved", 1) in run.log


def test_state() -> None:
    source, again = (Unsolved(UniformSource("ABCD", 1), prompts=4) for _ in range(2))
    seen(source, "B", "rrrr")
    source.pick(3, at())
    source.give_back(["B"])
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert again.pick(6, at()) == source.pick(6, at())
    assert again.metrics() == source.metrics()


def test_solved_prompts_are_asked_less() -> None:
    world = World(prompts=20, pass_rates=(1.0, 0.5), updates=20)
    asked = [event[2] for event in play(make, world, epochs=False).log if event[0] == "ask"]
    easy = [prompt_id for prompt_id in asked if int(prompt_id[1:]) % 2 == 0]
    assert len(easy) == len(set(easy)) == 10  # once each
