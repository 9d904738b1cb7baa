"""Drafters without a model: they look up what followed the last tokens of a row when those were seen before.

`NGram` looks in the row's own text. `Suffix` looks in the rollouts of the same prompt: siblings of the group, running
and finished, and earlier visits of the prompt. The engine calls them through `whet.draft.speculation`.

A row follows the text that matched its last tokens, 12 down to 1 of them, while both agree; then it searches the
longest match anew. Texts are found by anchors, the last 6, 2 and 1 tokens, and compared backwards up to 12. A draft is
as long as is wanted, however short its match: steps are padded to that length, so that a longer guess costs nothing.
The index is made of plain dicts and arrays: a step adds a token or two to each text, and for so little a dict is
several times faster than whole-array operations. Indexing may lag behind, so that a long text makes no step slow.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whet.draft.base import LONGEST, SHORTEST, Drafter, RowView

ANCHORS = (6, 2, SHORTEST)  # tokens
NEWEST = 16  # places of an anchor that are looked at, the newest ones
BACKLOG = 2000  # tokens indexed per step at most, beside the few that each row has just written
JUST_WRITTEN = 32  # tokens

Key = tuple[str, int]  # prompt and group; evaluations and training may number their groups alike


@dataclass(slots=True, eq=False)
class IndexedText:
    tokens: array[int]
    done: int = 1  # places before this one are indexed; the first token follows nothing


class Match(NamedTuple):
    source: IndexedText
    place: int  # where the token that followed is
    length: int  # tokens that agree: LONGEST at most when found, more when followed


class Index:
    """Texts that grow, and where in them any few tokens occur."""

    def __init__(self) -> None:
        self._behind: deque[IndexedText] = deque()
        # per anchor
        self._places: tuple[dict[bytes, list[tuple[IndexedText, int]]], ...] = ({}, {}, {})

    def add(self, tokens: bytes) -> IndexedText:
        """Begin a new text with int32 tokens."""
        text = IndexedText(array("i", tokens))
        self._behind.append(text)
        return text

    def extend(self, text: IndexedText, tokens: bytes) -> None:
        if text.done >= len(text.tokens):
            self._behind.append(text)
        text.tokens.frombytes(tokens)

    def catch_up(self, limit: int) -> int:
        """Index up to `limit` tokens of what was added, and return how many."""
        spent = 0
        while self._behind and spent < limit:
            text = self._behind[0]
            first = text.done
            last = len(text.tokens)
            stop = min(last, first + limit - spent)
            if stop > first:
                self._learn(text, first, stop)
                text.done = stop
                spent += stop - first
            if stop >= last:
                self._behind.popleft()
        return spent

    def _learn(self, text: IndexedText, first: int, stop: int) -> None:
        """Index the contexts in front of places first..stop-1."""
        offset = max(first - ANCHORS[0], 0)
        raw = text.tokens[offset:stop].tobytes()
        for width, places in zip(ANCHORS, self._places, strict=True):
            for place in range(max(first, width), stop):
                end = 4 * (place - offset)
                found = places.setdefault(raw[end - 4 * width : end], [])
                found.append((text, place))
                if len(found) > 2 * NEWEST:
                    del found[:NEWEST]

    def find(self, tokens: array[int], vote: bool) -> Match | None:
        """The longest match of the end of `tokens`, the newest among equals. vote: among equally long matches, one
        whose next token is the most frequent."""
        end = len(tokens)
        found = None
        for known, places in zip(ANCHORS, self._places, strict=True):
            if found := places.get(tokens[max(0, end - known) :].tobytes()):
                break
        if not found:
            return None
        best = 0
        matches: list[tuple[IndexedText, int]] = []
        for source, place in found[: -NEWEST - 1 : -1]:
            other = source.tokens
            n = known
            most = min(LONGEST, end, place)
            while n < most and other[place - n - 1] == tokens[end - n - 1]:
                n += 1
            if n > best:
                best = n
                matches = [(source, place)]
                if n == LONGEST and not vote:
                    break
            elif n == best:
                matches.append((source, place))
        following = [source.tokens[place] for source, place in matches]
        first = max(range(len(matches)), key=lambda i: following.count(following[i])) if vote else 0
        return Match(*matches[first], best)


class Cursor:
    """A running row: its text in the first of some indexes, and the match that it follows."""

    __slots__ = ("indexes", "match", "read", "text", "vote")

    def __init__(self, indexes: Sequence[Index], context: np.ndarray, vote: bool) -> None:
        self.indexes = indexes
        self.vote = vote
        self.text = indexes[0].add(context.astype(np.int32).tobytes())
        self.match: Match | None = None
        self.read = 0  # tokens of the row that are in the text

    def read_on(self, row: RowView) -> None:
        """Add to the text what the row has written; the match goes on with it or is lost."""
        ids = row.ids
        own = self.text.tokens
        if ids.size <= self.read:
            return
        if ids.itemsize != 4:
            raise TypeError(f"written ids must be int32, not {ids.dtype}")
        before = len(own)
        self.indexes[0].extend(self.text, ids[self.read :].tobytes())
        self.read = ids.size
        if self.match is not None:
            source, place, length = self.match
            n = len(own) - before
            same = source.tokens[place : place + n] == own[before:]
            self.match = Match(source, place + n, length + n) if same else None

    def draft(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the match."""
        if self.match is None:
            found = [
                match
                for index in self.indexes
                if (match := index.find(self.text.tokens, self.vote))
            ]
            if not found:
                return []
            self.match = max(found, key=lambda match: match.length)
        source, place, _ = self.match
        got = source.tokens[place : place + most].tolist()
        if source is self.text and got:  # a text that repeats itself is continued round and round
            while len(got) < most:
                got += got[: most - len(got)]
        if not got:
            self.match = None
        return got


