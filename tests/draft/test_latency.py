"""Times of steps: averaged, robust against a hiccup, and guessed from their neighbours."""

import pytest

from whet.draft.base import OFF, DraftArm
from whet.draft.controller import Latency, cell_of

ARMS = [OFF, DraftArm("ngram", 4), DraftArm("ngram", 8)]


def true(arm: DraftArm, rows: int, kv: int = 0) -> float:
    return 1e-3 + 4e-6 * rows * arm.tokens + 2e-5 * (2**kv - 1)


def test_a_hiccup_does_not_count_in_full() -> None:
    times = Latency(ARMS)
    for _ in range(20):
        times.record(OFF, (4, 0), 0.001)
    times.record(OFF, (4, 0), 10.0)
    assert times.seconds(OFF, (4, 0)) < 0.0012


def test_a_mean_first_then_an_exponential_one() -> None:
    times = Latency(ARMS)
    for seconds in (0.001, 0.002, 0.003):
        times.record(OFF, (4, 0), seconds)
    assert times.seconds(OFF, (4, 0)) == pytest.approx(0.002)
    for _ in range(200):
        times.record(OFF, (4, 0), 0.005)
    assert times.seconds(OFF, (4, 0)) == pytest.approx(0.005, rel=1e-3)


def test_arms_never_timed_are_guessed_from_plain_steps() -> None:
    times = Latency(ARMS)
    times.record(OFF, (8, 0), 0.001)
    assert times.seconds(ARMS[1], (8, 0)) == pytest.approx(0.001 * 1.08)
    assert {name: list(cells) for name, cells in times.times.items() if cells} == {"off": [(8, 0)]}


def test_the_shape_is_found_and_moves_times_to_other_batches() -> None:
    """The deep arm was timed once, with many rows: with few rows it is known to cost little more than plain steps."""
    times = Latency(ARMS)
    for arm in ARMS:
        times.record(arm, (128, 0), true(arm, 128))
    for rows, kv in ((64, 1), (16, 3), (4, 2)):
        times.record(OFF, (rows, kv), true(OFF, rows, kv))
    for arm in ARMS:
        for rows, kv in ((2, 0), (32, 2), (100, 4)):
            assert times.seconds(arm, (rows, kv)) == pytest.approx(true(arm, rows, kv), rel=1e-6)


def test_nonsense_does_not_make_a_shape() -> None:
    times = Latency(ARMS)
    for rows, seconds in ((1, 1e-5), (2, 5.0), (64, 1e-6), (128, 9.0)):
        times.record(OFF, (rows, 0), seconds)
    for rows in (1, 3, 500):
        assert times.seconds(ARMS[2], (rows, 0)) > 0


def test_saved_and_loaded() -> None:
    times = Latency(ARMS)
    times.record(OFF, cell_of(64, 2**30), 0.002)
    other = Latency(ARMS[:1])
    other.load({**times.state(), "gone_1_1_2": [[1, 0, 0.5, 1]]})
    assert other.times == {"off": {(64, 4): (0.002, 1.0)}}
