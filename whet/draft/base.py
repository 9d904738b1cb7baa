"""What speculation is made of: rows to draft for, drafters that guess their next tokens, arms to choose from.

A draft is a guess. The target draws its own token at every place (`whet.draft.base`), so nothing that a drafter or
a chooser does can change a token, only how soon it comes. A chooser is asked on the host, before each step or burst of
them; drafters at every step, unless the runner makes their drafts on the device (`Runner.own`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

LONGEST, SHORTEST = 12, 2
"""Tokens of context a model-free drafter matches: as many as it can."""


@dataclass(slots=True, eq=False)
class RowView:
    """One running rollout as drafters see it. The engine makes it once and moves `ids` on.

    >>> row = RowView(uid=3, prompt_id="p", group_id=9, index=0, prompt=np.array([5, 6]), ids=np.array([7, 8, 7]))
    >>> row.ids.size
    3
    """

    uid: int
    """Of the flight; never used again."""
    prompt_id: str
    group_id: int
    """New at each visit of the prompt."""
    index: int
    """Of the rollout in its group."""
    prompt: np.ndarray
    ids: np.ndarray
    """What it has written, int32, a view of the engine's columns: set before each propose and finish."""


class Drafter(Protocol):
    name: str

    def begin(self, row: RowView) -> None:
        """A rollout starts, or goes on after it waited; a second call for the same uid changes nothing."""

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Guesses for the next tokens: int32 [B, max(most)], and how many of them count, int32 [B], at most `most`."""

    def finish(self, row: RowView) -> None:
        """The rollout ended, or was cut; it may enter the history."""

    def updated(self, version: int) -> None:
        """The weights have changed."""

    def forget(self) -> None:
        """As if it had seen nothing."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to speculate. A chain has width 1 and verifies depth + 1 tokens: the newest one and its draft.

    >>> Arm("suffix", depth=4).name, Arm("suffix", depth=4).tokens, OFF.name, OFF.tokens
    ('suffix_4_1_5', 5, 'off', 1)
    """

    drafter: str
    depth: int
    width: int = 1
    verify: int = 0
    """Tokens a row to verify; 0 is depth + 1."""

    @property
    def tokens(self) -> int:
        return self.verify or self.depth + 1

    @property
    def name(self) -> str:
        return f"{self.drafter}_{self.depth}_{self.width}_{self.tokens}" if self.depth else "off"


OFF = Arm("", 0)


class Chooser(Protocol):
    """Picks the arm of each step: `whet.draft.controller`, or TLT's in `whet.draft.controller`."""

    def choose(self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()) -> Arm:
        """For so many rows. Drafters that were retired are not chosen from."""

    def record(
        self,
        arm: Arm,
        batch: int,
        seconds: float,
        *,
        steps: int = 1,
        accepted: np.ndarray | None = None,
        most: np.ndarray | None = None,
        kv_bytes: float = 0.0,
        typical: bool = True,
    ) -> None:
        """What so many steps of `arm` took on the host's clock, which says nothing of others if it is not typical;
        drafted tokens accepted, of at most `most`, per row and step."""

    def updated(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# ---- tally
#
# What speculation did since it was last asked: a chooser's part of a step's metrics.


class AcceptTally:
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._rows = self._accepted = 0

    def add(self, arm: Arm, seconds: float, accepted: np.ndarray | None) -> None:
        self._seconds[arm.name] += seconds
        if arm != OFF and accepted is not None:
            self._rows += accepted.size
            self._accepted += int(accepted.sum())

    def take(self) -> dict[str, float]:
        """Each arm's share of the time, and the tokens that a row writes in a step that speculates: the one that it
        writes anyway where none did. Begins anew.

        >>> tally = Tally()
        >>> tally.add(OFF, 1.0, None)
        >>> tally.add(Arm("ngram", 2), 3.0, np.array([2, 1]))
        >>> tally.take()
        {'draft/share_off': 0.25, 'draft/share_ngram_2_1_3': 0.75, 'draft/accept_length': 2.5, 'draft/saved': 3.0}
        >>> tally.take()
        {'draft/accept_length': 1.0, 'draft/saved': 0.0}
        """
        total = sum(self._seconds.values())
        out = {f"draft/share_{name}": seconds / total for name, seconds in self._seconds.items() if total > 0}
        out["draft/accept_length"] = 1 + self._accepted / max(1, self._rows)
        out["draft/saved"] = float(self._accepted)
        self._begin()
        return out


# ---- verify
#
# Which of the tokens a target drew at the places of a draft are kept. Pure; called by the engine after each forward.
#
# The rule: the target draws one token at every place of the draft, each from its own distribution there. Walk from the
# root: the token drawn is written; if the draft has it as a child, go on there. Every token written was drawn from the
# target's distribution after the tokens before it, whatever the draft was: exact for any draft that does not know the
# noise, no draft probabilities needed (TLT's "target-only" rule, one draw instead of one coin a child). With noise
# keyed by position the draw is the one plain decoding makes, so the very same tokens come out.


def walk(drafted: np.ndarray, counts: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Tokens written by each row of chains: those that agree with the draft, and the one after, int32 [B].

    `drafted` [B, K] counts up to `counts` [B]; `sampled` [B, K + 1] was drawn after the newest token and after each
    drafted one. Row b writes sampled[b, :n].

    >>> walk(np.array([[5, 6, 7], [5, 6, 7]]), np.array([3, 1]), np.array([[5, 6, 9, 1], [5, 6, 7, 8]])).tolist()
    [3, 2]
    """
    depth = drafted.shape[1]
    agree = (drafted == sampled[:, :depth]) & (np.arange(depth) < counts[:, None])
    return (np.logical_and.accumulate(agree, axis=1).sum(1) + 1).astype(np.int32)


def walk_tree(parent: np.ndarray, tokens: np.ndarray, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes visited by each row, [B, T] in order and -1 behind them, and how many, int32 [B].

    All arguments [B, T]. Node 0 is the newest token, its parent -1; parents come before children; any other node with
    parent -1 is padding. `sampled` was drawn at each node. Row b writes sampled[b, nodes[b, :n]].

    >>> parent, tokens = np.array([[-1, 0, 0, 2]]), np.array([[0, 5, 6, 7]])  # 5 or 6; after 6, 7
    >>> nodes, counts = walk_tree(parent, tokens, np.array([[6, 1, 7, 9]]))
    >>> nodes[0].tolist(), counts.tolist()  # draws 6, there 7, there 9
    ([0, 2, 3, -1], [3])
    """
    batch, width = parent.shape
    rows = np.arange(batch)
    at = np.zeros(batch, np.int64)
    live = np.ones(batch, bool)
    nodes = np.full((batch, width), -1, np.int64)
    for depth in range(width):
        nodes[live, depth] = at[live]
        child = (parent == at[:, None]) & (tokens == sampled[rows, at][:, None]) & live[:, None]
        child[:, 0] = False
        live = child.any(1)
        if not live.any():
            break
        at = np.where(live, child.argmax(1), at)
    return nodes, (nodes >= 0).sum(1).astype(np.int32)


def truncate(
    counts: np.ndarray, written: np.ndarray, stops: np.ndarray, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What remains of a run when a stop id or the limit falls inside it: counts [B], stopped [B], full [B].

    `written` [B, W] holds `counts` tokens a row, `stops` [B, S] stop ids (-1: none), `room` [B] tokens left to the
    limit. The stop id is written, too; a stop goes before the limit, as in plain decoding.

    >>> runs = np.array([[4, 2, 7], [4, 5, 7], [4, 5, 2]])
    >>> truncate(np.array([3, 3, 3]), runs, np.array([[2], [2], [2]]), np.array([9, 2, 3]))
    (array([2, 2, 3], dtype=int32), array([ True, False,  True]), array([False,  True, False]))
    """
    place = np.arange(written.shape[1])
    kept = np.minimum(counts, room)
    hits = (written[:, :, None] == stops[:, None, :]).any(2) & (written >= 0) & (place < kept[:, None])
    stopped = hits.any(1)
    kept = np.where(stopped, hits.argmax(1) + 1, kept)
    return kept.astype(np.int32), stopped, ~stopped & (kept >= room)
