"""Sources: where prompt ids come from. Gates (`gate.py`) pick ids and give back those that got no verdict.

Here are the ids with their rows, shuffled epochs, and the tree by which other sources (`rho.py`) draw
in proportion to weights. A source handles ids only, never the text of a prompt or its number of rollouts.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from whet.curriculum.base import Saved, Source, expect, named, refuse_state
from whet.errors import WhetError
from whet.types import Clock, Request, Rollout

# ---- ids


class Ids(Sequence[str]):
    """Distinct ids in a fixed order, with the row of each, for all that keeps arrays with one entry per prompt.

    A map of a million ids takes a tenth of a second to build and 100 MB to hold. `build.py` builds it once; a part (the
    prompts of a stage or of a data entry) is an array of rows into it, and shares the map.
    """

    def __init__(self, ids: Sequence[str]):
        if len(ids) == 0:
            raise WhetError(
                "There are no prompts to train on; check data.path and the task's options."
            )
        self._names = ids
        self._place_of = {prompt_id: place for place, prompt_id in enumerate(ids)}  # in the whole
        if len(self._place_of) < len(ids):
            twice, count = Counter(ids).most_common(1)[0]
            raise WhetError(
                f'The prompt id "{twice}" occurs {count} times; every prompt needs an id of its own.'
            )
        # from a row here to a place in the whole, and back
        self._places = self._rows = np.arange(len(ids))
        self._fingerprint = ""

    @staticmethod
    def of(ids: Sequence[str]) -> Ids:
        """Return `ids` as `Ids`, without a new map if they are that already."""
        return ids if isinstance(ids, Ids) else Ids(ids)

    def some(self, rows: np.ndarray) -> Ids:
        """The ids of these rows, which ascend."""
        if len(rows) == len(self):
            return self
        if len(rows) == 0:
            raise WhetError(
                "There are no prompts in this part of the data; check curriculum.stages."
            )
        part = copy.copy(self)
        part._places = self._places[rows]
        part._rows = np.full(len(self._names), -1, np.int32)
        part._rows[part._places] = np.arange(len(rows), dtype=np.int32)
        part._fingerprint = ""
        return part

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int | slice) -> Any:
        return (
            self.some(np.arange(len(self))[row])
            if isinstance(row, slice)
            else self._names[self._places[row]]
        )

    def __iter__(self) -> Iterator[str]:
        return (self._names[place] for place in self._places.tolist())

    def rows(self, ids: Sequence[str]) -> np.ndarray:
        """The rows of several ids, -1 for those that are not among these; without a loop for parts of one whole."""
        if isinstance(ids, Ids) and ids._names is self._names:
            return self._rows[ids._places]
        places = np.array([self._place_of.get(prompt_id, -1) for prompt_id in ids], np.int64)
        return np.where(places < 0, -1, self._rows[places].astype(np.int64))

    def shared(self, other: Ids) -> tuple[np.ndarray, np.ndarray]:
        """Rows here and rows there of the ids that both have."""
        here = self.rows(other)
        return here[here >= 0], np.flatnonzero(here >= 0)

    def state_dict(self) -> str:
        """A hash of all ids in their order: saved rows mean nothing over other data."""
        if not self._fingerprint:
            hashed = hashlib.blake2b("\0".join(self._names).encode(), digest_size=8)
            hashed.update(self._places.astype("<i8").tobytes())
            self._fingerprint = f"{len(self)}:{hashed.hexdigest()}"
        return self._fingerprint

    def load_state_dict(self, fingerprint: str) -> None:
        """Refuse a state that was written over other prompts."""
        if fingerprint != self.state_dict():
            refuse_state(f"over other prompts than the {len(self)} given now")


class Returns(Saved):
    """The part that all sources share: ids that got no verdict are handed out again before any other."""

    state_names: tuple[str, ...] = ("returned",)

    def __init__(self) -> None:
        self.returned: list[str] = []

    def give_back(self, ids: Sequence[str]) -> None:
        self.returned = [*ids, *self.returned]

    def take_back(self, k: int) -> list[str]:
        """Up to k of the ids that were given back."""
        taken = self.returned[:k]
        self.returned = self.returned[k:]
        return taken

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Learn nothing; sources that learn from verdicts override this."""

    def asked_for(self, requests: Sequence[Request]) -> None:
        """Nothing is drawn of it, unless a source overrides this and `pictures`."""

    def pictures(self) -> dict[str, Any]:
        return {}


# ---- shuffled epochs


