"""Who owns the traces: rollouts travel through judge and curriculum without them, and meet them again in the batch.

The loop puts what the engine finished, attaches traces to the batch that trains, frees what the
curriculum no longer holds, and saves the rest as a few flat arrays. Judging and choosing happen elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set

import numpy as np

from whet.types import Batch, Rollout, Trace

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
