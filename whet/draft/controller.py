"""Chooses how to speculate, step by step: the arm that writes most tokens a second, or OFF.

Tokens and time are estimated apart, so that what is learnt at one batch size serves at all: how likely a drafter's i-th
token is accepted, per drafter and length of the rows (`Ages`); how long a step takes, per arm, batch size and bytes of
KV, from the host's clock.
The rate of an arm is B * (accept length) / t. The engine asks before each step and tells after it; it may obey or not.
Decisions change the speed, never a token, and do not repeat from run to run: they hang on a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from statistics import median
from typing import Any

import numpy as np

from whet.draft.base import OFF, AcceptTally, Arm

# ---- latency
#
# How long a step takes: measured per arm, batch size and bytes of KV; guessed from its neighbours where it was not.
#
# A guess moves the nearest measurement of the same arm by the shape t ~ a + b * (rows * tokens to verify) + c * (KV),
# fitted to all that was measured. Times come from the host's clock, a step late or not: nothing waits for the device.


PRIOR_COST = 0.02
"""Of one more token to verify, in plain steps, as long as little was measured: low enough to be tried."""
ENOUGH = 4
"""Measured cells from which on the shape is fitted."""
STEADY = 16
"""Samples after which a mean becomes an exponential one of this length."""

Cell = tuple[int, int]
"""Rows a step is padded to, and bin of its KV: 0, or doublings of 64 MiB."""


class Latency:
    def __init__(self, arms: Iterable[Arm]) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.times: dict[str, dict[Cell, tuple[float, float]]] = {name: {} for name in self.arms}
        """Per arm and cell: seconds a step, samples."""
        self._shape: np.ndarray | None = None
        self._guesses: dict[tuple[str, Cell], float] = {}
        """Kept until a new cell is measured, or for so many records."""
        self._records = 0

    def record(self, arm: Arm, cell: Cell, seconds: float) -> None:
        mean, samples = self.times[arm.name].get(cell, (seconds, 0.0))
        self._records += 1
        if not samples or self._records % STEADY == 0:
            self._guesses.clear()
        if samples >= 3:
            seconds = min(seconds, 3 * mean)  # a hiccup of the host
        samples = min(samples + 1, STEADY)
        self.times[arm.name][cell] = (mean + (seconds - mean) / samples, samples)

    def known(self, arm: Arm, cell: Cell | None = None) -> bool:
        times = self.times[arm.name]
        return bool(times) if cell is None else cell in times

    def seconds(self, arm: Arm, cell: Cell) -> float:
        """As measured, else moved from the arm's nearest cell, else from the nearest of plain steps."""
        known = self.times[arm.name].get(cell)
        if known:
            return known[0]
        guess = self._guesses.get((arm.name, cell))
        if guess is None:
            if not self._guesses:
                self._fit()
            guess = self._guesses[arm.name, cell] = self._guess(arm, cell)
        return guess

    def _guess(self, arm: Arm, cell: Cell) -> float:
        times, like = self.times[arm.name], arm
        if not times:
            times, like = self.times[OFF.name], OFF
        near = min(times, key=lambda other: (distance(other, cell), other))
        return times[near][0] * self.shape(arm, cell) / self.shape(like, near)

    def shape(self, arm: Arm, cell: Cell) -> float:
        """Of the time, up to a factor."""
        if self._shape is None:
            return 1 + PRIOR_COST * (arm.tokens - 1)
        return float(self._shape @ features(arm, cell))

    def state(self) -> dict[str, Any]:
        return {arm: [[*cell, *t] for cell, t in cells.items()] for arm, cells in self.times.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Times of arms that still exist."""
        for name in self.times.keys() & state.keys():
            self.times[name] = {(int(b), int(k)): (float(t), float(n)) for b, k, t, n in state[name]}
        self._guesses.clear()

    def _fit(self) -> None:
        """Least squares of relative errors, no term below 0."""
        size, self._shape = sum(map(len, self.times.values())), None
        if size >= ENOUGH:
            seen = [(self.arms[name], cell, t) for name, cells in self.times.items() for cell, (t, _) in cells.items()]
            terms = np.array([features(arm, cell) / t for arm, cell, t in seen])
            found = np.maximum(np.linalg.lstsq(terms, np.ones(size), rcond=None)[0], 0)
            self._shape = found if found[0] > 0 else None  # a step that costs nothing when empty: not to be believed


def features(arm: Arm, cell: Cell) -> np.ndarray:
    return np.array([1.0, cell[0] * arm.tokens / 100, 2.0 ** cell[1] - 1])


def cell_of(rows: int, kv_bytes: float) -> Cell:
    """
    >>> cell_of(64, 0), cell_of(64, 2**26), cell_of(64, 2**30)
    ((64, 0), (64, 1), (64, 4))
    """
    return rows, int(math.log2(1 + kv_bytes / 2**26))


def distance(a: Cell, b: Cell) -> float:
    """Between cells: doublings of the rows and of the KV."""
    return abs(math.log2(a[0] / b[0])) + abs(a[1] - b[1])


PRIOR = 0.6
"""Acceptance of a place nobody has tried: high enough to be tried."""
LEAN = 8.0
"""Tries that what is known of another age counts for."""
HOPELESS = 0.5
"""Of the rate of what is in use: a drafter that promises less is not tried at a new age."""


class Acceptance:
    """How likely the i-th drafted token is accepted, given that those before it were: hits and tries that fade.

    >>> a = Acceptance(3)
    >>> a.record(np.array([2, 1, 0, 1]), np.array([2, 2, 2, 2]))  # c_1 = 3 / 4, c_2 = 1 / 3, and c_3 like c_2
    >>> [round(length, 3) for length in a.lengths]
    [1.0, 1.75, 2.0, 2.083]
    """

    def __init__(self, depth: int, memory: float = 0.98) -> None:
        self.hits, self.tries = np.zeros(depth), np.zeros(depth)
        self.memory = memory
        """What a step leaves of the steps before it."""
        self.lengths: list[float] = []
        """Tokens that a step of so many drafted ones writes for a row: 1 + c_1 + c_1 c_2 + ..."""
        self._sum()

    def record(self, accepted: np.ndarray, most: np.ndarray, steps: int = 1) -> None:
        """accepted [B] of at most `most` [B] wanted, in so many steps: a drafter that has nothing to propose is a
        miss."""
        depth = self.hits.size
        ended = np.bincount(accepted, minlength=depth + 1)[: depth + 1]
        through = np.bincount(accepted[accepted >= most], minlength=depth + 1)[:depth]  # asked for no more
        reached = ended[::-1].cumsum()[::-1]  # rows that accepted so many or more
        tries = reached[:-1] - through
        fading = np.where(tries > 0, self.memory**steps, 1.0)
        self.hits = self.hits * fading + reached[1:]
        self.tries = self.tries * fading + tries
        self._sum()

    def fade(self, share: float) -> None:
        """Only so much of the past counts from here on."""
        self.hits *= share
        self.tries *= share
        self._sum()

    def lean(self, other: Acceptance) -> None:
        """Begins with what is known elsewhere, as if it had been seen in few tries."""
        weight = np.minimum(1.0, LEAN / np.maximum(other.tries, 1.0))
        self.hits, self.tries = other.hits * weight, other.tries * weight
        self._sum()

    def _sum(self) -> None:
        total, alive, chance = 1.0, 1.0, PRIOR
        self.lengths = [total]
        for hits, tries in zip(self.hits.tolist(), self.tries.tolist(), strict=True):
            chance = hits / tries if tries >= 1 else chance
            alive *= chance
            total += alive
            self.lengths.append(total)


class Ages:
    """Acceptance by the length of the rows, in doublings (OURS): who looks up texts is accepted the more often the more
    of them there are, so what was seen of a drafter on young rows must not be held against it on old ones.

    >>> ages = Ages(2)
    >>> ages.record(3, np.array([2, 0]), np.array([2, 2]))
    >>> ages.lengths(3) == ages.lengths(5), ages.knows(3), ages.knows(5)  # as at the nearest age there is
    (True, True, False)
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.at: dict[int, Acceptance] = {}

    def lengths(self, age: int) -> list[float]:
        return (self.at.get(age) or self._near(age) or Acceptance(self.depth)).lengths

    def knows(self, age: int) -> bool:
        return age in self.at

    def record(self, age: int, accepted: np.ndarray, most: np.ndarray, steps: int = 1) -> None:
        if age not in self.at:
            self.at[age] = Acceptance(self.depth)
            if (near := self._near(age, but=age)) is not None:
                self.at[age].lean(near)
        self.at[age].record(accepted, most, steps)

    def fade(self, share: float) -> None:
        for acceptance in self.at.values():
            acceptance.fade(share)

    def load(self, state: Sequence[tuple[int, list[float], list[float]]]) -> None:
        """Drafts may have been longer, or shorter."""
        for age, hits, tries in state:
            mine = self.at[age] = Acceptance(self.depth)
            n = min(len(hits), self.depth)
            mine.hits[:n], mine.tries[:n] = hits[:n], tries[:n]
            mine.fade(1.0)

    def _near(self, age: int, but: int | None = None) -> Acceptance | None:
        """Of the nearest age, the younger of two."""
        known = (other for other in self.at if other != but)
        nearest = min(known, key=lambda other: (abs(other - age), other), default=None)
        return None if nearest is None else self.at[nearest]


def age_of(batch: int, kv_bytes: float) -> int:
    """
    >>> [age_of(4, 4 * kib * 1024) for kib in (0, 63, 64, 127, 128)]
    [0, 5, 6, 6, 7]
    """
    return max(0, int(kv_bytes / max(1, batch) / 1024).bit_length() - 1)


class Controller:
    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        serves: Callable[[Arm, int], bool] = lambda arm, batch: True,
        bucket: Callable[[int], int] = lambda batch: 1 << max(0, batch - 1).bit_length(),
        seed: int = 0,
        epsilon: float = 0.1,
        spend: float = 0.005,
        hysteresis: float = 0.03,
        margin: float = 0.1,
        dwell: int = 2,
    ) -> None:
        """serves: whether an arm's graphs exist for a batch; bucket: the size a batch is padded to.

        A choice stands for `dwell` turns of the engine: steps, or bursts of them. With chance epsilon it is a trial of
        another arm, if that fits into the share of all time that trials may lose (`spend`, OURS). Rows of a new age are
        a trial of each drafter that promises something (OURS). An arm is left for one that is better by `hysteresis`.
        Drafts must promise more than plain steps by `margin` (OURS): what is accepted is a mean over rows, and a batch
        waits for those that accept least.
        """
        self.arms = [OFF, *(arm for arm in arms if arm != OFF)]
        self.serves, self.bucket = serves, bucket
        self.epsilon, self.spend, self.hysteresis, self.dwell = epsilon, spend, hysteresis, dwell
        self.margin = margin
        self.generator = np.random.default_rng(seed)
        drafters = dict.fromkeys(arm.drafter for arm in self.arms)
        self.acceptance = {d: Ages(max(a.depth for a in self.arms if a.drafter == d)) for d in drafters}
        self.latency = Latency(self.arms)
        self.current = OFF
        self._trial: Arm | None = None
        self._left = 0
        """Turns for which the choice stands, trial or not, while the batch stays in this cell."""
        self._steps = 1
        """Of a turn, lately."""
        self._cell: Cell = (0, 0)
        self._spent = self._lost = 0.0
        """Seconds in all, and by trials."""
        self._last = OFF
        self._tally = AcceptTally()

    # ---- choosing

    def choose(self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()) -> Arm:
        if not self.latency.known(OFF):
            return OFF  # all other times are guessed from it
        cell = self.cell(batch, kv_bytes)
        held = self._trial or self.current
        if self._left > 0 and cell == self._cell and self._open(held, batch, retired):
            self._left -= 1
            return held
        arms = [arm for arm in self.arms if self._open(arm, batch, retired)]
        self._trial, self._left, self._cell = None, self.dwell - 1, cell
        age = age_of(batch, kv_bytes)
        rates = {arm: self.rate(arm, batch, cell, age) for arm in arms}
        worth = {arm: rate * (1 + self.margin if arm == OFF else 1) for arm, rate in rates.items()}
        best = max(arms, key=lambda arm: worth[arm])
        if self.current not in worth or worth[best] > worth[self.current] * (1 + self.hysteresis):
            self.current = best
        self._trial = self._untried(rates, age) or self._affordable(rates, cell)
        return self._trial or self.current

    def _untried(self, rates: Mapping[Arm, float], age: int) -> Arm | None:
        """The best arm of a drafter nobody has tried at this age, if there is hope."""
        known = {"", self.current.drafter, *(name for name, ages in self.acceptance.items() if ages.knows(age))}
        new = [arm for arm in rates if arm.drafter not in known]
        best = max(new, key=lambda arm: rates[arm], default=None)
        return best if best is not None and rates[best] > HOPELESS * rates[self.current] else None

    def _affordable(self, rates: Mapping[Arm, float], cell: Cell) -> Arm | None:
        """Now and then any other arm."""
        others = [arm for arm in rates if arm != self.current]
        if not others or self.generator.random() >= self.epsilon:
            return None
        trial = others[int(self.generator.integers(len(others)))]
        seconds = self.dwell * self._steps * self.latency.seconds(trial, cell)
        loss = seconds * max(0.0, 1 - rates[trial] / rates[self.current])
        return trial if self._lost + loss <= self.spend * self._spent else None

    def _open(self, arm: Arm, batch: int, retired: Set[str]) -> bool:
        return arm.depth == 0 or (arm.drafter not in retired and self.serves(arm, batch))

    def rate(self, arm: Arm, batch: int, cell: Cell, age: int = 0) -> float:
        """Expected tokens a second."""
        return batch * self.acceptance[arm.drafter].lengths(age)[arm.depth] / self.latency.seconds(arm, cell)

    def cell(self, batch: int, kv_bytes: float) -> Cell:
        return cell_of(self.bucket(batch), kv_bytes)

    # ---- learning

    def record(
        self,
        arm: Arm,
        batch: int,
        seconds: float,
        *,
        steps: int = 1,
        accepted: np.ndarray | None = None,
        most: np.ndarray | None = None,
        kv_bytes: float = 0.0,
        typical: bool = True,
    ) -> None:
        cell, age = self.cell(batch, kv_bytes), age_of(batch, kv_bytes)
        if arm.depth and accepted is not None:
            wanted = np.full(accepted.size, arm.depth) if most is None else most
            self.acceptance[arm.drafter].record(age, accepted, wanted, steps)
        if arm == self._trial:
            best = self.rate(self.current, batch, cell, age)
            self._lost += max(0.0, seconds * (1 - self.rate(arm, batch, cell, age) / best))
        # The step of a switch may pay for the switch.
        if typical and (arm == self._last or not self.latency.known(arm, cell)):
            self.latency.record(arm, cell, seconds / steps)
        self._last, self._steps = arm, steps
        self._spent += seconds
        self._tally.add(arm, seconds, accepted)

    def updated(self) -> None:
        """New weights: half of what is known about acceptance is forgotten, nothing about time."""
        for ages in self.acceptance.values():
            ages.fade(0.5)

    # ---- telling

    def metrics(self) -> dict[str, float]:
        return self._tally.take()

    def state_dict(self) -> dict[str, Any]:
        return {
            "current": self.current.name,
            "acceptance": {
                name: [[age, a.hits.tolist(), a.tries.tolist()] for age, a in ages.at.items()]
                for name, ages in self.acceptance.items()
            },
            "latency": self.latency.state(),
            "seconds": [self._spent, self._lost],
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is known of arms and drafters that still exist."""
        by_name = {arm.name: arm for arm in self.arms}
        self.current = by_name.get(state["current"], OFF)
        self._trial, self._left, self._last = None, 0, OFF
        for name in self.acceptance.keys() & state["acceptance"].keys():
            self.acceptance[name].load(state["acceptance"][name])
        self.latency.load(state["latency"])
        self._spent, self._lost = state["seconds"]
        self.generator.bit_generator.state = state["generator"]


# ---- bandit
#
# TLT's tuner, to compare ours with: BEG-MAB, a bucketed epsilon-greedy bandit, behind its elastic switch.
#
# As published (arXiv 2511.16665): arms are grouped by tokens to verify, and each group serves a range of batch sizes,
# the larger the fewer rows; within the group the arm with the best median reward over a window, never-tried ones first.
# Speculation is off above a number of rows, on after ten turns at or below it, and stays on until the step ends. The
# numbers are those of its released code, and a fifth threshold for a fifth size: halfway from the fourth to the switch.
# With one arm a group, as shipped, there is nothing to explore: a lookup table. Not copied from the code: a first
# reward of 0, and a device synchronisation at every step. It implements `Chooser`.


class Bandit:
    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        serves: Callable[[Arm, int], bool] = lambda arm, batch: True,
        seed: int = 0,
        epsilon: float = 0.1,
        window: int = 300,
        thresholds: Sequence[int] = (1, 2, 5, 21, 27),
        switch: int = 32,
        patience: int = 10,
    ) -> None:
        """thresholds: the least batch of each group, at least one for each size; switch: rows above which speculation
        is off; patience: turns."""
        self.arms = [arm for arm in arms if arm != OFF]
        self.serves, self.epsilon, self.thresholds = serves, epsilon, tuple(thresholds)
        self.switch, self.patience = switch, patience
        self.generator = np.random.default_rng(seed)
        sizes = sorted({arm.tokens for arm in self.arms}, reverse=True)
        self.groups = [[arm for arm in self.arms if arm.tokens == size] for size in sizes]
        """The most tokens to verify first: for the smallest batches."""
        assert len(self.groups) <= len(self.thresholds), "a size without a threshold would serve no batch"
        self.rewards: dict[str, deque[float]] = {arm.name: deque(maxlen=window) for arm in self.arms}
        self.calm = 0
        """Steps in a row at or below the switch; the patience once it is on."""
        self._trial: Arm | None = None
        """What chance chose. It stands for a second turn unless it was in use in the first: the engine may have
        launched that one before it asked, and EAGLE cannot follow another drafter without a pause."""
        self._tally = AcceptTally()

    def choose(self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()) -> Arm:
        if not self._on(batch):
            return OFF
        arms = [arm for arm in self.group(batch) if self.serves(arm, batch) and arm.drafter not in retired]
        if not arms:
            return OFF
        if len(arms) == 1:
            return arms[0]
        held, self._trial = self._trial, None
        if held in arms:
            return held
        if self.generator.random() < self.epsilon:
            self._trial = arms[int(self.generator.integers(len(arms)))]
        return self._trial or max(arms, key=self.score)

    def group(self, batch: int) -> list[Arm]:
        """The arms of a batch size; with fewer groups than thresholds the last serves all larger batches.

        >>> b = Bandit([Arm("eagle", 8, 4, v) for v in (48, 32, 16, 8)])
        >>> [b.group(n)[0].tokens for n in (1, 2, 4, 5, 20, 21, 99)]
        [48, 32, 32, 16, 16, 8, 8]
        >>> b = Bandit([Arm("eagle", depth) for depth in (2, 4, 8, 16, 32)])
        >>> [b.group(n)[0].depth for n in (1, 2, 4, 5, 20, 21, 26, 27, 32)]
        [32, 16, 16, 8, 8, 4, 4, 2, 2]
        """
        if not self.groups:
            return []
        reached = sum(batch >= threshold for threshold in self.thresholds)
        return self.groups[min(max(reached, 1), len(self.groups)) - 1]

    def score(self, arm: Arm) -> float:
        """Median reward; +inf for an arm that was never tried."""
        rewards = self.rewards[arm.name]
        return median(rewards) if rewards else float("inf")

    def record(
        self,
        arm: Arm,
        batch: int,
        seconds: float,
        *,
        steps: int = 1,
        accepted: np.ndarray | None = None,
        most: np.ndarray | None = None,
        kv_bytes: float = 0.0,
        typical: bool = True,
    ) -> None:
        """Reward r = a * batch / seconds with a = mean accepted + 1, of a step."""
        self._tally.add(arm, seconds, accepted)
        if arm == self._trial:
            self._trial = None
        if arm.name in self.rewards and accepted is not None and typical:
            self.rewards[arm.name].append((float(accepted.sum()) / (batch * steps) + 1) * batch * steps / seconds)

    def updated(self) -> None:
        """The step has ended: off again."""
        self.calm = 0

    def metrics(self) -> dict[str, float]:
        return self._tally.take()

    def state_dict(self) -> dict[str, Any]:
        rewards = {name: list(rewards) for name, rewards in self.rewards.items()}
        return {"rewards": rewards, "calm": self.calm, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, rewards in state["rewards"].items():
            if name in self.rewards:
                self.rewards[name].clear()
                self.rewards[name].extend(rewards)
        self.calm = state["calm"]
        self.generator.bit_generator.state = state["generator"]

    def _on(self, batch: int) -> bool:
        if self.calm < self.patience:
            self.calm = self.calm + 1 if batch <= self.switch else 0
        return self.calm >= self.patience
