"""Sends the rows of a run to wandb, trackio or tensorboard, or prints them as JSON lines: `whet train --log NAME`.

Each tracker's own client runs in a process of its own, which follows RUN/metrics.jsonl. So a client that fails, hangs
or waits for a network costs the run nothing, and its threads are not there when a judge is forked. A run that is over
can be sent as well: `python -m whet.report.loggers NAME RUN < /dev/null`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from whet.errors import WhetError
from whet.report.arms import Row, RunLog, arm_name, name_runs, number, read_run
from whet.report.live import POLL_S, FileTail, RunProgress

END_S = 60.0  # seconds that a client has at the end of a run, to send what is left
NOTE = 300  # characters of a client's last words

Write = Callable[[int, Mapping[str, float]], None]  # a step and its metrics
Client = tuple[Write, Callable[[], None]]  # what writes a row, and what ends the client

# ---- the clients: each gets the run, and the step before its first row, which is -1 for a run that begins


def open_wandb(run: RunLog, before: int) -> Client:
    """Its files go to RUN/wandb. A resumed run goes on under the id that it had."""
    import wandb

    known = run.folder / "wandb" / "whet-id"
    known.parent.mkdir(exist_ok=True)
    if before < 0 or not known.exists():
        known.write_text(secrets.token_hex(6))
    client = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "whet"),
        dir=run.folder,
        id=known.read_text(),
        resume="allow",
        name=run.name,
        group=arm_name(run.name),
        config=dict(run.settings),
        settings=wandb.Settings(console="off", silent=True),
    )
    client.define_metric("*", step_metric="step")  # wandb's own count of rows can only rise
    return lambda step, row: client.log({"step": step, **row}), client.finish


def open_trackio(run: RunLog, before: int) -> Client:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", "whet")
    resume = "never" if before < 0 else "allow"
    group = arm_name(run.name)
    config = dict(run.settings)
    trackio.init(
        project=project, name=run.name, group=group, config=config, resume=resume, embed=False
    )
    return lambda step, row: trackio.log(dict(row), step=step), trackio.finish


def open_tensorboard(run: RunLog, before: int) -> Client:
    """Events go to RUN/tensorboard. Those of steps that a resumed run repeats are marked as void."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run.folder / "tensorboard"))
    if before >= 0:
        start = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=before + 1, session_log=start))

    def write(step: int, row: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    return write, writer.close


def open_jsonl(run: RunLog, before: int) -> Client:
    def write(step: int, row: Mapping[str, float]) -> None:
        sys.stdout.write(json.dumps({"step": step, **row}) + "\n")
        sys.stdout.flush()

    return write, lambda: None


CLIENTS = {
    "wandb": open_wandb,
    "trackio": open_trackio,
    "tensorboard": open_tensorboard,
    "jsonl": open_jsonl,
}


def send(name: str, folder: Path, before: int) -> None:
    """Sends each row after the step `before` once, until standard input ends, as it does with the run."""
    ((title, path),) = name_runs([folder]).items()
    write, close = CLIENTS[name](read_run(title, path), before)
    tail = FileTail(path / "metrics.jsonl")
    going = True
    while going:
        going = not select.select([sys.stdin], [], [], POLL_S)[0]
        for row in tail.read():
            step = int(number(row, "step") or 0)
            if step > before:
                before = step
                known = {
                    key: value
                    for key in row
                    if (value := number(row, key)) is not None and key != "step"
                }
                write(step, known)
    close()


# ---- in the process of the run


def check_loggers(names: Sequence[str]) -> None:
    """Refuses what is not known or not installed, before a run begins."""
    for name in names:
        if name not in CLIENTS:
            raise WhetError(f'--log "{name}" is not known; it is one of {", ".join(CLIENTS)}.')
        found = importlib.util.find_spec(name if name != "jsonl" else "json")
        if found is None or found.origin is None:  # a mere folder of that name is no package
            raise WhetError(
                f'--log {name} needs {name}, which is not installed: pip install "whet[{name}]".'
            )


class Logger:
    """A process that sends the rows of a run, from the row of this step on."""

    def __init__(self, name: str, folder: Path, step: int) -> None:
        self.name = name
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        code = [sys.executable, "-m", "whet.report.loggers", name, str(folder), str(step - 1)]
        out = None if name == "jsonl" else self._words
        # A session of its own: Ctrl-C is for the run, which then ends its loggers.
        self._process = subprocess.Popen(
            code, stdin=subprocess.PIPE, stdout=out, stderr=self._words, start_new_session=True
        )

    def failed(self) -> str:
        """A sentence if the process has ended with an error, else nothing."""
        if not self._process.poll():
            return ""
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").split("\n")
        last = next(
            (line for line in reversed(words) if line.strip()),
            f"exit code {self._process.returncode}",
        )
        return (
            f"--log {self.name} has failed, and the run goes on without it: {last.strip()[:NOTE]}"
        )

    def close(self) -> str:
        """Lets it send what is left; a sentence if it cannot."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._words:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)  # with all that it has started
                self._process.wait()
                return f"--log {self.name} was not done {END_S:.0f} s after the run, and was ended."
            return self.failed()


class LoggedProgress(RunProgress):
    """Shows the run of this process and has its rows sent."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        super().__init__()
        self._names = list(dict.fromkeys(names))
        self._folder = folder
        self._loggers: list[Logger] | None = None  # until there is a row to send

    def update(self, metrics: Row, progress: float) -> None:
        if self._loggers is None:
            self._loggers = [
                Logger(name, self._folder, int(metrics["step"])) for name in self._names
            ]
        super().update(metrics, progress)
        for logger in [*self._loggers]:
            if logger.failed():
                self._loggers.remove(logger)
                self.message(logger.close())

    def close(self) -> None:
        super().close()
        for logger in self._loggers or ():
            if words := logger.close():
                self.message(words)
        self._loggers = None


if __name__ == "__main__":
    try:
        send(sys.argv[1], Path(sys.argv[2]), int((*sys.argv[3:], "-1")[0]))
    except Exception as error:  # each client raises its own
        sys.stderr.write("\n" + " ".join(f"{type(error).__name__}: {error}".split()) + "\n")
        sys.stderr.flush()
        os._exit(1)  # these are its last words: a client may hang in its own end
