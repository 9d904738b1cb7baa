"""The numbers behind SPEED: computed by hand, by enumeration, and by a one-parameter policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.curriculum.speed import (
    accept_probability,
    beta_acceptance,
    implicit_weight,
    predicted_acceptance,
    screening_pays,
)
from whet.learn.losses import rloo

SIZES = st.tuples(st.integers(2, 8), st.integers(1, 20))


def objective(p: float, n: int, c: int) -> float:
    """Phi(p), the integral of w: SPEED with RLOO ascends its mean over all prompts (docs/details/speed.md)."""
    total, q = n + c, 1 - p
    first = 1 - q**n + p**n
    second = (c - 1) / (n + 1) * (1 - q ** (n + 1) + p ** (n + 1))
    return p - c / (total * (total - 1)) * (first + second)


def gate_objective(p: float, n: int) -> float:
    """Psi(p), whose slope is a(p), where the screening decides but does not train."""
    return p - (1 + p ** (n + 1) - (1 - p) ** (n + 1)) / (n + 1)


def rollouts_per_group(p: float, n: int, c: int) -> float:
    """n / a_n(p) + c: rollouts per accepted group, its rejected screenings included; c = 0 is DAPO."""
    accepted = accept_probability(p, n)
    return n / accepted + c if accepted > 0 else math.inf


def near(value: float) -> object:
    return pytest.approx(value, abs=5e-7)


def slope(f: Callable[[float], float], p: float, h: float = 1e-5) -> float:
    return (f(p + h) - f(p - h)) / (2 * h)


@pytest.mark.parametrize(
    ("n", "p", "expected"),
    [
        (4, 0.1, 0.3438),
        (4, 0.25, 0.6796875),
        (4, 0.5, 0.875),
        (2, 0.1, 0.18),
        (2, 0.25, 0.375),
        (2, 0.5, 0.5),
        (8, 0.1, 0.569533),
        (4, 0.0, 0.0),
        (4, 1.0, 0.0),
    ],
)
def test_accept_probability(n: int, p: float, expected: float) -> None:
    assert accept_probability(p, n) == near(expected)


def test_thresholds_are_exclusive() -> None:
    """Six rollouts above 1/6 and below 5/6: two, three or four right."""
    assert accept_probability(0.5, 6, 1 / 6, 5 / 6) == near((15 + 20 + 15) / 64)


@pytest.mark.parametrize(
    ("p", "sizes", "expected"),
    [
        (0.01, (4, 20), 0.198097),
        (0.1, (4, 20), 0.442471),
        (0.25, (4, 20), 0.716089),
        (0.5, (4, 20), 0.877717),
        (0.9, (4, 20), 0.442471),
        (0.0, (4, 20), 1 / 6),
        (1.0, (4, 20), 1 / 6),
        (0.1, (8, 16), 0.701931),
        (0.3, (3, 4), 0.728571),
        (0.37, (5, 0), 1.0),
        (0.0, (5, 0), 1.0),
    ],
)
def test_implicit_weight(p: float, sizes: tuple[int, int], expected: float) -> None:
    assert implicit_weight(p, *sizes) == near(expected)


@given(sizes=SIZES, p=st.floats(0.0, 1.0))
def test_the_sum_is_the_closed_form(sizes: tuple[int, int], p: float) -> None:
    n, c = sizes
    total, q = n + c, 1 - p
    ends = q ** (n - 1) * (n + (c - 1) * q) + p ** (n - 1) * (n + (c - 1) * p)
    assert implicit_weight(p, n, c) == pytest.approx(
        1 - c / (total * (total - 1)) * ends, abs=1e-12
    )


@pytest.mark.parametrize(
    ("n", "c", "low", "high"), [(3, 4, 0.0, 1.0), (4, 3, 0.25, 1.0), (4, 3, 0.2, 0.7)]
)
def test_the_weight_is_that_of_a_policy_with_one_parameter(
    n: int, c: int, low: float, high: float
) -> None:
    """Every outcome of a Bernoulli policy with logit t: d log pi / dt = r - p and dp/dt = p (1 - p)."""
    p, gradient = 0.3, 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=n + c):
        r = np.array(outcome)
        if low < r[:n].mean() < high:
            gradient += math.prod(p if x else 1 - p for x in outcome) * float(
                np.mean(rloo([r])[0] * (r - p))
            )
    assert gradient / (p * (1 - p)) == pytest.approx(implicit_weight(p, n, c, low, high), abs=1e-12)


def test_objectives() -> None:
    assert objective(1.0, 4, 20) == near(0.652174)
    assert objective(0.5, 4, 20) == near(0.326087)
    assert objective(0.5, 2, 2) == near(0.277778)
    assert objective(0.0, 4, 20) == 0.0
    assert gate_objective(1.0, 4) == near(0.6) and gate_objective(0.0, 4) == 0.0


@given(sizes=SIZES, p=st.floats(0.01, 0.99))
def test_the_slope_of_an_objective_is_its_weight(sizes: tuple[int, int], p: float) -> None:
    n, c = sizes
    assert slope(lambda x: objective(x, n, c), p) == pytest.approx(
        implicit_weight(p, n, c), abs=1e-6
    )
    assert slope(lambda x: gate_objective(x, n), p) == pytest.approx(
        accept_probability(p, n), abs=1e-6
    )
    assert implicit_weight(p, n, c) > 0


@pytest.mark.parametrize(
    ("p", "speed", "dapo"), [(0.5, 24.57, 24.00), (0.1, 31.63, 26.08), (0.02, 71.5, 62.5)]
)
def test_for_a_prompt_with_a_chance_screening_costs_more(
    p: float, speed: float, dapo: float
) -> None:
    digits = 1 if speed > 70 else 2
    assert round(rollouts_per_group(p, 4, 20), digits) == speed
    assert round(rollouts_per_group(p, 24, 0), digits) == dapo


def test_a_hopeless_prompt_is_never_accepted() -> None:
    assert rollouts_per_group(0.0, 4, 20) == rollouts_per_group(1.0, 24, 0) == math.inf


def test_predicted_acceptance() -> None:
    assert predicted_acceptance(0.5, 1 / 3, 4) == near(3 / 5)  # Beta(1, 1)
    assert predicted_acceptance(2 / 3, 1 / 2, 2) == near(1 / 3)  # Beta(2, 1): 2 (2/3 - 1/2)
    assert predicted_acceptance(0.25, 0.0625, 4) == near(0.6796875)  # all prompts alike
    assert predicted_acceptance(0.25, 0.03, 4) == near(0.6796875)  # alike within noise
    assert predicted_acceptance(0.4, 0.4, 4) == 0.0  # hopeless and solved ones
    assert predicted_acceptance(0.0, 0.0, 4) == predicted_acceptance(1.0, 1.0, 4) == 0.0
    assert predicted_acceptance(0.5, 1 / 3, 6, 1 / 6, 5 / 6) == near(3 / 7)


@given(
    first=st.floats(0, 1),
    second=st.floats(0, 1),
    n=st.integers(2, 32),
    low=st.floats(0, 0.4),
    high=st.floats(0.6, 1),
)
def test_a_prediction_is_a_probability(
    first: float, second: float, n: int, low: float, high: float
) -> None:
    """Also of moments that no distribution has: they are estimates."""
    assert -1e-9 <= predicted_acceptance(first, min(first, second), n, low, high) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("n", "p", "expected"), [(4, 0.1, 0.514286), (24, 0.01, 0.247175), (4, 0.5, 6.0)]
)
def test_signal_to_noise_of_rloo(n: int, p: float, expected: float) -> None:
    """The paper's motive: SNR <= 4 N p (1 - p) for p < 1/4 or p > 3/4; in the middle it may lie above."""
    first = second = 0.0
    for k in range(n + 1):
        r = np.array([1.0] * k + [0.0] * (n - k))
        gradient = float(np.mean(rloo([r])[0] * (r - p)))
        chance = math.comb(n, k) * p**k * (1 - p) ** (n - k)
        first, second = first + chance * gradient, second + chance * gradient**2
    assert first == pytest.approx(p * (1 - p))
    assert first**2 / (second - first**2) == near(expected)
    assert (expected <= 4 * n * p * (1 - p)) is (p != 0.5)
    if (n, p) == (4, 0.1):
        assert second - first**2 == near(0.01575)


