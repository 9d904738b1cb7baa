"""Drafts looked up on the device: texts by hand, the reference against plain loops, the kernels against both."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_env import device, needs_triton
from torch import Tensor

from whet.draft import base
from whet.draft.base import LONGEST, SHORTEST
from whet.fast.kernels.decode import lookup, lookup_reference

paths = pytest.mark.parametrize("path", ["reference", pytest.param("triton", marks=needs_triton)])
NONE = -1
LONG = list(range(20, 32))
"""LONGEST tokens."""


def ints(numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def drafted(
    path: str,
    texts: Sequence[Sequence[int]],
    *,
    of: Sequence[int] | None = None,
    siblings: Sequence[Sequence[int]] | None = None,
    lane: Sequence[int] = (0,),
    most: Sequence[int] | None = None,
    depth: int = 6,
) -> list[list[int]]:
    """The drafts, in the midst of a wider tensor. All texts belong to one prompt and have no siblings, unless said.

    What is behind a text repeats its end: a row that reads it finds a match.
    """
    context = max(map(len, texts)) + 8
    filled = [[*text, *text[-4:], *[5] * context][:context] for text in texts]
    wide = torch.full((len(lane) + 1, depth + 3), 77, dtype=torch.int32, device=device)
    (lookup if path == "triton" else lookup_reference)(
        ints(filled),
        ints([len(text) for text in texts]),
        ints([0] * len(texts) if of is None else of),
        ints([[NONE]] * len(texts) if siblings is None else siblings),
        ints(lane),
        ints([depth] * len(lane) if most is None else most),
        part := wide[: len(lane), 1 : 1 + depth],
    )
    found: list[list[int]] = part.tolist()
    part.fill_(77)
    assert (wide == 77).all()
    return found


def draft(
    path: str, *texts: Sequence[int], siblings: Sequence[int] = (), **others: object
) -> list[int]:
    """What was guessed for the row of the first text."""
    rows = [list(siblings) or [NONE], *[[NONE] * max(1, len(siblings))] * (len(texts) - 1)]
    (row,) = drafted(path, texts, siblings=rows, **others)  # type: ignore[arg-type]
    guesses = [token for token in row if token != NONE]
    assert row == guesses + [NONE] * (len(row) - len(guesses))
    return guesses


def test_as_many_tokens_as_the_hosts_drafters_match() -> None:
    assert (LONGEST, SHORTEST) == (base.LONGEST, base.SHORTEST) and len(LONG) == LONGEST


@paths
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2, 7, 8, 9, 1, 2], [7, 8, 9, 1, 2, 7]),  # as many as are wanted
        ([0, 1, 2, 7, 8, 9, 0, 1, 2], [7, 8, 9, 0, 1, 2]),
        ([3, 1, 2, 7, 8, 3, 9, 2, 5, 4, 1, 2], [7, 8, 3, 9, 2, 5]),  # a gap ends a match
        ([2, 7, 8, 9, 2], [7, 8, 9, 2, 7, 8]),  # one token is a match
        ([1, 2, 7, 1, 2, 8, 9, 1, 2], [8, 9, 1, 2, 8, 9]),  # the newest place
        ([3, 1, 2, 7, 8, 1, 2, 9, 3, 1, 2], [7, 8, 1, 2, 9, 3]),  # but the longest first
        ([1, 2, 3], []),
        ([5, 4], []),  # at its own end nothing has followed yet
        ([4, 4], [4, 4, 4, 4, 4, 4]),
        ([4], []),
        ([], []),
        ([*LONG, 7, 8, *LONG], [7, 8, *LONG[:4]]),  # the longest: as many as wanted
        ([*LONG[1:], 7, 8, *LONG[1:]], [7, 8, *LONG[1:5]]),
        ([3, 4, 5] * 6, [3, 4, 5, 3, 4, 5]),  # round and round
    ],
)
def test_what_followed_in_its_own_text(path: str, text: list[int], want: list[int]) -> None:
    assert draft(path, text) == want


@paths
def test_a_draft_is_as_long_as_is_wanted_whatever_agrees(path: str) -> None:
    assert draft(path, [3, *range(40, 60), 3], depth=15) == list(range(40, 55))
    assert draft(path, [*LONG, *range(40, 60), *LONG], depth=15) == list(range(40, 55))
    assert draft(path, [9, *LONG, *range(40, 60), 9, *LONG], depth=15) == list(range(40, 55))


@paths
def test_siblings(path: str) -> None:
    own = [1, 2, 7, 7, 3, 1, 2]
    assert draft(path, own, [3, 1, 2, 8, 9, 6, 5]) == [7, 7, 3, 1, 2, 7]  # not a sibling
    assert draft(path, own, [3, 1, 2, 8, 9, 6, 5], siblings=[1]) == [8, 9, 6, 5]  # longer
    # as long: its own text first
    assert draft(path, own, [4, 1, 2, 8, 9, 6, 5], siblings=[1]) == [7, 7, 3, 1, 2, 7]
    # the earlier of two
    assert draft(path, own, [3, 1, 2, 8, 9], [3, 1, 2, 5, 6], siblings=[2, 1]) == [5, 6]
    assert draft(path, own, [3, 1, 2, 8, 9], [7, 3, 1, 2, 5, 6], siblings=[1, NONE, 2]) == [5, 6]
    # its newest place; it ends where it ends
    assert draft(path, own, [3, 1, 2, 8, 3, 1, 2, 9], siblings=[1]) == [9]
    assert draft(path, own, [3, 1, 2], siblings=[1]) == [7, 7, 3, 1, 2, 7]  # where nothing followed
    # no further back than its own start
    assert draft(path, [1, 2], [3, 1, 2, 8, 9, 5], siblings=[1]) == [8, 9, 5]
    # nor is its first token there twice
    assert draft(path, [1, 2], [1, 1, 1, 2, 8, 9, 5], siblings=[1]) == [8, 9, 5]
    assert draft(path, [2], [3, 1, 2, 8, 9, 5], siblings=[1]) == [8, 9, 5]
    # a sibling does not go round
    assert draft(path, [*LONG], [*LONG, 3, 4, 3], siblings=[1]) == [3, 4, 3]


@paths
def test_siblings_that_have_another_text_by_now_do_not_count(path: str) -> None:
    texts, own = ([1, 2, 7, 7, 3, 1, 2], [3, 1, 2, 8, 9, 6, 5]), [7, 7, 3, 1, 2, 7]
    assert draft(path, *texts, siblings=[1], of=[4, 4]) == [8, 9, 6, 5]
    assert draft(path, *texts, siblings=[1], of=[4, 5]) == own
    assert draft(path, *texts, siblings=[1], of=[4, NONE]) == own
    # no prompt is not the same prompt
    assert draft(path, *texts, siblings=[1], of=[NONE, NONE]) == own
    # its own text is its own, once
    assert draft(path, [*LONG, 7, *LONG], siblings=[0]) == [7, *LONG[:5]]


@paths
def test_rows_empty_rows_and_how_much_they_want(path: str) -> None:
    texts = [1, 2, 7, 8, 9, 1, 2], [4, 4, 4, 4], [3, 1, 2, 5, 6, 3, 1, 2]
    lane, most = [2, NONE, 1, 0, 2, 2], [6, 6, 2, 0, 1, -3]
    rows = [[5, 6, 3, 1], [], [4, 4], [], [5], []]
    assert drafted(path, texts, lane=lane, most=most, depth=4) == [
        [*row, *[NONE] * (4 - len(row))] for row in rows
    ]
    assert drafted(path, texts, lane=[2, 0], most=[9, 9], depth=1) == [[5], [7]]
    assert drafted(path, texts, lane=[2], siblings=[[], [], []]) == [[5, 6, 3, 1, 2, 5]]
    assert drafted(path, texts, lane=[2], depth=0) == [[]] and drafted(path, texts, lane=[]) == []


@paths
@pytest.mark.parametrize("at", [0, 1010, 1023, 1024, 1030, 2040])
def test_texts_of_many_blocks(path: str, at: int) -> None:
    text = [(7 * i) % 997 + 100 for i in range(2100)]
    text[at : at + LONGEST] = text[-LONGEST:] = LONG
    text[500 + at // 4 : 504 + at // 4] = LONG[-4:]  # a shorter one
    after = at + LONGEST
    assert draft(path, text) == text[after : after + 6]
    assert draft(path, LONG, text, siblings=[1]) == text[after : after + 6]


def plain(
    texts: list[list[int]], of: list[int], siblings: list[list[int]], own: int, most: int
) -> list[int]:
    """A row's draft by the letter: every place of every text, in the order in which they win."""
    mine = texts[own] if own >= 0 else []
    akin = (
        [k for k in siblings[own] if k >= 0 and k != own and of[k] == of[own] != NONE]
        if own >= 0
        else []
    )
    best, draft = 0, list[int]()
    for source in (own, *akin) if own >= 0 else ():
        text = texts[source]
        for place in range(len(text) - 1, SHORTEST - 1, -1):
            match = 0
            while (
                match < min(LONGEST, place, len(mine))
                and text[place - 1 - match] == mine[-1 - match]
            ):
                match += 1
            if match >= SHORTEST and match > best:
                best = match
                draft = text[place:] * (max(most, 1) if source == own else 1)
    return draft[: max(0, most)]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, list]:
    """A few lanes of one or two prompts, few words, and texts that begin alike."""
    words = st.integers(0, draw(st.integers(0, 3)))
    start = draw(st.lists(words, max_size=20))
    lanes = draw(st.integers(1, 4))
    texts = [
        draw(st.sampled_from([start, []])) + draw(st.lists(words, max_size=20))
        for _ in range(lanes)
    ]
    any_lane = st.integers(NONE, lanes - 1)
    size = draw(st.integers(0, 3))
    rows = draw(st.integers(1, 4))
    return {
        "texts": texts,
        "of": draw(st.lists(st.sampled_from([0, 0, 0, 1, NONE]), min_size=lanes, max_size=lanes)),
        "siblings": [draw(st.lists(any_lane, min_size=size, max_size=size)) for _ in range(lanes)],
        "lane": draw(st.lists(any_lane, min_size=rows, max_size=rows)),
        "most": draw(st.lists(st.integers(-1, 20), min_size=rows, max_size=rows)),
    }


