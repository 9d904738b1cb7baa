from __future__ import annotations

from collections.abc import Sequence

from scripted import SAMPLING, answer_all, at

from whet.config import CurriculumSettings
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.reset import Reset
from whet.testing.contract import check_contract
from whet.types import Report


def make(ids: Sequence[str], seed: int) -> Reset:
    """CurES over two subsets of the prompts, each for two updates."""
    cures = {"subsets": 2, "subset_steps": 2}
    settings = CurriculumSettings.model_validate({"name": "cures", "rollouts": 2, "cures": cures})
    built = build_curriculum(settings, facts=Facts(ids=list(ids)), sampling=SAMPLING, seed=seed)
    assert isinstance(built, Reset)
    return built


def resets(curriculum: Reset, steps: Sequence[int]) -> list[int]:
    """The steps whose batch starts reference and optimiser anew."""
    found = []
    for step in steps:
        requests = curriculum.plan(at(step=step))
        answer_all(curriculum, requests, ["rw"] * len(requests), version=step)  # type: ignore[arg-type]
        batch = curriculum.emit(at(step=step))
        assert batch is not None
        if batch.reset_reference:
            assert batch.reset_optimizer
            found.append(step)
        curriculum.updated(at(step=step + 1), Report(metrics={}))
    return found


def test_each_subset_but_the_first_begins_anew() -> None:
    curriculum = make("ABCD", 0)
    assert resets(curriculum, range(8)) == [2, 4, 6]
    assert curriculum.metrics()["curriculum/resets"] == 3


def test_a_reset_that_is_due_survives_a_save() -> None:
    curriculum, again = make("ABCD", 0), make("ABCD", 0)
    assert resets(curriculum, range(2)) == []
    again.load_state_dict(curriculum.state_dict())
    assert resets(again, range(2, 4)) == [2]


def test_the_contract() -> None:
    check_contract(make, rollouts=2, max_age=0, epochs=False)
