"""One training, one folder: its lock, its logs, its checkpoints, and how it stops and resumes.

    RUN/config.toml   machine.json   lock   metrics.jsonl   pictures.jsonl
    RUN/rollouts/step_00000012.jsonl, eval_00000012.jsonl
    RUN/checkpoints/step_00000012/   scores.json (of all kept)   best.json (the best of them, for other tools)

The loop records and saves through a Run; reports and viewers use the readers at the end. Every change goes through
`whet.files`, so a process may be killed at any instant and the folder can be resumed. This file never imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np

from whet import files
from whet.errors import Stopped, WhetError
from whet.learn.checkpoint import verify_checkpoint

CONFIG = "config.toml"
LOCK = "lock"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
PICTURES = "pictures.jsonl"
MACHINE = "machine.json"
SCORES = "scores.json"
BEST = "best.json"
LOGS = (METRICS, PICTURES)  # one line per step
# seconds in which another SIGTERM is the same one: `timeout` sends it to the process and to its
# group
REPEAT_S = 1.0
_CHECKPOINT_NAME = re.compile(r"step_(\d{8,})")
_ROLLOUTS_NAME = re.compile(r"[a-z]+_(\d{8,})\.jsonl")
_HELD: set[int] = set()  # handles of the locks of this process


class Run(contextlib.AbstractContextManager["Run"]):
    """A run folder, from `Run.create` or `Run.resume`; it is locked until it is closed or the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # the first signal that asked to stop (finish the step, save, leave); 0 for none
        self.signal = 0
        self.signal_at = math.inf  # when it came, by `time.monotonic`
        self.why = ""  # why the run stops, where that is a fault
        self._lock = _lock(folder / LOCK)

    @classmethod
    def create(cls, folder: Path, config_toml: str) -> Self:
        files.make_folder(folder)
        run = cls(folder)
        try:
            refuse_taken(folder)
            files.write_text(folder / CONFIG, config_toml)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def resume(cls, folder: Path) -> Self:
        """Lock the folder and remove what a killed process left half done."""
        if not (folder / CONFIG).is_file():
            what = "there is no such folder" if not folder.is_dir() else f"it holds no {CONFIG}"
            raise WhetError(
                f"There is no run to resume in {folder}: {what}; start one without --resume."
            )
        run = cls(folder)
        try:
            for part in (folder, folder / ROLLOUTS, folder / CHECKPOINTS):
                files.recover(part)
            run._name_best(read_scores(folder))
        except BaseException:
            run.close()
            raise
        return run

    @property
    def stopping(self) -> bool:
        return self.signal != 0 or bool(self.why)

    def stop(self, why: str) -> None:
        """Finish the step, save, and leave with this sentence."""
        self.why = why

    def close(self, *_: object) -> None:
        if self._lock in _HELD:
            _HELD.remove(self._lock)
            os.close(self._lock)

    __exit__ = close

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl; numbers that are not finite become null."""
        row = {"step": step, **{name: metrics[name] for name in sorted(metrics) if name != "step"}}
        files.append_line(self.folder / METRICS, _line(row))

    def draw(self, step: int, picture: Mapping[str, Any]) -> None:
        """Append a line to pictures.jsonl (`whet.pictures`)."""
        files.append_line(self.folder / PICTURES, _line({"step": step, **picture}))

    def describe(self, machine: Mapping[str, Any]) -> None:
        """Say once where, by which versions and with which evaluation prompts the run was started."""
        if not (self.folder / MACHINE).exists():
            files.write_text(self.folder / MACHINE, json.dumps(machine) + "\n")

    def write_rollouts(
        self, step: int, rows: Iterable[Mapping[str, Any]], kind: str = "step"
    ) -> None:
        """Write or replace the file of a step and kind, in ASCII, since the model may write anything."""
        lines = [_line({"step": step, **row}) + "\n" for row in rows]
        files.write_text(self.folder / ROLLOUTS / f"{kind}_{step:08d}.jsonl", "".join(lines))

    def cut_back(self, step: int) -> None:
        """Bring the logs back to what they were after `step`; -1 empties them. A line torn by a kill goes too."""
        for of_step, path in rollout_files(self.folder):
            if of_step > step:
                files.remove_file(path)

        def is_kept(line: str) -> bool:
            of_step = (parse_line(line) or {}).get("step")
            return isinstance(of_step, int) and of_step <= step

        for log in self._logs():
            files.keep_lines(log, is_kept)

    def _logs(self) -> list[Path]:
        return [self.folder / name for name in LOGS if (self.folder / name).exists()]

    def save(
        self, step: int, write: Callable[[Path], None], score: float | None = None, *, keep: int = 2
    ) -> None:
        """Write a checkpoint through `write`, which makes its argument appear whole; keep the newest and the best.

        Checkpoints of later steps belong to a future that was abandoned when the run went on from an older one.
        """
        final = checkpoint_path(self.folder, step)
        files.make_folder(final.parent)
        for log in self._logs():
            with files.one_sentence(log):
                files.sync(log)  # no checkpoint may be newer than its log
        there = checkpoint_steps(self.folder)
        scores = {s: v for s, v in read_scores(self.folder).items() if s in there and s <= step}
        if score is not None and math.isfinite(score):
            scores[step] = float(score)
        # Before the checkpoint: a score without one is ignored, one without its score might be pruned though best.
        files.write_text(final.parent / SCORES, json.dumps(scores))
        write(final)
        assert final.is_dir(), f"{final} was not written"
        kept = {
            self._name_best(scores),
            *[s for s in checkpoint_steps(self.folder) if s <= step][-keep:],
        }
        for old in checkpoint_steps(self.folder):
            if old not in kept:
                files.remove_tree(checkpoint_path(self.folder, old))
        files.recover(final.parent)

    def beats(self, step: int, score: float | None) -> bool:
        """Whether an evaluation after this step is better than those of all checkpoints before."""
        if score is None:
            return False
        there = checkpoint_steps(self.folder)
        kept = [
            value
            for of_step, value in read_scores(self.folder).items()
            if of_step in there and of_step < step
        ]
        return score > max(kept, default=-math.inf)

    def _name_best(self, scores: Mapping[int, float]) -> int | None:
        there = [step for step in checkpoint_steps(self.folder) if step in scores]
        best = min(there, key=lambda step: (-scores[step], step), default=None)
        path = self.folder / CHECKPOINTS / BEST
        if best is None:
            files.remove_file(path)
        else:
            files.write_text(path, json.dumps({"step": best, "score": scores[best]}))
        return best

    def newest_checkpoint(self, warn: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint, None if the run has none yet. `warn` gets a sentence for each one skipped."""
        steps = checkpoint_steps(self.folder)
        for step in reversed(steps):
            path = checkpoint_path(self.folder, step)
            wrong = verify_checkpoint(path)
            if wrong is None:
                return path
            warn(f"The checkpoint {path.name} is skipped: {wrong}.")
        if steps:  # starting again would delete all logs
            remedy = "bring one back from a backup, or start again in another folder"
            raise WhetError(f"No checkpoint in {self.folder / CHECKPOINTS} is whole: {remedy}.")
        return None

    @contextlib.contextmanager
    def stop_signals(self, on_signal: Callable[[], None] = lambda: None) -> Iterator[None]:
        """In the main thread SIGINT and SIGTERM set `signal` and call `on_signal`; a second one raises `Stopped`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask_to_stop(number: int, _: FrameType | None) -> None:
            now = time.monotonic()
            if self.stopping if number == signal.SIGINT else now > self.signal_at + REPEAT_S:
                raise Stopped(number)
            if not self.signal:
                self.signal = number
                self.signal_at = now
                on_signal()

        before = {
            number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _lock(path: Path) -> int:
    """Let one process work on a run; return the handle. The system frees it when the process ends, however it ends."""
    with files.one_sentence(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()} on {os.uname().nodename}\n".encode())
        except BaseException as error:
            holder = os.read(handle, 300).decode(errors="replace").strip()
            os.close(handle)
            if not isinstance(error, BlockingIOError):
                raise
            by = f"process {holder}" if holder else "another process"
            raise WhetError(
                f"{path.parent} is in use by {by}: wait for it to end, or stop it."
            ) from None
    _HELD.add(handle)
    return handle


def _close_inherited() -> None:
    """Close the locks in a forked worker, which may outlive the run and must not hold them."""
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_close_inherited)


def refuse_taken(folder: Path) -> None:
    """Refuse a folder that holds a run already, before anything of it is changed."""
    if name := next(
        (n for n in (CONFIG, METRICS, CHECKPOINTS, ROLLOUTS) if (folder / n).exists()), ""
    ):
        raise WhetError(
            f"{folder} already holds a run ({name}): go on with --resume, or give another --out."
        )


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / f"step_{step:08d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps with a checkpoint, whole or not, in ascending order."""
    names = (
        _CHECKPOINT_NAME.fullmatch(path.name)
        for path in (folder / CHECKPOINTS).glob("step_*")
        if path.is_dir()
    )
    return sorted(int(name[1]) for name in names if name)


