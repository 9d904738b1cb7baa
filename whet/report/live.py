"""Shows progress in the terminal, of the run in this process (`RunProgress`) or of several others (`follow`).

The loop calls `RunProgress` after each step: a terminal gets one line a step, which scrolls, above two lines that are
drawn anew, with bar, time left, the course of the accuracy and where the time of the step went. `whet demo` and the
studies in benchmarks/ call `follow` while their arms run: a terminal gets a table with a line for each run. Anything
else (nohup, CI, a pipe) gets plain lines, at most one every few seconds and one at each evaluation.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from whet.recipe import read_toml
from whet.report import formats
from whet.report.arms import Row, evaluation_names, number, parse_lines
from whet.text import printable

# parts of a step's time
TIMES = ("generate", "judge", "train", "idle", "eval", "save", "sync", "log_probs", "draft")
PACE_WINDOW = 32  # rows over which the pace is measured: responses grow, so old steps mislead
EVERY_S = 10.0  # seconds between plain lines
POLL_S = 0.25  # seconds between looks at the followed files
DRAW_S = 0.1  # seconds between drawings: steps of a tiny model are shorter
# columns from which there is room for the course of the accuracy, the tokens and the steps
WIDE = 96
# columns left free: the "^C" that a terminal writes at the cursor must not begin a new line
ECHO = 2
COURSE = 16  # evaluations in the course of the accuracy
# Of a step's line: name and width.
COLUMNS = {
    "step": 5,
    "accuracy": 10,
    "reward": 8,
    "signal": 8,
    "length": 8,
    "tokens": 7,
    "tok/s": 7,
    "time": 7,
}
BLOCKS = "▁▂▃▄▅▆▇█"

# ---- the state of one run. It has no clock: seconds are given, so a stored run is shown as a live one is.


class Pace:
    """Estimates the seconds left from the recent progress."""

    def __init__(self, window: int = PACE_WINDOW) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, seconds: float, progress: float) -> None:
        self._marks.append((seconds, progress))

    def left(self, waited: float = 0.0) -> float | None:
        """Seconds left, `waited` seconds after the last mark; None while nothing has moved."""
        if not self._marks:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        if last >= 1.0:
            return 0.0
        if last <= first or last_s <= first_s:
            return None
        return max(0.0, (1.0 - last) * (last_s - first_s) / (last - first) - waited)


def time_split(row: Row) -> str:
    """The shares of a row's time, largest first, and how long a GPU idled; "" if no times were recorded.

    >>> time_split({"time/generate": 7.0, "time/train": 2.5, "time/idle": 0.5, "time/gpu_idle": 0.08})
    'generate 70%, train 25%, idle 5%, GPU idle 8%'
    """
    spent = {name: number(row, f"time/{name}") or 0.0 for name in TIMES}
    total = sum(spent.values())
    if total <= 0:
        return ""
    shares = [(seconds / total, name.replace("_", "-")) for name, seconds in spent.items()]
    words = [
        f"{name} {formats.share(share)}"
        for share, name in sorted(shares, reverse=True)
        if share >= 0.005
    ]
    idle = number(row, "time/gpu_idle")
    return ", ".join(words + ([f"GPU idle {formats.share(idle)}"] if idle is not None else []))


@dataclass
class Status:
    """The state of one run, from its rows of metrics."""

    name: str
    steps: int = 0
    token_budget: int = 0
    step: int | None = None
    progress: float = 0.0
    tokens: float | None = None
    signal: float | None = None
    speed: float | None = None  # generated tokens per second
    split: str = ""  # where the time of the latest row went
    # in the first evaluation of the run, oldest first
    accuracies: list[float] = field(default_factory=list)
    accuracy: str = formats.MISSING  # of the latest evaluation, in words
    pace: Pace = field(default_factory=Pace)
    evaluation: str | None = None  # its name
    _seconds: float = 0.0

    def add(self, row: Row, progress: float | None = None, seconds: float | None = None) -> bool:
        """Adds one row; returns whether it holds an evaluation. Without `progress` it follows from steps and token
        budget, without `seconds` from the row's own time/total."""

        def latest(key: str, old: float | None) -> float | None:
            value = number(row, key)
            return old if value is None else value

        step = int(number(row, "step") or 0)
        # the run was resumed, and its log was cut back
        if self.step is not None and step <= self.step:
            self.accuracies, self.pace, self._seconds = [], Pace(), 0.0
        self.step = step
        self.tokens = latest("tokens_generated", self.tokens)
        signal = step_signal(row)
        self.signal = self.signal if signal is None else signal
        self.speed = latest("rollout/tokens_per_s", self.speed)
        self.split = time_split(row) or self.split
        self._seconds = (
            self._seconds + (number(row, "time/total") or 0.0) if seconds is None else seconds
        )
        # a run ends at its last step or with its last token, whichever comes first
        if progress is None:
            spent = ((step, self.steps), (self.tokens or 0.0, self.token_budget))
            progress = max((done / most for done, most in spent if most), default=1.0)
        self.progress = min(1.0, max(0.0, progress))
        self.pace.add(self._seconds, self.progress)
        names = evaluated(row)
        self.evaluation = self.evaluation or next(iter(names), None)
        accuracy = number(row, f"eval/{self.evaluation}/accuracy")
        if accuracy is not None:
            self.accuracies.append(accuracy)
        if self.evaluation in names:
            self.accuracy = accuracy_words(row, self.evaluation)
        return bool(names)


