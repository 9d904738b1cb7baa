"""The learner on adapters: the weights below never move, the reference is the model without them, resume is exact."""

import copy
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from whet.config import Learn, Lora
from whet.learn.learner import Learner, warm_start
from whet.model.lora import add_lora

MIXED = [[1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 1.0, None, 0.3, 1.0], [0.1, 0.1, 0.1]]
FEW = [[1.0, 0.0, 0.0], [0.0, 0.3]]
IDS = torch.tensor([[5, 3, 8, 2, 9, 11, 4]])


@pytest.fixture
def adapted(model_of):
    def make(dtype=torch.float64, seed=0):
        model = model_of(dtype)
        add_lora(model, Lora(rank=3, alpha=6.0), "base", seed)
        return model

    return make


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def frozen(model):
    return {n: p for n, p in model.named_parameters() if not p.requires_grad}


def adapters(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_only_adapters_are_trained_and_kept(adapted, batch_of, encoder, dtype):
    model = adapted(dtype)
    before, below = copy.deepcopy(adapters(model)), copy.deepcopy(frozen(model))
    learner = Learner(model, Learn(kl_coef=0.1, lr=0.01, warmup=0), encode=encoder)
    for i in range(3):
        assert learner.step(batch_of(MIXED, seed=i)).metrics["learn/grad_norm"] > 0
    assert all(torch.equal(p, below[n]) for n, p in frozen(model).items())
    assert all(not torch.equal(p, before[n]) for n, p in adapters(model).items())
    kinds = learner.tensors()
    assert kinds["reference"].keys() == adapters(model).keys()
    assert {n.partition(".")[2] for n in kinds["optimizer"]} == adapters(model).keys()
    assert kinds.get("masters", {}).keys() == (
        adapters(model).keys() if dtype == torch.bfloat16 else set()
    )


def test_the_reference_is_the_model_with_adapters_off(adapted, batch_of, encoder):
    """It holds the very weights below, so it costs the adapters alone."""
    model = adapted()
    learner = Learner(model, Learn(kl_coef=0.1, lr=0.05, warmup=0), encode=encoder)
    assert learner.step(batch_of(MIXED)).metrics["learn/kl"] == pytest.approx(0.0, abs=1e-12)
    assert learner.step(batch_of(MIXED)).metrics["learn/kl"] > 1e-6
    reference = learner._reference
    assert all(p is reference.get_parameter(n) for n, p in frozen(model).items())
    assert not any(p is reference.get_parameter(n) for n, p in adapters(model).items())
    assert not any(p.requires_grad for p in reference.parameters())
    model.disable_adapters()
    off = logits(model)
    model.enable_adapters()
    assert torch.equal(logits(reference), off)
    assert not torch.allclose(logits(model), off, atol=1e-4)
    assert all(p.requires_grad for p in adapters(model).values()) and adapters(model)


def test_a_reset_reference_is_the_adapters_as_they_are_then(adapted, batch_of, encoder):
    model = adapted()
    learner = Learner(model, Learn(kl_coef=0.1, lr=0.05, warmup=0), encode=encoder)
    for _ in range(2):
        learner.step(batch_of(MIXED))
    then = logits(model)
    assert learner.step(batch_of(MIXED, reset_reference=True)).metrics["learn/kl"] == pytest.approx(
        0.0, abs=1e-12
    )
    assert torch.equal(logits(learner._reference), then)
    assert learner.step(batch_of(MIXED)).metrics["learn/kl"] > 1e-6


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_resumed_training_is_bit_identical(adapted, batch_of, encoder, dtype, reset, tmp_path):
    """The base is loaded anew, adapters and state from files; the reference may have been reset before."""
    config = Learn(estimator="grpo", kl_coef=0.05, lr=1e-2, pack_tokens=64)
    straight = Learner(adapted(dtype), config, encode=encoder)
    for i in range(2):
        straight.step(batch_of(FEW, seed=i, reset_reference=reset and i == 1))
    kinds = straight.tensors()
    for kind, tensors in {**kinds, "live": adapters(straight.model)}.items():
        save_file(
            {n: t.detach().contiguous() for n, t in tensors.items()},
            tmp_path / f"{kind}.safetensors",
        )

    resumed = Learner(adapted(dtype, seed=9), config, encode=encoder)
    live = load_file(tmp_path / "live.safetensors")
    with torch.no_grad():
        for n, p in adapters(resumed.model).items():
            p.copy_(live[n])
    state = json.loads(json.dumps(straight.state_dict()))
    resumed.load({kind: load_file(tmp_path / f"{kind}.safetensors") for kind in kinds}, state)
    for i in range(2, 4):
        reports = [le.step(batch_of(FEW, seed=i)) for le in (straight, resumed)]
        assert reports[0].metrics == reports[1].metrics
    assert all(
        torch.equal(p, adapters(resumed.model)[n]) for n, p in adapters(straight.model).items()
    )


def test_activations_computed_again_change_nothing(adapted, batch_of, encoder):
    models = [adapted(), adapted()]
    for model, again in zip(models, (False, True), strict=True):
        config = Learn(kl_coef=0.1, lr=0.01, warmup=0, checkpoint_activations=again)
        learner = Learner(model, config, encode=encoder)
        for i in range(2):
            learner.step(batch_of(MIXED, seed=i))
    for name, p in adapters(models[0]).items():
        torch.testing.assert_close(p, adapters(models[1])[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_warm_start_trains_the_adapters_alone(adapted, dtype):
    model = adapted(dtype)
    below = copy.deepcopy(frozen(model))
    pairs = [([2, 3], [4, 5, 6, 1]), ([7], [8, 1]), ([9, 10, 11], [12, 13, 1])]
    losses = []
    warm_start(
        model,
        itertools.repeat(pairs),
        steps=30,
        lr=2e-2,
        on_step=lambda _, loss: losses.append(loss),
    )
    assert losses[-1] < 0.3 * losses[0]
    assert all(torch.equal(p, below[n]) for n, p in frozen(model).items())


def test_after_a_warm_start_the_reference_is_what_it_made(adapted, batch_of, encoder):
    """As without adapters: the policy that reinforcement starts from."""
    model = adapted()
    warm_start(model, itertools.repeat([([2, 3], [4, 5, 6, 1])]), steps=5, lr=2e-2)
    then = logits(model)
    learner = Learner(model, Learn(kl_coef=0.1, lr=0.05, warmup=0), encode=encoder)
    assert learner.step(batch_of(MIXED)).metrics["learn/kl"] == pytest.approx(0.0, abs=1e-12)
    assert torch.equal(logits(learner._reference), then) and not torch.equal(logits(model), then)