def best_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint with the highest score, the earliest of equals; where none has a score, the newest."""
    scores, steps = read_scores(folder), checkpoint_steps(folder)
    order = sorted(
        steps, key=lambda step: (step not in scores, -scores.get(step, float(step)), step)
    )
    paths = (checkpoint_path(folder, step) for step in order)
    return next((path for path in paths if verify_checkpoint(path) is None), None)


def best_weights(folder: Path) -> Path:
    """The best checkpoint of a run that must have one."""
    best = best_checkpoint(folder)
    if best is not None:
        return best
    steps = checkpoint_steps(folder)
    if not steps:
        raise WhetError(f"The run {folder} has no checkpoint yet.")
    newest = checkpoint_path(folder, steps[-1])
    why = f"{newest.name}: {verify_checkpoint(newest)}"
    raise WhetError(
        f"No checkpoint in {newest.parent} is whole ({why}); bring one back from a backup."
    )


def read_scores(folder: Path) -> dict[int, float]:
    """Scores by step, also of checkpoints that were removed."""
    path = folder / CHECKPOINTS / SCORES
    try:
        text = path.read_bytes() if path.exists() else "{}"
        return {int(step): float(score) for step, score in json.loads(text).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise WhetError(
            f"{path} is damaged: delete it, and the next checkpoint counts as the best."
        ) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, which a run may be writing at the same time."""
    _check_run(folder)
    return list(_read_rows(folder / METRICS))


