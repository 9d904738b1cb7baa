"""The commands as a person meets them: bad input gets one sentence and exit code 2, and loses nothing."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from small_run import SMALL, model_folder, problem_file

from whet import cli, errors, files
from whet.curriculum.build import CURRICULA
from whet.recipe import dump_config, load_config
from whet.run import Run
from whet.types import Phase, Verdict

QUICK = ["--set=steps=2", *(f"--set={item}" for item in SMALL if not item.startswith("steps="))]


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["whet", *words])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """The one sentence a refused command prints."""
    assert call(monkeypatch, *words) == 2
    sentence = capsys.readouterr().err.strip()
    assert sentence.startswith("whet: ") and "Traceback" not in sentence
    assert len(sentence.splitlines()) == 1, sentence
    return sentence


def problems(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_bad_data_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"--out={tmp_path / 'run'}"
    sentence = refused(monkeypatch, capsys, "train", "--data", str(tmp_path / "none.jsonl"), out)
    assert "none.jsonl" in sentence
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty" in refused(
        monkeypatch, capsys, "train", "--data", str(tmp_path / "empty.jsonl"), out
    )
    twice = problems(tmp_path / "twice.jsonl", [{"id": "x", "prompt": "1+1=", "answer": "2"}] * 2)
    assert '"x"' in refused(monkeypatch, capsys, "train", "--data", twice, out).replace("'", '"')
    assert not (tmp_path / "run").exists(), "nothing is made for a run that cannot start"


def test_unknown_keys_values_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"--out={tmp_path / 'run'}"
    assert "learn.lr" in refused(monkeypatch, capsys, "train", "--set", "learn.lrr=1", out)
    assert "learn.lr = -1" in refused(monkeypatch, capsys, "train", "--set", "learn.lr=-1", out)
    assert "dapo" in refused(monkeypatch, capsys, "train", "--curriculum", "dappo", out)
    assert "chain" in refused(monkeypatch, capsys, "train", "--set", "data.0.task=chian", out)
    assert "no model folder" in refused(
        monkeypatch, capsys, "train", "--model", str(tmp_path / "no"), out
    )
    assert "no_such_module" in refused(
        monkeypatch, capsys, "train", "--reward", "no_such_module:f", out
    )
    assert not (tmp_path / "run").exists()


def test_a_prompt_longer_than_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(
        monkeypatch,
        capsys,
        "train",
        *QUICK,
        "--set=rollout.context=13",
        f"--out={tmp_path / 'run'}",
        '--set=data.0.options={train_count=20, mix={"9-12"=1.0}}',
    )
    assert "rollout.context" in sentence


def test_folders_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in refused(
        monkeypatch, capsys, "train", *QUICK, f"--out={tmp_path / 'file' / 'run'}"
    )
    (tmp_path / "empty").mkdir()
    assert "no run to resume" in refused(
        monkeypatch, capsys, "train", "--resume", f"--out={tmp_path / 'empty'}"
    )
    assert "--resume" in refused(monkeypatch, capsys, "train", "--resume")
    assert "Give a recipe" in refused(monkeypatch, capsys, "train", f"--out={tmp_path / 'run'}")
    assert "is not a run folder" in refused(monkeypatch, capsys, "compare", str(tmp_path / "empty"))
    assert "holds no rollouts" in refused(monkeypatch, capsys, "view", str(tmp_path / "empty"))


def test_a_full_disk_is_one_sentence_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"--out={tmp_path / 'run'}"
    assert call(monkeypatch, "train", *QUICK, out) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(files.os, "fsync", full)
        sentence = refused(patch, capsys, "train", "--resume", out, "--set=steps=4")
    assert "space" in sentence
    assert call(monkeypatch, "train", "--resume", out, "--set=steps=4") == 0


def test_a_run_can_be_trained_viewed_compared_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert call(monkeypatch, "train", *QUICK, f"--out={run}") == 0
    told = capsys.readouterr().out
    assert f"whet view {run} " in told and f"whet report {run} --serve " in told, (
        "the next commands"
    )
    assert "already" in refused(monkeypatch, capsys, "train", *QUICK, f"--out={run}")
    assert call(monkeypatch, "view", str(run), "--limit=3") == 0
    assert call(monkeypatch, "compare", str(run), f"--page={tmp_path / 'page.html'}") == 0
    assert (tmp_path / "page.html").read_text().startswith("<!")
    capsys.readouterr()
    assert call(monkeypatch, "eval", str(run), f"--out={tmp_path / 'eval'}") == 0
    accuracy = json.loads((tmp_path / "eval" / "eval.json").read_text())["eval/held_out/accuracy"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert accuracy == last["eval/held_out/accuracy"]
    assert len((tmp_path / "eval" / "responses.jsonl").read_text().splitlines()) == 12


def test_dry_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "train", "--dry-run", *QUICK) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("60 training prompts; ") and "[curriculum]" not in printed
    assert len(printed.splitlines()) < 20
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_every_setting_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints is a recipe: the plan stands in its comments."""
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "train", "--dry-run", "--settings", *QUICK) == 0
    (tmp_path / "kept.toml").write_text(printed := capsys.readouterr().out)
    assert "# 60 training prompts" in printed
    assert load_config(Path("kept.toml")).rollout.slots == 12
    assert "--settings goes with --dry-run" in refused(
        monkeypatch, capsys, "train", "--settings", *QUICK
    )


