"""Every advantage against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.learn import losses
from whet.learn.losses import dr_grpo, grpo, overlong_penalty, reinforce, reinforce_pp, rloo

ONE_OF_FOUR = np.array([1.0, 0.0, 0.0, 0.0])


def test_reinforce_is_the_reward_and_no_view_of_it():
    rewards = np.array([0.5, -1.0])
    (a,) = reinforce([rewards])
    assert a.tolist() == [0.5, -1.0]
    a[0] = 9.0
    assert rewards[0] == 0.5


def test_rloo():
    (a,) = rloo([ONE_OF_FOUR])
    assert a.tolist() == [1.0, -1 / 3, -1 / 3, -1 / 3]
    assert rloo([np.array([3.0, 1.0])])[0].tolist() == [2.0, -2.0]


@pytest.mark.parametrize(("right", "n"), [(1, 4), (3, 8), (2, 24)])
def test_rloo_sum_of_advantage_times_reward(right, n):
    """sum A_i r_i = K (N - K) / (N - 1)."""
    r = np.array([1.0] * right + [0.0] * (n - right))
    assert float(rloo([r])[0] @ r) == pytest.approx(right * (n - right) / (n - 1))


def test_grpo_divides_by_the_sample_deviation():
    """mean 1/4; squared deviations 9/16 + 3/16 = 3/4, over 3 is 1/4, so std = 1/2."""
    (a,) = grpo([ONE_OF_FOUR], eps=0.0)
    assert a.tolist() == [1.5, -0.5, -0.5, -0.5]
    assert grpo([ONE_OF_FOUR], eps=0.5)[0].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_dr_grpo_only_centres():
    assert dr_grpo([ONE_OF_FOUR])[0].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_reinforce_pp_takes_the_batch_for_a_baseline():
    """Rewards 1 0 | 1 0 0 0 | 1 1: mean 1/2, squares 8 x 1/4 over 7, std sqrt(2/7). The solved group learns, too."""
    a = reinforce_pp([np.array([1.0, 0.0]), ONE_OF_FOUR, np.array([1.0, 1.0])], eps=0.0)
    one = 0.5 / (2 / 7) ** 0.5
    np.testing.assert_allclose(a[0], [one, -one])
    np.testing.assert_allclose(a[1], [one, -one, -one, -one])
    np.testing.assert_allclose(a[2], [one, one])


def test_reinforce_pp_of_equal_rewards_is_exactly_zero():
    a = reinforce_pp([np.full(3, 0.1), np.zeros(0), np.full(4, 0.1)])
    assert [x.tolist() for x in a] == [[0.0] * 3, [], [0.0] * 4]
    assert reinforce_pp([np.array([1.0])])[0].tolist() == [0.0]


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo"])
def test_no_spread_is_exactly_zero_whatever_the_rounding(name):
    """The mean of three 0.1 is not 0.1 in floating point."""
    awkward = np.full(3, 0.1)
    assert (awkward - awkward.mean()).any()
    groups = [awkward, np.full(7, 1 / 3), np.array([1.0]), np.zeros(0), np.array([1.0, 0.0])]
    a = getattr(losses, name)(groups)
    assert [x.size for x in a] == [3, 7, 1, 0, 2]
    assert not np.concatenate(a[:4]).any()
    assert a[4][0] > 0 > a[4][1]


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo"])
@given(rewards=st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=9), min_size=1, max_size=5))
def test_group_baselines_sum_to_zero(name, rewards):
    for a in getattr(losses, name)([np.array(r) for r in rewards]):
        assert np.isfinite(a).all()
        assert abs(a.sum()) <= 1e-9 * max(1.0, np.abs(a).max())


def test_nothing_to_do():
    assert reinforce_pp([]) == []
    assert rloo([]) == []


def test_overlong_penalty():
    """Limit 100, window 20: free to 80, then -1/20 a token, -1 from 100 on."""
    assert [overlong_penalty(n, 100, 20) for n in (1, 80, 81, 90, 100, 130)] == [
        0.0,
        0.0,
        -0.05,
        -0.5,
        -1.0,
        -1.0,
    ]
    assert overlong_penalty(100, 100, 0) == 0.0
