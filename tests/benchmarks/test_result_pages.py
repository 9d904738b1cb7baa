"""The pages say what the stored cells say: each table is made again from its JSON and compared with the page."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import dose
import proof
import pytest
from matrix import MatrixPlan, read_plan
from matrix_document import document, marks, read_arms, short_table, write_report
from matrix_figures import write_figures
from matrix_results import Arms, target_level

from whet.report.arms import Point
from whet.report.formats import first_crossing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EVIDENCE = ROOT / "docs" / "evidence"
MATRICES = ("gsm8k_matrix", "stack_matrix")


def stored(matrix: str) -> tuple[MatrixPlan, Arms]:
    plan = read_plan(ROOT / "benchmarks" / f"{matrix}.toml")
    return plan, read_arms(RESULTS / "train" / matrix, [arm.name for arm in plan.matrix.arm])


@pytest.mark.wide
@pytest.mark.parametrize("matrix", MATRICES)
def test_pages_and_figures_are_what_the_command_writes(matrix: str, tmp_path: Path) -> None:
    """matrix_figures.py and `matrix_document.py MATRIX` on copies of the pages change no byte of them."""
    folder = tmp_path / "docs" / "evidence"
    folder.mkdir(parents=True)
    (folder / "results.md").write_text((EVIDENCE / "results.md").read_text())
    plan, arms = stored(matrix)
    figures = write_figures(arms, plan.baseline, plan.name, folder / "figures")
    written = [*figures, *write_report(plan, RESULTS, folder, tmp_path / "README.md")]
    assert folder / "results.md" in written and figures
    for path in written:
        name = path.relative_to(tmp_path)
        assert path.read_text() == (ROOT / name).read_text(), f"{name} is not what the stored cells say"


@pytest.mark.parametrize(("matrix", "ours"), [("maze_matrix", "five"), ("operations_matrix", "all")])
def test_the_proof_is_what_the_stored_cells_say(tmp_path: Path, matrix: str, ours: str) -> None:
    plan, arms = stored(matrix)
    body = proof.document(plan, arms, proof.read_alone(plan, RESULTS))
    for figure in proof.draw(plan, arms, tmp_path):
        assert figure.read_text() == (EVIDENCE / "figures" / figure.name).read_text()
    assert body in (EVIDENCE / "proof.md").read_text(), f"run benchmarks/proof.py benchmarks/{matrix}.toml"
    row = cells_of(body, ours)
    for page in (ROOT / "README.md", EVIDENCE / "index.md"):  # "0.21 (0.15 to 0.34), 4 seeds"
        share, low, high = re.findall(r"[\d.]+", row[1])[:3]
        assert re.search(rf"{share}\s\({low}–{high}\) of uniform's", page.read_text()), page


def test_every_table_between_marks_is_of_a_matrix_that_is_checked() -> None:
    found = re.findall(r"<!-- results: (\w+) -->", (EVIDENCE / "results.md").read_text())
    assert found and set(found) <= set(MATRICES)


def cells_of(table: str, arm: str) -> list[str]:
    """The row of an arm in a Markdown table, without its name."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {arm} |"))
    return [text.strip() for text in line.strip("|").split(" | ")][1:]


@pytest.mark.slow
def test_the_headline_is_that_of_the_cells() -> None:
    """The sentences that a reader takes away: shares at the level, one answer lower, and by the hundredth."""
    plan, arms = stored("stack_matrix")
    text = document(arms, plan.baseline, {})
    level = target_level(arms[plan.baseline])
    short = cells_of(short_table(arms, plan.baseline), "speculation")
    lower = cells_of(text.partition("With one right answer fewer:")[2], "speculation")
    gained = text.partition("a hundredth of accuracy gained costs")[2]
    (tokens, seconds), (cures, _) = cells_of(gained, "speculation"), cells_of(gained, "cures")
    claims = [
        f"{level:.1%}",
        f"{short[3]} of its tokens and {short[5]} of its seconds",
        f"{lower[1]} and {lower[5]}",
        f"{spelt(tokens)} of the tokens and {spelt(seconds)} of the seconds",
        f"`cures` alone takes {spelt(cures)} of the tokens",
    ]
    prose = (EVIDENCE / "results.md").read_text().replace(marks("stack_matrix")[0], "\0").partition("\0")[0]
    assert [claim for claim in claims if claim not in " ".join(prose.split())] == []
    assert f"one point of accuracy costs {tokens} of the tokens" in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.slow
