"""The judges: rollouts in, judged rollouts out, from a pool of worker processes that may be killed at any time.

A judge that hangs, crashes, exhausts memory, raises or returns nonsense costs the one rollout it was given: that
stays unjudged and is counted. The loop calls `send` and `receive`, evaluation `judge`. There are no threads: work
moves on whenever one of these is called. Nothing here knows what a right answer looks like, or what it is worth:
`total` makes the reward of what the judge said.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any, Literal

from whet.errors import WhetError
from whet.tasks.base import Judgement
from whet.tasks.worker import Item, Kind, Reply, Worker
from whet.types import Prompt, Rollout, Verdict

CHUNK = 64
"""Items at most that a worker is given at once."""
LUMP_S = 0.005
"""Work that is not divided among workers: to hand out and to collect takes the time of whoever calls."""

Total = Callable[[Rollout, Judgement], tuple[float, dict[str, float]]]
"""The reward of a rollout that has its verdict, and each term of it; raises WhetError where it cannot be said."""

COUNTS = ("seconds", "right", "wrong", "unjudged", "timeouts", "crashes", "errors")


Truncated = Literal["judge", "wrong", "mask"]
"""What becomes of a training response cut at the limit, as in `config.Judge`."""


def _cut_short(rollout: Rollout) -> bool:
    """Evaluation judges every response: its limits are its own."""
    return rollout.finish == "length" and rollout.phase != "eval"


def score_alone(rollout: Rollout, judgement: Judgement) -> tuple[float, dict[str, float]]:
    return judgement.score, dict(judgement.terms)


class Judge:
    """
    `judges` by `Prompt.task`; `decode` makes text of `trace.ids`. With `ordered`, `receive` waits for all that was
    sent and keeps its order, so that a run repeats exactly; without, it hands out what is ready.
    """

    def __init__(
        self,
        lookup: Callable[[str], Prompt],
        judges: Mapping[str, Callable[[Prompt, str], Any]],
        *,
        decode: Callable[[Sequence[int]], str],
        workers: int = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 2048,
        pass_at: float = 0.99,
        ordered: bool = True,
        total: Total = score_alone,
        truncated: Truncated = "judge",
    ) -> None:
        self._lookup, self._judges, self._decode = lookup, judges, decode
        self._wanted, self._timeout_s, self._memory_mb = workers, timeout_s, memory_mb
        self._pass_at, self._ordered, self._total = pass_at, ordered, total
        self._truncated = truncated
        self._numbers = 0
        self._todo: deque[Item] = deque()
        self._open: dict[int, Rollout] = {}
        """Sent and not delivered yet, in the order sent."""
        self._awaited: set[int] = set()
        """Numbers without a result yet; a result that nobody awaits is dropped."""
        self._judged: dict[int, Rollout] = {}
        """Results not delivered yet, in the order they came."""
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._pace = LUMP_S
        """Seconds an item takes, lately."""
        self.complaint = ""
        """What the last failure said, for the user to see."""
        self.on_message: Callable[[str], None] = lambda sentence: None
        """Called when the judge of a task raises, or ends its process, for the first time."""
        self._blamed: set[str] = set()
        self._workers: list[Worker] = []
        self._closing = weakref.finalize(self, _close_all, self._workers, os.getpid())
        self._fill()  # now, while the process is small and has few threads

    def send(self, rollouts: Iterable[Rollout]) -> None:
        """Takes finished rollouts with their traces; what a weight update cut passes through unjudged."""
        for rollout in rollouts:
            self._open[self._number(rollout, self._todo.append)] = rollout
        if self._todo:
            self._move(0.0)

    def receive(self, wait: bool) -> list[Rollout]:
        """Judged copies. `wait` matters without `ordered` only: then for at least one, if any is to come."""
        self._move(0.0)
        while self._awaited and (self._ordered or (wait and not self._judged)):
            self._move(None)
        order = list(self._open) if self._ordered else list(self._judged)
        for number in order:
            del self._open[number]
        return [self._judged.pop(number) for number in order]

    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Just these, before what else is queued, in order."""
        items: list[Item] = []
        numbers: list[int] = []
        try:
            for rollout in rollouts:
                numbers.append(self._number(rollout, items.append))
            self._todo.extendleft(reversed(items))
            while not self._awaited.isdisjoint(numbers):
                self._move(None)
            return [self._judged[number] for number in numbers]
        finally:
            for number in numbers:  # also after Ctrl-C: nobody asks for them again
                self._awaited.discard(number)
                self._judged.pop(number, None)

    @property
    def idle(self) -> bool:
        """Everything sent was delivered."""
        return not self._open

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes there are now."""
        return tuple(worker.pid for worker in self._workers)

    def pending(self) -> list[Rollout]:
        """Sent and not delivered, as they were sent: what a checkpoint keeps, to be sent again after a resume."""
        return list(self._open.values())

    def stats(self) -> dict[str, float]:
        """Since the last call. Seconds are those the judges ran, over all workers; unjudged leaves out what was cut."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return {f"judge/{name}": count for name, count in counts.items()}

    def close(self) -> None:
        """Kills the workers. What is queued is lost: take `pending` first."""
        self._closing()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _number(self, rollout: Rollout, queue: Callable[[Item], None]) -> int:
        """Queues a rollout under a new number, unless it was cut: that is a result already."""
        self._numbers += 1
        number = self._numbers
        if rollout.finish == "cut" or (self._truncated == "mask" and _cut_short(rollout)):
            self._judged[number] = rollout
            return number
        assert rollout.trace is not None, "a rollout is judged by its trace"
        prompt = self._lookup(rollout.prompt_id)
        assert prompt.task in self._judges, f"no judge for task {prompt.task}"
        queue(Item(number, rollout, prompt, self._decode(rollout.trace.ids.tolist())))
        self._awaited.add(number)
        return number

    def _move(self, patience: float | None) -> None:
        """One round: hand out work, wait for an answer or a deadline (at most `patience`), book what came."""
        self._hand_out()
        busy = {worker.conn: worker for worker in self._workers if worker.chunk}
        if not busy:
            assert self._todo or not self._awaited, "a result is awaited that nobody works on"
            return
        left = min(worker.deadline(self._timeout_s) for worker in busy.values()) - time.monotonic()
        if patience != 0:
            wait_for(list(busy), max(0.0, left) if patience is None else min(patience, max(0.0, left)))
        for worker in busy.values():
            self._look_after(worker)
        self._hand_out()

    def _hand_out(self) -> None:
        if self._todo:
            self._fill()
        for worker in list(self._workers):
            if not self._todo:
                break
            if not worker.chunk:
                # One worker takes all it may; several leave some for whoever is done first, if it is worth dividing.
                share = math.ceil(len(self._todo) / (2 * len(self._workers) - 1))
                size = min(CHUNK, len(self._todo), max(share, int(LUMP_S / self._pace)))
                worker.give([self._todo.popleft() for _ in range(size)])
                if worker.broken:
                    self._bury(worker, "crashes")

    def _look_after(self, worker: Worker) -> None:
        """Books its answers, and buries it if it is dead, mute, or out of memory."""
        answered = worker.read()
        full = self._book(answered)
        if full:
            self._bury(worker, "")
        elif worker.broken:
            self._bury(worker, "crashes")
        elif worker.chunk and worker.deadline(self._timeout_s) <= time.monotonic():
            worker.kill()
            late = worker.read()
            self._book(late)
            self._bury(worker, "" if late else "timeouts")  # it answered while we took aim: nobody is to blame

    def _book(self, answered: Sequence[tuple[Item, Reply, float]]) -> bool:
        """True if the worker ran out of memory on the last of them."""
        for item, reply, took in answered:
            self._counts["seconds"] += took
            self._pace += (max(took, 1e-5) - self._pace) / 10
            if reply.kind == Kind.SCORE:
                self._settle(item, reply.judgement)
            elif reply.kind == Kind.LATE:
                self._fail(item, "timeouts", f"gave up: {reply.note}")
            else:
                self._fail(item, "errors", f"failed with {reply.note}")
        return bool(answered) and answered[-1][1].kind == Kind.FULL

    def _bury(self, worker: Worker, cause: str) -> None:
        """The item it was judging is lost to `cause`; the innocent rest of its chunk goes back to the queue.

        A worker that served before and died between chunks costs nothing. One that never answered does, or judges
        that cannot even start would be forked for ever: so each fork brings an answer or loses an item.
        """
        worker.close()
        self._workers.remove(worker)
        if cause and worker.chunk and (worker.started or not worker.proven):
            self._counts["seconds"] += max(0.0, time.monotonic() - worker.since)
            what = f"took longer than {self._timeout_s:g} s" if cause == "timeouts" else "ended its process"
            self._fail(worker.chunk.popleft(), cause, what)
        self._todo.extendleft(reversed(worker.chunk))
        worker.chunk.clear()

    def _settle(self, item: Item, said: Judgement) -> None:
        if self._truncated == "wrong" and _cut_short(item.rollout):
            said = replace(said, score=0.0)
        verdict: Verdict = "right" if said.score >= self._pass_at else "wrong"
        judged = replace(item.rollout, verdict=verdict, score=said.score, final=said.final)
        try:
            reward, terms = self._total(judged, said)
        except WhetError as error:
            self._fail(item, "errors", f"leaves no reward: {error}")
            return
        self._counts[verdict] += 1
        self._deliver(item.number, replace(judged, reward=reward, terms=terms))

    def _fail(self, item: Item, cause: str, what: str) -> None:
        self._counts[cause] += 1
        self._counts["unjudged"] += 1
        task = item.prompt.task
        self.complaint = f'the judge of task {task} {what} (prompt "{item.prompt.id}")'
        if cause != "timeouts" and task not in self._blamed:  # at once: a run may starve before its first warning
            self._blamed.add(task)
            self.on_message(f"T{self.complaint[1:]}; such a response stays unjudged and trains nothing.")
        self._deliver(item.number, replace(item.rollout, verdict="unjudged", score=None, reward=None, note=what))

    def _deliver(self, number: int, rollout: Rollout) -> None:
        if number in self._awaited:
            self._awaited.remove(number)
            self._judged[number] = rollout

    def _fill(self) -> None:
        """Up to the wanted number of workers; fewer do while the system gives no more."""
        assert self._closing.alive, "the judge is closed"
        while len(self._workers) < self._wanted:
            try:
                self._workers.append(Worker(self._judges, self._memory_mb))
            except OSError as error:
                if self._workers:
                    return
                raise WhetError(f"No judge process can be started: {error}; free memory or processes.") from error


def _close_all(workers: list[Worker], owner: int) -> None:
    """At `close`, at the end of the program, or when the Judge is forgotten; never in a forked child."""
    if os.getpid() == owner:
        while workers:
            workers.pop().close()
