import contextlib
import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import Faults, Killed
from small_run import read_pictures
from transformers.utils import logging

import whet
from whet import files
from whet.errors import Stopped, WhetError
from whet.learn.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from whet.model.load import tiny_model, tiny_tokenizer
from whet.recipe import load_config
from whet.run import (
    Run,
    best_checkpoint,
    checkpoint_path,
    checkpoint_steps,
    read_metrics,
    read_rollouts,
)

CONFIG = "seed = 1\n"
KINDS = ("before", "half", "error")
"""Killed after a change is killed before the next."""
SCORE = {0: 0.1, 1: 0.9, 3: 0.5}
"""The score of each step that is saved; 1 is the best, 3 the newest."""


def writer(step: int, note: str = ""):
    def write(folder: Path) -> None:
        save_checkpoint(
            folder,
            model=None,
            tokenizer=None,
            tensors={"masters": {"w": torch.full((8,), float(step))}},
            arrays={"traces": {"ids": np.arange(step)}},
            states={"tally": {"step": step, "note": note}},
        )

    return write


def live(folder: Path, done: list[int], warn=pytest.fail, keep: int = 1) -> None:
    """A run of three steps from wherever it stands; `done` gets the step of each save that came back."""
    run = Run.resume(folder) if (folder / "config.toml").exists() else Run.create(folder, CONFIG)
    with run:
        newest = run.newest_checkpoint(warn)
        step = -1 if newest is None else load_checkpoint(newest).states["tally"]["step"]
        run.cut_back(step)
        for now in range(step + 1, 4):
            run.write_rollouts(now, [{"response": f"{now} {i}"} for i in range(2)])
            run.record(now, {"b": now / 4, "a": now})
            if now in SCORE:
                run.save(now, writer(now), SCORE[now], keep=keep)
                done.append(now)


