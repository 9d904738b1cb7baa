"""Chooses how to speculate, step by step: the arm that writes most tokens per second, or OFF.

`whet.draft.speculation` makes one and passes it on to the engine, which calls `choose` before each step and `record`
after it. Tokens and time are estimated apart, so that what is learnt at one batch size serves at all of them: how
likely a drafter's i-th token is accepted, per drafter and age of the rows (`Ages`), and how long a step takes, per arm,
batch size and bytes of KV (`Latency`). The rate of an arm is B * (accept length) / t. Choices change the speed, never a
token, and do not repeat from run to run, since they depend on a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from statistics import median
from typing import Any

import numpy as np

from whet.draft.base import OFF, Chooser, DraftArm, StepReport

Serves = Callable[[DraftArm, int], bool]  # whether an arm may be used for a batch
# rows that a step is padded to, and the bin of its KV: 0, or doublings of 64 MiB
Cell = tuple[int, int]

# assumed time of one more token to verify, in plain steps: low enough to be tried
PRIOR_COST = 0.02
ENOUGH = 4  # measured cells from which on the shape of the time is fitted
STEADY = 16  # samples after which a mean becomes an exponential one of this length
PRIOR = 0.6  # assumed acceptance of a place that was never tried: high enough to be tried
MEMORY = 0.98  # factor on older hits and tries, per step
LEAN = 8.0  # number of tries that the acceptance at another age counts for
HOPELESS = 0.5  # share of the rate in use below which a drafter is not tried at a new age
DWELL = 2  # turns of the engine (steps, or bursts of them) for which a choice stands
# turns that are added to the acceptance at once: it takes the host as long for one of them
FOLDED = 4
HYSTERESIS = 0.03  # gain in rate for which an arm is left
# Gain in rate that drafts must promise over plain steps (OURS): acceptance is a mean over rows, and a batch waits for
# the rows that accept least.
MARGIN = 0.1
SWITCH = 32  # rows above which TLT's bandit does not speculate


class Latency:
    """Seconds per step: measured per arm and cell, guessed from neighbours where nothing was measured. A guess moves
    the nearest measurement of the same arm by the shape t ~ a + b * (rows * tokens to verify) + c * (KV), fitted to all
    measurements. Times come from the host's clock; nothing waits for the device."""

    def __init__(self, arms: Iterable[DraftArm]) -> None:
        self.arms = {arm.name: arm for arm in arms}
        # seconds, samples
        self.times: dict[str, dict[Cell, tuple[float, float]]] = {name: {} for name in self.arms}
        self._shape: list[float] | None = None
        # kept until a new cell is measured, or for STEADY records
        self._guesses: dict[tuple[str, Cell], float] = {}
        self._records = 0

    def record(self, arm: DraftArm, cell: Cell, seconds: float) -> None:
        mean, samples = self.times[arm.name].get(cell, (seconds, 0.0))
        self._records += 1
        if not samples or self._records % STEADY == 0:
            self._guesses.clear()
        if samples >= 3:
            seconds = min(seconds, 3 * mean)  # a hiccup of the host
        samples = min(samples + 1, STEADY)
        self.times[arm.name][cell] = (mean + (seconds - mean) / samples, samples)

    def seconds(self, arm: DraftArm, cell: Cell) -> float:
        """As measured, else moved from the arm's nearest cell, else from the nearest cell of plain steps."""
        if known := self.times[arm.name].get(cell):
            return known[0]
        if (arm.name, cell) not in self._guesses:
            if not self._guesses:
                self._fit()
            like = arm if self.times[arm.name] else OFF
            times = self.times[like.name]
            # The nearest cell, by doublings of the rows plus doublings of the KV.
            near = min(
                times, key=lambda c: (abs(math.log2(c[0] / cell[0])) + abs(c[1] - cell[1]), c)
            )
            self._guesses[arm.name, cell] = (
                times[near][0] * self._relative(arm, cell) / self._relative(like, near)
            )
        return self._guesses[arm.name, cell]

    def _relative(self, arm: DraftArm, cell: Cell) -> float:
        """The time up to a factor."""
        if self._shape is None:
            return 1 + PRIOR_COST * (arm.tokens - 1)
        return sum(a * b for a, b in zip(self._shape, features(arm, cell), strict=True))

    def _fit(self) -> None:
        """Least squares of relative errors, no term below 0."""
        self._shape = None
        seen = [
            (self.arms[name], cell, t)
            for name, cells in self.times.items()
            for cell, (t, _) in cells.items()
        ]
        if len(seen) >= ENOUGH:
            terms = np.array([features(arm, cell) for arm, cell, _ in seen]) / [
                [t] for *_, t in seen
            ]
            found = np.maximum(
                np.linalg.lstsq(terms, np.ones(len(seen)), rcond=None)[0], 0
            ).tolist()
            # an empty step that costs nothing is not credible
            self._shape = found if found[0] > 0 else None

    def state(self) -> dict[str, Any]:
        return {
            arm: [[*cell, *t] for cell, t in cells.items()] for arm, cells in self.times.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the times of arms that still exist."""
        for name in self.times.keys() & state.keys():
            self.times[name] = {
                (int(b), int(k)): (float(t), float(n)) for b, k, t, n in state[name]
            }
        self._guesses.clear()


def features(arm: DraftArm, cell: Cell) -> tuple[float, float, float]:
    return 1.0, cell[0] * arm.tokens / 100, 2.0 ** cell[1] - 1


def cell_of(rows: int, kv_bytes: float) -> Cell:
    """
    >>> cell_of(64, 0), cell_of(64, 2**26), cell_of(64, 2**30)
    ((64, 0), (64, 1), (64, 4))
    """
    return rows, int(math.log2(1 + kv_bytes / 2**26))


class Acceptance:
    """How likely the i-th drafted token is accepted, given that those before it were: hits and tries that fade."""

    def __init__(self, depth: int) -> None:
        self.set(np.zeros(depth), np.zeros(depth))

    def set(self, hits: np.ndarray, tries: np.ndarray) -> None:
        self.hits = hits
        self.tries = tries
        total = 1.0
        alive = 1.0
        chance = PRIOR
        # tokens that a step with so many drafted ones writes per row: 1 + c_1 + c_1 c_2 + ...
        self.lengths = [total]
        for hit, tried in zip(hits.tolist(), tries.tolist(), strict=True):
            chance = hit / tried if tried >= 1 else chance
            alive *= chance
            total += alive
            self.lengths.append(total)

    def record(self, accepted: np.ndarray, most: np.ndarray, steps: int = 1) -> None:
        """accepted [B] of at most `most` [B] wanted, in so many steps. A drafter that proposes nothing misses."""
        depth = self.hits.size
        ended = np.bincount(accepted, minlength=depth + 1)[: depth + 1]
        # no more was wanted
        through = np.bincount(accepted[accepted >= most], minlength=depth + 1)[:depth]
        reached = ended[::-1].cumsum()[::-1]  # rows that accepted so many or more
        tries = reached[:-1] - through
        fading = np.where(tries > 0, MEMORY**steps, 1.0)
        self.set(self.hits * fading + reached[1:], self.tries * fading + tries)


class Ages:
    """Acceptance by the length of the rows, in doublings (OURS). A drafter that looks up texts is accepted more often
    the more text there is, so what was seen of it on young rows must not count against it on old ones."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.at: dict[int, Acceptance] = {}

    def lengths(self, age: int) -> list[float]:
        return (self.at.get(age) or self._near(age)).lengths

    def record(self, age: int, accepted: np.ndarray, most: np.ndarray, steps: int = 1) -> None:
        # begin with what is known at another age, as if it had been seen in few tries
        if age not in self.at:
            near = self._near(age)
            new = Acceptance(self.depth)
            weight = np.minimum(1.0, LEAN / np.maximum(near.tries, 1.0))
            new.set(near.hits * weight, near.tries * weight)
            self.at[age] = new
        self.at[age].record(accepted, most, steps)

    def load(self, state: Sequence[tuple[int, list[float], list[float]]]) -> None:
        """Load hits and tries per age; the saved drafts may have been longer or shorter."""
        for age, *saved in state:
            self.at[age] = Acceptance(self.depth)
            self.at[age].set(
                *(np.resize([*part, *[0.0] * self.depth], self.depth) for part in saved)
            )

    def _near(self, age: int) -> Acceptance:
        """The acceptance at the nearest known age, the younger of two; where there is none, that of a new drafter."""
        nearest = min(self.at, key=lambda other: (abs(other - age), other), default=None)
        return Acceptance(self.depth) if nearest is None else self.at[nearest]


def age_of(batch: int, kv_bytes: float) -> int:
    """
    >>> [age_of(4, 4 * kib * 1024) for kib in (0, 63, 64, 127, 128)]
    [0, 5, 6, 6, 7]
    """
    return max(0, int(kv_bytes / max(1, batch) / 1024).bit_length() - 1)


class Controller(Chooser):
    """A choice stands for DWELL turns. With chance `epsilon` it is a trial of another arm, if that fits into `spend`,
    the share of all time that trials may lose (OURS). Rows of a new age start a trial of each drafter that promises
    something (OURS)."""

    epsilon = 0.1
    spend = 0.005

    def __init__(
        self,
        arms: Sequence[DraftArm],
        *,
        serves: Serves = lambda arm, batch: True,
        bucket: Callable[[int], int] = lambda batch: 1 << max(0, batch - 1).bit_length(),
        seed: int = 0,
    ) -> None:
        """bucket: the size that a batch is padded to."""
        super().__init__()
        self.arms = [OFF, *(arm for arm in arms if arm != OFF)]
        self.serves = serves
        self.bucket = bucket
        self.generator = np.random.default_rng(seed)
        drafters = dict.fromkeys(arm.drafter for arm in self.arms)
        self.acceptance = {
            d: Ages(max(a.depth for a in self.arms if a.drafter == d)) for d in drafters
        }
        self.latency = Latency(self.arms)
        self.current = OFF
        self._trial: DraftArm | None = None
        # turns for which the choice stands, trial or not, while the batch stays in its cell
        self._left = 0
        self._steps = 1  # steps of the last turn
        self._cell: Cell = (0, 0)
        self._spent = self._lost = 0.0  # seconds in all, and lost by trials
        self._last = OFF
        # By drafter and age, what came of drafts and is not in `acceptance` yet: accepted, wanted, steps of each turn.
        self._news: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray, int]]] = {}

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        if not self.latency.times[OFF.name]:
            return OFF  # all other times are guessed from it
        cell = cell_of(self.bucket(batch), kv_bytes)
        held = self._trial or self.current
        if self._left > 0 and cell == self._cell and self._open(held, batch, retired):
            self._left -= 1
            return held
        arms = [arm for arm in self.arms if self._open(arm, batch, retired)]
        self._trial = None
        self._left = DWELL - 1
        self._cell = cell
        age = age_of(batch, kv_bytes)
        rates = {arm: self.rate(arm, batch, cell, age) for arm in arms}
        worth = {arm: rate * (1 + MARGIN if arm == OFF else 1) for arm, rate in rates.items()}
        best = max(arms, key=lambda arm: worth[arm])
        if self.current not in worth or worth[best] > worth[self.current] * (1 + HYSTERESIS):
            self.current = best
        self._trial = self._untried(rates, age) or self._affordable(rates, cell)
        return self._trial or self.current

    def _open(self, arm: DraftArm, batch: int, retired: Set[str]) -> bool:
        return not arm.depth or (arm.drafter not in retired and self.serves(arm, batch))

    def _fold(self) -> None:
        """Add the news to the acceptance."""
        for (drafter, age), told in self._news.items():
            accepted, wanted, steps = zip(*told, strict=True)
            self.acceptance[drafter].record(
                age, np.concatenate(accepted), np.concatenate(wanted), sum(steps)
            )
        self._news.clear()

    def _untried(self, rates: Mapping[DraftArm, float], age: int) -> DraftArm | None:
        """The best arm of a drafter that was not tried at this age, unless it is hopeless."""
        known = {
            "",
            self.current.drafter,
            *(name for name, ages in self.acceptance.items() if age in ages.at),
        }
        best = max(
            (arm for arm in rates if arm.drafter not in known),
            key=lambda arm: rates[arm],
            default=None,
        )
        return best if best is not None and rates[best] > HOPELESS * rates[self.current] else None

    def _affordable(self, rates: Mapping[DraftArm, float], cell: Cell) -> DraftArm | None:
        """Now and then any other arm, if the trial fits into what trials may lose."""
        others = [arm for arm in rates if arm != self.current]
        if not others or self.generator.random() >= self.epsilon:
            return None
        trial = others[int(self.generator.integers(len(others)))]
        seconds = DWELL * self._steps * self.latency.seconds(trial, cell)
        loss = seconds * max(0.0, 1 - rates[trial] / rates[self.current])
        return trial if self._lost + loss <= self.spend * self._spent else None

    def rate(self, arm: DraftArm, batch: int, cell: Cell, age: int = 0) -> float:
        """Expected tokens per second."""
        return (
            batch
            * self.acceptance[arm.drafter].lengths(age)[arm.depth]
            / self.latency.seconds(arm, cell)
        )

    def record(self, report: StepReport) -> None:
        super().record(report)
        arm = report.arm
        batch = report.batch
        seconds = report.seconds
        accepted = report.accepted
        cell = cell_of(self.bucket(batch), report.kv_bytes)
        age = age_of(batch, report.kv_bytes)
        if arm.depth and accepted is not None:
            wanted = np.full(accepted.size, arm.depth) if report.most is None else report.most
            self._news.setdefault((arm.drafter, age), []).append((accepted, wanted, report.steps))
            waits = len(self._news[arm.drafter, age]) < FOLDED and arm != self._trial
            if not waits or age not in self.acceptance[arm.drafter].at:
                self._fold()
        if arm == self._trial:
            best = self.rate(self.current, batch, cell, age)
            self._lost += max(0.0, seconds * (1 - self.rate(arm, batch, cell, age) / best))
        # The first step after a switch may include the cost of the switch.
        if report.typical and (arm == self._last or cell not in self.latency.times[arm.name]):
            self.latency.record(arm, cell, seconds / report.steps)
        self._last, self._steps = arm, report.steps
        self._spent += seconds

    def updated(self) -> None:
        """New weights: forget half of what is known about acceptance, and nothing about time."""
        self._fold()
        for ages in self.acceptance.values():
            for known in ages.at.values():
                known.set(known.hits / 2, known.tries / 2)

    def state_dict(self) -> dict[str, Any]:
        self._fold()
        known = {name: ages.at.items() for name, ages in self.acceptance.items()}
        return {
            "current": self.current.name,
            "acceptance": {
                n: [[age, a.hits.tolist(), a.tries.tolist()] for age, a in of]
                for n, of in known.items()
            },
            "latency": self.latency.state(),
            "seconds": [self._spent, self._lost],
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what is known about arms and drafters that still exist."""
        self.current = next((arm for arm in self.arms if arm.name == state["current"]), OFF)
        self._trial = None
        self._left = 0
        self._last = OFF
        self._news.clear()
        for name in self.acceptance.keys() & state["acceptance"].keys():
            self.acceptance[name].load(state["acceptance"][name])
        self.latency.load(state["latency"])
        self._spent, self._lost = state["seconds"]
        self.generator.bit_generator.state = state["generator"]


class Bandit(Chooser):
    """TLT's tuner, to compare the controller with: BEG-MAB, a bucketed epsilon-greedy bandit behind an elastic switch.

    As published (arXiv 2511.16665): arms are grouped by tokens to verify, and each group serves a range of batch sizes,
    more tokens for fewer rows. Within a group the arm with the best median reward over a window is chosen, never-tried
    arms first. Speculation is off above SWITCH rows, on after ten turns at or below it, and stays on until the step
    ends. The numbers are those of the released code, with a fifth threshold for a fifth size, halfway from the fourth
    to the switch. With one arm per group, as shipped, it is a lookup table. Two things of the code are not copied: a
    first reward of 0, and a device synchronisation at every step.
    """

    epsilon = 0.1
    window = 300  # rewards of an arm that count
    thresholds = (1, 2, 5, 21, 27)  # the smallest batch of each group, at least one per size
    patience = 10  # turns until it is on

    def __init__(
        self, arms: Sequence[DraftArm], *, serves: Serves = lambda arm, batch: True, seed: int = 0
    ) -> None:
        super().__init__()
        self.arms = [arm for arm in arms if arm != OFF]
        self.serves, self.generator = serves, np.random.default_rng(seed)
        sizes = sorted({arm.tokens for arm in self.arms}, reverse=True)
        # The most tokens to verify come first: they are for the smallest batches.
        self.groups = [[arm for arm in self.arms if arm.tokens == size] for size in sizes]
        assert len(self.groups) <= len(self.thresholds), (
            "a size without a threshold would serve no batch"
        )
        self.rewards: dict[str, deque[float]] = {
            arm.name: deque(maxlen=self.window) for arm in self.arms
        }
        self.calm = 0  # turns in a row at or below the switch; `patience` once it is on
        # The arm that chance chose. It stands for a second turn unless it was in use in the first: the engine may have
        # launched that turn before it asked, and EAGLE cannot follow another drafter without a pause.
        self._trial: DraftArm | None = None

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        if self.calm < self.patience:
            self.calm = self.calm + 1 if batch <= SWITCH else 0
        if self.calm < self.patience:
            return OFF
        arms = [
            arm
            for arm in self.group(batch)
            if self.serves(arm, batch) and arm.drafter not in retired
        ]
        if len(arms) < 2:
            return arms[0] if arms else OFF
        held = self._trial
        self._trial = None
        if held in arms:
            return held
        if self.generator.random() < self.epsilon:
            self._trial = arms[int(self.generator.integers(len(arms)))]
        return self._trial or max(arms, key=self.score)

    def group(self, batch: int) -> list[DraftArm]:
        """The arms of a batch size; with fewer groups than thresholds the last serves all larger batches.

        >>> b = Bandit([DraftArm("eagle", depth) for depth in (2, 4, 8, 16, 32)])
        >>> [b.group(n)[0].depth for n in (1, 2, 4, 5, 20, 21, 26, 27, 32)]
        [32, 16, 16, 8, 8, 4, 4, 2, 2]
        """
        if not self.groups:
            return []
        reached = sum(batch >= threshold for threshold in self.thresholds)
        return self.groups[min(max(reached, 1), len(self.groups)) - 1]

    def score(self, arm: DraftArm) -> float:
        """Median reward; +inf for an arm that was never tried."""
        rewards = self.rewards[arm.name]
        return median(rewards) if rewards else float("inf")

    def record(self, report: StepReport) -> None:
        """The reward of a step is (mean accepted + 1) * batch / seconds."""
        super().record(report)
        if report.arm == self._trial:
            self._trial = None
        if report.arm.name in self.rewards and report.accepted is not None and report.typical:
            rows = report.batch * report.steps
            self.rewards[report.arm.name].append(
                (float(report.accepted.sum()) / rows + 1) * rows / report.seconds
            )

    def updated(self) -> None:
        """The step has ended: speculation is off again."""
        self.calm = 0

    def state_dict(self) -> dict[str, Any]:
        rewards = {name: list(rewards) for name, rewards in self.rewards.items()}
        return {
            "rewards": rewards,
            "calm": self.calm,
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.rewards.keys() & state["rewards"].keys():
            self.rewards[name] = deque(state["rewards"][name], self.window)
        self.calm = state["calm"]
        self.generator.bit_generator.state = state["generator"]
