"""Runs the tests on real weights (tests/real) and stores the table of outcomes: checks by models, with their figures.

    python benchmarks/real_weights.py                 every model of build/models, on a CPU
    python benchmarks/real_weights.py -k engine       some of the checks

Other options are pytest's. `make test-gpu` writes the part of the table that is of a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from gpu_tests import FAMILY, ROOT, TABLE, outcomes, store_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=TABLE)
    asked, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/real", *FAMILY, "-m", "not gpu"]
        code = subprocess.run([*command, "--junitxml", str(report), *words], cwd=ROOT).returncode
        found = list(outcomes(ET.parse(report).getroot())) if report.is_file() else []
    if store_table(found, asked.out):
        print(asked.out)
    sys.exit(code)


if __name__ == "__main__":
    main()
