"""TLT's tuner, to compare ours with: BEG-MAB, a bucketed epsilon-greedy bandit, behind its elastic switch.

As published (arXiv 2511.16665): arms are grouped by tokens to verify, and each group serves a range of batch sizes,
the larger the fewer rows; within the group the arm with the best median reward over a window, never-tried ones first.
Speculation is off above a number of rows, on after ten turns at or below it, and stays on until the step ends. The
numbers are those of its released code, and a fifth threshold for a fifth size: halfway from the fourth to the switch.
With one arm a group, as shipped, there is nothing to explore: a lookup table. Not copied from the code: a first reward
of 0, and a device synchronisation at every step. It implements `Chooser`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from statistics import median
from typing import Any

import numpy as np

from whet.draft.base import OFF, Arm
from whet.draft.tally import Tally


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
        self._tally = Tally()

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
