"""Confidence intervals over prompts: how far a share may lie from the truth. Pure maths, for `eval` and `probe`.

The prompts are the sample; the rollouts of one prompt resemble each other and count for less than as many prompts
would. Nothing here knows what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959964
"""Of the standard normal distribution, 95% lie within so many deviations."""


class Interval(NamedTuple):
    """95%: of a hundred such intervals, about 95 hold the truth."""

    low: float
    high: float


def wilson(share: float, size: float, z: float = Z95) -> Interval:
    """Wilson's score interval (1927) for a share seen in `size` independent draws.

    centre +- half, centre = (p + z^2/2n) / (1 + z^2/n), half = z/(1 + z^2/n) sqrt(p(1-p)/n + z^2/4n^2). Unlike
    p +- z sqrt(p(1-p)/n) it stays inside 0..1 and has a width at p = 0 and 1.

    >>> [round(x, 4) for x in wilson(0.0, 30)], [round(x, 4) for x in wilson(0.5, 100)]
    ([0.0, 0.1135], [0.4038, 0.5962])
    """
    shrink = 1.0 + z * z / size
    centre = (share + z * z / (2.0 * size)) / shrink
    half = z / shrink * math.sqrt(share * (1.0 - share) / size + z * z / (4.0 * size * size))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Sequence[float] | np.ndarray, draws: float = 1.0) -> Interval:
    """For the mean of one value in 0..1 a prompt, each got from `draws` independent rollouts.

    Wilson's interval at the effective number of draws, as for proportions in cluster samples (Korn and Graubard 1998):
    n_eff = p(1-p) / (s^2 / P) for P prompts whose values have variance s^2. It lies between P (a prompt's rollouts
    always agree) and P x draws (prompts do not differ), and is held there. With one draw it is P: plain Wilson.

    OURS: p and s^2 inside n_eff are taken with two more prompts, one all right and one all wrong (compare Agresti and
    Coull 1998). Few prompts with hardly a right rollout among them cannot show how alike rollouts are, and would pass
    for independent.
    """
    values = np.asarray(values, dtype=np.float64)
    widened = np.append(values, (0.0, 1.0))
    share = float(widened.mean())
    worth = float(share * (1.0 - share) / widened.var(ddof=1))
    return wilson(float(values.mean()), values.size * min(max(worth, 1.0), draws))
