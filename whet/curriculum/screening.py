"""What screening costs and what it does to the objective: the maths behind `speed.py`, on plain numbers.

A prompt with pass rate p is screened with n rollouts and goes on with c more (N = n + c) if the pass rate of the
screening lies strictly between `low` and `high`. SPEED's paper (arXiv 2506.09016) was withdrawn; the acceptance and
the cost follow from its algorithm, the weights and objectives below are DERIVED here, for RLOO with verdicts as
rewards and every rollout of the policy it trains. Nothing here draws or decides.
"""

from __future__ import annotations

import math


def accept_probability(p: float, n: int, low: float = 0.0, high: float = 1.0) -> float:
    """P(low < K / n < high), K ~ Binomial(n, p): the chance to come through a screening of n rollouts.

    With the thresholds 0 and 1 it is a(p) = 1 - p^n - (1 - p)^n, which is also what DAPO keeps of groups of n.

    >>> accept_probability(0.5, 4), round(accept_probability(0.1, 4), 4)
    (0.875, 0.3438)
    """
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in _between(n, low, high))


def implicit_weight(p: float, n_init: int, n_cont: int, low: float = 0.0, high: float = 1.0) -> float:
    """w(p): the expected gradient that a screened prompt gives is w(p) times the gradient of its pass rate.

    Derived. E[grad log pi(y) | r] = (r - p) / (p (1 - p)) grad p, and under RLOO sum_i A_i (r_i - p) =
    K (N - K) / (N - 1) with K right answers of N, so w(p) = E[1(accepted) K (N - K)] / (N (N - 1) p (1 - p)).
    Computed as a sum over the right answers of the screening, which has no 0 / 0 at either end. With the
    thresholds 0 and 1 it is 1 - c / (N (N - 1)) {q^(n-1) [n + (c - 1) q] + p^(n-1) [n + (c - 1) p]}, q = 1 - p:
    n / N at both ends, largest at 1/2; and 1 everywhere for c = 0, since DAPO drops what has no gradient anyway.

    >>> round(implicit_weight(0.5, 4, 20), 6), round(implicit_weight(0.0, 4, 20), 6)
    (0.877717, 0.166667)
    """
    total = n_init + n_cont
    weight = 0.0
    for k in _between(n_init, low, high):
        chance = math.comb(n_init, k) * p ** (k - 1) * (1 - p) ** (n_init - k - 1)  # over p (1 - p)
        more = n_cont * p * ((total - 2 * k) - (1 - p) - n_cont * p)  # E[(k + J)(N - k - J)] less k (N - k)
        weight += chance * (k * (total - k) + more)
    return weight / (total * (total - 1))


def objective(p: float, n_init: int, n_cont: int) -> float:
    """Phi(p), the integral of w: what SPEED with RLOO ascends is the mean of Phi(p) over all prompts. Derived.

    Phi(p) = p - c / (N (N - 1)) {[1 - q^n + p^n] + (c - 1) / (n + 1) [1 - q^(n+1) + p^(n+1)]}, for the thresholds 0
    and 1. It rises with p, so every prompt has the same best answers; only the weight between prompts changes.

    >>> round(objective(1.0, 4, 20), 6)
    0.652174
    """
    n, c, total, q = n_init, n_cont, n_init + n_cont, 1 - p
    first = 1 - q**n + p**n
    second = (c - 1) / (n + 1) * (1 - q ** (n + 1) + p ** (n + 1))
    return p - c / (total * (total - 1)) * (first + second)


def gate_objective(p: float, n_init: int) -> float:
    """Psi(p) = p - [1 + p^(n+1) - q^(n+1)] / (n + 1), where the screening decides but does not train. Derived.

    Its slope is a(p): the continuation is an unbiased sample, so a prompt counts by its chance to get there.

    >>> gate_objective(1.0, 4)
    0.6
    """
    return p - (1 + p ** (n_init + 1) - (1 - p) ** (n_init + 1)) / (n_init + 1)


def rollouts_per_group(p: float, n_init: int, n_cont: int) -> float:
    """n / a_n(p) + c: rollouts that an accepted group costs, its rejected screenings included; c = 0 is DAPO.

    >>> [round(rollouts_per_group(0.1, *sizes), 2) for sizes in ((4, 20), (24, 0))]
    [31.63, 26.08]
    """
    accepted = accept_probability(p, n_init)
    return n_init / accepted + n_cont if accepted > 0 else math.inf


def predicted_acceptance(first: float, second: float, n: int, low: float = 0.0, high: float = 1.0) -> float:
    """What a screening of n rollouts would accept of prompts whose pass rates have E[p] = first, E[p^2] = second.

    OURS: the Beta distribution with these two moments, so K is Beta-binomial. From k right of m judged rollouts,
    k / m and k (k - 1) / (m (m - 1)) estimate the moments without bias. Prompts that do not differ (within noise)
    are taken as one pass rate, prompts that are all hopeless or all solved as never accepted.

    >>> round(predicted_acceptance(1 / 2, 1 / 3, 4), 6)  # uniform pass rates: each K equally likely
    0.6
    """
    variance = second - first**2
    if variance <= 1e-12:
        return accept_probability(first, n, low, high)
    strength = (first - second) / variance
    if strength <= 1e-12:
        return 0.0
    a, b = first * strength, (1 - first) * strength
    return sum(
        math.comb(n, k) * math.exp(_log_beta(k + a, n - k + b) - _log_beta(a, b)) for k in _between(n, low, high)
    )


def _between(n: int, low: float, high: float) -> list[int]:
    return [k for k in range(n + 1) if low < k / n < high]


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
