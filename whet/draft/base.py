"""What speculation is made of: rows to draft for, drafters that guess their next tokens, arms to choose from.

A draft is a guess. The target draws its own token at every place (`whet.draft.verify`), so nothing that a drafter or
a chooser does can change a token, only how soon it comes. A chooser is asked on the host, before each step or burst of
them; drafters at every step, unless the runner makes their drafts on the device (`Runner.own`).
"""

from __future__ import annotations

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
    """Picks the arm of each step: `whet.draft.controller`, or TLT's in `whet.draft.bandit`."""

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
