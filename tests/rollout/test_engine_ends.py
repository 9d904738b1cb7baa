"""How rollouts end, what comes back in which order, and what is refused."""

import numpy as np
import pytest
from slow_engine import PROMPTS, ask, decode, make_engine, sharp_model, slow_decode

from whet.errors import WhetError
from whet.rollout.base import Engine
from whet.types import Request, Rollout, Sampling

MODEL = sharp_model()


def ids_of(rollout: Rollout) -> list[int]:
    assert rollout.trace is not None
    assert (
        rollout.length
        == rollout.trace.ids.size
        == rollout.trace.log_probs.size
        == rollout.trace.versions.size
    )
    return rollout.trace.ids.tolist()


def test_is_an_engine() -> None:
    engine: Engine = make_engine(MODEL)
    assert engine.can == {
        "keyed_noise",
        "token_versions",
        "stream",
        "cut",
        "recompute",
        "keep",
        "draft",
    }


def test_a_stop_id_ends_a_rollout_and_belongs_to_it() -> None:
    free, _ = slow_decode(MODEL, ask(1, max_tokens=30), 0)
    stop = free[6]
    first = free.index(stop)
    [rollout] = make_engine(MODEL).generate(
        [ask(1, max_tokens=30, stop_ids=(22, stop) if 22 not in free[:first] else (stop,))]
    )
    assert ids_of(rollout) == free[: first + 1] and rollout.finish == "stop"


def test_rows_with_different_stop_ids() -> None:
    free = {i: slow_decode(MODEL, ask(i, max_tokens=25), 0)[0] for i in range(4)}
    stops = {0: (free[0][3],), 1: (), 2: (free[2][9], free[2][12]), 3: (free[3][1], 99, 98)}
    rollouts = make_engine(MODEL).generate(
        [ask(i, max_tokens=25, stop_ids=stops[i]) for i in range(4)]
    )
    for i, rollout in enumerate(rollouts):
        ends = [k for k, token in enumerate(free[i]) if token in stops[i]]
        assert ids_of(rollout) == free[i][: ends[0] + 1 if ends else 25]
        assert rollout.finish == ("stop" if ends else "length")


@pytest.mark.parametrize("others", [(), ("nowhere!",)], ids=["alone", "among others"])
def test_a_stop_string_ends_a_rollout_with_its_last_token(others: tuple[str, ...]) -> None:
    free, _ = slow_decode(MODEL, ask(2, max_tokens=30), 0)
    text = decode(free)
    wanted = text[10:13]
    end = text.index(wanted) + 3
    [rollout, other] = make_engine(MODEL).generate(
        [
            ask(2, max_tokens=30, stop_strings=(*others, wanted)),
            ask(2, group=1, max_tokens=30, temperature=0.0),
        ]
    )
    assert ids_of(rollout) == free[:end] and rollout.finish == "stop"
    assert other.finish == "length" and other.length == 30


def test_a_stop_string_over_several_bytes_and_long_tokens() -> None:
    """Tokens that spell more than a character, or part of one, do not hide it."""
    pieces = {i: f"<{i}>" for i in range(23)} | {5: "é", 6: "ab"}

    def spell(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids)

    free, _ = slow_decode(MODEL, ask(4, max_tokens=40), 0)
    wanted = spell(free[11:13])[1:]
    engine = make_engine(MODEL)
    engine.decode = spell  # type: ignore[assignment]
    [rollout] = engine.generate([ask(4, max_tokens=40, stop_strings=(wanted,))])
    first = next(n for n in range(1, 41) if wanted in spell(free[:n]))
    assert ids_of(rollout) == free[:first]


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    free, _ = slow_decode(MODEL, ask(1), 0)
    n = next(k for k in range(3, 20) if free[k] not in free[:k])
    [rollout] = make_engine(MODEL).generate([ask(1, max_tokens=n + 1, stop_ids=(free[n],))])
    assert rollout.length == n + 1 and rollout.finish == "stop"


def test_max_tokens_and_context_limit() -> None:
    engine = make_engine(MODEL, context=16)
    long, short, one = engine.generate(
        [ask(5, max_tokens=100), ask(1, max_tokens=4), ask(2, max_tokens=1)]
    )
    assert long.length == 16 - len(PROMPTS["p5"]) and long.finish == "length"
    assert (short.length, one.length) == (4, 1)
    free, _ = slow_decode(MODEL, ask(5, max_tokens=100), 0, context=16)
    assert ids_of(long) == free


@pytest.mark.parametrize("page", [0, 4])
def test_a_prompt_that_leaves_one_token(page: int) -> None:
    size = len(PROMPTS["p5"])
    engine = make_engine(MODEL, context=size + 1, page=page)
    assert [r.length for r in engine.generate([ask(5, n=3)])] == [1, 1, 1]


def test_prompts_that_do_not_fit_are_refused_by_name_and_nothing_is_queued() -> None:
    engine = make_engine(MODEL, context=len(PROMPTS["p5"]))
    with pytest.raises(WhetError, match='"p5"'):
        engine.submit([ask(0), ask(5)])
    assert engine.idle
    with pytest.raises(WhetError, match="max_tokens = 0"):
        engine.submit([ask(0, max_tokens=0)])
    PROMPTS["empty"] = []
    with pytest.raises(WhetError, match='"empty" has 0 tokens'):
        engine.submit(
            [Request(prompt_id="empty", group_id=1, n=1, sampling=Sampling(max_tokens=3))]
        )


