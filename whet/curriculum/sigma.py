"""CurES's sigma of a prompt, by which rollouts are divided: from its pass rate alone, or from the gradient (eq. 21).

`cures.py` asks for the sigmas of the prompts of a batch. The gradient form needs the scores of responses, which only
the learner knows: `Scored` wraps the whole curriculum of a run or stage, asks for them (`needs`), remembers which
rollouts a batch had, and hands what the learner reports to `moments.py`. It changes no request and no batch by itself.
Which prompts are drawn is decided by sqrt(p (1 - p)) in either form: eq. 11 bounds what a step can gain by it, while
eq. 21 is about the noise of the estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.curriculum.allocation import sigma_gradient, sigma_of
from whet.curriculum.base import Curriculum
from whet.curriculum.moments import Moments
from whet.curriculum.rho import CuresSource
from whet.types import Batch, Clock, Group, Key, Report, Request, Rollout, Verdict

SCORE = "score"

Sigmas = Callable[[Sequence[str]], np.ndarray]
"""Prompt ids -> their sigmas. Only their ratios matter."""


def rate_sigmas(source: CuresSource) -> Sigmas:
    """sqrt(p (1 - p)): eq. 21 where all scores have norm one and right and wrong the same mean."""
    return lambda prompt_ids: sigma_of(source.spread_rates(source.posterior.rows(prompt_ids)))


class GradientSigmas:
    """Eq. 21, with the pass rate of the posterior and the moments of the scores reported so far.

    A new subset of the source forgets every prompt's moments, as it forgets their verdicts.
    """

    def __init__(self, source: CuresSource):
        self.source = source
        self.moments = Moments(len(source.ids))
        self.turn = source.turn
        self.moved = 0.0
        """Of the last rollouts divided among several prompts, the share that the pass rate alone would give to
        others."""

    def __call__(self, prompt_ids: Sequence[str]) -> np.ndarray:
        self._follow()
        rows = self.source.posterior.rows(prompt_ids)
        rates = self.source.spread_rates(rows)
        sigmas, plain = sigma_gradient(rates, *self.moments.of(rows).T), sigma_of(rates)
        if len(rows) > 1 and sigmas.any():
            self.moved = float(np.abs(sigmas / sigmas.sum() - plain / plain.sum()).sum() / 2)
        return sigmas

    def learn(self, groups: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> None:
        """(prompt id, scores of its right responses, of its wrong ones) of an update's groups."""
        self._follow()
        rows = self.source.posterior.rows([prompt_id for prompt_id, _, _ in groups]).tolist()
        self.moments.update((row, right, wrong) for row, (_, right, wrong) in zip(rows, groups, strict=True))

    def _follow(self) -> None:
        if self.turn != self.source.turn:
            self.turn = self.source.turn
            self.moments.clear()

    def metrics(self) -> dict[str, float]:
        right, wrong, gap = self.moments.usual.tolist()
        return {
            "curriculum/rollouts_moved": self.moved,
            "curriculum/score_right": right,
            "curriculum/score_wrong": wrong,
            "curriculum/score_gap": max(gap, 0.0),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.state_dict(), "turn": self.turn, "moved": self.moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])
        self.turn, self.moved = state["turn"], state["moved"]


class Scored:
    """A curriculum whose gate divides by `sigmas`, and the way of the learner's scores to them."""

    def __init__(self, inner: Curriculum, sigmas: GradientSigmas):
        self.inner, self.sigmas = inner, sigmas
        self.needs = inner.needs | {SCORE}
        self.trained: list[tuple[int, str, list[int], list[int]]] = []
        """Group id, prompt id, and which of its rollouts were right and wrong, of the batch that trains now."""

    def plan(self, clock: Clock) -> list[Request]:
        return self.inner.plan(clock)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.inner.observe(rollouts)

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(clock)
        if batch is not None:
            self.trained = [
                (group.group_id, group.prompt_id, _indexes(group, "right"), _indexes(group, "wrong"))
                for group in batch.groups
            ]
        return batch

    def updated(self, clock: Clock, report: Report) -> None:
        groups = [
            (prompt_id, _scores(report, group_id, right), _scores(report, group_id, wrong))
            for group_id, prompt_id, right, wrong in self.trained
        ]
        self.sigmas.learn([(name, right, wrong) for name, right, wrong in groups if len(right) or len(wrong)])
        self.trained = []
        self.inner.updated(clock, report)

    def holds(self) -> set[int]:
        return self.inner.holds()

    def metrics(self) -> dict[str, float]:
        return {**self.inner.metrics(), **self.sigmas.metrics()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "sigmas": self.sigmas.state_dict(),
            "trained": [list(group) for group in self.trained],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.sigmas.load_state_dict(state["sigmas"])
        self.trained = [(group_id, prompt_id, right, wrong) for group_id, prompt_id, right, wrong in state["trained"]]


def _indexes(group: Group, verdict: Verdict) -> list[int]:
    return [rollout.index for rollout in group.rollouts if rollout.verdict == verdict]


def _scores(report: Report, group_id: int, indexes: Sequence[int]) -> np.ndarray:
    """Of those that have one: a rollout without advantage never went through the model."""
    keys: list[Key] = [(group_id, index) for index in indexes]
    return np.array([report.signals[key][SCORE] for key in keys if SCORE in report.signals.get(key, ())])
