"""A gate stands over a source and says which groups train: the base class of plain groups, DAPO and the like.

It asks the source for prompts, keeps the book of groups, and emits a batch once enough of them were admitted.
A subclass overrides `admit`, and where it must `groups_to_ask`, `sizes` and `continuations`. Ages, cuts,
look-ahead, starvation, counters and state are the same for all and live here.

No response is left out or drawn again because it was long. Where rollouts run on over an update, every group is
decided in the end, and its age follows from when it was asked. Where an update cuts what runs (`Clock.cut`), the long
ones would be cut and the short ones stay: so nothing is asked ahead, only the first groups in line, which the batch
cannot do without, are decided and heard of by the source, and whatever is left at the update is let go.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import Any, Literal

from whet.curriculum.base import Source, smoothed
from whet.curriculum.groups import Counts, GroupBook, Visit
from whet.errors import Starved
from whet.types import Batch, Clock, Group, Phase, Report, Request, Rollout, Sampling

Admission = Literal["keep", "drop", "more"]
Starvation = Literal["raise", "relax", "partial"]


class Gate(ABC):
    needs: frozenset[str] = frozenset()
    phase: Phase = "train"
    """Of the first request of a group."""
    knob = "raise curriculum.rollouts"
    """What to do so that more groups are admitted, told when a batch starves."""

    def __init__(
        self,
        source: Source,
        *,
        sampling: Sampling,
        rollouts: int,
        max_age: int = 0,
        look_ahead: float = 1.0,
        starvation: Starvation = "raise",
        patience: int = 20,
    ):
        """`rollouts`: how many a group is first asked for; the other knobs as in `config.Curriculum`."""
        self.source = source
        self.sampling = sampling
        self.rollouts = rollouts
        self.max_age = max_age
        self.look_ahead = look_ahead
        self.starvation = starvation
        self.patience = patience
        self.book = GroupBook()
        self.counts = Counts()
        self.returned: list[tuple[int, str]] = []  # (place, prompt id) of what must be asked again, in ask order
        self.version = 0  # of the last emit
        self.inside: int | None = None  # so many groups, the first in line, are decided; None decides all
        self.ages: list[int] = []  # of the groups of the last batch
        self.dry = False  # the source had nothing more, and nothing is open

    # What makes a gate

    @abstractmethod
    def admit(self, group: Group) -> Admission:
        """All asked rollouts came, and two or more are judged: train on it, drop it, or ask for more first."""

    def groups_to_ask(self, clock: Clock) -> int:
        """New groups that the batch still lacks."""
        return clock.groups - self.book.ready - self.book.open

    def sizes(self, prompt_ids: Sequence[str]) -> list[int]:
        """How many rollouts each new group is first asked for; `rollouts` on average, since so many are free."""
        return [self.rollouts] * len(prompt_ids)

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
            requests.append(self.book.ask(prompt_id, n, self.sampling, self.phase, place))
        self.counts.add("asked", len(ids))
        self.counts.add("rollouts", sum(request.n for request in requests))
        self.dry = count > 0 and not ids and self.book.open == 0
        return requests

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            assert rollout.group_id < self.book.next_id, f"rollout {rollout.key} was never asked for"
            if rollout.group_id not in self.book:  # its group was cut before it came
                self.counts.add("tokens_dropped", rollout.length)
            elif rollout.finish == "cut":
                self.counts.add("tokens_dropped", rollout.length)
                self._give_back(self.book.remove(rollout.group_id), "cut")
            elif (visit := self.book.add(rollout)) is not None and self.inside is None:
                self._decide(visit)
        if self.inside is None:
            self.source.observe([r for r in rollouts if r.judged and r.finish != "cut"])
        else:
            self._settle()

    def emit(self, clock: Clock) -> Batch | None:
        self._turn(clock)
        for visit in self.book.expire(clock.version - self.max_age):
            self._give_back(visit, "expired")
        if self.book.ready >= clock.groups:
            groups = self.book.first_ready(clock.groups)
            return self._take(groups, clock) if len(groups) == clock.groups else None
        if self.book.open == 0 and (self.dry or self._budget(clock) <= 0):
            return self._take(self._starve(clock), clock)
        return None

    def updated(self, clock: Clock, report: Report) -> None:
        self._release_spare(0)

    def holds(self) -> set[int]:
        return self.book.holds()

    def metrics(self) -> dict[str, float]:
        return {
            **self.counts.metrics(),
            "curriculum/ready": float(self.book.ready),
            "curriculum/open": float(self.book.open),
            "curriculum/age_mean": sum(self.ages) / len(self.ages) if self.ages else 0.0,
            "curriculum/age_max": float(max(self.ages, default=0)),
            **self.source.metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "book": self.book.state_dict(),
            "source": self.source.state_dict(),
            "counts": self.counts.state_dict(),
            "returned": [list(pair) for pair in self.returned],
            "ages": list(self.ages),
            "dry": self.dry,
            "line": [self.version, self.inside],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.book.load_state_dict(state["book"])
        self.source.load_state_dict(state["source"])
        self.counts.load_state_dict(state["counts"])
        self.returned = [(place, prompt_id) for place, prompt_id in state["returned"]]
        self.ages = list(state["ages"])
        self.dry = state["dry"]
        self.version, self.inside = state.get("line", (0, None))

    # In line, where an update cuts what runs

    def _turn(self, clock: Clock) -> None:
        """Lets go what an update has outlived, finished or not, and says how many groups the batch wants."""
        if clock.cut and clock.version > self.version:
            for visit in list(self.book.in_line()):
                why: Literal["cut", "expired"] = "expired" if self.book.is_ready(visit.group_id) else "cut"
                self._give_back(self.book.remove(visit.group_id), why)
        self.version = clock.version
        self.inside = clock.groups if clock.cut else None

    def settle(self, groups: int) -> bool:
        """The batch wants so many groups, it turns out. True if that decided any."""
        if self.inside is None:
            return False
        self.inside = groups
        return self._settle()

    def _settle(self) -> bool:
        """The batch needs each of the first groups, or the verdict that it does not: none of them can be cut."""
        before, any_decided = 0, False
        for visit in list(self.book.in_line()) if self.inside else ():
            if before == self.inside:
                break
            if visit.complete and visit.settled < visit.asked:
                new = [rollout for index, rollout in sorted(visit.came.items()) if index >= visit.settled]
                visit.settled, any_decided = visit.asked, True
                self.source.observe([rollout for rollout in new if rollout.judged])
                self._decide(visit)
            before += visit.group_id in self.book
        return any_decided

    # Asking

    def _ahead(self, clock: Clock) -> int:
        """Groups to ask beyond the batch under stream: no more than can train before they are too old."""
        if clock.free is None or clock.cut:
            return 0
        return int(min(self.look_ahead, self.max_age) * clock.groups)

    def _room(self, clock: Clock, taken: int) -> int:
        """New groups to ask for now: what is wanted, within window, free capacity and patience.

        Under stream the look-ahead window is filled. Where there is none, as with max_age = 0, what the batch lacks is
        asked, which may be more than it has groups if some will be dropped; `look_ahead` bounds that, too.
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
        """Groups that may still be asked for this batch before it counts as starving."""
        return self.patience * clock.groups - self.counts.since("asked")

    def _pick(self, count: int, clock: Clock) -> tuple[list[str], list[int | None]]:
        """Prompts to ask, and the places in line of those that are asked again.

        The source gets back no more than is picked now, so that ask order holds among those that wait.
        """
        if count == 0:
            return [], []
        back, self.returned = self.returned[:count], self.returned[count:]
        self.source.give_back([prompt_id for _, prompt_id in back])
        ids = self.source.pick(count, clock)
        places = [place if prompt_id == picked else None for (place, prompt_id), picked in zip(back, ids, strict=False)]
        return ids, places + [None] * (len(ids) - len(places))

    def _give_back(self, visit: Visit, why: Literal["cut", "expired"]) -> None:
        """No verdict: the prompt is asked again, before any other, as a new group in the same place."""
        insort(self.returned, (visit.place, visit.prompt_id))
        self.counts.add(why)
        self.counts.add("reasked")
        self.counts.add("tokens_dropped", visit.tokens)

    def prompts_held(self) -> set[str]:
        """Those of open and ready groups, and those to be asked again: a batch should not have one twice."""
        return {visit.prompt_id for visit in self.book.in_line()} | {prompt_id for _, prompt_id in self.returned}

    # Deciding

    def _decide(self, visit: Visit) -> None:
        group = visit.group
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
        """A batch can take in at most `keep` rejected groups: the traces of all others are freed."""
        if self.book.spare > keep:
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
        self.inside = 0 if clock.cut else None  # what is left is for nobody to look at: the update lets it go
        return Batch(groups=tuple(groups))

    def _starve(self, clock: Clock) -> list[Group]:
        """Nothing is open and asking more is in vain: what the policy makes of it."""
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
        other = ', or set curriculum.starvation to "relax" or "partial"' if self.starvation == "raise" else ""
        raise Starved(
            f"Step {clock.step}: only {len(ready)} of the {clock.groups} groups of a batch are ready "
            f"{self.counts.why_starved(self.dry, self.knob)}{other}."
        )


