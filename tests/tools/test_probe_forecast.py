import itertools
import math
from math import comb

import numpy as np
import pytest
from probed import probed

from whet.tools.forecast import (
    Beta,
    SignalCurve,
    Spending,
    cheapest,
    cures_spending,
    enough,
    fit_beta,
    length_rows,
    limit_row,
    limit_rows,
    mixed,
    play_cures,
    resamples,
    spendings,
)

ONCE = np.ones((1, 5))


@pytest.mark.parametrize(
    ("n", "right", "size"), [(4, 1, 2), (5, 2, 3), (6, 0, 4), (6, 6, 2), (5, 4, 5), (8, 3, 1)]
)
def test_mixed_is_the_share_of_mixed_subsets(n: int, right: int, size: int) -> None:
    subsets = list(itertools.combinations([True] * right + [False] * (n - right), size))
    share = sum(any(s) and not all(s) for s in subsets) / len(subsets)
    assert mixed(np.array([right]), np.array([n]), size)[0] == pytest.approx(share)


@pytest.mark.parametrize(
    ("p", "size", "accepted"),
    [(0.1, 4, 0.3438), (0.25, 4, 0.6796875), (0.5, 2, 0.5), (0.1, 8, 0.569533)],
)
def test_mixed_is_unbiased(p: float, size: int, accepted: float) -> None:
    """Its mean over binomial counts is 1 - p^m - (1-p)^m; the numbers are SPEED's chances to accept."""
    n = 8
    counts = np.arange(n + 1)
    chances = np.array([comb(n, c) * p**c * (1 - p) ** (n - c) for c in counts])
    assert chances @ mixed(counts, np.full(n + 1, n), size) == pytest.approx(accepted, abs=1e-6)


def test_mixed_says_nothing_of_more_than_was_judged() -> None:
    assert np.isnan(mixed(np.array([1, 1]), np.array([3, 4]), 4)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("often", "a", "b"), [((1, 1, 1, 1, 1), 1.0, 1.0), ((1, 2, 3, 4, 5), 2.0, 1.0)]
)
def test_fit_finds_what_the_counts_follow_exactly(
    often: tuple[int, ...], a: float, b: float
) -> None:
    """With 4 rollouts Beta(1, 1) gives every count alike, Beta(2, 1) in proportion to 1 + c."""
    fit = fit_beta(np.arange(5), np.full(5, 4), np.array([often], dtype=float))
    assert (fit.a[0], fit.b[0]) == (pytest.approx(a, abs=1e-4), pytest.approx(b, abs=1e-4))


def test_fit_is_the_maximum_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    judged = rng.integers(5, 9, size=150)
    right = rng.binomial(judged, rng.beta(0.4, 1.1, size=150))
    a, b = (float(x[0]) for x in fit_beta(right, judged))

    def log_likelihood(a: float, b: float) -> float:
        terms = [
            sum(np.log(a + j) for j in range(c))
            + sum(np.log(b + j) for j in range(n - c))
            - sum(np.log(a + b + j) for j in range(n))
            for c, n in zip(right.tolist(), judged.tolist(), strict=True)
        ]
        return float(sum(terms))

    best = log_likelihood(a, b)
    for da, db in itertools.product((0.98, 1.0, 1.02), repeat=2):
        assert log_likelihood(a * da, b * db) <= best + 1e-9


def test_fit_of_many_resamples_is_each_by_itself() -> None:
    right, judged = np.array([0, 1, 4, 2, 0]), np.full(5, 4)
    weights = np.array([[1, 1, 1, 1, 1], [2, 0, 1, 2, 0], [5, 0, 0, 0, 0]], dtype=float)
    together = fit_beta(right, judged, weights)
    for i in range(2):
        assert together.a[i] == pytest.approx(
            fit_beta(right, judged, weights[i : i + 1]).a[0], rel=1e-4
        )
    assert np.isnan(together.a[2])  # not one right


def test_prompts_that_do_not_differ_are_a_binomial() -> None:
    fit = fit_beta(np.full(50, 4), np.full(50, 8))
    assert float(fit.mixed(16)[0]) == pytest.approx(1 - 2 * 0.5**16, abs=1e-3)


