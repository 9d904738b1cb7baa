"""Padded, static passes against plain ones: the same log-probs and gradients, and nothing of one pass in the next."""

import functools
import itertools

import pytest
import torch
from families import small, some_pairs
from hypothesis import given
from hypothesis import strategies as st
from test_compiled import flash_backward, flash_forward
from torch._dynamo.utils import counters

from whet.config import Lora
from whet.fast import graphed as module
from whet.fast.compiled import compiled_layers
from whet.fast.graphed import Buffers, Graphed, Size, host_bound, size_of, worth_graphs
from whet.model import packing
from whet.model import packing as packed
from whet.model.head import head_of, log_probs
from whet.model.load import tiny_model
from whet.model.lora import add_lora
from whet.model.packing import hidden_states, make_packs, packed_attention

BUDGET = 160
PACKS = ((0, 7), (0, 7), (1, 12), (1, 12), (2, 7), (3, 12), (4, 9), (0, 7))
"""(seed, sequences): three sizes under BUDGET, each at least twice and in turn."""

# torch's compiler looks there
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


def pack_of(seed, count, device="cpu"):
    (pack,) = make_packs(some_pairs(seed, count), 1000, device)
    return pack


def shared_pack_of(seed, count, device="cpu"):
    """Every prompt has three responses."""
    pairs = some_pairs(seed, 3 * count)
    (pack,) = make_packs(
        [(pairs[i // 3][0], response) for i, (_, response) in enumerate(pairs)], 1000, device, True
    )
    assert pack.boundaries.keys is not None
    return pack


def passed(model, hidden, pack):
    """Log-probs and the gradient of a nonlinear loss."""
    model.zero_grad(set_to_none=True)
    with packed_attention(model):
        lp, _ = log_probs(hidden(pack), head_of(model), pack.targets)
        lp.exp().sum().backward()
    return lp.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same(got, want, tolerance=1e-12):
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for name in want[1]:
        torch.testing.assert_close(got[1][name], want[1][name], rtol=tolerance, atol=tolerance)


def plain(model):
    return functools.partial(hidden_states, model)


def ready(model, *packs, budget=BUDGET):
    """With the sizes of these packs ready: they come a second time."""
    graphed = Graphed(model, budget)
    with packed_attention(model):
        for pack in packs * 2:
            graphed(pack)
    assert graphed.ready
    return graphed


def test_prompts_that_are_shared():
    """With packs that share none in between, in the same sizes and others."""
    model = small("llama")
    graphed = Graphed(model, 400)
    for seed in (0, 0, 1, 2, 0, 1):
        for pack in (shared_pack_of(seed, 4 + seed), pack_of(seed, 7)):
            same(passed(model, graphed, pack), passed(model, plain(model), pack))
    assert {bool(size.keys) for size in graphed.ready} == {False, True}


# Sizes


def test_sizes_by_hand():
    assert size_of(15000, 20, 1000, 16384) == Size(16384, 256, 1024)
    assert size_of(4096, 256, 128, 16384) == Size(4096, 256, 512)
    assert size_of(4097, 240, 129, 16384) == Size(6144, 256, 512), (
        "2,047 tokens of padding: 16 sequences more"
    )
    assert size_of(4097, 241, 129, 16384) == Size(6144, 512, 512)
    assert size_of(100, 1, 100, 16384) == Size(2048, 256, 512)
    assert size_of(8000, 128, 200, 16384, keys=24384).keys == 3 * 8192, (
        "192 of padding are keys, too"
    )
    assert size_of(8000, 128, 200, 16384, keys=24385).keys == 6 * 8192
    assert size_of(16385, 1, 16385, 16384) is None


@given(st.integers(16, 5000), st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_a_size_holds_its_pack(budget, lengths):
    tokens = sum(lengths)
    size = size_of(tokens, len(lengths), max(lengths), budget)
    if tokens > budget:
        assert size is None
        return
    assert tokens <= size.tokens < max(budget / 8, 1.5 * tokens) + 1
    assert size.tokens < tokens + budget / 4 + 1
    assert size.longest >= max(lengths)
    assert len(lengths) + -(-(size.tokens - tokens) // max(lengths)) <= size.sequences


@pytest.mark.parametrize("budget", [70, BUDGET, 1000])
def test_every_token_of_the_buffers_is_in_a_sequence(budget):
    for seed, count in PACKS:
        pack = pack_of(seed, count)
        tokens, n, longest = pack.input_ids.numel(), len(pack.members), pack.boundaries.longest
        size = size_of(tokens, n, longest, max(budget, tokens))
        buffers = Buffers(size, (4, torch.float32), torch.device("cpu"))
        for _ in range(2):  # what was there before leaves nothing
            buffers.fill(pack)
            starts = buffers.starts.tolist()
            assert starts[: n + 1] == pack.boundaries.starts.tolist()
            assert starts[-1] == size.tokens and starts == sorted(starts)
            assert max(b - a for a, b in itertools.pairwise(starts)) <= longest <= size.longest
            want = [i for a, b in itertools.pairwise(starts) for i in range(b - a)]
            assert buffers.position[0].tolist() == want
            assert buffers.ids[0, :tokens].tolist() == pack.input_ids[0].tolist()
            assert (
                sum(bucket.rows.numel() for bucket in buffers.boundaries.padding.buckets)
                == size.tokens
            )
            buffers.ids.fill_(-1)
            buffers.starts.fill_(-1)


def test_small_models_are_host_bound():
    assert host_bound(135_000_000, 30, 16384)
    assert host_bound(1_540_000_000, 28, 2048)
    assert not host_bound(1_540_000_000, 28, 16384)
    assert worth_graphs(small("llama"), 4096)
    assert not worth_graphs(small("qwen3"), 4096), "heads of 12: not the flash kernel either"
    assert not worth_graphs(small("gemma2"), 4096), "soft-capped: not the flash kernel"
    assert not worth_graphs(small("llama"), 2**50)


# Equality


@pytest.mark.wide
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
def test_log_probs_and_gradients_are_the_plain_ones(family, tied):
    """Packs one after the other, of one size and of others; Mistral has a sliding window, Gemma a soft-cap."""
    model = small(family, tied=tied)
    graphed = Graphed(model, BUDGET)
    for seed, count in PACKS:
        pack = pack_of(seed, count)
        same(passed(model, graphed, pack), passed(model, plain(model), pack))
    assert 1 < len(graphed.ready) < len(PACKS)


def test_single_precision_too():
    model = small("llama", torch.float32)
    graphed = ready(model, pack_of(0, 7))
    for seed in (0, 2):
        pack = pack_of(seed, 7)
        same(passed(model, graphed, pack), passed(model, plain(model), pack), 2e-5)


def test_adapters_alone_get_a_gradient():
    pytest.importorskip("peft")
    model = small("llama")
    add_lora(model, Lora(rank=2), "base")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if p.requires_grad else 0.0)
    graphed = Graphed(model, BUDGET)
    for seed, count in PACKS:
        pack = pack_of(seed, count)
        got = passed(model, graphed, pack)
        same(got, passed(model, plain(model), pack), 1e-6)  # peft computes in float32
        assert got[1] and all("lora" in name for name in got[1])
    assert graphed.ready


@pytest.fixture
def flash(monkeypatch):
    """torch's operator for packed attention over a CPU's kernels. Where no sequence lies they leave NaN; the longest
    that they are given may be longer than any."""

    def forward(q, k, v, starts, ends, longest, *rest, **named):
        exact = int(ends.diff().max())
        assert longest >= exact
        out, *others = flash_forward(q, k, v, starts, ends, exact, exact, *rest[1:], **named)
        out[int(starts[-1]) :] = torch.nan
        return out, *others

    def backward(grad, q, k, v, out, log_sum, starts, ends, longest, *rest, **named):
        exact = int(ends.diff().max())
        return flash_backward(
            grad, q, k, v, out, log_sum, starts, ends, exact, exact, *rest[1:], **named
        )

    monkeypatch.setattr(packing, "has_flash", lambda device: True)
    monkeypatch.setattr(packed, "can_varlen", lambda q, v, softcap: True)
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_flash_attention_forward", forward, "CPU")
        kernels.impl("_flash_attention_backward", backward, "CPU")
        yield


@pytest.mark.slow
def test_through_the_flash_kernel_and_compiled_there_is_one_graph(flash):
    """Neither a padded pack nor the stand-ins for the weights are anything new to the compiler. What it sees first has
    no two sizes that are equal by chance: it would take them for one."""
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model(37, hidden=32, layers=2, heads=4, kv_heads=2, dtype=torch.float64).eval()
    graphed = Graphed(model, BUDGET)
    for seed, count in ((5, 5), *PACKS):
        pack = pack_of(seed, count)
        want = passed(model, plain(model), pack)
        with compiled_layers(model, "whole", "aot_eager"):
            same(passed(model, graphed, pack), want, 1e-9)
    assert graphed.ready
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_shared_prompts_through_the_flash_kernel(flash):
    """Keys that no sequence has get no number from it, and no token may hear of that."""
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model(37, hidden=32, layers=2, heads=4, kv_heads=2, dtype=torch.float64).eval()
    graphed = Graphed(model, 400)
    for seed, count in ((5, 5), (0, 7), (0, 7), (1, 8), (1, 8), (5, 5)):
        pack = shared_pack_of(seed, count)
        want = passed(model, plain(model), pack)
        with compiled_layers(model, "whole", "aot_eager"):
            same(passed(model, graphed, pack), want, 1e-9)
    assert any(size.keys for size in graphed.ready)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()


# One pass after the other


def test_weights_updated_in_place_are_followed():
    model, pack = small("llama"), pack_of(0, 7)
    graphed = ready(model, pack)
    before = passed(model, graphed, pack)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    kept = dict(graphed.ready)
    after = passed(model, graphed, pack)
    same(after, passed(model, plain(model), pack))
    assert graphed.ready == kept, "nothing had to be made anew"
    assert not torch.allclose(before[0], after[0])


def test_weights_that_moved_are_found():
    model, pack = small("llama"), pack_of(0, 7)
    graphed = ready(model, pack)
    old = graphed.ready[next(iter(graphed.ready))]
    for p in model.parameters():
        p.data = p.data * 1.1
    same(passed(model, graphed, pack), passed(model, plain(model), pack))
    (new,) = graphed.ready.values()
    assert new is not old


def test_gradients_add_up_and_belong_to_the_caller():
    model, packs = small("llama"), [pack_of(0, 7), pack_of(2, 7)]
    graphed = ready(model, *packs)
    one, other = (passed(model, graphed, pack)[1] for pack in packs)
    kept = {name: slope.clone() for name, slope in one.items()}
    passed(model, graphed, packs[1])
    assert all(torch.equal(one[name], kept[name]) for name in kept), (
        "a later pass wrote over a gradient"
    )
    model.zero_grad(set_to_none=True)
    with packed_attention(model):
        for pack in packs:
            lp, _ = log_probs(graphed(pack), head_of(model), pack.targets)
            lp.exp().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, one[name] + other[name])


def test_a_backward_pass_too_late_is_refused():
    model, pack, other = small("llama"), pack_of(0, 7), pack_of(2, 7)
    graphed = ready(model, pack)
    with packed_attention(model):
        first = graphed(pack)
        kept, second = first.detach().clone(), graphed(other)
        assert torch.equal(first, kept), "what was handed out stays"
        with pytest.raises(RuntimeError, match="before its backward pass"):
            first.sum().backward()
        hidden_states(model, pack)  # the plain way disturbs nothing
        second.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="before its backward pass"):
            second.sum().backward()


def test_a_weight_without_use_gets_no_gradient():
    model, pack = small("llama"), pack_of(0, 7)
    model.model.spare = torch.nn.Linear(2, 2, dtype=torch.float64)
    graphed = ready(model, pack)
    same(passed(model, graphed, pack), passed(model, plain(model), pack))
    assert model.model.spare.weight.grad is None


def test_the_model_keeps_its_parameters():
    model, pack = small("llama", tied=True), pack_of(0, 7)
    before = dict(model.named_parameters(remove_duplicate=False))
    graphed = ready(model, pack)
    passed(model, graphed, pack)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


# The plain way


def test_a_size_that_comes_once_or_too_late_takes_the_plain_way(monkeypatch):
    monkeypatch.setattr(module, "MOST", 1)
    model = small("llama")
    graphed = Graphed(model, BUDGET)
    for seed, count in PACKS:
        pack = pack_of(seed, count)
        same(passed(model, graphed, pack), passed(model, plain(model), pack))
        assert len(graphed.ready) == (graphed._seen.most_common(1)[0][1] > 1)


def test_a_sequence_beyond_the_budget_and_a_pass_without_gradient_take_the_plain_way():
    model, pack = small("llama"), pack_of(0, 7)
    short = Graphed(model, pack.input_ids.numel() - 1)
    graphed = Graphed(model, BUDGET)
    for _ in range(3):
        same(passed(model, short, pack), passed(model, plain(model), pack))
        with packed_attention(model), torch.no_grad():
            assert torch.equal(graphed(pack), hidden_states(model, pack))
    assert not short.ready and not graphed.ready


def test_what_cannot_be_captured_costs_only_speed():
    """Here a network that fails on padded packs."""
    model, pack = small("llama"), pack_of(0, 7)

    def fail(layer, args):
        if args[0].numel() != pack.input_ids.numel():
            raise RuntimeError("not so many\ntokens")

    model.model.embed_tokens.register_forward_pre_hook(fail)
    before = dict(model.named_parameters())
    graphed = Graphed(model, BUDGET)
    want = passed(model, plain(model), pack)
    same(passed(model, graphed, pack), want)
    with pytest.warns(
        UserWarning, match="without CUDA graphs, more slowly: RuntimeError: not so many$"
    ):
        same(passed(model, graphed, pack), want)
    same(passed(model, graphed, pack), want)  # said once
    assert not graphed.ready and graphed.stopped
    assert all(p is before[name] for name, p in model.named_parameters())


# On a GPU


def on_gpu(model, hidden, pack, form):
    with compiled_layers(model, form):
        lp, slopes = passed(model, hidden, pack)
    return lp, torch.cat([slope.flatten().float() for slope in slopes.values()])


def near(got, want, bound):
    assert float((got[0] - want[0]).abs().max()) < 0.1
    assert float((got[1] - want[1]).norm() / want[1].norm()) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["", "whole", "split"])
@pytest.mark.parametrize(
    ("tied", "make"), [(False, pack_of), (True, pack_of), (True, shared_pack_of)]
)
def test_graphs_give_the_plain_gradient(tied, make, form):
    """Several packs in turn, weights updated in between; an earlier pass over the weights is still held."""
    torch._dynamo.reset()
    model = small("llama", torch.bfloat16, tied=tied, noise=0.05).to("cuda")
    with packed_attention(model):
        held = hidden_states(model, pack_of(5, 3, "cuda"))
    graphed = Graphed(model, 3 * BUDGET)
    for seed, count in PACKS:
        pack = make(seed, count, "cuda")
        near(on_gpu(model, graphed, pack, form), on_gpu(model, plain(model), pack, ""), 0.05)
        with torch.no_grad(), packed_attention(model):
            with compiled_layers(model, form):
                read = graphed.read(pack)
            torch.testing.assert_close(read, hidden_states(model, pack), rtol=0.02, atol=0.1)
            for p in model.parameters():
                p.mul_(1.02)
    assert not graphed.stopped and graphed.bytes > 0
    assert all(buffers.graphs for buffers in graphed.ready.values())
    assert len(graphed.ready) > 1 and held.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "phi"])
