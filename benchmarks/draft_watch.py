"""What speculation did, step by step: choosers that record each report, and figures of the records.

`draft_bench` and `benchmarks/draft_grid.py` put them into an engine; nothing here changes a token or a choice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.draft.base import OFF, Chooser, DraftArm, StepReport
from whet.draft.speculation import Columns, Speculation
from whet.fast.graphs import PROMPTS, Captures, Key

REPLAYS = 20
"""Replays of a graph that is timed."""


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step of `batch` rows, or several that were launched together."""

    arm: DraftArm
    batch: int
    seconds: float
    accepted: np.ndarray | None = None
    """Drafted tokens that were right, per row and step; None where nothing was drafted."""
    most: np.ndarray | None = None
    """How many were asked for, per row and step."""
    at: float = 0.0
    """Time of the report, on the host's clock."""
    steps: int = 1
    """How many they were."""


class Fixed(Chooser):
    """One arm for every batch that it serves, OFF for the others."""

    def __init__(
        self, arm: DraftArm, serves: Callable[[DraftArm, int], bool] = lambda arm, batch: True
    ) -> None:
        super().__init__()
        self.arm, self.serves = arm, serves

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        return self.arm if self.serves(self.arm, batch) and self.arm.drafter not in retired else OFF


class Watch(Chooser):
    """Another chooser, whose steps are written down."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self.steps: list[Step] = []

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        return self.chooser.choose(batch, kv_bytes, retired)

    def record(self, report: StepReport) -> None:
        at = time.perf_counter()
        self.steps.append(
            Step(
                report.arm,
                report.batch,
                report.seconds,
                report.accepted,
                report.most,
                at,
                report.steps,
            )
        )
        self.chooser.record(report)

    def updated(self) -> None:
        self.chooser.updated()

    def metrics(self) -> dict[str, float]:
        return self.chooser.metrics()

    def pictures(self) -> dict[str, Any]:
        return self.chooser.pictures()

    def state_dict(self) -> dict[str, Any]:
        return self.chooser.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.chooser.load_state_dict(state)

    def take(self) -> list[Step]:
        """The steps since the last call."""
        steps, self.steps = self.steps, []
        return steps


class WatchedSpeculation(Speculation):
    """Speculation whose drafts are timed on the host's clock."""

    drafting = 0.0
    """Seconds since it was last set to 0."""

    def draft(self, arm: DraftArm, rows: Columns, most: np.ndarray) -> np.ndarray:
        begin = time.perf_counter()
        drafts = super().draft(arm, rows, most)
        self.drafting += time.perf_counter() - begin
        return drafts


class WatchedCaptures(Captures):
    """Graphs whose use by drafters is counted. Those that are wanted are also timed, when they are used next: replayed
    again on the rows as they are, which leaves the same drafts, since a draft reads its rows and moves none."""

    def __init__(self, like: Captures) -> None:
        """Captures of the same steps; no graph of `like` is taken over."""
        super().__init__(like.device, like.step, like.at_rest)
        self.uses: Counter[Key] = Counter()
        """Since it was last cleared."""
        self.wanted: list[Key] = []
        self._spans: dict[Key, tuple[torch.cuda.Event, torch.cuda.Event] | float] = {}
        """Seconds of `REPLAYS` replays."""

    def replay(self, key: Key) -> Tensor:
        if key[2] not in ("", PROMPTS):
            self.uses[key] += 1
        out = super().replay(key)
        if key in self.wanted:
            self.wanted.remove(key)
            self._spans[key] = self._again(key)
        return out

    def costs(self) -> dict[Key, float]:
        """Seconds of one replay, of what was timed."""
        return {key: _seconds(span) / REPLAYS for key, span in self._spans.items()}

    def _again(self, key: Key) -> tuple[torch.cuda.Event, torch.cuda.Event] | float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(REPLAYS):
                super().replay(key)
            return time.perf_counter() - begin
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(REPLAYS):
            super().replay(key)
        after.record()
        return before, after


def _seconds(span: tuple[torch.cuda.Event, torch.cuda.Event] | float) -> float:
    if isinstance(span, float):
        return span
    before, after = span
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def accept_length(steps: Sequence[Step]) -> float | None:
    """Tokens that a row writes in a step that speculates; None if none does.

    >>> accept_length([Step(OFF, 2, 1.0), Step(DraftArm("ngram", 2), 2, 1.0, np.array([2, 1]), np.array([2, 2]))])
    2.5
    """
    reported = [step.accepted for step in steps if step.accepted is not None]
    return 1 + float(np.concatenate(reported).mean()) if reported else None


def chances(steps: Sequence[Step]) -> dict[str, list[float]]:
    """For each drafter, how often its first, second, ... token was right where those before it were, and it was asked
    for: c_i = rows that accepted i or more / rows that accepted i - 1 or more and were asked for i.

    >>> chances([Step(DraftArm("ngram", 2), 4, 1.0, np.array([2, 1, 0, 1]), np.array([2, 2, 2, 1]))])
    {'ngram': [0.75, 0.5]}
    """
    out: dict[str, list[float]] = {}
    for name in dict.fromkeys(step.arm.drafter for step in steps if step.accepted is not None):
        mine = [
            s
            for s in steps
            if s.arm.drafter == name and s.accepted is not None and s.most is not None
        ]
        accepted = np.concatenate([s.accepted for s in mine if s.accepted is not None])
        most = np.concatenate([s.most for s in mine if s.most is not None])
        depth = max(step.arm.depth for step in mine)
        tried = [int(((accepted >= i) & (most > i)).sum()) for i in range(depth)]
        hits = [int((accepted > i).sum()) for i in range(depth)]
        out[name] = [h / t for h, t in zip(hits, tried, strict=True) if t]
    return out


def by_batch(steps: Sequence[Step]) -> dict[str, dict[str, float | None]]:
    """Per class of batch sizes (up to 1, 2, 4, ...): steps, seconds, share of steps that speculate, accept length."""
    classes: dict[int, list[Step]] = {}
    for step in steps:
        classes.setdefault(1 << max(0, step.batch - 1).bit_length(), []).append(step)
    return {
        str(size): {
            "steps": sum(step.steps for step in mine),
            "seconds": sum(step.seconds for step in mine),
            "speculating": sum(step.steps for step in mine if step.arm != OFF)
            / sum(step.steps for step in mine),
            "accept_length": accept_length(mine),
        }
        for size, mine in sorted(classes.items())
    }


def arm_shares(steps: Sequence[Step]) -> dict[str, float]:
    """Each arm's share of the time of all steps."""
    total = sum(step.seconds for step in steps)
    out: dict[str, float] = {}
    for step in steps:
        out[step.arm.name] = out.get(step.arm.name, 0.0) + step.seconds / total
    return dict(sorted(out.items(), key=lambda item: -item[1]))
