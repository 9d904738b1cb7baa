"""Rollouts as they travel: all in one lump, since pickling each with a trace of its own takes more than twice as long.

Each step they go from the members to the driver, and those that train go back to the learners.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, repeat, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from whet.rollout.base import PARTS, join_traces
from whet.types import Batch, Rollout, Trace

FIELDS = tuple(name for name in Rollout.__dataclass_fields__ if name != "trace")


class Bundle(NamedTuple):
    columns: list[tuple[Any, ...]]  # of each of the FIELDS its values, a rollout each
    sizes: list[int]  # the tokens of each
    tokens: dict[str, np.ndarray]  # of all, end to end
    guessed: list[np.ndarray | None]  # of each trace

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Bundle:
        traces = [rollout.trace for rollout in rollouts if rollout.trace is not None]
        assert len(traces) == len(rollouts), "a rollout has no trace"
        columns = list(zip(*map(attrgetter(*FIELDS), rollouts), strict=True))
        tokens = join_traces(traces, np.dtype(np.float32))
        return cls(columns, [trace.ids.size for trace in traces], tokens, [trace.guessed for trace in traces])

    def rollouts(self) -> list[Rollout]:
        """Their traces are views of `tokens`: a copy of each part would cost as much as all the rest."""
        spans = list(starmap(slice, pairwise(accumulate(self.sizes, initial=0))))
        parts = {name: map(self.tokens[name].__getitem__, spans) for name in PARTS}
        traces = _made(Trace, len(spans), {**parts, "guessed": self.guessed})
        return _made(Rollout, len(spans), {**dict(zip(FIELDS, self.columns, strict=False)), "trace": traces})


def _made(kind: Any, count: int, columns: Mapping[str, Iterable[Any]]) -> list[Any]:
    """Objects of a frozen class with these values, column by column: their constructor takes four times as long."""
    made = list(map(object.__new__, repeat(kind, count)))
    for name, column in columns.items():
        deque(map(getattr(kind, name).__set__, made, column), maxlen=0)
    return made


def emptied(batch: Batch) -> tuple[Batch, Bundle]:
    """The batch without the rollouts of its groups, and these."""
    bare = replace(batch, groups=tuple(replace(group, rollouts=()) for group in batch.groups))
    return bare, Bundle.of([rollout for group in batch.groups for rollout in group.rollouts])


def filled(bare: Batch, bundle: Bundle) -> Batch:
    """The batch that was `emptied`."""
    found: dict[int, list[Rollout]] = {group.group_id: [] for group in bare.groups}
    for rollout in bundle.rollouts():
        found[rollout.group_id].append(rollout)
    return replace(bare, groups=tuple(replace(g, rollouts=tuple(found[g.group_id])) for g in bare.groups))
