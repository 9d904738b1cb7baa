"""Drafts from a row's own context: what followed when it was here before.

The longest match of the last 12 down to 2 tokens, prompt included; the newest one wins; the draft is as long as the
match, at most, and free once 12 tokens agree. A text that repeats itself is continued round and round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.draft.base import RowView
from whet.draft.index import Cursor, Index

BACKLOG = 2000
"""Tokens indexed a step at most, beside the few that each row has just written."""
JUST_WRITTEN = 32


class NGram:
    name = "ngram"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.cursors: dict[int, Cursor] = {}
        """By uid."""

    def begin(self, row: RowView) -> None:
        """Nothing: a row is read when its first draft is wanted."""

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drafts: list[list[int]] = []
        backlog = BACKLOG
        for row, wanted in zip(rows, most.tolist(), strict=True):
            if wanted <= 0:
                drafts.append([])
                continue
            cursor = self.cursors.get(row.uid) or self._start(row)
            read_on(cursor, row)
            if cursor.match is None:  # else it is followed, and nothing has to be found
                backlog -= cursor.index.catch_up(max(JUST_WRITTEN, backlog))
                cursor.match = cursor.index.find(cursor.text.tokens, vote=False)
            drafts.append(cursor.draft(wanted))
        return padded(drafts, int(most.max(initial=0)))

    def finish(self, row: RowView) -> None:
        self.cursors.pop(row.uid, None)

    def updated(self, version: int) -> None:
        """Nothing: a text is a text under any weights."""

    def _start(self, row: RowView) -> Cursor:
        index = Index()
        cursor = self.cursors[row.uid] = Cursor(index, index.add(row.prompt.astype(np.int32).tobytes()))
        return cursor


def read_on(cursor: Cursor, row: RowView) -> None:
    """Brings the cursor's text up to what the row has written."""
    ids, read = row.ids, cursor.read
    if (size := ids.size) > read:
        if ids.itemsize != 4:
            raise TypeError(f"written ids must be int32, not {ids.dtype}")
        cursor.extend(ids[read:].tobytes())
        cursor.read = size


def padded(drafts: Sequence[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Drafts as an int32 matrix with zeros behind them, and their sizes.

    >>> padded([[3], [4, 5]], 3)
    (array([[3, 0, 0],
           [4, 5, 0]], dtype=int32), array([1, 2], dtype=int32))
    """
    counts = np.array([len(d) for d in drafts], np.int32)
    tokens = np.zeros((len(drafts), width), np.int32)
    tokens[np.arange(width) < counts[:, None]] = [t for d in drafts for t in d]
    return tokens, counts
