"""Run folders as arms: an arm is the runs of one recipe that differ in the seed alone.

Read by `compare` and `page`. The name of a folder says which arm it belongs to: "speed-seed1", "speed_s2" and
"speed/seed3" are seeds of "speed"; "uniform-48" is an arm of its own, for a bare number may mean anything.
Recipes are read as plain trees, so that runs of another version of the settings still compare.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.errors import WhetError
from whet.recipe import read_toml
from whet.report.curves import Point, Row, evaluation_names, evaluations, number
from whet.report.formats import MISSING
from whet.run import is_in_use, read_metrics

SEED = re.compile(r"(?:[ ._/-](?:seed|s)[ _=-]?|/)\d+$", re.IGNORECASE)
BARE_SEED = re.compile(r"(?:seed|s)?[ _=-]?\d+", re.IGNORECASE)

Folders = Sequence[Path] | Mapping[str, Path]
"""Run folders, or names with their folders."""


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What one run left behind."""

    name: str
    folder: Path
    settings: Mapping[str, Any]
    """The resolved recipe, flat: "learn.lr" -> 2e-4."""
    rows: Sequence[Row]

    def points(self, evaluation: str | None) -> list[Point]:
        return evaluations(self.rows, evaluation) if evaluation is not None else []

    @property
    def unfinished(self) -> str:
        """Where a run stands that has not come to its end, in words; "" for one that has. A collapse is an end."""
        last = self.rows[-1] if self.rows else {}
        steps, step = number(self.settings, "steps"), number(last, "step") or 0.0
        spent = {"token_budget": "tokens_generated", "time_budget": "time_s"}
        budgets = [(number(self.settings, most) or math.inf, number(last, key) or 0.0) for most, key in spent.items()]
        if steps is None or step >= steps or last.get("collapsed") or any(so_far >= most for most, so_far in budgets):
            return ""
        return f"{'is at' if is_in_use(self.folder) else 'stopped at'} step {step:.0f} of {steps:.0f}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    runs: tuple[RunLog, ...]

    @property
    def unfinished(self) -> str:
        """Of each run that has not come to its end, where it stands; "" where all have."""
        words = {run.name: run.unfinished for run in self.runs}
        if len(words) == 1:
            return next(iter(words.values()))
        return "; ".join(
            f"{name.removeprefix(self.name).strip(' ._/-')} {told}" for name, told in words.items() if told
        )


def arm_name(run: str) -> str:
    """
    >>> [arm_name(n) for n in ("speed-seed1", "speed_s2", "speed/3", "uniform-48", "seed7")]
    ['speed', 'speed', 'speed', 'uniform-48', 'seed7']
    """
    return SEED.sub("", run) or run


def read_arms(folders: Folders) -> list[Arm]:
    """Arms in the order of their first run; the first is the baseline."""
    named = dict(folders) if isinstance(folders, Mapping) else name_runs(folders)
    if not named:
        raise WhetError("Name at least one run folder.")
    arms: dict[str, list[RunLog]] = {}
    for name, folder in named.items():
        arms.setdefault(arm_name(name), []).append(read_run(name, Path(folder)))
    return [Arm(name=name, runs=tuple(runs)) for name, runs in arms.items()]


def read_run(name: str, folder: Path) -> RunLog:
    """Also of a run that goes on or was killed; before its first row it has a recipe alone."""
    if not (folder / "config.toml").is_file():
        raise WhetError(f"{folder} is not a run folder: it holds no config.toml.")
    return RunLog(
        name=name,
        folder=folder,
        settings=flatten(read_toml(folder / "config.toml")),
        rows=tuple(read_metrics(folder)),
    )


def name_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """The shortest tail of each path that says which run it is; a bare "seed1" needs its parent.

    >>> list(name_runs([Path("out/speed/seed1"), Path("out/dapo"), Path("old/dapo")]))
    ['speed/seed1', 'out/dapo', 'old/dapo']
    """
    paths = list(dict.fromkeys(Path(f).absolute() for f in folders))
    depth = {p: 2 if BARE_SEED.fullmatch(p.name) else 1 for p in paths}

    def tail(path: Path) -> str:
        return "/".join(path.parts[-depth[path] :])

    while True:
        names = [tail(p) for p in paths]
        twins = [p for p in paths if names.count(tail(p)) > 1]
        if not twins:
            return dict(zip(names, paths, strict=True))
        for path in twins:
            depth[path] += 1


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """
    >>> flatten({"seed": 0, "eval": [{"name": "held_out"}], "stop": []})
    {'seed': 0, 'eval.0.name': 'held_out', 'stop': []}
    """
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and tree and all(isinstance(entry, Mapping) for entry in tree):
        items = [(str(i), entry) for i, entry in enumerate(tree)]
    else:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def common_evaluation(arms: Sequence[Arm], wanted: str | None = None) -> str | None:
    """The evaluation to compare by: the one asked for, else the first that every run holds."""
    runs = [run for arm in arms for run in arm.runs]
    held = [evaluation_names(run.rows) for run in runs if run.rows] or [[]]
    shared = [name for name in held[0] if all(name in names for names in held)]
    if wanted is None:
        return shared[0] if shared else None
    for run in runs:
        if wanted not in (names := evaluation_names(run.rows)):
            there = ", ".join(names) or "none"
            raise WhetError(f'The run {run.name} has no evaluation "{wanted}" (it has: {there}).')
    return wanted


def settings_that_differ(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each arm) where the arms differ; an arm whose own runs differ shows all its values."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.settings)
    table = []
    for key in keys:
        values = [_values(arm, key) for arm in arms]
        mixed = any(len(v) > 1 for v in values) and key != "seed"
        if mixed or any(v != values[0] for v in values):
            table.append((key, [", ".join(v) for v in values]))
    return table


def _values(arm: Arm, key: str) -> list[str]:
    return list(dict.fromkeys(show_setting(run.settings.get(key)) for run in arm.runs))


def show_setting(value: Any) -> str:
    """
    >>> [show_setting(v) for v in ("speed", True, 0.0002, "")]
    ['speed', 'true', '0.0002', '""']
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
