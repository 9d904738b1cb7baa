"""The EAGLE drafter in the engine: tokens stay what they are, and what it reads is what the target computed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_engine import PROMPTS, VOCAB, ask, make_engine, sharp_model
from test_speculation import Whim, requests, run, same
from torch import Tensor
from transformers import PreTrainedModel

from whet.draft.base import OFF, DraftArm
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead, eagle_head
from whet.draft.speculation import Speculation
from whet.draft.training import DrafterTrainer
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunner
from whet.fast.lanes import LANE, LENGTH
from whet.rollout.engine import LocalEngine
from whet.rollout.guesser import Guesser

sys.path.append(str(Path(__file__).parent.parent / "draft"))
from drafted import attach_slots

FORMS: list[dict[str, Any]] = [
    {},
    {"page": 4},
    {"page": 4, "pages": 40, "slots": 6},
    {"slots": 1},
    {"graphs": True, "page": 4},
]


def target() -> PreTrainedModel:
    model = sharp_model(heads=6, kv_heads=2)
    share_storage(model)
    return model


def drafting(
    model: PreTrainedModel,
    head: EagleHead,
    arms: list[DraftArm],
    buffer: DataBuffer | None = None,
    **form: Any,
) -> LocalEngine:
    speculation = Speculation([], Whim(arms), vocab=VOCAB)
    return make_engine(model, speculation=speculation, eagle=head, buffer=buffer, **form)


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tokens_are_those_of_plain_decoding(form: dict[str, Any]) -> None:
    """A drafter that knows nothing, switched on and off at random."""
    model = target()
    plain = run(make_engine(model, **form), requests())
    arms = [OFF, *(DraftArm("eagle", depth) for depth in (1, 3, 7))]
    engine = drafting(model, eagle_head(model), arms, **form)
    same(plain, run(engine, requests()), atol=1e-5 if "graphs" in form else 1e-9)
    assert engine.stats()["draft/failures"] == 0


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_hidden_states_are_those_of_one_forward(form: dict[str, Any]) -> None:
    """What goes to the buffer, tokens and states, beside the model's own over the same text."""
    model, buffer = target(), DataBuffer(10_000)
    engine = drafting(model, eagle_head(model), [OFF, DraftArm("eagle", 3)], buffer, **form)
    rollouts = {r.key: r for r in run(engine, requests())}
    assert len(buffer.entries) == len(rollouts)
    written = sorted(
        (*PROMPTS[r.prompt_id], *r.trace.ids.tolist())
        for r in rollouts.values()
        if r.trace is not None
    )
    assert sorted(tuple(entry.ids.tolist()) for entry in buffer.entries) == written
    for entry in buffer.entries:
        with torch.no_grad():
            hidden = model.get_decoder()(
                input_ids=entry.ids[None], use_cache=False
            ).last_hidden_state[0]
        torch.testing.assert_close(entry.hidden, hidden[: len(entry)], rtol=0, atol=1e-5)
        assert len(entry) == len(entry.ids) - 1


