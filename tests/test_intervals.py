import numpy as np
import pytest

from whet.eval import Z95, mean_interval, wilson


def test_wilson_by_hand() -> None:
    """At p = 0 the upper end is z^2 / (n + z^2); published: 9 of 10 gives 0.596 to 0.982."""
    assert wilson(0.0, 30).high == pytest.approx(Z95**2 / (30 + Z95**2))
    assert wilson(0.9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert wilson(1.0, 30).high == 1.0 and wilson(0.0, 30).low == 0.0


@pytest.mark.parametrize("right", [0, 1, 7, 29, 30])
def test_one_rollout_a_prompt_is_plain_wilson(right: int) -> None:
    values = [1.0] * right + [0.0] * (30 - right)
    assert mean_interval(values) == pytest.approx(wilson(right / 30, 30))


def test_effective_number_by_hand() -> None:
    """0.25 and 0.75, with 0 and 1 added: mean 1/2, variance (2/16 + 2/4) / 3 = 5/24, so 1.2 draws a prompt."""
    assert mean_interval([0.25, 0.75], draws=8) == pytest.approx(wilson(0.5, 2.4))


def test_prompts_that_do_not_differ_count_every_rollout_at_most() -> None:
    values = [0.5] * 10_000
    assert mean_interval(values, draws=4) == pytest.approx(wilson(0.5, 40_000))
    assert mean_interval(values, draws=1) == pytest.approx(wilson(0.5, 10_000))


def test_one_right_rollout_does_not_make_the_range_narrower() -> None:
    """Without the two added prompts it would: 240 rollouts that look independent against 30 prompts."""
    none, one = [0.0] * 30, [1 / 8] + [0.0] * 29
    assert mean_interval(one, 8).high > mean_interval(none, 8).high


@pytest.mark.parametrize(("a", "b"), [(0.1, 2.0), (0.3, 0.3), (2.0, 2.0), (0.05, 0.4)])
@pytest.mark.parametrize(("prompts", "n"), [(30, 1), (30, 8), (200, 4)])
def test_95_of_100_intervals_hold_the_truth(a: float, b: float, prompts: int, n: int) -> None:
    """Pass rates from Beta(a, b), of very unlike prompts; two sides apart, since one may hide the other."""
    rng = np.random.default_rng(7)
    truth, trials = a / (a + b), 800
    samples = rng.binomial(n, rng.beta(a, b, size=(trials, prompts))) / n
    intervals = [mean_interval(values, n) for values in samples]
    assert np.mean([low <= truth <= high for low, high in intervals]) > 0.925
    assert np.mean([truth < low for low, _ in intervals]) < 0.065
    assert np.mean([truth > high for _, high in intervals]) < 0.055


def test_normal_intervals_would_fail_the_same_trial() -> None:
    """Why not p +- 1.96 standard errors: for 30 hard prompts it holds the truth far too seldom."""
    rng = np.random.default_rng(7)
    samples = rng.binomial(8, rng.beta(0.1, 2.0, size=(800, 30))) / 8
    error = Z95 * samples.std(axis=1, ddof=1) / np.sqrt(30)
    assert np.mean(np.abs(samples.mean(axis=1) - 0.1 / 2.1) <= error) < 0.88