def test_the_readme_says_what_dose_and_response_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is made again from its cells; the README turns its savings into shares of uniform's tokens."""
    shutil.copytree(RESULTS / "dose", tmp_path / "dose")
    monkeypatch.setattr(dose, "RESULTS", tmp_path / "dose")
    dose.tabulate()
    for name in ("dose.md", "dose.svg"):
        assert (tmp_path / "dose" / name).read_bytes() == (RESULTS / "dose" / name).read_bytes()
    rows = [
        [text.strip() for text in line.split("|")] for line in (RESULTS / "dose" / "dose.md").read_text().splitlines()
    ]
    readme = (ROOT / "README.md").read_text().replace("**", "")
    for name, arm in (("the four curricula together (`all`)", "all"), ("SPEED alone", "speed")):
        savings = [list(map(float, re.findall(r"[\d.]+", row[7]))) for row in rows if row[2:3] == [arm]]
        shares = [f"{1 / value:.2f} ({1 / high:.2f}–{1 / low:.2f})" for value, low, high in savings]
        assert cells_of(readme, name) == shares


def spelt(share: str) -> str:
    """A range as it stands in a sentence."""
    return share.replace("–", " to ")


def of_seeds(found: list[float], show: Callable[[float], str], dash: str) -> str:
    """Median and range over the seeds, as the pages write them."""
    middle, low, high = (show(value) for value in (median(found), min(found), max(found)))
    return f"{middle} ({low}{dash}{high})"


def thousands(value: float) -> str:
    return f"{value / 1000:.0f}k" if math.isfinite(value) else "never"


def to_level(run: dict[str, Any], level: float) -> float:
    """Tokens at the first of two evaluations in a row at or above it."""
    points = [Point(step=s, tokens=t, seconds=x, accuracy=a) for s, t, x, a in run["curve"]]
    found = first_crossing(points, level)
    return found.tokens if found else math.inf


def toy_row(runs: dict[str, Any], arm: str, dash: str) -> list[str]:
    """[seeds, tokens to 0.70, of uniform_48's, tokens to 0.85, accuracy at the end] of an arm of the toy study."""
    mine, theirs = (
        [run for name, run in runs.items() if name.rpartition("-seed")[0] == a] for a in (arm, "uniform_48")
    )
    costs = [to_level(run, 0.70) for run in mine]
    share = median(costs) / median(to_level(run, 0.70) for run in theirs)
    return [
        f"{len(mine)}",
        of_seeds(costs, thousands, dash),
        f"{share:.2f}" if math.isfinite(share) else "",
        of_seeds([to_level(run, 0.85) for run in mine], thousands, dash),
        of_seeds([run["accuracy"] for run in mine], lambda value: f"{value:.2f}", dash),
    ]


@pytest.mark.parametrize("mix", ["few", "many"])
def test_the_tables_of_the_toy_study_are_those_of_its_runs(mix: str) -> None:
    runs = json.loads((RESULTS / f"curricula_{mix}.json").read_text())["runs"]
    section = (EVIDENCE / "benchmarks.md").read_text().partition("## Curricula side by side")[2]
    rows = section.partition(f"\n{mix.capitalize()}:\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 20
    for row in rows:
        arm, *cells = [text.strip() for text in row.strip("|").split("|")]
        assert cells == toy_row(runs, arm, "-"), arm
