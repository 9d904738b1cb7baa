"""silu(gate) * up of few tokens by one kernel, against plain torch in fp64.

Under the interpreter bfloat16 casts truncate where the hardware rounds, so its bound is twice as wide there.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_env import device, interpreted, needs_triton
from torch import Tensor

from whet.fast.kernels.layer import FEW, GatedTile, gated, gated_reference, plan, takes

TOKENS = [1, 2, 3, 16, 17, 64, 70]
HALF = [torch.float16, torch.bfloat16]
SHAPES = [(32, 32), (33, 40), (48, 37)]
"""(N, K): whole tiles, then neither side."""


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return (scale * torch.randn(*shape, generator=random)).to(device, dtype)


def case(
    tokens: int, n: int, k: int, dtype: torch.dtype, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    bias = normal(2 * n, dtype=dtype, seed=2) if biased else None
    return (
        normal(tokens, k, dtype=dtype),
        normal(2 * n, k, dtype=dtype, seed=1, scale=k**-0.5),
        bias,
    )


def assert_right(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within the roundings of gate, of up and of their product, each of which may fall the other way."""
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(
        x.dtype
    )
    gate, up = wide.double().chunk(2, -1)
    ulp = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2}[x.dtype]
    ulp *= 2 if interpreted and x.dtype == torch.bfloat16 else 1
    assert got.dtype == x.dtype and got.shape == (len(x), len(weight) // 2)
    torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=ulp, atol=ulp)


@needs_triton
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_equals_plain_torch(tokens: int, biased: bool, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        given = case(tokens, n, k, dtype, biased)
        assert_right(gated(*given), *given)


@needs_triton
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("columns", [16, 64])
def test_every_tile_gives_the_same(rows: int, columns: int) -> None:
    from whet.fast.kernels.layer_triton import launch

    given = case(19, 40, 70, torch.float16, True)
    assert_right(launch(*given, GatedTile(rows, columns, 32, 2)), *given)


@needs_triton
def test_the_same_bits_every_time_and_no_token_minds_its_neighbours() -> None:
    x, weight, bias = case(17, 33, 40, torch.float16, True)
    first = gated(x, weight, bias)
    assert torch.equal(gated(x, weight, bias), first)
    x[5] = float("nan")
    again = gated(x, weight, bias)
    others = torch.arange(17, device=device) != 5
    assert torch.equal(again[others], first[others]) and again[5].isnan().all()


@needs_triton
def test_strided_tokens_and_none_at_all() -> None:
    x, weight, bias = case(6, 32, 32, torch.float16, False)
    assert torch.equal(gated(x[::2], weight, bias), gated(x[::2].contiguous(), weight, bias))
    assert gated(x[:0], weight, bias).shape == (0, 32)


def test_by_hand() -> None:
    """gate 2, up 3: 2 / (1 + e^-2) * 3 = 5.2848."""
    x, weight = torch.ones(1, 1), torch.tensor([[2.0], [3.0]])
    torch.testing.assert_close(
        gated_reference(x, weight), torch.tensor([[5.2848]]), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        gated_reference(x, weight, torch.tensor([0.0, -3.0])), torch.zeros(1, 1)
    )


def test_which_tokens_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8, 4)
    assert not takes(torch.zeros(3, 4), weight) and not takes(
        torch.zeros(FEW + 1, 4, dtype=torch.float16), weight
    )
    assert takes(torch.zeros(FEW, 4, dtype=torch.float16), weight) == interpreted
    monkeypatch.setattr("whet.fast.kernels.layer.LARGE", weight.nbytes - 1)
    assert not takes(torch.zeros(FEW // 2 + 1, 4, dtype=torch.float16), weight)
    assert takes(torch.zeros(FEW // 2, 4, dtype=torch.float16), weight) == interpreted


def test_tiles_fit_the_memory_of_a_multiprocessor() -> None:
    for tokens in (1, 16, 17, 33, 64):
        for n, k in ((1536, 576), (8960, 1536), (18944, 3584), (40, 64), (100_000, 8192)):
            tile = plan(tokens, n, k, 132)
            assert tile.stages >= 2 and tile.columns >= tokens and tile.rows in (16, 32, 64)
            assert tile.stages * (2 * tile.rows + tile.columns) * tile.depth * 2 <= 113_000, (
                "two programs of 227 KB"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 8, 64])
@pytest.mark.parametrize(("n", "k"), [(8960, 1536), (1536, 576), (18944, 3584)])
def test_real_shapes_in_a_graph(n: int, k: int, tokens: int) -> None:
    x, weight, bias = case(tokens, n, k, torch.bfloat16, False)
    gated(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated(x, weight, bias)
    for seed in range(3):
        x.copy_(normal(tokens, k, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        assert_right(out, x, weight, bias)