def test_a_plan_that_does_not_fit_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "train", "--dry-run", *QUICK, "--set=rollout.slots=10000000000") == 2
    captured = capsys.readouterr()
    assert "fits: no: " in captured.out and "training prompts" in captured.out and not captured.err


def test_a_dry_run_counts_in_one_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thousands have commas, and one step is no steps; the warm start is part of the plan."""
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "train", "chain", "--dry-run", "--set", "steps=1") == 0
    printed = capsys.readouterr().out
    assert (
        "20,000 training prompts; 200 in held_out\n1 step of 16 groups x 16 rollouts (dapo), "
        in printed
    )
    assert "packs of 4,096: " in printed and "\ntime: 1 step on " in printed
    assert "time: warm start: 1,500 updates of 32 worked solutions of 2" in printed
    assert not re.findall(r"\d{4,}", printed.replace("0.0002", ""))


@pytest.mark.parametrize(
    "group", [[], ["data"], ["curriculum"], ["bench"]], ids=lambda group: "".join(group) or "whet"
)
def test_no_help_text_is_cut(
    group: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["whet", *group, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr().out
    assert "Commands:" in printed and "..." not in printed.partition("Commands:")[2]


def test_help_names_the_values_of_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, names in (
        ("train", CURRICULA),
        ("view", get_args(Phase)),
        ("view", get_args(Verdict)),
    ):
        assert call(monkeypatch, command, "--help") == 0
        words = set(re.findall(r"\w+", capsys.readouterr().out))
        assert set(names) <= words


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "return float('nan')",
            "failed with ValueError: a score or a reward is a finite number, not nan",
        ),
        ("return '1.0'", "failed with TypeError: a judge returns a number, this one a str"),
        ("raise KeyError('nums')", "failed with KeyError: 'nums'"),
        (
            "return later(response)",
            "failed with TypeError: a judge returns a number, this one a coroutine",
        ),
        ("os._exit(3)", "ended its process"),
        ("while True: pass", "took longer than 0.5 s"),
    ],
)
def test_a_reward_that_never_gives_a_verdict_is_refused_before_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    why: str,
) -> None:
    """By a dry run, too."""
    judge = f"import os\nasync def later(response): return 1.0\ndef judge(prompt, response):\n    {body}\n"
    name = "broken_" + re.sub(r"\W", "_", body)
    (tmp_path / f"{name}.py").write_text(judge)
    monkeypatch.chdir(tmp_path)
    flags = (*QUICK, f"--reward={name}:judge", "--set=judge.timeout_s=0.5")
    for words in (("--dry-run",), (f"--out={tmp_path / 'run'}",)):
        said = " ".join(refused(monkeypatch, capsys, "train", *flags, *words).split())
        assert said.startswith("whet: Called with the answer of problem ")
        cure = "raise judge.timeout_s" if "longer" in why else "repair it"
        assert f"the reward {name}:judge {why}; " in said
        assert said.endswith(f"an empty response and noise get no verdict either: {cure}.")
    assert not (tmp_path / "run").exists()


def test_a_reward_that_fails_on_an_empty_response_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "picky_judge.py").write_text(
        "def judge(prompt, response):\n    return float(response[0] == '3')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "train", "--dry-run", *QUICK, "--reward=picky_judge:judge") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Called with an empty response, the reward picky_judge:judge failed with IndexError: "
        in printed
    )


def test_an_import_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = "import time\ntry:\n    time.sleep(3600)\nexcept Exception:\n    pass\n"
    (tmp_path / "slow_import.py").write_text(
        f"{hangs}def judge(prompt, response):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(errors, "IMPORT_S", 0.3)
    before = signal.getsignal(signal.SIGALRM)
    said = " ".join(
        refused(
            monkeypatch, capsys, "train", *QUICK, "--reward=slow_import:judge", "--dry-run"
        ).split()
    )
    assert 'reward = "slow_import:judge": importing slow_import took longer than 0.3 s;' in said
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (
        0.0,
        0.0,
    )


def test_list_doctor_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "list") == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("uniform", "dapo", "chain", "rloo", "learn.lr"))
    assert call(monkeypatch, "doctor", "tiny") == 0
    assert "torch" in capsys.readouterr().out
    assert call(monkeypatch, "--version") == 0


@pytest.mark.parametrize(
    "recipe",
    sorted(Path(__file__).parent.parent.joinpath("recipes").rglob("*.toml")),
    ids=lambda p: p.stem,
)
def test_every_recipe_holds(recipe: Path) -> None:
    settings = load_config(recipe)
    assert dump_config(settings)


def test_a_recipe_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("papers/speed-rloo")).learn.lr == 1e-6
    assert call(monkeypatch, "train", "chain", "--dry-run") == 0
    assert "20,000 training prompts" in capsys.readouterr().out
    assert 'did you mean "chain"?' in refused(monkeypatch, capsys, "train", "chian")
    assert "gsm8k" in refused(monkeypatch, capsys, "train", "nothing")
    assert "no recipe at mine.toml" in refused(monkeypatch, capsys, "train", "mine.toml")
    (tmp_path / "chain").write_text("steps = 7")
    assert load_config(Path("chain")).steps == 7, "a file goes before a name"


def test_the_wheel_holds_the_recipes() -> None:
    project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {
        "recipes": "whet/recipes"
    }


@pytest.mark.parametrize(
    "command", (["train", "chain"], ["eval", "tiny", "--data", "x.jsonl"], ["export", "x", "y"])
)
def test_a_command_that_lacks_torch_says_so(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "x").mkdir()
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['whet', *{command}]; "
        "from whet.cli import main; main()"
    )
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (
        2,
        'whet: This needs torch, which is not installed: pip install "whet[train]".',
    )


def test_any_run_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs were killed before the first row, torn in the middle of a line, or go on."""
    young, torn = tmp_path / "young", tmp_path / "torn"
    for run in (young, torn):
        run.mkdir()
        (run / "config.toml").write_text(dump_config(load_config(sets=["steps=9"])))
    (torn / "metrics.jsonl").write_text(
        '{"step": 0}\n{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew'
    )
    (torn / "rollouts").mkdir()
    (torn / "rollouts" / "step_00000001.jsonl").write_text('{"step": 1, "prompt": "1+1=", "respo')
    assert call(monkeypatch, "report", str(young), str(torn)) == 0
    assert "young stopped at step 0 of 9" in (young / "report.html").read_text()
    assert '"state":"stopped at step 1 of 9"' in (torn / "report.html").read_text()
    with Run.resume(torn):
        assert call(monkeypatch, "report", str(torn)) == 0
    assert "torn is at step 1 of 9" in (torn / "report.html").read_text()
    assert (
        call(monkeypatch, "report", str(young), str(torn), "--out", str(tmp_path / "both.html"))
        == 0
    )
    assert (tmp_path / "both.html").read_text().count('"state":"stopped at') == 2
    assert "--serve writes no file" in refused(
        monkeypatch, capsys, "report", str(young), "--serve", "--out", "x"
    )
    (torn / "metrics.jsonl").write_text('{"step": 0}\nnoise\n{"step": 2}\n')
    assert call(monkeypatch, "report", str(torn)) == 0
    damage = "Line 2 of metrics.jsonl is damaged and left out."
    assert (
        capsys.readouterr().err.strip() == f"{torn}: {damage}"
        and damage in (torn / "report.html").read_text()
    )
    (young / "report.html").unlink()
    (tmp_path / "empty").mkdir()
    assert "holds no config.toml" in refused(
        monkeypatch, capsys, "report", str(young), str(tmp_path / "empty")
    )
    assert not (young / "report.html").exists(), "all are looked at before one is written"


