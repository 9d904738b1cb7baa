"""Reads run folders as data: arms of runs that differ only in the seed, their evaluations, and curves over steps.

`compare`, `page`, the demo and the benchmarks call `read_arms`. The folder name says which arm a run belongs to:
"speed-seed1", "speed_s2" and "speed/seed3" are seeds of "speed"; "uniform-48" is an arm of its own, because a bare
number may mean anything. Recipes are read as plain trees, so that runs of another version can still be compared.
Nothing here decides how a number looks.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from whet.errors import WhetError
from whet.recipe import read_toml
from whet.run import CONFIG, MACHINE, METRICS, is_in_use, parse_line

SEED = re.compile(r"(?:[ ._/-](?:seed|s)[ _=-]?|/)\d+$", re.IGNORECASE)
# settings that choose problems
PROBLEMS = ("task", "path", "subset", "split", "where", "limit", "options", "size")
BARE_SEED = re.compile(r"(?:seed|s)?[ _=-]?\d+", re.IGNORECASE)

Folders = Sequence[Path] | Mapping[str, Path]  # run folders, or names with their folders
Row = Mapping[str, Any]  # one line of metrics.jsonl
Curve = list[tuple[float, float]]  # (x, y), x rising
Axis = Literal["tokens", "seconds"]

# ---- files


def read_bytes(path: Path) -> bytes:
    """Nothing where there is no file: a run may lack it, or was cut back in this moment."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The objects in lines of JSON, without what is torn or damaged."""
    return [row for line in data.splitlines() if (row := parse_line(line)) is not None]


# ---- the rows of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation."""

    step: int
    tokens: float  # generated for training so far
    seconds: float  # training time so far, without evaluation and saving
    accuracy: float
    # independent answers that its 95% interval speaks of; 0 if it recorded none
    trials: float = 0.0


def number(row: Row, key: str) -> float | None:
    """A finite number, or None: an absent key, a null and a NaN all mean "not measured"."""
    value = row.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max
    ):
        return None
    return float(value)


def evaluation_names(rows: Sequence[Row]) -> list[str]:
    """The names in "eval/NAME/accuracy", in the order of their first appearance."""
    keys = (
        key.removeprefix("eval/")
        for key in dict.fromkeys(chain.from_iterable(rows))
        if key.startswith("eval/")
    )
    names = dict.fromkeys(
        key.removesuffix("/accuracy") for key in keys if key.endswith("/accuracy")
    )
    # a level may be called "accuracy"
    return [name for name in names if not name.endswith("/level")]


def evaluations(rows: Sequence[Row], name: str) -> list[Point]:
    """One point for each row that holds this evaluation."""
    points = []
    for row in rows:
        if (accuracy := number(row, f"eval/{name}/accuracy")) is not None:
            step, tokens, seconds = (
                number(row, key) or 0.0 for key in ("step", "tokens_generated", "time_s")
            )
            low, high = (number(row, f"eval/{name}/accuracy_{end}") for end in ("low", "high"))
            spread = 0.0 if low is None or high is None else effective_trials(accuracy, low, high)
            points.append(
                Point(
                    step=int(step), tokens=tokens, seconds=seconds, accuracy=accuracy, trials=spread
                )
            )
    return points


def effective_trials(p: float, low: float, high: float) -> float:
    """How many independent answers give Wilson's 95% interval this width around the share p; 0 if none do.

    With a = z^2 / n the width w has w^2 (1 + a)^2 = a^2 + 4 p (1 - p) a, which is solved for a.

    >>> round(effective_trials(0.5, 0.4038, 0.5962)), round(effective_trials(0.0, 0.0, 0.0370))
    (100, 100)
    """
    square = (high - low) ** 2
    if not 0.0 < square < 1.0:
        return 0.0
    half = 2 * p * (1 - p) - square
    return 1.96**2 * (1 - square) / (math.sqrt(half * half + square * (1 - square)) - half)


def series(rows: Sequence[Row], key: str) -> Curve:
    """(step, value) of the rows that hold both."""
    pairs = ((number(row, "step"), number(row, key)) for row in rows)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


