import math
from math import comb

import numpy as np
import pytest

from whet.tools.forecast import SignalCurve, Spending, cheapest, resamples, spendings

RIGHT, JUDGED, LENGTHS = np.array([0, 0, 2, 2]), np.full(4, 4), np.array([100.0, 100.0, 50.0, 50.0])


def by_name(found: list[Spending]) -> dict[tuple[str, int], Spending]:
    return {(s.curriculum, s.screen): s for s in found}


def test_prices_by_hand() -> None:
    """Two of four prompts are mixed over 4 rollouts; over 2 of their 4, with chance 1 - 2/6."""
    found = by_name(spendings(SignalCurve(RIGHT, JUDGED, resamples(4)), LENGTHS, 4))
    assert list(found) == [("uniform", 0), ("dapo", 0), ("speed", 2), ("speed", 3)]
    uniform, dapo, two, three = found.values()
    assert (uniform.prompts.value, uniform.rollouts.value, uniform.trained.value) == (2.0, 8.0, 8.0)
    assert uniform.tokens.value == 8 * 75 == dapo.tokens.value
    assert dapo.trained.value == 4 and dapo.saving.value == 1.0
    assert two.prompts.value == pytest.approx(3) and two.rollouts.value == pytest.approx(3 * 2 + 2)
    assert two.tokens.value == pytest.approx(3 * 2 * 75 + 2 * 50)  # the accepted prompts answer in 50
    assert three.rollouts.value == pytest.approx(2 * 3 + 1) and three.tokens.value == pytest.approx(500)
    assert three.saving.value == pytest.approx(600 / 500)
    assert cheapest(list(found.values())) == three


@pytest.mark.parametrize(("p", "speed", "dapo"), [(0.5, 24.57, 24.0), (0.1, 31.63, 26.08), (0.02, 71.5, 62.5)])
def test_per_prompt_that_has_a_chance_speed_is_dearer(p: float, speed: float, dapo: float) -> None:
    """SPEED's own setting, 4 + 20 rollouts, all prompts at p: it wins only by dropping hopeless prompts."""
    counts = np.arange(25)
    chances = np.array([[comb(24, int(c)) * p**c * (1 - p) ** (24 - c) for c in counts]] * 2)
    found = by_name(spendings(SignalCurve(counts, np.full(25, 24), chances), np.full(25, 1.0), 24))
    assert found["speed", 4].rollouts.value == pytest.approx(speed, abs=0.05)
    assert found["dapo", 0].rollouts.value == pytest.approx(dapo, abs=0.05)


def test_hopeless_prompts_are_what_speed_saves_on() -> None:
    few = by_name(spendings(SignalCurve(np.array([0] * 9 + [4]), np.full(10, 8), resamples(10)), np.full(10, 1.0), 8))
    many = by_name(spendings(SignalCurve(np.array([4] * 10), np.full(10, 8), resamples(10)), np.full(10, 1.0), 8))
    assert few["speed", 4].saving.value > 1.7 and many["speed", 4].saving.value < 1.0


def test_nothing_useful_costs_without_end() -> None:
    found = spendings(SignalCurve(np.zeros(6, int), np.full(6, 4), resamples(6)), np.full(6, 10.0), 8)
    assert all(math.isinf(s.tokens.value) for s in found) and cheapest(found) is None


def test_ranges_hold_the_value_repeat_and_narrow() -> None:
    rng = np.random.default_rng(1)

    def saving(prompts: int) -> tuple[float, float, float]:
        right = rng.binomial(8, rng.beta(0.2, 1.0, size=prompts))
        curve = SignalCurve(right, np.full(prompts, 8), resamples(prompts))
        arguments = (curve, np.full(prompts, 100.0), 16)
        found = by_name(spendings(*arguments))["speed", 4].saving
        assert found == by_name(spendings(*arguments))["speed", 4].saving
        assert found.low <= found.value <= found.high
        return found.value, found.low, found.high

    few, many = saving(60), saving(2000)
    assert many[2] - many[1] < 0.4 * (few[2] - few[1])


def test_a_range_may_reach_to_never() -> None:
    """One useful prompt of eight: a third of the resamples miss it."""
    found = by_name(spendings(SignalCurve(np.array([2] + [0] * 7), np.full(8, 4), resamples(8)), np.full(8, 1.0), 4))
    assert math.isfinite(found["dapo", 0].tokens.value) and math.isinf(found["dapo", 0].tokens.high)
