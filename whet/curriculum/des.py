"""The Data Effectiveness Score of ScalingRL: how much each prompt is worth training on now, and which ones to choose.

Pure maths on arrays with one entry per prompt; `scalingrl.py` calls it once per epoch. Equations are those of "Scale
Down to Speed Up" (EMNLP Findings 2025), with u = 1 - w_t the progress of the run, 0..1. OURS marks what the paper
leaves open or contradicts; docs/scalingrl.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray  # [prompts], unless said otherwise

GROWTH = 0.3  # alpha, beta, gamma of eqs. 3-5: how far the targets end above the average. OURS: not given
LEAST_SD = 1e-3  # a set without spread would make the bells infinitely narrow. OURS
# Least width of R's bell. Where few prompts are solved, their rates hardly differ, and a bell as narrow as that around
# a target of 0.1 would exclude those solved every second time, which teach the most. OURS.
LEAST_RATE_SD = 0.25
HOTTEST, COLDEST = 0.3, 0.02  # temperatures. OURS: the paper's T_0 is not given, and its last one, 0, cannot divide
ETA, FARTHEST = 0.1, 2.0  # adaptive weights: the size of a step, and how far a logit may move. OURS
_TIER = np.float32(128.0)  # between ranks that no score may cross: a key is at most 1 / COLDEST plus Gumbel noise


def bell(values: Array, target: float, sd: float) -> Array:
    """exp(-(x - target)^2 / (2 sd^2)), the form of eqs. 3-5."""
    scale = -0.5 / max(sd, LEAST_SD) ** 2
    distance = values - values.dtype.type(target)
    return np.exp(distance * distance * values.dtype.type(scale))


def moments(values: Array, known: Array) -> tuple[float, float]:
    """Mean and standard deviation of the known values, or (0, 0) if there are none. Unknown ones must hold 0."""
    count = int(np.count_nonzero(known))
    if not count:
        return 0.0, 0.0
    mean = float(values.sum(dtype=np.float64)) / count
    distance = (values - values.dtype.type(mean)) * known
    return mean, math.sqrt(float((distance * distance).sum(dtype=np.float64)) / count)


def nearness(values: Array, known: Array, signal: Array, u: float) -> Array:
    """D and C (eqs. 3 and 4): a bell around the target level (or length), as wide as the values' standard deviation. A
    value that is not known yet counts as the average one (OURS)."""
    mean, sd = moments(values, known)
    target = target_value(values, known, signal, u)
    near = bell(values, target, sd)
    near[~known] = bell(np.array([mean], values.dtype), target, sd)[0]
    return near


def target_value(values: Array, known: Array, signal: Array, u: float) -> float:
    """avg (1 + 0.3 u) of eqs. 3 and 4: the target slides from the average to above it.

    OURS: the average is over prompts with `signal` (over all, while none has any), as the paper's is over candidates
    that are neither always nor never solved. The target stays within one standard deviation of that average, and
    within the values: on a scale from 7 to 9 the printed one is 10.4, beyond the hardest prompt that is ever solved.
    """
    useful = known & signal
    if not useful.any():
        useful = known
    if not useful.any():
        return 0.0
    mean, sd = moments(values * useful, useful)
    low, high = float(values.min(where=known, initial=np.inf)), float(values.max(where=known, initial=-np.inf))
    return min(max(mean * (1.0 + GROWTH * u), mean - sd, low), mean + sd, high)


def adaptability(rates: Array, known: Array, flat: Array, new: Array, u: float) -> Array:
    """R: eq. 5 on pass rates, 0..1, instead of rewards (OURS), so that the target does not flip with their sign.

    0 where the latest group was `flat` (all right or all wrong: a group baseline has nothing to learn from it), 1 for
    a `new` prompt (OURS: optimistic, so that it is tried), else a bell around p* = clip(p_avg (1 + 0.3 u), 0.1, 0.9),
    at least 0.25 wide. A prompt that was handed out but not judged counts as average (OURS).
    """
    mean, sd = moments(rates, known)
    sd, target = max(sd, LEAST_RATE_SD), target_rate(mean, u)
    near = bell(rates, target, sd)
    near[~known] = bell(np.array([mean], rates.dtype), target, sd)[0] if known.any() else 1.0
    near[new], near[flat] = 1.0, 0.0
    return near


def target_rate(mean: float, u: float) -> float:
    """p* of eq. 5.

    >>> target_rate(0.5, 1.0), target_rate(0.02, 0.0), target_rate(0.8, 1.0)
    (0.65, 0.1, 0.9)
    """
    return min(max(mean * (1.0 + GROWTH * u), 0.1), 0.9)


def score(components: Array, weights: Sequence[float]) -> Array:
    """DES = sum of weight_i component_i (eq. 1); components is [3, prompts]: D, C, R."""
    total = components[0] * components.dtype.type(weights[0])
    for component, weight in zip(components[1:], weights[1:], strict=True):
        total += component * components.dtype.type(weight)
    return total


# ---- weights of the components


def softmax_weights(weights: Sequence[float], shift: Sequence[float]) -> tuple[float, ...]:
    """softmax(log weight_i + shift_i) (eq. 2): the weights themselves, made to sum to 1, where nothing was shifted."""
    parts = [weight * math.exp(by) for weight, by in zip(weights, shift, strict=True)]
    return tuple(part / sum(parts) for part in parts)


def shifted(shift: Sequence[float], components: Array, gain: Array) -> list[float]:
    """The step of the adaptive weights. OURS: the paper calls them learnable, but a discrete choice has no gradient.

    shift_i += 0.1 corr(component_i, gain) over the prompts of the last epoch, kept within +-2. The gain of a prompt
    is its mean |advantage|, 2 p (1 - p).
    """
    steps = [ETA * correlation(component, gain) for component in components]
    return [min(max(by + step, -FARTHEST), FARTHEST) for by, step in zip(shift, steps, strict=True)]


def correlation(a: Array, b: Array) -> float:
    """Pearson's correlation; 0 where one of the two has no spread."""
    if len(a) < 2:
        return 0.0
    x, y = (values.astype(np.float64) - float(values.mean(dtype=np.float64)) for values in (a, b))
    spread = math.sqrt(float(x @ x) * float(y @ y))
    return min(max(float(x @ y) / spread, -1.0), 1.0) if spread > 1e-12 else 0.0