def tree(folder: Path) -> dict[str, bytes]:
    """All that a run means: not the lock, not scores of what is gone, not the time inside an npz archive."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in ("lock", "scores.json", "manifest.json")
        and path.suffix != ".npz"
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The same life without any fault."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    live(folder, [])
    return folder


def install(monkeypatch, kind: str, at: int | None) -> Faults:
    faults = Faults(kind, at)
    monkeypatch.setattr(files, "os", faults)
    monkeypatch.setattr(files, "shutil", faults)
    return faults


def test_a_whole_life(whole):
    assert checkpoint_steps(whole) == [1, 3], "the newest and the best"
    assert json.loads((whole / "checkpoints" / "best.json").read_text()) == {
        "step": 1,
        "score": 0.9,
    }
    assert (
        best_checkpoint(whole)
        == checkpoint_path(whole, 1)
        == whole / "checkpoints" / "step_00000001"
    )
    assert [row["step"] for row in read_metrics(whole)] == list(range(4))
    assert [row["response"] for row in read_rollouts(whole, 3)] == ["3 0", "3 1"]
    assert [row["step"] for row in read_rollouts(whole)] == [
        step for step in range(4) for _ in range(2)
    ]
    assert (whole / "config.toml").read_text() == CONFIG


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_instant_a_run_goes_on_as_if_nothing_had_happened(
    monkeypatch, tmp_path, whole, kind
):
    for at in range(10_000):
        folder, done = tmp_path / str(at), []
        faults = install(monkeypatch, kind, at)
        with contextlib.suppress(Killed, WhetError):
            live(folder, done)
        install(monkeypatch, kind, None)
        if (folder / "config.toml").exists():
            check_resumable(folder, done, f"{kind} at {at}")
        live(folder, done)
        assert tree(folder) == tree(whole), f"{kind} at {at}"
        if not faults.fired:
            assert at > 30
            return
    raise AssertionError("the faults never ended")


def check_resumable(folder: Path, done: list[int], where: str) -> None:
    with Run.resume(folder) as run:
        newest = run.newest_checkpoint(pytest.fail)
        if done:
            assert newest is not None and int(newest.name[-8:]) >= done[-1], (
                f"{where}: a saved step was lost"
            )
            best = best_checkpoint(run.folder)
            assert best is not None, where
            assert SCORE[int(best.name[-8:])] >= max(SCORE[step] for step in done), (
                f"{where}: the best was lost"
            )
        step = -1 if newest is None else int(newest.name[-8:])
        run.cut_back(step)
        assert [row["step"] for row in read_metrics(folder)] == list(range(step + 1)), where
        assert sorted({row["step"] for row in read_rollouts(folder)}) == list(range(step + 1)), (
            where
        )
        assert list(folder.rglob(".whet-*")) == [], where


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_instant_while_it_writes_over_a_damaged_future(
    monkeypatch, tmp_path, whole, kind
):
    """The newest checkpoint is damaged; the run goes on from the one before and comes by that step again."""
    for at in range(10_000):
        folder = tmp_path / str(at)
        shutil.copytree(whole, folder)
        damage(checkpoint_path(folder, 3))
        faults = install(monkeypatch, kind, at)
        skipped: list[str] = []
        with contextlib.suppress(Killed, WhetError):
            live(folder, [], skipped.append)
        install(monkeypatch, kind, None)
        live(folder, [], skipped.append)
        assert 1 <= len(skipped) <= 2
        assert all(
            "step_00000003 is skipped: state/tally.json was changed" in text for text in skipped
        )
        assert tree(folder) == tree(whole), f"{kind} at {at}"
        assert list(folder.rglob(".whet-*")) == []
        if not faults.fired:
            assert at > 12
            return
    raise AssertionError("the faults never ended")


def damage(checkpoint: Path) -> None:
    path = checkpoint / "state" / "tally.json"
    path.write_bytes(path.read_bytes().replace(b"3", b"7"))


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_checkpoint_written_again_is_the_old_or_the_new_one(monkeypatch, tmp_path, kind):
    """The Hugging Face part included; what is replaced is whole, and the best."""
    tokenizer = tiny_tokenizer("01+=")
    models = [
        tiny_model(len(tokenizer), hidden=8, layers=1, heads=1, context=16, seed=seed)
        for seed in (0, 1)
    ]

    def write(which: int):
        def to(folder: Path) -> None:
            save_checkpoint(
                folder,
                model=models[which],
                tokenizer=tokenizer,
                tensors={},
                arrays={},
                states={"which": which},
            )

        return to

    with Run.create(tmp_path / "start", CONFIG) as run:
        run.save(5, write(0), 0.5)
    for at in range(1000):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "start", folder)
        faults = install(monkeypatch, kind, at)
        try:
            with Run.resume(folder) as run:
                run.save(5, write(1))
        except (Killed, WhetError):
            pass
        monkeypatch.undo()
        with Run.resume(folder) as run:
            assert (
                run.newest_checkpoint(pytest.fail)
                == best_checkpoint(run.folder)
                == checkpoint_path(folder, 5)
            )
        which = load_checkpoint(checkpoint_path(folder, 5)).states["which"]
        if not faults.fired:
            assert at > 8 and which == 1
            return
    raise AssertionError("the faults never ended")


LIFE = """
    import sys
    from pathlib import Path
    from whet.learn.checkpoint import load_checkpoint, save_checkpoint
    from whet.run import Run
    assert "torch" not in sys.modules and "transformers" not in sys.modules

    folder = Path(sys.argv[1])
    run = Run.resume(folder) if (folder / "config.toml").exists() else Run.create(folder, "seed = 1")
    newest = run.newest_checkpoint(lambda text: sys.exit(text))
    step = -1 if newest is None else load_checkpoint(newest).states["tally"]
    run.cut_back(step)
    while True:
        step += 1
        run.write_rollouts(step, [{"response": "x" * 10000}])
        run.record(step, {"a": step})
        run.save(step, lambda path: save_checkpoint(
            path, model=None, tokenizer=None, tensors={}, arrays={}, states={"tally": step, "big": "y" * 100000}
        ), -step)
