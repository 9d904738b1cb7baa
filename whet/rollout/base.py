"""The protocol of a rollout engine, and the store that keeps the tokens of finished rollouts.

The loop and the evaluation talk to an `Engine`: requests go in, rollouts with traces come out. The loop puts finished
rollouts into a `RolloutStore`, so that judge and curriculum see them without tokens, and attaches the traces again to
the batch that trains. Our own engine is `whet.rollout.engine.LocalEngine`; other engines follow the same protocol.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from whet.types import Batch, Key, Request, Rollout, Trace, changed


class Engine(Protocol):
    # What it supports, of: keyed_noise, token_versions, stream, cut, recompute, keep, draft.
    # A recipe that needs more is refused.
    can: frozenset[str]

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. The engine chooses which start first; the rollouts of one request start in order."""

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        """Return finished rollouts, unjudged and with traces, in the order in which they finished.

        barrier: run until everything is finished. stream: run until at least one rollout is finished. An idle engine
        returns at once. `early` is called at the start, now and then, and at the end with the rollouts that are new
        since its last call (possibly none). Evaluation rollouts are returned by `generate` only.
        """

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """Run these requests to their end and return their rollouts in request order. Other rollouts go on meanwhile
        and are collected later. `on_progress` receives the number of finished rollouts whenever it changes."""

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or waiting to be collected."""

    @property
    def free(self) -> int | None:
        """Number of rollouts that could start at once beyond the queued ones; None under barrier."""

    def update(self, version: int) -> None:
        """The weights have changed, to those of `version`. Running rollouts end as they are (cut), continue after their
        keys and values were computed again (recompute), or continue with the old ones (keep). It is called after each
        step and after a warm start; a checkpoint brings the version in `load_state_dict`."""

    def release(self) -> None:
        """Give GPU memory back before the learner's step, until `take_back`."""

    def take_back(self) -> None: ...

    def stats(self) -> dict[str, float]:
        """Counters since the last call, named "rollout/..."."""

    def state_dict(self) -> dict[str, Any]:
        """Queued and running rollouts: JSON-able values, and numpy arrays at the top level."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Nothing is asked any more: end what was started for it."""


PARTS = ("ids", "log_probs", "versions")  # arrays of a trace, with an entry per generated token


@functools.cache
def empty_trace(dtype: np.dtype[Any]) -> Trace:
    """One object for all flights, since nothing can be written to it. dtype: that of log-probs."""
    return Trace(
        ids=np.zeros(0, np.int32), log_probs=np.zeros(0, dtype), versions=np.zeros(0, np.int32)
    )


def join_traces(traces: Iterable[Trace], dtype: np.dtype[Any]) -> dict[str, np.ndarray]:
    """The tokens of all traces end to end."""
    traces = (empty_trace(dtype), *traces)
    return {name: np.concatenate([getattr(trace, name) for trace in traces]) for name in PARTS}


def split_traces(arrays: Mapping[str, np.ndarray], sizes: Sequence[int]) -> list[Trace]:
    """Traces of so many tokens each. They are copies, because a view would keep the tokens of all of them alive."""
    ends = np.cumsum(sizes)
    return [
        Trace(**{name: arrays[name][e - n : e].copy() for name in PARTS})
        for n, e in zip(sizes, ends, strict=True)
    ]


class RolloutStore:
    def __init__(self) -> None:
        self._traces: dict[Key, Trace] = {}

    def put(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Store the traces and return the rollouts without them."""
        bare = []
        for rollout in rollouts:
            trace = rollout.trace
            assert trace is not None, f"rollout {rollout.key} has no trace"
            assert trace.ids.size == trace.log_probs.size == trace.versions.size, (
                f"rollout {rollout.key} is ragged"
            )
            assert rollout.key not in self._traces, f"rollout {rollout.key} came twice"
            self._traces[rollout.key] = trace
            bare.append(changed(rollout, trace=None))
        return bare

    def attach(self, batch: Batch) -> Batch:
        """Return the batch with the traces of all its rollouts; they stay stored until `keep` frees them."""
        groups = (
            dataclasses.replace(g, rollouts=tuple(self.attach_rollouts(g.rollouts)))
            for g in batch.groups
        )
        return dataclasses.replace(batch, groups=tuple(groups))

    def attach_rollouts(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Return these rollouts, in any order, with the traces that `put` stored."""
        out = []
        for rollout in rollouts:
            trace = self._traces.get(rollout.key)
            assert trace is not None, f"the trace of {rollout.key} was freed or never put"
            out.append(changed(rollout, trace=trace))
        return out

    def keep(self, group_ids: Set[int]) -> None:
        """Free the traces of all other groups."""
        self._traces = {key: trace for key, trace in self._traces.items() if key[0] in group_ids}

    def arrays(self) -> dict[str, np.ndarray]:
        """keys (n, 2), offsets (n + 1), and ids, log_probs, versions of all tokens end to end. Rollout i is keys[i] =
        (group_id, index) with the tokens offsets[i] to offsets[i + 1]."""
        ends = np.cumsum([0, *(trace.ids.size for trace in self._traces.values())], dtype=np.int64)
        keys = np.array(list(self._traces), np.int64).reshape(-1, 2)
        return {
            "keys": keys,
            "offsets": ends,
            **join_traces(self._traces.values(), np.dtype(np.float32)),
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the stored traces by those that `arrays` returned."""
        offsets = arrays["offsets"]
        keys = arrays["keys"].tolist()
        assert len(offsets) == len(keys) + 1 and offsets[-1] == arrays["ids"].size, (
            "offsets and tokens disagree"
        )
        traces = split_traces(arrays, np.diff(offsets).tolist())
        self._traces = {
            (group_id, index): trace for (group_id, index), trace in zip(keys, traces, strict=True)
        }
