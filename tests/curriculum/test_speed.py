from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    SAMPLING,
    Listed,
    Once,
    answer_all,
    answers,
    asks,
    at,
    cut,
    held_tokens,
    metric,
    trained,
)

from whet.curriculum.allocation import largest_remainder
from whet.curriculum.gate import Dapo
from whet.curriculum.source import UniformSource
from whet.curriculum.speed import Speed, accept_probability, implicit_weight
from whet.errors import Starved, WhetError
from whet.testing.contract import (
    WORLDS,
    check_contract,
    check_cost,
    check_starvation,
    check_world,
    play,
)
from whet.testing.simulator import World
from whet.types import Clock, Report, Request

ABC = [chr(ord("A") + i) for i in range(26)]


def speed(ids: Sequence[str] = ABC, n_init: int = 2, n_cont: int = 2, **knobs: Any) -> Speed:
    return Speed(
        Listed(ids),
        sampling=SAMPLING,
        rollouts=n_init + n_cont,
        n_init=n_init,
        **{"max_age": 2, **knobs},
    )


def make(ids: Sequence[str], seed: int, **knobs: Any) -> Speed:
    return Speed(
        UniformSource(ids, seed), sampling=SAMPLING, **{"rollouts": 6, "n_init": 3, **knobs}
    )


def steps(requests: Sequence[Request]) -> list[tuple[str, str, int, int, int]]:
    return [(r.prompt_id, r.phase, r.group_id, r.first_index, r.n) for r in requests]


def by_name(prompt_ids: Sequence[str], total: int) -> list[int]:
    """Uneven shares that depend on the prompts alone: the last letter of the id, from 1 to 3."""
    return largest_remainder(
        [1.0 + ord(prompt_id[-1]) % 3 for prompt_id in prompt_ids], total, minimum=2
    )


# The contract


@pytest.mark.parametrize(
    "max_age", [0, *(pytest.param(age, marks=pytest.mark.slow) for age in (1, 3))]
)
def test_the_contract(max_age: int) -> None:
    check_contract(lambda ids, seed: make(ids, seed, max_age=max_age), rollouts=6, max_age=max_age)


@pytest.mark.slow
@pytest.mark.parametrize("max_age", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_contract_where_the_screening_does_not_train(max_age: int) -> None:
    def gate_only(ids: Sequence[str], seed: int) -> Speed:
        return make(ids, seed, max_age=max_age, use_screening=False)

    expected: dict[str, Any] = {"rollouts": 6, "max_age": max_age, "trains": "continue"}
    check_starvation(gate_only, **expected)
    check_cost(gate_only, **expected)
    assert sum(check_world(gate_only, world, **expected) for world in WORLDS) > 0


@pytest.mark.slow
def test_the_contract_where_the_continuation_is_divided() -> None:
    check_contract(lambda ids, seed: make(ids, seed, max_age=1, allocate=by_name), max_age=1)


ANY_WORLD = st.builds(
    World,
    prompts=st.integers(1, 30),
    pass_rates=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=6).map(
        tuple
    ),
    groups=st.integers(1, 5),
    updates=st.integers(1, 5),
    slots=st.none() | st.integers(1, 40),
    unjudged=st.sampled_from([0.0, 0.2, 0.8]),
    cut=st.sampled_from([0.0, 0.3, 1.0]),
    order=st.sampled_from(["random", "shortest"]),
    seed=st.integers(0, 1000),
)
KNOBS = st.fixed_dictionaries(
    {
        "n_init": st.integers(2, 4),
        "rollouts": st.integers(6, 8),
        "low": st.sampled_from([0.0, 0.3]),
        "high": st.sampled_from([0.8, 1.0]),
        "use_screening": st.booleans(),
        "allocate": st.sampled_from([None, by_name]),
        "max_age": st.integers(0, 3),
        "look_ahead": st.sampled_from([0.0, 0.5, 1.0, 2.5]),
        "starvation": st.sampled_from(["raise", "relax", "partial"]),
        "patience": st.integers(1, 6),
    }
)


