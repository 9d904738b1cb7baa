"""Steps captured as CUDA graphs, by rows, new tokens a row and drafter, in one memory pool; plain calls on a CPU.

Used by `graphs.py`, which says what a step is. A smaller graph fits into what the largest took, so the largest comes
first. A failed capture leaves CUDA's state broken: it is not caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from whet.model.meter import DeviceMeter

# ---- pool
#
# Memory of CUDA graphs: what their pool has taken from the device, and what the driver holds beside torch's memory.
#
# Read where graphs are captured (`graphed.py`, `whet.fast.pool`). How much torch has reserved in all says little
# of them: a capture gives back what lay unused.


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


Key = tuple[int, int, str]
"""Rows, tokens that each feeds, and ""; or rows, tokens that are drafted for each, and the drafter."""
Step = Callable[[int, int, str], Tensor]


def graph_name(key: Key) -> str:
    """
    >>> graph_name((64, 1, "")), graph_name((64, 5, "")), graph_name((8, 4, "eagle"))
    ('64x1', '64x5', '8x4_eagle')
    """
    rows, new, drafter = key
    return f"{rows}x{new}" + (f"_{drafter}" if drafter else "")


class Captures:
    def __init__(self, device: torch.device, step: Step, at_rest: Callable[[], AbstractContextManager[None]]) -> None:
        """step(*key): what is captured; at_rest: while it lasts, a step does nothing that lasts."""
        self.device, self.step, self.at_rest = device, step, at_rest
        self.graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """With the tensor that the step gave, which every replay writes anew."""
        self.bytes: dict[Key, int] = {}
        """What the pool grew by for each: little but for the largest."""
        self.driver_bytes = 0
        """What the driver took for all of them, beside the pool."""
        self.meter = DeviceMeter(device)
        self._pool: Any = None
        """What all graphs share; it lives as long as one of them."""

    def replay(self, key: Key) -> Tensor:
        if self.device.type != "cuda":
            return self.step(*key)
        graph, out = self.graphs[key]
        graph.replay()
        return out

    def capture(self, wanted: Sequence[Key]) -> None:
        """Each is run before, so that no kernel is compiled within a capture. Nothing on a CPU."""
        wanted = [key for key in wanted if key not in self.graphs]
        if self.device.type != "cuda" or not wanted:
            return
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        with torch.inference_mode(False), torch.no_grad(), self.at_rest():
            for key in wanted:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        self.step(*key)
                torch.cuda.current_stream().wait_stream(stream)
                before = driver_bytes(self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    out = self.step(*key)
                self.graphs[key] = (graph, out)
                self.bytes[key] = pool_bytes(pool) - sum(self.bytes.values())
                self.driver_bytes += driver_bytes(self.device) - before

    def stats(self) -> dict[str, float]:
        """Graphs there are; and, since the last call, how long the GPU worked. Bytes of all together: a run has dozens,
        and `whet bench rollout` tells them apart."""
        out = {
            "rollout/graphs": float(len(self.graphs)),
            "rollout/graph_bytes": float(sum(self.bytes.values())),
            "rollout/graph_driver_bytes": float(self.driver_bytes),
        }
        seconds = self.meter.seconds()
        return out if seconds is None else {**out, "rollout/gpu_seconds": seconds}
