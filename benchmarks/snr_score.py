"""The signal-to-noise ratio of the RLOO gradient of one prompt, and what SPEED's theorem says of it. Pure maths.

SNR = ||E g||^2 / E||g - E g||^2 for g = 1/N sum_i A_i s_i, the gradient of a group of N: A_i = r_i less the mean of the
other rewards, s_i = grad log pi(y_i | x). It follows from the rewards and the inner products K_ij = <s_i, s_j> of M
rollouts (`scores.py`), for every N at once. This is the gradient of the theorem, every rollout's tokens summed; the
learner's may weigh tokens otherwise (`learn.aggregate`). `benchmarks/snr.py` measures with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import WhetError


@dataclass(frozen=True, slots=True)
class GradientMoments:
    """Moments of h(i, j) = (r_i - r_j)(s_i - s_j) / 2, over independent rollouts 1, 2, 3, 4.

    The RLOO gradient is the mean of h over the pairs of a group, a U-statistic: these three say all (Hoeffding 1948).
    """

    apart: float
    """E <h(1,2), h(3,4)> = ||E g||^2, the signal; an estimate may be negative."""
    one: float
    """E <h(1,2), h(1,3)>."""
    both: float
    """E ||h(1,2)||^2."""

    def noise(self, n: int) -> float:
        """E||g - E g||^2 = [2 (n - 2) (one - apart) + (both - apart)] / (n (n - 1) / 2)."""
        return (2 * (n - 2) * (self.one - self.apart) + self.both - self.apart) / (n * (n - 1) / 2)

    def snr(self, n: int) -> float:
        noise = self.noise(n)
        return self.apart / noise if noise > 0 else float("nan")


def moments(gram: np.ndarray, rewards: np.ndarray) -> GradientMoments:
    """Unbiased estimates: means over all pairs of pairs with 0, 1 and 2 rollouts in common, in closed form.

    With D_i = sum_j (r_i - r_j), sums over ordered pairs: A = ||sum h||^2 = D' K D, V_i = sum_j h(i, j) =
    sum_j c_ij s_j with c = (diag(D) - (r_i - r_j)) / 2, S = sum ||h||^2. Of A, one index is shared in 4 (sum ||V_i||^2
    - S) and both in 2 S; what is left are disjoint pairs. The plug-in ||mean h||^2 = A / (M (M - 1))^2 would count
    the noise of the shared ones as signal.
    """
    r, m = np.asarray(rewards, np.float64), len(rewards)
    if m < 4:
        raise WhetError(f"{m} rollouts are too few for the moments of a gradient; it takes 4.")
    gaps = r[:, None] - r
    ahead = gaps.sum(1)
    rows = (np.diag(ahead) - gaps) / 2
    norms = np.diag(gram)
    both = float((gaps**2 * (norms[:, None] + norms - 2 * gram)).sum()) / 4
    one = float((rows @ gram * rows).sum()) - both
    apart = float(ahead @ gram @ ahead) - 4 * one - 2 * both
    triples = m * (m - 1) * (m - 2)
    return GradientMoments(apart / (triples * (m - 3)), one / triples, both / (m * (m - 1)))


def jackknife(gram: np.ndarray, rewards: np.ndarray, sizes: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Per group size, (SNR, its standard deviation): sqrt((M - 1) / M sum of squares) over leaving out each rollout.

    NaN where fewer than two rollouts are right or fewer than two wrong: no two disjoint pairs then disagree.
    """
    r, m = np.asarray(rewards, np.float64), len(rewards)
    if m < 5 or r.min() == r.max() or min(np.sum(r == r.max()), np.sum(r == r.min())) < 2:
        return {n: (float("nan"), float("nan")) for n in sizes}
    whole = moments(gram, r)
    without = [moments(np.delete(np.delete(gram, i, 0), i, 1), np.delete(r, i)) for i in range(m)]
    return {n: (whole.snr(n), float(np.sqrt((m - 1) * np.var([part.snr(n) for part in without])))) for n in sizes}


def bernoulli_snr(p: float, n: int) -> float:
    """One parameter, s = r - p: E h = pq, E[h(1,2) h(1,3)] = pq/4, E h^2 = pq/2, with q = 1 - p.

    >>> [round(bernoulli_snr(p, n), 6) for p, n in ((0.1, 4), (0.01, 24), (0.5, 4))]
    [0.514286, 0.247175, 6.0]
    """
    v = p * (1 - p)
    return GradientMoments(apart=v * v, one=v / 4, both=v / 2).snr(n)


def bound(p: float, n: int) -> float | None:
    """SPEED's theorem 3.1: SNR <= 4 N p (1 - p) for N >= 3 and p < 1/4 or p > 3/4; None where it says nothing.

    >>> round(bound(0.1, 4), 6), bound(0.5, 4), bound(0.1, 2)
    (1.44, None, None)
    """
    return 4 * n * p * (1 - p) if n >= 3 and (p < 0.25 or p > 0.75) else None


def choose_spread(rates: Sequence[float], count: int) -> list[int]:
    """Up to `count` places whose pass rates are spread from 0 to 1, in turns from eight strata, earlier places first.

    Those never or always solved take no more than an eighth each: most of them have no gradient to measure.

    >>> choose_spread([0.0] * 90 + [0.1] * 8 + [0.5, 1.0], 6)
    [0, 90, 91, 92, 98, 99]
    """
    strata: list[list[int]] = [[] for _ in range(8)]
    for place, rate in enumerate(rates):
        inner = 1 + int(np.searchsorted((0.125, 0.25, 0.5, 0.75, 0.875), rate))
        strata[0 if rate <= 0 else 7 if rate >= 1 else inner].append(place)
    for extreme in (0, 7):
        strata[extreme] = strata[extreme][: max(1, count // 8)]
    turns = [stratum[turn] for turn in range(max(map(len, strata))) for stratum in strata if turn < len(stratum)]
    return sorted(turns[:count])
