from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from scripted import SAMPLING, at

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import CURRICULA, Facts, build_curriculum, find_plan
from whet.curriculum.gate import Dapo, Uniform
from whet.curriculum.rho import CuresSource
from whet.curriculum.scalingrl import ScalingRLSource
from whet.curriculum.speed import Speed
from whet.curriculum.stages import Stages
from whet.errors import WhetError
from whet.testing.contract import check_contract, play
from whet.testing.simulator import World


def test_every_name_builds_and_asks() -> None:
    for name in CURRICULA:
        find_plan(name)
        settings = config.CurriculumSettings(name=name, rollouts=5)
        facts = Facts(
            ids=["a", "b", "c"], characters=[1, 2, 9], tasks=["t"] * 3, levels=[1, None, 3]
        )
        curriculum = build_curriculum(settings, facts=facts, sampling=SAMPLING, seed=1)
        requests = curriculum.plan(at(groups=1))
        assert requests and all(r.sampling.stop_ids == SAMPLING.stop_ids for r in requests)
        assert curriculum.needs == frozenset()


def test_knobs_arrive() -> None:
    settings = config.CurriculumSettings(
        name="dapo", rollouts=6, max_age=2, look_ahead=0.5, starvation="relax", patience=7
    )
    gate = build_curriculum(settings, facts=Facts(ids=["a", "b"]), sampling=SAMPLING, seed=3)
    assert isinstance(gate, Dapo)
    assert (gate.rollouts, gate.max_age, gate.look_ahead) == (6, 2, 0.5)
    assert (gate.starvation, gate.patience, gate.sampling) == ("relax", 7, SAMPLING)
    assert gate.source.seed == 3  # type: ignore[attr-defined]
    assert isinstance(
        build_curriculum(
            config.CurriculumSettings(), facts=Facts(ids=["a"]), sampling=SAMPLING, seed=0
        ),
        Uniform,
    )


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(WhetError, match='no curriculum "unifrom"; did you mean "uniform"'):
        find_plan("unifrom")
    with pytest.raises(WhetError, match='did you mean "dapo"'):
        build_curriculum(
            config.CurriculumSettings(name="DAPO"),
            facts=Facts(ids=["a"]),
            sampling=SAMPLING,
            seed=0,
        )
    with pytest.raises(
        WhetError, match="known are all, cures, dapo, scalingrl, speed, stages, uniform"
    ):
        find_plan("zzz")


def test_weights_arrive() -> None:
    curriculum = build_curriculum(
        config.CurriculumSettings(rollouts=2),
        facts=Facts(ids=["a", "b"], entries=[(1, 3.0), (1, 1.0)]),
        sampling=SAMPLING,
        seed=0,
    )
    asked = [r.prompt_id for r in curriculum.plan(at(groups=8))]
    assert asked.count("a") == 6 and asked.count("b") == 2


@pytest.mark.parametrize("source", ["scalingrl", "cures over scalingrl"])
def test_weights_are_refused_where_they_would_be_passed_over(source: str) -> None:
    facts = Facts(ids=["a", "b"], entries=[(1, 3.0), (1, 1.0)])
    settings = config.CurriculumSettings.model_validate({"source": source})
    with pytest.raises(WhetError, match=r"knows no data\.weight"):
        build_curriculum(settings, facts=facts, sampling=SAMPLING, seed=0)


def test_facts_among_some_of_the_ids() -> None:
    facts = Facts(
        ids=["a", "b", "c", "d"],
        entries=[(1, 2.0), (3, 1.0)],
        levels=[1, 2, 3, 4],
        characters=[5, 6, 7, 8],
    )
    some = facts.among(["b", "d"])
    assert (list(some.ids), list(some.entries)) == (["b", "d"], [(0, 2.0), (2, 1.0)])
    assert (list(some.levels), list(some.characters), list(some.tasks)) == ([2, 4], [6, 8], [])


