from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    SAMPLING,
    answer_all,
    answers,
    asks,
    at,
    cut,
    held_tokens,
    mean_rates,
    metric,
    trained,
)
from test_contract import KNOBS, WORLDS

from whet import config
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.cures import Cures, neyman_continuations, rate_sigmas
from whet.curriculum.gate import Gate
from whet.curriculum.rho import CuresSource
from whet.curriculum.scalingrl import ScalingRLSource
from whet.curriculum.speed import Speed
from whet.errors import WhetError
from whet.testing.contract import WORLDS as ALL_WORLDS
from whet.testing.contract import check_contract, check_cost, check_world, play
from whet.testing.simulator import World
from whet.types import Group, Report, Request

IDS = [f"p{i}" for i in range(4)]


def make(
    ids: Sequence[str], seed: int, source: dict[str, Any] | None = None, **knobs: Any
) -> Cures:
    return Cures(
        CuresSource(ids, seed, **(source or {})), sampling=SAMPLING, **{"rollouts": 4, **knobs}
    )


def knowing(verdicts: dict[str, str], **knobs: Any) -> Cures:
    gate = make(list(verdicts), 0, **knobs)
    for prompt_id, letters in verdicts.items():
        request = Request(prompt_id=prompt_id, group_id=0, n=len(letters), sampling=SAMPLING)
        gate.source.observe(answers(request, letters))
    return gate


# The contract


def test_the_contract_strictly_on_policy_with_exact_batches() -> None:
    check_contract(make, epochs=False, rollouts=4, max_age=0)


@pytest.mark.slow
def test_the_contract_with_look_ahead_forgetting_and_subsets() -> None:
    source = {"memory": 0.9, "rest": 1, "subsets": 3, "subset_steps": 2}
    check_contract(lambda ids, seed: make(ids, seed, source, max_age=1), epochs=False, max_age=1)


@pytest.mark.slow
def test_the_contract_while_probing() -> None:
    """Probes are extra: they wear out no patience, so the suite allows as many more."""
    for world in ALL_WORLDS:
        source = {"subsets": min(3, world.prompts), "subset_steps": 2}
        batches = check_world(
            lambda ids, seed: make(ids, seed, source, max_age=1, probe=2),  # noqa: B023
            world,
            epochs=False,
            max_age=1,
            patience=60,
        )
        assert batches == world.updates


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    world=WORLDS,
    knobs=KNOBS,
    probe=st.sampled_from([0, 0, 2]),
    memory=st.sampled_from([1.0, 0.7]),
    share=st.floats(0, 1),
)
def test_the_contract_in_any_world(
    world: World, knobs: dict[str, Any], probe: int, memory: float, share: float
) -> None:
    source = {"memory": memory, "subsets": min(2, world.prompts), "subset_steps": 2}
    exact = world.slots is None or knobs["max_age"] == 0
    check_world(
        lambda ids, seed: make(ids, seed, source, probe=probe, **knobs),
        world,
        save_share=share,
        epochs=False,
        max_age=knobs["max_age"],
        rollouts=knobs["rollouts"] if exact else None,
        patience=knobs["patience"] + 60,
    )


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(world=WORLDS, knobs=KNOBS, probe=st.sampled_from([0, 2]))
def test_the_books_balance(world: World, knobs: dict[str, Any], probe: int) -> None:
    source = {"subsets": min(2, world.prompts), "subset_steps": 2}
    run = play(
        lambda ids, seed: make(ids, seed, source, probe=probe, **knobs),
        world,
        save_share=0.3,
        sealed=False,
        epochs=False,
        patience=100,
    )
    m = {key.removeprefix("curriculum/"): value for key, value in run.curriculum.metrics().items()}
    gate = run.curriculum
    assert isinstance(gate, Cures)
    assert (
        gate.book.next_id
        == m["accepted"] + m["unjudged_groups"] + m["probed"] + m["cut"] + m["open"]
    )
    assert m["accepted"] == m["trained"] + m["expired"] + m["ready"]
    assert m["reasked"] == m["cut"] + m["expired"]
    assert m["tokens_kept"] + m["tokens_dropped"] + held_tokens(gate) == run.simulator.tokens


def test_work_does_not_grow_with_the_number_of_prompts() -> None:
    check_cost(make, 1_000, 100_000, epochs=False)
    check_cost(lambda ids, seed: make(ids, seed, {"memory": 0.9}), 1_000, 100_000, epochs=False)
    check_cost(lambda ids, seed: make(ids, seed, {"prior": "pool"}), 1_000, 100_000, epochs=False)


