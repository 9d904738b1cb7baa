"""Makes the data of a page from run folders: headlines with a judgement, curves, pictures, tables, rollouts.

`page` writes this data into a file that stands alone, `server` sends it, and the script of the page draws it. A page is
plain JSON: {format, title, note, live, cursor, runs, arms, compare}. Runs may be going on, killed, or of an older
version: what they lack is null or left out. A damaged line is left out; one of the metrics is named in a note.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import fmean
from typing import Any

from whet.recipe import describe
from whet.report import formats
from whet.report.arms import (
    Arm,
    Folders,
    Row,
    RunLog,
    arm_name,
    common_evaluation,
    evaluation_names,
    group_runs,
    name_runs,
    number,
    parse_lines,
    read_bytes,
    read_run,
)
from whet.report.compare import compare, settings_that_differ
from whet.report.formats import LAST, middle
from whet.report.rollouts import RolloutShelf
from whet.report.verdict import interval, is_greedy, judge
from whet.run import MACHINE, METRICS, PICTURES, is_in_use, parse_line

FORMAT = 1
CELLS = 500_000  # numbers of metrics in a page, all runs together; above, rows are thinned out
MOST_PICTURES = 1_000  # all runs together
ROLLOUT_BYTES = 5_000_000  # of a page that stands alone, all runs together

Data = dict[str, Any]


class PageData:
    """The page of some run folders, read again whenever they have changed."""

    def __init__(self, folders: Folders, *, title: str, note: str = "") -> None:
        self.folders = name_runs(folders)
        self.title = title
        self.note = note
        self.shelves = [RolloutShelf(folder) for folder in self.folders.values()]
        self._logs: dict[str, tuple[Any, RunLog]] = {}

    def read(self, *, live: bool = False, after: str = "") -> Data:
        """The page. A live one holds no rollouts, since they are asked for one by one, and of the steps only those
        `after` the cursor of an earlier page. Where a log was cut back since, the run is whole and says "reset"."""
        logs = [self._log(name) for name in self.folders]
        arms = group_runs(logs)
        evaluation = common_evaluation(arms)
        seen = after.split(",") if after else []
        runs = []
        cursor = []
        for i, (log, shelf) in enumerate(zip(logs, self.shelves, strict=True)):
            rows = in_order(log.rows)
            known = _known(rows, seen[i] if i < len(seen) else "")
            run = read_run_data(log, rows, rows[known:], evaluation, len(logs), thinned=not live)
            run["rollouts"] = shelf.overview()
            if not live:
                run["rollouts"]["rows"] = shelf.select(ROLLOUT_BYTES // len(logs))
            if after and known == 0:
                run["reset"] = True
            runs.append(run)
            cursor.append(_mark(rows[-1]) if rows else "")
        return {
            "format": FORMAT,
            "title": self.title,
            "note": self.note,
            "live": live,
            "cursor": ",".join(cursor),
            "runs": runs,
            "arms": [
                {"name": a.name, "runs": [i for i, r in enumerate(runs) if r["arm"] == a.name]}
                for a in arms
            ],
            "compare": read_comparison(arms, evaluation),
        }

    def _log(self, name: str) -> RunLog:
        """Reads metrics only if they have changed; the file of a run that goes on is asked for again and again."""
        path = self.folders[name] / METRICS
        try:
            about = path.stat()
            stamp: Any = (about.st_mtime_ns, about.st_size)
        except OSError:
            stamp = None
        known = self._logs.get(name)
        if known is None or known[0] != stamp:
            known = self._logs[name] = (stamp, read_run(name, self.folders[name]))
        return known[1]


def _mark(row: Row) -> str:
    """A step and a sum of its row: a row that was written anew after a cut has another."""
    return f"{row['step']:.0f}.{zlib.crc32(json.dumps(row).encode()):08x}"


def _known(rows: Sequence[Row], mark: str) -> int:
    """The number of rows up to the one with this mark; 0 if it is not there."""
    step = mark.partition(".")[0]
    return next(
        (i for i, row in enumerate(rows, 1) if f"{row['step']:.0f}" == step and _mark(row) == mark),
        0,
    )


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows with a step, rising; of two with the same step the later one."""
    by_step = {step: row for row in rows if (step := number(row, "step")) is not None}
    return [by_step[step] for step in sorted(by_step)]


# ---- one run


