"""What is known of every prompt's pass rate: a Beta prior and the verdicts counted so far.

CurES (arXiv 2510.01037, eq. 22-24) estimates difficulty by the posterior mean; `cures.py` draws and divides by it.
Counting only: nothing here draws, and only visited prompts take room in a checkpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.curriculum.ids import Ids
from whet.types import Rollout

INHERITED = 0.5
"""Of the evidence of a stage before: under its limit pass rates were others, yet more like these than a half. OURS."""


class Posterior:
    """Right and wrong verdicts of each prompt, by row: its place among `ids`.

    The paper forgets nothing within a subset and everything between subsets. `memory` below 1 (the decay of MoPPS,
    arXiv 2507.04632) is for a policy that drifts: with every update alpha <- memory alpha + (1 - memory) 1, and beta
    likewise, that is, the evidence beyond the prior shrinks by `memory`. It is applied when a prompt is looked at.

    The prior is the paper's, Beta(1, 1): a prompt never met is taken for half solved, the best there is. Or, with
    `pooled` (empirical Bayes, OURS), Beta(2 m, 2 (1 - m)), m being the mean rate of the prompts met so far: where few
    can be solved, one never met is worth less than one that was solved once, and is not asked first.

    >>> posterior = Posterior(["a", "b"])
    >>> posterior.add(posterior.rows(["a"]), right=[3], wrong=[1])
    >>> posterior.mean(posterior.rows(["a", "b"])).round(6).tolist()
    [0.666667, 0.5]
    """

    def __init__(self, ids: Sequence[str], memory: float = 1.0, pooled: bool = False):
        self.ids = Ids.of(ids)
        self.memory, self.pooled = memory, pooled
        self.now = 0
        """The update it is asked at."""
        self.clear()

    def clear(self) -> None:
        """Back to the prior."""
        self._right = np.zeros(len(self.ids))
        self._wrong = np.zeros(len(self.ids))
        self._seen = np.full(len(self.ids), -1, np.int32)  # the update of the last verdict
        self.prior = 0.5
        """Its mean, m."""

    def settle(self) -> None:
        """m = (1 + sum of the rates) / (2 + prompts met), where it is `pooled`. Fading leaves a rate what it was."""
        if self.pooled:
            right, wrong = self._right[self.visited], self._wrong[self.visited]
            self.prior = float((1.0 + (right / (right + wrong)).sum()) / (2.0 + len(right)))

    def rows(self, prompt_ids: Iterable[str]) -> np.ndarray:
        """Of ids that are among `ids`."""
        return np.array([self.ids.row(prompt_id) for prompt_id in prompt_ids], np.int64)

    @property
    def visited(self) -> np.ndarray:
        """Rows with a verdict."""
        return np.flatnonzero(self._seen >= 0)

    def seen(self, rows: np.ndarray) -> np.ndarray:
        """Which of them have a verdict."""
        return self._seen[rows] >= 0

    def visited_of(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.seen(rows)]

    def count(self, rollouts: Iterable[Rollout]) -> np.ndarray:
        """Adds the verdicts, right or wrong whatever the score; returns the rows they were for.

        Rollouts of prompts that are not among `ids` are passed over.
        """
        counts: dict[int, list[int]] = {}
        for rollout in rollouts:
            if rollout.judged and (row := self.ids.row(rollout.prompt_id)) is not None:
                counts.setdefault(row, [0, 0])[rollout.verdict == "wrong"] += 1
        rows = np.fromiter(counts, np.int64, len(counts))
        both = np.array(list(counts.values()), np.float64).reshape(-1, 2)
        self.add(rows, both[:, 0], both[:, 1])
        return rows

    def add(self, rows: np.ndarray, right: Sequence[float] | np.ndarray, wrong: Sequence[float] | np.ndarray) -> None:
        """`rows` differ."""
        fade = self._fade(rows)
        self._right[rows] = self._right[rows] * fade + right
        self._wrong[rows] = self._wrong[rows] * fade + wrong
        self._seen[rows] = self.now

    def mean(self, rows: np.ndarray, at: np.ndarray | int | None = None) -> np.ndarray:
        """alpha / (alpha + beta) = (2 m + right) / (2 + right + wrong), as of `now`, or of the update `at` of each."""
        fade = self._fade(rows, at)
        right, wrong = self._right[rows] * fade, self._wrong[rows] * fade
        return (2.0 * self.prior + right) / (2.0 + right + wrong)

    def inherit(self, older: Posterior) -> None:
        """Takes over what was counted of the prompts that are here, too, at `INHERITED` of its weight."""
        rows, theirs = self.ids.shared(older.ids)
        self.now, self._seen[rows] = older.now, older._seen[theirs]
        self._right[rows], self._wrong[rows] = INHERITED * older._right[theirs], INHERITED * older._wrong[theirs]
        self.settle()

    def mean_of(self, prompt_ids: Iterable[str]) -> np.ndarray:
        return self.mean(self.rows(prompt_ids))

    def _fade(self, rows: np.ndarray, at: np.ndarray | int | None = None) -> np.ndarray | float:
        if self.memory == 1.0:
            return 1.0
        passed = np.maximum((self.now if at is None else at) - self._seen[rows], 0)
        return np.power(self.memory, np.arange(passed.max(initial=0) + 1.0))[passed]  # each power once

    def state_dict(self) -> dict[str, Any]:
        """Some 32 bytes for a visited prompt, nothing for the others."""
        rows = self.visited
        arrays = {"right": self._right[rows], "wrong": self._wrong[rows], "seen": self._seen[rows]}
        packed = {name: _pack(array) for name, array in ({"rows": rows.astype(np.int32)} | arrays).items()}
        pooled = {"prior": self.prior} if self.pooled else {}
        return {"prompts": self.ids.fingerprint, "now": self.now, **pooled, **packed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ids.check(state["prompts"])
        self.clear()
        self.now = state["now"]
        rows = _unpack(state["rows"], np.int32)
        self._right[rows] = _unpack(state["right"], np.float64)
        self._wrong[rows] = _unpack(state["wrong"], np.float64)
        self._seen[rows] = _unpack(state["seen"], np.int32)
        self.prior = state.get("prior", 0.5)


def _pack(array: np.ndarray) -> str:
    """Little-endian bytes as base64: JSON that is small and exact."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _unpack(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
