"""Rollouts with drafts are those without: tokens, log-probs, finishes, whatever drafts and whatever chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_engine import VOCAB, ask, by_key, decode, make_engine, sharp_model

from whet.draft.base import OFF, Chooser, DraftArm, StepReport
from whet.draft.controller import Controller
from whet.draft.lookup import NGram, Suffix
from whet.draft.speculation import Speculation
from whet.fast.fused import share_storage
from whet.rollout.engine import LocalEngine
from whet.rollout.rows import Flight, Rows
from whet.rollout.runner import Drawn
from whet.types import Request, Rollout, Trace

sys.path.append(str(Path(__file__).parent.parent / "draft"))
from adversaries import Empty, adversaries
from simulated import World

EOS = 3


class Whim(Chooser):
    """Another arm at every step, OFF among them: a chooser may do anything."""

    def __init__(self, arms: Sequence[DraftArm], seed: int = 0) -> None:
        super().__init__()
        self.arms, self.rng = arms, np.random.default_rng(seed)
        self.used: dict[str, int] = {}
        self.accepted = 0

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        return self.arms[int(self.rng.integers(len(self.arms)))]

    def record(self, report: StepReport) -> None:
        super().record(report)
        self.used[report.arm.name] = self.used.get(report.arm.name, 0) + 1
        if report.accepted is not None:
            self.accepted += int(report.accepted.sum())


def requests(**sampling: Any) -> list[Request]:
    heat = (1.0, 0.0, 0.6)
    return [
        ask(
            i,
            n=1 + i % 3,
            temperature=heat[i % 3],
            **{"max_tokens": 5 + 4 * i, "stop_ids": (EOS,), **sampling},
        )
        for i in range(8)
    ]


def run(engine: LocalEngine, asked: Sequence[Request]) -> list[Rollout]:
    engine.submit(asked)
    return engine.collect()


def same(plain: Sequence[Rollout], other: Sequence[Rollout], atol: float = 1e-9) -> None:
    here, there = {r.key: r for r in plain}, {r.key: r for r in other}
    assert by_key(plain) == by_key(other)
    for key, rollout in here.items():
        assert rollout.finish == there[key].finish
        assert rollout.trace is not None and there[key].trace is not None
        np.testing.assert_allclose(
            rollout.trace.log_probs, there[key].trace.log_probs, rtol=0, atol=atol
        )
        assert rollout.trace.versions.tolist() == there[key].trace.versions.tolist()


def plain_tokens(rollouts: Sequence[Rollout]) -> dict[tuple[int, int], np.ndarray]:
    return {r.key: r.trace.ids for r in rollouts if r.trace is not None}


def speculating(drafters: Sequence[Any], chooser: Any) -> Speculation:
    return Speculation(drafters, chooser, vocab=VOCAB)


FORMS = [
    {},
    {"page": 4},
    {"page": 4, "pages": 40, "slots": 6},
    {"slots": 1},
    {"graphs": True, "page": 4},
]
NAMES = [
    "empty",
    "random",
    "oracle",
    "half_wrong",
    "always_end",
    "invalid",
    "too_long",
    "bad_shape",
    "crashing",
]


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", [*NAMES, "ngram", "suffix"])
def test_tokens_are_those_of_plain_decoding(name: str, form: dict[str, Any]) -> None:
    """Every drafter, depths and OFF at random; stops and limits fall inside accepted runs; slots are used again."""
    model = sharp_model(heads=6, kv_heads=2)
    share_storage(model)
    plain = run(make_engine(model, **form), requests())
    known = {d.name: d for d in adversaries(VOCAB, EOS, plain_tokens(plain))} | {
        "ngram": NGram(),
        "suffix": Suffix(),
    }
    whim = Whim([OFF, *(DraftArm(name, depth) for depth in (1, 3, 7))])
    engine = make_engine(model, speculation=speculating([known[name]], whim), **form)
    same(plain, run(engine, requests()), atol=1e-5 if "graphs" in form else 1e-9)
    if name == "oracle":
        assert whim.accepted > 30, "what is always right is always accepted"


def test_stop_strings_inside_an_accepted_run() -> None:
    model = sharp_model()
    asked = [ask(i, max_tokens=40, stop_strings=("ab", "fh")) for i in range(12)]
    long = run(make_engine(model), [ask(i, max_tokens=40) for i in range(12)])
    text = {r.key: decode(r.trace.ids.tolist()) for r in long if r.trace is not None}
    asked = [ask(i, max_tokens=40, stop_strings=(text[100 + i, 0][6:8],)) for i in range(12)]
    plain = run(make_engine(model), asked)
    assert sum(r.finish == "stop" for r in plain) == 12
    (oracle,) = [d for d in adversaries(VOCAB, EOS, plain_tokens(long)) if d.name == "oracle"]
    engine = make_engine(model, speculation=speculating([oracle], Whim([DraftArm("oracle", 5)])))
    same(plain, run(engine, asked))


def test_the_oracle_saves_steps() -> None:
    model = sharp_model()
    asked = [ask(i, max_tokens=33) for i in range(4)]
    plain_engine = make_engine(model)
    plain = run(plain_engine, asked)
    (oracle,) = [d for d in adversaries(VOCAB, EOS, plain_tokens(plain)) if d.name == "oracle"]
    engine = make_engine(model, speculation=speculating([oracle], Whim([DraftArm("oracle", 7)])))
    drafted = run(engine, asked)
    same(plain, drafted)
    marks = [
        r.trace.guessed.tolist()
        for r in drafted
        if r.trace is not None and r.trace.guessed is not None
    ]
    assert marks == [[False, *([True] * 7 + [False]) * 4]] * 4, (
        "the target's own draw ends each step"
    )
    assert all(r.trace is not None and r.trace.guessed is None for r in plain)
    shown = engine.pictures()
    assert shown["accepts"] == {"position": [[16, 16]] * 7, "rows": [[4, 16, 112]]}
    assert [rows for _, rows in shown["running"]] == [4] * 5
    assert engine.stats()["rollout/steps"] == 1 + 4, (
        "the first token with the prompt, then 8 + 8 + 8 + 8"
    )
    assert [(r.drafted, r.accepted) for r in drafted] == [(28, 28)] * 4, (
        "all but the target's own draw after each draft"
    )
    assert [(r.drafted, r.accepted) for r in plain] == [(0, 0)] * 4
    assert engine.pictures() == {}, "its counters were reset"


def test_marks_of_two_steps_at_once() -> None:
    """Three and two tokens, of which the last were the target's own; and one and two, which a stop id cuts."""
    rows = Rows(2, 16, np.dtype(np.float32), torch.device("cpu"))
    empty = Trace(
        ids=np.zeros(0, np.int32), log_probs=np.zeros(0, np.float32), versions=np.zeros(0, np.int32)
    )
    for i in range(2):
        rows.add(
            [Flight(ask(i, max_tokens=9, stop_ids=(EOS,)), 0, i, np.array([1]), 9, (0, i), empty)]
        )
    token = np.array([[5, 6, 7, 8, 9], [5, EOS, 7, 0, 0]])
    counted = np.array([[3, 1], [2, 2]])
    drawn = Drawn(token, np.zeros(token.shape, np.float32), counted, counted, DraftArm("oracle", 3))
    assert rows.record_runs(drawn, 2, 0, decode).tolist() == [5, 2]
    marks = [rows.trace(i).guessed for i in range(2)]
    assert [m.tolist() for m in marks if m is not None] == [
        [True, True, False, True, False],
        [False, True],
    ]
    assert np.array_equal(rows.remove([0]), [[1], [0]]) and rows.trace(0).guessed is not None
    again = rows.flights[0]
    again.trace = rows.trace(0)
    rows.remove([0])
    rows.add([again])
    assert rows.trace(0).guessed.tolist() == [False, True], "a flight that waited keeps its marks"  # type: ignore[union-attr]
    assert not rows.guessed[0, 2:].any()


