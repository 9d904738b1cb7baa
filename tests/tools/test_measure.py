"""whet eval and whet probe, end to end on a tiny random model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import SMALL, Silent, model_folder, problem_file

from whet.api import run_recipe
from whet.errors import WhetError
from whet.recipe import load_config
from whet.rollout.engine import LocalEngine
from whet.tools.measure import eval_entries, evaluate_model, probe_model

ANY_DIGIT = "measured_judge:any_digit"


@pytest.fixture(autouse=True)
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that an untrained model pleases now and then."""
    (tmp_path / "measured_judge.py").write_text(
        "def any_digit(prompt, response):\n    return float(any(c.isdigit() for c in response[:3]))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_any_model_on_any_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "notes", lambda self: ["Slow today."])
    said: list[str] = []
    model, data = model_folder(tmp_path / "model"), problem_file(tmp_path / "sums.jsonl", 30)
    entries = eval_entries([data], n=4, temperature=1.0, max_tokens=8, limit=10)
    progressed: list[tuple[str, int, int]] = []
    metrics = evaluate_model(
        model,
        entries=entries,
        sets=[f"eval.0.reward='{ANY_DIGIT}'"],
        out=tmp_path / "out",
        on_progress=lambda *progress: progressed.append(progress),
        say=said.append,
    )
    assert "Slow today." in said
    assert 0 < metrics["eval/sums/accuracy"] < 1
    assert (
        metrics["eval/sums/accuracy_low"]
        < metrics["eval/sums/accuracy"]
        < metrics["eval/sums/accuracy_high"]
    )
    assert metrics["eval/sums/pass@4"] > metrics["eval/sums/accuracy"]
    assert {"eval/sums/maj@4", "eval/sums/level/1", "eval/sums/truncated"} <= metrics.keys()
    rows = [
        json.loads(line) for line in (tmp_path / "out/responses.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 40 and {"prompt", "response", "answer", "verdict"} <= rows[0].keys()
    right = sum(row["verdict"] == "right" for row in rows) / 40
    assert right == pytest.approx(metrics["eval/sums/accuracy"])
    assert json.loads((tmp_path / "out/eval.json").read_text())["model"] == model
    assert progressed[-1] == ("sums", 40, 40)


def test_a_run_brings_its_own_sets(tmp_path: Path) -> None:
    run_recipe(load_config(sets=[*SMALL, "steps=2"]), tmp_path / "run", watcher=Silent())
    metrics = evaluate_model(str(tmp_path / "run"))
    assert "eval/held_out/accuracy" in metrics
    last = str(max((tmp_path / "run/checkpoints").glob("step_*")))
    assert evaluate_model(last).keys() == metrics.keys()


def test_a_plain_model_needs_problems(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="--data"):
        evaluate_model(model_folder(tmp_path / "model"))


def test_probe_reports_signal_and_keeps_what_was_written(tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "model"), problem_file(tmp_path / "sums.jsonl", 30)
    report = probe_model(
        model,
        data,
        n=4,
        prompts=12,
        group=8,
        max_tokens=8,
        temperature=1.0,
        sets=[f"data.0.reward='{ANY_DIGIT}'"],
        out=tmp_path / "out",
    )
    result = json.loads((tmp_path / "out/probe.json").read_text())
    rows = [
        json.loads(line) for line in (tmp_path / "out/responses.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 48 and {row["phase"] for row in rows} == {"probe"}
    mean = sum(row["verdict"] == "right" for row in rows) / 48
    assert report.to_json().items() <= result.items()
    assert result["pass_rate"]["value"] == pytest.approx(mean)


def test_a_judge_that_raises_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "measured_judge.py").write_text(
        "def needy(prompt, response):\n    return prompt.meta['nums'][0]\n"
    )
    sys.modules.pop("measured_judge", None)
    model, data = model_folder(tmp_path / "model"), problem_file(tmp_path / "sums.jsonl", 30)
    said: list[str] = []
    limits = {"n": 2, "prompts": 4, "group": 8, "max_tokens": 8, "temperature": 1.0}
    sentence = "the reward measured_judge:needy failed with KeyError: 'nums'"
    with pytest.raises(WhetError, match=sentence):
        probe_model(
            model, data, **limits, sets=["data.0.reward='measured_judge:needy'"], say=said.append
        )  # type: ignore[arg-type]
    with pytest.raises(WhetError, match=sentence):
        evaluate_model(
            model,
            entries=eval_entries([data], max_tokens=8, limit=4),
            sets=["eval.0.reward='measured_judge:needy'"],
            say=said.append,
        )
    sys.modules.pop("measured_judge")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["eval", "tiny", "--n", "2"], "--n goes with --data"),
        (["probe", "tiny", "x.jsonl", "--set", "learn.rate=1"], 'There is no setting "learn.rate"'),
    ],
)
def test_flags_are_checked_before_torch_is_imported(command: list[str], words: str) -> None:
    start = f"import sys; sys.modules['torch'] = None; sys.argv = ['whet', *{command}]"
    code = f"{start}; from whet.cli import main; main()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr, done.stderr
