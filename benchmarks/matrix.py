"""A matrix: one recipe, several arms and seeds, one start: the TOML of `train.py`, its cells and its start.

    recipe = "../recipes/gsm8k.toml"        # paths are relative to the matrix file
    seeds = [0, 1, 2]
    seconds = 150                           # per cell at most, from the start of its process
    set = { "learn.lr" = 4e-5 }             # settings of every arm
    pool = { size = 1536, seed = 0 }        # train on so many of the recipe's problems
    start = { adapter = "starts/gsm8k", set = { "model.lora.rank" = 16 } }

    [[arm]]
    name = "speed"
    set = { "curriculum.name" = "speed" }

What is wrong with it is said in one sentence before anything runs. `make_start` then makes, once, what all cells begin
from: a pool of problems, and weights (a named model, a warm-started one, or a LoRA adapter merged into its base).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from whet import config, files
from whet.config import Section
from whet.errors import WhetError
from whet.recipe import override, parse_config, read_toml
from whet.report.arms import flatten
from whet.run import CONFIG, best_checkpoint
from whet.tools.bench import names as split_names
from whet.tools.experiment import last_words, replace_run, start_run
from whet.tools.prepare import prepare_file

ADAPTER = "adapter_config.json"
# Settings that say where things are on a machine, or that a run fills in: no part of what a cell is.
PLACES = ("model.name", "data_folder", "rollout.context", "data.0.path")
OnLine = Callable[[str], None]
Tree = Mapping[str, Any]

# ---- the TOML


class StartSettings(Section):
    # A model folder, a run or a hub name that every cell begins from; empty is the recipe's own model, as below.
    model: str = ""
    # a stored LoRA folder, merged into the recipe's model; where it is missing, `set` makes it
    adapter: str = ""
    # of the run that makes the start: a warm start, and no update
    set: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way(self) -> StartSettings:
        if self.model and (self.adapter or self.set):
            raise ValueError(
                "a start is a model, or an adapter and the settings that make it, not both"
            )
        return self


class PoolSettings(Section):
    # Problems of the recipe's first [[data]] entry, drawn evenly over its levels, without those of the evaluation.
    size: int = Field(ge=1)
    seed: int = Field(0, ge=0)
    unseen: bool = False  # the warm start is trained on the other problems alone


class MatrixArm(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    set: dict[str, Any] = Field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # empty: those of the matrix
    counted: tuple[int, ...] = ()  # seeds whose ratios count; empty: all
    seconds: float = Field(0, ge=0)  # 0: the cap of the matrix
    note: str = ""


class Matrix(Section):
    recipe: str
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    # after these a cell's process is asked to stop; it finishes its step
    seconds: float = Field(150, gt=0)
    baseline: str = ""  # the arm that the others are compared with; empty is the first
    target: float = Field(0, ge=0, le=1)  # the accuracy whose cost is the result (proof.py)
    start: StartSettings = StartSettings()
    pool: PoolSettings | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    arm: tuple[MatrixArm, ...] = Field(min_length=1)

    @field_validator("start", mode="before")
    @classmethod
    def _a_name_is_a_model(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _names_differ(self) -> Matrix:
        names = [arm.name for arm in self.arm]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f'two arms are called "{twice}"')
        if self.baseline and self.baseline not in names:
            raise ValueError(
                f'baseline = "{self.baseline}" is no arm; there are {", ".join(names)}'
            )
        for seeds in (self.seeds, *(arm.seeds for arm in self.arm)):
            if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
                raise ValueError(f"seeds = {list(seeds)} should be different numbers from 0 up")
        return self


@dataclass(frozen=True)
class MatrixCell:
    """One arm with one seed: an ordinary run."""

    arm: str
    seed: int
    seconds: float
    note: str
    tree: Tree  # its recipe, before start and pool are put in
    settings: config.Config

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class MatrixPlan:
    """A matrix with its recipes read: what `train.py` works through."""

    name: str
    folder: Path  # of the matrix file
    matrix: Matrix
    base: Tree  # the recipe that makes the start
    # seed by seed, so that an unfinished matrix has all arms before many seeds
    cells: tuple[MatrixCell, ...]

    @property
    def baseline(self) -> str:
        return self.matrix.baseline or self.matrix.arm[0].name

    @property
    def evaluation(self) -> str:
        """The set that accuracy is read from: the recipe's first, else the slice that is held out."""
        entries = self.cells[0].settings.eval
        return entries[0].name if entries else config.HELD_OUT

    def path(self, name: str) -> Path:
        return self.folder / Path(name).expanduser()


