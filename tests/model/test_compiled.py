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
from whet.model import packing
from whet.model.compiled import compiled_layers, why_not
from whet.model.head import Head, gradient_chunk, head_of, log_probs, score_chunk
from whet.model.lora import add_lora
from whet.model.packing import hidden_states, make_packs, packed_attention
from whet.model.tiny import tiny_model
from whet.model.twin import rollout_twin

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks there


@pytest.fixture(autouse=True)
def _forget_graphs():
    """Compiled code is kept by class, for all models of a process."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@torch.library.custom_op("whet_test::varlen", mutates_args=())
def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> torch.Tensor:
    """Stands where the flash kernel stands on a GPU, with its arguments: a mean over the sequence so far."""
    assert longest == int(starts.diff().max())
    ends = starts.tolist()
    spans = [v[a:b].cumsum(0) / torch.arange(1, b - a + 1)[:, None, None] for a, b in itertools.pairwise(ends)]
    return q + torch.cat(spans).repeat_interleave(q.shape[1] // v.shape[1], 1)


@varlen.register_fake
def _(q, k, v, starts, longest):
    return torch.empty_like(q)


varlen.register_autograd(lambda ctx, grad: (grad.clone(), None, None, None, None))


@pytest.fixture
def flash(monkeypatch):
    """The path of a GPU: attention is one operator that takes the pack's sizes."""
    monkeypatch.setattr(packing, "_has_flash", lambda device: True)
    monkeypatch.setattr(packing, "_can_varlen", lambda q, v, softcap: True)
    monkeypatch.setattr(
        packing, "_varlen", lambda q, k, v, packed, *rest: varlen(q, k, v, packed.starts, packed.longest)
    )


