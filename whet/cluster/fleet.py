"""An engine and a learner made of members. The loop uses them as any others.

The engine: requests are divided among processes, each of which decodes with an engine of its own. A request goes to
the member with the fewest rollouts under way, or to the one that has the group already. Rollouts come in the order in
which they are written; the judge puts them in the order of their requests, so under barrier a run is the same for every
number of members. What a lost member had is asked again: with keyed noise tokens depend on key and weights alone, so
they are the same.

The learner: every member makes all samples of a batch, runs its share of them, and takes the same step. The batch goes
to all with its tokens; gradients are added up among them, so weights are never sent. A step in which a member dies is
taken again by all who did not end it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.cluster.channel import Bundle, emptied
from whet.cluster.crew import Crew
from whet.learn.base import Lesson, spread
from whet.learn.checkpoint import Checkpoint
from whet.rollout.base import empty_trace, join_traces, split_traces
from whet.types import (
    Batch,
    Key,
    Report,
    Request,
    Rollout,
    Trace,
    rollout_to_json,
    sampling_from_json,
)

if TYPE_CHECKING:
    from whet.draft.training import SpotDrafter

AHEAD = 4  # lessons that are sent before the first is answered
LOOK_S = 0.05  # seconds after which `early` is called though nothing has come
Place = tuple[int | None, int, int]  # ticket, group and index: one rollout that was asked for
State = Mapping[str, Any]
Row = tuple[dict[str, Any], Trace]  # a flight or a finished rollout, and its tokens so far

# Statistics that are means, with what they are weighted by; the others are sums.
MEANS = {
    "rollout/batch_mean": "rollout/steps",
    "rollout/occupied": "rollout/steps",
    "draft/accept_length": "rollout/steps",
    "rollout/tail_share": "rollout/seconds",
    "draft/share_": "rollout/seconds",
}


class Fleet:
    def __init__(
        self, crew: Crew, encode: Callable[[str], Sequence[int]], *, slots: int, mode: str
    ) -> None:
        """slots: of each member."""
        self.crew = crew
        self.encode = encode
        self.slots = slots
        self.mode = mode
        self.done: list[Rollout] = []
        self._open: dict[Place, tuple[int, Request]] = {}  # member, and what asked for it
        self._load = [0] * crew.size
        self.can: frozenset[str] = crew.call("can")[0]
        self._tickets: dict[int, dict[tuple[int, int], Rollout]] = {}
        self._ticket = 0
        self.spot: SpotDrafter | None = None  # the drafter that members train when they are idle
        crew.deliver, crew.mended, crew.handed, crew.owing = (
            self._deliver,
            self._ask_again,
            self._hand_on,
            self._owing,
        )

    # ---- the protocol

    def submit(self, requests: Sequence[Request]) -> None:
        self._send(None, requests)

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        shown = 0
        self.crew.listen(0.0)
        while True:
            over = not any(ticket is None for ticket, *_ in self._open) or (
                self.mode == "stream" and bool(self.done)
            )
            if early is not None:
                early(self.done[shown:])
                shown = len(self.done)
            if over:
                done = self.done
                self.done = []
                return done
            self.crew.listen(LOOK_S)

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        self._ticket += 1
        found = self._tickets[self._ticket] = {}
        wanted = [
            (r.group_id, index)
            for r in requests
            for index in range(r.first_index, r.first_index + r.n)
        ]
        self._send(self._ticket, requests)
        while (before := len(found)) < len(wanted):
            self.crew.listen(1.0)
            if on_progress is not None and len(found) > before:
                on_progress(len(found))
        del self._tickets[self._ticket]
        return [found[key] for key in wanted]

    @property
    def idle(self) -> bool:
        return not self._open and not self.done

    @property
    def free(self) -> int | None:
        return (
            None
            if self.mode == "barrier"
            else sum(max(0, self.slots - self._load[n]) for n in self.crew.present)
        )

    def update(self, version: int) -> None:
        """Tell all members, and compare what they hold."""
        if self.spot is not None:
            self.spot.update()
        self.crew.version = version
        answers = self.crew.refresh(version)
        self.crew.compare([sums for _, sums in answers], f"after update {version}")
        self.crew.restarts = 0

    def release(self) -> None:
        self.crew.call("release")

    def take_back(self) -> None:
        self.crew.call("take_back")

    def stats(self) -> dict[str, float]:
        return merge_stats(self.crew.call("stats")) | (
            self.spot.stats() if self.spot is not None else {}
        )

    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for notes in self.crew.call("notes") for note in notes))

    def state_dict(self) -> dict[str, Any]:
        states = self.crew.call("state_dict")  # what has come before each answer is in `done`
        held = {(row["group_id"], row["index"]) for state in states for row in state["flights"]}
        # Of a member that is not present the tokens are not waited for: its rollouts begin anew.
        bare = [
            {**asdict(request), "index": index, "arrival": -1, "tokens": 0}
            for (ticket, group, index), (_, request) in self._open.items()
            if ticket is None and (group, index) not in held
        ]
        return merge_states(states, self.done, bare)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.idle, "state is loaded into an engine that has not begun"
        self.crew.version = int(state["version"])
        self.crew.prepare()  # before it is known who gets a share
        self.crew.call_each("load_state", self._share_out(state), again=False)

    def _share_out(self, state: State) -> dict[int, tuple[State, dict[str, Sequence[int]]]]:
        """What each member that is present gets of a state, with its prompts; noted as under way there."""
        there = list(self.crew.present)
        states = dict(zip(there, divide_state(state, len(there)), strict=True))
        for number, own in states.items():
            for row in (*own["flights"], *own["done"]):
                named = {name: row[name] for name in ("prompt_id", "group_id", "phase")}
                request = Request(
                    **named,
                    first_index=row["index"],
                    n=1,
                    sampling=sampling_from_json(row["sampling"]),
                )
                self._open[None, request.group_id, request.first_index] = (number, request)
                self._load[number] += 1
        return {
            number: (
                own,
                {row["prompt_id"]: self.encode(row["prompt_id"]) for row in own["flights"]},
            )
            for number, own in states.items()
        }

    def close(self) -> None:
        self.crew.close()

    # ---- requests, and what becomes of them

    def _send(self, ticket: int | None, requests: Iterable[Request]) -> None:
        self.crew.prepare()
        shares: dict[int, list[Request]] = {}
        homes = {
            place[:2]: number
            for place, (number, _) in self._open.items()
            if number in self.crew.present
        }
        for request in requests:
            group = (ticket, request.group_id)
            number = homes.setdefault(
                group, min(self.crew.present, key=lambda n: (self._load[n], n))
            )
            shares.setdefault(number, []).append(request)
            self._load[number] += request.n
            for index in range(request.first_index, request.first_index + request.n):
                self._open[*group, index] = (number, request)
        for number, share in shares.items():
            self.crew.tell(
                number, "ask", ticket, share, {r.prompt_id: self.encode(r.prompt_id) for r in share}
            )

    def _deliver(self, number: int, tickets: Sequence[int | None], bundle: Bundle) -> None:
        for ticket, rollout in zip(tickets, bundle.rollouts(), strict=True):
            if self._open.pop((ticket, *rollout.key), None) is None:
                continue  # of a `generate` that an interrupt ended
            self._load[number] -= 1
            if ticket is None:
                self.done.append(rollout)
            elif ticket in self._tickets:
                self._tickets[ticket][rollout.key] = rollout

    def _ask_again(self, numbers: set[int]) -> None:
        lost = {
            place: request for place, (number, request) in self._open.items() if number in numbers
        }
        for place in lost:
            self._load[self._open.pop(place)[0]] -= 1
        for ticket in dict.fromkeys(place[0] for place in lost):
            self._send(
                ticket,
                [replace(r, first_index=p[2], n=1) for p, r in lost.items() if p[0] == ticket],
            )

    def _hand_on(self, number: int, state: State) -> None:
        """Let others go on with what a member has given up. What has no tokens to keep is asked again."""
        self.crew.prepare()
        self._load[number] -= len(state["flights"])
        for other, given in self._share_out(state).items():
            self.crew.tell(other, "take_on", *given)
        self._ask_again({number})

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


# ---- checkpoints
#
# A checkpoint holds the state of one engine, whatever the number of engines that wrote it. Rollouts that were under way
# go on with the same tokens wherever they are put. The forms are those of `LocalEngine.state_dict`.


def merge_states(
    states: Sequence[State], done: Sequence[Rollout] = (), bare: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """One state with all rollouts of these, with `done`, which have finished and wait elsewhere, and with the flights
    `bare`, of which no tokens are known. Flights are numbered anew, in the order in which they arrived."""
    assert len({state["version"] for state in states}) == 1, (
        "engines have weights of different versions"
    )
    rows = [_rows(state) for state in states]
    waiting = [
        ({**rollout_to_json(r), "tokens": r.length}, r.trace) for r in done if r.trace is not None
    ]
    none = [(data, empty_trace(states[0]["log_probs"].dtype)) for data in bare]
    flights = sorted(
        [*none, *(row for own, _ in rows for row in own)], key=lambda row: row[0]["arrival"]
    )
    prompts = {
        name: mean
        for s in states
        for name, mean in zip(s["length_prompts"], s["length_means"].tolist(), strict=True)
    }
    return _state(
        [({**data, "arrival": number}, trace) for number, (data, trace) in enumerate(flights)],
        [row for _, own in rows for row in own] + waiting,
        like=states[0],
        begun=np.unique(np.concatenate([state["begun"] for state in states])),
        length_sums=np.sum([state["length_sums"] for state in states], axis=0),
        length_prompts=list(prompts),
        length_means=np.array(list(prompts.values()), np.float64),
    )


def divide_state(state: State, count: int) -> list[dict[str, Any]]:
    """A state per engine. A group stays whole, so that its prompt is fed once, and goes to the engine with the fewest
    flights so far; what has finished goes to the first engine. Sums of lengths are divided, so that merging adds up."""
    flights, done = _rows(state)
    sizes: dict[int, int] = {}
    for data, _ in flights:
        sizes[data["group_id"]] = sizes.get(data["group_id"], 0) + 1
    where = spread(sizes, count)
    return [
        _state(
            [row for row in flights if where[row[0]["group_id"]] == number],
            done if number == 0 else [],
            like=state,
            begun=np.array(
                [group for group in state["begun"] if where.get(int(group), 0) == number], np.int64
            ),
            length_sums=state["length_sums"] / count,
        )
        for number in range(count)
    ]


def _rows(state: State) -> tuple[list[Row], list[Row]]:
    """(flights, finished rollouts), each with its tokens."""
    data = [*state["flights"], *state["done"]]
    rows = list(zip(data, split_traces(state, [row["tokens"] for row in data]), strict=True))
    return rows[: len(state["flights"])], rows[len(state["flights"]) :]


def _state(
    flights: Sequence[Row], done: Sequence[Row], like: State, **changed: Any
) -> dict[str, Any]:
    arrivals = max((data["arrival"] + 1 for data, _ in flights), default=0)
    rows = {"flights": [data for data, _ in flights], "done": [data for data, _ in done]}
    tokens = join_traces([trace for _, trace in (*flights, *done)], like["log_probs"].dtype)
    return {**like, **rows, **tokens, "arrivals": max(arrivals, like["arrivals"]), **changed}


# ---- the learner


class Lessons(NamedTuple):
    """A part of a warm start: its batches, of which those that were sent are kept."""

    steps: int
    lr: float
    coming: Iterator[Lesson]
    sent: list[Lesson]

    def from_the_first(self) -> Iterator[Lesson]:
        for number in range(self.steps):
            if number == len(self.sent):
                self.sent.extend(itertools.islice(self.coming, 1))
            yield from self.sent[number : number + 1]


class Chorus:
    can_signal = frozenset({"score"})

    def __init__(self, crew: Crew, encode: Callable[[str], Sequence[int]]) -> None:
        self.crew = crew
        self.encode = encode
        self.version = 0
        self.scored_s = 0.0
        self._lessons: list[Lessons] = []  # of the warm start so far: a death repeats it

    def step(self, batch: Batch, progress: float = 0.0, needs: Set[str] = frozenset()) -> Report:
        self._lessons = []
        prompts = {group.prompt_id: self.encode(group.prompt_id) for group in batch.groups}
        sent = emptied(batch)
        while True:
            done = self.crew.together("step", sent, progress, needs, prompts)
            # After a death all members are where the furthest one is: the step counts if that one has ended it.
            if len(done) == self.crew.size or (done and self.crew.first("position") > self.version):
                self.version += 1
                report, self.scored_s = done[min(done)]
                return report

    def entropies(self, keys: Iterable[Key]) -> dict[Key, np.ndarray]:
        """None: they stay with the processes that found them."""
        return {}

    def warm_start(
        self,
        batches: Iterable[Lesson],
        *,
        steps: int,
        lr: float,
        on_step: Callable[[int, float], None],
    ) -> None:
        self._lessons.append(Lessons(steps, lr, iter(batches), []))
        todo = self._lessons[-1:]
        while not all(self._teach(lessons, on_step) for lessons in todo):
            self.crew.renew()  # weights were between two steps of some member: from the beginning
            todo = self._lessons

    def _teach(self, lessons: Lessons, on_step: Callable[[int, float], None]) -> bool:
        """Whether all members made all steps."""
        pairs = lessons.from_the_first()

        def send(count: int = 1) -> None:
            for lesson in itertools.islice(pairs, count):
                self.crew.send_all(lesson)

        def taught(number: int, step: int, loss: float) -> None:
            if number == 0:
                on_step(step, loss)
                send()

        self.crew.taught = taught
        return self.crew.lead("teach", (lessons.steps, lessons.lr), lambda: send(AHEAD))

    def rehearse(self) -> None:
        """Members have done it when they began."""

    def write(self, folder: Path) -> None:
        if self.crew.divided:
            self.crew.together("write_together", str(folder.absolute()))
        else:
            self.crew.first("write", str(folder.absolute()))

    def restore(self, checkpoint: Checkpoint) -> None:
        self.version = self.crew.call("restore", str(checkpoint.folder.absolute()))[0]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.crew.first("learner_state"))
