"""The desk between a curriculum and an asynchronous trainer, which begins one prompt after the other.

A curriculum plans requests, observes rollouts and emits batches. Such a trainer asks other questions: how many prompts
may be begun (`wanted`), which one and how many rollouts (`begin`), what now with this group (`report`, `ask`), which
groups train (`take`). The desk answers them by the protocol of `curriculum/base.py` and decides nothing itself. The
trainer names a group by a uid of its own. Nothing here imports torch, verl or Ray, or waits; calls come one at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.adapters.client import check_outcome
from whet.curriculum.base import RECORDS, Curriculum, Saved
from whet.curriculum.build import Facts, build_curriculum, resets_of
from whet.errors import Starved, WhetError
from whet.recipe import parse_config
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
    # of the policy that wrote its first token; None: the version of its order
    first_version: int | None = None
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

    state_names = (
        "curriculum",
        "step",
        "tokens",
        "queue",
        "errands",
        "batch",
        "taken",
        "starved",
        "moved",
    )

    def __init__(
        self,
        curriculum: Curriculum,
        *,
        groups: int,
        slots: int | None = None,
        steps: int = 0,
        cut: bool = False,
    ):
        if groups < 1 or (slots is not None and slots < 1):
            raise WhetError(
                f"A desk needs one group and one slot or more, not groups = {groups} and slots = {slots}."
            )
        self.curriculum = curriculum
        self.groups = groups
        self.slots = slots
        self.steps = steps
        self.cut = cut
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
        # refuses before anything has changed
        rollouts = [self._rollout(outcome) for outcome in outcomes]
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
            raise WhetError(
                "The batch that was taken last is in training; call updated() before the next take()."
            )
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
        self.step = self.step + 1
        self.batch = None
        self.taken = False
        self.moved = True
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
        return {
            uid for uid, errand in self.errands.items() if errand.request.group_id in self._kept
        }

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
        begun = sum(
            len(errand.left) + errand.more * errand.request.n for errand in self.errands.values()
        )
        return begun + sum(request.n for request in self.queue)

    @property
    def _kept(self) -> set[int]:
        """Groups that may still train, those of the present batch among them."""
        return (
            self._held | {group.group_id for group in self.batch.groups}
            if self.batch
            else self._held
        )

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
                # if nothing runs the next emit or plan finds a way
                self.moved, rounds = self._running == 0, rounds + 1
                self.starved = (
                    "The curriculum asks for nothing and emits nothing." if rounds == 4 else ""
                )
        self._look()

    def _plan(self) -> None:
        begun = {errand.request.group_id: errand for errand in self.errands.values()}
        for request in self.curriculum.plan(self.clock):
            if (errand := begun.get(request.group_id)) is None:
                self.queue.append(request)
            else:
                errand.request = request
                errand.more = True

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
            cut: dict[str, Any] = {
                "length": 0,
                "finish": "cut",
                "first_version": self.step,
                "last_version": self.step,
            }
            lost = [
                Rollout.of(request, request.first_index + i, **cut)
                for request in gone
                for i in range(request.n)
            ]
            self.curriculum.observe(lost)
        self._forget()

    def _forget(self) -> None:
        """Forget groups that are over, as the trainer knows, and that will not train."""
        kept = self._kept
        for uid in [
            uid for uid, e in self.errands.items() if e.told and e.request.group_id not in kept
        ]:
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
        request = errand.request
        sampling = errand.request.sampling
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
        errand = self._errand(outcome.uid)
        where = f'Rollout {outcome.index} of group "{outcome.uid}"'
        if outcome.index not in errand.left:
            raise WhetError(f"{where} was not ordered, or was reported before.")
        check_outcome(where, outcome)
        unjudged = outcome.verdict == "unjudged" or outcome.finish == "cut"
        score = None if unjudged else float(outcome.verdict == "right")
        reward = score if unjudged or outcome.reward is None else float(outcome.reward)
        if reward is not None and not math.isfinite(reward):
            raise WhetError(
                f"{where} has the reward {reward}; give a finite number, or the verdict unjudged."
            )
        first = outcome.first_version
        last = outcome.last_version
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


# ---- the desk that verl's parts share, as `verl.py` puts it into a Ray actor

MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class=whet.adapters.verl.WhetManager"


def facts_of(
    extra: Sequence[Mapping[str, Any] | None], sources: Sequence[Any], prompts: Sequence[Any]
) -> Facts:
    """What verl's rows say: a prompt is named by data_source and extra_info.index, and extra_info.level is its level.

    >>> facts_of([{"index": 7, "level": 2}], ["gsm8k"], [[{"role": "user", "content": "1+1"}]]).ids
    ['gsm8k/7']
    """
    ids = dict[str, None]()
    table = [row or {} for row in extra]
    for row, (source, about) in enumerate(zip(sources, table, strict=True)):
        if source is None or about.get("index") is None:
            raise WhetError(
                f"Row {row} of the training data has no data_source or no extra_info.index to name it."
            )
        if (name := f"{source}/{about['index']}") in ids:
            raise WhetError(
                f'Two rows of the training data are "{name}" by data_source and extra_info.index.'
            )
        ids[name] = None
    characters = [sum(len(str(turn["content"])) for turn in turns) for turns in prompts]
    levels = [
        level if isinstance(level := about.get("level"), int | float) else None for about in table
    ]
    return Facts(ids=list(ids), tasks=list(sources), characters=characters, levels=levels)


class VerlDesk:
    """The actor: a desk whose groups are named by tickets, and verl's uid of each."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.opened = False
        self.failure = ""
        self.count = 0
        self.digest = hashlib.sha256("\n".join(facts.ids).encode()).hexdigest()
        self.uids: dict[str, str] = {}  # by ticket

    def open(self, config: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Build the curriculum by verl's whole configuration, and load the state of a checkpoint."""
        rollout = config["actor_rollout_ref"]["rollout"]
        data = config["data"]
        trainer = config["trainer"]
        sampler = trainer["v1"]["sampler"]
        groups = data["train_batch_size"]
        own = dict(sampler["sampler_kwargs"])
        # as verl's warm-up does
        given, slots = own.pop("curriculum", {}), own.pop("slots", 2 * groups * rollout["n"])
        if own:
            raise WhetError(
                f"sampler_kwargs has curriculum and slots, but {', '.join(own)} was given."
            )
        age = (sampler["max_off_policy_threshold"] or 10**6) - 1  # verl counts from 1
        given = {"name": given} if isinstance(given, str) else given
        table = {"groups": groups, "rollouts": rollout["n"], "max_age": age, **given}
        sampling = Sampling(
            max_tokens=rollout["response_length"], temperature=rollout["temperature"]
        )
        settings = parse_config({"curriculum": table}).curriculum
        seed = data.get("seed") or 0
        curriculum = build_curriculum(settings, facts=self.facts, sampling=sampling, seed=seed)
        # Without a KL term no one reads the reference policy, and its reset is nothing.
        self.reference = (
            config["actor_rollout_ref"]["actor"]["use_kl_loss"]
            or config["algorithm"]["use_kl_in_reward"]
        )
        for stage in settings.stages:  # now, and not when the stage begins
            refuse(
                stage.kl_coef,
                stage.entropy_coef,
                stage.minibatches or None,
                stage.temperature or None,
            )
        for _, optimizer in resets_of(settings):
            self.refuse_resets(True, optimizer)
        if curriculum.needs:
            raise WhetError(
                f'verl cannot compute the signal "{min(curriculum.needs)}" that this curriculum needs.'
            )
        steps = (
            trainer["total_training_steps"]
            or len(self.facts.ids) // groups * trainer["total_epochs"]
        )
        self.desk = Desk(curriculum, groups=settings.groups, slots=slots, steps=steps)
        self.opened = True
        if state is not None:
            if state["digest"] != self.digest:
                raise WhetError(
                    "The checkpoint was written with other prompts; resume with the same data."
                )
            self.desk.load_state_dict(state["desk"])
            self.count, self.uids = state["count"], dict(state["uids"])
            self.wanted()  # the update is done
            for ticket in list(self.desk.errands):  # no one will ask for a group that was complete
                self.desk.resume(ticket)

    def state(self) -> dict[str, Any]:
        return {
            "desk": self.desk.state_dict(),
            "digest": self.digest,
            "count": self.count,
            "uids": self.uids,
        }

    def wanted(self) -> int:
        """Prompts that may be begun. The trainer has one thread: it asks after it has trained on what it took."""
        if not self.opened:
            raise WhetError(f"verl's own workers were about to generate; add +{MANAGER}.")
        if self.desk.taken:
            self.desk.updated()
        return self.desk.wanted()

    def hand_out(self) -> tuple[str, str]:
        """A ticket and the id of its prompt; empty if verl asks for more than is wanted."""
        if not self.wanted():
            return "", ""
        self.count += 1
        order = self.desk.begin(str(self.count))
        return order.uid, order.prompt_id

    def start(self, ticket: str, uid: str) -> Answer:
        self.uids[ticket] = uid
        return self.desk.resume(ticket)

    def report(self, outcomes: list[Finished]) -> Answer:
        return self.desk.report(outcomes)[outcomes[0].uid]

    def ask(self, ticket: str) -> Answer:
        return self.desk.ask(ticket)

    def fail(self, sentence: str) -> None:
        self.failure = self.failure or sentence

    def unfinished(self) -> tuple[dict[str, set[int]], set[str]]:
        """The sessions that a worker must go on with, by ticket, and all uids that are known."""
        return {
            ticket: e.left for ticket, e in self.desk.errands.items() if not e.told
        }, self.known()

    def take(self, global_steps: int) -> tuple[dict[str, list[int]], dict[str, float]] | None:
        """The sessions that train, by uid, and metrics; None while the batch is not full."""
        if self.failure:
            raise WhetError(self.failure)
        self.wanted()
        if self.desk.step != global_steps - 1:
            raise WhetError(
                f"verl is at step {global_steps}, but the curriculum has seen {self.desk.step} updates."
            )
        if (groups := self.desk.take()) is None:
            return None
        batch = self.desk.batch
        assert batch is not None
        refuse(
            batch.kl_coef,
            batch.entropy_coef,
            batch.minibatches,
            *(group.weight for group in batch.groups),
        )
        self.refuse_resets(batch.reset_reference, batch.reset_optimizer)
        trained = {
            self.uids[ticket]: [r.index for r in group.judged] for ticket, group in groups.items()
        }
        return trained, self.desk.metrics()

    def refuse_resets(self, reference: bool, optimizer: bool) -> None:
        if optimizer or (reference and self.reference):
            raise WhetError(
                "verl cannot reset the reference or the optimiser during a run; set the resets to false."
            )

    def known(self) -> set[str]:
        """The uids of groups in work and of groups that may still train; what others have can be freed."""
        self.uids = {
            ticket: uid for ticket, uid in self.uids.items() if ticket in self.desk.errands
        }
        return set(self.uids.values())


def refuse(*settings: float | None) -> None:
    """Refuse what a curriculum may set for whet's own learner."""
    if any(value is not None for value in settings):
        raise WhetError(
            "verl cannot change coefficients, minibatches, temperature or weights in a run; unset them."
        )