def passed(model, pairs, *, compiled, budget=1000, checkpoint=False, backend="aot_eager"):
    """Log-probs and the gradient of a nonlinear loss."""
    model.zero_grad(set_to_none=True)
    out = []
    with packed_attention(model, checkpoint), compiled_layers(model, compiled, backend):
        for pack in make_packs(pairs, budget):
            lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets)
            lp.exp().sum().backward()
            out.append(lp.detach())
    return torch.cat(out), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(got, want, tolerance=1e-9):
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for name in want[1]:
        torch.testing.assert_close(got[1][name], want[1][name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_graph_serves_all_layers_and_every_pack(flash, checkpoint):
    """The first pack is a single sequence, so that its longest is its length: no later pack may be held to that."""
    model = tiny_model(37, hidden=32, layers=4, heads=4, kv_heads=2, dtype=torch.float64)
    model.eval().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for pairs in ([([2] * 5, [3] * 30)], some_pairs(), some_pairs(seed=1, count=12), [([2] * 5, [3] * 9)]):
        want = passed(model, pairs, compiled=False, checkpoint=checkpoint)
        same(passed(model, pairs, compiled=True, checkpoint=checkpoint), want)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_with_attention_outside_the_number_of_graphs_does_not_grow_with_packs():
    """The reference attention, which loops over buckets, is not compiled."""
    model, compiled = small("qwen2"), {"compiled": True, "backend": "eager"}
    same(passed(model, some_pairs(), **compiled), passed(model, some_pairs(), compiled=False), 1e-6)
    before = counters["stats"]["unique_graphs"]
    assert before > 0
    for pairs in (some_pairs(seed=1, count=15), some_pairs(seed=2, count=3)):
        same(passed(model, pairs, budget=24, **compiled), passed(model, pairs, compiled=False, budget=24), 1e-6)
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
    passed(model, some_pairs(), compiled=True, backend="eager")
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 1
    copied = copy.deepcopy(model)
    for either in (model, copied, twin):
        assert not any("forward" in vars(module) for module in either.modules())
    copied(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)
    assert counters["stats"]["unique_graphs"] == graphs


def test_it_ends_with_an_error_as_well_and_spares_a_forward_of_others():
    model = tiny_model(37, hidden=32, layers=2, heads=4)
    model.model.layers[1].forward = own = functools.partial(type(model.model.layers[1]).forward, model.model.layers[1])
    with pytest.raises(ZeroDivisionError), compiled_layers(model, backend="aot_eager"):
        assert model.model.layers[1].forward is own
        assert "forward" in vars(model.model.layers[0])
        raise ZeroDivisionError
    assert "forward" not in vars(model.model.layers[0])
    assert model.model.layers[1].forward is own


def test_adapters_are_compiled_like_any_layer(flash):
    """The first layer's input asks for no gradient, so it is a graph of its own."""
    pytest.importorskip("peft")
    model = small("llama", torch.float32)
    add_lora(model, Lora(rank=2), "base")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if p.requires_grad else 0.0)
    want = passed(model, some_pairs(), compiled=False)
    assert want[1] and all("lora" in name for name in want[1])
    compiled = {"compiled": True, "backend": "eager"}
    same(passed(model, some_pairs(), **compiled), want, 1e-4)
    same(passed(model, some_pairs(seed=1), **compiled), passed(model, some_pairs(seed=1), compiled=False), 1e-4)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_no_graph_holds_on_to_a_model(flash):
    model = tiny_model(37, hidden=32, layers=2, heads=4).eval()
    passed(model, some_pairs(), compiled=True, backend="eager")
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
    targets, heat = torch.randint(23, (11,), generator=g), torch.rand(11, generator=g, dtype=torch.float64) + 0.5
    head = Head(torch.empty(23, 1), **changes)
    log_p = head.finish(product, heat).log_softmax(-1)
    want = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ways = [torch.randn(11, generator=g, dtype=torch.float64) for _ in range(2)]
    loss = (want[0] * ways[0]).sum() + ((want[1] * ways[1]).sum() if entropy_grad else 0.0)
    (slope,) = torch.autograd.grad(loss, product)
    with torch.no_grad():
        lp, entropy, log_sum = score_chunk(product, targets, heat, head.scale, head.softcap)
        known = targets, heat, log_sum, entropy, ways[0], ways[1] if entropy_grad else None
        got = gradient_chunk(product, *known, head.scale, head.softcap)
    torch.testing.assert_close((lp, entropy), want)
    torch.testing.assert_close(got, slope)


def test_a_compiled_head_equals_the_plain_one(monkeypatch):
    """Over several chunks and a rest; a second length and a second temperature are no second graph."""
    monkeypatch.setattr(
        "whet.model.head._compile", functools.cache(functools.partial(torch.compile, dynamic=True, backend="aot_eager"))
    )
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    head = Head(draw(23, 6).requires_grad_(), draw(23).requires_grad_())
    for tokens, heat in ((50, 0.7), (31, 1.0)):
        hidden, targets, way = draw(tokens, 6).requires_grad_(), torch.randint(23, (tokens,), generator=g), draw(tokens)
        results = []
        for compiled in (False, True):
            lp, entropy = log_probs(hidden, head, targets, heat, chunk=23 * 8, compiled=compiled)
            assert not entropy.requires_grad
            slopes = torch.autograd.grad((lp * way).sum(), [hidden, head.weight, head.bias])
            results.append((lp.detach(), entropy, *slopes))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert counters["stats"]["unique_graphs"] == 2


def test_why_not_is_silent_about_a_model_that_works_and_names_what_does_not(monkeypatch, flash):
    monkeypatch.setattr("whet.model.head._compile", lambda function: function)
    model = small("llama", torch.float32)
    assert why_not(model, tokens=64, backend="eager") == ""
    assert all(p.grad is None for p in model.parameters())
    assert counters["stats"]["unique_graphs"] == 1
    assert "no_such_backend" in why_not(model, tokens=64, backend="no_such_backend")
    monkeypatch.setattr("whet.model.head._compile", lambda f: f if f is gradient_chunk else wrong)
    assert "log-probs are off" in why_not(model, tokens=64, backend="eager")


def wrong(*given):
    return tuple(1.1 * x for x in score_chunk(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_compiles_on_a_gpu(family):
    assert why_not(small(family, torch.bfloat16, noise=0.05).to("cuda"), tokens=512) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_graph_for_all_layers_on_a_gpu(checkpoint):
    model = tiny_model(64, hidden=64, layers=4, heads=4, kv_heads=2).to("cuda", torch.bfloat16).eval()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    results = {}
    for compiled in (False, True):
        with packed_attention(model, checkpoint), compiled_layers(model, compiled):
            for seed, count in ((0, 7), (1, 12), (2, 1)):
                (pack,) = make_packs(some_pairs(seed, count), 1000, "cuda")
                lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets, compiled=compiled)
                slopes = torch.autograd.grad(lp.sum(), list(model.parameters()))
                results[compiled, seed] = lp.detach(), torch.cat([s.flatten().float() for s in slopes])
    for seed in (0, 1, 2):
        (lp, slope), (plain_lp, plain) = results[True, seed], results[False, seed]
        assert float((lp - plain_lp).abs().max()) < 0.1
        assert float((slope - plain).norm() / plain.norm()) < 0.05
    assert counters["stats"]["unique_graphs"] == 3  # the layers', the head's forward and backward
    assert not counters["graph_break"]
