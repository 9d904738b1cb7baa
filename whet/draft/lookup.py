"""Drafts from a prompt's other rollouts: siblings of the group, running and finished, and earlier visits of the prompt.

Rollouts of one prompt say much the same in much the same words. Each visit of a prompt has an index of its rollouts
and of the prompt. A row follows what matched its last tokens, 12 down to 2 of them; when that goes wrong it looks for
the longest match anew, in its own group first, then in the last visits, and takes what followed most often, the newest
among equals. Memory is bounded in tokens: the oldest visits go first, and none outlives `window` updates.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from whet.draft.base import LONGEST, SHORTEST, RowView

# ---- index
#
# An index of texts that grow: where the last tokens of a text were seen before, and what followed.
#
# Places are found by two anchors, the last 6 and the last 2 tokens, and compared backwards up to 12. Plain dicts and
# arrays: a step adds a token or two to each text, and for so little a dict is several times faster than whole-array
# operations. Indexing may lag behind the texts, so that a long text costs no single step dear.
# Used by the n-gram and suffix drafters; it knows nothing of rows.


ANCHORS = (6, SHORTEST)
NEWEST = 16
"""Places looked at, the newest of an anchor."""


class IndexedText:
    __slots__ = ("done", "tokens")

    def __init__(self, tokens: bytes) -> None:
        self.tokens = array("i", tokens)
        self.done = 1
        """Places before this one are indexed; the first token follows nothing."""


class Match(NamedTuple):
    source: IndexedText
    place: int
    """Of the token that followed."""
    length: int
    """Tokens that agree; LONGEST at most when found, more when followed."""


class Index:
    def __init__(self) -> None:
        self._behind: deque[IndexedText] = deque()
        self._places: tuple[dict[bytes, list[tuple[IndexedText, int]]], ...] = ({}, {})

    def add(self, tokens: bytes) -> IndexedText:
        """A new text of int32 tokens."""
        text = IndexedText(tokens)
        self._behind.append(text)
        return text

    def extend(self, text: IndexedText, tokens: bytes) -> None:
        if text.done >= len(text.tokens):
            self._behind.append(text)
        text.tokens.frombytes(tokens)

    def catch_up(self, limit: int) -> int:
        """Indexes up to `limit` tokens of what was added; how many."""
        spent = 0
        while self._behind and spent < limit:
            text = self._behind[0]
            first, last = text.done, len(text.tokens)
            stop = min(last, first + limit - spent)
            if stop > first:
                self._learn(text, first, stop)
                text.done = stop
                spent += stop - first
            if stop >= last:
                self._behind.popleft()
        return spent

    def find(self, tokens: array[int], vote: bool) -> Match | None:
        """The longest match of the end of `tokens`, the newest among equals.

        vote: of equally long ones those whose next token is the most frequent.
        """
        end = len(tokens)
        for width, places in zip(ANCHORS, self._places, strict=True):
            found = places.get(tokens[max(0, end - width) :].tobytes())
            if found:
                return longest(tokens, found[: -NEWEST - 1 : -1], width, vote)
        return None

    def _learn(self, text: IndexedText, first: int, stop: int) -> None:
        """The contexts in front of places first..stop-1."""
        offset = first - ANCHORS[0] if first > ANCHORS[0] else 0
        raw = text.tokens[offset:stop].tobytes()
        for width, places in zip(ANCHORS, self._places, strict=True):
            for place in range(first if first > width else width, stop):
                end = 4 * (place - offset)
                key = raw[end - 4 * width : end]
                found = places.get(key)
                if found is None:
                    places[key] = [(text, place)]
                else:
                    found.append((text, place))
                    if len(found) > 2 * NEWEST:
                        del found[:NEWEST]


def longest(tokens: array[int], found: list[tuple[IndexedText, int]], known: int, vote: bool) -> Match:
    """Of places, the newest first, in front of which `known` tokens agree with the end of `tokens`."""
    end, best = len(tokens), 0
    matches: list[tuple[IndexedText, int]] = []
    for source, place in found:
        other, n = source.tokens, known
        most = min(LONGEST, end, place)
        while n < most and other[place - n - 1] == tokens[end - n - 1]:
            n += 1
        if n > best:
            best, matches = n, [(source, place)]
            if n == LONGEST and not vote:
                break
        elif n == best:
            matches.append((source, place))
    return Match(*(elected(matches) if vote and len(matches) > 1 else matches[0]), best)


def elected(matches: list[tuple[IndexedText, int]]) -> tuple[IndexedText, int]:
    """The first whose next token has the most votes."""
    votes: dict[int, int] = {}
    for source, place in matches:
        token = source.tokens[place]
        votes[token] = votes.get(token, 0) + 1
    return max(matches, key=lambda match: votes[match[0].tokens[match[1]]])


class Cursor:
    """Where a text stands in an index: what it matched is followed while they agree, then looked for anew."""

    __slots__ = ("index", "match", "read", "text")

    def __init__(self, index: Index, text: IndexedText) -> None:
        self.index, self.text = index, text
        self.match: Match | None = None
        self.read = 0
        """Tokens of the row that are in the text."""

    def extend(self, new: bytes) -> None:
        """The text grows by int32 tokens; the match goes on with it or is lost."""
        own = self.text.tokens
        before = len(own)
        self.index.extend(self.text, new)
        if self.match is not None:
            source, place, length = self.match
            n = len(own) - before
            same = source.tokens[place : place + n] == own[before:]
            self.match = Match(source, place + n, length + n) if same else None

    def draft(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the match, and no more than it is long unless it is of the longest."""
        if self.match is None:
            return []
        source, place, length = self.match
        if length < LONGEST:
            most = min(most, length)
        got = source.tokens[place : place + most].tolist()
        if source is self.text and got:  # a text that repeats itself: round and round
            while len(got) < most:
                got += got[: most - len(got)]
        if not got:
            self.match = None
        return got