def assert_plain(path: str, case: dict[str, list], depth: int) -> None:
    wanted = [min(most, depth) for most in case["most"]]
    rows = [
        plain(case["texts"], case["of"], case["siblings"], *row)
        for row in zip(case["lane"], wanted, strict=True)
    ]
    assert drafted(path, **case, depth=depth) == [row + [NONE] * (depth - len(row)) for row in rows]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(case=cases(), depth=st.integers(1, 17))
def test_the_reference_is_the_plain_loop(case: dict[str, list], depth: int) -> None:
    assert_plain("reference", case, depth)


@needs_triton
@settings(max_examples=80, deadline=None)
@given(case=cases(), depth=st.integers(1, 17))
def test_the_kernels_are_the_plain_loop(case: dict[str, list], depth: int) -> None:
    assert_plain("triton", case, depth)


@needs_triton
@pytest.mark.parametrize("words", [2, 5])
def test_the_kernels_are_the_reference(words: int) -> None:
    """On texts of several blocks, many rows and siblings."""
    rng = torch.Generator().manual_seed(words)
    lanes, context, rows, depth = 6, 1500, 8, 15

    def some(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32).to(device)

    history, written = some(0, words, lanes, context), some(0, context + 1, lanes)
    given = (
        history,
        written,
        some(-1, 2, lanes),
        some(-1, lanes, lanes, 5),
        some(-1, lanes, rows),
        some(-1, 17, rows),
    )
    want, got = (torch.zeros(rows, depth, dtype=torch.int32, device=device) for _ in range(2))
    lookup_reference(*given, want)
    lookup(*given, got)
    assert torch.equal(want, got) and (want >= 0).any()


