"""The GPU's tests, run by a few processes: every outcome is counted and stored, also of a file that cannot be read."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import gpu_tests
import pytest

ROOT = Path(__file__).parents[2]
SOME = """
import os, pytest
@pytest.mark.gpu
@pytest.mark.parametrize("n", range(7))
def test_many(n): assert n != 3, "three is wrong"
@pytest.mark.gpu
def test_skipped(): pytest.skip("not here")
def test_unmarked(): assert False
"""
CRASH = """
import os, pytest
@pytest.mark.gpu
def test_crash(): os._exit(7)
"""


@pytest.mark.slow
def test_every_outcome_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "tests"
    (tests / "deep").mkdir(parents=True)
    (tests / "deep" / "test_some.py").write_text(SOME)
    (tests / "test_crash.py").write_text(CRASH)
    (tests / "test_arena.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_last(): pass\n"
    )
    (tests / "test_lost.py").write_text("import no_such_package  # mark.gpu\n")
    (tests / "test_plain.py").write_text("import another_that_is_missing\n")
    monkeypatch.setenv("WHET_COMMIT", "0123abc")
    out = tmp_path / "found.json"
    result = gpu_tests.measure(tests, out, workers=2)
    assert result == json.loads(out.read_text())
    assert (result["commit"], result["passed"], result["failed"], result["skipped"]) == (
        "0123abc",
        7,
        3,
        1,
    )
    why = result["failures"]
    assert set(why) == {
        "tests/deep/test_some.py::test_many[3]",
        "tests/test_crash.py::test_crash",
        "tests/test_lost.py",
    }
    assert (
        "three is wrong" in why["tests/deep/test_some.py::test_many[3]"]
        and "no_such_package" in why["tests/test_lost.py"]
    )
    assert why["tests/test_crash.py::test_crash"].startswith("the process ended with code 7")
    assert result["device"] and result["versions"]["torch"] and result["seconds"] > 0


REAL = """
import json, os, pytest
pytestmark = [
    pytest.mark.parametrize("model", ["one", "an-other", pytest.param("none", marks=pytest.mark.skip("no weights"))]),
    pytest.mark.parametrize("device", ["cpu", "cuda"]),
]
def test_the_gap(device, model, record_property):
    record_property("gap_max", json.dumps(0.25))
    if model != "one" and os.environ.get("LACKS"): pytest.skip("needs another package")
    assert model == "one", "too far off"
"""


def test_outcomes_on_real_weights_join_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By check and model, each device apart. A skipped check keeps an outcome of the same commit, and no other."""
    tests, out = tmp_path / "tests" / "real", tmp_path / "table.json"
    tests.mkdir(parents=True)
    (tests / "test_real.py").write_text(REAL)

    def stored(commit: str, *, lacks: str = "") -> dict[str, Any]:
        monkeypatch.setenv("WHET_COMMIT", commit)
        monkeypatch.setenv("LACKS", lacks)
        report = tmp_path / "report.xml"
        strict = ["-o", "addopts=", "-W", "error", *gpu_tests.FAMILY]
        command = [sys.executable, "-m", "pytest", *strict, "--junitxml", str(report), str(tests)]
        subprocess.run(command, cwd=tmp_path, capture_output=True)
        gpu_tests.store_table(gpu_tests.outcomes(ET.parse(report).getroot()), out)
        return json.loads(out.read_text())

    first = stored("0123abc")
    assert first.keys() == {"cpu", "cuda"}
    for part in first.values():
        assert part["commit"] == "0123abc" and part["versions"]["torch"] and part["hardware"]["cpu"]
        (row,) = part["checks"].values()
        assert part["checks"].keys() == {"the gap"} and row.keys() == {"one", "an-other"}
        assert (row["one"]["outcome"], row["one"]["gap_max"]) == ("passed", 0.25)
        assert row["an-other"]["outcome"] == "failed" and "too far off" in row["an-other"]["why"]
    again = stored("0123abc", lacks="yes")
    assert (
        again["cpu"]["checks"]["the gap"]["an-other"]
        == first["cpu"]["checks"]["the gap"]["an-other"]
    )
    later = stored("fedcba9", lacks="yes")["cpu"]["checks"]["the gap"]["an-other"]
    assert later["outcome"] == "skipped" and "another package" in later["why"]


def test_nothing_is_stored_where_there_are_no_real_weights(tmp_path: Path) -> None:
    one = {"test": "tests/test_x.py::test_y", "outcome": "passed", "seconds": 0.1, "figures": {}}
    assert gpu_tests.store_table([one], tmp_path / "table.json") == {}
    assert not (tmp_path / "table.json").exists()


def test_a_crash_is_a_failed_cell() -> None:
    one = gpu_tests.failure(
        "tests/real/test_x.py::test_the_gap[cuda-one]", "the process ended with code -9"
    )
    assert gpu_tests.real_cells([one])["cuda"]["the gap"]["one"]["outcome"] == "failed"


def test_every_file_that_speaks_of_the_mark_is_found() -> None:
    """A mark that a test takes from a helper would not be seen: no helper has one."""
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    assert not [path.name for path in helpers if "mark.gpu" in path.read_text()]


def test_make_without_a_venv_asks_the_interpreter_at_hand() -> None:
    def asked(*given: str) -> str:
        return subprocess.run(
            ["make", "-n", "--no-print-directory", "test-gpu", *given],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout

    assert (
        asked("VENV=none", f"PYTHON={sys.executable}")
        == f"{sys.executable} -m benchmarks.gpu_tests\n"
    )
    assert asked().splitlines()[-1] == ".venv/bin/python -m benchmarks.gpu_tests"
