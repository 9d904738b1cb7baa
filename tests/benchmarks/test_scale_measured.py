"""Predicted against measured seconds: a run worked out by hand, and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run_script
from scale_measured import MeasuredRun, fit, main

from whet.recipe import dump_config, load_config
from whet.tools.bench.scale import read_inputs


def measured_run(folder: Path, *, workers: int = 1, steps: int = 3) -> Path:
    """2 groups of 2 rollouts of 10 tokens: a decode step of b rows takes 30 + 5 b ms, an update 100 ms and 5 ms per
    token, handing over to the judges 100 ms, the rest 200 ms. The first update takes longer, and an evaluation is not a
    part of any."""
    sets = ["curriculum.name=uniform", "curriculum.groups=2", "curriculum.rollouts=2", "rollout.slots=8"]
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(load_config(sets=sets)))
    rows: list[dict[str, float]] = [{"step": 0, "time/total": 1.0}]
    for step in range(1, steps + 1):
        batch = 2 + 2 * (step % 2)  # the fit needs batches of two sizes
        decoding, train = 10 * (0.030 + 0.005 * batch), 0.100 + 0.005 * 10 * batch / workers
        rows.append(
            {
                "step": step,
                "rollout/steps": 10.0,
                "rollout/tokens": 10.0 * batch,
                "rollout/seconds": decoding,
                "rollout/finished": 4.0,
                "batch/groups": 2.0,
                "batch/tokens": 10.0 * batch,
                "time/generate": decoding + 0.1,
                "time/train": train,
                "time/eval": 5.0,
                "time/total": decoding + train + 0.3 + 5.0 + 9.0 * (step == 1),
                **{f"length/{name}": 10.0 for name in ("mean", "p50", "p90", "p99", "max")},
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_predicted_against_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = measured_run(tmp_path / "one"), measured_run(tmp_path / "two", workers=2)
    monkeypatch.setenv("COLUMNS", "200")
    main([str(one), f"{two}@2", "--out", str(tmp_path)])
    stored = json.loads((tmp_path / "scale_measured.json").read_text())
    alone, together = stored["runs"]
    assert alone["updates"] == 2 and together["workers"] == 2
    # 10 steps of 4 rows at 50 ms, 40 tokens at 5 ms. Two workers: 2 rows at 40 ms, and 20 tokens each; judges are
    # handed their rollouts while they decode.
    assert alone["predicted_s"] == pytest.approx(0.5 + 0.1 + 0.2 + 0.3)
    assert together["predicted_s"] == pytest.approx(0.4 + 0.1 + 0.1 + 0.2)
    assert alone["measured_s"] == pytest.approx(np.mean([0.4 + 0.2, 0.5 + 0.3]) + 0.3)
    # one worker decodes all at once, two of them 10 steps each
    assert (alone["predicted_steps"], together["predicted_steps"]) == pytest.approx((10.0, 20.0))
    assert alone["measured_steps"] == together["measured_steps"] == 10.0
    assert alone["error"] == pytest.approx(alone["predicted_s"] / alone["measured_s"] - 1)
    shown = capsys.readouterr().out
    assert "1.100" in shown and "0.800" in shown and f"{alone['error']:+.1%}" in shown
    # The JSON, or its inputs alone, may be the next inputs.
    (tmp_path / "fitted.json").write_text(json.dumps(stored["inputs"]))
    for name in ("fitted.json", "scale_measured.json"):
        assert read_inputs(path=tmp_path / name).update_ms == pytest.approx(100.0)


def test_a_step_of_a_stream_may_need_no_generation(tmp_path: Path) -> None:
    folder = measured_run(tmp_path / "run")
    whole = fit(MeasuredRun(str(folder)), read_inputs())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    idle = {"rollout/steps": 0.0, "rollout/tokens": 0.0, "rollout/seconds": 0.0, "rollout/finished": 0.0}
    idle |= {name: rows[-1][name] for name in ("batch/groups", "batch/tokens", "time/train")}
    idle |= {"step": 4, "time/total": rows[-1]["time/train"] + 0.2}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, idle]))
    found = fit(MeasuredRun(str(folder)), read_inputs())
    assert found.lengths == whole.lengths and found.host_ms == pytest.approx(200.0)
    assert found.decode_ms == pytest.approx(whole.decode_ms) and found.update_ms == pytest.approx(100.0)


def test_options_change_what_no_run_shows(tmp_path: Path) -> None:
    """Shape, file and --set in this order; what the run shows stays the run's."""
    run, own, out = measured_run(tmp_path / "run"), tmp_path / "own.toml", tmp_path / "new" / "out"
    own.write_text("node = 3\nrestart_s = 4.0\nupdate_ms = 9.0\n")
    main([str(run), "--shape=135m", "--inputs", str(own), "--set", "node=5", "--set=max_age=7", "--out", str(out)])
    found = read_inputs(path=out / "scale_measured.json")
    assert (found.node, found.restart_s, found.max_age) == (5, 4.0, 7)
    assert found.acceptance == read_inputs("135m").acceptance and found.speculation == read_inputs("135m").speculation
    assert found.update_ms == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "There is no run in nowhere"),
        (["run@two"], 'got "run@two"'),
        (["empty"], "has no step to measure"),
        (["mute"], "says nothing of lengths"),
        (["torn"], "has a step without rollout/seconds"),
        (["mute", "--set", "slotz=1"], 'There is no input "slotz"; there are decode_ms,'),
        (["mute", "--shape", "70b"], 'There is no shape "70b"; there are 1.5b, 135m'),
        (["mute", "--inputs", "none.toml"], "none.toml cannot be read"),
    ],
)
def test_bad_input(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    measured_run(tmp_path / "empty", steps=0)
    torn = measured_run(tmp_path / "torn") / "metrics.jsonl"
    torn.write_text(torn.read_text().replace("rollout/seconds", "elsewhere"))
    mute = measured_run(tmp_path / "mute") / "metrics.jsonl"
    mute.write_text(mute.read_text().replace("length/", "elsewhere/"))
    monkeypatch.setattr("sys.argv", ["scale_measured.py", *words])
    with pytest.raises(SystemExit) as left:
        run_script(main)
    sentence = capsys.readouterr().err.strip()
    assert left.value.code == 2 and says in sentence and len(sentence.splitlines()) == 1
    assert not list(tmp_path.rglob("scale*.json"))


def test_a_seed_is_not_below_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(measured_run(tmp_path / "run")), "--seed", "-1"])
    assert left.value.code == 2 and "--seed must not be below 0" in capsys.readouterr().err
