"""A training step on many GPUs, simulated: how long it takes, who waits, and what each technique gains.

`whet bench scale` calls it. It is a discrete-event simulation on one heap and needs no GPU. Workers decode by measured
latencies: with b rows at once, a token of every row takes decode(b). A group stays on one worker, the one with the
fewest rollouts under way, as in `whet.cluster.fleet`. Of all groups that are asked, the share `signal` teaches and
trains; the others are dropped. An update takes

    host + update + trained tokens / (rate L) + 2 (L - 1) / L * gradients / reduce

seconds on L GPUs. Where GPUs only train, the others get new weights in rounds, in each of which every node that has
them gives them to another. Under barrier all groups of an update are asked at once, and none before the update ahead of
it is published. Under stream they are asked as slots become free, at most max_age + 1 updates ahead, and an update
waits for a group that would be too old for the next one. So stream with max_age = 0 and enough slots is barrier.

The inputs, with their sources, are in scale.toml; docs/scale.md says what is left out, and how far off it was.
benchmarks/scale_measured.py fits the inputs to a run and compares predicted seconds with measured ones.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whet.errors import WhetError
from whet.recipe import override

FIGURES = Path(__file__).with_name("scale.toml")  # every input with its source
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
ByRows = Annotated[dict[Count, Positive], Field(min_length=1)]  # rows decoded at once -> a figure


class ScaleInputs(BaseModel):
    """What is known of a model, a machine and a task; scale.toml says what each means."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    decode_ms: ByRows
    prompt_ms: Amount
    train_tokens_per_s: Positive
    update_ms: Amount
    host_ms: Amount
    weights_gb: Amount
    publish_gb_s: Positive
    reduce_gb_s: Positive
    node: Count
    failures: Amount
    restart_s: Amount
    groups: Count
    rollouts: Count
    n_init: Count
    slots: Count
    max_age: Annotated[int, Field(ge=0)]
    lengths: Annotated[list[tuple[Annotated[float, Field(ge=0, le=1)], Positive]], Field(min_length=1)]
    signal: Share
    signal_screened: Share
    signal_allocated: Share
    signal_both: Share
    acceptance: Share
    acceptance_trained: Share
    lesson_s: Amount
    speculation: dict[Share, ByRows]


def read_inputs(shape: str = "1.5b", path: Path | None = None, sets: Iterable[str] = ()) -> ScaleInputs:
    """The figures of a shape, those of a TOML or JSON file over them, and `name=value` over both. A result of the
    command is such a file too: it holds its inputs."""
    tree = tomllib.loads(FIGURES.read_text())
    shapes = tree.pop("shapes")
    if shape not in shapes:
        raise WhetError(f'There is no shape "{shape}"; there are {", ".join(shapes)}.')
    tree |= shapes[shape]
    if path is not None:
        try:
            text = path.read_text()
            given = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
            tree |= given.get("inputs", given)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise WhetError(f"The inputs {path} cannot be read: {error}.") from None
    tree.pop("shapes", None)  # of a copy of scale.toml
    for item in sets:
        override(tree, item)
    try:
        found = ScaleInputs.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        name, known = ".".join(map(str, first["loc"])), ", ".join(ScaleInputs.model_fields)
        if first["type"] == "extra_forbidden":
            raise WhetError(f'There is no input "{name}"; there are {known}.') from None
        raise WhetError(f'The input "{name}" is wrong: {first["msg"][0].lower()}{first["msg"][1:]}.') from None
    ranks, tokens = zip(*found.lengths, strict=True)
    if list(ranks) != sorted(ranks) or list(tokens) != sorted(tokens):
        raise WhetError('The input "lengths" is wrong: ranks and lengths must not fall.')
    if found.n_init >= found.rollouts:
        raise WhetError(f"A screening of {found.n_init} must be smaller than a group of {found.rollouts} rollouts.")
    return found


def between(table: Mapping[int, float], at: float) -> float:
    """The value on the straight line between two entries; beyond the last on the line through the last two.

    >>> [between({1: 2.0, 3: 4.0}, at) for at in (0, 1, 2, 3, 4)]
    [2.0, 2.0, 3.0, 4.0, 5.0]
    """
    places = sorted(table)
    if len(places) > 1 and at > places[-1]:
        low, high = places[-2:]
        return table[high] + (table[high] - table[low]) / (high - low) * (at - high)
    return float(np.interp(at, places, [table[place] for place in places]))


