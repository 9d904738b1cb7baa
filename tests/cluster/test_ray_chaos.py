"""A run whose workers, judge, learner and driver are killed, and which a node joins, by a plan drawn from a seed."""

from pathlib import Path

import pytest
from chaos import bring_chaos
from ray_run import MARKS, loopback

pytestmark = [*MARKS, pytest.mark.slow]


def test_kills_and_joins_leave_no_trace(tmp_path: Path) -> None:
    with loopback():
        result = bring_chaos(tmp_path, seed=0, kills=5, joins=1, steps=12, mode="barrier")
    assert all(result[kind] for kind in ("worker", "judge", "learner", "driver", "join")), result
    assert (
        result["trained twice"]
        == result["judged twice"]
        == result["trained without a verdict"]
        == 0
    )
    assert result["rollouts trained"] == 12 * 3 * 4 and result["most visits to a prompt"] == 1
    assert result["largest difference"] < 1e-12
