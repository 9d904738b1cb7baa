"""What the cells of a matrix come to: the cost of each accuracy level, and where each arm ended. Pure.

`matrix_document.py` makes tables of these numbers and short texts. A level is reached as in `whet compare`: at the
first of two consecutive evaluations at or above it; a seed that never gets there is counted, not left out. Seconds
come from cells that had the machine to themselves, and are compared on one machine and at one commit alone.

One evaluation is as noisy as its problems are few, so where curves are flat a seed's own crossing is largely luck.
`pooled_costs` therefore puts all evaluations of an arm in the order of their cost and fits the nearest rising step
function (isotonic regression by pooling adjacent violators); `gain_costs` fits a straight line, which depends on no
level. Their ranges come from a bootstrap: seeds are drawn again, and each evaluation is drawn again from its fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, median
from typing import Any

import numpy as np
from curves import at

from whet.eval import Interval, wilson
from whet.report import formats
from whet.report.arms import Curve, Point
from whet.report.draws import rising
from whet.report.formats import Reach, first_crossing, median_reach, reach

Log = Mapping[str, Any]  # the JSON of a cell
Arms = Mapping[str, Sequence[Log]]  # arm -> its cells, one per seed
Show = Callable[[float | None], str]
GRID = 200  # levels are half hundredths
MOST_LEVELS = 6
ENOUGH = 3  # seeds that a claim rests on; an arm with fewer is marked
DRAWS = 400  # resamples of a bootstrap

# ---- one cell


def column(cell: Log, name: str) -> list[float | None]:
    place = cell["columns"].index(name)
    return [row[place] for row in cell["rows"]]


def points(cell: Log, cost: str) -> list[Point]:
    """The evaluations, with `cost` in the place of tokens."""
    columns = (column(cell, name) for name in ("step", cost, "seconds", "accuracy"))
    return [
        Point(step=int(step or 0), tokens=spent or 0.0, seconds=seconds or 0.0, accuracy=accuracy)
        for step, spent, seconds, accuracy in zip(*columns, strict=True)
        if accuracy is not None
    ]


def curve(cell: Log, cost: str) -> Curve:
    return [(point.tokens, point.accuracy) for point in points(cell, cost)]


def end(cell: Log) -> float:
    """Accuracy of the last evaluation."""
    return points(cell, "tokens")[-1].accuracy


def last(cell: Log, name: str) -> float:
    return column(cell, name)[-1] or 0.0


def drift(cell: Log, name: str) -> tuple[float, float] | None:
    """(value in the first update, mean of the last three)."""
    values = [value for value in column(cell, name) if value is not None]
    return (values[0], fmean(values[-3:])) if values else None


# ---- levels and what they cost


def reaches(cells: Sequence[Log], level: float, cost: str) -> list[Reach]:
    return [reach(points(cell, cost), level, "tokens") for cell in cells]


def place(cell: Log) -> dict[str, Any]:
    """Where a cell ran: its hardware and its commit."""
    return {**cell["hardware"], "commit": cell["commit"][:12]}


def usable(arms: Arms, baseline: str, cost: str) -> Arms:
    """The cells of each arm whose cost can be compared.

    For seconds these ran alone on their machine, where and at the commit at which most of the baseline's cells ran.
    """
    if cost != "seconds":
        return arms
    alone = {arm: [cell for cell in cells if cell["solo"]] for arm, cells in arms.items()}
    places = [place(cell) for cell in alone.get(baseline) or [cell for cells in alone.values() for cell in cells]]
    theirs = max(places, key=places.count, default=None)
    return {arm: [cell for cell in cells if place(cell) == theirs] for arm, cells in alone.items()}


def elsewhere(arms: Arms, baseline: str) -> dict[str, list[str]]:
    """What differs -> arms, for the cells that ran alone but in another place than those of `usable`."""
    used = usable(arms, baseline, "seconds")
    here = next((place(cell) for cells in used.values() for cell in cells), {})
    found: dict[str, list[str]] = {}
    for arm, cells in arms.items():
        for cell in cells:
            other = ", ".join(f"{key} {value}" for key, value in place(cell).items() if here.get(key) != value)
            if cell["solo"] and cell not in used[arm] and arm not in found.setdefault(other, []):
                found[other].append(arm)
    return found


def target_level(cells: Sequence[Log]) -> float | None:
    """The highest level that the median seed reaches; None where it reaches none above its start."""
    curves = [points(cell, "tokens") for cell in cells]
    start = max((c[0].accuracy for c in curves), default=1.0)
    for k in range(GRID, 0, -1):
        level = k / GRID
        if level > start and median_reach(reaches(cells, level, "tokens")).known:
            return level
    return None


def one_lower(level: float, cell: Log) -> float:
    """A level that one right answer fewer reaches, half an answer below it, so that rounding decides nothing.

    >>> round(one_lower(0.05, {"evaluation": {"prompts": 1319, "n": 1}}) * 1319, 9)  # 66 right answers are 0.05
    64.5
    """
    size = cell["evaluation"]["prompts"] * cell["evaluation"]["n"]
    return (math.ceil(level * size) - 1.5) / size


def pick_levels(arms: Arms, target: float | None) -> list[float]:
    """A few rising levels, from the start to the highest that any cell reaches, with `target` among them."""
    curves = [points(cell, "tokens") for cells in arms.values() for cell in cells]
    start = max((c[0].accuracy for c in curves), default=1.0)
    reached = [
        k / GRID for k in range(1, GRID + 1) if k / GRID > start and any(first_crossing(c, k / GRID) for c in curves)
    ]
    stride = math.ceil(len(reached) / MOST_LEVELS) if reached else 1
    return sorted({*reached[::-1][::stride], *([target] if target is not None else [])})


def share(baseline: Reach, other: Reach) -> Reach:
    """What part of the baseline's cost the other takes, as an interval.

    >>> share(Reach(600, 600), Reach(300, 300)), share(Reach(600, 600), Reach(900, math.inf))
    (Reach(low=0.5, high=0.5), Reach(low=1.5, high=inf))
    """
    low = other.low / baseline.high if baseline.high > 0 else 0.0
    return Reach(low, other.high / baseline.low if baseline.low > 0 else math.inf)


def share_text(found: Reach) -> str:
    """
    >>> share_text(Reach(0.5, 0.5)), share_text(Reach(1.5, math.inf))
    ('0.50', '>1.50')
    """
    if found.known:
        return f"{found.low:.2f}"
    return f">{found.low:.2f}" if found.low > 0 else formats.MISSING


def cost_text(found: Sequence[Reach], show: Show) -> str:
    """Median, range, and how many got there where not all did.

    >>> cost_text([Reach(9, math.inf), Reach(7, math.inf)], formats.count), cost_text([Reach(3, 3)], formats.count)
    ('never (by 7)', '3')
    """
    if not found:
        return formats.MISSING
    known = [one.low for one in found if one.known]
    if not known:
        return f"never (by {show(min(one.low for one in found))})"
    middle = median_reach(found)
    text = show(middle.low) if middle.known else f">{show(middle.low)}"
    if len(found) == 1:
        return text
    most = show(max(known)) if len(known) == len(found) else "never"
    return f"{text} ({show(min(known))}–{most})" + ("" if most != "never" else f", {len(known)} of {len(found)}")


# ---- where the arms ended


@dataclass(frozen=True, kw_only=True)
class Equal:
    """Accuracy of each arm after as many seconds of training as the baseline had."""

    seconds: float
    accuracy: Mapping[str, float]
    interval: Interval  # the baseline's own

    def verdict(self, arm: str) -> str:
        if arm not in self.accuracy:
            return formats.MISSING
        value = self.accuracy[arm]
        return "better" if value > self.interval.high else "within" if value >= self.interval.low else "worse"


def at_equal_seconds(arms: Arms, baseline: str) -> Equal | None:
    """Interpolated between evaluations; an arm that ended earlier keeps its last. None if no cell ran alone."""
    alone = {arm: cells for arm, cells in usable(arms, baseline, "seconds").items() if cells}
    if baseline not in alone:
        return None
    seconds = min(points(cell, "seconds")[-1].tokens for cell in alone[baseline])
    accuracy = {arm: median(at(curve(cell, "seconds"), seconds) for cell in cells) for arm, cells in alone.items()}
    size = alone[baseline][0]["evaluation"]["prompts"]
    return Equal(seconds=seconds, accuracy=accuracy, interval=wilson(accuracy[baseline], size))


def start_accuracy(arms: Arms) -> float:
    return median(points(cell, "tokens")[0].accuracy for cells in arms.values() for cell in cells)


def end_row(arm: str, cells: Sequence[Log], alone: Sequence[Log], equal: Equal | None) -> dict[str, str]:
    """One line of the table of ends. `alone`: those of the cells whose seconds can be compared."""
    accuracy = median(map(end, cells))
    low, high = wilson(accuracy, cells[0]["evaluation"]["prompts"])
    least = "≥" if any(cell["distinct_is_least"] for cell in cells) else ""
    row = {
        "seeds": f"{len(cells)}" + (" (few)" if len(cells) < ENOUGH else ""),
        "accuracy at the end (95%)": f"{accuracy:.3f} ({low:.3f}–{high:.3f})",
        "seeds' range": range_text([*map(end, cells)]),
        "updates": formats.count(median(last(cell, "step") for cell in cells)),
        "tokens": formats.count(median(last(cell, "tokens") for cell in cells)),
        "rollouts": formats.count(median(last(cell, "rollouts") for cell in cells)),
        "seconds": formats.duration(median(last(cell, "seconds") for cell in alone) if alone else None),
        "informative": formats.share(_middle([column(cell, "signal") for cell in cells])),
        "entropy": _drift([drift(cell, "entropy") for cell in cells], "{:.2f}"),
        "length": _drift([drift(cell, "length") for cell in cells], "{:.0f}"),
        "prompts used": least + formats.count(median(cell["distinct_prompts"] for cell in cells)),
    }
    for name in dict.fromkeys(name for cell in cells for name in cell.get("also", {})):
        row[name] = _first_and_last(cells, name)
    if equal is not None:
        text = f"{formats.accuracy(equal.accuracy[arm])}, {equal.verdict(arm)}" if alone else formats.MISSING
        row[f"at {formats.duration(equal.seconds)}"] = text
    return row


def entropy_correlation(arms: Arms) -> float | None:
    """Pearson's correlation of final accuracy and entropy over all cells: how far gains are only surer draws."""
    pairs = [
        (drifted[1], fmean(point.accuracy for point in points(cell, "tokens")[-3:]))
        for cells in arms.values()
        for cell in cells
        if (drifted := drift(cell, "entropy")) is not None
    ]
    sides = [*zip(*pairs, strict=True)]
    if len(pairs) < ENOUGH or any(len(set(side)) < 2 for side in sides):
        return None
    return correlation(*sides)


