"""Who waits: the queue, admission while slots and pages suffice, and which groups have begun.

The engine asks it for the next wave, gives back what was preempted, and at a weight update asks which
waiting flights belong to a group that has begun. It holds no tokens on the device and runs nothing.
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

# ---- forecast
#
# How long rollouts will be, and how many pages that takes: what the scheduler admits by.
#
# `Lengths` remembers what has finished, by prompt and overall; `Room` adds up a wave. The engine keeps the first over
# its life and makes the second when there is somebody to admit. Nothing here decides: a wrong forecast costs a
# preemption.


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


class CacheRoom:
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


FEW = 256
"""Tokens below which a prompt is not divided, however little memory there is."""
PATIENCE = 4
"""Turns of the engine, each a burst of steps, that a flight waits for company. A prefill of its own is several steps
of everybody else's."""

Room = Callable[[Flight, bool], bool]
"""Takes a flight, forked or not, if the pages for it can be had (`forecast.Room`)."""


@dataclass(slots=True)
class Wave:
    """What one step admits: flights to feed, and those that fork from one of them."""

    chunks: list[Chunk] = field(default_factory=list)
    """Each of another flight. All end with the flight's last token, or there is one alone that does not."""
    forks: list[tuple[Flight, int]] = field(default_factory=list)
    """Each with the place among the chunks of the one whose prompt it shares."""
    tokens: int = 0
    longest: int = 0
    opened: list[int] = field(default_factory=list)
    """Groups that begin with it."""


class Scheduler:
    def __init__(self, packed: bool = False, batch: int = 1) -> None:
        """packed: prompts are prefilled one after the other in one row of tokens, not padded to the longest. batch:
        flights that are admitted together while others run, or PATIENCE steps after the first could have been."""
        self.packed, self.batch = packed, batch
        self._held = 0
        """Steps since somebody could have been admitted."""
        self.waiting: deque[Flight] = deque()
        self.begun: set[int] = set()
        """Groups of which a rollout has started since the last update; evaluation has its own ids and is never here."""
        self.full = False
        """Pages ran short: nobody is admitted until a row has ended. What was preempted would soon be so again."""
        self.most: int | None = None
        """Tokens of a wave, where more did not fit in memory; for good, but not saved: another card may be larger."""
        self.forks: int | None = None
        """The same of forks: each wants logits of its own."""
        self.ooms = 0
        """How often they did not."""

    def add(self, flights: Iterable[Flight]) -> None:
        self.waiting.extend(flights)

    def give_back(self, flights: Iterable[Flight]) -> None:
        """Flights that lost their row go first again; they arrived before all that wait."""
        self.waiting.extendleft(sorted(flights, key=lambda f: -f.arrival))

    def next_wave(self, slots: int, room: Room, half: tuple[Flight, int] | None = None, running: bool = False) -> Wave:
        """For so many free slots. `half`: a flight in a row, of which so many tokens are fed, comes first. running:
        rows go on meanwhile, whom every wave holds up."""
        wave = Wave()
        ready = min(slots, len(self.waiting))
        if running and half is None and 0 < ready < self.batch and self._held < PATIENCE:
            self._held += 1
            return wave
        self._held = 0
        leaders: dict[str, int] = {}
        if half is not None:
            self._feed(wave, leaders, *half)
        while self.waiting and slots > 0 and not (self.full or _part(wave)):
            flight = self.waiting[0]
            leader = leaders.get(flight.request.prompt_id) if flight.fresh else None
            if not (self._affords(wave, flight) if leader is None else self._affords_fork(wave)):
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
            if flight.request.phase != "eval" and flight.request.group_id not in self.begun:
                self.begun.add(flight.request.group_id)
                wave.opened.append(flight.request.group_id)
        return wave

    @property
    def budget(self) -> int:
        """Tokens of a wave, as `_affords` counts them."""
        return PREFILL if self.most is None else min(PREFILL, self.most)

    def put_back(self, wave: Wave) -> None:
        """It was not fed after all: the queue is as it was before. Who was half fed has kept its row."""
        flights = [c.flight for c in wave.chunks if c.start == 0] + [flight for flight, _ in wave.forks]
        self.give_back(flights)
        self.begun.difference_update(wave.opened)
        if flights:  # so it was before they were admitted
            self.full = False

    def shrink(self, wave: Wave) -> bool:
        """This one did not fit in memory: from now on half of it. False where it is one prompt, or little of one."""
        self.ooms += 1
        if len(wave.chunks) == 1 and wave.tokens <= FEW:
            self.forks = len(wave.forks) // 2
            return bool(wave.forks)
        plain = self.packed or len(wave.chunks) == 1
        self.most = min(self.budget, wave.tokens if plain else 2 * len(wave.chunks) * wave.longest) // 2
        return True

    def _feed(self, wave: Wave, leaders: dict[str, int], flight: Flight, fed: int = 0) -> None:
        if flight.fresh:
            leaders[flight.request.prompt_id] = len(wave.chunks)
        chunk = Chunk(flight, fed, min(flight.known, fed + min(PREFILL, max(FEW, self.budget))))
        wave.chunks.append(chunk)
        wave.tokens, wave.longest = wave.tokens + chunk.size, max(wave.longest, chunk.size)

    def _affords(self, wave: Wave, flight: Flight) -> bool:
        """Within the tokens of one step; one that has more than that begins alone."""
        padded = 2 * (len(wave.chunks) + 1) * max(wave.longest, flight.known)
        return not wave.chunks or (wave.tokens + flight.known if self.packed else padded) <= self.budget

    def _affords_fork(self, wave: Wave) -> bool:
        return self.forks is None or len(wave.forks) < self.forks

    def cut(self) -> list[Flight]:
        """Take out the waiting flights of groups that have begun, in order."""
        out = [f for f in self.waiting if f.request.group_id in self.begun and f.request.phase != "eval"]
        gone = set(map(id, out))
        self.waiting = deque(f for f in self.waiting if id(f) not in gone)
        return out

    def forget(self) -> None:
        """After an update, of the groups that have begun only those with a rollout still to start matter."""
        self.begun &= {f.request.group_id for f in self.waiting}


def _part(wave: Wave) -> bool:
    """Whether the wave is a part of one flight, beside which nothing is fed."""
    return bool(wave.chunks) and not wave.chunks[-1].last
