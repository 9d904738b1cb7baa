"""The command `whet bench rollout`: how fast the engine is on this machine.

It writes JSON and shows a table. Everything else that can be measured is a script in benchmarks/.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from whet.errors import WhetError
from whet.terminal import out_console, say
from whet.text import printable

bench_app = typer.Typer(no_args_is_help=True, help="Measure whet on this machine.")

Out = Annotated[Path, typer.Option(help="Folder for the JSON result.")]
RESULTS = Path("benchmarks/results")


@bench_app.callback()
def bench() -> None:
    """Measure whet on this machine."""


@bench_app.command("rollout")
def bench_rollout(
    out: Out = RESULTS,
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")
    ] = "auto",
    shape: Annotated[
        list[str] | None, typer.Option(help="135m and 1.5b on a GPU, tiny on a CPU.")
    ] = None,
    cells: Annotated[
        str, typer.Option(help="Cells of the grid, with commas between; all on a GPU if not given.")
    ] = "",
    peers: Annotated[
        str, typer.Option(help="whet, vllm and generate, with commas between; all if not given.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 3,
    seconds: Annotated[
        float, typer.Option(help="After these, cells that are left are skipped.")
    ] = float("inf"),
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Time the engine beside vLLM and transformers.

    It does so by batch and context; on a CPU a tiny model in two cells.
    """
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
        return f"{main_rate(figures, cell['decode_only']):,.0f}" + (
            f" ({ratio['median']:.1f}x)" if ratio else ""
        )

    for shape, found in result["shapes"].items():
        peers = list(
            dict.fromkeys(name for cell in found["cells"].values() for name in cell["peers"])
        )
        table = Table("cell", *peers, "of attainable", title=f"{shape}, tokens/s (ours / theirs)")
        for name, cell in found["cells"].items():
            share = cell["peers"].get("whet", {}).get("share_of_attainable", {}).get("paper")
            table.add_row(
                name,
                *(shown(cell, peer) for peer in peers),
                "" if share is None else f"{share:.2f}",
            )
        out_console.print(table)
        if gap := found.get("log_probs"):
            tell(
                f"Log-probs against the model: max {gap['max']:.2g}, mean {gap['mean']:.2g}, KL {gap['kl']:.2g}."
            )


def tell(line: str) -> None:
    say(printable(line, one_line=True), out_console)
