"""A batch that shrinks, in simulated time: how fast a chooser gets it written."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from whet.draft.base import OFF, Chooser, DraftArm, StepReport


class World:
    """Steps cost base + token * B * (tokens to verify), with noise; acceptance is the same at every place."""

    def __init__(
        self, accept: dict[str, float], base: float = 1e-3, token: float = 4e-6, seed: int = 0
    ) -> None:
        self.accept, self.base, self.token = accept, base, token
        self.rng = np.random.default_rng(seed)

    def seconds(self, arm: DraftArm, batch: int) -> float:
        drafting = 5e-5 if arm.depth else 0.0
        return (self.base + self.token * batch * arm.tokens + drafting) * float(
            self.rng.uniform(0.97, 1.03)
        )

    def accepted(self, arm: DraftArm, batch: int) -> np.ndarray:
        if not arm.depth:
            return np.zeros(batch, int)
        hit = self.rng.random((batch, arm.depth)) < self.accept[arm.drafter]
        return np.logical_and.accumulate(hit, axis=1).sum(1)


class Stepped(World):
    """Rows are padded to powers of two, a forward is expensive beyond 200 tokens, suffix drafts cost 0.3 ms."""

    def seconds(self, arm: DraftArm, batch: int) -> float:
        tokens = (1 << max(0, batch - 1).bit_length()) * arm.tokens
        drafting = {"": 0.0, "suffix": 3e-4}.get(arm.drafter, 5e-5)
        seconds = self.base * max(1.0, tokens / 200) + self.token * tokens + drafting
        return seconds * float(self.rng.uniform(0.9, 1.1))


class Fixed(Chooser):
    """One arm, always; OFF where it is not served."""

    def __init__(self, arm: DraftArm, batch: int = 10**9) -> None:
        super().__init__()
        self.arm, self.most = arm, batch

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        return self.arm if batch <= self.most else OFF


def lengths(rows: int = 128, seed: int = 0) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(5.5, 1.0, rows), 4000).astype(int) + 1


def write(chooser: Chooser, world: World, length: np.ndarray) -> tuple[float, list[DraftArm]]:
    """Seconds until all rows are written, and the arms chosen."""
    left, total, arms = length.copy(), 0.0, []
    while left.size:
        arm = chooser.choose(left.size, 2**20 * left.size)
        seconds, accepted = world.seconds(arm, left.size), world.accepted(arm, left.size)
        chooser.record(
            StepReport(arm, left.size, seconds, accepted=accepted, kv_bytes=2**20 * left.size)
        )
        total += seconds
        arms.append(arm)
        left = left - 1 - accepted
        left = left[left > 0]
    return total, arms
