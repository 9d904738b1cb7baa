"""`whet bench train`: the cells of a matrix, each an ordinary `whet train` process, from the same bytes.

    RUNS/pool.jsonl  base/  start-HASH/     the training problems, the run that warm-started, the merged weights
    RUNS/ARM-seedN/  .toml  .log            a cell's run, its recipe, what it said
    OUT/train/MATRIX/ARM-seedN.json         what is left of a finished cell (`outcome.py`)

A finished cell is never run again, an interrupted one goes on from its checkpoint, so a matrix may be completed over
several calls, or machines that share OUT. Tables and plots are made by `results.py` from the JSON alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from whet import config, files
from whet.errors import WhetError
from whet.recipe import dump_config, parse_config, read_toml
from whet.report.arms import flatten
from whet.run import CONFIG, has_collapsed, read_metrics
from whet.tools.bench.matrix import MatrixCell, MatrixPlan, differing
from whet.tools.bench.start import OnLine, Start, last_words, on_problems, outcome, read_outcome, write_outcome
from whet.tools.experiment import cores

WHET = (sys.executable, "-m", "whet", "train")
POLL = 0.2
"""Seconds between two looks at the processes."""
GRACE = 120.0
"""Seconds that a cell has to finish its step and save; then it is stopped at once, and stays unfinished."""


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
        """[solo, seconds] of each process that worked at the cell; no seconds while it runs."""
        return self.runs / f"{cell.name}.goes.json"

    def read_goes(self, cell: MatrixCell) -> list[list[Any]]:
        return json.loads(self.goes(cell).read_bytes()) if self.goes(cell).is_file() else []

    def spent(self, cell: MatrixCell) -> float:
        """Seconds of its processes so far; of one that was killed, those in the metrics."""
        known = sum(seconds or 0.0 for _, seconds in self.read_goes(cell))
        begun = (self.run(cell) / CONFIG).is_file()
        recorded = sum(row.get("time/total") or 0.0 for row in read_metrics(self.run(cell))) if begun else 0.0
        return max(known, recorded)


@dataclass(frozen=True)
class Planned:
    """A line of the table that is shown first."""

    cell: MatrixCell
    state: str
    """done, begun or to do."""
    seconds: float
    """That it took, or will take."""


def planned(places: Places) -> list[Planned]:
    """What is to be done, with the seconds it will take; refuses other settings."""
    done = {}
    for cell in places.plan.cells:
        if places.result(cell).is_file():
            done[cell.name] = read_outcome(places.result(cell))
            refuse_other(cell, done[cell.name]["settings"], places.result(cell))
        elif (places.run(cell) / CONFIG).is_file():
            stored = flatten(read_toml(places.run(cell) / CONFIG))
            if places.plan.matrix.pool is not None:  # whose file stands in for the recipe's entry
                stored = {key: value for key, value in stored.items() if not key.startswith("data.0.")}
            refuse_other(cell, stored, places.run(cell))
    lines = []
    for cell in places.plan.cells:
        if cell.name in done:
            lines.append(Planned(cell, "done", done[cell.name]["wall_s"]))
            continue
        spent = places.spent(cell)
        lines.append(Planned(cell, "begun" if spent else "to do", max(0.0, expected(cell, done.values()) - spent)))
    return lines


def expected(cell: MatrixCell, done: Collection[Mapping[str, Any]]) -> float:
    """Seconds that a cell will take: as its arm's finished ones did, else as much of its cap as any did of theirs."""
    mine = [found["wall_s"] for found in done if found["arm"] == cell.arm]
    shares = [found["wall_s"] / found["cap_s"] for found in done if found["cap_s"]]
    return median(mine) if mine else cell.seconds * min(1.0, max(shares, default=1.0))


def refuse_other(cell: MatrixCell, stored: Mapping[str, Any], path: Path) -> None:
    if wrong := differing(cell, stored):
        raise WhetError(f"{path} was run with other settings ({wrong}); move it away, or change the matrix back.")


