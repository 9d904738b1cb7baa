"""No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt that is solved nearly always is asked no more.

Wraps any source and leaves out the prompts whose pass rate over all their judged rollouts so far is 0.9 or more.
They are counted. OURS: a prompt that got no verdict is asked again whatever its rate, and if a whole pass over the
data finds nobody left, the source is dry, which is for the gate's starvation policy to answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.curriculum.base import Source
from whet.types import Clock, Rollout

SOLVED = 0.9


class Unsolved:
    """`prompts`: how many the source has. Finding k prompts takes about k / (share not solved) looks.

    >>> from whet.curriculum.source import UniformSource
    >>> source = Unsolved(UniformSource(["a", "b"], seed=0), prompts=2)
    >>> source.counts["a"] = [9, 10]
    >>> source.pick(2, Clock(step=0, version=0, groups=1, free=None, tokens=0, progress=0.0))
    ['b', 'b']
    """

    def __init__(self, source: Source, *, prompts: int, solved: float = SOLVED):
        self.source = source
        self.prompts = prompts
        self.solved = solved
        self.counts: dict[str, list[int]] = {}
        """[right, judged] of each prompt that was visited."""
        self.skipped = 0
        self._returned: list[str] = []

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked, self._returned = self._returned[:k], self._returned[k:]
        in_vain = 0  # since the last one that will do
        while len(picked) < k and in_vain < self.prompts:
            some = self.source.pick(k - len(picked), clock)
            if not some:
                break
            for prompt_id in some:
                if self.is_solved(prompt_id):
                    in_vain += 1
                    self.skipped += 1
                else:
                    in_vain = 0
                    picked.append(prompt_id)
        return picked

    def is_solved(self, prompt_id: str) -> bool:
        right, judged = self.counts.get(prompt_id, (0, 0))
        return judged > 0 and right >= self.solved * judged

    def give_back(self, ids: Sequence[str]) -> None:
        self._returned = [*ids, *self._returned]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            count = self.counts.setdefault(rollout.prompt_id, [0, 0])
            count[0] += rollout.verdict == "right"
            count[1] += 1
        self.source.observe(rollouts)

    def metrics(self) -> dict[str, float]:
        return {**self.source.metrics(), "curriculum/skipped_solved": float(self.skipped)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self.source.state_dict(),
            "counts": {prompt_id: list(count) for prompt_id, count in self.counts.items()},
            "skipped": self.skipped,
            "returned": list(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.counts = {prompt_id: list(count) for prompt_id, count in state["counts"].items()}
        self.skipped = state["skipped"]
        self._returned = list(state["returned"])
