"""Rollouts as they travel: all in one lump, since pickling each with a trace of its own takes more than twice as long.

Each step they go from the members to the driver, and those that train go back to the learners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from whet.rollout.base import PARTS, join_traces
from whet.types import Batch, Rollout, Trace

FIELDS = tuple(name for name in Rollout.__dataclass_fields__ if name != "trace")


class Bundle(NamedTuple):
    rows: list[tuple[Any, ...]]  # of each rollout its FIELDS
    sizes: list[int]  # the tokens of each
    tokens: dict[str, np.ndarray]  # of all, end to end
    guessed: list[np.ndarray | None]  # of each trace

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Bundle:
        traces = [rollout.trace for rollout in rollouts if rollout.trace is not None]
        assert len(traces) == len(rollouts), "a rollout has no trace"
        tokens = join_traces(traces, np.dtype(np.float32))
        rows, sizes = list(map(attrgetter(*FIELDS), rollouts)), [trace.ids.size for trace in traces]
        return cls(rows, sizes, tokens, [trace.guessed for trace in traces])

    def rollouts(self) -> list[Rollout]:
        """Their traces are views of `tokens`: a copy of each part would cost as much as all the rest."""
        found, end = [], 0
        for row, size, guessed in zip(self.rows, self.sizes, self.guessed, strict=True):
            begin, end = end, end + size
            trace = Trace(**{name: self.tokens[name][begin:end] for name in PARTS}, guessed=guessed)
            found.append(Rollout(**dict(zip(FIELDS, row, strict=True)), trace=trace))
        return found


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
