"""The page pool and the paged cache: nothing leaks, nothing is shared that will be written."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.model.twin import KVShape
from whet.rollout.pages import Cache, PagedCache, make_cache

SHAPES = [KVShape(1, 2, 2, torch.float64)]


def test_pool_counts_owners() -> None:
    pool = make_cache(SHAPES, 1, 3, 1, 3, torch.device("cpu"))
    a = pool.take(2)
    pool.share(a)
    pool.drop(a)
    assert pool.free == 1 and [pool.owners[p] for p in a] == [1, 1]
    pool.drop(a)
    assert pool.free == 3 and pool.owners == [0, 0, 0]
    with pytest.raises(AssertionError):
        pool.drop(a)
    with pytest.raises(AssertionError):
        pool.take(4)


class Tracked:
    """A paged cache beside what it should hold: a list of stamps per row, one per token."""

    def __init__(self, page: int, slots: int = 6, context: int = 20, pages: int = 18) -> None:
        self.cache = PagedCache(SHAPES, slots, context, page, pages, torch.device("cpu"), False)
        self.slots, self.context, self.pages = slots, context, pages
        self.rows: list[list[float]] = []
        self.stamp = 0.0

    def open(self, tokens: int) -> None:
        if len(self.rows) < self.slots and -(-tokens // self.cache.page) <= self.cache.free:
            self.cache.open(len(self.rows), tokens)
            self.rows.append([])
            for _ in range(tokens):
                self._write(len(self.rows) - 1)

    def fork(self, source: int) -> None:
        n = len(self.rows[source])
        if len(self.rows) < self.slots and (n % self.cache.page > 0) <= self.cache.free:
            self.cache.fork([source], [len(self.rows)], [n])
            self.rows.append(list(self.rows[source]))

    def grow(self) -> None:
        length = np.array([len(row) for row in self.rows])
        if length.max() < self.context and self.cache.lacking(length) <= self.cache.free:
            self.cache.grow(length)
            for row in range(len(self.rows)):
                self._write(row)

    def close(self, row: int) -> None:
        self.cache.close([row])
        last = len(self.rows) - 1
        if row != last:
            self.cache.move(np.array([last]), np.array([row]), np.array([len(self.rows[last])]))
            self.rows[row] = self.rows[last]
        self.rows.pop()

    def _write(self, row: int) -> None:
        """The next token of a row, to its page and offset, as a forward does."""
        self.stamp += 1
        context = self.cache.context([(slice(row, row + 1), np.array([[len(self.rows[row])]]))])
        self.cache.keys[0][context.page, :, context.offset] = self.stamp
        self.rows[row].append(self.stamp)

    def check(self) -> None:
        """Owners are counted exactly, tokens are where they were put, and no other row has the page written next."""
        cache = self.cache
        held = [cache.table[row, : cache.held[row]].tolist() for row in range(len(self.rows))]
        assert cache.owners == [sum(page in pages for pages in held) for page in range(self.pages)]
        assert cache.free == cache.owners.count(0)
        assert (cache.held[len(self.rows) :] == 0).all()
        for pages, want in zip(held, self.rows, strict=True):
            assert len(set(pages)) == len(pages)
            assert cache.keys[0][pages, 0, :, 0].flatten()[: len(want)].tolist() == want
            if len(want) < len(pages) * cache.page:
                assert cache.owners[pages[len(want) // cache.page]] == 1


@settings(max_examples=60, deadline=None)
@given(
    page=st.integers(1, 5),
    actions=st.lists(
        st.tuples(st.sampled_from(["open", "fork", "grow", "grow", "close"]), st.integers(0, 8)),
        max_size=25,
    ),
)
def test_paged_cache_never_leaks_or_shares_wrongly(
    page: int, actions: list[tuple[str, int]]
) -> None:
    tracked = Tracked(page)
    for action, number in actions:
        if action == "open":
            tracked.open(number + 1)
        elif tracked.rows and action == "fork":
            tracked.fork(number % len(tracked.rows))
        elif tracked.rows and action == "grow":
            tracked.grow()
        elif tracked.rows:
            tracked.close(number % len(tracked.rows))
        tracked.check()
    for row in reversed(range(len(tracked.rows))):
        tracked.close(row)
    assert tracked.cache.free == tracked.pages and not any(tracked.cache.owners)


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    """10 tokens in pages of 4: two full pages with two owners, one copy of the half-filled third."""
    cache = make_cache(SHAPES, 3, 16, 4, 8, torch.device("cpu"))
    cache.open(0, 10)
    cache.fork([0, 0], [1, 2], [10, 10])
    assert cache.table[0, :2].tolist() == cache.table[1, :2].tolist() == cache.table[2, :2].tolist()
    assert len({int(cache.table[row, 2]) for row in range(3)}) == 3
    assert cache.free == 8 - 2 - 3
    cache.close([0])
    assert cache.free == 4  # its last page only: the others are still in use


def test_forks_and_pages_of_many_rows_are_those_of_one_after_the_other() -> None:
    """Two groups, the second of full pages only; then rows that lack none, one and three pages. Contents and all."""
    found = []
    for together in (True, False):
        cache = make_cache(SHAPES, 7, 40, 4, 60, torch.device("cpu"))
        cache.keys[0].copy_(torch.arange(cache.keys[0].numel()).view_as(cache.keys[0]))
        cache.open(0, 10)
        cache.open(1, 8)
        ways = [(0, 2, 10), (0, 3, 10), (0, 4, 10), (1, 5, 8), (1, 6, 8)]
        for some in [ways] if together else [[way] for way in ways]:
            cache.fork(*map(list, zip(*some, strict=True)))
        lengths = np.array([10, 8, 21, 10, 12, 8, 19])
        for row in range(7) if not together else [6]:
            cache.grow(lengths[: row + 1])
        state = [cache.table.tolist(), cache.held.tolist(), cache.owners, cache.free, cache.edits]
        found.append((state, cache.keys[0].clone()))
    assert found[0][0] == found[1][0]
    assert found[0][0][1] == [3, 3, 6, 3, 4, 3, 5]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


def test_slot_cache_moves_and_forks_contents() -> None:
    cache = Cache(SHAPES, 4, 8, torch.device("cpu"))
    cache.keys[0].copy_(torch.arange(cache.keys[0].numel()).view_as(cache.keys[0]))
    first = cache.keys[0].clone()
    cache.fork([0, 1], [2, 3], [5, 2])
    torch.testing.assert_close(cache.keys[0][2, :, :5], first[0, :, :5])
    torch.testing.assert_close(cache.keys[0][3, :, :2], first[1, :, :2])
    cache.move(np.array([1]), np.array([0]), np.array([3]))
    torch.testing.assert_close(cache.keys[0][0, :, :3], first[1, :, :3])
    torch.testing.assert_close(cache.keys[0][0, :, 3:], first[0, :, 3:])


def test_padding_is_written_to_the_trash_page() -> None:
    for cache in (
        Cache(SHAPES, 2, 8, torch.device("cpu")),
        make_cache(SHAPES, 2, 8, 4, 4, torch.device("cpu")),
    ):
        cache.open(0, 2)
        cache.open(1, 3)
        context = cache.context([(slice(0, 2), np.array([[-1, 0, 1], [0, 1, 2]]))])
        assert context.page[0] == cache.trash == cache.keys[0].shape[0] - 1
        assert (context.page[1:] != cache.trash).all()
        assert context.position.tolist() == [0, 0, 1, 0, 1, 2]
        assert context.blocks[0].longest == 3 and not context.blocks[0].level
