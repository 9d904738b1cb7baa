from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from small_run import small_config

from whet.config import merged as merge
from whet.errors import WhetError
from whet.recipe import parse_config
from whet.report.arms import read_arms
from whet.run import Run
from whet.tools.experiment import last_words, name_arms, replace_run, start_run, train_arms


def test_tables_merge_and_all_else_replaces() -> None:
    base = {
        "eval": [{"limit": 400, "every": 4}],
        "learn": {"lr": 1e-4, "warmup": 5},
        "stop": [1, 2],
        "steps": 9,
    }
    over = {"eval": {"every": 8}, "learn": {"lr": 2e-4}, "stop": [3], "seed": 1}
    assert merge(base, over) == {
        "eval": [{"limit": 400, "every": 8}],
        "learn": {"lr": 2e-4, "warmup": 5},
        "stop": [3],
        "steps": 9,
        "seed": 1,
    }
    assert base["eval"] == [{"limit": 400, "every": 4}], "what is merged is not changed"


def test_arms_are_named_from_the_folder_that_holds_them() -> None:
    assert list(name_arms([Path("out/few/a"), Path("out/few/b")])) == ["a", "b"]
    assert list(name_arms([Path("out/few/a"), Path("out/many/a")])) == ["few/a", "many/a"]
    assert list(name_arms([Path("out/a")])) == ["a"]


def test_only_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(WhetError, match="is in the way and holds no run"):
        replace_run(mine)
    assert (mine / "thesis.txt").read_text() == "precious"
    run.mkdir()
    (run / "config.toml").write_text("")
    replace_run(run)
    assert not run.exists()
    replace_run(run)  # nothing there is no reason to complain


def test_runs_that_another_process_is_writing_are_left_alone(tmp_path: Path) -> None:
    finished, going = tmp_path / "finished", tmp_path / "going"
    for folder in (finished, going):
        Run.create(folder, "").close()
    # an arm that is started fails at once
    settings = parse_config({"model": {"name": str(tmp_path / "nowhere")}})
    with Run.resume(going), pytest.raises(WhetError, match="going is in use by another process"):
        train_arms({finished: settings, going: settings}, Console(file=io.StringIO()))
    assert (finished / "config.toml").is_file() and (going / "config.toml").is_file()


@pytest.mark.slow
def test_a_run_that_failed_at_once_keeps_its_words_when_it_is_started_again(tmp_path: Path) -> None:
    """It failed before there was a config.toml; only `replace_run` removes the log."""
    settings, log = (
        parse_config({"model": {"name": str(tmp_path / "nowhere")}}),
        tmp_path / "cell.log",
    )
    log.write_text("The first words.\n")
    start_run(tmp_path / "cell", settings).wait()
    assert not (tmp_path / "cell" / "config.toml").exists()
    assert log.read_text().startswith("The first words.\n") and "nowhere" in last_words(
        tmp_path / "cell", 2
    )
    replace_run(tmp_path / "cell")
    assert not log.exists()


@pytest.mark.slow
def test_an_arm_that_fails_ends_the_experiment_in_its_own_words(tmp_path: Path) -> None:
    arms = {tmp_path / "deep" / "bad": parse_config({"model": {"name": str(tmp_path / "nowhere")}})}
    with pytest.raises(WhetError, match=r"The arm bad failed: .*nowhere"):
        train_arms(arms, Console(file=io.StringIO()))


@pytest.mark.slow
def test_an_arm_that_is_stopped_leaves_the_others_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    long, short = tmp_path / "long", tmp_path / "short"
    own = {"data.0.reward": "small_run:even_digits", "eval.0.reward": "small_run:even_digits"}
    sets = [f"{key}={value}" for key, value in own.items()]
    arms = {long: small_config("steps=100000", *sets), short: small_config("steps=2", *sets)}

    def stop_the_long_one() -> None:
        while not (long / "metrics.jsonl").is_file():
            time.sleep(0.05)
        os.kill(int((long / "lock").read_text().split()[0]), signal.SIGTERM)

    thread = threading.Thread(target=stop_the_long_one)
    thread.start()
    train_arms(arms, Console(file=io.StringIO()))
    thread.join()
    unfinished = [arm.unfinished for arm in read_arms(list(arms))]
    assert unfinished[0].startswith("stopped at step ") and unfinished[1] == ""