def _first_and_last(cells: Sequence[Log], name: str) -> str:
    """Accuracy on a further set before the first update and after the last, which a cell cut short lacks."""
    firsts = [found[0][1] for cell in cells if (found := cell["also"].get(name))]
    lasts = [found[-1][1] for cell in cells if (found := cell["also"].get(name)) and found[-1][0] == last(cell, "step")]
    return " → ".join(f"{median(side):.3f}" if side else formats.MISSING for side in (firsts, lasts))


def _middle(columns: Sequence[Sequence[float | None]]) -> float | None:
    """The median of the cells' means."""
    known = [[value for value in values if value is not None] for values in columns]
    return median(map(fmean, filter(None, known))) if any(known) else None


def range_text(accuracies: Sequence[float]) -> str:
    return f"{min(accuracies):.3f}–{max(accuracies):.3f}" if len(accuracies) > 1 else formats.MISSING


def _drift(pairs: Sequence[tuple[float, float] | None], form: str) -> str:
    known = [pair for pair in pairs if pair is not None]
    return " → ".join(form.format(median(side)) for side in zip(*known, strict=True)) if known else formats.MISSING


# ---- all evaluations of an arm together


def crossing(costs: np.ndarray, fit: np.ndarray, level: float) -> float:
    """The cost of the first step at or above the level, without the start, which costs nothing; infinite if none."""
    above = np.flatnonzero((fit >= level) & (costs > 0))
    return float(costs[above[0]]) if above.size else math.inf


