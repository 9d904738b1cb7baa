"""Progress in the terminal, of the run in this process (`RunProgress`) or of several others (`follow`).

On a terminal a table that redraws itself: a line for each run with bar, time left, accuracy, signal share and
speed. Anywhere else (nohup, CI, a pipe) plain lines, at most one every few seconds and one at each evaluation.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from whet.recipe import read_toml
from whet.report import formats
from whet.report.arms import Folders, name_runs
from whet.report.curves import evaluation_names, number
from whet.text import printable

# ---- status
#
# Where a run stands, from its rows of metrics: progress, time left, latest accuracy. And the lines that say so.
#
# `live` shows it, in the run's own process or from another that follows the folder. No clock here: seconds
# are given, so that a run is told the same way while it goes and afterwards.


TIMES = ("generate", "judge", "train", "idle", "eval", "save", "sync", "log_probs", "draft")
"""Where the time of a row may go, by the name after "time/"; what else is there is no part of the total."""
PACE_WINDOW = 32
"""Rows over which the pace is measured: responses grow, so old steps mislead."""


class Pace:
    """Seconds left, from how progress went lately.

    >>> pace = Pace()
    >>> for second, progress in ((0.0, 0.0), (10.0, 0.25), (20.0, 0.5)):
    ...     pace.add(second, progress)
    >>> pace.left(), pace.left(waited=5.0)
    (20.0, 15.0)
    """

    def __init__(self, window: int = PACE_WINDOW) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, seconds: float, progress: float) -> None:
        self._marks.append((seconds, progress))

    def left(self, waited: float = 0.0) -> float | None:
        """None while nothing has moved. `waited`: seconds since the last mark."""
        if not self._marks:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last >= 1.0:
            return 0.0
        if last <= first or last_s <= first_s:
            return None
        return max(0.0, (1.0 - last) * (last_s - first_s) / (last - first) - waited)


def time_split(row: Mapping[str, Any]) -> str:
    """Where the time of a row went, the most first; and, on a GPU, how much of the step it idled. "" if not told.

    >>> time_split({"time/generate": 7.0, "time/train": 2.5, "time/idle": 0.5, "time/gpu_idle": 0.08})
    'generate 70%, train 25%, idle 5%, GPU idle 8%'
    """
    spent = {name: number(row, f"time/{name}") or 0.0 for name in TIMES}
    total = sum(spent.values())
    if total <= 0:
        return ""
    shares = [(seconds / total, name.replace("_", "-")) for name, seconds in spent.items()]
    words = [f"{name} {formats.share(share)}" for share, name in sorted(shares, reverse=True) if share >= 0.005]
    idle = number(row, "time/gpu_idle")
    return ", ".join(words + ([f"GPU idle {formats.share(idle)}"] if idle is not None else []))


class Status:
    """What is known of one run."""

    def __init__(self, name: str, steps: int = 0, token_budget: int = 0) -> None:
        self.name = name
        self.steps = steps
        self.token_budget = token_budget
        self.step: int | None = None
        self.progress = 0.0
        self.tokens: float | None = None
        self.accuracies: list[float] = []
        """Of the first evaluation the run names, oldest first."""
        self.signal: float | None = None
        self.speed: float | None = None
        """Tokens generated a second."""
        self.split = ""
        """Where the time of the latest row went."""
        self.pace = Pace()
        self._evaluation: str | None = None
        self._seconds = 0.0

    def add(self, row: Mapping[str, Any], progress: float | None = None, seconds: float | None = None) -> bool:
        """Takes in one row; says whether it holds an evaluation.

        Without `progress` it is derived from steps and token budget; without `seconds` from the
        row's own time/total.
        """
        step = int(number(row, "step") or 0)
        if self.step is not None and step <= self.step:
            self._rewind()
        self.step = step
        self.tokens = self._latest(row, "tokens_generated", self.tokens)
        self.signal = self._latest(row, "curriculum/signal_share", self.signal)
        self.speed = self._latest(row, "rollout/tokens_per_s", self.speed)
        self.split = time_split(row) or self.split
        self._seconds = self._seconds + (number(row, "time/total") or 0.0) if seconds is None else seconds
        self.progress = self._derived() if progress is None else min(1.0, max(0.0, progress))
        self.pace.add(self._seconds, self.progress)
        return self._add_accuracy(row)

    @staticmethod
    def _latest(row: Mapping[str, Any], key: str, old: float | None) -> float | None:
        value = number(row, key)
        return old if value is None else value

    def _derived(self) -> float:
        """A run ends at its last step or with its last token, whichever comes first."""
        shares = [(self.step or 0) / self.steps] if self.steps else []
        if self.token_budget:
            shares.append((self.tokens or 0.0) / self.token_budget)
        return min(1.0, max(shares, default=1.0))

    def _add_accuracy(self, row: Mapping[str, Any]) -> bool:
        names = evaluation_names([row])
        if names and self._evaluation is None:
            self._evaluation = names[0]
        accuracy = number(row, f"eval/{self._evaluation}/accuracy")
        if accuracy is not None:
            self.accuracies.append(accuracy)
        return bool(names)

    def _rewind(self) -> None:
        """The rows start again further back: the run was resumed, and its log cut."""
        self.accuracies.clear()
        self.pace = Pace()
        self._seconds = 0.0

    @property
    def accuracy(self) -> float | None:
        return self.accuracies[-1] if self.accuracies else None


def plain_line(status: Status, left: float | None) -> str:
    """For logs, pipes and nohup: ASCII, one line, every number with its name.

    >>> status = Status("speed", steps=40)
    >>> status.add({"step": 10, "tokens_generated": 85_000, "eval/held_out/accuracy": 0.598,
    ...             "curriculum/signal_share": 0.4, "rollout/tokens_per_s": 21_400})
    True
    >>> plain_line(status, 200.0)
    'speed: step 10, 25%, 3m20s left, accuracy 0.598, signal 40%, 21.4k tokens/s, 85k tokens'

    Where the row says where its time went, it ends so: "; generate 70%, train 25%, idle 5%".
    """
    words = [f"step {status.step if status.step is not None else 0}", formats.percent(status.progress)]
    if status.progress < 1.0 and left is not None:
        words.append(f"{formats.duration(round(left))} left")
    for name, text in (
        ("accuracy {}", formats.accuracy(status.accuracy)),
        ("signal {}", formats.share(status.signal)),
        ("{} tokens/s", formats.count(status.speed)),
        ("{} tokens", formats.count(status.tokens)),
    ):
        if text != formats.MISSING:
            words.append(name.format(text))
    split = f"; {status.split}" if status.split else ""
    return f"{status.name}: " * bool(status.name) + ", ".join(words) + split


# ---- tail
#
# Follows a growing JSONL file that another process writes: each byte is read once, half lines wait for their end.


class FileTail:
    """
    A line counts once its newline is there. A file that was replaced or cut back (a resumed run does both)
    is read again from its beginning. Whole lines that are no JSON object are passed over and counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read, up to the last newline."""
        self.bad_lines = 0
        self._inode: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """The objects that came since the last call; none while the file is not there."""
        try:
            with self.path.open("rb") as file:
                return self._parse(self._read_new(file))
        except FileNotFoundError:
            return []

    def _read_new(self, file: BinaryIO) -> bytes:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self.offset:
            self._inode, self.offset = status.st_ino, 0
        file.seek(self.offset)
        data: bytes = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole

    def _parse(self, data: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in data.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif line.strip():
                self.bad_lines += 1
        return rows


EVERY_S = 10.0
"""Seconds between plain lines."""
POLL_S = 0.25
"""Seconds between looks at the followed files."""
DRAW_S = 0.1
"""Seconds between drawings: steps of a tiny model are shorter."""
WIDE = 96
"""From so many columns on there is room for the course of the accuracy, the tokens and the steps."""
COURSE = 16
"""Evaluations in the course of the accuracy."""
BLOCKS = "▁▂▃▄▅▆▇█"


class RunProgress:
    """Shows the run of this process. Fits the loop's `Watcher`; `close` it in a `finally`.

    Draws when it is told something and has no thread of its own: judges are forked from this process.
    """

    def __init__(
        self, name: str = "", *, quiet: bool = False, console: Console | None = None, every_s: float = EVERY_S
    ) -> None:
        self.quiet = quiet
        self._console = console or Console(stderr=True)
        self._status = Status(printable(name, one_line=True))
        self._every_s = every_s
        self._warm: Status | None = None
        self._live: Live | None = None
        self._shown_at = float("-inf")

    def start(self, total: int) -> None:
        """So many steps are planned. Not needed where `update` is told the progress."""
        self._status.steps = total
        self._show()

    def update(self, metrics: Mapping[str, Any], progress: float | None = None) -> None:
        """After each step, with its row of metrics and how far the run is, 0..1."""
        evaluated = self._status.add(metrics, progress, time.monotonic())
        self._show(evaluated or self._status.progress >= 1.0)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None:
        """After each update of a warm start, which has no rows of metrics."""
        if self._warm is None or self._warm.name != name:
            self._warm = Status(name, steps)
        self._warm.add({"step": step}, step / steps, time.monotonic())
        if self._is_due(step == steps):
            left = self._warm.pace.left()
            if redraws(self._console):
                self._draw(warm_start_table(self._warm, left, loss))
            else:
                self.message(f"{name}: {step}/{steps} updates, {_left(step / steps, left)}, loss {loss:.3f}")

    def message(self, text: str) -> None:
        """A sentence that stays."""
        if not self.quiet:
            self._console.print(Text(printable(text)), soft_wrap=not redraws(self._console))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, due: bool = False) -> None:
        if not self._is_due(due):
            return
        left = self._status.pace.left()
        if redraws(self._console):
            table = progress_table([(self._status, left)], self._console.width)
            table.caption = Text(self._status.split, style="dim") if self._status.split else None
            table.caption_justify = "left"
            self._draw(table)
        else:
            self._console.print(Text(plain_line(self._status, left)), soft_wrap=True)

    def _is_due(self, due: bool) -> bool:
        wait = DRAW_S if redraws(self._console) else self._every_s
        if self.quiet or not (due or time.monotonic() >= self._shown_at + wait):
            return False
        self._shown_at = time.monotonic()
        return True

    def _draw(self, table: Table) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(table, refresh=True)


class Followed:
    """A run that another process writes: its files and what is known of it."""

    def __init__(self, name: str, folder: Path, total: tuple[int, int] | None) -> None:
        self.folder = folder
        self.status = Status(printable(name, one_line=True))
        self._tail = FileTail(folder / "metrics.jsonl")
        self._read_at = time.monotonic()
        self._knows_total = total is not None
        if total is not None:
            self.status.steps, self.status.token_budget = total

    def read(self) -> bool:
        """Takes in the new rows; says whether one holds an evaluation."""
        if not self._knows_total:
            if not (self.folder / "config.toml").is_file():
                return False
            recipe = read_toml(self.folder / "config.toml")
            self.status.steps, self.status.token_budget = recipe.get("steps", 0), recipe.get("token_budget", 0)
            self._knows_total = True
        rows = self._tail.read()
        if rows:
            self._read_at = time.monotonic()
        evaluated = False
        for row in rows:
            evaluated |= self.status.add(row)
        return evaluated

    def left(self) -> float | None:
        return self.status.pace.left(time.monotonic() - self._read_at)


def follow(
    folders: Folders,
    alive: Callable[[], bool],
    *,
    totals: Mapping[str, tuple[int, int]] | None = None,
    console: Console | None = None,
    every_s: float = EVERY_S,
    poll_s: float = POLL_S,
) -> None:
    """Shows the runs in these folders while `alive()`, then once more to the end.

    totals: name -> (steps, token budget); where it names none, the run's config.toml is asked.
    """
    console = console or Console()
    named = dict(folders) if isinstance(folders, Mapping) else name_runs(folders)
    runs = [Followed(name, Path(folder), (totals or {}).get(name)) for name, folder in named.items()]
    if redraws(console):
        _redraw(runs, alive, console, poll_s)
    else:
        _print_lines(runs, alive, console, every_s, poll_s)


def _redraw(runs: Sequence[Followed], alive: Callable[[], bool], console: Console, poll_s: float) -> None:
    together = Together(len(runs))
    with Live(console=console, auto_refresh=False) as live:
        going = True
        while going:
            going = alive()
            for run in runs:
                run.read()
            lines = [(run.status, run.left() if going else None) for run in runs]
            together.add(lines, time.monotonic())
            live.update(progress_table(lines, console.width, together if len(runs) > 1 else None), refresh=True)
            if going:
                time.sleep(poll_s)


class Together:
    """The progress of several runs as one. Those that wait their turn count too."""

    def __init__(self, runs: int) -> None:
        self.progress = -1.0
        self._pace = Pace(PACE_WINDOW * runs)
        self._moved_at = 0.0
        self.left: float | None = None

    def add(self, lines: Sequence[tuple[Status, float | None]], now: float) -> None:
        progress = sum(status.progress for status, _ in lines) / len(lines)
        if progress != self.progress:
            self.progress, self._moved_at = progress, now
            self._pace.add(now, progress)
        lefts = [self._pace.left(now - self._moved_at), *(left for _, left in lines)]
        self.left = max((left for left in lefts if left is not None), default=None)


def _print_lines(
    runs: Sequence[Followed], alive: Callable[[], bool], console: Console, every_s: float, poll_s: float
) -> None:
    printed_at = dict.fromkeys(runs, float("-inf"))
    told: dict[Followed, int | None] = dict.fromkeys(runs)
    going = True
    while going:
        going = alive()
        for run in runs:
            evaluated = run.read()
            news = run.status.step != told[run]
            if news and (evaluated or not going or time.monotonic() >= printed_at[run] + every_s):
                printed_at[run], told[run] = time.monotonic(), run.status.step
                console.print(Text(plain_line(run.status, run.left())), soft_wrap=True)
        if going:
            time.sleep(poll_s)


def redraws(console: Console) -> bool:
    """Whether this console can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal


