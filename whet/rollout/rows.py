"""The running batch as columns: row i is one flight, rows 0..size-1 are in use.

numpy on the host; on a CPU the tensors of a forward are views of these columns. A decode step touches them
with whole-column operations only; per-row Python happens when a flight enters, leaves or watches for a stop string.
Used by the engine alone; it knows nothing of the model or of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from whet.draft.verify import truncate
from whet.rollout.flight import Flight
from whet.rollout.sampling import Draws
from whet.types import Finish, Trace

Decode = Callable[[Sequence[int]], str]
ANY = 2**20
"""As many as can be had."""


class Rows:
    def __init__(self, slots: int, context: int, dtype: np.dtype[Any], device: torch.device) -> None:
        self.size = 0
        self.fed = 0
        """Known tokens of the last row that are cached, while there are more to feed and it draws none; else 0."""
        self.edits = 0
        """Times a row came or went; a copy of the columns kept elsewhere is stale by then."""
        self.device = device
        self.flights: list[Flight] = []
        self.token = np.zeros(slots, np.int64)
        """The newest token, which the next decode step feeds."""
        self.length = np.zeros(slots, np.int64)
        """Tokens whose K and V are cached (of a row that is half fed: will be)."""
        self.paired = np.zeros(slots, np.int64)
        """Of these, tokens that a drafter with a cache of its own has read."""
        self.drafted = np.zeros(slots, np.int64)
        self.accepted = np.zeros(slots, np.int64)
        """Tokens that were proposed by speculation, and of these kept."""
        self.launched = np.full(slots, -1, np.int64)
        """Its place in the step that is under way; -1 if it is not in it."""
        self.lane = np.zeros(slots, np.int32)
        """Where the device has the row's text, if it keeps one."""
        self.most = np.full(slots, ANY, np.int32)
        """Drafts that the row wants at a step, at most."""
        self.shared = np.zeros(slots, np.int64)
        """Of these, tokens of a prompt that was forked: other rows hold their pages, too."""
        self.count = np.zeros(slots, np.int32)
        """Tokens generated."""
        self.limit = np.zeros(slots, np.int32)
        self.stops = np.full((slots, 1), -1, np.int64)
        self.watches = np.zeros(slots, bool)
        """Has stop strings."""
        self.picky = np.zeros(slots, bool)
        """Wants top-k or top-p."""
        self.keys = np.zeros((2, slots), np.int32)
        self.temperature = np.ones(slots, dtype)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, dtype)
        self.ids = np.zeros((slots, context), np.int32)
        self.log_probs = np.zeros((slots, context), dtype)
        self.versions = np.zeros((slots, context), np.int32)
        self._numbers = np.arange(slots)
        self._draws: Draws | None = None

    @property
    def ready(self) -> int:
        """Rows 0..ready-1 draw a token at each step: all, or all but the last."""
        return self.size - (self.fed > 0)

    def feed(self, fed: int) -> None:
        """So much of the last row's known tokens will be cached after this step; 0: all of them."""
        if fed != self.fed:
            self.fed, self._draws = fed, None
            self.edits += 1

    def add(self, flight: Flight) -> int:
        row, self.size = self.size, self.size + 1
        self.edits += 1
        self.flights.append(flight)
        sampling, trace = flight.request.sampling, flight.trace
        n = trace.ids.size
        self.count[row], self.limit[row] = n, flight.limit
        self.length[row], self.shared[row], self.paired[row], self.launched[row] = flight.known, 0, 0, -1
        self.drafted[row], self.accepted[row], self.most[row] = flight.drafted, flight.accepted, ANY
        self.ids[row, :n], self.log_probs[row, :n], self.versions[row, :n] = trace.ids, trace.log_probs, trace.versions
        self.keys[:, row] = flight.key
        self.temperature[row], self.top_k[row], self.top_p[row] = sampling.temperature, sampling.top_k, sampling.top_p
        self.watches[row] = bool(sampling.stop_strings)
        self.picky[row] = sampling.top_k > 0 or sampling.top_p < 1
        self._set_stops(row, sampling.stop_ids)
        self._draws = None
        return row

    def remove(self, row: int) -> list[tuple[int, int]]:
        """The flight in `row` leaves and the last row takes its place; if that is half fed and stays the last, the last
        but one does, and leaves its own to it. Returns the moves, in order."""
        last = self.size - 1
        way = [row, last] if row >= self.ready - 1 or self.ready == self.size else [row, self.ready - 1, last]
        moves = [(source, target) for target, source in pairwise(way) if source != target]
        for source, target in moves:
            self._move(source, target)
        if row == last:
            self.fed = 0
        self.size = last
        self.edits += 1
        self.flights.pop()
        self._draws = None
        return moves

    def _move(self, source: int, target: int) -> None:
        n = self.count[source]
        columns: tuple[np.ndarray, ...] = (
            self.token,
            self.length,
            self.shared,
            self.paired,
            self.drafted,
            self.accepted,
            self.launched,
            self.lane,
            self.most,
            self.count,
            self.limit,
            self.stops,
            self.watches,
            self.picky,
        )
        for column in (*columns, self.temperature, self.top_k, self.top_p):
            column[target] = column[source]
        self.keys[:, target] = self.keys[:, source]
        for matrix in (self.ids, self.log_probs, self.versions):
            matrix[target, :n] = matrix[source, :n]
        self.flights[target] = self.flights[source]

    def trace(self, row: int) -> Trace:
        n = self.count[row]
        return Trace(
            ids=self.ids[row, :n].copy(),
            log_probs=self.log_probs[row, :n].copy(),
            versions=self.versions[row, :n].copy(),
        )

    def record(self, token: np.ndarray, log_prob: np.ndarray, version: int) -> None:
        """One more token for each row that is ready."""
        n = self.ready
        rows, count = self._numbers[:n], self.count[:n]
        self.token[:n] = token
        self.ids[rows, count], self.log_probs[rows, count], self.versions[rows, count] = token, log_prob, version
        count += 1

    def record_runs(
        self, token: np.ndarray, log_prob: np.ndarray, counted: np.ndarray, running: int, version: int, decode: Decode
    ) -> np.ndarray:
        """The first `counted` [B] of token [B, W] for each row that is ready, up to what ends it; how many that were
        [B]. Those of `running` rows were fed with them."""
        counted = self._up_to_the_end(token, counted, decode)
        rows, count = self._numbers[: counted.size], self.count[: counted.size]
        row, place = np.nonzero(np.arange(token.shape[1]) < counted[:, None])
        at = count[row] + place
        self.ids[row, at], self.log_probs[row, at] = token[row, place], log_prob[row, place]
        self.versions[row, at] = version
        self.token[: counted.size] = token[rows, counted - 1]
        self.length[:running] += counted[:running]
        count += counted
        return counted

    def _up_to_the_end(self, token: np.ndarray, counted: np.ndarray, decode: Decode) -> np.ndarray:
        n = counted.size
        counted, _, _ = truncate(counted, token, self.stops[:n], self.limit[:n] - self.count[:n])
        for row in np.flatnonzero(self.watches[:n]):
            flight, written = self.flights[row], self.ids[row, : self.count[row]]
            for end in range(1, int(counted[row])):
                if flight.stops_in(np.concatenate((written, token[row, :end]))[-flight.tail() :], decode):
                    counted[row] = end
                    break
        return counted

    def finished(self, decode: Decode) -> list[tuple[int, Finish]]:
        """Rows that their newest token ended, and how; a stop goes before the limit."""
        n = self.ready
        stop = (self.stops[:n] == self.token[:n, None]).any(1)
        if self.watches[:n].any():
            for row in np.flatnonzero(self.watches[:n] & ~stop):
                flight, count = self.flights[row], self.count[row]
                stop[row] = flight.stops_in(self.ids[row, max(0, count - flight.tail()) : count], decode)
        ended = np.flatnonzero(stop | (self.count[:n] >= self.limit[:n]))
        return [(int(row), "stop" if stop[row] else "length") for row in ended]

    def draws(self) -> Draws:
        """How the ready rows draw their next token; kept until one comes or goes."""
        if self._draws is None:
            self._draws = self.draws_of(slice(0, self.ready))
        return self._draws

    def draws_of(self, part: slice | np.ndarray) -> Draws:
        hot, top_k, top_p = self.temperature[part], self.top_k[part], self.top_p[part]
        greedy = hot == 0
        return Draws(
            keys=self._tensor(self.keys[:, part]),
            temperature=None if ((hot == 1) | greedy).all() else self._tensor(np.where(greedy, 1, hot)[:, None]),
            greedy=self._tensor(greedy[:, None]) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            top_k=self._tensor(top_k[:, None]) if top_k.any() else None,
            top_p=self._tensor(top_p[:, None]) if (top_p < 1).any() else None,
        )

    def positions(self) -> torch.Tensor:
        """Index of the token each row draws next."""
        return self._tensor(self.count[: self.ready])

    def _tensor(self, column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).to(self.device)

    def _set_stops(self, row: int, ids: Sequence[int]) -> None:
        missing = len(ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(ids)] = ids
