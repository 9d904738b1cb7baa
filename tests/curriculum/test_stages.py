from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, Screening, answers, asks, at, cut, held_tokens, rollout, trained

from whet import config
from whet.config import Stage
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.gate import Dapo, Gate, Uniform
from whet.curriculum.groups import GroupBook
from whet.curriculum.source import UniformSource
from whet.curriculum.stages import Stages, named_in, stage_sampling, stage_settings
from whet.errors import Mastered, Starved, WhetError
from whet.recipe import load_config
from whet.testing.contract import check_contract, check_cost, check_world, play
from whet.testing.simulator import World
from whet.types import Batch, Report, Request

LETTERS = list("ABCDEF")
LENGTHS = [10, 10, 10, 40, 40, 40]  # mean 25
DONE = Report(metrics={})


def screening(*args: Any, rollouts: int, **knobs: Any) -> Screening:
    return Screening(*args, rollouts=rollouts, more=rollouts + 1, **knobs)


def stages(
    list_of: Sequence[Stage],
    ids: Sequence[str] = LETTERS,
    *,
    gate: Any = Uniform,
    seed: int = 0,
    characters: Sequence[int] = LENGTHS,
    tasks: Sequence[str] = (),
    **knobs: Any,
) -> Stages:
    def make(stage: Stage, chosen: Sequence[str], first: int) -> Gate:
        source = UniformSource(chosen, seed + first)
        rollouts = stage.rollouts or knobs.get("rollouts", 2)
        inner = gate(
            source, sampling=stage_sampling(stage, SAMPLING), **{**knobs, "rollouts": rollouts}
        )
        inner.book = GroupBook(next_id=first)
        return inner

    return Stages(list_of, make, ids=ids, characters=characters, tasks=tasks)


def step(
    curriculum: Stages, number: int, letters: str = "rw", groups: int = 2, **kind: Any
) -> tuple[list[Request], Batch]:
    """One update; every request is answered by `letters`."""
    asked: list[Request] = []
    while (batch := curriculum.emit(at(step=number, groups=groups))) is None:
        requests = curriculum.plan(at(step=number, groups=groups))
        asked += requests
        for request in requests:
            came = answers(request, letters, version=number)
            curriculum.observe([replace(r, **kind) for r in came])
    curriculum.updated(at(step=number + 1, groups=groups), DONE)
    return asked, batch


def test_a_stage_sets_prompts_limit_batch_and_coefficients() -> None:
    first = Stage(
        subset="short", max_tokens=8, groups=3, rollouts=4, temperature=0.5, kl_coef=0.1, steps=1
    )
    first = first.model_copy(update={"minibatches": 2})
    curriculum = stages(
        [first, Stage(subset="long", entropy_coef=0.01, reset_optimizer=True, steps=2), Stage()]
    )
    asked, batch = step(curriculum, 0, "rwrw")
    assert sorted(asks(asked)) == [("A", 4), ("B", 4), ("C", 4)]
    assert {(r.sampling.max_tokens, r.sampling.temperature) for r in asked} == {(8, 0.5)}
    assert (batch.stage, batch.kl_coef, batch.entropy_coef, batch.minibatches) == (0, 0.1, None, 2)
    assert not batch.reset_reference and not batch.reset_optimizer  # nothing to reset yet

    asked, batch = step(curriculum, 1)
    assert {r.prompt_id for r in asked} < {"D", "E", "F"}
    assert [r.group_id for r in asked] == [3, 4]  # goes on counting
    assert {r.sampling for r in asked} == {SAMPLING}
    assert (batch.stage, batch.kl_coef, batch.entropy_coef, batch.minibatches) == (
        1,
        None,
        0.01,
        None,
    )
    assert batch.reset_reference and batch.reset_optimizer
    _, batch = step(curriculum, 2)
    assert not batch.reset_reference and not batch.reset_optimizer  # only its first

    _, batch = step(curriculum, 3)
    assert batch.stage == 2 and batch.reset_reference and not batch.reset_optimizer
    assert curriculum.metrics()["curriculum/stage_prompts"] == 6


def test_a_coefficient_of_zero_is_a_setting_of_its_own() -> None:
    names = ("groups", "minibatches", "temperature", "kl_coef", "entropy_coef")
    assert named_in(Stage(kl_coef=0.0, groups=2), names) == ["groups", "kl_coef"] and not named_in(
        Stage(), names
    )


def test_a_reference_may_be_kept() -> None:
    curriculum = stages([Stage(steps=1), Stage(reset_reference=False)])
    step(curriculum, 0)
    _, batch = step(curriculum, 1)
    assert batch.stage == 1 and not batch.reset_reference


