"""What an engine is: requests in, rollouts with traces out. Our own, later vLLM, serve the same loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from whet.types import Batch, Request, Rollout, Trace


class Engine(Protocol):
    can: frozenset[str]
    """Of keyed_noise, token_versions, stream, cut, recompute, keep, draft. A recipe that needs more is refused."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue. Which of them start first is the engine's choice; rollouts of one request start in order."""

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        """Finished rollouts, unjudged, with traces, in the order they finished.

        `early` is called at the start, now and then, and at the end with those that are new (maybe none): in the end it
        has had all that is returned, in that order.

        barrier: runs until all is finished. stream: runs until at least one rollout finished.
        Never waits when idle. Evaluation rollouts are handed out by `generate` alone.
        """

    def generate(self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None) -> list[Rollout]:
        """These requests to their end, in request order; what else runs goes on and is collected later.

        `told` hears how many are finished, whenever that changes.
        """

    @property
    def idle(self) -> bool:
        """Nothing queued, running or waiting to be collected."""

    @property
    def free(self) -> int | None:
        """Rollouts that could start at once beyond what is queued; None under barrier."""

    def update(self, version: int) -> None:
        """The weights are now those of `version`; running rollouts are cut, recomputed or kept."""

    def release(self) -> None:
        """The learner's step comes next: what memory it can do without until `take_back` may go back to the card."""

    def take_back(self) -> None: ...

    def stats(self) -> dict[str, float]:
        """Counters since the last call, named "rollout/..."."""

    def state_dict(self) -> dict[str, Any]:
        """Queued and running rollouts: JSON-able values, and numpy arrays at the top level."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# ---- store
#
# Who owns the traces: rollouts travel through judge and curriculum without them, and meet them again in the batch.
#
# The loop puts what the engine finished, attaches traces to the batch that trains, frees what the
# curriculum no longer holds, and saves the rest as a few flat arrays. Judging and choosing happen elsewhere.


_DTYPES = {"ids": np.int32, "log_probs": np.float32, "versions": np.int32}


class RolloutStore:
    def __init__(self) -> None:
        self._traces: dict[int, dict[int, Trace]] = {}
        """By group, so that a group is freed at once, then by index."""

    def put(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """The same rollouts without traces."""
        bare = []
        for rollout in rollouts:
            trace, group = rollout.trace, self._traces.setdefault(rollout.group_id, {})
            assert trace is not None, f"rollout {rollout.key} has no trace"
            assert trace.ids.size == trace.log_probs.size == trace.versions.size, f"rollout {rollout.key} is ragged"
            assert rollout.index not in group, f"rollout {rollout.key} came twice"
            group[rollout.index] = trace
            bare.append(dataclasses.replace(rollout, trace=None))
        return bare

    def attach(self, batch: Batch) -> Batch:
        """The batch with the traces of all its rollouts; they stay here until `keep` frees them."""
        groups = (dataclasses.replace(g, rollouts=tuple(self.attach_rollouts(g.rollouts))) for g in batch.groups)
        return dataclasses.replace(batch, groups=tuple(groups))

    def attach_rollouts(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """What `put` took off, for rollouts in any order."""
        return [dataclasses.replace(rollout, trace=self._trace(rollout)) for rollout in rollouts]

    def _trace(self, rollout: Rollout) -> Trace:
        trace = self._traces.get(rollout.group_id, {}).get(rollout.index)
        assert trace is not None, f"the trace of {rollout.key} was freed or never put"
        return trace

    def keep(self, group_ids: Set[int]) -> None:
        """Frees the traces of all other groups."""
        self._traces = {group_id: traces for group_id, traces in self._traces.items() if group_id in group_ids}

    @property
    def tokens(self) -> int:
        return sum(trace.ids.size for traces in self._traces.values() for trace in traces.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """keys (n, 2), offsets (n + 1), and ids, log_probs, versions of all tokens end to end.

        Rollout i is keys[i] = (group_id, index) with the tokens offsets[i] to offsets[i + 1].
        """
        flat = [(g, i, trace) for g, traces in self._traces.items() for i, trace in traces.items()]
        sizes = [trace.ids.size for _, _, trace in flat]
        arrays = {
            "keys": np.array([(g, i) for g, i, _ in flat], np.int64).reshape(-1, 2),
            "offsets": np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64),
        }
        for name, dtype in _DTYPES.items():
            arrays[name] = np.concatenate([np.empty(0, dtype), *(getattr(trace, name) for _, _, trace in flat)])
        return arrays

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces what is here by what `arrays` gave."""
        offsets, keys = arrays["offsets"], arrays["keys"]
        assert len(offsets) == len(keys) + 1 and offsets[-1] == arrays["ids"].size, "offsets and tokens disagree"
        self._traces = {}
        for (group_id, index), start, end in zip(keys.tolist(), offsets[:-1], offsets[1:], strict=True):
            # A copy, because a view would keep the tokens of all rollouts alive.
            parts = {name: arrays[name][start:end].copy() for name in _DTYPES}
            self._traces.setdefault(group_id, {})[index] = Trace(**parts)
