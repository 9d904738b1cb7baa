"""A guarded drafter keeps its promises whatever the drafter does."""

import numpy as np
import pytest
from adversaries import Crashing, Empty, Oracle, TooLong, adversaries

from whet.draft.base import RowView
from whet.draft.speculation import PATIENCE, DraftGuard, tidy

VOCAB = 11
PLAIN = {(0, i): np.arange(i, i + 9, dtype=np.int32) % VOCAB for i in range(4)}


def rows(written: int = 2) -> list[RowView]:
    return [
        RowView(i, "p", 0, i, np.array([1, 2], np.int32), PLAIN[0, i][:written]) for i in range(4)
    ]


@pytest.mark.parametrize("drafter", adversaries(VOCAB, 3, PLAIN), ids=lambda d: d.name)
def test_what_comes_out_is_in_form(drafter: Empty) -> None:
    guard = DraftGuard(drafter, VOCAB)
    for row in rows():
        guard.begin(row)
    for most in (np.array([3, 0, 1, 5]), np.zeros(4, int), np.array([1, 1, 1, 1])):
        tokens, counts = guard.propose(rows(), most)
        assert tokens.shape == (4, most.max()) and tokens.dtype == counts.dtype == np.int32
        assert (counts <= most).all() and (counts >= 0).all()
        kept = tokens[np.arange(tokens.shape[1]) < counts[:, None]]
        assert ((kept >= 0) & (kept < VOCAB)).all()
    for row in rows():
        guard.finish(row)
    guard.updated(1)
    guard.forget()


def test_a_good_draft_passes_unchanged() -> None:
    tokens, counts = DraftGuard(Oracle(PLAIN), VOCAB).propose(rows(), np.array([3, 2, 1, 0]))
    assert counts.tolist() == [3, 2, 1, 0]
    assert [tokens[i, :n].tolist() for i, n in enumerate(counts)] == [[2, 3, 4], [3, 4], [4], []]


def test_crashes_are_counted_and_retire_it() -> None:
    guard = DraftGuard(Crashing(), VOCAB)
    for _ in range(PATIENCE + 4):
        assert guard.propose(rows(), np.full(4, 2))[1].tolist() == [0, 0, 0, 0]
    assert (
        guard.retired and guard.failures == PATIENCE and guard.error == "ZeroDivisionError: propose"
    )
    guard.drafter = TooLong()
    assert guard.propose(rows(), np.full(4, 2))[1].tolist() == [0, 0, 0, 0]
    guard.forget()
    assert guard.propose(rows(), np.full(4, 2))[1].tolist() == [2, 2, 2, 2]


def test_work_in_its_stead_that_fails_retires_it_at_once() -> None:
    guard, done = DraftGuard(Empty(), VOCAB), list[int]()
    assert guard.hold(done.append, 1) and done == [1] and not guard.retired
    assert not guard.hold(lambda: 1 / 0)
    assert guard.retired and guard.failures == 1 and guard.error.startswith("ZeroDivisionError")
    assert not guard.hold(done.append, 2) and done == [1]
    guard.forget()
    assert guard.hold(done.append, 3) and done == [1, 3]


def test_tidy_cuts_before_a_bad_id_and_never_after() -> None:
    tokens, counts = tidy(
        np.array([[1, -1, 2], [VOCAB, 1, 1]]), np.array([3, 3]), np.array([3, 3]), VOCAB
    )
    assert counts.tolist() == [1, 0] and tokens.tolist() == [[1, 0, 0], [0, 0, 0]]
