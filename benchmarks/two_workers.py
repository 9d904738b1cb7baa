"""Two processes that share one device against one process: the share of rollouts that are the same, and the speed.

    python benchmarks/two_workers.py recipes/chain.toml --device cuda --steps 8 --out benchmarks/results

Both train from the same weights, those after the recipe's warm start, in single precision and under barrier. The two
processes have half of the device's memory and half of the slots each, and exchange gradients over gloo, since NCCL
refuses two processes on one GPU. Keys decide the tokens, so rollouts differ only where rounding does: batches of
another size run by other kernels. A rollout that differs changes the weights a little, so later steps may differ more;
the shares are given step by step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from command_line import RESULTS, Out, run_script, tell

from whet import api, config, processes
from whet.cluster import crew
from whet.model import memory
from whet.recipe import load_config
from whet.report.live import RunProgress
from whet.run import read_metrics
from whet.tools.experiment import circumstances, replace_run

WORKERS = 2
CONTEXT = 2**30  # bytes that CUDA itself takes in each process

app = typer.Typer(add_completion=False)


@app.command()
def main(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe, or its name in whet list.")],
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    steps: Annotated[int, typer.Option(min=2, help="Updates of each run.")] = 8,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override a setting. Repeatable.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/two_workers"),
    out: Out = RESULTS,
) -> None:
    """Compare two processes on one device with one process."""
    result = compare(recipe, runs, [*(sets or []), f"model.device={device}"], steps)
    out.mkdir(parents=True, exist_ok=True)
    (out / "two_workers.json").write_text(json.dumps({"circumstances": circumstances(), **result}, indent=1) + "\n")
    tell(f"{result['same']:.2%} of {result['rollouts']} rollouts are the same; by step {result['same_by_step']}")
    for name in ("one", "two"):
        found = result[name]
        tell(f"{name}: {found['tokens_per_s']:,.0f} tokens per second, {found['step_s']:.2f} seconds per step")


def compare(recipe: Path, runs: Path, sets: Sequence[str], steps: int) -> dict[str, Any]:
    """Run both, and say what they have in common."""
    sets = [*sets, "model.dtype=float32", "rollout.mode=barrier", "save.rollouts=1000000", f"save.every={steps}"]
    settings = load_config(recipe, [*sets, f"steps={steps}"])
    if settings.warm_start:
        train(load_config(recipe, [*sets, "steps=0"]), runs / "base")
        base = max((runs / "base" / "checkpoints").glob("step_*"))
        settings = load_config(recipe, [*sets, f"steps={steps}", f'model.name="{base}"', "warm_start=[]"])
    slots = settings.rollout.slots
    train(settings, runs / "one")
    with one_device():
        half = settings.rollout.model_copy(update={"slots": max(1, slots // WORKERS)})
        train(settings.model_copy(update={"rollout": half}), runs / "two", WORKERS)
    pairs = list(same_rollouts(runs / "one", runs / "two"))
    return {
        "recipe": recipe.name,
        "steps": steps,
        "slots": slots,
        "same": fmean(same for _, same in pairs),
        "rollouts": len(pairs),
        "same_by_step": [
            round(fmean(same for step, same in pairs if step == number), 4)
            for number in dict.fromkeys(step for step, _ in pairs)
        ],
        "one": speed(runs / "one"),
        "two": speed(runs / "two"),
    }


def train(settings: config.Config, folder: Path, gpus: int = 1) -> None:
    replace_run(folder)
    with closing(RunProgress()) as watcher:
        api.run_recipe(settings, folder, watcher=watcher, gpus=gpus)


def same_rollouts(one: Path, two: Path) -> Iterator[tuple[str, bool]]:
    """For each rollout of `one`, the file that it is in and whether `two` wrote the same."""
    for path in sorted((one / "rollouts").glob("step*")):
        mine, theirs = (
            {(row["group_id"], row["index"]): (row["length"], row["response"]) for row in map(json.loads, text)}
            for text in (path.read_text().splitlines(), (two / "rollouts" / path.name).read_text().splitlines())
        )
        yield from ((path.stem, theirs.get(key) == row) for key, row in mine.items())


def speed(folder: Path) -> dict[str, float]:
    """Without the first update, in which things are made that are used again."""
    rows = read_metrics(folder)[1:]
    tokens = rows[-1]["tokens_generated"] - rows[0]["tokens_generated"]
    return {
        "tokens_per_s": tokens / sum(row["time/generate"] for row in rows[1:]),
        "step_s": (rows[-1]["time_s"] - rows[0]["time_s"]) / (len(rows) - 1),
        "train_s": fmean(row["time/train"] for row in rows[1:]),
    }


# ---- several processes on one device, which `whet train --gpus` refuses


@contextmanager
def one_device() -> Iterator[None]:
    """While it lasts, the processes of a run have the first device together."""
    before = processes.check_gpus, processes.member_environments, crew.COMMAND

    def environments(plan: Any, gpus: int) -> tuple[list[dict[str, str]], str]:
        (own, *_), _ = before[1](plan, 1)
        return [own] * gpus, "gloo"

    processes.check_gpus = lambda settings, gpus: None
    processes.member_environments = environments
    crew.COMMAND = (sys.executable, str(Path(__file__).resolve()), "member")
    try:
        yield
    finally:
        processes.check_gpus, processes.member_environments, crew.COMMAND = before


def serve_half(handle: int, parent: int) -> None:
    """The program of such a process: it has its share of the memory, whatever the other has taken."""
    if torch.cuda.is_available():
        share = torch.cuda.mem_get_info()[1] // WORKERS - CONTEXT
        torch.cuda.set_per_process_memory_fraction(1.0 / WORKERS)
        memory.free_memory = lambda device: share
    processes.serve_member(handle, parent)


if __name__ == "__main__":
    if sys.argv[1:2] == ["member"]:
        serve_half(int(sys.argv[2]), int(sys.argv[3]))
    else:
        run_script(app)
