"""Every loss, its gradient and every aggregate against numbers worked out by hand."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from whet.config import Learn
from whet.learn.losses import ESTIMATORS, cispo, clipped, gspo, importance, k3, plain, token_weights

LOG = math.log
ONE = torch.zeros(3, dtype=torch.long)


def grad_of(surrogate, ratios, advantage, owner=None, low=0.2, high=0.3):
    lp_old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    lp = (lp_old + torch.tensor([LOG(r) for r in ratios], dtype=torch.float64)).requires_grad_()
    a = torch.tensor(advantage, dtype=torch.float64)
    loss, held = surrogate(lp, lp_old, a, ONE if owner is None else owner, low, high)
    loss.sum().backward()
    return loss.tolist(), lp.grad.tolist(), held.tolist()


def test_plain_is_minus_advantage_times_log_prob():
    loss, grad, held = grad_of(plain, [1.0, 1.0, 1.0], [2.0, -1.0, 0.0])
    assert loss == pytest.approx([2.0, -2.0, 0.0])
    assert grad == [-2.0, 1.0, 0.0]
    assert held == [False] * 3


def test_clipped_holds_back_only_what_goes_too_far():
    """A = 2: ratio 1.5 is cut at 1.3 (no gradient); 0.5 is below the bound but the minimum stays free."""
    loss, grad, held = grad_of(clipped, [1.5, 0.5, 1.1], [2.0, 2.0, 2.0])
    assert loss == pytest.approx([-2.6, -1.0, -2.2])
    assert grad == pytest.approx([0.0, -1.0, -2.2])
    assert held == [True, False, False]


def test_clipped_with_a_negative_advantage():
    """A = -1: ratio 0.5 is cut at 0.8; 1.5 stays free."""
    loss, grad, held = grad_of(clipped, [1.5, 0.5, 1.1], [-1.0, -1.0, -1.0])
    assert loss == pytest.approx([1.5, 0.8, 1.1])
    assert grad == pytest.approx([1.5, 0.0, 1.1])
    assert held == [False, True, False]


def test_clipped_at_ratio_one_has_the_plain_gradient():
    assert grad_of(clipped, [1.0] * 3, [2.0, -1.0, 0.5])[1] == pytest.approx(
        grad_of(plain, [1.0] * 3, [2.0, -1.0, 0.5])[1]
    )


def test_gspo_has_one_ratio_per_rollout():
    """Rollout 0: ratios 1.2 and 0.9, s = sqrt(1.08); rollout 1: 1.1. The gradient is -s A for each token."""
    s = 1.08**0.5
    loss, grad, held = grad_of(gspo, [1.2, 0.9, 1.1], [2.0, 2.0, -1.0], torch.tensor([0, 0, 1]))
    assert loss == pytest.approx([-2 * s, -2 * s, 1.1])
    assert grad == pytest.approx([-2 * s, -2 * s, 1.1])
    assert held == [False] * 3


def test_gspo_gradient_is_that_of_the_sequence_objective():
    """d/dlp of -s A with s = exp(mean(lp - lp_old)), the paper's objective, against the token form averaged."""
    lp_old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    lp = (lp_old + torch.tensor([0.1, -0.05, 0.02], dtype=torch.float64)).requires_grad_()
    (-1.7 * torch.exp((lp - lp_old).mean())).backward()
    published = lp.grad.clone()
    lp.grad = None
    loss, _ = gspo(lp, lp_old, torch.full((3,), 1.7, dtype=torch.float64), ONE, 0.2, 0.2)
    loss.mean().backward()
    torch.testing.assert_close(lp.grad, published)


def test_gspo_clips_whole_rollouts():
    loss, grad, held = grad_of(gspo, [2.0, 1.5, 1.1], [1.0, 1.0, 1.0], torch.tensor([0, 0, 1]))
    assert loss == pytest.approx([-1.3, -1.3, -1.1])
    assert grad == pytest.approx([0.0, 0.0, -1.1])
    assert held == [True, True, False]


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    """-clip(r) A lp: the gradient is -clip(r) A, never zero."""
    loss, grad, held = grad_of(cispo, [1.5, 0.5, 1.1], [2.0, 2.0, -1.0])
    lp = [-1.0 + LOG(1.5), -2.0 + LOG(0.5), -0.5 + LOG(1.1)]
    assert grad == pytest.approx([-2.6, -1.6, 1.1])
    assert loss == pytest.approx([g * x for g, x in zip(grad, lp, strict=True)])
    assert held == [True, True, False]


