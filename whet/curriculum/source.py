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

# ---- weighted
#
# Weighted draws from a million rows in a few microseconds: a binary tree whose nodes hold the sums below them.
#
# Sources that draw by weight (`rho.py`, `kimi.py`) keep their prompts in one. It knows numbers alone. Every node is the
# sum of its two children as they stand, never a running total, so one filled anew with the same weights draws the same.


SMALL = 4096
"""Rows of a tree that is summed up anew in less time than it takes to find out which sums have changed."""
FEW = 8
"""Points that are found one by one in less time than together."""


class WeightedRows:
    """
    >>> rows = WeightedRows(3)
    >>> rows.put(np.array([0, 2]), np.array([1.0, 3.0]))
    >>> rows.total, rows.find(np.array([0.5, 1.0, 3.9])).tolist()
    (4.0, [0, 2, 2])
    >>> rows.draw(5, np.random.default_rng(0)).tolist(), rows.total
    ([2, 0], 0.0)
    """

    def __init__(self, size: int):
        self.size = size
        self._leaves = 1 << max(1, (size - 1).bit_length())
        self._sums = np.zeros(2 * self._leaves)  # node i has the children 2i and 2i + 1; the root is 1

    @property
    def total(self) -> float:
        return float(self._sums[1])

    @property
    def weights(self) -> np.ndarray:
        return self._sums[self._leaves : self._leaves + self.size]

    def fill(self, weights: np.ndarray) -> None:
        """All weights at once."""
        self.weights[:] = weights
        self.add_up()

    def put(self, rows: np.ndarray, weights: np.ndarray | float) -> None:
        self.weights[rows] = weights
        if self._leaves <= SMALL or 16 * len(rows) > self.size:
            self.add_up()
            return
        nodes = rows + self._leaves
        while len(nodes) and nodes[0] > 1:  # all are of one level; one that comes twice is summed twice, to the same
            nodes >>= 1
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, points: np.ndarray) -> np.ndarray:
        """The row at each point of [0, total), where rows lie side by side, each as wide as its weight.

        A row without weight is never found, whatever rounding does.
        """
        if len(points) <= FEW:
            return np.array([self._find_one(point) for point in points.tolist()], np.int64)
        nodes, points = np.ones(len(points), np.int64), points.copy()
        while nodes[0] < self._leaves:
            left, right = self._sums[2 * nodes], self._sums[2 * nodes + 1]
            goes_right = (points >= left) & (right > 0)
            points -= np.where(goes_right, left, 0.0)
            nodes = 2 * nodes + goes_right
        return nodes - self._leaves

    def _find_one(self, point: float) -> int:
        sums, node = self._sums, 1
        while node < self._leaves:
            node *= 2
            if point >= (left := sums.item(node)) and sums.item(node + 1) > 0:
                node, point = node + 1, point - left
        return node - self._leaves

    def draw(self, k: int, rng: np.random.Generator, least: float = 0.0) -> np.ndarray:
        """Up to k different rows, one after the other in proportion to the weights left; they lose their weight.

        Fewer when no more than `least` is left of all weights together. Drawing several at once and passing over
        repeats is the same as drawing one by one without replacement.
        """
        drawn = np.empty(0, np.int64)
        while len(drawn) < k and self.total > least:
            found = self.find(rng.random(k - len(drawn)) * self.total)
            new = found[np.sort(np.unique(found, return_index=True)[1])]  # in the order they were drawn
            self.put(new, 0.0)
            drawn = np.concatenate([drawn, new])
        return drawn

    def add_up(self, first: int = 0, count: int = 0) -> None:
        """After `weights` was written to: all of it, or from row `first` on as many rows, a power of two that divides
        `first`, which are a tree of their own.
        """
        width = count or self._leaves
        node = (self._leaves + first) // width  # that holds their sum
        while width > 1:
            below = self._sums[node * width : (node + 1) * width]
            width //= 2
            np.add(below[0::2], below[1::2], out=self._sums[node * width : (node + 1) * width])
        while node > 1:
            node //= 2
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]


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


# ---- kimi
#
# Kimi k1.5's prioritised sampling (arXiv 2501.12599, section 2.3.4): a prompt comes up in proportion to 1 - s.
#
# s is the success rate tracked for the prompt. The paper starts from ten rollouts of every prompt; OURS starts from
# nothing and takes s = (right + 1) / (judged + 2), so that an unseen prompt counts as half solved and no prompt
# is ever out for good. The prompts of one pick differ, as long as there are enough. Unlike curricula that look for
# prompts of middling difficulty, this one keeps asking those that are never solved, and pays for them: put it under a
# gate that screens.


def weight(right: float, judged: float) -> float:
    """1 - s with s = (right + 1) / (judged + 2), the mean of a Beta(1, 1) after the evidence.

    >>> weight(0, 0), weight(2, 2), weight(0, 6)
    (0.5, 0.25, 0.875)
    """
    return (judged - right + 1) / (judged + 2)


