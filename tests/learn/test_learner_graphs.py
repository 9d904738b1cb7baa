"""The learner with graphed passes, which on a CPU are plain calls over padded packs: the training is the same."""

import pytest
import torch

from whet.config import Learn
from whet.fast.graphed import FastPasses, Graphed
from whet.learn.learner import Learner

MIXED = [[1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 1.0, None, 0.3, 1.0], [0.1, 0.1, 0.1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_training_is_the_same(model_of, batch_of, encoder, dtype):
    """Two updates a batch with KL and scores, several packs an update, several batches."""
    config = Learn(estimator="grpo", kl_coef=0.1, entropy_coef=0.05, updates=2, pack_tokens=64, lr=1e-3)
    results = []
    for graphs in (False, True):
        learner = Learner(model_of(dtype), config, encode=encoder, passes=FastPasses)
        assert learner.passes.graphed is None, "on a CPU there are none"
        learner.passes.graphed = Graphed(learner.model, learner.pack_tokens) if graphs else None
        reports = [learner.step(batch_of(MIXED, seed=seed), needs={"score"}) for seed in (0, 0, 1)]
        results.append((reports, learner.model.state_dict()))
        assert not graphs or learner.passes.graphed.ready
    rough = {"rel": 0.05, "abs": 0.02} if dtype == torch.bfloat16 else {}
    for ours, want in zip(results[1][0], results[0][0], strict=True):
        assert ours.metrics == pytest.approx(want.metrics, **rough)
        assert ours.signals.keys() == want.signals.keys()
    close = {"rtol": 0.02, "atol": 0.01} if dtype == torch.bfloat16 else {"rtol": 1e-9, "atol": 1e-10}
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, **close)


@pytest.mark.parametrize("graphs", [False, True])
def test_prompts_that_are_fed_once_train_the_same(model_of, batch_of, encoder, graphs):
    config = Learn(estimator="grpo", kl_coef=0.1, entropy_coef=0.05, minibatches=2, pack_tokens=64, lr=1e-3)
    results = []
    for share in (False, True):
        learner = Learner(model_of(torch.float64), config, encode=encoder, passes=FastPasses)
        learner.share = share
        learner.passes.graphed = Graphed(learner.model, learner.pack_tokens) if graphs else None
        reports = [learner.step(batch_of(MIXED, seed=seed), needs={"score"}) for seed in (0, 0, 1)]
        results.append((reports, learner.model.state_dict()))
    for ours, want in zip(results[1][0], results[0][0], strict=True):
        assert ours.metrics == pytest.approx(want.metrics)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=1e-9, atol=1e-10)


def test_a_full_memory_first_costs_the_graphs_then_the_size_of_packs(model_of, batch_of, encoder):
    full = [2]

    def fail(layer, args):
        if full[0] and torch.is_grad_enabled():
            full[0] -= 1
            raise torch.OutOfMemoryError("full")

    config = Learn(estimator="grpo", pack_tokens=128)
    batch, want = batch_of(MIXED), Learner(model_of(), config, encode=encoder, passes=FastPasses)
    learner = Learner(model_of(), config, encode=encoder, passes=FastPasses)
    learner.passes.graphed = Graphed(learner.model, learner.pack_tokens)
    learner.model.model.embed_tokens.register_forward_pre_hook(fail)
    with pytest.warns(UserWarning, match="trained without CUDA graphs, more slowly: the memory they hold is needed"):
        got = learner.step(batch).metrics
    assert learner.passes.graphed is None and learner.ooms == 2
    assert learner.pack_tokens < 128
    assert got["learn/grad_norm"] == pytest.approx(want.step(batch).metrics["learn/grad_norm"])


def test_a_rehearsal_makes_every_size_ready_and_changes_nothing(model_of, batch_of, encoder):
    config = Learn(estimator="grpo", updates=2, pack_tokens=64, lr=1e-3)
    results = []
    for rehearsed in (False, True):
        learner = Learner(model_of(torch.float64), config, encode=encoder, passes=FastPasses)
        learner.passes.graphed = Graphed(learner.model, learner.pack_tokens)
        if rehearsed:
            learner.rehearse()
            assert sorted(size.tokens for size in learner.passes.graphed.ready) == [8, 12, 16, 24, 32, 48, 64]
            assert learner.updates == learner.version == learner.ooms == 0
        reports = [learner.step(batch_of(MIXED, seed=seed)).metrics for seed in (0, 1)]
        results.append((reports, learner.model.state_dict()))
    for ours, want in zip(*(reports for reports, _ in results), strict=True):
        assert ours == pytest.approx(want)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True])
def test_small_models_are_trained_by_graphs(model_of, batch_of, encoder, share):
    config = Learn(estimator="grpo", kl_coef=0.1, entropy_coef=0.01, pack_tokens=64, lr=1e-4)
    results = []
    for compiled in (False, True):
        learner = Learner(
            model_of(torch.bfloat16).to("cuda"),
            config.model_copy(update={"compile": compiled}),
            encode=encoder,
            passes=FastPasses,
        )
        learner.share = share
        assert (learner.passes.graphed is not None) == compiled
        results.append([learner.step(batch_of(MIXED, seed=seed)).metrics for seed in (0, 0, 1, 1)])
        assert not compiled or (learner.passes.graphed.ready and not learner.passes.graphed.stopped)
    for ours, want in zip(*reversed(results), strict=True):
        assert ours["learn/grad_norm"] == pytest.approx(want["learn/grad_norm"], rel=0.2)
        assert ours["learn/entropy"] == pytest.approx(want["learn/entropy"], rel=0.02)
