"""The start of a matrix: one pool of problems and one set of weights, the same bytes for every cell.

The weights are a model that is named, a warm-started one, or a stored LoRA adapter merged into its base. What is
missing is made, once, in the folder of the runs. `train.py` calls `make_start` before the first cell.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet import config, files
from whet.errors import WhetError
from whet.problems import load_problems
from whet.recipe import dump_config, load_config, parse_config
from whet.report.curves import number
from whet.run import CONFIG, best_checkpoint, read_metrics, read_rollouts
from whet.tools.bench.matrix import MatrixCell, MatrixPlan, told_settings
from whet.tools.experiment import replace_run, start_arm
from whet.tools.prepare import prepare_file

# ---- outcome
#
# What a finished cell of a matrix leaves: one small JSON file, from which alone all tables and plots are made.
#
# `train.py` writes it when a cell's run has ended; `results.py` reads it. A row an update, cumulative where it counts
# something; what evaluation took is in columns of its own, and in none of the others.


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


def outcome(cell: MatrixCell, folder: Path, evaluation: str) -> dict[str, Any]:
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


OnLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Start:
    folder: Path
    """Of the weights."""
    hashes: Mapping[str, str]
    """sha256 of the weights and of the pool, for the JSON of a cell."""
    pool: Path | None = None


def make_start(plan: MatrixPlan, runs: Path, on_progress: OnLine) -> Start:
    pool = make_pool(plan, runs) if plan.matrix.pool else None
    folder = start_weights(plan, runs, on_progress, pool if plan.matrix.pool and plan.matrix.pool.unseen else None)
    hashes = {"weights": hash_weights(folder)}
    if pool is not None:
        hashes["pool"] = hashlib.sha256(pool.read_bytes()).hexdigest()
    return Start(folder=folder, hashes=hashes, pool=pool)


def make_pool(plan: MatrixPlan, runs: Path) -> Path:
    """A seeded sample of the first [[data]] entry, without the problems of the evaluation sets."""
    assert plan.matrix.pool is not None
    settings, size, path = plan.cells[0].settings, plan.matrix.pool.size, runs / "pool.jsonl"
    if not path.is_file():
        tests = [entry.path for entry in settings.eval if entry.path]
        folder = settings.data_folder
        prepare_file(settings.data[0], path, folder=folder, against=tests, size=size, seed=plan.matrix.pool.seed)
    with path.open("rb") as file:
        if (found := sum(1 for _ in file)) != size:
            raise WhetError(f"{path} holds {found:,} problems, and pool.size = {size:,} are wanted.")
    return path


def without(tree: Mapping[str, Any], pool: Path, path: Path) -> config.Config:
    """The recipe on its other problems, written to `path`."""
    settings = parse_config(tree)
    if not path.is_file():
        tests = [entry.path for entry in settings.eval if entry.path]
        prepare_file(settings.data[0], path, folder=settings.data_folder, against=[*tests, str(pool)])
    return parse_config(on_problems(tree, settings, path))


def on_problems(tree: Mapping[str, Any], settings: config.Config, path: Path) -> dict[str, Any]:
    """The tree of a recipe with the problems of a file in place of its first [[data]] entry's."""
    first, *rest = [entry.model_dump(exclude_none=True) for entry in settings.data]
    kept = {key: first[key] for key in ("task", "reward", "options", "weight", "curriculum")}
    return {**tree, "data": [{**kept, "path": str(path.resolve())}, *rest]}


def start_weights(plan: MatrixPlan, runs: Path, on_progress: OnLine, unseen: Path | None = None) -> Path:
    """unseen: problems that no warm start may see."""
    from whet.model.load import resolve_model
    from whet.tools.measure import weights_of

    start, settings = plan.matrix.start, parse_config(plan.base)
    if start.model:
        named = plan.path(start.model)
        return resolve_model(weights_of(str(named if named.exists() else start.model))[0]).resolve()
    stored = plan.path(start.adapter) if start.adapter else None
    if stored is None or not (stored / "adapter_config.json").is_file():
        if not settings.warm_start:
            return resolve_model(settings.model.name).resolve()
        if unseen is not None:
            settings = without(plan.base, unseen, runs / "rest.jsonl")
        made = warm_start(runs / "base", settings, on_progress)
        if not (made / "adapter_config.json").is_file():
            return made.resolve()
        stored = store_adapter(made, stored or runs / "adapter", settings.model.name)
    return merged(settings.model, stored, runs, on_progress).resolve()


def warm_start(folder: Path, settings: config.Config, on_progress: OnLine) -> Path:
    """The checkpoint of a run of the recipe's warm start; one that is there is taken."""
    done = best_checkpoint(folder) if (folder / CONFIG).is_file() else None
    if done is None:
        on_progress(f"Warm start in {folder}, from which every cell begins.")
        files.make_folder(folder.parent)
        replace_run(folder)
        recipe = folder.with_suffix(".toml")
        files.write_text(recipe, dump_config(settings))
        process = start_arm(recipe, folder)
        try:
            code = process.wait()
        finally:
            process.terminate()
        if code != 0 or (done := best_checkpoint(folder)) is None:
            raise WhetError(f"The warm start failed: {last_words(folder, code)}")
    return done


def store_adapter(checkpoint: Path, folder: Path, base: str) -> Path:
    """Only the adapter, and no path of this machine: what it stands on is the recipe's model."""
    files.make_folder(folder)
    files.write_bytes(folder / "adapter_model.safetensors", (checkpoint / "adapter_model.safetensors").read_bytes())
    told = json.loads((checkpoint / "adapter_config.json").read_bytes())
    told["base_model_name_or_path"] = Path(base).name if Path(base).expanduser().is_dir() else base
    files.write_text(folder / "adapter_config.json", json.dumps(told, indent=2, sort_keys=True) + "\n")
    return folder


def merged(model: config.Model, adapter: Path, runs: Path, on_progress: OnLine) -> Path:
    """The model with the adapter folded in; summed in fp64, so that every machine rounds to the same bytes."""
    target = runs / f"start-{hash_weights(adapter)[:12]}"
    if target.is_dir():
        return target
    on_progress(f"Merging {adapter} into {model.name}.")
    import torch
    from transformers import GenerationConfig

    from whet.model.load import DTYPES, load_weights, locate_model
    from whet.model.lora import load_lora, merge_lora

    place = locate_model(model.name)
    network: Any = load_weights(place.folder, torch.float64)
    load_lora(network, adapter)
    network = merge_lora(network).to(DTYPES[model.dtype])
    network.generation_config = GenerationConfig()  # the base's own is copied
    tmp = files.temporary(target)
    files.remove_tree(tmp)
    files.make_folder(tmp)
    files.write_into(tmp, network.save_pretrained)
    for path in place.folder.iterdir():
        if path.is_file() and path.name != "config.json" and "safetensors" not in path.name:
            shutil.copyfile(path, tmp / path.name)
    files.publish(tmp, target)
    return target


def last_words(folder: Path, code: int) -> str:
    """What the process of a run said at its end."""
    words = folder.with_suffix(".log").read_text(errors="replace").strip().splitlines()[-1:]
    return " ".join(words).removeprefix("whet: ") or f"code {code}"
