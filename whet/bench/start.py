"""The start of a matrix: one pool of problems and one set of weights, the same bytes for every cell.

The weights are a model that is named, a warm-started one, or a stored LoRA adapter merged into its base. What is
missing is made, once, in the folder of the runs. `train.py` calls `make_start` before the first cell.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet import config, files
from whet.bench.matrix import Plan
from whet.bench.outcome import hash_weights
from whet.errors import WhetError
from whet.experiment import replace_run, start_arm
from whet.prepare import prepare_file
from whet.recipe import dump_config, parse_config
from whet.run import CONFIG, best_checkpoint

Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Start:
    folder: Path
    """Of the weights."""
    hashes: Mapping[str, str]
    """sha256 of the weights and of the pool, for the JSON of a cell."""
    pool: Path | None = None


def make_start(plan: Plan, runs: Path, told: Told) -> Start:
    pool = make_pool(plan, runs) if plan.matrix.pool else None
    folder = start_weights(plan, runs, told, pool if plan.matrix.pool and plan.matrix.pool.unseen else None)
    hashes = {"weights": hash_weights(folder)}
    if pool is not None:
        hashes["pool"] = hashlib.sha256(pool.read_bytes()).hexdigest()
    return Start(folder=folder, hashes=hashes, pool=pool)


def make_pool(plan: Plan, runs: Path) -> Path:
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


def start_weights(plan: Plan, runs: Path, told: Told, unseen: Path | None = None) -> Path:
    """unseen: problems that no warm start may see."""
    from whet.measure import weights_of
    from whet.model.load import resolve_model

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
        made = warm_start(runs / "base", settings, told)
        if not (made / "adapter_config.json").is_file():
            return made.resolve()
        stored = store_adapter(made, stored or runs / "adapter", settings.model.name)
    return merged(settings.model, stored, runs, told).resolve()


def warm_start(folder: Path, settings: config.Config, told: Told) -> Path:
    """The checkpoint of a run of the recipe's warm start; one that is there is taken."""
    done = best_checkpoint(folder) if (folder / CONFIG).is_file() else None
    if done is None:
        told(f"Warm start in {folder}, from which every cell begins.")
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


def merged(model: config.Model, adapter: Path, runs: Path, told: Told) -> Path:
    """The model with the adapter folded in; summed in fp64, so that every machine rounds to the same bytes."""
    target = runs / f"start-{hash_weights(adapter)[:12]}"
    if target.is_dir():
        return target
    told(f"Merging {adapter} into {model.name}.")
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
