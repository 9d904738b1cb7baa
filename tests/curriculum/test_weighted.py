from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.curriculum.source import WeightedRows


def filled(weights: list[float]) -> WeightedRows:
    rows = WeightedRows(len(weights))
    rows.fill(np.array(weights))
    return rows


def test_draws_follow_the_weights_without_replacement() -> None:
    """P(first a, then b) = w_a / W * w_b / (W - w_a)."""
    weights = [1.0, 2.0, 5.0]
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(20_000):
        pair = tuple(filled(weights).draw(2, np.random.default_rng(seed)).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    for a, b in itertools.permutations(range(3), 2):
        expected = weights[a] / 8 * weights[b] / (8 - weights[a])
        # three standard deviations
        assert counts[a, b] / 20_000 == pytest.approx(expected, abs=0.011)


def test_no_row_is_drawn_twice_and_none_without_weight() -> None:
    rows = filled([1.0, 0.0, 1e-300, 1e200, 0.0])
    assert rows.draw(9, np.random.default_rng(1)).tolist() == [3, 0, 2]
    assert rows.total == 0.0
    assert len(rows.draw(2, np.random.default_rng(1))) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_any_size(size: int) -> None:
    assert sorted(filled([1.0] * size).draw(size + 1, np.random.default_rng(0)).tolist()) == list(
        range(size)
    )


@given(
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=70),
    changes=st.lists(st.tuples(st.integers(0, 69), st.floats(0, 10)), max_size=10),
    seed=st.integers(0, 99),
)
def test_changed_is_the_same_as_built_anew(
    weights: list[float], changes: list[tuple[int, float]], seed: int
) -> None:
    rows = filled(weights)
    for row, weight in changes:
        rows.put(np.array([row % len(weights)]), weight)
        weights[row % len(weights)] = weight
    again = filled(weights)
    assert rows.total == again.total
    assert rows.total == pytest.approx(sum(weights))
    drawn = [tree.draw(5, np.random.default_rng(seed)).tolist() for tree in (rows, again)]
    assert drawn[0] == drawn[1]
    assert all(weights[row] > 0 for row in drawn[0])


@pytest.mark.parametrize(("first", "count"), [(0, 4), (4, 4), (8, 2), (10, 1), (0, 8)])
def test_a_part_is_added_up_as_the_whole_would_be(first: int, count: int) -> None:
    rows, again = filled([1.0] * 11), filled([1.0] * 11)
    for tree in (rows, again):
        tree.weights[first : first + count] = 0.1
    rows.add_up(first, count)
    again.add_up()
    assert rows.total == again.total == pytest.approx(11 - 0.9 * min(count, 11 - first))
    assert (
        rows.draw(11, np.random.default_rng(0)).tolist()
        == again.draw(11, np.random.default_rng(0)).tolist()
    )
