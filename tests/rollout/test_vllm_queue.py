"""The queue of the vLLM engine at an update, with a stand-in for vLLM that draws nothing."""

from typing import Any

import pytest
from slow_engine import PROMPTS, ask, decode, sharp_model

from whet.rollout import vllm
from whet.rollout.vllm import VllmEngine


class SilentCore:
    """Takes requests and weights, and never answers."""

    def apply_model(self, work: Any) -> list[Any]:
        return [set()] if work is vllm.module_names else [None]

    def step(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **how: None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setattr(vllm, "build_core", lambda *args, **how: SilentCore())
    monkeypatch.setattr(vllm, "sampling_params", lambda flight, written: None)
    given: dict[str, Any] = {
        "seed": 5,
        "slots": 2,
        "context": 64,
        "mode": "stream",
        "on_update": "cut",
    }
    return VllmEngine(sharp_model(), encode=PROMPTS.__getitem__, decode=decode, **given)


def test_cut_takes_begun_groups_and_what_still_waits_of_them(engine: VllmEngine) -> None:
    engine.submit([ask(0, n=3), ask(1)])
    engine.step()
    engine.update(1)
    assert [(r.key, r.finish) for r in engine.collect()] == [
        ((100, index), "cut") for index in range(3)
    ]
    assert engine.load == 1 and not engine.idle


def test_a_group_of_an_evaluation_may_have_the_number_of_one_that_waits(engine: VllmEngine) -> None:
    engine.order([ask(0, n=2, phase="eval", group=101)], ticket=0)
    engine.submit([ask(1, n=2)])
    engine.step()  # the evaluation has both slots, and the group 101 of the training waits
    engine.update(1)
    assert not engine.done, "nothing of it has begun"
    assert engine.load == 4


def test_cut_ends_what_was_taken_on_from_another_engine(engine: VllmEngine) -> None:
    engine.submit([ask(0, n=3)])
    engine.step()
    state = engine.state_dict()
    engine.drop()
    engine.submit([ask(1, n=2)])
    engine.step()
    engine.take_on(state)
    engine.update(1)
    assert [r.key for r in engine.collect()] == [(101, 0), (101, 1), (100, 0), (100, 1), (100, 2)]
