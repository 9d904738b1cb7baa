"""Attention over pages against the plain formula, for both forms of the cache, ragged rows and every option."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from whet.model.twin import How, KVShape
from whet.rollout.pages import Cache, PagedCache

DIM, CONTEXT, SLOTS = 4, 24, 5


def plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One row, one query head at a time; queries are the last of the keys."""
    heads, new, _ = query.shape
    length = keys.shape[1]
    out = torch.zeros(new, heads, values.shape[-1], dtype=query.dtype)
    for h in range(heads):
        kv = h // (heads // keys.shape[0])
        for j in range(new):
            at = length - new + j
            first = 0 if window is None else max(0, at - window + 1)
            scores = keys[kv, first : at + 1] @ query[h, j] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[j, h] = torch.softmax(scores, 0) @ values[kv, first : at + 1]
    return out


def make_cache(page: int, kv_heads: int, dtype: torch.dtype, device: str = "cpu") -> Cache:
    shapes = [KVShape(kv_heads, DIM, DIM, dtype)]
    if page == 0:
        return Cache(shapes, SLOTS, CONTEXT, torch.device(device))
    return PagedCache(
        shapes, SLOTS, CONTEXT, page, SLOTS * -(-CONTEXT // page), torch.device(device), False
    )


def run_all(
    page: int,
    ratio: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[Tensor]:
    """Prefill ragged rows, then decode and prefill in one forward, then decode; outputs in order, padding left out."""
    kv_heads, lengths = 2, [5, 9, 1]
    cache = make_cache(page, kv_heads, dtype, device)
    generator = torch.Generator().manual_seed(0)
    done: dict[int, tuple[Tensor, Tensor]] = {}
    outputs: list[Tensor] = []

    def forward(blocks: list[tuple[slice, list[int], list[int]]]) -> None:
        """Each block: rows, their start, their new tokens."""
        placed, columns, wanted = [], [], []
        for rows, starts, news in blocks:
            width = max(news)
            position = np.array(
                [
                    [s + n - width + j if j >= width - n else -1 for j in range(width)]
                    for s, n in zip(starts, news, strict=True)
                ]
            )
            placed.append((rows, position))
            for row, n in zip(range(rows.start, rows.stop), news, strict=True):
                q, k, v = (
                    torch.randn(h, width, DIM, generator=generator, dtype=torch.float64)
                    for h in (kv_heads * ratio, kv_heads, kv_heads)
                )
                columns.append((q, k, v))
                old = done.get(row, (torch.zeros(kv_heads, 0, DIM, dtype=torch.float64),) * 2)
                done[row] = (
                    torch.cat((old[0], k[:, width - n :]), 1),
                    torch.cat((old[1], v[:, width - n :]), 1),
                )
                wanted.append((row, q[:, width - n :], width, n))
        packed = [torch.cat(part, 1)[None].to(device, dtype) for part in zip(*columns, strict=True)]
        out = (
            cache.context(placed)
            .attend(0, *packed, How(0.7, window, softcap), {})[0]
            .double()
            .cpu()
        )
        at = 0
        for row, q, width, n in wanted:
            got = out[at + width - n : at + width]
            at += width
            outputs.append(got)
            tolerance = (
                1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 3e-2
            )
            torch.testing.assert_close(
                got, plain(q, *done[row], 0.7, window, softcap), rtol=0, atol=tolerance
            )

    for row, n in enumerate(lengths):
        cache.open(row, n)
    forward([(slice(0, 3), [0, 0, 0], lengths)])
    cache.grow(np.array(lengths))
    cache.open(3, 7)
    cache.open(4, 2)
    forward([(slice(0, 3), lengths, [1, 1, 1]), (slice(3, 5), [0, 0], [7, 2])])
    now = np.array([6, 10, 2, 7, 2])
    cache.grow(now)
    forward([(slice(0, 5), now.tolist(), [1] * 5)])
    return outputs


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("page", [0, 1, 4, 7])
def test_equals_the_plain_formula(
    page: int, ratio: int, window: int | None, softcap: float | None
) -> None:
    run_all(page, ratio, window, softcap, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [0, 4])
def test_lower_precision(page: int, dtype: torch.dtype) -> None:
    run_all(page, 3, None, None, dtype)


def test_rows_of_one_length_need_no_mask() -> None:
    """The shortcut for equally long rows gives what the mask gives, also with a window."""
    cache = make_cache(0, 1, torch.float64)
    assert not isinstance(cache, PagedCache)
    cache.keys[0].normal_(generator=torch.Generator().manual_seed(0))
    cache.values[0].normal_(generator=torch.Generator().manual_seed(1))
    q, k, v = (
        torch.randn(1, 1, 2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in (2, 3, 4)
    )
    for window in (None, 3, 9, math.inf):
        outs = []
        for level in (True, False):
            context = cache.context([(slice(0, 2), np.array([[8], [8]]))])
            assert context.blocks[0].level
            context.blocks[0].level = level
            outs.append(
                context.attend(
                    0, q, k, v, How(1.0, None if window is None else int(min(window, 99))), {}
                )
            )
        torch.testing.assert_close(*outs, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [0, 4])
def test_cuda_equals_cpu(page: int, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for cpu, cuda in zip(
        run_all(page, 3, 3, None, dtype), run_all(page, 3, 3, None, dtype, "cuda"), strict=True
    ):
        torch.testing.assert_close(cpu, cuda, rtol=0, atol=tolerance)
