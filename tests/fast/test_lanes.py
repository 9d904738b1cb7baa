"""Drafts made where they are verified: the device has the rollouts' texts, and the tokens are those of plain steps."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from slow_engine import PROMPTS, VOCAB, ask, expecting_short, make_engine, sharp_model
from test_speculation import EOS, Whim, each_updated_after, requests, run, same, updated_midway

from whet.draft.base import OFF, DraftArm
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import eagle_head
from whet.draft.lookup import NGram, Suffix
from whet.draft.speculation import Speculation
from whet.draft.training import DrafterTrainer
from whet.fast.fused import share_storage
from whet.fast.lanes import LANE, LENGTH, SIBLINGS, TOKEN, Lanes
from whet.rollout.engine import LocalEngine
from whet.rollout.guesser import Guesser

ARMS = {
    "ngram": [OFF, DraftArm("ngram", 1), DraftArm("ngram", 4), DraftArm("ngram", 8)],
    "suffix": [OFF, DraftArm("suffix", 2), DraftArm("suffix", 8)],
    "eagle": [OFF, DraftArm("eagle", 2), DraftArm("eagle", 4)],
    "always": [DraftArm("ngram", 3), DraftArm("suffix", 3), DraftArm("eagle", 3)],
}


FORMS = [{"page": 4}, {"page": 4, "pages": 40, "slots": 6}, {"slots": 1}, {"slots": 8}]
CLOSE = 1e-5
"""Graphs record log-probs in float32."""


def drafting(whim: Whim, dtype: torch.dtype = torch.float64, **form: Any) -> LocalEngine:
    model = sharp_model(heads=6, kv_heads=2, dtype=dtype)
    share_storage(model)
    speculation = Speculation([NGram(), Suffix()], whim, vocab=VOCAB)
    return make_engine(model, graphs=True, speculation=speculation, eagle=eagle_head(model), **form)


def plain(dtype: torch.dtype = torch.float64, **form: Any) -> LocalEngine:
    model = sharp_model(heads=6, kv_heads=2, dtype=dtype)
    share_storage(model)
    return make_engine(model, **form)


@functools.cache
def plainly_done(**form: Any) -> Any:
    """What plain decoding makes of `requests`: the same for all drafters."""
    return run(plain(**form), requests())


def check_texts(engine: LocalEngine) -> None:
    """What the device has of each row is what the host has, but for a step that is under way."""
    lanes, rows = engine.runner.lanes, engine.rows
    assert lanes is not None
    for row in range(rows.ready):
        text = np.concatenate((rows.flights[row].prompt, rows.ids[row, : rows.count[row]]))
        lane = rows.lane[row]
        assert lane == lanes.lane[rows.flights[row].arrival]
        if not engine.runner.ahead:
            # the first token comes with the next step
            assert int(lanes.written[lane]) in (text.size, text.size - 1)
        assert lanes.history[lane, : text.size - 1].tolist() == text[:-1].tolist()


@pytest.mark.wide
@pytest.mark.parametrize(
    "form", [{"page": 4}, {"page": 4, "pages": 40, "slots": 6}, {"slots": 1}, {"slots": 8}], ids=str
)
@pytest.mark.parametrize("which", ARMS)
def test_tokens_are_those_of_plain_decoding(which: str, form: dict[str, Any]) -> None:
    """Arms at random, rows that come and go, stops and limits inside what was accepted, steps launched ahead."""
    whim = Whim(ARMS[which])
    engine = drafting(whim, **form)
    engine.runner.burst = 4  # more turns, so that chance comes to every arm
    asked, done, ahead = requests(), [], 0
    engine.submit(asked)
    while not engine.idle:
        engine.step()
        check_texts(engine)
        ahead += engine.runner.ahead
        done += engine.done
        engine.done = []
    same(plainly_done(**form), done, atol=CLOSE)
    assert ahead, "steps are launched before the one before is read"
    assert set(whim.used) == {arm.name for arm in ARMS[which]}
    assert engine.stats()["draft/failures"] == 0


def test_preempted_rows_come_back() -> None:
    form = {"slots": 6, "page": 4, "pages": 22}
    asked = [ask(i, n=2, max_tokens=30) for i in range(5)]
    engine = expecting_short(drafting(Whim(ARMS["always"]), **form))
    other = expecting_short(plain(**form))
    same(run(other, asked), run(engine, asked), atol=CLOSE)
    assert engine.stats()["rollout/preempted"] > 0


def test_stop_strings_and_picky_rows() -> None:
    asked = [ask(i, max_tokens=40, stop_strings=("ab", "fh")) for i in range(8)]
    asked += [ask(20 + i, phase="eval", top_k=5, max_tokens=20) for i in range(2)]
    same(run(plain(), asked), run(drafting(Whim(ARMS["suffix"])), asked), atol=CLOSE)


@pytest.mark.wide
@pytest.mark.parametrize("on_update", ["keep", "recompute", "cut"])
def test_weights_that_change_under_way(on_update: str) -> None:
    """Every row is cut or goes on; what was launched ahead under the old weights is not used."""
    asked = [ask(i, n=2, temperature=0.4, max_tokens=40) for i in range(3)]
    engine = drafting(Whim(ARMS["always"]), slots=6, on_update=on_update)
    # launched under the old weights
    done, written = updated_midway(engine, asked, lambda engine: engine.runner.ahead)
    assert len(set(written.values())) > 1, "drafts were accepted before the update"
    same(
        each_updated_after(lambda: plain(slots=1, on_update=on_update), asked, written),
        done,
        atol=CLOSE,
    )
    if on_update != "cut":
        assert any(r.trace.ids.size > written[r.key] for r in done), (
            "some went on under the new weights"
        )


BROKEN = {"catch_up": (Guesser, "eagle"), "round": (Guesser, "eagle"), "lookup": (Lanes, "suffix")}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("part", "after"), [("catch_up", 0), ("round", 0), ("round", 3), ("lookup", 0), ("lookup", 3)]
)
def test_a_drafter_that_fails_on_the_device_is_retired(
    part: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first call or in mid-rollout: the same tokens, by plain steps and by those of the others."""
    owner, name = BROKEN[part]
    right, calls = getattr(owner, part), [0]

    def breaks(self: Any, *given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise torch.OutOfMemoryError("no memory left")
        return right(self, *given, **named)

    monkeypatch.setattr(owner, part, breaks)
    others = [DraftArm("ngram", 3)] if name == "eagle" else [DraftArm("eagle", 3)]
    whim = Whim([OFF, DraftArm(name, 4), *others])
    engine = drafting(whim, slots=3)
    assert engine.speculation is not None
    asked = requests()
    same(plainly_done(slots=3), run(engine, asked), atol=CLOSE)
    guard = engine.speculation.drafters[name]
    assert guard.retired and guard.error == "OutOfMemoryError: no memory left"
    assert calls[0] == after + 1, "it is not asked again"
    assert engine.stats()["draft/failures"] == 1
    whim.used.clear()
    engine.update(1)
    same(plainly_done(slots=3, version=1), run(engine, asked), atol=CLOSE)
    assert calls[0] == after + 1 and set(whim.used) == {"off", others[0].name}, "the others go on"


def test_greedy_siblings_write_each_others_drafts() -> None:
    """The first of a group has only itself to look at; those that come after it copy it, whole runs at a time."""
    whim = Whim([DraftArm("suffix", 8)])
    engine = drafting(whim, slots=1)
    asked = [ask(3, n=4, temperature=0.0, max_tokens=32)]
    same(run(plain(slots=1), asked), run(engine, asked), atol=CLOSE)
    steps = engine.stats()["rollout/steps"]
    assert steps < 32 + 3 * 32 / 4
    assert engine.runner.lanes is not None
    engine.runner.lanes.forget()
    run(engine, [ask(3, n=1, group=900, temperature=0.0, max_tokens=32)])
    assert engine.stats()["rollout/steps"] > 32 / 9, "forgotten texts are not looked at"


@pytest.mark.parametrize("on_device", [True, False])
def test_drafters_are_called_where_they_draft(on_device: bool) -> None:
    """What the device drafts from is in lanes: the host's memory of it, which is not used, stays empty."""
    calls: list[tuple[str, int]] = []

    class Listening(Suffix):
        def begin(self, row: Any) -> None:
            calls.append(("begin", row.uid))
            super().begin(row)

        def finish(self, row: Any) -> None:
            calls.append(("finish", row.uid))
            super().finish(row)

        def updated(self, version: int) -> None:
            calls.append(("updated", version))
            super().updated(version)

    model = sharp_model(heads=6, kv_heads=2)
    share_storage(model)
    drafter = Listening()
    speculation = Speculation([drafter], Whim([DraftArm("suffix", 4)]), vocab=VOCAB)
    engine = make_engine(model, graphs=on_device, slots=3, speculation=speculation)
    done = run(engine, requests())
    engine.update(1)
    expected = [("finish", i) for i in range(len(done))] if not on_device else []
    assert sorted(line for line in calls if line[0] != "begin") == [*expected, ("updated", 1)]
    assert bool(drafter.visits) == (not on_device)
    assert not speculation._views


@pytest.mark.slow
def test_a_published_drafter_drafts_better() -> None:
    """Within the captured step, from its next round on."""
    model, buffer = sharp_model(heads=6, kv_heads=2, dtype=torch.float32), DataBuffer(50_000)
    share_storage(model)
    head, whim = eagle_head(model), Whim([DraftArm("eagle", 4)])
    speculation = Speculation([], whim, vocab=VOCAB)
    engine = make_engine(
        model, graphs=True, slots=8, speculation=speculation, eagle=head, buffer=buffer
    )
    asked = [
        ask(i, n=4, group=1000 + i, max_tokens=40, temperature=0.3, stop_ids=(EOS,))
        for i in range(16)
    ]
    before = run(engine, asked)
    first, whim.accepted = whim.accepted, 0
    trainer = DrafterTrainer(head, buffer, pack=256, lr=3e-3)
    trainer.run(20_000)
    head.take(trainer.head)
    same(before, run(engine, asked), atol=1e-5)
    assert whim.accepted > 1.5 * first + 20


def test_the_newest_tokens_as_the_host_uploaded_them() -> None:
    lanes, state = Lanes(4, 16, torch.device("cpu")), torch.zeros(13, 4, dtype=torch.int32)
    state[TOKEN], state[LENGTH] = torch.tensor([7, 8, 9, 5]), torch.tensor([3, 0, 16, -1])
    state[LANE] = torch.tensor([2, 5, 0, 1])
    lanes.newest(state[:, :3])
    assert lanes.written.tolist()[:6] == [17, 0, 4, 0, 0, 1]
    assert [int(lanes.history[2, 3]), int(lanes.history[5, 0]), int(lanes.history[0, 16])] == [
        7,
        8,
        9,
    ]
    assert int(lanes.history.sum()) == 24, "nothing else"


def test_lanes_are_used_again_and_stale_siblings_are_none() -> None:
    lanes = Lanes(1, 64, torch.device("cpu"))
    count = len(lanes.written)
    engine = plain()
    asked = [ask(i % 2) for i in range(count + 3)]
    prompts = [np.asarray(engine.encode(request.prompt_id)) for request in asked]
    flights = [engine.flight(request, i, i, prompts[i]) for i, request in enumerate(asked)]
    taken = []
    for flight in flights:
        taken += lanes.enter([flight])
        lanes.leave(flight)
    assert taken == [i % count for i in range(count + 3)]
    assert lanes.of.tolist().count(-1) == 0
    for lane in range(count):
        prompt = PROMPTS[f"p{(lane if lane >= 3 else lane + count) % 2}"]
        assert lanes.history[lane, : len(prompt)].tolist() == prompt
        siblings = [k for k in lanes.siblings[lane].tolist() if k >= 0]
        assert len(siblings) <= SIBLINGS and lane not in siblings
