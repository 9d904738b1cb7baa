"""A gate takes prompts from a source and decides which groups train: the base class, plain groups, and DAPO's filter.

A group is open (rollouts are still to come), waiting (its admission was "more", so it is open, too), ready (it will
train) or spare (rejected, but kept for starvation = "relax"). Without cuts it is decided as soon as it is complete.
With cuts (`Clock.cut`) short groups complete first, so deciding in that order would favour short responses. Then
nothing is requested ahead, and only the first `decidable` groups in line, as many as the batch needs, may be decided
and shown to the source: whether one is decided cannot depend on its length. When one is rejected the next in line moves
up. Each update drops all other groups, finished or not, and requests their prompts again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Sequence
from math import ceil
from typing import Any, Literal

from whet.curriculum.base import Saved, Source, named
from whet.curriculum.groups import Counts, GroupBook, Visit
from whet.errors import Mastered, Starved
from whet.types import Batch, Clock, Group, Phase, Report, Request, Rollout, Sampling

Admission = Literal["keep", "drop", "more"]
Starvation = Literal["raise", "relax", "partial"]


class Gate(Saved, ABC):
    """Requests prompts from the source, keeps the book of groups, and emits a batch once enough groups were admitted.

    A subclass overrides `admit` and, if needed, `groups_to_ask`, `sizes` and `continuations`, and adds to `state_names`
    what it must remember. `curriculum.name = "module:Class"` may name it: `build.py` gives it the arguments below.
    """

    state_names: tuple[str, ...] = (
        "book",
        "source",
        "counts",
        "returned",
        "ages",
        "dry",
        "version",
        "decidable",
    )
    needs: frozenset[str] = frozenset()
    phase: Phase = "train"  # phase of the first request of a group
    # advice when a batch starves: what makes the gate admit more groups
    knob = "raise curriculum.rollouts"

    def __init__(
        self,
        source: Source,
        *,
        sampling: Sampling,
        rollouts: int,
        max_age: int = 0,
        look_ahead: float = 1.25,
        starvation: Starvation = "raise",
        patience: int = 20,
    ):
        """`rollouts` is the first size of a group; the other settings are those of `config.CurriculumSettings`."""
        self.source = source
        self.sampling = sampling
        self.rollouts = rollouts
        self.max_age = max_age
        self.look_ahead = look_ahead
        self.starvation = starvation
        self.patience = patience
        self.book, self.counts = GroupBook(), Counts()
        # (place, prompt id) of what must be requested again, in line
        self.returned: list[tuple[int, str]] = []
        self.version = 0  # at the last emit
        # number of groups, first in line, that may be decided; None: all
        self.decidable: int | None = None
        self.ages: list[int] = []  # ages of the groups of the last batch, in versions
        self.dry = False  # the source had nothing more, and no group is open

    # What makes a gate

    @abstractmethod
    def admit(self, group: Group) -> Admission:
        """Decide on a complete group with two or more judged rollouts: train, drop, or ask for more first."""

    def groups_to_ask(self, clock: Clock) -> int:
        """The number of new groups that the batch still lacks."""
        return clock.groups - self.book.ready - self.book.open

    def sizes(self, prompt_ids: Sequence[str]) -> list[int]:
        """The first size of each new group. `_room` counts on `rollouts` on average; Speed overrides both."""
        return [self.rollouts] * len(prompt_ids)

    def phase_of(self, n: int) -> Phase:
        """The phase of the first request of a group, where it depends on its n rollouts."""
        return self.phase

    def continuations(self, clock: Clock) -> list[Request]:
        """Requests (`book.ask_more`) for groups whose admission was "more"; they come before new groups."""
        return []

    # The protocol

    def plan(self, clock: Clock) -> list[Request]:
        self._release_spare(clock.groups)
        requests = self.continuations(clock)
        count = self._room(clock, taken=sum(request.n for request in requests))
        ids, places = self._pick(count, clock)
        for prompt_id, n, place in zip(ids, self.sizes(ids), places, strict=True):
            requests.append(self.book.ask(prompt_id, n, self.sampling, self.phase_of(n), place))
        self.counts.add("asked", len(ids))
        self.counts.add("rollouts", sum(request.n for request in requests))
        self.dry = count > 0 and not ids and self.book.open == 0
        self.source.asked_for(requests)
        return requests

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            assert rollout.group_id < self.book.next_id, (
                f"rollout {rollout.key} was never asked for"
            )
            if rollout.group_id not in self.book:  # its group was cut before it came
                self.counts.add("tokens_dropped", rollout.length)
            elif rollout.finish == "cut":
                self.counts.add("tokens_dropped", rollout.length)
                self._give_back(self.book.remove(rollout.group_id), "cut")
            elif (visit := self.book.add(rollout)) is not None and self.decidable is None:
                self._decide(visit)
        if self.decidable is None:
            self.source.observe([r for r in rollouts if r.judged and r.finish != "cut"])
        else:
            self._settle()

    def emit(self, clock: Clock) -> Batch | None:
        self._turn(clock)
        for visit in self.book.expire(clock.version - self.max_age):
            self._give_back(visit, "expired")
        if self.book.ready >= clock.groups:
            # There may be fewer: the line stops at the first undecided group, so no short group overtakes a long one.
            groups = self.book.first_ready(clock.groups)
            return self._take(groups, clock) if len(groups) == clock.groups else None
        if self.book.open == 0 and (self.dry or self._budget(clock) <= 0):
            return self._take(self._starve(clock), clock)
        return None

    def updated(self, clock: Clock, report: Report) -> None:
        self._release_spare(0)

    def holds(self) -> set[int]:
        return self.book.holds()

    def waits(self) -> set[int]:
        # a complete group there may be undecided
        line = self.book.in_line() if self.decidable is not None else ()
        return self.book.waiting_ids() | {
            v.group_id for v in line if v.complete and v.settled < v.asked
        }

    def metrics(self) -> dict[str, float]:
        held = {"ready": self.book.ready, "open": self.book.open, **age_metrics(self.ages)}
        return {**self.counts.metrics(), **named(held), **self.source.metrics()}

    def pictures(self) -> dict[str, Any]:
        return self.source.pictures()

    # Deciding in line, where an update cuts what runs

    def _turn(self, clock: Clock) -> None:
        """Drop every group that was begun before an update, finished or not, and note the size of the batch."""
        if clock.cut and clock.version > self.version:
            for visit in list(self.book.in_line()):
                why: Literal["cut", "expired"] = (
                    "expired" if self.book.is_ready(visit.group_id) else "cut"
                )
                self._give_back(self.book.remove(visit.group_id), why)
        self.version = clock.version
        self.decidable = clock.groups if clock.cut else None

    def _settle(self) -> None:
        """Decide the complete ones of the first `decidable` groups. No update can cut them: the batch needs each."""
        before = 0
        for visit in list(self.book.in_line()):
            if before == self.decidable:
                break
            if visit.complete and visit.settled < visit.asked:
                new = [
                    rollout
                    for index, rollout in sorted(visit.came.items())
                    if index >= visit.settled
                ]
                visit.settled = visit.asked
                self.source.observe([rollout for rollout in new if rollout.judged])
                self._decide(visit)
            before += visit.group_id in self.book

    # Requesting

    def _ahead(self, clock: Clock) -> int:
        """Groups to request beyond the batch under stream. One batch trains per version, so groups more than `max_age`
        batches ahead would be too old."""
        if clock.free is None or clock.cut:
            return 0
        return int(min(self.look_ahead, self.max_age) * clock.groups)

    def _room(self, clock: Clock, taken: int) -> int:
        """New groups to request now, within the look-ahead window, the free capacity and the patience.

        Under stream the window is filled. If `_ahead` is 0, only the groups that the batch lacks are requested; a gate
        that expects rejections may ask for more, up to `look_ahead`.
        """
        want = self.groups_to_ask(clock)
        if clock.free is not None:
            if ahead := self._ahead(clock):
                want = clock.groups + ahead - len(self.book)
            window = clock.groups + int(self.look_ahead * clock.groups) - len(self.book)
            fits = max(0, clock.free - taken) // self.rollouts
            if self.book.open == 0:
                fits = max(fits, 1)  # a group may be larger than the engine: it queues
            want = min(want, window, fits)
        return max(0, min(want, self._budget(clock)))

    def _budget(self, clock: Clock) -> int:
        """Groups that may still be requested for this batch before it starves."""
        return self.patience * clock.groups - self.counts.since("asked")

    def _pick(self, count: int, clock: Clock) -> tuple[list[str], list[int | None]]:
        """Prompts to request, and the places in line of those that are requested again. The source gets back no more
        than is picked now, so those that must still wait keep their order."""
        if count == 0:
            return [], []
        back = self.returned[:count]
        self.returned = self.returned[count:]
        self.source.give_back([prompt_id for _, prompt_id in back])
        ids = self.source.pick(count, clock)
        places = [
            place if prompt_id == picked else None
            for (place, prompt_id), picked in zip(back, ids, strict=False)
        ]
        return ids, places + [None] * (len(ids) - len(places))

    def _give_back(self, visit: Visit, why: Literal["cut", "expired"]) -> None:
        """Note that a group will not train: its prompt is requested again first, as a new group in its place."""
        insort(self.returned, (visit.place, visit.prompt_id))
        self.counts.add(why)
        self.counts.add("reasked")
        self.counts.add("tokens_dropped", visit.tokens)

    def prompts_held(self) -> set[str]:
        """Prompts of open and ready groups, and those to be requested again: a batch should have none of them twice."""
        return {visit.prompt_id for visit in self.book.in_line()} | {
            prompt_id for _, prompt_id in self.returned
        }

    # Deciding

    def _decide(self, visit: Visit) -> None:
        group = visit.group  # its judged rollouts only
        if len(group.rollouts) < 2:
            self.counts.add("unjudged_groups")
            self.counts.acceptance.add(False)
            self._drop(group)
            return
        admission = self.admit(group)
        if admission == "more":
            self.book.wait(group.group_id)
            return
        self.counts.add("judged", len(group.rollouts))
        self.counts.add("right", sum(rollout.verdict == "right" for rollout in group.rollouts))
        self.counts.signal.add(group.spread > 0)
        self.counts.acceptance.add(admission == "keep")
        if admission == "keep":
            self.counts.add("accepted")
            self.book.keep(group.group_id)
        else:
            self._reject(group)

    def _reject(self, group: Group) -> None:
        self.counts.add("rejected_easy" if group.pass_rate > 0.5 else "rejected_hard")
        if self.starvation == "relax":
            self.book.set_aside(group.group_id)
        else:
            self._drop(group)

    def _drop(self, group: Group) -> None:
        self.counts.add("tokens_dropped", self.book.remove(group.group_id).tokens)

    def _release_spare(self, keep: int) -> None:
        """Drop all but the best `keep` rejected groups, which a batch could still take: it frees their traces."""
        for group in self.book.best_spare()[keep:]:
            self._drop(group)

    # Emitting

    def _take(self, groups: Sequence[Group], clock: Clock) -> Batch:
        for group in groups:
            visit = self.book.remove(group.group_id)
            self.counts.add("tokens_kept", group.tokens)
            self.counts.add("tokens_dropped", visit.tokens - group.tokens)  # its unjudged rollouts
        self.counts.add("trained", len(groups))
        self.counts.batch()
        self.ages = [clock.version - group.oldest_version for group in groups]
        self.dry = False
        # nothing more is decided before the update, which drops the rest
        self.decidable = 0 if clock.cut else None
        return Batch(groups=tuple(groups))

    def _starve(self, clock: Clock) -> list[Group]:
        """Apply the policy where no group is open and more requests would bring no result."""
        self.counts.add("starved")
        ready = self.book.first_ready(clock.groups)
        if self.starvation == "partial" and ready:
            return ready
        if self.starvation == "relax":
            oldest = clock.version - self.max_age
            spare = [group for group in self.book.best_spare() if group.oldest_version >= oldest]
            filled = ready + spare[: clock.groups - len(ready)]
            if len(filled) == clock.groups:
                self.counts.add("relaxed", len(filled) - len(ready))
                return sorted(filled, key=lambda group: self.book.place(group.group_id))
        # "partial" trains on fewer groups, but never on none.
        fewer = ', or set curriculum.starvation = "partial" to train on fewer'
        other = fewer if self.starvation == "raise" and ready else ""
        why = self.counts.why_starved(len(ready), clock.groups, self.dry, self.knob) + other
        kind = Mastered if self.counts.mastered else Starved
        raise kind(f"Step {clock.step}: {why}.")


def age_metrics(ages: Sequence[int]) -> dict[str, float]:
    """Mean and largest age, in versions, of the groups of the last batch."""
    return {
        "age_mean": sum(ages) / len(ages) if ages else 0.0,
        "age_max": float(max(ages, default=0)),
    }


class Uniform(Gate):
    """Plain groups: every prompt is requested once and trained on, whatever its pass rate.

    This is the baseline for all other curricula. Prompts that are always or never solved take part, cost their
    rollouts and, under a group baseline, have no gradient.
    """

    def admit(self, group: Group) -> Admission:
        return "keep"


# before any evidence, every second group is expected to be kept, with the weight of 2 groups
PRIOR, WEIGHT = 0.5, 2.0
LEAST = 1 / 8  # lowest acceptance assumed: never more than 8 open groups for one that is lacking


class Dapo(Gate):
    """DAPO's dynamic sampling (arXiv 2503.14476): a group trains only if 0 < pass rate < 1 over its judged rollouts.

    The published loop requests a fixed number of prompts per call (three times the batch in its scripts) until the
    batch is full, and discards the surplus. OURS: the surplus waits for the next batch, as far as `max_age` allows,
    else its prompts are requested again; and what the batch lacks is divided by the recent acceptance rate, so the
    surplus is small to begin with.
    """

    def admit(self, group: Group) -> Admission:
        return "keep" if 0.0 < group.pass_rate < 1.0 else "drop"

    def groups_to_ask(self, clock: Clock) -> int:
        acceptance = max(LEAST, self.counts.acceptance.value(PRIOR, WEIGHT))
        return ceil((clock.groups - self.book.ready) / acceptance) - self.book.open
