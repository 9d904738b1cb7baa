"""What it costs to lend the KV cache's memory to the learner: release, mapping again, zeroing, in ms; that it works.

    python benchmarks/kv_release.py --gib 4 16 40 --out benchmarks/results

A cycle is what a run does around an update: release, the learner takes most of that memory from torch's allocator and
lets go of it, take back. A graph captured over the cache before the first cycle adds one to what is in it; after each
cycle it must find zeros and leave ones. Beside it, the other way: free plain tensors and make them again, which loses
every graph. Median, least and most of the cycles; the first one apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whet.rollout.pages import Arena
from whet.tools.bench.stand import circumstances

LAYERS = 28
"""Pieces: keys and values of so many layers."""
GIB = 2**30


def milliseconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begun)


def measure(gib: float, cycles: int, device: torch.device) -> dict[str, Any]:
    numbers = int(gib * GIB) // (2 * LAYERS) // 2
    pieces = [((numbers,), torch.bfloat16)] * (2 * LAYERS)
    made: list[Arena] = []
    row: dict[str, Any] = {
        "gib": gib,
        "make_ms": milliseconds(lambda: made.append(Arena(pieces, device, releasable=True))),
    }
    (arena,) = made
    probe = arena.tensors[-1][-4096:]
    probe.add_(1)  # its kernel is loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probe.add_(1)
    seconds: dict[str, list[float]] = {}
    for _ in range(cycles):
        probe.fill_(torch.nan)
        times = cycle(arena, int(0.9 * gib * GIB), device)
        graph.replay()
        assert (probe == 1).all(), "the graph replays over zeros at the same addresses"
        for name, value in times.items():
            seconds.setdefault(name, []).append(value)
    row |= {f"{name}_ms": summary(values) for name, values in seconds.items()}
    row["whole_ms"] = summary([sum(parts) for parts in zip(*seconds.values(), strict=True)])
    del probe, graph, arena
    made.clear()
    torch.cuda.empty_cache()
    row["plain_make_ms"] = milliseconds(lambda: [torch.zeros(s, dtype=t, device=device) for s, t in pieces])
    row["plain_free_ms"] = milliseconds(torch.cuda.empty_cache)
    return row


def cycle(arena: Arena, borrowed: int, device: torch.device) -> dict[str, float]:
    held: list[torch.Tensor] = []
    out = {"release": milliseconds(arena.release)}
    out["learner_takes"] = milliseconds(lambda: held.append(torch.empty(borrowed, dtype=torch.uint8, device=device)))
    held[0].fill_(255)  # nan, for whoever reads it as bf16
    held.clear()
    out["learner_gives"] = milliseconds(torch.cuda.empty_cache)
    both = milliseconds(arena.take_back)
    out["zero"] = milliseconds(lambda: [t.zero_() for t in arena.tensors])
    out["map"] = both - out["zero"]
    return out


def summary(values: list[float]) -> dict[str, float]:
    later = values[1:] or values
    return {"median": statistics.median(later), "min": min(later), "max": max(later), "first": values[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for kv_release.json")
    parser.add_argument("--gib", nargs="+", type=float, default=[4, 16, 40])
    parser.add_argument("--cycles", type=int, default=8)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device.")
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    result: dict[str, Any] = {"rows": [], **circumstances()}
    options.out.mkdir(parents=True, exist_ok=True)
    for gib in options.gib:
        row = measure(gib, options.cycles, device)
        result["rows"].append(row)
        (options.out / "kv_release.json").write_text(json.dumps(result, indent=1) + "\n")
        parts = {name: value["median"] for name, value in row.items() if isinstance(value, dict)}
        print(f"{gib:5.1f} GiB  " + "  ".join(f"{name} {value:.1f}" for name, value in parts.items()), flush=True)


if __name__ == "__main__":
    main()
