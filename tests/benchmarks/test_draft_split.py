"""Where a drafted run's seconds go: uses times costs, and graphs that are timed in a run without changing it."""

from collections.abc import Mapping
from typing import Any

import pytest
from draft_bench import Bench, DraftTaken, Rung, split_apart
from draft_lessons import Lessons
from draft_split import APART, HOST, Wanted, drafting_seconds, split, timed_share
from draft_watch import REPLAYS, Fixed, Step, WatchedCaptures
from tail_work import shape_work

from whet.draft.base import OFF, DraftArm
from whet.draft.eagle import eagle_head
from whet.fast.fused import share_storage
from whet.fast.graphs import Captures, GraphRunner, GraphRunners, Key
from whet.model.load import tiny_model
from whet.rollout.engine import LocalEngine

NGRAM, EAGLE = DraftArm("ngram", 2), DraftArm("eagle", 2)
RUNGS = [
    Rung("off"),
    Rung("ngram", ("ngram",), lambda: Fixed(NGRAM), (NGRAM,)),
    Rung("eagle", ("eagle",), lambda: Fixed(EAGLE), (EAGLE,)),
]


class Graphed(Bench):
    """As on a GPU: drafts are a part of the steps, which are plain calls here."""

    def _engine(self, slots: int, **more: Any) -> LocalEngine:
        how: dict[str, Any] = {"seed": 0, "slots": slots, "context": self.work.context, **more}
        prompts = {**self.work.prompts, **(self.lessons.work.prompts if self.lessons is not None else {})}
        return LocalEngine(self.model, encode=prompts.__getitem__, decode=lambda ids: "", runners=GraphRunners(), **how)


def graphed(lessons: bool = False) -> Graphed:
    model = tiny_model(20, hidden=16, layers=1, heads=2, context=64).eval().requires_grad_(False)
    share_storage(model)
    work, head = shape_work(20, rollouts=4, siblings=2, cap=16, seed=0), eagle_head(model)
    others = Lessons(model, shape_work(20, rollouts=4, siblings=2, cap=16, seed=1), head) if lessons else None
    return Graphed(model, work, head, 0, others)


def measured(bench: Bench, rungs: list[Rung]) -> tuple[dict[str, list[DraftTaken]], dict[str, Any]]:
    taken = {rung.name: [bench.run(rung)] for rung in rungs}
    return taken, {"rungs": {rung.name: {} for rung in rungs}}


def test_seconds_are_divided() -> None:
    steps = [Step(OFF, 8, 1.0), Step(NGRAM, 4, 2.0), Step(EAGLE, 2, 3.0, steps=4)]
    assert split(7.0, steps, 1.5, HOST) == {"draft": 1.5, "verify": 3.5, "plain": 1.0, "rest": 1.0, "measured": HOST}
    assert split(7.0, steps, None, None)["verify"] == 5.0


def test_uses_are_multiplied() -> None:
    uses = {(8, 4, "eagle"): 3, (2, 8, "suffix"): 5}
    assert drafting_seconds(uses, {(8, 4, "eagle"): 0.5, (2, 8, "suffix"): 0.25, (2, 2, "ngram"): 9.0}) == 2.75
    assert drafting_seconds(uses, {(8, 4, "eagle"): 0.5}) is None and drafting_seconds({}, {}) == 0.0
    near = {(8, 4, "eagle"): 0.5, (2, 8, "ngram"): 9.0, (1, 8, "suffix"): 9.0, (4, 8, "suffix"): 1.0}
    assert drafting_seconds(uses, near) == 6.5 and timed_share(uses, near) == 3 / 8


def test_graphs_are_counted_and_those_that_are_wanted_timed() -> None:
    calls: list[Key] = []
    bare = graphed().engine("model_free").runner
    assert isinstance(bare, GraphRunner)

    def step(*key: Any) -> Any:
        calls.append(key)

    captures = WatchedCaptures(Captures(bare.device, step, bare.captures.at_rest))
    wanted, other, target = (2, 4, "ngram"), (2, 4, "suffix"), (2, 5, "")
    captures.wanted = [wanted]
    for key in (other, target, wanted, target, wanted):
        captures.replay(key)
    assert captures.uses == {other: 1, wanted: 2}, "those of the target belong to no draft"
    assert calls.count(wanted) == 2 + REPLAYS and calls.count(other) == 1 and calls.count(target) == 2
    assert list(captures.costs()) == [wanted] and captures.costs()[wanted] > 0 and captures.wanted == []


def test_what_is_wanted_is_chosen() -> None:
    captures = graphed().engine("model_free").runner.captures  # type: ignore[attr-defined]
    captures.wanted = [(4, 2, "eagle"), (2, 8, "ngram")]
    chooser = Wanted(captures, [2, 4, 8], {(2, 8, "ngram"): 1, (4, 2, "eagle"): 1, (4, 4, "ngram"): 2})
    assert [chooser.choose(batch) for batch in (1, 2, 3, 4, 5)] == [DraftArm("ngram", 8)] * 2 + [EAGLE] * 2 + [OFF]
    assert chooser.choose(4, retired={"eagle", "ngram"}) == OFF
    captures.wanted = []
    assert chooser.choose(4) == DraftArm("ngram", 4), "what was used most"


def test_drafts_of_the_device_are_timed_apart() -> None:
    """By runs of the same work, whose tokens are compared as any rung's are; on a CPU that demands equality."""
    bench = graphed(lessons=True)
    rungs = [*RUNGS, Rung("training", ("ngram", "eagle"), lambda: Fixed(EAGLE), (EAGLE,), learning=True)]
    taken, result = measured(bench, rungs)
    assert [taken[rung.name][0].drafting for rung in rungs] == [0.0, None, None, None]
    uses = taken["ngram"][0].uses
    assert uses and {(depth, drafter) for _, depth, drafter in uses} == {(2, "ngram")}
    assert sum(uses.values()) == sum(step.steps for step in taken["ngram"][0].steps if step.arm == NGRAM)
    split_apart(bench, rungs, taken, result)
    for name in ("ngram", "eagle", "training"):
        run, found = taken[name][0], result["rungs"][name]["split"]
        assert found["measured"] == APART and found["draft"] > 0 and found["timed_share"] > 0.5
        parts = [found[part] for part in ("draft", "verify", "plain", "rest")]
        assert sum(parts) == pytest.approx(run.seconds)
    assert "split" not in result["rungs"]["off"] and "split_missing" not in result
    assert bench.lessons is not None and len(bench.lessons.rows) == 1, "to be timed is no lesson"


class Failing(Graphed):
    def time_drafts(self, kind: str, uses: Mapping[Key, int]) -> dict[Key, float]:
        if kind == "eagle":
            raise RuntimeError("CUDA error: capture failed")
        return {}


def test_what_cannot_be_timed_is_said_and_loses_nothing() -> None:
    bench = graphed()
    bench.__class__ = Failing
    taken, result = measured(bench, RUNGS)
    split_apart(bench, RUNGS, taken, result)
    for name in ("ngram", "eagle"):
        found = result["rungs"][name]["split"]
        assert found["draft"] is None and found["measured"] is None and found["verify"] > 0
    assert result["split_missing"]["eagle"] == "RuntimeError: CUDA error: capture failed"
    assert "came to 4x2_ngram" in result["split_missing"]["ngram"]
