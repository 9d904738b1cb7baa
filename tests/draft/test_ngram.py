"""The n-gram drafter continues as its own context did: longest match, newest of equals."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.draft.base import LONGEST, RowView
from whet.draft.lookup import ANCHORS, NEWEST, Index, NGram


def ints(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def row(prompt: np.ndarray, written: np.ndarray, uid: int = 0) -> RowView:
    return RowView(uid, "p", 0, uid, prompt, written)


def draft(prompt: np.ndarray, written: np.ndarray, most: int = 4) -> list[int]:
    tokens, counts = NGram().propose([row(prompt, written)], np.array([most]))
    return tokens[0, : counts[0]].tolist()


def test_continues_what_followed() -> None:
    assert draft(ints(1, 2, 3, 4, 5), ints(9, 2, 3)) == [4, 5, 9, 2]  # two tokens agree
    assert draft(ints(1, 2, 3, 4, 5), ints(9, 1, 2, 3)) == [4, 5, 9, 1]
    assert draft(ints(1, 2, 3, 4, 5), ints(9, 3)) == [4, 5, 9, 3]  # one token is a match
    assert draft(ints(7), ints()) == []


def test_the_longest_match_goes_before_the_newest() -> None:
    assert draft(ints(1, 2, 3, 4), ints(8, 2, 3, 5, 9, 1, 2, 3))[:1] == [4]
    # equally long: the newest
    assert draft(ints(1, 2, 3, 4), ints(8, 2, 3, 5, 9, 7, 2, 3))[:1] == [5]


def test_a_repeating_text_goes_round() -> None:
    period = np.tile(ints(5, 6, 7), 8)
    assert draft(ints(1), period, 10) == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]


def test_drafts_are_as_long_as_is_wanted_whatever_agrees() -> None:
    text = np.arange(100, 160, dtype=np.int32)
    for matched in (1, 2, 5, 11, LONGEST):
        assert (
            draft(text, np.append(ints(1), text[:matched]), 30)
            == text[matched : matched + 30].tolist()
        )


def test_reading_on_gives_what_reading_at_once_gives() -> None:
    """Rows that come token by token, run by run, or after a pause draft from the same text."""
    rng = np.random.default_rng(0)
    prompt, text = (
        rng.integers(0, 12, 40).astype(np.int32),
        rng.integers(0, 12, 300).astype(np.int32),
    )
    text[150:250] = text[20:120]
    slow = NGram()
    at = 0
    while at < 300:
        at = min(300, at + int(rng.integers(1, 6)))
        fast = NGram()
        for drafter in (slow, fast):
            drafter.propose([row(prompt, text[:at])], np.array([1]))
        mine, fresh = slow.cursors[0], fast.cursors[0]
        assert (
            mine.text.tokens.tolist()
            == fresh.text.tokens.tolist()
            == [*prompt.tolist(), *text[:at].tolist()]
        )
        if mine.match is None:
            assert fresh.match is None
            continue
        assert fresh.match is not None and min(mine.match.length, LONGEST) == fresh.match.length
        n, place = fresh.match.length, mine.match.place
        assert (
            mine.match.source.tokens[place - n : place].tolist() == mine.text.tokens[-n:].tolist()
        )


def test_rows_keep_apart_and_ends_are_forgotten() -> None:
    drafter = NGram()
    both = [row(ints(1, 2, 3), ints(1, 2), 0), row(ints(1, 2, 4), ints(1, 2), 1)]
    tokens, counts = drafter.propose(both, np.array([1, 1]))
    assert tokens.ravel().tolist() == [3, 4] and counts.tolist() == [1, 1]
    tokens, counts = drafter.propose(both, np.array([0, 1]))
    assert counts.tolist() == [0, 1]
    for r in both:
        drafter.finish(r)
        drafter.finish(r)
    assert not drafter.cursors


def test_a_long_text_is_indexed_over_several_steps() -> None:
    text = np.arange(9000, dtype=np.int32)
    drafter, r = NGram(), row(text, ints(1, 2))
    steps = 0
    while not drafter.propose([r], np.array([2]))[1][0]:
        steps += 1
    assert steps == 0  # what is needed is near the front
    drafter, r = NGram(), row(text, ints(8990, 8991))
    while not drafter.propose([r], np.array([2]))[1][0]:
        steps += 1
    assert steps == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(0, 2**31 - 1))
def test_the_longest_match_against_brute_force(text: list[int], seed: int) -> None:
    index = Index()
    own = index.add(np.array(text, np.int32).tobytes())
    index.catch_up(10**6)
    found = index.find(own.tokens, vote=False)

    def agree(place: int) -> int:
        n = 0
        while n < min(LONGEST, place) and text[place - n - 1] == text[len(text) - n - 1]:
            n += 1
        return n

    lengths = {place: agree(place) for place in range(1, len(text))}
    anchor = max((n for n in ANCHORS if n <= max(lengths.values(), default=0)), default=1)
    newest = [p for p in sorted(lengths, reverse=True) if lengths[p] >= anchor][: 2 * NEWEST]
    if not newest:
        assert found is None
    else:
        assert found is not None and found.length == lengths[found.place]
        if len(newest) <= NEWEST:
            best = max(newest, key=lambda p: (lengths[p], p))
            assert (found.place, found.length) == (best, lengths[best])