"""


def test_a_process_killed_by_the_system_can_be_resumed_at_once(tmp_path):
    folder = tmp_path / "run"
    reached = 0
    for more in (3, 17, 8):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LIFE), str(folder)], stderr=subprocess.PIPE
        )
        wait_until(lambda: len(steps_logged(folder)) > reached + more, process)  # noqa: B023
        process.kill()
        process.communicate()
        with Run.resume(folder) as run:
            newest = run.newest_checkpoint(pytest.fail)
            assert newest is not None
            step = load_checkpoint(newest).states["tally"]
            run.cut_back(step)
            assert best_checkpoint(run.folder) == checkpoint_path(folder, 0), (
                "the first had the highest score"
            )
        assert step >= reached + more - 1
        assert steps_logged(folder) == list(range(step + 1))
        assert sorted({row["step"] for row in read_rollouts(folder)}) == list(range(step + 1))
        reached = step


def steps_logged(folder: Path) -> list[int]:
    return (
        [row["step"] for row in read_metrics(folder)] if (folder / "config.toml").exists() else []
    )


def wait_until(condition, process: subprocess.Popen) -> None:
    while not condition():
        if process.poll() is not None:
            raise AssertionError(process.stderr.read().decode())
        time.sleep(0.01)


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path):
    with Run.create(tmp_path / "run", CONFIG):
        script = "import sys; from pathlib import Path; from whet.run import Run; Run.resume(Path(sys.argv[1]))"
        second = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True
        )
        assert second.returncode == 1
        assert (
            f"WhetError: {tmp_path / 'run'} is in use by process {os.getpid()} on {platform.node()}: wait"
            in second.stderr
        )
        with pytest.raises(WhetError, match="in use by process"):
            Run.resume(tmp_path / "run")
        with pytest.raises(WhetError, match="in use by process"):
            Run.create(tmp_path / "run", CONFIG)
    Run.resume(tmp_path / "run").close()


def test_a_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    script = """
        import os, sys, time
        from pathlib import Path
        from whet.run import Run
        run = Run.create(Path(sys.argv[1]), "")
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(60)
        time.sleep(60)
    """
    args = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        try:
            with pytest.raises(WhetError, match=f"process {process.pid}"):
                Run.resume(tmp_path / "run")
            process.kill()
            process.wait()
            Run.resume(tmp_path / "run").close()
            os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_folder_with_a_run_is_not_started_again(tmp_path):
    Run.create(tmp_path, CONFIG).close()
    with pytest.raises(
        WhetError, match=r"already holds a run \(config.toml\): go on with --resume"
    ):
        Run.create(tmp_path, "other")
    assert (tmp_path / "config.toml").read_text() == CONFIG
    (tmp_path / "config.toml").unlink()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(WhetError, match=r"\(metrics.jsonl\)"):
        Run.create(tmp_path, CONFIG)


def test_a_run_keeps_its_prompts_where_another_is_refused(tmp_path):
    Run.create(tmp_path, CONFIG).close()
    (tmp_path / "prompts.jsonl").write_text("those of the first run")
    with pytest.raises(WhetError, match="already holds a run"):
        whet.train("tiny", [("2+2=", "4")], out=tmp_path, quiet=True)
    assert (tmp_path / "prompts.jsonl").read_text() == "those of the first run"


def test_prompts_that_no_file_can_hold_are_refused(tmp_path):
    prompts = [("2+2=", "4"), {"prompt": "3+5=", "answer": np.int64(8)}]
    with pytest.raises(
        WhetError, match=r"^Prompt 2 cannot be written to the run's folder: Object of type int64"
    ):
        whet.train("tiny", prompts, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_other_things_can_hold_a_run(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("")
    Run.create(tmp_path, CONFIG).close()
    with Run.resume(tmp_path) as run:
        assert (run.folder / "config.toml").read_text() == CONFIG


def test_what_is_no_run_is_not_resumed(tmp_path):
    with pytest.raises(
        WhetError, match=r"There is no run to resume in .*none: there is no such folder; start one"
    ):
        Run.resume(tmp_path / "none")
    with pytest.raises(WhetError, match=r"it holds no config.toml"):
        Run.resume(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(WhetError, match="no such folder"):
        Run.resume(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "asking leaves nothing behind"
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(WhetError, match=r"config.toml cannot be read"):
        load_config(tmp_path / "config.toml")


def test_a_folder_that_cannot_be_made_is_refused_in_words(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(WhetError, match="a part of that path is a file"):
        Run.create(tmp_path / "file" / "run", CONFIG)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.os, "makedirs", refuse)
    with pytest.raises(WhetError, match=r"no permission to write .*run: choose another folder"):
        Run.create(tmp_path / "run", CONFIG)


def test_a_failed_start_frees_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "write_text", lambda *_: (_ for _ in ()).throw(WhetError("full")))
    with pytest.raises(WhetError, match="full"):
        Run.create(tmp_path / "run", CONFIG)
    monkeypatch.undo()
    Run.create(tmp_path / "run", CONFIG).close()


def test_saving_a_model_leaves_the_progress_bars_of_transformers_on(tmp_path):
    logging.enable_progress_bar()
    save_checkpoint(
        tmp_path / "a", model=tiny_model(8), tokenizer=None, tensors={}, arrays={}, states={}
    )
    assert (tmp_path / "a" / "model.safetensors").is_file() and logging.is_progress_bar_enabled()


def test_a_full_disk_stops_a_save_but_costs_nothing_saved(tmp_path, monkeypatch):
    with Run.create(tmp_path / "run", CONFIG) as run:
        run.record(1, {"a": 1})
        run.save(1, writer(1), 0.5)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files.os, "write", full)
        for act in (
            lambda: run.record(2, {"a": 2}),
            lambda: run.save(2, writer(2), 0.7),
        ):
            with pytest.raises(
                WhetError, match=r"no space left to write .*everything saved before is untouched"
            ):
                act()
        monkeypatch.undo()
        assert (
            run.newest_checkpoint(pytest.fail)
            == best_checkpoint(run.folder)
            == checkpoint_path(run.folder, 1)
        )
        assert read_metrics(run.folder) == [{"step": 1, "a": 1}]
        run.save(2, writer(2), 0.7)
        assert best_checkpoint(run.folder) == checkpoint_path(run.folder, 2)


def test_metrics_are_strict_json_with_the_step_first(tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        run.record(
            3,
            {
                "z": float("nan"),
                "a": np.float32(0.5),
                "m": float("-inf"),
                "n": np.int64(4),
                "step": 3,
            },
        )
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 3, "a": 0.5, "m": null, "n": 4, "z": null}\n'


def test_rollouts_of_hostile_text_stay_one_line_each(tmp_path):
    text = "a\nb\u2028c\x1b[2J\ud800"
    with Run.create(tmp_path, CONFIG) as run:
        run.write_rollouts(0, [{"response": text, "reward": float("nan")}, {"response": ""}])
        run.write_rollouts(0, [{"response": "x"}], kind="eval")
    data = (tmp_path / "rollouts" / "step_00000000.jsonl").read_bytes()
    assert data.count(b"\n") == 2 and data.isascii() and b"\x1b" not in data
    rows = list(read_rollouts(tmp_path, 0))
    assert rows[1] == {"step": 0, "response": text, "reward": None}
    assert [row["response"] for row in rows] == ["x", text, ""]


def test_half_written_rollouts_are_not_seen(tmp_path):
    def rows():
        yield {"response": "x"}
        raise ZeroDivisionError

    with Run.create(tmp_path, CONFIG) as run, pytest.raises(ZeroDivisionError):
        run.write_rollouts(0, rows())
    assert list((tmp_path / "rollouts").glob("*")) == []


def test_logs_are_cut_back_to_a_step(tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        for step in range(5):
            run.record(step, {"a": step})
            run.draw(step, {"flow": {"asked": np.int64(step)}})
            run.write_rollouts(step, [{"response": str(step)}])
            run.write_rollouts(step, [{"response": str(step)}], kind="eval")
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1, "a"')
        assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
        run.cut_back(2)
        assert (tmp_path / "metrics.jsonl").read_text().splitlines()[-1] == '{"step": 2, "a": 2}'
        assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
        assert read_pictures(tmp_path)[1:] == [
            {"step": step, "flow": {"asked": step}} for step in (1, 2)
        ]
        assert [row["step"] for row in read_rollouts(tmp_path)] == [0, 0, 1, 1, 2, 2]
        run.record(3, {"a": 3})
        assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]
        run.cut_back(-1)
        assert (
            read_metrics(tmp_path) == read_pictures(tmp_path) == []
            and list(read_rollouts(tmp_path)) == []
        )


def test_a_damaged_line_in_the_midst_is_told(tmp_path):
    Run.create(tmp_path, CONFIG).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nrubbish\n{"step": 1}\n')
    with pytest.raises(WhetError, match=r"Line 2 of .*metrics.jsonl is damaged"):
        read_metrics(tmp_path)


def test_readers_want_a_run(tmp_path):
    for read in (read_metrics, lambda folder: list(read_rollouts(folder))):
        with pytest.raises(WhetError, match="There is no run in"):
            read(tmp_path)
    Run.create(tmp_path, CONFIG).close()
    assert read_metrics(tmp_path) == [] and list(read_rollouts(tmp_path, 4)) == []


def test_damaged_checkpoints_are_passed_over(tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        assert run.newest_checkpoint(pytest.fail) is None and best_checkpoint(run.folder) is None
        for step in (1, 2, 3, 4):
            run.save(step, writer(step), step / 10, keep=4)
        newest = lambda warn: run.newest_checkpoint(warn)  # noqa: E731
        assert newest(pytest.fail) == checkpoint_path(tmp_path, 4)
        (checkpoint_path(tmp_path, 4) / "manifest.json").write_text("rubbish")
        (checkpoint_path(tmp_path, 3) / "state" / "masters.safetensors").unlink()
        warnings: list[str] = []
        assert newest(warnings.append) == checkpoint_path(tmp_path, 2)
        assert warnings == [
            "The checkpoint step_00000004 is skipped: manifest.json is unreadable.",
            "The checkpoint step_00000003 is skipped: state/masters.safetensors is missing.",
        ]
        assert best_checkpoint(run.folder) == checkpoint_path(tmp_path, 2)
        for step in (1, 2):
            (checkpoint_path(tmp_path, step) / "manifest.json").unlink()
        with pytest.raises(WhetError, match=r"No checkpoint in .* is whole"):
            newest(warnings.append)
        assert best_checkpoint(run.folder) is None


def test_pruning_never_counts_a_damaged_future(tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        for step in (10, 20, 30):
            run.save(step, writer(step), keep=3)
        (checkpoint_path(tmp_path, 30) / "manifest.json").unlink()
        run.save(25, writer(25), keep=1)
        assert checkpoint_steps(tmp_path) == [25]


def test_the_best_is_the_highest_and_earliest(tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        best = []
        for step, score in enumerate((None, 0.2, float("nan"), 0.4, 0.4, None, 0.1)):
            run.save(step, writer(step), score, keep=1)
            path = best_checkpoint(run.folder)
            assert path is not None
            best.append(int(path.name[-8:]))
        assert best == [0, 1, 1, 3, 3, 3, 3]
        assert checkpoint_steps(tmp_path) == [3, 6]
        assert all(verify_checkpoint(checkpoint_path(tmp_path, step)) is None for step in (3, 6))


def test_a_best_that_was_not_yet_named_is_named_by_the_next_start(monkeypatch, tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        run.save(1, writer(1), 0.5)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(run, "_name_best", lambda scores: (_ for _ in ()).throw(Killed))
            run.save(2, writer(2), 0.6)
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["step"] == 1
    with Run.resume(tmp_path):
        assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {
            "step": 2,
            "score": 0.6,
        }


def test_the_best_is_never_of_a_future_that_was_abandoned(tmp_path):
    """Step 30 scored highest and was damaged, so the run went on from 20: its score must not name the best."""
    with Run.create(tmp_path, CONFIG) as run:
        for step, score in ((10, 0.3), (20, 0.2), (30, 0.9)):
            run.save(step, writer(step), score, keep=3)
        (checkpoint_path(tmp_path, 30) / "manifest.json").unlink()
        run.save(25, writer(25), 0.1, keep=1)
        assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {
            "step": 10,
            "score": 0.3,
        }
        assert checkpoint_steps(tmp_path) == [10, 25]
        run.save(30, writer(30), keep=1)  # the same step again, which was not evaluated this time
        assert best_checkpoint(run.folder) == checkpoint_path(tmp_path, 10)


def test_a_step_saved_twice_keeps_its_score(tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        run.save(1, writer(1), 0.5, keep=1)
        run.save(1, writer(1, "again"), keep=1)
        run.save(2, writer(2), 0.1, keep=1)
        assert best_checkpoint(run.folder) == checkpoint_path(tmp_path, 1)
        assert load_checkpoint(checkpoint_path(tmp_path, 1)).states["tally"]["note"] == "again"


def test_damaged_scores_are_told(tmp_path):
    with Run.create(tmp_path, CONFIG) as run:
        run.save(1, writer(1), 0.5)
        (tmp_path / "checkpoints" / "scores.json").write_text("[")
        with pytest.raises(WhetError, match=r"scores.json is damaged"):
            run.save(2, writer(2), 0.6)
        assert checkpoint_steps(tmp_path) == [1]


def test_signals_ask_to_stop(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Run.create(tmp_path, CONFIG) as run:
        with run.stop_signals():
            assert not run.stopping
            signal.raise_signal(signal.SIGTERM)
            assert run.stopping
            # as `timeout` does, which also sends it to its group
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGINT)
            run.signal_at -= 2.0  # as if it had been two seconds ago
            with pytest.raises(Stopped) as again:
                signal.raise_signal(signal.SIGTERM)
            assert again.value.number == signal.SIGTERM and run.signal == signal.SIGTERM
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        run.signal = 0
        with run.stop_signals():
            signal.raise_signal(signal.SIGINT)
            assert run.stopping
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(ZeroDivisionError), run.stop_signals():
            raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_goes_without_signals(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with Run.create(tmp_path, CONFIG) as run, run.stop_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
