"""The cells of a matrix, arms by seeds, each an ordinary `whet train` process, from the same bytes.

    python benchmarks/train.py benchmarks/maze_matrix.toml --runs runs/maze      # again until nothing is left to do

    RUNS/pool.jsonl  base/  start-HASH/     the training problems, the run that warm-started, the merged weights
    RUNS/ARM-seedN/  .toml  .log            a cell's run, its recipe, its output
    OUT/train/MATRIX/ARM-seedN.json         what is left of a finished cell

A finished cell is never run again, an interrupted one goes on from its checkpoint, so a matrix may be completed over
several calls, or by machines that share OUT. `proof.py` makes tables from the JSON alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from command_line import RESULTS, Out, run_script, tell
from matrix import (
    MatrixCell,
    MatrixPlan,
    OnLine,
    Start,
    defining_settings,
    differing,
    make_start,
    on_problems,
    read_plan,
    read_seeds,
)
from rich.table import Table

from whet import config, files
from whet.errors import WhetError
from whet.problems import load_problems
from whet.processes import available_cores
from whet.recipe import load_config, parse_config
from whet.report.arms import number
from whet.run import CONFIG, has_collapsed, read_metrics, read_rollouts
from whet.terminal import DataFolder, Sets, folder_set, out_console
from whet.tools.bench import names
from whet.tools.experiment import circumstances, last_words, start_run

app = typer.Typer()
# seconds that a cell has to finish its step and save; then it is killed, and stays unfinished
GRACE = 120.0


@dataclass(kw_only=True)
class Places:
    """Where a matrix lies on this machine."""

    plan: MatrixPlan
    runs: Path
    out: Path

    def run(self, cell: MatrixCell) -> Path:
        return self.runs / cell.name

    def result(self, cell: MatrixCell) -> Path:
        return self.out / "train" / self.plan.name / f"{cell.name}.json"

    def goes(self, cell: MatrixCell) -> Path:
        """File with [solo, seconds] of each process that worked on the cell; no seconds while it runs."""
        return self.runs / f"{cell.name}.goes.json"

    def read_goes(self, cell: MatrixCell) -> list[list[Any]]:
        return json.loads(self.goes(cell).read_bytes()) if self.goes(cell).is_file() else []

    def metrics(self, cell: MatrixCell) -> list[dict[str, Any]]:
        return read_metrics(self.run(cell)) if (self.run(cell) / CONFIG).is_file() else []

    def spent(self, cell: MatrixCell) -> float:
        """Seconds of its processes so far; for one that was killed, those in the metrics."""
        known = sum(seconds or 0.0 for _, seconds in self.read_goes(cell))
        return max(known, sum(row.get("time/total") or 0.0 for row in self.metrics(cell)))


class Planned(NamedTuple):
    cell: MatrixCell
    state: str  # done, begun or to do
    seconds: float  # that it took, or will take


def planned(places: Places) -> list[Planned]:
    """The state of every cell and the seconds it will take; refuses cells that were run with other settings.

    A cell will take as long as its arm's finished ones did, else as much of its cap as any did of theirs.
    """
    done = {}
    for cell in places.plan.cells:
        stored, path = {}, places.result(cell)
        if path.is_file():
            done[cell.name] = read_outcome(path)
            stored = done[cell.name]["settings"]
        elif (places.run(cell) / CONFIG).is_file():
            path = places.run(cell)
            stored = defining_settings(load_config(path / CONFIG))
            if places.plan.matrix.pool is not None:  # whose file stands in for the recipe's entry
                stored = {
                    key: value for key, value in stored.items() if not key.startswith("data.0.")
                }
        if wrong := differing(cell, stored):
            raise WhetError(
                f"{path} was run with other settings ({wrong}); move it away, or change the matrix back."
            )
    share = min(
        1.0,
        max(
            (found["wall_s"] / found["cap_s"] for found in done.values() if found["cap_s"]),
            default=1.0,
        ),
    )

    def line(cell: MatrixCell) -> Planned:
        if cell.name in done:
            return Planned(cell, "done", done[cell.name]["wall_s"])
        mine = [found["wall_s"] for found in done.values() if found["arm"] == cell.arm]
        spent, whole = places.spent(cell), median(mine) if mine else cell.seconds * share
        return Planned(cell, "begun" if spent else "to do", max(0.0, whole - spent))

    return [line(cell) for cell in places.plan.cells]


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits, asks the process to stop when its time is up, and kills it where it does not; says whether it asked."""
    for limit, stop in ((seconds, signal.SIGINT), (GRACE, signal.SIGKILL)):
        try:
            process.wait(limit)
            return stop == signal.SIGKILL
        except subprocess.TimeoutExpired:
            process.send_signal(stop)
    process.wait()
    return True


