"""Supervised fine-tuning: the loss falls, is the plain cross-entropy, and repeats exactly."""

import itertools

import pytest
import torch

from whet.errors import Diverged, WhetError
from whet.learn.learner import warm_start

PAIRS = [([2, 3], [4, 5, 6, 1]), ([7], [8, 1]), ([9, 10, 11], [12, 13, 1])]


def run(model, steps=30, **changes):
    losses = []
    options = {
        "steps": steps,
        "lr": 1e-2,
        "on_step": lambda step, loss: losses.append((step, loss)),
        **changes,
    }
    last = warm_start(model, itertools.repeat(PAIRS), **options)
    return losses, last


def test_the_loss_falls(model_of):
    losses, last = run(model_of(torch.float32))
    assert [step for step, _ in losses] == list(range(30))
    assert last == losses[-1][1] < 0.2 * losses[0][1]


def test_the_first_loss_is_the_mean_over_response_tokens(model):
    total = 0.0
    with torch.no_grad():
        for prompt, response in PAIRS:
            lp = (
                model(input_ids=torch.tensor([prompt + response]), use_cache=False)
                .logits[0]
                .log_softmax(-1)
            )
            total -= sum(float(lp[len(prompt) - 1 + i, token]) for i, token in enumerate(response))
    losses, _ = run(model, steps=1)
    assert losses[0][1] == pytest.approx(total / 9, rel=1e-12)


def test_packs_do_not_matter_and_runs_repeat(model_of):
    models = [model_of() for _ in range(3)]
    whole, again, cut = (
        run(m, steps=5, pack_tokens=p) for m, p in zip(models, (4096, 4096, 1), strict=True)
    )
    assert whole == again
    assert cut[1] == pytest.approx(whole[1], rel=1e-9)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_bf16_weights_learn_through_masters(model_of):
    losses, last = run(model_of(torch.bfloat16))
    assert last < 0.5 * losses[0][1]


def test_too_few_batches_and_nonsense_are_errors(model_of):
    with pytest.raises(WhetError, match="wants 4 batches of worked solutions and got 2"):
        warm_start(model_of(), [PAIRS, PAIRS], steps=4, lr=1e-3)
    model = model_of()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(WhetError):
        warm_start(model, [PAIRS], steps=1, lr=1e-3)
    model = model_of()
    model.model.embed_tokens.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(Diverged, match=r"warm_start.lr = 0.001"):
        warm_start(model, [PAIRS], steps=1, lr=1e-3)
