"""Any settings of any curriculum in any world: batches or Starved, in bounds, and numbers that are numbers. And what is
refused with a sentence: settings that cannot work, and data that changed under a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted import SAMPLING, answers, at

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import CURRICULA, Facts, build_curriculum
from whet.errors import Starved, WhetError
from whet.testing.contract import play
from whet.testing.simulator import World
from whet.types import Rollout

SOURCES = ("", "uniform", "cures", "scalingrl", "cures over scalingrl")
STAGE = st.fixed_dictionaries(
    {
        "subset": st.sampled_from(["all", "short", "long"]),
        "by": st.sampled_from(["characters", "responses"]),
        "groups": st.sampled_from([0, 1, 3]),
        "rollouts": st.sampled_from([0, 6]),
        "max_tokens": st.sampled_from([0, 4]),
        "steps": st.integers(1, 2),
        "epochs": st.sampled_from([0.0, 0.5]),
        "truncated": st.sampled_from([0.0, 1.0]),
        "plateau": st.integers(0, 2),
    }
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "source": st.sampled_from(SOURCES),
    "rollouts": st.integers(4, 7),
    "max_age": st.integers(0, 2),
    "look_ahead": st.sampled_from([0.0, 1.0, 2.5]),
    "starvation": st.sampled_from(["raise", "partial", "relax"]),
    "patience": st.integers(1, 6),
    "speed": st.fixed_dictionaries(
        {
            "n_init": st.integers(2, 3),
            "low": st.sampled_from([0.0, 0.3]),
            "high": st.sampled_from([0.6, 1.0]),
        }
    ),
    "cures": st.fixed_dictionaries(
        {
            "tau": st.sampled_from([1e-6, 0.1, 1e6]),
            "minimum": st.integers(2, 4),
            "probe": st.sampled_from([0, 0, 2]),
            "subsets": st.integers(1, 3),
            "subset_steps": st.integers(1, 2),
            "memory": st.sampled_from([0.1, 0.9, 1.0]),
        }
    ),
    "scalingrl": st.fixed_dictionaries(
        {
            "share": st.sampled_from([0.001, 0.18, 1.0]),
            "select": st.sampled_from(
                ["gumbel_topk", "des_threshold", "rel_threshold", "random", "fixed"]
            ),
            "threshold": st.sampled_from([0.01, 0.6, 0.99]),
            "adaptive": st.booleans(),
            "new": st.sampled_from([0.0, 0.5]),
        }
    ),
    "stages": st.lists(STAGE, max_size=3).map(tuple),
}
WORLDS = st.builds(
    World,
    prompts=st.integers(1, 30),
    pass_rates=st.sampled_from([(0.0,), (1.0,), (0.5,), (0.0, 0.1, 0.5, 0.9, 1.0)]),
    groups=st.integers(1, 4),
    updates=st.integers(1, 6),
    slots=st.none() | st.integers(1, 40),
    unjudged=st.sampled_from([0.0, 0.3, 1.0]),
    cut=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 1000),
)


def built(ids: Sequence[str], seed: int, **chosen: Any) -> Curriculum:
    facts = Facts(
        ids=ids,
        characters=[1 + i % 7 for i in range(len(ids))],
        levels=[i % 5 if i % 3 else None for i in range(len(ids))],
        tasks=["t"] * len(ids),
    )
    section = config.CurriculumSettings.model_validate(chosen)
    return build_curriculum(section, facts=facts, sampling=SAMPLING, seed=seed)


@pytest.mark.wide
@pytest.mark.parametrize("name", CURRICULA)
@settings(max_examples=60, deadline=None)
@given(chosen=st.fixed_dictionaries(SETTINGS), world=WORLDS, save_share=st.sampled_from([0.0, 0.3]))
def test_no_setting_starves_silently_loops_or_gives_nan(
    name: str, chosen: dict[str, Any], world: World, save_share: float
) -> None:
    if name == "cures" and "cures" not in chosen["source"]:
        chosen["source"] = ""
    if any(stage["by"] == "responses" for stage in chosen["stages"]):
        chosen["cures"]["subsets"] = 1  # the number of prompts of such a stage is not known
    try:
        built(world.ids, world.seed, name=name, **chosen)
    except (
        WhetError
    ):  # subsets of a moving set, a stage without prompts, ...: refused with a sentence
        assume(False)
    run = play(
        lambda ids, seed: built(ids, seed, name=name, **chosen),
        world,
        save_share=save_share,
        sealed=not save_share,
        epochs=False,
        max_age=chosen["max_age"],
        patience=chosen["patience"] * 3 + world.prompts,
        # a stage may have three groups, and probes are asked beside
    )
    reports = [event[1] for event in run.log if event[0] == "metrics"] + [run.curriculum.metrics()]
    bad = {
        key: value
        for report in reports
        for key, value in report.items()
        if not math.isfinite(value)
    }
    assert not bad
    assert run.batches == world.updates or ("starved", run.batches) in run.log
    undisturbed = world.slots is None and not (world.unjudged or world.cut)
    if name in ("uniform", "cures", "scalingrl", "stages") and undisturbed:
        assert run.batches == world.updates  # they train on whatever comes


# All solved, none solved, rewards of any size


@pytest.mark.parametrize("name", CURRICULA)
@pytest.mark.parametrize(
    ("rate", "advice"), [(0.0, "take easier prompts"), (1.0, "take harder prompts")]
)
@pytest.mark.parametrize("starvation", ["raise", "partial", "relax"])
def test_all_solved_or_none(name: str, rate: float, advice: str, starvation: str) -> None:
    """A filter starves, with a sentence that names what to turn, or relaxes; other gates train on."""
    world = World(prompts=60, pass_rates=(rate,), updates=3)
    chosen = {"name": name, "rollouts": 6, "max_age": 1, "patience": 3, "starvation": starvation}
    run = play(lambda ids, seed: built(ids, seed, **chosen), world, epochs=False, patience=3)
    filters = name in ("dapo", "speed", "all")
    assert run.batches == (0 if filters and starvation != "relax" else 3)
    if filters and starvation == "raise":
        with pytest.raises(Starved, match=advice) as error:
            until_a_batch(built(world.ids, 0, **chosen), "r" if rate else "w")
        knob = "curriculum.rollouts" if name == "dapo" else "curriculum.speed.n_init"
        assert f"raise {knob} or raise curriculum.patience" in str(error.value)


def until_a_batch(curriculum: Curriculum, letter: str) -> None:
    while curriculum.emit(at()) is None:
        for request in curriculum.plan(at()):
            curriculum.observe(answers(request, letter * request.n))


def test_the_sentence_names_the_thresholds_that_were_narrowed() -> None:
    speed = built([f"p{i}" for i in range(60)], 0, name="speed", patience=3, speed={"low": 0.3})
    with pytest.raises(
        Starved, match=r"curriculum\.speed\.n_init, widen curriculum\.speed\.low and high or raise"
    ):
        until_a_batch(speed, "w")


class Paid:
    """A curriculum whose rollouts bring other rewards for the same verdicts."""

    def __init__(self, inner: Curriculum):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.inner.observe(
            [
                replace(r, reward=None if r.reward is None else 7.0 * r.reward - 3.0)
                for r in rollouts
            ]
        )


@pytest.mark.parametrize("name", CURRICULA)
def test_rewards_outside_0_to_1_change_no_plan(name: str) -> None:
    """A judge's score is from 0 to 1; a reward may be anything, and pass rates are of verdicts alone."""
    world = World(updates=6, pass_rates=(0.5, 0.2, 0.9), unjudged=0.1)

    def log(wrap: Any) -> list[Any]:
        run = play(
            lambda ids, seed: wrap(built(ids, seed, name=name, rollouts=6, max_age=1)),
            world,
            epochs=False,
            sealed=False,
        )
        return run.log

    assert log(Paid) == log(lambda inner: inner)