def dim(engine: LocalEngine) -> None:
    """Other weights, in place, under which it would write other tokens."""
    with torch.no_grad():
        for weight in engine.twin.parameters():
            weight.mul_(0.6)


def updated_midway(
    engine: LocalEngine, asked: Sequence[Request], due: Callable[[LocalEngine], bool]
) -> tuple[list[Rollout], dict[Any, int]]:
    """New weights while all rollouts run; and how many tokens each had written by then."""
    engine.submit(asked)
    while not (
        engine.rows.size and engine.rows.count[: engine.rows.size].min() > 4 and due(engine)
    ):
        engine.step()
    flights = engine.rows.flights
    assert len(flights) == sum(request.n for request in asked), "all have a row, none has ended"
    written = {
        (f.request.group_id, f.index): int(engine.rows.count[row]) for row, f in enumerate(flights)
    }
    dim(engine)
    engine.update(1)
    done: list[Rollout] = []
    while not engine.idle:
        done += engine.collect()
    return done, written


def updated_after(engine: LocalEngine, request: Request, index: int, written: int) -> list[Rollout]:
    """The same rollout alone and plainly, token by token, with new weights after so many: what it must be."""
    engine.submit([replace(request, n=1, first_index=index)])
    while not engine.rows.size or engine.rows.count[0] < written:
        engine.step()
    assert engine.rows.count[0] == written
    dim(engine)
    engine.update(1)
    return engine.collect()


