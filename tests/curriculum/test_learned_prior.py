"""CurES's prior is learned from the run's own verdicts, within the first batches, where few prompts can be solved."""

from __future__ import annotations

from typing import Any

import numpy as np
from barrier_run import Played, play

CURES = {"name": "cures", "groups": 32, "rollouts": 8}
UNIFORM = {**CURES, "name": "uniform"}
EVEN = {**CURES, "cures": {"prior": "even"}}


def pool(prompts: int) -> np.ndarray:
    """Mean pass rate 0.1: most prompts are hardly ever solved, some often."""
    return np.random.default_rng(0).beta(0.3, 2.7, prompts)


def levels_of(rates: np.ndarray) -> list[float]:
    """Five levels that tell the difficulty roughly, as those of MATH do."""
    seen = rates + np.random.default_rng(1).normal(size=len(rates)) * 0.05
    return np.digitize(seen, [0.02, 0.06, 0.12, 0.25]).astype(float).tolist()


def told(run: Played) -> tuple[float, float]:
    """The recent pass rate, as estimated when the prompts were drawn, and as it came."""
    assert run.metrics is not None
    return run.metrics["curriculum/predicted"], run.metrics["curriculum/observed"]


def mixed(settings: dict[str, Any], rates: np.ndarray, **given: Any) -> float:
    run = play(settings, rates, **given)
    return run.informative / run.trained


def test_with_levels_hard_prompts_are_told_apart_before_any_is_seen_twice() -> None:
    rates = pool(4_000)
    levels = levels_of(rates)
    learned, even = (play(settings, rates, updates=16, levels=levels) for settings in (CURES, EVEN))
    assert abs(np.subtract(*told(learned))) < 0.03 and abs(np.subtract(*told(even))) > 0.3
    assert learned.informative > 1.5 * even.informative
    assert mixed(CURES, rates, updates=8, levels=levels) > 1.5 * mixed(UNIFORM, rates, updates=8)


def test_without_levels_the_pool_says_what_an_unseen_prompt_is_worth() -> None:
    rates = pool(400)
    learned, even = (play(settings, rates, updates=16) for settings in (CURES, EVEN))
    assert abs(np.subtract(*told(learned))) < 0.03 and abs(np.subtract(*told(even))) > 0.2
    assert learned.informative > 1.25 * even.informative
    assert mixed(CURES, rates, updates=16) > 1.35 * mixed(UNIFORM, rates, updates=16)
