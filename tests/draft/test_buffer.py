"""The data buffer: tokens as its unit, what stays from step to step, and samples that follow from their key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.draft.buffer import FEW, DataBuffer
from whet.errors import WhetError


def add(buffer: DataBuffer, step: int, *lengths: int) -> None:
    """Entries whose hidden states are their places."""
    for length in lengths:
        hidden = torch.arange(length, dtype=torch.float32)[:, None]
        buffer.add(step, list(range(length + 1)), hidden)


def held(buffer: DataBuffer) -> list[tuple[int, int]]:
    """Step and length of each entry."""
    return [(entry.step, len(entry)) for entry in buffer.entries]


def test_of_the_last_step_only_the_longest_quarter_stays() -> None:
    buffer = DataBuffer(1000)
    add(buffer, 0, 10, 40, 20, 30, 35)
    assert len(buffer.entries) == 5
    add(buffer, 1, 5, 6)
    assert held(buffer) == [(0, 40), (0, 35), (1, 5), (1, 6)]  # ceil(5 / 4) = 2
    add(buffer, 2, 7)
    assert held(buffer) == [(1, 6), (2, 7)], "nothing of the step before the last"
    assert buffer.tokens == 13


def test_beyond_capacity_the_fullest_class_of_lengths_loses_its_oldest() -> None:
    buffer = DataBuffer(100)
    add(buffer, 0, 40, 5, 6, 45)
    assert buffer.tokens == 96
    add(buffer, 0, 7)
    assert [len(e) for e in buffer.entries] == [5, 6, 45, 7], "85 of 103 tokens were long ones"
    add(buffer, 0, *[4] * 14)
    assert [len(e) for e in buffer.entries] == [45, *[4] * 13], (
        "then the short ones pass 45 tokens, and lose theirs"
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=30))
def test_it_never_holds_more_than_its_capacity(steps: list[tuple[int, int]]) -> None:
    buffer, step = DataBuffer(70), 0
    for more, length in steps:
        step += more
        add(buffer, step, length)
        assert buffer.tokens == sum(map(len, buffer.entries)) <= 70
        if length > 1:
            assert (buffer.entries[-1].step, len(buffer.entries[-1])) == (step, length), (
                "the newest is there"
            )


def test_what_cannot_be_a_pair_is_left_out_and_what_is_too_long_is_cut() -> None:
    buffer = DataBuffer(8)
    add(buffer, 0, 1)
    assert not buffer.entries
    add(buffer, 0, 20)
    assert buffer.tokens == 8 and len(buffer.entries[0].ids) == 8
    with pytest.raises(WhetError, match="at least 2"):
        DataBuffer(1)


def test_hidden_states_must_fit_their_tokens() -> None:
    buffer = DataBuffer(100)
    with pytest.raises(ValueError, match="5 hidden states for 3 tokens"):
        buffer.add(0, [1, 2, 3], torch.zeros(5, 2))
    with pytest.raises(ValueError, match="3 hidden states for 5 tokens"):
        buffer.add(0, [1, 2, 3, 4, 5], torch.zeros(3, 2))


def test_a_run_that_goes_back_begins_another_step() -> None:
    buffer = DataBuffer(1000)
    add(buffer, 3, 10, 40, 20, 30)
    assert buffer.wants(2, 9)
    assert held(buffer) == [(3, 40)] and (buffer.step, buffer.ended) == (2, 9)
    add(buffer, 2, 9)
    add(buffer, 3, 8)
    assert held(buffer) == [(2, 9), (3, 8)]


def test_it_keeps_copies() -> None:
    buffer, hidden, ids = DataBuffer(10), torch.ones(3, 2), torch.tensor([1, 2, 3])
    buffer.add(0, ids, hidden)
    hidden.zero_()
    ids.zero_()
    assert buffer.entries[0].hidden.min() == 1 and buffer.entries[0].ids.tolist() == [1, 2, 3]


def storages(buffer: DataBuffer) -> dict[int, int]:
    """Bytes of the memory behind the entries."""
    found = (entry.hidden.untyped_storage() for entry in buffer.entries)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(2, 30), min_size=1, max_size=6)),
        max_size=20,
    )
)
def test_parts_of_one_tensor_take_no_memory_beyond_their_own(
    batches: list[tuple[int, list[int]]],
) -> None:
    """Entries that came together go one by one; those that stay are what they were."""
    buffer, step = DataBuffer(70), 0
    for batch, (more, lengths) in enumerate(batches):
        step += more
        whole = (
            torch.full((sum(lengths), 3), float(batch)) + torch.arange(sum(lengths))[:, None] / 1000
        )
        buffer.wants(step, lengths[0])
        for part in whole.split(lengths):
            buffer.add(step, [batch, *range(len(part))], part)
        assert buffer.tokens == sum(map(len, buffer.entries)) <= 70
        assert sum(storages(buffer).values()) == buffer.tokens * 3 * 4
        assert all((entry.hidden.floor() == entry.ids[0]).all() for entry in buffer.entries)


def wanted(buffer: DataBuffer, step: int, *lengths: int) -> list[int]:
    return [length for length in lengths if buffer.wants(step, length)]


def test_a_lesson_wants_twice_its_share_whatever_the_length() -> None:
    """Equal lengths, none of which is among the longest: the first 5 by the floor of a small step, then 4 in 10."""
    buffer = DataBuffer(10**6, share=0.2)
    found = [buffer.wants(0, 1000) for _ in range(100)]
    assert found[:5] == [True] * 5 and FEW == 4096
    assert not any(found[5:12]), "5,000 tokens are more than 2 x 0.2 of 12,000"
    assert sum(found) == 40
    assert [DataBuffer(100, share=0.2).wants(0, n) for n in (1, 2)] == [False, True], (
        "one state is no pair"
    )


def test_the_longest_of_a_step_are_wanted_too() -> None:
    """Two steps of the lengths 1 to 400, in any order, each times ten: of the second, all of the longest tenth."""
    for order in (range(1, 401), range(400, 0, -1), torch.randperm(400).add(1).tolist()):
        buffer = DataBuffer(10**6, share=0.2)
        lengths = [10 * n for n in order]
        wanted(buffer, 0, *lengths)
        found = wanted(buffer, 1, *lengths)
        assert {10 * n for n in range(361, 401)} <= set(found)
        assert len(found) <= 0.72 * 400, "the rest is left to its turn"
        assert min(found) < 2000, "short ones have theirs, too"


def test_without_lessons_nothing_is_wanted_and_by_default_everything() -> None:
    assert wanted(DataBuffer(100, share=0.0), 0, 5, 50, 500) == []
    lengths = [*range(2, 400), *range(400, 2, -1)]
    assert wanted(DataBuffer(100), 0, *lengths) == lengths
    buffer = DataBuffer(1000)
    add(buffer, 0, 5, 6)
    buffer.close()
    assert not buffer.entries and buffer.tokens == 0 and not buffer.wants(0, 50)


def test_to_be_asked_is_to_begin_the_step() -> None:
    buffer = DataBuffer(1000, share=0.2)
    add(buffer, 0, 10, 40, 20, 30)
    assert buffer.wants(1, 9)
    assert held(buffer) == [(0, 40)] and buffer.step == 1
    add(buffer, 1, 9)
    assert held(buffer) == [(0, 40), (1, 9)]


def test_samples_follow_from_their_key_and_fill_their_room() -> None:
    buffer = DataBuffer(1000)
    add(buffer, 0, 30, 12, 25, 50, 9)
    one, same = (
        [(len(w.entry), w.start, w.stop) for w in buffer.sample(40, (7, 1))] for _ in range(2)
    )
    assert one == same
    drawn = {tuple((len(w.entry), w.start) for w in buffer.sample(40, (7, i))) for i in range(20)}
    assert len(drawn) > 5
    for i in range(20):
        windows = buffer.sample(40, (7, i))
        assert 40 - 8 < sum(map(len, windows)) <= 40
        assert [len(w) for w in windows] == sorted((len(w) for w in windows), reverse=True)
        assert all(0 <= w.start < w.stop <= len(w.entry) - 1 for w in windows)
        assert len({len(w.entry) for w in windows}) == len(windows)
    assert sum(map(len, buffer.sample(10_000, (0,)))) == buffer.tokens - 5, (
        "an entry of n states has n - 1 pairs"
    )
    assert DataBuffer(10).sample(5, (0,)) == []


def test_a_window_may_begin_anywhere_up_to_the_last_place_that_it_fits() -> None:
    """Seven states have six pairs, so a window of four begins at 0, 1 or 2."""
    buffer = DataBuffer(1000)
    add(buffer, 0, 7)
    assert {buffer.sample(4, (0, i))[0].start for i in range(60)} == {0, 1, 2}


def test_token_counts() -> None:
    buffer = DataBuffer(100)
    assert buffer.counts(4).tolist() == [0, 0, 0, 0]
    buffer.add(0, [1, 1, 3], torch.zeros(3, 1))
    assert buffer.counts(5).tolist() == [0, 2, 0, 1, 0]