@settings(max_examples=60, deadline=None)
@given(world=ANY_WORLD, knobs=KNOBS, share=st.sampled_from([0.1, 0.5, 1.0]))
def test_no_setting_starves_silently_or_loops(
    world: World, knobs: dict[str, Any], share: float
) -> None:
    trains = None if knobs["use_screening"] else "continue"
    check_world(
        lambda ids, seed: make(ids, seed, **knobs),
        world,
        save_share=share,
        max_age=knobs["max_age"],
        patience=knobs["patience"],
        trains=trains,
        rollouts=None if knobs["allocate"] else knobs["rollouts"],
    )


@settings(max_examples=40, deadline=None)
@given(world=ANY_WORLD, knobs=KNOBS, save_share=st.sampled_from([0.0, 0.5]))
def test_the_books_balance(world: World, knobs: dict[str, Any], save_share: float) -> None:
    trains = None if knobs["use_screening"] else "continue"
    run = play(
        lambda ids, seed: make(ids, seed, **knobs),
        world,
        save_share=save_share,
        sealed=False,
        trains=trains,
    )
    m = {key.removeprefix("curriculum/"): value for key, value in run.curriculum.metrics().items()}
    assert all(math.isfinite(value) for value in m.values())
    rejected = m["rejected_easy"] + m["rejected_hard"]
    assert m["asked"] == m["accepted"] + rejected + m["unjudged_groups"] + m["cut"] + m["open"]
    assert m["accepted"] == m["trained"] - m["relaxed"] + m["expired"] + m["ready"]
    assert m["reasked"] == m["cut"] + m["expired"]
    assert m["accepted"] <= m["qualified"] <= m["screened"] <= m["asked"]
    held = held_tokens(run.curriculum)  # type: ignore[arg-type]
    assert m["tokens_kept"] + m["tokens_dropped"] + held == run.simulator.tokens


# The algorithm, call by call


def test_screening_and_continuation_share_a_call() -> None:
    """Equal sizes of both: nothing is told apart by count."""
    gate = speed()
    first = gate.plan(at())
    assert sum(r.n for r in first) == 8
    assert steps(first)[0] == ("A", "screen", 0, 0, 2)
    answer_all(gate, first, ["rw", "ww", "wr", "rr"])
    assert gate.emit(at()) is None
    assert gate.holds() == {0, 2}  # B and D are dropped
    second = gate.plan(at())
    assert sum(r.n for r in second) == 12
    assert steps(second) == [
        ("A", "continue", 0, 2, 2),
        ("C", "continue", 2, 2, 2),
        ("E", "screen", 4, 0, 2),
        ("F", "screen", 5, 0, 2),
        ("G", "screen", 6, 0, 2),
        ("H", "screen", 7, 0, 2),
    ]
    answer_all(gate, second, ["ww", "rr", "rw", "ww", "ww", "rw"])
    batch = gate.emit(at())
    assert batch is not None and trained(batch) == ["A", "C"]
    assert [[r.index for r in group.rollouts] for group in batch.groups] == [[0, 1, 2, 3]] * 2
    assert gate.holds() == {4, 7}
    # The next update needs one call alone: E and H go on, with rollouts of the new policy.
    third = gate.plan(at(step=1))
    assert steps(third)[:2] == [("E", "continue", 4, 2, 2), ("H", "continue", 7, 2, 2)]
    answer_all(gate, third, ["rw", "rw"] + ["ww"] * (len(third) - 2), version=1)
    assert trained(gate.emit(at(step=1))) == ["E", "H"]
    assert (metric(gate, "age_mean"), metric(gate, "age_max")) == (1, 1)


def test_without_look_ahead_a_call_screens_for_this_batch_alone() -> None:
    gate = speed(look_ahead=0.0)
    answer_all(gate, gate.plan(at()), ["rw", "ww", "wr", "rr"])
    assert asks(gate.plan(at())) == [("A", 2), ("C", 2)]


def test_screens_what_is_lacking_at_the_acceptance_seen() -> None:
    gate = speed(look_ahead=0.0, n_cont=4)
    answer_all(gate, gate.plan(at(groups=3)), ["rw", "ww", "ww", "ww", "ww", "ww"])
    # 1 of 6, with the prior 2 of 8: two are lacking, so eight are screened beside A.
    second = gate.plan(at(groups=3))
    assert [r.phase for r in second] == ["continue"] + ["screen"] * 8
    assert gate.plan(at(groups=3)) == []  # enough is on its way
    assert (metric(gate, "screened"), metric(gate, "qualified")) == (6, 1)
    assert (
        metric(gate, "qualified_share") == pytest.approx(1 / 6) and metric(gate, "step_scale") == 4
    )


