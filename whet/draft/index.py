"""An index of texts that grow: where the last tokens of a text were seen before, and what followed.

Places are found by two anchors, the last 6 and the last 2 tokens, and compared backwards up to 12. Plain dicts and
arrays: a step adds a token or two to each text, and for so little a dict is several times faster than whole-array
operations. Indexing may lag behind the texts, so that a long text costs no single step dear.
Used by the n-gram and suffix drafters; it knows nothing of rows.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from whet.draft.base import LONGEST, SHORTEST

ANCHORS = (6, SHORTEST)
NEWEST = 16
"""Places looked at, the newest of an anchor."""


class Text:
    __slots__ = ("done", "tokens")

    def __init__(self, tokens: bytes) -> None:
        self.tokens = array("i", tokens)
        self.done = 1
        """Places before this one are indexed; the first token follows nothing."""


class Match(NamedTuple):
    source: Text
    place: int
    """Of the token that followed."""
    length: int
    """Tokens that agree; LONGEST at most when found, more when followed."""


class Index:
    def __init__(self) -> None:
        self._behind: deque[Text] = deque()
        self._places: tuple[dict[bytes, list[tuple[Text, int]]], ...] = ({}, {})

    def add(self, tokens: bytes) -> Text:
        """A new text of int32 tokens."""
        text = Text(tokens)
        self._behind.append(text)
        return text

    def extend(self, text: Text, tokens: bytes) -> None:
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

    def _learn(self, text: Text, first: int, stop: int) -> None:
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


def longest(tokens: array[int], found: list[tuple[Text, int]], known: int, vote: bool) -> Match:
    """Of places, the newest first, in front of which `known` tokens agree with the end of `tokens`."""
    end, best = len(tokens), 0
    matches: list[tuple[Text, int]] = []
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


def elected(matches: list[tuple[Text, int]]) -> tuple[Text, int]:
    """The first whose next token has the most votes."""
    votes: dict[int, int] = {}
    for source, place in matches:
        token = source.tokens[place]
        votes[token] = votes.get(token, 0) + 1
    return max(matches, key=lambda match: votes[match[0].tokens[match[1]]])


class Cursor:
    """Where a text stands in an index: what it matched is followed while they agree, then looked for anew."""

    __slots__ = ("index", "match", "read", "text")

    def __init__(self, index: Index, text: Text) -> None:
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