def test_sources_under_gates() -> None:
    facts = Facts(ids=[f"p{i}" for i in range(50)], characters=range(50))

    def built(**settings: object) -> object:
        return build_curriculum(
            config.CurriculumSettings(rollouts=8, **settings),
            facts=facts,
            sampling=SAMPLING,
            seed=0,
        )  # type: ignore[arg-type]

    speed = built(name="speed", source="scalingrl")
    assert (
        isinstance(speed, Speed)
        and isinstance(speed.source, ScalingRLSource)
        and speed.allocate is None
    )
    both = built(name="speed", source="cures over scalingrl")
    assert (
        isinstance(both, Speed)
        and isinstance(both.source, CuresSource)
        and both.allocate is not None
    )
    assert isinstance(both.source.pool, ScalingRLSource)
    everything = built(name="all")
    assert isinstance(everything, Stages) and isinstance(everything.inner, Speed)
    assert isinstance(everything.inner.source, CuresSource)
    staged = built(name="dapo", stages=[{"subset": "short", "steps": 2}, {}])
    assert isinstance(staged, Stages) and isinstance(staged.inner, Dapo)
    with pytest.raises(WhetError, match="draws its own prompts"):
        built(name="cures", source="uniform")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "max_age"),
    [
        *((name, 1) for name in CURRICULA if name != "all"),
        pytest.param("all", 1, marks=pytest.mark.slow),
        ("stages", 0),
        ("all", 0),
    ],
)
def test_every_name_keeps_the_contract(name: str, max_age: int) -> None:
    def make(ids: Sequence[str], seed: int) -> Curriculum:
        settings = config.CurriculumSettings(name=name, rollouts=6, max_age=max_age)
        facts = Facts(
            ids=ids,
            characters=[i % 7 for i in range(len(ids))],
            levels=[i % 5 for i in range(len(ids))],
        )
        return build_curriculum(settings, facts=facts, sampling=SAMPLING, seed=seed)

    check_contract(make, epochs=name in ("uniform", "dapo", "speed"), max_age=max_age)


@pytest.mark.parametrize("name", ["cures", "all"])
def test_what_a_stage_has_learnt_goes_on_into_the_next_also_through_a_checkpoint(name: str) -> None:
    """The first stage has the short half of 32 prompts, the second all of them."""
    stages = [{"subset": "short", "max_tokens": 8, "steps": 3}, {"subset": "all"}]
    settings = config.CurriculumSettings.model_validate(
        {"name": name, "groups": 4, "rollouts": 4, "speed": {"n_init": 2}, "stages": stages}
    )
    rates = tuple([0.5, 0.0, 0.9, 1.0] * 4 + [0.5] * 16)

    def make(ids: Sequence[str], seed: int) -> Curriculum:
        facts = Facts(ids=ids, characters=[1] * 16 + [99] * 16)
        return build_curriculum(settings, facts=facts, sampling=SAMPLING, seed=seed)

    def after(updates: int, save_share: float) -> tuple[Curriculum, list[tuple[Any, ...]]]:
        world = World(prompts=32, pass_rates=rates, groups=4, updates=updates)
        run = play(make, world, patience=100, save_share=save_share, epochs=False)
        return run.curriculum, run.log

    border, _ = after(3, 0.0)
    assert isinstance(border, Stages) and border.number == 1
    source = border.inner.source  # type: ignore[attr-defined]
    assert isinstance(source, CuresSource) and 0 < len(source.posterior.visited) <= 16
    if source.pool is not None:
        assert isinstance(source.pool, ScalingRLSource) and source.pool.history.visits[:16].any()
    assert after(8, 0.5)[1] == after(8, 0.0)[1]


def test_the_columns_of_the_data_are_not_left_for_the_first_update_to_collect() -> None:
    """A list of a million names takes the collector 8 ms to look at, once: then it is old, and looked at seldom."""
    ids, characters = [f"p{i}" for i in range(5000)], list(range(5000))
    build_curriculum(
        config.CurriculumSettings(name="all"),
        facts=Facts(ids=ids, characters=characters),
        sampling=SAMPLING,
        seed=0,
    )
    young = {id(held) for generation in (0, 1) for held in gc.get_objects(generation)}
    assert not young & {id(ids), id(characters)}


# a value, not a state
VALUES = {"dict", "tuple", "set", "array", "Group", "Batch", "Rollout", "Visit", "Seat"}


def names_of(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every name in a state and in the states inside it."""
    for name, value in (
        state.items() if isinstance(state, dict) and not state.keys() & VALUES else ()
    ):
        yield (*path, name)
        yield from names_of(value, (*path, name))


@pytest.mark.parametrize("name", CURRICULA)
def test_a_state_of_an_older_version_is_refused_in_one_sentence(name: str) -> None:
    def make(ids: Sequence[str], seed: int) -> Curriculum:
        settings = config.CurriculumSettings(name=name, rollouts=6)
        facts = Facts(ids=ids, characters=[i % 7 for i in range(len(ids))])
        return build_curriculum(settings, facts=facts, sampling=SAMPLING, seed=seed)

    world = World(updates=2)
    curriculum = play(make, world, sealed=False, epochs=False).curriculum
    text = json.dumps(curriculum.state_dict())
    paths = list(names_of(json.loads(text)))
    assert len(paths) > 10
    for *path, last in paths:
        whole = json.loads(text)
        state = whole
        for step in path:
            state = state[step]
        del state[last]
        with pytest.raises(WhetError, match=f"^The checkpoint was written without {last}, "):
            make(world.ids, world.seed).load_state_dict(whole)
