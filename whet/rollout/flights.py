"""What engines that decode flight by flight have in common: requests become flights, flights become rollouts, and what
is under way goes into a checkpoint. `engine.py` decodes them by our own kernels, `vllm.py` by vLLM.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel

from whet.errors import WhetError
from whet.model.noise import row_key
from whet.rollout.base import empty_trace, join_traces, split_traces
from whet.rollout.rows import Flight
from whet.rollout.scheduler import Lengths, Queue
from whet.types import (
    Finish,
    Request,
    Rollout,
    Trace,
    rollout_from_json,
    rollout_to_json,
    sampling_from_json,
)

MEMORY = 0.98  # what a step leaves of those before it
TRAIL = 60  # points at which the running rows of a step are noted, at most
# steps after which `early` is called though nothing has finished, so that slow judges are noticed
EARLY = 8


class Trail:
    """How many rows ran when: at most TRAIL points since the last `clear`, every n-th where there were more."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.points: list[tuple[float, int]] = []
        self._every = 1
        self._count = 0

    def add(self, rows: int) -> None:
        self._count += 1
        if self._count % self._every == 0:
            self.points.append((time.perf_counter(), rows))
            if len(self.points) == TRAIL:
                self.points, self._every = self.points[1::2], 2 * self._every


class FlightEngine(ABC):
    """Queues and hands out; `step`, `load` and `written` are those of a kind of engine, as is what an update does."""

    scheduler: Queue

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        seed: int,
        slots: int,
        context: int,
        mode: Literal["barrier", "stream"] = "barrier",
        on_update: Literal["cut", "recompute", "keep"] = "cut",
        version: int = 0,
        dtype: np.dtype[Any],
    ) -> None:
        """encode: prompt id to token ids. dtype: that of log-probs."""
        known = getattr(model.config, "max_position_embeddings", None) or context
        if context > known:
            raise WhetError(
                f"rollout.context = {context} is more than the {known} positions that the model knows."
            )
        self.encode = encode
        self.decode = decode
        self.seed = seed
        self.slots = slots
        self.context = context
        self.mode = mode
        self.on_update = on_update
        self.version = version
        self.dtype = dtype
        self.lengths = Lengths()
        self.done: list[Rollout] = []  # finished, waiting to be collected
        # per ticket under way, finished ones by arrival
        self._tickets: dict[int, dict[int, Rollout]] = {}
        self.arrivals = 0
        self._stats: Counter[str] = Counter()
        self.trail = Trail()
        self._seconds = self._tail = 0.0
        self._paced = [0.0, 0.0, 0.0]  # steps, their seconds, and the same per row

    # ---- what a kind of engine brings

    @abstractmethod
    def step(self) -> None:
        """Draw tokens for what is under way, and retire what has ended."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Flights that run or wait."""

    @property
    @abstractmethod
    def written(self) -> int:
        """Tokens that running flights have written so far."""

    def notes(self) -> list[str]:
        """What the user should know about the engine before it starts."""
        return []

    @abstractmethod
    def _evict_all(self) -> None:
        """Put all that runs back to the head of the queue, with its tokens."""

    # ---- requests in, rollouts out

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, the ones expected to be longest first, so that no long rollout is left alone at the end."""
        running = self.written
        ordered = sorted(requests, key=lambda r: -self.lengths.expect(r.prompt_id, running))
        self.scheduler.waiting.extend(self._flights(ordered))

    def order(self, requests: Sequence[Request], ticket: int) -> list[Flight]:
        """Queue requests in their order; their rollouts are kept apart under a ticket that no other call has."""
        flights = self._flights(requests, ticket)
        self.scheduler.waiting.extend(flights)
        return flights

    def take(self) -> list[tuple[int | None, Rollout]]:
        """What has finished and was not handed out, with its ticket; for a caller that steps the engine itself."""
        found: list[tuple[int | None, Rollout]] = [(None, rollout) for rollout in self.done]
        self.done = []
        for ticket, rollouts in self._tickets.items():
            found += ((ticket, rollout) for rollout in rollouts.values())
        self._tickets = {}
        return found

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        shown = steps = 0
        while True:
            over = not self.busy or (self.mode == "stream" and bool(self.done))
            if early is not None and (over or len(self.done) > shown or steps % EARLY == 0):
                early(self.done[shown:])
                shown = len(self.done)
            if over:
                done = self.done
                self.done = []
                return done
            self.step()
            steps += 1

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        ticket = self.arrivals
        flights = self.order(requests, ticket)
        found = self._tickets[ticket] = {}
        while (before := len(found)) < len(flights):
            self.step()
            if on_progress is not None and len(found) > before:
                on_progress(len(found))
        del self._tickets[ticket]
        return [found[f.arrival] for f in flights]

    def drop(self) -> None:
        """Forget all that was asked for and not handed out."""
        self._evict_all()
        self.scheduler.clear()
        self.done = []
        self._tickets = {}
        self._paced = [0.0, 0.0, 0.0]

    @property
    def busy(self) -> bool:
        return self.load > 0

    @property
    def idle(self) -> bool:
        return not self.busy and not self.done

    @property
    def free(self) -> int | None:
        return None if self.mode == "barrier" else max(0, self.slots - self.load)

    # ---- flights

    def _flights(self, requests: Sequence[Request], ticket: int | None = None) -> list[Flight]:
        """Make all flights or, when one is refused, none."""
        flights: list[Flight] = []
        for request in requests:
            prompt = np.asarray(self.encode(request.prompt_id), np.int64)
            for index in range(request.first_index, request.first_index + request.n):
                flights.append(self.flight(request, index, self.arrivals + len(flights), prompt))
                flights[-1].ticket = ticket
        self.arrivals += len(flights)
        return flights

    def flight(self, request: Request, index: int, arrival: int, prompt: np.ndarray) -> Flight:
        if not 0 < prompt.size < self.context:
            limits = f"rollout.context = {self.context} takes 1 to {self.context - 1}"
            raise WhetError(f'Prompt "{request.prompt_id}" has {prompt.size} tokens; {limits}.')
        limit = min(request.sampling.max_tokens, self.context - prompt.size)
        if limit < 1:
            raise WhetError(
                f'Prompt "{request.prompt_id}" was asked with max_tokens = {limit}; it takes 1 or more.'
            )
        key = row_key(self.seed, request.phase == "eval", request.group_id, index)
        return Flight(request, index, arrival, prompt, limit, key, empty_trace(self.dtype))

    def _land(self, flight: Flight, finish: Finish) -> None:
        """A flight has ended, and its tokens are in it: keep its rollout until it is handed out."""
        rollout = flight.rollout(finish, self.version)
        self.lengths.end(rollout.prompt_id, rollout.length, remember=flight.ticket is None)
        if flight.ticket is None:
            self.done.append(rollout)
        else:
            self._tickets.setdefault(flight.ticket, {})[flight.arrival] = rollout

    def _cut(self, flights: list[Flight], version: int) -> list[Flight]:
        """An update ends these, of that version, as they are. Returns them."""
        self.lengths.tokens += sum(flight.trace.ids.size for flight in flights)
        self.done += [flight.rollout("cut", version) for flight in flights]
        self._stats["cut"] += len(flights)
        return flights

    # ---- counters and checkpoints

    def _took(self, seconds: float, rows: int, fed: bool) -> None:
        """Note a step, and whether it fed prompts: such a step says nothing of the pace, for which steps before the
        last one count less and less."""
        self._seconds += seconds
        self._tail += seconds if 4 * rows <= self.slots and not fed else 0.0
        if rows and not fed:
            new = (1, seconds, seconds / rows)
            self._paced = [MEMORY * old + more for old, more in zip(self._paced, new, strict=True)]

    @property
    def pace(self) -> tuple[float, float, float]:
        """How many steps it has seen, seconds of one, and of a row of it."""
        steps, seconds, shares = self._paced
        return steps, seconds / max(steps, 1), shares / max(steps, 1)

    def pictures(self) -> dict[str, Any]:
        """What `whet.pictures` shows of the time since the last `stats`: (time, running rows), and of speculation."""
        return {"running": self.trail.points} if self.trail.points else {}

    def _counted(self, *names: str) -> dict[str, float]:
        """The counters of these names since the last call, which are reset, and what every engine can say."""
        out = {f"rollout/{name}": float(self._stats[name]) for name in names}
        rows = out["rollout/batch_mean"] = self._stats["tokens"] / max(1, self._stats["steps"])
        out |= {"rollout/occupied": min(1.0, rows / self.slots)} if self.mode == "stream" else {}
        out["rollout/seconds"] = self._seconds
        # Share of the time in which a quarter of the slots or less was in use.
        out["rollout/tail_share"] = self._tail / self._seconds if self._seconds else 0.0
        self._stats.clear()
        self.trail.clear()
        self._seconds = self._tail = 0.0
        return out

    def _state(self, running: Iterable[tuple[Flight, Trace]], draft: Any) -> dict[str, Any]:
        """What was asked for and not handed out, in one form for all engines, so that each can go on from another's.

        running: running flights with their tokens. They are saved as waiting ones, before those that wait: a resumed
        engine prefills them again and goes on. draft: what the choice of drafts has learnt.
        """
        flights = sorted(running, key=lambda pair: pair[0].arrival) + [
            (f, f.trace) for f in self.scheduler.waiting
        ]
        # `generate` asks again
        flights = [(flight, trace) for flight, trace in flights if flight.ticket is None]
        traces = [trace for _, trace in flights] + [
            r.trace for r in self.done if r.trace is not None
        ]
        return {
            "version": self.version,
            "arrivals": self.arrivals,
            "begun": np.array(sorted(self.scheduler.begun), np.int64),
            "flights": [
                {
                    **dataclasses.asdict(f.request),
                    "index": f.index,
                    "arrival": f.arrival,
                    "tokens": trace.ids.size,
                }
                for f, trace in flights
            ],
            "done": [{**rollout_to_json(r), "tokens": r.length} for r in self.done],
            **join_traces(traces, self.dtype),
            **self.lengths.state_dict(),
            "draft": draft,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `_state` returned, except for drafts."""
        assert self.idle, "state is loaded into an engine that has not begun"
        self.version = int(state["version"])
        self.arrivals = 0
        self.lengths.load_state_dict(state)
        self.scheduler.clear()
        self.take_on(state)

    def take_on(self, state: Mapping[str, Any]) -> None:
        """Go on with what is under way in another engine, behind what is under way here."""
        traces = iter(
            split_traces(state, [data["tokens"] for data in (*state["flights"], *state["done"])])
        )
        flights = []
        for data in state["flights"]:
            fields = {field.name: data[field.name] for field in dataclasses.fields(Request)}
            request = Request(**{**fields, "sampling": sampling_from_json(data["sampling"])})
            prompt = np.asarray(self.encode(request.prompt_id), np.int64)
            flights.append(
                self.flight(request, data["index"], self.arrivals + data["arrival"], prompt)
            )
            flights[-1].trace = next(traces)
        begun = set(state["begun"].tolist())
        # as the update would have
        if self.on_update == "cut" and (old := int(state["version"])) != self.version:
            over = self._cut(
                [f for f in flights if f.request.group_id in begun and f.request.phase != "eval"],
                old,
            )
            flights = [f for f in flights if f not in over]
            begun = set()
        self.scheduler.waiting.extend(flights)
        self.scheduler.begun |= begun
        self.arrivals += int(state["arrivals"])
        for data in state["done"]:
            fields = {k: v for k, v in data.items() if k != "tokens"}
            self.done.append(rollout_from_json({**fields, "trace": next(traces)}))