# ---- choosing


def temperature(u: float) -> float:
    """T = max(0.02, 0.3 (1 - u)): eq. 7 with a floor."""
    return max(COLDEST, HOTTEST * (1.0 - u))


def rank(
    scores: Array, eligible: Array, mode: str, u: float, rng: np.random.Generator, *, share: float, cut: float
) -> tuple[Array, int]:
    """Keys, of which the largest are to be chosen, and how many to choose.

    gumbel_topk     share x prompts, drawn without replacement with logits DES / T, of those that reach `cut`
    des_threshold   all with DES >= cut
    rel_threshold   all with P / P_max = exp((DES - DES_max) / T) >= cut, that is DES >= DES_max + T log(cut)
    random, fixed   share x prompts, whatever they score: the baselines of a choice

    Eq. 8 as printed, P >= 0.6, is met by no prompt of thousands; the published counts fit DES >= 0.6. Prompts below
    the cut rank behind all that reach it, and those that are not eligible last, so a set can be filled in that order.
    """
    most = max(1, round(share * len(scores)))
    if mode in ("random", "fixed"):
        return rng.random(len(scores), dtype=np.float32), most
    best = float(np.max(scores, where=eligible, initial=0.0))
    level = best + temperature(u) * math.log(cut) if mode == "rel_threshold" else cut
    good = (scores >= scores.dtype.type(level - 1e-6)) & eligible
    size = int(np.count_nonzero(good))
    keys = scores.astype(np.float32)
    if mode == "gumbel_topk":
        size = min(size, most)
        keys *= np.float32(1.0 / temperature(u))
        keys -= np.log(np.maximum(rng.standard_exponential(len(scores), dtype=np.float32), np.float32(1e-30)))
    keys -= _TIER * (~good).astype(np.float32)
    keys -= _TIER * (~eligible).astype(np.float32)
    return keys, size


def choose(keys: Array, size: int, parts: Sequence[tuple[Array, int]] = ()) -> Array:
    """Rows of the `size` largest keys, ascending; of each part (a mask) at least so many, as far as it has them."""
    rows = _largest(keys, size)
    parts = [(part, min(least, int(np.count_nonzero(part)))) for part, least in parts]
    if all(np.count_nonzero(part[rows]) >= least for part, least in parts):
        return np.sort(rows)
    keys = keys.copy()
    for part, least in parts:
        inside = np.flatnonzero(part)
        keys[inside[_largest(keys[inside], least)]] = np.inf
    return np.sort(_largest(keys, size))


def _largest(keys: Array, count: int) -> Array:
    if count >= len(keys):
        return np.arange(len(keys))
    return np.argpartition(keys, len(keys) - count)[len(keys) - count :] if count > 0 else np.zeros(0, np.int64)
