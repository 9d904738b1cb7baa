"""Dose and response: its rules, with numbers by hand."""

import math

import pytest
from dose import (
    ARMS,
    COUNTED,
    SHARES,
    TUNING,
    cells_in_order,
    counts,
    groups_of,
    mix_of,
    saving,
    saving_interval,
    target_of,
    tokens_per_group,
    tokens_to,
    within,
)


def test_the_rest_of_a_mix_is_half_solved_and_half_hopeless() -> None:
    assert mix_of(12) == {"1-2": 0.44, "4": 0.12, "12": 0.44}
    assert all(sum(mix_of(share).values()) == pytest.approx(1) for share in SHARES)


def test_uniform_meets_as_many_informative_groups_as_the_others_keep() -> None:
    assert [groups_of("uniform", share) for share in SHARES] == [60, 25, 12, 6, 4]
    assert [groups_of("dapo", share) for share in SHARES] == [3] * 5
    assert groups_of("cures", 12) == 25, "cures trains on whatever it draws, as uniform does"


def test_the_target_is_halfway() -> None:
    assert target_of([[0.3, 0.5, 0.7, 0.7, 0.7]]) == 0.5
    # Starts 0.2 and 0.4; ends (0.4 + 0.6 + 0.8) / 3 = 0.6 and 0.8.
    assert target_of([[0.2, 0.4, 0.6, 0.8], [0.4, 0.8, 0.8, 0.8]]) == 0.5


def test_tokens_to_the_target() -> None:
    assert tokens_to([0, 100, 200], [0.2, 0.4, 0.8], 0.5) == pytest.approx(125)
    assert tokens_to([0, 100, 200], [0.2, 0.4, 0.8], 0.4) == pytest.approx(100)
    assert tokens_to([0, 100, 200], [0.2, 0.4, 0.4], 0.5) == math.inf
    assert tokens_to([0, 100, 200], [0.6, 0.7, 0.8], 0.5) == 0
    lucky = [0.2, 0.8, 0.2, 0.2, 0.8]  # rising: 0.2, then the mean 0.4 of three, then 0.8
    assert tokens_to([0, 100, 200, 300, 400], lucky, 0.6) == pytest.approx(350)


def test_tokens_per_informative_group() -> None:
    assert tokens_per_group([0, 40, 100, 200], [0, 1, 0, 3]) == 50, (
        "a run may be shorter than the first updates"
    )
    assert tokens_per_group([0, 40, 100, 200], [0, 0, 0, 3], first=2) == math.inf


def test_savings_and_their_interval() -> None:
    assert saving([100, 200, 300], [50, 100, 150]) == 2
    assert saving([100, 200], [100, math.inf]) == 0
    assert math.isnan(saving([100, math.inf], [100, 100]))
    assert saving_interval([100, 100, 100], [50, 50, 50]) == (2, 2), (
        "seeds that agree have no range"
    )
    low, high = saving_interval([100, 100, 100], [50, 50, 200])
    # All three draws are 200 in 1 of 27 cases, more than 2.5%; all are 50 in 8 of 27.
    assert (low, high) == (0.5, 2)


@pytest.mark.parametrize(
    ("forecast", "measured", "near"), [(1.25, 1, True), (1, 1.25, True), (1.26, 1, False)]
)
def test_near_is_the_same_both_ways(forecast: float, measured: float, near: bool) -> None:
    assert within(forecast, measured) is near
    assert within(1 / forecast, 1 / measured) is near
    assert not within(forecast, 0) and not within(forecast, math.nan)


def test_a_share_counts_if_speed_and_cures_were_foreseen() -> None:
    forecast = {"speed": 2.0, "cures": 1.0}
    assert counts(forecast, {"speed": 2.4, "cures": 1.1, "dapo": 9.0})
    assert not counts(forecast, {"speed": 2.6, "cures": 1.1})
    assert not counts(forecast, {"speed": 2.4, "cures": 0.7})
    assert not counts(forecast, {"speed": 2.4}), "without a measurement nothing was foreseen"


def test_the_order_of_the_cells() -> None:
    order = cells_in_order()
    assert len(order) == len(set(order)) == len(SHARES) * (len(TUNING) + len(ARMS) * len(COUNTED))
    assert all(seed in TUNING and arm == "uniform" for _, arm, seed in order[:10])
    assert {(arm, seed) for _, arm, seed in order[10:25]} == {
        (arm, 0) for arm in ("uniform", "speed", "cures")
    }