def ends_after(curriculum: Stages, most: int = 60, **kind: Any) -> int:
    for number in range(most):
        step(curriculum, number, **kind)
        if curriculum.number:
            return number + 1
    return 0


def test_ends_after_its_steps() -> None:
    assert ends_after(stages([Stage(steps=3), Stage()])) == 3


def test_ends_after_its_epochs() -> None:
    # two of six prompts an update: 1.5 epochs are 4.5 updates
    assert ends_after(stages([Stage(epochs=1.5), Stage()])) == 5
    # two of three
    assert ends_after(stages([Stage(subset="short", epochs=2), Stage()])) == 3


def test_a_prompt_asked_again_counts_once_to_an_epoch() -> None:
    curriculum = stages([Stage(epochs=0.5), Stage()])
    requests = curriculum.plan(at())
    curriculum.observe([cut(requests[0], 0), *answers(requests[1], "rw")])
    again = curriculum.plan(at())
    assert asks(again) == asks(requests[:1])
    curriculum.observe(answers(again[0], "rw"))
    assert trained(curriculum.emit(at())) == [request.prompt_id for request in requests]
    curriculum.updated(at(step=1), DONE)
    assert curriculum.metrics()["curriculum/stage_epoch"] == pytest.approx(2 / 6)  # not 3 / 6
    assert curriculum.number == 0


def test_ends_when_few_are_truncated_after_a_quarter_epoch() -> None:
    ids = [f"p{i}" for i in range(24)]
    curriculum = stages([Stage(truncated=0.1), Stage()], ids, characters=[1] * 24)
    assert ends_after(curriculum) == 3  # none ever was: 6 of 24 prompts
    curriculum = stages([Stage(truncated=0.1), Stage()], ids, characters=[1] * 24)
    step(curriculum, 0, finish="length")
    assert curriculum.metrics()["curriculum/truncated_ema"] == 1
    for number in range(1, 23):
        step(curriculum, number)
        assert curriculum.number == 0
    # (19/21)^22 = 0.1106, (19/21)^23 = 0.1001, (19/21)^24 = 0.0905
    assert curriculum.metrics()["curriculum/truncated_ema"] == pytest.approx((19 / 21) ** 22)
    step(curriculum, 23)
    assert curriculum.number == 0
    step(curriculum, 24)
    assert curriculum.number == 1
    assert curriculum.metrics()["curriculum/truncated_ema"] == 0  # a new stage begins anew


def test_does_not_end_while_many_are_truncated() -> None:
    assert ends_after(stages([Stage(truncated=0.1), Stage()]), finish="length") == 0


def test_ends_on_a_plateau() -> None:
    # the reward stands still from the first update: four more, and it gained nothing over four
    assert ends_after(stages([Stage(plateau=4), Stage()])) == 5


def test_the_first_limit_that_is_met_ends_it() -> None:
    assert ends_after(stages([Stage(plateau=4, steps=3, epochs=10), Stage()])) == 3


def test_the_last_stage_never_ends() -> None:
    curriculum = stages([Stage(steps=1), Stage(steps=1, epochs=0.1, plateau=1)])
    for number in range(6):
        step(curriculum, number)
    assert curriculum.metrics()["curriculum/stage"] == 1
    assert curriculum.metrics()["curriculum/stage_step"] == 5


def test_what_the_old_stage_still_held_is_dropped_and_counted() -> None:
    curriculum = stages([Stage(steps=1), Stage()], max_age=3)
    first = curriculum.plan(at(free=8))  # look-ahead: four groups, two of them for the next batch
    assert len(first) == 4
    for request in first[:3]:
        curriculum.observe(answers(request, "rw"))
    curriculum.observe([rollout(first[3], 0, "r")])
    assert trained(curriculum.emit(at())) == [r.prompt_id for r in first[:2]]
    assert curriculum.holds() == {2, 3}
    curriculum.updated(at(step=1), DONE)
    assert curriculum.holds() == set()  # one was ready, one half there
    curriculum.observe([rollout(first[3], 1, "w")])
    metrics = curriculum.metrics()
    assert (metrics["curriculum/border"], metrics["curriculum/late"]) == (2, 1)
    assert (metrics["curriculum/tokens_kept"], metrics["curriculum/tokens_dropped"]) == (40, 40)
    assert metrics["curriculum/asked"] == 4
    second = curriculum.plan(at(step=1))
    assert [request.group_id for request in second] == [4, 5]


