"""A run that was interrupted, at any instant and in any way, ends as the one that was not."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Faults, Killed
from small_run import (
    SMALL,
    Silent,
    Stop,
    assert_same_run,
    even_digits,
    newest_weights,
    small_config,
)

from whet import api, cli, files
from whet.errors import WhetError
from whet.recipe import dump_config, load_config
from whet.report import live
from whet.report.live import RunProgress
from whet.run import read_metrics
from whet.tasks.answer_check import NOISE

KINDS = {
    "barrier": (),
    "dapo": ("curriculum.name=dapo", "curriculum.max_age=1"),
    "stream cut": ("rollout.mode=stream", "curriculum.name=dapo"),
    "stream recompute": (
        "rollout.mode=stream",
        "rollout.on_update=recompute",
        "curriculum.max_age=2",
    ),
    "bf16 masters, kl": ("model.dtype=bfloat16", "learn.kl_coef=0.1", "learn.updates=2"),
}
FILE = [item for item in SMALL if not item.startswith(("data.", "eval."))] + [
    "steps=2",
    "held_out.size=0",
]


def train(folder: Path, *sets: str, resume: bool = False) -> Silent:
    silent = Silent()
    api.run_recipe(small_config(*sets), folder, watcher=silent, reward=even_digits, resume=resume)
    return silent


# A filter that requests more groups is also part of "stream cut".
@pytest.mark.wide
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "dapo")) for kind in KINDS]
)
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, kind: str) -> None:
    train(tmp_path / "whole", *KINDS[kind])
    api.run_recipe(
        small_config(*KINDS[kind]), tmp_path / "parts", watcher=Stop(3), reward=even_digits
    )
    assert read_metrics(tmp_path / "parts")[-1]["step"] == 3
    resumed = train(tmp_path / "parts", *KINDS[kind], resume=True)
    assert "Resuming after step 3." in resumed.messages
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


class WritesAndRenames(Faults):
    """Whole runs are not repeated for every fsync and chmod; tests/test_run.py does that for the folder alone."""

    CHANGES = ("write", "replace", "rename", "truncate", "unlink", "rmtree")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("before", 24), ("half", 10)])
def test_a_crash_at_any_write_or_rename_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, least: int
) -> None:
    """Killed before or in the midst of the k-th change of a file, for every k of a run (after it = before the next)."""
    sets = (
        "steps=2",
        "save.every=1",
        "save.keep=1",
        "save.rollouts=4",
        "eval.0.limit=4",
        "curriculum.groups=2",
    )
    train(tmp_path / "whole", *sets)
    for number in itertools.count():
        folder = tmp_path / f"killed-{number}"
        faults = WritesAndRenames(kind, number)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", faults)
            patch.setattr(files, "shutil", faults)
            with contextlib.suppress(Killed):
                train(folder, *sets)
        if not faults.fired:
            break
        train(folder, *sets, resume=(folder / "config.toml").is_file())
        assert_same_run(tmp_path / "whole", folder)
        shutil.rmtree(folder)
    assert number >= least, "a run of two steps changes more files than that"


def start_process(folder: Path, recipe: Path, resume: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "whet", "train", "--out", str(folder)]
    command += ["--resume"] if resume else [str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def said(folder: Path) -> str:
    return folder.with_suffix(".log").read_text()


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline:
        rows = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
        if rows and rows[-1]["step"] >= step:
            return
        assert process.poll() is None, said(folder)
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


def process_recipe(tmp_path: Path, steps: int) -> Path:
    recipe = tmp_path / "recipe.toml"
    sets = [
        *SMALL,
        f"steps={steps}",
        "data.0.reward=small_run:even_digits",
        "eval.0.reward=small_run:even_digits",
    ]
    recipe.write_text(dump_config(load_config(sets=sets)))
    return recipe


@pytest.mark.slow
def test_three_real_kills(tmp_path: Path) -> None:
    recipe = process_recipe(tmp_path, 40)
    whole = start_process(tmp_path / "whole", recipe, resume=False)
    assert whole.wait(1200) == 0, said(tmp_path / "whole")
    folder = tmp_path / "killed"
    for attempt, step in enumerate((4, 15, 27)):
        process = start_process(folder, recipe, resume=attempt > 0)
        wait_for_step(folder, step, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(600) == -signal.SIGKILL
    last = start_process(folder, recipe, resume=True)
    assert last.wait(180) == 0, said(folder)
    assert_same_run(tmp_path / "whole", folder)


def test_sigterm_saves_and_leaves_and_a_second_process_is_refused(tmp_path: Path) -> None:
    recipe = process_recipe(tmp_path, 4000)
    folder = tmp_path / "run"
    process = start_process(folder, recipe, resume=False)
    wait_for_step(folder, 3, process)
    with pytest.raises(WhetError, match=str(process.pid)):
        train(folder, resume=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 143
    last = read_metrics(folder)[-1]["step"]
    assert f"It stopped at step {last} of 4000; whet train --out {folder} --resume" in said(folder)
    assert f"stopped at step {last} of 4000" in (folder / "report.html").read_text()
    assert (folder / "checkpoints" / f"step_{last:08d}").is_dir()


def test_a_corrupted_checkpoint_is_skipped_with_a_message(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "hurt", "save.keep=3")
    newest = max((tmp_path / "hurt" / "checkpoints").glob("step_*"))
    weights = newest / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-3] ^= 0xFF
    weights.write_bytes(damaged)
    resumed = train(tmp_path / "hurt", "save.keep=3", resume=True)
    assert any("step_00000005" in text for text in resumed.messages)
    assert "Resuming after step 4." in resumed.messages
    assert_same_run(tmp_path / "whole", tmp_path / "hurt")


def test_a_problem_that_was_changed_under_its_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "sums.jsonl"
    rows = [
        {"id": f"sum {i}", "prompt": f"What is {i}+1?", "answer": str(i + 1)} for i in range(60)
    ]

    def go_on(changes: dict[int, dict[str, str]], resume: bool = True) -> Silent:
        data.write_text(
            "".join(json.dumps(row | changes.get(i, {})) + "\n" for i, row in enumerate(rows))
        )
        settings = load_config(sets=[*FILE, f"data.0.path={data}"])
        silent = Silent()
        api.run_recipe(
            settings, tmp_path / "run", watcher=silent, reward=even_digits, resume=resume
        )
        return silent

    go_on({}, resume=False)
    monkeypatch.setattr("whet.build.build_parts", None)  # no weights are loaded before
    sentence = 'The training problem "{}" is not what it was when the checkpoint was written ({} of 60 have another'
    for changes, said in (
        ({7: {"answer": "9"}}, sentence.format("sum 7", 1)),
        (
            {9: {"prompt": "What is 9+2?"}, 8: {"prompt": "What is 8+2?"}},
            sentence.format("sum 8", 2),
        ),
    ):
        with pytest.raises(WhetError, match=f"^{re.escape(said)}"):
            go_on(changes)
    monkeypatch.undo()
    assert "Resuming after step 2." in go_on({}).messages


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_warm_start_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    class InWarmStart(RunProgress):
        def warm_start(self, name: str, step: int, steps: int, loss: float) -> None:
            if step == 2:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(live, "RunProgress", InWarmStart)
    sets = [f"--set={item}" for item in (*SMALL, "warm_start.0.steps=50")]
    monkeypatch.setattr("sys.argv", ["whet", "train", *sets, f"--out={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == code
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path) -> None:
    arguments = {"watcher": Stop(5), "reward": even_digits}
    assert api.run_recipe(small_config(), tmp_path / "run", **arguments) == 0
    assert (
        api.run_recipe(small_config(), tmp_path / "other", watcher=Stop(3), reward=even_digits)
        == signal.SIGINT
    )


@pytest.mark.parametrize("mode", ["barrier", "stream"])
def test_a_judge_that_hangs_does_not_hold_up_a_run_that_is_to_stop(
    tmp_path: Path, mode: str
) -> None:
    """The judge itself asks the run to stop, and then never answers. What it was given is judged after the resume."""
    sets = (f"rollout.mode={mode}", "judge.timeout_s=2", "judge.workers=1", "save.every=50")
    hangs, asked, parent = tmp_path / "hangs", tmp_path / "asked", os.getpid()

    class Breaks(Silent):
        def update(self, metrics: dict[str, float], progress: float) -> None:
            super().update(metrics, progress)
            if metrics["step"] == 3:  # the next evaluation follows the fourth step
                hangs.touch()

    def judge(prompt: object, response: str) -> float:
        if hangs.exists():
            if not asked.exists():
                asked.touch()
                os.kill(parent, signal.SIGTERM)
            time.sleep(3600)
        return even_digits(prompt, response)

    train(tmp_path / "whole", *sets)
    folder = tmp_path / "parts"
    stopped = api.run_recipe(small_config(*sets), folder, watcher=Breaks(), reward=judge)
    assert stopped == signal.SIGTERM and [row["step"] for row in read_metrics(folder)] == [
        0,
        1,
        2,
        3,
    ]
    hangs.unlink()
    resumed = train(folder, *sets, resume=True)
    assert "Resuming after step 3." in resumed.messages
    mine, theirs = newest_weights(tmp_path / "whole"), newest_weights(folder)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    spent = ("tokens_generated", "rollouts", "prompts_seen", "tokens_trained")
    last, again = (read_metrics(run)[-1] for run in (tmp_path / "whole", folder))
    assert [last[name] for name in spent] == [again[name] for name in spent]


def test_a_judge_that_hangs_in_an_evaluation_is_not_waited_for(tmp_path: Path) -> None:
    parent, asked = os.getpid(), tmp_path / "asked"

    def judge(prompt: Any, response: str) -> float:
        # it is called before there is a folder, too
        if prompt.id.startswith("eval:") and (tmp_path / "run").exists():
            if not asked.exists():
                asked.touch()
                os.kill(parent, signal.SIGTERM)
            time.sleep(3600)
        return 0.0

    sets = ("judge.timeout_s=2", "judge.workers=1")
    watcher = Silent()
    assert (
        api.run_recipe(small_config(*sets), tmp_path / "run", watcher=watcher, reward=judge)
        == signal.SIGTERM
    )
    (row,) = read_metrics(tmp_path / "run")
    assert row["step"] == 0 and "eval/held_out/accuracy" not in row
    assert (tmp_path / "run" / "checkpoints" / "step_00000000").is_dir()
    assert sum("took longer" in said for said in watcher.messages) <= 1


@pytest.mark.slow
def test_a_second_sigterm_ends_a_run_at_once(tmp_path: Path) -> None:
    """The judge hangs for longer than this test may take."""
    recipe, folder = process_recipe(tmp_path, 40), tmp_path / "run"
    text = (
        recipe.read_text()
        .replace("small_run:even_digits", "hanging:judge")
        .replace("120.0", "5000.0")
    )
    recipe.write_text(text)
    (tmp_path / "hanging.py").write_text(
        "import time\n"
        "def judge(prompt, response):\n"
        f"    if response in ('', {NOISE!r}, prompt.answer): return 0.0\n"
        "    open('hangs', 'w').close()\n"
        "    time.sleep(4000)\n"
    )
    command = [sys.executable, "-m", "whet", "train", "--out", str(folder), str(recipe)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with folder.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: (tmp_path / "hangs").exists(), process, folder)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Finishing this step" in said(folder), process, folder)
        time.sleep(1.2)  # a repetition within a second is taken for the same signal
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert f"It stopped at once; whet train --out {folder} --resume begins again." in said(folder)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, said(folder)
        time.sleep(0.02)
