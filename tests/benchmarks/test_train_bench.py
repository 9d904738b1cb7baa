"""A matrix of two arms and two seeds, run by real processes: one cell killed and taken up again, none done twice."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import train
from matrix import (
    MatrixCell,
    MatrixPlan,
    Start,
    hash_weights,
    make_pool,
    make_start,
    merged,
    on_problems,
    read_plan,
    store_adapter,
    write_problems,
)
from safetensors.torch import load_file
from small_run import even_digits, small_config
from train import COLUMNS, CellWork, Places, Planned, cell_settings, planned, read_outcome
from typer.testing import CliRunner

from whet import config
from whet.errors import WhetError
from whet.model.load import load_weights, tiny_model, tiny_tokenizer
from whet.model.lora import add_lora, save_lora
from whet.problems import load_problems
from whet.recipe import dump_config, parse_config
from whet.tools.experiment import circumstances

pytestmark = pytest.mark.slow  # its fixture trains cells

KILLED = "uniform-seed0"
MATRIX = """
recipe = "recipe.toml"
seeds = [0, 1]
seconds = 300
start = "model"
set = { steps = 4, "save.rollouts" = 1000, "save.every" = 5, "eval.0.every" = 1 }

[[arm]]
name = "uniform"
set = { steps = 30 }

[[arm]]
name = "dapo"
note = "groups with signal alone"
set = { "curriculum.name" = "dapo" }
"""


def model(folder: Path) -> Path:
    """A model folder that speaks the task's characters."""
    tokenizer = tiny_tokenizer(load_problems(small_config(), even_digits).alphabet)
    tiny_model(len(tokenizer), hidden=16, layers=1, heads=2, context=64, seed=5).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_matrix(folder: Path, text: str = MATRIX) -> Path:
    judged = ('data.0.reward="small_run:even_digits"', 'eval.0.reward="small_run:even_digits"')
    (folder / "recipe.toml").write_text(dump_config(small_config(*judged)))
    (folder / "small.toml").write_text(text)
    return folder / "small.toml"


