"""The group book: which groups are open, which are ready, and in what order they were first asked for.

Shared by all gates. A group is born with its first request, may be asked for more under the same id (a
screened prompt that is continued), is complete when all asked rollouts have come, and then waits, is
ready, is spare, or is gone; a gate (`gate.py`) decides which. A prompt that is asked again, because a
weight update cut its group or the group grew too old, gets a new group in its old place in the order.
The book keeps no counters and knows no source: it never decides, and never asks on its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.types import Group, Phase, Request, Rollout, Sampling, rollout_from_json, rollout_to_json

# ---- counts
#
# What a gate counts: since the start, since the last batch, and as a share of late.
#
# The numbers behind "curriculum/..." metrics, the acceptance DAPO asks by, and the sentence a starving run
# ends with. Counting only; nothing here decides.


COUNTERS = (
    "asked",
    "rollouts",
    "accepted",
    "rejected_easy",
    "rejected_hard",
    "unjudged_groups",
    "cut",
    "expired",
    "reasked",
    "trained",
    "relaxed",
    "starved",
    "tokens_kept",
    "tokens_dropped",
    "judged",
    "right",
)
"""All count groups, but for `rollouts` (asked), `judged` and `right` (rollouts of decided groups), the tokens,
and `starved` (batches)."""

MEMORY = 0.9
"""What a batch leaves of the evidence before it."""


class Share:
    """How often something was so, of late: counts that fade by `MEMORY` with every batch.

    >>> share = Share()
    >>> for hit in (True, False, False):
    ...     share.add(hit)
    >>> round(share.value(), 4), share.value(prior=0.5, weight=2)
    (0.3333, 0.4)
    """

    def __init__(self, hits: float = 0.0, seen: float = 0.0):
        self.hits, self.seen = hits, seen

    def add(self, hit: bool) -> None:
        self.hits, self.seen = self.hits + hit, self.seen + 1

    def fade(self) -> None:
        self.hits, self.seen = self.hits * MEMORY, self.seen * MEMORY

    def value(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """As if `weight` more had been seen, with a share of `prior`."""
        seen = self.seen + weight
        return (self.hits + prior * weight) / seen if seen else prior


class Counts:
    """Totals, what they were at the last batch, and two shares.

    >>> counts = Counts()
    >>> counts.add("asked", 3)
    >>> counts.batch()
    >>> counts.add("asked")
    >>> counts.total["asked"], counts.since("asked")
    (4, 1)
    """

    def __init__(self) -> None:
        self.total = dict.fromkeys(COUNTERS, 0)
        self._mark = dict(self.total)
        self.acceptance = Share()
        """Of complete groups, those admitted."""
        self.signal = Share()
        """Of judged groups, those with right and wrong rollouts."""

    def add(self, name: str, by: int = 1) -> None:
        self.total[name] += by

    def since(self, name: str) -> int:
        """Since the last batch."""
        return self.total[name] - self._mark[name]

    def batch(self) -> None:
        """A batch was emitted."""
        self._mark = dict(self.total)
        self.acceptance.fade()
        self.signal.fade()

    def metrics(self) -> dict[str, float]:
        shares = {"acceptance": self.acceptance.value(), "signal_share": self.signal.value()}
        return {f"curriculum/{name}": float(value) for name, value in (self.total | shares).items()}

    def why_starved(self, dry: bool, knob: str = "raise curriculum.rollouts") -> str:
        """The counts of the batch in vain, and what to do: half of a sentence. `knob`: what makes a gate admit more."""
        easy, hard = self.since("rejected_easy"), self.since("rejected_hard")
        unjudged, judged = self.since("unjudged_groups"), self.since("judged")
        passed = f"mean pass rate {self.since('right') / judged:.2f}" if judged else "none judged"
        if dry:
            cure = "the source has no more prompts, so give it more or lower curriculum.groups"
        elif unjudged > easy + hard:
            cure = "see why the judge gives no verdict (judge.timeout_s), or raise curriculum.patience"
        else:
            prompts = "harder" if easy > hard else "easier"
            cure = f"take {prompts} prompts, {knob} or raise curriculum.patience"
        return (
            f"after {self.since('asked')} groups were asked ({hard} too hard, {easy} too easy, {unjudged} unjudged, "
            f"{self.since('cut')} cut; {passed}); {cure}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": dict(self.total),
            "mark": dict(self._mark),
            "acceptance": [self.acceptance.hits, self.acceptance.seen],
            "signal": [self.signal.hits, self.signal.seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self._mark = dict(state["total"]), dict(state["mark"])
        self.acceptance, self.signal = Share(*state["acceptance"]), Share(*state["signal"])


@dataclass(slots=True)
class Visit:
    """One visit of a prompt: how many rollouts were asked so far, and those that came, by index."""

    prompt_id: str
    group_id: int
    place: int
    """In the order of first ask: the id of the prompt's first group, kept when it is asked again."""
    asked: int = 0
    came: dict[int, Rollout] = field(default_factory=dict)
    untrained: int = 0
    """So many rollouts, the first ones, only helped to decide (a screening that is a gate alone)."""
    settled: int = 0
    """So many rollouts, the first ones, were decided on (`Gate.settle`)."""

    @property
    def complete(self) -> bool:
        return len(self.came) == self.asked

    @property
    def group(self) -> Group:
        """What a learner may see of it: the judged rollouts, by index."""
        judged = tuple(r for index, r in sorted(self.came.items()) if r.judged and index >= self.untrained)
        return Group(prompt_id=self.prompt_id, group_id=self.group_id, rollouts=judged)

    @property
    def tokens(self) -> int:
        return sum(rollout.length for rollout in self.came.values())


