"""The commands of `whet bench`: `rollout` (is my GPU fast?) and `scale` (a step on many GPUs, simulated).

Both write JSON and show tables. Everything else that can be measured is a script in benchmarks/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from whet import files
from whet.errors import WhetError
from whet.terminal import out_console, say
from whet.text import printable

bench_app = typer.Typer(no_args_is_help=True, help="Measure whet on this machine, or simulate it on many GPUs.")

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


@bench_app.command("scale")
def bench_scale(
    out: Out = RESULTS,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas between.")] = "8,64,256,1024",
    learners: Annotated[int | None, typer.Option(min=1, help="GPUs that only train; if not given, the best.")] = None,
    shape: Annotated[
        str, typer.Option(help="Measured latencies to begin with: 1.5b or 135m, both on an H200.")
    ] = "1.5b",
    inputs: Annotated[Path | None, typer.Option(help="TOML or JSON of your own latencies and lengths.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="One input: --set slots=128. Repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Simulate a training step on 8 to 1,024 GPUs: its seconds, idle GPUs, the gain of each technique, the best split.

    No GPU is needed, and it takes half a minute. The inputs are time per token by batch, acceptance of drafts, training
    throughput, bandwidth, failures and lengths of responses. The last line names the file that lists them with their
    sources; a copy of it with your own figures is what --inputs takes.
    """
    from whet.tools.bench.scale import FIGURES, read_inputs, study

    known = read_inputs(shape, inputs, sets or [])
    sizes = names(gpus)
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise WhetError(f'--gpus takes whole numbers above 0 with commas between, got "{gpus}".')
    if learners and (few := min(map(int, sizes))) <= learners:
        raise WhetError(f"--learners {learners} leaves no GPU of {few} to generate.")
    found = []
    for size in sizes:
        tell(f"{size} GPUs ...")
        found.append(study(known, int(size), learners, seed))
    show_scale(found)
    result = {"seed": seed, "sizes": found, "inputs": known.model_dump()}
    path = out / "scale.json"
    files.write_text(path, json.dumps(result, indent=1) + "\n")
    tell(f"Written: {path}. The inputs that --inputs may change are listed in {FIGURES}.")


def show_scale(found: Sequence[Mapping[str, Any]]) -> None:
    """Two tables with a column for each number of GPUs: seconds of the layouts, and gains of the techniques."""
    sizes = [f"{size['gpus']:,} GPUs" for size in found]
    seconds = Table("layout", *sizes, title="seconds of an update (idle share of all GPUs; GPUs that only train)")
    gains = Table("technique", *sizes, title="times as fast as barrier without it")

    def cell(arm: Mapping[str, Any] | None) -> str:
        if arm is None:
            return ""
        only = f"; {arm['learners']}" if arm["learners"] else ""
        return f"{arm['step_s']:.2f} ({arm['idle_share']:.0%}{only})"

    for name in ("barrier", "barrier, split", "stream", "stream, split", "all", "all, split"):
        seconds.add_row(name, *(cell(size["arms"].get(name)) for size in found))
    for name in ("stream", "screening", "allocation", "speculation", "speculation, spot", "all"):
        gains.add_row(name, *(f"{size['arms'][name]['gain']:.2f}" for size in found))
    out_console.print(seconds)
    out_console.print(gains)