class UniformSource(Returns):
    """Every prompt once per epoch, each epoch in an order of its own, drawn from (seed, epoch).

    The order can be drawn again, so the state is small however many prompts there are. At 1,000,000 prompts a draw
    costs about 30 ms, once per epoch.
    """

    state_names = ("ids", "epoch", "cursor", "returned")

    def __init__(self, ids: Sequence[str], seed: int):
        super().__init__()
        self.ids = Ids.of(ids)
        self.seed = seed
        self.epoch = self.cursor = 0
        self._order = self._draw_order()

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked = self.take_back(k)
        while len(picked) < k:
            if self.cursor == len(self.ids):
                self.epoch = self.epoch + 1
                self.cursor = 0
                self._order = self._draw_order()
            rows = self._order[self.cursor : self.cursor + k - len(picked)]
            picked += [self.ids[row] for row in rows.tolist()]
            self.cursor += len(rows)
        return picked

    def _draw_order(self) -> np.ndarray:
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self.ids))

    def metrics(self) -> dict[str, float]:
        """`epoch` is fractional: 1.25 is a quarter of the second epoch."""
        return named({"epoch": self.epoch + self.cursor / len(self.ids), "prompts": len(self.ids)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._order = self._draw_order()


_NEXT_SEED = 1_000_003  # between data entries, so that two sets of one size are not shuffled alike


def furthest_behind(shares: Sequence[float], counts: Sequence[int]) -> int:
    """The number of the part that lacks most of its share once one more is given; it gets the next one."""
    total = sum(counts) + 1
    behind = [share * total - count for share, count in zip(shares, counts, strict=True)]
    return behind.index(max(behind))


class MixedSource(Returns):
    """Several sets of prompts, each in shuffled epochs of its own, interleaved by weight.

    A prompt of weight 2 is picked twice as often as one of weight 1: the share of a set is weight x size, divided by
    the sum of that over all sets. The next pick goes to the set that is furthest behind its share, so no set is ever
    more than one pick ahead.
    """

    state_names = ("picks", "returned")

    def __init__(self, ids: Sequence[str], seed: int, entries: Sequence[tuple[int, float]]):
        super().__init__()
        ids = Ids.of(ids)
        assert sum(size for size, _ in entries) == len(ids), (
            "the entries are parts of the ids, in order"
        )
        self.entries = [(size, weight) for size, weight in entries if size]
        ends = accumulate(size for size, _ in self.entries)
        self.parts = [
            UniformSource(ids[end - size : end], seed + number * _NEXT_SEED)
            for number, (end, (size, _)) in enumerate(zip(ends, self.entries, strict=True))
        ]
        total = sum(size * weight for size, weight in self.entries)
        self.shares = [size * weight / total for size, weight in self.entries]
        self.picks = [0] * len(self.parts)

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked = self.take_back(k)
        while len(picked) < k:
            part = furthest_behind(self.shares, self.picks)
            picked += self.parts[part].pick(1, clock)
            self.picks[part] += 1
        return picked

    def metrics(self) -> dict[str, float]:
        """`epoch` is that of all prompts; `epoch_0` and so on are those of the sets."""
        prompts = sum(size for size, _ in self.entries)
        own = {"epoch": sum(self.picks) / prompts, "prompts": prompts}
        each = {
            f"epoch_{i}": part.metrics()["curriculum/epoch"] for i, part in enumerate(self.parts)
        }
        return named({**own, **each})

    def state_dict(self) -> dict[str, Any]:
        parts = [part.state_dict() for part in self.parts]
        return {
            **super().state_dict(),
            "entries": [list(entry) for entry in self.entries],
            "parts": parts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if [tuple(entry) for entry in state.get("entries", ())] != self.entries:
            refuse_state("over data of other sizes or weights")
        expect(state, "parts")
        super().load_state_dict(state)
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def build_source(
    ids: Sequence[str], seed: int, entries: Sequence[tuple[int, float]] = ()
) -> Source:
    """Plain epochs where all weights are equal: such a recipe picks as if its data were one set."""
    if len({weight for size, weight in entries if size}) <= 1:
        return UniformSource(ids, seed)
    return MixedSource(ids, seed, entries)


# ---- weighted draws


class WeightedRows:
    """Draws from a million weighted rows in microseconds: a binary tree whose nodes hold the sums below them.

    Every node is the sum of its two children, never a running total, so a tree that is filled anew with the same
    weights draws the same rows.
    """

    def __init__(self, size: int):
        self.size = size
        self._leaves = 1 << max(1, (size - 1).bit_length())
        # node i has the children 2i and 2i + 1; the root is 1
        self._sums = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    @property
    def weights(self) -> np.ndarray:
        return self._sums[self._leaves : self._leaves + self.size]

    def fill(self, weights: np.ndarray) -> None:
        """Set all weights at once."""
        self.weights[:] = weights
        self.add_up()

    def put(self, rows: np.ndarray, weights: np.ndarray | float) -> None:
        self.weights[rows] = weights
        # then summing the whole tree anew is faster than finding what changed
        if 16 * len(rows) > self.size:
            self.add_up()
            return
        nodes = rows + self._leaves
        # all nodes are of one level; a repeated one is summed twice to the same
        while len(nodes) and nodes[0] > 1:
            nodes >>= 1
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, points: np.ndarray) -> np.ndarray:
        """The row at each point of [0, total), where rows lie side by side, each as wide as its weight. A row without
        weight is never found, whatever the rounding."""
        nodes = np.ones(len(points), np.int64)
        points = points.copy()
        while nodes[0] < self._leaves:
            nodes *= 2
            left = self._sums[nodes]
            goes_right = (points >= left) & (self._sums[nodes + 1] > 0)
            points -= left * goes_right
            nodes += goes_right
        return nodes - self._leaves

    def draw(self, k: int, rng: np.random.Generator, least: float = 0.0) -> np.ndarray:
        """Draw up to k different rows in proportion to their weights, and set their weights to 0.

        Fewer come when the remaining weights sum to no more than `least`. Drawing several at once and passing over
        repeats is the same as drawing one by one without replacement.
        """
        drawn = np.empty(0, np.int64)
        while len(drawn) < k and self.total > least:
            found = self.find(rng.random(k - len(drawn)) * self.total)
            # in the order they were drawn
            new = found[np.sort(np.unique(found, return_index=True)[1])]
            self.put(new, 0.0)
            drawn = np.concatenate([drawn, new])
        return drawn

    def add_up(self, first: int = 0, count: int = 0) -> None:
        """Sum the tree after a write to `weights`: all of it, or only `count` rows from row `first` on. `count` is a
        power of two that divides `first`, so these rows are a tree of their own."""
        width = count or self._leaves
        node = (self._leaves + first) // width  # the node that holds their sum
        while width > 1:
            below = self._sums[node * width : (node + 1) * width]
            width //= 2
            np.add(below[0::2], below[1::2], out=self._sums[node * width : (node + 1) * width])
        while node > 1:
            node //= 2
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]
