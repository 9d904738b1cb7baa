"""Ideas of neighbouring papers, each a few lines around a gate, a source or a whole curriculum; `build.py` adds them.

`KimiSource` (Kimi k1.5) draws prompts by their failure rate, `Unsolved` (ScaleRL) leaves out solved prompts, and
`Reset` (ProRL) renews reference and optimiser. docs/curricula-neighbours.md says what to expect of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.curriculum.base import Curriculum, Source, Wrapper, named
from whet.curriculum.rho import CuresSource
from whet.curriculum.source import Ids, Returns, WeightedRows
from whet.types import Batch, Clock, Report, Request, Rollout

# ---- sources that count verdicts


class VerdictCounts(Returns):
    """Counts right and judged rollouts of each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, list[int]] = {}  # [right, judged] of each prompt that was visited

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            count = self.counts.setdefault(rollout.prompt_id, [0, 0])
            count[0] += rollout.verdict == "right"
            count[1] += 1


def weight(right: float, judged: float) -> float:
    """1 - s with s = (right + 1) / (judged + 2), the mean of a Beta(1, 1) after the evidence."""
    return (judged - right + 1) / (judged + 2)


class KimiSource(VerdictCounts):
    """Kimi k1.5's prioritised sampling (arXiv 2501.12599, section 2.3.4): prompts are drawn in proportion to 1 - s.

    s is the success rate of a prompt. The paper starts from ten rollouts of every prompt. OURS starts from none and
    takes the mean of a Beta(1, 1) posterior (`weight`), so an unseen prompt counts as half solved and no prompt is
    ever excluded. The prompts of one pick differ, as long as there are enough. Prompts that are never solved keep
    being drawn, so a gate that screens should stand over this source. Each draw is from (seed, number of the draw).
    """

    state_names = ("ids", "counts", "draws", "returned")

    def __init__(self, ids: Sequence[str], seed: int):
        super().__init__()
        self.ids, self.seed = Ids.of(ids), seed
        self.draws = 0
        self._weighted = WeightedRows(len(ids))
        self._weighted.fill(np.full(len(ids), weight(0, 0)))

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked = self.take_back(k)
        while len(picked) < k:
            rng = np.random.default_rng((self.seed, self.draws))
            rows = self._weighted.draw(min(k - len(picked), len(self.ids)), rng)
            self.draws += 1
            ids = [self.ids[row] for row in rows.tolist()]
            self._weigh(ids)  # a drawn prompt has no weight until the draw is over
            picked += ids
        return picked

    def _weigh(self, ids: Sequence[str]) -> None:
        weights = [weight(*self.counts.get(prompt_id, (0, 0))) for prompt_id in ids]
        self._weighted.put(self.ids.rows(ids), np.array(weights))

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        super().observe(rollouts)
        self._weigh(sorted({rollout.prompt_id for rollout in rollouts}))

    def metrics(self) -> dict[str, float]:
        solved = 1.0 - self._weighted.total / len(self.ids)
        return named({"prompts": len(self.ids), "visited": len(self.counts), "success_mean": solved})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._weighted.fill(np.full(len(self.ids), weight(0, 0)))
        self._weigh(list(self.counts))


class Unsolved(VerdictCounts):
    """No-positive-resampling (ScaleRL, arXiv 2510.13786): prompts that are nearly always solved are left out.

    Wraps any source of `prompts` ids and skips those whose pass rate over all their judged rollouts reaches `solved`
    (0.9 in the paper). OURS: a prompt that got no verdict is asked again whatever its rate, and if a whole pass over
    the data finds no unsolved prompt, the source is dry, which the gate's starvation policy answers.
    """

    state_names = ("source", "counts", "skipped", "returned")

    def __init__(self, source: Source, *, prompts: int, solved: float = 0.9):
        super().__init__()
        self.source, self.prompts, self.solved = source, prompts, solved
        self.skipped = 0

    def pick(self, k: int, clock: Clock) -> list[str]:
        picked = self.take_back(k)
        passed = 0  # solved prompts since the last unsolved one
        while len(picked) < k and passed < self.prompts and (some := self.source.pick(k - len(picked), clock)):
            for prompt_id in some:
                right, judged = self.counts.get(prompt_id, (0, 0))
                if judged > 0 and right >= self.solved * judged:
                    passed += 1
                    self.skipped += 1
                else:
                    passed = 0
                    picked.append(prompt_id)
        return picked

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        super().observe(rollouts)
        self.source.observe(rollouts)

    def metrics(self) -> dict[str, float]:
        return {**self.source.metrics(), **named({"skipped_solved": self.skipped})}

    def asked_for(self, requests: Sequence[Request]) -> None:
        self.source.asked_for(requests)

    def pictures(self) -> dict[str, Any]:
        return self.source.pictures()


# ---- wrappers


class Reset(Wrapper):
    """Marks a batch now and then, with which reference and optimiser start anew. The batches stay the same.

    `every`: updates between resets, 0 for none; `subset`: the first batch of each subset but the first causes one.
    Under a KL term the reference holds the policy back once it has moved; the policy of today as reference lets it go
    on. ProRL (arXiv 2505.24864) resets by hand when a validation score stalls; a fixed number of updates is OURS. The
    subsets of CurES (arXiv 2510.01037) are runs of their own from the weights of the last one.
    """

    state_names = ("inner", "since", "resets", "due", "turn")

    def __init__(self, inner: Curriculum, *, every: int = 0, subset: CuresSource | None = None):
        super().__init__(inner)
        self.every, self.subset = every, subset
        self.since = self.resets = 0
        self.due = False
        self.turn = 0  # turn of the subset at the last batch

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(clock)
        if batch is None:
            return None
        if self.subset is not None:
            self.due, self.turn = self.due or self.subset.turn > self.turn, max(self.subset.turn, 0)
        if not self.due:
            return batch
        self.due = False
        self.resets += 1
        return replace(batch, reset_reference=True, reset_optimizer=True)

    def updated(self, clock: Clock, report: Report) -> None:
        self.inner.updated(clock, report)
        self.since += 1
        if 0 < self.every <= self.since:
            self.due, self.since = True, 0

    def metrics(self) -> dict[str, float]:
        metrics = self.inner.metrics()
        return {**metrics, "curriculum/resets": metrics.get("curriculum/resets", 0.0) + self.resets}
