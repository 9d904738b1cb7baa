"""The judge pool: rollouts go in and come out judged, by worker processes that may be killed at any time.

The loop calls `send` and `receive`, evaluation calls `judge`; both end in `worker.py`, which owns one process. A judge
that hangs, crashes, runs out of memory, raises or returns nonsense costs the one rollout that it was given: this one
stays unjudged and is counted. There are no threads: work moves on whenever one of these functions is called. What a
right answer looks like is up to the judges, and `total` turns what they say into the reward.
"""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial

from whet import config
from whet.errors import WhetError
from whet.tasks.base import Judgement
from whet.tasks.worker import Item, Judges, Kind, Reply, Worker
from whet.types import Prompt, Rollout, Verdict, changed

CHUNK = 64  # most items that a worker receives at once
MOST_SPARED = 3  # machines in a row that may be lost before the item is blamed
LUMP_S = 0.005  # seconds of work that are not worth dividing among workers
HOPELESS = 32  # responses, the first of a run, after which a judge without any verdict is given up
COUNTS = ("seconds", "right", "wrong", "unjudged", "timeouts", "crashes", "errors")


def judge_name(task: str) -> str:
    """How a sentence names the judge of a task. The task of a user's judge has its name (`build.name_task`).

    >>> judge_name("text:rewards:score:2"), judge_name("chain:2")
    ('the reward rewards:score', 'the judge of task chain')
    """
    kind, _, own = task.partition(":")
    module, _, function = own.partition(":")
    return (
        f"the reward {module}:{function.partition(':')[0]}"
        if function
        else f"the judge of task {kind}"
    )


# The reward of a rollout with this verdict, and each of its terms; raises WhetError where there is none.
Total = Callable[[Rollout, Verdict, Judgement], tuple[float, dict[str, float]]]


class Unfinished(Exception):
    """The run is to stop, and the time for which it may wait for verdicts is over. `pending` holds what is lacking."""


