"""Who waits: the queue, admission while slots and pages suffice, and which groups have begun.

The engine asks it for the next wave, gives back what was preempted, and at a weight update asks which
waiting flights belong to a group that has begun. It holds no tokens on the device and runs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from whet.model.attention import PREFILL
from whet.rollout.flight import Chunk, Flight

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
