"""What a probe found, as one record: `probe_report` makes it, `report/probe.py` shows it, `probe.json` keeps it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.intervals import mean_interval
from whet.probe.lengths import Lengths, Limit, enough, length_rows, limit_rows
from whet.probe.signal import SignalCurve, mixed
from whet.probe.spending import Estimate, Spending, resamples, spendings
from whet.probe.suggestions import recipe_lines, suggestions
from whet.types import Prompt, Rollout

FINE = 10
"""Up to so many rollouts a prompt each count has its own bar, beyond it the pass rates fall into eighths."""
SIZES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Of the histogram of pass rates."""

    label: str
    prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Share of prompts with both right and wrong rollouts among `size`."""

    size: int
    share: Estimate
    how: str
    """counted, fitted or at least; see `Extrapolation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    prompts: int
    """With two judged rollouts or more; the others are left out of all but lengths."""
    left_out: int
    n: int
    limit: int
    """Tokens a response could have."""
    group: int
    """Rollouts a group would be trained with."""
    rollouts: int
    unjudged: float
    truncated: float
    pass_rate: Estimate
    """Mean over the prompts."""
    never: Estimate
    """Share of prompts with no right rollout."""
    always: Estimate
    signals: tuple[Signal, ...]
    histogram: tuple[Bar, ...]
    lengths: tuple[Lengths, ...]
    limits: tuple[Limit, ...]
    enough: int | None
    """The smallest limit that would do (`lengths.enough`); None where too few responses are right to say."""
    spendings: tuple[Spending, ...]
    suggestions: tuple[str, ...] = ()
    """Sentences."""
    recipe: str = ""
    """TOML to paste; empty where nothing can be advised."""

    def signal(self, size: int) -> Signal:
        return next(s for s in self.signals if s.size == size)

    def to_json(self) -> dict[str, Any]:
        """Infinite costs (nothing useful was found) become null."""
        tree: dict[str, Any] = _finite(dataclasses.asdict(self))
        return tree


def probe_report(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], *, n: int, limit: int, group: int
) -> ProbeReport:
    """From judged rollouts (`group_id`: the prompt's place in `prompts`) to what they mean for training."""
    right, judged, lengths = _counts(len(prompts), rollouts)
    told = judged >= 2
    if not told.any():
        raise WhetError(
            f"Of {len(rollouts)} responses hardly one was judged, so the probe has nothing to say; "
            "mend the judge, or raise judge.timeout_s or judge.memory_mb."
        )
    right, judged, lengths = right[told], judged[told], lengths[told]
    curve = SignalCurve(right, judged, resamples(right.size))
    report = ProbeReport(
        prompts=right.size,
        left_out=int((~told).sum()),
        n=n,
        limit=limit,
        group=group,
        rollouts=len(rollouts),
        unjudged=float(np.mean([not r.judged for r in rollouts])),
        truncated=float(np.mean([r.finish == "length" for r in rollouts])),
        pass_rate=_share(right / judged, n),
        never=_share(right == 0),
        always=_share(right == judged),
        signals=tuple(_signal(curve, size) for size in _sizes(curve.n, group)),
        histogram=tuple(histogram(right, judged, n)),
        lengths=tuple(length_rows(rollouts)),
        limits=tuple(limit_rows(rollouts, limit)),
        enough=enough(rollouts, limit),
        spendings=tuple(spendings(curve, lengths, group)),
    )
    return dataclasses.replace(report, suggestions=tuple(suggestions(report)), recipe=recipe_lines(report))


def histogram(right: np.ndarray, judged: np.ndarray, n: int) -> list[Bar]:
    """Never and always apart; between them by count, or by eighths of the pass rate when n is large.

    >>> [(bar.label, bar.prompts) for bar in histogram(np.array([0, 0, 1, 4]), np.array([4, 4, 4, 4]), 4)]
    [('never', 2), ('1 of 4', 1), ('2 of 4', 0), ('3 of 4', 0), ('always', 1)]
    """
    inner = n if n <= FINE else 8
    rate = right / judged
    place = np.clip(np.ceil(rate * inner - 1e-9), 1, inner) if n > FINE else np.clip(np.rint(rate * n), 1, n - 1)
    place = np.where(right == 0, 0, np.where(right == judged, inner + 1, place)).astype(int)
    if n <= FINE:
        between = [(f"{k} of {n}", k) for k in range(1, n)]
    else:
        between = [(f"up to {k / inner:.3g}" if k < inner else "below 1", k) for k in range(1, inner + 1)]
    bars = [("never", 0), *between, ("always", inner + 1)]
    return [Bar(label=label, prompts=int((place == k).sum())) for label, k in bars]


def _counts(prompts: int, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each prompt: right, judged, and the mean length of a response."""
    right, judged, seen, tokens = (np.zeros(prompts, dtype=np.int64) for _ in range(4))
    for rollout in rollouts:
        right[rollout.group_id] += rollout.verdict == "right"
        judged[rollout.group_id] += rollout.judged
        seen[rollout.group_id] += 1
        tokens[rollout.group_id] += rollout.length
    return right, judged, tokens / np.maximum(seen, 1)


def _sizes(counted: int, group: int) -> list[int]:
    """What was counted, the group wanted, and up to twice what was counted: further no fit is to be trusted."""
    return sorted({size for size in SIZES if size <= max(2 * counted, group)} | {counted, group})


def _signal(curve: SignalCurve, size: int) -> Signal:
    found = curve.at(size)
    if found.how == "fitted":
        return Signal(size=size, share=Estimate.of(found.share), how=found.how)
    counted = min(size, curve.n)
    values = mixed(curve.right, curve.judged, counted)
    share = _share(values[np.isfinite(values)], curve.judged.max() / counted)  # a bootstrap of zeros has no width
    return Signal(size=size, share=share, how=found.how)


def _share(values: np.ndarray, draws: float = 1.0) -> Estimate:
    return Estimate(float(values.mean()), *mean_interval(values, draws))


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
