from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.report import formats
from whet.report.arms import Point
from whet.report.formats import (
    Reach,
    final_accuracy,
    first_crossing,
    median_reach,
    pick_levels,
    reach,
    saving,
)


def test_what_was_not_measured_is_a_dash() -> None:
    shown = [
        formats.count(None),
        formats.duration(None),
        formats.accuracy(None),
        formats.share(None),
    ]
    assert shown == ["–"] * 4
    assert formats.duration(math.inf) == "–"


def test_a_ratio_known_from_one_side_says_which() -> None:
    assert formats.times(Reach(2.14, 2.14)) == "2.1×"
    assert formats.times(Reach(2.14, math.inf)) == ">2.1×"
    assert formats.times(Reach(0.0, 0.333)) == "<0.33×"
    assert formats.times(Reach(0.0, math.inf)) == "–"
    assert formats.times(Reach(250.0, 250.0)) == "250×"
    assert formats.times(Reach(0.96, 0.96)) == "1.0×"
    ends = ((1.5, 2.4), (1.5, math.inf), (0.0, 0.8), (2.0, 2.0), (0.0, math.inf))
    assert [formats.times_range(Reach(*pair)) for pair in ends] == [
        "1.5–2.4×",
        ">1.5×",
        "<0.8×",
        "",
        "",
    ]


def curve(*pairs: tuple[float, float]) -> list[Point]:
    """(thousand tokens, accuracy); a second for every two thousand tokens, a step for every ten."""
    return [Point(step=int(k / 10), tokens=1000 * k, seconds=k / 2, accuracy=a) for k, a in pairs]


TOKENS_UNIFORM, TOKENS_SCREENED = (
    (0, 97, 237, 375, 529, 684, 828, 959),
    (0, 85, 210, 341, 484, 631, 763, 895),
)
UNIFORM = curve(
    *zip(TOKENS_UNIFORM, (0.215, 0.593, 0.595, 0.65, 0.733, 0.657, 0.698, 0.71), strict=True)
)
SCREENED = curve(
    *zip(TOKENS_SCREENED, (0.215, 0.598, 0.66, 0.7, 0.743, 0.748, 0.782, 0.77), strict=True)
)


def test_a_level_needs_two_evaluations_in_a_row() -> None:
    crossing = first_crossing(SCREENED, 0.7)
    assert crossing is not None and (crossing.tokens, crossing.seconds, crossing.step) == (
        341_000,
        170.5,
        34,
    )
    assert first_crossing(UNIFORM, 0.7) is None  # 0.733 stands alone, and so does the last, 0.71
    crossing = first_crossing(UNIFORM, 0.65)
    assert crossing is not None and crossing.tokens == 375_000  # exactly at the level counts
    assert first_crossing(SCREENED, 0.75) == SCREENED[6]
    assert first_crossing(SCREENED, 0.78) is None


def test_the_last_evaluation_alone_never_counts() -> None:
    assert first_crossing(curve((0, 0.9)), 0.5) is None
    assert first_crossing(curve((0, 0.1), (10, 0.9)), 0.5) is None
    assert first_crossing([], 0.5) is None


def test_a_run_that_never_crosses_needs_more_than_its_last_evaluation_below() -> None:
    assert reach(SCREENED, 0.7, "tokens") == Reach(341_000, 341_000)
    # 0.71 at 959k may yet be confirmed
    assert reach(UNIFORM, 0.7, "tokens") == Reach(828_000, math.inf)
    assert reach(UNIFORM, 0.8, "seconds") == Reach(479.5, math.inf)
    assert reach([], 0.8, "tokens") == Reach(0.0, math.inf)


def test_savings_keep_what_is_not_known_as_a_bound() -> None:
    known, never = Reach(300.0, 300.0), Reach(900.0, math.inf)
    assert saving(known, known) == Reach(1.0, 1.0)
    assert saving(never, known) == Reach(3.0, math.inf)
    assert saving(known, never) == Reach(0.0, 1 / 3)
    assert saving(never, never) == Reach(0.0, math.inf)
    assert saving(known, Reach(0.0, 0.0)) == Reach(0.0, math.inf)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.booleans()), min_size=1, max_size=7), st.data())
def test_the_true_median_lies_in_the_interval(
    seeds: list[tuple[float, bool]], data: st.DataObject
) -> None:
    """Whatever an unfinished seed would have taken, the median of all seeds is inside."""
    truth = [low if done else data.draw(st.floats(low, 1e7)) for low, done in seeds]
    middle = median_reach([Reach(low, low if done else math.inf) for low, done in seeds])
    ordered = sorted(truth)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    assert middle.low <= median * (1 + 1e-12) and median <= middle.high * (1 + 1e-12)


def test_final_accuracy_is_the_mean_of_the_last_three() -> None:
    assert final_accuracy(SCREENED) == pytest.approx((0.748 + 0.782 + 0.77) / 3)
    assert final_accuracy(SCREENED[:2]) == pytest.approx((0.215 + 0.598) / 2)
    assert final_accuracy([]) is None


def test_levels_end_at_the_highest_that_some_run_reaches() -> None:
    assert pick_levels([UNIFORM, SCREENED]) == [0.45, 0.55, 0.65, 0.7, 0.75]
    assert pick_levels([UNIFORM]) == [0.35, 0.45, 0.55, 0.6, 0.65]


def test_levels_stay_above_the_start() -> None:
    assert pick_levels([curve((0, 0.62), (1, 0.71), (2, 0.75), (3, 0.76))]) == [0.65, 0.7, 0.75]


def test_levels_get_finer_when_little_moved() -> None:
    levels = pick_levels([curve((0, 0.7), (1, 0.723), (2, 0.741), (3, 0.745))])
    assert levels == [0.72, 0.73, 0.74]
    assert pick_levels([curve((0, 0.7), (1, 0.6), (2, 0.6))]) == []
    assert pick_levels([[]]) == []
