"""Admission in order of arrival, forks, pages kept in reserve, and what an update cuts."""

import numpy as np
import pytest
import torch
from slow_engine import ask, by_key, make_engine, sharp_model

from whet.model.twin import KVShape
from whet.rollout import scheduler as module
from whet.rollout.flight import Flight, empty_trace
from whet.rollout.pages import Cache, PagedCache, SlotCache
from whet.rollout.scheduler import Scheduler
from whet.types import Phase, Trace

SHAPES = [KVShape(1, 2, 2, torch.float32)]


def flight(
    arrival: int, prompt: int = 0, size: int = 4, written: int = 0, group: int = 0, phase: Phase = "train"
) -> Flight:
    trace = empty_trace(np.dtype(np.float32))
    if written:
        trace = Trace(
            ids=np.ones(written, np.int32),
            log_probs=np.zeros(written, np.float32),
            versions=np.zeros(written, np.int32),
        )
    return Flight(ask(prompt, group=group, phase=phase), arrival, arrival, np.ones(size, np.int64), 9, (0, 0), trace)


def roomy() -> Cache:
    return SlotCache(SHAPES, 8, 32, torch.device("cpu"))


def wave(scheduler: Scheduler, running: int, slots: int, cache: Cache) -> list[tuple[int, int]]:
    return [(f.arrival, leader) for f, leader in scheduler.next_wave(running, slots, cache)]


def test_rollouts_of_a_prompt_fork_from_the_first_in_the_wave() -> None:
    scheduler = Scheduler()
    scheduler.add(
        [flight(0, prompt=1), flight(1, prompt=1), flight(2, prompt=2), flight(3, prompt=1), flight(4, prompt=1)]
    )
    assert wave(scheduler, 1, 5, roomy()) == [(0, 0), (1, 0), (2, 2), (3, 0)]
    assert wave(scheduler, 4, 5, roomy()) == [(4, 0)]  # in a later wave the prompt is prefilled again
    assert wave(scheduler, 0, 5, roomy()) == []


def test_what_has_written_neither_forks_nor_is_forked() -> None:
    scheduler = Scheduler()
    scheduler.add([flight(0, written=2), flight(1), flight(2, written=1), flight(3)])
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0), (1, 1), (2, 2), (3, 1)]


def test_given_back_goes_first_in_order_of_arrival() -> None:
    scheduler = Scheduler()
    scheduler.add([flight(5), flight(6)])
    scheduler.give_back([flight(4), flight(2), flight(3)])
    assert [f.arrival for f in scheduler.waiting] == [2, 3, 4, 5, 6]


def test_a_page_for_each_running_row_stays_free() -> None:
    """10 pages of 4 tokens; each prompt of 6 takes two and wants one in reserve: three fit (6 taken, 4 left for 3)."""
    cache = PagedCache(SHAPES, 8, 32, 4, 10, torch.device("cpu"))
    scheduler = Scheduler()
    scheduler.add([flight(i, prompt=i, size=6) for i in range(6)])
    assert [a for a, _ in wave(scheduler, 0, 8, cache)] == [0, 1, 2]
    forks = Scheduler()
    forks.add([flight(i, size=6) for i in range(6)])  # one prompt: one shared page, one own page each
    assert [a for a, _ in wave(forks, 0, 8, cache)] == [0, 1, 2, 3]


def test_one_flight_alone_is_always_admitted() -> None:
    cache = PagedCache(SHAPES, 8, 32, 4, 8, torch.device("cpu"))
    scheduler = Scheduler()
    scheduler.add([flight(0, size=31), flight(1)])
    assert [a for a, _ in wave(scheduler, 0, 8, cache)] == [0]


def test_a_prefill_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PADDED", 20)
    scheduler = Scheduler()
    scheduler.add([flight(0, prompt=0, size=5), flight(1, prompt=1, size=9), flight(2, prompt=0), flight(3, prompt=3)])
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0), (1, 1), (2, 0)]  # a third prefill would pad to 27
    scheduler = Scheduler()
    scheduler.add([flight(0, size=30)])
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0)]


def test_a_packed_prefill_counts_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKED", 20)
    scheduler = Scheduler(packed=True)
    scheduler.add([flight(i, prompt=i, size=size) for i, size in enumerate((5, 9, 6, 1))])
    assert wave(scheduler, 0, 8, roomy()) == [(0, 0), (1, 1), (2, 2)]  # 20 tokens; padded they would be 27


def test_small_prefills_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp_model()
    requests = [ask(i, n=2, max_tokens=6) for i in range(6)]
    want = by_key(make_engine(model, slots=8).generate(requests))
    monkeypatch.setattr(module, "PADDED", 12)
    assert by_key(make_engine(model, slots=8).generate(requests)) == want


def test_cut_takes_waiting_flights_of_begun_groups_only() -> None:
    scheduler = Scheduler()
    scheduler.add(
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
    scheduler.add([flight(0, group=1, phase="eval"), flight(1, group=1)])
    wave(scheduler, 0, 1, roomy())
    assert scheduler.begun == set() and scheduler.cut() == []
