from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scripted import SAMPLING

from whet.curriculum.gate import Uniform
from whet.curriculum.groups import GroupBook
from whet.curriculum.source import UniformSource
from whet.testing.contract import check_contract, play
from whet.testing.simulator import World
from whet.types import Group


def make(ids: Sequence[str], seed: int, **knobs: Any) -> Uniform:
    return Uniform(UniformSource(ids, seed), sampling=SAMPLING, **{"rollouts": 3, **knobs})


def test_the_contract() -> None:
    check_contract(make, rollouts=3, max_age=0)


def test_every_group_trains_whatever_its_pass_rate() -> None:
    world = World(prompts=12, pass_rates=(0.0, 1.0, 0.5), updates=6)
    metrics = play(make, world, max_age=0).curriculum.metrics()
    assert metrics["curriculum/trained"] == 24 == metrics["curriculum/accepted"]
    assert metrics["curriculum/epoch"] == 2.0
    assert metrics["curriculum/tokens_dropped"] == 0


LONG_AND_SHORT = World(
    prompts=40,
    lengths=(2, 3, 4, 60, 90),
    order="shortest",
    groups=8,
    updates=15,
    slots=48,
    pass_rates=(0.5,),
)


def trained_prompts(world: World, curriculum: Any) -> list[str]:
    log = play(curriculum, world).log
    asked = {event[1]: event[2] for event in log if event[0] == "ask"}
    return [asked[group_id] for event in log if event[0] == "batch" for group_id in dict(event[1])]


def mean_length(prompts: Sequence[str]) -> float:
    return sum(LONG_AND_SHORT.lengths[int(prompt[1:]) % 5] for prompt in prompts) / len(prompts)


def test_short_responses_are_not_preferred() -> None:
    """Who finishes late waits in line: what trains is what was asked, in that order, epoch by epoch."""
    prompts = trained_prompts(
        LONG_AND_SHORT, lambda ids, seed: make(ids, seed, max_age=4, look_ahead=2.0)
    )
    assert set(Counter(prompts).values()) == {3}
    assert mean_length(prompts) == sum(LONG_AND_SHORT.lengths) / 5


class EagerBook(GroupBook):
    """Takes groups as they complete, as a naive stream would."""

    def first_ready(self, count: int) -> list[Group]:
        return [self._visits[group_id].group for group_id in list(self._ready)[:count]]


def test_taking_groups_as_they_complete_would_prefer_short_ones(monkeypatch: Any) -> None:
    def eager(ids: Sequence[str], seed: int) -> Uniform:
        gate = make(ids, seed, max_age=4, look_ahead=2.0)
        gate.book = EagerBook()
        return gate

    monkeypatch.setattr("whet.testing.contract.Ledger._check_batch", lambda *args, **kw: None)
    monkeypatch.setattr("whet.testing.contract.Ledger.updated", lambda *args: None)
    assert (
        mean_length(trained_prompts(LONG_AND_SHORT, eager)) < 0.9 * sum(LONG_AND_SHORT.lengths) / 5
    )


def test_cuts_do_not_thin_out_the_long_ones() -> None:
    """Updates cut what still runs, always the long ones; they train as often as the others all the same."""
    world = replace(LONG_AND_SHORT, cut=0.9, slots=36)  # so that what is asked ahead begins later
    run = play(lambda ids, seed: make(ids, seed, max_age=1), world)
    assert run.curriculum.metrics()["curriculum/cut"] > 0
    prompts = trained_prompts(world, lambda ids, seed: make(ids, seed, max_age=1))
    assert set(Counter(prompts).values()) == {3}