def speed_up(gains: Mapping[float, Mapping[int, float]], rows: int, acceptance: float) -> float:
    """Tokens per second of speculation over those without; 1 for an acceptance of 0, and constant beyond the table.

    >>> gains = {0.4: {1: 1.4, 3: 1.2}, 0.6: {1: 2.0, 3: 1.2}}
    >>> [round(speed_up(gains, rows, accept), 6) for rows, accept in ((1, 0.0), (1, 0.2), (1, 0.5), (9, 0.6))]
    [1.0, 1.2, 1.7, 1.2]
    """
    known = {0.0: 1.0} | {share: between(gains[share], min(rows, max(gains[share]))) for share in sorted(gains)}
    return float(np.interp(acceptance, list(known), list(known.values())))


class LengthDraws:
    """Lengths of rollouts: those of a group depend on its number and the seed alone, so that layouts meet the same."""

    def __init__(self, inputs: ScaleInputs, seed: int) -> None:
        self.ranks, self.tokens = zip(*inputs.lengths, strict=True)
        self.seed, self.known = seed, dict[int, list[int]]()

    def __call__(self, unit: int, count: int) -> list[int]:
        if len(self.known.get(unit, ())) < count:
            draws = np.random.default_rng((self.seed, unit)).random(count)
            self.known[unit] = np.maximum(1, np.interp(draws, self.ranks, self.tokens).round()).astype(int).tolist()
        return self.known[unit][:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a step is run."""

    gpus: int
    learners: int = 0  # GPUs that only train; with 0 every GPU generates and trains in turn
    max_age: int | None = None  # None for barrier
    screening: bool = False
    allocation: bool = False
    acceptance: float = 0.0  # of drafted tokens; 0 without speculation

    @property
    def workers(self) -> int:
        return self.gpus - self.learners


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What an update takes, as a mean. The first updates of a stream, which starts without rollouts, do not count."""

    step_s: float
    idle_share: float  # of the time of all GPUs: neither decoding nor training
    spare_s: float  # idle seconds of the GPUs that generate
    decode_steps: float  # of all workers; with speculation, those that it would take without
    age_mean: float  # updates between the weights that began a trained rollout and those that train on it


@dataclass(slots=True)
class SimWorker:
    """A GPU that decodes. `written` counts the tokens of a row since the start, and a row ends where that reaches its
    mark, so that rows need not be counted one by one."""

    rows: list[tuple[float, int, int]] = field(default_factory=list)  # heap of mark, tokens and unit
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # tokens and unit
    written: float = 0.0
    at: float = 0.0  # up to here everything is counted
    ready: float = 0.0  # until then it reads prompts
    busy: float = 0.0
    stamp: int = 0  # of its next event; an older one is void
    down: bool = False

    @property
    def load(self) -> int:
        return len(self.rows) + len(self.waiting)


MOST_FAULTS = 10_000  # in one simulation: with more of them it would not come to an end


class Simulation:
    """One layout, from an empty start. A unit is what must be generated for one group that trains: groups or screenings
    that are dropped, and one that is not."""

    def __init__(
        self,
        inputs: ScaleInputs,
        layout: Layout,
        lengths: Callable[[int, int], Sequence[int]],
        faults: Iterable[tuple[float, int]] | None = None,
        seed: int = 0,
    ) -> None:
        """lengths(unit, count): tokens of its rollouts. faults: seconds and GPUs, in place of random ones by the seed;
        the first GPUs generate, and the last ones train."""
        self.inputs, self.layout, self.lengths, self.age = inputs, layout, lengths, layout.max_age or 0
        times = [between(inputs.decode_ms, rows) / 1e3 for rows in range(inputs.slots + 1)]
        gains = [speed_up(inputs.speculation, rows, layout.acceptance) for rows in range(inputs.slots + 1)]
        self.rates = [gain / seconds for gain, seconds in zip(gains, times, strict=True)]  # tokens per second and row
        self.workers = [SimWorker() for _ in range(layout.workers)]
        self.loads = [(0, number) for number in range(layout.workers)]  # heap; an entry may be out of date
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []  # heap of time, order, and what happens
        self.now, self.order = 0.0, itertools.count()
        self.pieces: deque[tuple[int, list[int]]] = deque()  # unit and tokens of what was asked and has no worker
        self.asked = self.trained = self.published = 0
        self.version: dict[int, int] = {}  # updates that were published when a unit began
        self.left: dict[int, int] = {}  # rollouts of a unit that have not ended
        self.tokens: dict[int, int] = {}  # that a unit trains on
        self.open: Counter[int] = Counter()  # units that have begun and are not trained, by version
        self.done: list[tuple[int, int]] = []  # version and unit of those that may train
        self.training = self.paused = False
        self.lesson, self.seconds = 0, 0.0  # stamp and seconds of the newest update
        self.free_at = self.sent_at = 0.0  # when learners that failed are back, and when the newest weights have come
        self.learned = self.generated = self.finished = self.lost = 0.0  # GPU seconds; tokens
        self.ages, self.faults = list[int](), 0
        self.rng = np.random.default_rng((seed, layout.gpus)) if faults is None and inputs.failures else None
        for time, gpu in faults or ():
            self._at(time, self._fail, gpu)
        self._next_fault()

    def run(self, updates: int, warm: int = 0) -> Simulated:
        """Until `updates` are published; counted from the publication of the update `warm` on."""
        marks = {0: (0.0, 0.0, 0.0, 0.0)}
        self._ask()
        while self.published < updates:
            self.now, _, handle, given = heapq.heappop(self.events)
            handle(given)
            if self.published not in marks:
                for worker in self.workers:
                    self._count(worker)
                busy, written = (sum(getattr(worker, name) for worker in self.workers) for name in ("busy", "written"))
                marks[self.published] = (self.now, busy, self.learned, written)
        seconds, decoding, learning, written = (b - a for a, b in zip(marks[warm], marks[updates], strict=True))
        counted, layout = updates - warm, self.layout
        return Simulated(
            step_s=seconds / counted,
            idle_share=1.0 - (decoding + learning) / (layout.gpus * seconds),
            spare_s=(layout.workers * seconds - decoding - (0.0 if layout.learners else learning)) / counted,
            decode_steps=written / counted,
            age_mean=float(np.mean(self.ages[warm * self.inputs.groups :])),
        )

    def _at(self, time: float, handle: Callable[[Any], None], given: Any = None) -> None:
        heapq.heappush(self.events, (time, next(self.order), handle, given))

    # ---- workers

    def _count(self, worker: SimWorker) -> None:
        """Bring a worker up to now."""
        if worker.rows and not self.paused:
            more = max(0.0, self.now - max(worker.at, worker.ready)) * self.rates[len(worker.rows)]
            worker.busy += self.now - worker.at
            worker.written += more
            self.generated += more * len(worker.rows)
        worker.at = self.now

    def _go_on(self, number: int) -> None:
        """Fill the slots of a worker that was counted, and expect its next end."""
        worker = self.workers[number]
        while worker.waiting and len(worker.rows) < self.inputs.slots:
            tokens, unit = worker.waiting.popleft()
            heapq.heappush(worker.rows, (worker.written + tokens, tokens, unit))
        worker.stamp += 1
        if worker.rows and not self.paused:
            left = max(0.0, worker.rows[0][0] - worker.written) / self.rates[len(worker.rows)]
            self._at(max(self.now, worker.ready) + left, self._landed, (number, worker.stamp))

    def _landed(self, given: tuple[int, int]) -> None:
        number, stamp = given
        worker = self.workers[number]
        if stamp != worker.stamp:
            return
        self._count(worker)
        end = max(worker.written, worker.rows[0][0]) + 1e-9  # the sum of many small times is not exact
        while worker.rows and worker.rows[0][0] <= end:
            _, tokens, unit = heapq.heappop(worker.rows)
            self.finished += tokens
            self.left[unit] -= 1
            if not self.left[unit]:
                heapq.heappush(self.done, (self.version[unit], unit))
        self._go_on(number)
        heapq.heappush(self.loads, (worker.load, number))
        self._ask()
        self._train()

    def _ask(self) -> None:
        """Hand out what may be asked and has room, each piece to the worker with the fewest rollouts."""
        touched = set()
        while self.pieces or self.asked < (self.published + self.age + 1) * self.inputs.groups:
            if (number := self._least()) is None:
                break
            if not self.pieces:
                self._next_unit()
            unit, lengths = self.pieces.popleft()
            if unit not in self.version:
                self.version[unit] = self.published
                self.open[self.published] += 1
            worker = self.workers[number]
            if number not in touched:
                self._count(worker)
                touched.add(number)
            worker.waiting.extend((tokens, unit) for tokens in lengths)
            worker.ready = max(worker.ready, self.now) + self.inputs.prompt_ms / 1e3
            heapq.heappush(self.loads, (worker.load, number))
        for number in touched:
            self._go_on(number)

    def _least(self) -> int | None:
        """Under stream only a worker with a free slot."""
        while self.loads:
            load, number = self.loads[0]
            if load == self.workers[number].load and not self.workers[number].down:
                return number if self.layout.max_age is None or load < self.inputs.slots else None
            heapq.heappop(self.loads)
        return None

    def _next_unit(self) -> None:
        """Its pieces are 1 / signal groups or screenings on average; the last rollouts of all are those that train."""
        i, layout, unit = self.inputs, self.layout, self.asked
        plain, screened = (i.signal_allocated, i.signal_both) if layout.allocation else (i.signal, i.signal_screened)
        signal = screened if layout.screening else plain
        prompts = math.floor((unit + 1) / signal + 1e-9) - math.floor(unit / signal + 1e-9)
        sizes = [*[i.n_init] * prompts, i.rollouts - i.n_init] if layout.screening else [i.rollouts] * prompts
        drawn = list(self.lengths(unit, sum(sizes)))
        self.left[unit], self.tokens[unit] = len(drawn), sum(drawn[-i.rollouts :])
        ends = list(itertools.accumulate(sizes))
        self.pieces.extend((unit, drawn[end - size : end]) for size, end in zip(sizes, ends, strict=True))
        self.asked += 1

    # ---- updates

    def _train(self, _: object = None) -> None:
        """Begin an update if a batch is there, and nothing that is left can become too old by it."""
        i, learners = self.inputs, self.layout.learners or self.layout.gpus
        if self.training or self.now < self.free_at or len(self.done) < i.groups:
            return
        batch = heapq.nsmallest(i.groups, self.done)
        left = self.open - Counter(version for version, _ in batch)
        for ahead in range(self.age + 1):  # those of this version and older have `ahead` more updates to go into
            oldest = self.trained - self.age + ahead
            if sum(count for version, count in left.items() if version <= oldest) > ahead * i.groups:
                return
        taken = set(batch)
        self.open, self.done = left, sorted(unit for unit in self.done if unit not in taken)
        self.ages += [self.trained - version for version, _ in batch]
        share = sum(self.tokens[unit] for _, unit in batch) / learners / i.train_tokens_per_s
        self.seconds = i.update_ms / 1e3 + share + 2 * (learners - 1) / learners * 2 * i.weights_gb / i.reduce_gb_s
        self.training = True
        self._pause(not self.layout.learners)
        self._learn(self.now)

    def _learn(self, start: float) -> None:
        self.lesson += 1
        self._at(start + self.inputs.host_ms / 1e3 + self.seconds, self._learned, self.lesson)

    def _learned(self, lesson: int) -> None:
        if lesson != self.lesson:  # a learner failed meanwhile
            return
        i, layout = self.inputs, self.layout
        self.trained, self.training = self.trained + 1, False
        self.learned += self.seconds * (layout.learners or layout.gpus)
        self._pause(False)
        rounds = math.ceil(math.log2(math.ceil(layout.workers / i.node) + 1)) if layout.learners else 0
        self.sent_at = max(self.now, self.sent_at) + rounds * i.weights_gb / i.publish_gb_s
        self._at(self.sent_at, self._sent)
        self._train()

    def _sent(self, _: object) -> None:
        self.published += 1
        self._ask()

    def _pause(self, paused: bool) -> None:
        if paused != self.paused:
            for worker in self.workers:
                self._count(worker)
            self.paused = paused
            for number in range(len(self.workers)):
                self._go_on(number)

    # ---- failures

    def _next_fault(self) -> None:
        if self.rng is not None:
            self.faults += 1
            if self.faults > MOST_FAULTS:
                raise WhetError(f"With {self.inputs.failures:g} failures per GPU and hour no step comes to its end.")
            wait = self.rng.exponential(3600.0 / (self.inputs.failures * self.layout.gpus))
            self._at(self.now + wait, self._fail, int(self.rng.integers(self.layout.gpus)))

    def _fail(self, gpu: int) -> None:
        """Rollouts of a worker begin again elsewhere; an update begins again when all learners are back."""
        back = self.now + self.inputs.restart_s
        if gpu < len(self.workers) and not self.workers[gpu].down:
            worker, again = self.workers[gpu], dict[int, list[int]]()
            self._count(worker)
            self.lost += sum(tokens - (mark - worker.written) for mark, tokens, _ in worker.rows)
            for tokens, unit in [*((tokens, unit) for _, tokens, unit in worker.rows), *worker.waiting]:
                again.setdefault(unit, []).append(tokens)
            self.pieces.extendleft(reversed(again.items()))
            worker.rows, worker.waiting, worker.down, worker.stamp = [], deque(), True, worker.stamp + 1
            self._at(back, self._back, gpu)
        if gpu >= len(self.workers) or not self.layout.learners:
            self.free_at = back
            if self.training:
                self._learn(back)
            self._at(back, self._train)
        self._next_fault()
        self._ask()

    def _back(self, gpu: int) -> None:
        self.workers[gpu].down = False
        heapq.heappush(self.loads, (self.workers[gpu].load, gpu))
        self._ask()


# ---- what is asked of it

WARM, COUNTED, TRIED = 3, 8, 4  # updates of a stream before it is even, those that are counted, and those of a trial


def simulate(inputs: ScaleInputs, layout: Layout, lengths: LengthDraws, counted: int = COUNTED) -> Simulated:
    warm = 0 if layout.max_age is None else layout.max_age + WARM
    return Simulation(inputs, layout, lengths, seed=lengths.seed).run(warm + counted, warm)


def best_split(seconds: Callable[[int], float], gpus: int) -> int:
    """The number of learners with the shortest step, where that has one valley: the best of every eighth of the GPUs,
    then ever nearer ones beside the best so far, down to a 128th.

    >>> best_split(lambda learners: max(60 / (64 - learners), 4 / learners), 64)  # 60 / 60 = 4 / 4
    4
    """
    gap, least, known = max(1, gpus // 8), max(1, gpus // 128), dict[int, float]()
    tried = range(gap, gpus, gap)
    while True:
        known |= {number: seconds(number) for number in tried if 0 < number < gpus and number not in known}
        best = min(known, key=lambda number: (known[number], number))
        if gap == least:
            return best
        gap = max(least, gap // 2)
        tried = range(best - gap, best + gap + 1, gap)


def study(inputs: ScaleInputs, gpus: int, learners: int | None, seed: int) -> dict[str, Any]:
    """One number of GPUs: barrier and stream, together and split, and what each technique gains over plain barrier."""
    lengths, plain = LengthDraws(inputs, seed), Layout(gpus=gpus)
    drafting = replace(plain, acceptance=inputs.acceptance)
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, layout: Layout) -> Simulated:
        outcome = simulate(inputs, layout, lengths)
        found[name] = {**asdict(layout), **asdict(outcome)}
        return outcome

    def add_split(name: str, layout: Layout) -> None:
        def seconds(number: int) -> float:
            return simulate(inputs, replace(layout, learners=number), lengths, TRIED).step_s

        add(name, layout)
        if gpus > 1:
            add(f"{name}, split", replace(layout, learners=learners or best_split(seconds, gpus)))

    def spot(layout: Layout, spare: float) -> Layout:
        """The drafter is trained in idle time, as far as there is enough."""
        share = min(1.0, spare / inputs.lesson_s) if inputs.lesson_s else 1.0
        more = share * (inputs.acceptance_trained - inputs.acceptance)
        return replace(layout, acceptance=inputs.acceptance + more)

    add_split("barrier", plain)
    add_split("stream", replace(plain, max_age=inputs.max_age))
    add("screening", replace(plain, screening=True))
    add("allocation", replace(plain, allocation=True))
    drafted = add("speculation", drafting)
    add("speculation, spot", spot(drafting, drafted.spare_s))
    every = replace(drafting, screening=True, allocation=True, max_age=inputs.max_age)
    add_split("all", spot(every, simulate(inputs, every, lengths).spare_s))
    for arm in found.values():
        arm["gain"] = found["barrier"]["step_s"] / arm["step_s"]
    return {"gpus": gpus, "arms": found}