def test_what_resume_cannot_heed_is_refused_and_an_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"--out={tmp_path / 'run'}"
    assert call(monkeypatch, "train", *QUICK, out) == 0
    capsys.readouterr()
    assert "leave the other recipe" in refused(
        monkeypatch, capsys, "train", "gsm8k", "--resume", out
    )
    assert "leave the other recipe" in refused(
        monkeypatch, capsys, "train", "--model", "tiny", "--resume", out
    )
    assert call(monkeypatch, "train", "--resume", out) == 0
    assert (
        "The run has come to its end; more steps go on from here: --set steps=N."
        in capsys.readouterr().err
    )
    assert call(monkeypatch, "view", str(tmp_path / "run"), "--limit", "0") == 2
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    assert "has no checkpoint yet" in refused(monkeypatch, capsys, "eval", str(tmp_path / "run"))


def test_damaged_checkpoints_are_told_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which file is damaged, and what to do; `eval` and `export` say the same."""
    run = tmp_path / "run"
    assert call(monkeypatch, "train", *QUICK, f"--out={run}") == 0
    capsys.readouterr()
    for weights in run.glob("checkpoints/step_*/model.safetensors"):
        damaged = bytearray(weights.read_bytes())
        damaged[-1] ^= 1
        weights.write_bytes(damaged)
    why = "(step_00000002: model.safetensors was changed or damaged (its hash is wrong)); bring one back from a backup"
    for words in (["eval", str(run)], ["export", str(run), str(tmp_path / "out")]):
        assert why in refused(monkeypatch, capsys, *words)


def test_cheap_mistakes_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    """Its import and that of transformers take most of ten seconds."""
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "empty").mkdir()
    mistakes = {
        "train --data none.jsonl": "There is no data file at none.jsonl.",
        "train --data none.jsonl --dry-run": "There is no data file at none.jsonl.",
        "train --set data.0.task=chian": 'There is no task "chian"',
        "train --curriculum dappo": 'There is no curriculum "dappo"',
        "train --reward no_such_module:f": 'there is no module "no_such_module"',
        "train --model nowhere --data sums.jsonl": "There is no model folder at nowhere",
        "train --model empty --data gsm8k": "empty is no Hugging Face folder",
        "eval nowhere --data sums.jsonl": "There is no model folder at nowhere",
        "probe nowhere sums.jsonl": "There is no model folder at nowhere",
    }
    code = """
