"""How long rollouts will be, and how many pages that takes: what the scheduler admits by.

`Lengths` remembers what has finished, by prompt and overall; `Room` adds up a wave. The engine keeps the first over its
life and makes the second when there is somebody to admit. Nothing here decides: a wrong forecast costs a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from whet.rollout.flight import Flight
from whet.rollout.pages import Cache, PagedCache
from whet.rollout.rows import Rows

PROMPTS = 1 << 20
"""Prompts whose lengths are remembered; beyond them the one not seen for longest is forgotten."""
WEIGHT = 0.25
"""Of the newest rollout in a prompt's expected length."""
AHEAD = 0.25
"""Of what rows are expected to write still: so far ahead pages must suffice (OURS). All the way would leave a third of
a tight pool unused to save preemptions, each of which costs one prefill; a page alone saves none."""
FADE = 0.999
"""What a finished rollout leaves of the weight of those before it, in the overall mean: policies change."""


class Lengths:
    """Expected response lengths.

    >>> lengths = Lengths()
    >>> lengths.mean(running=100)
    inf
    >>> lengths.end("a", 40); lengths.expect("a", running=100), lengths.expect("b", running=100)
    (40.0, 140.0)
    """

    def __init__(self) -> None:
        self.tokens = self.ended = 0.0
        """Of rollouts that are over, and how many of them came to their end; both fade."""
        self.prompts: dict[str, float] = {}

    def end(self, prompt_id: str, length: int, remember: bool = True) -> None:
        self.tokens, self.ended = FADE * self.tokens + length, FADE * self.ended + 1
        if remember:
            old = self.prompts.pop(prompt_id, float(length))  # and in again at the end: the oldest is first
            self.prompts[prompt_id] = old + WEIGHT * (length - old)
            if len(self.prompts) > PROMPTS:
                del self.prompts[next(iter(self.prompts))]

    def cut(self, length: int) -> None:
        self.tokens += length

    def mean(self, running: int) -> float:
        """All tokens written / rollouts ended, `running` tokens being of those that run.

        The maximum likelihood of a geometric length when some are still under way (OURS). The mean of the finished
        alone would be that of the short ones, which finish first. Infinite while none has ended.
        """
        return (self.tokens + running) / self.ended if self.ended else np.inf

    def expect(self, prompt_id: str, running: int) -> float:
        known = self.prompts.get(prompt_id)
        return self.mean(running) if known is None else known

    def left(self, flights: Iterable[Flight], count: np.ndarray, limit: np.ndarray, running: int) -> np.ndarray:
        """Tokens that flights which have written `count` will still write: what is expected of them, but half of what
        they have at least, since lengths have long tails (OURS), and what the limit leaves at most."""
        expected = np.array([self.expect(f.request.prompt_id, running) for f in flights])
        return np.minimum(np.maximum(expected - count, count / 2), limit - count)

    def state_dict(self) -> dict[str, Any]:
        return {
            "length_sums": np.array([self.tokens, self.ended]),
            "length_prompts": list(self.prompts),
            "length_means": np.array(list(self.prompts.values()), np.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.ended = state["length_sums"].tolist()
        self.prompts = dict(zip(state["length_prompts"], state["length_means"].tolist(), strict=True))


def peak_pages(own: np.ndarray, left: np.ndarray, page: int) -> float:
    """Most pages that rows hold together from now on, if a row of `own` tokens writes `left` more and then goes.

    Just before the row with the k-th fewest tokens to go ends, those from it on are alive, and each has written as much
    as it: max_k sum_{i >= k} (own_i + left_k) / page, and half a page each, since the last one is half full on average.

    >>> peak_pages(np.array([8, 8]), np.array([8, 40]), 8)  # 2 + 2 when the first ends, 1 + 5 in the end
    6.5
    """
    order = np.argsort(left)
    own, left = own[order], left[order]
    alive = np.arange(own.size, 0, -1)
    tokens = np.cumsum(own[::-1])[::-1] + alive * left
    return float((tokens / page + alive / 2).max())


class Room:
    """Pages to be had, while a wave is put together; looks at the rows that run when it is first asked."""

    def __init__(self, cache: Cache, rows: Rows, lengths: Lengths) -> None:
        self.cache = cache if isinstance(cache, PagedCache) else None
        """None: every slot has its own, and nothing is short."""
        self.rows, self.lengths = rows, lengths
        self.own: np.ndarray | None = None
        """Of each row, the tokens in pages that no other row holds; the next one included, for which there is room."""
        self.left: np.ndarray | None = None
        """Tokens it is expected to write; looked up when limits alone do not settle it."""
        self.held = self.worst = self.now = 0
        """Pages they have; pages of all that the limits allow, if nobody ended; and those that the wave takes at once.
        Shared pages go back when their last owner ends, which is not counted on."""
        self.taken: list[tuple[Flight, int]] = []
        """The wave, each with its own tokens."""

    def __call__(self, flight: Flight, forked: bool) -> bool:
        """Whether this one fits, too; if so it is counted in. One alone always fits."""
        if self.cache is None:
            return True
        if self.own is None:
            self._look(self.cache)
        page = self.cache.page
        own = flight.known % page if forked else flight.known
        worst = self.worst + -(-(own + flight.limit - flight.trace.ids.size) // page)
        now = self.now + -(-own // page)
        free = self.cache.free
        fits = worst - self.held <= free or not (self.rows.size or self.taken)
        if fits or (now < free and self._peak(page, (flight, own)) - self.held <= free):
            self.worst, self.now = worst, now
            self.taken.append((flight, own))
            return True
        return False

    def _look(self, cache: PagedCache) -> None:
        rows, n, page = self.rows, self.rows.size, cache.page
        shared = rows.shared[:n] // page
        self.own = rows.length[:n] + 1 - shared * page
        self.held = int((cache.held[:n] - shared).sum())
        self.worst = int((-(-(self.own + rows.limit[:n] - rows.count[:n]) // page)).sum())

    def _peak(self, page: int, one_more: tuple[Flight, int]) -> float:
        """Pages held at the worst moment ahead, with this one."""
        rows, n = self.rows, self.rows.size
        running = int(rows.count[:n].sum())
        if self.left is None:
            self.left = self.lengths.left(rows.flights, rows.count[:n], rows.limit[:n], running)
        flights, own = zip(*self.taken, one_more, strict=True)
        count, limit = (
            np.array(column) for column in zip(*((f.trace.ids.size, f.limit) for f in flights), strict=True)
        )
        left = np.concatenate((self.left, self.lengths.left(flights, count, limit, running)))
        ahead = np.minimum(left, max(page, AHEAD * left.mean()))
        return peak_pages(np.concatenate((self.own, own)), ahead, page)  # type: ignore[arg-type]
