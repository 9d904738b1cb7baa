"""Chooses how to speculate, step by step: the arm that writes most tokens a second, or OFF.

Tokens and time are estimated apart, so that what is learnt at one batch size serves at all: how likely a drafter's i-th
token is accepted, per drafter; how long a step takes, per arm, batch size and bytes of KV, from the host's clock.
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

    def _sum(self) -> None:
        total, alive, chance = 1.0, 1.0, PRIOR
        self.lengths = [total]
        for hits, tries in zip(self.hits.tolist(), self.tries.tolist(), strict=True):
            chance = hits / tries if tries >= 1 else chance
            alive *= chance
            total += alive
            self.lengths.append(total)


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
        another arm, if that fits into the share of all time that trials may lose (`spend`, OURS). An arm is left for
        one that is better by `hysteresis`. Drafts must promise more than plain steps by `margin` (OURS): what is
        accepted is a mean over rows, and a batch waits for those that accept least.
        """
        self.arms = [OFF, *(arm for arm in arms if arm != OFF)]
        self.serves, self.bucket = serves, bucket
        self.epsilon, self.spend, self.hysteresis, self.dwell = epsilon, spend, hysteresis, dwell
        self.margin = margin
        self.generator = np.random.default_rng(seed)
        drafters = dict.fromkeys(arm.drafter for arm in self.arms)
        self.acceptance = {d: Acceptance(max(a.depth for a in self.arms if a.drafter == d)) for d in drafters}
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
        arms = [arm for arm in self.arms if arm == OFF or (self.serves(arm, batch) and arm.drafter not in retired)]
        cell = self.cell(batch, kv_bytes)
        held = self._trial or self.current
        if self._left > 0 and cell == self._cell and held in arms:
            self._left -= 1
            return held
        self._trial, self._left, self._cell = None, self.dwell - 1, cell
        rates = {arm: self.rate(arm, batch, cell) for arm in arms}
        worth = {arm: rate * (1 + self.margin if arm == OFF else 1) for arm, rate in rates.items()}
        best = max(arms, key=lambda arm: worth[arm])
        if self.current not in worth or worth[best] > worth[self.current] * (1 + self.hysteresis):
            self.current = best
        if len(arms) > 1 and self.generator.random() < self.epsilon:
            others = [arm for arm in arms if arm != self.current]
            trial = others[int(self.generator.integers(len(others)))]
            seconds = self.dwell * self._steps * self.latency.seconds(trial, cell)
            loss = seconds * max(0.0, 1 - rates[trial] / rates[self.current])
            if self._lost + loss <= self.spend * self._spent:
                self._trial = trial
                return trial
        return self.current

    def rate(self, arm: Arm, batch: int, cell: Cell) -> float:
        """Expected tokens a second."""
        return batch * self.acceptance[arm.drafter].lengths[arm.depth] / self.latency.seconds(arm, cell)

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
        cell = self.cell(batch, kv_bytes)
        if arm.depth and accepted is not None:
            wanted = np.full(accepted.size, arm.depth) if most is None else most
            self.acceptance[arm.drafter].record(accepted, wanted, steps)
        if arm == self._trial:
            best = self.rate(self.current, batch, cell)
            self._lost += max(0.0, seconds * (1 - self.rate(arm, batch, cell) / best))
        # The step of a switch may pay for the switch.
        if typical and (arm == self._last or not self.latency.known(arm, cell)):
            self.latency.record(arm, cell, seconds / steps)
        self._last, self._steps = arm, steps
        self._spent += seconds
        self._tally.add(arm, seconds, accepted)

    def updated(self) -> None:
        """New weights: half of what is known about acceptance is forgotten, nothing about time."""
        for acceptance in self.acceptance.values():
            acceptance.fade(0.5)

    # ---- telling

    def metrics(self) -> dict[str, float]:
        return self._tally.take()

    def state_dict(self) -> dict[str, Any]:
        return {
            "current": self.current.name,
            "acceptance": {k: [a.hits.tolist(), a.tries.tolist()] for k, a in self.acceptance.items()},
            "latency": self.latency.state(),
            "seconds": [self._spent, self._lost],
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is known of arms and drafters that still exist."""
        by_name = {arm.name: arm for arm in self.arms}
        self.current = by_name.get(state["current"], OFF)
        self._trial, self._left, self._last = None, 0, OFF
        for name, (hits, tries) in state["acceptance"].items():
            if name in self.acceptance:
                mine = self.acceptance[name]
                n = min(len(hits), mine.hits.size)
                mine.hits[:n], mine.tries[:n] = hits[:n], tries[:n]
                mine.fade(1.0)
        self.latency.load(state["latency"])
        self._spent, self._lost = state["seconds"]
        self.generator.bit_generator.state = state["generator"]
