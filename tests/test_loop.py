"""Whole runs in one process: barrier and stream, what an update does to running rollouts, judges that misbehave."""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import Silent, assert_same_run, even_digits, newest_weights, small_config, timeless

from whet import api, loop
from whet.build import build_parts
from whet.errors import Diverged, Starved, WhetError
from whet.learn.learner import Learner
from whet.recipe import dump_config
from whet.report.arms import read_run
from whet.resolve import check_run
from whet.rollout.engine import LocalEngine
from whet.run import Run, checkpoint_steps, read_metrics, read_rollouts, read_scores
from whet.tasks.answer_check import NOISE
from whet.tasks.judge import Judge
from whet.types import Batch, Report, Rollout


def run(folder: Path, *sets: str, reward=even_digits, silent: Silent | None = None) -> Silent:
    silent = silent or Silent()
    api.run_recipe(small_config(*sets), folder, watcher=silent, reward=reward)
    return silent


def test_a_barrier_run_leaves_a_whole_folder(tmp_path: Path) -> None:
    run(tmp_path / "a")
    rows = read_metrics(tmp_path / "a")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [("eval/held_out/accuracy" in row) for row in rows] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    last = rows[-1]
    assert last["version"] == 5 and last["rollouts"] == 5 * 12 and last["prompts_seen"] == 15
    assert last["tokens_generated"] == sum(row["length/mean"] * 12 for row in rows[1:])
    for key in (
        "reward/mean",
        "verdict/right",
        "length/p90",
        "learn/entropy",
        "learn/grad_norm",
        "learn/mismatch",
        "curriculum/signal_share",
        "rollout/tokens_per_s",
        "time/generate",
        "time/train",
    ):
        assert key in last, key
    assert (
        sorted(p.name for p in (tmp_path / "a" / "checkpoints").glob("step_*"))[-1]
        == "step_00000005"
    )
    written = list(read_rollouts(tmp_path / "a"))
    assert {row["phase"] for row in written} == {"train", "eval"}
    assert (tmp_path / "a" / "report.html").is_file()


@pytest.mark.parametrize("mode", ["barrier", "stream"])
def test_judges_work_while_the_engine_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Under barrier, too, rollouts are sent as they finish; each once."""
    running: list[int] = []
    sent: list[tuple[int, int]] = []
    step, send = LocalEngine.step, Judge.send

    def stepping(self: LocalEngine) -> None:
        step(self)
        running[:] = [self.rows.size]

    def sending(self: Judge, rollouts: Iterable[Rollout]) -> None:
        rollouts = list(rollouts)
        sent.extend([(*rollout.key, running[0]) for rollout in rollouts])  # type: ignore[misc]
        send(self, rollouts)

    monkeypatch.setattr(LocalEngine, "step", stepping)
    monkeypatch.setattr(Judge, "send", sending)
    run(tmp_path / "a", f"rollout.mode={mode}", "steps=2", "curriculum.look_ahead=0", reward=None)
    assert len(sent) == len({key[:2] for key in sent}) == 2 * 12
    assert sum(at > 0 for *_, at in sent) > 5  # while others ran


def test_rows_say_where_the_time_went(tmp_path: Path) -> None:
    """Each row accounts for the time since the row before it; saving is no part of the training's time."""
    run(tmp_path / "a", "save.every=1", "learn.kl_coef=0.1")
    rows = read_metrics(tmp_path / "a")
    spent = ("generate", "judge", "log_probs", "train", "sync", "save", "idle")
    for row in rows[1:]:
        assert all(row[f"time/{name}"] >= 0 for name in spent)
        parts = sum(
            v
            for k, v in row.items()
            if k.startswith("time/") and k not in ("time/total", "time/gpu_idle")
        )
        assert parts == pytest.approx(row["time/total"], abs=1e-6)
    assert rows[1]["time/save"] > 0 and rows[1]["time/log_probs"] > 0
    trained = sum(
        row["time/total"] - row["time/save"] - row.get("time/eval", 0.0) for row in rows[1:]
    )
    assert rows[-1]["time_s"] <= trained + 0.01 * len(rows)
    assert rows[-1]["time_s"] >= sum(row["time/generate"] + row["time/train"] for row in rows[1:])