def read_seeds(text: str) -> list[int]:
    """
    >>> read_seeds("0, 2"), read_seeds("")
    ([0, 2], [])
    """
    if not all(seed.isdecimal() for seed in split_names(text)):
        raise WhetError(f'Seeds are whole numbers with commas between, got "{text}".')
    return [int(seed) for seed in split_names(text)]


def read_plan(
    path: Path, sets: Sequence[str] = (), arms: Sequence[str] = (), seeds: Sequence[int] = ()
) -> MatrixPlan:
    """`sets` override every arm; `arms` and `seeds` choose among the cells. Raises WhetError with one sentence."""
    if not path.is_file():
        raise WhetError(f"There is no matrix at {path}.")
    matrix = parse_matrix(read_toml(path), path)
    recipe = read_toml(path.parent / Path(matrix.recipe).expanduser())
    base = settled(recipe, [matrix.start.set], [*sets, "steps=0"], f"{path}, start")
    names = [arm.name for arm in matrix.arm]
    if unknown := next((name for name in arms if name not in names), None):
        raise WhetError(f'{path} has no arm "{unknown}"; {hint(unknown, names, "there are")}')
    turns = [
        (turn, seed, arm)
        for arm in matrix.arm
        for turn, seed in enumerate(arm.seeds or matrix.seeds)
    ]
    cells = []
    for _, seed, arm in sorted(turns, key=lambda item: item[0]):
        if (not arms or arm.name in arms) and (not seeds or seed in seeds):
            tree = settled(
                recipe, [matrix.set, arm.set], [*sets, f"seed={seed}"], f'{path}, arm "{arm.name}"'
            )
            seconds, settings = arm.seconds or matrix.seconds, parse_config(tree)
            cells.append(MatrixCell(arm.name, seed, seconds, arm.note, tree, settings))
    if not cells:
        raise WhetError(f"No arm of {path} has a seed among {', '.join(map(str, seeds))}.")
    plan = MatrixPlan(
        name=path.stem, folder=path.parent, matrix=matrix, base=base, cells=tuple(cells)
    )
    if wrong := wrong_start(plan, recipe):
        raise WhetError(f"{path}: {wrong}.")
    return plan


def hint(word: str, known: Iterable[str], there_are: str) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f'did you mean "{near[0]}"?' if near else f"{there_are} {', '.join(known)}."


def wrong_start(plan: MatrixPlan, recipe: Tree) -> str:
    """The reason why there will not be one start for all cells: one model, one adapter or warm start, one pool."""
    start, base, data = plan.matrix.start, parse_config(plan.base), plan.cells[0].settings.data
    adapter = plan.path(start.adapter)
    stored = start.adapter and (adapter / ADAPTER).is_file()
    if start.adapter and not stored and not base.model.lora.rank:
        return f'there is no adapter in {adapter}, and start.set does not say how it is made; give it "model.lora.rank"'
    tiny = recipe.get("model", {}).get("name", "tiny") == "tiny"
    if tiny and not (start.model or stored or base.warm_start):
        return 'the cells would each begin from a tiny model of their own seed; say "start"'
    if plan.matrix.pool is not None and not (data and data[0].path):
        return "a pool is drawn from data with a path, and the recipe's first [[data]] has none"
    return ""