@pytest.mark.gpu
@needs_triton
def test_a_captured_lookup_reads_the_texts_anew() -> None:
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    history, one = ints([[1, 2, 7, 8, 1, 2, 0, 0]]), ints([0])
    written, drafts = ints([6]), torch.zeros(1, 3, dtype=torch.int32, device=device)
    texts = history, written, one, ints([[NONE]]), one, ints([3]), drafts
    lookup(*texts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lookup(*texts)
    graph.replay()
    assert drafts.tolist() == [[7, 8, 1]]
    history[0, 6:] = ints([7, 8])
    written.fill_(8)
    graph.replay()
    assert drafts.tolist() == [[1, 2, 7]]


def test_sizes_and_types_that_do_not_fit_are_refused() -> None:
    history, lengths, rows = ints([[1, 2, 3]] * 2), ints([3, 3]), ints([0])
    drafts, siblings = ints([[0, 0]]), ints([[NONE]] * 2)
    with pytest.raises(ValueError, match="2 lanes need as many lengths"):
        lookup(history, ints([3]), lengths, siblings, rows, rows, drafts)
    with pytest.raises(ValueError, match="1 rows of drafts need a lane"):
        lookup(history, lengths, lengths, siblings, ints([0, 1]), rows, drafts)
    with pytest.raises(ValueError, match="int32"):
        lookup(history.long(), lengths, lengths, siblings, rows, rows, drafts)
