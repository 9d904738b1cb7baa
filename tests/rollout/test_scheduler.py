"""Admission in order of the queue, forks, long flights in chunks, pages forecast, and what an update cuts."""

import numpy as np
import pytest
import torch
from slow_engine import ask, by_key, make_engine, sharp_model

from whet.model.twin import KVShape
from whet.rollout import scheduler as module
from whet.rollout.base import empty_trace
from whet.rollout.pages import Cache, make_cache
from whet.rollout.rows import Flight, Rows
from whet.rollout.scheduler import CacheRoom, Lengths, Scheduler
from whet.types import Phase, Trace

SHAPES = [KVShape(1, 2, 2, torch.float32)]


def flight(
    arrival: int,
    prompt: int = 0,
    size: int = 4,
    written: int = 0,
    group: int = 0,
    phase: Phase = "train",
) -> Flight:
    trace = empty_trace(np.dtype(np.float32))
    if written:
        trace = Trace(
            ids=np.ones(written, np.int32),
            log_probs=np.zeros(written, np.float32),
            versions=np.zeros(written, np.int32),
        )
    return Flight(
        ask(prompt, group=group, phase=phase),
        arrival,
        arrival,
        np.ones(size, np.int64),
        9,
        (0, 0),
        trace,
    )


def roomy() -> Cache:
    return Cache(SHAPES, 8, 32, torch.device("cpu"))


def wave(scheduler: Scheduler, running: int, slots: int, cache: Cache) -> list[tuple[int, int]]:
    """Arrival of each flight that is admitted, and of the one it forks from: itself, if it is fed."""
    rows = Rows(slots, 32, np.dtype(np.float32), torch.device("cpu"))
    for i in range(running):
        rows.add([flight(-1 - i)])
    got = scheduler.next_wave(slots - running, CacheRoom(cache, rows, Lengths()))
    assert all(chunk.start == 0 and chunk.last for chunk in got.chunks)
    fed = [chunk.flight.arrival for chunk in got.chunks]
    return sorted(
        [(arrival, arrival) for arrival in fed]
        + [(f.arrival, fed[leader]) for f, leader in got.forks]
    )


def test_rollouts_of_a_prompt_fork_from_the_first_in_the_wave() -> None:
    scheduler = Scheduler()
    scheduler.waiting.extend(
        [
            flight(0, prompt=1),
            flight(1, prompt=1),
            flight(2, prompt=2),
            flight(3, prompt=1),
            flight(4, prompt=1),
        ]
    )
    assert wave(scheduler, 1, 5, roomy()) == [(0, 0), (1, 0), (2, 2), (3, 0)]
    # in a later wave the prompt is prefilled again
    assert wave(scheduler, 4, 5, roomy()) == [(4, 4)]
    assert wave(scheduler, 0, 5, roomy()) == []


def test_few_wait_for_company_while_others_run_but_not_long() -> None:
    """Three together at once; one alone after four turns, or when no other row runs."""
    scheduler, cache = Scheduler(batch=3), roomy()
    room = CacheRoom(cache, Rows(8, 32, np.dtype(np.float32), torch.device("cpu")), Lengths())

    def admitted(slots: int, running: bool) -> int:
        return len(scheduler.next_wave(slots, room, running=running).chunks)

    scheduler.waiting.extend([flight(0, prompt=0)])
    assert admitted(4, running=False) == 1
    scheduler.waiting.extend([flight(i, prompt=i) for i in (1, 2)])
    assert [admitted(4, running=True) for _ in range(3)] == [0, 0, 0]
    scheduler.waiting.extend([flight(3, prompt=3)])
    assert admitted(2, running=True) == 0, "for three there must be slots, too"
    assert admitted(4, running=True) == 3
    scheduler.waiting.extend([flight(4, prompt=4)])
    assert [admitted(1, running=True) for _ in range(5)] == [0] * 4 + [1]


def test_what_has_written_neither_forks_nor_is_forked() -> None:
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(0, written=2), flight(1), flight(2, written=1), flight(3)])
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0), (1, 1), (2, 2), (3, 1)]


def test_given_back_goes_first_in_order_of_arrival() -> None:
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(5), flight(6)])
    scheduler.give_back([flight(4), flight(2), flight(3)])
    assert [f.arrival for f in scheduler.waiting] == [2, 3, 4, 5, 6]


