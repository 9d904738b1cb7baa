"""Weighted draws from a million rows in a few microseconds: a binary tree whose nodes hold the sums below them.

Sources that draw by weight (`rho.py`, `kimi.py`) keep their prompts in one. It knows numbers alone. Every node is the
sum of its two children as they stand, never a running total, so one filled anew with the same weights draws the same.
"""

from __future__ import annotations

import numpy as np

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
