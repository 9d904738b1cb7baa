"""A guard around a drafter: it may be wrong, slow or crash, and the run stays right.

What it proposes is brought into form; what it raises is counted, and three failures in a row retire it until it is told
to forget. Where the runner does a drafter's work on the device (`hold`) the first one does. The engine holds drafters
only through this. It does not look at whether a guess is good: that is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.draft.base import Drafter, RowView

PATIENCE = 3


class Guard:
    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab, self.name = drafter, vocab, drafter.name
        self.failures = 0
        """In all; `error` has the latest."""
        self.error = ""
        self._in_a_row = 0

    @property
    def retired(self) -> bool:
        return self._in_a_row >= PATIENCE

    def begin(self, row: RowView) -> None:
        self._try(self.drafter.begin, row)

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        got = self._try(self._proposed, rows, most)
        if got is None:
            return np.zeros((len(rows), int(most.max(initial=0))), np.int32), np.zeros(len(rows), np.int32)
        self._in_a_row = 0
        return got

    def finish(self, row: RowView) -> None:
        self._try(self.drafter.finish, row)

    def updated(self, version: int) -> None:
        self._try(self.drafter.updated, version)

    def forget(self) -> None:
        self._in_a_row = 0
        self._try(self.drafter.forget)

    def hold(self, work: Callable[..., Any], *args: Any) -> bool:
        """Work that is done in the drafter's stead; whether it was. A failure there comes again at every step, or is
        of memory that lacks: it is not tried again."""
        if self.retired:
            return False
        before = self.failures
        self._try(work, *args)
        if self.failures > before:
            self._in_a_row = PATIENCE
        return not self.retired

    def _proposed(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tidy(*self.drafter.propose(rows, most), most, self.vocab)

    def _try(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.retired:
            return None
        try:
            return call(*args)
        except Exception as error:
            self.failures += 1
            self._in_a_row += 1
            self.error = f"{type(error).__name__}: {error}"
            return None


def tidy(tokens: np.ndarray, counts: np.ndarray, most: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A proposal in the form promised: int32 [B, max(most)], counts at most `most`, cut before the first bad id.

    >>> tidy(np.array([[3, 99, 4], [1, 2, 3]]), np.array([3, 9]), np.array([2, 1]), vocab=10)
    (array([[3, 0],
           [1, 0]], dtype=int32), array([1, 1], dtype=int32))
    """
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    batch, width = most.size, int(most.max(initial=0))
    out = np.zeros((batch, width), np.int32)
    if not batch or not width:
        return out, np.zeros(batch, np.int32)
    shared = min(width, tokens.shape[1])
    given = tokens[:, :shared]
    good = (given >= 0) & (given < vocab) & (np.arange(shared) < np.minimum(counts, most)[:, None])
    good = np.logical_and.accumulate(good, axis=1)
    out[:, :shared] = np.where(good, given, 0)
    return out, good.sum(1).astype(np.int32)
