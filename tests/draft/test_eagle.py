"""The EAGLE drafter: its layer, its cache, its draft vocabulary, and that it leaves the target alone."""

import copy

import numpy as np
import pytest
import torch
from drafted import VOCABULARY, attach_slots, hidden_of, numbers, qwen3_target, target
from kernel_env import device, needs_triton
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead, draft_vocabulary, eagle_head, named_weights, undraftable
from whet.draft.training import pair_up
from whet.errors import WhetError
from whet.fast.fused import KERNELS


def recomputed(head: EagleHead, hidden: Tensor, ids: Tensor) -> Tensor:
    """Guesses for all pairs of one document, without a cache; ids are the next tokens."""
    buffer = DataBuffer(10_000)
    states = torch.cat((hidden, hidden[-1:]))  # the last answer is not looked at
    buffer.add(0, torch.cat((ids[:1], ids)), states)
    pairs = pair_up(buffer.sample(10_000, (0,)))
    assert pairs.ids.tolist() == ids.tolist()
    with torch.no_grad():
        return head(pairs.hidden, pairs.ids, pairs.position, pairs.packed)


def by_recomputing(head: EagleHead, hidden: Tensor, ids: Tensor, steps: int) -> list[int]:
    """The chain, with every feature computed again from the first pair on."""
    chain: list[int] = []
    for _ in range(steps):
        features = recomputed(head, hidden, ids)
        chain += head.choose(features[-1:]).tolist()
        hidden, ids = torch.cat((hidden, features[-1:])), torch.cat((ids, torch.tensor(chain[-1:])))
    return chain


def with_cache(head: EagleHead, context: int = 64, page: int = 8, rows: int = 3) -> Tensor:
    """Pages in a scattered order, and the table over them."""
    pages = rows * context // page
    size = (pages + 1, head.target.kv_heads, page, head.target.dim)
    head.attach(torch.randn(size, dtype=head.dtype), torch.randn(size, dtype=head.dtype), context)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    return order.view(rows, -1).to(torch.int32)


def extend(head: EagleHead, table: Tensor, new: list[tuple[int, Tensor, Tensor]]) -> Tensor:
    """`new`: for each row the pairs it has, hidden states and next tokens. The guess of each row's last pair."""
    sizes = [len(ids) for _, _, ids in new]
    starts = numbers([0, *torch.tensor(sizes).cumsum(0).tolist()])
    features = head.extend(
        torch.cat([hidden for _, hidden, _ in new]),
        torch.cat([ids for _, _, ids in new]).to(torch.int32),
        torch.cat(
            [numbers(range(had, had + size)) for (had, _, _), size in zip(new, sizes, strict=True)]
        ),
        numbers([row for row, size in enumerate(sizes) for _ in range(size)]),
        table[: len(new)],
        numbers([had + size for (had, _, _), size in zip(new, sizes, strict=True)]),
        starts,
        max(sizes),
    )
    return features[starts[1:].long() - 1]


