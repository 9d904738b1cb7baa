"""Kimi k1.5's prioritised sampling (arXiv 2501.12599, section 2.3.4): a prompt comes up in proportion to 1 - s.

s is the success rate tracked for the prompt. The paper starts from ten rollouts of every prompt; OURS starts from
nothing and takes s = (right + 1) / (judged + 2), so that an unseen prompt counts as half solved and no prompt
is ever out for good. The prompts of one pick differ, as long as there are enough. Unlike curricula that look for
prompts of middling difficulty, this one keeps asking those that are never solved, and pays for them: put it under a
gate that screens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.curriculum.ids import Ids
from whet.curriculum.weighted import WeightedRows
from whet.types import Clock, Rollout


def weight(right: float, judged: float) -> float:
    """1 - s with s = (right + 1) / (judged + 2), the mean of a Beta(1, 1) after the evidence.

    >>> weight(0, 0), weight(2, 2), weight(0, 6)
    (0.5, 0.25, 0.875)
    """
    return (judged - right + 1) / (judged + 2)


class KimiSource:
    """Each draw is from (seed, number of the draw), so the state holds counts alone."""

    def __init__(self, ids: Sequence[str], seed: int):
        self.ids, self.seed = Ids.of(ids), seed
        self.draws = 0
        self.counts: dict[str, list[int]] = {}
        """[right, judged] of each prompt that was visited."""
        self._weighted = WeightedRows(len(ids))
        self._weighted.fill(np.full(len(ids), weight(0, 0)))
        self._returned: list[str] = []

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked, self._returned = self._returned[:k], self._returned[k:]
        while len(picked) < k:
            picked += self._draw(min(k - len(picked), len(self.ids)))
        return picked

    def _draw(self, k: int) -> list[str]:
        """k different prompts: who is drawn weighs nothing until the draw is over."""
        rows = self._weighted.draw(k, np.random.default_rng((self.seed, self.draws)))
        self.draws += 1
        ids = [self.ids[row] for row in rows.tolist()]
        self._weigh(ids)
        return ids

    def _weigh(self, ids: Sequence[str]) -> None:
        rows = np.array([self.ids.row(prompt_id) for prompt_id in ids], np.int64)
        self._weighted.put(rows, np.array([weight(*self.counts.get(prompt_id, (0, 0))) for prompt_id in ids]))

    def give_back(self, ids: Sequence[str]) -> None:
        self._returned = [*ids, *self._returned]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            count = self.counts.setdefault(rollout.prompt_id, [0, 0])
            count[0] += rollout.verdict == "right"
            count[1] += 1
        self._weigh(sorted({rollout.prompt_id for rollout in rollouts}))

    def metrics(self) -> dict[str, float]:
        return {
            "curriculum/prompts": float(len(self.ids)),
            "curriculum/visited": float(len(self.counts)),
            "curriculum/success_mean": 1.0 - self._weighted.total / len(self.ids),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.ids.fingerprint,
            "draws": self.draws,
            "counts": {prompt_id: list(count) for prompt_id, count in self.counts.items()},
            "returned": list(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ids.check(state["prompts"])
        self.draws = state["draws"]
        self.counts = {prompt_id: list(count) for prompt_id, count in state["counts"].items()}
        self._returned = list(state["returned"])
        self._weighted.fill(np.full(len(self.ids), weight(0, 0)))
        self._weigh(list(self.counts))
