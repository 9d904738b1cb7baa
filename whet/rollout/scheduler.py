"""The queue of an engine: which flights wait, and which of them the next step admits.

The engine calls `next_wave` at every step, returns flights that lost their row, and at a weight update takes out the
waiting flights of groups that have begun. Admission goes by a forecast: `Lengths` remembers how long rollouts were,
`CacheRoom` adds up the pages that a wave would need. A wrong forecast costs a preemption, never a token. Nothing here
touches the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.model.twin import PREFILL
from whet.rollout.pages import Cache, PagedCache
from whet.rollout.rows import Chunk, Flight, Rows

PROMPTS = 1 << 20  # prompts whose lengths are remembered; the one not seen for longest is forgotten
WEIGHT = 0.25  # weight of the newest rollout in a prompt's expected length
FADE = 0.999  # factor on older rollouts in the overall mean, per finished rollout: policies change
FEW = 256  # tokens below which a prompt is not divided, however little memory there is
# turns that a flight waits for company, since a prefill of its own delays all running rows
PATIENCE = 4
# Share of the tokens still expected for which pages must suffice now (OURS). All of them would leave a third of a tight
# pool unused to save preemptions, which cost one prefill each; a single page would save none.
AHEAD = 0.25

Room = Callable[[Flight, bool], bool]  # takes a flight (forked or not) if there are pages for it


class Lengths:
    """Expected response lengths."""

    def __init__(self) -> None:
        # faded sums: tokens of rollouts that are over, rollouts that came to their end
        self.tokens = self.ended = 0.0
        self.prompts: dict[str, float] = {}

    def end(self, prompt_id: str, length: int, remember: bool = True) -> None:
        self.tokens, self.ended = FADE * self.tokens + length, FADE * self.ended + 1
        if remember:
            # inserted again at the end: the oldest is first
            old = self.prompts.pop(prompt_id, float(length))
            self.prompts[prompt_id] = old + WEIGHT * (length - old)
            if len(self.prompts) > PROMPTS:
                del self.prompts[next(iter(self.prompts))]

    def mean(self, running: int) -> float:
        """All tokens written / rollouts ended, where `running` tokens belong to rollouts that still run. This is the
        maximum-likelihood mean of a geometric length when some are unfinished (OURS). The mean of the finished ones
        alone would be too small, since short rollouts finish first. Infinite while none has ended."""
        return (self.tokens + running) / self.ended if self.ended else np.inf

    def expect(self, prompt_id: str, running: int) -> float:
        known = self.prompts.get(prompt_id)
        return self.mean(running) if known is None else known

    def left(
        self, flights: Iterable[Flight], count: np.ndarray, limit: np.ndarray, running: int
    ) -> np.ndarray:
        """Tokens that flights with `count` tokens are expected to write still. At least half of what they have written,
        since lengths have long tails (OURS); at most what the limit leaves."""
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
        self.prompts = dict(
            zip(state["length_prompts"], state["length_means"].tolist(), strict=True)
        )


def peak_pages(own: np.ndarray, left: np.ndarray, page: int) -> float:
    """Most pages that rows hold together from now on, if a row of `own` tokens writes `left` more and then ends.

    Just before the row with the k-th fewest tokens left ends, the rows from it on are alive and each has written as
    much as it: max_k sum_{i >= k} (own_i + left_k) / page, plus half a page each, since the last page is half full on
    average.

    >>> peak_pages(np.array([8, 8]), np.array([8, 40]), 8)  # 2 + 2 when the first ends, 1 + 5 in the end
    6.5
    """
    order = np.argsort(left)
    own = own[order]
    left = left[order]
    alive = np.arange(own.size, 0, -1)
    tokens = np.cumsum(own[::-1])[::-1] + alive * left
    return float((tokens / page + alive / 2).max())


class CacheRoom:
    """The pages that are available while one wave is put together. The running rows are looked at when first needed."""

    def __init__(self, cache: Cache, rows: Rows, lengths: Lengths) -> None:
        # None: every slot has its own memory
        self.cache = cache if isinstance(cache, PagedCache) else None
        self.rows = rows
        self.lengths = lengths
        # Per row, the tokens in pages that no other row holds, the next token included. Shared pages are freed when
        # their last owner ends, which the forecast does not count on.
        self.own: np.ndarray | None = None
        self.left: np.ndarray | None = None  # per row, tokens that it is expected to write
        self.held = 0  # pages that the rows have
        self.worst = 0  # pages that rows and wave would have if each wrote up to its limit
        self.now = 0  # pages that the wave takes at once
        self.taken: list[tuple[Flight, int]] = []  # the wave, each flight with its own tokens

    def __call__(self, flight: Flight, forked: bool) -> bool:
        """Count this flight in if it fits as well; a flight that is alone always fits."""
        if self.cache is None:
            return True
        page = self.cache.page
        free = self.cache.free
        rows = self.rows
        n = self.rows.size
        if self.own is None:
            shared = rows.shared[:n] // page
            self.own = rows.length[:n] + 1 - shared * page
            self.held = int((self.cache.held[:n] - shared).sum())
            self.worst = int((-(-(self.own + rows.limit[:n] - rows.count[:n]) // page)).sum())
        own = flight.known % page if forked else flight.known
        worst = self.worst + -(-(own + flight.limit - flight.trace.ids.size) // page)
        now = self.now + -(-own // page)
        fits = worst - self.held <= free or not (n or self.taken)
        # The forecast is needed only where the limits alone do not settle it.
        if fits or (now < free and self._peak(page, self.own, (flight, own)) - self.held <= free):
            self.worst = worst
            self.now = now
            self.taken.append((flight, own))
            return True
        return False

    def _peak(self, page: int, own: np.ndarray, one_more: tuple[Flight, int]) -> float:
        """Most pages held from now on, with this flight."""
        rows = self.rows
        n = self.rows.size
        running = int(rows.count[:n].sum())
        if self.left is None:
            self.left = self.lengths.left(rows.flights, rows.count[:n], rows.limit[:n], running)
        flights, added = zip(*self.taken, one_more, strict=True)
        count, limit = np.array([(f.trace.ids.size, f.limit) for f in flights]).T
        left = np.concatenate((self.left, self.lengths.left(flights, count, limit, running)))
        ahead = np.minimum(left, max(page, AHEAD * left.mean()))
        return peak_pages(np.concatenate((own, added)), ahead, page)


@dataclass(slots=True)
class Wave:
    """What one step admits: flights to feed, and flights that fork from one of them."""

    # One chunk per flight. Each ends with its flight's last known token, or there is a single chunk that does not.
    chunks: list[Chunk] = field(default_factory=list)
    # flight, and the chunk whose prompt it shares
    forks: list[tuple[Flight, int]] = field(default_factory=list)
    tokens: int = 0
    longest: int = 0
    opened: list[int] = field(default_factory=list)  # groups that begin with this wave


class Queue:
    """The flights that wait and the groups that have begun: what every engine has, whoever decides what starts next."""

    def __init__(self) -> None:
        self.waiting: deque[Flight] = deque()
        # Groups with a rollout started since the last update; never evaluation groups, whose numbers may be the same.
        self.begun: set[int] = set()

    def begin(self, flight: Flight) -> bool:
        """The flight leaves the queue. Returns whether its group begins with it."""
        group = flight.request.group_id
        if flight.request.phase == "eval" or group in self.begun:
            return False
        self.begun.add(group)
        return True

    def give_back(self, flights: Iterable[Flight]) -> None:
        """Flights that lost their row are first again, since they arrived before all that wait."""
        self.waiting.extendleft(sorted(flights, key=lambda f: -f.arrival))

    def cut(self) -> list[Flight]:
        """Take out the waiting flights of groups that have begun, in order."""
        out = [
            f
            for f in self.waiting
            if f.request.group_id in self.begun and f.request.phase != "eval"
        ]
        gone = set(out)
        self.waiting = deque(f for f in self.waiting if f not in gone)
        return out

    def updated(self) -> None:
        """The weights have changed: a group is remembered as long as it still has a rollout to start."""
        self.begun &= {f.request.group_id for f in self.waiting}

    def clear(self) -> None:
        self.waiting.clear()
        self.begun.clear()


class Scheduler(Queue):
    def __init__(self, packed: bool = False, batch: int = 1) -> None:
        """packed: prompts are fed end to end in one row of tokens, not padded to the longest. batch: flights that are
        admitted together while others run, or PATIENCE turns after the first could have been."""
        super().__init__()
        self.packed = packed
        self.batch = batch
        # Pages ran short: no flight is admitted until a row has ended, since it would soon be preempted again.
        self.full = False
        # Limits per wave after a shortage of memory. They are not saved: another GPU may be larger.
        self.budget = PREFILL  # tokens, as `_affords` counts them
        self.forks: int | None = None  # forks, each of which needs logits of its own
        self.ooms = 0  # shortages of memory so far
        self._held = 0  # turns since a flight could have been admitted

    def next_wave(
        self, slots: int, room: Room, half: tuple[Flight, int] | None = None, running: bool = False
    ) -> Wave:
        """Choose what fits in so many free slots. half: a flight that has a row, and how many of its tokens are fed; it
        comes first. running: other rows go on, and every wave delays them."""
        wave = Wave()
        ready = min(slots, len(self.waiting))
        if running and half is None and 0 < ready < self.batch and self._held < PATIENCE:
            self._held += 1
            return wave
        self._held = 0
        leaders: dict[str, int] = {}  # prompt id -> the chunk that feeds it
        if half is not None:
            self._feed(wave, leaders, *half)
        # A part of a long prompt is fed alone.
        while (
            self.waiting
            and slots > 0
            and not self.full
            and (not wave.chunks or wave.chunks[-1].last)
        ):
            flight = self.waiting[0]
            leader = leaders.get(flight.request.prompt_id) if flight.fresh else None
            fork_fits = self.forks is None or len(wave.forks) < self.forks
            if not (self._affords(wave, flight) if leader is None else fork_fits):
                break
            if not room(flight, leader is not None):
                self.full = True
                break
            self.waiting.popleft()
            slots -= 1
            if leader is None:
                self._feed(wave, leaders, flight)
            else:
                wave.forks.append((flight, leader))
            if self.begin(flight):
                wave.opened.append(flight.request.group_id)
        return wave

    def put_back(self, wave: Wave) -> None:
        """The wave was not fed: restore the queue. A half-fed flight has kept its row."""
        flights = [c.flight for c in wave.chunks if c.start == 0] + [
            flight for flight, _ in wave.forks
        ]
        self.give_back(flights)
        self.begun.difference_update(wave.opened)
        if flights:  # they were admitted, so the queue was open before
            self.full = False

    def shrink(self, wave: Wave) -> bool:
        """The wave did not fit in memory: halve what later waves may hold. False where nothing is left to halve."""
        self.ooms += 1
        if len(wave.chunks) == 1 and wave.tokens <= FEW:
            self.forks = len(wave.forks) // 2
            return bool(wave.forks)
        plain = self.packed or len(wave.chunks) == 1
        self.budget = (
            min(self.budget, wave.tokens if plain else 2 * len(wave.chunks) * wave.longest) // 2
        )
        return True

    def _feed(self, wave: Wave, leaders: dict[str, int], flight: Flight, fed: int = 0) -> None:
        if flight.fresh:
            leaders[flight.request.prompt_id] = len(wave.chunks)
        chunk = Chunk(flight, fed, min(flight.known, fed + min(PREFILL, max(FEW, self.budget))))
        wave.chunks.append(chunk)
        wave.tokens, wave.longest = wave.tokens + chunk.size, max(wave.longest, chunk.size)

    def _affords(self, wave: Wave, flight: Flight) -> bool:
        """Whether the flight fits in the tokens of one step; a longer one begins alone."""
        padded = 2 * (len(wave.chunks) + 1) * max(wave.longest, flight.known)
        return (
            not wave.chunks
            or (wave.tokens + flight.known if self.packed else padded) <= self.budget
        )
