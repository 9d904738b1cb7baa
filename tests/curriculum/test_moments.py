from __future__ import annotations

import json

import numpy as np
import pytest

from whet.curriculum.allocation import COMMON_RATE, Moments, moments_of

RIGHT = np.array([[1.0, 0.0], [3.0, 0.0]])  # mean (2, 0), mean square 5, variance 2
# mean (0, 3), mean square 35 / 3, variance 4
WRONG = np.array([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0]])
NONE = np.empty((0, 2))


def test_by_hand() -> None:
    """The means are 13 apart, squared; 2 / 2 and 4 / 3 of it are noise of the means."""
    assert moments_of(RIGHT, WRONG) == pytest.approx([5, 35 / 3, 13 - 1 - 4 / 3])


def test_one_response_of_a_class_tells_its_norm_and_no_gap() -> None:
    assert moments_of(RIGHT, WRONG[:1]) == pytest.approx([5, 1, np.nan], nan_ok=True)
    assert moments_of(NONE, WRONG) == pytest.approx([np.nan, 35 / 3, np.nan], nan_ok=True)
    assert np.isnan(moments_of(NONE, NONE)).all()


def test_the_estimates_are_unbiased_and_the_plain_distance_is_not() -> None:
    """True gap: |(1, 0, ...)|^2 = 1; noise of variance 8 and 18 in 8 dimensions, 3 right and 5 wrong responses."""
    rng, gaps, plain = np.random.default_rng(0), [], []
    for _ in range(4000):
        right, wrong = rng.normal(size=(3, 8)), 1.5 * rng.normal(size=(5, 8))
        right[:, 0] += 1.0
        gaps.append(moments_of(right, wrong))
        plain.append(np.sum((right.mean(0) - wrong.mean(0)) ** 2))
    assert np.mean(gaps, axis=0) == pytest.approx([9, 18, 1], abs=0.2)
    assert np.mean(plain) == pytest.approx(1 + 8 / 3 + 18 / 5, abs=0.2)
    assert np.min(gaps, axis=0)[2] < 0, (
        "some are negative, and must stay so until they are averaged"
    )


def test_averages_over_visits_and_over_updates() -> None:
    """Two prompts of (5, 35/3, 32/3) and (20, 5, 15): each lies three tenths off their mean."""
    moments = Moments(3)
    moments.update([(0, RIGHT, WRONG), (1, 2 * RIGHT, WRONG[:2])])
    assert moments.common == pytest.approx([12.5, 25 / 3, 77 / 6])
    own = [
        [12.5 - 2.25, 25 / 3 + 1, 77 / 6 - 0.65],
        [12.5 + 2.25, 25 / 3 - 1, 77 / 6 + 0.65],
        [12.5, 25 / 3, 77 / 6],
    ]
    assert moments.of(np.arange(3)) == pytest.approx(np.array(own), rel=1e-6)
    moments.update([(0, 2 * RIGHT, NONE)])  # from 10.25 towards 20; the rest stays
    assert moments.of(np.array([0])) == pytest.approx(
        np.array([[10.25 + 0.3 * 9.75, *own[0][1:]]]), rel=1e-6
    )
    assert moments.common == pytest.approx([12.5 + COMMON_RATE * 7.5, 25 / 3, 77 / 6])
    assert moments.visited.tolist() == [0, 1]


def test_a_gap_is_clipped_only_where_it_is_read() -> None:
    moments = Moments(1)
    moments.update([(0, np.array([[1.0], [-1.0]]), np.array([[1.0], [-1.0]]))])  # 0 - 2/2 - 2/2
    assert moments.of(np.array([0])).tolist() == [[1, 1, 0]]
    # 16, no noise: -2 + 0.3 * 18
    moments.update([(0, np.array([[2.0], [2.0]]), np.array([[-2.0], [-2.0]]))])
    assert moments.of(np.array([0])) == pytest.approx(np.array([[1.9, 1.9, 3.4]]), rel=1e-6)


def test_what_a_prompt_lacks_is_the_common_scaled_to_its_norms() -> None:
    moments = Moments(4)
    moments.common = np.array([10.0, 20.0, 6.0])
    moments._own[1] = (20.0, 40.0, np.nan)  # twice the common norms
    moments._own[2] = (np.nan, 5.0, np.nan)  # a quarter
    moments._own[3] = (1.0, 1.0, -3.0)  # a gap below its own noise
    want = [[10, 20, 6], [20, 40, 12], [2.5, 5, 1.5], [1, 1, 0]]
    assert moments.of(np.arange(4)) == pytest.approx(np.array(want))


def test_nothing_known_is_the_pass_rates_own_form() -> None:
    moments = Moments(2)
    assert moments.of(np.array([0, 1])).tolist() == [[1, 1, 0], [1, 1, 0]]
    moments.update([])
    assert moments.of(np.array([1])).tolist() == [[1, 1, 0]]
    # one class only, as under an estimator that passes over the other
    moments.update([(0, NONE, WRONG)])
    assert moments.of(np.array([1])) == pytest.approx(np.array([[35 / 3, 35 / 3, 0]]))
    moments.common = np.zeros(3)
    moments._own[1] = (2.0, np.nan, np.nan)
    assert np.isfinite(moments.of(np.array([0, 1]))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_no_evidence(bad: float) -> None:
    moments = Moments(1)
    with np.errstate(invalid="ignore"):
        moments.update([(0, RIGHT + bad, WRONG)])
    assert moments.of(np.array([0])) == pytest.approx(np.array([[35 / 3, 35 / 3, 0]]))


def test_resumes_exactly_and_keeps_only_visited_prompts() -> None:
    rng = np.random.default_rng(1)
    moments, other = Moments(1000), Moments(1000)
    for step in range(5):
        groups = [
            (int(row), rng.normal(size=(2, 4)), rng.normal(size=(step % 3, 4)))
            for row in rng.integers(9, size=3)
        ]
        moments.update(groups)
        text = json.dumps(moments.state_dict(), allow_nan=False)
        other = Moments(1000)
        other.load_state_dict(json.loads(text))
        assert np.array_equal(other.of(np.arange(1000)), moments.of(np.arange(1000)))
        assert np.array_equal(other.common, moments.common, equal_nan=True)
        assert other.state_dict() == moments.state_dict()
    assert len(text) < 500
    common = moments.common.copy()
    moments.clear()
    assert len(moments.visited) == 0 and np.array_equal(moments.common, common)