def test_the_layer_is_a_llama_layer_without_its_first_norm() -> None:
    model = target()
    head = eagle_head(model, seed=3)
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).double()
    weights = {
        name.removeprefix("layers.0."): w
        for name, w in named_weights(head).items()
        if "layers.0" in name
    }
    missing = layer.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["input_layernorm.weight"] and not missing.unexpected_keys
    layer.input_layernorm = nn.Identity()

    ids = torch.randint(VOCABULARY, (11,), generator=torch.Generator().manual_seed(0))
    hidden = hidden_of(model, ids)[:-1]
    x = nn.functional.linear(
        torch.cat((model.get_input_embeddings()(ids[1:]), hidden), -1), head.fc
    )[None]
    mask = torch.full((10, 10), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    with torch.no_grad():
        angles = model.model.rotary_emb(x, torch.arange(10)[None])
        want = layer(x, attention_mask=mask, position_embeddings=angles)
    torch.testing.assert_close(recomputed(head, hidden, ids[1:]), want[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [target, qwen3_target])
def test_drafting_with_a_cache_is_drafting_by_recomputing(make) -> None:
    """Rows of other lengths, extended in two turns, then drafted from; after that accepted tokens overwrite."""
    model = make()
    head = eagle_head(model, dtype=torch.float64, seed=1)
    table = with_cache(head)
    random = torch.Generator().manual_seed(2)
    rows = [torch.randint(VOCABULARY, (n,), generator=random) for n in (12, 5, 21)]
    hidden = [hidden_of(model, ids)[:-1].double() for ids in rows]
    extend(head, table, [(0, h[:3], ids[1:4]) for h, ids in zip(hidden, rows, strict=True)])
    last = extend(head, table, [(3, h[3:], ids[4:]) for h, ids in zip(hidden, rows, strict=True)])
    position = numbers([len(h) for h in hidden])
    drafted = head.draft(last, position, numbers([0, 1, 2]), table, steps=5)
    assert drafted.dtype == torch.int32
    want = [by_recomputing(head, h, ids[1:], 5) for h, ids in zip(hidden, rows, strict=True)]
    assert drafted.tolist() == want and drafted.unique().numel() > 3
    whole = [recomputed(head, h, ids[1:])[-1] for h, ids in zip(hidden, rows, strict=True)]
    torch.testing.assert_close(last, torch.stack(whole), rtol=1e-6, atol=1e-9)

    # the target says otherwise: other tokens at the drafted places, of which one row takes all and one a single one
    taken = [4, 1, 2]
    more = [
        torch.cat((ids, torch.randint(VOCABULARY, (n,), generator=random)))
        for ids, n in zip(rows, taken, strict=True)
    ]
    states = [hidden_of(model, ids)[:-1].double() for ids in more]
    new = [
        (len(h), s[len(h) :], ids[len(h) + 1 :])
        for h, s, ids in zip(hidden, states, more, strict=True)
    ]
    last = extend(head, table, new)
    position = numbers([len(s) for s in states])
    drafted = head.draft(last, position, numbers([0, 1, 2]), table, steps=3)
    assert drafted.tolist() == [
        by_recomputing(head, s, ids[1:], 3) for s, ids in zip(states, more, strict=True)
    ]


def test_pairs_past_the_accepted_ones_leave_no_trace() -> None:
    """A graph extends over all verified places; what lies past the accepted ones is overwritten before it is read."""
    model = target()
    head = eagle_head(model, seed=1)
    table = with_cache(head)
    ids = torch.randint(VOCABULARY, (14,), generator=torch.Generator().manual_seed(3))
    hidden = hidden_of(model, ids)[:-1]
    rubbish = torch.full_like(hidden[:4], 9.0)
    extend(head, table, [(0, torch.cat((hidden[:6], rubbish)), torch.cat((ids[1:7], ids[:4])))])
    last = extend(head, table, [(6, hidden[6:], ids[7:])])
    drafted = head.draft(last, numbers([13]), numbers([0]), table[:1], steps=4)
    assert drafted[0].tolist() == by_recomputing(head, hidden, ids[1:], 4)


def test_padding_and_the_end_of_the_table_touch_no_page() -> None:
    head = eagle_head(target(), seed=1)
    table = with_cache(head, context=16)
    keys = head.keys.clone()
    feature = torch.randn(3, 32, dtype=torch.float64)
    head.draft(feature, numbers([0, 16, 14]), numbers([-1, 1, 2]), table, steps=6)
    changed = (head.keys != keys).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert set(changed) <= {int(table[2, 1]), len(keys) - 1} and int(table[2, 1]) in changed


def test_slots_serve_apart_from_an_engine() -> None:
    model = target()
    head = eagle_head(model, seed=1)
    attach_slots(head, 1, 32)
    ids = torch.arange(9) % VOCABULARY
    hidden = hidden_of(model, ids)[:-1]
    last = extend(head, numbers([[0]]), [(0, hidden, ids[1:])])
    drafted = head.draft(last, numbers([8]), numbers([0]), numbers([[0]]), 3)
    assert drafted[0].tolist() == by_recomputing(head, hidden, ids[1:], 3)


def test_only_its_own_weights_are_parameters_and_state() -> None:
    model = target()
    head = eagle_head(model)
    assert set(head.state_dict()) == {"fc", "qkv", "out", "norm", "gate_up", "down"}
    assert head.target.embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert head.draft_head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert not {p.data_ptr() for p in head.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }


def test_a_copy_has_its_own_weights_in_the_type_that_is_asked() -> None:
    head = eagle_head(target(torch.float32))
    same, wide = head.copy(), head.copy(torch.float64)
    assert (same.dtype, wide.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(wide.fc.float(), head.fc)
    assert not {p.data_ptr() for p in head.parameters()} & {p.data_ptr() for p in same.parameters()}


def test_a_reduced_vocabulary_proposes_its_own_ids_and_follows_the_target() -> None:
    model = target()
    ids = torch.tensor([2, 5, 11, 17])
    full, head = eagle_head(model), eagle_head(model, draft_ids=ids)
    features = torch.randn(40, 32, dtype=torch.float64)
    chosen = head.choose(features)
    assert set(chosen.tolist()) <= set(ids.tolist()) and chosen.unique().numel() > 1
    assert torch.equal(ids[full.logits(features)[:, ids].argmax(-1)], chosen.long())
    rows = head.draft_head.weight
    with torch.no_grad():
        model.get_output_embeddings().weight += 1.0
    assert not torch.equal(rows, model.get_output_embeddings().weight[ids])
    head.refresh()
    assert head.draft_head.weight is rows, "graphs hold this very tensor"
    assert torch.equal(rows, model.get_output_embeddings().weight[ids])


def test_the_draft_vocabulary_is_the_most_frequent() -> None:
    assert draft_vocabulary(np.array([1, 1, 1, 3]), 2).tolist() == [0, 3]
    assert draft_vocabulary(np.array([1, 1, 1, 3]), 4) is None


def test_the_same_seed_gives_the_same_drafter() -> None:
    model = target()
    one, same, other = (eagle_head(model, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.qkv, same.qkv) and not torch.equal(one.qkv, other.qkv)


def test_other_families_are_refused_by_name() -> None:
    class Other(LlamaForCausalLM):
        pass

    model = Other(target().config)
    assert "Other" in str(undraftable(model))
    with pytest.raises(WhetError, match="Other is not one of"):
        eagle_head(model)


@needs_triton
def test_the_kernels_draft_what_the_reference_drafts() -> None:
    """fp32 over the kernels on a GPU or under the interpreter, against fp64, which only the reference takes."""
    drafted = []
    for dtype, place in ((torch.float32, device), (torch.float64, torch.device("cpu"))):
        head = eagle_head(target(dtype).to(place), draft_ids=torch.arange(3, 20), seed=1)
        head.ops = KERNELS
        table = with_cache(eagle_head(target()), context=32, rows=2).to(place)
        head.attach(*(torch.zeros(9, 2, 8, 8, dtype=dtype, device=place) for _ in range(2)), 32)
        hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(4)).to(place, dtype)
        ids, position = numbers([3, 4, 5, 6, 7, 8, 9, 10, 11]), numbers([0, 1, 2, 3, 4, 5, 0, 1, 2])
        row, length, starts = numbers([0] * 6 + [1] * 3), numbers([6, 3]), numbers([0, 6, 9])
        ids, position, row, length, starts = (
            x.to(place) for x in (ids, position, row, length, starts)
        )
        features = head.extend(hidden, ids, position, row, table, length, starts, 6)
        last = features[starts[1:].long() - 1]
        drafted.append(
            (features.cpu().double(), head.draft(last, length, row[[0, 8]], table, 4).tolist())
        )
    torch.testing.assert_close(drafted[0][0], drafted[1][0], rtol=1e-3, atol=1e-3)
    assert drafted[0][1] == drafted[1][1]


@pytest.mark.gpu
def test_a_graph_drafts_what_a_call_drafts() -> None:
    model = target(torch.bfloat16).cuda()
    head = eagle_head(model, draft_ids=torch.arange(2, 20), seed=1)
    head.ops = KERNELS
    attach_slots(head, 4, 64)
    table = torch.arange(4, dtype=torch.int32, device="cuda")[:, None]
    hidden = torch.randn(4, 32, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([3, 4, 5, 6], dtype=torch.int32, device="cuda")
    position, row = (
        torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([0, 0, 0, 0], [0, 1, 2, -1])
    )
    length = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device="cuda")
    starts = torch.arange(5, dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        feature = head.extend(hidden, ids, position, row, table, length, starts, 1)
        return head.draft(feature, position + 1, row, table, 4)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafted = call()
    for seed in (3, 4):
        hidden.copy_(torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)))
        other = eagle_head(model, seed=seed)
        head.take(other)  # published in place: the graph sees it
        graph.replay()
        got = drafted.clone()
        assert torch.equal(got[:3], call()[:3])
