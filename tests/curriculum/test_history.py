from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.curriculum.scalingrl import ALL_RIGHT, ALL_WRONG, MIXED, UNSEEN, History


def add(
    history: History, row: int, *, group_id: int, right: int, judged: int, tokens: int, epoch: int
) -> None:
    history.add(
        *(np.array([value]) for value in (row, group_id, right, judged, tokens)), epoch=epoch
    )


def test_groups_that_come_together_count_as_one_by_one() -> None:
    """Two groups of row 0, the older one last, and one of row 2 between them."""
    groups = [(0, 7, 1, 4, 40), (2, 8, 0, 4, 30), (0, 5, 4, 4, 20), (0, 9, 2, 4, 10)]
    together, single = History(3), History(3)
    together.add(*np.array(groups).T, epoch=2)
    for row, group_id, right, judged, tokens in groups:
        add(single, row, group_id=group_id, right=right, judged=judged, tokens=tokens, epoch=2)
    assert together.state_dict() == single.state_dict() and together.visits.tolist() == [2, 0, 1]


def test_a_group_may_come_in_pieces() -> None:
    whole, pieces = History(1), History(1)
    add(whole, 0, group_id=3, right=2, judged=8, tokens=900, epoch=1)
    for right, judged, tokens in ((0, 2, 100), (1, 5, 700), (1, 1, 100)):
        add(pieces, 0, group_id=3, right=right, judged=judged, tokens=tokens, epoch=1)
    assert whole.state_dict() == pieces.state_dict()
    assert (whole.rate[0], whole.length[0], whole.visits[0]) == (0.25, 112.5, 1)


def test_recent_rate_is_over_three_groups_and_lengths_remember_seven_tenths() -> None:
    """Rates 0, 1, 1/2, 1/4: the last three give 7/12. Lengths 100, then 200: 130, 151, 165.7."""
    history = History(1)
    for group, (right, tokens) in enumerate([(0, 400), (4, 800), (2, 800), (1, 800)]):
        add(history, 0, group_id=group, right=right, judged=4, tokens=tokens, epoch=group)
        if group == 1:
            assert history.length[0] == pytest.approx(130.0)
    assert history.rate[0] == pytest.approx(7 / 12)
    assert history.length[0] == pytest.approx(165.7)


def test_kind_is_that_of_the_last_three_groups_and_solved_is_for_ever() -> None:
    history = History(2)
    kinds, flat = [], []
    for group, right in enumerate((0, 2, 4, 0, 0, 4, 4, 4)):
        add(history, 0, group_id=group, right=right, judged=4, tokens=8, epoch=0)
        kinds.append(int(history.kind[0]))
        flat.append(bool(history.flat(np.array([0]))[0]))
    assert kinds == [ALL_WRONG, MIXED, MIXED, MIXED, MIXED, MIXED, MIXED, ALL_RIGHT]
    assert flat == [True, False, True, True, True, True, True, True], "the latest group alone"
    assert history.solved.tolist() == [True, False] and history.kind[1] == UNSEEN


def test_one_verdict_does_not_tell_whether_all_agree() -> None:
    history = History(1)
    kinds = []
    for _ in range(2):
        add(history, 0, group_id=5, right=0, judged=1, tokens=10, epoch=0)
        kinds.append(int(history.kind[0]))
    assert kinds == [MIXED, ALL_WRONG]


def test_late_rollouts_of_an_older_group_count_with_the_latest() -> None:
    history = History(1)
    add(history, 0, group_id=5, right=1, judged=1, tokens=10, epoch=0)
    add(history, 0, group_id=8, right=0, judged=2, tokens=20, epoch=0)
    add(history, 0, group_id=5, right=1, judged=2, tokens=20, epoch=0)
    assert history.kind[0] == MIXED
    assert (history.visits[0], history.right[0], history.judged[0]) == (2, 1, 4)
    assert history.rate[0] == pytest.approx((0.25 + 1.0) / 2)


events = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 3), st.integers(0, 3)),
    max_size=30,
)


@given(events, st.integers(0, 30))
def test_a_saved_history_goes_on_as_if_never_interrupted(
    steps: list[tuple[int, ...]], save_at: int
) -> None:
    def run(saving: bool) -> History:
        history = History(5)
        for number, (row, group, right, wrong) in enumerate(steps):
            if right + wrong:
                add(
                    history,
                    row,
                    group_id=group,
                    right=right,
                    judged=right + wrong,
                    tokens=7 * right + 1,
                    epoch=number,
                )
            if saving and number == save_at:
                state = json.loads(json.dumps(history.state_dict()))
                history = History(5)
                # overwritten by the state
                add(history, 4, group_id=1, right=1, judged=2, tokens=3, epoch=4)
                history.load_state_dict(state)
        return history

    saved, plain = run(True), run(False)
    assert saved.state_dict() == plain.state_dict()
    assert np.isfinite(plain.rate).all() and plain.rate.min() >= 0 and plain.rate.max() <= 1.00001


def test_an_heir_knows_what_was_seen_of_the_prompts_it_has() -> None:
    old, new = History(3), History(2)
    add(old, 1, group_id=4, right=1, judged=4, tokens=40, epoch=7)
    add(old, 2, group_id=5, right=0, judged=4, tokens=80, epoch=7)
    new.inherit(old, rows=np.array([0]), theirs=np.array([2]))
    assert (int(new.kind[0]), float(new.length[0]), int(new.epoch[0]), int(new.visits[1])) == (
        ALL_WRONG,
        20.0,
        0,
        0,
    )
    add(new, 0, group_id=9, right=2, judged=4, tokens=40, epoch=1)
    assert float(new.rate[0]) == 0.25 and int(old.visits[2]) == 1