class KimiSource:
    """Each draw is from (seed, number of the draw), so the state holds counts alone."""

    def __init__(self, ids: Sequence[str], seed: int):
        self.ids, self.seed = Ids.of(ids), seed
        self.draws = 0
        self.counts: dict[str, list[int]] = {}
        """[right, judged] of each prompt that was visited."""
        self._weighted = WeightedRows(len(ids))
        self._weighted.fill(np.full(len(ids), weight(0, 0)))
        self._returned: list[str] = []

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked, self._returned = self._returned[:k], self._returned[k:]
        while len(picked) < k:
            picked += self._draw(min(k - len(picked), len(self.ids)))
        return picked

    def _draw(self, k: int) -> list[str]:
        """k different prompts: who is drawn weighs nothing until the draw is over."""
        rows = self._weighted.draw(k, np.random.default_rng((self.seed, self.draws)))
        self.draws += 1
        ids = [self.ids[row] for row in rows.tolist()]
        self._weigh(ids)
        return ids

    def _weigh(self, ids: Sequence[str]) -> None:
        rows = np.array([self.ids.row(prompt_id) for prompt_id in ids], np.int64)
        self._weighted.put(rows, np.array([weight(*self.counts.get(prompt_id, (0, 0))) for prompt_id in ids]))

    def give_back(self, ids: Sequence[str]) -> None:
        self._returned = [*ids, *self._returned]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            count = self.counts.setdefault(rollout.prompt_id, [0, 0])
            count[0] += rollout.verdict == "right"
            count[1] += 1
        self._weigh(sorted({rollout.prompt_id for rollout in rollouts}))

    def metrics(self) -> dict[str, float]:
        return {
            "curriculum/prompts": float(len(self.ids)),
            "curriculum/visited": float(len(self.counts)),
            "curriculum/success_mean": 1.0 - self._weighted.total / len(self.ids),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.ids.fingerprint,
            "draws": self.draws,
            "counts": {prompt_id: list(count) for prompt_id, count in self.counts.items()},
            "returned": list(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ids.check(state["prompts"])
        self.draws = state["draws"]
        self.counts = {prompt_id: list(count) for prompt_id, count in state["counts"].items()}
        self._returned = list(state["returned"])
        self._weighted.fill(np.full(len(self.ids), weight(0, 0)))
        self._weigh(list(self.counts))


# ---- solved
#
# No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt that is solved nearly always is asked no more.
#
# Wraps any source and leaves out the prompts whose pass rate over all their judged rollouts so far is 0.9 or more.
# They are counted. OURS: a prompt that got no verdict is asked again whatever its rate, and if a whole pass over the
# data finds nobody left, the source is dry, which is for the gate's starvation policy to answer.


SOLVED = 0.9


class Unsolved:
    """`prompts`: how many the source has. Finding k prompts takes about k / (share not solved) looks.

    >>> from whet.curriculum.source import UniformSource
    >>> source = Unsolved(UniformSource(["a", "b"], seed=0), prompts=2)
    >>> source.counts["a"] = [9, 10]
    >>> source.pick(2, Clock(step=0, version=0, groups=1, free=None, tokens=0, progress=0.0))
    ['b', 'b']
    """

    def __init__(self, source: Source, *, prompts: int, solved: float = SOLVED):
        self.source = source
        self.prompts = prompts
        self.solved = solved
        self.counts: dict[str, list[int]] = {}
        """[right, judged] of each prompt that was visited."""
        self.skipped = 0
        self._returned: list[str] = []

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked, self._returned = self._returned[:k], self._returned[k:]
        in_vain = 0  # since the last one that will do
        while len(picked) < k and in_vain < self.prompts:
            some = self.source.pick(k - len(picked), clock)
            if not some:
                break
            for prompt_id in some:
                if self.is_solved(prompt_id):
                    in_vain += 1
                    self.skipped += 1
                else:
                    in_vain = 0
                    picked.append(prompt_id)
        return picked

    def is_solved(self, prompt_id: str) -> bool:
        right, judged = self.counts.get(prompt_id, (0, 0))
        return judged > 0 and right >= self.solved * judged

    def give_back(self, ids: Sequence[str]) -> None:
        self._returned = [*ids, *self._returned]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            count = self.counts.setdefault(rollout.prompt_id, [0, 0])
            count[0] += rollout.verdict == "right"
            count[1] += 1
        self.source.observe(rollouts)

    def metrics(self) -> dict[str, float]:
        return {**self.source.metrics(), "curriculum/skipped_solved": float(self.skipped)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self.source.state_dict(),
            "counts": {prompt_id: list(count) for prompt_id, count in self.counts.items()},
            "skipped": self.skipped,
            "returned": list(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.counts = {prompt_id: list(count) for prompt_id, count in state["counts"].items()}
        self.skipped = state["skipped"]
        self._returned = list(state["returned"])
