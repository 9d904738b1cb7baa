"""A flight: one rollout in the making, from its request to its end.

While it runs, its tokens live in the columns of `whet.rollout.rows`; while it waits (not begun, preempted, or
after a weight update) the flight holds them itself. The engine makes flights and turns them into Rollouts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.types import Finish, Request, Rollout, Trace, sampling_from_json


@dataclass(slots=True, eq=False)
class Flight:
    request: Request
    index: int
    """Of the rollout in its group."""
    arrival: int
    """Counts up over the engine's life: the queue is in this order, the youngest is preempted first."""
    prompt: np.ndarray
    limit: int
    """Tokens it may write: max_tokens, cut to what the context leaves."""
    key: tuple[int, int]
    """Names its noise."""
    trace: Trace
    """What it has written; stale while it runs."""
    drafted: int = 0
    accepted: int = 0
    """Of its tokens, as of its last place in a row; a resumed engine counts from 0."""
    ticket: int | None = None
    """The `generate` call that waits for it."""

    @property
    def known(self) -> int:
        """Tokens a prefill has to feed."""
        return self.prompt.size + self.trace.ids.size

    @property
    def fresh(self) -> bool:
        return self.trace.ids.size == 0

    def rollout(self, finish: Finish, version: int) -> Rollout:
        """`version` stands for the tokens of a rollout that was cut before its first."""
        versions = self.trace.versions
        return Rollout(
            prompt_id=self.request.prompt_id,
            group_id=self.request.group_id,
            index=self.index,
            phase=self.request.phase,
            sampling=self.request.sampling,
            length=versions.size,
            finish=finish,
            first_version=int(versions[0]) if versions.size else version,
            last_version=int(versions[-1]) if versions.size else version,
            drafted=self.drafted,
            accepted=self.accepted,
            trace=self.trace,
        )

    def tail(self) -> int:
        """Tokens that surely hold a stop string that has just been completed.

        A token gives at least one byte, and a few more tokens keep a broken first character out of it.
        """
        return max(len(s.encode()) for s in self.request.sampling.stop_strings) + 4

    def stops_in(self, tail: np.ndarray, decode: Callable[[Sequence[int]], str]) -> bool:
        text = decode(tail.tolist())
        return any(s in text for s in self.request.sampling.stop_strings)

    def to_json(self) -> dict[str, Any]:
        """All but the trace, the prompt and what follows from the engine's settings."""
        return {**dataclasses.asdict(self.request), "index": self.index, "arrival": self.arrival}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens `start` .. `stop` of a flight, which one step feeds; those before them are cached."""

    flight: Flight
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """After it the flight draws a token."""
        return self.stop == self.flight.known

    def ids(self) -> np.ndarray:
        return np.concatenate((self.flight.prompt, self.flight.trace.ids))[self.start : self.stop]


def request_from_json(data: Mapping[str, Any]) -> Request:
    fields = {f.name: data[f.name] for f in dataclasses.fields(Request)}
    return Request(**{**fields, "sampling": sampling_from_json(data["sampling"])})


@functools.cache
def empty_trace(dtype: np.dtype[Any]) -> Trace:
    """One for all: nothing can be written to it."""
    return Trace(ids=np.zeros(0, np.int32), log_probs=np.zeros(0, dtype), versions=np.zeros(0, np.int32))