def test_by_responses_splits_by_what_was_seen() -> None:
    curriculum = stages([Stage(steps=3), Stage(subset="long", by="responses")])
    for number in range(3):
        while curriculum.emit(at(step=number)) is None:
            for request in curriculum.plan(at(step=number)):
                length = 30 if request.prompt_id in "ABD" else 5  # not as the characters say
                came = answers(request, "rw", version=number)
                curriculum.observe([replace(r, length=length) for r in came])
        curriculum.updated(at(step=number + 1), DONE)
    assert curriculum.number == 1
    assert [LETTERS[row] for row in curriculum.rows] == ["A", "B", "D"]
    state = json.loads(json.dumps(curriculum.state_dict()))
    again = stages([Stage(steps=3), Stage(subset="long", by="responses")])
    again.load_state_dict(state)
    assert again.rows.tolist() == curriculum.rows.tolist()  # as they were at the border
    assert again.plan(at(step=3)) == curriculum.plan(at(step=3))


def test_a_split_by_responses_that_leaves_nothing_takes_all() -> None:
    curriculum = stages([Stage(epochs=1), Stage(subset="long", by="responses")])
    assert ends_after(curriculum) == 3
    assert curriculum.metrics()["curriculum/stage_prompts"] == 6


def test_by_task_the_mean_is_that_of_the_tasks() -> None:
    tasks = ["x", "x", "y", "y", "y", "x"]
    list_of = [Stage(tasks=("x",), subset="short", steps=1), Stage(tasks=("y",), subset="long")]
    curriculum = stages(list_of, tasks=tasks, characters=[10, 20, 1, 2, 90, 90])
    assert [LETTERS[row] for row in curriculum.rows] == ["A", "B"]
    step(curriculum, 0)
    assert [LETTERS[row] for row in curriculum.rows] == ["E"]


@pytest.mark.parametrize(
    ("list_of", "sentence"),
    [
        ([Stage(tasks=("z",))], r'stages\.0 wants prompts of task "z", but the data has none'),
        (
            [Stage(steps=1), Stage(subset="long")],
            r'stages\.1 has no prompts: none is "long" by characters',
        ),
        ([Stage(), Stage()], r"stages\.0 would never end"),
    ],
)
def test_refused_before_it_runs(list_of: list[Stage], sentence: str) -> None:
    with pytest.raises(WhetError, match=sentence):
        stages(list_of, tasks=["x"] * 6, characters=[7] * 6)


def test_other_data_or_stages_are_refused_at_resume() -> None:
    state = stages([Stage(steps=1), Stage()]).state_dict()
    with pytest.raises(WhetError, match="in 2 stages, not the 1 given now"):
        stages([Stage()]).load_state_dict(state)
    with pytest.raises(WhetError, match="other prompts than the 5 given now"):
        stages([Stage(steps=1), Stage()], LETTERS[:5], characters=LENGTHS[:5]).load_state_dict(
            state
        )
    with pytest.raises(WhetError, match="other prompts"):
        stages([Stage(steps=1), Stage()], list("GHIJKL")).load_state_dict(state)


def test_settings_of_a_stage() -> None:
    settings_ = config.CurriculumSettings(name="speed", rollouts=24, groups=16)
    assert stage_settings(Stage(), settings_) == settings_
    assert stage_settings(Stage(groups=3, rollouts=8), settings_).groups == 3
    with pytest.raises(WhetError, match="n_init = 4 leaves none to continue: rollouts = 4"):
        stage_settings(Stage(rollouts=4), settings_)


TABLE = {"uniform": Uniform, "dapo": Dapo, "screening": screening}
THREE = (
    Stage(subset="short", max_tokens=8, steps=2),
    Stage(subset="long", by="responses", epochs=0.3, groups=2),
    Stage(plateau=2),
)


def world_stages(list_of: Sequence[Stage], gate: Any, **knobs: Any) -> Any:
    def make(ids: Sequence[str], seed: int) -> Stages:
        characters = np.random.default_rng(seed).integers(1, 50, len(ids)).tolist()
        tasks = ["odd" if i % 2 else "even" for i in range(len(ids))]
        return stages(
            list_of, ids, gate=gate, seed=seed, characters=characters, tasks=tasks, **knobs
        )

    return make