def step_signal(row: Row) -> float | None:
    """The share of a step's groups with right and wrong answers; of a run by an older version, averaged over steps."""
    own = number(row, "verdict/mixed")
    return number(row, "curriculum/signal_share") if own is None else own


def evaluated(row: Row) -> list[str]:
    """The evaluations of a row. One of which most responses have no verdict holds no accuracy."""
    without = [key[5:-9] for key in row if key.startswith("eval/") and key.endswith("/unjudged")]
    return list(
        dict.fromkeys(
            [*evaluation_names([row]), *(name for name in without if not name.endswith("/level"))]
        )
    )


def accuracy_words(row: Row, evaluation: str | None) -> str:
    """
    >>> accuracy_words({"eval/a/accuracy": 0.056, "eval/a/unjudged": 0.39}, "a")
    '0.056 (39% unjudged)'
    >>> accuracy_words({"eval/a/unjudged": 1.0}, "a")
    '- (100% unjudged)'
    """
    accuracy, lacking = (
        number(row, f"eval/{evaluation}/{name}") for name in ("accuracy", "unjudged")
    )
    return ("-" if accuracy is None else formats.accuracy(accuracy)) + formats.unjudged(lacking)


def plain_line(status: Status, left: float | None) -> str:
    """One line of ASCII for logs, pipes and nohup, every number with its name.

    >>> status = Status("speed", steps=40)
    >>> status.add({"step": 10, "tokens_generated": 85_000, "eval/held_out/accuracy": 0.598,
    ...             "curriculum/signal_share": 0.4, "rollout/tokens_per_s": 21_400})
    True
    >>> plain_line(status, 200.0)
    'speed: step 10, 25%, 3m20s left, accuracy 0.598, signal 40%, 21.4k tokens/s, 85k tokens'

    If the row holds times, the line ends with their shares: "; generate 70%, train 25%, idle 5%".
    """
    words = [f"step {status.step or 0}", formats.percent(status.progress)]
    if status.progress < 1.0 and left is not None:
        words.append(f"{formats.duration(round(left))} left")
    named = {
        "accuracy {}": status.accuracy,
        "signal {}": formats.share(status.signal),
        "{} tokens/s": formats.count(status.speed),
        "{} tokens": formats.count(status.tokens),
    }
    words += [name.format(text) for name, text in named.items() if text != formats.MISSING]
    split = f"; {status.split}" if status.split else ""
    return f"{status.name}: " * bool(status.name) + ", ".join(words) + split


def step_line(row: Row, evaluation: str | None) -> str:
    """The numbers of one step under the names of COLUMNS; what was not measured is blank.

    >>> step_line({"step": 5, "reward/mean": 0.41, "tokens_generated": 85_000, "eval/test/accuracy": 0.6}, "test")
    '    5     0.600   0.410                    85k'
    """
    lacking = number(row, f"eval/{evaluation}/unjudged")
    cells = [
        f"{number(row, 'step') or 0:.0f}",
        "" if evaluation not in evaluated(row) else accuracy_words(row, evaluation).split(" ")[0],
        formats.accuracy(number(row, "reward/mean")),
        formats.share(step_signal(row)),
        formats.count(number(row, "length/mean")),
        formats.count(number(row, "tokens_generated")),
        formats.count(number(row, "rollout/tokens_per_s")),
        formats.duration(number(row, "time/total")),
    ]
    widths = zip(cells, COLUMNS.values(), strict=True)
    line = "".join(
        f"{cell if cell != formats.MISSING else '':>{width}}" for cell, width in widths
    ).rstrip()
    return line + formats.unjudged(lacking)


