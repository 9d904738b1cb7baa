from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import sampling_weights

from whet.curriculum.allocation import largest_remainder, sigma_gradient, sigma_of
from whet.errors import WhetError

P = [0.5, 0.1, 0.9, 0.0, 1.0]


def test_rho_at_several_temperatures() -> None:
    assert sampling_weights(P, 0.1) == pytest.approx(
        [0.778727, 0.105389, 0.105389, 0.005247, 0.005247], abs=5e-7
    )
    assert sampling_weights(P, 1.0) == pytest.approx(
        [0.259705, 0.212628, 0.212628, 0.157519, 0.157519], abs=5e-7
    )
    assert sampling_weights(P, 0.01)[0] > 0.99999999


@pytest.mark.parametrize("tau", [1e-9, 1e-4, 1e9])
def test_no_temperature_overflows(tau: float) -> None:
    rho = sampling_weights(P, tau)
    assert np.isfinite(rho).all()
    assert rho.sum() == pytest.approx(1.0)
    assert rho[0] == pytest.approx(1.0 if tau < 1 else 0.2)


def test_rho_maximises_gain_plus_entropy() -> None:
    tau, sigma, rho = 0.1, sigma_of(P), sampling_weights(P, 0.1)

    def objective(rho: np.ndarray) -> float:
        return float(rho @ sigma - tau * rho @ np.log(rho))

    assert objective(rho) == pytest.approx(0.525009, abs=5e-7)
    assert objective(rho) == pytest.approx(tau * np.log(np.exp(sigma / tau).sum()))
    for i in range(5):
        for j in range(5):
            if i != j:
                other = rho.copy()
                other[i] += 0.002
                other[j] -= 0.002
                assert objective(other) < objective(rho)


def test_sigma_of_gradients() -> None:
    assert sigma_of(0.25) == pytest.approx(0.433013, abs=5e-7)
    # unit norms, no gap
    assert sigma_gradient(0.25, 1.0, 1.0, 0.0) == pytest.approx(0.433013, abs=5e-7)
    assert sigma_gradient(0.5, 1.0, 1.0, 2.0) == pytest.approx(0.353553, abs=5e-7)
    assert sigma_gradient(0.5, 1.0, 1.0, 4.0) == 0.0  # opposite unit vectors
    assert sigma_gradient(0.25, 1.0, 1.0, 4.0) == pytest.approx(0.216506, abs=5e-7)
    assert sigma_gradient(0.25, 4.0, 1.0, 1.0) ** 2 == pytest.approx(0.57421875)
    assert sigma_gradient(0.25, 4.0, 1.0, 1.0) == pytest.approx(0.757772, abs=5e-7)
    assert sigma_gradient(0.0, 9.0, 9.0, 1.0) == sigma_gradient(1.0, 9.0, 9.0, 1.0) == 0.0
    assert sigma_gradient(0.5, 1.0, 1.0, 9.0) == 0.0  # estimates that contradict each other
    both = sigma_gradient([0.25, 0.5], [4.0, 1.0], [1.0, 1.0], [1.0, 2.0])
    assert both == pytest.approx([0.757772, 0.353553], abs=5e-7)


def test_allocation() -> None:
    sigmas = [0.5, 0.433013, 0.433013, 0.3, 0.0]
    assert largest_remainder(sigmas, 40) == [12, 11, 10, 7, 0]
    assert largest_remainder(sigmas, 40, minimum=2) == [11, 10, 10, 7, 2]
    # what rounding each would lose
    assert int(np.round(np.array(sigmas) / sum(sigmas) * 40).sum()) == 39
    assert largest_remainder([0.3] * 3, 8) == [3, 3, 2]
    assert largest_remainder([0.3] * 4, 10) == [3, 3, 2, 2]
    assert largest_remainder(sigma_of([0.5, 0.25, 0.75, 0.1]).tolist(), 32) == [10, 8, 8, 6]


def test_allocation_beats_equal_shares() -> None:
    sigmas = np.array([0.5, 0.25, 0.25])
    sizes = largest_remainder(sigmas.tolist(), 16)
    assert sizes == [8, 4, 4]
    assert (sigmas**2 / sizes).sum() == pytest.approx(0.0625)
    assert (sigmas**2 / (16 / 3)).sum() == pytest.approx(0.0703125)


def test_nothing_to_go_by_divides_evenly() -> None:
    assert largest_remainder([0.0, 0.0, 0.0], 9, minimum=2) == [3, 3, 3]


def test_a_budget_below_the_minimum_is_refused() -> None:
    with pytest.raises(
        WhetError, match="7 rollouts cannot be divided among 4 prompts with at least 2 each"
    ):
        largest_remainder([0.5] * 4, 7, minimum=2)


@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    spare=st.integers(0, 200),
    minimum=st.integers(0, 5),
)
def test_the_sum_is_exact_and_the_minimum_holds(
    rates: list[float], spare: int, minimum: int
) -> None:
    total = minimum * len(rates) + spare
    sigmas = sigma_of(rates).tolist()
    sizes = largest_remainder(sigmas, total, minimum)
    assert sum(sizes) == total
    assert min(sizes) >= minimum
    by_sigma = sorted(zip(sigmas, sizes, strict=True))
    assert all(b >= a - 1 for (_, a), (_, b) in itertools.pairwise(by_sigma))