def read_run_data(
    log: RunLog,
    rows: Sequence[Row],
    new: Sequence[Row],
    evaluation: str | None,
    runs: int,
    *,
    thinned: bool,
) -> Data:
    """`new`: the rows of which the curves are wanted; `runs`: the number of runs that share the page."""
    names = evaluation_names(rows)
    mine = evaluation if evaluation in names else next(iter(names), None)
    machine = parse_line(read_bytes(log.folder / MACHINE)) or {}
    kept = thin(new, CELLS // runs) if thinned else new
    since = _step(rows[-len(new) - 1]) if len(new) < len(rows) else -math.inf
    drawn = (
        p for p in parse_lines(read_bytes(log.folder / PICTURES)) if number(p, "step") is not None
    )
    pictures = sorted((p for p in drawn if _step(p) > since), key=_step)
    stride = math.ceil(len(pictures) * (runs if thinned else 1) / MOST_PICTURES) or 1
    last = rows[-1] if rows else {}
    notes = [log.damage] if log.damage else [] if rows else ["Nothing was recorded yet."]
    if len(kept) < len(new):
        notes.append(f"The curves show {len(kept):,} of {len(rows):,} steps, evenly chosen.")
    points = log.points(mine)
    low, high = interval(log, mine, last=True) or (None, None)
    return {
        "name": log.name,
        "arm": arm_name(log.name),
        "seed": log.settings.get("seed"),
        "state": state(log),
        "note": " ".join(notes),
        "headline": {
            "evaluation": mine,
            "accuracy": points[-1].accuracy if points else None,
            "low": low,
            "high": high,
            "start": points[0].accuracy if points else None,
            "greedy": is_greedy(log.settings, mine),
            "tokens": number(last, "tokens_generated"),
            "seconds": number(last, "time_s"),
            "steps": number(last, "step"),
            "hardware": str(machine.get("hardware") or ""),
            "recipe": str(machine.get("recipe") or log.settings.get("curriculum.name") or ""),
            "verdict": judge(log, rows, mine),
        },
        "settings": own_settings(log.settings),
        "series": columns(kept),
        "evaluations": names,
        "stages": stages(rows),
        "pictures": pictures[::-stride][::-1],
    }


def _step(row: Row) -> float:
    return number(row, "step") or 0.0


def state(log: RunLog) -> str:
    if log.rows and log.rows[-1].get("collapsed"):
        return "collapsed"
    if is_in_use(log.folder):
        return "going on"
    return log.unfinished or "finished"


def columns(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """The metrics by name, of equal length; what is missing or not finite is None.

    >>> columns([{"step": 0, "a": float("nan")}, {"step": 1, "a": 2 / 3, "word": "x"}])["a"]
    [None, 0.666667]
    """
    keys = dict.fromkeys(["step", "tokens_generated", "time_s", *chain.from_iterable(rows)])
    table = {key: [_short(row.get(key)) for row in rows] for key in keys}
    axes = ("step", "tokens_generated", "time_s")
    return {
        key: values
        for key, values in table.items()
        if key in axes or any(v is not None for v in values)
    }


def _short(value: Any) -> float | None:
    """A finite number with six digits, which is more than a curve can show; whole numbers stay exact."""
    if type(value) is float and math.isfinite(value):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value if type(value) is int else None


def thin(rows: Sequence[Row], cells: int) -> Sequence[Row]:
    """Rows with about `cells` numbers in all: evenly chosen, the last one among them, and those with an evaluation
    unless there are too many."""
    most = max(2, cells // max(1, max(map(len, rows), default=1)))
    if len(rows) <= most:
        return rows
    stride = math.ceil(2 * len(rows) / most)
    evaluated = {i for i, row in enumerate(rows) if any(key.startswith("eval/") for key in row)}
    kept = set(range(len(rows) - 1, -1, -stride)) | (
        evaluated if len(evaluated) <= most // 2 else set()
    )
    return [rows[i] for i in sorted(kept)]


def stages(rows: Sequence[Row]) -> list[Data]:
    found: list[Data] = []
    for row in rows:
        stage = number(row, "curriculum/stage")
        if stage is not None and (not found or found[-1]["stage"] != stage):
            found.append(
                {
                    "step": _short(number(row, "step")),
                    "stage": stage,
                    "label": f"stage {stage + 1:.0f}",
                }
            )
    return found


def own_settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings that differ from the defaults; those of an older version count as different."""
    defaults = {name: default for name, default, _ in describe()}

    def differs(key: str, value: Any) -> bool:
        default = defaults.get(".".join(part for part in key.split(".") if not part.isdigit()))
        if isinstance(value, list):  # TOML has lists where a setting is a tuple
            return repr(tuple(value)) != (default or "()")
        return repr(value) != default

    return [(key, formats.setting(value)) for key, value in settings.items() if differs(key, value)]


# ---- several runs


def read_comparison(arms: Sequence[Arm], evaluation: str | None) -> Data:
    result = compare(arms)
    tables: list[Data] = []
    for title, heads, cells in result.tables():
        rows = [[name, *map(asdict, row)] for name, row in zip(result.arms, cells, strict=True)]
        tables.append({"title": title, "heads": heads, "rows": rows})
    if by_level := difficulty(arms, evaluation):
        tables.append(by_level)
    if differ := settings_that_differ(arms) if len(arms) > 1 else []:
        rows = [
            [key, *({"value": value, "ratio": "", "range": ""} for value in values)]
            for key, values in differ
        ]
        tables.append({"title": "Settings that differ", "heads": result.arms, "rows": rows})
    return {
        "evaluation": result.evaluation,
        "verdicts": result.verdicts,
        "notes": result.notes,
        "tables": tables,
    }


def difficulty(arms: Sequence[Arm], evaluation: str | None) -> Data | None:
    """Accuracy by the level of the prompts: before training, and at the end of each arm."""
    prefix = f"eval/{evaluation}/level/"
    keys = {
        key
        for arm in arms
        for run in arm.runs
        for row in run.rows
        for key in row
        if key.startswith(prefix)
    }
    if not keys:
        return None

    def numbers_first(key: str) -> tuple[bool, float, str]:
        """Sorts numbers by size, then words."""
        name = key.removeprefix(prefix)
        try:
            return (False, float(name), name)
        except ValueError:
            return (True, 0.0, name)

    def final(arm: Arm, key: str) -> float | None:
        """Median over the seeds of the mean of the last evaluations."""
        seeds = [[v for row in run.rows if (v := number(row, key)) is not None] for run in arm.runs]
        return middle(fmean(values[-LAST:]) if values else None for values in seeds)

    def cells(values: Sequence[float | None]) -> list[Data]:
        return [{"value": formats.accuracy(value), "ratio": "", "range": ""} for value in values]

    levels = sorted(keys, key=numbers_first)
    before = [
        number(next((row for row in arms[0].runs[0].rows if key in row), {}), key) for key in levels
    ]
    rows = [["at the start", *cells(before)]]
    rows += [[arm.name, *cells([final(arm, key) for key in levels])] for arm in arms]
    title = "Accuracy by difficulty of the prompt"
    return {"title": title, "heads": [key.removeprefix(prefix) for key in levels], "rows": rows}