@pytest.mark.wide
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("max_age", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_contract(name: str, max_age: int) -> None:
    make = world_stages(THREE, TABLE[name], max_age=max_age, rollouts=4)
    budget = None if name == "screening" else 4  # a fixed one is exact in every stage
    check_contract(make, epochs=False, max_age=max_age, rollouts=budget)


@pytest.mark.parametrize("name", ["stages", "cures", "scalingrl", "all"])
def test_a_border_looks_at_no_prompt_by_itself(name: str) -> None:
    """Four updates with three borders: the steps of the interpreter do not grow with the number of prompts."""

    def make(ids: Sequence[str], seed: int) -> Any:
        list_of = [
            {"subset": "short", "steps": 1},
            {"tasks": ["odd"], "steps": 1},
            {"subset": "long", "steps": 1},
            {},
        ]
        chosen = config.CurriculumSettings.model_validate(
            {"name": name, "rollouts": 6, "stages": list_of}
        )
        facts = Facts(
            ids=ids,
            characters=[1 + i % 5 for i in range(len(ids))],
            tasks=[("even", "odd")[i % 2] for i in range(len(ids))],
        )
        return build_curriculum(chosen, facts=facts, sampling=SAMPLING, seed=seed)

    check_cost(make, epochs=False)


STAGE = st.builds(
    Stage,
    subset=st.sampled_from(["all", "short", "long"]),
    by=st.just("responses"),  # by characters a subset may be empty, which is refused
    tasks=st.sampled_from([(), ("even",), ("odd", "even")]),
    max_tokens=st.sampled_from([0, 1, 12]),
    groups=st.sampled_from([0, 1, 3]),
    rollouts=st.sampled_from([0, 2, 5]),
    steps=st.integers(0, 3),
    epochs=st.sampled_from([0.0, 0.2, 1.0]),
    truncated=st.sampled_from([0.0, 0.1, 1.0]),
    plateau=st.integers(1, 3),
)
WORLDS = st.builds(
    World,
    prompts=st.integers(2, 24),
    pass_rates=st.sampled_from([(0.5,), (0.5, 0.0, 1.0, 0.3), (0.0,)]),
    groups=st.integers(1, 4),
    updates=st.integers(2, 7),
    slots=st.none() | st.integers(1, 40),
    unjudged=st.sampled_from([0.0, 0.2]),
    cut=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 1000),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Stage . ends early")
@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=25, deadline=None)
@given(
    world=WORLDS,
    list_of=st.lists(STAGE, min_size=1, max_size=5),
    max_age=st.integers(0, 2),
    starvation=st.sampled_from(["raise", "relax", "partial"]),
    share=st.sampled_from([0.1, 1.0]),
)
def test_any_stages_in_any_world(
    name: str, world: World, list_of: list[Stage], max_age: int, starvation: str, share: float
) -> None:
    make = world_stages(list_of, TABLE[name], max_age=max_age, starvation=starvation, patience=4)
    # a hopeless stage ends within an update, and the next one has its own patience
    most = 4 * 3 * len(list_of)
    check_world(make, world, save_share=share, epochs=False, max_age=max_age, patience=most)
    run = play(make, world, epochs=False, sealed=False, patience=most)
    metrics = {
        key.removeprefix("curriculum/"): value for key, value in run.curriculum.metrics().items()
    }
    held = held_tokens(run.curriculum.inner)  # type: ignore[attr-defined]
    assert metrics["tokens_kept"] + metrics["tokens_dropped"] + held == run.simulator.tokens


PAPERS = Path(__file__).parents[2] / "recipes" / "papers"
PREVIEW = [("short", 8192, 128, 8, 160), ("all", 16384, 64, 8, 590), ("long", 24576, 64, 8, 230)]


