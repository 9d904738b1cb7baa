"""All evaluations of an arm in one rising curve: its crossings, and how sure they are."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix_results import DRAWS, crossing, gain_costs, gain_shares, pooled_costs, pooled_shares, rising
from test_matrix_results import cell


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_a_rising_fit(values: list[float]) -> None:
    """It rises, keeps the sum, and no rising sequence is nearer: not the values sorted, nor one level."""
    fit = rising(values)
    assert (np.diff(fit) >= 0).all() and fit.sum() == pytest.approx(sum(values))

    def off(other: np.ndarray) -> float:
        return float(((other - values) ** 2).sum())

    assert off(fit) <= off(np.sort(values)) + 1e-12 and off(fit) <= off(np.full(len(values), np.mean(values))) + 1e-12


def test_crossings_by_hand() -> None:
    costs, fit = np.array([0.0, 10.0, 20.0]), np.array([0.1, 0.2, 0.2])
    assert [crossing(costs, fit, level) for level in (0.1, 0.15, 0.2, 0.21)] == [10.0, 10.0, 10.0, math.inf]


def straight(arm: str, seeds: int, step: float, **more: bool) -> list[dict[str, object]]:
    """From 0.1 up by `step` every 10 thousand tokens, five times."""
    points = [(10.0 * i, 10.0 * i, 0.1 + step * i) for i in range(6)]
    return [cell(arm, seed, points, **more) for seed in range(seeds)]


def test_twice_as_steep_costs_half() -> None:
    slow, fast = straight("slow", 3, 0.05), straight("fast", 3, 0.1)
    assert pooled_costs(slow, 0.3, "tokens")[0] == 40_000 and pooled_costs(fast, 0.3, "tokens")[0] == 20_000
    shares = pooled_shares({"slow": slow, "fast": fast}, "slow", 0.3, "tokens")
    assert [share[:6] for share in shares] == ["1.00 (", "0.50 ("]
    draws = pooled_costs(slow, 0.3, "tokens")[1:]
    assert len(draws) == DRAWS and 30_000 <= np.median(draws) <= 50_000
    assert pooled_costs(slow, 0.3, "tokens").tolist() == pooled_costs(slow, 0.3, "tokens").tolist(), "seeded"


def test_a_lucky_evaluation_is_no_crossing() -> None:
    """Seed 0 has 0.3 once, between others of 0.1: no level."""
    lucky = cell("a", 0, [(0, 0, 0.1), (10, 10, 0.1), (20, 20, 0.3), (30, 30, 0.1), (40, 40, 0.1)])
    steady = cell("a", 1, [(0, 0, 0.1), (10, 10, 0.1), (20, 20, 0.1), (30, 30, 0.1), (40, 40, 0.1)])
    assert pooled_costs([lucky, steady], 0.2, "tokens")[0] == math.inf


def test_what_is_not_reached_or_not_known() -> None:
    flat, slow = straight("flat", 1, 0.0), straight("slow", 1, 0.05)
    arms = {"slow": slow, "flat": flat, "shared": straight("shared", 2, 0.05, solo=False)}
    assert pooled_shares(arms, "slow", 0.3, "tokens")[1].startswith("never")
    assert pooled_shares(arms, "flat", 0.3, "tokens") == []
    assert pooled_shares(arms, "slow", 0.3, "seconds")[2] == "–" and pooled_shares(arms, "shared", 0.3, "seconds") == []


def test_the_bootstrap_draws_seeds_anew() -> None:
    """Two seeds and a million problems, so that only the seeds can differ between draws: the early one crosses at 10
    thousand tokens, the late one at 100 thousand. Half of the draws hold both, a quarter either alone."""
    size = {"name": "test", "prompts": 1_000_000, "n": 1}
    early = cell("a", 0, [(0, 0, 0.1), (10, 10, 0.3), (20, 20, 0.3)]) | {"evaluation": size}
    late = cell("a", 1, [(0, 0, 0.1), (100, 100, 0.3), (200, 200, 0.3)]) | {"evaluation": size}
    found, *draws = pooled_costs([early, late], 0.2, "tokens").tolist()
    assert found == 10_000 and set(draws) == {10_000.0, 100_000.0}
    assert 0.15 < draws.count(100_000.0) / DRAWS < 0.35


def test_what_a_hundredth_costs_by_hand() -> None:
    """0.05 in 10 thousand tokens is a hundredth in 2 thousand; twice as steep is half of it; what falls never gains."""
    slow, fast = straight("slow", 3, 0.05), straight("fast", 3, 0.1)
    assert gain_costs(slow, "tokens")[0] == pytest.approx(2000) and gain_costs(fast, "tokens")[0] == pytest.approx(1000)
    arms = {
        "slow": slow,
        "fast": fast,
        "falls": straight("falls", 1, -0.01),
        "shared": straight("s", 1, 0.1, solo=False),
    }
    shares = gain_shares(arms, "slow", "tokens")
    assert [share[:6] for share in shares] == ["1.00 (", "0.50 (", "never ", "0.50 ("]
    low, high = (float(text) for text in shares[1][6:-1].split("–"))
    assert 0.35 < low < 0.5 < high < 0.65
    assert gain_shares(arms, "slow", "seconds")[3] == "–" and gain_shares(arms, "falls", "tokens") == []
