"""The parts of speculation: rows to draft for, drafters, arms to choose from, choosers, and the rule of verification.

A draft is a guess. The target draws its own token at every place, so a drafter or a chooser can change only how soon
a token comes, never the token. The engine asks a chooser before each step or burst of steps; it asks a drafter at every
step, unless the runner makes that drafter's drafts on the device (`Runner.own`).

Verification: the target draws one token after the newest token and after each drafted one, each from its own
distribution there. Tokens are written while the draft agrees with the draw, and one more. Every written token was drawn
from the target's distribution after the tokens before it, so the result is exact for any draft that does not depend on
the noise, without draft probabilities (TLT's "target-only" rule). With noise keyed by position each draw is the one
that plain decoding makes, so the very same tokens come out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Shapes: B rows, K drafted tokens, W tokens written in one turn, S stop ids.

PLACES = 129  # lengths of drafts that are told apart in pictures
MOST_TOLD = 256  # reports that are kept until they are counted
# tokens of context that a model-free drafter matches, at most and at least
LONGEST, SHORTEST = 12, 1


@dataclass(slots=True, eq=False)
class RowView:
    """One running rollout as drafters see it. It is made once; `ids` is set before each `propose` and `finish`."""

    uid: int  # the flight's own number, which no other flight gets
    prompt_id: str
    group_id: int  # new at each visit of the prompt
    index: int  # place of the rollout in its group
    prompt: np.ndarray
    ids: np.ndarray  # tokens written so far, int32, a view of the engine's columns


class Drafter:
    """Guesses the next tokens of rows. This one has no guess and no memory; others override what they need."""

    name = ""

    def begin(self, row: RowView) -> None:
        """A rollout starts, or goes on after a wait; a second call for the same uid changes nothing."""

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Guess the next tokens: int32 [B, max(most)], and how many of them count, int32 [B], at most `most`."""
        return np.zeros((len(rows), int(most.max(initial=0))), np.int32), np.zeros(
            len(rows), np.int32
        )

    def finish(self, row: RowView) -> None:
        """The rollout ended or was cut; it may enter the drafter's history."""

    def updated(self, version: int) -> None:
        """The weights have changed."""

    def forget(self) -> None:
        """Drop everything seen so far."""


@dataclass(frozen=True, slots=True)
class DraftArm:
    """One way to speculate: a drafter and the number of tokens that it drafts for each row.

    The name says drafter, depth, number of chains (always 1) and tokens to verify: the newest one and its draft.

    >>> DraftArm("suffix", depth=4).name, DraftArm("suffix", depth=4).tokens, OFF.name, OFF.tokens
    ('suffix_4_1_5', 5, 'off', 1)
    """

    drafter: str
    depth: int
    tokens: int = field(init=False, compare=False)  # to verify per row
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", self.depth + 1)
        object.__setattr__(
            self, "name", f"{self.drafter}_{self.depth}_1_{self.tokens}" if self.depth else "off"
        )


