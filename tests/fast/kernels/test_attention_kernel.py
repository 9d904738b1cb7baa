"""Ragged paged attention: the kernels against the reference, and the reference against what it stands for."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_env import device, interpreted, needs_triton
from torch import Tensor

from whet.fast.kernels.attention import Tile, kernel_lacks, paged_attention, plan_splits, plan_tile
from whet.model.ops import paged_attention as reference
from whet.model.ops import visible
from whet.model.twin import Block, How


def make(
    rows: list[tuple[int, int]],
    kv_heads: int = 1,
    group: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    where: torch.device = device,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments for rows of (new tokens, keys): pages in random order, NaN in all that no row holds."""
    random_ = torch.Generator().manual_seed(seed)
    width = max(-(-keys // page) for _, keys in rows) + 1
    count = len(rows) * width + 1
    table = torch.randperm(count - 1, generator=random_)[: len(rows) * width].view(len(rows), width)
    sizes = dim, value_dim or dim
    caches = [torch.full((count, kv_heads, page, size), torch.nan) for size in sizes]
    for row, (_, keys) in enumerate(rows):
        for key in range(keys):
            for cache in caches:
                entry = torch.randn(kv_heads, cache.shape[3], generator=random_)
                cache[table[row, key // page], :, key % page] = entry
        # beyond the row: reading there would not go unnoticed
        table[row, -(-keys // page) :] = -(10**6)
    news = [new for new, _ in rows]
    tokens = sum(news)
    return {
        "query": torch.randn(tokens, kv_heads * group, dim, generator=random_).to(where, dtype),
        "keys": caches[0].to(where, dtype),
        "values": caches[1].to(where, dtype),
        "table": table.to(where, torch.int32),
        "length": torch.tensor([keys for _, keys in rows], dtype=torch.int32, device=where),
        "starts": torch.tensor([0, *news]).cumsum(0).to(where, torch.int32),
        "most": max(news),
        "scaling": dim**-0.5,
    }


def agree(arguments: dict[str, Any], tolerance: float = 2e-6, **more: Any) -> Tensor:
    got = paged_attention(**arguments, **more)
    expected = reference(**arguments, **more)
    assert not expected.isnan().any()
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    return got


RAGGED = [(1, 37), (2, 2), (0, 20), (5, 18), (1, 1), (3, 0), (1, 40)]


@needs_triton
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 80), (7, 32)])
def test_kernel_equals_reference_on_ragged_rows(group: int, dim: int, splits: int) -> None:
    out = agree(make(RAGGED, group=group, dim=dim), splits=splits)
    assert not out[9:12].any(), "a padded row gets zeros"
    assert out[:9].all() and out[12:].all()


@needs_triton
def test_kernel_takes_several_kv_heads_and_wide_heads() -> None:
    agree(make([(1, 70), (2, 40)], kv_heads=3, group=6, dim=128, page=64), splits=2)


@needs_triton
def test_values_may_have_another_width() -> None:
    agree(make([(1, 30), (3, 20)], dim=64, value_dim=24), splits=1)
    agree(make([(1, 30), (3, 20)], dim=24, value_dim=48), splits=2)


@needs_triton
@pytest.mark.parametrize("page", [3, 16, 64, 100, 128])
def test_any_page_size(page: int) -> None:
    agree(make([(1, 150), (2, 65)], group=1, page=page), splits=2)


@needs_triton
def test_prompt_chunk_in_the_middle_of_a_context() -> None:
    """More tiles than one, most of them beyond the shorter rows."""
    agree(make([(70, 170), (1, 5), (9, 9)], page=64))


@needs_triton
@pytest.mark.parametrize("splits", [1, 4])
def test_verification_of_48(splits: int) -> None:
    """The first of three tiles ends one key into a turn of the loop."""
    agree(make([(48, 65), (1, 80)], group=1, page=64), splits=splits)


@needs_triton
def test_rows_may_share_pages() -> None:
    arguments = make([(1, 40), (2, 45)])
    arguments["table"][1, :2] = arguments["table"][0, :2]
    agree(arguments, splits=2)


@needs_triton
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_window(window: int, splits: int) -> None:
    agree(make([(1, 150), (5, 70), (2, 2), (1, 0)], page=64), window=window, splits=splits)


@needs_triton
def test_window_of_a_long_prompt() -> None:
    """Tiles start at their first query's window, not at key 0."""
    agree(make([(70, 130)], page=64), window=40)


@needs_triton
@pytest.mark.parametrize("splits", [1, 2])
def test_softcap(splits: int) -> None:
    arguments = make([(1, 37), (3, 18)])
    arguments["query"] *= 30  # scores far beyond the cap, where tanh is flat
    capped = agree(arguments, softcap=5.0, splits=splits, tolerance=2e-5)
    assert not torch.allclose(capped, paged_attention(**arguments))


@needs_triton
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    agree(make([(1, 70), (3, 20)], dtype=dtype), tolerance, splits=2)


@needs_triton
def test_queries_may_be_a_part_of_a_fused_projection() -> None:
    arguments = make([(1, 30), (3, 20)])
    query = arguments["query"]
    fused = torch.randn(query.shape[0], 7, query.shape[2], device=device)
    fused[:, 1:3] = query
    arguments["query"] = fused[:, 1:3]
    agree(arguments)


@needs_triton
def test_one_launch_serves_all_lengths() -> None:
    """What a captured graph replays: shapes and host numbers fixed, lengths and tables changed in place."""
    arguments = make([(2, 70)] * 3, group=1, page=64)
    for lengths in ([70, 69, 68], [2, 70, 33], [0, 0, 16]):
        arguments["length"].copy_(torch.tensor(lengths))
        agree(arguments, splits=4)


@needs_triton
def test_tile_does_not_change_the_result() -> None:
    from whet.fast.kernels.attention_triton import launch

    arguments = make([(1, 100), (3, 70)], group=3, page=64)
    expected = reference(**arguments)
    for tile in (
        Tile(16, 16, 4, 2),
        Tile(32, 64, 4, 2),
        Tile(16, 128, 4, 2),
        Tile(16, 32, 4, 2, ahead=False),
    ):
        torch.testing.assert_close(
            launch(**arguments, tile=tile, splits=1), expected, rtol=0, atol=2e-6
        )


@needs_triton
@settings(max_examples=8 if interpreted else 25, deadline=None, derandomize=True)
@given(
    st.lists(
        st.integers(0, 6).flatmap(lambda new: st.tuples(st.just(new), st.integers(0, 60))),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 2),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([8, 16, 33]),
    st.sampled_from([4, 32, 64]),
    st.none() | st.integers(1, 70),
    st.sampled_from([1, 2, 3]),
)
def test_any_shape(
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    page: int,
    window: int | None,
    splits: int,
) -> None:
    # the new tokens are among the keys
    rows = [(new, keys and max(new, keys)) for new, keys in rows]
    agree(make(rows, kv_heads, group, dim, page=page), window=window, splits=splits)


def test_reference_equals_the_block_of_the_plain_path() -> None:
    """Three rows of two new tokens, as the engine's torch path sees them."""
    lengths = [9, 30, 17]
    arguments = make(
        [(2, n) for n in lengths], kv_heads=2, group=3, dim=16, where=torch.device("cpu")
    )
    table = arguments["table"].clamp_min(0).long()
    position = torch.tensor([[n - 2, n - 1] for n in lengths])
    for key in ("keys", "values"):
        arguments[key].nan_to_num_()
    for window, softcap in ((None, None), (4, None), (None, 2.0)):
        block = Block(position, longest=30, rows=slice(0, 3), table=table)
        how = How(arguments["scaling"], window, softcap)
        expected = block.attend(arguments["query"], arguments["keys"], arguments["values"], how)
        got = reference(**arguments, window=window, softcap=softcap)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_visible_by_brute_force() -> None:
    for window in (None, 1, 4, 68, 75):
        got = visible(74, 64, window, torch.device("cpu"))
        for place in range(10, 74):
            expected = [key for key in range(place + 1) if window is None or place - key < window]
            assert got[place - 10].nonzero()[:, 0].tolist() == expected


def test_what_the_kernel_lacks_is_said_and_served_by_the_reference() -> None:
    assert kernel_lacks(torch.float64, 64, 64) == "the attention kernel has no float64"
    assert "at most 256 numbers, not 512" in (kernel_lacks(torch.bfloat16, 512, 64) or "")
    arguments = make([(1, 20), (2, 9)], dtype=torch.float64)
    assert torch.equal(paged_attention(**arguments), reference(**arguments))


def test_wrong_shapes_are_refused() -> None:
    arguments = make([(1, 20)])
    with pytest.raises(ValueError, match="int32"):
        paged_attention(**{**arguments, "length": arguments["length"].long()})
    with pytest.raises(ValueError, match="one type"):
        paged_attention(**{**arguments, "query": arguments["query"].half()})


def test_plans() -> None:
    """Numbers of the sweep on an H200: 2 * 128 / (B * Hkv) parts where rows may be long, 1 * 128 where not, as powers
    of two; up to 32, and at least two of long rows."""
    assert [plan_splits(b, 3, 1, 64) for b in (1, 8, 64, 256)] == [32, 16, 2, 2]
    assert [plan_splits(b, 2, 5, 64) for b in (1, 8, 64, 256)] == [32, 16, 2, 2]
    assert plan_splits(256, 3, 1, 8) == 1, "short rows of a full device"
    assert [plan_splits(64, 2, q, 64) for q in (1, 8, 9)] == [2, 2, 4], "twice from q 9 on"
    assert [plan_splits(64, 2, q, 8) for q in (1, 8, 9)] == [1, 1, 2], "of short rows, too"
    assert plan_splits(512, 2, 9, 64) == 1, "eight programs a processor are enough"
    assert plan_splits(1, 2, 1, 5) == 4, "no more parts than pages"
    assert plan_splits(1, 2, 512, 64) == 1, "prompts are not split"
    for most, group, dim in ((1, 7, 64), (5, 6, 128), (9, 7, 128), (48, 2, 64)):
        assert plan_tile(most, group, dim, dim, 2).rows >= most * group, "each key is read once"
    for tile in (
        plan_tile(q, g, d, d, b)
        for q in (1, 9, 999)
        for g in (1, 12)
        for d in (8, 80, 256)
        for b in (2, 4)
    ):
        assert all(n >= 16 and n & n - 1 == 0 for n in dataclasses.astuple(tile)[:2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (12, 2, 128), (14, 2, 64), (28, 4, 128), (8, 4, 256)]
)
@pytest.mark.parametrize("new", [1, 5, 9, 48, 300])
def test_real_sizes_on_the_device(heads: int, kv_heads: int, dim: int, new: int) -> None:
    cuda, batch, width = torch.device("cuda"), 6, 40
    torch.manual_seed(0)
    pages = batch * width + 1
    keys, values = (
        torch.randn(pages, kv_heads, 64, dim, device=cuda, dtype=torch.bfloat16) for _ in range(2)
    )
    length = torch.tensor([new, new + 1, 1000, 2560, 0, 1300], dtype=torch.int32, device=cuda)
    starts = torch.arange(batch + 1, device=cuda, dtype=torch.int32) * new
    table = torch.randperm(pages - 1, device=cuda).view(batch, width).int()
    query = torch.randn(batch * new, heads, dim, device=cuda, dtype=torch.bfloat16)
    scaling = dim**-0.5
    for splits in (0, 1, 8):
        got = paged_attention(
            query, keys, values, table, length, starts, most=new, scaling=scaling, splits=splits
        )
        expected = reference(query, keys, values, table, length, starts, most=new, scaling=scaling)
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_captured_graph_serves_all_lengths() -> None:
    arguments = make(
        [(2, 200)] * 4, group=6, dim=128, page=64, dtype=torch.bfloat16, where=torch.device("cuda")
    )
    paged_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(**arguments)
    for lengths in ([200, 199, 2, 64], [0, 65, 128, 3]):
        arguments["length"].copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(out, reference(**arguments), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_cache_of_more_than_two_billion_numbers() -> None:
    """The last pages lie beyond what 32 bits can address."""
    cuda, count = torch.device("cuda"), (1 << 31) // (2 * 64 * 128) + 3
    keys, values = (
        torch.zeros(count, 2, 64, 128, device=cuda, dtype=torch.bfloat16) for _ in range(2)
    )
    values[count - 1] = 1.0
    table = torch.tensor([[count - 1]], dtype=torch.int32, device=cuda)
    length, starts = (torch.tensor(v, dtype=torch.int32, device=cuda) for v in ([64], [0, 1]))
    query = torch.zeros(1, 4, 128, device=cuda, dtype=torch.bfloat16)
    out = paged_attention(query, keys, values, table, length, starts, most=1, scaling=1.0)
    assert (out == 1.0).all()
