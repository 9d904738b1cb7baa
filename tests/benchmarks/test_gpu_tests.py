"""The GPU's tests, run by a few processes: every outcome is counted and stored, also of a file that cannot be read."""

import json
import subprocess
import sys
from pathlib import Path

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
    (tests / "test_arena.py").write_text("import pytest\npytestmark = pytest.mark.gpu\ndef test_last(): pass\n")
    (tests / "test_lost.py").write_text("import no_such_package  # mark.gpu\n")
    (tests / "test_plain.py").write_text("import another_that_is_missing\n")
    monkeypatch.setenv("WHET_COMMIT", "0123abc")
    out = tmp_path / "found.json"
    result = gpu_tests.measure(tests, out, workers=2)
    assert result == json.loads(out.read_text())
    assert (result["commit"], result["passed"], result["failed"], result["skipped"]) == ("0123abc", 7, 3, 1)
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


def test_every_file_that_speaks_of_the_mark_is_found() -> None:
    """A mark that a test takes from a helper would not be seen: no helper has one."""
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    assert not [path.name for path in helpers if "mark.gpu" in path.read_text()]


def test_make_without_a_venv_asks_the_interpreter_at_hand() -> None:
    def asked(*given: str) -> str:
        return subprocess.run(
            ["make", "-n", "--no-print-directory", "test-gpu", *given], cwd=ROOT, capture_output=True, text=True
        ).stdout

    assert asked("VENV=none", f"PYTHON={sys.executable}") == f"{sys.executable} -m benchmarks.gpu_tests\n"
    assert asked().splitlines()[-1] == ".venv/bin/python -m benchmarks.gpu_tests"