def test_thresholds_are_exclusive() -> None:
    gate = speed(n_init=6, low=1 / 6, high=5 / 6)
    answer_all(gate, gate.plan(at()), ["rwwwww", "rrwwww", "rrrrrw", "rrrrww"])
    assert gate.holds() == {1, 3}
    assert (metric(gate, "rejected_hard"), metric(gate, "rejected_easy")) == (1, 1)


def test_a_continuation_trains_whatever_it_brings() -> None:
    gate = speed(n_init=2, n_cont=2)
    answer_all(gate, gate.plan(at(groups=1)), ["rw", "ww"])
    more, *others = gate.plan(at(groups=1))
    answer_all(gate, [more, *others], ["uu", *["ww"] * len(others)])
    batch = gate.emit(at(groups=1))
    # two verdicts are enough
    assert batch is not None and [r.index for r in batch.groups[0].rollouts] == [0, 1]


def test_an_unjudged_screening_is_dropped_and_counted() -> None:
    gate = speed(n_init=3)
    answer_all(gate, gate.plan(at()), ["ruu", "ruw", "uuu", "wuw"])
    assert gate.holds() == {1}
    assert (
        metric(gate, "unjudged_groups"),
        metric(gate, "rejected_hard"),
        metric(gate, "screened"),
    ) == (2, 1, 4)


# More survivors than a batch takes


def test_stream_continues_at_once_and_keeps_the_surplus() -> None:
    gate = speed(look_ahead=1.5, max_age=3)
    first = gate.plan(at(free=10))
    assert len(first) == 5
    answer_all(gate, first, ["rw"] * 5)
    second = gate.plan(at(free=10))
    assert asks(second) == [(i, 2) for i in "ABCDE"] and {r.phase for r in second} == {"continue"}
    answer_all(gate, second, ["rw"] * 5)
    assert trained(gate.emit(at(step=0))) == ["A", "B"] and metric(gate, "age_mean") == 0
    # no plan between: nothing had to be generated
    assert trained(gate.emit(at(step=1))) == ["C", "D"]
    assert metric(gate, "age_mean") == 1
    assert gate.emit(at(step=2)) is None and (gate.book.ready, gate.book.open) == (1, 0)


def test_barrier_lets_the_surplus_wait_for_the_policy_that_trains_it() -> None:
    gate = speed()
    answer_all(gate, gate.plan(at()), ["rw", "rw", "rw", "rw"])
    second = gate.plan(at())
    assert [i for i, _ in asks(second)] == ["A", "B"]  # C and D are what is wanted ahead
    answer_all(gate, second, ["rw", "rw"])
    assert trained(gate.emit(at())) == ["A", "B"]
    third = gate.plan(at(step=1))
    assert steps(third)[:2] == [("C", "continue", 2, 2, 2), ("D", "continue", 3, 2, 2)]


def test_strictly_on_policy_only_what_the_batch_takes_is_continued() -> None:
    gate = speed(max_age=0)
    answer_all(gate, gate.plan(at()), ["rw", "ww", "rw", "rw"])
    second = gate.plan(at())
    # D's place is in the next batch, and nothing is screened for it
    assert asks(second) == [("A", 2), ("C", 2)]
    answer_all(gate, second, ["rw", "rw"])
    assert trained(gate.emit(at())) == ["A", "C"]
    assert gate.emit(at(step=1)) is None
    again = gate.plan(at(step=1))
    assert steps(again)[0] == ("D", "screen", 4, 0, 2)  # its screening is of the old policy
    assert (metric(gate, "cut"), metric(gate, "reasked"), metric(gate, "expired")) == (1, 1, 0)
    assert metric(gate, "tokens_dropped") == 20 + 20


def test_strictly_on_policy_a_batch_of_several_rounds_comes_together() -> None:
    gate = speed(max_age=0, patience=9)
    rounds, step = 0, at(groups=3)
    while (batch := gate.emit(step)) is None:
        requests = gate.plan(step)
        answer_all(
            gate,
            requests,
            ["rw" if r.phase == "continue" or r.prompt_id in "CIQ" else "ww" for r in requests],
        )
        rounds += 1
    assert trained(batch) == ["C", "I", "Q"] and {
        r.first_version for g in batch.groups for r in g.rollouts
    } == {0}
    assert rounds <= 4