@dataclass
class Going:
    """A cell whose process runs."""

    cell: MatrixCell
    process: subprocess.Popen[bytes]
    left: float
    """Seconds until it is asked to stop."""
    began: float = field(default_factory=time.monotonic)
    asked: float | None = None
    """When it was asked to stop."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def hurry(self) -> None:
        """Asks it to stop when its time is up; one that does not listen is killed."""
        if self.asked is None and self.seconds >= self.left:
            self.asked = time.monotonic()
            self.process.send_signal(signal.SIGINT)
        elif self.asked is not None and time.monotonic() - self.asked > GRACE:
            self.process.kill()


@dataclass(kw_only=True)
class CellWork:
    """The cells that are not done, `beside` at a time."""

    places: Places
    start: Start
    beside: int
    on_progress: OnLine
    about: Mapping[str, Any]
    """What every JSON says of the circumstances."""
    going: dict[str, Going] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> int:
        """Begins none that would end later than `seconds` from now, and says how many were left for that reason.

        A cell that fails does not stop the others; at the end it is said which, and why.
        """
        refuse_other_start(self.places, self.start)
        begun, left = time.monotonic(), 0
        queue = [line.cell.name for line in planned(self.places) if line.state != "done"]
        try:
            while queue or self.going:
                while queue and len(self.going) < self.beside:
                    name = queue.pop(0)
                    line = next(line for line in planned(self.places) if line.cell.name == name)  # others ended since
                    if time.monotonic() - begun + line.seconds > seconds:
                        left += 1
                    else:
                        self.begin(line)
                for one in list(self.going.values()):
                    self.look_at(one)
                time.sleep(POLL if self.going else 0)
        finally:
            for one in self.going.values():
                one.process.terminate()
            for one in self.going.values():
                one.process.wait()
                self.note_go(one)
        if self.failed:
            raise WhetError(" ".join(self.failed))
        return left

    def begin(self, line: Planned) -> None:
        cell, places = line.cell, self.places
        left = cell.seconds - places.spent(cell)
        if left <= 0 or has_collapsed(places.run(cell)):  # it is over, and whoever waited for it was gone
            self.end(cell, asked=True)
            return
        files.make_folder(places.runs)
        recipe = places.run(cell).with_suffix(".toml")
        files.write_text(recipe, dump_config(cell_settings(cell, self.start)))
        files.write_text(places.goes(cell), json.dumps([*places.read_goes(cell), [self.beside == 1, None]]))
        self.going[cell.name] = Going(cell, start_run(recipe, places.run(cell), self.beside), left)
        self.on_progress(f"{cell.name} {'goes on' if line.state == 'begun' else 'begins'}.")

    def look_at(self, one: Going) -> None:
        if one.process.poll() is None:
            one.hurry()
            return
        del self.going[one.cell.name]
        self.note_go(one)
        cell, code = one.cell, one.process.returncode
        # Asked while it was still loading, or when all was done and the process about to go.
        over = code == 0 or (one.asked is not None and code in (130, -signal.SIGINT))
        if over or has_collapsed(self.places.run(cell)):
            self.end(cell, asked=one.asked is not None)
        else:
            self.fail(f"The cell {cell.name} failed: {last_words(self.places.run(cell), code)}")

    def end(self, cell: MatrixCell, *, asked: bool) -> None:
        """asked: it was stopped when its time was up."""
        folder = self.places.run(cell)
        rows = read_metrics(folder) if (folder / CONFIG).is_file() else []
        if not rows:
            self.fail(f"The cell {cell.name} had {cell.seconds:.0f} s, and began nothing in them; raise its seconds.")
        elif rows[-1].get("collapsed"):
            self.finish(cell, "collapse")
        elif not asked and not at_its_end(cell.settings, rows):
            self.fail(f"The cell {cell.name} was stopped by somebody; the same command goes on with it.")
        else:
            self.finish(cell, "recipe" if at_its_end(cell.settings, rows) else "time")

    def fail(self, sentence: str) -> None:
        self.on_progress(sentence)
        self.failed.append(sentence)

    def note_go(self, one: Going) -> None:
        *before, _ = self.places.read_goes(one.cell)
        goes = [*before, [self.beside == 1, round(one.seconds, 2)]]
        files.write_text(self.places.goes(one.cell), json.dumps(goes))

    def finish(self, cell: MatrixCell, ended_by: str) -> None:
        """Its JSON, which is what makes it done."""
        places = self.places
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
        self.on_progress(f"{cell.name}: {found['rows'][-1][0]} updates, {reached}, {found['wall_s']:.0f} s.")


def refuse_other_start(places: Places, start: Start) -> None:
    """Cells that are done must have begun from the same bytes."""
    for cell in places.plan.cells:
        if places.result(cell).is_file():
            before = read_outcome(places.result(cell))["start"]
            if before != start.hashes:
                other = next(key for key in {**start.hashes, **before} if before.get(key) != start.hashes.get(key))
                path = places.result(cell)
                raise WhetError(f"{path} began from other {other} than {start.folder}; choose another --out.")


def cell_settings(cell: MatrixCell, start: Start) -> config.Config:
    """The cell's recipe on the common weights and problems, without a warm start of its own."""
    tree = {**cell.tree, "warm_start": [], "model": {**cell.tree.get("model", {}), "name": str(start.folder)}}
    return parse_config(tree if start.pool is None else on_problems(tree, cell.settings, start.pool))


def start_run(recipe: Path, folder: Path, beside: int) -> subprocess.Popen[bytes]:
    """A process for the run, which goes on where there is one; cores are shared out among those beside it."""
    words = ["--resume"] if (folder / CONFIG).is_file() else [str(recipe)]
    environment = dict(os.environ)
    if beside > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, cores() // beside))
    with folder.with_suffix(".log").open("ab") as log:  # the process has its own handle
        return subprocess.Popen(
            [*WHET, *words, "--out", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def at_its_end(settings: config.Config, rows: Sequence[Mapping[str, Any]]) -> bool:
    last = rows[-1]
    spent = {"tokens_generated": settings.token_budget, "time_s": settings.time_budget}
    return last["step"] >= settings.steps or any(
        budget and (last.get(name) or 0.0) >= budget for name, budget in spent.items()
    )
