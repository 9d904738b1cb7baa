"""How long responses are, and what a shorter limit would cost. Pure, from the rollouts of a probe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.types import Rollout

EIGHTHS = 8
"""Limits are tried at every eighth of the one used."""
LOST = 0.02
"""Share of the right responses that a suggested limit may lose."""
CUT = 0.1
"""Share of all responses that it may cut: a response that is cut shows only that it was long."""
ENOUGH = 20
"""Right responses that it takes to suggest a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of some responses, in tokens."""

    of: str
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What would have become of the responses under another limit, had they been cut there."""

    limit: int
    cut: float
    """Share of all responses."""
    right_lost: float | None
    """Share of the right responses, if there are any."""
    tokens: float
    """Share of the generated tokens that would still be paid for."""


def length_rows(rollouts: Sequence[Rollout]) -> list[Lengths]:
    """All, right and wrong responses; what does not occur is left out."""
    kinds = {"all": rollouts} | {v: [r for r in rollouts if r.verdict == v] for v in ("right", "wrong")}
    return [_lengths(of, [r.length for r in mine]) for of, mine in kinds.items() if mine]


def _lengths(of: str, lengths: Sequence[int]) -> Lengths:
    p50, p90, p99 = (float(x) for x in np.percentile(lengths, (50, 90, 99)))
    mean = float(np.mean(lengths))
    return Lengths(of=of, count=len(lengths), mean=mean, p50=p50, p90=p90, p99=p99, longest=max(lengths))


def limit_rows(rollouts: Sequence[Rollout], limit: int) -> list[Limit]:
    """Every eighth of the limit up to it: nothing is known beyond."""
    return [limit_row(rollouts, at) for at in sorted({math.ceil(limit * i / EIGHTHS) for i in range(1, EIGHTHS + 1)})]


def limit_row(rollouts: Sequence[Rollout], limit: int) -> Limit:
    """A response of exactly `limit` tokens is cut only if it did not end there by itself."""
    lengths = np.array([r.length for r in rollouts])
    cut = (lengths > limit) | ((lengths == limit) & np.array([r.finish == "length" for r in rollouts]))
    right = np.array([r.verdict == "right" for r in rollouts])
    return Limit(
        limit=limit,
        cut=float(cut.mean()),
        right_lost=float((lengths[right] > limit).mean()) if right.any() else None,
        tokens=float(np.minimum(lengths, limit).sum() / lengths.sum()),
    )


def enough(rollouts: Sequence[Rollout], limit: int) -> int | None:
    """The smallest limit, in whole 64ths of the one used, that loses under 2% of the right responses and cuts at most
    10% of all; the one used where none does. None with fewer than 20 right responses: their tail is not known.
    """
    if sum(r.verdict == "right" for r in rollouts) < ENOUGH:
        return None
    rows = (limit_row(rollouts, math.ceil(limit * i / 64)) for i in range(1, 65))
    return next((row.limit for row in rows if (row.right_lost or 0.0) < LOST and row.cut <= CUT), limit)
