"""Hand-computed numbers of the formulas in docs/details/scalingrl.md."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from whet import config
from whet.curriculum import scalingrl as des

SELECTS = get_args(config.ScalingRL.model_fields["select"].annotation)

FIVE = np.array([1.0, 2.0, 3.0, 4.0, 5.0])  # mean 3, variance 2
ALL = np.ones(5, bool)
NONE = np.zeros(5, bool)


def test_the_bell_by_hand() -> None:
    """exp(-(x - 3)^2 / (2 x 2^2)): one deviation off e^-1/2, two e^-2; even, in the width of the values."""
    values = np.array([-1.0, 1.0, 3.0, 5.0, 7.0])
    expected = [math.exp(-2), math.exp(-0.5), 1.0, math.exp(-0.5), math.exp(-2)]
    assert des.bell(values, 3.0, 2.0) == pytest.approx(expected)
    assert des.bell(values.astype(np.float32), 3.0, 2.0).dtype == np.float32
    # sd 0.001
    assert des.bell(np.array([0.001, 0.002]), 0.0, 0.0) == pytest.approx(
        [math.exp(-0.5), math.exp(-2)]
    )


def test_difficulty_at_the_start_is_a_bell_around_the_average() -> None:
    """exp(-(d - 3)^2 / 4): 1/e, e^-1/4, 1."""
    expected = [0.36787944, 0.77880078, 1.0, 0.77880078, 0.36787944]
    assert des.nearness(FIVE, ALL, NONE, 0.0) == pytest.approx(expected)
    assert des.nearness(FIVE, ALL, ALL, 0.0) == pytest.approx(expected)


def test_the_target_moves_above_the_average() -> None:
    """u = 1: target 3 x 1.3 = 3.9, so exp(-2.9^2 / 4) for level 1 and exp(-0.1^2 / 4) for level 4."""
    scores = des.nearness(FIVE, ALL, NONE, 1.0)
    assert scores[[0, 3]] == pytest.approx([math.exp(-2.1025), math.exp(-0.0025)])
    assert scores.argmax() == 3
    # target 3.45
    assert des.nearness(FIVE, ALL, NONE, 0.5)[2] == pytest.approx(math.exp(-0.2025 / 4))


def test_the_target_is_about_the_prompts_with_signal() -> None:
    """Levels 1 and 2 have it: 1.5, at the end 1.95; the bell is as wide as all levels are."""
    signal = np.array([1, 1, 0, 0, 0], bool)
    assert [des.target_value(FIVE, ALL, signal, u) for u in (0.0, 1.0)] == pytest.approx(
        [1.5, 1.95]
    )
    assert des.nearness(FIVE, ALL, signal, 0.0)[[0, 4]] == pytest.approx(
        [math.exp(-0.0625), math.exp(-3.0625)]
    )
    # those with signal have no level: all count
    assert des.target_value(FIVE, ~signal, signal, 0.0) == 4.0


def test_the_target_stays_within_a_deviation_and_within_the_values() -> None:
    """7, 8, 9: 8 x 1.3 = 10.4 is cut to 8 + sqrt(2/3). Of 1 and nine times 9 (8.2, deviation 2.4) 10.66 is cut to 9,
    of levels below zero, where 1.3 times the average is less, to the lowest. One level is its own target."""
    every = np.ones(3, bool)
    assert des.target_value(np.array([7.0, 8.0, 9.0]), every, every, 1.0) == pytest.approx(
        8 + math.sqrt(2 / 3)
    )
    many = np.array([1.0, *[9.0] * 9])
    assert des.target_value(many, np.ones(10, bool), np.ones(10, bool), 1.0) == 9.0
    assert des.target_value(-many, np.ones(10, bool), np.ones(10, bool), 1.0) == -9.0
    assert des.target_value(np.array([7.0, 8.0, 9.0]), every, np.array([0, 1, 0], bool), 1.0) == 8.0


def test_an_unknown_value_counts_as_the_average() -> None:
    """Known 100 and 300: mean 200, variance 10,000. Target 260 at u = 1: exp(-60^2 / 20,000)."""
    lengths, known = np.array([100.0, 0.0, 300.0]), np.array([True, False, True])
    assert des.nearness(lengths, known, known, 1.0) == pytest.approx(
        [math.exp(-1.28), math.exp(-0.18), math.exp(-0.08)], rel=1e-6
    )
    assert des.nearness(lengths, known, known, 0.0)[1] == 1.0
    assert des.nearness(np.zeros(3), np.zeros(3, bool), known, 0.7).tolist() == [1.0, 1.0, 1.0]


def test_a_set_without_spread_rules_out_nothing() -> None:
    for u in (0.0, 1.0):
        assert (
            des.nearness(np.full(4, 2.0), np.ones(4, bool), np.ones(4, bool), u).tolist()
            == [1.0] * 4
        )


def test_adaptability() -> None:
    """Rates 1/4, 1/2, 3/4, all wrong, all right: mean 1/2, variance 1/8; flat ones score 0, a new one 1."""
    rates = np.array([0.25, 0.5, 0.75, 0.0, 1.0, 0.0, 0.0])
    known = np.array([1, 1, 1, 1, 1, 0, 0], bool)
    flat = np.array([0, 0, 0, 1, 1, 0, 0], bool)
    new = np.array([0, 0, 0, 0, 0, 1, 0], bool)
    at_start = des.adaptability(rates, known, flat, new, 0.0)
    assert at_start == pytest.approx([math.exp(-0.25), 1.0, math.exp(-0.25), 0.0, 0.0, 1.0, 1.0])
    # target 0.65; handed out but not judged is average
    at_end = des.adaptability(rates, known, flat, new, 1.0)
    expected = [math.exp(-0.64), math.exp(-0.09), math.exp(-0.04), 0.0, 0.0, 1.0, math.exp(-0.09)]
    assert at_end == pytest.approx(expected)


def test_rates_that_hardly_differ_have_a_bell_of_a_quarter() -> None:
    """Rates 0 and 1/8: mean and deviation 1/16, so the target is 0.1: exp(-0.1^2 / (2 / 16)), exp(-0.025^2 x 8)."""
    rates, none = np.array([0.0, 0.125]), np.zeros(2, bool)
    scores = des.adaptability(rates, np.ones(2, bool), none, none, 0.0)
    assert scores == pytest.approx([math.exp(-0.08), math.exp(-0.005)])


def test_score_is_the_weighted_sum() -> None:
    """A prompt of level 2, average length, pass rate 1/4: 0.4 e^-1/4 + 0.3 + 0.3 e^-1/4."""
    components = np.array([[math.exp(-0.25)], [1.0], [math.exp(-0.25)]])
    assert des.score(components, (0.4, 0.3, 0.3)) == pytest.approx([0.84516055])
    assert des.score(components, (0.0, 1.0, 0.0)) == pytest.approx([1.0])


def test_temperature_falls_to_its_floor() -> None:
    assert [des.temperature(u) for u in (0.0, 0.25, 0.9, 0.95, 1.0)] == pytest.approx(
        [0.3, 0.225, 0.03, 0.02, 0.02]
    )


def test_weights_are_a_softmax_and_a_zero_stays_zero() -> None:
    assert des.softmax_weights((4, 3, 3), (0, 0, 0)) == pytest.approx((0.4, 0.3, 0.3))
    assert des.softmax_weights((0.4, 0.3, 0.3), (math.log(2), 0, 0)) == pytest.approx(
        (8 / 14, 3 / 14, 3 / 14)
    )
    assert des.softmax_weights((0.5, 0.5, 0.0), (0, 0, 2.0)) == (0.5, 0.5, 0.0)


def test_adaptive_weights_follow_the_correlation_with_the_gain() -> None:
    """D moves with the gain, C against it, R not at all: +0.1, -0.1, 0; held at 2."""
    gain = np.array([0.0, 0.2, 0.4])
    components = np.array([[0.1, 0.5, 0.9], [0.9, 0.5, 0.1], [0.7, 0.7, 0.7]])
    assert des.shifted([0.0, 0.0, 0.0], components, gain) == pytest.approx([0.1, -0.1, 0.0])
    assert des.shifted([1.95, -1.95, 1.0], components, gain) == pytest.approx([2.0, -2.0, 1.0])
    assert des.shifted([0.3, 0.2, 0.1], components[:, :1], gain[:1]) == [0.3, 0.2, 0.1]


SCORES = np.array([0.9, 0.61, 0.6, 0.59, 0.2], np.float32)


def chosen(
    mode: str,
    scores: np.ndarray = SCORES,
    u: float = 0.0,
    eligible: np.ndarray | None = None,
    **knobs,
) -> list:
    rng = np.random.default_rng(knobs.pop("seed", 0))
    mask = np.ones(len(scores), bool) if eligible is None else eligible
    keys, size = des.rank(scores, mask, mode, u, rng, **{"share": 1.0, "cut": 0.6, **knobs})
    return des.choose(keys, size).tolist()


def test_des_threshold_takes_all_that_reach_it() -> None:
    assert chosen("des_threshold") == [0, 1, 2]
    assert chosen("des_threshold", eligible=np.array([1, 0, 1, 1, 1], bool)) == [0, 2]


def test_rel_threshold_is_relative_to_the_best_and_narrows() -> None:
    """P / P_max >= 0.6 is DES >= 0.9 + T log 0.6: 0.747 at T = 0.3; of the best two, 0.1 apart, T = 0.15 keeps one."""
    assert chosen("rel_threshold") == [0]
    close = np.array([0.9, 0.8, 0.76, 0.74], np.float32)
    assert chosen("rel_threshold", close, u=0.0) == [0, 1, 2]
    assert chosen("rel_threshold", close, u=0.5) == [0]  # 0.823
    # 0.723
    assert chosen("rel_threshold", close, u=0.5, eligible=np.array([0, 1, 1, 1], bool)) == [1, 2, 3]


def test_gumbel_topk_takes_its_share_of_those_above_the_floor() -> None:
    assert len(chosen("gumbel_topk", cut=0.0, share=0.4)) == 2
    assert chosen("gumbel_topk", cut=0.5, share=1.0) == [0, 1, 2, 3]
    assert len(chosen("random", cut=0.0, share=0.4)) == 2


def test_gumbel_topk_draws_by_the_softmax() -> None:
    """One of three with DES 0.9, 0.6, 0.3 at T = 0.3: odds e^2 : e : 1, so 0.665, 0.245, 0.090."""
    scores = np.array([0.9, 0.6, 0.3], np.float32)
    rng = np.random.default_rng(0)
    keys = [
        des.rank(scores, np.ones(3, bool), "gumbel_topk", 0.0, rng, share=0.3, cut=0.0)[0]
        for _ in range(20_000)
    ]
    shares = np.bincount(np.argmax(keys, axis=1), minlength=3) / 20_000
    odds = np.exp([2.0, 1.0, 0.0])
    assert shares == pytest.approx(odds / odds.sum(), abs=0.015)


def test_late_in_the_run_the_choice_is_all_but_greedy() -> None:
    scores = np.array([0.9, 0.6, 0.3, 0.1], np.float32)
    assert {
        tuple(chosen("gumbel_topk", scores, u=1.0, share=0.5, cut=0.0, seed=seed))
        for seed in range(200)
    } == {(0, 1)}


def test_a_set_is_filled_up_below_the_cut_and_then_by_prompts_that_are_not_eligible() -> None:
    scores = np.array([0.1, 0.99, 0.7, 0.3], np.float32)
    eligible = np.array([1, 0, 1, 1], bool)
    for mode in ("gumbel_topk", "des_threshold"):
        keys, size = des.rank(
            scores, eligible, mode, 1.0, np.random.default_rng(0), share=1.0, cut=0.6
        )
        assert size == 1
        assert [des.choose(keys, n).tolist() for n in (1, 2, 3, 4)] == [
            [2],
            [2, 3],
            [0, 2, 3],
            [0, 1, 2, 3],
        ]


def test_a_mix_is_met_from_the_best_of_each_part_and_only_where_it_binds() -> None:
    keys = np.array([9.0, 8.0, 7.0, 6.0, 1.0, 2.0])
    low, top = np.array([0, 0, 0, 0, 1, 1], bool), np.array([1, 1, 0, 0, 0, 0], bool)
    assert des.choose(keys, 3, [(low, 1), (top, 1)]).tolist() == [0, 1, 5]
    assert des.choose(keys, 4, [(low, 2), (top, 2)]).tolist() == [0, 1, 4, 5]
    assert des.choose(keys, 3, [(low, 9)]).tolist() == [0, 4, 5]
    assert des.choose(keys, 3, [(top, 2)]).tolist() == [0, 1, 2]
    assert des.choose(keys, 0).tolist() == [] and des.choose(keys, 99).tolist() == list(range(6))


floats = arrays.arrays(np.float32, 7, elements=st.floats(0, 1, width=32))
masks = arrays.arrays(np.bool_, 7)


@given(
    floats, masks, masks, masks, st.floats(0, 1), st.sampled_from(SELECTS), st.floats(0.01, 0.99)
)
def test_no_input_gives_nan_or_an_empty_choice(rates, known, flat, new, u, mode, cut) -> None:
    rates = rates * known
    parts = [
        des.nearness(rates * 1000, known, flat, u),
        des.nearness(rates, known, new, u),
        des.adaptability(rates, known, flat, new, u),
    ]
    scores = des.score(np.stack(parts), (0.4, 0.3, 0.3))
    assert np.isfinite(scores).all() and (scores >= 0).all() and (scores <= 1.00001).all()
    keys, size = des.rank(scores, known, mode, u, np.random.default_rng(1), share=0.18, cut=cut)
    rows = des.choose(keys, max(size, 2), [(new, 2), (flat, 1)])
    assert len(rows) == len(set(rows.tolist())) == min(max(size, 2), 7)
