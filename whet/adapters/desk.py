"""The desk between a curriculum and an asynchronous trainer, which begins one prompt after the other.

A curriculum plans requests, observes rollouts and emits batches. Such a trainer asks other questions: how many prompts
may be begun (`wanted`), which one and how many rollouts (`begin`), what now with this group (`report`, `ask`), which
groups train (`take`). The desk answers them by the protocol of `curriculum/base.py` and decides nothing itself. The
trainer names a group by a uid of its own. Nothing here imports torch or waits; calls come one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from whet.curriculum.base import RECORDS, Curriculum, Saved
from whet.errors import Starved, WhetError
from whet.types import Batch, Clock, Finish, Group, Report, Request, Rollout, Sampling, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Rollouts that the trainer is to generate."""

    uid: str
    prompt_id: str
    group_id: int  # the curriculum's own name of the group, for `Report.signals`
    indices: tuple[int, ...]  # numbers of these rollouts within the group
    limit: int  # most tokens of a response
    temperature: float
    version: int  # the policy's at this moment

    @property
    def n(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One rollout as it came out: Finished(uid="a", index=0, length=212, verdict="right")."""

    uid: str
    index: int
    length: int  # generated tokens
    verdict: Verdict
    reward: float | None = None  # None: 1 if right, 0 if wrong
    finish: Finish = "stop"
    first_version: int | None = None  # of the policy that wrote its first token; None: the version of its order
    last_version: int | None = None  # of the last token; None: the present version


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What becomes of a group: generate `order` ("more"), ask again later ("wait"), or nothing more ("over")."""

    what: Literal["more", "wait", "over"]
    order: Order | None = None


@dataclass(slots=True)
class Errand:
    """A group that the trainer has begun."""

    uid: str
    request: Request  # the last one
    version: int  # when it was ordered
    left: set[int] = field(default_factory=set)  # rollouts that are ordered and have not come
    told: bool = False  # the trainer knows that it is over
    more: bool = False  # the last request is not ordered yet


RECORDS.update({kind.__name__: kind for kind in (Errand, Request, Sampling)})


class Desk(Saved):
    """Answers a trainer's questions over any curriculum.

    groups: per update. slots: rollouts that the trainer generates at once; None has no limit, and then a plan is made
    as under barrier. steps: updates of the whole run, for curricula that follow its progress. cut: an update ends the
    running rollouts (`Clock.cut`), which are then reported with finish = "cut".
    """

    state_names = ("curriculum", "step", "tokens", "queue", "errands", "batch", "taken", "starved", "moved")

    def __init__(
        self, curriculum: Curriculum, *, groups: int, slots: int | None = None, steps: int = 0, cut: bool = False
    ):
        if groups < 1 or (slots is not None and slots < 1):
            raise WhetError(f"A desk needs one group and one slot or more, not groups = {groups} and slots = {slots}.")
        self.curriculum, self.groups, self.slots, self.steps, self.cut = curriculum, groups, slots, steps, cut
        self.step = self.tokens = 0  # updates, and tokens that were reported
        self.queue: list[Request] = []  # first requests of groups, not begun yet
        self.errands: dict[str, Errand] = {}  # by uid, in the order in which they were begun
        self.batch: Batch | None = None  # full, or in training
        self.taken = False  # the batch is in training
        self.starved = ""  # why no batch will come
        self.moved = True  # since the last plan something happened, or must: nothing runs
        self._waits: set[int] = set()
        self._held: set[int] = set()

    @property
    def clock(self) -> Clock:
        return Clock(
            step=self.step,
            version=self.step,
            groups=self.groups,
            free=None if self.slots is None else max(0, self.slots - self._running),
            tokens=self.tokens,
            progress=min(1.0, self.step / self.steps) if self.steps else 0.0,
            cut=self.cut,
        )

    # The questions

    def wanted(self) -> int:
        """The number of prompts that may be begun now."""
        self._turn()
        return len(self.queue)

    def begin(self, uid: str) -> Order:
        """Begin the next prompt as a group with this name, which no group in work has."""
        if uid in self.errands:
            raise WhetError(f'The uid "{uid}" names a group in work; begin each with a new one.')
        if not self.queue:
            raise WhetError("No prompt is wanted now: begin as many as wanted() says.")
        self.errands[uid] = Errand(uid, self.queue.pop(0), self.step, more=True)
        return self._order(self.errands[uid])

    def report(self, outcomes: Sequence[Finished]) -> dict[str, Answer]:
        """Take note of finished rollouts, of one group or of several, and say what becomes of each of these groups."""
        rollouts = [self._rollout(outcome) for outcome in outcomes]  # refuses before anything has changed
        if len({rollout.key for rollout in rollouts}) < len(rollouts):
            raise WhetError("A rollout is reported twice in one call.")
        for outcome in outcomes:
            self.errands[outcome.uid].left.remove(outcome.index)
            self.tokens += outcome.length
        self.curriculum.observe(rollouts)
        self.moved = True
        self._turn()
        return {uid: self.ask(uid) for uid in dict.fromkeys(outcome.uid for outcome in outcomes)}

    def ask(self, uid: str) -> Answer:
        """Say what becomes of a group; "wait" also means that rollouts of it have still to come."""
        errand = self._errand(uid)
        if errand.more:
            return Answer(what="more", order=self._order(errand))
        if errand.left or errand.request.group_id in self._waits:
            return Answer(what="wait")
        errand.told = True
        self._forget()
        return Answer(what="over")

    def take(self) -> dict[str, Group] | None:
        """Return the groups of the next batch by uid, in the order of first request; None while it is not full.

        `batch` then holds their coefficients and resets. Starved is raised if no batch will come. A group's
        `rollouts` name by `index` which of them train: unjudged ones do not.
        """
        if self.taken:
            raise WhetError("The batch that was taken last is in training; call updated() before the next take().")
        self._turn()
        if self.starved:
            raise Starved(self.starved)
        if self.batch is None:
            return None
        self.taken = True
        uids = {errand.request.group_id: uid for uid, errand in self.errands.items()}
        return {uids[group.group_id]: group for group in self.batch.groups}

    def updated(self, report: Report | None = None) -> None:
        """Take note of the update on the batch that was taken: from now on the next version of the policy generates.

        Between `take` and this call nothing new is wanted. A trainer that generates while it trains calls it right
        after `take`, and reports for each rollout the version that wrote it (`max_age` must allow for one more).
        """
        if not self.taken:
            raise WhetError("There is no batch in training: updated() comes after take().")
        self.step, self.batch, self.taken, self.moved = self.step + 1, None, False, True
        self.curriculum.updated(self.clock, report or Report(metrics={}))
        self._look()

    def resume(self, uid: str) -> Answer:
        """Say what a group still lacks, for a trainer that lost what it generated in a restart, or begins only now."""
        errand = self._errand(uid)
        if not errand.left:
            return self.ask(uid)
        errand.version = self.step
        return Answer(what="more", order=self._as_order(errand))

    def holds(self) -> set[str]:
        """The uids of groups that may still train; the texts of all others can be freed."""
        return {uid for uid, errand in self.errands.items() if errand.request.group_id in self._kept}

    def metrics(self) -> dict[str, float]:
        running = sum(len(errand.left) for errand in self.errands.values())
        waiting = sum(errand.request.group_id in self._waits for errand in self.errands.values())
        own = {"desk/running": running, "desk/waiting": waiting, "desk/queued": len(self.queue)}
        return {**self.curriculum.metrics(), **{name: float(value) for name, value in own.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._look()

    # The protocol behind them

    @property
    def _running(self) -> int:
        """Rollouts that were requested and have not come, ordered or not."""
        begun = sum(len(errand.left) + errand.more * errand.request.n for errand in self.errands.values())
        return begun + sum(request.n for request in self.queue)

    @property
    def _kept(self) -> set[int]:
        """Groups that may still train, those of the present batch among them."""
        return self._held | {group.group_id for group in self.batch.groups} if self.batch else self._held

    def _turn(self) -> None:
        """Emit, and plan while the batch is not full, as the loop of a trainer does after every observe."""
        rounds = 0
        while self.moved and self.batch is None and not self.starved:
            try:
                self.batch = self.curriculum.emit(self.clock)
            except Starved as error:
                self.starved = str(error)
            if self.batch is None and not self.starved:
                self._plan()
                self.moved, rounds = self._running == 0, rounds + 1  # if nothing runs the next emit or plan finds a way
                self.starved = "The curriculum asks for nothing and emits nothing." if rounds == 4 else ""
        self._look()

    def _plan(self) -> None:
        begun = {errand.request.group_id: errand for errand in self.errands.values()}
        for request in self.curriculum.plan(self.clock):
            if (errand := begun.get(request.group_id)) is None:
                self.queue.append(request)
            else:
                errand.request, errand.more = request, True

    def _look(self) -> None:
        """See which groups wait and which are held. A request of a group that was dropped before its rollouts were
        ordered comes back as cut, since every request must come back."""
        self._waits, self._held = self.curriculum.waits(), self.curriculum.holds()
        gone = [request for request in self.queue if request.group_id not in self._held]
        self.queue = [request for request in self.queue if request.group_id in self._held]
        for errand in self.errands.values():
            if errand.more and errand.request.group_id not in self._held:
                gone.append(errand.request)
                errand.more = False
        if gone:
            cut: dict[str, Any] = {"length": 0, "finish": "cut", "first_version": self.step, "last_version": self.step}
            lost = [Rollout.of(request, request.first_index + i, **cut) for request in gone for i in range(request.n)]
            self.curriculum.observe(lost)
        self._forget()

    def _forget(self) -> None:
        """Forget groups that are over, as the trainer knows, and that will not train."""
        kept = self._kept
        for uid in [uid for uid, e in self.errands.items() if e.told and e.request.group_id not in kept]:
            del self.errands[uid]

    # Records

    def _errand(self, uid: str) -> Errand:
        if uid not in self.errands:
            raise WhetError(f'There is no group "{uid}" in work: it was not begun, or it is over.')
        return self.errands[uid]

    def _order(self, errand: Errand) -> Order:
        """Order the last request of a group."""
        first, errand.more, errand.version = errand.request.first_index, False, self.step
        errand.left = set(range(first, first + errand.request.n))
        return self._as_order(errand)

    def _as_order(self, errand: Errand) -> Order:
        request, sampling = errand.request, errand.request.sampling
        return Order(
            uid=errand.uid,
            prompt_id=request.prompt_id,
            group_id=request.group_id,
            indices=tuple(sorted(errand.left)),
            limit=sampling.max_tokens,
            temperature=sampling.temperature,
            version=errand.version,
        )

    def _rollout(self, outcome: Finished) -> Rollout:
        errand, where = self._errand(outcome.uid), f'Rollout {outcome.index} of group "{outcome.uid}"'
        if outcome.index not in errand.left:
            raise WhetError(f"{where} was not ordered, or was reported before.")
        if outcome.length < 0 or outcome.verdict not in get_args(Verdict) or outcome.finish not in get_args(Finish):
            what = f"length = {outcome.length}, verdict = {outcome.verdict!r} and finish = {outcome.finish!r}"
            raise WhetError(f"{where} cannot have {what}.")
        unjudged = outcome.verdict == "unjudged" or outcome.finish == "cut"
        score = None if unjudged else float(outcome.verdict == "right")
        reward = score if unjudged or outcome.reward is None else float(outcome.reward)
        if reward is not None and not math.isfinite(reward):
            raise WhetError(f"{where} has the reward {reward}; give a finite number, or the verdict unjudged.")
        first, last = outcome.first_version, outcome.last_version
        return Rollout.of(
            errand.request,
            outcome.index,
            length=outcome.length,
            finish=outcome.finish,
            first_version=errand.version if first is None else first,
            last_version=self.step if last is None else last,
            verdict="unjudged" if unjudged else outcome.verdict,
            score=score,
            reward=reward,
        )