def pooled_costs(cells: Sequence[Log], level: float, cost: str, seed: int = 0) -> np.ndarray:
    """[1 + DRAWS]: what the level costs, then the same in every draw of the bootstrap."""
    curves, rolls = _curves(cells, cost)
    if not curves:
        return np.full(1 + DRAWS, math.nan)
    costs, fit, owner = _fit(curves)
    found, rng = [crossing(costs, fit, level)], np.random.default_rng(seed)
    mine = [fit[owner == number] for number in range(len(curves))]
    for _ in range(DRAWS):
        drawn = rng.integers(len(curves), size=len(curves))
        again = [np.column_stack((curves[i][:, 0], rng.binomial(rolls[i], mine[i]) / rolls[i])) for i in drawn]
        found.append(crossing(*_fit(again)[:2], level))
    return np.array(found)


def _curves(cells: Sequence[Log], cost: str) -> tuple[list[np.ndarray], list[int]]:
    """Curves as [evaluations, (cost, accuracy)], and the rollouts of one evaluation."""
    rolls = [cell["evaluation"]["prompts"] * cell["evaluation"]["n"] for cell in cells]
    return [np.array(curve(cell, cost)) for cell in cells], rolls


def _fit(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(costs in order, the fit, the number of the curve that each belongs to)."""
    owner = np.repeat(range(len(curves)), [len(points) for points in curves])
    points = np.concatenate(curves)
    order = np.argsort(points[:, 0], kind="stable")
    return points[order, 0], rising(points[order, 1]), owner[order]


def pooled_shares(arms: Arms, baseline: str, level: float, cost: str) -> list[str]:
    """For each arm, its part of the baseline's cost and the middle 80% of the draws; empty if the baseline fails.

    In a draw where the baseline does not get there, all that it spent stands for its cost, which can only make the
    share look larger than it is.
    """
    arms = usable(arms, baseline, cost)
    theirs = pooled_costs(arms[baseline], level, cost, seed=1)
    if not math.isfinite(theirs[0]):
        return []
    spent = max(curve(cell, cost)[-1][0] for cell in arms[baseline])
    found = [pooled_costs(cells, level, cost) for cells in arms.values()]
    return [_with_range(mine / np.minimum(theirs, spent), (0.1, 0.9)) for mine in found]


def line(curves: Sequence[np.ndarray]) -> tuple[float, float]:
    """(height at no cost, slope) of the least-squares line through all points: slope = cov(cost, accuracy) / var(cost).

    >>> line([np.array([[0.0, 0.25], [16.0, 0.5]]), np.array([[0.0, 0.5], [16.0, 0.75]])])
    (0.375, 0.015625)
    """
    costs, values = np.concatenate(curves).T
    off = costs - costs.mean()
    slope = float((off * values).sum() / (off * off).sum())
    return float(values.mean() - slope * costs.mean()), slope


def gain_costs(cells: Sequence[Log], cost: str, seed: int = 0) -> np.ndarray:
    """[1 + DRAWS]: what a hundredth of accuracy costs, then the same in every draw; infinite where it does not rise."""
    curves, rolls = _curves(cells, cost)
    if not curves:
        return np.full(1 + DRAWS, math.nan)
    start, slope = line(curves)
    slopes, rng = [slope], np.random.default_rng(seed)
    for _ in range(DRAWS):
        drawn = [(curves[i][:, 0], rolls[i]) for i in rng.integers(len(curves), size=len(curves))]
        expected = [np.clip(start + slope * costs, 0.0, 1.0) for costs, _ in drawn]
        again = zip(drawn, expected, strict=True)
        slopes.append(line([np.column_stack((costs, rng.binomial(n, p) / n)) for (costs, n), p in again])[1])
    return np.array([0.01 / slope if slope > 0 else math.inf for slope in slopes])


def gain_shares(arms: Arms, baseline: str, cost: str) -> list[str]:
    """For each arm, its part of the baseline's cost of a hundredth gained and the middle 95% of the draws; empty if
    the baseline gains nothing."""
    arms = usable(arms, baseline, cost)
    theirs = gain_costs(arms[baseline], cost, seed=1)
    if not math.isfinite(theirs[0]):
        return []
    return [_with_range(gain_costs(cells, cost) / theirs, (0.025, 0.975)) for cells in arms.values()]


def _with_range(shares: np.ndarray, ends: tuple[float, float]) -> str:
    """The first, and quantiles of the rest; a draw in which neither gets there counts as never."""
    if math.isnan(shares[0]):
        return formats.MISSING
    low, high = np.quantile(np.nan_to_num(shares[1:], nan=math.inf, posinf=math.inf), ends, method="nearest")
    return f"{_share(shares[0])} ({_share(low)}–{_share(high)})"


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "never"
