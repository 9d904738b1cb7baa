"""Seconds of an update that the simulation of `whet bench scale` predicts, beside those that runs have measured.

    python benchmarks/scale_measured.py runs/one runs/two@2               # @2 for a run with --gpus 2
    python benchmarks/scale_measured.py RUN --shape 135m --set node=4     # what no run shows, from elsewhere

The inputs of the simulation are fitted to the first run, and every run is simulated with them, with its own number of
workers and its own sizes. So the error of the first run says little: the figures are its own. The script writes
scale_measured.json, which holds the fitted inputs; `whet bench scale --inputs` takes that file. docs/scale.md says how
far off the simulation was.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from command_line import RESULTS, run_script, tell
from rich.table import Table
from rich.text import Text

from whet import files
from whet.errors import WhetError
from whet.recipe import load_config
from whet.run import CONFIG, read_metrics
from whet.terminal import out_console
from whet.text import printable
from whet.tools.bench.scale import Layout, LengthDraws, ScaleInputs, read_inputs, simulate


class MeasuredRun:
    """The updates of a run folder, named as RUN, or RUN@WORKERS, since the folder does not say how many there were."""

    def __init__(self, named: str, warm: int = 1) -> None:
        """warm: updates in which things are compiled; they do not count."""
        folder, at, count = named.rpartition("@")
        if at and not (count.isdecimal() and int(count)):
            raise WhetError(f'A run is named as RUN or RUN@WORKERS, as in "runs/two@2"; got "{named}".')
        self.folder, self.workers = Path(folder if at else named), int(count) if at else 1
        rows = [row for row in read_metrics(self.folder) if row.get("step")]
        if not rows:
            raise WhetError(f"The run {self.folder} has no step to measure.")
        self.rows = rows[warm:] or rows
        self.settings = load_config(self.folder / CONFIG)
        self.train_s = self.of("time/train") + self.of("time/log_probs", 0.0)
        apart = ("time/save", "time/eval", "time/warm_start")
        self.step_s = self.of("time/total") - sum(self.of(name, 0.0) for name in apart)

    def of(self, name: str, absent: float | None = None) -> np.ndarray:
        """A metric by update."""
        found = [row.get(name, absent) for row in self.rows]
        if None in found:
            raise WhetError(f"The run {self.folder} has a step without {name}.")
        return np.array(found, np.float64)


def fitted_line(seconds: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Least squares of seconds = a counts + b tokens, with neither below 0: tokens are never free.

    >>> [round(x, 9) for x in fitted_line(np.array([3.0, 4.0]), np.array([1, 1]), np.array([10, 20]))]
    [2.0, 0.1]
    """
    (a, b), *_ = np.linalg.lstsq(np.stack([counts, tokens], axis=1), seconds, rcond=None)
    return (float(a), float(b)) if min(a, b) >= 0 else (0.0, float(seconds.sum() / tokens.sum()))


def length_ranks(mean: float, p50: float, p90: float, p99: float, most: float) -> list[tuple[float, float]]:
    """Lengths by rank, with a shortest one that makes their mean right: the mean of each stretch is that of its ends.

    >>> length_ranks(10, 10, 10, 10, 10)[0], length_ranks(100, 90, 180, 200, 200)[0]
    ((0.0, 10.0), (0.0, 17.6))
    """
    above = 0.4 * (p50 + p90) / 2 + 0.09 * (p90 + p99) / 2 + 0.01 * (p99 + most) / 2
    low = min(max(1.0, 4 * (mean - above) - p50), p50)
    return [(0.0, round(low, 6)), (0.5, p50), (0.9, p90), (0.99, p99), (1.0, most)]