# ---- ngram
#
# Drafts from a row's own context: what followed when it was here before.
#
# The longest match of the last 12 down to 2 tokens, prompt included; the newest one wins; the draft is as long as the
# match, at most, and free once 12 tokens agree. A text that repeats itself is continued round and round.


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


Key = tuple[str, int]
"""Prompt and group: evaluations and training may number their groups alike."""


class SuffixVisit:
    """One group of a prompt: the index of what it wrote."""

    def __init__(self, key: Key, version: int, prompt: np.ndarray) -> None:
        self.key, self.version = key, version
        self.index = Index()
        self.index.add(prompt.astype(np.int32).tobytes())
        self.tokens = 0
        """Of the prompt and of rollouts that ended."""


class Reader:
    """A running row: its text in the index of its own visit, and the visits it drafts from."""

    def __init__(self, row: RowView, visits: Sequence[SuffixVisit]) -> None:
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
        self.visits: dict[Key, SuffixVisit] = {}
        """The oldest first."""
        self._of: dict[str, list[SuffixVisit]] = {}
        """Of each prompt, the oldest first."""
        self.tokens = 0

    def begin(self, row: RowView) -> None:
        if row.uid in self.readers:
            return
        key = row.prompt_id, row.group_id
        visit = self.visits.get(key)
        if visit is None:
            visit = self.visits[key] = SuffixVisit(key, self.version, row.prompt)
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

    def _count(self, visit: SuffixVisit, tokens: int) -> None:
        """So many more are remembered; the oldest visits make room, never this one."""
        visit.tokens += tokens
        self.tokens += tokens
        while self.tokens > self.capacity and (oldest := next(iter(self.visits.values()))) is not visit:
            self._drop(oldest)

    def _drop(self, visit: SuffixVisit) -> None:
        """Nothing new will look at it; rows that do may go on."""
        del self.visits[visit.key]
        self.tokens -= visit.tokens
        visits = self._of[visit.key[0]]
        visits.remove(visit)
        if not visits:
            del self._of[visit.key[0]]