def test_beta_by_hand() -> None:
    """E[p^3] of Beta(2, 1) is 2/5, E[(1-p)^3] is 1/10."""
    assert float(Beta(np.array(2.0), np.array(1.0)).mixed(3)) == pytest.approx(0.5)


def test_signal_is_counted_up_to_n_and_fitted_beyond() -> None:
    right, judged = np.arange(5), np.full(5, 4)
    share, how = SignalCurve(right, judged, ONCE).at(4)
    assert how == "counted" and share[0] == pytest.approx(3 / 5)
    share, how = SignalCurve(right, judged, ONCE).at(8)
    assert how == "fitted" and share[0] == pytest.approx(1 - 2 / 9, abs=1e-4)


@pytest.mark.parametrize("right", [[0, 0, 0, 0, 0], [4, 4, 4, 4, 4], [0, 0, 4, 4, 4]])
def test_without_one_mixed_prompt_nothing_is_made_up(right: list[int]) -> None:
    share, how = SignalCurve(np.array(right), np.full(5, 4), ONCE).at(16)
    assert how == "at least" and share[0] == 0.0


def test_a_fit_that_misses_what_was_counted_is_not_used() -> None:
    """Half the prompts hopeless, half at one half: no beta has that shape."""
    right = np.array([0] * 500 + [8] * 500)
    share, how = SignalCurve(right, np.full(1000, 16), np.ones((1, 1000))).at(32)
    assert how == "at least" and share[0] == 0.5


def test_larger_groups_never_carry_less() -> None:
    rng = np.random.default_rng(2)
    right = rng.binomial(8, rng.beta(0.3, 1.0, size=100))
    curve = SignalCurve(right, np.full(100, 8), np.ones((1, 100)))
    shares = [curve.at(m)[0][0] for m in range(2, 33)]
    assert shares == sorted(shares)


def test_fit_foretells_larger_groups() -> None:
    rng = np.random.default_rng(4)
    for a, b in ((0.3, 1.0), (0.1, 0.6), (1.0, 1.0)):
        right = rng.binomial(8, rng.beta(a, b, size=2000))
        foretold, how = SignalCurve(right, np.full(2000, 8), np.ones((1, 2000))).at(16)
        truth = float(Beta(np.array(a), np.array(b)).mixed(16))
        assert how == "fitted" and foretold[0] == pytest.approx(truth, abs=0.03)


def test_a_few_unjudged_rollouts_do_not_lower_what_is_counted() -> None:
    for judged, n in (
        ([8, 8, 8, 7, 2], 8),
        ([8, 7, 7, 7, 7], 7),
        ([8, 8, 7, 8], 8),
        ([8, 6, 7, 7], 7),
    ):
        assert SignalCurve(np.zeros(len(judged)), np.array(judged), ONCE).n == n


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
    assert (
        rows[0].cut == 1.0
        and rows[0].right_lost == 1.0
        and rows[0].tokens == pytest.approx(64 * 8 / (4 * 612))
    )
    assert rows[1].cut == 0.5 and rows[1].right_lost == 0.0
    assert rows[-1].cut == 0.5 and rows[-1].tokens == 1.0


def test_a_response_that_ends_at_the_limit_is_not_cut() -> None:
    _, rollouts = probed([2, 2], 4, right_length=100, wrong_length=200)
    assert limit_row(rollouts, 200).cut == 0.0 and limit_row(rollouts, 199).cut == 0.5
    assert limit_row(rollouts, 100).right_lost == 0.0 and limit_row(rollouts, 99).right_lost == 1.0
    assert limit_row(probed([0], 4)[1], 99).right_lost is None


def test_enough_loses_few_right_responses_and_cuts_few_of_all() -> None:
    # the first 64th of 640 from 101 on
    assert enough(probed([8] * 10, 8, limit=640, right_length=101)[1], 640) == 110
    assert enough(probed([4] * 10, 8, limit=640, right_length=101, wrong_length=301)[1], 640) == 310
    assert enough(probed([4] * 10, 8, limit=640, right_length=101, wrong_length=640)[1], 640) == 640
    assert enough(probed([1] * 10, 8)[1], 512) is None  # ten right ones are too few


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
    # the accepted prompts answer in 50
    assert two.tokens.value == pytest.approx(3 * 2 * 75 + 2 * 50)
    assert three.rollouts.value == pytest.approx(2 * 3 + 1) and three.tokens.value == pytest.approx(
        500
    )
    assert three.saving.value == pytest.approx(600 / 500)
    assert cheapest(list(found.values())) == three


