"""Bytes of a graphs' memory pool, of hand-made segments and of a real pool."""

import pytest
import torch

from whet.fast.graphs import driver_bytes, pool_bytes


def segment(pool: tuple[int, int], size: int) -> dict[str, object]:
    return {"segment_pool_id": pool, "total_size": size, "allocated_size": 0, "device": 0}


def test_only_the_pools_own_segments_count(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        segment((0, 0), 64),
        segment((0, 2), 3),
        segment((2, 0), 16),
        segment((0, 2), 5),
        segment((0, 3), 32),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool: segments)
    assert pool_bytes((0, 2)) == 8 and pool_bytes((0, 4)) == 0
    segments.clear()
    assert pool_bytes((0, 2)) == 0


@pytest.mark.gpu
def test_a_pool_grows_by_what_is_captured_whatever_is_freed_elsewhere() -> None:
    device, pool = torch.device("cuda"), torch.cuda.graph_pool_handle()
    assert pool_bytes(pool) == 0
    elsewhere = torch.empty(2**28, dtype=torch.uint8, device=device)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(2**22, device=device)
    x + 1  # loads what the graph needs
    del elsewhere
    with torch.cuda.graph(graph, pool=pool):
        out = x + 1
    assert 2**24 <= pool_bytes(pool) < 2**26
    assert out.shape == x.shape and driver_bytes(device) > 0