# ---- the run in this process


class RunProgress:
    """Shows the run of this process. It fits the `Watcher` of the loop; `close` it in a `finally`.

    It draws only when it is called and has no thread of its own, because judges are forked from this process.
    """

    every_s = EVERY_S

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet = quiet
        self._console = console or Console(stderr=True)
        self._redraws = redraws(self._console)
        self._status = Status("")
        self._warm: Status | None = None
        self._live: Live | None = None
        self._shown_at = -math.inf
        self._lines = 0  # of steps

    def update(self, metrics: Row, progress: float) -> None:
        """After each step, with its row of metrics and how far the run is, 0..1."""
        status = self._status
        evaluated = status.add(metrics, progress, time.monotonic())
        if self._redraws and not self.quiet:
            lines = [Text(step_line(metrics, status.evaluation), style="bold" if evaluated else "")]
            if self._lines % max(10, self._console.height - 6) == 0:  # on every screen once
                heads = "".join(f"{name:>{width}}" for name, width in COLUMNS.items())
                lines.insert(0, Text(heads, style="dim"))
            self._lines += 1
            self._draw(run_footer(status, status.pace.left(), self._console.width), lines)
        elif self._is_due(evaluated or status.progress >= 1.0):
            self._console.print(Text(plain_line(status, status.pace.left())), soft_wrap=True)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None:
        """After each update of a warm start, which has no rows of metrics."""
        if self._warm is None or self._warm.name != name:
            self._warm = Status(name)
        self._warm.add({"step": step}, step / steps, time.monotonic())
        if not self._is_due(step == steps):
            return
        done = step / steps
        left = _left(step / steps, self._warm.pace.left())
        if self._redraws:
            table = Table.grid(padding=(0, 1))
            table.width = self._console.width - ECHO
            table.add_column(no_wrap=True)
            table.add_column(ratio=1)
            table.add_row(
                Text(name),
                _bar(done),
                *map(Text, (formats.percent(done), left, f"loss {loss:.3f}")),
            )
            self._draw(table)
        else:
            self.message(f"{name}: {step}/{steps} updates, {left}, loss {loss:.3f}")

    def message(self, text: str) -> None:
        """Prints a sentence that stays."""
        if not self.quiet:
            self._console.print(Text(printable(text)), soft_wrap=not self._redraws)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_due(self, due: bool) -> bool:
        wait = DRAW_S if self._redraws else self.every_s
        if self.quiet or not (due or time.monotonic() >= self._shown_at + wait):
            return False
        self._shown_at = time.monotonic()
        return True

    def _draw(self, table: Table, above: Sequence[Text] = ()) -> None:
        """Draws the table, and above it lines that stay."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        if above:
            self._console.print(Text("\n").join(above), no_wrap=True, overflow="crop")
        self._live.update(table, refresh=True)


# ---- runs of other processes


class FileTail:
    """Reads a growing JSONL file that another process writes, each byte once.

    A line counts once its newline is there. A file that was replaced or cut back (a resumed run does both) is read
    again from its beginning. Whole lines that are not a JSON object are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # bytes read, up to the last newline
        self._inode: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """The objects that were written since the last call; none while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self.offset:
                    self._inode, self.offset = status.st_ino, 0
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return parse_lines(whole)


class Followed:
    """A run that another process writes: its files and its state."""

    def __init__(self, name: str, folder: Path) -> None:
        self.status = Status(printable(name, one_line=True))
        self._recipe = folder / "config.toml"
        self._has_recipe = False
        self._tail = FileTail(folder / "metrics.jsonl")
        self._read_at = time.monotonic()
        # step and time of the last plain line
        self.printed: tuple[int | None, float] = (None, -math.inf)

    def read(self) -> bool:
        """Adds the new rows; returns whether one of them holds an evaluation."""
        if not self._has_recipe and self._recipe.is_file():
            recipe = read_toml(self._recipe)
            self.status.steps, self.status.token_budget = (
                recipe.get("steps", 0),
                recipe.get("token_budget", 0),
            )
            self._has_recipe = True
        rows = self._tail.read() if self._has_recipe else []
        if rows:
            self._read_at = time.monotonic()
        evaluated = [self.status.add(row) for row in rows]
        return any(evaluated)

    def left(self) -> float | None:
        return self.status.pace.left(time.monotonic() - self._read_at)


def follow(
    folders: Mapping[str, Path],
    alive: Callable[[], bool],
    *,
    console: Console,
    every_s: float = EVERY_S,
    poll_s: float = POLL_S,
) -> None:
    """Shows the runs in these folders, by name, while `alive()`, and once more at the end."""
    runs = [Followed(name, folder) for name, folder in folders.items()]
    # all runs as one, also those that still wait
    pace, share, moved_at = Pace(PACE_WINDOW * len(runs)), -1.0, 0.0
    with Live(console=console, auto_refresh=False) if redraws(console) else nullcontext() as live:
        going = True
        while going:
            going = alive()
            evaluated = [run.read() for run in runs]
            if live is not None:
                lines = [(run.status, run.left() if going else None) for run in runs]
                now = time.monotonic()
                before = share
                share = sum(run.status.progress for run in runs) / len(runs)
                if share != before:
                    moved_at = now
                    pace.add(now, share)
                lefts = [
                    left
                    for left in (pace.left(now - moved_at), *(left for _, left in lines))
                    if left is not None
                ]
                together = (share, max(lefts, default=None)) if len(runs) > 1 else None
                live.update(progress_table(lines, console.width, together), refresh=True)
            else:
                for run, due in zip(runs, evaluated, strict=True):
                    (step, at), now = run.printed, time.monotonic()
                    if run.status.step != step and (due or not going or now >= at + every_s):
                        run.printed = (run.status.step, now)
                        console.print(Text(plain_line(run.status, run.left())), soft_wrap=True)
            if going:
                time.sleep(poll_s)


# ---- what is drawn


def redraws(console: Console) -> bool:
    """Whether this console can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal


