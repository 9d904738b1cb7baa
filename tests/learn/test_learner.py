"""The learner against a slow, plain reading of the formulas: padded batches, full logits, one backward."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from learner_batches import gradient_of

from whet.config import Learn
from whet.errors import Diverged, WhetError
from whet.learn import losses
from whet.learn.learner import Learner
from whet.types import Batch, Sampling

MIXED = [[1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 1.0, None, 0.3, 1.0], [0.1, 0.1, 0.1]]
FEW = [[1.0, 0.0, 0.0], [0.0, 0.3]]


def padded_log_probs(model, encoder, rollouts):
    rows = [[*encoder(r.prompt_id), *r.trace.ids.tolist()] for r in rollouts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    heat = torch.tensor([r.sampling.temperature for r in rollouts], dtype=torch.float64)[
        :, None, None
    ]
    lp = (model(input_ids=ids, attention_mask=mask, use_cache=False).logits / heat).log_softmax(-1)
    entropy = -(lp.exp() * lp).sum(-1)
    cut = [
        (i, torch.arange(len(row) - r.length, len(row)))
        for i, (row, r) in enumerate(zip(rows, rollouts, strict=True))
    ]
    return [lp[i, at - 1, ids[i, at]] for i, at in cut], [entropy[i, at - 1] for i, at in cut]


def close(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pack_tokens", [16, 40, 4096])
def test_grpo_with_kl_and_entropy_equals_the_plain_formula(
    model, batch_of, encoder, pack_tokens, monkeypatch
):
    """Packed, chunked and micro-batched against one padded forward, in fp64; loss and every gradient."""
    kl, entropy, cap = 0.3, 0.05, 1.4
    batch = batch_of(MIXED, temperature=0.7)
    monkeypatch.setattr(losses, "CAP", cap)
    config = Learn(estimator="grpo", kl_coef=kl, entropy_coef=entropy, pack_tokens=pack_tokens)
    learner = Learner(model, config, encode=encoder)
    learner._set_reference(learner.optimizer.live)
    with torch.no_grad():  # the policy has left the reference by the time of this batch
        for p in model.parameters():
            p.mul_(1.05)
    grads, metrics = gradient_of(learner, batch)
    judged = [[r for r in g.rollouts if r.judged] for g in batch.groups]
    flat = [r for group in judged for r in group]
    lps, entropies = padded_log_probs(model, encoder, flat)
    with torch.no_grad():
        refs, _ = padded_log_probs(learner._reference, encoder, flat)
    total = torch.zeros((), dtype=torch.float64)
    i = 0
    for group in judged:
        r = np.array([x.reward for x in group])
        a = (r - r.mean()) / (r.std(ddof=1) + 1e-6) if r.min() < r.max() else 0 * r
        for j in range(len(group)):
            lp, behaviour = lps[i], torch.tensor(group[j].trace.log_probs, dtype=torch.float64)
            w = torch.exp(lp.detach() - behaviour).clamp(max=cap)
            ratio = torch.exp(lp - lp.detach())
            d = refs[i] - lp
            tokens = -w * ratio * a[j] + kl * (d.exp() - d - 1) - entropy * entropies[i]
            total = total + tokens.mean() / len(group) / len(batch.groups)
            i += 1
    want = dict(
        zip(
            grads,
            torch.autograd.grad(total, [learner.optimizer.masters[n] for n in grads]),
            strict=True,
        )
    )
    close(grads, want)
    assert metrics["learn/loss"] == pytest.approx(float(total.detach()), rel=1e-9)
    every = torch.cat(lps).detach()
    gap = (
        every - torch.tensor(np.concatenate([r.trace.log_probs for r in flat]), dtype=torch.float64)
    ).abs()
    assert metrics["learn/mismatch"] == pytest.approx(float(gap.mean()))
    assert metrics["learn/mismatch_max"] == pytest.approx(float(gap.max()))
    assert metrics["learn/entropy"] == pytest.approx(float(torch.cat(entropies).detach().mean()))
    assert metrics["learn/kl"] > 0
    assert metrics["learn/tokens"] == every.numel()
    assert metrics["learn/signal_share"] == 0.5


def test_entropies_of_tokens_are_those_before_the_update(model, batch_of, encoder):
    """Two updates on the batch: what is kept is of the first pass. Groups without spread do not train."""
    batch = batch_of([[1.0, 0.0, 0.0], [0.0, 1.0], [0.1, 0.1, 0.1]])
    flat = [r for g in batch.groups for r in g.rollouts]
    with torch.no_grad():
        _, want = padded_log_probs(model, encoder, flat)
    learner = Learner(
        model, Learn(estimator="grpo", updates=2, pack_tokens=40, lr=1e-2), encode=encoder
    )
    assert learner.entropies([r.key for r in flat]) == {}
    learner.step(batch)
    found = learner.entropies([(99, 0), *(r.key for r in flat)])
    assert list(found) == [r.key for r in flat[:5]]
    for rollout, expected in zip(flat[:5], want, strict=False):
        np.testing.assert_allclose(found[rollout.key], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "estimator", ["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "reinforce_pp", "gspo", "cispo"]
)
@pytest.mark.filterwarnings("ignore:larger groups weigh more")
def test_micro_batches_do_not_change_the_gradient(model, batch_of, encoder, estimator):
    batch = batch_of(MIXED)
    whole, metrics = gradient_of(
        Learner(model, Learn(estimator=estimator, pack_tokens=4096), encode=encoder), batch
    )
    cut, again = gradient_of(
        Learner(model, Learn(estimator=estimator, pack_tokens=16), encode=encoder), batch
    )
    close(cut, whole)
    assert again.keys() == metrics.keys()
    assert again["learn/loss"] == pytest.approx(metrics["learn/loss"])


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_no_spread_gives_exactly_no_policy_gradient(
    model, batch_of, encoder, estimator, monkeypatch
):
    """With the entropy bonus on, such rollouts do run; then only the bonus moves the weights."""
    batch = batch_of([[0.1, 0.1, 0.1], [1.0, 1.0, 1.0]])
    bonus, metrics = gradient_of(
        Learner(model, Learn(estimator=estimator, entropy_coef=0.5), encode=encoder), batch
    )
    assert metrics["learn/rollouts"] == 6
    monkeypatch.setattr(losses, "CAP", 9.0)
    other = Learner(model, Learn(estimator=estimator, entropy_coef=0.5), encode=encoder)
    again, _ = gradient_of(other, batch_of([[0.7] * 3, [0.0] * 3], log_prob=-9.0))
    assert any(g.any() for g in bonus.values())
    for name in bonus:  # rewards, behaviour and cap changed: a policy gradient would show
        assert torch.equal(bonus[name], again[name])


def test_reinforce_learns_without_spread(model, batch_of, encoder):
    _, metrics = gradient_of(
        Learner(model, Learn(estimator="reinforce"), encode=encoder), batch_of([[1.0, 1.0]])
    )
    assert metrics["learn/grad_norm"] > 0
    assert metrics["learn/signal_share"] == 1.0


def test_rollouts_without_advantage_are_not_run_and_do_not_matter(model, batch_of, encoder):
    """Leaving them out is exact: the same gradient as with a vanishing entropy bonus, which makes all run."""
    batch = batch_of(MIXED)
    few, metrics = gradient_of(Learner(model, Learn(estimator="dr_grpo"), encode=encoder), batch)
    every, all_of = gradient_of(
        Learner(model, Learn(estimator="dr_grpo", entropy_coef=1e-300), encode=encoder), batch
    )
    assert metrics["learn/rollouts"] == 3 + 4
    assert all_of["learn/rollouts"] == 3 + 2 + 4 + 3
    close(few, every)


def test_a_batch_without_signal_takes_no_step_but_is_a_version(model, batch_of, encoder):
    learner = Learner(model, Learn(estimator="rloo"), encode=encoder)
    learner.step(batch_of(MIXED))
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(learner.tensors())
    report = learner.step(batch_of([[1.0, 1.0], [0.0, 0.0]]))
    assert (learner.version, learner.updates) == (2, 1)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(
        torch.equal(t, learner.tensors()["optimizer"][n]) for n, t in state["optimizer"].items()
    )
    assert report.metrics["learn/tokens"] == 0
    assert report.metrics["learn/signal_share"] == 0.0
    assert report.metrics["learn/grad_norm"] == 0.0


def test_groups_without_signal_count_in_the_weights(model, batch_of, encoder):
    one = batch_of([[1.0, 0.0, 0.0]])
    silent = batch_of([[1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    alone, _ = gradient_of(Learner(model, Learn(estimator="grpo"), encode=encoder), one)
    third, _ = gradient_of(Learner(model, Learn(estimator="grpo"), encode=encoder), silent)
    close({n: 3 * g for n, g in third.items()}, alone)


def test_group_weights_are_the_curriculums(model, batch_of, encoder):
    rewards = [[1.0, 0.0], [0.0, 1.0, 1.0]]
    learner = Learner(model, Learn(estimator="grpo"), encode=encoder)
    first, _ = gradient_of(learner, batch_of(rewards, weights=[1.0, 0.0]))
    second, _ = gradient_of(learner, batch_of(rewards, weights=[0.0, 1.0]))
    mixed, _ = gradient_of(learner, batch_of(rewards, weights=[0.25, 0.75]))
    close(mixed, {n: 0.25 * first[n] + 0.75 * second[n] for n in mixed})


def test_unjudged_rollouts_are_ignored(model, batch_of, encoder):
    batch = batch_of([[1.0, None, 0.0], [None, None]])
    group = batch.groups[0]
    without = dataclasses.replace(group, rollouts=(group.rollouts[0], group.rollouts[2]))
    learner = Learner(model, Learn(estimator="grpo"), encode=encoder)
    got, metrics = gradient_of(learner, batch)
    want, _ = gradient_of(learner, dataclasses.replace(batch, groups=(without, batch.groups[1])))
    close(got, want)
    assert metrics["learn/rollouts"] == 2


def test_checkpointing_changes_nothing(model_of, batch_of, encoder):
    batch = batch_of(MIXED)
    config = Learn(estimator="grpo", kl_coef=0.1, entropy_coef=0.1, updates=2)
    calls = {True: 0, False: 0}
    results = {}
    for on in (False, True):
        model = model_of()
        learner = Learner(
            model, config.model_copy(update={"checkpoint_activations": on}), encode=encoder
        )
        model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *a, on=on: calls.__setitem__(on, calls[on] + 1)
        )
        report = learner.step(batch)
        results[on] = report.metrics, model.state_dict()
    assert calls[True] > calls[False]  # computed again in the backward pass
    assert results[True][0] == pytest.approx(results[False][0])
    for name, tensor in results[False][1].items():
        torch.testing.assert_close(results[True][1][name], tensor, rtol=1e-12, atol=1e-13)


def test_two_updates_use_the_log_probs_from_before_the_first(model, batch_of, encoder):
    """The second gradient is -w r A grad lp with r = exp(lp - lp_old) no longer 1, tokens out of bounds held back."""
    batch = batch_of([[1.0, 0.0]], log_prob=-2.0)
    learner = Learner(
        model,
        Learn(estimator="dr_grpo", updates=2, lr=0.02, warmup=0, clip_low=0.05),
        encode=encoder,
    )
    rollouts = list(batch.groups[0].rollouts)
    with torch.no_grad():
        old, _ = padded_log_probs(model, encoder, rollouts)
    seen = []
    step = learner.optimizer.step

    def watch(lr, norm):
        seen.append(
            (
                {n: p.grad.clone() for n, p in learner.optimizer.masters.items()},
                copy.deepcopy(model),
            )
        )
        step(lr, norm)

    learner.optimizer.step = watch
    report = learner.step(batch)
    assert (len(seen), learner.version, learner.updates) == (2, 1, 2)
    grads, at = seen[1]
    lps, _ = padded_log_probs(at, encoder, rollouts)
    total, held = torch.zeros((), dtype=torch.float64), 0
    for a, lp, lp_old in zip((0.5, -0.5), lps, old, strict=True):
        ratio = torch.exp(lp - lp_old)
        w = torch.exp(lp_old + 2.0).clamp(max=2.0)
        bounded = ratio.clamp(0.95, 1.2)
        total = total - (w * torch.minimum(ratio * a, bounded * a)).sum() / (2 * 16)
        held += int((bounded * a < ratio * a).sum())
    want = torch.autograd.grad(total, list(at.parameters()))
    close(grads, dict(zip((n for n, _ in at.named_parameters()), want, strict=True)))
    assert held > 0
    assert report.metrics["learn/clipped"] == pytest.approx(held / sum(r.length for r in rollouts))


def test_two_parts_of_a_batch_are_two_batches(model_of, batch_of, encoder):
    """Each has an optimiser step, and what the second learns from was drawn before the first. A batch that is one
    version old says the same by its importance weights, as long as nothing is clipped."""
    models = [model_of(), model_of()]
    batch = batch_of([[1.0, 0.0], [0.0, 1.0]])
    groups = []
    for group in batch.groups:
        with torch.no_grad():
            drawn, _ = padded_log_probs(models[0], encoder, group.rollouts)
        traces = [
            dataclasses.replace(r.trace, log_probs=lp.numpy())
            for r, lp in zip(group.rollouts, drawn, strict=True)
        ]
        rollouts = tuple(
            dataclasses.replace(r, trace=trace)
            for r, trace in zip(group.rollouts, traces, strict=True)
        )
        groups.append(dataclasses.replace(group, rollouts=rollouts))
    settings = {"estimator": "dr_grpo", "lr": 1e-3, "warmup": 0, "clip_low": 0.9, "clip_high": 9.0}
    whole = Learner(models[0], Learn(**settings, minibatches=2), encode=encoder)
    report = whole.step(dataclasses.replace(batch, groups=tuple(groups)))
    assert (whole.version, whole.updates) == (1, 2)
    assert report.metrics["learn/importance_mean"] == pytest.approx(1.0), (
        "all is drawn from the policy before"
    )
    apart = Learner(models[1], Learn(**settings), encode=encoder)
    for group in groups:
        apart.step(dataclasses.replace(batch, groups=(group,)))
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=name)
    moved = [
        float((p - q).detach().abs().max())
        for p, q in zip(models[0].parameters(), model_of().parameters(), strict=True)
    ]
    assert max(moved) > 1e-3


def test_a_batch_may_want_other_parts_than_the_recipe(model, batch_of, encoder):
    learner = Learner(model, Learn(minibatches=2), encode=encoder)
    batch = batch_of([[1.0, 0.0], [0.0, 1.0]])
    learner.step(dataclasses.replace(batch, minibatches=4))
    assert learner.updates == 4
    learner.step(dataclasses.replace(batch, minibatches=1))
    assert learner.updates == 4 + 1
    learner.step(batch)
    assert learner.updates == 4 + 1 + 2


def test_more_parts_than_samples_and_scores_of_all(model, batch_of, encoder):
    batch = batch_of([[1.0, 0.0], [1.0, 1.0, 0.0]])
    learner = Learner(model, Learn(minibatches=9, updates=2), encode=encoder)
    report = learner.step(batch, needs={"score"})
    assert learner.updates == 2 * 5
    assert len(report.signals) == 5, "under the weights before the first update"


def test_importance_is_capped(model, batch_of, encoder, monkeypatch):
    """Behaviour log-probs of -40 make every weight the cap: the gradient scales with it."""
    batch = batch_of([[1.0, 0.0]], log_prob=-40.0)
    low, metrics = gradient_of(Learner(model, Learn(), encode=encoder), batch)
    monkeypatch.setattr(losses, "CAP", 6.0)
    high, _ = gradient_of(Learner(model, Learn(), encode=encoder), batch)
    close({n: 3 * g for n, g in low.items()}, high)
    assert metrics["learn/importance_mean"] == 2.0


def test_overlong_shaping_gives_signal_where_all_are_wrong(model, batch_of, encoder):
    batch = batch_of([[0.0, 0.0, 0.0, 0.0]])
    lengths = sorted({r.length for r in batch.groups[0].rollouts})
    window = 16 - lengths[0]
    _, plain = gradient_of(Learner(model, Learn(), encode=encoder), batch)
    _, shaped = gradient_of(Learner(model, Learn(overlong=window), encode=encoder), batch)
    assert len(lengths) > 1
    assert (plain["learn/signal_share"], shaped["learn/signal_share"]) == (0.0, 1.0)


def test_batch_coefficients_override_the_recipe(model, batch_of, encoder):
    learner = Learner(model, Learn(kl_coef=0.5), encode=encoder)
    assert "learn/kl" not in learner.step(batch_of(MIXED, kl_coef=0.0)).metrics
    assert learner._reference is None
    assert "learn/kl" in learner.step(batch_of(MIXED)).metrics


def test_the_reference_stays_until_it_is_reset(model, batch_of, encoder):
    learner = Learner(model, Learn(kl_coef=0.1, lr=0.01, warmup=0), encode=encoder)
    first = copy.deepcopy(model.state_dict())
    assert learner.step(batch_of(MIXED)).metrics["learn/kl"] == pytest.approx(0.0, abs=1e-12)
    moved = learner.step(batch_of(MIXED)).metrics["learn/kl"]
    assert moved > 1e-6
    assert all(torch.equal(t, first[n]) for n, t in learner.tensors()["reference"].items())
    address = next(learner._reference.parameters()).data_ptr()
    assert learner.step(batch_of(MIXED, reset_reference=True)).metrics["learn/kl"] == pytest.approx(
        0.0, abs=1e-12
    )
    assert next(learner._reference.parameters()).data_ptr() == address


def test_reset_optimizer_forgets_the_moments(model, batch_of, encoder):
    learner = Learner(model, Learn(), encode=encoder)
    for _ in range(3):
        learner.step(batch_of(MIXED))
    learner.step(batch_of(MIXED, reset_optimizer=True))
    assert {
        float(t) for n, t in learner.tensors()["optimizer"].items() if n.startswith("step.")
    } == {1.0}
    assert learner.updates == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_resumed_training_is_bit_identical(model_of, batch_of, encoder, dtype, tmp_path):
    """Through safetensors and JSON, as a checkpoint is; with KL, so that the reference matters."""
    import json

    from safetensors.torch import load_file, save_file

    config = Learn(estimator="grpo", kl_coef=0.05, lr=1e-3, schedule="cosine", pack_tokens=64)
    straight = Learner(model_of(dtype), config, encode=encoder)
    for i in range(2):
        straight.step(batch_of(FEW, seed=i), progress=i / 4)
    straight.pack_tokens = 32
    kinds = straight.tensors()
    assert set(kinds) == {"optimizer", "reference"} | (
        {"masters"} if dtype == torch.bfloat16 else set()
    )
    for kind, tensors in {**kinds, "live": dict(straight.model.named_parameters())}.items():
        save_file(
            {n: t.detach().contiguous() for n, t in tensors.items()},
            tmp_path / f"{kind}.safetensors",
        )
    state = json.loads(json.dumps(straight.state_dict()))

    resumed = Learner(model_of(dtype, seed=9), config, encode=encoder)
    with torch.no_grad():
        live = load_file(tmp_path / "live.safetensors")
        for n, p in resumed.model.named_parameters():
            p.copy_(live[n])
    resumed.load({kind: load_file(tmp_path / f"{kind}.safetensors") for kind in kinds}, state)
    assert resumed.state_dict() == straight.state_dict()
    for i in range(2, 4):
        reports = [le.step(batch_of(FEW, seed=i), progress=i / 4) for le in (straight, resumed)]
        assert reports[0].metrics == reports[1].metrics
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert straight.version == resumed.version == 4


def poison(batch: Batch) -> Batch:
    """Behaviour log-probs that are not numbers, as a broken engine would record."""
    group = batch.groups[0]
    trace = group.rollouts[0].trace
    bad = dataclasses.replace(
        group.rollouts[0], trace=dataclasses.replace(trace, log_probs=trace.log_probs * math.nan)
    )
    return dataclasses.replace(
        batch,
        groups=(dataclasses.replace(group, rollouts=(bad, *group.rollouts[1:])), *batch.groups[1:]),
    )


def test_a_step_that_is_not_finite_is_skipped_and_three_in_a_row_end_the_run(
    model, batch_of, encoder
):
    learner = Learner(model, Learn(lr=1e-3), encode=encoder)
    good = batch_of(MIXED)
    learner.step(good)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        report = learner.step(poison(good))
        assert all(math.isfinite(v) for v in report.metrics.values())
    assert report.metrics["learn/skipped"] == 2
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    learner.step(good)
    assert learner.version == 4
    assert any(not torch.equal(before[n], t) for n, t in model.state_dict().items())
    after = copy.deepcopy(model.state_dict())
    with pytest.raises(Diverged, match="not finite 3 times in a row"):
        for _ in range(3):
            learner.step(poison(good))
    assert learner.skipped == 5
    assert all(torch.equal(after[n], t) for n, t in model.state_dict().items())


def limit_memory(model, tokens):
    """A device that cannot hold more than so many tokens at once."""

    def check(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > tokens:
            raise torch.OutOfMemoryError("too many tokens")

    model.model.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.parametrize("updates", [1, 2])
def test_out_of_memory_halves_the_packs_and_loses_nothing(model_of, batch_of, encoder, updates):
    batch, config = batch_of(MIXED), Learn(updates=updates, pack_tokens=4096, kl_coef=0.1)
    roomy, tight = (Learner(model_of(), config, encode=encoder) for _ in range(2))
    limit_memory(tight.model, 30)
    want, got = roomy.step(batch).metrics, tight.step(batch).metrics
    assert got["learn/oom"] > 0
    assert tight.pack_tokens <= 30
    assert got["learn/loss"] == pytest.approx(want["learn/loss"])
    for a, b in zip(roomy.model.parameters(), tight.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_one_sequence_that_does_not_fit_is_said_so(model, batch_of, encoder):
    learner = Learner(model, Learn(), encode=encoder)
    limit_memory(model, 2)
    with pytest.raises(WhetError, match="checkpoint_activations"):
        learner.step(batch_of(MIXED))


def test_live_weights_are_only_written_in_place(model_of, batch_of, encoder):
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(dtype)
        addresses = [p.data_ptr() for p in model.parameters()]
        objects = [id(p) for p in model.parameters()]
        before = [p.detach().clone() for p in model.parameters()]
        Learner(model, Learn(lr=1e-2, warmup=0), encode=encoder).step(batch_of(MIXED))
        assert [p.data_ptr() for p in model.parameters()] == addresses
        assert [id(p) for p in model.parameters()] == objects
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_mixed_temperatures_in_one_pack(model, batch_of, encoder):
    hot, cold = batch_of([[1.0, 0.0]], temperature=1.0), batch_of([[1.0, 0.0]], temperature=0.5)
    a = dataclasses.replace(hot.groups[0], weight=1.0)
    b = dataclasses.replace(cold.groups[0], weight=1.0)
    learner = Learner(model, Learn(), encode=encoder)
    together, _ = gradient_of(learner, Batch(groups=(a, b)))
    first, _ = gradient_of(learner, Batch(groups=(a,)))
    second, _ = gradient_of(learner, Batch(groups=(b,)))
    close(together, {n: first[n] + second[n] for n in first})
    assert any(not torch.allclose(first[n], second[n]) for n in first)


def test_the_learning_rate_warms_up_and_is_reported(model, batch_of, encoder):
    learner = Learner(model, Learn(lr=0.01, warmup=2, schedule="linear"), encode=encoder)
    rates = [learner.step(batch_of(MIXED), progress=p).metrics["learn/lr"] for p in (0.0, 0.0, 0.5)]
    assert rates == pytest.approx([0.005, 0.01, 0.005])


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (Sampling(max_tokens=16, temperature=0.0), "temperature 0.0"),
        (Sampling(max_tokens=16, top_k=5), "top_k 5"),
        (Sampling(max_tokens=16, top_p=0.9), "top_p 0.9"),
    ],
)
def test_rollouts_not_drawn_from_the_policy_are_refused(model, batch_of, encoder, sampling, word):
    batch = batch_of([[1.0, 0.0]])
    group = batch.groups[0]
    odd = tuple(dataclasses.replace(r, sampling=sampling) for r in group.rollouts)
    with pytest.raises(WhetError, match=word):
        Learner(model, Learn(), encode=encoder).step(
            Batch(groups=(dataclasses.replace(group, rollouts=odd),))
        )


def test_a_missing_trace_is_refused(model, batch_of, encoder):
    group = batch_of([[1.0, 0.0]]).groups[0]
    bare = tuple(dataclasses.replace(r, trace=None) for r in group.rollouts)
    with pytest.raises(WhetError, match="without its trace"):
        Learner(model, Learn(), encode=encoder).step(
            Batch(groups=(dataclasses.replace(group, rollouts=bare),))
        )


def test_batch_tokens_warns_where_groups_differ_in_size(model, batch_of, encoder):
    learner = Learner(model, Learn(estimator="dapo"), encode=encoder)
    learner.step(batch_of([[1.0, 0.0], [0.0, 1.0]]))
    with pytest.warns(UserWarning, match="larger groups weigh more"):
        learner.step(batch_of(MIXED))


@pytest.mark.parametrize("estimator", ["rloo", "gspo", "cispo"])
def test_it_learns(model_of, batch_of, encoder, estimator):
    """The same batch again and again: what was rewarded becomes likelier than what was not."""
    model = model_of(torch.float32)
    learner = Learner(model, Learn(estimator=estimator, lr=5e-3, warmup=0), encode=encoder)
    batch = batch_of([[1.0, 0.0, 0.0], [0.0, 1.0]], log_prob=-1.0)
    rollouts = [r for g in batch.groups for r in g.rollouts]

    def lead():
        with torch.no_grad():
            lps, _ = padded_log_probs(model, encoder, rollouts)
        mean = {1.0: [], 0.0: []}
        for r, lp in zip(rollouts, lps, strict=True):
            mean[r.reward].append(float(lp.mean()))
        return np.mean(mean[1.0]) - np.mean(mean[0.0])

    before = lead()
    for _ in range(15):
        learner.step(batch)
    assert lead() > before + 1.0


@pytest.mark.gpu
def test_a_bf16_step_on_a_gpu_follows_fp32_on_the_cpu(model_of, batch_of, encoder):
    batch, config = (
        batch_of(MIXED),
        Learn(estimator="grpo", kl_coef=0.1, checkpoint_activations=True, updates=2),
    )
    exact = Learner(model_of(torch.float32), config, encode=encoder)
    model = model_of(torch.float32).to("cuda", torch.bfloat16)
    learner = Learner(model, config, encode=encoder)
    want, got = exact.step(batch).metrics, learner.step(batch).metrics
    assert got["learn/entropy"] == pytest.approx(want["learn/entropy"], rel=0.05)
    assert got["learn/grad_norm"] == pytest.approx(want["learn/grad_norm"], rel=0.2)
    assert set(learner.tensors()) == {"masters", "optimizer", "reference"}


# Signals


def scores_of(model, encoder, batch):
    """For every judged rollout, one by one: the gradient of its log-prob in a bias added to the last hidden states."""
    found = {}
    for rollout in (r for group in batch.groups for r in group.judged):
        ids = torch.tensor([[*encoder(rollout.prompt_id), *rollout.trace.ids.tolist()]])
        hidden = model.get_decoder()(
            input_ids=ids[:, :-1], use_cache=False
        ).last_hidden_state.detach()
        bias = torch.zeros(hidden.shape[-1], dtype=hidden.dtype, requires_grad=True)
        lp = (model.lm_head(hidden + bias) / rollout.sampling.temperature).log_softmax(-1)[0]
        chosen = lp.gather(1, ids[0, 1:, None])[-rollout.length :]
        found[rollout.key] = torch.autograd.grad(chosen.sum(), bias)[0].numpy()
    return found


@pytest.mark.parametrize("pack_tokens", [16, 4096])
def test_scores_are_those_of_the_rollouts_that_train(model, batch_of, encoder, pack_tokens):
    batch = batch_of(MIXED, temperature=0.7)
    want = scores_of(model, encoder, batch)
    learner = Learner(model, Learn(pack_tokens=pack_tokens), encode=encoder)
    signals = learner.step(batch, needs={"score"}).signals
    assert sorted(signals) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 3), (2, 4)], (
        "no advantage, no pass"
    )
    for key, signal in signals.items():
        assert signal.keys() == {"score"} and isinstance(signal["score"], np.ndarray)
        assert signal["score"].dtype == np.float32
        np.testing.assert_allclose(signal["score"], want[key], rtol=1e-5, atol=1e-6)


def test_scores_are_of_the_weights_before_the_first_update(model, batch_of, encoder):
    batch = batch_of(MIXED)
    want = scores_of(model, encoder, batch)
    learner = Learner(model, Learn(updates=3, lr=0.1, warmup=0, kl_coef=0.1), encode=encoder)
    signals = learner.step(batch, needs={"score"}).signals
    assert signals.keys() == want.keys(), "under KL all judged ones pass through"
    for key, signal in signals.items():
        np.testing.assert_allclose(signal["score"], want[key], rtol=1e-5, atol=1e-6)
    assert not np.allclose(want[0, 0], scores_of(model, encoder, batch)[0, 0]), (
        "the weights have moved since"
    )


def test_asking_for_scores_changes_nothing_else(model_of, batch_of, encoder):
    learners = [Learner(model_of(torch.float32), Learn(lr=0.01), encode=encoder) for _ in range(2)]
    for seed in range(2):
        plain, scored = (
            learner.step(batch_of(MIXED, seed=seed), needs=needs)
            for learner, needs in zip(learners, (frozenset(), {"score"}), strict=True)
        )
        assert plain.metrics == scored.metrics
        assert plain.signals == {} and len(scored.signals) == 7
    for a, b in zip(learners[0].model.parameters(), learners[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_without_signal_or_a_diverged_one_reports_no_scores(model, batch_of, encoder):
    learner = Learner(model, Learn(), encode=encoder)
    assert learner.step(batch_of([[1.0, 1.0]]), needs={"score"}).signals == {}
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    report = learner.step(batch_of(MIXED), needs={"score"})
    assert report.metrics["learn/skipped"] == 1 and report.signals == {}