def test_a_survivor_that_would_be_too_old_in_its_turn_is_not_continued() -> None:
    gate = speed(max_age=1, look_ahead=2.0)
    first = gate.plan(at(free=100))
    # four wanted, every second expected: more could not train within one version
    assert len(first) == 8
    answer_all(gate, first[:6], ["rw"] * 6)
    # A to D train at age 0 and 1; E and F would at age 2.
    assert [r.prompt_id for r in gate.plan(at(free=100)) if r.phase == "continue"] == [
        "A",
        "B",
        "C",
        "D",
    ]


# Free capacity under stream


def test_small_screenings_fill_small_gaps() -> None:
    gate = speed(n_init=2, n_cont=6)
    assert asks(gate.plan(at(free=5))) == [("A", 2), ("B", 2)]
    assert asks(gate.plan(at(free=1))) == []


def test_what_falls_free_is_kept_for_a_survivor() -> None:
    gate = speed(n_init=2, n_cont=6)
    first = gate.plan(at(free=6))
    assert asks(first) == [("A", 2), ("B", 2), ("C", 2)]
    gate.observe(answers(first[0], "rw"))
    assert gate.plan(at(free=2)) == []  # a screening would fit, but A needs six
    gate.observe(answers(first[1], "ww"))
    assert gate.plan(at(free=4)) == []
    gate.observe(answers(first[2], "ww"))
    assert steps(gate.plan(at(free=6))) == [("A", "continue", 0, 2, 6)]


def test_a_continuation_larger_than_the_engine_is_asked_alone() -> None:
    gate = speed(n_init=2, n_cont=6)
    (first,) = gate.plan(at(free=3))
    gate.observe(answers(first, "rw"))
    (more,) = gate.plan(at(free=3))
    assert (more.prompt_id, more.phase, more.n) == ("A", "continue", 6)


# The screening as a gate alone


def test_gate_only_trains_on_the_continuation() -> None:
    gate = speed(use_screening=False, n_cont=3, max_age=0)
    answer_all(gate, gate.plan(at()), ["rw", "ww", "wr", "rr"])
    second = gate.plan(at())
    # Although strictly on-policy it screens ahead: what does not train may be old.
    assert [(r.prompt_id, r.phase) for r in second[:3]] == [
        ("A", "continue"),
        ("C", "continue"),
        ("E", "screen"),
    ]
    answer_all(gate, second, ["rrr", "rwu", "rw", "ww", "ww", "rw"])
    batch = gate.emit(at())
    assert batch is not None
    assert [[r.index for r in group.rollouts] for group in batch.groups] == [[2, 3, 4], [2, 3]]
    assert metric(gate, "tokens_kept") == 50
    # screenings, C's unjudged one, F and G
    assert metric(gate, "tokens_dropped") == 4 * 20 + 10 + 2 * 20
    third = gate.plan(at(step=1))
    assert [(r.prompt_id, r.phase) for r in third[:2]] == [("E", "continue"), ("H", "continue")]
    answer_all(gate, third, ["rwr", "uur"] + ["ww"] * (len(third) - 2), version=1)
    # H has one verdict that trains
    assert gate.emit(at(step=1)) is None and metric(gate, "unjudged_groups") == 1
    copy = speed(use_screening=False, n_cont=3, max_age=0)
    copy.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    (left,) = copy.book.first_ready(2)
    assert (
        left.prompt_id == "E"
        and [r.index for r in left.rollouts] == [2, 3, 4]
        and left.oldest_version == 1
    )


# The division of the continuation


def test_a_budget_is_divided_among_those_continued_together() -> None:
    calls: list[tuple[list[str], int]] = []

    def allocate(prompt_ids: Sequence[str], total: int) -> list[int]:
        calls.append((list(prompt_ids), total))
        return by_name(prompt_ids, total)

    gate = speed(n_init=4, n_cont=8, allocate=allocate)
    answer_all(gate, gate.plan(at()), ["rrww", "rwww", "wwww", "wwww"])
    second = [r for r in gate.plan(at()) if r.phase == "continue"]
    assert calls == [(["A", "B"], 16)]
    assert asks(second) == [("A", 12), ("B", 4)]  # shares of 3 and 1