OFF = DraftArm("", 0)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a chooser learns from: so many steps of one arm, launched together."""

    arm: DraftArm
    batch: int  # rows
    seconds: float  # time of all the steps on the host's clock
    steps: int = 1
    # drafted tokens that were accepted, per row and step; None: there were none
    accepted: np.ndarray | None = None
    most: np.ndarray | None = None  # how many of them were wanted at most; None: the arm's depth
    kv_bytes: float = 0.0  # keys and values that the rows have cached
    typical: bool = True  # whether the time says anything about other steps
    had: np.ndarray | None = None  # drafted tokens, per row and step; None: as many as were wanted


class Chooser:
    """Picks the arm of each step: the controller, or TLT's bandit (`whet.draft.controller`). This one never drafts."""

    def __init__(self) -> None:
        # seconds per arm, since the last `metrics`
        self._clock: defaultdict[str, float] = defaultdict(float)
        self._told: list[StepReport] = []  # of drafts, that are still to be counted
        # drafts of so many tokens, and of so many that came true
        self._offers = np.zeros((2, PLACES), np.int64)
        # rows -> drafts, tokens accepted
        self._by_rows: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        """Choose for a batch of so many rows, not among the drafters that were retired."""
        return OFF

    def record(self, report: StepReport) -> None:
        """Learn from steps that were made."""
        self._clock[report.arm.name] += report.seconds
        if report.arm.depth and report.accepted is not None:
            self._told.append(report)
            if len(self._told) == MOST_TOLD:
                self._count()

    def _count(self) -> None:
        """Count what came of drafts. It is done when asked for: between two steps there is no time for it."""
        told = [(report, report.accepted) for report in self._told if report.accepted is not None]
        self._told = []
        for report, accepted in told:
            of = report.most if report.had is None else report.had
            had = np.full(accepted.size, report.arm.depth) if of is None else of
            self._offers += [
                np.bincount(each, minlength=PLACES)[:PLACES] for each in (had, accepted)
            ]
            of_size = self._by_rows[1 << max(0, report.batch.bit_length() - 1)]
            of_size[0], of_size[1] = of_size[0] + accepted.size, of_size[1] + int(accepted.sum())

    def updated(self) -> None:
        """The weights have changed."""

    def metrics(self) -> dict[str, float]:
        """Each arm's share of the time, and the tokens that a row writes in a step that speculates; then start anew."""
        total = sum(self._clock.values())
        out = {
            f"draft/share_{name}": seconds / total
            for name, seconds in self._clock.items()
            if total > 0
        }
        self._count()
        drafts, accepted = np.sum([(0, 0), *self._by_rows.values()], 0).tolist()
        out["draft/accept_length"] = 1 + accepted / max(1, drafts)
        out["draft/saved"] = float(accepted)
        self._clock.clear()
        self._by_rows.clear()
        self._offers[:] = 0
        return out

    def pictures(self) -> dict[str, Any]:
        """Since the last `metrics`: tokens offered and accepted at each place of a draft, and [rows that ran (from this
        power of two on), drafts, tokens accepted]."""
        self._count()
        if not self._by_rows:
            return {}
        reached = self._offers[:, :0:-1].cumsum(1)[:, ::-1].T  # drafts of that many tokens or more
        position = reached[reached[:, 0] > 0].tolist()
        return {
            "accepts": {
                "position": position,
                "rows": [[rows, *of] for rows, of in sorted(self._by_rows.items())],
            }
        }

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def walk(drafted: np.ndarray, counts: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Tokens that each row writes, int32 [B]: those that agree with the draft, and the one after.

    `drafted` [B, K], of which `counts` [B] count; `sampled` [B, K + 1] was drawn after the newest token and after each
    drafted one. Row b writes sampled[b, :n].

    >>> walk(np.array([[5, 6, 7], [5, 6, 7]]), np.array([3, 1]), np.array([[5, 6, 9, 1], [5, 6, 7, 8]])).tolist()
    [3, 2]
    """
    depth = drafted.shape[1]
    agree = (drafted == sampled[:, :depth]) & (np.arange(depth) < counts[:, None])
    return (np.logical_and.accumulate(agree, axis=1).sum(1) + 1).astype(np.int32)


def truncate(
    counts: np.ndarray, written: np.ndarray, stops: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """Tokens of each row that remain, int32 [B], when a stop id or the limit falls inside what it wrote.

    `written` [B, W] holds `counts` tokens per row, `stops` [B, S] stop ids (-1: none), `room` [B] tokens left to the
    limit. The stop id itself is kept.

    >>> runs = np.array([[4, 2, 7], [4, 5, 7], [4, 5, 2]])
    >>> truncate(np.array([3, 3, 3]), runs, np.array([[2], [2], [2]]), np.array([9, 2, 3])).tolist()
    [2, 2, 3]
    """
    kept = np.minimum(counts, room)
    hits = (written[:, :, None] == stops[:, None, :]).any(2) & (written >= 0)
    hits &= np.arange(written.shape[1]) < kept[:, None]
    return np.where(hits.any(1), hits.argmax(1) + 1, kept).astype(np.int32)
