"""Steps captured as CUDA graphs in one memory pool, and what such pools take from the device.

`graphs.py` says what a step is and calls `Captures`, by rows, new tokens per row and drafter; on a CPU a step is a
plain call. `graphed.py` reads `pool_bytes` for the learner's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from whet.model.ops import DeviceMeter

Pool = tuple[int, int]  # what `torch.cuda.graph_pool_handle` gives
Key = tuple[int, int, str]  # rows, tokens that each feeds, and ""; or rows, tokens drafted for each, and the drafter
Step = Callable[[int, int, str], Tensor]


def pool_bytes(pool: Pool) -> int:
    """Bytes that a pool has taken; they never shrink while one of its graphs lives. (What torch has reserved in all
    says little: a capture gives back memory that lay unused.)"""
    segments = torch.cuda.memory_snapshot(pool)
    return sum(int(s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


def driver_bytes(device: torch.device) -> int:
    """Device memory in use beside torch's allocator: the context, kernels, graphs as the driver keeps them; and what
    other processes take, so that a difference means something only where there are none."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class Captures:
    def __init__(self, device: torch.device, step: Step, at_rest: Callable[[], AbstractContextManager[None]]) -> None:
        """step(*key): what is captured; at_rest: a context in which a step changes no row."""
        self.device, self.step, self.at_rest = device, step, at_rest
        # Each graph with the tensor that its step gave, which every replay writes anew.
        self.graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.bytes: dict[Key, int] = {}  # what the pool grew by for each: little but for the largest
        self.driver_bytes = 0  # what the driver took for all of them, beside the pool
        self.meter = DeviceMeter(device)
        self._pool: Any = None  # all graphs share it; it lives as long as one of them

    def replay(self, key: Key) -> Tensor:
        if self.device.type != "cuda":
            return self.step(*key)
        graph, out = self.graphs[key]
        graph.replay()
        return out

    def capture(self, wanted: Sequence[Key]) -> None:
        """Captures these steps, where they have no graph yet; nothing on a CPU. List the largest first: a smaller graph
        fits into the memory of a larger one. Each step is run before, so that no kernel is compiled within a capture. A
        failed capture leaves CUDA's state broken: it is not caught."""
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
        """How many graphs there are and their bytes in all; and how long the GPU worked since the last call."""
        out = {
            "rollout/graphs": float(len(self.graphs)),
            "rollout/graph_bytes": float(sum(self.bytes.values())),
            "rollout/graph_driver_bytes": float(self.driver_bytes),
        }
        seconds = self.meter.seconds()
        return out if seconds is None else {**out, "rollout/gpu_seconds": seconds}
