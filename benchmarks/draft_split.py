"""Where the seconds of a drafted run go: drafts, their verification, plain steps, and the rest.

Drafts of the host are timed as they are made. Where the device makes them, the host sees only whole steps: then each
drafter's graph that a run has used is replayed by itself on rows that are under way, and what a replay takes is
multiplied by how often it was used. `draft_bench` counts the uses and makes the run to replay in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from draft_watch import Fixed, Step, WatchedCaptures

from whet.draft.base import OFF, DraftArm
from whet.fast.graphs import Key

HOST, APART = "by the host's clock", "replayed apart"
"""How the seconds of drafts were found."""


def split(seconds: float, steps: Sequence[Step], draft: float | None, measured: str | None) -> dict[str, Any]:
    """draft: seconds of drafts, None where they are not known, and are then a part of those that verify."""
    speculating = sum(step.seconds for step in steps if step.arm != OFF)
    plain = sum(step.seconds for step in steps if step.arm == OFF)
    return {
        "draft": draft,
        "verify": speculating - (draft or 0.0),
        "plain": plain,
        "rest": seconds - speculating - plain,
        "measured": measured,
    }


def drafting_seconds(uses: Mapping[Key, int], costs: Mapping[Key, float]) -> float | None:
    """How often each graph was replayed, times what a replay takes. One that was not timed is taken for that of the
    next larger batch with the same drafts, or of the next smaller; None where no batch has them.

    >>> costs = {(8, 4, "eagle"): 0.25, (2, 16, "suffix"): 0.125}
    >>> drafting_seconds({(8, 4, "eagle"): 10, (2, 16, "suffix"): 4}, costs)
    3.0
    >>> drafting_seconds({(8, 4, "eagle"): 10, (4, 4, "eagle"): 2}, costs)
    3.0
    >>> drafting_seconds({(8, 4, "eagle"): 10, (8, 8, "eagle"): 1}, costs)
    """
    total = 0.0
    for key, count in uses.items():
        if (timed := nearest(key, costs)) is None:
            return None
        total += count * costs[timed]
    return total


def nearest(key: Key, timed: Iterable[Key]) -> Key | None:
    """
    >>> nearest((4, 2, "ngram"), [(2, 2, "ngram"), (8, 2, "ngram"), (16, 2, "ngram"), (4, 4, "ngram")])
    (8, 2, 'ngram')
    """
    alike = [other for other in timed if other[1:] == key[1:]]
    return min(alike, key=lambda other: (other[0] < key[0], abs(other[0] - key[0])), default=None)


def timed_share(uses: Mapping[Key, int], costs: Mapping[Key, float]) -> float:
    """The uses whose very graph was timed.

    >>> timed_share({(8, 4, "eagle"): 3, (4, 4, "eagle"): 1}, {(8, 4, "eagle"): 0.25})
    0.75
    """
    return sum(count for key, count in uses.items() if key in costs) / max(1, sum(uses.values()))


def graph_name(key: Key) -> str:
    """
    >>> graph_name((64, 1, "")), graph_name((64, 5, "")), graph_name((8, 4, "eagle"))
    ('64x1', '64x5', '8x4_eagle')
    """
    rows, new, drafter = key
    return f"{rows}x{new}" + (f"_{drafter}" if drafter else "")


def untimed(uses: Mapping[Key, int], costs: Mapping[Key, float]) -> str:
    """
    >>> untimed({(4, 8, "eagle"): 1, (8, 4, "eagle"): 2}, {(8, 4, "eagle"): 0.25})
    'No step of the run to replay in came to 4x8_eagle.'
    """
    return f"No step of the run to replay in came to {', '.join(graph_name(k) for k in uses if k not in costs)}."


class Wanted(Fixed):
    """A chooser of whatever is to be timed with so many rows; once that is done, of what was used most with so many, so
    that rows part from each other and batches shrink as they did."""

    def __init__(self, captures: WatchedCaptures, sizes: Sequence[int], uses: Mapping[Key, int]) -> None:
        super().__init__(OFF)
        self.captures, self.sizes = captures, sizes
        self.usual = sorted(uses, key=lambda key: -uses[key])

    def choose(self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()) -> DraftArm:
        size = next(size for size in self.sizes if size >= batch)
        wanted = (key for key in (*self.captures.wanted, *self.usual) if key[0] == size and key[2] not in retired)
        return next((DraftArm(drafter, depth) for _, depth, drafter in wanted), OFF)
