"""The running batch as columns, the flights in its rows, and the draw of their tokens.

Row i is one flight; rows 0..size-1 are in use. The columns are numpy arrays on the host; on a CPU the tensors of a
forward are views of them. A decode step uses whole-column operations; per-row Python runs only when a flight enters or
leaves, or where a row has stop strings. The engine and its runners use this file; it depends on no model and no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.draft.base import truncate
from whet.model.noise import noise_bits, uniform
from whet.rollout.base import PARTS
from whet.types import Finish, Request, Rollout, Trace

# Shapes: B rows that draw, V vocabulary, W tokens drawn for a row in one turn.

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class Flight:
    """One rollout in the making, from its request to its end. While it runs its tokens are in the columns of `Rows`;
    while it waits (not begun, preempted, or after a weight update) they are in `trace`."""

    request: Request
    index: int  # place of the rollout in its group
    # counts up over the engine's life: order of the queue; the youngest is preempted first
    arrival: int
    prompt: np.ndarray
    limit: int  # tokens that it may write: max_tokens, or less where the context ends
    key: tuple[int, int]  # names its noise
    trace: Trace  # what it has written; stale while it runs
    drafted: int = 0  # tokens proposed for it by speculation; a resumed engine counts from 0
    accepted: int = 0  # tokens of these that were kept
    ticket: int | None = None  # the `generate` call that waits for it

    @property
    def known(self) -> int:
        """Number of tokens that a prefill has to feed."""
        return self.prompt.size + self.trace.ids.size

    @property
    def fresh(self) -> bool:
        return self.trace.ids.size == 0

    def rollout(self, finish: Finish, version: int) -> Rollout:
        """The finished rollout; `version` is recorded where it was cut before its first token."""
        versions = self.trace.versions
        first, last = (int(versions[0]), int(versions[-1])) if versions.size else (version, version)
        return Rollout.of(
            self.request,
            self.index,
            length=versions.size,
            finish=finish,
            first_version=first,
            last_version=last,
            drafted=self.drafted,
            accepted=self.accepted,
            trace=self.trace,
        )

    def stops_in(self, ids: np.ndarray, decode: Decode) -> bool:
        """Whether the newest of these tokens has completed a stop string."""
        strings = self.request.sampling.stop_strings
        # A token gives at least one byte, and a few more tokens keep a broken first character out of the match.
        tail = max(len(s.encode()) for s in strings) + 4
        text = decode(ids[-tail:].tolist())
        return any(s in text for s in strings)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens `start` to `stop` of a flight, which one step feeds; those before them are cached."""

    flight: Flight
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """Whether the flight draws a token after this chunk."""
        return self.stop == self.flight.known

    def ids(self) -> np.ndarray:
        return np.concatenate((self.flight.prompt, self.flight.trace.ids))[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Draws:
    """How B rows draw. None means that no row asks for it, so that the common case does no work."""

    keys: Tensor  # int32 [2, B], from `row_key`
    temperature: Tensor | None = None  # [B, 1], 1 for greedy rows
    greedy: Tensor | None = None  # bool [B, 1]
    all_greedy: bool = False
    top_k: Tensor | None = None  # int64 [B, 1]; 0 keeps all
    top_p: Tensor | None = None  # [B, 1]


def sample(logits: Tensor, draws: Draws, position: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-softmax(logits / T) [B], taken before top-k and top-p, from logits [B, V].

    The exponential race: token i arrives at E_i / p_i with E_i = -log1p(-u_i) standard exponential; the first to arrive
    is distributed exactly as p. In logs: argmax(log p_i - log E_i). u is never 0, so rounding can lose an unlikely
    token but never force one. `position` int32 [B] counts each row's generated tokens. Greedy rows record at T = 1.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if draws.temperature is not None:
        logits = logits / draws.temperature
    log_probs = torch.log_softmax(logits, -1)
    race = log_probs
    if draws.top_k is not None or draws.top_p is not None:
        race = race.masked_fill(_dropped(race, draws.top_k, draws.top_p), -torch.inf)
    if not draws.all_greedy:
        u = uniform(noise_bits(draws.keys, position, logits.shape[-1])).to(race.dtype)
        log_delay = u.neg_().log1p_().neg_().log_()
        if draws.greedy is not None:
            log_delay.masked_fill_(draws.greedy, 0.0)
        race = race - log_delay
    token = race.argmax(-1)
    return token, log_probs.gather(1, token[:, None])[:, 0]


def _dropped(log_probs: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """True where top-k, then top-p over the rest, takes a token out. The likeliest token always stays."""
    ordered, index = log_probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    out = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        out |= (rank >= top_k) & (top_k > 0)
    if top_p is not None:
        probs = torch.softmax(ordered.masked_fill(out, -torch.inf), -1)
        before = probs.cumsum(-1) - probs
        out |= (before >= top_p) & (top_p < 1) & (rank > 0)  # rounding may sum to more than 1
    return torch.empty_like(out).scatter_(-1, index, out)


class Rows:
    def __init__(
        self, slots: int, context: int, dtype: np.dtype[Any], device: torch.device
    ) -> None:
        self.size = 0
        self.fed = 0  # cached tokens of the last row while it is half fed and draws none; else 0
        # changes of the rows so far: tells whether a copy of the columns elsewhere is stale
        self.edits = 0
        self.device = device
        self.flights: list[Flight] = []
        self.token = np.zeros(slots, np.int64)  # the newest token, which the next decode step feeds
        # tokens whose K and V are cached (in a half-fed row: will be)
        self.length = np.zeros(slots, np.int64)
        # cached tokens of a forked prompt: other rows hold their pages, too
        self.shared = np.zeros(slots, np.int64)
        # cached tokens that a drafter with a cache of its own has read
        self.paired = np.zeros(slots, np.int64)
        self.drafted = np.zeros(slots, np.int64)  # tokens proposed by speculation
        self.accepted = np.zeros(slots, np.int64)  # tokens of these that were kept
        # the row's place in the step under way; -1: not in it
        self.launched = np.full(slots, -1, np.int64)
        # where the device has the row's text, if it keeps one
        self.lane = np.zeros(slots, np.int32)
        self.count = np.zeros(slots, np.int32)  # tokens generated
        self.limit = np.zeros(slots, np.int32)
        # stop ids, as many columns as the longest list needs
        self.stops = np.full((slots, 1), -1, np.int64)
        self.watches = np.zeros(slots, bool)  # has stop strings
        self.picky = np.zeros(slots, bool)  # has top-k or top-p
        self.temperature = np.ones(slots, dtype)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, dtype)
        # Names, not arrays: `add` may replace `stops` by a wider one.
        self._columns = [
            name for name, column in vars(self).items() if isinstance(column, np.ndarray)
        ]
        self.keys = np.zeros((2, slots), np.int32)
        self.ids = np.zeros((slots, context), np.int32)
        self.log_probs = np.zeros((slots, context), dtype)
        self.versions = np.zeros((slots, context), np.int32)
        # came from an accepted draft; False beyond `count`
        self.guessed = np.zeros((slots, context), bool)
        self._numbers = np.arange(slots)
        # with the number of edits that it was made after
        self._draws: tuple[int, Draws] | None = None

    @property
    def ready(self) -> int:
        """Rows 0..ready-1 draw a token at each step: all, or all but a half-fed last one."""
        return self.size - (self.fed > 0)

    def feed(self, fed: int) -> None:
        """After this step so many known tokens of the last row are cached; 0: all of them."""
        if fed != self.fed:
            self.fed = fed
            self.edits += 1

    def add(self, flights: Sequence[Flight]) -> None:
        """Give each flight a row, from `size` on."""
        new = slice(self.size, self.size + len(flights))
        self.size = new.stop
        self.edits += 1
        self.flights += flights
        samplings = [flight.request.sampling for flight in flights]
        width = max((len(s.stop_ids) for s in samplings), default=0)
        if (missing := width - self.stops.shape[1]) > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[new] = -1
        self.stops[new, :width] = [
            [*s.stop_ids, *[-1] * (width - len(s.stop_ids))] for s in samplings
        ]
        self.shared[new] = 0
        self.paired[new] = 0
        self.launched[new] = -1
        self.guessed[new] = False
        self.count[new] = [flight.trace.ids.size for flight in flights]
        self.length[new] = [flight.known for flight in flights]
        for name in ("limit", "drafted", "accepted"):
            getattr(self, name)[new] = [getattr(flight, name) for flight in flights]
        for name in ("temperature", "top_k", "top_p"):
            getattr(self, name)[new] = [getattr(sampling, name) for sampling in samplings]
        self.watches[new] = [bool(s.stop_strings) for s in samplings]
        self.picky[new] = [s.top_k > 0 or s.top_p < 1 for s in samplings]
        self.keys[:, new] = np.reshape([flight.key for flight in flights], (-1, 2)).T
        for row in np.flatnonzero(self.count[new]) + new.start:
            trace = self.flights[row].trace
            n = self.count[row]
            for name in PARTS:
                getattr(self, name)[row, :n] = getattr(trace, name)
            if trace.guessed is not None:
                self.guessed[row, :n] = trace.guessed

    def remove(self, gone: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Take the flights out of these rows, in rising order. From the end on, the last row moves into each hole; a
        half-fed row must stay the last: then the last row but one fills the hole, and the half-fed row follows it.
        Returns source and target of each move, in an order in which no row is written to before it has moved."""
        held = list(range(self.size))  # the row whose flight each row will have
        for row in reversed(gone):
            last = len(held) - 1
            if self.fed and row < last - 1:
                held[row], held[last - 1] = held[last - 1], held[last]
            else:
                held[row] = held[last]
            if row == last:
                self.fed = 0
            held.pop()
        self.size = len(held)
        self.edits += 1
        self.flights = [self.flights[row] for row in held]
        target = np.flatnonzero(np.array(held, int) != self._numbers[: self.size])
        source = np.array(held, int)[target]
        for name in self._columns:
            column = getattr(self, name)
            column[target] = column[source]
        self.keys[:, target] = self.keys[:, source]
        n = self.count[target].max(initial=0)
        for name in PARTS:
            matrix = getattr(self, name)
            matrix[target, :n] = matrix[source, :n]
        self.guessed[target] = self.guessed[source]
        return source, target

    def trace(self, row: int) -> Trace:
        n = self.count[row]
        guessed = self.guessed[row, :n].copy() if self.guessed[row, :n].any() else None
        return Trace(
            **{name: getattr(self, name)[row, :n].copy() for name in PARTS}, guessed=guessed
        )

    def record(self, token: np.ndarray, log_prob: np.ndarray, version: int) -> None:
        """Write one more token for each row that is ready."""
        n = self.ready
        rows = self._numbers[:n]
        count = self.count[:n]
        self.token[:n] = token
        self.ids[rows, count] = token
        self.log_probs[rows, count] = log_prob
        self.versions[rows, count] = version
        count += 1

    def record_runs(self, drawn: Any, running: int, version: int, decode: Decode) -> np.ndarray:
        """Write the tokens that count of each ready row (`runner.Drawn`), up to the one that ends the row. Returns how
        many were written [B]. The first `running` rows have cached as many."""
        # up to the end of each step
        token, log_prob, turns = drawn.token, drawn.log_prob, drawn.counted.cumsum(0)
        counted = turns[-1]
        n = counted.size
        rows = self._numbers[:n]
        count = self.count[:n]
        counted = truncate(counted, token, self.stops[:n], self.limit[:n] - count)
        for i in np.flatnonzero(self.watches[:n]):
            flight = self.flights[i]
            written = self.ids[i, : count[i]]
            ends = (
                e
                for e in range(1, counted[i])
                if flight.stops_in(np.append(written, token[i, :e]), decode)
            )
            counted[i] = next(ends, counted[i])
        row, place = np.nonzero(np.arange(token.shape[1]) < counted[:, None])
        at = count[row] + place
        self.ids[row, at], self.log_probs[row, at] = token[row, place], log_prob[row, place]
        self.versions[row, at] = version
        if drawn.arm.depth:  # all but the last token of each step, which is the target's own
            guessed = np.ones(token.shape, bool)
            guessed[rows, turns - 1] = False
            self.guessed[row, at] = guessed[row, place]
        self.token[:n] = token[rows, counted - 1]
        self.length[:running] += counted[:running]
        count += counted
        return counted

    def finished(self, decode: Decode) -> list[tuple[int, Finish]]:
        """Rows that their newest token ended, and how; a stop goes before the limit."""
        n = self.ready
        stop = (self.stops[:n] == self.token[:n, None]).any(1)
        for row in np.flatnonzero(self.watches[:n] & ~stop):
            stop[row] = self.flights[row].stops_in(self.ids[row, : self.count[row]], decode)
        ended = np.flatnonzero(stop | (self.count[:n] >= self.limit[:n]))
        return [(int(row), "stop" if stop[row] else "length") for row in ended]

    def draws(self) -> Draws:
        """How the ready rows draw their next token; kept until a row comes or goes."""
        if self._draws is None or self._draws[0] != self.edits:
            self._draws = self.edits, self.draws_of(slice(0, self.ready))
        return self._draws[1]

    def draws_of(self, part: slice | np.ndarray) -> Draws:
        hot = self.temperature[part]
        top_k = self.top_k[part]
        top_p = self.top_p[part]
        greedy = hot == 0
        return Draws(
            keys=self._tensor(self.keys[:, part]),
            temperature=None
            if ((hot == 1) | greedy).all()
            else self._tensor(np.where(greedy, 1, hot)[:, None]),
            greedy=self._tensor(greedy[:, None]) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            top_k=self._tensor(top_k[:, None]) if top_k.any() else None,
            top_p=self._tensor(top_p[:, None]) if (top_p < 1).any() else None,
        )

    def positions(self) -> Tensor:
        """Index of the token that each ready row draws next, int32 [B]."""
        return self._tensor(self.count[: self.ready])

    def _tensor(self, column: np.ndarray) -> Tensor:
        return torch.from_numpy(column).to(self.device)
