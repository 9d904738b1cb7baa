from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whet.curriculum.stages import short_by_characters, short_by_responses


def test_up_to_the_floor_of_the_mean_is_short() -> None:
    # mean 12.33, floor 12
    assert short_by_characters(np.array([10, 12, 13, 12, 14, 13])).tolist() == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    # mean 247.24 as in the published set: 247 is in, 248 is out
    assert short_by_characters(np.array([247, 248, 246, 248])).tolist() == [
        True,
        False,
        True,
        False,
    ]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30))
def test_some_are_short_and_these_are_shorter(lengths: list[int]) -> None:
    short = short_by_characters(np.array(lengths))
    assert short.any()
    if not short.all():
        assert np.array(lengths)[short].max() < np.array(lengths)[~short].min()


def test_responses_are_compared_with_responses_and_characters_with_characters() -> None:
    characters = np.array([100, 900, 100, 900])  # mean 500
    # means 400 and 100, of which the mean is 250
    tokens, seen = np.array([800, 100, 0, 0]), np.array([2, 1, 0, 0])
    assert short_by_responses(characters, tokens, seen).tolist() == [False, True, True, False]


def test_without_any_response_it_is_the_split_by_characters() -> None:
    characters = np.array([3, 9, 4])
    assert (
        short_by_responses(characters, np.zeros(3), np.zeros(3)).tolist()
        == short_by_characters(characters).tolist()
    )