@pytest.mark.slow
def test_it_composes_with_screening_and_a_moving_set() -> None:
    def speed(ids: Sequence[str], seed: int, pool: ScalingRLSource | None = None) -> Gate:
        source = CuresSource(ids, seed, rest=1, pool=pool)
        allocate = neyman_continuations(rate_sigmas(source))
        return Speed(source, sampling=SAMPLING, rollouts=6, n_init=3, max_age=1, allocate=allocate)

    def everything(ids: Sequence[str], seed: int) -> Gate:
        return speed(ids, seed, pool=ScalingRLSource(ids, seed, share=0.5))

    def pooled(ids: Sequence[str], seed: int) -> Gate:
        pool = ScalingRLSource(ids, seed, share=0.5)
        return Cures(CuresSource(ids, seed, pool=pool), sampling=SAMPLING, rollouts=4)

    for world in ALL_WORLDS[1:5]:
        check_world(speed, world, epochs=False, max_age=1)
        check_world(everything, world, epochs=False, max_age=1)
        check_world(pooled, world, epochs=False, max_age=0, rollouts=4)
    check_cost(pooled, epochs=False)


# Dividing


def test_rollouts_go_where_verdicts_differ() -> None:
    """p = 1/2, 1/4, 3/4, 1/10 and 32 rollouts: 0.5, 0.433, 0.433, 0.3 of 1.666."""
    gate = knowing({"p0": "", "p1": "ww", "p2": "rr", "p3": "w" * 8}, rollouts=8)
    assert dict(asks(gate.plan(at(groups=4)))) == {"p0": 10, "p1": 8, "p2": 8, "p3": 6}


def test_pictures_of_posterior_and_allocation() -> None:
    """Means 1/2 of the unseen prompt, 5/6, 1/6 and 1/2 (bins 10, 16, 3, 10); 16 rollouts in proportion to 3:sqrt 5."""
    gate = knowing({"p0": "", "p1": "rrrr", "p2": "wwww", "p3": "rw"})
    requests = gate.plan(at(groups=4))
    sizes = dict(asks(requests))
    assert sizes == {"p0": 5, "p1": 3, "p2": 3, "p3": 5}
    for request in requests:
        gate.observe(answers(request, "r" * request.n))  # p0: 6/7, p1: 8/9, p2: 4/9, p3: 7/9
    shown = gate.pictures()["posterior"]
    assert {i: n for i, n in enumerate(shown["counts"]) if n} == {8: 1, 15: 1, 17: 2}
    given = {i: n for i, n in enumerate(shown["rollouts"]) if n is not None}
    assert given == {3: 3.0, 10: 5.0, 16: 3.0}, "by what was known when they were asked for"
    assert set(gate.pictures()["posterior"]["rollouts"]) == {None}, (
        "of the time since the last picture"
    )


def test_the_minimum_holds() -> None:
    verdicts = {"p0": "", "p1": "w" * 998, "p2": "r" * 998}
    sizes = dict(asks(knowing(verdicts, rollouts=8, minimum=3).plan(at(groups=3))))
    assert sizes == {"p0": 18, "p1": 3, "p2": 3}


def test_every_group_trains_with_equal_weight() -> None:
    gate = make(IDS, 0)
    answer_all(gate, gate.plan(at()), ["rrrr", "wwww"])
    batch = gate.emit(at())
    assert batch is not None
    assert [group.weight for group in batch.groups] == [None, None]
    assert metric(gate, "accepted") == 2
    assert (metric(gate, "allocation_min"), metric(gate, "allocation_max")) == (4, 4)


def test_the_successor_of_a_dropped_group_gets_its_rollouts() -> None:
    gate = knowing({"p0": "", "p1": "w" * 8, "p2": "w" * 8, "p3": "w" * 8}, rollouts=4)
    first = gate.plan(at(groups=2))
    assert sum(n for _, n in asks(first)) == 8
    answer_all(gate, first, ["u" * first[0].n, "r" * first[1].n])
    assert metric(gate, "unjudged_groups") == 1
    (second,) = gate.plan(at(groups=2))
    assert second.n == first[0].n
    assert second.prompt_id not in [request.prompt_id for request in first]


