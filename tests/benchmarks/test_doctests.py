"""The examples in the docstrings of the scripts of benchmarks/, which the collection of tests leaves out."""

import doctest
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_examples_of_a_script_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0
