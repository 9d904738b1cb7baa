"""silu(gate) * up of few tokens on a GPU: the kernel against the same by inductor around a library's product.

    python benchmarks/gated_kernel.py --out benchmarks/results

One call a layer with weights of its own, captured in a CUDA graph over all layers, so that neither the host nor the
second-level cache is measured; `share` is of the bandwidth that a plain read reaches. Repeats are interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from sampler_kernel import captured
from torch import Tensor

from whet.fast.kernels.layer import gated, gated_reference
from whet.tools.experiment import circumstances

SHAPES = {"1.5b": (28, 8960, 1536), "135m": (30, 1536, 576), "7b": (28, 18944, 3584)}
"""Layers, inner width, width."""
TOKENS = (2, 8, 16, 32, 64, 128)
"""A single row is decoded as two."""
REPLAYS = 20

Form = Callable[[Tensor, Tensor], Tensor]


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(REPLAYS):
        graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / REPLAYS


def measure(name: str, tokens: int, forms: dict[str, Form], repeats: int, bandwidth: float) -> dict[str, object]:
    layers, n, k = SHAPES[name]
    weights = [torch.randn(2 * n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for _ in range(layers)]
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    graphs = {form: captured(lambda call=call: [call(x, w) for w in weights]) for form, call in forms.items()}
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(repeats):
        for form, graph in graphs.items():
            times[form].append(1e6 * seconds(graph) / layers)
    row: dict[str, object] = {"shape": name, "tokens": tokens}
    for form, taken in times.items():
        middle = statistics.median(taken)
        share = 4 * n * k / bandwidth / middle * 1e6
        row[form] = {"us": round(middle, 2), "range": [round(min(taken), 2), round(max(taken), 2)], "share": share}
    gap = (gated(x, weights[0]).double() - gated_reference(x.double(), weights[0].double())).abs().max()
    return {**row, "off_by": float(gap)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=4.68e12, help="bytes a second of a plain read")
    options = parser.parse_args()
    forms: dict[str, Form] = {"compiled": torch.compile(gated_reference, dynamic=True), "kernel": gated}
    result = {**circumstances(), "bandwidth": options.bandwidth, "repeats": options.repeats, "rows": []}
    with torch.no_grad():
        for name in SHAPES:
            for tokens in TOKENS:
                row = measure(name, tokens, forms, options.repeats, options.bandwidth)
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
    (options.out / "gated_kernel.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