def test_a_cut_group_is_asked_again_for_as_many() -> None:
    gate = knowing({"p0": "", "p1": "w" * 8, "p2": "rr", "p3": "w" * 20}, rollouts=5)
    first = gate.plan(at(groups=4))
    gate.observe([cut(first[1], 0)])
    (again,) = gate.plan(at(groups=4))
    assert (again.prompt_id, again.n) == (first[1].prompt_id, first[1].n)
    answer_all(
        gate,
        [first[0], first[2], first[3], again],
        ["r" * r.n for r in (first[0], first[2], first[3], again)],
    )
    assert trained(gate.emit(at(groups=4))) == [request.prompt_id for request in first]


def test_under_stream_a_batch_is_divided_as_a_whole() -> None:
    """Asked one by one as room is made, the sizes are those of the barrier."""
    verdicts = {"p0": "", "p1": "w" * 8, "p2": "rr", "p3": "w" * 20}
    whole = asks(knowing(verdicts, rollouts=5).plan(at(groups=4)))
    assert len({n for _, n in whole}) > 2
    gate, one_by_one = knowing(verdicts, rollouts=5), []
    for _ in range(4):
        (request,) = gate.plan(at(groups=4, free=1))
        one_by_one += asks([request])
        assert gate.plan(at(groups=4, free=1)) == []
        gate.observe(answers(request, "r" * request.n))
    assert one_by_one == whole


def test_verdicts_reach_the_next_plan() -> None:
    """In the released code they do not. With a small tau the next step takes the two prompts nearest to one half."""
    gate = make([f"p{i}" for i in range(6)], 1, {"tau": 0.001, "prior": "even"})
    for step in range(3):  # every prompt once: all unseen ones come before those with a verdict
        requests = gate.plan(at(step=step))
        answer_all(
            gate,
            requests,
            ["rrww" if r.prompt_id in ("p2", "p5") else "wwww" for r in requests],
            version=step,
        )
        assert gate.emit(at(step=step)) is not None
    assert {prompt_id for prompt_id, _ in asks(gate.plan(at(step=3)))} == {"p2", "p5"}
    assert metric(gate, "prompts_visited") == 6


def test_settings_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(WhetError, match=r"rollouts = 2 on average cannot give .*minimum = 4"):
        make(IDS, 0, rollouts=2, minimum=4)


# Subsets and probes


def test_a_subset_is_probed_in_slices_before_it_trains() -> None:
    ids = [f"p{i}" for i in range(10)]
    gate = make(ids, 0, {"subsets": 2, "subset_steps": 1}, probe=2, rollouts=2)
    probed = []
    for _ in range(3):
        requests = gate.plan(at())  # two groups of two rollouts: two probes at once
        assert {(r.phase, r.n) for r in requests} == {("probe", 2)}
        assert len(requests) <= 2
        assert gate.plan(at()) == []
        answer_all(gate, requests, ["rw"] * len(requests))
        probed += [r.prompt_id for r in requests]
        assert gate.emit(at()) is None
    assert len(set(probed)) == 5
    assert (metric(gate, "probed"), metric(gate, "asked"), metric(gate, "tokens_dropped")) == (
        5,
        0,
        100,
    )
    requests = gate.plan(at())
    assert {r.phase for r in requests} == {"train"}
    answer_all(gate, requests, ["rw", "rr"])
    assert set(trained(gate.emit(at()))) <= set(probed)
    assert mean_rates(gate.source.posterior, [requests[1].prompt_id]) == pytest.approx(
        [4 / 6]
    )  # 1 + 1 + 2 of 2 + 2 + 2
    again = gate.plan(at(step=1))  # the other subset: counts are forgotten, probing begins anew
    assert {r.phase for r in again} == {"probe"}
    assert not {r.prompt_id for r in again} & set(probed)
    assert mean_rates(gate.source.posterior, ids).tolist() == [0.5] * 10


def test_the_step_within_a_subset_survives_a_resume() -> None:
    source = {"subsets": 2, "subset_steps": 3}

    def subsets(resume_at: int) -> list[float]:
        gate, seen = make(IDS, 0, source, rollouts=2), []
        for step in range(5, 12):  # a stage may begin anywhere
            requests = gate.plan(at(step=step))
            seen.append(metric(gate, "subset"))
            answer_all(gate, requests, ["rw", "rw"], version=step)
            if step == resume_at:
                state = json.loads(json.dumps(gate.state_dict()))
                gate = make(IDS, 0, source, rollouts=2)
                gate.load_state_dict(state)
            assert gate.emit(at(step=step)) is not None
        return seen

    assert subsets(resume_at=0) == subsets(resume_at=6) == [0, 0, 0, 1, 1, 1, 0]


