"""The data buffer: tokens as its unit, what stays from step to step, and samples that follow from their key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.draft.buffer import DataBuffer
from whet.errors import WhetError


def add(buffer: DataBuffer, step: int, *lengths: int) -> None:
    """Entries whose hidden states are their places."""
    for i, length in enumerate(lengths):
        hidden = torch.arange(length, dtype=torch.float32)[:, None]
        buffer.add(f"{step}.{i}", step, list(range(length + 1)), hidden)


def uids(buffer: DataBuffer) -> list[str]:
    return [entry.uid for entry in buffer.entries]


def test_of_the_last_step_only_the_longest_quarter_stays() -> None:
    buffer = DataBuffer(1000)
    add(buffer, 0, 10, 40, 20, 30, 35)
    assert len(buffer.entries) == 5
    add(buffer, 1, 5, 6)
    assert uids(buffer) == ["0.1", "0.4", "1.0", "1.1"]  # ceil(5 / 4) = 2
    add(buffer, 2, 7)
    assert uids(buffer) == ["1.1", "2.0"], "nothing of the step before the last"
    assert buffer.tokens == 13


def test_beyond_capacity_the_fullest_class_of_lengths_loses_its_oldest() -> None:
    buffer = DataBuffer(100)
    add(buffer, 0, 40, 5, 6, 45)
    assert buffer.tokens == 96
    add(buffer, 0, 7)
    assert [len(e) for e in buffer.entries] == [5, 6, 45, 7], "85 of 103 tokens were long ones"
    add(buffer, 0, *[4] * 14)
    assert [len(e) for e in buffer.entries] == [45, *[4] * 13], "then the short ones pass 45 tokens, and lose theirs"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=30))
def test_it_never_holds_more_than_its_capacity(steps: list[tuple[int, int]]) -> None:
    buffer, step = DataBuffer(70), 0
    for more, length in steps:
        step += more
        add(buffer, step, length)
        assert buffer.tokens == sum(map(len, buffer.entries)) <= 70
        if length > 1:
            assert (buffer.entries[-1].step, len(buffer.entries[-1])) == (step, length), "the newest is there"


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
        buffer.add("a", 0, [1, 2, 3], torch.zeros(5, 2))
    with pytest.raises(ValueError, match="3 hidden states for 5 tokens"):
        buffer.add("a", 0, [1, 2, 3, 4, 5], torch.zeros(3, 2))
    add(buffer, 3, 5)
    with pytest.raises(ValueError, match="step 2"):
        add(buffer, 2, 5)


def test_it_keeps_copies() -> None:
    buffer, hidden, ids = DataBuffer(10), torch.ones(3, 2), torch.tensor([1, 2, 3])
    buffer.add("a", 0, ids, hidden)
    hidden.zero_()
    ids.zero_()
    assert buffer.entries[0].hidden.min() == 1 and buffer.entries[0].ids.tolist() == [1, 2, 3]


def test_samples_follow_from_their_key_and_fill_their_room() -> None:
    buffer = DataBuffer(1000)
    add(buffer, 0, 30, 12, 25, 50, 9)
    one, same = ([(w.entry.uid, w.start, w.stop) for w in buffer.sample(40, (7, 1))] for _ in range(2))
    assert one == same
    drawn = {tuple((w.entry.uid, w.start) for w in buffer.sample(40, (7, i))) for i in range(20)}
    assert len(drawn) > 5
    for i in range(20):
        windows = buffer.sample(40, (7, i))
        assert 40 - 8 < sum(map(len, windows)) <= 40
        assert [len(w) for w in windows] == sorted((len(w) for w in windows), reverse=True)
        assert all(0 <= w.start < w.stop <= len(w.entry) - 1 for w in windows)
        assert len({w.entry.uid for w in windows}) == len(windows)
    assert sum(map(len, buffer.sample(10_000, (0,)))) == buffer.tokens - 5, "an entry of n states has n - 1 pairs"
    assert DataBuffer(10).sample(5, (0,)) == []


def test_token_counts() -> None:
    buffer = DataBuffer(100)
    assert buffer.counts(4).tolist() == [0, 0, 0, 0]
    buffer.add("a", 0, [1, 1, 3], torch.zeros(3, 1))
    assert buffer.counts(5).tolist() == [0, 2, 0, 1, 0]


def test_a_saved_buffer_goes_on_as_the_old_one() -> None:
    buffer = DataBuffer(200)
    add(buffer, 0, 30, 12, 25)
    other = DataBuffer(200)
    other.load(buffer.state_dict(), buffer.tensors())
    for b in (buffer, other):
        add(b, 1, 20, 90)
    assert uids(buffer) == uids(other) == ["0.0", "1.0", "1.1"]
    for mine, theirs in zip(buffer.entries, other.entries, strict=True):
        assert torch.equal(mine.hidden, theirs.hidden) and torch.equal(mine.ids, theirs.ids)
    empty = DataBuffer(200)
    empty.load(DataBuffer(5).state_dict(), {})
    assert not empty.entries
