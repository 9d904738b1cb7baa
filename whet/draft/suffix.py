"""Drafts from a prompt's other rollouts: siblings of the group, running and finished, and earlier visits of the prompt.

Rollouts of one prompt say much the same in much the same words. Each visit of a prompt has an index of its rollouts
and of the prompt. A row follows what matched its last tokens, 12 down to 2 of them; when that goes wrong it looks for
the longest match anew, in its own group first, then in the last visits, and takes what followed most often, the newest
among equals. Memory is bounded in tokens: the oldest visits go first, and none outlives `window` updates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.draft.base import LONGEST, RowView
from whet.draft.index import Cursor, Index, Match
from whet.draft.ngram import BACKLOG, JUST_WRITTEN, padded, read_on

Key = tuple[str, int]
"""Prompt and group: evaluations and training may number their groups alike."""


class Visit:
    """One group of a prompt: the index of what it wrote."""

    def __init__(self, key: Key, version: int, prompt: np.ndarray) -> None:
        self.key, self.version = key, version
        self.index = Index()
        self.index.add(prompt.astype(np.int32).tobytes())
        self.tokens = 0
        """Of the prompt and of rollouts that ended."""


class Reader:
    """A running row: its text in the index of its own visit, and the visits it drafts from."""

    def __init__(self, row: RowView, visits: Sequence[Visit]) -> None:
        self.visits = visits
        """Its own first, then earlier ones, the newest first."""
        own = visits[0].index
        self.cursor = Cursor(own, own.add(row.prompt[-LONGEST:].astype(np.int32).tobytes()))

    def draft(self, most: int) -> list[int]:
        if self.cursor.match is None:
            self.cursor.match = self._longest()
        return self.cursor.draft(most)

    def _longest(self) -> Match | None:
        best = None
        for visit in self.visits:
            match = visit.index.find(self.cursor.text.tokens, vote=True)
            if match and (best is None or match.length > best.length):
                best = match
        return best


class Suffix:
    name = "suffix"

    def __init__(self, tokens: int = 500_000, visits: int = 2, window: int = 16) -> None:
        """tokens: of ended rollouts, remembered at most, up to half a kilobyte each; visits: earlier ones that a row
        looks at, none of them begun `window` updates ago or more."""
        self.capacity, self.earlier, self.window = tokens, visits, window
        self.version = 0
        self.forget()

    def forget(self) -> None:
        self.readers: dict[int, Reader] = {}
        """By uid."""
        self.visits: dict[Key, Visit] = {}
        """The oldest first."""
        self._of: dict[str, list[Visit]] = {}
        """Of each prompt, the oldest first."""
        self.tokens = 0

    def begin(self, row: RowView) -> None:
        if row.uid in self.readers:
            return
        key = row.prompt_id, row.group_id
        visit = self.visits.get(key)
        if visit is None:
            visit = self.visits[key] = Visit(key, self.version, row.prompt)
            self._of.setdefault(row.prompt_id, []).append(visit)
            self._count(visit, row.prompt.size)
        visits = self._of[row.prompt_id]
        before = visits[: visits.index(visit)][::-1][: self.earlier]
        self.readers[row.uid] = Reader(row, [visit, *before])

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        readers = []
        for row in rows:
            if row.uid not in self.readers:
                self.begin(row)
            reader = self.readers[row.uid]
            read_on(reader.cursor, row)
            readers.append(reader)
        self._catch_up(readers, most)
        drafts = [reader.draft(n) if n > 0 else [] for reader, n in zip(readers, most.tolist(), strict=True)]
        return padded(drafts, int(most.max(initial=0)))

    def finish(self, row: RowView) -> None:
        """Its text stays for its siblings and for later visits; it is indexed when one of them drafts."""
        reader = self.readers.pop(row.uid, None)
        if reader:
            read_on(reader.cursor, row)
            visit = reader.visits[0]
            if self.visits.get(visit.key) is visit:
                self._count(visit, row.ids.size)

    def updated(self, version: int) -> None:
        self.version = version
        for visit in list(self.visits.values()):
            if visit.version > version - self.window:
                break
            self._drop(visit)

    def _catch_up(self, readers: Sequence[Reader], most: np.ndarray) -> None:
        """Indexes what was written in visits that some row has to search, within a budget a step."""
        searching = [r for r, n in zip(readers, most.tolist(), strict=True) if n > 0 and r.cursor.match is None]
        backlog = BACKLOG
        for visit in dict.fromkeys(visit for reader in searching for visit in reader.visits):
            backlog -= visit.index.catch_up(max(JUST_WRITTEN, backlog))

    def _count(self, visit: Visit, tokens: int) -> None:
        """So many more are remembered; the oldest visits make room, never this one."""
        visit.tokens += tokens
        self.tokens += tokens
        while self.tokens > self.capacity and (oldest := next(iter(self.visits.values()))) is not visit:
            self._drop(oldest)

    def _drop(self, visit: Visit) -> None:
        """Nothing new will look at it; rows that do may go on."""
        del self.visits[visit.key]
        self.tokens -= visit.tokens
        visits = self._of[visit.key[0]]
        visits.remove(visit)
        if not visits:
            del self._of[visit.key[0]]
