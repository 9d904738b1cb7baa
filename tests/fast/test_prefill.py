"""Prompts by graphs, padded to one of a few sizes: hidden states and pages are those of plain calls."""

import numpy as np
import pytest
import torch
from slow_engine import ask, make_engine, sharp_model

from whet.fast import graphs as prefill
from whet.fast.fused import share_storage
from whet.fast.graphs import LONGEST, PROMPTS, ROWS, SIZES, GraphRunner, Key, Prefill, fed
from whet.rollout.base import empty_trace
from whet.rollout.rows import Chunk, Flight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def chunk(size: int, start: int = 0, first: int = 1) -> Chunk:
    """Tokens first, first + 1, ... in a circle of 20, from `start` on."""
    prompt = first + np.arange(start + size, dtype=np.int32) % 20
    flight = Flight(ask(0), 0, 0, prompt, 8, (0, 0), empty_trace(np.dtype(np.float32)))
    return Chunk(flight, start, start + size)


def runner(device: str = "cpu") -> GraphRunner:
    model = sharp_model(heads=6, kv_heads=2)
    if device == "cuda":
        model = model.to(device, torch.float32)
    share_storage(model)
    made = make_engine(model, graphs=True, page=4, slots=8).runner
    assert isinstance(made, GraphRunner)
    return made


def test_padding_is_of_no_row() -> None:
    """Two chunks, the second from its third token on, in eight tokens, three rows and three pages."""
    tokens, table, length, starts = fed(
        [chunk(3), chunk(2, start=2, first=7)], np.array([[5, 6], [8, 9]]), 8, 3, 3
    )
    assert tokens.tolist() == [
        [1, 2, 3, 9, 10, 0, 0, 0],
        [0, 1, 2, 2, 3, 0, 0, 0],
        [0, 0, 0, 1, 1, -1, -1, -1],
    ]
    assert table.tolist() == [[5, 6, 0], [8, 9, 0], [0, 0, 0]]
    assert length.tolist() == [3, 4, 0] and starts.tolist() == [0, 3, 5, 5]


def test_the_smallest_graph_that_holds_them() -> None:
    key = runner().prefill.key
    assert key([chunk(3)]) == key([chunk(64)] * 2) == (128, 128, PROMPTS)
    assert key([chunk(64)] * 2 + [chunk(1)]) == (256, 256, PROMPTS)
    assert key([chunk(LONGEST)]) == (512, 512, PROMPTS)
    assert key([chunk(LONGEST)] * 4) == (2048, 512, PROMPTS)
    assert key([chunk(LONGEST + 1)]) is None
    assert key([chunk(LONGEST)] * 4 + [chunk(1)]) is None
    assert key([chunk(1)] * ROWS) == (128, 128, PROMPTS) and key([chunk(1)] * (ROWS + 1)) is None


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_equals_plain_calls(device: str) -> None:
    """Hidden states and what is in the pages, those of others too, wave after wave through the same buffers."""
    by_graph, plain = runner(device), runner(device)
    tables = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    for chunks in (
        [chunk(5), chunk(9, first=4), chunk(2)],
        [chunk(4, start=5)],
        [chunk(7, first=3)] * 2,
    ):
        table, tokens = tables[: len(chunks)], sum(c.size for c in chunks)
        key = by_graph.prefill.key(chunks)
        assert key is not None
        by_graph.captures.capture([key])
        by_graph.prefill.tell(chunks, table, key[0])
        got, want = by_graph.captures.replay(key)[:tokens], plain.prefill.plain(chunks, table)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        for field in ("keys", "values"):
            for pools in zip(
                *(getattr(each.cache, field) for each in (by_graph, plain)), strict=True
            ):
                # padding writes to the last page
                mine, others = (pool[: by_graph.cache.trash] for pool in pools)
                torch.testing.assert_close(mine, others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_at_rest_no_row_is_fed(device: str) -> None:
    """What a step at rest writes goes to the page of no row. All 128 tokens go to the same place of it, and which is
    the last differs between devices; none of them is id 0 here, whose embedding is zero and would leave no trace."""
    made = runner(device)
    chunks, pages = [chunk(SIZES[0] // 2)] * 2, np.arange(32).reshape(2, 16)
    trash = made.cache.trash

    def changed() -> list[list[int]]:
        pools = zip(made.cache.keys, before, strict=True)
        return [
            torch.nonzero((pool != old).flatten(1).any(1)).flatten().tolist() for pool, old in pools
        ]

    made.prefill.tell(chunks, pages, SIZES[0])
    before = [pool.clone() for pool in made.cache.keys]
    with made._at_rest():
        made.prefill.step(SIZES[0], SIZES[0])
    assert changed() == [[trash]] * len(before)
    made.prefill.tell(chunks, pages, SIZES[0])
    made.prefill.step(SIZES[0], SIZES[0])
    assert changed() == [[*range(32), trash]] * len(before)


def test_what_no_graph_holds_is_fed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for few tokens of few prompts: some waves go by plain calls, and the tokens are the same."""
    requests = [ask(i, n=1 + i % 3, max_tokens=5) for i in range(12)]
    used: list[bool] = []

    def tokens() -> list[list[int]]:
        model = sharp_model(heads=6, kv_heads=2)
        share_storage(model)
        engine = make_engine(model, graphs=True, page=4, slots=6)
        done = []
        for some in (requests[:1], requests[1:]):
            engine.submit(some)
            done += engine.collect()
        return [r.trace.ids.tolist() for r in sorted(done, key=lambda r: r.key) if r.trace]

    def noting(self: Prefill, chunks: list[Chunk]) -> Key | None:
        used.append((key := before(self, chunks)) is not None)
        return key

    before = Prefill.key
    monkeypatch.setattr(Prefill, "key", noting)
    always = tokens()
    assert all(used)
    used.clear()
    monkeypatch.setattr(prefill, "SIZES", (16, 32))
    monkeypatch.setattr(prefill, "ROWS", 2)
    assert tokens() == always and True in used and False in used