@dataclass
class Done:
    """What two calls left and said; the first lost a process."""

    folder: Path
    plan: MatrixPlan
    start: Start
    first: list[str]
    second: list[str]
    before: dict[str, bytes]
    """The JSON files after the first call."""

    @property
    def results(self) -> Path:
        return self.folder / "out" / "train" / "small"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("matrix")
    model(folder / "model")
    plan = read_plan(write_matrix(folder))
    places = Places(plan=plan, runs=folder / "runs", out=folder / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of the judge
        patch.setenv("OMP_NUM_THREADS", "1")
        start = make_start(plan, folder / "runs", lambda line: None)
        first, second = list[str](), list[str]()
        work = CellWork(
            places=places, start=start, beside=2, on_progress=first.append, about=circumstances()
        )
        threading.Thread(target=kill_after_a_checkpoint, args=(work, KILLED), daemon=True).start()
        with pytest.raises(WhetError, match=f"The cell {KILLED} failed"):
            work.run(seconds=1e9)
        results = folder / "out" / "train" / "small"
        before = {path.name: path.read_bytes() for path in results.iterdir()}
        CellWork(
            places=places, start=start, beside=1, on_progress=second.append, about=circumstances()
        ).run(seconds=1e9)
    return Done(folder=folder, plan=plan, start=start, first=first, second=second, before=before)


def kill_after_a_checkpoint(work: CellWork, name: str) -> None:
    while not (work.places.runs / name / "checkpoints" / "step_00000005").is_dir():
        time.sleep(0.01)
    work.running[name].kill()


def test_a_killed_cell_goes_on_and_what_is_done_stays(done: Done) -> None:
    assert set(done.before) == {"uniform-seed1.json", "dapo-seed0.json", "dapo-seed1.json"}
    assert done.second[0] == f"{KILLED} goes on."
    assert done.second[1].startswith(f"{KILLED}: 30 updates") and len(done.second) == 2
    for name, data in done.before.items():
        assert (done.results / name).read_bytes() == data
    log = (done.folder / "runs" / f"{KILLED}.log").read_text()
    assert "Resuming after step" in log
    found = read_outcome(done.results / f"{KILLED}.json")
    assert [row[0] for row in found["rows"]] == list(range(31))
    assert (found["goes"], found["solo"], found["ended_by"]) == (2, False, "recipe"), (
        "at first it was not alone"
    )


def test_a_cell_says_all_that_the_tables_need(done: Done) -> None:
    found = read_outcome(done.results / "dapo-seed1.json")
    assert (found["arm"], found["seed"], found["matrix"], found["note"]) == (
        "dapo",
        1,
        "small",
        "groups with signal alone",
    )
    assert {"hardware", "versions", "commit", "date", "wall_s", "cap_s"} <= found.keys()
    assert found["start"] == {"weights": hash_weights(done.folder / "model")} == done.start.hashes
    assert (
        found["evaluation"] == {"name": "held_out", "prompts": 12, "n": 1} and found["pool"] == 60
    )
    assert found["settings"]["curriculum.name"] == "dapo" and found["settings"]["seed"] == 1
    assert str(done.folder) not in (done.results / "dapo-seed1.json").read_text(), (
        "no path of this machine"
    )
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    assert found["columns"] == list(COLUMNS) and [row["step"] for row in rows] == list(range(5))
    for name in ("tokens", "rollouts", "seconds", "eval_tokens", "eval_seconds"):
        values = [row[name] for row in rows]
        assert values == sorted(values) and values[-1] > 0
    assert all(row["accuracy"] is not None and row["eval_length"] for row in rows)
    assert rows[0]["tokens"] == 0 < rows[0]["eval_tokens"]
    assert rows[-1]["signal"] is not None and rows[-1]["entropy"] > 0 and rows[-1]["length"] > 0
    assert 0 < found["distinct_prompts"] <= 60 and not found["distinct_is_least"]
    assert all(path.stat().st_size < 200_000 for path in done.results.iterdir())


def test_the_plan_says_what_is_done_and_what_is_left(done: Done, tmp_path: Path) -> None:
    shutil.copytree(done.folder / "out", tmp_path / "out")
    (tmp_path / "out" / "train" / "small" / "dapo-seed1.json").unlink()
    words = [str(done.folder / "small.toml"), "--out", str(tmp_path / "out"), "--plan"]
    result = CliRunner().invoke(
        train.app, [*words, "--runs", str(tmp_path / "none")], catch_exceptions=False
    )
    assert (
        result.exit_code == 0 and result.output.count("done") == 3 and "dapo-seed1" in result.output
    )
    places = Places(plan=done.plan, runs=tmp_path / "none", out=tmp_path / "out")
    states = {line.cell.name: (line.state, line.seconds) for line in planned(places)}
    took = read_outcome(done.results / "dapo-seed0.json")["wall_s"]
    assert states["dapo-seed1"] == ("to do", took), "as long as its arm took before"
    assert states["uniform-seed0"][0] == "done"
    (tmp_path / "out" / "train" / "small" / "dapo-seed0.json").unlink()
    longest = max(
        read_outcome(done.results / f"uniform-seed{seed}.json")["wall_s"] for seed in (0, 1)
    )
    left = {line.cell.name: line.seconds for line in planned(places)}
    assert left["dapo-seed0"] == pytest.approx(longest), (
        "as long as another arm, whose cap is the same"
    )


def test_no_cell_is_begun_that_would_end_too_late(done: Done, tmp_path: Path) -> None:
    places = Places(plan=done.plan, runs=tmp_path / "runs", out=tmp_path / "out")
    lines: list[str] = []
    work = CellWork(places=places, start=done.start, beside=1, on_progress=lines.append, about={})
    assert work.run(seconds=299.0) == 4 and lines == []


def unwritten(done: Done, folder: Path) -> tuple[MatrixCell, Places, CellWork, list[str]]:
    """A cell whose run has ended and whose JSON was never written, and the lines that are printed."""
    shutil.copytree(done.folder / "runs", folder / "runs")
    plan = read_plan(done.folder / "small.toml", arms=["dapo"], seeds=[0])
    places = Places(plan=plan, runs=folder / "runs", out=folder / "out")
    lines: list[str] = []
    work = CellWork(
        places=places, start=done.start, beside=1, on_progress=lines.append, about=circumstances()
    )
    return plan.cells[0], places, work, lines


def test_a_cell_that_had_its_time_is_not_begun_again(done: Done, tmp_path: Path) -> None:
    """The command that began it was killed after the run had ended, and before its JSON was written."""
    cell, places, work, lines = unwritten(done, tmp_path)
    places.goes(cell).write_text("[[true, 300.0]]")
    assert (
        work.run(seconds=10.0) == 0
        and len(lines) == 1
        and lines[0].startswith("dapo-seed0: 4 updates")
    )
    found = read_outcome(places.result(cell))
    assert (found["ended_by"], found["solo"], found["wall_s"]) == ("recipe", True, 300.0), (
        "it had made all 4"
    )
    places.result(cell).unlink()
    metrics = places.run(cell) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert work.run(seconds=10.0) == 0 and lines[1].startswith("dapo-seed0: 3 updates")
    assert read_outcome(places.result(cell))["ended_by"] == "time"
    shutil.rmtree(places.run(cell))
    places.result(cell).unlink()
    with pytest.raises(WhetError, match="had 300 s, and began nothing in them; raise its seconds"):
        CellWork(places=places, start=done.start, beside=1, on_progress=lines.append, about={}).run(
            seconds=10.0
        )


def test_a_cell_that_is_asked_to_stop_when_it_has_just_ended_is_done(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal meets a process that handles no signals any more."""
    cell, places, work, lines = unwritten(done, tmp_path)
    places.goes(cell).unlink()
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        monkeypatch.setattr(train, "start_run", lambda *_: process)
        work.train(Planned(replace(cell, seconds=places.spent(cell) + 0.1), "begun", 0.1))
    assert process.returncode == -signal.SIGINT
    assert lines[0] == "dapo-seed0 goes on." and lines[1].startswith("dapo-seed0: 4 updates")
    assert read_outcome(places.result(cell))["ended_by"] == "recipe"


def test_a_cell_that_collapsed_is_a_result(done: Done, tmp_path: Path) -> None:
    """Its last row says so; the command that began it was killed before the JSON was written."""
    cell, places, work, lines = unwritten(done, tmp_path)
    metrics = places.run(cell) / "metrics.jsonl"
    *rows, last = metrics.read_text().splitlines()
    metrics.write_text(
        "\n".join([*rows, json.dumps({**json.loads(last), "collapsed": 1.0})]) + "\n"
    )
    assert (
        work.run(seconds=600.0) == 0
        and len(lines) == 1
        and lines[0].startswith("dapo-seed0: 4 updates")
    )
    found = read_outcome(places.result(cell))
    assert found["ended_by"] == "collapse"


def test_other_settings_and_another_start_are_refused(done: Done) -> None:
    path = done.folder / "small.toml"
    places = Places(
        plan=read_plan(path, ["learn.lr=0.5"]), runs=done.folder / "runs", out=done.folder / "out"
    )
    with pytest.raises(
        WhetError, match=r"was run with other settings \(learn.lr = 0.003 there and 0.5"
    ):
        planned(places)
    places.out = done.folder / "elsewhere"
    with pytest.raises(WhetError, match=r"runs/uniform-seed0 was run with other settings"):
        planned(places)
    other = Start(folder=done.start.folder, hashes={"weights": "0" * 64})
    places = Places(plan=done.plan, runs=done.folder / "runs", out=done.folder / "out")
    with pytest.raises(WhetError, match="began from other weights"):
        CellWork(places=places, start=other, beside=1, on_progress=print, about={}).run(seconds=1.0)


def test_a_process_is_asked_to_stop_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: {}); print('ready', flush=True); "
    for reaction, then, ended in (
        ("sys.exit(7)", "signal.pause()", 7),
        ("None", "[signal.pause() for _ in 'ab']", -9),
    ):
        command = [sys.executable, "-c", begin.format(reaction) + then]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            monkeypatch.setattr(train, "GRACE", 60.0 if ended == 7 else 0.1)
            assert train.wait_for(process, 0.05) and process.returncode == ended
    quick = subprocess.Popen([sys.executable, "-c", ""])
    assert not train.wait_for(quick, 60.0) and quick.returncode == 0


def test_a_warm_started_adapter_is_stored_and_merged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    model(tmp_path / "model")
    path = write_matrix(
        tmp_path,
        f"""
        recipe = "recipe.toml"
        set = {{ "model.name" = "{tmp_path}/model" }}
        start = {{ adapter = "stored", set = {{ "model.name" = "{tmp_path}/model", "model.lora.rank" = 2,
                   "eval" = [], "held_out.size" = 0, "warm_start" = [{{ steps = 2, lr = 0.1 }}] }} }}
        [[arm]]
        name = "a"
        """.replace("\n                  ", ""),
    )
    lines: list[str] = []
    plan = read_plan(path)
    start = make_start(plan, tmp_path / "runs", lines.append)
    assert len(lines) == 2 and "Warm start" in lines[0] and "Merging" in lines[1]
    stored = json.loads((tmp_path / "stored" / "adapter_config.json").read_text())
    assert stored["r"] == 2 and stored["base_model_name_or_path"] == "model", (
        "no path of this machine"
    )
    assert hash_weights(start.folder) == start.hashes["weights"] != hash_weights(tmp_path / "model")
    settings = cell_settings(plan.cells[0], start)
    assert settings.model == config.Model(name=str(start.folder), hidden=16, layers=1, heads=2)
    assert not settings.warm_start
    # another machine, which has the adapter
    again = make_start(read_plan(path), tmp_path / "other", lines.append)
    assert again.hashes == start.hashes and len(lines) == 3 and "Merging" in lines[2]


def test_a_pool_that_no_warm_start_has_seen(tmp_path: Path) -> None:
    problems = [
        {"prompt": f"{i} + {i} =", "answer": str(2 * i), "solution": f"It is {2 * i}."}
        for i in range(20)
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    tree = f'[[data]]\npath = "{tmp_path}/all.jsonl"\n[[eval]]\npath = "{tmp_path}/test.jsonl"\n'
    (tmp_path / "test.jsonl").write_text(json.dumps(problems[3]) + "\n")
    (tmp_path / "recipe.toml").write_text(tree + "[[warm_start]]\nsteps = 2\n")
    text = 'recipe = "recipe.toml"\npool = { size = 6, unseen = true }\n[[arm]]\nname = "a"\n'
    (tmp_path / "small.toml").write_text(text)
    plan = read_plan(tmp_path / "small.toml")
    assert plan.matrix.pool is not None and plan.matrix.pool.unseen
    pool, rest = (
        make_pool(plan.cells[0].settings, plan.matrix.pool, tmp_path / "runs"),
        tmp_path / "runs/rest.jsonl",
    )
    write_problems(parse_config(plan.base), rest, [str(pool)])
    settings = on_problems(plan.base, parse_config(plan.base), rest)
    assert settings.data[0].path == str(rest) and settings.warm_start[0].steps == 2
    asked, taught = (
        [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        for path in (pool, rest)
    )
    assert len(asked) == 6 and len(taught) == 13, "one of the 20 is the test's"
    assert not {*asked} & {*taught} and "3 + 3 =" not in {*asked, *taught}


def test_merging_adds_the_product_of_the_adapters(tmp_path: Path) -> None:
    base = load_weights(model(tmp_path / "model"), torch.float32)
    before = {name: tensor.detach().clone() for name, tensor in base.named_parameters()}
    add_lora(base, config.Lora(rank=2, alpha=4.0), str(tmp_path / "model"))
    with torch.no_grad():
        for name, tensor in base.named_parameters():
            if "lora_B" in name:
                tensor.fill_(0.01)
    name = next(name for name in before if name.endswith("q_proj.weight"))
    a = next(t for n, t in base.named_parameters() if "q_proj.lora_A" in n).detach()
    (tmp_path / "adapter").mkdir()
    save_lora(base, tmp_path / "adapter")
    stored = store_adapter(tmp_path / "adapter", tmp_path / "stored", "org/name")
    settings = config.Model(name=str(tmp_path / "model"), dtype="bfloat16")
    folder = merged(settings, stored, tmp_path / "runs", lambda line: None)
    found = load_file(folder / "model.safetensors")
    wanted = before[name].double() + 4.0 / 2 * torch.full((16, 2), 0.01).double() @ a.double()
    assert torch.equal(found[name], wanted.to(torch.bfloat16))
    assert (folder / "tokenizer_config.json").is_file()
