import json
from pathlib import Path

import numpy as np
import pytest
from curriculum_bench import curriculum_bench, rollouts_to
from toy import MIXES, RATE, Toy, make_rollout, play

from whet import config
from whet.curriculum.build import CURRICULA
from whet.types import Batch, Group, Request, Sampling


def group(toy: Toy, prompt: str, verdicts: list[bool]) -> Group:
    request = Request(prompt_id=prompt, group_id=0, n=len(verdicts), sampling=Sampling(max_tokens=400))
    return Group(
        prompt_id=prompt, group_id=0, rollouts=tuple(make_rollout(request, i, v, 9, 0) for i, v in enumerate(verdicts))
    )


def test_a_step_is_the_policy_gradient_by_hand() -> None:
    """Right and wrong at p = 1/2: advantages 1 and -1, scores 1/2 and -1/2, so a step of 1/2 along the features."""
    toy = Toy("few", 0, prompts=3)
    toy.offsets[1] = 0.0
    assert toy.learn(Batch(groups=(group(toy, "1", [True, False]),))) == 1.0
    assert toy.theta == pytest.approx(RATE * 0.5 * toy.facing[1])


def test_groups_that_agree_move_nothing() -> None:
    toy = Toy("few", 0, prompts=3)
    batch = Batch(groups=(group(toy, "0", [True] * 4), group(toy, "1", [False] * 4)))
    assert toy.learn(batch) == 0.0 and not toy.theta.any()


def test_the_mixes_are_what_they_say() -> None:
    for mix in MIXES:
        chances = Toy(mix, 0).chance(np.arange(4000))
        signal = float(np.mean(1 - chances**16 - (1 - chances) ** 16))
        assert (signal < 0.45) == (mix == "few"), signal


def test_rollouts_to_a_level() -> None:
    curve = [(0, 0.1), (10, 0.5), (20, 0.4), (30, 0.7)]
    assert rollouts_to(curve, 0.5) == 10 and rollouts_to(curve, 0.6) == 30 and rollouts_to(curve, 0.9) is None


def test_training_helps_and_repeats() -> None:
    settings = config.CurriculumSettings(name="speed", groups=16, rollouts=16)
    toys = [Toy("many", 3, prompts=500) for _ in range(2)]
    one, other = (play(settings, toy, lambda toy=toy: toy.rollouts / 6000)[0] for toy in toys)  # type: ignore[misc]
    assert one == other
    assert one[-1]["accuracy"] > one[0]["accuracy"] + 0.1
    assert one[-1]["rollouts"] >= 6000 and one[-1]["curriculum/trained"] == 16 * (len(one) - 1)


def test_every_curriculum_is_measured_and_written(tmp_path: Path) -> None:
    result = curriculum_bench(tmp_path, mix="many", seeds=1, budget=1500)
    assert json.loads((tmp_path / "curriculum_many.json").read_text()) == json.loads(json.dumps(result))
    assert result["curricula"].keys() == CURRICULA.keys()
    assert all(found["updates"][0] > 0 for found in result["curricula"].values())
