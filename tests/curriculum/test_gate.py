"""What all gates share, in scripted runs small enough to follow by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import (
    SAMPLING,
    Listed,
    Once,
    Screening,
    answer_all,
    answers,
    asks,
    at,
    cut,
    metric,
    trained,
)

from whet.curriculum.gate import Admission, Dapo, Gate, Uniform
from whet.errors import Starved
from whet.types import Group, Report


def uniform(ids: str = "ABCDEFGH", n: int = 2, **knobs: Any) -> Uniform:
    return Uniform(Listed(list(ids)), sampling=SAMPLING, rollouts=n, **knobs)


def dapo(ids: str = "ABCDEFGH", n: int = 2, **knobs: Any) -> Dapo:
    return Dapo(Listed(list(ids)), sampling=SAMPLING, rollouts=n, **knobs)


# Asking


def test_barrier_asks_for_what_the_batch_lacks() -> None:
    gate = uniform()
    requests = gate.plan(at(groups=3))
    assert asks(requests) == [("A", 2), ("B", 2), ("C", 2)]
    assert [(r.group_id, r.first_index, r.phase, r.sampling) for r in requests[:1]] == [
        (0, 0, "train", SAMPLING)
    ]
    assert gate.plan(at(groups=3)) == []  # all of it is on its way
    answer_all(gate, requests[::-1], ["rw", "uu", "rw"])
    assert gate.emit(at(groups=3)) is None  # B got no verdict
    assert asks(gate.plan(at(groups=3))) == [("D", 2)]


def test_stream_fills_free_capacity_up_to_the_window() -> None:
    gate = uniform(max_age=1, look_ahead=1.0)
    assert asks(gate.plan(at(free=7))) == [("A", 2), ("B", 2), ("C", 2)]
    assert gate.plan(at(free=1)) == []  # no group fits
    assert asks(gate.plan(at(free=100))) == [("D", 2)]  # two for the batch, two ahead
    assert gate.plan(at(free=100)) == []


def test_the_window_holds_open_and_ready_groups() -> None:
    gate = uniform(max_age=1, look_ahead=0.5)
    requests = gate.plan(at(free=100))
    assert len(requests) == 3
    gate.observe(answers(requests[2], "rw"))  # C is ready but may not overtake A and B
    assert gate.emit(at()) is None and gate.plan(at(free=100)) == []
    answer_all(gate, requests[:2], ["rr", "ww"])
    assert trained(gate.emit(at())) == ["A", "B"]
    assert asks(gate.plan(at(step=1, free=100))) == [("D", 2), ("E", 2)]  # with C, three again


def test_nothing_is_asked_ahead_that_would_be_too_old_to_train() -> None:
    gate = uniform(max_age=0, look_ahead=4.0)
    assert len(gate.plan(at(free=100))) == 2


def test_no_more_is_asked_ahead_than_may_train() -> None:
    gate = uniform("ABCDEFGHIJ", max_age=1, look_ahead=4.0)
    # two for this update and two for the next; more would be too old
    assert len(gate.plan(at(free=100))) == 4


def test_a_group_larger_than_the_engine_is_asked_alone() -> None:
    gate = uniform(n=8, max_age=1)
    (request,) = gate.plan(at(free=3))
    assert gate.plan(at(free=0)) == []
    gate.observe(answers(request, "rwrwrwrw"))
    assert asks(gate.plan(at(free=0))) == [("B", 8)]


# Cuts, ages, missing verdicts


def test_cut_groups_are_asked_again_first_in_ask_order_with_new_ids() -> None:
    gate = uniform(max_age=1)
    a, b, c, d = gate.plan(at(free=100))
    gate.observe([*answers(a, "rw"), *answers(b, "rw")])
    assert trained(gate.emit(at())) == ["A", "B"]
    gate.observe([cut(d, 1)])  # the later one first
    # before and after its group was cut
    gate.observe([answers(c, "rw")[1], cut(c, 0), answers(d, "rw")[0]])
    assert gate.holds() == set()
    again = gate.plan(at(step=1, free=100))
    assert [(r.prompt_id, r.group_id) for r in again] == [("C", 4), ("D", 5), ("E", 6), ("F", 7)]
    assert (metric(gate, "reasked"), metric(gate, "cut"), metric(gate, "expired")) == (2, 2, 0)
    assert (metric(gate, "tokens_dropped"), metric(gate, "tokens_kept")) == (3 + 10 + 3 + 10, 40)


def test_ask_order_holds_among_cut_groups_although_some_wait_for_capacity() -> None:
    gate = uniform(max_age=1, look_ahead=0.5)
    a, b, c = gate.plan(at(free=6))
    gate.observe([cut(a, 0), cut(b, 0)])
    assert asks(gate.plan(at(free=3))) == [("A", 2)]
    gate.observe([cut(c, 0)])  # B waits, and was asked before C
    assert asks(gate.plan(at(free=4))) == [("B", 2), ("C", 2)]


def test_a_prompt_asked_again_keeps_its_place_in_line() -> None:
    """Else a long response could be cut by every update and overtaken for ever."""
    gate = uniform(max_age=1)
    a, b, c, d = gate.plan(at(free=100))
    answer_all(gate, [a, b, d], ["rw", "rw", "rw"])
    assert trained(gate.emit(at())) == ["A", "B"]
    e, f = gate.plan(at(step=1, free=100))  # asked before the cut of C is known
    gate.observe([cut(c, 0)])
    (again,) = gate.plan(at(step=1, free=100))
    assert (again.prompt_id, again.group_id) == ("C", 6)
    answer_all(gate, [e, f], ["rw", "rw"], version=1)
    assert gate.emit(at(step=1)) is None  # D, E and F are ready, but C comes first
    answer_all(gate, [again], ["rw"], version=1)
    assert trained(gate.emit(at(step=1))) == ["C", "D"]


def test_a_rollout_of_no_group_is_our_own_mistake() -> None:
    gate = uniform()
    (request, _) = uniform().plan(at())
    with pytest.raises(AssertionError, match="never asked"):
        gate.observe(answers(request, "rw"))


def test_age_is_bounded_at_emit() -> None:
    for version, kept in ((1, True), (2, False)):
        gate = uniform(max_age=1)
        requests = gate.plan(at())
        answer_all(gate, requests, ["rw", "rw"])
        batch = gate.emit(at(version=version))
        assert (batch is not None) is kept
        if kept:
            assert (metric(gate, "age_mean"), metric(gate, "age_max"), metric(gate, "expired")) == (
                1,
                1,
                0,
            )
        else:
            assert [(r.prompt_id, r.group_id) for r in gate.plan(at(version=version))] == [
                ("A", 2),
                ("B", 3),
            ]
            assert (metric(gate, "expired"), metric(gate, "reasked"), metric(gate, "cut")) == (
                2,
                2,
                0,
            )


def test_age_is_that_of_the_oldest_trained_token() -> None:
    gate = uniform(max_age=1)
    a, b = gate.plan(at())
    old, young = answers(a, "rw", version=0)[0], answers(a, "rw", version=3)[1]
    gate.observe([old, young, *answers(b, "rw", version=3)])
    assert gate.emit(at(version=3)) is None
    assert asks(gate.plan(at(version=3))) == [("A", 2)]


def test_unjudged_rollouts_are_left_out_and_groups_without_two_verdicts_dropped() -> None:
    gate = uniform(n=3)
    requests = gate.plan(at())
    answer_all(gate, requests, ["ruw", "uur"])
    requests = gate.plan(at())
    assert asks(requests) == [("C", 3)]
    answer_all(gate, requests, ["rrr"])
    batch = gate.emit(at())
    assert batch is not None and trained(batch) == ["A", "C"]
    assert [[r.index for r in g.rollouts] for g in batch.groups] == [[0, 2], [0, 1, 2]]
    assert metric(gate, "unjudged_groups") == 1
    assert (metric(gate, "tokens_kept"), metric(gate, "tokens_dropped")) == (50, 40)
    assert metric(gate, "signal_share") == 0.5 and metric(gate, "acceptance") == pytest.approx(
        2 / 3
    )


# Starvation


def starving(verdicts: list[str], **knobs: Any) -> Dapo:
    """Patience for four groups, all asked at once and answered."""
    gate = dapo(patience=2, **knobs)
    answer_all(gate, gate.plan(at()), verdicts)
    return gate


def test_starvation_raises_with_counts_and_a_knob() -> None:
    gate = starving(["ww", "rw", "ww", "rr"])
    assert gate.plan(at()) == []
    with pytest.raises(Starved) as error:
        gate.emit(at())
    assert str(error.value) == (
        "Step 0: too few prompts are sometimes solved and sometimes not (mean pass rate 0.38): 4 were tried and only 1 "
        "found useful, 2 are needed (2 too hard, 1 too easy, 0 unjudged, 0 cut); take easier prompts, raise "
        'curriculum.rollouts or raise curriculum.patience, or set curriculum.starvation = "partial" to train on fewer.'
    )
    assert metric(gate, "starved") == 1


def test_patience_is_for_one_batch_and_waits_for_what_is_open() -> None:
    gate = dapo(patience=2, max_age=9)
    requests = gate.plan(at())
    answer_all(gate, requests[:3], ["ww", "ww", "rw"])
    assert gate.plan(at()) == [] and gate.emit(at()) is None  # one is still open
    answer_all(gate, requests[3:], ["rw"])
    assert trained(gate.emit(at())) == ["C", "D"]
    assert len(gate.plan(at(step=1))) == 4  # a new batch, a new patience


def test_relax_fills_up_with_rejected_groups_in_ask_order() -> None:
    gate = starving(["ww", "uu", "rw", "rr"], starvation="relax")
    assert gate.holds() == {0, 2, 3}
    assert trained(gate.emit(at())) == ["A", "C"]
    assert (metric(gate, "relaxed"), metric(gate, "starved"), metric(gate, "trained")) == (1, 1, 2)
    assert gate.holds() == {3}
    gate.updated(at(step=1), Report(metrics={}))
    assert gate.holds() == set() and metric(gate, "tokens_dropped") == 40


class Never(Gate):
    def admit(self, group: Group) -> Admission:
        return "drop"


def test_relax_takes_the_largest_spread_first() -> None:
    gate = Never(Listed("ABCD"), sampling=SAMPLING, rollouts=4, starvation="relax", patience=2)
    for verdicts in (["rwww", "rrww"], ["wwww", "rrrw"]):
        answer_all(gate, gate.plan(at()), verdicts)
    batch = gate.emit(at())  # p (1 - p): 3/16, 4/16, 0, 3/16
    assert trained(batch) == ["A", "B"]


def test_relax_holds_no_more_than_a_batch_could_take() -> None:
    gate = Never(Listed("ABCDEFGH"), sampling=SAMPLING, rollouts=4, starvation="relax", patience=4)
    for verdicts in (["wwww", "wwww"], ["rwww", "rrww"], ["wwww", "wwww"]):
        answer_all(gate, gate.plan(at()), verdicts)
    gate.plan(at())
    assert gate.holds() == {2, 3, 6, 7}  # the two best, and two open ones


def test_relax_cannot_use_what_is_too_old_or_unjudged() -> None:
    for gate, version in (
        (starving(["ww"] * 4, starvation="relax"), 1),
        (starving(["uu"] * 4, starvation="relax"), 0),
    ):
        with pytest.raises(Starved, match="none found useful, 2 are needed") as error:
            gate.emit(at(version=version))
        assert "curriculum.starvation" not in str(error.value)


def test_partial_trains_on_fewer_groups_but_never_on_none() -> None:
    gate = starving(["ww", "ww", "rw", "rr"], starvation="partial")
    assert trained(gate.emit(at())) == ["C"]
    assert metric(gate, "starved") == 1
    with pytest.raises(Starved):
        starving(["ww"] * 4, starvation="partial").emit(at())


def test_a_source_that_ends_starves_the_batch_instead_of_stalling() -> None:
    for policy in ("raise", "partial"):
        gate = Uniform(Once(["A"]), sampling=SAMPLING, rollouts=2, starvation=policy)
        answer_all(gate, gate.plan(at()), ["rw"])
        assert gate.emit(at()) is None and gate.plan(at()) == []
        state = json.dumps(gate.state_dict())
        gate = Uniform(Once(["A"]), sampling=SAMPLING, rollouts=2, starvation=policy)
        gate.load_state_dict(json.loads(state))
        if policy == "partial":
            assert trained(gate.emit(at())) == ["A"]
        else:
            with pytest.raises(Starved, match="no more prompts"):
                gate.emit(at())


# Groups asked for in several requests


def screening(ids: str, **knobs: Any) -> Screening:
    return Screening(Listed(list(ids)), sampling=SAMPLING, rollouts=2, more=2, **knobs)


def test_screen_then_continue() -> None:
    gate = screening("ABCDEFGH", screens=4)
    first = gate.plan(at())
    assert sum(r.n for r in first) == 8 and {r.phase for r in first} == {"screen"}
    answer_all(gate, first, ["rw", "ww", "wr", "rr"])
    assert gate.emit(at()) is None and gate.holds() == {0, 2}
    second = gate.plan(at())
    assert sum(r.n for r in second) == 12
    assert [(r.prompt_id, r.phase, r.group_id, r.first_index) for r in second] == [
        ("A", "continue", 0, 2),
        ("C", "continue", 2, 2),
        ("E", "screen", 4, 0),
        ("F", "screen", 5, 0),
        ("G", "screen", 6, 0),
        ("H", "screen", 7, 0),
    ]
    answer_all(gate, second, ["ww", "rr", "ww", "ww", "ww", "ww"])
    batch = gate.emit(at())
    assert batch is not None and trained(batch) == ["A", "C"]
    assert [len(g.rollouts) for g in batch.groups] == [4, 4]
    assert (metric(gate, "asked"), metric(gate, "rollouts")) == (8, 20)
    assert (
        metric(gate, "rejected_hard"),
        metric(gate, "rejected_easy"),
        metric(gate, "accepted"),
    ) == (5, 1, 2)


def test_more_qualify_than_a_batch_takes() -> None:
    gate = screening("ABCDEFGHIJ", screens=5, max_age=3)
    answer_all(gate, gate.plan(at()), ["rw"] * 5)
    answer_all(gate, gate.plan(at()), ["rw"] * 5 + ["ww"] * 5)
    assert trained(gate.emit(at(step=0))) == ["A", "B"]
    # no plan between: nothing had to be generated
    assert trained(gate.emit(at(step=1))) == ["C", "D"]
    assert metric(gate, "age_mean") == 1
    assert gate.emit(at(step=2)) is None and (gate.book.ready, gate.book.open) == (1, 0)


def test_a_cut_continuation_gives_the_whole_group_back() -> None:
    gate = screening("ABCDEF", screens=2, max_age=1)
    answer_all(gate, gate.plan(at()), ["rw", "ww"])
    more, *others = gate.plan(at())
    assert [r.prompt_id for r in others] == ["C", "D"]
    gate.observe([cut(more, 3), *answers(more, "rr")[:1]])
    again = gate.plan(at(step=1))
    assert [(r.prompt_id, r.phase, r.group_id, r.first_index) for r in again] == [
        ("A", "screen", 4, 0),
        ("E", "screen", 5, 0),
    ]
    assert metric(gate, "tokens_dropped") == 20 + 20 + 3 + 10


def test_where_an_update_cuts_nothing_that_was_begun_before_it_is_kept() -> None:
    """C was finished when D was not: keeping it would prefer what is short."""
    gate, now = dapo("ABCDE", max_age=1), at(free=100, cut=True)
    assert gate.emit(now) is None
    a, b, c, d = gate.plan(now)  # two are wanted, every second is expected to be admitted
    gate.observe([*answers(c, "rw"), *answers(a, "rw"), *answers(b, "rw")])
    assert trained(gate.emit(now)) == ["A", "B"] and gate.holds() == {2, 3}
    assert gate.emit(at(step=1, free=100, cut=True)) is None and gate.holds() == set()
    gate.observe([cut(d, 0), cut(d, 1)])
    assert [(r.prompt_id, r.group_id) for r in gate.plan(at(step=1, free=100, cut=True))[:2]] == [
        ("C", 4),
        ("D", 5),
    ]
    assert (metric(gate, "cut"), metric(gate, "expired"), metric(gate, "reasked")) == (2, 0, 2)
    assert metric(gate, "tokens_dropped") == 20 + 3 + 3


def test_where_an_update_cuts_a_group_counts_once_the_batch_cannot_do_without_it() -> None:
    """The verdict on C, and what the source hears of it, wait until A or B is rejected: an update could still cut D."""
    seen: list[str] = []

    class Listening(Listed):
        def observe(self, rollouts: Any) -> None:
            seen.extend(r.prompt_id for r in rollouts)

    gate, now = Dapo(Listening("ABCDE"), sampling=SAMPLING, rollouts=2), at(free=100, cut=True)
    assert gate.emit(now) is None
    a, b, c, _ = gate.plan(now)
    gate.observe([*answers(c, "ww"), *answers(b, "rw")])
    assert seen == ["B", "B"] and metric(gate, "rejected_hard") == 0
    copy = Dapo(Listening("ABCDE"), sampling=SAMPLING, rollouts=2)
    copy.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    gate.observe(answers(a, "rr"))
    assert seen == [*"BBAACC"] and (
        metric(gate, "rejected_easy"),
        metric(gate, "rejected_hard"),
    ) == (1, 1)
    copy.observe(answers(a, "rr"))
    assert seen == [*"BBAACCAACC"] and copy.metrics() == gate.metrics()


# State


def test_a_state_is_json_and_reads_back_equal() -> None:
    gate = starving(["ww", "rw", "ww", "rr"], starvation="relax")
    text = json.dumps(gate.state_dict())
    copy = dapo(patience=2, starvation="relax")
    copy.load_state_dict(json.loads(text))
    assert json.dumps(copy.state_dict()) == text
    assert copy.metrics() == gate.metrics() and copy.holds() == gate.holds()


def test_a_source_hears_of_every_judged_rollout_also_of_dropped_groups() -> None:
    seen = []

    class Listening(Listed):
        def observe(self, rollouts: Any) -> None:
            seen.extend(r.key for r in rollouts)

    gate = Dapo(Listening("ABCD"), sampling=SAMPLING, rollouts=2, max_age=1)
    a, b, c, _ = gate.plan(at())
    gate.observe([*answers(a, "ww"), answers(b, "ru")[1], cut(c, 0), *answers(c, "rw")[1:]])
    assert seen == [(0, 0), (0, 1), (2, 1)]