class NGram(Drafter):
    """Drafts from a row's own text, prompt included: the longest match, the newest among equals."""

    name = "ngram"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.cursors: dict[int, Cursor] = {}  # by uid

    def begin(self, row: RowView) -> None:
        if row.uid not in self.cursors:
            self.cursors[row.uid] = self._cursor(row)

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for row in rows:
            self.begin(row)
            self.cursors[row.uid].read_on(row)
        cursors = [self.cursors[row.uid] for row in rows]
        # Index what was written where some row has to search, within a budget per step: a match is just followed.
        searching = [
            c for c, n in zip(cursors, most.tolist(), strict=True) if n > 0 and c.match is None
        ]
        backlog = BACKLOG
        for index in dict.fromkeys(index for cursor in searching for index in cursor.indexes):
            backlog -= index.catch_up(max(JUST_WRITTEN, backlog))
        drafts = [
            cursor.draft(n) if n > 0 else []
            for cursor, n in zip(cursors, most.tolist(), strict=True)
        ]
        counts = np.array([len(draft) for draft in drafts], np.int32)
        width = int(most.max(initial=0))
        tokens = np.zeros((len(rows), width), np.int32)
        tokens[np.arange(width) < counts[:, None]] = [token for draft in drafts for token in draft]
        return tokens, counts

    def finish(self, row: RowView) -> None:
        self.cursors.pop(row.uid, None)

    def _cursor(self, row: RowView) -> Cursor:
        return Cursor([Index()], row.prompt, vote=False)


class SuffixVisit:
    """One group of a prompt: the index of the prompt and of what the group wrote."""

    def __init__(self, key: Key, begun: int, prompt: np.ndarray) -> None:
        self.key, self.begun = key, begun  # begun: after so many updates
        self.index = Index()
        self.index.add(prompt.astype(np.int32).tobytes())
        self.tokens = 0  # tokens of the prompt and of rollouts that ended


class Suffix(NGram):
    """Drafts from the rollouts of the same prompt: its own group first, then the last visits. Among equally long
    matches it takes what followed most often, the newest among equals. Memory is bounded in tokens: the oldest visits
    are dropped first."""

    name = "suffix"

    # tokens of ended rollouts that are remembered at most, up to half a kilobyte each
    capacity = 500_000
    # visits that a row looks at, and the updates after which one is too old
    earlier, window = 2, 16
    # that the drafter has heard of: versions may begin late, in a resumed run, or go back
    updates = 0

    def forget(self) -> None:
        super().forget()
        self.visits: dict[Key, SuffixVisit] = {}  # the oldest first
        self._of: dict[str, list[SuffixVisit]] = {}  # visits per prompt, the oldest first
        self.tokens = 0

    def finish(self, row: RowView) -> None:
        """The text stays for siblings and later visits; it is indexed when one of them drafts."""
        if cursor := self.cursors.pop(row.uid, None):
            cursor.read_on(row)
            visit = self.visits.get((row.prompt_id, row.group_id))
            # else it was dropped meanwhile
            if visit is not None and visit.index is cursor.indexes[0]:
                self._count(visit, row.ids.size)

    def updated(self, version: int) -> None:
        self.updates += 1
        for visit in list(self.visits.values()):
            if visit.begun > self.updates - self.window:
                break
            self._drop(visit)

    def _cursor(self, row: RowView) -> Cursor:
        key = row.prompt_id, row.group_id
        visit = self.visits.get(key)
        if visit is None:
            visit = self.visits[key] = SuffixVisit(key, self.updates, row.prompt)
            self._of.setdefault(row.prompt_id, []).append(visit)
            self._count(visit, row.prompt.size)
        visits = self._of[row.prompt_id]
        before = visits[: visits.index(visit)][::-1][: self.earlier]
        return Cursor(
            [visit.index, *(other.index for other in before)], row.prompt[-LONGEST:], vote=True
        )

    def _count(self, visit: SuffixVisit, tokens: int) -> None:
        """Count tokens that are remembered; the oldest visits make room, never this one."""
        visit.tokens += tokens
        self.tokens += tokens
        while (
            self.tokens > self.capacity
            and (oldest := next(iter(self.visits.values()))) is not visit
        ):
            self._drop(oldest)

    def _drop(self, visit: SuffixVisit) -> None:
        """No new row will look at it; rows that already do may go on."""
        del self.visits[visit.key]
        self.tokens -= visit.tokens
        visits = self._of[visit.key[0]]
        visits.remove(visit)
        if not visits:
            del self._of[visit.key[0]]