def test_graphs_of_other_families(family):
    torch._dynamo.reset()
    model = small(family, torch.bfloat16, noise=0.05).to("cuda")
    assert worth_graphs(model, BUDGET)
    graphed = Graphed(model, BUDGET)
    for seed, count in PACKS:
        pack = pack_of(seed, count, "cuda")
        near(on_gpu(model, graphed, pack, "whole"), on_gpu(model, plain(model), pack, ""), 0.25)
    assert not graphed.stopped and graphed.ready


@pytest.mark.gpu
def test_a_network_that_waits_for_the_device_is_found_before_a_capture():
    model, pack = small("qwen2", torch.bfloat16, noise=0.05).to("cuda"), pack_of(0, 7, "cuda")
    model.model.embed_tokens.register_forward_hook(
        lambda layer, args, out: out * float(out.isfinite().all())
    )
    graphed = Graphed(model, BUDGET)
    want = on_gpu(model, plain(model), pack, "")
    near(on_gpu(model, graphed, pack, ""), want, 0.05)
    with pytest.warns(
        UserWarning, match="without CUDA graphs, more slowly: RuntimeError: called a synchronizing"
    ):
        near(on_gpu(model, graphed, pack, ""), want, 0.05)
    near(on_gpu(model, graphed, pack, ""), want, 0.05)