def progress_table(lines: Sequence[tuple[Status, float | None]], width: int, together: Together | None = None) -> Table:
    """A line for each run (with its seconds left), and one for all of them."""
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=max(8, width // 4))
    table.add_column("", ratio=1, min_width=6)
    for head in ("done", "left", "accuracy"):
        table.add_column(head, justify="right", no_wrap=True, min_width=5)
    if wide:
        table.add_column("", no_wrap=True, min_width=COURSE)
    for head in ("signal", "tok/s", "tokens", "step") if wide else ("signal", "tok/s"):
        table.add_column(head, justify="right", no_wrap=True, min_width=5)
    for status, left in lines:
        table.add_row(*_cells(status, left, wide))
    if together is not None:
        done = together.progress
        table.add_row(
            Text("all"), _bar(done), Text(formats.percent(done)), Text(_left(done, together.left)), style="bold"
        )
    return table


def warm_start_table(status: Status, left: float | None, loss: float) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(
        Text(status.name),
        _bar(status.progress),
        Text(formats.percent(status.progress)),
        Text(_left(status.progress, left)),
        Text(f"loss {loss:.3f}"),
    )
    return table


def _cells(status: Status, left: float | None, wide: bool) -> list[Text | ProgressBar]:
    if status.step is None:
        return [Text(status.name), _bar(0.0), Text("waiting", style="dim")]
    cells: list[Text | ProgressBar] = [
        Text(status.name or f"step {status.step}"),
        _bar(status.progress),
        Text(formats.percent(status.progress)),
        Text(_left(status.progress, left)),
        Text(formats.accuracy(status.accuracy), style="bold"),
    ]
    if wide:
        cells.append(Text(sparkline(status.accuracies, COURSE), style="cyan"))
    numbers = [formats.share(status.signal), formats.count(status.speed)]
    if wide:
        numbers += [formats.count(status.tokens), str(status.step)]
    return [*cells, *map(Text, numbers)]


def _left(progress: float, seconds: float | None) -> str:
    if progress >= 1.0:
        return "done"
    return formats.duration(None if seconds is None else round(seconds))


def _bar(progress: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=progress)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values in small bars, between the lowest and the highest of all.

    >>> sparkline([0.2, 0.5, 0.8], 8)
    '▁▄█'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale)] for value in values[-width:])
