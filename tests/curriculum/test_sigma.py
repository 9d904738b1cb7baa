"""Sigma of the gradient: what the learner reports, through every wrapper, to what is asked next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, answer_all, answers, asks, at
from test_contract import WORLDS

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.cures import Cures, GradientSigmas, Scored
from whet.curriculum.rho import CuresSource
from whet.curriculum.stages import Stages
from whet.testing.contract import WORLDS as ALL_WORLDS
from whet.testing.contract import check_contract, check_cost, check_world, play
from whet.testing.simulator import World
from whet.types import Report

IDS = [f"p{i}" for i in range(4)]


def build(
    ids: Sequence[str], seed: int = 0, sigma: str = "gradient", cures: Any = (), **sets: Any
) -> Curriculum:
    chosen = {"name": "cures", "rollouts": 6, "cures": {"sigma": sigma, **dict(cures)}, **sets}
    facts = Facts(ids=ids, characters=[i % 7 for i in range(len(ids))], tasks=["t"] * len(ids))
    return build_curriculum(
        config.CurriculumSettings.model_validate(chosen), facts=facts, sampling=SAMPLING, seed=seed
    )


def cures(ids: Sequence[str] = IDS, source: dict[str, Any] | None = None, **knobs: Any) -> Scored:
    made = CuresSource(ids, 0, **(source or {}))
    sigmas = GradientSigmas(made)
    return Scored(Cures(made, sigmas=sigmas, sampling=SAMPLING, **{"rollouts": 8, **knobs}), sigmas)


def report(scores: dict[tuple[int, int], Any]) -> Report:
    return Report(
        metrics={},
        signals={key: {"score": np.array(score, np.float32)} for key, score in scores.items()},
    )


def one_update(curriculum: Curriculum, large: str) -> dict[str, int]:
    """Four prompts, half right; the scores of one are four times as long. What each was asked for then."""
    requests = curriculum.plan(at(groups=4))
    answer_all(curriculum, requests, [("rw" * r.n)[: r.n] for r in requests])  # type: ignore[arg-type]
    batch = curriculum.emit(at(groups=4))
    assert batch is not None
    scores = {
        rollout.key: [
            (4.0 if group.prompt_id == large else 1.0) * (1 - 2 * (rollout.index // 2 % 2))
        ]
        for group in batch.groups
        for rollout in group.rollouts
    }
    curriculum.updated(at(step=1, groups=4), report(scores))
    return dict(asks(requests))


# The contract


@pytest.mark.slow
def test_the_contract() -> None:
    check_contract(lambda ids, seed: build(ids, seed), epochs=False, rollouts=6, max_age=0)
    for world in ALL_WORLDS[1:4]:
        check_world(
            lambda ids, seed: build(ids, seed, name="all", max_age=1),
            world,
            epochs=False,
            max_age=1,
        )


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(world=WORLDS, name=st.sampled_from(["cures", "all"]), share=st.floats(0, 1))
def test_the_contract_in_any_world(world: World, name: str, share: float) -> None:
    check_world(
        lambda ids, seed: build(ids, seed, name=name, max_age=1, starvation="partial"),
        world,
        save_share=share,
        epochs=False,
        max_age=1,
        patience=60,
    )


def test_work_does_not_grow_with_the_number_of_prompts() -> None:
    check_cost(lambda ids, seed: build(ids, seed), 1_000, 50_000, epochs=False)


def test_scores_change_what_is_asked() -> None:
    """Or the suite above would prove nothing of them."""
    world = World(prompts=8, updates=6, pass_rates=(0.5,))
    plain, scored = (
        play(lambda ids, _: build(ids, sigma=s), world, epochs=False)  # noqa: B023
        for s in ("rate", "gradient")
    )
    assert plain.log != scored.log
    metrics = scored.curriculum.metrics()
    assert metrics["curriculum/rollouts_moved"] > 0
    # standard normal in four dimensions
    assert metrics["curriculum/score_right"] == pytest.approx(4, rel=0.6)


# What is done with scores


def test_rollouts_go_where_gradients_differ() -> None:
    """All four are solved every other time, their scores of norms 4, 1, 1, 1 and no gap.

    Mean squares 16, 1, 1, 1 are 4.75 in the mean, so 8.125 and 3.625 are believed of them: sigma as 1.497 to 1.
    """
    curriculum = cures()
    assert one_update(curriculum, "p2") == dict.fromkeys(IDS, 8)
    assert curriculum.metrics()["curriculum/rollouts_moved"] == 0
    second = dict(asks(curriculum.plan(at(step=1, groups=4))))
    assert second == {"p0": 7, "p1": 7, "p2": 11, "p3": 7}  # of 32: 10.65, and 7.12 for the others
    assert curriculum.metrics()["curriculum/rollouts_moved"] == pytest.approx(
        1.49714 / 4.49714 - 1 / 4, rel=1e-4
    )
    assert curriculum.metrics()["curriculum/score_right"] == pytest.approx((16 + 3) / 4)


def test_the_probability_of_a_draw_is_the_rates_all_the_same() -> None:
    plain, scored = build(IDS, sigma="rate", rollouts=8), cures()
    one_update(scored, "p2"), one_update(plain, "p2")
    drawn = [[r.prompt_id for r in c.plan(at(step=1, groups=4))] for c in (plain, scored)]
    assert drawn[0] == drawn[1]


def test_without_reports_it_is_the_pass_rates_form() -> None:
    plain, scored = build(IDS, sigma="rate"), build(IDS)
    for step in range(4):
        asked = [c.plan(at(step=step, groups=4)) for c in (plain, scored)]
        assert asks(asked[0]) == asks(asked[1])
        for c, requests in zip((plain, scored), asked, strict=True):
            for r in requests:
                c.observe(answers(r, ("rww" * r.n)[: r.n], version=step))
            assert c.emit(at(step=step, groups=4)) is not None
            c.updated(at(step=step + 1, groups=4), Report(metrics={}))


def test_verdicts_part_the_scores_and_missing_ones_are_passed_over() -> None:
    curriculum = cures(rollouts=4)
    requests = curriculum.plan(at(groups=1))
    (request,) = requests
    curriculum.observe(answers(request, "rwuw"))
    curriculum.emit(at(groups=1))
    g = request.group_id
    curriculum.updated(
        at(step=1, groups=1),
        report({(g, 0): [3.0], (g, 1): [1.0], (g, 2): [50.0], (g + 9, 0): [70.0]}),
    )
    rows = curriculum.sigmas.source.posterior.ids.rows([request.prompt_id])
    assert curriculum.sigmas.moments.of(rows).tolist() == [[9, 1, 0]]
    curriculum.updated(at(step=2, groups=1), report({(g, 0): [90.0]}))  # of no batch
    assert curriculum.sigmas.moments.of(rows).tolist() == [[9, 1, 0]]


def test_a_save_between_batch_and_report_loses_nothing() -> None:
    first = cures()
    requests = first.plan(at(groups=4))
    answer_all(first, requests, ["rrrrwwww"] * 4)  # type: ignore[arg-type]
    first.emit(at(groups=4))
    second = cures()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    scores = {(r.group_id, i): [float(i), float(r.group_id)] for r in requests for i in range(8)}
    for curriculum in (first, second):
        curriculum.updated(at(step=1, groups=4), report(scores))
    assert first.state_dict() == second.state_dict()
    assert len(first.sigmas.moments.visited) == 4
    assert first.plan(at(step=1, groups=4)) == second.plan(at(step=1, groups=4))


def test_a_new_subset_forgets_moments_as_it_forgets_verdicts() -> None:
    curriculum = cures([f"p{i}" for i in range(8)], {"subsets": 2, "subset_steps": 1})
    sizes = one_update(curriculum, "p2")
    assert len(curriculum.sigmas.moments.visited) == len(sizes) == 4
    common = curriculum.sigmas.moments.common.tolist()
    curriculum.plan(at(step=1, groups=4))
    assert len(curriculum.sigmas.moments.visited) == 0
    assert curriculum.sigmas.moments.common.tolist() == common, "what is common is the policy's"


# Wrappers


def test_needs_reach_the_learner_through_every_wrapper() -> None:
    ids = [f"p{i}" for i in range(40)]
    whole = build(ids, name="all")
    assert isinstance(whole, Stages) and isinstance(whole.inner, Scored)
    assert whole.needs == {"score"}
    assert build(ids, name="speed", source="cures").needs == {"score"}
    assert build(ids, name="all", sigma="rate").needs == frozenset()
    assert build(ids, name="uniform", source="cures").needs == frozenset(), (
        "nothing is divided there"
    )
    assert build(ids, name="speed").needs == frozenset()


def test_scores_divide_the_continuations_of_speed() -> None:
    curriculum = build(IDS, name="speed", source="cures", rollouts=12, speed={"n_init": 4})
    assert isinstance(curriculum, Scored)
    requests = curriculum.plan(at(groups=2))
    assert {r.phase for r in requests} == {"screen"}
    right, wrong = np.array([[1.0], [-1.0]]), np.array([[1.0], [-1.0]])
    curriculum.sigmas.learn(
        [(p, right * size, wrong * size) for p, size in zip(IDS, (1, 4, 1, 1), strict=True)]
    )
    verdicts = ["rrww" if r.prompt_id in ("p0", "p1") else "wwww" for r in requests]
    answer_all(curriculum, requests, verdicts)  # type: ignore[arg-type]
    more = {r.prompt_id: r.n for r in curriculum.plan(at(groups=2)) if r.phase == "continue"}
    assert more == {"p0": 6, "p1": 10}  # of 16, 1 to 1.497 as above
