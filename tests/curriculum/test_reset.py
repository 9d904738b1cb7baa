from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripted import SAMPLING, answer_all, at

from whet.curriculum.gate import Uniform
from whet.curriculum.neighbours import Reset
from whet.curriculum.source import UniformSource
from whet.testing.contract import check_contract, check_world
from whet.testing.simulator import World
from whet.types import Report


def make(ids: Sequence[str], seed: int, **knobs: Any) -> Reset:
    return Reset(Uniform(UniformSource(ids, seed), sampling=SAMPLING, rollouts=2), **knobs)


def resets(curriculum: Reset, letters: Sequence[str]) -> list[int]:
    """Steps whose batch begins anew; one pair of verdicts a step."""
    steps = []
    for step, pair in enumerate(letters):
        requests = curriculum.plan(at(step=step))
        answer_all(curriculum, requests, [pair] * len(requests), version=step)  # type: ignore[arg-type]
        batch = curriculum.emit(at(step=step))
        assert batch is not None
        if batch.reset_reference:
            assert batch.reset_optimizer
            steps.append(step)
        curriculum.updated(at(step=step + 1), Report(metrics={}))
    return steps


def test_the_contract() -> None:
    check_contract(lambda ids, seed: make(ids, seed, every=3), rollouts=2, max_age=0)


def test_every_so_many_updates() -> None:
    curriculum = make("ABCD", 0, every=3)
    assert resets(curriculum, ["rw"] * 10) == [3, 6, 9]
    assert curriculum.metrics()["curriculum/resets"] == 3


def test_none_is_due_by_default() -> None:
    assert resets(make("ABCD", 0), ["rw"] * 8) == []


def test_a_due_reset_survives_a_save() -> None:
    """`play` compares plans and batches, not flags."""
    curriculum, again = make("ABCD", 0, every=2), make("ABCD", 0, every=2)
    assert resets(curriculum, ["rw"] * 2) == []
    again.load_state_dict(curriculum.state_dict())
    assert again.due
    check_world(lambda ids, seed: make(ids, seed, every=1), World(slots=20, cut=0.5), save_share=1.0)
