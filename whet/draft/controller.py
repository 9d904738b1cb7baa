"""Chooses how to speculate, step by step: the arm that writes most tokens a second, or OFF.

Tokens and time are estimated apart, so that what is learnt at one batch size serves at all: how likely a drafter's i-th
token is accepted, per drafter and length of the rows (`Ages`); how long a step takes, per arm, batch size and bytes of
KV, from the host's clock.
The rate of an arm is B * (accept length) / t. The engine asks before each step and tells after it; it may obey or not.
Decisions change the speed, never a token, and do not repeat from run to run: they hang on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from whet.draft.base import OFF, Arm
from whet.draft.latency import Cell, Latency, cell_of
from whet.draft.tally import Tally

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
        self._tally = Tally()

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
