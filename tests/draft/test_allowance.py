"""Seconds of a drafter's lessons by hand, and over a run; the lessons of a real drafter by them."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.draft.training import AdaptiveDrafter, Allowance
from whet.model.load import tiny_model


def test_by_hand() -> None:
    """3 s a step, 4 s an update: three lessons in four steps, none that is not paid for."""
    allowance = Allowance()
    assert not allowance.allows(), "nothing is granted"
    allowance.grant(3.0)
    assert allowance.allows() and not allowance.allows(spent=3.0)
    allowance.spend(100.0, updates=1)  # makes kernels ready
    allowance.grant(3.0)
    allowance.spend(4.0, updates=1)
    assert (allowance.left, allowance.each) == (-1.0, 4.0), (
        "what was granted before the first has lapsed"
    )
    left = []
    for _ in range(6):
        allowance.grant(3.0)
        if lesson := allowance.allows():
            allowance.spend(4.0, updates=1)
        left.append((allowance.left, lesson))
    assert left == [(2.0, False), (1.0, True), (4.0, False), (3.0, True), (2.0, True), (1.0, True)]


def test_several_updates_fit_into_a_long_step() -> None:
    allowance = Allowance()
    allowance.spend(1.0, updates=1)
    allowance.grant(10.0)
    allowance.spend(6.0, updates=2)
    assert (allowance.left, allowance.each) == (4.0, 3.0)
    allowance.grant(5.0)
    assert allowance.left == 8.0, "no more than an update is kept"
    assert allowance.allows(spent=4.9) and not allowance.allows(spent=5.0)
    allowance.spend(0.5, updates=0)
    assert (allowance.left, allowance.each) == (7.5, 3.0), (
        "a lesson without an update says nothing of the next"
    )


def test_without_a_limit() -> None:
    allowance = Allowance()
    for _ in range(3):
        allowance.grant(math.inf)
        assert allowance.allows(spent=1e9)
        allowance.spend(5.0, updates=2)


@given(st.lists(st.tuples(st.floats(0.1, 30), st.floats(0.01, 2)), min_size=1, max_size=60))
def test_a_run_spends_no_more_than_it_is_granted_and_one_update(
    steps: list[tuple[float, float]],
) -> None:
    """(seconds of a step, of its updates), from the second lesson on."""
    allowance, granted, spent, longest = Allowance(), 0.0, 0.0, 0.0
    allowance.spend(9.0, updates=1)
    for seconds, update in steps:
        allowance.grant(0.03 * seconds)
        granted += 0.03 * seconds
        lesson = updates = 0.0
        while allowance.allows(lesson):
            lesson, updates, longest = lesson + update, updates + 1, max(longest, update)
        allowance.spend(lesson, int(updates))
        spent += lesson
        assert spent <= granted + longest + 1e-9


def test_saved_it_goes_on_as_if_it_had_not_been() -> None:
    """But for the first lesson, which makes kernels ready once more; without a limit there is nothing to keep."""
    allowance, again = Allowance(), Allowance()
    allowance.spend(1.0, updates=1)
    allowance.grant(10.0)
    allowance.spend(6.0, updates=2)
    again.load_state_dict(allowance.state_dict())
    for one in (allowance, again):
        one.grant(5.0)
    assert again.left == allowance.left == 8.0 and again.each == 3.0
    again.spend(50.0, updates=1)
    assert again.left == 8.0
    allowance.grant(math.inf)
    assert json.loads(json.dumps(allowance.state_dict(), allow_nan=False)) == {
        "left": 3.0,
        "each": 3.0,
    }


def test_the_share_of_a_run_of_short_steps() -> None:
    """1 s a step, 45 ms an update: two lessons in three steps, not one in each."""
    allowance, lessons = Allowance(), 0
    allowance.spend(1.0, updates=1)
    for _ in range(3000):
        allowance.grant(0.03)
        if allowance.allows():
            allowance.spend(0.045, updates=1)
            lessons += 1
    assert lessons == pytest.approx(2000, abs=2)


def test_a_drafter_in_debt_learns_nothing_until_it_is_paid() -> None:
    model = tiny_model(20, hidden=16, layers=1, heads=2)
    drafter = AdaptiveDrafter(model, share=1.0)
    generator = torch.Generator().manual_seed(0)
    drafter.buffer.add(
        0, torch.randint(0, 20, (40,)), torch.randn(40, 16, generator=generator), prompt=4
    )
    assert drafter.train(40, seconds=0.0) == {}, "nothing is granted"
    for _ in range(2):  # the first is not counted
        assert drafter.train(40, seconds=3600.0)["draft/tokens_trained"] > 0
    assert 0 < drafter.allowance.each < 3600
    drafter.allowance.left = -1.0
    before = {name: weight.clone() for name, weight in drafter.tensors().items()}
    assert drafter.train(40, seconds=0.5) == {} and drafter.allowance.left < -0.5 + 1e-9
    assert all(torch.equal(weight, before[name]) for name, weight in drafter.tensors().items())
    again = AdaptiveDrafter(model, share=1.0)
    again.load(before, json.loads(json.dumps(drafter.state_dict())))
    assert again.allowance.left == drafter.allowance.left < 0, (
        "what is owed is owed by the run that goes on"
    )
    assert (
        again.allowance.each == drafter.allowance.each
        and again.state_dict() == drafter.state_dict()
    )
    old = {name: value for name, value in drafter.state_dict().items() if name != "allowance"}
    again = AdaptiveDrafter(model, share=1.0)
    again.load(before, old)  # a checkpoint from before
    assert again.allowance.left == 0
    assert drafter.train(40, seconds=3600.0)["draft/tokens_trained"] > 0