def test_importance_is_capped_and_carries_no_gradient():
    old = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.0, -1.0 - LOG(1.5), -1.0 - LOG(50.0)], dtype=torch.float64)
    w = importance(old, behaviour)
    assert w.tolist() == pytest.approx([1.0, 1.5, 2.0])
    assert not w.requires_grad


def test_k3():
    """d = log 2: 2 - log 2 - 1; its gradient in lp is 1 - exp(d) = -1; zero and flat where both agree."""
    lp = torch.tensor([-2.0, -1.0], dtype=torch.float64, requires_grad=True)
    value = k3(lp, torch.tensor([-2.0 + LOG(2.0), -1.0], dtype=torch.float64))
    assert value.tolist() == pytest.approx([1.0 - LOG(2.0), 0.0])
    value.sum().backward()
    assert lp.grad.tolist() == pytest.approx([-1.0, 0.0])


LENGTHS = [np.array([1, 3]), np.array([2, 2, 2, 2]), np.array([4])]
LIMITS = [np.array([10, 10]), np.array([20] * 4), np.array([10])]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("sequence", [[1 / 6, 1 / 18], [1 / 24] * 4, [1 / 12]]),
        ("group_tokens", [[1 / 12, 1 / 12], [1 / 24] * 4, [1 / 12]]),
        ("constant", [[1 / 60, 1 / 60], [1 / 240] * 4, [1 / 30]]),
        ("batch_tokens", [[1 / 16, 1 / 16], [1 / 16] * 4, [1 / 16]]),
    ],
)
def test_token_weights_by_hand(aggregate, expected):
    weights = token_weights(aggregate, LENGTHS, LIMITS, [None] * 3)
    for got, want in zip(weights, expected, strict=True):
        np.testing.assert_allclose(got, want)


def test_under_batch_tokens_only_the_ratios_of_group_weights_matter():
    """4, 8 and 4 tokens, the first group's counted twice: 2 / 20 of the loss each, the others' 1 / 20."""
    weights = token_weights("batch_tokens", LENGTHS, LIMITS, [0.2, 0.1, 0.1])
    for got, want in zip(weights, [[2 / 20] * 2, [1 / 20] * 4, [1 / 20]], strict=True):
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("aggregate", ["sequence", "group_tokens", "constant"])
def test_group_weights_scale_their_group(aggregate):
    even = token_weights(aggregate, LENGTHS, LIMITS, [None] * 3)
    given = token_weights(aggregate, LENGTHS, LIMITS, [0.5, None, 0.0])
    np.testing.assert_allclose(given[0], 1.5 * even[0])
    np.testing.assert_allclose(given[1], even[1])
    assert not given[2].any()


def test_groups_of_two_and_eight_contribute_equally():
    """A loss of 1 a token: a group's share is the sum of weight * length, under `sequence` 1/2 each."""
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 30, 2), rng.integers(1, 30, 8)]
    limits = [np.full(2, 32), np.full(8, 32)]
    shares = [
        float(w @ n)
        for w, n in zip(
            token_weights("sequence", lengths, limits, [None, None]), lengths, strict=True
        )
    ]
    assert shares == pytest.approx([0.5, 0.5])
    by_size = token_weights("batch_tokens", lengths, limits, [None, None])
    assert by_size[1].sum() == pytest.approx(4 * by_size[0].sum())


def test_a_group_without_judged_rollouts_still_counts():
    weights = token_weights(
        "sequence",
        [np.zeros(0, int), np.array([2])],
        [np.zeros(0, int), np.array([8])],
        [None, None],
    )
    assert weights[0].size == 0
    assert weights[1].tolist() == [0.25]


def test_every_estimator_of_the_config_is_in_the_table():
    assert set(ESTIMATORS) == set(get_args(Learn.model_fields["estimator"].annotation))
    aggregates = set(get_args(Learn.model_fields["aggregate"].annotation)) - {"published"}
    assert {e.aggregate for e in ESTIMATORS.values()} <= aggregates