@pytest.mark.parametrize("sizes", [[8, 7], [16, 0], [16], [15.0, 0.5]])
def test_a_wrong_division_is_our_own_mistake(sizes: list[int]) -> None:
    gate = speed(n_init=2, n_cont=8, allocate=lambda groups, total: sizes)
    answer_all(gate, gate.plan(at()), ["rw", "rw", "ww", "ww"])
    with pytest.raises(AssertionError, match="16 rollouts for 2 groups"):
        gate.plan(at())


# Where prompts are known


def test_only_those_are_screened_for_whom_it_pays() -> None:
    """A and C are known to be middling, B may be hopeless, D was never seen: as in `test_when_a_screening_pays`."""
    known = dict.fromkeys(ABC, (0.1, 0.15)) | {"A": (1.1, 3.15), "B": (0.1, 4.15), "C": (3.1, 1.15)}
    gate = speed(n_init=4, n_cont=12, estimates=lambda ids: [known[prompt_id] for prompt_id in ids])
    first = gate.plan(at())
    assert [(r.prompt_id, r.phase, r.n) for r in first] == [
        ("A", "train", 16),
        (
            "C",
            "train",
            16,
        ),  # whole groups come first in line: a survivor before them would hold them up
        ("B", "screen", 4),
        ("D", "screen", 4),
        (
            "E",
            "screen",
            4,
        ),  # chances of 0.86, 0.87, 0.07, 0.18 and 0.18: more than the two that are lacking
    ]
    answer_all(gate, first, ["rw" * 8, "r" * 16, "wwww", "rwww", "wwww"])
    assert metric(gate, "screened") == 3 and metric(gate, "qualified") == 1
    assert gate.holds() == {0, 3}  # a whole group without signal is dropped, as a screening is
    (more,) = [r for r in gate.plan(at()) if r.phase == "continue"]
    assert (more.prompt_id, more.first_index, more.n) == ("D", 4, 12)
    answer_all(gate, [more], ["w" * 12])
    assert trained(gate.emit(at())) == ["A", "D"]
    # The whole group weighs 1, as under DAPO, which drops what has no gradient; the screened one 0.4.
    assert metric(gate, "implicit_weight") == pytest.approx(
        (1 + implicit_weight(1 / 16, 4, 12)) / 2
    )


def test_known_prompts_fill_a_batch_in_one_call_with_a_margin_and_without_waiting_for_survivors() -> (
    None
):
    known = dict.fromkeys(ABC, (0.1, 0.15)) | {"B": (3.0, 3.0), "C": (3.0, 3.0), "E": (3.0, 3.0)}
    gate = speed(
        n_init=4,
        n_cont=12,
        look_ahead=1.5,
        estimates=lambda ids: [known[prompt_id] for prompt_id in ids],
    )
    first = gate.plan(at())
    assert steps(first)[:3] == [
        ("B", "train", 0, 0, 16),
        ("C", "train", 1, 0, 16),
        ("E", "train", 2, 0, 16),
    ]
    assert {r.phase for r in first[3:]} == {"screen"}
    answer_all(gate, first, ["rw" * 8] * 3 + ["rwww"] * (len(first) - 3))
    assert trained(gate.emit(at())) == ["B", "C"]  # A survived, too, and does not hold them up
    second = gate.plan(at(step=1))
    assert steps(second)[0] == ("A", "continue", 3, 4, 12)  # E is ready, so one is lacking


def test_a_prompt_that_is_requested_again_keeps_its_place_before_whole_groups() -> None:
    known = dict.fromkeys(ABC, (0.1, 0.15)) | {"C": (3.0, 3.0), "K": (3.0, 3.0)}
    gate = speed(
        n_init=4,
        n_cont=12,
        look_ahead=0.0,
        estimates=lambda ids: [known[prompt_id] for prompt_id in ids],
    )
    first = gate.plan(at())
    assert [r.prompt_id for r in first[:2]] == ["C", "A"]
    answer_all(gate, [first[0], *first[2:]], ["w" * 16] + ["wwww"] * (len(first) - 2))
    gate.observe([cut(first[1], 0), *answers(first[1], "rwrw")[1:]])
    again = gate.plan(at(version=1))
    assert [r.prompt_id for r in again[:2]] == ["A", "K"]
    assert gate.book.place(again[0].group_id) == first[1].group_id


