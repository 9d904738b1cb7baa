"""Lessons between the rounds of `draft_bench.py`: a drafter of its own, other prompts, and it learns."""

from dataclasses import replace

import pytest
import torch
from draft_bench import Bench, Rung
from draft_lessons import Lessons, renamed
from draft_watch import Fixed
from tail_work import TailWork, shape_work

from whet.draft.base import DraftArm
from whet.draft.eagle import eagle_head
from whet.draft.training import SHARE, AdaptiveDrafter
from whet.model.load import tiny_model

ARM = DraftArm("eagle", 2)
RUNG = Rung("training", ("ngram", "eagle"), lambda: Fixed(ARM), (ARM,), learning=True)


def small_work(seed: int) -> TailWork:
    """Prompts of four tokens: a fifth of the tokens would else be none of a response."""
    work = shape_work(20, rollouts=4, siblings=2, cap=160, seed=seed)
    return replace(work, prompts={name: ids[:4] for name, ids in work.prompts.items()})


@pytest.fixture
def bench() -> Bench:
    model = tiny_model(20, hidden=16, layers=1, heads=2, context=256).eval().requires_grad_(False)
    head = eagle_head(model, draft_ids=torch.arange(10), seed=3)
    return Bench(model, small_work(0), head, 0, Lessons(model, small_work(1), head))


@pytest.mark.slow
def test_a_copy_learns_and_what_it_was_copied_from_does_not(bench: Bench) -> None:
    head, lessons = bench.head, bench.lessons
    assert head is not None and lessons is not None
    live, before = lessons.adaptive.live, [weight.clone() for weight in head.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), before, strict=True)), "it begins as a copy"
    assert live.draft_ids is not head.draft_ids and torch.equal(live.draft_ids, head.draft_ids)
    bench.run(Rung("off"))
    for _ in range(3):
        assert bench.run(RUNG).same == 1.0
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), before, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(live.parameters(), before, strict=True)), "published in place"
    assert bench.engine("training").guesser.head is live  # type: ignore[union-attr]
    assert head.draft_ids is not None and head.draft_ids.tolist() == list(range(10))
    rows = lessons.rows
    assert [row["round"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["tokens_trained"] <= SHARE * row["tokens"] and row["tokens_trained"] > 0
        assert row["share"] == pytest.approx(row["seconds"] / (row["seconds"] + row["makespan"]))
        assert row["loss"] > 0 and row["accept_length"] >= 1 and row["eagle_accept_length"] >= 1
    assert lessons.adaptive.trainer.updates >= 3


def test_what_is_measured_is_never_learnt_from(bench: Bench) -> None:
    assert bench.lessons is not None
    bench.run(Rung("off"))
    bench.run(RUNG)
    buffer, measured = bench.lessons.adaptive.buffer, {tuple(ids) for ids in bench.work.prompts.values()}
    seen = {tuple(entry.ids[: entry.prompt].tolist()) for entry in buffer.entries}
    assert len(buffer.entries) == 4 and seen == {tuple(ids) for ids in bench.lessons.work.prompts.values()}
    assert not seen & measured


def test_the_chooser_hears_of_what_is_measured_alone(bench: Bench) -> None:
    assert bench.lessons is not None
    bench.run(Rung("off"))
    taken = bench.run(RUNG)
    assert sum(step.batch * step.steps for step in taken.steps) <= sum(taken.lengths.values())


def test_from_scratch_it_begins_as_in_a_run() -> None:
    model = tiny_model(20, hidden=16, layers=1, heads=2, context=256)
    made = Lessons(model, small_work(1), seed=5).adaptive
    fresh = AdaptiveDrafter(model, SHARE, 5)
    assert made.share == fresh.share == 0.2
    assert all(torch.equal(a, b) for a, b in zip(made.live.parameters(), fresh.live.parameters(), strict=True))


def test_names_differ() -> None:
    work = small_work(1)
    other = renamed(work)
    assert not other.prompts.keys() & work.prompts.keys()
    assert {request.prompt_id for request in other.requests} == other.prompts.keys()
    assert [r.sampling for r in other.requests] == [r.sampling for r in work.requests]