# ---- runs and arms


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The recipe and the metrics of one run."""

    name: str
    folder: Path
    settings: Mapping[str, Any]  # the resolved recipe, flat: "learn.lr" -> 2e-4
    rows: Sequence[Row]
    damage: str = ""  # a sentence that names the lines of the metrics that cannot be read
    # evaluation -> hash of its problems, if it was recorded
    prompts: Mapping[str, str] = field(default_factory=dict)

    def points(self, evaluation: str | None) -> list[Point]:
        return evaluations(self.rows, evaluation) if evaluation is not None else []

    def problem_settings(self, evaluation: str) -> dict[str, Any]:
        """The settings that choose the problems of an evaluation; a slice that was set aside comes from the data."""
        own = [
            key.removesuffix("name") for key, value in self.settings.items() if value == evaluation
        ]
        prefixes = [key for key in own if key.startswith("eval.")] or ["data.", "held_out."]
        chosen = {}
        for key, value in self.settings.items():
            if key.startswith(tuple(prefixes)) and any(part in PROBLEMS for part in key.split(".")):
                chosen[key.removeprefix(prefixes[0])] = value
        return chosen

    @property
    def unfinished(self) -> str:
        """How far an unfinished run has come, in words; "" for a finished one. It may also end by a collapse, or
        because nothing is left to learn."""
        last = self.rows[-1] if self.rows else {}
        steps = number(self.settings, "steps")
        step = number(last, "step") or 0.0
        spent = {"token_budget": "tokens_generated", "time_budget": "time_s"}
        budgets = [
            (number(self.settings, most) or math.inf, number(last, key) or 0.0)
            for most, key in spent.items()
        ]
        ended = last.get("collapsed") or last.get("mastered")
        if (
            steps is None
            or step >= steps
            or ended
            or any(so_far >= most for most, so_far in budgets)
        ):
            return ""
        return (
            f"{'is at' if is_in_use(self.folder) else 'stopped at'} step {step:.0f} of {steps:.0f}"
        )


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    runs: tuple[RunLog, ...]

    def has_problems_of(self, other: Arm, evaluation: str) -> bool:
        """Whether both were evaluated on the same problems, as far as they tell.

        Generated problems depend on the seed, so hashes of different seeds may differ where the settings are the same.
        """
        mine = self._hashes(evaluation)
        theirs = other._hashes(evaluation)
        if mine & theirs:
            return True
        if {seed for seed, _ in mine} & {seed for seed, _ in theirs}:
            return False
        settings = [run.problem_settings(evaluation) for run in (*self.runs, *other.runs)]
        return all(each == settings[0] for each in settings)

    def _hashes(self, evaluation: str) -> set[tuple[Any, str]]:
        """(seed, hash of the problems) of the runs that recorded one."""
        known = [run for run in self.runs if evaluation in run.prompts]
        return {(run.settings.get("seed"), run.prompts[evaluation]) for run in known}

    @property
    def unfinished(self) -> str:
        """How far each unfinished run has come; "" if all are finished."""
        if len(self.runs) == 1:
            return self.runs[0].unfinished
        states = (
            (run.name.removeprefix(self.name).strip(" ._/-"), run.unfinished) for run in self.runs
        )
        return "; ".join(f"{seed} {state}" for seed, state in states if state)


def arm_name(run: str) -> str:
    """The name of a run without its seed.

    >>> [arm_name(n) for n in ("speed-seed1", "speed_s2", "speed/3", "uniform-48", "seed7")]
    ['speed', 'speed', 'speed', 'uniform-48', 'seed7']
    """
    return SEED.sub("", run) or run


def read_arms(folders: Folders) -> list[Arm]:
    """Arms in the order of their first run; the first is the baseline."""
    return group_runs([read_run(name, folder) for name, folder in name_runs(folders).items()])


def group_runs(logs: Sequence[RunLog]) -> list[Arm]:
    arms: dict[str, list[RunLog]] = {}
    for log in logs:
        arms.setdefault(arm_name(log.name), []).append(log)
    return [Arm(name=name, runs=tuple(runs)) for name, runs in arms.items()]


def read_run(name: str, folder: Path) -> RunLog:
    """Also reads a run that is going on or was killed: before its first row it has only a recipe, and it may end in the
    middle of a row. A damaged line costs that row alone."""
    if not (folder / CONFIG).is_file():
        raise WhetError(f"{folder} is not a run folder: it holds no {CONFIG}.")
    rows = [parse_line(line) for line in read_bytes(folder / METRICS).split(b"\n")]
    damaged = [place for place, row in enumerate(rows[:-1], 1) if row is None]
    damage = f"Line {damaged[0]} of {METRICS} is damaged and left out." if damaged else ""
    if len(damaged) > 1:
        damage = (
            f"Line {damaged[0]} and {len(damaged) - 1} more of {METRICS} are damaged and left out."
        )
    known = tuple(row for row in rows if row is not None)
    settings = flatten(read_toml(folder / CONFIG))
    prompts = (parse_line(read_bytes(folder / MACHINE)) or {}).get("prompts")
    hashes = (
        {str(key): str(value) for key, value in prompts.items()}
        if isinstance(prompts, Mapping)
        else {}
    )
    return RunLog(
        name=name, folder=folder, settings=settings, rows=known, damage=damage, prompts=hashes
    )


def name_runs(folders: Folders) -> dict[str, Path]:
    """Names each folder that has no name by the shortest end of its path that is unique; a bare "seed1" includes its
    parent.

    >>> list(name_runs([Path("out/speed/seed1"), Path("out/dapo"), Path("old/dapo")]))
    ['speed/seed1', 'out/dapo', 'old/dapo']
    """
    if not folders:
        raise WhetError("Name at least one run folder.")
    if isinstance(folders, Mapping):
        return {name: Path(folder) for name, folder in folders.items()}
    paths = list(dict.fromkeys(Path(f).absolute() for f in folders))
    depth = {p: 2 if BARE_SEED.fullmatch(p.name) else 1 for p in paths}
    while True:
        names = ["/".join(p.parts[-depth[p] :]) for p in paths]
        twins = [p for p, name in zip(paths, names, strict=True) if names.count(name) > 1]
        if not twins:
            return dict(zip(names, paths, strict=True))
        for path in twins:
            depth[path] += 1


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one table with dotted keys.

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


def common_evaluation(arms: Sequence[Arm]) -> str | None:
    """The evaluation by which the arms are compared: the first that every run with rows holds."""
    held = [evaluation_names(run.rows) for arm in arms for run in arm.runs if run.rows] or [[]]
    return next((name for name in held[0] if all(name in names for names in held)), None)
