"""Rotation and KV write against transformers' own functions and plain indexing.

The references must equal transformers to the bit in every type. The kernels must too on CUDA; under the interpreter in
float32 and float16 (its bfloat16 casts truncate where the hardware rounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_env import device, interpreted, needs_triton
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import (
    apply_rotary_pos_emb as apply_partial_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from whet.fast.kernels.layer import rope_write, write_kv
from whet.model import ops

PAGE = 4
TABLE = [[3, 0, 5], [3, 1, 7], [6, 2, 7]]
"""Rows 0 and 1 share their first page, 1 and 2 name one neither has reached."""
ROW = [0, 1, 1, -1, 2, 2, 2, 0, -1]
POSITION = [4, 5, 4, 0, 1, 2, 0, 9, 6]
PLACE = [(0, 0), (1, 1), (1, 0), None, (6, 1), (6, 2), (6, 0), (5, 1), None]
"""By hand: the page and offset of each token above."""
PAGES = 9
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TRITON = pytest.param("triton", marks=needs_triton)


@dataclass
class Case:
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    row: Tensor
    position: Tensor
    heads: int
    kv_heads: int

    def run(self, path: str, **norms: Any) -> Tensor:
        """Written into this case's pages."""
        chosen = rope_write if path == "triton" else ops.rope_write
        return chosen(
            self.qkv,
            self.cos,
            self.sin,
            self.keys,
            self.values,
            self.table,
            self.row,
            self.position,
            heads=self.heads,
            kv_heads=self.kv_heads,
            **norms,
        )

    def parts(self) -> list[Tensor]:
        """Query, key, value as transformers has them, [1, heads, T, d]."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        split = self.qkv.unflatten(1, (-1, self.keys.shape[-1])).split(sizes, 1)
        return [part.transpose(0, 1)[None] for part in split]


def case(
    ratio: int, dim: int, dtype: torch.dtype, rotary: int = 0, where: torch.device = device
) -> Case:
    random = torch.Generator().manual_seed(ratio * 1000 + dim)
    kv_heads, tokens = 1 if ratio == 7 else 2, len(ROW)
    heads = ratio * kv_heads
    rotary = rotary or dim
    angle = torch.tensor(POSITION)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
    angle = torch.cat((angle, angle), -1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(where, dtype)

    def word(numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=where)

    return Case(
        qkv=normal(tokens, (heads + 2 * kv_heads) * dim),
        cos=angle.cos().to(where, dtype),
        sin=angle.sin().to(where, dtype),
        keys=normal(PAGES, kv_heads, PAGE, dim),
        values=normal(PAGES, kv_heads, PAGE, dim),
        table=word(TABLE),
        row=word(ROW),
        position=word(POSITION),
        heads=heads,
        kv_heads=kv_heads,
    )


def expected(before: Tensor, new: Tensor) -> Tensor:
    """Pages but the last, with new [1, kv heads, T, d] put where PLACE says."""
    pages = before.clone()
    for token, place in enumerate(PLACE):
        if place is not None:
            pages[place[0], :, place[1]] = new[0, :, token]
    return pages[:-1]


def assert_same(got: Tensor, want: Tensor, path: str, normed: bool = False) -> None:
    """Norms sum in another order in a kernel, so a value near the middle of two may round the other way."""
    if path == "triton" and (normed or (interpreted and got.dtype == torch.bfloat16)):
        ulp = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}[got.dtype]
        torch.testing.assert_close(got, want, rtol=ulp, atol=ulp)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("path", ["reference", TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ratio", "dim"), [(1, 64), (3, 80), (7, 128)])
def test_equals_llama(path: str, dtype: torch.dtype, ratio: int, dim: int) -> None:
    c = case(ratio, dim, dtype)
    before = c.keys.clone(), c.values.clone()
    query, key, value = c.parts()
    query, key = apply_rotary_pos_emb(query, key, c.cos[None], c.sin[None])
    got = c.run(path)
    assert got.is_contiguous() and got.shape == (len(ROW), c.heads, dim)
    assert_same(got, query[0].transpose(0, 1), path)
    assert_same(c.keys[:-1], expected(before[0], key), path)
    assert torch.equal(c.values[:-1], expected(before[1], value))


@pytest.mark.parametrize("path", ["reference", TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ratio", "dim"), [(3, 64), (7, 80)])
def test_equals_qwen3(path: str, dtype: torch.dtype, ratio: int, dim: int) -> None:
    c = case(ratio, dim, dtype)
    norms = [Qwen3RMSNorm(dim, eps=1e-5).to(device, dtype) for _ in range(2)]
    with torch.no_grad():
        for i, norm in enumerate(norms):
            norm.weight.copy_(torch.linspace(0.5, 2.0 + i, dim))
        before = c.keys.clone(), c.values.clone()
        query, key, value = c.parts()
        query, key = apply_rotary_pos_emb(norms[0](query), norms[1](key), c.cos[None], c.sin[None])
        got = c.run(path, q_norm=norms[0].weight, k_norm=norms[1].weight, eps=1e-5)
    assert_same(got, query[0].transpose(0, 1), path, normed=True)
    assert_same(c.keys[:-1], expected(before[0], key), path, normed=True)
    assert torch.equal(c.values[:-1], expected(before[1], value))


@pytest.mark.parametrize("path", ["reference", TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(80, 32), (128, 96)])
def test_equals_phi3_with_part_of_a_head_rotated(
    path: str, dtype: torch.dtype, dim: int, rotary: int
) -> None:
    c = case(3, dim, dtype, rotary)
    before = c.keys.clone(), c.values.clone()
    query, key, value = c.parts()
    query, key = apply_partial_rotary_pos_emb(query, key, c.cos[None], c.sin[None])
    assert_same(c.run(path), query[0].transpose(0, 1), path)
    assert_same(c.keys[:-1], expected(before[0], key), path)
    assert torch.equal(c.values[:-1], expected(before[1], value))


@needs_triton
def test_norms_reach_the_part_that_is_not_rotated() -> None:
    c, same = case(3, 80, torch.float32, 32), case(3, 80, torch.float32, 32)
    weights = {
        "q_norm": torch.linspace(0.5, 2, 80, device=device),
        "k_norm": torch.linspace(2, 3, 80, device=device),
    }
    assert_same(c.run("triton", **weights), same.run("reference", **weights), "triton", normed=True)
    assert_same(c.keys[:-1], same.keys[:-1], "triton", normed=True)


@pytest.mark.parametrize("path", ["reference", TRITON])
def test_padding_touches_the_last_page_alone(path: str) -> None:
    c = case(3, 64, torch.float32)
    c.row.fill_(-1)
    # may be anything
    c.position.copy_(torch.tensor([0, 5, -3, 2**30, 1, 2, 3, 4, 5], dtype=torch.int32))
    keys, values = c.keys.clone(), c.values.clone()
    c.run(path)
    assert torch.equal(c.keys[:-1], keys[:-1]) and torch.equal(c.values[:-1], values[:-1])
    assert not torch.equal(c.keys[-1], keys[-1])


@pytest.mark.parametrize("path", ["reference", TRITON])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_write_kv_takes_any_strides_and_widths(path: str, dtype: torch.dtype) -> None:
    c = case(3, 80, dtype)
    values = torch.zeros(PAGES, 2, PAGE, 24, dtype=dtype, device=device)
    key = torch.randn(1, 2, len(ROW), 80).to(device, dtype)
    value = torch.randn(1, 2, 24, len(ROW)).to(device, dtype).transpose(2, 3)
    before = c.keys.clone(), values.clone()
    chosen = write_kv if path == "triton" else ops.write_kv
    chosen(
        key[0].transpose(0, 1), value[0].transpose(0, 1), c.keys, values, c.table, c.row, c.position
    )
    assert torch.equal(c.keys[:-1], expected(before[0], key))
    assert torch.equal(values[:-1], expected(before[1], value))


@needs_triton
@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("tile", [(4, 2), (16, 4)])
def test_tiles_for_many_tokens(
    tokens: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than one program takes, the last program not full."""
    from whet.fast.kernels import layer_triton as rope_triton

    assert [rope_triton.plan_tokens(heads)[0] for heads in (1, 4096, 4097, 10**6)] == [1, 1, 4, 16]
    monkeypatch.setattr(rope_triton, "plan_tokens", lambda heads: tile)
    rows, width, dim = 3, 4, 8
    row = torch.arange(tokens, dtype=torch.int32, device=device) % rows
    position = torch.arange(tokens, dtype=torch.int32, device=device) // rows
    table = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).view(
        rows, width
    )
    table = table.to(device, torch.int32)
    qkv = torch.randn(tokens, (3 + 2 * 1) * dim, device=device)
    cos, sin = torch.rand(2, tokens, dim, device=device)
    found = []
    for chosen in (rope_write, ops.rope_write):
        pages = torch.zeros(2, rows * width + 1, 1, PAGE, dim, device=device)
        query = chosen(qkv, cos, sin, pages[0], pages[1], table, row, position, heads=3, kv_heads=1)
        found.append((query, pages))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_shapes_that_would_write_elsewhere_are_refused() -> None:
    c = case(3, 64, torch.float32)
    with pytest.raises(ValueError, match="int32 tables"):
        write_kv(
            c.keys[:9, :, 0],
            c.values[:9, :, 0],
            c.keys,
            c.values,
            c.table.long(),
            c.row,
            c.position,
        )
    c.kv_heads = 3
    with pytest.raises(ValueError, match="pages of the tokens' heads"):
        c.run("triton")
    c.kv_heads, c.cos = 2, c.cos[:, :63]
    with pytest.raises(ValueError, match="even number of cosines"):
        c.run("triton")