def each_updated_after(
    make: Callable[[], LocalEngine], asked: Sequence[Request], written: dict[tuple[int, int], int]
) -> list[Rollout]:
    """All that was asked, each by an engine of its own."""
    every = [(request, index) for request in asked for index in range(request.n)]
    return [
        rollout for r, i in every for rollout in updated_after(make(), r, i, written[r.group_id, i])
    ]


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["barrier", "stream"])
@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_weights_that_change_in_mid_rollout(on_update: Any, mode: Any) -> None:
    """Drafted rows have come unequally far by then: each goes on as the one that plain decoding has brought so far."""
    asked = [ask(i, n=2, temperature=0.6, max_tokens=30) for i in range(4)]
    before = run(make_engine(sharp_model(), slots=8), asked)
    half_wrong = next(
        d for d in adversaries(VOCAB, EOS, plain_tokens(before)) if d.name == "half_wrong"
    )
    speculation = speculating(
        [NGram(), half_wrong], Whim([OFF, DraftArm("ngram", 3), DraftArm("half_wrong", 3)])
    )
    engine = make_engine(
        sharp_model(), slots=8, mode=mode, on_update=on_update, speculation=speculation
    )
    done, written = updated_midway(engine, asked, lambda engine: True)
    assert len(set(written.values())) > 1, "drafts were accepted before the update"
    same(
        each_updated_after(
            lambda: make_engine(sharp_model(), slots=1, on_update=on_update), asked, written
        ),
        done,
    )
    if on_update != "cut":
        assert any(by_key(done)[key] != ids for key, ids in by_key(before).items()), (
            "the update changes what is written"
        )


@pytest.mark.parametrize("name", ["empty", "suffix"])
def test_a_retired_drafter_leaves_the_others_at_work(name: str) -> None:
    """Its tries fade with the updates until it is as promising as an unknown one: it is not chosen again."""
    speculation = speculating(
        [Empty(), Suffix()], Controller([DraftArm("empty", 4), DraftArm("suffix", 4)], seed=1)
    )
    rows, world = (
        Rows(8, 64, np.dtype(np.float64), torch.device("cpu")),
        World({"empty": 0.5, "suffix": 0.5}),
    )
    (healthy,) = {"empty", "suffix"} - {name}
    chosen: list[DraftArm] = []
    for step in range(3000):
        if step == 300:
            assert not speculation.drafters[name].hold(lambda: 1 / 0)
        if step % 30 == 29:
            speculation.updated(step)
        chosen.append(speculation.choose(rows, 8))  # type: ignore[arg-type]
        accepted = world.accepted(chosen[-1], 8) if chosen[-1] != OFF else None
        speculation.chooser.record(
            StepReport(chosen[-1], 8, world.seconds(chosen[-1], 8), accepted=accepted)
        )
    after = [arm.drafter for arm in chosen[300:]]
    assert name not in after and speculation.drafters[name].failures == 1
    assert after[-300:].count(healthy) > 200


def test_evaluation_with_top_p_beside_it() -> None:
    model = sharp_model()
    picky = [ask(9, n=2, phase="eval", temperature=0.5, top_p=0.7, max_tokens=9)]
    results = []
    for drafts in (False, True):
        speculation = speculating([NGram()], Whim([DraftArm("ngram", 3)])) if drafts else None
        engine = make_engine(model, slots=6, speculation=speculation)
        engine.submit(requests()[:3])
        results.append((engine.generate(picky), engine.collect()))
    (a, b), (c, d) = results
    same(a, c)
    same(b, d)


def test_the_cache_is_that_of_a_fresh_prefill() -> None:
    """After steps with drafts, keys and values are what feeding the same tokens at once gives."""
    model = sharp_model()
    long = run(make_engine(model), [ask(i, max_tokens=30) for i in range(3)])
    half_wrong = next(
        d for d in adversaries(VOCAB, EOS, plain_tokens(long)) if d.name == "half_wrong"
    )
    engine = make_engine(
        model, speculation=speculating([half_wrong], Whim([OFF, DraftArm("half_wrong", 4)]))
    )
    engine.submit([ask(i, max_tokens=30) for i in range(3)])
    while engine.rows.size < 3 or engine.rows.count[:3].min() < 15:
        engine.step()
    flights = list(engine.rows.flights)
    lengths = engine.rows.length[:3].tolist()
    before = [
        pages[row, :, :n].clone() for pages in engine.cache.keys for row, n in enumerate(lengths)
    ]
    engine._evict_all()
    engine.step()
    rows = [engine.rows.flights.index(flight) for flight in flights]
    after = [pages[rows[i], :, :n] for pages in engine.cache.keys for i, n in enumerate(lengths)]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_the_controller_in_the_engine() -> None:
    """A real one, on real clocks: it may choose anything, and the tokens stay."""
    model = sharp_model()
    asked = [ask(i % 10, n=2, group=500 + i, max_tokens=40) for i in range(30)]
    plain = run(make_engine(model, slots=8), asked)
    arms = [DraftArm("ngram", 2), DraftArm("suffix", 2), DraftArm("suffix", 6)]
    chooser = Controller(arms)
    chooser.epsilon = 0.3
    engine = make_engine(model, slots=8, speculation=speculating([NGram(), Suffix()], chooser))
    same(plain, run(engine, asked))
    metrics = engine.stats()
    assert metrics["draft/failures"] == 0
    assert 0 < metrics["draft/share_off"] <= 1
    again = make_engine(
        model, slots=8, speculation=speculating([NGram(), Suffix()], Controller(arms))
    )
    again.load_state_dict(engine.state_dict())
    assert again.speculation is not None and engine.speculation is not None
    assert again.speculation.chooser.state_dict() == engine.speculation.chooser.state_dict()
