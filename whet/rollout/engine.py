"""The local rollout engine: continuous batching over a second view of the model that shares its weights
(`model/twin.py`). The same key always gives the same tokens.

It implements `whet.rollout.base.Engine` for the loop and the evaluation. `submit` queues requests; `step` schedules
(`scheduler.py`), runs (`runner.py`), records (`rows.py`) and retires; `collect` and `generate` step until the rollouts
that they return are finished. The engine sees prompts as token ids, text only for stop strings, and training only as a
version number: the weights change in place under it.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from whet.draft.base import OFF, DraftArm, StepReport
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead
from whet.draft.speculation import Speculation
from whet.errors import WhetError
from whet.model.twin import kv_shapes, rollout_twin
from whet.rollout.flights import FlightEngine
from whet.rollout.guesser import Guesser, extra_shapes
from whet.rollout.pages import make_cache
from whet.rollout.rows import Flight, Rows
from whet.rollout.runner import Drawn, EagerRunner, Runner
from whet.rollout.scheduler import CacheRoom, Scheduler, Wave
from whet.types import Finish


class LocalEngine(FlightEngine):
    """Decodes rollouts of one model on one device.

    A flight is a rollout under way; while it decodes it has one of `slots` rows. A wave is what is prefilled in one
    step: chunks of prompts, and forks, which share the prompt of another flight. An arm is one way to speculate: a
    drafter and a depth. Rows 0..ready-1 draw a token at each step; the last row may hold a prompt of which only
    `rows.fed` tokens are fed. The tokens of a rollout depend on the weights, the prompt and its key (seed, train or
    eval, group, index) alone, not on the batch: exactly in float64 on a CPU, up to rounding elsewhere.
    """

    can = frozenset(
        {"keyed_noise", "token_versions", "stream", "cut", "recompute", "keep", "draft"}
    )

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        page: int = 0,
        pages: int = 0,
        runners: Any = None,
        releasable: bool = False,
        speculation: Speculation | None = None,
        eagle: EagleHead | None = None,
        buffer: DataBuffer | None = None,
        **common: Any,
    ) -> None:
        """runners: a faster form of a step, `whet.fast.graphs.GraphRunners`, used if it supports the model. releasable:
        on a GPU, the memory of keys and values is lent to the learner, see `release`. eagle: a drafter that reads
        hidden states joins `speculation`; those of finished rollouts go to `buffer`. common: as for `FlightEngine`."""
        dtype = np.dtype(np.float64 if model.dtype == torch.float64 else np.float32)
        super().__init__(model, slots=slots, context=context, dtype=dtype, **common)
        self.twin = rollout_twin(model)
        self.device = model.device
        shapes = kv_shapes(self.twin)
        # Why the runners that were handed in are not used; None where they are, or where there are none.
        self.lack = runners.lack(shapes, self.device) if runners is not None else None
        runners = runners if self.lack is None else None
        extra = extra_shapes(eagle) if eagle is not None else []
        page = page or (runners.page if runners is not None else 0)
        self.cache = make_cache(
            [*shapes, *extra], slots, context, page, pages, self.device, releasable
        )
        self.rows = Rows(slots, context, self.dtype, self.device)
        self.guesser = Guesser(eagle, self.cache, self.rows) if eagle is not None else None
        self.buffer = buffer
        parts = (self.twin, self.cache, self.rows, self.guesser)
        self.runner: Runner = (
            EagerRunner(*parts) if runners is None else runners.make(*parts, speculation)
        )
        self.scheduler: Scheduler = Scheduler(packed=self.runner.packed, batch=self.runner.wave)
        self.speculation = speculation
        if speculation is not None:
            if self.guesser is not None:
                speculation.join(self.guesser)
            speculation.elsewhere = self.runner.own
            speculation.token_bytes = sum(
                s.heads * (s.key_dim + s.value_dim) * s.dtype.itemsize for s in shapes
            )

    # ---- what callers use

    def begin(self) -> None:
        """On a GPU, compile and capture what every run needs before the first request has to wait for it."""
        self.runner.begin(self.speculation.served if self.speculation is not None else ())

    @property
    def load(self) -> int:
        return self.rows.size + len(self.scheduler.waiting)

    @property
    def written(self) -> int:
        return int(self.rows.count[: self.rows.size].sum())

    def update(self, version: int) -> None:
        if self.on_update != "keep":
            self._evict_all()
        if self.on_update == "cut":
            for flight in self._cut(self.scheduler.cut(), self.version):
                self._tell_drafters(flight)
        self.scheduler.updated()
        self.runner.forget()
        if self.speculation is not None:
            self.speculation.updated(version)
        self.version = version

    def release(self) -> None:
        """Lend the cache's memory to the learner's step, unless running rollouts still need what is in it."""
        if self.cache.arena is None:
            return
        if self.on_update != "keep":
            self._evict_all()  # `update` would do it after the step, with the same outcome
        if not self.rows.size:
            self.cache.arena.release()

    def take_back(self) -> None:
        if self.cache.arena is not None:
            self.cache.arena.take_back()

    def notes(self) -> list[str]:
        slow = "Rollouts are decoded by plain calls of the model's own layers, more slowly than by graphs, since"
        return [*self.cache.notes, *([f"{slow} {self.lack}."] if self.lack else [])]

    def stats(self) -> dict[str, float]:
        """Return the counters since the last call and reset them; rollout/oom counts from the start."""
        out = self._counted("tokens", "steps", "prefill_tokens", "preempted", "finished", "cut")
        out["rollout/oom"] = float(self.scheduler.ooms)
        return (
            out
            | self.runner.stats()
            | (self.speculation.metrics() if self.speculation is not None else {})
        )

    def pictures(self) -> dict[str, Any]:
        return super().pictures() | (
            self.speculation.chooser.pictures() if self.speculation is not None else {}
        )

    def state_dict(self) -> dict[str, Any]:
        draft = self.speculation.chooser.state_dict() if self.speculation is not None else None
        return self._state(
            ((flight, self.rows.trace(row)) for row, flight in enumerate(self.rows.flights)), draft
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.speculation is not None and state["draft"] is not None:
            self.speculation.chooser.load_state_dict(state["draft"])

    def drop(self) -> None:
        self._evict_all()
        for flight in self.scheduler.waiting:
            self._tell_drafters(flight)
        super().drop()

    def close(self) -> None:
        """Nothing was started that would have to end."""

    # ---- one step

    @torch.inference_mode()
    def step(self) -> None:
        """Schedule, run, record, retire: draw tokens for every row that is fed, the running ones and the new ones."""
        begin = time.perf_counter()
        rows = self.rows
        wave = self._schedule()
        running = rows.ready
        if wave.chunks:
            if (drawn := self._feed(running, wave)) is not None:
                self._record(drawn, running)
                self._stats["prefill_tokens"] += wave.tokens
        elif running:
            arm = self._choose(running)
            # what is done once is not part of the step's time
            begin += self.runner.prepare(running, arm)
            drawn = self._decode(running, arm)
            accepted, most, had = self._record(drawn, running)
            if self.speculation is not None:
                steps = len(drawn.counted)
                seconds = time.perf_counter() - begin
                # A step before a burst was waited for in full: its time is not typical.
                typical = steps > 1 or not self.runner.ahead
                kv_bytes = self.speculation.kv_bytes(rows, running)
                report = StepReport(
                    drawn.arm, running, seconds, steps, accepted, most, kv_bytes, typical, had
                )
                self.speculation.chooser.record(report)
        rows_run = rows.size
        self._retire(rows.finished(self.decode))
        if wave.chunks and (rows.size == self.slots or not self.scheduler.waiting):
            begin += self._go_ahead()
        self._took(time.perf_counter() - begin, running, fed=bool(wave.chunks))
        self.trail.add(rows_run)

    def _schedule(self) -> Wave:
        """Preempt the youngest rows until every row has a page for its next token, then choose what to admit."""
        rows = self.rows
        # one row alone always fits
        while self.cache.lacking(rows.length[: rows.ready]) > self.cache.free:
            youngest = max(range(rows.size), key=lambda row: rows.flights[row].arrival)
            self.scheduler.give_back(self._evict([youngest]))
            self.scheduler.full = True
            self._stats["preempted"] += 1
        self.cache.grow(rows.length[: rows.ready])
        half = (rows.flights[-1], rows.fed) if rows.fed else None
        room = CacheRoom(self.cache, rows, self.lengths)
        return self.scheduler.next_wave(self.slots - rows.size, room, half, rows.ready > 0)

    def _decode(self, running: int, arm: DraftArm) -> Drawn:
        """Draw with drafts that the host or the runner makes, or plainly where the host's drafts cannot be fed."""
        runner = self.runner
        rows = self.rows
        if arm != OFF and arm.drafter not in runner.own and not runner.ahead:
            assert self.speculation is not None
            most = self._wanted(arm, running)
            reach = rows.length[:running] + most
            if self.cache.lacking(reach) <= self.cache.free:
                self.cache.grow(reach)
                return dataclasses.replace(
                    runner.verify(self.speculation.draft(arm, rows, most)), arm=arm
                )
        own = arm if arm.drafter in runner.own else OFF
        return runner.advance(running, (), (), own, ahead=own == arm)

    def _choose(self, running: int) -> DraftArm:
        """How to speculate next."""
        if self.speculation is None or self.rows.picky[:running].any():
            return OFF
        return self.speculation.choose(self.rows, running)

    def _wanted(self, arm: DraftArm, running: int, ahead: np.ndarray | int = 0) -> np.ndarray:
        """Drafts for each row at most, `ahead` tokens after its newest. The last token of a rollout is never guessed,
        since the target's own draw brings it."""
        rows = self.rows
        left = np.maximum(rows.limit[:running] - rows.count[:running] - ahead - 1, 0)
        return np.minimum(left, arm.depth)

    def _record(
        self, drawn: Drawn, running: int
    ) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Write down what was drawn. With drafts, returns for each step of each row how many came true, of how many
        wanted, and how many it had."""
        rows = self.rows
        steps = len(drawn.counted)
        self._stats["steps"] += steps
        if steps == 1 and drawn.arm == OFF:
            rows.length[:running] += 1
            rows.record(drawn.token[:, 0], drawn.log_prob[:, 0], self.version)
            self._stats["tokens"] += rows.ready
            return None, None, None
        counted = drawn.counted[:, :running]
        proposed = drawn.proposed[:, :running]
        before = counted.cumsum(0) - counted  # tokens of the steps before each
        wanted = self._wanted(drawn.arm, running, before) if drawn.arm != OFF else None
        kept = rows.record_runs(drawn, running, self.version, self.decode)
        self._stats["tokens"] += int(kept.sum())
        if wanted is None:
            return None, None, None
        real = np.minimum(kept[:running] - before, counted)  # 0 or less after the row's end
        lived = real > 0
        rows.drafted[:running] += (lived * proposed).sum(0)
        rows.accepted[:running] += kept[:running] - lived.sum(0)
        return real[lived] - 1, wanted[lived], proposed[lived]

    def _retire(self, ended: Sequence[tuple[int, Finish]]) -> None:
        if not ended:
            return
        self._stats["finished"] += len(ended)
        self.scheduler.full = False
        rows, ways = zip(*ended, strict=True)
        if self.buffer is not None and self.guesser is not None:
            self.guesser.remember(rows, self.buffer, self.version)
        for flight, finish in sorted(
            zip(self._evict(rows), ways, strict=True), key=lambda pair: pair[0].arrival
        ):
            self._land(flight, finish)
            self._tell_drafters(flight)

    def _tell_drafters(self, flight: Flight) -> None:
        """The flight ended, was cut or is dropped."""
        if self.speculation is not None:
            self.speculation.ended(flight)

    def _go_ahead(self) -> float:
        """Give the device something to do while the caller judges rollouts and chooses prompts: after a wave nothing is
        under way. Returns the seconds of one-time preparation."""
        running = self.rows.ready
        drafters = self.speculation.drafters if self.speculation is not None else {}
        # drafts on the host wait for tokens
        if not running or self.rows.fed or drafters.keys() - self.runner.own:
            return 0.0
        once = self.runner.prepare(running, arm := self._choose(running))
        self.runner.go_ahead(running, arm)
        return once

    # ---- new flights, and rows that leave

    def _feed(self, running: int, wave: Wave) -> Drawn | None:
        """Draw for the running rows and the wave. None where that did not fit in memory and no row drew a token.

        A forward over thousands of prompt tokens is the largest that an engine runs. When the GPU is full the wave's
        flights wait again, later waves are smaller, and the next step goes on: tokens depend on a flight's key alone,
        so they are the same.
        """
        rows = self.rows
        scheduler = self.scheduler
        source = [running + leader for _, leader in wave.forks]  # the row that each fork copies
        first = rows.size
        fed = rows.fed
        leaders = [chunk.flight for chunk in wave.chunks if chunk.start == 0]
        rows.add([*leaders, *(flight for flight, _ in wave.forks)])
        for row, flight in enumerate(leaders, first):
            self.cache.open(row, flight.known)
        forked = slice(first + len(leaders), rows.size)
        rows.shared[source] = rows.shared[forked] = rows.length[forked]
        try:
            self.runner.enter(first)
            rows.feed(0 if wave.chunks[-1].last else wave.chunks[-1].stop)
            return self.runner.advance(running, wave.chunks, source)
        except torch.OutOfMemoryError:
            pass
        # Here, after the handler, the traceback no longer keeps the failed forward alive.
        self._evict(range(first, rows.size))
        rows.feed(fed)
        rows.shared[running:first] = 0  # no row forks from a half-fed row yet
        scheduler.put_back(wave)
        # The running rows may be a step further on the device, and a drafter may have read that: they repeat it.
        self.runner.forget()
        rows.paired[:running] = np.minimum(rows.paired[:running], rows.length[:running])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if not scheduler.shrink(wave):  # a wave that cannot be smaller waits for a row to end
            if not running:
                raise WhetError(
                    f"Not even a prompt of {wave.tokens} tokens can be fed in the memory that is left beside the model "
                    "and its KV cache; lower rollout.pages or rollout.slots, or free memory that others hold."
                )
            if rows.fed:  # else it would be fed again at once, and no row would get any further
                scheduler.give_back(self._evict([rows.size - 1]))
            scheduler.full = True
        if scheduler.ooms == 1:
            warnings.warn(
                f"There was no memory to feed prompts of {wave.tokens} tokens at once: fewer are fed from now on, "
                "fewer still each time rollout/oom goes up. Rollouts are the same, but begin later.",
                stacklevel=2,
            )
        return None

    def _evict(self, gone: Sequence[int]) -> list[Flight]:
        """Take flights out of their rows, given in rising order, with their tokens."""
        rows = self.rows
        out = []
        for row in gone:
            out.append(flight := rows.flights[row])
            flight.trace = rows.trace(row)
            flight.drafted, flight.accepted = int(rows.drafted[row]), int(rows.accepted[row])
            self.runner.leave(flight)
        self.cache.close(list(gone[::-1]))  # the pages of the first rows are the next to be taken
        source, target = rows.remove(gone)
        self.cache.move(source, target, rows.length[target])
        return out

    def _evict_all(self) -> None:
        self.scheduler.give_back(self._evict(range(self.rows.size)))
        self.scheduler.full = False
