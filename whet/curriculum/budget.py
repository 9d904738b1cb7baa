"""Dividing a whole number of rollouts by shares, so that nothing is lost to rounding.

Pure maths, exact (rationals, no floats): called wherever a budget is divided among prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from whet.errors import WhetError


def largest_remainder(shares: Sequence[float], total: int, minimum: int = 0) -> list[int]:
    """Whole numbers proportional to `shares`, each at least `minimum`, that sum to exactly `total`.

    Who would fall below the minimum gets the minimum, and the rest is divided among the others (which is
    also what minimises sum share_i^2 / n_i under n_i >= minimum). Each then gets the floor of its part;
    what is left goes one by one to the largest fractions, ties to the lower index (Hamilton's method).
    Shares that are all zero count as equal.

    >>> largest_remainder([1, 1, 1], 8)
    [3, 3, 2]
    >>> largest_remainder([0.5, 0.433013, 0.433013, 0.3, 0.0], 40, minimum=2)
    [11, 10, 10, 7, 2]
    """
    if not all(math.isfinite(share) and share >= 0 for share in shares):
        raise ValueError(f"shares must be finite and not negative, got {list(shares)}")
    if total < minimum * len(shares) or (total > 0 and not shares):
        raise WhetError(
            f"{total} rollouts cannot be divided among {len(shares)} prompts with at least {minimum} each; "
            "give more rollouts or take fewer prompts."
        )
    parts = _ideal(shares, total, minimum)
    whole = [math.floor(part) for part in parts]
    by_fraction = sorted(range(len(parts)), key=lambda i: (whole[i] - parts[i], i))
    for i in by_fraction[: total - sum(whole)]:
        whole[i] += 1
    return whole


def _ideal(shares: Sequence[float], total: int, minimum: int) -> list[Fraction]:
    """The exact parts before rounding: proportional, but for those held at the minimum.

    Since the total covers every minimum, never all are held, so `weight` is never zero.
    """
    exact = [Fraction(float(share)) for share in shares]
    if not any(exact):
        exact = [Fraction(1)] * len(exact)
    held: set[int] = set()
    while True:
        left = total - minimum * len(held)
        weight = sum(share for i, share in enumerate(exact) if i not in held)
        parts = [Fraction(minimum) if i in held else share * left / weight for i, share in enumerate(exact)]
        below = {i for i, part in enumerate(parts) if part < minimum}
        if not below:
            return parts
        held |= below
