"""A matrix: one recipe, several arms and seeds, one start. The TOML that `whet bench train` reads, and its cells.

    recipe = "../recipes/gsm8k.toml"        # paths are taken from the matrix's own folder
    seeds = [0, 1, 2]
    seconds = 150                           # of a cell at most, from the start of its process
    set = { "learn.lr" = 4e-5 }             # of every arm
    pool = { size = 1536, seed = 0 }        # train on so many of the recipe's problems
    start = { adapter = "starts/gsm8k", set = { "model.lora.rank" = 16 } }

    [[arm]]
    name = "speed"
    set = { "curriculum.name" = "speed" }

Everything that can be wrong with it is one sentence, said before anything runs. What runs is `train.py`'s matter.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from whet import config
from whet.config import Section
from whet.errors import WhetError
from whet.recipe import override, parse_config, read_toml
from whet.report.arms import flatten
from whet.tools.experiment import merge


class StartSettings(Section):
    model: str = ""
    """A model folder, a run or a hub name that every cell begins from; empty is the recipe's own model, as below."""
    adapter: str = ""
    """A stored LoRA folder, merged into the recipe's model; where it is missing, `set` says how it is made."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings of the run that makes the start: the recipe's warm start, and no update."""

    @model_validator(mode="after")
    def _one_way(self) -> StartSettings:
        if self.model and (self.adapter or self.set):
            raise ValueError("a start is a model, or an adapter and the settings that make it, not both")
        return self


class PoolSettings(Section):
    size: int = Field(ge=1)
    """Problems of the recipe's first [[data]] entry, drawn evenly over its levels, less those of the evaluation."""
    seed: int = Field(0, ge=0)
    unseen: bool = False
    """The warm start is trained on the others alone: what is learnt of these is learnt by reinforcement."""


