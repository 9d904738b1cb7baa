import pytest
from probed import probed

from whet.tools.forecast import enough, length_rows, limit_row, limit_rows


def test_lengths_apart() -> None:
    _, rollouts = probed([1, 3], 4, right_length=100, wrong_length=200)
    rows = {row.of: row for row in length_rows(rollouts)}
    assert rows["all"].count == 8 and rows["all"].mean == 150 and rows["all"].longest == 200
    assert rows["right"].p99 == 100 and rows["wrong"].p50 == 200
    assert [row.of for row in length_rows(probed([0], 4)[1])] == ["all", "wrong"]


def test_a_lower_limit_by_hand() -> None:
    """Four right of 100 tokens, four wrong cut at 512."""
    _, rollouts = probed([2, 2], 4, limit=512, wrong_length=512)
    rows = limit_rows(rollouts, 512)
    assert [row.limit for row in rows] == [64, 128, 192, 256, 320, 384, 448, 512]
    assert rows[0].cut == 1.0 and rows[0].right_lost == 1.0 and rows[0].tokens == pytest.approx(64 * 8 / (4 * 612))
    assert rows[1].cut == 0.5 and rows[1].right_lost == 0.0
    assert rows[-1].cut == 0.5 and rows[-1].tokens == 1.0


def test_a_response_that_ends_at_the_limit_is_not_cut() -> None:
    _, rollouts = probed([2, 2], 4, right_length=100, wrong_length=200)
    assert limit_row(rollouts, 200).cut == 0.0 and limit_row(rollouts, 199).cut == 0.5
    assert limit_row(rollouts, 100).right_lost == 0.0 and limit_row(rollouts, 99).right_lost == 1.0
    assert limit_row(probed([0], 4)[1], 99).right_lost is None


def test_enough_loses_few_right_responses_and_cuts_few_of_all() -> None:
    assert enough(probed([8] * 10, 8, limit=640, right_length=101)[1], 640) == 110  # the first 64th of 640 from 101 on
    assert enough(probed([4] * 10, 8, limit=640, right_length=101, wrong_length=301)[1], 640) == 310
    assert enough(probed([4] * 10, 8, limit=640, right_length=101, wrong_length=640)[1], 640) == 640
    assert enough(probed([1] * 10, 8)[1], 512) is None  # ten right ones are too few