def has_collapsed(folder: Path) -> bool:
    """Whether a run was stopped by the guard against collapse (`whet.watch`), which is a result, not a failure."""
    rows = list(_read_rows(folder / METRICS))
    return bool(rows) and bool(rows[-1].get("collapsed"))


def is_in_use(folder: Path) -> bool:
    """Whether any process, this one included, holds the lock of a run."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def mean_response(folder: Path) -> float | None:
    """Mean tokens per response in the last step of a run; None where there is no run, or no step."""
    rows = reversed(list(_read_rows(folder / METRICS)))
    return next((row["length/mean"] for row in rows if row.get("length/mean")), None)


def read_rollouts(folder: Path, step: int | None = None) -> Iterator[dict[str, Any]]:
    """The rollouts of one step, or of all steps in order; each row has its `step`."""
    _check_run(folder)
    for of_step, path in rollout_files(folder):
        if step is None or step == of_step:
            yield from _read_rows(path)


def _check_run(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise WhetError(f"There is no run in {folder}: it holds no {CONFIG}.")


def rollout_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, path), by step and kind."""
    matches = (
        (_ROLLOUTS_NAME.fullmatch(path.name), path) for path in (folder / ROLLOUTS).glob("*.jsonl")
    )
    return sorted((int(name[1]), path) for name, path in matches if name)


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, if it exists; a last line without its end, torn by a kill or being written now, is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            row = parse_line(line)
            if row is not None:
                yield row
            elif line.endswith("\n"):
                raise WhetError(f"Line {number} of {path} is damaged: delete that line.")


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, allow_nan=False)
    except (
        TypeError,
        ValueError,
    ):  # numpy or NaN; to look at every token of every rollout for them takes longer
        return json.dumps(_plain(row))


def _plain(value: Any) -> Any:
    """The value as strict JSON can hold it: no numpy, no NaN."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
