from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, Listed, Once, asks, at, rollout, trained

from whet.curriculum.gate import Dapo, Uniform
from whet.curriculum.neighbours import TokenBudget, groups_within
from whet.curriculum.source import UniformSource
from whet.errors import Starved
from whet.testing.contract import check_contract, check_world, play
from whet.testing.simulator import World
from whet.types import Report, Request


def make(ids: Sequence[str], seed: int, *, gate: Any = Uniform, tokens: int = 200, **knobs: Any) -> TokenBudget:
    source = UniformSource(ids, seed)
    return TokenBudget(gate(source, sampling=SAMPLING, **{"rollouts": 3, "patience": 60, **knobs}), tokens=tokens)


def answer(curriculum: TokenBudget, requests: Sequence[Request], *lengths: int, version: int = 0) -> None:
    for request, length in zip(requests, lengths, strict=True):
        curriculum.observe([rollout(request, i, "rw"[i], version=version, length=length) for i in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("gate", [Uniform, pytest.param(Dapo, marks=pytest.mark.slow)])
def test_the_contract(gate: Any) -> None:
    check_contract(lambda ids, seed: make(ids, seed, gate=gate, max_age=1), max_age=1, patience=200)


def test_groups_within() -> None:
    assert groups_within([5, 5, 5], 10) == 2  # reached, not passed
    assert groups_within([5, 5, 5], 11) == 3
    assert groups_within([50], 11) == 1
    assert groups_within([5, 5], 11) is None
    assert groups_within([], 1) is None


def test_groups_in_ask_order_until_the_budget_and_the_surplus_stays() -> None:
    curriculum = TokenBudget(Uniform(Listed("ABCDEFGH"), sampling=SAMPLING, rollouts=2, max_age=1), tokens=100)
    first = curriculum.plan(at(groups=3))
    assert asks(first) == [("A", 2), ("B", 2), ("C", 2)]  # nothing is known yet: as the recipe says
    answer(curriculum, first, 10, 20, 10)  # 20 + 40 + 20 tokens, 27 a group
    assert curriculum.emit(at(groups=3)) is None
    more = curriculum.plan(at(groups=3))
    assert asks(more) == [("D", 2)]  # ceil(20 / 27)
    answer(curriculum, more, 5)
    assert curriculum.emit(at(groups=3)) is None  # 90
    more = curriculum.plan(at(groups=3))
    assert asks(more) == [("E", 2)]
    answer(curriculum, more, 60)
    assert trained(curriculum.emit(at(groups=3))) == ["A", "B", "C", "D", "E"]  # 210: the last one reached it
    curriculum.updated(at(step=1, groups=3), Report(metrics={}))
    assert curriculum.metrics()["curriculum/batch_tokens"] == 210
    more = curriculum.plan(at(step=1, groups=3))
    assert asks(more) == [("F", 2), ("G", 2), ("H", 2)]  # ceil(100 / 42)
    answer(curriculum, more, 60, 20, 40, version=1)
    assert trained(curriculum.emit(at(step=1, groups=3))) == ["F"]
    assert curriculum.metrics()["curriculum/ready"] == 2
    assert trained(curriculum.emit(at(step=2, groups=3))) == ["G", "H"]  # 40 + 80
    assert curriculum.metrics()["curriculum/age_max"] == 1


def test_a_group_weighs_the_same_whatever_the_length_of_its_batch() -> None:
    """Five groups, then one that is as long: 1/5 each, where 1 / groups would give the long one five times as much."""

    def budget() -> TokenBudget:
        return TokenBudget(Uniform(Listed("ABCDEFGHIJ"), sampling=SAMPLING, rollouts=2, max_age=2), tokens=100)

    curriculum, weights = budget(), []
    for step, (length, groups) in enumerate([(10, 5), (50, 1), (50, 1)]):
        requests = curriculum.plan(at(step=step, groups=5))
        answer(curriculum, requests, *[length] * len(requests), version=step)
        batch = curriculum.emit(at(step=step, groups=5))
        assert batch is not None and len(batch.groups) == groups
        weights.append(batch.groups[0].weight)
        state = json.loads(json.dumps(curriculum.state_dict()))
        curriculum = budget()
        curriculum.load_state_dict(state)
    assert weights == pytest.approx([1 / 5, 1 / 5, 1 / (5 - 2 / 21 * 4)])


def test_what_is_too_old_does_not_count() -> None:
    curriculum = TokenBudget(Uniform(Listed("ABCD"), sampling=SAMPLING, rollouts=2, max_age=0), tokens=100)
    answer(curriculum, curriculum.plan(at(groups=2)), 60, 60)
    assert trained(curriculum.emit(at(groups=2))) == ["A"]
    assert curriculum.emit(at(step=1, groups=2)) is None
    assert asks(curriculum.plan(at(step=1, groups=2))) == [("B", 2)]  # asked again


def test_a_budget_that_cannot_be_met_starves() -> None:
    curriculum = TokenBudget(Uniform(Once("AB"), sampling=SAMPLING, rollouts=2), tokens=100)
    answer(curriculum, curriculum.plan(at()), 10, 10)
    assert curriculum.emit(at()) is None
    assert curriculum.plan(at()) == []
    with pytest.raises(Starved, match="the source has no more prompts"):
        curriculum.emit(at())


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([1, 60, 300]),
    slots=st.none() | st.integers(1, 40),
    cut=st.sampled_from([0.0, 0.5]),
    max_age=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_every_batch_reaches_the_budget_by_its_last_group(
    tokens: int, slots: int | None, cut: float, max_age: int, seed: int
) -> None:
    world = World(slots=slots, cut=cut, seed=seed, updates=6, unjudged=0.1)
    batches = []

    class Watched(TokenBudget):
        def emit(self, clock: Any) -> Any:
            if (batch := super().emit(clock)) is not None:
                batches.append([group.tokens for group in batch.groups])
            return batch

    def build(ids: Sequence[str], s: int) -> TokenBudget:
        gate = Uniform(UniformSource(ids, s), sampling=SAMPLING, rollouts=3, max_age=max_age, patience=60)
        return Watched(gate, tokens=tokens)

    check_world(build, world, max_age=max_age, patience=400)
    batches.clear()
    assert play(build, world, patience=400).batches == len(batches) == 6
    assert all(sum(batch) >= tokens > sum(batch[:-1]) for batch in batches)
