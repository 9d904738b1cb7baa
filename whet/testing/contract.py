"""The curriculum contract, tested line by line for any implementation, also yours.

    from whet.testing.contract import check_contract
    check_contract(lambda ids, seed: MyCurriculum(ids, seed))

plays the curriculum through simulated runs (`simulator.py`): barrier and stream, rollouts in any order over several
calls and versions, cuts, missing verdicts, saves at every point. A line that does not hold is an AssertionError
that names it. What a ledger sees from outside is all that is used: requests, batches, `holds` and `metrics`.
`measure_update` times an update at any number of prompts; no check depends on a clock.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np

from whet.curriculum.base import Curriculum
from whet.errors import Starved
from whet.testing.ledger import Ledger, require
from whet.testing.simulator import Simulator, World
from whet.types import Batch, Clock, Report, Request, Rollout

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

LONG_RUN = World(prompts=96, pass_rates=(), skew=3, groups=8, updates=60, order="shortest")
"""Lengths depend on nothing but the draw. Every group has both verdicts, so that hardly one is dropped for them: what
trains is then nearly all that was asked, and the mean of either has the same noise."""

ENGINES = {"barrier": (None, 0.0), "stream, keep or recompute": (64, 0.0), "stream, cut": (64, 1.0)}
"""Slots, and the share of what runs that an update cuts."""


def check_contract(
    make: Make,
    *,
    worlds: Sequence[World] = WORLDS,
    epochs: bool = True,
    rollouts: int | None = None,
    max_age: int | None = None,
    patience: int = 20,
    parts: Sequence[str] = ("",),
) -> None:
    """Raises AssertionError, naming the line, if `make(ids, seed)` gives a curriculum that breaks the contract.

    epochs: every prompt is visited once before any is visited again; false for sources that choose.
    rollouts: asked on average for a group of a full batch, where the curriculum divides a budget.
    max_age: the bound on (version - oldest token) it was built with.
    patience: times a batch's groups that it may ask in vain.
    parts: names of those of a mixture, in each of which the order of first ask holds.
    """
    expected: dict[str, Any] = {"patience": patience, "epochs": epochs, "rollouts": rollouts, "max_age": max_age}
    expected["parts"] = parts
    check_starvation(make, **expected)
    check_cost(make, **expected)
    check_lengths(make)
    batches = [check_world(make, world, **expected) for world in worlds]
    require(5, sum(batches) > 0, "not one batch came of all the simulated runs")


def check_world(make: Make, world: World, *, save_share: float = 0.3, **expected: Any) -> int:
    """Lines 1 to 5 and 7 in one simulated run. Returns how many batches it gave."""
    first = play(make, world, **expected)
    again = play(make, world, **expected)
    _same(first, again, "a second run with the same seed and verdicts")
    what = f"a run saved and loaded after {save_share:.0%} of all calls"
    try:
        saved = play(make, world, save_share=save_share, sealed=False, **expected)
    except AssertionError as error:
        require(1, False, f"{what} goes wrong, the same without saving does not: {error}")
    _same(first, saved, what)
    return first.batches


def check_starvation(make: Make, **expected: Any) -> None:
    """Line 5, where nothing is judged and where nothing is ever right: a batch, or Starved, in bounded time."""
    base = World(updates=2, prompts=50)
    for world in (
        replace(base, unjudged=1.0),
        replace(base, unjudged=1.0, slots=10),
        replace(base, pass_rates=(0.0,)),
        replace(base, pass_rates=(1.0,), slots=10),
    ):
        run = play(make, world, **expected)
        require(5, world.unjudged < 1 or run.batches == 0, "a batch was emitted although nothing was judged")


def check_cost(make: Make, few: int = 500, many: int = 16_000, **expected: Any) -> None:
    """Line 6, by counting: the interpreter's steps in an update do not grow with the number of prompts.

    Other prompts have other verdicts, so the steps differ somewhat; a look at every prompt shows all the same.
    """
    world = World(groups=4, updates=4)
    steps = [_cost(make, replace(world, prompts=prompts), Operations(), **expected) for prompts in (few, many)]
    require(
        6,
        steps[1] <= 3 * steps[0],
        f"an update takes {steps[0]:.0f} steps of the interpreter over {few} prompts, {steps[1]:.0f} over {many}",
    )


def check_lengths(make: Make, world: World = LONG_RUN) -> None:
    """Line 8: what trains is as long as what the policy writes, to 1%, whatever becomes of rollouts at an update.

    The policy's mean is taken over all that was asked, cut or not, since each is drawn when it is asked for. Where a
    run is further off, which may be chance, one of four times the length decides.
    """
    for name, (slots, cut) in ENGINES.items():
        for updates in (world.updates, 4 * world.updates):
            trained, policy = measure_lengths(make, replace(world, slots=slots, cut=cut, updates=updates))
            if abs(off := trained / policy - 1) <= 0.01:
                break
        length = f"{trained:.4f} of the limit instead of the policy's {policy:.4f}"
        require(8, abs(off) <= 0.01, f"{name}: the mean length of trained responses is {length}")


def measure_lengths(make: Make, world: World) -> tuple[float, float]:
    """Mean length, as a share of the limit, of what was trained, and of all that was asked, had none of it been cut.

    What is held at the end is left out: its turn has not come.
    """
    simulator = Simulator(world, sealed=False)
    player = Player(make, world, 0.0, simulator, Unwritten(world.ids), None)
    trained: list[float] = []
    for step in range(world.updates):
        player.gather(step, most=sys.maxsize)
        trained += [r.length / r.sampling.max_tokens for group in player.batch.groups for r in group.rollouts]
        player.update(step + 1)
    held = player.curriculum.holds()
    written = [share for group_id, shares in simulator.written.items() if group_id not in held for share in shares]
    return sum(trained) / len(trained), sum(written) / len(written)


def measure_update(make: Make, prompts: int = 1_000_000, groups: int = 16, updates: int = 5, **expected: Any) -> float:
    """Processor seconds the curriculum takes for an update, the slowest of several. Line 6 wants 0.05 at most."""
    return _cost(make, World(prompts=prompts, groups=groups, updates=updates), Seconds(), **expected)


@dataclass
class Play:
    """What came of a simulated run."""

    curriculum: Curriculum
    """As it stands at the end."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    batches: int = 0
    costs: list[float] = field(default_factory=list)
    """One a batch, as the meter counts."""
    tokens: int = 0
    """Of all rollouts that were delivered."""