def test_a_whole_group_is_divided_like_a_continuation() -> None:
    gate = speed(
        n_init=4, n_cont=8, allocate=by_name, estimates=lambda ids: [(2.0, 2.0)] * len(ids)
    )
    # 8 on average by 3, 1 and 2; and 4
    assert asks(gate.plan(at())) == [("A", 16), ("B", 8), ("C", 12)]


def test_without_the_screening_in_the_batch_every_prompt_is_screened() -> None:
    gate = speed(
        n_init=2, n_cont=8, use_screening=False, estimates=lambda ids: [(2.0, 2.0)] * len(ids)
    )
    assert {r.phase for r in gate.plan(at())} == {"screen"}


# Epochs, cuts, starvation


def test_every_prompt_of_an_epoch_is_screened_exactly_once() -> None:
    """The released code pulls prompts also in the turns in which it trains, and loses them."""
    ids = [f"p{i}" for i in range(64)]
    gate = Speed(
        Once(ids), sampling=SAMPLING, rollouts=4, n_init=2, max_age=9, starvation="partial"
    )
    screened: Counter[str] = Counter()
    updates = 0
    while True:
        clock = at(step=updates, groups=3)
        try:
            batch = gate.emit(clock)
        except Starved:
            break
        if batch is not None:
            updates += 1
            gate.updated(at(step=updates, groups=3), Report(metrics={}))
            continue
        requests = gate.plan(clock)
        screened.update(r.prompt_id for r in requests if r.phase == "screen")
        answer_all(
            gate,
            requests,
            ["rw" if int(r.prompt_id[1:]) % 3 else "ww" for r in requests],
            version=updates,
        )
    assert set(screened.values()) == {1} and len(screened) == 64
    assert metric(gate, "trained") == 42 and updates == 14
    assert gate.holds() == set()


def test_a_cut_continuation_gives_the_whole_group_back() -> None:
    gate = speed(look_ahead=0.0)
    answer_all(gate, gate.plan(at(groups=1)), ["rw", "ww"])
    (more,) = gate.plan(at(groups=1))
    gate.observe([cut(more, 3), *answers(more, "rr")[:1]])
    assert steps(gate.plan(at(groups=1, version=1)))[0] == ("A", "screen", 2, 0, 2)
    assert metric(gate, "tokens_dropped") == 20 + 20 + 3 + 10


def starving(policy: str, **knobs: Any) -> Speed:
    """Two groups wanted, patience for four: one qualifies and is continued."""
    gate = speed(starvation=policy, patience=2, **knobs)
    answer_all(gate, gate.plan(at()), ["ww", "rw", "rr", "ww"])
    assert gate.emit(at()) is None
    requests = gate.plan(at())
    assert asks(requests) == [("B", 2)]
    answer_all(gate, requests, ["rw"])
    return gate


def test_starvation_is_a_policy() -> None:
    with pytest.raises(
        Starved,
        match=r"4 were tried and only 1 found useful, 2 are needed \(2 too hard, 1 too easy",
    ):
        starving("raise").emit(at())
    assert trained(starving("partial").emit(at())) == ["B"]
    batch = starving("relax").emit(at())
    assert trained(batch) == ["A", "B"]  # A with the two rollouts it has
    assert batch is not None and [len(group.rollouts) for group in batch.groups] == [2, 4]
    assert trained(starving("relax", use_screening=False).emit(at())) == ["A", "B"]


# Metrics


def test_metrics_of_a_batch() -> None:
    gate = speed(n_init=4, n_cont=20, look_ahead=0.0)
    first = gate.plan(at())
    answer_all(gate, first, ["rwww", "wwww", "rrww", "rrrr"])
    # Moments: (1/4 + 0 + 1/2 + 1) / 4 = 7/16 and (0 + 0 + 1/6 + 1) / 4 = 7/24.
    second = gate.plan(at())
    answer_all(gate, second, ["r" * 5 + "w" * 15, "r" * 10 + "w" * 10])
    full = gate.seen.predict(24)
    assert 0.5 < gate.seen.predict(4) < full < 1
    assert gate.seen.moments == pytest.approx([7 / 4, 7 / 6, 4])
    assert gate.emit(at()) is not None
    assert metric(gate, "implicit_weight") == pytest.approx(
        (implicit_weight(0.25, 4, 20) + implicit_weight(0.5, 4, 20)) / 2
    )
    assert metric(gate, "rollouts_saved") == pytest.approx(2 * 24 / full - (4 * 4 + 2 * 20))
    assert (metric(gate, "rollouts"), metric(gate, "qualified_share")) == (56, 0.5)
    # fades by 0.9
    assert gate.seen.share.seen == pytest.approx(3.6) and gate.seen.moments[2] == pytest.approx(3.6)


