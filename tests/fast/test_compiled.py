"""Compiled layers and head against plain ones: equal, one graph for all layers and packs, and no trace left behind."""

import copy
import functools
import gc
import itertools

import pytest
import torch
from families import FAMILIES, small, some_pairs
from torch._dynamo.utils import counters

from whet.config import Lora
from whet.fast.compiled import (
    FORMS,
    _trial,
    best_form,
    compiled_layers,
    compiled_log_probs,
    gradient_chunk,
    not_finite,
    score_chunk,
    why_not,
)
from whet.model import packing
from whet.model import packing as packed
from whet.model.head import Head, head_of, log_probs
from whet.model.load import tiny_model
from whet.model.lora import add_lora
from whet.model.packing import hidden_states, make_packs, packed_attention
from whet.model.twin import rollout_twin

# torch's compiler looks there
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.fixture(autouse=True)
def _forget_graphs():
    """Compiled code is kept by class, for all models of a process."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def by_sequence(q, k, v, starts, ends, scale):
    """(where, where its keys are, scores, q, k, v with the keys of each query head) of each sequence, in fp64. Queries
    are the last of its tokens, as flash attention has it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for (a, b), (c, d) in zip(
        itertools.pairwise(starts.tolist()), itertools.pairwise(ends.tolist()), strict=True
    ):
        one, keys, values = q[a:b].double(), k[c:d].double(), v[c:d].double()
        scores = torch.einsum("qhd,khd->hqk", one, keys) * scale
        later = torch.ones(b - a, d - c, dtype=torch.bool).triu(1 + (d - c) - (b - a))
        yield slice(a, b), slice(c, d), scores.masked_fill(later, -torch.inf), one, keys, values


def flash_forward(
    q, k, v, starts, ends, longest, longest_k, dropout, causal, debug, *, scale, **rest
):
    assert longest == longest_k == int(ends.diff().max()) and int(starts[-1]) == len(q) and causal
    out, log_sum = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for where, _, scores, _, _, values in by_sequence(q, k, v, starts, ends, scale):
        out[where] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        log_sum[:, where] = scores.logsumexp(-1).float()
    return (
        out,
        log_sum,
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros((), dtype=torch.uint64),
        torch.zeros(0),
    )


def flash_backward(
    grad,
    q,
    k,
    v,
    out,
    log_sum,
    starts,
    ends,
    longest,
    longest_k,
    dropout,
    causal,
    seed,
    offset,
    *,
    scale,
    **rest,
):
    """All that the forward pass left must be what it was."""
    assert longest == longest_k == int(ends.diff().max()) and int(starts[-1]) == len(q) and causal
    slopes, share = [torch.full_like(x, torch.nan) for x in (q, k, v)], q.shape[1] // k.shape[1]
    for where, there, scores, one, keys, values in by_sequence(q, k, v, starts, ends, scale):
        p, way = scores.softmax(-1), grad[where].double()
        torch.testing.assert_close(out[where], torch.einsum("hqk,khd->qhd", p, values).to(q.dtype))
        torch.testing.assert_close(log_sum[:, where], scores.logsumexp(-1).float())
        of_p = torch.einsum("qhd,khd->hqk", way, values)
        of_scores = p * (of_p - (p * of_p).sum(-1, keepdim=True)) * scale
        slopes[0][where] = torch.einsum("hqk,khd->qhd", of_scores, keys).to(q.dtype)
        for slope, weights, rows in ((slopes[1], of_scores, one), (slopes[2], p, way)):
            each = torch.einsum("hqk,qhd->khd", weights, rows)
            slope[there] = each.unflatten(1, (-1, share)).sum(2).to(q.dtype)
    return tuple(slopes)


@pytest.fixture
def flash(monkeypatch):
    """The path of a GPU: torch's operator for packed attention, with kernels for a CPU below it."""
    monkeypatch.setattr(packing, "has_flash", lambda device: True)
    monkeypatch.setattr(packed, "can_varlen", lambda q, v, softcap: True)
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_flash_attention_forward", flash_forward, "CPU")
        kernels.impl("_flash_attention_backward", flash_backward, "CPU")
        yield