def test_a_probe_that_was_cut_is_probed_again() -> None:
    gate = make(IDS, 0, probe=2, rollouts=2)
    first = gate.plan(at())
    gate.observe([cut(first[0], 0), *answers(first[1], "rw")])
    again = gate.plan(at())
    assert (again[0].prompt_id, again[0].phase, again[0].n) == (first[0].prompt_id, "probe", 2)
    assert metric(gate, "reasked") == 1


# SPEED's continuation


def group(prompt_id: str, letters: str) -> Group:
    request = Request(prompt_id=prompt_id, group_id=0, n=len(letters), sampling=SAMPLING)
    return Group(prompt_id=prompt_id, group_id=0, rollouts=tuple(answers(request, letters)))


def test_continuations_are_divided_by_what_the_screening_showed() -> None:
    groups = [group("p0", "rw"), group("p1", "wwww"), group("p2", "rrrr")]
    names = [g.prompt_id for g in groups]
    source = CuresSource(IDS, 0)
    source.observe([r for g in groups for r in g.rollouts])
    divide = neyman_continuations(rate_sigmas(source))
    assert divide(names, 30) == [12, 9, 9]  # 0.5, 0.3727, 0.3727 of 1.2454
    assert divide(names, 3) == [1, 1, 1]
    assert divide([], 0) == []


def test_what_was_screened_counts_in_the_division() -> None:
    """sigma 0.5, 0.3727, 0.3727 of 30 + 3 x 4 rollouts: ideal 16.86, 12.57, 12.57, so 17, 13 and 12 in all."""
    groups = [group("p0", "rw"), group("p1", "wwww"), group("p2", "rrrr")]
    names = [g.prompt_id for g in groups]
    source = CuresSource(IDS, 0)
    source.observe([r for g in groups for r in g.rollouts])
    divide = neyman_continuations(rate_sigmas(source), minimum=1, screened=4)
    assert divide(names, 30) == [17 - 4, 13 - 4, 12 - 4]
    assert divide(names, 3) == [1, 1, 1]
    assert divide([], 0) == []


def test_sigma_is_of_the_probe_where_there_was_one() -> None:
    """p0 was probed right twice (p = 1/2), p1 never (p = 1/6); what trains later changes the draw alone."""
    gate = make(IDS, 0, probe=4, rollouts=4)
    probed: dict[str, str] = {"p0": "rrww"}
    while (requests := gate.plan(at()))[0].phase == "probe":
        answer_all(gate, requests, [probed.get(r.prompt_id, "wwww") for r in requests])
    expected = pytest.approx([0.5, (1 / 6 * 5 / 6) ** 0.5])
    assert gate.sigmas(["p0", "p1"]) == expected
    late = [replace(r, phase="train") for r in group("p1", "rrrr").rollouts]
    gate.source.observe(late)
    assert mean_rates(gate.source.posterior, ["p1"]) == pytest.approx([0.5])
    assert gate.sigmas(["p0", "p1"]) == expected
    again = make(IDS, 0, probe=4, rollouts=4)
    again.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert again.sigmas(["p0", "p1"]) == expected


def test_a_subset_begins_with_a_new_reference_and_optimiser() -> None:
    settings = config.CurriculumSettings(
        name="cures",
        groups=2,
        rollouts=2,
        cures=config.CuresSettings(subsets=2, subset_steps=3, probe=0),
    )

    def build() -> Any:
        return build_curriculum(settings, facts=Facts(ids=IDS), sampling=SAMPLING, seed=0)

    curriculum, anew = build(), []
    for step in range(9):
        requests = curriculum.plan(at(step=step))
        answer_all(curriculum, requests, ["rw"] * len(requests), version=step)
        curriculum, state = build(), json.loads(json.dumps(curriculum.state_dict()))
        curriculum.load_state_dict(state)
        batch = curriculum.emit(at(step=step))
        assert batch is not None and batch.reset_reference == batch.reset_optimizer
        anew += [step] * batch.reset_reference
        curriculum.updated(at(step=step + 1), Report(metrics={}))
    assert anew == [3, 6]
    assert curriculum.metrics()["curriculum/resets"] == 2