class MatrixArm(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    set: dict[str, Any] = Field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    """Its own; none are those of the matrix."""
    seconds: float = Field(0, ge=0)
    """Its own cap; 0 is that of the matrix."""
    note: str = ""


class Matrix(Section):
    recipe: str
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    seconds: float = Field(150, gt=0)
    """A cell is asked to stop so long after its process began; the step it is in is finished."""
    baseline: str = ""
    """The arm that the others are compared with; empty is the first."""
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
            raise ValueError(f'baseline = "{self.baseline}" is no arm; there are {", ".join(names)}')
        for seeds in (self.seeds, *(arm.seeds for arm in self.arm)):
            if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
                raise ValueError(f"seeds = {list(seeds)} should be different numbers from 0 up")
        return self


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """One arm with one seed: an ordinary run.

    >>> Cell(arm="speed", seed=1, seconds=150, tree={}, settings=config.Config()).name
    'speed-seed1'
    """

    arm: str
    seed: int
    seconds: float
    note: str = ""
    tree: Mapping[str, Any]
    """Its recipe, before start and pool are put in."""
    settings: config.Config

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class MatrixPlan:
    """A matrix with its recipes read: what `train.py` works off."""

    name: str
    folder: Path
    """Of the matrix file."""
    matrix: Matrix
    base: Mapping[str, Any]
    """The recipe that makes the start."""
    cells: tuple[MatrixCell, ...]
    """Seed by seed, so that an unfinished matrix has all arms before any has many seeds."""

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


def read_plan(path: Path, sets: Sequence[str] = (), arms: Sequence[str] = (), seeds: Sequence[int] = ()) -> MatrixPlan:
    """`sets` override every arm; `arms` and `seeds` choose among the cells. Raises WhetError with one sentence."""
    if not path.is_file():
        raise WhetError(f"There is no matrix at {path}.")
    matrix = parse_matrix(read_toml(path), path)
    recipe = read_toml(path.parent / Path(matrix.recipe).expanduser())
    base = settled(recipe, [matrix.start.set], [*sets, "steps=0"], f"{path}, start")
    plan = MatrixPlan(
        name=path.stem,
        folder=path.parent,
        matrix=matrix,
        base=base,
        cells=tuple(cells_of(matrix, recipe, sets, arms, seeds, path)),
    )
    check_start(plan, recipe, path)
    data = plan.cells[0].settings.data
    if matrix.pool is not None and not (data and data[0].path):
        raise WhetError(f"{path}: a pool is drawn from data with a path, and the recipe's first [[data]] has none.")
    return plan


def cells_of(
    matrix: Matrix,
    recipe: Mapping[str, Any],
    sets: Sequence[str],
    arms: Sequence[str],
    seeds: Sequence[int],
    path: Path,
) -> list[MatrixCell]:
    names = [arm.name for arm in matrix.arm]
    if unknown := next((name for name in arms if name not in names), None):
        near = difflib.get_close_matches(unknown, names, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(names)}."
        raise WhetError(f'{path} has no arm "{unknown}"; {hint}')
    numbered = []
    for place, arm in enumerate(matrix.arm):
        if arms and arm.name not in arms:
            continue
        for turn, seed in enumerate(arm.seeds or matrix.seeds):
            if seeds and seed not in seeds:
                continue
            tree = settled(recipe, [matrix.set, arm.set], [*sets, f"seed={seed}"], f'{path}, arm "{arm.name}"')
            cell = MatrixCell(
                arm=arm.name,
                seed=seed,
                seconds=arm.seconds or matrix.seconds,
                note=arm.note,
                tree=tree,
                settings=parse_config(tree),
            )
            numbered.append((turn, place, cell))
    if not numbered:
        raise WhetError(f"No arm of {path} has a seed among {', '.join(map(str, seeds))}.")
    return [cell for _, _, cell in sorted(numbered, key=lambda item: item[:2])]


def check_start(plan: MatrixPlan, recipe: Mapping[str, Any], path: Path) -> None:
    """Whether there will be one start for all: a model, an adapter, or a warm start that makes either."""
    start = plan.matrix.start
    stored = start.adapter and (plan.path(start.adapter) / "adapter_config.json").is_file()
    if start.adapter and not stored and not parse_config(plan.base).model.lora.rank:
        raise WhetError(
            f"{path}: there is no adapter in {plan.path(start.adapter)}, and start.set does not say how it is made; "
            'give it "model.lora.rank".'
        )
    if start.model or stored or parse_config(plan.base).warm_start:
        return
    if recipe.get("model", {}).get("name", "tiny") == "tiny":
        raise WhetError(f'{path}: the cells would each begin from a tiny model of their own seed; say "start".')


def settled(
    recipe: Mapping[str, Any], own: Iterable[Mapping[str, Any]], sets: Iterable[str], where: str
) -> dict[str, Any]:
    """The recipe with the settings of a matrix, then those of the command line; known to be valid."""
    tree: dict[str, Any] = deepcopy(dict(recipe))
    try:
        for key, value in (item for some in own for item in some.items()):
            if isinstance(value, Mapping) and "." not in key:  # set = { curriculum.name = "speed" }: nested by TOML
                tree = merge(tree, {key: value})
            else:
                override(tree, f"{key}={inline(value)}")
        for item in sets:
            override(tree, item)
        parse_config(tree)
    except WhetError as error:
        raise WhetError(f"{where}: {error}") from None
    return tree


def inline(value: Any) -> str:
    """A value as TOML on one line, as `--set` takes it.

    >>> inline({"low": 0.5, "of": ["a", True]})
    '{"low" = 0.5, "of" = ["a", true]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def parse_matrix(tree: Mapping[str, Any], path: Path) -> Matrix:
    try:
        return Matrix.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        sections: dict[str, type[Section]] = {"arm": MatrixArm, "start": StartSettings, "pool": PoolSettings}
        known = (sections.get(str(first["loc"][0]), Matrix) if len(first["loc"]) > 1 else Matrix).model_fields
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(known)}."
        raise WhetError(f'{path}: there is no "{where}" in a matrix; {hint}')
    if first["type"] == "missing":
        raise WhetError(f'{path}: a matrix needs "{where}".')
    message = first["msg"].removeprefix("Value error, ")
    raise WhetError(f"{path}: {f'{where}: ' if where else ''}{message[0].lower()}{message[1:]}.")


PLACES = ("model.name", "data_folder", "rollout.context", "data.0.path")
"""Settings that say where things are on a machine, or are filled in by a run: no part of what a cell is."""


def told_settings(settings: config.Config) -> dict[str, Any]:
    """The settings that make a cell what it is, flat: "learn.lr" -> 4e-5."""
    flat = flatten(settings.model_dump(mode="json", exclude_none=True))
    return {key: value for key, value in flat.items() if key not in PLACES}


def differing(cell: MatrixCell, stored: Mapping[str, Any]) -> str:
    """The first setting that a stored cell had otherwise, in words; "" where all agree."""
    for key, value in told_settings(cell.settings).items():
        if key in stored and stored[key] != value:
            return f"{key} = {stored[key]!r} there and {value!r} in the matrix"
    return ""