class Judge(AbstractContextManager):
    """A pool of worker processes.

    judges: by `Prompt.task`. decode: makes text of `trace.ids`. ordered: `receive` waits for everything that was sent
    and sorts it by group and index, so that a run repeats exactly, whichever rollout or engine was done first;
    otherwise it returns what is ready. start: makes a worker elsewhere; by default it is a process of this machine.
    hopeless: raise a WhetError if none of so many first responses has a verdict; 0 goes on.
    """

    def __init__(
        self,
        lookup: Callable[[str], Prompt],
        judges: Judges,
        settings: config.JudgeSettings,
        *,
        decode: Callable[[Sequence[int]], str],
        ordered: bool = True,
        total: Total = lambda rollout, verdict, said: (said.score, dict(said.terms)),
        start: Callable[[], Worker] | None = None,
        hopeless: int = 0,
    ) -> None:
        self._lookup = lru_cache(4096)(lookup)
        self._judges = judges
        self._decode = decode
        self._settings = settings
        self._ordered = ordered
        self._total = total
        self._start = start or partial(Worker, judges, settings.memory_mb)
        self._spared = 0  # workers lost with their machine since the last answer
        self._doubted: set[int] = set()  # numbers of items whose worker has ended once
        self._wanted = settings.workers or min(8, max(1, (os.cpu_count() or 2) - 1))
        self._last_number = 0
        self._todo: deque[Item] = deque()
        self._open: dict[int, Rollout] = {}  # sent and not delivered yet, in the order sent
        self._awaited: set[int] = set()  # numbers without a result yet; any other result is dropped
        # results not delivered yet, in the order of their arrival
        self._judged: dict[int, Rollout] = {}
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._pace = LUMP_S  # seconds per item, averaged over the last ones
        self._hopeless = hopeless
        self._failed = 0  # responses without a verdict, until the first verdict
        self._trusted = False  # there was a verdict
        self.complaint = ""  # the last failure, in words for the user
        # Called with a sentence when the judge of a task raises, hangs or ends its process for the first time.
        self.on_message: Callable[[str], None] = lambda sentence: None
        # Until when verdicts may be waited for, by `time.monotonic`; a run that was told to stop gives an end.
        self.until: Callable[[], float] = lambda: math.inf
        # tasks and causes that on_message was called for
        self._blamed: set[tuple[str, str]] = set()
        self._workers: list[Worker] = []
        self._closing = weakref.finalize(self, _close_all, self._workers, os.getpid())
        self._start_workers()  # now, while the process is small and has few threads

    def send(self, rollouts: Iterable[Rollout]) -> None:
        """Queue finished rollouts, with their traces. Those that a weight update cut pass through unjudged."""
        for rollout in rollouts:
            self._open[self._number(rollout, self._todo.append)] = rollout
            if len(self._todo) % CHUNK == CHUNK - 1:
                self._hand_out()  # the judges begin while the rest is made ready
        if self._todo:
            self._move(wait=False)

    def receive(self, wait: bool) -> list[Rollout]:
        """Judged copies. `wait` only matters if not `ordered`: wait for at least one, if any is to come."""
        self._move(wait=False)
        while self._awaited and (self._ordered or (wait and not self._judged)):
            self._wait()
        order = (
            sorted(self._open, key=lambda n: self._open[n].key)
            if self._ordered
            else list(self._judged)
        )
        for number in order:
            del self._open[number]
        return [self._judged.pop(number) for number in order]

    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Judge only these, before anything else in the queue, and return them in order."""
        items: list[Item] = []
        numbers: list[int] = []
        try:
            for rollout in rollouts:
                numbers.append(self._number(rollout, items.append))
            self._todo.extendleft(reversed(items))
            while not self._awaited.isdisjoint(numbers):
                self._wait()
            return [self._judged[number] for number in numbers]
        finally:
            for number in numbers:  # also after Ctrl-C, when no caller will fetch them
                self._awaited.discard(number)
                self._judged.pop(number, None)

    @property
    def idle(self) -> bool:
        """Everything that was sent has been delivered."""
        return not self._open

    def pending(self) -> list[Rollout]:
        """Rollouts sent and not delivered, as they were sent: a checkpoint keeps them, to send them again."""
        return list(self._open.values())

    def stats(self) -> dict[str, float]:
        """Counts since the last call; the seconds are summed over all workers, and cut rollouts do not count."""
        counts = self._counts
        self._counts = dict.fromkeys(COUNTS, 0.0)
        return {f"judge/{name}": count for name, count in counts.items()}

    def close(self) -> None:
        """Kill the workers. Everything in the queue is lost: take `pending` first."""
        self._closing()

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ---- one round of work

    def _number(self, rollout: Rollout, queue: Callable[[Item], None]) -> int:
        """Queue a rollout under a new number, unless it is not to be judged: then it is its own result."""
        self._last_number += 1
        number = self._last_number
        if rollout.finish == "cut" or (
            self._settings.truncated == "mask" and _is_truncated(rollout)
        ):
            self._judged[number] = rollout
            return number
        assert rollout.trace is not None, "a rollout is judged by its trace"
        prompt = self._lookup(rollout.prompt_id)
        assert prompt.task in self._judges, f"no judge for task {prompt.task}"
        queue(Item(number, rollout, prompt, self._decode(rollout.trace.ids.tolist())))
        self._awaited.add(number)
        return number

    def _wait(self) -> None:
        if time.monotonic() >= self.until():
            raise Unfinished
        self._move(wait=True)

    def _move(self, wait: bool) -> None:
        """One round: hand out work, wait (if so) for an answer or a deadline, book the answers, and bury workers that
        are dead, silent or out of memory."""
        self._hand_out()
        busy = {worker.conn: worker for worker in self._workers if worker.chunk}
        if not busy:
            assert self._todo or not self._awaited, "a result is awaited that no worker works on"
            return
        if wait:
            first_deadline = min(
                worker.deadline(self._settings.timeout_s) for worker in busy.values()
            )
            # A signal does not end the poll: so that it is heeded in time, none is longer than an item may take.
            end = min(first_deadline, self.until(), time.monotonic() + self._settings.timeout_s)
            poll = select.poll()  # `multiprocessing.connection.wait` takes ten times as long
            for conn in busy:
                poll.register(conn, select.POLLIN)
            poll.poll(max(0.0, 1000 * (end - time.monotonic())))
        for worker in busy.values():
            out_of_memory = self._book(worker.read())
            if out_of_memory or worker.broken:
                self._bury(worker, "" if out_of_memory else "crashes")
            elif worker.chunk and worker.deadline(self._settings.timeout_s) <= time.monotonic():
                worker.kill()
                # an answer that came just before the kill counts, and no item is to blame
                late = worker.read()
                self._book(late)
                self._bury(worker, "" if late else "timeouts")
        self._hand_out()

    def _hand_out(self) -> None:
        if self._todo:
            self._start_workers()
        for worker in list(self._workers):
            if self._todo and not worker.chunk:
                # One worker takes as much as it may; several leave some for the one that is done first.
                share = math.ceil(len(self._todo) / (2 * len(self._workers) - 1))
                size = min(CHUNK, len(self._todo), max(share, int(LUMP_S / self._pace)))
                worker.give([self._todo.popleft() for _ in range(size)])
                if worker.broken:
                    self._bury(worker, "crashes")

    def _book(self, answered: Sequence[tuple[Item, Reply, float]]) -> bool:
        """True if the worker ran out of memory on the last of them."""
        for item, reply, took in answered:
            self._spared, self._counts["seconds"] = 0, self._counts["seconds"] + took
            self._pace += (max(took, 1e-5) - self._pace) / 10
            if reply.kind == Kind.SCORE:
                self._settle(
                    item, Judgement(score=reply.score, final=reply.final, terms=reply.terms)
                )
            elif reply.kind == Kind.LATE:
                # The judge of whet's own text task gives up on hostile answers, which is no news.
                self._fail(item, "timeouts", f"gave up: {reply.note}", news=False)
            else:
                self._fail(item, "errors", f"failed with {reply.note}")
        return bool(answered) and answered[-1][1].kind == Kind.FULL

    def _bury(self, worker: Worker, cause: str) -> None:
        """Remove a worker. The item that it was judging is lost to `cause`; the rest goes back to the queue.

        A worker that answered before and died between chunks costs nothing. One that never answered does, or judges
        that cannot even start would be forked for ever. An item whose worker ended is judged once more, since it may
        have been killed from outside: each second fork brings an answer or loses an item.
        """
        worker.close()
        self._workers.remove(worker)
        if cause and self._spared < MOST_SPARED and worker.gone():
            self._spared = self._spared + 1
            cause = ""
        if cause == "crashes" and worker.chunk and worker.chunk[0].number not in self._doubted:
            self._doubted.add(worker.chunk[0].number)
            cause = ""
        if cause and worker.chunk and (worker.started or not worker.proven):
            self._counts["seconds"] += max(0.0, time.monotonic() - worker.since)
            what = (
                f"took longer than {self._settings.timeout_s:g} s"
                if cause == "timeouts"
                else "ended its process"
            )
            self._fail(worker.chunk.popleft(), cause, what)
        self._todo.extendleft(reversed(worker.chunk))
        worker.chunk.clear()

    def _settle(self, item: Item, said: Judgement) -> None:
        if self._settings.truncated == "wrong" and _is_truncated(item.rollout):
            said = replace(said, score=0.0)
        verdict: Verdict = "right" if said.score >= self._settings.pass_at else "wrong"
        try:
            reward, terms = self._total(item.rollout, verdict, said)
        except WhetError as error:
            self._fail(item, "errors", f"leaves no reward: {error}")
            return
        self._counts[verdict] += 1
        self._trusted = True
        judged = changed(
            item.rollout,
            verdict=verdict,
            score=said.score,
            final=said.final,
            reward=reward,
            terms=terms,
        )
        self._deliver(item.number, judged)

    def _fail(self, item: Item, cause: str, what: str, news: bool = True) -> None:
        self._counts[cause] += 1
        self._counts["unjudged"] += 1
        task = item.prompt.task
        self.complaint = f'{judge_name(task)} {what} (prompt "{item.prompt.id}")'
        said = f"T{self.complaint[1:]}"
        # at once: the first warning may be hours away
        if news and (task, cause) not in self._blamed:
            self._blamed.add((task, cause))
            self.on_message(f"{said}; such a response stays unjudged and trains nothing.")
        self._deliver(
            item.number,
            changed(item.rollout, verdict="unjudged", score=None, reward=None, note=what),
        )
        self._failed += 1
        if self._failed == self._hopeless and not self._trusted:
            cure = "raise judge.timeout_s" if cause == "timeouts" else "repair it"
            raise WhetError(
                f"{said}, and none of the first {self._failed} responses has a verdict: {cure}."
            )

    def _deliver(self, number: int, rollout: Rollout) -> None:
        self._doubted.discard(number)
        if number in self._awaited:
            self._awaited.remove(number)
            self._judged[number] = rollout

    def _start_workers(self) -> None:
        """Start workers up to the wanted number; fewer will do while the system gives no more."""
        assert self._closing.alive, "the judge is closed"
        while len(self._workers) < self._wanted:
            try:
                self._workers.append(self._start())
            except OSError as error:
                if self._workers:
                    return
                raise WhetError(
                    f"No judge process can be started: {error}; free memory or processes."
                ) from error


def _is_truncated(rollout: Rollout) -> bool:
    """A training response cut at the limit. Evaluation has limits of its own and judges every response."""
    return rollout.finish == "length" and rollout.phase != "eval"


def _close_all(workers: list[Worker], owner: int) -> None:
    """Called by `close`, at the end of the program, or when the Judge is collected; never in a forked child."""
    if os.getpid() == owner:
        while workers:
            workers.pop().close()
