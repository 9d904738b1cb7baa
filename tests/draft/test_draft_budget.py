"""Draft budgets by expected remaining length: the numbers of the model by hand, and none for rows that end anyway."""

import math

import numpy as np
import pytest

from whet.draft.speculation import best_forwards, budgets, draft_tokens, makespan, remaining


def test_draft_tokens_by_hand() -> None:
    got = draft_tokens(np.array([100.0, 200.0, 400.0]), 200, alpha=2.0)
    assert got[:2].tolist() == [0.0, 0.0]
    assert got[2] == pytest.approx(-200 * math.log(1 - 0.5 / 0.8))  # 196.2
    accepted = 0.8 * 400 * (1 - math.exp(-2.0 * got[2] / 400))
    assert accepted == pytest.approx(400 - 200)  # the rest is written one a forward
    assert draft_tokens(np.array([400.0]), 79)[0] == math.inf  # drafts hit 80% at most


def test_best_forwards_is_the_closed_form_of_one_row() -> None:
    """base + token = token / (k m) with m = 1 - (1 - N / l) / k, where one row outlasts the rest."""
    for token in (0.01, 0.1, 0.3):
        m = token / (0.8 * (1 + token))
        n = 400 * (1 - 0.8 * (1 - m))
        assert best_forwards(np.array([10.0, 50.0, 400.0]), token) == pytest.approx(n, rel=1e-4)


def test_no_other_number_of_forwards_is_faster() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        length, token = rng.lognormal(5, 1, 16), float(rng.uniform(0.001, 0.2))
        best = best_forwards(length, token)
        found = makespan(length, best, token)
        grid = np.linspace(0.2001, 1, 300) * length.max()
        assert found <= min(makespan(length, n, token) for n in grid) * (1 + 1e-6)


def test_short_rows_get_nothing_and_longer_ones_never_less() -> None:
    length = np.sort(np.random.default_rng(1).lognormal(6, 1, 64))
    got = budgets(length, 8, token=0.05)
    assert got.dtype == np.int32 and got[0] == 0 and got[-1] > 0
    assert (np.diff(got) >= 0).all() and got.max() <= 8


def test_where_tokens_are_dear_nothing_is_drafted() -> None:
    assert budgets(np.array([10, 50, 400]), 8, token=50.0).tolist() == [0, 0, 0]
    assert budgets(np.array([10, 50, 400]), 0).tolist() == [0, 0, 0]
    assert budgets(np.zeros(0), 8).tolist() == []
    assert budgets(np.array([0]), 8).size == 1


def test_remaining_is_the_mean_residual_life() -> None:
    seen = np.array([300, 100, 200])
    written = np.array([0, 100, 250, 300, 900])
    assert remaining(written, np.full(5, 1000), seen).tolist() == [200, 150, 50, 350, 50]
    assert remaining(np.array([10]), np.array([60]), np.array([900])).tolist() == [50]  # the limit leaves no more
    assert remaining(np.array([10]), np.array([60]), np.zeros(0)).tolist() == [25]
