"""The learner with compiled and captured passes, plain calls over padded packs on a CPU: the training is the same."""

import functools

import pytest
import torch
from learner_batches import gradient_of

from whet.config import Learn
from whet.fast.compiled import compiled_layers
from whet.fast.graphed import FastPasses, Graphed
from whet.learn.learner import Learner

MIXED = [[1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 1.0, None, 0.3, 1.0], [0.1, 0.1, 0.1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_training_is_the_same(model_of, batch_of, encoder, dtype):
    """Two updates a batch with KL and scores, several packs an update, several batches."""
    config = Learn(
        estimator="grpo", kl_coef=0.1, entropy_coef=0.05, updates=2, pack_tokens=64, lr=1e-3
    )
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
    close = (
        {"rtol": 0.02, "atol": 0.01} if dtype == torch.bfloat16 else {"rtol": 1e-9, "atol": 1e-10}
    )
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, **close)


@pytest.mark.parametrize("graphs", [False, True])
def test_prompts_that_are_fed_once_train_the_same(model_of, batch_of, encoder, graphs):
    config = Learn(
        estimator="grpo", kl_coef=0.1, entropy_coef=0.05, minibatches=2, pack_tokens=64, lr=1e-3
    )
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
    with pytest.warns(
        UserWarning,
        match="trained without CUDA graphs, more slowly: the memory they hold is needed",
    ):
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
            assert sorted(size.tokens for size in learner.passes.graphed.ready) == [
                8,
                12,
                16,
                24,
                32,
                48,
                64,
            ]
            assert learner.updates == learner.version == learner.ooms == 0
        reports = [learner.step(batch_of(MIXED, seed=seed)).metrics for seed in (0, 1)]
        results.append((reports, learner.model.state_dict()))
    for ours, want in zip(*(reports for reports, _ in results), strict=True):
        assert ours == pytest.approx(want)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("again", "form"), [(False, "whole"), (True, "whole"), (True, "split"), (False, "head")]
)
def test_compiled_training_is_the_same(model_of, batch_of, encoder, monkeypatch, again, form):
    """Two updates with KL, so that the reference and the log-probs from before run compiled, too."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        "whet.fast.graphed.compiled_layers", functools.partial(compiled_layers, backend="eager")
    )
    monkeypatch.setattr("whet.fast.compiled._compile_chunk", lambda function: function)
    config = Learn(
        estimator="grpo", kl_coef=0.1, entropy_coef=0.05, updates=2, checkpoint_activations=again
    )
    results = []
    for compiled in ("", form):
        model = model_of()
        learner = Learner(model, config, encode=encoder, passes=FastPasses)
        assert not learner.passes.form  # on a CPU it is not asked for
        learner.passes.form = compiled
        results.append((learner.step(batch_of(MIXED)).metrics, model.state_dict()))
    assert results[1][0] == pytest.approx(results[0][0])
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=1e-9, atol=1e-10)


def test_a_compiler_that_fails_in_a_step_costs_only_speed(model_of, batch_of, encoder, monkeypatch):
    monkeypatch.setattr(
        "whet.fast.graphed.compiled_layers", functools.partial(compiled_layers, backend="none_such")
    )
    config = Learn(estimator="grpo", kl_coef=0.1)
    plain, broken = (
        Learner(model_of(), config, encode=encoder, passes=FastPasses) for _ in range(2)
    )
    broken.passes.form = "whole"
    want = plain.step(batch_of(MIXED)).metrics
    with pytest.warns(UserWarning, match="LlamaForCausalLM is trained without the compiler"):
        got = broken.step(batch_of(MIXED)).metrics
    assert not broken.passes.form
    assert got == want
    for a, b in zip(plain.model.parameters(), broken.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_form_that_is_compiled_is_said_in_one_line(model_of, encoder, monkeypatch):
    passes = FastPasses(model_of(), Learn())
    monkeypatch.setattr(
        "whet.fast.graphed.best_form", lambda *given: ("split", "whole layers: its gradient is off")
    )
    said = (
        "LlamaForCausalLM is trained with only layers around their attention compiled, "
        "more slowly: whole layers: its"
    )
    with pytest.warns(UserWarning, match=said):
        assert passes._best_form() == "split"


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


@pytest.mark.gpu
def test_a_compiled_bf16_gradient_follows_the_plain_one(model_of, batch_of, encoder):
    results = []
    for compiled in (False, True):
        config = Learn(
            estimator="grpo", kl_coef=0.1, entropy_coef=0.01, pack_tokens=64, compile=compiled
        )
        learner = Learner(
            model_of(torch.bfloat16).to("cuda"), config, encode=encoder, passes=FastPasses
        )
        assert bool(learner.passes.form) == compiled
        grads, metrics = gradient_of(learner, batch_of(MIXED))
        results.append((torch.cat([g.flatten() for g in grads.values()]), metrics))
    (plain, a), (ours, b) = results
    assert torch.nn.functional.cosine_similarity(plain, ours, dim=0) > 0.98
    assert b["learn/grad_norm"] == pytest.approx(a["learn/grad_norm"], rel=0.1)
    assert b["learn/entropy"] == pytest.approx(a["learn/entropy"], rel=0.02)
