"""The stored cells of a matrix, what is read from them, and the tables of a page that are made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from train import read_outcome

from whet.errors import WhetError
from whet.report import formats
from whet.report.arms import Curve, Point

Log = Mapping[str, Any]  # the JSON of a cell
Arms = Mapping[str, Sequence[Log]]  # arm -> its cells, one for each seed
Show = Callable[[float | None], str]

COSTS: dict[str, Show] = {"tokens": formats.count, "seconds": formats.duration}


def read_arms(folder: Path, order: Sequence[str]) -> dict[str, list[Log]]:
    """The stored cells by arm: first the arms in the given order, then any others."""
    cells = [read_outcome(path) for path in sorted(folder.glob("*.json"))]
    evaluated = [cell for cell in cells if points(cell, "tokens")]
    if not evaluated:
        raise WhetError(f"There are no finished cells in {folder}.")
    arms: dict[str, list[Log]] = {name: [] for name in order}
    for cell in sorted(evaluated, key=lambda cell: cell["seed"]):
        arms.setdefault(cell["arm"], []).append(cell)
    return {name: cells for name, cells in arms.items() if cells}


def column(cell: Log, name: str) -> list[float | None]:
    place = cell["columns"].index(name)
    return [row[place] for row in cell["rows"]]


def points(cell: Log, cost: str) -> list[Point]:
    """The evaluations, with `cost` in the place of tokens."""
    columns = (column(cell, name) for name in ("step", cost, "seconds", "accuracy"))
    found = []
    for step, spent, seconds, accuracy in zip(*columns, strict=True):
        if accuracy is not None:
            point = Point(
                step=int(step or 0), tokens=spent or 0.0, seconds=seconds or 0.0, accuracy=accuracy
            )
            found.append(point)
    return found


def curve(cell: Log, cost: str) -> Curve:
    return [(point.tokens, point.accuracy) for point in points(cell, cost)]


def drift(cell: Log, name: str) -> tuple[float, float] | None:
    """(value in the first update, mean of the last three)."""
    values = [value for value in column(cell, name) if value is not None]
    return (values[0], fmean(values[-3:])) if values else None


def crossing(costs: np.ndarray, fit: np.ndarray, level: float) -> float:
    """The cost of the first step at or above the level; infinite if none is. The start has no cost and is left out."""
    above = np.flatnonzero((fit >= level) & (costs > 0))
    return float(costs[above[0]]) if above.size else math.inf


def place(cell: Log) -> dict[str, Any]:
    """Where a cell ran: its hardware and its commit."""
    return {**cell["hardware"], "commit": cell["commit"][:12]}


def usable(arms: Arms, baseline: str, cost: str) -> Arms:
    """The cells of each arm whose cost can be compared.

    Seconds are compared only between cells that had the machine to themselves, on the machine and at the commit where
    most of the baseline's cells ran.
    """
    if cost != "seconds":
        return arms
    alone = {arm: [cell for cell in cells if cell["solo"]] for arm, cells in arms.items()}
    references = alone.get(baseline) or [cell for cells in alone.values() for cell in cells]
    places = [place(cell) for cell in references]
    commonest = max(places, key=places.count, default=None)
    return {
        arm: [cell for cell in cells if place(cell) == commonest] for arm, cells in alone.items()
    }


def marks(name: str) -> tuple[str, str]:
    return f"<!-- results: {name} -->", f"<!-- end: {name} -->"


def fill(text: str, name: str, body: str) -> str:
    """The text with `body` between the marks of `name`, and all else as it was.

    >>> fill("a\\n<!-- results: m -->\\nold\\n<!-- end: m -->\\nb", "m", "new").split("\\n")
    ['a', '<!-- results: m -->', 'new', '<!-- end: m -->', 'b']
    """
    opening, closing = marks(name)
    before, found, rest = text.partition(opening)
    _, ended, after = rest.partition(closing)
    if not found or not ended:
        raise WhetError(f"The mark {closing if found else opening} is missing.")
    return f"{before}{opening}\n{body}\n{closing}{after}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
