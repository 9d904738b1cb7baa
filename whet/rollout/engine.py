"""The local rollout engine: continuous batching over the rollout twin, exact for a given key.

`submit` queues, `step` admits what fits, prefills it, and decodes a token for every running row, or several where they
were drafted; `collect` and `generate` step until they have what they promise. It implements `whet.rollout.base.Engine`.
It knows nothing of prompts but their token ids, of text but stop strings, and of training but a version number: weights
change in place under it.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from whet.draft.base import OFF, Arm
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead
from whet.draft.speculation import Speculation
from whet.errors import WhetError
from whet.model.noise import row_key
from whet.model.twin import kv_shapes, rollout_twin
from whet.rollout.guesser import Guesser, extra_shapes
from whet.rollout.pages import make_cache, pool_lines
from whet.rollout.rows import Flight, Rows, empty_trace, request_from_json
from whet.rollout.runner import Drawn, EagerRunner, Runner, RunnerFactory
from whet.rollout.scheduler import CacheRoom, Lengths, Scheduler, Wave
from whet.types import Finish, Request, Rollout, Trace, rollout_from_json, rollout_to_json

# ---- snapshot
#
# An engine's state in a checkpoint: what it was asked for and has not handed out, as JSON and a few flat arrays.
#
# Called by `LocalEngine.state_dict` and `load_state_dict`. Running flights are saved as waiting ones: a resumed engine
# prefills them again and goes on.


def snapshot(engine: LocalEngine) -> dict[str, Any]:
    rows = engine.rows
    running = sorted(range(rows.size), key=lambda row: rows.flights[row].arrival)
    flights = [(rows.flights[row], rows.trace(row)) for row in running]
    flights += [(f, f.trace) for f in engine.scheduler.waiting]
    assert all(f.ticket is None for f, _ in flights), "generate() leaves nothing behind"
    traces = [trace for _, trace in flights] + [r.trace for r in engine.done if r.trace is not None]
    return {
        "version": engine.version,
        "arrivals": engine.arrivals,
        "begun": np.array(sorted(engine.scheduler.begun), np.int64),
        "flights": [{**f.to_json(), "tokens": trace.ids.size} for f, trace in flights],
        "done": [{**rollout_to_json(r), "tokens": r.length} for r in engine.done],
        "ids": np.concatenate([np.zeros(0, np.int32), *(t.ids for t in traces)]),
        "log_probs": np.concatenate([np.zeros(0, engine.dtype), *(t.log_probs for t in traces)]),
        "versions": np.concatenate([np.zeros(0, np.int32), *(t.versions for t in traces)]),
        **engine.lengths.state_dict(),
        "draft": engine.speculation.state_dict() if engine.speculation is not None else None,
    }


def restore(engine: LocalEngine, state: Mapping[str, Any]) -> None:
    assert engine.idle, "state is loaded into an engine that has not begun"
    engine.version, engine.arrivals = int(state["version"]), int(state["arrivals"])
    engine.scheduler.begun = set(state["begun"].tolist())
    engine.lengths.load_state_dict(state)
    if engine.speculation is not None and state["draft"] is not None:
        engine.speculation.load_state_dict(state["draft"])
    at = 0

    def trace(n: int) -> Trace:
        nonlocal at
        part, at = slice(at, at + n), at + n
        return Trace(ids=state["ids"][part], log_probs=state["log_probs"][part], versions=state["versions"][part])

    for data in state["flights"]:
        flight = engine.flight(request_from_json(data), data["index"], data["arrival"])
        flight.trace = trace(data["tokens"])
        engine.scheduler.waiting.append(flight)
    for data in state["done"]:
        fields = {k: v for k, v in data.items() if k != "tokens"}
        engine.done.append(rollout_from_json({**fields, "trace": trace(data["tokens"])}))


# ---- waves
#
# A step with new flights: a wave gets its rows and is fed, or is as if it had never been where memory is short.
#
# Called by `LocalEngine.step`; the scheduler says who is in a wave, a runner computes it. A forward over thousands of
# prompt tokens is the most that an engine asks of a card at once. When the card is full the wave's flights wait again,
# waves are smaller from then on, and the next step goes on: tokens depend on a flight's key alone, so they are the
# same. Where a wave is as small as can be, it waits for a row to end; only where none runs there is no way on.


def feed(engine: LocalEngine, running: int, wave: Wave) -> Drawn | None:
    """What the rows that run and those of the wave draw. None where that did not fit in memory: nobody drew a token."""
    first, fed = engine.rows.size, engine.rows.fed
    try:
        return engine.runner.advance(running, wave.chunks, admit(engine, running, wave))
    except torch.OutOfMemoryError:
        pass
    # Here, after the handler, the traceback no longer keeps the failed forward alive.
    take_out(engine, running, wave, first, fed)
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    _shrink(engine, running, wave)
    return None


def admit(engine: LocalEngine, running: int, wave: Wave) -> list[int]:
    """Rows for a wave: first those to feed, then their forks; and for each fork the row it copies."""
    rows = engine.rows
    first = rows.size
    for chunk in wave.chunks:
        if chunk.start == 0:
            engine.cache.open(rows.add(chunk.flight), chunk.flight.known)
    source = [running + leader for _, leader in wave.forks]
    for leader, (flight, _) in zip(source, wave.forks, strict=True):
        rows.shared[[leader, rows.add(flight)]] = flight.known
    engine.runner.enter(first)
    rows.feed(0 if wave.chunks[-1].last else wave.chunks[-1].stop)
    return source


def take_out(engine: LocalEngine, running: int, wave: Wave, first: int, fed: int) -> None:
    """Undoes `admit`, where rows from `first` on were new and the one before them had `fed` tokens."""
    rows = engine.rows
    for row in reversed(range(first, rows.size)):
        engine.evict(row)
    rows.feed(fed)
    rows.shared[running:first] = 0  # of a row that is half fed: nobody forks from it yet
    engine.scheduler.put_back(wave)
    # The rows that run may have been a step further on the device, and a drafter have read that: they take it again.
    engine.runner.forget()
    rows.paired[:running] = np.minimum(rows.paired[:running], rows.length[:running])


def _shrink(engine: LocalEngine, running: int, wave: Wave) -> None:
    scheduler, rows = engine.scheduler, engine.rows
    if not scheduler.shrink(wave):
        if not running:
            raise WhetError(
                f"Not even a prompt of {wave.tokens} tokens can be fed in the memory that is left beside the model and "
                "its KV cache; lower rollout.pages or rollout.slots, or free memory that others hold."
            )
        if rows.fed:  # it would be fed again at once, and nobody get any further
            scheduler.give_back([engine.evict(rows.size - 1)])
        scheduler.full = True
    if scheduler.ooms == 1:
        warnings.warn(
            f"There was no memory to feed prompts of {wave.tokens} tokens at once: fewer are fed from now on, fewer "
            "still each time rollout/oom goes up. Rollouts are the same, but begin later.",
            stacklevel=2,
        )


EARLY = 8
"""Turns after which judges are looked after though nothing has finished: that takes the host some time."""


class LocalEngine:
    can = frozenset({"keyed_noise", "token_versions", "stream", "cut", "recompute", "keep", "draft"})

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        seed: int,
        slots: int,
        context: int,
        page: int = 0,
        pages: int = 0,
        mode: Literal["barrier", "stream"] = "barrier",
        on_update: Literal["cut", "recompute", "keep"] = "cut",
        version: int = 0,
        runners: RunnerFactory | None = None,
        releasable: bool = False,
        speculation: Speculation | None = None,
        eagle: EagleHead | None = None,
        buffer: DataBuffer | None = None,
    ) -> None:
        """runners: a faster form of a step than calls of the twin's modules, used where it can serve the model.
        releasable: on a GPU, the memory of keys and values is lent to the learner, see `release`. eagle: a drafter that
        reads hidden states joins `speculation`; those of finished rollouts go to `buffer`."""
        known = getattr(model.config, "max_position_embeddings", None) or context
        if context > known:
            raise WhetError(
                f"rollout.context = {context} is more than the {known} positions {type(model).__name__} knows."
            )
        self.encode, self.decode = encode, decode
        self.seed, self.slots, self.context = seed, slots, context
        self.mode, self.on_update, self.version = mode, on_update, version
        self.twin = rollout_twin(model)
        self.device = model.device
        shapes = kv_shapes(self.twin)
        self.lack = runners.lack(shapes, self.device) if runners is not None else None
        """Why the runners that were handed in are not used."""
        runners = runners if self.lack is None else None
        extra = extra_shapes(eagle) if eagle is not None else []
        page = page or (runners.page if runners is not None else 0)
        self.cache = make_cache([*shapes, *extra], slots, context, page, pages, self.device, releasable)
        self.dtype = np.dtype(np.float64 if model.dtype == torch.float64 else np.float32)
        """Of recorded log-probs."""
        self.rows = Rows(slots, context, self.dtype, self.device)
        self.guesser = Guesser(eagle, self.cache, self.rows) if eagle is not None else None
        self.buffer = buffer
        given = (self.twin, self.cache, self.rows, self.guesser)
        self.runner: Runner = EagerRunner(*given) if runners is None else runners.make(*given, speculation)
        self.scheduler = Scheduler(packed=self.runner.packed, batch=self.runner.wave)
        self.lengths = Lengths()
        self.speculation = speculation
        if speculation is not None:
            if self.guesser is not None:
                speculation.join(self.guesser)
            speculation.elsewhere = self.runner.own
            speculation.token_bytes = sum(s.heads * (s.key_dim + s.value_dim) * s.dtype.itemsize for s in shapes)
        self.done: list[Rollout] = []
        """Finished, waiting to be collected."""
        self._tickets: dict[int, dict[int, Rollout]] = {}
        """Per `generate` call under way, what has finished of it, by arrival."""
        self.arrivals = 0
        self._stats: Counter[str] = Counter()
        self._seconds = self._tail = 0.0

    # ---- what callers use

    def begin(self) -> None:
        """On a GPU: compiles and captures what every run wants, before the first request has to wait for it."""
        self.runner.begin(self.speculation.served if self.speculation is not None else ())

    def submit(self, requests: Sequence[Request]) -> None:
        """Those that are expected to be long go first, so that none is left over at the end; equal ones keep order."""
        running = int(self.rows.count[: self.rows.size].sum())
        self.scheduler.add(self._flights(sorted(requests, key=lambda r: -self.lengths.expect(r.prompt_id, running))))

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        shown = steps = 0
        while True:
            over = not self._busy or (self.mode == "stream" and bool(self.done))
            if early is not None and (over or len(self.done) > shown or steps % EARLY == 0):
                early(self.done[shown:])
                shown = len(self.done)
            if over:
                done, self.done = self.done, []
                return done
            self.step()
            steps += 1

    def generate(self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None) -> list[Rollout]:
        ticket = self.arrivals
        flights = self._flights(requests, ticket)
        found = self._tickets[ticket] = {}
        self.scheduler.add(flights)
        while (before := len(found)) < len(flights):
            self.step()
            if on_progress is not None and len(found) > before:
                on_progress(len(found))
        del self._tickets[ticket]
        return [found[f.arrival] for f in flights]

    @property
    def idle(self) -> bool:
        return not self._busy and not self.done

    @property
    def free(self) -> int | None:
        if self.mode == "barrier":
            return None
        return max(0, self.slots - self.rows.size - len(self.scheduler.waiting))

    def update(self, version: int) -> None:
        if self.on_update == "recompute":
            self._evict_all()
        elif self.on_update == "cut":
            self._evict_all()
            cut = self.scheduler.cut()
            for flight in cut:
                self.lengths.cut(flight.trace.ids.size)
                if self.speculation is not None:
                    self.speculation.ended(flight, flight.trace.ids)
            self.done += [f.rollout("cut", self.version) for f in cut]
            self._stats["cut"] += len(cut)
        self.scheduler.forget()
        self.runner.forget()
        if self.speculation is not None:
            self.speculation.updated(version)
        self.version = version

    def release(self) -> None:
        """Before the learner's step: lends it the cache's memory, unless rollouts run on that need what is in it."""
        if not self.cache.arena.releasable:
            return
        if self.on_update != "keep":
            self._evict_all()  # `update` would do it after the step, with the same outcome
        if not self.rows.size:
            self.cache.arena.release()

    def take_back(self) -> None:
        self.cache.arena.take_back()

    def notes(self) -> list[str]:
        """What the user should hear of it before it starts."""
        slow = "Rollouts are decoded by plain calls of the model's own layers, more slowly than by graphs, since"
        return [*pool_lines(self.cache), *([f"{slow} {self.lack}."] if self.lack else [])]

    def stats(self) -> dict[str, float]:
        names = ("tokens", "steps", "prefill_tokens", "preempted", "finished", "cut")
        out = {f"rollout/{name}": float(self._stats[name]) for name in names}
        rows = out["rollout/batch_mean"] = self._stats["tokens"] / max(1, self._stats["steps"])
        out |= {"rollout/occupied": min(1.0, rows / self.slots)} if self.mode == "stream" else {}
        out["rollout/oom"] = float(self.scheduler.ooms)
        out["rollout/seconds"] = self._seconds
        # of the time, where a quarter of the slots or less were in use
        out["rollout/tail_share"] = self._tail / self._seconds if self._seconds else 0.0
        out |= self.runner.stats() | (self.speculation.metrics() if self.speculation is not None else {})
        self._stats.clear()
        self._seconds = self._tail = 0.0
        return out

    def state_dict(self) -> dict[str, Any]:
        return snapshot(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self, state)

    # ---- one step

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then one more token for every row that is fed: the running ones and the new ones."""
        begin = time.perf_counter()
        rows = self.rows
        self._make_room()
        running = rows.ready
        half = (rows.flights[-1], rows.fed) if rows.fed else None
        room = CacheRoom(self.cache, rows, self.lengths)
        wave = self.scheduler.next_wave(self.slots - rows.size, room, half, running > 0)
        if wave.chunks:
            if (first := feed(self, running, wave)) is not None:
                self._record(first, running)
                self._stats["prefill_tokens"] += wave.tokens
        elif running:
            arm = self._choose(running)
            begin += self.runner.prepare(running, arm)
            if arm == OFF or arm.drafter in self.runner.own or not self._speculate(arm, running):
                own = arm if arm.drafter in self.runner.own else OFF
                drawn = self.runner.advance(running, (), (), own, ahead=own == arm)
                drafted = self._record(drawn, running)
                if self.speculation is not None:
                    self._tell(drawn, running, time.perf_counter() - begin, *drafted)
        self._retire(rows.finished(self.decode))
        if wave.chunks and (rows.size == self.slots or not self.scheduler.waiting):
            begin += self._go_ahead()
        spent = time.perf_counter() - begin
        self._seconds += spent
        self._tail += spent if 4 * running <= self.slots and not wave.chunks else 0.0

    def _go_ahead(self) -> float:
        """After a wave nothing is under way, and the caller has rollouts to judge and prompts to choose: the device is
        given something to do meanwhile. Seconds that took once and for all."""
        running, drafters = self.rows.ready, self.speculation.drafters if self.speculation is not None else {}
        if not running or self.rows.fed or drafters.keys() - self.runner.own:  # who drafts on the host waits for tokens
            return 0.0
        once = self.runner.prepare(running, arm := self._choose(running))
        self.runner.go_ahead(running, arm)
        return once

    def _choose(self, running: int) -> Arm:
        """How to speculate next: rows' wishes are looked at on the way."""
        rows, speculation = self.rows, self.speculation
        if speculation is None or rows.picky[:running].any():
            return OFF
        if (wishes := speculation.budgets(rows, running)) is not None:
            rows.most[:running] = wishes
            self.runner.budgeted()
        return speculation.choose(rows, running)

    def _speculate(self, arm: Arm, running: int) -> bool:
        """A step with drafts that the host makes; False where it must be a plain one."""
        rows, speculation = self.rows, self.speculation
        assert speculation is not None
        if self.runner.ahead:
            return False
        begin = time.perf_counter()
        most = self._wanted(arm, running)
        if self.cache.lacking(rows.length[:running] + most) > self.cache.free:
            return False
        self.cache.grow(rows.length[:running] + most)
        drawn = replace(self.runner.verify(speculation.draft(arm, rows, most)), arm=arm)
        drafted = self._record(drawn, running)
        self._tell(drawn, running, time.perf_counter() - begin, *drafted)
        return True

    def _wanted(self, arm: Arm, running: int, ahead: np.ndarray | int = 0) -> np.ndarray:
        """Drafts of each row at most, so many tokens ahead of its newest. The last token of a rollout is never guessed:
        the target's own draw brings it."""
        rows = self.rows
        left = np.maximum(rows.limit[:running] - rows.count[:running] - ahead - 1, 0)
        return np.minimum(np.minimum(left, arm.depth), rows.most[:running])

    def _record(self, drawn: Drawn, running: int) -> list[np.ndarray]:
        """Writes down what was drawn. For each step of a row that drafts were made for: how many came true, of how many
        wanted."""
        rows, steps = self.rows, len(drawn.counted)
        self._stats["steps"] += steps
        if steps == 1 and drawn.arm == OFF:
            rows.length[:running] += 1
            rows.record(drawn.token[:, 0], drawn.log_prob[:, 0], self.version)
            self._stats["tokens"] += rows.ready
            return []
        wanted = self._wanted(drawn.arm, running, drawn.before[:, :running]) if drawn.arm != OFF else None
        kept = rows.record_runs(drawn.token, drawn.log_prob, drawn.counted.sum(0), running, self.version, self.decode)
        self._stats["tokens"] += int(kept.sum())
        if wanted is None:
            return []
        real = drawn.real(kept)[:, :running]
        lived = real > 0
        rows.drafted[:running] += np.where(lived, drawn.proposed[:, :running], 0).sum(0)
        rows.accepted[:running] += kept[:running] - lived.sum(0)
        return [real[lived] - 1, wanted[lived]]

    def _tell(self, drawn: Drawn, running: int, seconds: float, *drafted: np.ndarray) -> None:
        assert self.speculation is not None
        steps = len(drawn.counted)
        alone = steps == 1 and self.runner.ahead  # before a burst, and waited for at once
        self.speculation.on_step(drawn.arm, self.rows, running, seconds, steps, *drafted, typical=not alone)

    def _retire(self, ended: Sequence[tuple[int, Finish]]) -> None:
        if not ended:
            return
        self._stats["finished"] += len(ended)
        self.scheduler.full = False
        if self.buffer is not None and self.guesser is not None:
            self.guesser.remember([row for row, _ in ended], self.buffer, self.version)
        finishes = {id(self.rows.flights[row]): finish for row, finish in ended}
        flights = [self.evict(row) for row, _ in reversed(ended)]  # from the end, so that no ended row moves
        for flight in sorted(flights, key=lambda f: f.arrival):
            rollout = flight.rollout(finishes[id(flight)], self.version)
            self.lengths.end(rollout.prompt_id, rollout.length, remember=flight.ticket is None)
            if self.speculation is not None:
                self.speculation.ended(flight, flight.trace.ids)
            if flight.ticket is None:
                self.done.append(rollout)
            else:
                self._tickets[flight.ticket][flight.arrival] = rollout

    def _make_room(self) -> None:
        """Preempt the youngest until every row has a page for its next token. One row alone always fits."""
        rows = self.rows
        while self.cache.lacking(rows.length[: rows.ready]) > self.cache.free:
            youngest = max(range(rows.size), key=lambda row: rows.flights[row].arrival)
            self.scheduler.give_back([self.evict(youngest)])
            self.scheduler.full = True
            self._stats["preempted"] += 1
        self.cache.grow(rows.length[: rows.ready])

    def evict(self, row: int) -> Flight:
        """The flight leaves its row and takes its tokens along."""
        flight = self.rows.flights[row]
        flight.trace = self.rows.trace(row)
        flight.drafted, flight.accepted = int(self.rows.drafted[row]), int(self.rows.accepted[row])
        self.runner.leave(flight)
        self.cache.close(row)
        for source, target in self.rows.remove(row):
            self.cache.move(source, target, int(self.rows.length[target]))
        return flight

    def _evict_all(self) -> None:
        self.scheduler.give_back([self.evict(row) for row in reversed(range(self.rows.size))])
        self.scheduler.full = False

    @property
    def _busy(self) -> bool:
        return bool(self.rows.size or self.scheduler.waiting)

    def _flights(self, requests: Sequence[Request], ticket: int | None = None) -> list[Flight]:
        """All of them or, when one is refused, none."""
        flights: list[Flight] = []
        for request in requests:
            first = self.flight(request, request.first_index, 0)
            for i in range(request.n):
                arrival = self.arrivals + len(flights)
                flights.append(self.flight(request, request.first_index + i, arrival, first.prompt))
                flights[-1].ticket = ticket
        self.arrivals += len(flights)
        return flights

    def flight(self, request: Request, index: int, arrival: int, prompt: np.ndarray | None = None) -> Flight:
        if prompt is None:
            prompt = np.asarray(self.encode(request.prompt_id), np.int64)
        if not 0 < prompt.size < self.context:
            raise WhetError(
                f'Prompt "{request.prompt_id}" has {prompt.size} tokens; rollout.context = {self.context} '
                f"takes 1 to {self.context - 1}."
            )
        limit = min(request.sampling.max_tokens, self.context - prompt.size)
        if limit < 1:
            raise WhetError(f'Prompt "{request.prompt_id}" was asked with max_tokens = {limit}; it takes 1 or more.')
        key = row_key(self.seed, request.phase == "eval", request.group_id, index)
        return Flight(request, index, arrival, prompt, limit, key, empty_trace(self.dtype))
