"""The bootstrap of `whet compare`: what is drawn again, and that without noise it is the rule itself."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.eval import wilson
from whet.report.arms import Point, effective_trials
from whet.report.draws import DRAWS, Redrawn, middle_95, peaked
from whet.report.formats import final_accuracy, median_reach, reach

accuracies = st.lists(st.integers(0, 20).map(lambda k: k / 20), max_size=12)


def curve(values: list[float], trials: float = 0.0) -> list[Point]:
    return [
        Point(step=i, tokens=10.0 * i, seconds=0.5 * i, accuracy=a, trials=trials)
        for i, a in enumerate(values)
    ]


@settings(max_examples=40)
@given(accuracies, st.integers(0, 20).map(lambda k: k / 20))
def test_without_noise_and_other_seeds_every_draw_is_the_rule_itself(
    values: list[float], level: float
) -> None:
    points = curve(values)
    drawn = Redrawn([points], 0)
    for axis in ("tokens", "seconds"):
        assert set(drawn.costs(level, axis)) == {reach(points, level, axis).high}
    if values:
        assert drawn.finals() == pytest.approx(final_accuracy(points))


def test_each_draw_is_the_median_of_the_seeds_in_it() -> None:
    """Three seeds that cross at 10, 20 and 40: by 27 equal draws the median is each of them 7, 13 and 7 times."""
    runs = [curve([0.0] * k + [1.0] * 3) for k in (1, 2, 4)]
    costs = Redrawn(runs, 0).costs(0.5, "tokens").tolist()
    assert (
        set(costs) == {10.0, 20.0, 40.0}
        and median_reach([reach(r, 0.5, "tokens") for r in runs]).low == 20.0
    )
    for cost, ways in ((10.0, 7), (20.0, 13), (40.0, 7)):
        assert costs.count(cost) / DRAWS == pytest.approx(ways / 27, abs=0.07)


def test_the_end_is_as_unsure_as_its_answers_are_few() -> None:
    # the last three have 300 answers
    finals = Redrawn([curve([0.1, 0.5, 0.6, 0.7], trials=100)], 0).finals()
    spread = fmean(p * (1 - p) for p in (0.5, 0.6, 0.7)) / 300
    assert finals.mean() == pytest.approx(0.6, abs=0.005) and finals.var() == pytest.approx(
        spread, rel=0.2
    )
    low, high = middle_95(finals)
    assert high - low == pytest.approx(2 * 1.96 * spread**0.5, rel=0.15)


@given(accuracies)
def test_a_peak_is_kept_and_nothing_rising_or_falling_is_nearer(values: list[float]) -> None:
    fit, array = peaked(values), np.array(values)
    top = int(fit.argmax()) if values else 0
    assert (np.diff(fit[: top + 1]) >= -1e-12).all() and (np.diff(fit[top:]) <= 1e-12).all()
    assert ((fit - array) ** 2).sum() <= ((np.sort(array) - array) ** 2).sum() + 1e-12
    assert fit.sum() == pytest.approx(array.sum())


@given(st.floats(0, 1), st.integers(2, 5000))
def test_an_interval_tells_how_many_answers_it_had(share: float, size: int) -> None:
    assert effective_trials(share, *wilson(share, size)) == pytest.approx(size, rel=0.02)
    assert effective_trials(share, share, share) == 0.0
