"""The protocol of a learner, as the loop uses it; and the team of those that train one model together.

`whet.learn.learner.Learner` trains the model of this process; `whet.cluster.fleet.Chorus` is the learner of several
processes. Each of these makes the samples of the whole batch, with the weights that they have in its loss, and runs its
share of them. So gradients and sums are added, never averaged, and each learner takes the same optimiser step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from whet.learn.checkpoint import Checkpoint
from whet.types import Batch, Key, Report

if TYPE_CHECKING:  # a part of whet runs without torch
    from torch import Tensor

    from whet.learn.samples import Sample

T = TypeVar("T")
# pairs of (prompt ids, response ids), one update
Lesson = Sequence[tuple[Sequence[int], Sequence[int]]]


class Trainer(Protocol):
    version: int  # counts the batches that were trained on
    scored_s: float  # seconds of the last step for log-probs under the old policy and the reference
    can_signal: frozenset[str]  # signals per rollout that a curriculum may ask for

    def step(self, batch: Batch, progress: float, needs: Set[str]) -> Report:
        """Train on a batch with traces. The engine must be told of the new weights by `Engine.update`."""

    def entropies(self, keys: Iterable[Key]) -> dict[Key, np.ndarray]:
        """The entropy at each token of these rollouts; only of those on which the last step trained in this process."""

    def warm_start(
        self,
        batches: Iterable[Lesson],
        *,
        steps: int,
        lr: float,
        on_step: Callable[[int, float], None],
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


class Team:
    """One learner by itself; `whet.cluster.ranks.Ranks` is a team of processes."""

    rank = 0
    size = 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the team. All members give tensors of the same shapes."""

    def give(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> None:
        """Replace each tensor by that of the member that owns it."""

    def gather(self, value: T) -> list[T]:
        """The values of all members, by rank."""
        return [value]

    def rounds(self, passes: int) -> int:
        """How many passes this member makes that has so many packs."""
        return passes

    def norm(self, norm: float) -> float:
        """The norm of the whole gradient, from that of what this member holds of it."""
        return norm

    def divide(self, samples: list[Sample]) -> list[Sample]:
        """The samples that this member runs, in their order."""
        if self.size == 1:
            return samples
        mine = share_of(samples, self.size)
        return [sample for sample, rank in zip(samples, mine, strict=True) if rank == self.rank]


def share_of(samples: Sequence[Sample], size: int) -> list[int]:
    """The rank that runs each sample. Groups stay whole, so that a prompt is fed once; the next goes to the rank with
    the fewest tokens so far, the lowest of those that are equal.

    >>> from whet.learn.samples import Sample
    >>> def sample(group, tokens): return Sample((group, 0), np.zeros(2), np.zeros(tokens), np.zeros(tokens), 1, 1, 1)
    >>> share_of([sample(0, 8), sample(1, 3), sample(1, 3), sample(2, 5), sample(3, 1)], 2)
    [0, 1, 1, 1, 0]
    """
    tokens: dict[int, int] = {}
    for sample in samples:
        tokens[sample.key[0]] = tokens.get(sample.key[0], sample.prompt.size) + sample.response.size
    ranks = spread(tokens, size)
    return [ranks[sample.key[0]] for sample in samples]


def spread(costs: Mapping[int, int], count: int) -> dict[int, int]:
    """How things of different cost are divided among a few places: groups among learners or engines, parameters among
    processes that own them. The next goes where the least lies so far, to the first of equals.

    >>> spread({7: 5, 8: 2, 9: 2, 4: 9}, 2)
    {7: 0, 8: 1, 9: 1, 4: 1}
    """
    load = [0] * count
    places = dict[int, int]()
    for one, cost in costs.items():
        places[one] = load.index(min(load))
        load[places[one]] += cost
    return places
