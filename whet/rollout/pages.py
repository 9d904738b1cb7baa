"""Where K and V lie: the page pool with reference counts, and the two forms of the cache over it.

`SlotCache`: a page is a whole row of `context` tokens and row i owns page i, read by slice: the fast form on a CPU.
`PagedCache`: pages of a few tokens, a block table, and prompt pages shared by the rollouts of a prompt.
Both keep rows 0..B-1 dense (the engine moves the last row into a hole) and make the `PageContext` of a forward.
They know tokens by number only, and never look at what is in a page.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from whet.errors import WhetError
from whet.model.attention import Block, PageContext
from whet.model.packed import ranges
from whet.model.twin import KVShape
from whet.rollout.arena import Arena, Piece


class PagePool:
    """Reference counts of pages 0..count-1.

    >>> pool = PagePool(2)
    >>> page = pool.take(1); pool.share(page); pool.drop(page); pool.free
    1
    >>> pool.drop(page); pool.free
    2
    """

    def __init__(self, count: int) -> None:
        self.owners = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        assert n <= len(self._free), "the scheduler admits and preempts so that pages suffice"
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self.owners[page] = 1
        return taken

    def share(self, pages: Sequence[int], times: int = 1) -> None:
        for page in pages:
            assert self.owners[page] > 0, "only a page in use can be shared"
            self.owners[page] += times

    def drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self.owners[page] > 0, "a page is dropped once by each owner"
            self.owners[page] -= 1
            if self.owners[page] == 0:
                self._free.append(page)


class Cache(Protocol):
    arena: Arena
    """Of the tensors: what lends their memory to the learner."""

    @property
    def free(self) -> int:
        """Pages to be had."""

    def need(self, tokens: int, forked: bool) -> int:
        """Pages a row of so many tokens takes, alone or forked from another."""

    def open(self, row: int, tokens: int) -> None:
        """A new row that will be filled with `tokens` tokens."""

    def fork(self, source: Sequence[int], target: Sequence[int], tokens: Sequence[int]) -> None:
        """New rows `target` with the first `tokens` tokens of the rows `source`."""

    def lacking(self, length: np.ndarray) -> int:
        """Pages missing to give each row 0..B-1 of these lengths room for one more token; a length of -1 wants none."""

    def grow(self, length: np.ndarray) -> None:
        """Give them that room."""

    def move(self, source: int, target: int, tokens: int) -> None: ...

    def close(self, row: int) -> None: ...

    def context(self, blocks: Sequence[tuple[slice, np.ndarray]]) -> PageContext:
        """For blocks of rows with new tokens at `position` [B, q]; -1 marks padding."""


class PageStore(ABC):
    """The tensors of all layers, and how a forward finds its way in them."""

    def __init__(
        self, shapes: Sequence[KVShape], pages: int, page: int, device: torch.device, releasable: bool = False
    ) -> None:
        def piece(shape: KVShape, dim: int) -> Piece:
            return (pages + 1, shape.heads, page, dim), shape.dtype

        pieces = [piece(s, s.key_dim) for s in shapes] + [piece(s, s.value_dim) for s in shapes]
        # Zeros: a masked key still meets its value, and 0 times a stray nan is nan.
        self.arena = Arena(pieces, device, releasable=releasable)
        self.keys, self.values = self.arena.tensors[: len(shapes)], self.arena.tensors[len(shapes) :]
        self.trash = pages
        """The page that padding is written to."""
        self.device = device

    def context(self, blocks: Sequence[tuple[slice, np.ndarray]]) -> PageContext:
        where = np.concatenate([self._place(rows, position) for rows, position in blocks], 1)
        page, offset, flat = torch.from_numpy(where).to(self.device)
        out, at = [], 0
        for rows, position in blocks:
            first, last = int(position.min()), int(position.max())
            out.append(
                Block(
                    flat[at : at + position.size].view(position.shape),
                    last + 1,
                    rows=rows,
                    table=self._table(rows, last),
                    level=first == last and position.shape[1] == 1,
                )
            )
            at += position.size
        return PageContext(self.keys, self.values, page, offset, flat, out)

    def _place(self, rows: slice, position: np.ndarray) -> np.ndarray:
        """Page, offset and position [3, B * q] of a block's tokens; padding goes to the trash page."""
        place = np.empty((3, *position.shape), np.int64)
        place[0], place[1] = self._locate(rows, position)
        place[2] = position
        if position.shape[1] > 1:
            place[:, position < 0] = [[self.trash], [0], [0]]
        return place.reshape(3, -1)

    @abstractmethod
    def _locate(self, rows: slice, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Page and offset of each token."""

    @abstractmethod
    def _table(self, rows: slice, last: int) -> Tensor | None:
        """The block table of these rows up to position `last`, where pages are not whole slots."""


class SlotCache(PageStore):
    def __init__(
        self, shapes: Sequence[KVShape], slots: int, context: int, device: torch.device, releasable: bool = False
    ) -> None:
        super().__init__(shapes, slots, context, device, releasable)

    @property
    def free(self) -> int:
        return sys.maxsize

    def need(self, tokens: int, forked: bool) -> int:
        return 0

    def open(self, row: int, tokens: int) -> None: ...

    def fork(self, source: Sequence[int], target: Sequence[int], tokens: Sequence[int]) -> None:
        longest = max(tokens)
        index = torch.tensor([source, target], device=self.device)
        for pages in (*self.keys, *self.values):
            pages[index[1], :, :longest] = pages[index[0], :, :longest]

    def lacking(self, length: np.ndarray) -> int:
        return 0

    def grow(self, length: np.ndarray) -> None: ...

    def move(self, source: int, target: int, tokens: int) -> None:
        for pages in (*self.keys, *self.values):
            pages[target, :, :tokens] = pages[source, :, :tokens]

    def close(self, row: int) -> None: ...

    def _locate(self, rows: slice, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(rows.start, rows.stop)[:, None], position

    def _table(self, rows: slice, last: int) -> None:
        return None


class PagedCache(PageStore):
    def __init__(
        self,
        shapes: Sequence[KVShape],
        slots: int,
        context: int,
        page: int,
        pages: int,
        device: torch.device,
        releasable: bool = False,
    ) -> None:
        super().__init__(shapes, pages, page, device, releasable)
        self.page = page
        self.wanted = pages
        """Pages asked for, where the card had no room for so many."""
        self.pool = PagePool(pages)
        self.table = np.full((slots, -(-context // page)), self.trash, np.int32)
        """Entries beyond what a row holds name the page that is nobody's: what a draft writes too far is lost there."""
        self.edits = 0
        """Times the table changed."""
        self.held = np.zeros(slots, np.int64)
        """Pages of each row."""

    @property
    def free(self) -> int:
        return self.pool.free

    def need(self, tokens: int, forked: bool) -> int:
        return int(tokens % self.page > 0) if forked else -(-tokens // self.page)

    def open(self, row: int, tokens: int) -> None:
        self._set([row], [self.pool.take(self.need(tokens, False))])

    def fork(self, source: Sequence[int], target: Sequence[int], tokens: Sequence[int]) -> None:
        """Full pages are shared; a half-filled last page is copied, since its owners will write to it."""
        copied: list[tuple[int, int]] = []
        ways = zip(source, target, tokens, strict=True)
        for (src, n), some in groupby(ways, key=lambda way: (way[0], way[2])):  # the rows of a group come together
            rows = [row for _, row, _ in some]
            shared, half = self.table[src, : n // self.page].tolist(), self.need(n, True)
            self.pool.share(shared, len(rows))
            own = self.pool.take(half * len(rows))
            copied += [(int(self.table[src, len(shared)]), page) for page in own]
            self._set(rows, [[*shared, *own[i * half : (i + 1) * half]] for i in range(len(rows))])
        if copied:
            old, new = torch.tensor(copied, device=self.device).T
            for pages in (*self.keys, *self.values):
                pages[new] = pages[old]

    def lacking(self, length: np.ndarray) -> int:
        return int(self._missing(length).sum())

    def grow(self, length: np.ndarray) -> None:
        missing = self._missing(length)
        if not missing.any():
            return
        rows = np.flatnonzero(missing)
        more = missing[rows]
        each = np.repeat(rows, more)
        self.table[each, self.held[each] + ranges(more)] = self.pool.take(each.size)
        self.held[rows] += more
        self.edits += rows.size

    def _missing(self, length: np.ndarray) -> np.ndarray:
        return np.maximum(length // self.page + 1 - self.held[: length.size], 0)

    def move(self, source: int, target: int, tokens: int) -> None:
        self.table[target] = self.table[source]
        self.table[source] = self.trash
        self.edits += 1
        self.held[target] = self.held[source]
        self.held[source] = 0

    def close(self, row: int) -> None:
        self.pool.drop(self.table[row, : self.held[row]].tolist())
        self.table[row] = self.trash
        self.held[row] = 0

    def _locate(self, rows: slice, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        page, offset = np.divmod(np.maximum(position, 0), self.page)
        return np.take_along_axis(self.table[rows], page, 1), offset

    def _table(self, rows: slice, last: int) -> Tensor:
        return torch.from_numpy(self.table[rows, : last // self.page + 1].astype(np.int64)).to(self.device)

    def _set(self, rows: list[int], pages: list[list[int]]) -> None:
        """As many pages for each row."""
        assert not self.held[rows].any(), "a row is closed before it is used again"
        self.table[rows, : len(pages[0])] = pages
        self.edits += len(rows)
        self.held[rows] = len(pages[0])


def make_cache(
    shapes: Sequence[KVShape],
    slots: int,
    context: int,
    page: int,
    pages: int,
    device: torch.device,
    releasable: bool = False,
) -> SlotCache | PagedCache:
    """Whole slots where `page` is 0. On a full card the pool of pages is halved until it fits, at least one context."""
    if page == 0:
        try:
            return SlotCache(shapes, slots, context, device, releasable)
        except torch.OutOfMemoryError as error:
            raise WhetError(
                f"The KV cache of rollout.slots = {slots} x rollout.context = {context} does not fit in memory; "
                "lower one of them, or set rollout.page = 128 and rollout.pages."
            ) from error
    full = -(-context // page)
    if 0 < pages < full:
        raise WhetError(
            f"rollout.pages = {pages} cannot hold one rollout of rollout.context = {context}; it takes {full}."
        )
    pages = wanted = pages or slots * full
    while True:
        try:
            cache = PagedCache(shapes, slots, context, page, pages, device, releasable)
            cache.wanted = wanted
            return cache
        except torch.OutOfMemoryError as error:
            if pages == full:
                raise WhetError(
                    f"Not even one rollout of rollout.context = {context} fits into memory beside the model; "
                    "lower rollout.context, or take a smaller model."
                ) from error
        pages = max(full, pages // 2)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def pool_lines(cache: Cache) -> list[str]:
    """What the user should hear of a pool that had to be made smaller."""
    if not isinstance(cache, PagedCache) or cache.trash == cache.wanted:
        return []
    return [
        f"The card has no room for {cache.wanted} KV pages: the pool has {cache.trash}; when they are full, "
        "the youngest rollouts wait."
    ]