def run_footer(status: Status, left: float | None, width: int) -> Table:
    """Bar, time left and course of the accuracy; below, where the time of the last step went."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.width = width - ECHO
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(8, width // 4))
    table.add_column(ratio=1, min_width=6)
    for _ in range(4):
        table.add_column(no_wrap=True)
    ends = _left(status.progress, left)
    course = Text(sparkline(status.accuracies, max(4, width // 5)), style="cyan")
    words = (
        f"{formats.percent(status.progress):>4}",
        ends if ends in ("done", formats.MISSING) else f"{ends} left",
    )
    accuracy = Text(f"accuracy {status.accuracy}", style="bold") if status.evaluation else Text("")
    table.add_row(
        Text(f"step {status.step}"), _bar(status.progress), *map(Text, words), course, accuracy
    )
    table.caption = Text(status.split, style="dim") if status.split else None
    table.caption_justify = "left"
    return table


def progress_table(
    lines: Sequence[tuple[Status, float | None]],
    width: int,
    together: tuple[float, float | None] | None = None,
) -> Table:
    """A line for each run (with its seconds left), and one for all of them (progress and seconds left)."""
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, width=width - ECHO, header_style="dim")
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
        words = (formats.percent(together[0]), _left(*together))
        table.add_row(Text("all"), _bar(together[0]), *map(Text, words), style="bold")
    return table


def _cells(status: Status, left: float | None, wide: bool) -> list[Text | ProgressBar]:
    if status.step is None:
        return [Text(status.name), _bar(0.0), Text("waiting", style="dim")]
    course = [Text(sparkline(status.accuracies, COURSE), style="cyan")] if wide else []
    more = [formats.count(status.tokens), str(status.step)] if wide else []
    numbers = [formats.share(status.signal), formats.count(status.speed), *more]
    return [
        Text(status.name),
        _bar(status.progress),
        Text(formats.percent(status.progress)),
        Text(_left(status.progress, left)),
        Text(status.accuracy, style="bold"),
        *course,
        *map(Text, numbers),
    ]


def _left(progress: float, seconds: float | None) -> str:
    if progress >= 1.0:
        return "done"
    return formats.duration(None if seconds is None else round(seconds))


def _bar(progress: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=progress)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as small bars, scaled between the lowest and the highest of all.

    >>> sparkline([0.2, 0.5, 0.8], 8)
    '▁▄█'
    """
    if not values:
        return ""
    low = min(values)
    high = max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale)] for value in values[-width:])
