"""The data of a page: runs of every state, curves, cursors, and the sentence of judgement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import chain_rollouts, learning_rows, write_run

from whet.errors import WhetError
from whet.report import data
from whet.report.arms import RunLog
from whet.report.data import PageData, columns, stages, thin
from whet.report.rollouts import to_json
from whet.report.verdict import forecast_saving, judge, lost_rollouts
from whet.run import Run

Save = Callable[..., Path]


def page_of(*folders: Path, **options: Any) -> dict[str, Any]:
    page = PageData(list(folders), title="t").read(**options)
    return json.loads(to_json(page), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# ---- runs of every state


def test_a_finished_run_has_all_parts(make_run: Save) -> None:
    folder = make_run("speed-seed3", seed=3)
    (folder / "machine.json").write_text(json.dumps({"hardware": "2 cores", "recipe": "chain"}))
    (folder / "pictures.jsonl").write_text('{"step": 1, "pass_rates": [1]}\n{"step": 2}\n')
    page = page_of(folder)
    (run,) = page["runs"]
    assert (run["name"], run["arm"], run["seed"], run["state"]) == (
        "speed-seed3",
        "speed",
        3,
        "finished",
    )
    head = run["headline"]
    assert (
        head["evaluation"] == "held_out"
        and head["greedy"]
        and 0 < head["low"] < head["accuracy"] < head["high"] < 1
    )
    assert (head["tokens"], head["steps"], head["hardware"], head["recipe"]) == (
        960_000,
        60,
        "2 cores",
        "chain",
    )
    assert {len(values) for values in run["series"].values()} == {61}
    assert run["evaluations"] == ["held_out"] and [p["step"] for p in run["pictures"]] == [1, 2]
    assert ["curriculum.groups", "8"] in run["settings"] and ["learn.lr", "0.0002"] in run[
        "settings"
    ]
    assert not [
        key for key, _ in run["settings"] if key in ("model.hidden", "learn.stop", "eval.0.top_p")
    ]
    assert run["rollouts"]["total"] == 60 and run["rollouts"]["steps"] == [0, 1, 2, 59, 60]
    titles = [table["title"] for table in page["compare"]["tables"]]
    assert titles[0] == "How the runs ended" and "Accuracy by difficulty of the prompt" in titles


def test_states_are_told(save_run: Save) -> None:
    stopped = save_run("stopped", [{"step": 0}, {"step": 12}], steps=40)
    collapsed = save_run("collapsed", [{"step": 0}, {"step": 12, "collapsed": 1.0}], steps=40)
    going = save_run("going", [{"step": 3}], steps=40)
    with Run.resume(going):
        states = [
            run["state"]
            for run in page_of(stopped, collapsed, going, save_run("young", [], steps=4))["runs"]
        ]
    assert states == ["stopped at step 12 of 40", "collapsed", "going on", "stopped at step 0 of 4"]


def test_a_run_of_an_older_version_or_half_written_is_shown(save_run: Save) -> None:
    folder = save_run("old", [{"step": 0}, {"step": 1, "reward/mean": 0.5}], chain_rollouts([1], 0))
    with (folder / "config.toml").open("a") as file:
        file.write("\n[bygone]\nsetting = 3\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    (folder / "machine.json").write_text("{")
    (folder / "pictures.jsonl").write_text(
        '{"step": 0}\nnoise\n[1]\n{"flow": 1}\n{"step": 1, "flow": {"asked": 1e999}}\n{"st'
    )
    with (folder / "rollouts" / "step_00000001.jsonl").open("a") as file:
        file.write(
            'noise\n{"step": 1, "verdict": "odd", "reward": NaN, "prompt": null}\n{"step": 1, "prom'
        )
    (run,) = page_of(folder)["runs"]
    assert ["bygone.setting", "3"] in run["settings"] and run["series"]["step"] == [0, 1]
    assert run["pictures"] == [{"step": 0}, {"step": 1, "flow": {"asked": None}}]
    rows = run["rollouts"]["rows"]
    (odd,) = (row for row in rows if not row["prompt_id"])
    assert len(rows) == 13 and odd["verdict"] == "unjudged" and odd["reward"] is None


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WhetError, match=r"holds no config\.toml"):
        page_of(tmp_path / "empty")
    with pytest.raises(WhetError, match="at least one"):
        page_of()


# ---- curves


def test_gaps_nan_and_disorder_become_columns_of_equal_length(save_run: Save) -> None:
    rows = [
        {"step": 2, "a": math.nan, "b": True},
        {"step": 0, "a": 1 / 3},
        {"a": 5},
        {"step": 3, "word": "x"},
    ]
    folder = save_run("run", [])
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 3, "a": 4e9}])
    )
    series = page_of(folder)["runs"][0]["series"]
    assert series == {
        "step": [0, 2, 3],
        "tokens_generated": [None] * 3,
        "time_s": [None] * 3,
        "a": [0.333333, None, 4_000_000_000],
    }


def test_thinned_rows_keep_the_last_and_the_evaluations() -> None:
    rows = [
        {"step": i, "x": 1.0} | ({"eval/a/accuracy": 0.5} if i % 100 == 0 else {})
        for i in range(1001)
    ]
    kept = thin(rows, 400)
    assert (
        len(kept) <= 145
        and kept[-1] is rows[-1]
        and sum("eval/a/accuracy" in row for row in kept) == 11
    )
    assert (
        thin(rows, 10_000) is rows
        and len(thin([{"step": i, "eval/a/accuracy": 0} for i in range(1000)], 200)) <= 100
    )
    assert columns(kept)["step"][0] == 0


def test_stages_begin_where_they_change() -> None:
    rows = [{"step": 0}, *({"step": i, "curriculum/stage": float(i > 2)} for i in range(1, 5))]
    assert [(s["step"], s["label"]) for s in stages(rows)] == [(1, "stage 1"), (3, "stage 2")]


# ---- news


def test_a_cursor_gives_only_what_is_new(save_run: Save) -> None:
    rows = learning_rows(2.0, 6, 16_000, 0.3, 0)
    a, b = save_run("a", rows[:3]), save_run("b", rows[:5])
    for folder in (a, b):
        (folder / "pictures.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(3)))
    live = PageData([a, b], title="t")
    first = live.read(live=True)
    assert (
        first["live"]
        and first["runs"][0]["rollouts"]["rows"] is None
        and "reset" not in first["runs"][0]
    )
    assert [
        run["series"]["step"] for run in live.read(live=True, after=first["cursor"])["runs"]
    ] == [[], []]
    with (a / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(rows[3]) + "\n")
    with (a / "pictures.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    second = live.read(live=True, after=first["cursor"])
    assert [run["series"]["step"] for run in second["runs"]] == [[3], []]
    assert (
        second["runs"][0]["pictures"] == [{"step": 3}]
        and second["runs"][0]["headline"]["steps"] == 3
    )
    assert second["cursor"] != first["cursor"]


def test_a_log_that_was_cut_back_is_sent_whole(save_run: Save) -> None:
    rows = learning_rows(2.0, 6, 16_000, 0.3, 0)
    folder = save_run("run", rows[:4])
    live = PageData([folder], title="t")
    cursor = live.read(live=True)["cursor"]
    other = [*rows[:2], *({**row, "time_s": row["time_s"] + 1} for row in rows[2:6])]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    (run,) = live.read(live=True, after=cursor)["runs"]
    assert run["reset"] and run["series"]["step"] == [0, 1, 2, 3, 4, 5]
    for odd in ("nonsense", ",,,", "3.00000000", "1,2,3"):
        assert live.read(live=True, after=odd)["runs"][0]["reset"]


# ---- the sentence of judgement


def log_of(rows: list[dict[str, Any]], **settings: Any) -> RunLog:
    about = {"curriculum.name": "uniform", "curriculum.rollouts": 8, "curriculum.source": ""}
    return RunLog(name="run", folder=Path("nowhere"), settings=about | settings, rows=rows)


def evaluated(
    *accuracies: float, half: float = 0.03, name: str = "a", **more: list[float]
) -> list[dict[str, Any]]:
    """Rows a minute apart with these accuracies, all known up to `half`."""
    rows: list[dict[str, Any]] = []
    for i, accuracy in enumerate(accuracies):
        key = f"eval/{name}/accuracy"
        row = {
            "step": i,
            "time_s": 60.0 * i,
            key: accuracy,
            f"{key}_low": accuracy - half,
            f"{key}_high": accuracy + half,
        }
        rows.append(row | {metric.replace("__", "/"): values[i] for metric, values in more.items()})
    return rows


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "It was not evaluated yet."),
        (evaluated(0.31), "Evaluated once so far: 0.310."),
        (
            evaluated(0.31, 0.35, 0.38, 0.43),
            "Learning: +12.0 points in 3m00s, from 0.310 to 0.430.",
        ),
        (
            evaluated(0.31, 0.34),
            "Not clearly learning: +3.0 points in 60s, from 0.310 to 0.340, which may be chance.",
        ),
        (evaluated(0.5, 0.4), "Getting worse: −10.0 points in 60s, from 0.500 to 0.400."),
        (
            evaluated(0.3, 0.9, 0.6),
            "Learning: +30.0 points in 2m00s, from 0.300 to 0.600, after 0.900 at step 1.",
        ),
        (
            [{"eval/a/accuracy": 0.1}, {"eval/a/accuracy": 0.2}],
            "Accuracy: +10.0 points in 0s, from 0.100 to 0.200.",
        ),
    ],
)
def test_learning_is_told_from_chance(rows: list[dict[str, Any]], sentence: str) -> None:
    assert judge(log_of(rows), rows, "a") == sentence


def test_a_collapse_is_called_one() -> None:
    rows = evaluated(0.5, 0.1)
    rows[-1]["collapsed"] = 1.0
    assert judge(log_of(rows), rows, "a").startswith("Collapsed: −40.0 points")


def test_sharpening_is_told_from_learning() -> None:
    falling = [1.0, 0.8, 0.5, 0.3]
    flat = evaluated(0.5, 0.5, 0.51, 0.51, learn__entropy=falling)
    said = judge(log_of(flat), flat, "a")
    assert said.endswith(
        "It sharpens only: entropy fell from 1 to 0.3, and greedy answers did not get better."
    )
    for rows in (
        evaluated(0.5, 0.6, 0.7, 0.8, learn__entropy=falling),  # it learns
        evaluated(0.5, 0.5, 0.51, 0.51, learn__entropy=[1.0, 1.0, 0.9, 0.9]),  # it explores
    ):
        assert "sharpens" not in judge(log_of(rows), rows, "a")
    drawn = log_of(flat, **{"eval.0.name": "a", "eval.0.temperature": 1.0})
    assert "sharpens" not in judge(drawn, flat, "a"), "nothing greedy was measured"


def test_lost_rollouts_are_those_without_a_gradient() -> None:
    rows = [
        {"step": i, "rollouts": 100 * i, "learn/rollouts": 39, "learn/signal_share": 0.39}
        for i in range(1, 5)
    ]
    assert lost_rollouts({}, rows) == pytest.approx(0.61)
    whole = [{**row, "learn/rollouts": 100} for row in rows]
    assert lost_rollouts({"learn.kl_coef": 0.1}, whole) == pytest.approx(0.61), (
        "all went through the model for the KL"
    )
    assert lost_rollouts({}, rows[2:]) is None, "half of the log is missing"
    assert lost_rollouts({}, []) is None


def test_a_saving_is_forecast_where_whole_groups_are_wasted() -> None:
    """Half of the groups never right, 40% always: a screening with 2 of 8 rollouts spends at most 2 / a_2 + 6, where
    a_2 = 0.1 (1 - p^2 - (1 - p)^2) for the mixed ones; uniform spends 8 / 0.1 = 80."""
    shares = {"pass_rate/0": 0.5, "pass_rate/100": 0.4, "pass_rate/to_50": 0.1}
    rows = [{"step": i, "batch/groups": 20.0, **shares} for i in range(1, 6)]
    settings = log_of([]).settings
    p = (0.375 + 0.5) / 2
    speed = min(s / (0.1 * (1 - p**s - (1 - p) ** s)) + 8 - s for s in range(2, 8))
    assert forecast_saving(settings, rows) == ("speed", pytest.approx(1 - speed / 80))
    assert "SPEED would save about 45% of the tokens." in judge(log_of(rows), rows, None)
    again = forecast_saving(settings, [{**row, "curriculum/epoch": 3.0} for row in rows])
    assert again is not None and again[0] == "cures" and 1 - speed / 80 < again[1] < 1, (
        "prompts come back"
    )
    assert forecast_saving(settings, rows[:1]) is None, "twenty groups are too few"
    assert forecast_saving({**settings, "curriculum.name": "cures"}, rows) is None
    assert forecast_saving(settings, [{"batch/groups": 900.0, "pass_rate/0": 1.0}]) is None, (
        "nothing would teach"
    )
    dense = [{"batch/groups": 900.0, "pass_rate/to_50": 1.0}]
    assert "save" not in judge(log_of(dense), dense, None)


# ---- size


@pytest.mark.slow
def test_a_thousand_steps_and_a_hundred_thousand_rollouts_fit(tmp_path: Path) -> None:
    from whet.report.page import write_page

    metrics = [
        {f"m/{k}": row["time_s"] * k / 7 for k in range(100)} | row
        for row in learning_rows(1.0, 1000, 9, 0.3, 0)
    ]
    folder = write_run(tmp_path / "run", metrics)
    picture = {"pass_rates": [7] * 11, "running": [[i / 7, 64 - i] for i in range(60)]}
    (folder / "pictures.jsonl").write_text(
        "".join(json.dumps({"step": i, **picture}) + "\n" for i in range(1001))
    )
    rows = chain_rollouts(range(1), 0, "a response & <b> " * 40)
    for step in range(1, 1001):
        lines = [
            json.dumps({**rows[i % 12], "step": step, "group_id": i // 8, "index": i % 8})
            for i in range(100)
        ]
        (folder / "rollouts" / f"step_{step:08d}.jsonl").write_text("\n".join(lines) + "\n")
    write_page(tmp_path / "page.html", [folder], title="large")
    assert (tmp_path / "page.html").stat().st_size < 15_000_000
    (run,) = json.loads(re_data((tmp_path / "page.html").read_text()))["runs"]
    assert run["rollouts"]["total"] == 100_000 and len(run["rollouts"]["rows"]) > 2_000
    steps = {row["step"] for row in run["rollouts"]["rows"]}
    assert {1, 1000} <= steps and len(steps) > 100 and len(run["series"]["step"]) == 1001
    assert data.ROLLOUT_BYTES < 15_000_000


def re_data(html: str) -> str:
    start = html.index('id="data">') + len('id="data">')
    return html[start : html.index("</script>", start)]