def test_barrier_drains_in_order_of_finish() -> None:
    engine = make_engine(MODEL, slots=3)
    assert engine.collect() == [] and engine.idle and engine.free is None
    engine.submit(
        [ask(0, max_tokens=9), ask(1, max_tokens=3), ask(2, max_tokens=9), ask(3, max_tokens=2)]
    )
    assert not engine.idle
    assert [r.prompt_id for r in engine.collect()] == ["p1", "p3", "p0", "p2"]
    assert engine.idle


@pytest.mark.parametrize("mode", ["barrier", "stream"])
def test_finished_rollouts_are_told_early_in_order_and_once(mode: str) -> None:
    engine = make_engine(MODEL, slots=3, mode=mode)
    engine.submit([ask(i, max_tokens=(29, 3, 29, 2, 5)[i]) for i in range(5)])
    early: list[Rollout] = []
    running: list[int] = []

    def on_progress(new: list[Rollout]) -> None:
        running.extend([engine.rows.size] * len(new))
        early.extend(new)

    collected: list[Rollout] = []
    while not engine.idle:
        collected += engine.collect(on_progress)
        assert early == collected  # the very same objects, in the same order
    assert len(collected) == 5 and running[0] == 2 and running[-1] == 0, (
        "called while others run, and at the end"
    )


def test_stream_hands_out_what_finished_and_counts_free_slots() -> None:
    engine = make_engine(MODEL, slots=3, mode="stream")
    assert engine.free == 3 and engine.collect() == []
    engine.submit([ask(0, max_tokens=9), ask(1, max_tokens=3)])
    assert engine.free == 1
    engine.submit([ask(2, n=2, max_tokens=9)])
    assert engine.free == 0
    assert [r.prompt_id for r in engine.collect()] == ["p1"]
    assert not engine.idle
    seen = [r.key for r in engine.collect()]
    while not engine.idle:
        seen += [r.key for r in engine.collect()]
    assert sorted(seen) == [(100, 0), (102, 0), (102, 1)]
    assert engine.free == 3


def test_generate_leaves_running_rollouts_to_collect() -> None:
    engine = make_engine(MODEL, slots=4, mode="stream")
    engine.submit([ask(0, max_tokens=2), ask(1, max_tokens=40)])
    engine.step()
    found = engine.generate(
        [ask(3, n=2, phase="eval", max_tokens=12), ask(2, phase="eval", max_tokens=5)]
    )
    assert [(r.prompt_id, r.index, r.phase) for r in found] == [
        ("p3", 0, "eval"),
        ("p3", 1, "eval"),
        ("p2", 0, "eval"),
    ]
    assert [r.prompt_id for r in engine.collect()] == ["p0"]
    assert [r.prompt_id for r in engine.collect()] == ["p1"]
    assert engine.generate([]) == []


def test_continuous_batching_refills_at_once() -> None:
    """Rollouts of 6, 2, 2, 2, 2, 2 tokens on two slots: three short ones beside the long one, then two together."""
    engine = make_engine(MODEL, slots=2)
    engine.submit([ask(i, max_tokens=6 if i == 0 else 2) for i in range(6)])
    engine.collect()
    stats = engine.stats()
    assert stats["rollout/tokens"] == 16 and stats["rollout/finished"] == 6
    assert stats["rollout/steps"] == 8 and stats["rollout/batch_mean"] == 2.0
    assert stats["rollout/prefill_tokens"] == sum(len(PROMPTS[f"p{i}"]) for i in range(6))
    assert stats["rollout/seconds"] > 0
    assert set(engine.stats().values()) == {0.0}  # since the last call


def test_a_stream_tells_how_many_of_its_slots_are_in_use() -> None:
    engine = make_engine(MODEL, slots=8, mode="stream")
    engine.submit([ask(0, max_tokens=4), ask(1, max_tokens=4)])
    while not engine.idle:
        engine.collect()
    assert engine.stats()["rollout/occupied"] == 0.25
    assert "rollout/occupied" not in make_engine(MODEL, slots=8).stats(), "a batch has its tail"


def test_prefilled_tokens_of_rollouts_that_end_at_once() -> None:
    engine = make_engine(MODEL)
    engine.generate([ask(5, n=2, max_tokens=1)])
    assert engine.stats()["rollout/prefill_tokens"] == len(PROMPTS["p5"])


def test_fifo_with_groups_larger_than_the_slots() -> None:
    engine = make_engine(MODEL, slots=3)
    engine.submit([ask(0, n=5, max_tokens=4), ask(1, max_tokens=4)])
    assert [r.key for r in engine.collect()] == [
        (100, 0),
        (100, 1),
        (100, 2),
        (100, 3),
        (100, 4),
        (101, 0),
    ]


def test_versions_are_recorded() -> None:
    [rollout] = make_engine(MODEL, version=7).generate([ask(0, max_tokens=3)])
    assert rollout.trace is not None
    assert rollout.trace.versions.tolist() == [7, 7, 7] and rollout.trace.versions.dtype == np.int32
    assert rollout.trace.ids.dtype == np.int32
    assert (rollout.first_version, rollout.last_version) == (7, 7)
