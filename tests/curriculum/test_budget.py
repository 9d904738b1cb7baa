from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.curriculum.allocation import largest_remainder
from whet.errors import WhetError

SIGMA = [0.5, 0.433013, 0.433013, 0.3, 0.0]


def test_by_hand() -> None:
    # ideal 12.005, 10.396, 10.396, 7.203, 0: floors sum to 39, and the tie of .396 goes to the lower index
    assert largest_remainder(SIGMA, 40) == [12, 11, 10, 7, 0]
    # why plain rounding will not do
    assert int(np.round(np.array(SIGMA) / sum(SIGMA) * 40).sum()) == 39
    # the last one is held at 2; of 38: 11.405, 9.877, 9.877, 6.842
    assert largest_remainder(SIGMA, 40, minimum=2) == [11, 10, 10, 7, 2]
    # sigma = sqrt(p (1 - p)) of p = .5, .25, .75, .1: ideal 9.604, 8.317, 8.317, 5.762
    assert largest_remainder([(p * (1 - p)) ** 0.5 for p in (0.5, 0.25, 0.75, 0.1)], 32) == [
        10,
        8,
        8,
        6,
    ]
    assert largest_remainder([0.5, 0.25, 0.25], 16) == [8, 4, 4]
    assert largest_remainder([0.40689, 0.26776, 0.19047, 0.13488], 32) == [13, 9, 6, 4]


def test_equal_shares_favour_the_first() -> None:
    assert largest_remainder([1, 1, 1], 8) == [3, 3, 2]
    assert largest_remainder([0.1] * 4, 10) == [3, 3, 2, 2]
    assert largest_remainder([0, 0, 0], 8) == [3, 3, 2]


def test_ties_are_exact_where_floats_would_tear_them() -> None:
    # 7 * 1/10, 7 * 2/10, 7 * 7/10 = 0.7, 1.4, 4.9; and 0.1 + 0.2 is not 0.3 in floats
    assert largest_remainder([1, 2, 7], 7) == [1, 1, 5]
    # three times 1.5, once 0.5: all fractions equal
    assert largest_remainder([3, 3, 3, 1], 5) == [2, 2, 1, 0]


def test_a_minimum_for_one_may_push_another_down_to_it() -> None:
    # 10 by 8, 1.9, 0.1: holding the last at 2 leaves 8, of which the second has 1.535: it is held, too
    assert largest_remainder([8, 1.9, 0.1], 10, minimum=2) == [6, 2, 2]


def test_nothing_to_divide() -> None:
    assert largest_remainder([], 0) == []
    assert largest_remainder([1, 2], 0) == [0, 0]
    assert largest_remainder([np.float32(0.5), np.float64(0.5)], 3) == [2, 1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        WhetError, match="10 rollouts cannot be divided among 6 prompts with at least 2 each"
    ):
        largest_remainder([1] * 6, 10, minimum=2)
    with pytest.raises(WhetError, match="among 0 prompts"):
        largest_remainder([], 3)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            largest_remainder([1.0, bad], 3)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(0, 500), st.integers(0, 4))
def test_exact_fair_and_never_below_the_minimum(
    shares: list[float], total: int, minimum: int
) -> None:
    total += minimum * len(shares)
    parts = largest_remainder(shares, total, minimum)
    assert sum(parts) == total and min(parts) >= minimum
    order = sorted(range(len(shares)), key=lambda i: (-shares[i], i))
    assert [parts[i] for i in order] == sorted(parts, reverse=True)  # a larger share gets no less
    if minimum == 0 and any(shares):
        whole = sum(Fraction(share) for share in shares)
        assert all(
            abs(part - Fraction(share) * total / whole) < 1
            for part, share in zip(parts, shares, strict=True)
        )