@dataclass(kw_only=True)
class CellWork:
    """The cells that are not done, `beside` at a time."""

    places: Places
    start: Start
    beside: int
    on_progress: OnLine
    about: Mapping[str, Any]  # the circumstances, for every JSON
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopped: bool = False  # from outside: what has not ended is no result

    def run(self, seconds: float) -> int:
        """Begins no cell that would end later than `seconds` from now; returns how many were left for that reason.

        A cell that fails does not stop the others; an error at the end names it and says why.
        """
        for path in map(self.places.result, self.places.plan.cells):
            if path.is_file() and (before := read_outcome(path)["start"]) != self.start.hashes:
                other = next(
                    name
                    for name in ("weights", "pool")
                    if before.get(name) != self.start.hashes.get(name)
                )
                raise WhetError(
                    f"{path} began from other {other} than {self.start.folder}; choose another --out."
                )
        begun, left, failed = time.monotonic(), list[str](), list[str]()

        def work(name: str) -> None:
            # others ended since
            line = next(line for line in planned(self.places) if line.cell.name == name)
            if time.monotonic() - begun + line.seconds > seconds:
                left.append(name)
                return
            try:
                self.train(line)
            except WhetError as error:
                self.on_progress(str(error))
                failed.append(str(error))

        with ThreadPoolExecutor(self.beside) as workers:
            try:
                list(
                    workers.map(
                        work,
                        [line.cell.name for line in planned(self.places) if line.state != "done"],
                    )
                )
            except BaseException:
                self.stopped = True
                workers.shutdown(wait=False, cancel_futures=True)
                for process in list(self.running.values()):
                    process.terminate()
                raise
        if failed:
            raise WhetError(" ".join(failed))
        return len(left)

    def train(self, line: Planned) -> None:
        cell, places = line.cell, self.places
        folder, goes, left = (
            places.run(cell),
            places.read_goes(cell),
            cell.seconds - places.spent(cell),
        )
        if left <= 0 or has_collapsed(folder):  # it ended after the command that began it
            self.end(cell, asked=True)
            return
        files.write_text(places.goes(cell), json.dumps([*goes, [self.beside == 1, None]]))
        # cells share the cores
        threads = max(1, available_cores() // self.beside) if self.beside > 1 else None
        began, process = (
            time.monotonic(),
            start_run(folder, cell_settings(cell, self.start), threads),
        )
        self.running[cell.name] = process
        self.on_progress(f"{cell.name} {'goes on' if line.state == 'begun' else 'begins'}.")
        asked = wait_for(process, left)
        del self.running[cell.name]
        took = [self.beside == 1, round(time.monotonic() - began, 2)]
        files.write_text(places.goes(cell), json.dumps([*goes, took]))
        if self.stopped:
            return
        # A cell may be asked while it still loads, or when all is done and its process is about to go.
        over = process.returncode == 0 or (asked and process.returncode in (130, -signal.SIGINT))
        if not over and not has_collapsed(folder):
            raise WhetError(
                f"The cell {cell.name} failed: {last_words(folder, process.returncode)}"
            )
        self.end(cell, asked=asked)

    def end(self, cell: MatrixCell, *, asked: bool) -> None:
        """Writes the JSON of a cell, which is what makes it done. asked: it was stopped when its time was up."""
        places, rows, settings = self.places, self.places.metrics(cell), cell.settings
        if not rows:
            raise WhetError(
                f"The cell {cell.name} had {cell.seconds:.0f} s, and began nothing in them; raise its seconds."
            )
        budgets = {"tokens_generated": settings.token_budget, "time_s": settings.time_budget}
        spent = any(
            budget and (rows[-1].get(name) or 0.0) >= budget for name, budget in budgets.items()
        )
        ended_by = "recipe" if spent or rows[-1]["step"] >= settings.steps else "time"
        if rows[-1].get("collapsed"):
            ended_by = "collapse"
        if ended_by == "time" and not asked:
            raise WhetError(
                f"The cell {cell.name} was stopped from outside; the same command goes on with it."
            )
        goes = places.read_goes(cell)
        found = {
            **self.about,
            "matrix": places.plan.name,
            "solo": all(solo for solo, _ in goes),
            "goes": len(goes),
            "wall_s": round(places.spent(cell), 1),
            "cap_s": cell.seconds,
            "ended_by": ended_by,
            "start": dict(self.start.hashes),
            **outcome(cell, places.run(cell), places.plan.evaluation),
        }
        write_outcome(places.result(cell), found)
        scores = [row[-2] for row in found["rows"] if row[-2] is not None]
        reached = f"accuracy {scores[0]:.3f} to {scores[-1]:.3f}" if scores else "never evaluated"
        self.on_progress(
            f"{cell.name}: {found['rows'][-1][0]} updates, {reached}, {found['wall_s']:.0f} s."
        )


def cell_settings(cell: MatrixCell, start: Start) -> config.Config:
    """The cell's recipe on the common weights and problems, without a warm start of its own."""
    tree = {
        **cell.tree,
        "warm_start": [],
        "model": {**cell.tree.get("model", {}), "name": str(start.folder)},
    }
    return (
        parse_config(tree) if start.pool is None else on_problems(tree, cell.settings, start.pool)
    )


# ---- what a finished cell leaves

# Column -> metric: first totals since the start, of training alone, then those of the update.
METRICS = {
    "step": "step",
    "tokens": "tokens_generated",
    "tokens_trained": "tokens_trained",
    "rollouts": "rollouts",
    "visits": "prompts_seen",
    "seconds": "time_s",
    "signal": "curriculum/signal_share",
    "trained_signal": "learn/signal_share",
    "groups": "batch/groups",
    "right": "verdict/right",
    "entropy": "learn/entropy",
    "length": "length/mean",
    "truncated": "length/truncated",
    "gradient": "learn/grad_norm",
    "mismatch": "learn/mismatch",
    "generate_s": "time/generate",
    "train_s": "time/train",
    "draft_s": "time/draft",
    "gpu_idle": "time/gpu_idle",
    "stage": "curriculum/stage",
}
# Last: tokens and seconds of all evaluations so far; accuracy and mean length where this update was evaluated.
COLUMNS = (*METRICS, "eval_tokens", "eval_seconds", "accuracy", "eval_length")


def outcome(cell: MatrixCell, folder: Path, evaluation: str) -> dict[str, Any]:
    """The JSON of a cell, from the folder of its run: one row per update, cumulative where it counts something."""
    problems = load_problems(load_config(folder / CONFIG))
    tries = {entry.name: entry.n for entry in cell.settings.eval}
    sizes = {name: len(prompts) * tries.get(name, 1) for name, prompts in problems.evals.items()}
    if evaluation not in sizes:
        raise WhetError(
            f'The run {folder} has no evaluation "{evaluation}" (it has: {", ".join(sizes) or "none"}).'
        )
    metrics = read_metrics(folder)
    scores = {
        name: [
            [row["step"], _short(x)]
            for row in metrics
            if (x := number(row, f"eval/{name}/accuracy")) is not None
        ]
        for name in sizes
    }
    made = [
        (row["step"], row["prompt_id"]) for row in read_rollouts(folder) if row["phase"] != "eval"
    ]
    # A run keeps the first `save.rollouts` of a step; where a step made more, the prompts are not all counted.
    most = max(Counter(step for step, _ in made).values(), default=0)
    return {
        "arm": cell.arm,
        "seed": cell.seed,
        "note": cell.note,
        "evaluation": {
            "name": evaluation,
            "prompts": len(problems.evals[evaluation]),
            "n": tries.get(evaluation, 1),
        },
        "pool": len(problems.train),
        "distinct_prompts": len({prompt for _, prompt in made}),
        "distinct_is_least": most >= cell.settings.save.rollouts,
        "also": {
            name: scores[name] for name in sizes if name != evaluation
        },  # by set: [step, accuracy], ...
        "settings": defining_settings(cell.settings),
        "columns": list(COLUMNS),
        "rows": rows_of(metrics, evaluation, sizes),
    }


def rows_of(
    metrics: Sequence[Mapping[str, Any]], evaluation: str, sizes: Mapping[str, int]
) -> list[list[Any]]:
    """One row per update. `sizes`: rollouts of each evaluation set; its tokens are their number times the mean length.

    >>> metrics = [{"step": 0, "eval/a/accuracy": 0.1, "eval/a/length": 20.0, "time/eval": 2.0}, {"step": 1}]
    >>> [row[-4:] for row in rows_of(metrics, "a", {"a": 100})]
    [[2000, 2.0, 0.1, 20], [2000, 2.0, None, None]]
    """
    rows: list[list[Any]] = []
    tokens, seconds = 0.0, 0.0
    for row in metrics:
        tokens += sum(
            (number(row, f"eval/{name}/length") or 0.0) * size for name, size in sizes.items()
        )
        seconds += number(row, "time/eval") or 0.0
        found = [_short(number(row, key)) for key in METRICS.values()]
        scores = [
            _short(number(row, f"eval/{evaluation}/{what}")) for what in ("accuracy", "length")
        ]
        rows.append([*found, round(tokens), round(seconds, 2), *scores])
    return rows


def write_outcome(path: Path, found: Mapping[str, Any]) -> None:
    """Write the JSON with one line per row: small, and readable."""
    head = {key: value for key, value in found.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in found["rows"])
    files.write_text(path, json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')


def read_outcome(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if {"arm", "seed", "columns", "rows"} <= found.keys():
            return found
        what = "it is no cell of a matrix"
    except (OSError, ValueError, AttributeError) as error:
        what = str(error)
    raise WhetError(f"{path} cannot be used: {what}; move it away, and the cell is run again.")


def _short(value: float | None) -> float | int | None:
    """
    >>> [_short(v) for v in (None, 3.0, 0.123456789, 12345678.0)]
    [None, 3, 0.12346, 12345678]
    """
    if value is None:
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")


@app.command()
def main(
    matrix: Annotated[Path, typer.Argument(help="A TOML matrix: recipe, seeds, start, arms.")],
    runs: Annotated[Path, typer.Option(help="Folder for the runs, one per cell.")] = Path(
        "runs/matrix"
    ),
    out: Out = RESULTS,
    arms: Annotated[
        str, typer.Option(help="Only these, with commas between; all if not given.")
    ] = "",
    seeds: Annotated[
        str, typer.Option(help="Only these, with commas between; all if not given.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="No cell is begun that would end later.")] = float(
        "inf"
    ),
    beside: Annotated[
        int, typer.Option(min=1, help="Cells at a time; seconds are compared for 1 only.")
    ] = 1,
    sets: Sets = None,
    data_folder: DataFolder = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be run, and leave.")
    ] = False,
) -> None:
    """Arms by seeds from the same weights, each cell a run. Finished cells are kept: call it again to go on."""
    chosen = [*folder_set(data_folder), *(sets or [])]
    whole = read_plan(matrix, chosen, names(arms), read_seeds(seeds))
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
    start = make_start(whole, runs, tell)
    work = CellWork(
        places=places, start=start, beside=beside, on_progress=tell, about=circumstances()
    )
    if waiting := work.run(seconds):
        tell(f"{waiting} cells are left for another time; the same command goes on.")


if __name__ == "__main__":
    run_script(app)
