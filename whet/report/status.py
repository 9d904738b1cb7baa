"""Where a run stands, from its rows of metrics: progress, time left, latest accuracy. And the lines that say so.

`live` shows it, in the run's own process or from another that follows the folder. No clock here: seconds
are given, so that a run is told the same way while it goes and afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from whet.report import formats
from whet.report.curves import evaluation_names, number

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