@pytest.mark.parametrize(
    ("p", "speed", "dapo"), [(0.5, 24.57, 24.0), (0.1, 31.63, 26.08), (0.02, 71.5, 62.5)]
)
def test_per_prompt_that_has_a_chance_speed_costs_more(p: float, speed: float, dapo: float) -> None:
    """SPEED's own setting, 4 + 20 rollouts, all prompts at p: it wins only by dropping hopeless prompts."""
    counts = np.arange(25)
    chances = np.array([[comb(24, int(c)) * p**c * (1 - p) ** (24 - c) for c in counts]] * 2)
    found = by_name(spendings(SignalCurve(counts, np.full(25, 24), chances), np.full(25, 1.0), 24))
    assert found["speed", 4].rollouts.value == pytest.approx(speed, abs=0.05)
    assert found["dapo", 0].rollouts.value == pytest.approx(dapo, abs=0.05)


def test_hopeless_prompts_are_what_speed_saves_on() -> None:
    few = by_name(
        spendings(
            SignalCurve(np.array([0] * 9 + [4]), np.full(10, 8), resamples(10)), np.full(10, 1.0), 8
        )
    )
    many = by_name(
        spendings(
            SignalCurve(np.array([4] * 10), np.full(10, 8), resamples(10)), np.full(10, 1.0), 8
        )
    )
    assert few["speed", 4].saving.value > 1.7 and many["speed", 4].saving.value < 1.0


def test_nothing_useful_costs_without_end() -> None:
    found = spendings(
        SignalCurve(np.zeros(6, int), np.full(6, 4), resamples(6)), np.full(6, 10.0), 8
    )
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
    found = by_name(
        spendings(
            SignalCurve(np.array([2] + [0] * 7), np.full(8, 4), resamples(8)), np.full(8, 1.0), 4
        )
    )
    assert math.isfinite(found["dapo", 0].tokens.value) and math.isinf(found["dapo", 0].tokens.high)


def test_cures_pays_the_full_price_where_all_prompts_are_alike() -> None:
    """Prompts of rate 1/2 are mixed but for 2 of 2^16 groups: 16 rollouts of 10 tokens are one useful group."""
    rates, lengths = np.full(50, 0.5), np.full(50, 10.0)
    play = play_cures(rates, lengths, groups=10, rollouts=16, updates=1, tau=0.05, seed=0)
    assert (play.groups, play.rollouts, play.tokens) == (10, 160, 1600) and play.useful >= 9
    assert (
        play_cures(
            np.zeros(50), lengths, groups=10, rollouts=16, updates=8, tau=0.05, seed=0
        ).useful
        == 0
    )


def test_cures_comes_back_to_what_it_found() -> None:
    """One prompt in ten is informative: at first it costs 1600 tokens; drawn by what was seen, far less."""
    rates, lengths = np.repeat([0.5, 0.0], [10, 90]), np.full(100, 10.0)

    def cost(updates: int) -> float:
        plays = [play_cures(rates, lengths, 20, 16, updates, 0.05, seed) for seed in range(50)]
        return sum(play.tokens for play in plays) / sum(play.useful for play in plays)

    assert cost(1) > 1400 and cost(40) < 700


def test_cures_has_a_price_in_the_probe() -> None:
    """Where a tenth of the prompts teaches, two passes of cures cost less than uniform; where all do, about as much."""
    few, all_alike = (np.repeat([8, 0], [count, 100 - count]) for count in (10, 100))
    judged, lengths = np.full(100, 16), np.full(100, 10.0)
    found = {}
    for name, right in (("few", few), ("alike", all_alike)):
        uniform = spendings(SignalCurve(right, judged, resamples(100)), lengths, 16)[0]
        found[name] = cures_spending(right, judged, lengths, uniform, 16)
    assert found["few"].saving.low > 1.1 and found["few"].trained == found["few"].rollouts
    assert found["alike"].saving.value == pytest.approx(1.0, abs=0.05)
