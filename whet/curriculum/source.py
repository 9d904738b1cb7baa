"""Where prompt ids come from: shuffled epochs without replacement.

Gates (`gate.py`) pick from a source and give back what got no verdict. Other sources (a posterior over
difficulty, a moving pool, the subset of a stage) follow the same protocol, `base.Source`.
A source knows ids alone: never a prompt's text, never how many rollouts it gets.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.types import Clock, Rollout


class UniformSource:
    """Every prompt once an epoch, each epoch in its own order, drawn from (seed, epoch).

    The state is three small things (epoch, cursor, what was given back) however many prompts there are,
    because the order can be drawn again. At 1,000,000 prompts that costs some 30 ms, once an epoch.

    >>> source = UniformSource(["a", "b", "c"], seed=0)
    >>> clock = Clock(step=0, version=0, groups=1, free=None, tokens=0, progress=0.0)
    >>> first = source.pick(3, clock)
    >>> sorted(first)
    ['a', 'b', 'c']
    >>> source.give_back([first[2], first[0]])
    >>> source.pick(2, clock) == [first[2], first[0]]
    True
    """

    def __init__(self, ids: Sequence[str], seed: int):
        _check_ids(ids)
        self.ids = ids
        self.seed = seed
        self.epoch = 0
        self.cursor = 0
        self.returned: list[str] = []
        self._order = self._draw_order()
        self._fingerprint = ""

    def pick(self, k: int, clock: Clock) -> list[str]:
        """What was given back first, then on through this epoch and, if need be, the next ones."""
        picked, self.returned = self.returned[:k], self.returned[k:]
        while len(picked) < k:
            if self.cursor == len(self.ids):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._draw_order()
            rows = self._order[self.cursor : self.cursor + k - len(picked)]
            picked += [self.ids[row] for row in rows.tolist()]
            self.cursor += len(rows)
        return picked

    def give_back(self, ids: Sequence[str]) -> None:
        self.returned = [*ids, *self.returned]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Uniform sampling learns nothing from verdicts."""

    def metrics(self) -> dict[str, float]:
        """`epoch` is exact and fractional: 1.25 is a quarter of the second epoch."""
        return {
            "curriculum/epoch": self.epoch + self.cursor / len(self.ids),
            "curriculum/prompts": float(len(self.ids)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.fingerprint,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "returned": list(self.returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["prompts"] != self.fingerprint:
            raise WhetError(
                f"The checkpoint was written over other prompts than the {len(self.ids)} given now; "
                "resume with the same data, or start a new run."
            )
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self.returned = list(state["returned"])
        self._order = self._draw_order()

    @property
    def fingerprint(self) -> str:
        """Of all ids in their order: a cursor means nothing over other data."""
        if not self._fingerprint:
            digest = hashlib.blake2b("\0".join(self.ids).encode(), digest_size=8).hexdigest()
            self._fingerprint = f"{len(self.ids)}:{digest}"
        return self._fingerprint

    def _draw_order(self) -> np.ndarray:
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self.ids))


def _check_ids(ids: Sequence[str]) -> None:
    if len(ids) == 0:
        raise WhetError("There are no prompts to train on; check data.path and the task's options.")
    if len(set(ids)) < len(ids):
        twice, count = Counter(ids).most_common(1)[0]
        raise WhetError(f'The prompt id "{twice}" occurs {count} times; every prompt needs an id of its own.')
