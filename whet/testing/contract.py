"""The contract of a curriculum, checked line by line for any implementation; `check_contract` is the entry point.

It plays the curriculum through simulated runs (`simulator.py`): barrier and stream, rollouts in any order over several
calls and versions, cuts, missing verdicts, saves at every point. A `Ledger` sees every call from outside (requests,
batches, `holds` and `metrics`), follows the fate of each group, and raises an AssertionError that names the broken
line. `measure_update` times an update at any number of prompts; no check depends on a clock.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Literal

import numpy as np

from whet.curriculum.base import Curriculum
from whet.errors import Starved
from whet.testing.simulator import Simulator, World
from whet.types import Batch, Clock, Group, Phase, Report, Request, Rollout

# ---- the ledger

LINES = {
    1: "same seed and verdicts, same plans, also across save and load",
    2: "a rollout is trained at most once, a prompt of an epoch gets one verdict",
    3: "rollouts of a group may come in any order, over several calls and versions",
    4: "integer budgets are exact",
    5: "starvation is a policy, never an endless loop, never silent",
    6: "the cost of an update does not grow with the number of prompts",
    7: "no traces",
    8: "no response is left out or drawn again because it was long",
    9: "a complete group waits for more or is over, which is final",
}


def require(line: int, holds: bool, detail: str) -> None:
    if not holds:
        raise AssertionError(f"Contract line {line} ({LINES[line]}): {detail}")


@dataclass
class LedgerEntry:
    """A group, seen from outside."""

    prompt_id: str
    position: int  # in the order of first request; a prompt that is requested again keeps it
    asked: int = 0
    came: dict[int, Rollout] = field(default_factory=dict)
    fate: Literal["open", "trained", "dropped", "returned"] = "open"
    over: bool = False  # it was complete and did not wait

    @property
    def complete(self) -> bool:
        return len(self.came) == self.asked


@dataclass
class Ledger:
    """What was seen of a curriculum, and what holds for it."""

    ids: Sequence[str]
    # every prompt is visited once before any is visited again; false for sources that choose
    epochs: bool = True
    # the average per group of a full batch, where the curriculum has a fixed budget
    rollouts: int | None = None
    max_age: int | None = None  # the bound on (version - oldest token) with which it was built
    trains: Phase | None = None  # a group that has rollouts of this phase trains only on those

    def __post_init__(self) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        self.pending: list[tuple[int, str]] = []  # returned, in ask order, not yet asked again
        self.visits: Counter[str] = Counter()  # without those that make up for a return
        self.reached: Counter[int] = Counter()  # prompts with so many visits or more
        self.last_trained = -1
        self.stage = 0.0
        self.starved = 0.0  # at the last batch
        self._held: set[int] = set()  # before an emit
        self._reasked = 0.0

    def planned(self, requests: Sequence[Request], clock: Clock) -> None:
        self._check_capacity(requests, clock)
        fresh = [r for r in requests if r.first_index == 0 and r.group_id not in self.entries]
        again = self.pending[: len(fresh)]
        del self.pending[: len(fresh)]
        due = [prompt_id for _, prompt_id in again]
        asked = [request.prompt_id for request in fresh]
        require(
            2,
            asked[: len(due)] == due,
            f"{due} got no verdict and must be asked first, but {asked} are asked",
        )
        for prompt_id in asked[len(due) :]:
            self.visits[prompt_id] += 1
            epoch = self.visits[prompt_id]
            self.reached[epoch] += 1
            early = self.epochs and epoch > 1 and self.reached[epoch - 1] < len(self.ids)
            require(
                2,
                not early,
                f"{prompt_id} has its visit {epoch} before every prompt had {epoch - 1}",
            )
        for request, (position, _) in zip(fresh, again, strict=False):
            self.entries[request.group_id] = LedgerEntry(request.prompt_id, position)
        for request in requests:
            group_id = request.group_id
            n = request.n
            first = request.first_index
            entry = self.entries.setdefault(
                group_id, LedgerEntry(request.prompt_id, len(self.entries))
            )
            require(4, type(n) is int and n > 0, f"group {group_id} is asked for {n!r} rollouts")
            require(
                2,
                entry.fate == "open",
                f"more is asked for group {group_id}, which was {entry.fate}",
            )
            require(2, entry.prompt_id == request.prompt_id, f"group {group_id} changed its prompt")
            require(9, not entry.over, f"more is asked for group {group_id}, which was over")
            require(
                4, first == entry.asked, f"group {group_id} goes on at {first}, not {entry.asked}"
            )
            entry.asked += n

    def _check_capacity(self, requests: Sequence[Request], clock: Clock) -> None:
        """Only a single group may exceed the free capacity, and only while none is open: a large group would else never
        start."""
        if clock.free is None:
            return
        is_running = any(
            entry.fate == "open" and not entry.complete for entry in self.entries.values()
        )
        is_alone = len(requests) == 1 and not is_running
        asked = sum(request.n for request in requests)
        fits = asked <= clock.free or is_alone
        require(4, fits, f"{asked} rollouts are asked where {clock.free} are free")

    def observed(self, rollouts: Sequence[Rollout], curriculum: Curriculum) -> None:
        for rollout in rollouts:
            entry = self.entries[rollout.group_id]
            entry.came[rollout.index] = rollout
            if rollout.finish == "cut" and entry.fate == "open":
                self._return(rollout.group_id)
        self._drop_gone(curriculum)
        self._check_waits(curriculum.waits())

    def _check_waits(self, waits: set[int]) -> None:
        for group_id, entry in self.entries.items():
            may_wait = entry.fate == "open" and entry.complete and not entry.over
            require(
                9,
                may_wait or group_id not in waits,
                f"group {group_id} waits, but is not complete or was over",
            )
            entry.over |= entry.complete and group_id not in waits

    def before_emit(self, curriculum: Curriculum) -> None:
        self._check_waits(curriculum.waits())
        self._held, self._reasked = (
            curriculum.holds(),
            curriculum.metrics().get("curriculum/reasked", 0),
        )
        self._drop_gone(curriculum)

    def emitted(self, batch: Batch | None, clock: Clock, curriculum: Curriculum) -> None:
        groups = batch.groups if batch else ()
        metrics = curriculum.metrics()
        for group in groups:
            self._check_group(group, clock)
        if batch is not None:
            # where the curriculum decides it
            wanted = int(metrics.get("curriculum/groups", clock.groups))
            starved = metrics.get("curriculum/starved", 0)
            self._check_batch(batch, wanted, starved=starved > self.starved)
            self.starved = starved
        gone = self._held - curriculum.holds() - {group.group_id for group in groups}
        expired = metrics.get("curriculum/reasked", 0) - self._reasked
        lost = f"{len(gone)} groups went unseen at an emit, {expired:.0f} were counted as reasked"
        require(2, expired == len(gone), lost)
        for group_id in sorted(gone, key=lambda group_id: self.entries[group_id].position):
            self._return(group_id)

    def _check_group(self, group: Group, clock: Clock) -> None:
        group_id = group.group_id
        require(2, group_id in self.entries, f"group {group_id} is trained but was never asked for")
        entry = self.entries[group_id]
        require(2, entry.fate == "open", f"group {group_id} is trained but was {entry.fate}")
        entry.fate = "trained"
        require(
            9,
            not entry.complete or entry.over,
            f"group {group_id} is trained while it waits for more",
        )
        require(
            3,
            entry.complete,
            f"group {group_id} is trained with {len(entry.came)} of {entry.asked} rollouts",
        )
        trained = [(r.key, r.verdict, r.length) for r in group.rollouts]
        came = [r for _, r in sorted(entry.came.items())]
        came = [r for r in came if r.phase == self.trains] or came
        judged = [(r.key, r.verdict, r.length) for r in came if r.judged]
        differs = f"group {group_id} trains on {trained}, but its judged rollouts are {judged}"
        require(3, sorted(trained) == judged, differs)
        require(
            2, len(judged) >= 2, f"group {group_id} is trained with {len(judged)} judged rollouts"
        )
        age = clock.version - group.oldest_version
        require(
            3,
            self.max_age is None or age <= self.max_age,
            f"group {group_id} is {age} versions old",
        )

    def _check_batch(self, batch: Batch, wanted: int, starved: bool) -> None:
        require(5, len(batch.groups) > 0, "a batch without groups")
        positions = [self.entries[group.group_id].position for group in batch.groups]
        require(
            3,
            positions == sorted(positions),
            "the groups of a batch are not in the order of first ask",
        )
        self.last_trained = positions[-1]
        running = [(g, e) for g, e in self.entries.items() if e.fate == "open" and not e.complete]
        late = [g for g, e in running if e.position < self.last_trained]
        require(3, not late, f"a batch overtakes the groups {late}, asked before and not complete")
        if not starved:
            entries = [self.entries[group.group_id] for group in batch.groups]
            count = len(entries)
            asked = sum(entry.asked for entry in entries)
            require(
                5,
                count == wanted,
                f"a batch of {count} groups instead of {wanted}, not counted as starved",
            )
            exact = self.rollouts is None or asked == self.rollouts * wanted
            require(
                4,
                exact,
                f"{asked} rollouts were asked for a batch of {wanted} times {self.rollouts}",
            )

    def updated(self, curriculum: Curriculum) -> None:
        self._drop_gone(curriculum)
        stage = curriculum.metrics().get("curriculum/stage", 0)
        if stage != self.stage:
            self.stage = stage
            self.pending.clear()  # the next stage has prompts of its own
        left = [g for g in curriculum.holds() if self.entries[g].position < self.last_trained]
        require(
            2,
            not left,
            f"the groups {left} were asked before a trained one and are neither trained nor dropped",
        )

    def close(self, curriculum: Curriculum) -> None:
        """Check that every group that got lost was counted."""
        self._drop_gone(curriculum)
        metrics = curriculum.metrics()
        fates = Counter(entry.fate for entry in self.entries.values())
        again = fates["returned"]
        reasked = metrics.get("curriculum/reasked")
        require(
            2, reasked == again, f"{again} groups are to be asked again, reasked says {reasked}"
        )
        dropped = ("rejected_easy", "rejected_hard", "unjudged_groups", "border", "probed")
        counted = sum(metrics.get(f"curriculum/{name}", 0) for name in dropped)
        spare = len(curriculum.holds()) + metrics.get("curriculum/relaxed", 0)
        exact = fates["dropped"] <= counted <= fates["dropped"] + spare
        require(
            2,
            exact,
            f"{fates['dropped']} groups were dropped, rejected and unjudged count {counted:.0f}",
        )

    def _drop_gone(self, curriculum: Curriculum) -> None:
        """A group that is no longer held, and was not trained, is dropped; a decided group must not be held."""
        held = curriculum.holds()
        for group_id, entry in self.entries.items():
            if entry.fate == "open" and group_id not in held:
                entry.fate = "dropped"
            elif entry.fate != "open" and group_id in held:
                require(2, False, f"group {group_id} is held but was {entry.fate}")

    def _return(self, group_id: int) -> None:
        entry = self.entries[group_id]
        entry.fate = "returned"
        insort(self.pending, (entry.position, entry.prompt_id))


# ---- the checks

Make = Callable[[Sequence[str], int], Curriculum]

WORLDS = (
    World(),
    World(unjudged=0.3, seed=1),
    World(slots=12, seed=2),
    World(slots=40, cut=1.0, seed=3),
    World(slots=40, cut=0.3, unjudged=0.1, seed=4),
    World(slots=1, seed=5),
    World(prompts=3, slots=16, cut=0.5, seed=6),
    World(groups=1, prompts=5, updates=16, slots=30, seed=7),
    World(slots=64, order="shortest", seed=8),
    World(slots=24, cut=0.9, order="shortest", seed=9),
)

# Lengths depend only on the draw. Every group has both verdicts, so hardly one is dropped for them: what trains is
# nearly all that was requested, and both means have the same noise.
LONG_RUN = World(prompts=96, pass_rates=(), skew=3, groups=8, updates=60, order="shortest")
# Slots, and the share of running rollouts that an update cuts.
ENGINES = {"barrier": (None, 0.0), "stream, keep or recompute": (64, 0.0), "stream, cut": (64, 1.0)}


def check_contract(make: Make, *, worlds: Sequence[World] = WORLDS, **expected: Any) -> None:
    """Raise an AssertionError, which names the line, if `make(ids, seed)` gives a curriculum that breaks the contract.
    `expected` says what holds for this curriculum: `patience` of `play`, and the arguments of `Ledger`."""
    check_starvation(make, **expected)
    check_cost(make, **expected)
    check_lengths(make)
    batches = [check_world(make, world, **expected) for world in worlds]
    require(5, sum(batches) > 0, "not one batch came of all the simulated runs")


def check_world(make: Make, world: World, *, save_share: float = 0.3, **expected: Any) -> int:
    """Check lines 1 to 5, 7 and 9 in one simulated run; return its number of batches."""
    first = play(make, world, **expected)
    _same(first, play(make, world, **expected), "a second run with the same seed and verdicts")
    what = f"a run saved and loaded after {save_share:.0%} of all calls"
    try:
        saved = play(make, world, save_share=save_share, sealed=False, **expected)
    except AssertionError as error:
        require(1, False, f"{what} goes wrong, the same without saving does not: {error}")
    _same(first, saved, what)
    return first.batches


def check_starvation(make: Make, **expected: Any) -> None:
    """Check line 5 where nothing is judged, or nothing right: a batch or Starved comes in bounded time."""
    base = World(updates=2, prompts=50)
    for world in (
        replace(base, unjudged=1.0),
        replace(base, unjudged=1.0, slots=10),
        replace(base, pass_rates=(0.0,)),
        replace(base, pass_rates=(1.0,), slots=10),
    ):
        run = play(make, world, **expected)
        require(
            5,
            world.unjudged < 1 or run.batches == 0,
            "a batch was emitted although nothing was judged",
        )


def check_cost(make: Make, few: int = 500, many: int = 16_000, **expected: Any) -> None:
    """Check line 6 by counting: the interpreter's steps per update do not grow with the number of prompts. Other
    prompts have other verdicts, so the steps differ a little; a loop over every prompt shows clearly."""
    world = World(groups=4, updates=4)
    less, more = (
        _cost(make, replace(world, prompts=prompts), count_steps, **expected)
        for prompts in (few, many)
    )
    grown = f"an update takes {less:.0f} steps of the interpreter over {few} prompts, {more:.0f} over {many}"
    require(6, more <= 3 * less, grown)


def check_lengths(make: Make, world: World = LONG_RUN) -> None:
    """Check line 8: what trains is as long as what the policy writes, to 1%, whatever an update does to rollouts.

    The policy's mean is over all that was requested, cut or not, since a length is drawn at the request. If a run is
    further off, which may be chance, one of four times the length decides.
    """
    for name, (slots, cut) in ENGINES.items():
        for updates in (world.updates, 4 * world.updates):
            trained, policy = measure_lengths(
                make, replace(world, slots=slots, cut=cut, updates=updates)
            )
            if abs(off := trained / policy - 1) <= 0.01:
                break
        length = f"{trained:.4f} of the limit instead of the policy's {policy:.4f}"
        require(8, abs(off) <= 0.01, f"{name}: the mean length of trained responses is {length}")


def measure_lengths(make: Make, world: World) -> tuple[float, float]:
    """Mean length, as a share of the limit, of what was trained, and of all that was requested, had nothing been cut.
    Groups that are still held at the end are left out."""
    # without a ledger, which looks at every group at every call
    run = Play(make, world, sealed=False)
    batches = list(run.batches_within(sys.maxsize))
    trained = [
        r.length / r.sampling.max_tokens
        for batch in batches
        for group in batch.groups
        for r in group.rollouts
    ]
    held = run.curriculum.holds()
    every = run.simulator.written
    written = [
        share for group_id, shares in every.items() if group_id not in held for share in shares
    ]
    return sum(trained) / len(trained), sum(written) / len(written)


def measure_update(
    make: Make, prompts: int = 1_000_000, groups: int = 16, updates: int = 5, **expected: Any
) -> float:
    """Processor seconds per update of the curriculum, the slowest of several. Line 6 wants at most 0.05."""
    return _cost(
        make, World(prompts=prompts, groups=groups, updates=updates), count_seconds, **expected
    )


# adds what happens inside to the last number
Meter = Callable[[list[float]], contextlib.AbstractContextManager[None]]


def play(make: Make, world: World, *, patience: int = 20, **given: Any) -> Play:
    """Play one simulated run, the loop of a trainer, with every call checked by a ledger. Starved ends it early.

    `patience` times the groups of a batch may be requested without result. `given`: arguments of `Play` and `Ledger`.
    """
    how = {name: given.pop(name) for name in ("save_share", "sealed", "meter") if name in given}
    ledger = Ledger(world.ids, **given)
    run = Play(make, world, ledger, **how)
    try:
        for _ in run.batches_within(patience * world.groups):
            run.batches += 1
    except Starved:
        run.log.append(("starved", run.batches))
        run.costs.pop()
    ledger.close(run.curriculum)
    return run


@dataclass
class Play:
    """A simulated run: drives a curriculum as a trainer does, shows every call to the ledger, logs what must repeat."""

    make: Make
    world: World
    ledger: Ledger | None = None
    # after this share of all calls the curriculum is saved, and a new one goes on from there
    save_share: float = 0.0
    sealed: bool = True  # rollouts refuse to show their trace
    meter: Meter | None = None
    batches: int = 0
    costs: list[float] = field(default_factory=list)  # one per batch, in the unit of the meter
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.simulator = Simulator(self.world, sealed=self.sealed)
        self.curriculum = self.make(self.world.ids, self.world.seed)
        self._rng = np.random.default_rng((self.world.seed, 11))

    def batches_within(self, most: int) -> Iterator[Batch]:
        """The batch of each update, for which `most` groups may be requested."""
        for step in range(self.world.updates):
            self.costs.append(0.0)
            batch = self.gather(step, most)
            yield batch
            self.simulator.update(step + 1)
            signals = self.simulator.scores(batch) if "score" in self.curriculum.needs else {}
            self.call("updated", self.clock(step + 1), Report(metrics={}, signals=signals))
            self.show("updated", self.curriculum)
            self.log.append(("metrics", self.curriculum.metrics()))

    def gather(self, step: int, most: int) -> Batch:
        """Call plan, observe and emit until there is a batch."""
        asked = still = 0
        while (batch := self.emit(self.clock(step))) is None:
            clock = self.clock(step)
            requests = self.call("plan", clock)
            self.show("planned", requests, clock)
            self.log += [
                ("ask", r.group_id, r.prompt_id, r.first_index, r.n, r.phase) for r in requests
            ]
            self.simulator.submit(requests)
            rollouts = self.simulator.collect()
            self.call("observe", rollouts)
            self.show("observed", rollouts, self.curriculum)
            asked += sum(request.first_index == 0 for request in requests)
            require(
                5,
                asked <= most,
                f"{asked} groups were asked without result for a batch of {clock.groups}",
            )
            still = 0 if requests or rollouts else still + 1
            require(
                5,
                still < 2,
                "nothing is asked, nothing runs, and neither a batch nor Starved comes of it",
            )
        return batch

    def emit(self, clock: Clock) -> Batch | None:
        self.show("before_emit", self.curriculum)
        try:
            batch: Batch | None = self.call("emit", clock)
        except Starved:
            self.show("emitted", None, clock, self.curriculum)
            raise
        self.show("emitted", batch, clock, self.curriculum)
        if batch is not None:
            self.log.append(
                ("batch", [rollout.key for group in batch.groups for rollout in group.rollouts])
            )
        return batch

    def show(self, event: str, *args: Any) -> None:
        if self.ledger is not None:
            getattr(self.ledger, event)(*args)

    def call(self, name: str, *args: Any) -> Any:
        with self.meter(self.costs) if self.meter else contextlib.nullcontext():
            result = getattr(self.curriculum, name)(*args)
        if self._rng.random() < self.save_share:
            text = json.dumps(self.curriculum.state_dict())
            self.curriculum = self.make(self.world.ids, self.world.seed)
            self.curriculum.load_state_dict(json.loads(text))
        return result

    def clock(self, step: int) -> Clock:
        return Clock(
            step=step,
            version=step,
            groups=self.world.groups,
            free=self.simulator.free,
            tokens=self.simulator.tokens,
            progress=step / self.world.updates,
            cut=self.world.cut == 1,
        )


@contextlib.contextmanager
def count_seconds(costs: list[float]) -> Iterator[None]:
    began = time.process_time()
    try:
        yield
    finally:
        costs[-1] += time.process_time() - began


@contextlib.contextmanager
def count_steps(costs: list[float]) -> Iterator[None]:
    """Count steps of the interpreter: the same on every machine, and blind only to loops inside C."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        costs[-1] += 1  # lines, also each turn of a comprehension, calls and returns
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _cost(make: Make, world: World, meter: Meter, **expected: Any) -> float:
    """The cost of the most expensive update."""
    costs = play(make, world, sealed=False, meter=meter, **expected).costs
    require(6, bool(costs), "no batch came, so an update cannot be measured")
    return max(costs)


def _same(first: Play, other: Play, what: str) -> None:
    for number, (a, b) in enumerate(zip(first.log, other.log, strict=False)):
        require(1, a == b, f"{what} differs at event {number}: {a} became {b}")
    require(
        1,
        len(first.log) == len(other.log),
        f"{what} is {len(other.log)} events long instead of {len(first.log)}",
    )
