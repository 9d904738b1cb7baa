from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import SAMPLING, Listed, answer_all, asks, at, metric, trained

from whet.curriculum.gate import Dapo
from whet.curriculum.source import UniformSource
from whet.testing.contract import LONG_RUN, check_contract, measure_lengths, play
from whet.testing.simulator import World
from whet.types import Rollout

ABC = [chr(ord("A") + i) for i in range(26)]


def make(ids: Sequence[str], seed: int, **knobs: Any) -> Dapo:
    return Dapo(UniformSource(ids, seed), sampling=SAMPLING, **{"rollouts": 4, **knobs})


def test_the_contract() -> None:
    check_contract(make, rollouts=4, max_age=0)


def test_kept_iff_the_judged_rollouts_disagree() -> None:
    gate = Dapo(Listed(ABC), sampling=SAMPLING, rollouts=8)
    answer_all(gate, gate.plan(at()), ["r" * 8, "r" * 7 + "w", "w" * 8, "uuuuuurr"])
    assert gate.holds() == {1}
    assert (
        metric(gate, "accepted"),
        metric(gate, "rejected_easy"),
        metric(gate, "rejected_hard"),
    ) == (1, 2, 1)


def test_asks_by_the_acceptance_seen_and_keeps_the_surplus() -> None:
    gate = Dapo(Listed(ABC), sampling=SAMPLING, rollouts=2, max_age=1)
    first = gate.plan(at())
    assert asks(first) == [("A", 2), ("B", 2), ("C", 2), ("D", 2)]  # 2 / 0.5
    assert gate.plan(at()) == []  # enough is on its way
    answer_all(gate, first, ["rw", "rr", "rw", "wr"])
    assert trained(gate.emit(at())) == ["A", "C"]
    assert metric(gate, "ready") == 1  # D waits
    # 3 of 4, faded to 2.7 of 3.6, with the prior 3.7 of 5.6: ceil(1 / 0.661) = 2
    assert gate.emit(at(step=1)) is None
    second = gate.plan(at(step=1))
    assert asks(second) == [("E", 2), ("F", 2)]
    answer_all(gate, second, ["ww", "rw"], version=1)
    assert trained(gate.emit(at(step=1))) == ["D", "F"]
    assert (metric(gate, "age_mean"), metric(gate, "age_max")) == (0.5, 1)


def test_strictly_on_policy_the_surplus_is_asked_again() -> None:
    gate = Dapo(Listed(ABC), sampling=SAMPLING, rollouts=2, max_age=0)
    answer_all(gate, gate.plan(at()), ["rw", "rr", "rw", "wr"])
    assert trained(gate.emit(at())) == ["A", "C"]
    assert gate.emit(at(step=1)) is None
    # ceil(2 / 0.661) = 4, D first
    assert asks(gate.plan(at(step=1))) == [("D", 2), ("E", 2), ("F", 2), ("G", 2)]
    assert (metric(gate, "expired"), metric(gate, "reasked")) == (1, 1)


def test_a_bad_start_sets_off_no_flood() -> None:
    gate = Dapo(Listed(ABC), sampling=SAMPLING, rollouts=2, patience=50)
    sizes = []
    for _ in range(4):
        requests = gate.plan(at(groups=1))
        sizes.append(len(requests))
        answer_all(gate, requests, ["ww"] * len(requests))
    # acceptance 1/2, 1/4, 1/8, then the floor of 1/8
    assert sizes == [2, 4, 8, 8]


@pytest.mark.parametrize("slots", [None, 24])
def test_only_groups_with_signal_train(slots: int | None) -> None:
    world = World(prompts=60, pass_rates=(0.0, 0.0, 0.0, 0.5, 1.0), updates=10, slots=slots)
    metrics = play(
        lambda ids, seed: make(ids, seed, max_age=2), world, max_age=2
    ).curriculum.metrics()
    assert metrics["curriculum/trained"] == 40
    assert metrics["curriculum/rejected_hard"] > metrics["curriculum/rejected_easy"] > 0
    assert 0.1 < metrics["curriculum/acceptance"] == metrics["curriculum/signal_share"] < 0.3


def test_a_source_hears_of_long_responses_as_often_as_they_are_written() -> None:
    """Where an update cuts what runs: what is asked in reserve is finished if it is short, and cut if it is long."""
    seen: list[float] = []

    class Listening(UniformSource):
        def observe(self, rollouts: Sequence[Rollout]) -> None:
            seen.extend(r.length / r.sampling.max_tokens for r in rollouts)

    def build(ids: Sequence[str], seed: int) -> Dapo:
        return Dapo(Listening(ids, seed), sampling=SAMPLING, rollouts=6, max_age=1)

    _, policy = measure_lengths(build, replace(LONG_RUN, pass_rates=(0.2, 0.8), slots=64, cut=1.0))
    assert sum(seen) / len(seen) == pytest.approx(policy, rel=0.02)  # it was 12% less