def play(
    make: Make,
    world: World,
    *,
    patience: int = 20,
    save_share: float = 0.0,
    sealed: bool = True,
    meter: ContractMeter | None = None,
    **expected: Any,
) -> Play:
    """One simulated run, the loop of a trainer, every call checked by a ledger. Starved ends it early.

    patience: times a batch's groups that may be asked in vain. save_share: after this share of all calls the
    curriculum is saved, and a new one goes on from its state. sealed: rollouts refuse to show their trace.
    """
    player = Player(make, world, save_share, Simulator(world, sealed=sealed), Ledger(world.ids, **expected), meter)
    run = Play(player.curriculum, log=player.log)
    for step in range(world.updates):
        try:
            player.gather(step, most=patience * world.groups)
        except Starved:
            player.log.append(("starved", step))
            break
        player.update(step + 1)
        run.batches += 1
        run.costs.append(player.take_cost())
    player.ledger.close(player.curriculum)
    run.curriculum, run.tokens = player.curriculum, player.simulator.tokens
    return run


class Player:
    """Moves a curriculum as a trainer does, tells the ledger of it, and writes down what is to repeat."""

    def __init__(
        self,
        make: Make,
        world: World,
        save_share: float,
        simulator: Simulator,
        ledger: Ledger,
        meter: ContractMeter | None,
    ):
        self.make, self.world, self.save_share, self.meter = make, world, save_share, meter
        self.simulator, self.ledger = simulator, ledger
        self.curriculum = make(world.ids, world.seed)
        self.batch = Batch(groups=())
        self.log: list[tuple[Any, ...]] = []
        self._rng = np.random.default_rng((world.seed, 11))

    def gather(self, step: int, most: int) -> None:
        """plan, observe and emit until there is a batch, for which `most` groups may be asked."""
        asked = still = 0
        while not self.emit(self.clock(step)):
            clock = self.clock(step)
            requests = self.call("plan", clock)
            self.ledger.planned(requests, clock)
            self.log += [("ask", r.group_id, r.prompt_id, r.first_index, r.n, r.phase) for r in requests]
            self.simulator.submit(requests)
            rollouts = self.simulator.collect()
            self.call("observe", rollouts)
            self.ledger.observed(rollouts, self.curriculum)
            asked += sum(request.first_index == 0 for request in requests)
            require(5, asked <= most, f"{asked} groups were asked in vain for a batch of {clock.groups}")
            still = 0 if requests or rollouts else still + 1
            require(5, still < 2, "nothing is asked, nothing runs, and neither a batch nor Starved comes of it")

    def emit(self, clock: Clock) -> bool:
        self.ledger.before_emit(self.curriculum)
        try:
            batch = self.call("emit", clock)
        except Starved:
            self.ledger.emitted(None, clock, self.curriculum)
            raise
        self.ledger.emitted(batch, clock, self.curriculum)
        if batch is not None:
            self.batch = batch
            self.log.append(("batch", [rollout.key for group in batch.groups for rollout in group.rollouts]))
        return batch is not None

    def update(self, step: int) -> None:
        self.simulator.update(step)
        signals = self.simulator.scores(self.batch) if "score" in self.curriculum.needs else {}
        self.call("updated", self.clock(step), Report(metrics={}, signals=signals))
        self.ledger.updated(self.curriculum)
        self.log.append(("metrics", self.curriculum.metrics()))

    def call(self, name: str, *args: Any) -> Any:
        with self.meter or contextlib.nullcontext():
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

    def take_cost(self) -> float:
        if self.meter is None:
            return 0.0
        cost, self.meter.total = self.meter.total, 0.0
        return cost