# ---- tokens
#
# A token budget an update, after C3PO (Ring-lite, arXiv 2506.14731): a batch is as many groups as make up the budget.
#
# Long responses then make few groups and short ones many, and an update costs the same throughout. C3PO cuts the set of
# rollouts to exactly the budget; OURS keeps groups whole: in the order of first ask, up to the one that reaches it. The
# surplus stays for the next batch, as far as `max_age` allows. Wraps any gate, whose `groups` an update no longer
# count; to weigh every token alike, as C3PO does, set learn.aggregate = "batch_tokens".
#
# A group weighs 1 / (groups a batch has of late), not 1 / (groups of this batch): where long responses make a batch of
# few groups, each of those would weigh more than a short one among many. How many groups reach the budget is a stopping
# time, so with a weight fixed beforehand groups of any length count alike (Wald's equation: E[sum to G] = E[G] E[one]).


def groups_within(tokens: Sequence[int], budget: int) -> int | None:
    """How many of the groups, from the first on, reach the budget; None if all together do not.

    >>> groups_within([300, 500, 400, 100], 1000), groups_within([300, 500], 1000)
    (3, None)
    """
    return next((i + 1 for i, total in enumerate(accumulate(tokens)) if total >= budget), None)


class TokenBudget:
    def __init__(self, inner: Gate, *, tokens: int):
        assert tokens > 0, "a budget is at least one token"
        self.inner, self.needs = inner, inner.needs
        self.tokens = tokens
        self.mean: float | None = None
        """Tokens a trained group has of late."""
        self.count: float | None = None
        """Groups a batch has of late, before the next one is known."""
        self.last = (0, 0)  # groups and tokens of the last batch

    def plan(self, clock: Clock) -> list[Request]:
        while self.inner.settle(self._clock(clock).groups):  # what is decided may move the end of the batch
            pass
        return self.inner.plan(self._clock(clock))

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.inner.observe(rollouts)

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(self._clock(clock))
        if batch is None:
            return None
        tokens, groups = sum(group.tokens for group in batch.groups), len(batch.groups)
        weight = 1 / (self.count or groups)
        self.last = (groups, tokens)
        self.mean, self.count = smoothed(self.mean, tokens / groups), smoothed(self.count, groups)
        return replace(batch, groups=tuple(replace(group, weight=weight) for group in batch.groups))

    def updated(self, clock: Clock, report: Report) -> None:
        self.inner.updated(self._clock(clock), report)

    def holds(self) -> set[int]:
        return self.inner.holds()

    def _clock(self, clock: Clock) -> Clock:
        """With the groups of the next batch: known once the budget is reached, else by what a group has of late."""
        tokens = [group.tokens for group in self._in_line(clock)]
        if (count := groups_within(tokens, self.tokens)) is not None:
            return replace(clock, groups=count)
        mean = self.mean or (sum(tokens) / len(tokens) if tokens else 0.0)
        if not mean:
            return clock
        return replace(clock, groups=len(tokens) + max(1, ceil((self.tokens - sum(tokens)) / mean)))

    def _in_line(self, clock: Clock) -> list[Group]:
        """The ready groups with nothing open before them, without those too old by now."""
        oldest = clock.version - self.inner.max_age
        return [g for g in self.inner.book.first_ready(self.inner.book.ready) if g.oldest_version >= oldest]

    def metrics(self) -> dict[str, float]:
        """`groups` and `batch_tokens` are the last batch's."""
        groups, tokens = self.last
        return {
            **self.inner.metrics(),
            "curriculum/groups": float(groups),
            "curriculum/batch_tokens": float(tokens),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "mean": self.mean, "count": self.count, "last": list(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.mean, self.count = state["mean"], state.get("count")
        groups, tokens = state["last"]
        self.last = (groups, tokens)


# ---- uniform
#
# Plain groups: every prompt of the source is asked once and trained on, whatever its pass rate.
#
# The baseline every other curriculum is measured against. Prompts that are always or never solved take part,
# cost their rollouts and, under a group baseline, move nothing.


class Uniform(Gate):
    def admit(self, group: Group) -> Admission:
        return "keep"


# ---- dapo
#
# DAPO's dynamic sampling (arXiv 2503.14476): groups whose rollouts all agree are left out of the batch.
#
# Kept iff 0 < pass rate < 1 over the judged rollouts. Two things are OURS. The published loop asks for a fixed
# number of prompts a call (three times the batch in its scripts) until the batch is full and throws the surplus
# away; here the surplus waits for the next batch, as far as `max_age` allows, else its prompts are asked again.
# And we ask for what the batch lacks divided by the acceptance seen of late, so the surplus is small to begin with.


PRIOR, WEIGHT = 0.5, 2.0
"""Before anything is known every second group is expected to be kept, on the strength of two groups."""

LEAST = 1 / 8
"""A few bad groups must not set off a flood: never more than eight groups open for one that is lacking."""


class Dapo(Gate):
    def admit(self, group: Group) -> Admission:
        return "keep" if 0.0 < group.pass_rate < 1.0 else "drop"

    def groups_to_ask(self, clock: Clock) -> int:
        acceptance = max(LEAST, self.counts.acceptance.value(PRIOR, WEIGHT))
        return math.ceil((clock.groups - self.book.ready) / acceptance) - self.book.open
