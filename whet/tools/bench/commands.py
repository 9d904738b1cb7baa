"""The commands of `whet bench`: `rollout` (is my GPU fast?) and `train` (arms by seeds), on this machine.

Both write JSON and show tables. Everything else that can be measured is a script in benchmarks/.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from whet.errors import WhetError
from whet.terminal import DataFolder, Sets, folder_set, out_console, say
from whet.text import printable

bench_app = typer.Typer(no_args_is_help=True, help="Measure whet against its peers on this machine.")

Out = Annotated[Path, typer.Option(help="Folder for the JSON result.")]
RESULTS = Path("benchmarks/results")


@bench_app.command("rollout")
def bench_rollout(
    out: Out = RESULTS,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="135m and 1.5b on a GPU, tiny on a CPU.")] = None,
    cells: Annotated[str, typer.Option(help="Cells of the grid, with commas between; all on a GPU if not given.")] = "",
    peers: Annotated[str, typer.Option(help="whet, vllm and generate, with commas between; all if not given.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 3,
    seconds: Annotated[float, typer.Option(help="After these, cells that are left are skipped.")] = float("inf"),
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """The engine beside vLLM and transformers, by batch and context; on a CPU a tiny model in two cells."""
    import torch

    if device not in ("auto", "cuda", "cpu"):
        raise WhetError(f'There is no device "{device}"; there are auto, cuda and cpu.')
    if device == "cuda" and not torch.cuda.is_available():
        raise WhetError("There is no CUDA device here; --device cpu measures the CPU.")
    device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    from whet.tools.bench.peers import PEERS
    from whet.tools.bench.rollout import decode_bench

    small = device == "cpu"  # a CPU takes minutes for what a GPU does in seconds
    result = decode_bench(
        out,
        device=device,
        shapes=shape or (("tiny",) if small else ("135m", "1.5b")),
        cells=names(cells) or (["b64_c512", "b8_c512"] if small else []),
        peers=names(peers) or tuple(PEERS),
        repeats=repeats,
        seconds=seconds,
        seed=seed,
        on_progress=tell,
    )
    show_grid(result)


def names(listed: str) -> list[str]:
    """
    >>> names("b64_p128, tail,")
    ['b64_p128', 'tail']
    """
    return [name.strip() for name in listed.split(",") if name.strip()]


def show_grid(result: Mapping[str, Any]) -> None:
    """Tokens per second of each peer in each cell, how many times as fast ours is, and our share of the attainable."""
    from whet.tools.bench.rollout import main_rate

    def shown(cell: Mapping[str, Any], peer: str) -> str:
        figures = cell["peers"].get(peer)
        if figures is None or "failed" in figures:
            return "" if figures is None else "failed"
        rate = "decode_tokens_per_second" if cell["decode_only"] else "tokens_per_second"
        ratio = cell["ratios"].get(peer, {}).get(rate)
        return f"{main_rate(figures, cell['decode_only']):,.0f}" + (f" ({ratio['median']:.1f}x)" if ratio else "")

    for shape, found in result["shapes"].items():
        peers = list(dict.fromkeys(name for cell in found["cells"].values() for name in cell["peers"]))
        table = Table("cell", *peers, "of attainable", title=f"{shape}, tokens/s (ours / theirs)")
        for name, cell in found["cells"].items():
            share = cell["peers"].get("whet", {}).get("share_of_attainable", {}).get("paper")
            table.add_row(name, *(shown(cell, peer) for peer in peers), "" if share is None else f"{share:.2f}")
        out_console.print(table)
        if gap := found.get("log_probs"):
            tell(f"Log-probs against the model: max {gap['max']:.2g}, mean {gap['mean']:.2g}, KL {gap['kl']:.2g}.")


def tell(line: str) -> None:
    say(printable(line, one_line=True), out_console)


@bench_app.command("train")
def bench_train(
    matrix: Annotated[Path, typer.Argument(help="A TOML matrix: recipe, seeds, start, arms.")],
    runs: Annotated[Path, typer.Option(help="Folder for the runs, one per cell.")] = Path("runs/matrix"),
    out: Out = RESULTS,
    arms: Annotated[str, typer.Option(help="Only these, with commas between; all if not given.")] = "",
    seeds: Annotated[str, typer.Option(help="Only these, with commas between; all if not given.")] = "",
    seconds: Annotated[float, typer.Option(help="No cell is begun that would end later.")] = float("inf"),
    beside: Annotated[int, typer.Option(min=1, help="Cells at a time; seconds are compared for 1 only.")] = 1,
    sets: Sets = None,
    data_folder: DataFolder = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run, and leave.")] = False,
) -> None:
    """Arms by seeds from the same weights, each cell a run. Finished cells are kept: call it again to go on."""
    from whet.tools.bench.matrix import make_start, read_plan
    from whet.tools.bench.train import CellWork, Places, planned

    if not all(seed.isdecimal() for seed in names(seeds)):
        raise WhetError(f'Seeds are whole numbers with commas between, got "{seeds}".')
    chosen = [*folder_set(data_folder), *(sets or [])]
    whole = read_plan(matrix, chosen, names(arms), [int(seed) for seed in names(seeds)])
    places = Places(plan=whole, runs=runs, out=out)
    lines = planned(places)
    table = Table("cell", "state", "minutes")
    for line in lines:
        table.add_row(line.cell.name, line.state, f"{line.seconds / 60:.1f}")
    left = sum(line.seconds for line in lines if line.state != "done") / 60
    table.add_row("", "to do", f"{left:.1f}" + (f", {beside} at a time" if beside > 1 else ""))
    out_console.print(table)
    if plan or all(line.state == "done" for line in lines):
        return
    from whet.tools.experiment import circumstances

    start = make_start(whole, runs, tell)
    work = CellWork(places=places, start=start, beside=beside, on_progress=tell, about=circumstances())
    if waiting := work.run(seconds):
        tell(f"{waiting} cells are left for another time; the same command goes on.")
