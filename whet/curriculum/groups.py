"""The group book and the counters, which all gates share (`gate.py` is the only caller).

The book records the groups in the order of their first request, and decides nothing. A group is open, ready or spare;
an open group whose rollouts have all come, and that will be asked for more, is waiting. A group may be asked for more
rollouts under the same id (a screened prompt that is continued), and is complete when all requested rollouts came. A
prompt that is requested again, because an update cut its group or the group grew too old, gets a new group in its old
place in the order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from whet.curriculum.base import RECORDS, Saved, named
from whet.types import Group, Phase, Request, Rollout, Sampling

# ---- counts

# All count groups, except `rollouts` (requested), `judged` and `right` (rollouts of decided groups), the tokens, and
# `starved` (batches).
COUNTERS = (
    *(
        "asked",
        "rollouts",
        "accepted",
        "rejected_easy",
        "rejected_hard",
        "unjudged_groups",
        "cut",
        "expired",
    ),
    *(
        "reasked",
        "trained",
        "relaxed",
        "starved",
        "tokens_kept",
        "tokens_dropped",
        "judged",
        "right",
    ),
)
# of the groups that a batch turned down, to say of all of them that they are too easy or too hard
NEARLY_ALL = 0.8
MEMORY = 0.9  # share of the earlier evidence that remains after a batch


class Share(Saved):
    """How often something was true recently: counts that fade by `MEMORY` with every batch."""

    state_names = ("hits", "seen")

    def __init__(self) -> None:
        self.hits = self.seen = 0.0

    def add(self, hit: bool) -> None:
        self.hits, self.seen = self.hits + hit, self.seen + 1

    def fade(self) -> None:
        self.hits, self.seen = self.hits * MEMORY, self.seen * MEMORY

    def value(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """The share, as if `weight` more cases with a share of `prior` had been seen."""
        seen = self.seen + weight
        return (self.hits + prior * weight) / seen if seen else prior


class Counts(Saved):
    """Totals, their values at the last batch, and two recent shares."""

    state_names = ("total", "_mark", "acceptance", "signal")

    def __init__(self) -> None:
        self.total = dict.fromkeys(COUNTERS, 0)
        self._mark = dict(self.total)  # the totals at the last batch
        self.acceptance = Share()  # admitted groups among complete ones
        self.signal = Share()  # groups with right and wrong rollouts among judged ones

    def add(self, name: str, by: int = 1) -> None:
        self.total[name] += by

    def since(self, name: str) -> int:
        """The count since the last batch."""
        return self.total[name] - self._mark[name]

    def batch(self) -> None:
        """Start the counts of the next batch."""
        self._mark = dict(self.total)
        self.acceptance.fade()
        self.signal.fade()

    def metrics(self) -> dict[str, float]:
        return named(
            {
                **self.total,
                "acceptance": self.acceptance.value(),
                "signal_share": self.signal.value(),
            }
        )

    @property
    def mastered(self) -> bool:
        """Whether a batch is not full because prompts are too easy."""
        easy = self.since("rejected_easy")
        others = self.since("rejected_hard") + self.since("unjudged_groups")
        return easy > 0 and easy >= NEARLY_ALL * (easy + others)

    def why_starved(self, ready: int, wanted: int, dry: bool, knob: str) -> str:
        """Say what was tried, what was useful of it, and what to do; `knob` makes a gate admit more."""
        easy = self.since("rejected_easy")
        hard = self.since("rejected_hard")
        unjudged = self.since("unjudged_groups")
        judged = self.since("judged")
        passed = f"mean pass rate {self.since('right') / judged:.2f}" if judged else "none judged"
        cure = f"take {'harder' if easy > hard else 'easier'} prompts, {knob} or raise curriculum.patience"
        if self.mastered:
            why = f"almost all prompts are solved ({passed})"
        elif dry:
            why = f"the source has no more prompts ({passed})"
            cure = "give it more, or lower curriculum.groups"
        elif unjudged > easy + hard:
            why = f"most groups have no verdict ({passed})"
            cure = "see why the judge gives none (judge.timeout_s), or raise curriculum.patience"
        elif hard >= NEARLY_ALL * (easy + hard + unjudged):
            why = f"almost no prompt is ever solved ({passed})"
        else:
            why = f"too few prompts are sometimes solved and sometimes not ({passed})"
        found = f"only {ready}" if ready else "none"
        tried = f"{self.since('asked')} were tried and {found} found useful, {wanted} are needed"
        turned_down = (
            f"{hard} too hard, {easy} too easy, {unjudged} unjudged, {self.since('cut')} cut"
        )
        return f"{why}: {tried} ({turned_down}); {cure}"


# ---- groups


@dataclass(slots=True)
class Visit:
    """One visit of a prompt, which is one group: what was requested so far, and what came, by index."""

    prompt_id: str
    group_id: int
    # in the order of first request: the id of the prompt's first group, kept when it is requested
    # again
    place: int
    asked: int = 0
    came: dict[int, Rollout] = field(default_factory=dict)
    # the number of first rollouts that only help to decide (a screening that does not train)
    untrained: int = 0
    settled: int = 0  # the number of first rollouts that were already decided on (`Gate._settle`)

    @property
    def complete(self) -> bool:
        return len(self.came) == self.asked

    @property
    def group(self) -> Group:
        """The part that a learner may see: the judged rollouts, by index."""
        came = [self.came[index] for index in sorted(self.came) if index >= self.untrained]
        judged = tuple([rollout for rollout in came if rollout.verdict != "unjudged"])
        return Group(prompt_id=self.prompt_id, group_id=self.group_id, rollouts=judged)

    @property
    def tokens(self) -> int:
        return sum(rollout.length for rollout in self.came.values())


RECORDS["Visit"] = Visit


class GroupBook(Saved):
    """Groups by id, and in line: in the order of their first request."""

    state_names = (
        "next_id",
        "_visits",
        "_line",
        "_waiting",
        "continued",
        "_ready",
        "_spare",
        "_oldest",
    )

    def __init__(self, next_id: int = 0):
        # a stage that starts with a new book goes on counting: ids are unique within a run
        self.next_id = next_id
        self._visits: dict[int, Visit] = {}  # open and ready groups
        self._line: list[tuple[int, int]] = []  # their (place, group id), sorted
        # those among them that are complete and will be asked for more
        self._waiting: set[int] = set()
        self.continued: set[int] = set()  # those among them that were asked for more
        # those among them that are ready, with their oldest version
        self._ready: dict[int, int] = {}
        self._spare: dict[int, Visit] = {}  # rejected groups, kept for a batch that starves
        self._oldest = 0  # no ready group is older; avoids a scan of all of them at every emit

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._visits

    def __len__(self) -> int:
        """The number of open and ready groups."""
        return len(self._visits)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def open(self) -> int:
        """The number of groups with rollouts still to come, or to be requested."""
        return len(self._visits) - len(self._ready)

    @property
    def certain(self) -> int:
        """The number of groups that wait, were continued or are ready: those that will train if nothing goes wrong."""
        return len(self._waiting) + len(self.continued | self._ready.keys())

    def holds(self) -> set[int]:
        return self._visits.keys() | self._spare.keys()

    def ask(
        self, prompt_id: str, n: int, sampling: Sampling, phase: Phase, place: int | None = None
    ) -> Request:
        """Open a new group: last in line, or at the `place` of an earlier group that will not train."""
        visit = Visit(prompt_id, self.next_id, self.next_id if place is None else place)
        self._visits[visit.group_id] = visit
        insort(self._line, (visit.place, visit.group_id))
        self.next_id += 1
        return self._request(visit, n, sampling, phase)

    def ask_more(
        self, group_id: int, n: int, sampling: Sampling, phase: Phase, fresh: bool = False
    ) -> Request:
        """Ask a waiting group for more rollouts; with `fresh`, only those from now on train."""
        self._waiting.remove(group_id)
        visit = self._visits[group_id]
        visit.untrained = visit.asked if fresh else visit.untrained
        self.continued.add(group_id)
        return self._request(visit, n, sampling, phase)

    def _request(self, visit: Visit, n: int, sampling: Sampling, phase: Phase) -> Request:
        assert n > 0, f"group {visit.group_id} is asked for {n} rollouts"
        first = visit.asked
        visit.asked = visit.asked + n
        return Request(
            prompt_id=visit.prompt_id,
            group_id=visit.group_id,
            first_index=first,
            n=n,
            sampling=sampling,
            phase=phase,
        )

    def add(self, rollout: Rollout) -> Visit | None:
        """Enter a rollout; return its group if that is complete now."""
        visit = self._visits[rollout.group_id]
        assert rollout.index < visit.asked, f"rollout {rollout.key} was never asked for"
        assert rollout.index not in visit.came, f"rollout {rollout.key} was delivered twice"
        visit.came[rollout.index] = rollout
        return visit if visit.complete else None

    def is_ready(self, group_id: int) -> bool:
        return group_id in self._ready

    def wait(self, group_id: int) -> None:
        """Mark a complete group as one that will be asked for more."""
        self._waiting.add(group_id)

    def waiting_ids(self) -> set[int]:
        return set(self._waiting)

    def waiting(self) -> list[Group]:
        """The waiting groups, in line."""
        in_line = sorted(
            (self._visits[group_id] for group_id in self._waiting), key=lambda visit: visit.place
        )
        return [visit.group for visit in in_line]

    def keep(self, group_id: int) -> None:
        """Mark a group as ready to train."""
        version = self._visits[group_id].group.oldest_version
        self._oldest = min(self._oldest, version) if self._ready else version
        self._ready[group_id] = version

    def set_aside(self, group_id: int) -> None:
        """Keep a rejected group for a batch that starves; it leaves the line."""
        self._spare[group_id] = self.remove(group_id)

    def remove(self, group_id: int) -> Visit:
        """Take a group out of the book: it was trained, dropped, cut, or it expired."""
        if group_id in self._spare:
            return self._spare.pop(group_id)
        self._waiting.discard(group_id)
        self.continued.discard(group_id)
        self._ready.pop(group_id, None)
        visit = self._visits.pop(group_id)
        del self._line[bisect_left(self._line, (visit.place, group_id))]
        return visit

    def first_ready(self, count: int) -> list[Group]:
        """Return up to `count` ready groups with no open group before them. Taking groups as they complete would prefer
        short responses; in line, a long one only makes the others wait."""
        groups: list[Group] = []
        for _, group_id in self._line:
            if len(groups) == count or group_id not in self._ready:
                break
            groups.append(self._visits[group_id].group)
        return groups

    def expire(self, version: int) -> list[Visit]:
        """Remove and return the ready groups with a token of a policy before `version`."""
        if not self._ready or self._oldest >= version:
            return []
        old = [group_id for group_id, oldest in self._ready.items() if oldest < version]
        self._oldest = version
        return [self.remove(group_id) for group_id in old]

    def best_spare(self) -> list[Group]:
        """The spare groups, those with the largest p (1 - p) first, then in line."""
        in_line = sorted(self._spare.values(), key=lambda visit: visit.place)
        return sorted((visit.group for visit in in_line), key=lambda group: -group.spread)

    def in_line(self) -> Iterator[Visit]:
        """Open and ready groups, in line."""
        return (self._visits[group_id] for _, group_id in self._line)

    def place(self, group_id: int) -> int:
        return (self._visits.get(group_id) or self._spare[group_id]).place