# Refused with a sentence


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (
            {"speed": {"low": 0.6, "high": 0.4}},
            r"speed\.low = 0\.6 must be below speed\.high = 0\.4",
        ),
        ({"speed": {"low": 0.5, "high": 0.5}}, r"must be below"),
        ({"speed": {"low": -0.1}}, "greater than or equal to 0"),
        ({"speed": {"high": 1.5}}, "less than or equal to 1"),
        ({"name": "speed", "rollouts": 4}, r"n_init = 4 leaves none to continue: rollouts = 4"),
        ({"name": "all", "rollouts": 4}, r"n_init = 4 leaves none to continue"),
        ({"cures": {"tau": 0.0}}, "greater than 0"),
        ({"cures": {"memory": 1.1}}, "less than or equal to 1"),
        ({"scalingrl": {"share": 0.0}}, "greater than 0"),
        ({"scalingrl": {"threshold": 1.0}}, "less than 1"),
        ({"patience": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_out_of_bounds(chosen: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        config.CurriculumSettings.model_validate(chosen)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (
            {"name": "speed", "speed": {"low": 0.3, "high": 0.4}},
            "No pass rate of 4 rollouts lies between",
        ),
        (
            {"name": "cures", "rollouts": 3, "cures": {"minimum": 4}},
            r"rollouts = 3 on average cannot give every",
        ),
        ({"name": "cures", "cures": {"subsets": 7}}, "subsets = 7 of 6 prompts leave some empty"),
        ({"name": "all", "cures": {"subsets": 2}}, "a moving set has chosen"),
        ({"name": "scalingrl", "scalingrl": {"new": 0.7, "old": 0.4}}, "at most 1 together"),
        (
            {"name": "stages", "stages": [{"tasks": ["z"], "steps": 1}, {}]},
            'wants prompts of task "z"',
        ),
        (
            {"name": "all", "stages": [{"steps": 1, "rollouts": 4}, {}]},
            "A stage of curriculum.stages does not fit",
        ),
        (
            {"name": "all", "stages": [{"steps": 1}, {"rollouts": 4}]},
            "A stage of curriculum.stages does not fit",
        ),
        (
            {
                "name": "cures",
                "cures": {"subsets": 5},
                "stages": [{"steps": 1}, {"subset": "short"}],
            },
            "subsets = 5 of 3 prompts",
        ),
        ({"name": "dapo", "stages": [{}, {}]}, "would never end"),
    ],
)
def test_settings_that_cannot_be_met(chosen: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WhetError, match=sentence):
        built(list("ABCDEF"), 0, **chosen)


@pytest.mark.parametrize(
    ("name", "source"),
    [*((name, "") for name in CURRICULA), *(("speed", source) for source in SOURCES if source)],
)
def test_data_that_changed_is_refused_at_resume(name: str, source: str) -> None:
    ids = [f"p{i}" for i in range(14)]
    chosen: dict[str, Any] = {"name": name, "source": source, "rollouts": 6}
    curriculum = built(ids, 0, **chosen)
    curriculum.plan(at())
    state = json.loads(json.dumps(curriculum.state_dict()))
    built(list(ids), 0, **chosen).load_state_dict(state)
    for other in (ids[:-1], [*ids, "new"], [*ids[:-1], "new"], ids[::-1]):
        with pytest.raises(WhetError, match="resume with the same"):
            built(other, 0, **chosen).load_state_dict(state)
