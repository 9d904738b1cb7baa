"""How many tokens to draft for each row: more for those that will be the last to end, none for short ones.

DAS (arXiv 2511.13841) models a batch's time as t = base * N + token * (tokens fed): all rows share N forwards, a
draft token costs only its place in them. Pure functions of numbers; the engine asks now and then, not every step.
"""

from __future__ import annotations

import numpy as np


def draft_tokens(length: np.ndarray, forwards: float | np.ndarray, alpha: float, accept: float) -> np.ndarray:
    """Draft tokens in all with which a row of `length` more tokens ends within `forwards` forwards; inf: it cannot.

    A row that is fed p draft tokens gets A(p) = k l (1 - exp(-alpha p / l)) of its l tokens by acceptance, and
    needs A = l - N, so p = -(l / alpha) ln(1 - (1 - N / l) / k), and 0 where l <= N. `accept` is k, the share of a
    text that drafts can hit at all; `alpha` how fast more draft gets there. (Our derivation from the DAS model.)

    >>> draft_tokens(np.array([100.0, 400.0]), 200, alpha=1.0, accept=0.8).round(2).tolist()  # -400 ln(1 - 0.5 / 0.8)
    [0.0, 392.33]
    """
    length = np.asarray(length, float)
    missing = 1 - np.clip(1 - forwards / np.maximum(length, 1e-9), 0, None) / accept
    with np.errstate(divide="ignore"):
        drafted = -(length / alpha) * np.log(np.maximum(missing, 0))
    return np.where(length <= forwards, 0.0, drafted)


def makespan(
    length: np.ndarray, forwards: float | np.ndarray, *, alpha: float, accept: float, base: float, token: float
) -> np.ndarray:
    """t = base * N + token * sum_i (min(l_i, N) + p_i): each row is fed one token a forward, and its drafts.

    >>> t = makespan(np.array([100.0, 400.0]), 200, alpha=1.0, accept=0.8, base=1.0, token=0.01)
    >>> round(float(t), 2)  # 200 + 0.01 (100 + 200 + 392.33)
    206.92
    """
    length, forwards = np.asarray(length, float), np.asarray(forwards, float)[..., None]
    fed = np.minimum(length, forwards) + draft_tokens(length, forwards, alpha, accept)
    t: np.ndarray = base * forwards[..., 0] + token * fed.sum(-1)
    return t


def best_forwards(length: np.ndarray, *, alpha: float, accept: float, base: float, token: float) -> float:
    """The N that ends soonest. t is convex in N between what acceptance allows, (1 - k) max l, and max l: no drafts.
    Grids, each within two meshes of the one before: a whole array costs the host what one number does.
    """
    low, high = (1 - accept) * float(np.max(length)), float(np.max(length))
    best, grid = 0, np.array([low])
    for _ in range(5):  # to a millionth of the range
        grid = np.linspace(low, high, 33)
        best = int(np.argmin(makespan(length, grid, alpha=alpha, accept=accept, base=base, token=token)))
        low, high = grid[max(0, best - 1)], grid[min(32, best + 1)]
    return float(grid[best])


def budgets(
    length: np.ndarray, most: int, *, alpha: float = 1.0, accept: float = 0.8, base: float = 1.0, token: float = 0.01
) -> np.ndarray:
    """Draft tokens a step for each row, int32 [B], at most `most`: p_i / N rounded up, 0 where l_i <= N.

    `length` [B] is the expected remaining length; `base` and `token` the time of a forward and of one more token in
    it, of which only the ratio counts.

    >>> budgets(np.array([10, 50, 400]), 8, token=0.3).tolist()  # N = 172.3, p = 497.3
    [0, 0, 3]
    """
    length = np.maximum(np.asarray(length, float), 1.0)
    if not length.size or most <= 0:
        return np.zeros(length.size, np.int32)
    forwards = best_forwards(length, alpha=alpha, accept=accept, base=base, token=token)
    a_step = draft_tokens(length, forwards, alpha, accept) / forwards
    return np.minimum(np.ceil(a_step - 1e-6), most).astype(np.int32)


def remaining(written: np.ndarray, limit: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Tokens still to come of rows that have written so many: the mean over lengths seen that were longer (OURS).

    `seen` holds lengths of ended rollouts. Where none was longer: half of what the limit leaves. Never above that rest.

    >>> remaining(np.array([0, 150, 500]), np.array([1000, 1000, 1000]), np.array([100, 200, 300])).tolist()
    [200.0, 100.0, 250.0]
    """
    ordered = np.sort(np.asarray(seen, float))
    above = np.append(np.cumsum(ordered[::-1])[::-1], 0.0)  # sum of the lengths from here up
    first = np.searchsorted(ordered, written, side="right")
    longer = ordered.size - first
    rest = np.asarray(limit, float) - written
    mean = above[first] / np.maximum(longer, 1) - written
    return np.minimum(np.where(longer > 0, mean, rest / 2), rest)