def test_what_training_gains_during_an_evaluation_is_of_training_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation in which streamed training rollouts alone were decoded, for a fifth of a second."""

    def evaluating(eval_set: object, engine: LocalEngine, *rest: object) -> dict[str, float]:
        engine.step()
        time.sleep(0.2)
        return {}

    monkeypatch.setattr(loop, "evaluate", evaluating)
    sets = ("rollout.mode=stream", "curriculum.max_age=2", 'rollout.on_update="keep"', "steps=4")
    run(tmp_path / "a", *sets, "curriculum.look_ahead=3", "rollout.slots=6")
    rows = read_metrics(tmp_path / "a")[1:]
    second = rows[1]  # evaluated, while the third batch is under way
    assert second["time/eval"] < 0.1 and second["time/generate"] > 0.2
    assert rows[-1]["time_s"] >= sum(row["time/generate"] + row["time/train"] for row in rows)


@pytest.mark.gpu
def test_on_a_gpu_rows_say_how_long_it_idled(tmp_path: Path) -> None:
    said = run(tmp_path / "a", "rollout.graphs=true", 'model.device="cuda"', "steps=2")
    for row in read_metrics(tmp_path / "a")[1:]:
        assert 0 < row["rollout/gpu_seconds"] < row["time/generate"]
        assert row["learn/gpu_seconds"] > 0 and 0 <= row["time/gpu_idle"] < 1
    assert any(message.startswith("Memory: ") for message in said.messages)


def test_same_seed_same_run_other_seed_other_run(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, f"seed={seed}")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert timeless(read_metrics(tmp_path / "a")) != timeless(read_metrics(tmp_path / "c"))


def test_stream_without_look_ahead_trains_what_barrier_trains(tmp_path: Path) -> None:
    """The fast path against the slow one: fp64, so that the batch a token was computed in cannot be seen."""
    run(tmp_path / "barrier", "model.dtype=float64")
    run(
        tmp_path / "stream",
        "model.dtype=float64",
        "rollout.mode=stream",
        "curriculum.look_ahead=0",
        "rollout.slots=5",
    )
    mine, theirs = newest_weights(tmp_path / "barrier"), newest_weights(tmp_path / "stream")
    assert max((mine[k] - theirs[k]).abs().max().item() for k in mine) < 1e-9


@pytest.mark.wide
@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_stream_carries_on_over_updates(tmp_path: Path, on_update: str) -> None:
    run(
        tmp_path / "a",
        "rollout.mode=stream",
        f"rollout.on_update={on_update}",
        "curriculum.max_age=2",
        "steps=8",
        "rollout.slots=18",
        "save.rollouts=1000",
    )
    rows = read_metrics(tmp_path / "a")
    assert rows[-1]["step"] == 8
    lengths = [row["length"] for row in read_rollouts(tmp_path / "a") if row["phase"] == "train"]
    assert rows[-1]["tokens_generated"] == sum(lengths), "whether they train or not"
    assert max(row["curriculum/age_max"] for row in rows[1:]) in (
        (0,) if on_update == "cut" else (1, 2)
    )
    # under `cut` nothing is begun that could be cut
    assert sum(row["rollout/cut"] for row in rows[1:]) == 0


@pytest.mark.parametrize(
    "sets", [(), ("rollout.mode=stream", "curriculum.max_age=2", "rollout.slots=18")], ids=str
)
def test_an_update_frees_the_traces_that_no_group_needs(
    tmp_path: Path, sets: tuple[str, ...]
) -> None:
    class Checks(loop.Log):
        def emitted(self, batch: Batch) -> None:
            super().emitted(batch)
            assert (
                self.parts.store.arrays()["ids"].size
                >= sum(group.tokens for group in batch.groups)
                > 0
            )

        def updated(self, batch: Batch, report: Report) -> None:
            groups = set(self.parts.store.arrays()["keys"][:, 0].tolist())
            assert groups <= self.parts.curriculum.holds() and groups.isdisjoint(
                g.group_id for g in batch.groups
            )
            super().updated(batch, report)

    plan = check_run(small_config("steps=4", *sets), even_digits)
    parts = build_parts(plan)
    try:
        with Run.create(tmp_path / "a", dump_config(plan.settings)) as run:
            loop.train(parts, Checks(run, parts, Silent()))
        assert parts.tally.step == 4
    finally:
        parts.close()


def test_stream_is_on_policy_when_asked(tmp_path: Path) -> None:
    run(
        tmp_path / "a",
        "rollout.mode=stream",
        "curriculum.name=dapo",
        "rollout.slots=18",
        "curriculum.max_age=1",
        "rollout.on_update=cut",
    )
    rows = read_metrics(tmp_path / "a")
    # How many groups are asked in reserve and let go depends on when verdicts come, so on the machine.
    assert len(rows) == 6 and all(row["curriculum/age_max"] == 0 for row in rows[1:])


def test_dapo_trains_on_groups_with_signal_alone(tmp_path: Path) -> None:
    run(tmp_path / "a", "curriculum.name=dapo")
    rows = read_metrics(tmp_path / "a")[1:]
    assert all(row["learn/signal_share"] == 1.0 for row in rows)


def test_starvation_is_said_not_suffered(tmp_path: Path) -> None:
    with pytest.raises(Starved, match=r"almost no prompt is ever solved \(mean pass rate 0.00\)"):
        run(
            tmp_path / "a",
            "curriculum.name=dapo",
            "curriculum.patience=2",
            reward=lambda prompt, response: 0.0,
        )
    run(
        tmp_path / "b",
        "curriculum.name=dapo",
        "curriculum.patience=2",
        "curriculum.starvation=relax",
        reward=lambda prompt, response: 1.0,
    )
    assert read_metrics(tmp_path / "b")[-1]["curriculum/starved"] > 0


@pytest.mark.parametrize("after", [0, 3])
def test_a_run_that_has_nothing_left_to_learn_ends_well(tmp_path: Path, after: int) -> None:
    """It is evaluated, saved and finished; what is resumed ends as well."""
    solved = tmp_path / "solved"

    class Solves(Silent):
        def update(self, metrics: dict[str, float], progress: float) -> None:
            super().update(metrics, progress)
            if metrics["step"] == after:
                solved.touch()

    def judge(prompt: object, response: str) -> float:
        return 1.0 if solved.exists() else even_digits(prompt, response)

    sets = (
        "curriculum.name=dapo",
        "curriculum.patience=2",
        "steps=9",
        "eval.0.every=3",
        "save.every=50",
    )
    folder, watcher = tmp_path / "run", Solves()
    assert api.run_recipe(small_config(*sets), folder, watcher=watcher, reward=judge) == 0
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(after + 2)) and rows[-1]["mastered"] == 1.0
    assert watcher.messages[-1].startswith(
        "Nothing is left to learn, so the run ends as finished. Step "
    )
    why = "almost all prompts are solved (mean pass rate 1.00): 6 were tried and none found useful, 3 are needed"
    assert (
        f"{why} (0 too hard, 6 too easy, 0 unjudged, 0 cut); take harder prompts"
        in watcher.messages[-1]
    )
    assert "eval/held_out/accuracy" not in rows[-1], (
        "these weights were evaluated after the step before"
    )
    assert (folder / "checkpoints" / f"step_{after + 1:08d}").is_dir() and (
        folder / "report.html"
    ).is_file()
    assert read_run("run", folder).unfinished == ""
    assert {row["verdict"] for row in read_rollouts(folder, after + 1)} == {"right"}
    again = Silent()
    assert (
        api.run_recipe(small_config(*sets), folder, watcher=again, reward=judge, resume=True) == 0
    )
    assert (
        again.messages[-1].startswith("Nothing is left to learn")
        and read_metrics(folder)[-1]["mastered"] == 1.0
    )


def test_the_last_weights_of_a_run_that_has_nothing_left_to_learn_are_evaluated(
    tmp_path: Path,
) -> None:
    sets = ("curriculum.name=dapo", "curriculum.patience=2", "eval.0.every=3")

    class Solves(Silent):
        def update(self, metrics: dict[str, float], progress: float) -> None:
            if metrics["step"] == 2:
                (tmp_path / "solved").touch()

    def judge(prompt: object, response: str) -> float:
        return 1.0 if (tmp_path / "solved").exists() else even_digits(prompt, response)

    assert (
        api.run_recipe(small_config(*sets), tmp_path / "run", watcher=Solves(), reward=judge) == 0
    )
    last = read_metrics(tmp_path / "run")[-1]
    assert last["step"] == 3 and last["eval/held_out/accuracy"] == 1.0
    assert read_scores(tmp_path / "run")[3] == 1.0, "the best checkpoint is chosen by it, too"


def test_a_reward_that_raises_or_loops_costs_its_rollouts_alone(tmp_path: Path) -> None:
    def moody(prompt, response: str) -> float:
        if len(response) % 5 == 0:
            raise ValueError("no")
        if len(response) % 7 == 0:
            time.sleep(60)
        return even_digits(prompt, response)

    run(
        tmp_path / "a",
        "judge.timeout_s=0.2",
        "steps=2",
        "curriculum.starvation=partial",
        reward=moody,
    )
    rows = read_metrics(tmp_path / "a")
    assert rows[-1]["step"] == 2
    assert sum(row["verdict/unjudged"] for row in rows[1:]) > 0


def test_weights_that_beat_the_record_are_kept(tmp_path: Path) -> None:
    """Though no checkpoint is due: of the second step, which is right in an evaluation, and of no worse one."""
    good = tmp_path / "good"

    class Turns(Silent):
        def update(self, metrics: dict[str, float], progress: float) -> None:
            good.touch() if metrics["step"] in (1, 2) else good.unlink(missing_ok=True)

    def judge(prompt: Any, response: str) -> float:
        return (
            float(good.exists()) if prompt.id.startswith("eval:") else even_digits(prompt, response)
        )

    sets = ("eval.0.every=1", "eval.0.limit=3", "save.every=50", "save.keep=1")
    folder = tmp_path / "run"
    api.run_recipe(small_config(*sets), folder, watcher=Turns(), reward=judge)
    accuracies = [row["eval/held_out/accuracy"] for row in read_metrics(folder)]
    assert accuracies == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert checkpoint_steps(folder) == [2, 5], "the best, the first of equals, and the newest"
    assert json.loads((folder / "checkpoints" / "best.json").read_text()) == {
        "step": 2,
        "score": 1.0,
    }
    assert api.Result(folder=folder, metrics=[]).model.name == "step_00000002"


def test_a_run_that_learns_nothing_says_so_after_three_updates(tmp_path: Path) -> None:
    said = run(tmp_path / "a", "steps=8", reward=lambda prompt, response: 0.0).messages
    found = [sentence for sentence in said if "whet probe" in sentence]
    assert len(found) == 1 and found[0].startswith("Nothing was learned in 3 updates: ")


def test_token_budget_ends_the_run(tmp_path: Path) -> None:
    run(tmp_path / "a", "token_budget=200", "steps=100")
    rows = read_metrics(tmp_path / "a")
    assert rows[-1]["tokens_generated"] >= 200 > rows[-2]["tokens_generated"]
    assert "eval/held_out/accuracy" in rows[-1]


def test_time_budget_ends_the_run(tmp_path: Path) -> None:
    """At the first update past it, which is evaluated as a last one."""
    run(tmp_path / "a", "time_budget=0.001", "steps=100")
    rows = read_metrics(tmp_path / "a")
    assert [row["step"] for row in rows] == [0, 1] and rows[-1]["time_s"] >= 0.001
    assert "eval/held_out/accuracy" in rows[-1]


def test_warm_start_then_no_steps_leaves_a_base(tmp_path: Path) -> None:
    run(tmp_path / "a", "steps=0", "warm_start.steps=3", "warm_start.batch=4", reward=None)
    assert [row["step"] for row in read_metrics(tmp_path / "a")] == [0]
    assert (tmp_path / "a" / "checkpoints" / "step_00000000" / "config.json").is_file()


def test_further_rewards_are_weighed_in_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict stays the judge's; what the learner uses is weight x score and each term x its weight."""
    (tmp_path / "digits.py").write_text(
        "def share(prompt, response):\n    return len(response) / 10\n"
    )
    sets = (
        "judge.weight=0.5",
        "reward=[{name='digits:share', weight=2.0}, {name='length', weight=0.1}]",
        "save.rollouts=1000",
        "steps=1",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run(tmp_path / "run", *sets)
    rows = [row for row in read_rollouts(tmp_path / "run") if row["phase"] == "train"]
    assert rows
    for row in rows:
        assert row["terms"].keys() == {"digits:share", "length"}
        assert row["terms"]["digits:share"] == pytest.approx(len(row["response"]) / 10)
        assert row["reward"] == pytest.approx(
            0.5 * row["score"] + 2.0 * row["terms"]["digits:share"] + 0.1 * row["terms"]["length"]
        )
    last = read_metrics(tmp_path / "run")[-1]
    assert last["reward/digits:share"] == pytest.approx(
        np.mean([row["terms"]["digits:share"] for row in rows])
    )


def test_a_judge_that_raises_is_quoted_first(tmp_path: Path) -> None:
    def needy(prompt, response) -> float:
        if response == NOISE or prompt.id.startswith("eval:"):
            return 0.0
        return float(prompt.meta["nums"][0])

    silent = Silent()
    with pytest.raises(Starved) as error:
        run(tmp_path / "a", reward=needy, silent=silent)
    for said in (next(said for said in silent.messages if said[:1] == "T"), str(error.value)):
        assert (
            said.startswith("The judge of task chain")
            and "failed with KeyError: 'nums' (prompt \"" in said
        )
    assert (
        "responses were not judged; whet view shows them. Step 0: most groups have no verdict"
        in str(error.value)
    )
    rows = list(read_rollouts(tmp_path / "a", 1))
    assert rows and all(row["note"] == "failed with KeyError: 'nums'" for row in rows)


@pytest.mark.parametrize("limit", [12, 60])
def test_a_run_without_any_verdict_stops_soon(tmp_path: Path, limit: int) -> None:
    """In its first step, or in the midst of its first evaluation, long before its patience is over."""

    def broken(prompt, response) -> float:
        return 0.0 if response == NOISE else float(prompt.meta["nums"][0])

    with pytest.raises(
        WhetError, match=r"none of the first 32 responses has a verdict: repair it\.$"
    ) as error:
        run(tmp_path / "a", f"eval.0.limit={limit}", reward=broken)
    assert str(error.value).startswith("The judge of task chain failed with KeyError: 'nums'")
    assert len(read_metrics(tmp_path / "a")) == (limit == 12)


def test_starving_for_other_reasons_blames_no_judge(tmp_path: Path) -> None:
    silent = Silent()
    with pytest.raises(Starved, match=r"^Step 0: almost no prompt is ever solved"):
        run(
            tmp_path / "a",
            "curriculum.name=dapo",
            reward=lambda prompt, response: 0.0,
            silent=silent,
        )
    assert not [message for message in silent.messages if "judge of task" in message]
    assert {row["verdict"] for row in read_rollouts(tmp_path / "a", 1)} == {"wrong"}


def test_a_run_ends_where_the_engine_draws_with_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third update reports that log-probs of fresh rollouts are far from the learner's; nothing of it is saved."""
    step = Learner.step

    def drifting(self: Learner, *args: Any) -> Report:
        report = step(self, *args)
        return (
            replace(report, metrics={**report.metrics, "learn/mismatch": 2.0})
            if self.version == 3
            else report
        )

    monkeypatch.setattr(Learner, "step", drifting)
    with pytest.raises(
        Diverged, match=r"^Step 3: log-probs of the engine and the learner drift apart \(.* 2 now\)"
    ):
        api.run_recipe(
            small_config("save.every=1"), tmp_path / "run", watcher=Silent(), reward=even_digits
        )
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3, "the row is there to be looked at"
    assert max((tmp_path / "run" / "checkpoints").glob("step_*")).name.endswith("2")
    with pytest.raises(Diverged, match=r"^Step 3:"):  # a resumed run knows what was sound before
        api.run_recipe(
            small_config("save.every=1"),
            tmp_path / "run",
            watcher=Silent(),
            reward=even_digits,
            resume=True,
        )
    stale = ("curriculum.max_age=1", "rollout.mode=stream", "rollout.on_update=keep", "steps=4")
    settings = small_config(*stale)
    # old tokens prove nothing
    api.run_recipe(settings, tmp_path / "stale", watcher=Silent(), reward=even_digits)
