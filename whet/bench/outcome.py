"""What a finished cell of a matrix leaves: one small JSON file, from which alone all tables and plots are made.

`train.py` writes it when a cell's run has ended; `results.py` reads it. A row an update, cumulative where it counts
something; what evaluation took is in columns of its own, and in none of the others.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet import files
from whet.bench.matrix import Cell, told_settings
from whet.errors import WhetError
from whet.problems import load_problems
from whet.recipe import load_config
from whet.report.curves import number
from whet.run import CONFIG, read_metrics, read_rollouts

COUNTS = {
    "step": "step",
    "tokens": "tokens_generated",
    "tokens_trained": "tokens_trained",
    "rollouts": "rollouts",
    "visits": "prompts_seen",
    "seconds": "time_s",
}
"""Column -> metric: totals since the start, of training alone."""
GAUGES = {
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
"""Column -> metric: of the update."""
EVALUATED = ("eval_tokens", "eval_seconds", "accuracy", "eval_length")
"""Tokens and seconds of all evaluations so far; accuracy and mean length where this update was evaluated."""
COLUMNS = (*COUNTS, *GAUGES, *EVALUATED)


def outcome(cell: Cell, folder: Path, evaluation: str) -> dict[str, Any]:
    """What the run of a cell did, from its folder."""
    problems = load_problems(load_config(folder / CONFIG))
    tries = {entry.name: entry.n for entry in cell.settings.eval}
    sizes = {name: len(prompts) * tries.get(name, 1) for name, prompts in problems.evals.items()}
    if evaluation not in sizes:
        raise WhetError(f'The run {folder} has no evaluation "{evaluation}" (it has: {", ".join(sizes) or "none"}).')
    metrics = read_metrics(folder)
    prompts, complete = distinct_prompts(folder, cell.settings.save.rollouts)
    return {
        "arm": cell.arm,
        "seed": cell.seed,
        "note": cell.note,
        "evaluation": {"name": evaluation, "prompts": len(problems.evals[evaluation]), "n": tries.get(evaluation, 1)},
        "pool": len(problems.train),
        "distinct_prompts": prompts,
        "distinct_is_least": not complete,
        "also": {name: scores_of(metrics, name) for name in sizes if name != evaluation},
        "settings": told_settings(cell.settings),
        "columns": list(COLUMNS),
        "rows": rows_of(metrics, evaluation, sizes),
    }


def rows_of(metrics: Sequence[Mapping[str, Any]], evaluation: str, sizes: Mapping[str, int]) -> list[list[Any]]:
    """`sizes`: rollouts of each evaluation set, whose tokens are their mean length times as many.

    >>> metrics = [{"step": 0, "eval/a/accuracy": 0.1, "eval/a/length": 20.0, "time/eval": 2.0}, {"step": 1}]
    >>> [row[-4:] for row in rows_of(metrics, "a", {"a": 100})]
    [[2000, 2.0, 0.1, 20], [2000, 2.0, None, None]]
    """
    rows: list[list[Any]] = []
    tokens, seconds = 0.0, 0.0
    for row in metrics:
        tokens += sum((number(row, f"eval/{name}/length") or 0.0) * size for name, size in sizes.items())
        seconds += number(row, "time/eval") or 0.0
        counts = [_short(number(row, key)) for key in COUNTS.values()]
        gauges = [_short(number(row, key)) for key in GAUGES.values()]
        found = [number(row, f"eval/{evaluation}/{what}") for what in ("accuracy", "length")]
        rows.append([*counts, *gauges, round(tokens), round(seconds, 2), *map(_short, found)])
    return rows


def scores_of(metrics: Sequence[Mapping[str, Any]], evaluation: str) -> list[list[Any]]:
    """[step, accuracy] of every evaluation on a set.

    >>> scores_of([{"step": 0, "eval/greedy/accuracy": 0.07}, {"step": 1}], "greedy")
    [[0, 0.07]]
    """
    found = [(row, number(row, f"eval/{evaluation}/accuracy")) for row in metrics]
    return [[row["step"], _short(accuracy)] for row, accuracy in found if accuracy is not None]


def distinct_prompts(folder: Path, kept: int) -> tuple[int, bool]:
    """Prompts that were asked in training, each once; False where some step made more than the `kept` rollouts.

    A run keeps the first `save.rollouts` of a step, so the count is then the least that it can be.
    """
    prompts: set[str] = set()
    made: Counter[int] = Counter()
    for row in read_rollouts(folder):
        if row["phase"] != "eval":
            prompts.add(row["prompt_id"])
            made[row["step"]] += 1
    return len(prompts), max(made.values(), default=0) < kept


def hash_weights(folder: Path) -> str:
    """sha256 over the names and bytes of all safetensors of a model folder."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WhetError(f"{folder} holds no *.safetensors, so there is nothing to start from.")
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.name.encode())
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def write_outcome(path: Path, found: Mapping[str, Any]) -> None:
    """One line a row: small, and readable."""
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