def settled(recipe: Tree, own: Iterable[Tree], sets: Iterable[str], where: str) -> dict[str, Any]:
    """The recipe with the settings of a matrix, then those of the command line; known to be valid."""
    tree: dict[str, Any] = deepcopy(dict(recipe))
    try:
        for key, value in (item for some in own for item in some.items()):
            # set = { curriculum.name = "speed" }: nested by TOML
            if isinstance(value, Mapping) and "." not in key:
                tree = config.merged(tree, {key: value})
            else:
                override(tree, f"{key}={inline(value)}")
        for item in sets:
            override(tree, item)
        parse_config(tree)
    except WhetError as error:
        raise WhetError(f"{where}: {error}") from None
    return tree


def inline(value: Any) -> str:
    """A value as TOML on one line, as `--set` takes it."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{json.dumps(k, ensure_ascii=False)} = {inline(v)}" for k, v in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def parse_matrix(tree: Tree, path: Path) -> Matrix:
    try:
        return Matrix.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        inner: dict[str, type[Section]] = {
            "arm": MatrixArm,
            "start": StartSettings,
            "pool": PoolSettings,
        }
        section = inner[str(first["loc"][0])] if len(first["loc"]) > 1 else Matrix
        near = hint(str(first["loc"][-1]), section.model_fields, "known are")
        raise WhetError(f'{path}: there is no "{where}" in a matrix; {near}')
    if first["type"] == "missing":
        raise WhetError(f'{path}: a matrix needs "{where}".')
    message = first["msg"].removeprefix("Value error, ")
    raise WhetError(f"{path}: {f'{where}: ' if where else ''}{message[0].lower()}{message[1:]}.")


def defining_settings(settings: config.Config) -> dict[str, Any]:
    """The settings that make a cell what it is, flat: "learn.lr" -> 4e-5."""
    flat = flatten(settings.model_dump(mode="json", exclude_none=True))
    flat["rollout.on_update"] = settings.on_update  # what an unset one stands for
    flat["curriculum.max_age"] = settings.curriculum.age_bound
    return {key: value for key, value in flat.items() if key not in PLACES}


def differing(cell: MatrixCell, stored: Mapping[str, Any]) -> str:
    """The first setting that differs in a stored cell, in words; "" where all agree."""
    for key, value in defining_settings(cell.settings).items():
        if key in stored and stored[key] != value:
            return f"{key} = {stored[key]!r} there and {value!r} in the matrix"
    return ""


# ---- the start


@dataclass(frozen=True, kw_only=True)
class Start:
    folder: Path  # of the weights
    hashes: Mapping[str, str]  # sha256 of the weights and of the pool, for the JSON of a cell
    pool: Path | None = None


def make_start(plan: MatrixPlan, runs: Path, on_progress: OnLine) -> Start:
    wanted = plan.matrix.pool
    pool = make_pool(plan.cells[0].settings, wanted, runs) if wanted else None
    folder = start_weights(plan, runs, on_progress, pool if wanted and wanted.unseen else None)
    hashes = {"pool": hashlib.sha256(pool.read_bytes()).hexdigest()} if pool else {}
    return Start(folder=folder, hashes={"weights": hash_weights(folder), **hashes}, pool=pool)


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


def make_pool(settings: config.Config, pool: PoolSettings, runs: Path) -> Path:
    """A seeded sample of the first [[data]] entry, without the problems of the evaluation sets."""
    path = runs / "pool.jsonl"
    write_problems(settings, path, size=pool.size, seed=pool.seed)
    if (found := len(path.read_bytes().splitlines())) != pool.size:
        raise WhetError(
            f"{path} holds {found:,} problems, and pool.size = {pool.size:,} are wanted."
        )
    return path


def write_problems(
    settings: config.Config, path: Path, pool: Sequence[str] = (), size: int = 0, seed: int = 0
) -> None:
    """Writes the first [[data]] entry's problems outside of evaluation and pool, unless they are there already."""
    if not path.is_file():
        against = [*(entry.path for entry in settings.eval if entry.path), *pool]
        prepare_file(
            settings.data[0],
            path,
            folder=settings.data_folder,
            against=against,
            size=size,
            seed=seed,
        )


