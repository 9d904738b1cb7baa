import itertools

import numpy as np
import pytest
from snr_score import GradientMoments, bernoulli_snr, bound, choose_spread, jackknife, moments

from whet.errors import WhetError
from whet.learn.losses import rloo


def scores(m: int, seed: int = 0, width: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(m, width))


def gradient(s: np.ndarray, r: np.ndarray) -> np.ndarray:
    """The learner's own RLOO."""
    return rloo([r])[0] @ s / len(r)


def exact(outcomes: list[tuple[float, float, np.ndarray]], n: int) -> tuple[float, float]:
    """(||E g||^2, E||g - E g||^2) by going through every group of n draws of (probability, reward, score)."""
    mean, square = np.zeros(len(outcomes[0][2])), 0.0
    for group in itertools.product(outcomes, repeat=n):
        p = float(np.prod([chance for chance, _, _ in group]))
        g = gradient(np.array([s for _, _, s in group]), np.array([r for _, r, _ in group]))
        mean, square = mean + p * g, square + p * g @ g
    return float(mean @ mean), square - float(mean @ mean)


VECTORS = [(0.2, 1.0, np.array([1.0, 0.3])), (0.3, 0.0, np.array([-0.7, 0.4])), (0.5, 0.0, np.array([0.1, -0.5]))]


@pytest.mark.parametrize(
    ("n", "p", "mean", "noise", "snr"), [(4, 0.1, 0.09, 0.01575, 0.514286), (4, 0.5, 0.25, None, 6.0)]
)
def test_the_bernoulli_toy_by_enumeration(n: int, p: float, mean: float, noise: float | None, snr: float) -> None:
    signal, found = exact([(p, 1.0, np.array([1 - p])), (1 - p, 0.0, np.array([-p]))], n)
    assert signal == pytest.approx(mean**2) and (noise is None or found == pytest.approx(noise))
    assert signal / found == pytest.approx(snr, abs=1e-6)
    assert bernoulli_snr(p, n) == pytest.approx(signal / found)


def test_the_published_toy_and_bound() -> None:
    assert bernoulli_snr(0.01, 24) == pytest.approx(0.247175, abs=1e-6)
    assert bound(0.01, 24) == pytest.approx(0.9504) and bound(0.1, 4) == pytest.approx(1.44)
    for n in (3, 4, 16):
        for p in np.linspace(0.005, 0.995, 199):
            limit = bound(float(p), n)
            assert limit is None or bernoulli_snr(float(p), n) <= limit
    assert bound(0.25, 4) is None and bound(0.75, 4) is None and bound(0.5, 16) is None and bound(0.1, 2) is None


@pytest.mark.parametrize("n", [2, 3, 5])
def test_moments_give_the_noise_of_any_group(n: int) -> None:
    """Population moments of three outcomes with vector scores, against every group there is."""

    def h(x: tuple[float, float, np.ndarray], y: tuple[float, float, np.ndarray]) -> np.ndarray:
        return (x[1] - y[1]) * (x[2] - y[2]) / 2

    mean = sum(x[0] * y[0] * h(x, y) for x in VECTORS for y in VECTORS)
    halves = [sum(y[0] * h(x, y) for y in VECTORS) for x in VECTORS]
    found = GradientMoments(
        apart=float(mean @ mean),
        one=sum(x[0] * float(half @ half) for x, half in zip(VECTORS, halves, strict=True)),
        both=sum(x[0] * y[0] * float(h(x, y) @ h(x, y)) for x in VECTORS for y in VECTORS),
    )
    signal, noise = exact(VECTORS, n)
    assert (found.apart, found.noise(n)) == (pytest.approx(signal), pytest.approx(noise))


def test_estimates_are_unbiased() -> None:
    """Averaged over every sample of five rollouts, they are the truth; the plug-in signal is far above it."""
    signal, noise = exact(VECTORS, 4)
    apart = spread = plug_in = 0.0
    for sample in itertools.product(VECTORS, repeat=5):
        p = float(np.prod([chance for chance, _, _ in sample]))
        s, r = np.array([x[2] for x in sample]), np.array([x[1] for x in sample])
        found = moments(s @ s.T, r)
        apart, spread = apart + p * found.apart, spread + p * found.noise(4)
        plug_in += p * float(gradient(s, r) @ gradient(s, r))
    assert (apart, spread) == (pytest.approx(signal), pytest.approx(noise))
    assert plug_in > 1.5 * signal


def test_closed_forms_are_means_over_all_groups() -> None:
    """For nine rollouts: ||g||^2 over all groups of four, <g, g'> over all disjoint pairs of them."""
    s, r = scores(9), np.array([1, 0, 0, 1, 1, 0, 0, 0, 1.0])
    found = moments(s @ s.T, r)
    groups = [list(g) for g in itertools.combinations(range(9), 4)]
    g = {tuple(group): gradient(s[group], r[group]) for group in groups}
    square = np.mean([x @ x for x in g.values()])
    apart = np.mean([g[x] @ g[y] for x, y in itertools.combinations(g, 2) if not set(x) & set(y)])
    assert found.apart == pytest.approx(apart)
    assert found.noise(4) == pytest.approx(square - apart)


def test_rewards_shift_and_scores_shift_change_nothing() -> None:
    """RLOO has a baseline, and sum of A is 0; so nothing depends on where either is counted from."""
    s, r = scores(8), np.array([1, 0, 0, 1, 0, 0, 0, 1.0])
    moved = s + np.array([2.0, -1.0, 0.5])
    one, other = moments(s @ s.T, r), moments(moved @ moved.T, r + 3)
    assert (one.apart, one.one, one.both) == pytest.approx((other.apart, other.one, other.both))


def test_the_spread_is_that_of_repeated_measurement() -> None:
    """The jackknife's deviation against what many fresh samples show, within a third."""
    rng = np.random.default_rng(5)
    values, deviations = [], []
    for _ in range(60):
        r = (rng.random(64) < 0.3).astype(float)
        s = rng.normal(size=(64, 40)) + np.outer(r, np.full(40, 0.4))
        value, deviation = jackknife(s @ s.T, r, [8])[8]
        values.append(value)
        deviations.append(deviation)
    assert np.mean(deviations) == pytest.approx(np.std(values), rel=0.35)


@pytest.mark.parametrize("right", [0, 1, 11, 12])
def test_without_two_of_each_there_is_nothing_to_measure(right: int) -> None:
    s = scores(12)
    value, deviation = jackknife(s @ s.T, np.array([1.0] * right + [0.0] * (12 - right)), [4])[4]
    assert np.isnan(value) and np.isnan(deviation)


def test_too_few_rollouts_are_refused() -> None:
    with pytest.raises(WhetError, match="too few"):
        moments(np.eye(3), np.array([1, 0, 1.0]))


def test_prompts_are_spread_over_pass_rates() -> None:
    rates = np.random.default_rng(0).choice([0, 0, 0, 0.06, 0.2, 0.4, 0.6, 0.8, 0.95, 1], size=400).tolist()
    chosen = choose_spread(rates, 40)
    assert len(set(chosen)) == 40
    picked = np.array(rates)[chosen]
    assert all((picked == rate).sum() == 5 for rate in (0, 0.06, 0.2, 0.4, 0.6, 0.8, 0.95, 1))
    assert choose_spread([0.5] * 3, 8) == [0, 1, 2]
