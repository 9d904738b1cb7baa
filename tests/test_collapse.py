"""The guard: what counts as a collapse, and how a run ends by it."""

import os
import signal
from pathlib import Path

import pytest
from small_run import Silent, small_config

from whet import api
from whet.errors import Collapsed
from whet.eval import wilson
from whet.run import Run, has_collapsed, read_metrics
from whet.watch import CollapseGuard


def of(name: str, right: int, prompts: int) -> dict[str, float]:
    low, high = wilson(right / prompts, prompts)
    return {
        f"eval/{name}/accuracy": right / prompts,
        f"eval/{name}/accuracy_low": low,
        f"eval/{name}/accuracy_high": high,
    }


def judged(*evaluations: dict[str, float]) -> list[bool]:
    guard = CollapseGuard()
    return [bool(guard.check(10 * i, metrics)) for i, metrics in enumerate(evaluations)]


def test_twice_in_a_row_far_below_the_best_beyond_chance() -> None:
    """71 of 660 are 10.8% (8.6 to 13.4); 12 are 1.8% (1.0 to 3.1): less than half, and below 8.6."""
    start, fallen, mild = of("test", 71, 660), of("test", 12, 660), of("test", 48, 660)
    assert judged(start, fallen, fallen) == [False, False, True]
    assert judged(start, fallen, start, fallen) == [False] * 4, "once may be a mishap"
    assert judged(start, mild, mild, mild) == [False] * 4, "worse is no collapse"
    assert judged(fallen, start, fallen, fallen) == [False, False, False, True], (
        "against the best, not the first"
    )


def test_a_weak_model_that_is_worn_down_is_stopped_in_time() -> None:
    """What a learning rate of 1e-4 did to SmolLM2 on GSM8K: right of 1,319 every twelve updates, from 6.9%."""
    curve = [of("test", right, 1319) for right in (91, 54, 38, 28, 35)]
    assert judged(*curve) == [False, False, False, True, True]
    seldom = [curve[0] | of("greedy", 96, 1319), *curve[1:]]
    assert judged(*seldom) == [False, False, False, True, True], "a set evaluated once says nothing"


def test_few_problems_and_bad_models_prove_nothing() -> None:
    assert (
        judged(of("test", 6, 12), of("test", 1, 12), of("test", 1, 12), of("test", 0, 12))
        == [False] * 4
    )
    assert judged(of("test", 1, 1319), *[of("test", 0, 1319)] * 3) == [False] * 4
    assert judged({}, {"reward/mean": 0.5}, {}) == [False] * 3


def test_all_sets_must_have_fallen() -> None:
    fine, gone = of("a", 300, 600), of("a", 30, 600)
    other, lost = of("b/c", 90, 100), of("b/c", 5, 100)
    assert judged(fine | other, gone | other, gone | other, gone | other) == [False] * 4
    assert judged(fine | other, gone | lost, gone, lost) == [False, False, False, True], (
        "each has its own times"
    )


class Turning(Silent):
    """The judge changes its mind after the second step: nothing is right any more. The run is stopped later."""

    def __init__(self, flag: Path, stop: int | None = None) -> None:
        super().__init__()
        self.flag, self.stop = flag, stop

    def update(self, metrics: dict[str, float], progress: float) -> None:
        super().update(metrics, progress)
        if metrics["step"] == 2:
            self.flag.touch()
        if metrics["step"] == self.stop:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_resumed_run_remembers_what_its_guards_have_seen(tmp_path: Path) -> None:
    """Stopped between the two bad evaluations, after the advice on updates that learn nothing."""
    flag, folder = tmp_path / "no more", tmp_path / "run"

    def judge(prompt: object, response: str) -> float:
        return 0.0 if flag.exists() else 1.0

    settings = small_config("steps=20", "save.every=100", "eval.0.every=4")
    first = Turning(flag, stop=5)
    api.run_recipe(settings, folder, watcher=first, reward=judge)
    resumed = Silent()
    with pytest.raises(
        Collapsed, match=r"fell from 1\.000 after step 0 to 0\.000: the run is stopped at step 8"
    ):
        api.run_recipe(settings, folder, watcher=resumed, resume=True, reward=judge)
    assert [int(row["step"]) for row in resumed.rows] == [6, 7, 8]
    advice = "Nothing was learned in 3 updates"
    assert sum(advice in text for text in first.messages) == 1
    assert not any(advice in text for text in resumed.messages), "it is said once in a run"


def test_a_run_that_collapses_is_saved_and_stopped(tmp_path: Path) -> None:
    """Nothing is right in the evaluations of steps 4 and 6."""
    flag = tmp_path / "no more"

    def judge(prompt: object, response: str) -> float:
        return 0.0 if flag.exists() else 1.0

    sets = ("steps=20", "save.every=100")
    with pytest.raises(
        Collapsed,
        match=r"held_out fell from 1\.000 after step 0 to 0\.000: the run is stopped at step 6",
    ):
        api.run_recipe(small_config(*sets), tmp_path / "run", watcher=Turning(flag), reward=judge)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(7)) and rows[-1]["collapsed"] == 1.0
    assert has_collapsed(tmp_path / "run") and (tmp_path / "run" / "report.html").is_file()
    with Run.resume(tmp_path / "run") as run:
        newest = run.newest_checkpoint(lambda text: None)
    assert newest is not None and newest.name == "step_00000006", "the user may decide to go on"
    flag.unlink()
    api.run_recipe(
        small_config(*sets, "steps=8"),
        tmp_path / "run",
        watcher=Silent(),
        resume=True,
        reward=judge,
    )
    assert read_metrics(tmp_path / "run")[-1]["step"] == 8 and not has_collapsed(tmp_path / "run")