def passed(model, pairs, *, form, budget=1000, checkpoint=False, backend="aot_eager", share=False):
    """Log-probs and the gradient of a nonlinear loss."""
    model.zero_grad(set_to_none=True)
    out = []
    with packed_attention(model, checkpoint), compiled_layers(model, form, backend):
        for pack in make_packs(pairs, budget, share=share):
            lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets)
            lp.exp().sum().backward()
            out += zip(pack.members, lp.detach().split(pack.counts), strict=True)
    in_order = [lp for _, lp in sorted(out, key=lambda pair: pair[0])]
    return torch.cat(in_order), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def same(got, want, tolerance=1e-9):
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for name in want[1]:
        torch.testing.assert_close(got[1][name], want[1][name], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_graph_serves_all_layers_and_every_pack(flash, checkpoint):
    """The first pack is a single sequence, so that its longest is its length: no later pack may be held to that."""
    model = tiny_model(37, hidden=32, layers=2, heads=4, kv_heads=2, dtype=torch.float64)
    model.eval().gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    for pairs in (
        [([2] * 5, [3] * 30)],
        some_pairs(),
        some_pairs(seed=1, count=12),
        [([2] * 5, [3] * 9)],
    ):
        want = passed(model, pairs, form="", checkpoint=checkpoint)
        same(passed(model, pairs, form="whole", checkpoint=checkpoint), want)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_one_more_graph_serves_packs_that_share_prompts(flash):
    """What is fed once trains as what is fed for each, compiled or not."""
    model = tiny_model(37, hidden=32, layers=2, heads=4, kv_heads=2, dtype=torch.float64).eval()
    for seed, count in ((5, 5), (0, 7), (1, 12), (2, 9)):
        pairs = some_pairs(seed, 3 * count)
        pairs = [(pairs[i // 3][0], response) for i, (_, response) in enumerate(pairs)]
        want = passed(model, pairs, form="", share=True)
        same(want, passed(model, pairs, form=""), 1e-5)  # norms round to fp32
        same(passed(model, pairs, form="whole", share=True), want)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_with_attention_outside_the_number_of_graphs_does_not_grow_with_packs():
    """The reference attention, which loops over buckets, is not compiled."""
    model, graphs = small("qwen2"), {"form": "whole", "backend": "eager"}
    same(passed(model, some_pairs(), **graphs), passed(model, some_pairs(), form=""), 1e-6)
    before = counters["stats"]["unique_graphs"]
    assert before > 0
    for pairs in (some_pairs(seed=1, count=15), some_pairs(seed=2, count=3)):
        same(
            passed(model, pairs, budget=24, **graphs),
            passed(model, pairs, form="", budget=24),
            1e-6,
        )
    assert counters["stats"]["unique_graphs"] == before


def test_modules_names_and_copies_do_not_see_it(flash):
    model = tiny_model(37, hidden=32, layers=2, heads=4).eval()
    names, modules = list(model.state_dict()), [type(m) for m in model.modules()]
    twin = rollout_twin(model)
    with packed_attention(model), compiled_layers(model, backend="aot_eager"):
        assert all("forward" in vars(layer) for layer in model.model.layers)
        assert not any("forward" in vars(module) for module in twin.modules())
        assert list(model.state_dict()) == names
        assert [type(m) for m in model.modules()] == modules
    passed(model, some_pairs(), form="whole", backend="eager")
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 1
    copied = copy.deepcopy(model)
    for either in (model, copied, twin):
        assert not any("forward" in vars(module) for module in either.modules())
    copied(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)
    assert counters["stats"]["unique_graphs"] == graphs


def test_it_ends_with_an_error_as_well_and_spares_a_forward_of_others():
    model = tiny_model(37, hidden=32, layers=2, heads=4)
    model.model.layers[1].forward = own = functools.partial(
        type(model.model.layers[1]).forward, model.model.layers[1]
    )
    with pytest.raises(ZeroDivisionError), compiled_layers(model, backend="aot_eager"):
        assert model.model.layers[1].forward is own
        assert "forward" in vars(model.model.layers[0])
        raise ZeroDivisionError
    assert "forward" not in vars(model.model.layers[0])
    assert model.model.layers[1].forward is own


@pytest.mark.slow
def test_adapters_are_compiled_like_any_layer(flash):
    """The first layer's input asks for no gradient, so it is a graph of its own."""
    pytest.importorskip("peft")
    model = small("llama", torch.float32)
    add_lora(model, Lora(rank=2), "base")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if p.requires_grad else 0.0)
    want = passed(model, some_pairs(), form="")
    assert want[1] and all("lora" in name for name in want[1])
    graphs = {"form": "whole", "backend": "eager"}
    same(passed(model, some_pairs(), **graphs), want, 1e-4)
    same(
        passed(model, some_pairs(seed=1), **graphs),
        passed(model, some_pairs(seed=1), form=""),
        1e-4,
    )
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_no_graph_holds_on_to_a_model(flash):
    model = tiny_model(37, hidden=32, layers=2, heads=4).eval()
    passed(model, some_pairs(), form="whole", backend="eager")
    gone = torch._C._WeakTensorRef(model.model.layers[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert gone.expired()


@pytest.mark.parametrize("changes", [{}, {"softcap": 1.5, "scale": 0.7}])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_heads_chunks_are_what_autograd_says(changes, entropy_grad):
    """Log-prob, entropy and their gradient in the matrix product, in fp64, a temperature a token."""
    g = torch.Generator().manual_seed(1)
    product = torch.randn(11, 23, generator=g, dtype=torch.float64).requires_grad_()
    targets, heat = (
        torch.randint(23, (11,), generator=g),
        torch.rand(11, generator=g, dtype=torch.float64) + 0.5,
    )
    head = Head(torch.empty(23, 1), **changes)
    log_p = head.finish(product, heat).log_softmax(-1)
    want = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ways = [torch.randn(11, generator=g, dtype=torch.float64) for _ in range(2)]
    loss = (want[0] * ways[0]).sum() + ((want[1] * ways[1]).sum() if entropy_grad else 0.0)
    (slope,) = torch.autograd.grad(loss, product)
    with torch.no_grad():
        lp, entropy, log_sum = score_chunk(product, targets, heat, head.scale, head.softcap)
        known = ways[0], ways[1] if entropy_grad else None, entropy, log_sum
        got = gradient_chunk(product, targets, heat, head.scale, head.softcap, *known)
    torch.testing.assert_close((lp, entropy), want)
    torch.testing.assert_close(got, slope)


def test_a_compiled_head_equals_the_plain_one(monkeypatch):
    """Over several chunks and a rest; a second length and a second temperature are no second graph."""
    monkeypatch.setattr(
        "whet.fast.compiled._compile_chunk",
        functools.cache(functools.partial(torch.compile, dynamic=True, backend="aot_eager")),
    )
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    head = Head(draw(23, 6).requires_grad_(), draw(23).requires_grad_())
    for tokens, heat in ((50, 0.7), (31, 1.0)):
        hidden, targets, way = (
            draw(tokens, 6).requires_grad_(),
            torch.randint(23, (tokens,), generator=g),
            draw(tokens),
        )
        results = []
        for compiled in (False, True):
            compute = compiled_log_probs if compiled else log_probs
            lp, entropy = compute(hidden, head, targets, heat, chunk=23 * 8)
            assert not entropy.requires_grad
            slopes = torch.autograd.grad((lp * way).sum(), [hidden, head.weight, head.bias])
            results.append((lp.detach(), entropy, *slopes))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert counters["stats"]["unique_graphs"] == 2


def test_why_not_is_silent_about_a_model_that_works_and_names_what_does_not(monkeypatch, flash):
    monkeypatch.setattr("whet.fast.compiled._compile_chunk", lambda function: function)
    model = small("llama", torch.float32)
    assert why_not(model, tokens=64, backend="eager") == ""
    assert all(p.grad is None for p in model.parameters())
    assert counters["stats"]["unique_graphs"] == 1
    assert best_form(model, tokens=64, backend="eager") == ("whole", "")
    assert "no_such_backend" in why_not(model, tokens=64, backend="no_such_backend")
    monkeypatch.setattr(
        "whet.fast.compiled._compile_chunk", lambda f: f if f is gradient_chunk else wrong
    )
    assert "log-probs are off" in why_not(model, tokens=64, backend="eager")


def wrong(*given):
    return tuple(1.1 * x for x in score_chunk(*given))


@pytest.mark.slow
def test_the_attention_of_a_split_layer_is_in_no_graph(flash):
    """As many graphs for every pack, and the plain operator between them."""
    model, seen = small("qwen2", torch.float64), []

    def compiler(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    for seed in (0, 1, 2):
        pairs = some_pairs(seed, count=5 + 3 * seed)
        same(passed(model, pairs, form="split", backend=compiler), passed(model, pairs, form=""))
        graphs = counters["stats"]["unique_graphs"] if not seed else graphs  # noqa: F821
    assert counters["stats"]["unique_graphs"] == graphs
    assert any("linear" in target for target in seen)
    assert not any("varlen" in target for target in seen)
    assert model.config._attn_implementation == "sdpa"
    passed(model, some_pairs(), form="whole", backend=compiler)
    assert any("varlen" in target for target in seen)


def test_where_a_gradient_is_not_finite_is_said_from_the_top():
    fine, bad = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert not_finite({}) == not_finite({"a": fine}) == ""
    assert not_finite({"a": fine, "b": bad, "c": fine}) == "b"
    assert not_finite({"a": bad, "b": bad / bad * torch.inf, "c": fine}) == "b (2 of 3 parameters)"


def nan_with(operator):
    """A compiler whose graphs are right, but for the gradient of those that hold an operator of this name."""

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.nan

    def compiler(graph, inputs):
        spoiled = any(operator in str(node.target) for node in graph.graph.nodes)

        def run(*args):
            out = graph.forward(*args)
            real = [isinstance(x, torch.Tensor) and x.requires_grad for x in out]
            return tuple(
                Spoil.apply(x) if r and spoiled else x for x, r in zip(out, real, strict=True)
            )

        return run

    return compiler


@pytest.mark.slow
def test_the_first_form_with_a_sound_gradient_is_taken(monkeypatch, flash):
    """Forward passes agree in all of these; only the gradient tells."""
    monkeypatch.setattr("whet.fast.compiled._compile_chunk", lambda function: function)
    model = small("llama", torch.float32)
    form, reason = best_form(model, tokens=64, backend=nan_with("varlen"))
    assert form == "split"
    assert reason.startswith(
        "whole layers: its gradient of 108 tokens is not finite in model.layers.1."
    )
    form, reason = best_form(model, tokens=64, backend="no_such_backend")
    assert form == "head"
    assert all(f"{FORMS[name]}: InvalidBackend" in reason for name in ("whole", "split"))
    nan = lambda f: (lambda *given: f(*given) * torch.nan) if f is gradient_chunk else f  # noqa: E731
    monkeypatch.setattr("whet.fast.compiled._compile_chunk", nan)
    form, reason = best_form(model, tokens=64, backend="no_such_backend")
    assert form == ""
    assert (
        "the head alone: its gradient of 108 tokens is not finite in lm_head.weight (21 of 21 parameters)"
        in reason
    )


def test_a_plain_gradient_that_is_not_finite_is_not_laid_to_the_compiler(flash):
    model = small("llama", torch.float32)
    up = model.model.layers[0].mlp.up_proj
    up.weight.register_hook(lambda grad: grad * torch.nan)
    form, reason = best_form(model, tokens=64, backend="no_such_backend")
    assert form == ""
    assert "the plain gradient is not finite in model.layers.0.mlp.up_proj.weight" in reason
    assert "no_such_backend" not in reason


@pytest.mark.slow
def test_the_trial_leaves_out_the_padding_token_whose_embedding_is_zero():
    """Through 14 norms of a zero vector a slope grows beyond float32: no fault of the model or the compiler."""
    model = tiny_model(64, hidden=16, layers=14, heads=2, kv_heads=1)
    table = model.get_input_embeddings()
    table.weight.data[7] = 0
    table.padding_idx = None
    assert 7 in _trial(model, 256).input_ids
    table.padding_idx = 7
    assert 7 not in _trial(model, 256).input_ids
    assert why_not(model, tokens=64, form="head", backend="eager") == ""


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_compiles_on_a_gpu(family, form):
    assert (
        why_not(small(family, torch.bfloat16, noise=0.05).to("cuda"), tokens=512, form=form) == ""
    )


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_graph_for_all_layers_on_a_gpu(checkpoint):
    model = (
        tiny_model(64, hidden=64, layers=4, heads=4, kv_heads=2).to("cuda", torch.bfloat16).eval()
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    results = {}
    for compiled in (False, True):
        with (
            packed_attention(model, checkpoint),
            compiled_layers(model, "whole" if compiled else ""),
        ):
            for seed, count in ((0, 7), (1, 12), (2, 1)):
                (pack,) = make_packs(some_pairs(seed, count), 1000, "cuda")
                compute = compiled_log_probs if compiled else log_probs
                lp, _ = compute(hidden_states(model, pack), head_of(model), pack.targets)
                slopes = torch.autograd.grad(lp.sum(), list(model.parameters()))
                results[compiled, seed] = (
                    lp.detach(),
                    torch.cat([s.flatten().float() for s in slopes]),
                )
    for seed in (0, 1, 2):
        (lp, slope), (plain_lp, plain) = results[True, seed], results[False, seed]
        assert float((lp - plain_lp).abs().max()) < 0.1
        assert float((slope - plain).norm() / plain.norm()) < 0.05
    assert counters["stats"]["unique_graphs"] == 3  # the layers', the head's forward and backward
    assert not counters["graph_break"]
