from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.curriculum.source import Ids
from whet.errors import WhetError

ABC = list("abcdefgh")


@given(first=st.sets(st.integers(0, 7), min_size=1), second=st.sets(st.integers(0, 7), min_size=1))
def test_a_part_is_a_list_of_its_own_also_of_a_part(first: set[int], second: set[int]) -> None:
    ids = Ids(ABC)
    rows = np.array(sorted(first))
    part = ids.some(rows)
    among = np.array(sorted(row % len(rows) for row in second))
    among = np.unique(among)
    for some, names in (
        (part, [ABC[i] for i in rows]),
        (part.some(among), [ABC[i] for i in rows[among]]),
    ):
        assert list(some) == names == [some[row] for row in range(len(some))]
        assert some.rows(names).tolist() == list(range(len(names)))
        assert [name in some for name in ABC] == [name in names for name in ABC]
        assert set(some.rows([*({*ABC, "z"} - set(names))]).tolist()) == {-1}
        assert list(some[1:]) == names[1:] if len(names) > 1 else True


def test_all_rows_are_the_ids_themselves() -> None:
    ids = Ids(ABC)
    assert ids.some(np.arange(8)) is ids and Ids.of(ids) is ids and ids[:] is ids
    assert isinstance(ids[2:4], Ids) and list(ids[2:4]) == ["c", "d"]


def test_a_fingerprint_is_of_the_ids_their_order_and_of_what_they_are_part_of() -> None:
    ids, rows = Ids(ABC), np.array([1, 3])
    ids.load_state_dict(Ids(tuple(ABC)).state_dict())
    ids.some(rows).load_state_dict(Ids(ABC).some(rows).state_dict())
    others = [
        Ids(ABC[::-1]),
        Ids(ABC[:-1]),
        ids.some(rows),
        Ids(ABC[:-1]).some(rows),
        ids.some(np.array([1, 4])),
    ]
    assert len({ids.state_dict(), *(other.state_dict() for other in others)}) == 6
    with pytest.raises(WhetError, match="other prompts than the 8 given now"):
        ids.load_state_dict(others[0].state_dict())


def test_no_ids_and_repeated_ids_are_refused() -> None:
    with pytest.raises(WhetError, match="no prompts to train on"):
        Ids([])
    with pytest.raises(WhetError, match='"b" occurs 2 times'):
        Ids(["a", "b", "b"])
    with pytest.raises(WhetError, match="no prompts in this part"):
        Ids(ABC).some(np.array([], np.int64))