import sys
from whet.cli import main
for words in sys.argv[1:]:
    sys.argv = ["whet", *words.split()]
    try:
        main()
    except SystemExit as left:
        print(left.code, {"torch", "transformers", "math_verify"} & set(sys.modules), flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "COLUMNS": "200"}
    command = [sys.executable, "-c", code, *mistakes]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 set()"] * len(mistakes), done.stderr
    for line, sentence in zip(done.stderr.splitlines(), mistakes.values(), strict=True):
        assert sentence in line


def test_eval_flags_need_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--n goes with --data" in refused(monkeypatch, capsys, "eval", "tiny", "--n", "8")
    sentence = refused(monkeypatch, capsys, "eval", "tiny", "--data", "x.jsonl", "--n", "8")
    assert sentence.endswith(
        "eval.0: n = 8 rollouts at temperature 0 would all be the same; set a temperature."
    )


def test_eval_takes_a_recipe_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("--set", "eval.0.limit=3", "--set", "eval.0.max_tokens=4", "--set", "warm_start=[]")
    assert call(monkeypatch, "eval", "tiny", "--recipe", "chain", *few, "--out", "out") == 0
    assert len((tmp_path / "out" / "responses.jsonl").read_text().splitlines()) == 3
    capsys.readouterr()
    assert 'did you mean "chain"?' in refused(
        monkeypatch, capsys, "eval", "tiny", "--recipe", "chian"
    )


