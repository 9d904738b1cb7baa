"""Rows reach the trackers by their own clients, offline; a client that fails does not end a run.

The tests of wandb, trackio and tensorboard run where these are installed: `make test-loggers`.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.errors import WhetError
from whet.report import loggers
from whet.report.loggers import LoggedProgress, Logger, check_loggers

MakeRun = Callable[..., Path]
Captured = pytest.CaptureFixture[str]
ROWS = [
    {"step": 0, "eval/held_out/accuracy": 0.25, "time_s": 0.0},
    {"step": 1, "reward/mean": 0.5, "time_s": 1.5, "learn/kl": float("nan")},
    {"step": 2, "reward/mean": 0.75, "time_s": 3.0},
]


def drive(folder: Path, rows: list[dict[str, float]], *names: str) -> LoggedProgress:
    """What a run does: a row is written, then the watcher hears of it."""
    progress = LoggedProgress(names, folder)
    for number, row in enumerate(rows):
        with (folder / "metrics.jsonl").open("a") as file:
            known = {key: None if value != value else value for key, value in row.items()}
            file.write(json.dumps(known) + "\n")
        progress.update(row, number / len(rows))
    progress.close()
    return progress


def test_jsonl_prints_each_row_once(save_run: MakeRun, capfd: Captured) -> None:
    drive(save_run("run", []), ROWS, "jsonl", "jsonl")
    printed = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert printed == [ROWS[0], {"step": 1, "reward/mean": 0.5, "time_s": 1.5}, ROWS[2]], "no NaN"


def test_a_resumed_run_sends_only_its_own_rows(save_run: MakeRun, capfd: Captured) -> None:
    drive(save_run("run", ROWS[:2]), ROWS[2:], "jsonl")
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == ROWS[2:]


def test_steps_that_are_repeated_are_sent_once(save_run: MakeRun, capfd: Captured) -> None:
    """A run that has lost its processes goes back to a checkpoint, with a log that is cut back."""
    folder, printed = save_run("run", ROWS[:2]), ""
    progress = LoggedProgress(["jsonl"], folder)
    progress.update(ROWS[0], 0.5)
    begun = time.monotonic()
    while len(printed.splitlines()) < 2 and time.monotonic() < begun + 120:
        time.sleep(0.05)
        printed += capfd.readouterr().out
    (folder / "other").write_text("".join(json.dumps({"step": row["step"]}) + "\n" for row in ROWS))
    os.replace(folder / "other", folder / "metrics.jsonl")
    progress.close()
    printed += capfd.readouterr().out
    assert [json.loads(line)["step"] for line in printed.splitlines()] == [0, 1, 2]


def test_what_is_not_known_or_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_loggers(["jsonl"])
    with pytest.raises(
        WhetError, match=r'--log "mlflow" is not known; it is one of wandb, trackio'
    ):
        check_loggers(["jsonl", "mlflow"])
    (tmp_path / "wandb").mkdir()  # what wandb leaves in a folder is not wandb
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(
        WhetError, match=r'needs wandb, which is not installed: pip install "whet\[wandb\]"'
    ):
        check_loggers(["wandb"])


def test_a_client_that_fails_does_not_end_the_run(save_run: MakeRun, capfd: Captured) -> None:
    """Its folder is a file, so it fails with tensorboard installed, and without."""
    folder = save_run("run", [])
    (folder / "tensorboard").write_text("in the way")
    drive(folder, ROWS, "tensorboard", "jsonl")
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 3
    assert (
        " ".join(err.split()).count(
            "--log tensorboard has failed, and the run goes on without it: "
        )
        == 1
    )
    assert "Error" in err and "Traceback" not in err


def test_a_client_that_hangs_is_ended(save_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "END_S", 0.5)
    logger = Logger("jsonl", save_run("run", ROWS), 0)
    os.kill(logger._process.pid, signal.SIGSTOP)
    assert logger.close() == "--log jsonl was not done 0 s after the run, and was ended."
    assert logger._process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_reader_that_went_away_does_not_end_the_run(tmp_path: Path) -> None:
    """As in `whet train --log jsonl | head -0`: the pipe breaks, the run does not."""
    small = [
        "steps=3",
        "held_out.size=8",
        "curriculum.groups=2",
        "curriculum.rollouts=4",
        "rollout.slots=8",
    ]
    small += [
        "data.0.task=chain",
        "curriculum.name=uniform",
        "rollout.max_tokens=8",
        "curriculum.starvation=partial",
    ]
    command = [sys.executable, "-m", "whet", "train", "--log=jsonl", f"--out={tmp_path / 'run'}"]
    command += [f"--set={item}" for item in small]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "The run is in" in done.stderr and "--log jsonl has failed" in done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_tensorboard_reads_the_events(save_run: MakeRun) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = save_run("run", [])
    drive(folder, ROWS, "tensorboard")
    # resumed after step 1
    again = [{"step": 2, "reward/mean": 1.0}, {"step": 3, "reward/mean": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ({"step": 1},)))
    drive(folder, again, "tensorboard")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["eval/held_out/accuracy", "time_s", "reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 0.5),
    ]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline file: a header of 7 bytes, then blocks of 32 KiB in which each piece of a record has
    a sum of 4 bytes, a length of 2 and a kind (whole, first, middle, last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := -place % 32768) and left < 7:  # the rest of a block that no piece fits into
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def test_wandb_writes_offline(save_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = save_run("speed-seed1", [], seed=1)
    drive(folder, ROWS, "wandb")
    drive(folder, [{"step": 3, "reward/mean": 1.0}], "wandb")  # resumed
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1, "one id"
    records = [record for path in files for record in wandb_records(path)]
    run = next(record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name, run.run_group) == ("whet", "speed-seed1", "speed")
    assert {item.key: item.value_json for item in run.config.update}["seed"] == "1"
    history = [record.history for record in records if record.HasField("history")]
    sent = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item}
        for row in history
    ]
    assert [(row["step"], row.get("reward/mean")) for row in sent] == [
        (0, None),
        (1, 0.5),
        (2, 0.75),
        (3, 1.0),
    ]


def test_wandb_without_a_key_says_so(
    save_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: Captured, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    drive(save_run("run", []), ROWS, "wandb")
    assert (
        "--log wandb has failed" in (err := " ".join(capfd.readouterr().err.split()))
        and "No API key" in err
    )


def test_trackio_keeps_rows_on_this_machine(
    save_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = save_run("speed-seed1", [])
    drive(folder, ROWS, "trackio")
    drive(folder, [{"step": 3, "reward/mean": 1.0}], "trackio")  # resumed
    ask = [
        sys.executable,
        "-m",
        "trackio.cli",
        "get",
        "metric",
        "--project",
        "whet",
        "--run",
        "speed-seed1",
        "--json",
    ]
    done = subprocess.run(
        [*ask, "--metric", "reward/mean"], capture_output=True, text=True, check=True
    )
    values = json.loads(done.stdout)["values"]
    assert [(point["step"], point["value"]) for point in values] == [(1, 0.5), (2, 0.75), (3, 1.0)]
