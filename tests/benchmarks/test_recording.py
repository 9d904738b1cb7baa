"""How a recording of the terminal becomes one of 90 seconds."""

import doctest
from itertools import pairwise

import pictures


def test_examples_of_the_cut() -> None:
    ran = doctest.testmod(pictures)
    assert ran.attempted and not ran.failed


def test_a_recording_is_shortened_and_loses_no_line() -> None:
    lines = [(7.0 * n, f"step {n}\r\n") for n in range(200)]
    short = pictures.fit(lines)
    assert "".join(text for _, text in short) == "".join(text for _, text in lines)
    assert short[0][0] == 0.0 and short[-1][0] <= pictures.SECONDS - pictures.HOLD
    assert all(after - before >= pictures.FRAME for (before, _), (after, _) in pairwise(short))