def test_eval_probe_and_export_as_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = model_folder(tmp_path / "model"), problem_file(tmp_path / "sums.jsonl", 12)
    assert (
        call(monkeypatch, "eval", model, "--data", data, "--max-tokens", "4", "--limit", "5") == 0
    )
    assert "accuracy" in capsys.readouterr().out
    (kept,) = (tmp_path / "runs").glob("eval-*")
    assert len((kept / "responses.jsonl").read_text().splitlines()) == 5
    assert (
        call(monkeypatch, "probe", model, data, "--n", "2", "--prompts", "4", "--max-tokens", "4")
        == 0
    )
    assert "Advice" in capsys.readouterr().out
    assert call(monkeypatch, "data", "look", data) == 0
    assert "What is 0+0?" in capsys.readouterr().out
    assert call(monkeypatch, "export", model, str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "README.md").is_file()
    assert call(monkeypatch, "doctor", model) in (0, 1)
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_names_with_escape_codes_are_spelled_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, a column, a prompt's id and a model: none of them drives the terminal."""
    evil = "\x1b[2J\x1b]0;mine\x07\u202e"
    row = {"prompt": "1+1=", "answer": "2"}
    twice = problems(tmp_path / "p.jsonl", [{**row, "id": evil}] * 2)
    column = problems(tmp_path / "c.jsonl", [{evil: "1+1=", "answer": "2"}])
    for words in (
        ("train", "--data", str(tmp_path / f"none{evil}.jsonl")),
        ("train", "--data", twice),
        ("train", "--data", column),
        (
            "train",
            "--model",
            str(tmp_path / f"model{evil}"),
            "--data",
            problems(tmp_path / "g.jsonl", [row] * 3),
        ),
        ("view", str(tmp_path / f"run{evil}")),
        ("data", "look", str(tmp_path / f"none{evil}.jsonl")),
        ("export", str(tmp_path / f"run{evil}"), str(tmp_path / "out")),
    ):
        said = refused(monkeypatch, capsys, *words)
        assert "\\x1b[2J" in said and said.isprintable(), (words, said)
    named = problems(tmp_path / f"{evil}.jsonl", [{**row, evil: 1, "essay": "x" * 101}])
    assert call(monkeypatch, "data", "look", named) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2J" in shown and not {"\x1b", "\x07", "\u202e"} & set(shown)


@pytest.mark.slow
def test_the_first_recipe_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rounding of the machine makes of its warm start: 12 of its 24 updates."""
    words = ["--set=steps=12", "--set=eval.0.every=12", "--set=eval.0.limit=100"]
    assert call(monkeypatch, "train", "chain", *words, f"--out={tmp_path / 'run'}") == 0
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    start, end = (rows[i]["eval/held_out/accuracy"] for i in (0, -1))
    assert start < 0.5 and end > start + 0.3, (start, end)