@pytest.mark.parametrize(
    ("name", "table", "last"),
    [
        ("fastcurl-preview", [*PREVIEW, ("all", 16384, 64, 16, 0)], (None, None)),
        (
            "fastcurl-v2",
            [*PREVIEW, ("all", 16384, 64, 16, 580), ("all", 16384, 64, 16, 0)],
            (0.0, 1e-6),
        ),
        (
            "fastcurl-v3",
            [*PREVIEW, ("all", 16384, 64, 16, 580), ("all", 16384, 64, 16, 0)],
            (0.0, 0.0),
        ),
        (
            "deepscaler",
            [("all", 8192, 128, 8, 1040), ("all", 16384, 128, 16, 480), ("all", 24576, 128, 16, 0)],
            (None, None),
        ),
    ],
)
def test_the_published_stages(
    name: str, table: list[tuple[Any, ...]], last: tuple[float | None, float | None]
) -> None:
    recipe = load_config(PAPERS / f"{name}.toml")
    found = recipe.curriculum.stages
    assert [(s.subset, s.max_tokens, s.groups, s.rollouts, s.steps) for s in found] == table
    assert (found[-1].kl_coef, found[-1].entropy_coef) == last
    steps = [s.groups // (64 * (s.minibatches or recipe.learn.minibatches)) for s in found]
    assert steps == [1] * len(found), "every optimiser step is on 64 prompts, as published"
    assert (recipe.learn.lr, recipe.learn.kl_coef, recipe.rollout.temperature) == (1e-6, 0.001, 0.6)
    assert len(recipe.text.prompt_suffix) == 70
    stages(found)  # every stage has an end and prompts


# A limit that truncates everything


def hopeless(**settings: Any) -> Stages:
    """SPEED inside a first stage of half the limit, unless other stages are given."""
    half = Stage(subset="short", max_tokens=SAMPLING.max_tokens // 2, truncated=0.1, epochs=1.0)
    settings = {"stages": (half, Stage()), **settings}
    facts = Facts(ids=[f"p{i}" for i in range(40)], characters=[10] * 20 + [40] * 20)
    built = build_curriculum(
        config.CurriculumSettings(
            name="all", groups=2, rollouts=4, speed=config.SpeedSettings(n_init=2), **settings
        ),
        facts=facts,
        sampling=SAMPLING,
        seed=0,
    )
    assert isinstance(built, Stages)
    return built


def truncate(
    curriculum: Stages, requests: Sequence[Request], finish: Any = "length", letter: str = "w"
) -> None:
    for request in requests:
        curriculum.observe(
            [replace(r, finish=finish) for r in answers(request, letter * request.n)]
        )


def test_a_stage_that_truncates_everything_ends_by_itself_and_says_so() -> None:
    curriculum, half = hopeless(), SAMPLING.max_tokens // 2
    while curriculum.without_result[1] < 16:
        assert curriculum.emit(at()) is None
        asked = curriculum.plan(at())
        assert {r.sampling.max_tokens for r in asked} == {half}
        truncate(curriculum, asked)
    again = hopeless()
    again.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    for one in (curriculum, again):
        assert one.emit(at()) is None
        with pytest.warns(
            UserWarning,
            match=rf"Stage 0 ends early: .* truncated at its limit of {half} tokens .*Stage 1",
        ):
            wider = one.plan(at())
        assert {r.sampling.max_tokens for r in wider} == {SAMPLING.max_tokens}
        assert one.metrics()["curriculum/stage"] == 1


@pytest.mark.parametrize(("finish", "letter"), [("stop", "w"), ("length", "r"), ("cut", "w")])
def test_a_stage_goes_on_where_responses_end_or_are_right(finish: str, letter: str) -> None:
    curriculum = hopeless()
    for number in range(6):
        truncate(curriculum, curriculum.plan(at(step=number)), finish, letter)
    assert curriculum.metrics()["curriculum/stage"] == 0


def test_a_starving_stage_names_its_limit() -> None:
    """The last stage has no wider one to go to."""
    curriculum = hopeless(stages=(Stage(max_tokens=8),), patience=2)
    with pytest.raises(
        Starved, match=r"truncated at its limit of 8 tokens \(curriculum\.stages\.0\.max_tokens\)"
    ):
        for _ in range(20):
            truncate(curriculum, curriculum.plan(at()))
            curriculum.emit(at())


@pytest.mark.parametrize(
    ("list_of", "mastered"),
    [
        ([Stage()], True),
        ([Stage(max_tokens=8, steps=9), Stage()], True),
        ([Stage(subset="short", steps=9), Stage()], False),
        ([Stage(subset="short", steps=9), Stage(subset="long")], False),
    ],
)
def test_a_solved_stage_ends_a_training_well_where_no_other_prompts_are_to_come(
    list_of: list[Stage], mastered: bool
) -> None:
    with pytest.raises(Starved, match="almost all prompts are solved") as error:
        step(stages(list_of, gate=Dapo, patience=2), 0, "rr")
    assert isinstance(error.value, Mastered) == mastered


def test_all_on_few_prompts_has_no_prompt_twice_in_a_batch() -> None:
    facts = Facts(ids=[f"p{i}" for i in range(9)], characters=[10] * 9)
    settings = config.CurriculumSettings(
        name="all", groups=4, rollouts=4, speed=config.SpeedSettings(n_init=2), stages=(Stage(),)
    )
    curriculum = build_curriculum(settings, facts=facts, sampling=SAMPLING, seed=0)
    for number in range(6):
        while (batch := curriculum.emit(at(step=number, groups=4))) is None:
            for request in curriculum.plan(at(step=number, groups=4)):
                letters = (
                    "wwww"
                    if request.prompt_id in ("p0", "p1", "p2")
                    else "rw" + "r" * (request.n - 2)
                )
                curriculum.observe(answers(request, letters[: request.n], version=number))
        curriculum.updated(at(step=number + 1, groups=4), DONE)
        names = [group.prompt_id for group in batch.groups]
        assert len(set(names)) == len(names) == 4
