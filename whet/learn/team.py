"""What learners that train one model together add up, agree on and divide.

Every learner of a team makes the samples of the whole batch, with the weights that they have in its loss, and runs its
share of them. So gradients and sums are added, never averaged, and each learner takes the same optimiser step. `Team`
is the plain case of one learner; `whet.cluster.ranks.Ranks` is a team of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from whet.learn.samples import Sample

T = TypeVar("T")


class Team:
    """One learner by itself."""

    rank, size = 0, 1

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

    >>> import numpy as np
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
    load, places = [0] * count, dict[int, int]()
    for one, cost in costs.items():
        places[one] = load.index(min(load))
        load[places[one]] += cost
    return places
