"""Who waits: a queue in order of arrival, admission while slots and pages suffice, and which groups have begun.

The engine asks it for the next wave, gives back what was preempted, and at a weight update asks which
waiting flights belong to a group that has begun. It holds no tokens on the device and runs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from whet.rollout.flight import Flight
from whet.rollout.pages import Cache

PADDED, PACKED = 8192, 16384
"""Tokens of one prefill at most (or one flight), padding included where there is any: bounds its memory."""


class Scheduler:
    def __init__(self, packed: bool = False) -> None:
        """packed: prompts are prefilled one after the other in one row of tokens, not padded to the longest."""
        self.packed = packed
        self.waiting: deque[Flight] = deque()
        self.begun: set[int] = set()
        """Groups of which a rollout has started since the last update; evaluation has its own ids and is never here."""

    def add(self, flights: Iterable[Flight]) -> None:
        self.waiting.extend(flights)

    def give_back(self, flights: Iterable[Flight]) -> None:
        """Flights that lost their row go first again; they arrived before all that wait."""
        self.waiting.extendleft(sorted(flights, key=lambda f: -f.arrival))

    def next_wave(self, running: int, slots: int, cache: Cache) -> list[tuple[Flight, int]]:
        """The flights to start now, each with the place in the wave of the one it forks from (its own: prefilled).

        One page stays free for each row that will run, else what is admitted now is preempted a few tokens later.
        """
        wave: list[tuple[Flight, int]] = []
        leaders: dict[str, int] = {}
        pages, fed, longest, tokens = cache.free, 0, 0, 0
        while self.waiting and running + len(wave) < slots:
            flight = self.waiting[0]
            leader = leaders.get(flight.request.prompt_id) if flight.fresh else None
            pages -= cache.need(flight.known, forked=leader is not None)
            if 0 < running + len(wave) >= pages:
                break
            if leader is None:
                fed, longest, tokens = fed + 1, max(longest, flight.known), tokens + flight.known
                if fed > 1 and (tokens > PACKED if self.packed else fed * longest > PADDED):
                    break
                leader = len(wave)
                if flight.fresh:
                    leaders[flight.request.prompt_id] = leader
            wave.append((flight, leader))
            self.waiting.popleft()
        self.begun.update(f.request.group_id for f, _ in wave if f.request.phase != "eval")
        return wave

    def cut(self) -> list[Flight]:
        """Take out the waiting flights of groups that have begun, in order."""
        out = [f for f in self.waiting if f.request.group_id in self.begun and f.request.phase != "eval"]
        gone = set(map(id, out))
        self.waiting = deque(f for f in self.waiting if id(f) not in gone)
        return out

    def forget(self) -> None:
        """After an update, of the groups that have begun only those with a rollout still to start matter."""
        self.begun &= {f.request.group_id for f in self.waiting}
