"""The sampler's kernel on a GPU against the same draw in eager torch and compiled by inductor.

    python benchmarks/sampler_kernel.py --out benchmarks/results [--sweep]

Each call is captured in a CUDA graph of many calls over different logits, so that neither the host nor a warm cache is
measured; `read_us` is what reading the logits once takes at the bandwidth measured here. --sweep also tries other chunk
sizes and warps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.fast.kernels import decode_triton as race_triton
from whet.fast.kernels.decode import race, race_reference
from whet.model.noise import MUL1, MUL2, STEP, TOKEN, row_key
from whet.tools.experiment import circumstances

BATCHES = (1, 8, 64, 256)
VOCABULARIES = (49_152, 151_936)
TILES = ((1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
COLD = 200 * 2**20
"""Bytes of logits a graph goes through: four times the second-level cache of an H200."""

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def compilable(logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """`reference` with its constants as numbers: tensors made while tracing would be copied from the host."""
    first, second, token = (n - 2**32 for n in (*STEP, TOKEN))
    x = (keys[0] + position * first)[:, None] + torch.arange(logits.shape[1], dtype=torch.int32, device="cuda") * token
    x = (x ^ ((x >> 16) & 0xFFFF)) * MUL1
    x = x ^ (keys[1] + position * second)[:, None]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (MUL2 - 2**32)
    x = x ^ ((x >> 16) & 0xFFFF)
    u = (((x >> 8) & 0xFFFFFF).float() * 2.0**-24 + 2.0**-25).clamp(max=1 - 2.0**-24)
    greedy = (temperature == 0)[:, None]
    log_probs = torch.log_softmax(logits.float() / temperature[:, None].masked_fill(greedy, 1.0), -1)
    drawn = torch.where(greedy, log_probs, log_probs - (-torch.log1p(-u)).log()).argmax(-1)
    return drawn, log_probs.gather(1, drawn[:, None])[:, 0]


def inputs(batch: int, vocab: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    copies = max(2, min(64, COLD // (batch * vocab * 2)))
    logits = [4 * torch.randn(batch, vocab, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    keys = torch.tensor([row_key(0, False, i, 0) for i in range(batch)], dtype=torch.int32).T.contiguous().cuda()
    position = torch.arange(batch, dtype=torch.int32, device="cuda")
    return logits, keys, position, torch.ones(batch, device="cuda")


def captured(calls: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph


def microseconds(calls: Callable[[], None], count: int, repeats: int = 7) -> dict[str, float]:
    """Median, least and most of one call out of `count` in a graph."""
    graph, times = captured(calls), []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    times = times[2:]
    return {k: round(f(times), 2) for k, f in (("us", statistics.median), ("least", min), ("most", max))}


def measure(draw: Draw, batch: int, vocab: int) -> dict[str, float]:
    logits, *rest = inputs(batch, vocab)

    def calls() -> None:
        for part in logits:
            draw(part, *rest)

    return microseconds(calls, len(logits))


def bandwidth() -> float:
    """Bytes a second of a read-only pass over 2 GiB."""
    data = torch.ones(2**29, device="cuda")
    return float(data.nbytes / (microseconds(lambda: data.sum(), 1)["least"] * 1e-6))


def agree(batch: int, vocab: int, compiled: Draw) -> dict[str, float]:
    """Rows whose token is not that of both others, and how far the kernel's log-probs are from float64."""
    logits, *rest = inputs(batch, vocab)
    token, log_prob = race(logits[0], *rest)
    want, _ = race_reference(logits[0], *rest)
    others = (token != want) | (token != compiled(logits[0], *rest)[0])
    exact = torch.log_softmax(logits[0].double(), -1).gather(1, token[:, None])[:, 0]
    return {"tokens_that_differ": int(others.sum()), "log_prob_error": float((log_prob - exact).abs().max())}


def cell(batch: int, vocab: int, compiled: Draw, read: float, sweep: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"batch": batch, "vocab": vocab, "read_us": round(batch * vocab * 2 / read * 1e6, 2)}
    row |= {"kernel": measure(race, batch, vocab), "compiled": measure(compiled, batch, vocab)}
    row |= {"eager": measure(race_reference, batch, vocab), **agree(batch, vocab, compiled)}
    if sweep:
        kept = race_triton.CHUNK, race_triton.WARPS
        row["sweep"] = {}
        for race_triton.CHUNK, race_triton.WARPS in TILES:
            row["sweep"][f"{race_triton.CHUNK} x {race_triton.WARPS}"] = measure(race, batch, vocab)["us"]
        race_triton.CHUNK, race_triton.WARPS = kept
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    read = bandwidth()
    result: dict[str, Any] = {"circumstances": circumstances(), "read_bytes_per_s": read, "cells": []}
    args.out.mkdir(parents=True, exist_ok=True)
    for vocab in VOCABULARIES:
        torch.compiler.reset()
        compiled = torch.compile(compilable, dynamic=False)
        for batch in BATCHES:
            row = cell(batch, vocab, compiled, read, args.sweep)
            result["cells"].append(row)
            print(json.dumps(row), flush=True)
            (args.out / "sampler_kernel.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