@pytest.mark.parametrize("at_once", [1, 25, 10_000])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_read_together(
    form: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rows, in whichever order, as much as is asked for: what each has alone, in as few tensors as may be."""
    monkeypatch.setattr("whet.rollout.guesser.AT_ONCE", at_once)
    model = target()
    engine = drafting(model, eagle_head(model), [OFF], **{**form, "slots": 6})
    engine.submit([ask(i, max_tokens=30) for i in range(6)])
    while not engine.rows.size or engine.rows.count[0] < 9:
        engine.step()
    guesser, rows = engine.guesser, engine.rows
    assert guesser is not None and rows.size > 2
    order = list(range(rows.size))[::-2]
    read = list(guesser.read(order, 12))
    for row, hidden in zip(order, read, strict=True):
        ids = [*rows.flights[row].prompt.tolist(), *rows.ids[row, : rows.count[row]].tolist()]
        with torch.no_grad():
            expected = model.get_decoder()(
                input_ids=torch.tensor([ids]), use_cache=False
            ).last_hidden_state[0]
        assert len(hidden) == min(12, int(rows.length[row]))
        torch.testing.assert_close(hidden, expected[: len(hidden)], rtol=0, atol=1e-5)
    tensors = len({hidden.untyped_storage().data_ptr() for hidden in read})
    assert tensors == {1: len(order), 10_000: 1}.get(at_once, tensors)
    assert not list(guesser.read([], 12))


def test_what_is_not_wanted_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, buffer = target(), DataBuffer(10_000)
    engine = drafting(model, eagle_head(model), [OFF], buffer, slots=8)
    asked: list[int] = []

    def every_other(step: int, tokens: int) -> bool:
        asked.append(tokens)
        return len(asked) % 2 == 0

    monkeypatch.setattr(buffer, "wants", every_other)
    gathered: list[int] = []
    gather = Guesser._gather

    def watched(self: Guesser, where: Tensor) -> Tensor:
        gathered.append(len(where))
        return gather(self, where)

    monkeypatch.setattr(Guesser, "_gather", watched)
    train = [ask(i, n=2, max_tokens=5 + i % 3, stop_ids=()) for i in range(12)]
    evaluation = [ask(20 + i, phase="eval", max_tokens=6) for i in range(4)]
    engine.submit([*train, *evaluation])
    engine.collect()
    assert len(asked) == 24, "evaluations are not even asked about"
    assert [len(entry) for entry in buffer.entries] == asked[1::2]
    assert sum(gathered) == sum(asked[1::2]) and len(gathered) < 12, (
        "rows that end together are read together"
    )


def test_a_run_that_goes_back_to_an_earlier_checkpoint_goes_on() -> None:
    """The engine of a cluster outlives a learner, and then hears of an older version than its own."""
    model, buffer = target(), DataBuffer(10_000)
    engine = drafting(model, eagle_head(model), [OFF, DraftArm("eagle", 3)], buffer)
    for version in (7, 5, 6):
        engine.update(version)
        engine.submit([ask(i, max_tokens=6 + i, stop_ids=()) for i in range(4)])
        assert len(engine.collect()) == 4
        assert (
            buffer.step == version
            and [entry.step for entry in buffer.entries][-4:] == [version] * 4
        )


@pytest.mark.parametrize("capacity", [50, 100, 10_000])
def test_rows_that_end_together_take_no_memory_beyond_the_buffers(capacity: int) -> None:
    model, buffer = target(), DataBuffer(capacity)
    engine = drafting(model, eagle_head(model), [OFF], buffer, slots=6)
    engine.submit([ask(i, n=3, max_tokens=10 + i % 2, stop_ids=()) for i in range(8)])
    while not engine.idle:
        engine.step()
        engine.done.clear()
        storages = [entry.hidden.untyped_storage() for entry in buffer.entries]
        found = {storage.data_ptr(): storage.nbytes() for storage in storages}
        assert sum(found.values()) == sum(entry.hidden.nbytes for entry in buffer.entries)
        assert buffer.tokens <= capacity


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_drafts_are_those_of_the_drafter_alone(form: dict[str, Any]) -> None:
    """Whatever came before: what the engine asks to verify is what the drafter says of the whole text at once."""
    model = target()
    head, alone = eagle_head(model, seed=3), eagle_head(model, seed=3)
    attach_slots(alone, 1, 64)
    engine = drafting(model, head, [OFF, DraftArm("eagle", 4), DraftArm("eagle", 2)], **form)
    seen: list[tuple[list[int], list[int]]] = []
    verify = engine.runner.verify

    def watched(drafts: np.ndarray) -> Any:
        for i in range(len(drafts)):
            flight, ids = engine.rows.flights[i], engine.rows.ids[i, : engine.rows.count[i]]
            wanted = drafts[i][drafts[i] >= 0].tolist()
            seen.append(([*flight.prompt.tolist(), *ids.tolist()], wanted))
        return verify(drafts)

    if isinstance(engine.runner, GraphRunner):
        watch_drafts(engine.runner, seen)
    else:
        engine.runner.verify = watched  # type: ignore[method-assign]
    run(engine, [ask(i, max_tokens=14 + i) for i in range(6)])
    assert len(seen) > 20
    for text, wanted in seen:
        with torch.no_grad():
            hidden = model.get_decoder()(
                input_ids=torch.tensor([text]), use_cache=False
            ).last_hidden_state[0]
        pairs = len(text) - 1
        numbers = torch.arange(pairs, dtype=torch.int32)
        table = torch.zeros(1, 1, dtype=torch.int32)
        feature = alone.extend(
            hidden[:-1],
            torch.tensor(text[1:]),
            numbers,
            torch.zeros_like(numbers),
            table,
            torch.tensor([pairs], dtype=torch.int32),
            torch.tensor([0, pairs], dtype=torch.int32),
            pairs,
        )[-1:]
        place = torch.tensor([pairs], dtype=torch.int32)
        drafts = alone.draft(feature, place, torch.zeros(1, dtype=torch.int32), table, 4)
        assert drafts[0, : len(wanted)].tolist() == wanted


def watch_drafts(runner: GraphRunner, seen: list[tuple[list[int], list[int]]]) -> None:
    """What is drafted within a step, and for which text, as the device has it then."""
    draft, lanes = runner._draft, runner.lanes
    assert lanes is not None

    def watched(size: int, depth: int, drafter: str) -> Tensor:
        out = draft(size, depth, drafter)
        length, lane = runner.device_rows.state[LENGTH], runner.device_rows.state[LANE]
        for i in range(size):
            if length[i] >= 0:
                text = lanes.history[lane[i], : length[i] + 1].tolist()
                drafts = runner.drafts[i, :depth]
                seen.append((text, drafts[drafts >= 0].tolist()))
        return out

    runner._draft = watched  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_trained_drafter_is_accepted_more_often_and_changes_nothing() -> None:
    model, buffer = target(), DataBuffer(50_000)
    head = eagle_head(model)
    asked = [ask(i, n=4, group=1000 + i, max_tokens=40, temperature=0.3) for i in range(30)]
    accepted = []
    plain = run(make_engine(model, slots=8), asked)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for trained in (False, True):
        if trained:
            trainer = DrafterTrainer(head, buffer, pack=256, lr=3e-3)
            trainer.run(30_000)
            head.take(trainer.head)
        engine = drafting(model, head, [DraftArm("eagle", 4)], None if trained else buffer, slots=8)
        same(plain, run(engine, asked))
        assert engine.speculation is not None
        accepted.append(engine.speculation.chooser.accepted)  # type: ignore[attr-defined]
    assert accepted[1] > 2 * accepted[0] + 50
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
