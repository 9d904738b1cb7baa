"""What can be seen of a curriculum from outside, and what the contract says of it.

`contract.py` tells the ledger of every call; the ledger knows each group's fate (open, trained, dropped, returned)
and raises an AssertionError that names the broken line. It never looks inside a curriculum.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.curriculum.base import Curriculum
from whet.types import Batch, Clock, Group, Phase, Request, Rollout

LINES = {
    1: "same seed and verdicts, same plans, also across save and load",
    2: "a rollout is trained at most once, a prompt of an epoch gets one verdict",
    3: "rollouts of a group may come in any order, over several calls and versions",
    4: "integer budgets are exact",
    5: "starvation is a policy, never an endless loop, never silent",
    6: "the cost of an update does not grow with the number of prompts",
    7: "no traces",
    8: "no response is left out or drawn again because it was long",
}


def require(line: int, holds: bool, detail: str) -> None:
    if not holds:
        raise AssertionError(f"Contract line {line} ({LINES[line]}): {detail}")


@dataclass
class LedgerEntry:
    """A group, from outside."""

    prompt_id: str
    position: int
    """Its place in the order of first ask; a prompt that is asked again keeps it."""
    asked: int = 0
    came: dict[int, Rollout] = field(default_factory=dict)
    fate: Literal["open", "trained", "dropped", "returned"] = "open"

    @property
    def complete(self) -> bool:
        return len(self.came) == self.asked


class Ledger:
    def __init__(
        self,
        ids: Sequence[str],
        *,
        epochs: bool = True,
        rollouts: int | None = None,
        max_age: int | None = None,
        trains: Phase | None = None,
        parts: Sequence[str] = ("",),
    ):
        """As in `check_contract`; `trains`: a group that has rollouts of this phase trains on them alone."""
        self.parts = parts
        self.ids = ids
        self.epochs = epochs
        self.rollouts = rollouts
        self.max_age = max_age
        self.trains = trains
        self.entries: dict[int, LedgerEntry] = {}
        self.pending: list[list[tuple[int, str]]] = [[] for _ in parts]  # returned, in ask order, not yet asked again
        self.visits: Counter[str] = Counter()  # without those that make up for a return
        self.reached: Counter[int] = Counter()  # prompts with so many visits or more
        self.last_trained = [-1] * len(parts)
        self.stages = [0.0] * len(parts)
        self.starved = 0.0  # at the last batch
        self._held: set[int] = set()
        self._metrics: dict[str, float] = {}

    def planned(self, requests: Sequence[Request], clock: Clock) -> None:
        self._check_capacity(requests, clock)
        for part, pending in enumerate(self.pending):
            self._check_order([r for r in requests if self._part(r.group_id) == part], pending)

    def _part(self, group_id: int) -> int:
        return group_id % len(self.parts)

    def _check_order(self, requests: Sequence[Request], pending: list[tuple[int, str]]) -> None:
        fresh = [r for r in requests if r.first_index == 0 and r.group_id not in self.entries]
        again = pending[: len(fresh)]
        del pending[: len(fresh)]
        due, asked = [prompt_id for _, prompt_id in again], [request.prompt_id for request in fresh]
        require(2, asked[: len(due)] == due, f"{due} got no verdict and must be asked first, but {asked} are asked")
        self._check_epoch(asked[len(due) :])
        for request, (position, _) in zip(fresh, again, strict=False):
            self.entries[request.group_id] = LedgerEntry(request.prompt_id, position)
        for request in requests:
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        group_id, n, first = request.group_id, request.n, request.first_index
        entry = self.entries.setdefault(group_id, LedgerEntry(request.prompt_id, len(self.entries)))
        require(4, type(n) is int and n > 0, f"group {group_id} is asked for {n!r} rollouts")
        require(2, entry.fate == "open", f"more is asked for group {group_id}, which was {entry.fate}")
        require(2, entry.prompt_id == request.prompt_id, f"group {group_id} changed its prompt")
        require(4, first == entry.asked, f"group {group_id} goes on at {first}, not {entry.asked}")
        entry.asked += n

    def _check_capacity(self, requests: Sequence[Request], clock: Clock) -> None:
        """More than is free only as a single group while nothing is open: else a large group never starts.

        So for each part: else one that fills the engine keeps out another.
        """
        if clock.free is None:
            return
        running = {self._part(g) for g, entry in self.entries.items() if entry.fate == "open" and not entry.complete}
        count = Counter(self._part(request.group_id) for request in requests)
        alone = {part for part in count if count[part] == 1 and part not in running}
        asked = sum(request.n for request in requests)
        bound = asked - sum(request.n for request in requests if self._part(request.group_id) in alone)
        require(
            4,
            asked <= clock.free or (len(alone) > 0 and bound <= clock.free),
            f"{asked} rollouts are asked where {clock.free} are free",
        )

    def _check_epoch(self, prompt_ids: Sequence[str]) -> None:
        for prompt_id in prompt_ids:
            self.visits[prompt_id] += 1
            epoch = self.visits[prompt_id]
            self.reached[epoch] += 1
            early = self.epochs and epoch > 1 and self.reached[epoch - 1] < len(self.ids)
            require(2, not early, f"{prompt_id} has its visit {epoch} before every prompt had {epoch - 1}")

    def observed(self, rollouts: Sequence[Rollout], curriculum: Curriculum) -> None:
        for rollout in rollouts:
            entry = self.entries[rollout.group_id]
            entry.came[rollout.index] = rollout
            if rollout.finish == "cut" and entry.fate == "open":
                self._return(rollout.group_id)
        self._drop_gone(curriculum)

    def before_emit(self, curriculum: Curriculum) -> None:
        self._held, self._metrics = curriculum.holds(), curriculum.metrics()
        self._drop_gone(curriculum)

    def emitted(self, batch: Batch | None, clock: Clock, curriculum: Curriculum) -> None:
        groups = batch.groups if batch else ()
        for group in groups:
            self._check_group(group, clock)
        if batch is not None:
            wanted = int(curriculum.metrics().get("curriculum/groups", clock.groups))  # where it has a say itself
            starved = curriculum.metrics().get("curriculum/starved", 0)
            self._check_batch(batch, wanted, starved=starved > self.starved)
            self.starved = starved
        gone = self._held - curriculum.holds() - {group.group_id for group in groups}
        expired = self._rise(curriculum, "reasked")
        require(
            2, expired == len(gone), f"{len(gone)} groups went unseen at an emit, {expired:.0f} were counted as reasked"
        )
        for group_id in sorted(gone, key=lambda group_id: self.entries[group_id].position):
            self._return(group_id)

    def _check_group(self, group: Group, clock: Clock) -> None:
        group_id = group.group_id
        require(2, group_id in self.entries, f"group {group_id} is trained but was never asked for")
        entry = self.entries[group_id]
        require(2, entry.fate == "open", f"group {group_id} is trained but was {entry.fate}")
        entry.fate = "trained"
        require(3, entry.complete, f"group {group_id} is trained with {len(entry.came)} of {entry.asked} rollouts")
        trained = [(r.key, r.verdict, r.length) for r in group.rollouts]
        came = [r for _, r in sorted(entry.came.items())]
        came = [r for r in came if r.phase == self.trains] or came
        judged = [(r.key, r.verdict, r.length) for r in came if r.judged]
        require(
            3, sorted(trained) == judged, f"group {group_id} trains on {trained}, but its judged rollouts are {judged}"
        )
        require(2, len(judged) >= 2, f"group {group_id} is trained with {len(judged)} judged rollouts")
        age = clock.version - group.oldest_version
        require(3, self.max_age is None or age <= self.max_age, f"group {group_id} is {age} versions old")

    def _check_batch(self, batch: Batch, wanted: int, starved: bool) -> None:
        require(5, len(batch.groups) > 0, "a batch without groups")
        for part in range(len(self.parts)):
            self._check_line([g.group_id for g in batch.groups if self._part(g.group_id) == part], part)
        if not starved:
            entries = [self.entries[group.group_id] for group in batch.groups]
            count, asked = len(entries), sum(entry.asked for entry in entries)
            require(5, count == wanted, f"a batch of {count} groups instead of {wanted}, not counted as starved")
            exact = self.rollouts is None or asked == self.rollouts * wanted
            require(4, exact, f"{asked} rollouts were asked for a batch of {wanted} times {self.rollouts}")

    def _check_line(self, group_ids: Sequence[int], part: int) -> None:
        if not group_ids:
            return
        positions = [self.entries[group_id].position for group_id in group_ids]
        require(3, positions == sorted(positions), "the groups of a batch are not in the order of first ask")
        late = [
            group_id
            for group_id, entry in self.entries.items()
            if entry.position < positions[-1] and entry.fate == "open" and not entry.complete
            if self._part(group_id) == part
        ]
        require(3, not late, f"a batch overtakes the groups {late}, which were asked before and are not complete")
        self.last_trained[part] = positions[-1]

    def updated(self, curriculum: Curriculum) -> None:
        self._drop_gone(curriculum)
        for part, name in enumerate(self.parts):
            stage = curriculum.metrics().get(f"curriculum/{name}/stage" if name else "curriculum/stage", 0)
            if stage != self.stages[part]:
                self.stages[part] = stage
                self.pending[part].clear()  # the next stage has prompts of its own
        left = [g for g in curriculum.holds() if self.entries[g].position < self.last_trained[self._part(g)]]
        require(2, not left, f"the groups {left} were asked before a trained one and are neither trained nor dropped")

    def close(self, curriculum: Curriculum) -> None:
        """Nothing got lost without being counted."""
        self._drop_gone(curriculum)
        metrics = curriculum.metrics()
        fates = Counter(entry.fate for entry in self.entries.values())
        require(
            2,
            metrics.get("curriculum/reasked") == fates["returned"],
            f"{fates['returned']} groups are to be asked again, reasked says {metrics.get('curriculum/reasked')}",
        )
        counted = sum(
            metrics.get(f"curriculum/{name}", 0)
            for name in ("rejected_easy", "rejected_hard", "unjudged_groups", "border", "probed")
        )
        spare = len(curriculum.holds()) + metrics.get("curriculum/relaxed", 0)
        exact = fates["dropped"] <= counted <= fates["dropped"] + spare
        require(2, exact, f"{fates['dropped']} groups were dropped, rejected and unjudged count {counted:.0f}")

    def _drop_gone(self, curriculum: Curriculum) -> None:
        """Who is held no more, and was not taken, is dropped; who was decided must not be held."""
        held = curriculum.holds()
        for group_id, entry in self.entries.items():
            if entry.fate == "open" and group_id not in held:
                entry.fate = "dropped"
            require(2, entry.fate == "open" or group_id not in held, f"group {group_id} is held but was {entry.fate}")

    def _return(self, group_id: int) -> None:
        entry = self.entries[group_id]
        entry.fate = "returned"
        insort(self.pending[self._part(group_id)], (entry.position, entry.prompt_id))

    def _rise(self, curriculum: Curriculum, name: str) -> float:
        return curriculum.metrics().get(f"curriculum/{name}", 0) - self._metrics.get(f"curriculum/{name}", 0)