def fit(run: MeasuredRun, base: ScaleInputs) -> ScaleInputs:
    """The inputs of a run in which GPUs generate and train in turn: latencies, lengths and signal, by its metrics."""
    decoding = run.of("rollout/seconds")  # of all workers
    once, each = fitted_line(decoding, run.of("rollout/steps"), run.of("rollout/tokens"))
    update, token = fitted_line(run.train_s, np.ones_like(run.train_s), run.of("batch/tokens") / run.workers)
    host = run.step_s - run.train_s - run.of("time/generate", 0.0)  # a step of a stream may need none
    seen = [run.of(f"length/{name}", math.nan) for name in ("mean", "p50", "p90", "p99", "max")]
    if np.isnan(seen).all():
        raise WhetError(f"The run {run.folder} says nothing of lengths (length/mean).")
    trained = run.of("batch/groups").sum() * run.settings.curriculum.rollouts
    found = {
        "decode_ms": {1: 1e3 * (once + each), 1001: 1e3 * (once + 1001 * each)},
        "prompt_ms": 0.0,  # it is a part of decode_ms
        "train_tokens_per_s": 1.0 / token,
        "update_ms": 1e3 * update,
        "host_ms": max(0.0, 1e3 * float(host.mean())),
        "weights_gb": 0.0,  # nothing is sent, and what is added up is a part of update_ms
        "failures": 0.0,
        "signal": min(1.0, trained / run.of("rollout/finished").sum()),
        "lengths": length_ranks(*(float(np.nanmean(lengths)) for lengths in seen)),
    }
    return base.model_copy(update=found)


def against(runs: Sequence[MeasuredRun], base: ScaleInputs, seed: int) -> list[dict[str, Any]]:
    """Predicted and measured seconds of an update: figures of the first run, workers and sizes of each.

    In one process rollouts are handed to the judges between two decode steps; members decode on meanwhile.
    """
    fitted, rows, first = fit(runs[0], base), list[dict[str, Any]](), runs[0]
    between_s = (
        float((first.of("time/generate", 0.0) - first.of("rollout/seconds")).mean()) if first.workers == 1 else 0.0
    )
    for run in runs:
        c, r = run.settings.curriculum, run.settings.rollout
        host = fitted.host_ms + (1e3 * max(0.0, between_s) if run.workers == 1 else 0.0)
        sizes = {"groups": c.groups, "rollouts": c.rollouts, "slots": r.slots, "host_ms": host}
        inputs = fitted.model_copy(update=sizes)
        layout = Layout(gpus=run.workers, max_age=c.max_age if r.mode == "stream" else None)
        found, measured = simulate(inputs, layout, LengthDraws(inputs, seed)), float(run.step_s.mean())
        seconds = {"predicted_s": found.step_s, "measured_s": measured, "error": found.step_s / measured - 1.0}
        steps = {"predicted_steps": found.decode_steps, "measured_steps": float(run.of("rollout/steps").mean())}
        rows.append({"run": str(run.folder), "workers": run.workers, "updates": len(run.rows), **seconds, **steps})
    return rows


def show_measured(rows: Sequence[Mapping[str, Any]]) -> None:
    """Seconds, which another program on the machine changes, and decode steps of all workers, which it does not."""
    columns = ("run", "workers", "updates", "predicted s", "measured s", "error", "predicted steps", "measured steps")
    table = Table(*columns, title="an update")
    for row in rows:
        figures = (f"{row['predicted_s']:.3f}", f"{row['measured_s']:.3f}", f"{row['error']:+.1%}")
        steps = (f"{row['predicted_steps']:.1f}", f"{row['measured_steps']:.1f}")
        table.add_row(Text(printable(row["run"])), str(row["workers"]), str(row["updates"]), *figures, *steps)
    out_console.print(table)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; RUN@2 for one with --gpus 2")
    parser.add_argument("--shape", default="1.5b", help="latencies to begin with: 1.5b or 135m, both on an H200")
    parser.add_argument("--inputs", type=Path, help="TOML or JSON of your own figures, over those of the shape")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="one input, as in --set node=4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    if args.seed < 0:
        parser.error("--seed must not be below 0")
    base = read_inputs(args.shape, args.inputs, args.sets)
    runs = [MeasuredRun(name) for name in args.runs]
    rows = against(runs, base, args.seed)
    show_measured(rows)
    path = args.out / "scale_measured.json"
    result = {"runs": rows, "inputs": fit(runs[0], base).model_dump()}
    files.write_text(path, json.dumps(result, indent=1) + "\n")
    tell(f"Written: {path}. It holds the fitted inputs, and --inputs of `whet bench scale` takes it.")


if __name__ == "__main__":
    run_script(main)