def on_problems(tree: Tree, settings: config.Config, path: Path) -> config.Config:
    """The recipe with the problems of a file in place of its first [[data]] entry's."""
    first, *rest = [entry.model_dump(exclude_none=True) for entry in settings.data]
    kept = {key: first[key] for key in ("task", "reward", "options", "weight", "curriculum")}
    return parse_config({**tree, "data": [{**kept, "path": str(path.resolve())}, *rest]})


def start_weights(
    plan: MatrixPlan, runs: Path, on_progress: OnLine, unseen: Path | None = None
) -> Path:
    """The folder of the weights. unseen: problems that no warm start may see."""
    from whet.model.load import resolve_model
    from whet.tools.measure import weights_of

    start, settings = plan.matrix.start, parse_config(plan.base)
    if start.model:
        named = plan.path(start.model)
        return resolve_model(weights_of(str(named if named.exists() else start.model))[0]).resolve()
    stored = plan.path(start.adapter) if start.adapter else None
    if stored is None or not (stored / ADAPTER).is_file():
        if not settings.warm_start:
            return resolve_model(settings.model.name).resolve()
        if unseen is not None:
            write_problems(settings, runs / "rest.jsonl", [str(unseen)])
            settings = on_problems(plan.base, settings, runs / "rest.jsonl")
        made = warm_start(runs / "base", settings, on_progress)
        if not (made / ADAPTER).is_file():
            return made.resolve()
        stored = store_adapter(made, stored or runs / "adapter", settings.model.name)
    return merged(settings.model, stored, runs, on_progress).resolve()


def warm_start(folder: Path, settings: config.Config, on_progress: OnLine) -> Path:
    """The checkpoint of a run of the recipe's warm start; an earlier one is used as it is."""
    done = best_checkpoint(folder) if (folder / CONFIG).is_file() else None
    if done is None:
        on_progress(f"Warm start in {folder}, from which every cell begins.")
        replace_run(folder)
        process = start_run(folder, settings)
        try:
            code = process.wait()
        finally:
            process.terminate()
        if code != 0 or (done := best_checkpoint(folder)) is None:
            raise WhetError(f"The warm start failed: {last_words(folder, code)}")
    return done


def store_adapter(checkpoint: Path, folder: Path, base: str) -> Path:
    """Stores only the adapter, and no path of this machine: its base is the recipe's model."""
    files.write_bytes(
        folder / "adapter_model.safetensors",
        (checkpoint / "adapter_model.safetensors").read_bytes(),
    )
    settings = json.loads((checkpoint / ADAPTER).read_bytes())
    settings["base_model_name_or_path"] = (
        Path(base).name if Path(base).expanduser().is_dir() else base
    )
    files.write_text(folder / ADAPTER, json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return folder


def merged(model: config.Model, adapter: Path, runs: Path, on_progress: OnLine) -> Path:
    """The model with the adapter merged in, summed in fp64 so that every machine rounds to the same bytes."""
    target = runs / f"start-{hash_weights(adapter)[:12]}"
    if target.is_dir():
        return target
    on_progress(f"Merging {adapter} into {model.name}.")
    import torch

    from whet.model.load import locate_model
    from whet.tools.export import merge_adapters

    base = locate_model(model.name).folder
    network = merge_adapters(base, adapter, torch.float64, getattr(torch, model.dtype))
    with files.preparing(target) as folder:
        files.write_into(folder, network.save_pretrained)
        for path in base.iterdir():
            if path.is_file() and path.name != "config.json" and "safetensors" not in path.name:
                shutil.copyfile(path, folder / path.name)
    return target
