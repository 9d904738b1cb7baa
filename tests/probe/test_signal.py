import itertools
from math import comb

import numpy as np
import pytest

from whet.tools.forecast import Beta, SignalCurve, countable, fit_beta, mixed

ONCE = np.ones((1, 5))


@pytest.mark.parametrize(("n", "right", "size"), [(4, 1, 2), (5, 2, 3), (6, 0, 4), (6, 6, 2), (5, 4, 5), (8, 3, 1)])
def test_mixed_is_the_share_of_mixed_subsets(n: int, right: int, size: int) -> None:
    subsets = list(itertools.combinations([True] * right + [False] * (n - right), size))
    share = sum(any(s) and not all(s) for s in subsets) / len(subsets)
    assert mixed(np.array([right]), np.array([n]), size)[0] == pytest.approx(share)


@pytest.mark.parametrize(
    ("p", "size", "accepted"), [(0.1, 4, 0.3438), (0.25, 4, 0.6796875), (0.5, 2, 0.5), (0.1, 8, 0.569533)]
)
def test_mixed_is_unbiased(p: float, size: int, accepted: float) -> None:
    """Its mean over binomial counts is 1 - p^m - (1-p)^m; the numbers are SPEED's chances to accept."""
    n = 8
    counts = np.arange(n + 1)
    chances = np.array([comb(n, c) * p**c * (1 - p) ** (n - c) for c in counts])
    assert chances @ mixed(counts, np.full(n + 1, n), size) == pytest.approx(accepted, abs=1e-6)


def test_mixed_says_nothing_of_more_than_was_judged() -> None:
    assert np.isnan(mixed(np.array([1, 1]), np.array([3, 4]), 4)).tolist() == [True, False]


@pytest.mark.parametrize(("often", "a", "b"), [((1, 1, 1, 1, 1), 1.0, 1.0), ((1, 2, 3, 4, 5), 2.0, 1.0)])
def test_fit_finds_what_the_counts_follow_exactly(often: tuple[int, ...], a: float, b: float) -> None:
    """Of 4 rollouts, Beta(1, 1) gives every count alike, Beta(2, 1) in proportion to 1 + c."""
    fit = fit_beta(np.arange(5), np.full(5, 4), np.array([often], dtype=float))
    assert (fit.a[0], fit.b[0]) == (pytest.approx(a, abs=1e-4), pytest.approx(b, abs=1e-4))


def test_fit_is_the_maximum_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    judged = rng.integers(5, 9, size=150)
    right = rng.binomial(judged, rng.beta(0.4, 1.1, size=150))
    a, b = (float(x[0]) for x in fit_beta(right, judged))

    def log_likelihood(a: float, b: float) -> float:
        terms = [
            sum(np.log(a + j) for j in range(c))
            + sum(np.log(b + j) for j in range(n - c))
            - sum(np.log(a + b + j) for j in range(n))
            for c, n in zip(right.tolist(), judged.tolist(), strict=True)
        ]
        return float(sum(terms))

    best = log_likelihood(a, b)
    for da, db in itertools.product((0.98, 1.0, 1.02), repeat=2):
        assert log_likelihood(a * da, b * db) <= best + 1e-9


def test_fit_of_many_resamples_is_each_by_itself() -> None:
    right, judged = np.array([0, 1, 4, 2, 0]), np.full(5, 4)
    weights = np.array([[1, 1, 1, 1, 1], [2, 0, 1, 2, 0], [5, 0, 0, 0, 0]], dtype=float)
    together = fit_beta(right, judged, weights)
    for i in range(2):
        assert together.a[i] == pytest.approx(fit_beta(right, judged, weights[i : i + 1]).a[0], rel=1e-4)
    assert np.isnan(together.a[2])  # not one right


def test_prompts_that_do_not_differ_are_a_binomial() -> None:
    fit = fit_beta(np.full(50, 4), np.full(50, 8))
    assert float(fit.mixed(16)[0]) == pytest.approx(1 - 2 * 0.5**16, abs=1e-3)


def test_beta_by_hand() -> None:
    """E[p^3] of Beta(2, 1) is 2/5, E[(1-p)^3] is 1/10."""
    assert float(Beta(np.array(2.0), np.array(1.0)).mixed(3)) == pytest.approx(0.5)


def test_signal_is_counted_up_to_n_and_fitted_beyond() -> None:
    right, judged = np.arange(5), np.full(5, 4)
    assert SignalCurve(right, judged, ONCE).at(4)[1] == "counted"
    assert SignalCurve(right, judged, ONCE).at(4).share[0] == pytest.approx(3 / 5)
    beyond = SignalCurve(right, judged, ONCE).at(8)
    assert beyond.how == "fitted" and beyond.share[0] == pytest.approx(1 - 2 / 9, abs=1e-4)


@pytest.mark.parametrize("right", [[0, 0, 0, 0, 0], [4, 4, 4, 4, 4], [0, 0, 4, 4, 4]])
def test_without_one_mixed_prompt_nothing_is_made_up(right: list[int]) -> None:
    found = SignalCurve(np.array(right), np.full(5, 4), ONCE).at(16)
    assert found.how == "at least" and found.share[0] == 0.0


def test_a_fit_that_misses_what_was_counted_is_not_used() -> None:
    """Half the prompts hopeless, half at one half: no beta has that shape."""
    right = np.array([0] * 500 + [8] * 500)
    found = SignalCurve(right, np.full(1000, 16), np.ones((1, 1000))).at(32)
    assert found.how == "at least" and found.share[0] == 0.5


def test_larger_groups_never_carry_less() -> None:
    rng = np.random.default_rng(2)
    right = rng.binomial(8, rng.beta(0.3, 1.0, size=100))
    curve = SignalCurve(right, np.full(100, 8), np.ones((1, 100)))
    shares = [curve.at(m).share[0] for m in range(2, 33)]
    assert shares == sorted(shares)


def test_fit_foretells_larger_groups() -> None:
    rng = np.random.default_rng(4)
    for a, b in ((0.3, 1.0), (0.1, 0.6), (1.0, 1.0)):
        right = rng.binomial(8, rng.beta(a, b, size=2000))
        foretold = SignalCurve(right, np.full(2000, 8), np.ones((1, 2000))).at(16)
        truth = float(Beta(np.array(a), np.array(b)).mixed(16))
        assert foretold.how == "fitted" and foretold.share[0] == pytest.approx(truth, abs=0.03)


def test_a_few_unjudged_rollouts_do_not_lower_what_is_counted() -> None:
    assert countable(np.array([8, 8, 8, 7, 2])) == 8
    assert countable(np.array([8, 7, 7, 7, 7])) == 7