@pytest.mark.gpu
def test_no_more_than_so_many_sizes_are_captured_and_stopping_frees_them(monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    model = small("qwen2", torch.bfloat16, noise=0.05).to("cuda")
    graphed = Graphed(model, 400)
    for count in (3, 12, 24, 36):
        for seed in (0, 0, 1):
            pack = pack_of(seed, count, "cuda")
            near(on_gpu(model, graphed, pack, ""), on_gpu(model, plain(model), pack, ""), 0.05)
    assert len(graphed.ready) == 2
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    with pytest.warns(UserWarning, match="because"):
        graphed.stop("because")
    assert torch.cuda.memory_reserved() < held
    near(on_gpu(model, graphed, pack, ""), on_gpu(model, plain(model), pack, ""), 0.05)


# Without a gradient


def test_reading_takes_the_graph_of_a_pass_that_has_one():
    model = small("llama").double()
    known, unknown = pack_of(0, 7), pack_of(1, 12)
    graphed = ready(model, known)
    with packed_attention(model):
        for pack in (known, unknown, known):
            got = graphed.read(pack)
            assert not got.requires_grad
            torch.testing.assert_close(
                got, hidden_states(model, pack).detach(), rtol=1e-12, atol=1e-12
            )
    assert len(graphed.ready) == 1, "reading makes nothing ready"


def test_reading_between_the_passes_of_another_pack_is_refused():
    model = small("llama").double()
    pack = pack_of(0, 7)
    graphed = ready(model, pack)
    with packed_attention(model):
        hidden = graphed(pack)
        graphed.read(pack)
        with pytest.raises(RuntimeError, match="Another forward pass"):
            hidden.sum().backward()
