"""Where prompt ids come from: shuffled epochs without replacement, of all prompts or of each data entry by its weight.

Gates (`gate.py`) pick from a source and give back what got no verdict. Other sources (a posterior over
difficulty, a moving pool, the subset of a stage) follow the same protocol, `base.Source`.
A source knows ids alone: never a prompt's text, never how many rollouts it gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.curriculum.base import Source
from whet.curriculum.ids import Ids
from whet.errors import WhetError
from whet.types import Clock, Rollout

_NEXT_SEED = 1_000_003
"""Between the sets of a mixture, so that sets of one size are not shuffled alike."""


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
        self.ids = Ids.of(ids)
        self.seed = seed
        self.epoch = 0
        self.cursor = 0
        self.returned: list[str] = []
        self._order = self._draw_order()

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
            "prompts": self.ids.fingerprint,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "returned": list(self.returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ids.check(state["prompts"])
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self.returned = list(state["returned"])
        self._order = self._draw_order()

    def _draw_order(self) -> np.ndarray:
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self.ids))


class MixedSource:
    """Several sets of prompts, each in shuffled epochs of its own, interleaved by weight.

    A prompt of weight 2 comes up twice as often as one of weight 1: a set's share of the picks is
    weight x size / the sum of that over all sets. The next pick goes to the set that is furthest behind its share,
    so at no time is one more than a pick ahead.

    >>> source = MixedSource(["a", "b", "c", "d"], seed=0, entries=[(2, 1.0), (2, 3.0)])
    >>> clock = Clock(step=0, version=0, groups=1, free=None, tokens=0, progress=0.0)
    >>> picked = source.pick(8, clock)
    >>> sum(i in "ab" for i in picked), sum(i in "cd" for i in picked)
    (2, 6)
    """

    def __init__(self, ids: Sequence[str], seed: int, entries: Sequence[tuple[int, float]]):
        ids = Ids.of(ids)
        assert sum(size for size, _ in entries) == len(ids), "the entries are parts of the ids, in order"
        self.entries = [(size, weight) for size, weight in entries if size]
        ends = [sum(size for size, _ in self.entries[: i + 1]) for i in range(len(self.entries))]
        self.parts = [
            UniformSource(ids[end - size : end], seed + number * _NEXT_SEED)
            for number, (end, (size, _)) in enumerate(zip(ends, self.entries, strict=True))
        ]
        total = sum(size * weight for size, weight in self.entries)
        self.shares = [size * weight / total for size, weight in self.entries]
        self.picks = [0] * len(self.parts)
        self.returned: list[str] = []

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked, self.returned = self.returned[:k], self.returned[k:]
        while len(picked) < k:
            drawn = sum(self.picks) + 1
            behind = [share * drawn - done for share, done in zip(self.shares, self.picks, strict=True)]
            part = behind.index(max(behind))
            picked += self.parts[part].pick(1, clock)
            self.picks[part] += 1
        return picked

    def give_back(self, ids: Sequence[str]) -> None:
        self.returned = [*ids, *self.returned]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Weights are fixed: nothing is learnt from verdicts."""

    def metrics(self) -> dict[str, float]:
        """`epoch` over all prompts, and that of each set."""
        prompts = sum(size for size, _ in self.entries)
        each = {f"curriculum/epoch_{i}": part.metrics()["curriculum/epoch"] for i, part in enumerate(self.parts)}
        return {"curriculum/epoch": sum(self.picks) / prompts, "curriculum/prompts": float(prompts), **each}

    def state_dict(self) -> dict[str, Any]:
        return {
            "entries": [list(entry) for entry in self.entries],
            "parts": [part.state_dict() for part in self.parts],
            "picks": list(self.picks),
            "returned": list(self.returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if [tuple(entry) for entry in state.get("entries", ())] != self.entries:
            raise WhetError(
                "The checkpoint was written over data of other sizes or weights; resume with the same [[data]], "
                "or start a new run."
            )
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self.picks, self.returned = list(state["picks"]), list(state["returned"])


def build_source(ids: Sequence[str], seed: int, entries: Sequence[tuple[int, float]] = ()) -> Source:
    """Plain epochs unless weights differ: a recipe without weights picks as if it were one set."""
    if len({weight for size, weight in entries if size}) <= 1:
        return UniformSource(ids, seed)
    return MixedSource(ids, seed, entries)