def test_pages_must_suffice_for_a_while() -> None:
    """11 pages of 4 tokens. A prompt of 6 with 9 tokens to write is at 10 a page from now: 2.5 pages, and half of one.

    Three need 9, four need 12. Of one prompt, the first needs so many and a fork, which shares a page, 2: five need 11.
    """
    cache = make_cache(SHAPES, 8, 32, 4, 11, torch.device("cpu"))
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(i, prompt=i, size=6) for i in range(6)])
    assert [a for a, _ in wave(scheduler, 0, 8, cache)] == [0, 1, 2]
    assert scheduler.full
    forks = Scheduler()
    forks.waiting.extend([flight(i, size=6) for i in range(6)])
    assert [a for a, _ in wave(forks, 0, 8, cache)] == [0, 1, 2, 3, 4]


def test_a_pool_for_every_slot_admits_to_every_slot() -> None:
    """Whatever is expected: no row can write more than its limit."""
    cache = make_cache(SHAPES, 8, 32, 32, 8, torch.device("cpu"))
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(i, prompt=i, size=23) for i in range(9)])
    assert len(wave(scheduler, 0, 8, cache)) == 8


def test_after_a_shortage_nobody_is_admitted_until_a_row_ends() -> None:
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(0)])
    scheduler.full = True
    assert wave(scheduler, 1, 8, roomy()) == []
    scheduler.full = False
    assert wave(scheduler, 1, 8, roomy()) == [(0, 0)]


def test_one_flight_alone_is_always_admitted() -> None:
    cache = make_cache(SHAPES, 8, 32, 4, 8, torch.device("cpu"))
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(0, size=31), flight(1)])
    assert [a for a, _ in wave(scheduler, 0, 8, cache)] == [0]


def test_a_prefill_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL", 40)
    scheduler = Scheduler()
    scheduler.waiting.extend(
        [
            flight(0, prompt=0, size=5),
            flight(1, prompt=1, size=9),
            flight(2, prompt=0),
            flight(3, prompt=3),
        ]
    )
    # a third prefill would pad to 27, of at most 20
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0), (1, 1), (2, 0)]


def test_what_is_longer_than_a_prefill_is_fed_in_chunks_and_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """25 tokens, 10 a step: two steps of its own; with the last five go its fork and a prompt that fits beside them."""
    monkeypatch.setattr(module, "PREFILL", 10)
    scheduler = Scheduler(packed=True)
    long = flight(0, size=25)
    scheduler.waiting.extend(
        [long, flight(1, size=25), flight(2, prompt=2, size=5), flight(3, prompt=3, size=1)]
    )
    fed = 0
    for _ in range(2):
        got = scheduler.next_wave(8, lambda f, forked: True, (long, fed) if fed else None)
        assert [(c.flight, c.start, c.stop, c.last) for c in got.chunks] == [
            (long, fed, fed + 10, False)
        ]
        assert got.forks == [] and len(scheduler.waiting) == 3
        fed = got.chunks[0].stop
    got = scheduler.next_wave(8, lambda f, forked: True, (long, fed))
    assert [(c.flight.arrival, c.start, c.stop, c.last) for c in got.chunks] == [
        (0, 20, 25, True),
        (2, 0, 5, True),
    ]
    assert [(f.arrival, leader) for f, leader in got.forks] == [(1, 0)] and got.tokens == 10


def test_a_long_one_does_not_begin_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL", 10)
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(0, size=2), flight(1, prompt=1, size=25)])
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0)]


def test_a_packed_prefill_counts_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL", 20)
    scheduler = Scheduler(packed=True)
    scheduler.waiting.extend(
        [flight(i, prompt=i, size=size) for i, size in enumerate((5, 9, 6, 1))]
    )
    # 20 tokens; padded they would be 27
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0), (1, 1), (2, 2)]


def test_small_prefills_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp_model()
    requests = [ask(i, n=2, max_tokens=6) for i in range(6)]
    want = by_key(make_engine(model, slots=8).generate(requests))
    monkeypatch.setattr(module, "PREFILL", 12)
    assert by_key(make_engine(model, slots=8).generate(requests)) == want


def test_cut_takes_waiting_flights_of_begun_groups_only() -> None:
    scheduler = Scheduler()
    scheduler.waiting.extend(
        [
            flight(0, group=1),
            flight(1, group=1),
            flight(2, group=2),
            flight(3, group=1),
            flight(4, group=1, phase="eval"),
        ]
    )
    wave(scheduler, 0, 1, roomy())
    assert [f.arrival for f in scheduler.cut()] == [1, 3]
    assert [f.arrival for f in scheduler.waiting] == [2, 4]
    assert scheduler.begun == {1}


def test_evaluation_begins_no_group() -> None:
    scheduler = Scheduler()
    scheduler.waiting.extend([flight(0, group=1, phase="eval"), flight(1, group=1)])
    wave(scheduler, 0, 1, roomy())
    assert scheduler.begun == set() and scheduler.cut() == []