class Unwritten(Ledger):
    """For long runs: the other lines are checked in short ones, and a ledger looks at every group at every call."""

    def planned(self, requests: Sequence[Request], clock: Clock) -> None: ...

    def observed(self, rollouts: Sequence[Rollout], curriculum: Curriculum) -> None: ...

    def before_emit(self, curriculum: Curriculum) -> None: ...

    def emitted(self, batch: Batch | None, clock: Clock, curriculum: Curriculum) -> None: ...

    def updated(self, curriculum: Curriculum) -> None: ...


class ContractMeter(AbstractContextManager[None]):
    """Adds up what happens inside `with`."""

    total = 0.0


class Seconds(ContractMeter):
    def __enter__(self) -> None:
        self._began = time.process_time()

    def __exit__(self, *exc: object) -> None:
        self.total += time.process_time() - self._began


class Operations(ContractMeter):
    """Steps of the interpreter: a count that is the same on every machine, blind only to loops inside C."""

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.total += 1  # lines, also each turn of a comprehension, calls and returns
        return self._trace


def _cost(make: Make, world: World, meter: ContractMeter, **expected: Any) -> float:
    """Of the dearest update; the world must be one where batches come."""
    costs = play(make, world, sealed=False, meter=meter, **expected).costs
    require(6, bool(costs), "no batch came, so an update cannot be measured")
    return max(costs)


def _same(first: Play, other: Play, what: str) -> None:
    for number, (a, b) in enumerate(zip(first.log, other.log, strict=False)):
        require(1, a == b, f"{what} differs at event {number}: {a} became {b}")
    require(1, len(first.log) == len(other.log), f"{what} is {len(other.log)} events long instead of {len(first.log)}")
