"""From a batch to samples: which rollouts count, with which advantage and weight."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from whet.learn.losses import ESTIMATORS
from whet.learn.samples import Sums, make_samples
from whet.rollout.base import PARTS


def test_samples_by_hand(batch_of, encoder):
    """Two groups; the unjudged rollout is in neither baseline nor weight."""
    batch = batch_of([[1.0, None, 0.0], [0.5, 0.5]])
    samples, signal = make_samples(batch, encoder, ESTIMATORS["dr_grpo"], "sequence")
    kept = [batch.groups[0].rollouts[0], batch.groups[0].rollouts[2], *batch.groups[1].rollouts]
    assert signal == 1
    assert [s.advantage for s in samples] == [0.5, -0.5, 0.0, 0.0]
    assert [s.weight for s in samples] == pytest.approx([1 / 2 / 2 / r.length for r in kept])
    assert [list(s.prompt) for s in samples] == [encoder("p0")] * 2 + [encoder("p1")] * 2
    assert all(np.array_equal(s.response, r.trace.ids) for s, r in zip(samples, kept, strict=True))


def test_a_judged_rollout_without_tokens_is_left_out(batch_of, encoder):
    """An empty response has no token to train, and a sequence weight of 1 / 0 tokens."""
    batch = batch_of([[1.0, 0.0, 0.0]])
    first, *rest = batch.groups[0].rollouts
    empty = replace(
        first,
        length=0,
        trace=replace(first.trace, **{n: getattr(first.trace, n)[:0] for n in PARTS}),
    )
    batch = replace(batch, groups=(replace(batch.groups[0], rollouts=(empty, *rest)),))
    samples, signal = make_samples(batch, encoder, ESTIMATORS["dr_grpo"], "sequence")
    assert [s.key for s in samples] == [r.key for r in rest] and signal == 0


def test_constant_divides_by_the_limit(batch_of, encoder):
    samples, _ = make_samples(batch_of([[1.0, 0.0]]), encoder, ESTIMATORS["dr_grpo"], "constant")
    assert [s.weight for s in samples] == [1 / 2 / 16] * 2


def test_the_overlong_penalty_is_part_of_the_reward(batch_of, encoder):
    batch = batch_of([[1.0, 1.0]])
    lengths = [r.length for r in batch.groups[0].rollouts]
    samples, _ = make_samples(batch, encoder, ESTIMATORS["reinforce"], "constant", overlong=16)
    assert [s.advantage for s in samples] == pytest.approx([1 - n / 16 for n in lengths])


def test_a_prompt_is_encoded_once_per_group(batch_of, encoder):
    asked = []
    make_samples(
        batch_of([[1.0, 0.0, 0.0], [None]]),
        lambda p: asked.append(p) or encoder(p),
        ESTIMATORS["rloo"],
        "constant",
    )
    assert asked == ["p0"]


def test_metrics_are_means_over_the_tokens_of_all_packs():
    """Two packs of two tokens and one token: (1 + 2 + 6) / 3 = 3; losses add up; the largest mismatch stays."""
    sums = Sums()
    for loss, values, mismatch in ((0.5, [1.0, 2.0], [0.1, 0.3]), (0.25, [6.0], [0.2])):
        parts = {"importance": torch.tensor(values), "mismatch": torch.tensor(mismatch)}
        sums.add(torch.tensor(loss), parts)
    found = sums.metrics()
    assert found["learn/importance_mean"] == pytest.approx(3.0) and found[
        "learn/mismatch"
    ] == pytest.approx(0.2)
    assert found["learn/loss"] == 0.75 and found["learn/mismatch_max"] == pytest.approx(0.3)
