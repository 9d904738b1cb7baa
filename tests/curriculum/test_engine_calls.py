"""Screening and continuation share one engine call per update, by default, also where whole groups are asked."""

from __future__ import annotations

from typing import Any

import pytest
from barrier_run import ARMS, Played, few_pool, hard_pool, play

from whet.config import CurriculumSettings

UPDATES = 30
POOLS = {"hard": hard_pool, "few": few_pool}


def played(pool: str, name: str, **settings: Any) -> Played:
    return play({**ARMS[name], **settings}, POOLS[pool](0), updates=UPDATES)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", ["speed", "speed over cures", "all"])
def test_an_update_takes_about_one_engine_call(name: str, pool: str) -> None:
    """Two of the calls are of the start: nothing was screened before the first update."""
    found = played(pool, name)
    assert found.calls_per_update <= 1.3
    assert found.informative >= 0.95 * found.trained, "screening costs no signal"
    assert found.ages <= 2 * found.trained


def test_look_ahead_and_max_age_act_over_a_posterior_too() -> None:
    """Without a look-ahead, or strictly on-policy, the two phases take turns."""
    ahead, turns = played("few", "all"), played("few", "all", look_ahead=0.0)
    strict = played("few", "all", max_age=0)
    assert turns.calls_per_update > 1.5 * ahead.calls_per_update
    assert strict.calls_per_update > 1.5 * ahead.calls_per_update
    assert strict.ages == 0 and turns.ages < ahead.ages


def test_a_call_less_is_a_tail_less() -> None:
    before, after = played("few", "all", max_age=0), played("few", "all")
    assert after.steps_per_update < 0.7 * before.steps_per_update
    assert after.tokens / after.informative < 1.1 * before.tokens / before.informative


def test_the_age_bound_follows_the_curriculum_unless_it_is_set() -> None:
    def bound(**settings: Any) -> int:
        return CurriculumSettings.model_validate(settings).age_bound

    names = ("uniform", "dapo", "cures", "scalingrl", "stages")
    assert [bound(name=name) for name in names] == [0] * 5
    assert bound(name="speed") == bound(name="all") == bound(name="speed", source="cures") == 2
    assert bound(name="speed", max_age=0) == 0 and bound(name="uniform", max_age=1) == 1
