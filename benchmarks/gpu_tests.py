"""Runs every test marked `gpu` on the GPU at hand and stores the results.

    make test-gpu               in .venv
    make test-gpu VENV=none     with python3 and PYTHONPATH as they are: a machine with a GPU may have no network

Most of the time goes into compiling, so a few processes share the GPU, each with a few tests of one file: a process
that crashes or hangs takes no other test along. Those of `ALONE` read the free memory of the GPU, or take most of it,
and run last, one process at a time. The outcomes of the tests on real weights (build/models) also go into
`real_weights.json`. The result, `benchmarks/results/gpu_tests.json`, is written whether tests fail or not;
without a git history the commit is what WHET_COMMIT says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from whet import files
from whet.tools.experiment import circumstances

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
TABLE = OUT.with_name("real_weights.json")
ALONE = ("test_arena.py", "test_real_learner.py", "test_real_vllm.py")
AT_ONCE = 5
"""Tests of a process: more wait for each other, fewer pay for more starts of torch, some seconds each."""
LIMIT = 300
"""Seconds of a process, which then counts as failed."""
LIMIT_REAL = 1500
"""Of a process with tests on real weights: some evaluate a whole benchmark."""


FAMILY = ("-o", "junit_family=xunit1")  # the form of a report that has the properties of tests


def pytest(*args: str) -> list[str]:
    """Without the options of pyproject.toml, which choose how much is printed and what else is collected."""
    own = ["-o", "addopts=", *FAMILY, "-p", "no:cacheprovider", "-q", "-m", "gpu"]
    return [sys.executable, "-m", "pytest", *own, *args]


def collect(tests: Path) -> tuple[list[str], dict[str, str]]:
    """Ids of all tests marked `gpu`; and what could not be imported, with the reason."""
    holding = sorted(
        str(path) for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text()
    )
    command = pytest("--collect-only", "--continue-on-collection-errors", *holding)
    done = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True)
    parts = [part.split("\n") for part in done.stdout.split("ERROR collecting ")[1:]]
    broken = {
        head.split()[0]: "; ".join(line[1:].strip() for line in lines if line[:2] == "E ")
        for head, *lines in parts
    }
    return re.findall(r"(?m)^\S+\.py::.+$", done.stdout), broken


def shards(ids: Iterable[str], size: int = AT_ONCE) -> list[list[str]]:
    """
    >>> shards(["a.py::x", "a.py::y", "a.py::z", "b.py::x"], 2)
    [['a.py::x', 'a.py::y'], ['a.py::z'], ['b.py::x']]
    """
    by_file = [list(some) for _, some in groupby(ids, key=lambda name: name.split("::")[0])]
    return [some[i : i + size] for some in by_file for i in range(0, len(some), size)]


def run(ids: list[str], root: Path) -> list[dict[str, Any]]:
    """One process; for each of its tests the outcome, its seconds and, where it failed, why."""
    limit = LIMIT_REAL if "tests/real/" in ids[0] else LIMIT
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        try:
            done = subprocess.run(
                pytest("--junitxml", str(report), *ids),
                cwd=root,
                capture_output=True,
                text=True,
                timeout=limit,
            )
            why = f"the process ended with code {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"
        except subprocess.TimeoutExpired:
            why = f"the process was stopped after {limit} s"
        if not report.is_file():
            return [failure(name, why) for name in ids]
        return list(outcomes(ET.parse(report).getroot()))


def failure(test: str, why: str) -> dict[str, Any]:
    """The outcome of a test that did not come to its end."""
    return {"test": test, "outcome": "failed", "seconds": 0.0, "figures": {}, "why": why}


def outcomes(report: ET.Element) -> Iterator[dict[str, Any]]:
    """What pytest's report in JUnit's form tells of each test: `figures` are its properties."""
    for case in report.iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        outcome = "failed" if bad is not None else "skipped" if skipped is not None else "passed"
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found = {"test": name, "outcome": outcome, "seconds": round(float(case.get("time", 0)), 2)}
        found["figures"] = {
            p.get("name"): figure(p.get("value") or "") for p in case.iter("property")
        }
        reason = bad if bad is not None else skipped
        yield (
            found
            if reason is None
            else {**found, "why": (reason.get("message") or "").strip()[:500]}
        )


def figure(text: str) -> Any:
    """A property of a test: JSON, or words."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def real_cells(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the tests on real weights: device -> check -> model, and what else the test was given -> outcome, figures.

    >>> real_cells([{"test": "tests/real/test_x.py::test_the_gap[cuda-tiny]", "outcome": "passed", "seconds": 1.0,
    ...              "figures": {"gap_max": 0.5}}])
    {'cuda': {'the gap': {'tiny': {'outcome': 'passed', 'seconds': 1.0, 'gap_max': 0.5}}}}
    """
    table: dict[str, Any] = {}
    for one in found:
        path, _, name = one["test"].partition("::test_")
        check, _, given = name.rstrip("]").partition("[")
        words = given.split("-")
        if "tests/real/" not in path or "none" in words:  # a test without a model was skipped
            continue
        device = "cuda" if "cuda" in words else "cpu"
        column = "-".join(word for word in words if word != device)
        why = {"why": one["why"]} if "why" in one else {}
        cell = {"outcome": one["outcome"], "seconds": one["seconds"], **one["figures"], **why}
        table.setdefault(device, {}).setdefault(check.replace("_", " "), {})[column] = cell
    return table


def store_table(found: Iterable[Mapping[str, Any]], out: Path = TABLE) -> dict[str, Any]:
    """Merge the outcomes of the tests on real weights into their table, and return what was merged.

    The table has a part for each device and is of one commit there: at another one it starts anew. A check that is
    skipped leaves an earlier outcome, so that what needs TRL or vLLM can be run by the Python that has it.
    """
    stored: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    about, found = circumstances(), real_cells(found)
    for device, checks in found.items():
        part = stored.get(device, {})
        if part.get("commit") != about["commit"]:
            part = {"checks": {}}
        for check, columns in checks.items():
            row = part["checks"].setdefault(check, {})
            row |= {
                name: cell
                for name, cell in columns.items()
                if cell["outcome"] != "skipped" or name not in row
            }
        stored[device] = {**about, "checks": dict(sorted(part["checks"].items()))}
    if found:
        files.write_text(out, json.dumps(stored, indent=1) + "\n")
    return found


def measure(tests: Path, out: Path, workers: int) -> dict[str, Any]:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes keep the cores busy
    begin = time.perf_counter()
    ids, broken = collect(tests)
    found = [failure(name, why) for name, why in broken.items()]
    parts = shards(ids)
    alone = [part for part in parts if part[0].split("::")[0].endswith(ALONE)]
    for some, beside in (([part for part in parts if part not in alone], workers), (alone, 1)):
        with ThreadPoolExecutor(beside) as pool:
            for results in pool.map(lambda part: run(part, tests.parent), some):
                found += results
                for one in results:
                    print(f"{one['outcome']:8}{one['seconds']:8.1f} s  {one['test']}", flush=True)
    about = circumstances()
    counted = Counter(one["outcome"] for one in found)
    result = {
        "commit": about["commit"],
        "date": about["date"],
        "device": about["hardware"].get("gpu", about["hardware"]["cpu"]),
        "versions": about["versions"],
        **{outcome: counted[outcome] for outcome in ("passed", "failed", "skipped")},
        "seconds": round(time.perf_counter() - begin, 1),
        "workers": workers,
        "failures": {one["test"]: one["why"] for one in found if one["outcome"] == "failed"},
        "slowest": {
            one["test"]: one["seconds"]
            for one in sorted(found, key=lambda one: -one["seconds"])[:10]
        },
    }
    files.write_text(out, json.dumps(result, indent=1) + "\n")
    store_table(found, out.with_name(TABLE.name))
    return result


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "There is no CUDA device here, so that every test would be skipped; run this where there is one."
        )
    result = measure(ROOT / "tests", asked.out, asked.workers)
    for name, why in result["failures"].items():
        print(f"\n{name}\n{why}")
    print(
        ", ".join(f"{result[name]} {name}" for name in ("passed", "failed", "skipped")),
        f"in {result['seconds']} s;",
        asked.out,
    )
    sys.exit(bool(result["failed"] or not result["passed"]))


if __name__ == "__main__":
    main()