class GroupBook:
    """Groups by id, and in line: in the order of first ask.

    >>> book = GroupBook()
    >>> request = book.ask("a", 4, Sampling(max_tokens=8), "screen")
    >>> request.group_id, book.open, book.ready
    (0, 1, 0)
    """

    def __init__(self, next_id: int = 0):
        self.next_id = next_id
        """A stage that starts with a new book goes on counting here: an id names one group for a whole run."""
        self._visits: dict[int, Visit] = {}  # open and ready ones
        self._line: list[tuple[int, int]] = []  # their (place, group id), sorted
        self._waiting: dict[int, Group] = {}  # of those, complete ones that will be asked for more
        self.continued: set[int] = set()
        """Of open and ready groups, those that were asked for more."""
        self._ready: dict[int, int] = {}  # of those, ready ones: their oldest version
        self._spare: dict[int, Visit] = {}  # rejected, kept for a batch that starves
        self._oldest = 0  # no ready group is older; saves looking at all of them at every emit

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._visits

    def __len__(self) -> int:
        """Open and ready groups."""
        return len(self._visits)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def open(self) -> int:
        """Neither ready nor gone: rollouts are to come, or more will be asked."""
        return len(self._visits) - len(self._ready)

    def holds(self) -> set[int]:
        return self._visits.keys() | self._spare.keys()

    def ask(self, prompt_id: str, n: int, sampling: Sampling, phase: Phase, place: int | None = None) -> Request:
        """A new group: last in line, unless `place` is that of an earlier group which got no verdict."""
        visit = Visit(prompt_id, self.next_id, self.next_id if place is None else place)
        self._visits[visit.group_id] = visit
        insort(self._line, (visit.place, visit.group_id))
        self.next_id += 1
        return self._request(visit, n, sampling, phase)

    def ask_more(self, group_id: int, n: int, sampling: Sampling, phase: Phase, fresh: bool = False) -> Request:
        """More rollouts for a waiting group; it keeps its id and its place. `fresh`: only those from now on train."""
        del self._waiting[group_id]
        visit = self._visits[group_id]
        visit.untrained = visit.asked if fresh else visit.untrained
        self.continued.add(group_id)
        return self._request(visit, n, sampling, phase)

    def _request(self, visit: Visit, n: int, sampling: Sampling, phase: Phase) -> Request:
        assert n > 0, f"group {visit.group_id} is asked for {n} rollouts"
        first = visit.asked
        visit.asked += n
        return Request(
            prompt_id=visit.prompt_id, group_id=visit.group_id, first_index=first, n=n, sampling=sampling, phase=phase
        )

    def add(self, rollout: Rollout) -> Visit | None:
        """The rollout's group if it is complete now."""
        visit = self._visits[rollout.group_id]
        assert rollout.index < visit.asked, f"rollout {rollout.key} was never asked for"
        assert rollout.index not in visit.came, f"rollout {rollout.key} was delivered twice"
        visit.came[rollout.index] = rollout
        return visit if visit.complete else None

    def is_ready(self, group_id: int) -> bool:
        return group_id in self._ready

    def wait(self, group_id: int) -> None:
        """Complete, but more will be asked: open still."""
        self._waiting[group_id] = self._visits[group_id].group

    def waiting(self) -> list[Group]:
        """In ask order."""
        return sorted(self._waiting.values(), key=lambda group: self._visits[group.group_id].place)

    @property
    def waits(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def keep(self, group_id: int) -> None:
        """Ready to train."""
        version = self._visits[group_id].group.oldest_version
        self._oldest = min(self._oldest, version) if self._ready else version
        self._ready[group_id] = version

    def set_aside(self, group_id: int) -> None:
        """Rejected, but held: it stands in nobody's way, and is there when a batch starves."""
        self._spare[group_id] = self.remove(group_id)

    def remove(self, group_id: int) -> Visit:
        """Taken, dropped, cut or expired."""
        if group_id in self._spare:
            return self._spare.pop(group_id)
        self._waiting.pop(group_id, None)
        self.continued.discard(group_id)
        self._ready.pop(group_id, None)
        visit = self._visits.pop(group_id)
        del self._line[bisect_left(self._line, (visit.place, group_id))]
        return visit

    def first_ready(self, count: int) -> list[Group]:
        """Up to `count` ready groups with nothing open before them.

        Taking groups as they complete would prefer short responses; in ask order, who is long only waits.
        """
        groups: list[Group] = []
        for _, group_id in self._line:
            if len(groups) == count or group_id not in self._ready:
                break
            groups.append(self._visits[group_id].group)
        return groups

    def expire(self, version: int) -> list[Visit]:
        """Takes out the ready groups with a token of a policy before `version`."""
        if not self._ready or self._oldest >= version:
            return []
        old = [group_id for group_id, oldest in self._ready.items() if oldest < version]
        self._oldest = version
        return [self.remove(group_id) for group_id in old]

    def best_spare(self) -> list[Group]:
        """Spare groups, largest p (1 - p) first, then in ask order."""
        in_line = sorted(self._spare.values(), key=lambda visit: visit.place)
        return sorted((visit.group for visit in in_line), key=lambda group: -group.spread)

    def in_line(self) -> Iterator[Visit]:
        """Open and ready groups, in ask order."""
        return (self._visits[group_id] for _, group_id in self._line)

    def place(self, group_id: int) -> int:
        return (self._visits.get(group_id) or self._spare[group_id]).place

    @property
    def spare(self) -> int:
        return len(self._spare)

    def state_dict(self) -> dict[str, Any]:
        return {
            "next_id": self.next_id,
            "visits": [_visit_to_json(visit) for visit in self._visits.values()],
            "waiting": list(self._waiting),
            "continued": sorted(self.continued),
            "ready": list(self._ready),
            "spare": [_visit_to_json(visit) for visit in self._spare.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_id = state["next_id"]
        self._waiting, self._ready = {}, {}
        self._visits = _visits_from_json(state["visits"])
        self._line = sorted((visit.place, visit.group_id) for visit in self._visits.values())
        self._spare = _visits_from_json(state["spare"])
        self.continued = set(state.get("continued", ()))
        for group_id in state["waiting"]:
            self.wait(group_id)
        for group_id in state["ready"]:
            self.keep(group_id)


def _visit_to_json(visit: Visit) -> dict[str, Any]:
    return {
        "prompt_id": visit.prompt_id,
        "group_id": visit.group_id,
        "place": visit.place,
        "asked": visit.asked,
        "came": [rollout_to_json(rollout) for rollout in visit.came.values()],
        "untrained": visit.untrained,
        "settled": visit.settled,
    }


def _visits_from_json(rows: Sequence[Mapping[str, Any]]) -> dict[int, Visit]:
    visits = {}
    for row in rows:
        came = {rollout.index: rollout for rollout in map(rollout_from_json, row["came"])}
        visits[row["group_id"]] = Visit(
            row["prompt_id"],
            row["group_id"],
            row["place"],
            row["asked"],
            came,
            row.get("untrained", 0),
            row.get("settled", 0),
        )
    return visits
