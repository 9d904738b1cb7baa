"""The benchmark of the learner's step, as a script: what it writes, on a tiny shape without a GPU."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "learner.py"


def test_it_measures_plain_steps_and_the_forms_it_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("whet.fast.compiled._compile_chunk", lambda function: function)
    given = [
        "--shape",
        "tiny",
        "--tokens",
        "64",
        "--responses",
        "4",
        "--steps",
        "1",
        "--forms",
        "head",
        "--out",
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given, str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found = json.loads((tmp_path / "learner_tiny_64.json").read_text())
    assert found["compiled"] == ""  # a CPU tries nothing
    assert set(found["runs"]) == set(found["summary"]) == {"plain", "head"}
    plain, head = (found["summary"][name] for name in ("plain", "head"))
    assert plain["mfu"] == pytest.approx(6 * found["parameters"] * plain["tokens_per_s"] / 790e12)
    assert plain["tokens_per_s"] == pytest.approx(1e3 * 64 / plain["step_ms"])
    assert found["speedup"]["head"] == pytest.approx(head["tokens_per_s"] / plain["tokens_per_s"])
    assert "of plain:" in capsys.readouterr().out
