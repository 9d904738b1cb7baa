"""The protocol of a learner, as the loop and the assembly use it.

`whet.learn.learner.Learner` trains the model of this process; `whet.cluster.chorus.Chorus` is the learner of several
processes that train one model together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from whet.learn.checkpoint import Checkpoint
from whet.types import Batch, Key, Report

Lesson = Sequence[tuple[Sequence[int], Sequence[int]]]  # pairs of (prompt ids, response ids), one update


class Trainer(Protocol):
    version: int  # counts the batches that were trained on
    scored_s: float  # seconds of the last step for log-probs under the old policy and the reference
    can_signal: frozenset[str]  # signals per rollout that a curriculum may ask for

    def step(self, batch: Batch, progress: float, needs: Set[str]) -> Report:
        """Train on a batch with traces. The engine must be told of the new weights by `Engine.update`."""

    def entropies(self, keys: Iterable[Key]) -> dict[Key, np.ndarray]:
        """The entropy at each token of these rollouts; only of those on which the last step trained in this process."""

    def warm_start(
        self, batches: Iterable[Lesson], *, steps: int, lr: float, on_step: Callable[[int, float], None]
    ) -> None:
        """Train on worked solutions before the first step; the engine must be told of the new weights."""

    def rehearse(self) -> None:
        """Prepare what would otherwise be compiled while an engine waits. Weights and moments stay."""

    def write(self, folder: Path) -> None:
        """Write the model and what its training needs into a checkpoint that is being prepared."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over weights and state of a checkpoint; the engine takes its own state over after that."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able values for the checkpoint."""
