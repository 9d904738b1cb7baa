from __future__ import annotations

import pytest
from scripted import SAMPLING, at

from whet import config
from whet.curriculum.build import CURRICULA, build_curriculum, check_curriculum
from whet.curriculum.dapo import Dapo
from whet.curriculum.uniform import Uniform
from whet.errors import WhetError


def test_every_name_builds_and_asks() -> None:
    for name in CURRICULA:
        check_curriculum(name)
        settings = config.Curriculum(name=name, rollouts=5)
        curriculum = build_curriculum(settings, ids=["a", "b", "c"], sampling=SAMPLING, seed=1)
        requests = curriculum.plan(at(groups=1))
        assert requests and all(r.sampling == SAMPLING for r in requests)
        assert curriculum.needs == frozenset()


def test_knobs_arrive() -> None:
    settings = config.Curriculum(name="dapo", rollouts=6, max_age=2, look_ahead=0.5, starvation="relax", patience=7)
    gate = build_curriculum(settings, ids=["a", "b"], sampling=SAMPLING, seed=3)
    assert isinstance(gate, Dapo)
    assert (gate.rollouts, gate.max_age, gate.look_ahead) == (6, 2, 0.5)
    assert (gate.starvation, gate.patience, gate.sampling) == ("relax", 7, SAMPLING)
    assert gate.source.seed == 3  # type: ignore[attr-defined]
    assert isinstance(build_curriculum(config.Curriculum(), ids=["a"], sampling=SAMPLING, seed=0), Uniform)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(WhetError, match='no curriculum "unifrom"; did you mean "uniform"'):
        check_curriculum("unifrom")
    with pytest.raises(WhetError, match='did you mean "dapo"'):
        build_curriculum(config.Curriculum(name="DAPO"), ids=["a"], sampling=SAMPLING, seed=0)
    with pytest.raises(WhetError, match="known are dapo, uniform"):
        check_curriculum("zzz")


def test_weights_arrive() -> None:
    curriculum = build_curriculum(
        config.Curriculum(rollouts=2), ids=["a", "b"], sampling=SAMPLING, seed=0, entries=[(1, 3.0), (1, 1.0)]
    )
    asked = [r.prompt_id for r in curriculum.plan(at(groups=8))]
    assert asked.count("a") == 6 and asked.count("b") == 2
