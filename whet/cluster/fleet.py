"""An engine made of members: requests are divided among processes, each of which decodes with a `LocalEngine`.

The loop and the evaluation use it as any other engine. A request goes to the member with the fewest rollouts under way,
or to the one that has the group already. Rollouts come in the order in which they are written; the judge puts them in
the order of their requests, so under barrier a run is the same for every number of members. What a lost member had is
asked again: tokens depend on key and weights alone, so they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.cluster.crew import Crew
from whet.cluster.states import divide_state, merge_states
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout, sampling_from_json

LOOK_S = 0.05  # seconds after which `early` is called though nothing has come
Place = tuple[int | None, int, int]  # ticket, group and index: one rollout that was asked for

# Statistics that are means, with what they are weighted by; the others are sums.
MEANS = {
    "rollout/batch_mean": "rollout/steps",
    "rollout/occupied": "rollout/steps",
    "draft/accept_length": "rollout/steps",
    "rollout/tail_share": "rollout/seconds",
    "draft/share_": "rollout/seconds",
}


class Fleet:
    can = LocalEngine.can

    def __init__(self, crew: Crew, encode: Callable[[str], Sequence[int]], *, slots: int, mode: str) -> None:
        """slots: of each member."""
        self.crew, self.encode, self.slots, self.mode = crew, encode, slots, mode
        self.done: list[Rollout] = []
        self._open: dict[Place, tuple[int, Request]] = {}  # member, and a request for this rollout alone
        self._load = [0] * crew.size
        self._tickets: dict[int, dict[tuple[int, int], Rollout]] = {}
        self._ticket = 0
        crew.deliver, crew.mended = self._deliver, self._ask_again

    # ---- the protocol

    def submit(self, requests: Sequence[Request]) -> None:
        self._send(None, requests)

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        shown = 0
        self.crew.listen(0.0, self._owing())
        while True:
            over = not self._waited(None) or (self.mode == "stream" and bool(self.done))
            if early is not None:
                early(self.done[shown:])
                shown = len(self.done)
            if over:
                done, self.done = self.done, []
                return done
            self.crew.listen(LOOK_S, self._owing())

    def generate(self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None) -> list[Rollout]:
        self._ticket += 1
        found = self._tickets[self._ticket] = {}
        wanted = [(r.group_id, index) for r in requests for index in range(r.first_index, r.first_index + r.n)]
        self._send(self._ticket, requests)
        while (before := len(found)) < len(wanted):
            self.crew.listen(1.0, self._owing())
            if on_progress is not None and len(found) > before:
                on_progress(len(found))
        del self._tickets[self._ticket]
        return [found[key] for key in wanted]

    @property
    def idle(self) -> bool:
        return not self._open and not self.done

    @property
    def free(self) -> int | None:
        return None if self.mode == "barrier" else sum(max(0, self.slots - self._load[n]) for n in self.crew.present)

    def update(self, version: int) -> None:
        """Tell all members, and compare what they hold."""
        self.crew.version = version
        answers = self.crew.refresh(version)
        self.crew.compare([sums for _, sums in answers], f"after update {version}")
        self.crew.restarts = 0

    def release(self) -> None:
        self.crew.call("release")

    def take_back(self) -> None:
        self.crew.call("take_back")

    def stats(self) -> dict[str, float]:
        return merge_stats(self.crew.call("stats"))

    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for notes in self.crew.call("notes") for note in notes))

    def state_dict(self) -> dict[str, Any]:
        states = self.crew.call("state_dict")  # what has come before each answer is in `done`
        return merge_states(states, self.done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.idle, "state is loaded into an engine that has not begun"
        self.crew.version = int(state["version"])
        there = list(self.crew.present)
        states = dict(zip(there, divide_state(state, len(there)), strict=True))
        given = {
            number: (own, {row["prompt_id"]: self.encode(row["prompt_id"]) for row in own["flights"]})
            for number, own in states.items()
        }
        for number, own in states.items():
            for row in (*own["flights"], *own["done"]):
                named = {name: row[name] for name in ("prompt_id", "group_id", "phase")}
                request = Request(**named, first_index=row["index"], n=1, sampling=sampling_from_json(row["sampling"]))
                self._open[None, request.group_id, request.first_index] = (number, request)
                self._load[number] += 1
        self.crew.call_each("load_state", given, again=False)

    def close(self) -> None:
        self.crew.close()

    # ---- requests, and what becomes of them

    def _send(self, ticket: int | None, requests: Iterable[Request]) -> None:
        self.crew.prepare()
        shares: dict[int, list[Request]] = {}
        homes = {place[:2]: number for place, (number, _) in self._open.items()}
        for request in requests:
            group = (ticket, request.group_id)
            number = homes.setdefault(group, min(self.crew.present, key=lambda n: (self._load[n], n)))
            shares.setdefault(number, []).append(request)
            self._load[number] += request.n
            for index in range(request.first_index, request.first_index + request.n):
                self._open[*group, index] = (number, replace(request, first_index=index, n=1))
        for number, share in shares.items():
            self.crew.tell(number, "ask", ticket, share, {r.prompt_id: self.encode(r.prompt_id) for r in share})

    def _deliver(self, number: int, found: Sequence[tuple[int | None, Rollout]]) -> None:
        for ticket, rollout in found:
            if self._open.pop((ticket, *rollout.key), None) is None:
                continue  # of a `generate` that an interrupt ended
            self._load[number] -= 1
            if ticket is None:
                self.done.append(rollout)
            elif ticket in self._tickets:
                self._tickets[ticket][rollout.key] = rollout

    def _ask_again(self, numbers: set[int]) -> None:
        lost = [(place, request) for place, (number, request) in self._open.items() if number in numbers]
        for place, _ in lost:
            self._load[self._open.pop(place)[0]] -= 1
        for ticket in dict.fromkeys(place[0] for place, _ in lost):
            self._send(ticket, [request for place, request in lost if place[0] == ticket])

    def _waited(self, ticket: int | None) -> bool:
        return any(place[0] == ticket for place in self._open)

    def _owing(self) -> list[int]:
        return [number for number, load in enumerate(self._load) if load]


def merge_stats(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """
    >>> one = {"rollout/steps": 1.0, "rollout/batch_mean": 4.0, "rollout/seconds": 1.0, "rollout/tail_share": 0.0}
    >>> two = {"rollout/steps": 3.0, "rollout/batch_mean": 8.0, "rollout/seconds": 1.0, "rollout/tail_share": 0.5}
    >>> merge_stats([one, two])
    {'rollout/steps': 4.0, 'rollout/batch_mean': 7.0, 'rollout/seconds': 2.0, 'rollout/tail_share': 0.25}
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for own in stats for name in own):
        by = next((weight for start, weight in MEANS.items() if name.startswith(start)), None)
        pairs = [(own.get(name, 0.0), own.get(by, 0.0) if by else 1.0) for own in stats]
        total = sum(value * weight for value, weight in pairs)
        merged[name] = total / (sum(weight for _, weight in pairs) or 1.0) if by else total
    return merged