def test_the_weight_of_a_gate_is_its_acceptance() -> None:
    gate = speed(n_init=4, n_cont=4, use_screening=False)
    answer_all(gate, gate.plan(at(groups=1)), ["rwww", "wwww"])
    requests = gate.plan(at(groups=1))
    answer_all(gate, requests, ["rwww", *["wwww"] * (len(requests) - 1)])
    assert gate.emit(at(groups=1)) is not None
    assert metric(gate, "implicit_weight") == pytest.approx(accept_probability(0.25, 4))


def test_the_weight_of_a_group_is_that_of_its_own_sizes() -> None:
    """By their names, A gets 15 of 20 rollouts beyond its screening, and B gets 5."""
    gate = speed(n_init=4, n_cont=10, allocate=by_name)
    answer_all(gate, gate.plan(at()), ["rwww", "rrww", "wwww", "wwww"])
    more = gate.plan(at())
    assert asks(more[:2]) == [("A", 15), ("B", 5)]
    answer_all(gate, more[:2], ["w" * 15, "w" * 5])
    assert trained(gate.emit(at())) == ["A", "B"]
    assert metric(gate, "implicit_weight") == pytest.approx(
        (implicit_weight(1 / 19, 4, 15) + implicit_weight(2 / 9, 4, 5)) / 2
    )


def test_metrics_are_numbers_before_anything_is_seen() -> None:
    assert all(math.isfinite(value) for value in speed().metrics().values())
    assert metric(speed(), "step_scale") == 2


@pytest.mark.parametrize(("pass_rates", "saves"), [((0.5,), False), ((0.5, 0.0, 0.0, 0.0), True)])
def test_it_saves_rollouts_where_many_prompts_are_hopeless_and_only_there(
    pass_rates: tuple[float, ...], saves: bool
) -> None:
    """The metric says what a DAPO run beside it shows."""
    world = World(prompts=400, pass_rates=pass_rates, groups=8, updates=12)

    def spent(kind: type[Speed] | type[Dapo], **knobs: Any) -> tuple[float, float]:
        def build(ids: Sequence[str], seed: int) -> Speed | Dapo:
            return kind(
                UniformSource(ids, seed), sampling=SAMPLING, rollouts=24, max_age=2, **knobs
            )

        metrics = play(build, world).curriculum.metrics()
        assert metrics["curriculum/trained"] == 96
        return metrics["curriculum/rollouts"], metrics.get("curriculum/rollouts_saved", 0.0)

    screened, claimed = spent(Speed, n_init=4)
    assert (screened < spent(Dapo)[0]) is saves and (claimed > 0) is saves


# Settings and state


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"n_init": 1}, "n_init = 1 shows no difference"),
        ({"n_cont": 0}, "leaves 0 after a screening of 2"),
        (
            {"n_cont": 1, "use_screening": False},
            "leaves 1 after a screening of 2, and a continuation needs 2",
        ),
        ({"low": 0.5}, "No pass rate of 2 rollouts lies between"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WhetError, match=sentence):
        speed(**settings)


def test_a_state_is_json_and_reads_back_equal() -> None:
    gate = speed()
    answer_all(gate, gate.plan(at()), ["rw", "ww", "wr", "rw"])
    answer_all(gate, gate.plan(at())[:2], ["rw", "ww"])
    assert gate.emit(at()) is not None
    text = json.dumps(gate.state_dict())
    copy = speed()
    copy.load_state_dict(json.loads(text))
    assert json.dumps(copy.state_dict()) == text
    assert copy.metrics() == gate.metrics() and copy.holds() == gate.holds()
    clock: Clock = at(step=1)
    assert copy.plan(clock) == gate.plan(clock)
