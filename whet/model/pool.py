"""Memory of CUDA graphs: what their pool has taken from the device, and what the driver holds beside torch's memory.

Read where graphs are captured (`graphed.py`, `whet.rollout.captures`). How much torch has reserved in all says little
of them: a capture gives back what lay unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Pool = tuple[int, int]
"""What `torch.cuda.graph_pool_handle` gives."""


def total_size(segments: Iterable[Mapping[str, Any]], pool: Pool) -> int:
    """Bytes of a snapshot's segments that belong to the pool.

    >>> total_size([{"segment_pool_id": (0, 1), "total_size": 5}, {"segment_pool_id": (0, 0), "total_size": 7}], (0, 1))
    5
    """
    return sum(int(s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


def pool_bytes(pool: Pool) -> int:
    """Never less than before while one of its graphs lives."""
    return total_size(torch.cuda.memory_snapshot(pool), pool)


def driver_bytes(device: torch.device) -> int:
    """Device memory in use that torch's allocator knows nothing of: the context, kernels, graphs as the driver keeps
    them; and what other processes take, so that a difference is worth something only where there are none."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