def test_rloo_advantages() -> None:
    assert rloo([np.array([1.0, 0.0, 0.0, 0.0])])[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    for k in range(6):
        r = np.array([1.0] * k + [0.0] * (5 - k))
        assert float(rloo([r])[0] @ r) == pytest.approx(k * (5 - k) / 4)


# Whether to screen at all


@pytest.mark.parametrize(
    ("a", "b", "n", "expected"),
    [
        (1.0, 1.0, 4, 1 - 2 / 5),  # K is even on 0..4
        (1.0, 1.0, 16, 1 - 2 / 17),
        (0.5, 0.5, 4, 1 - 2 * (0.5 * 1.5 * 2.5 * 3.5) / (1 * 2 * 3 * 4)),
        (1.0, 3.0, 2, 1 - 3 * 4 / (4 * 5) - 1 * 2 / (4 * 5)),
    ],
)
def test_a_beta_binomial_chance_by_hand(a: float, b: float, n: int, expected: float) -> None:
    assert beta_acceptance(a, b, n) == near(expected)


@given(p=st.floats(0.01, 0.99), n=st.integers(2, 8), more=st.integers(1, 20))
def test_a_known_prompt_is_never_worth_a_screening(p: float, n: int, more: int) -> None:
    """A Beta distribution as narrow as this is a pass rate. What a screening drops, the whole group might have kept."""
    assert not screening_pays(1e7 * p, 1e7 * (1 - p), n, n + more)


def test_when_a_screening_pays() -> None:
    """Beta(1/2, 1/2), 4 of 16: a_4 = 0.4531 and a_16 = 0.7201, so 8.83 + 12 rollouts against 22.22."""
    assert screening_pays(0.5, 0.5, 4, 16)
    assert not screening_pays(1.0, 1.0, 4, 16)  # 4 / 0.6 + 12 = 18.67 against 16 / 0.882 = 18.13
    assert screening_pays(0.1, 4.15, 4, 16) and not screening_pays(3.1, 1.15, 4, 16)
