"""The attention kernel in a CUDA graph: microseconds a call and the share of the read bandwidth it reaches.

    python benchmarks/attention_kernel.py --out benchmarks/results
    python benchmarks/attention_kernel.py --out DIR --heads 12/2/128 --batch 64 --context 4096 --tiles sweep
    python benchmarks/attention_kernel.py --out DIR --new 1 --tiles 16,64,2,3,1 16,64,2,4,1 --splits 1 4 16

Every call reads other pages than the calls before it, in random order, so that no key comes from the L2 cache. The
share is of what a plain read of 2 GiB reaches on the same device in the same run. Bytes are those of keys and values.
`--tiles` takes rows,keys,warps,stages,ahead; `plan` is the planned tile, `sweep` the planned one and its neighbours.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.fast.kernels.attention import Tile, plan_splits, plan_tile
from whet.fast.kernels.attention_triton import launch
from whet.model.ops import paged_attention as reference
from whet.tools.experiment import circumstances

PAGE = 64
HEADS = ["9/3/64", "12/2/128", "14/2/64", "28/4/128"]
COLD = 256 * 2**20
"""Bytes between two reads of one key: five times the L2 cache of an H200."""


@triton.jit
def read_kernel(
    numbers: tl.tensor, sums: tl.tensor, BLOCK: tl.constexpr, TURNS: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK * TURNS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for turn in range(TURNS):
        total += tl.load(numbers + at + turn * BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def graph_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Best time of one replay of what `call` launches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def read_bandwidth() -> float:
    """Bytes a second of a pass over 2 GiB that writes next to nothing; the best of a few shapes of it."""
    numbers = torch.zeros(2**29, dtype=torch.int32, device="cuda")
    sums = torch.empty(2**20, dtype=torch.int32, device="cuda")
    times = []
    for block, turns, warps in itertools.product((1024, 2048, 4096), (4, 16), (4, 8)):
        grid = (numbers.numel() // (block * turns),)
        times.append(
            graph_seconds(
                lambda g=grid, b=block, t=turns, w=warps: read_kernel[g](
                    numbers, sums, b, t, num_warps=w
                )
            )
        )  # type: ignore[misc]
    return numbers.nbytes / min(times)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape of the grid."""

    heads: int
    kv_heads: int
    dim: int
    new: int
    context: int
    batch: int

    @property
    def bytes(self) -> int:
        return self.batch * self.context * self.kv_heads * self.dim * 2 * 2

    @property
    def flops(self) -> float:
        """Two products over the keys each query sees."""
        return (
            4.0
            * self.batch
            * self.heads
            * self.dim
            * self.new
            * (self.context - (self.new - 1) / 2)
        )

    def inputs(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The call without its table, and tables of pages that no other table names."""
        width = -(-self.context // PAGE)
        sets = min(max(-(-COLD // self.bytes), 1), 512)
        pages = sets * self.batch * width
        shape = pages + 1, self.kv_heads, PAGE, self.dim
        keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        tables = torch.randperm(pages, device="cuda").int().view(sets, self.batch, width).unbind(0)
        query = torch.randn(
            self.batch * self.new, self.heads, self.dim, device="cuda", dtype=torch.bfloat16
        )
        length = torch.full((self.batch,), self.context, dtype=torch.int32, device="cuda")
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * self.new
        call = {"query": query, "keys": keys, "values": values, "length": length, "starts": starts}
        return {**call, "most": self.new, "scaling": self.dim**-0.5}, list(tables)


def tiles_of(cell: Cell, wanted: list[str]) -> Iterator[Tile]:
    planned = plan_tile(cell.new, cell.heads // cell.kv_heads, cell.dim, cell.dim, 2)
    for text in wanted:
        if text in ("plan", "sweep"):
            yield planned
        if text == "sweep":
            for stages, ahead in ((2, True), (4, True), (5, True), (3, False)):
                yield dataclasses.replace(planned, stages=stages, ahead=ahead)
            for warps in {1, 2, 4, 8} - {planned.warps}:
                yield dataclasses.replace(planned, warps=warps)
            yield dataclasses.replace(planned, keys=32)
            yield dataclasses.replace(planned, keys=32, stages=4)
            yield dataclasses.replace(planned, keys=128, stages=2)
            if planned.rows > 16:
                yield dataclasses.replace(planned, rows=planned.rows // 2)
        elif text != "plan":
            rows, keys, warps, stages, ahead = map(int, text.split(","))
            yield Tile(rows, keys, warps, stages, bool(ahead))


def splits_of(cell: Cell, wanted: list[int]) -> list[int]:
    width = -(-cell.context // PAGE)
    planned = plan_splits(cell.batch, cell.kv_heads, cell.new, width)
    around = {planned // 2, planned, planned * 2, planned * 4} if cell.new <= 64 else {1}
    return wanted or sorted(s for s in around if 1 <= s <= width)


def error(call: dict[str, Any], table: Tensor, tile: Tile, splits: int) -> float:
    """Largest distance to the reference on the first rows: a fast wrong kernel is no result."""
    few = min(table.shape[0], 4)
    part = {**call, "length": call["length"][:few], "starts": call["starts"][: few + 1]}
    part["query"] = call["query"][: few * call["most"]]
    table = table[:few].contiguous()
    got = launch(**part, table=table, tile=tile, splits=splits)
    return (got.float() - reference(**part, table=table).float()).abs().max().item()


def measure(cell: Cell, options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    call, tables = cell.inputs()
    order = [tables[i % len(tables)] for i in range(max(len(tables), 8))]
    rows = []
    planned_splits = plan_splits(cell.batch, cell.kv_heads, cell.new, tables[0].shape[1])
    planned_tile = next(tiles_of(cell, ["plan"]))
    for tile, splits in itertools.product(
        tiles_of(cell, options.tiles), splits_of(cell, options.splits)
    ):
        row = {**dataclasses.asdict(cell), "splits": splits, "tile": dataclasses.asdict(tile)}
        row["planned"] = splits == planned_splits and tile == planned_tile
        try:
            row["error"] = error(call, tables[0], tile, splits)

            def replay(tile: Tile = tile, splits: int = splits) -> None:
                for table in order:
                    launch(**call, table=table, tile=tile, splits=splits)

            seconds = graph_seconds(replay) / len(order)
        except triton.runtime.errors.OutOfResources as failure:
            row["failed"] = str(failure).splitlines()[0]
        else:
            row["us"] = round(seconds * 1e6, 2)
            row["share"] = round(cell.bytes / seconds / bandwidth, 3)
            row["tflops"] = round(cell.flops / seconds / 1e12, 1)
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    tile = row["tile"]
    shape = f"{row['heads']}/{row['kv_heads']} d{row['dim']} q{row['new']} ctx {row['context']} B {row['batch']}"
    how = (
        f"S {row['splits']} tile {tile['rows']}x{tile['keys']} "
        f"w{tile['warps']} s{tile['stages']} a{int(tile['ahead'])}"
    )
    result = (
        row.get("failed")
        or f"{row['us']:9.2f} us {row['share']:6.1%} {row['tflops']:6.1f} TF err {row['error']:.4f}"
    )
    print(f"{shape:38} {how:30} {'*' if row['planned'] else ' '} {result}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for attention_kernel.json")
    parser.add_argument("--heads", nargs="+", default=HEADS, help="query heads/kv heads/head size")
    parser.add_argument("--new", nargs="+", type=int, default=[1, 5, 9], help="queries a row")
    parser.add_argument("--context", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument(
        "--splits", nargs="+", type=int, default=[], help="instead of those around the planned"
    )
    parser.add_argument(
        "--tiles", nargs="+", default=["plan"], help="rows,keys,warps,stages,ahead; plan; sweep"
    )
    parser.add_argument(
        "--prompts", action="store_true", help="also prompts of 1,024 tokens, 8 at once"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device.")
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    shapes = [tuple(map(int, text.split("/"))) for text in options.heads]
    cells = [
        Cell(*s, *rest)
        for s in shapes
        for rest in itertools.product(options.new, options.context, options.batch)
    ]
    cells += [Cell(*s, 1024, 1024, 8) for s in shapes if options.prompts]
    result = {"read_bandwidth": bandwidth, "rows": [], **circumstances()}
    options.out.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        result["rows"] += measure(cell, options, bandwidth)
        # Written after every cell: a run that is cut short keeps what it measured.
        (options.out / "attention_kernel.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
