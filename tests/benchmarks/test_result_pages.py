"""The pages say what the stored cells say: each table is made again from its JSON and compared with the page."""

import re
import shutil
from pathlib import Path

import dose
import proof
import pytest
from matrix import read_plan
from matrix_cells import read_arms

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


@pytest.mark.parametrize("matrix", ["maze_matrix", "operations_matrix"])
def test_the_evidence_is_what_the_stored_cells_say(tmp_path: Path, matrix: str) -> None:
    plan = read_plan(ROOT / "benchmarks" / f"{matrix}.toml")
    arms = read_arms(RESULTS / "train" / matrix, [arm.name for arm in plan.matrix.arm])
    body = proof.document(plan, arms, proof.read_alone(plan, RESULTS))
    for figure in proof.draw(plan, arms, tmp_path):
        assert figure.read_text() == (DOCS / "figures" / figure.name).read_text()
    page = (DOCS / "evidence.md").read_text()
    assert body in page, f"run python benchmarks/proof.py benchmarks/{matrix}.toml"


@pytest.mark.parametrize(
    ("matrix", "ours"), [("maze_matrix", "five"), ("operations_matrix", "all")]
)
def test_the_readme_and_the_summary_repeat_the_headline(matrix: str, ours: str) -> None:
    page = (DOCS / "evidence.md").read_text()
    body = page.partition(f"<!-- results: {matrix} -->")[2]
    share, low, high = re.findall(r"[\d.]+", cells_of(body, ours)[1])[:3]
    assert f"{share} ({low}–{high}) of uniform's" in page
    assert share in (ROOT / "README.md").read_text()


def cells_of(table: str, arm: str) -> list[str]:
    """The row of an arm in a Markdown table, without its name."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {arm} |"))
    return [text.strip() for text in line.strip("|").split(" | ")][1:]


@pytest.mark.slow
def test_the_evidence_says_what_the_share_of_informative_prompts_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is made again from its cells; the page turns its savings into shares of uniform's tokens."""
    shutil.copytree(RESULTS / "dose", tmp_path / "dose")
    monkeypatch.setattr(dose, "RESULTS", tmp_path / "dose")
    dose.tabulate()
    for name in ("dose.md", "dose.svg"):
        assert (tmp_path / "dose" / name).read_bytes() == (RESULTS / "dose" / name).read_bytes()
    lines = (RESULTS / "dose" / "dose.md").read_text().splitlines()
    rows = [[text.strip() for text in line.split("|")] for line in lines]
    page = (DOCS / "evidence.md").read_text()
    for name, arm in (("the four curricula together (`all`)", "all"), ("SPEED alone", "speed")):
        savings = [
            list(map(float, re.findall(r"[\d.]+", row[7]))) for row in rows if row[2:3] == [arm]
        ]
        shares = [f"{1 / value:.2f} ({1 / high:.2f}–{1 / low:.2f})" for value, low, high in savings]
        assert cells_of(page, name) == shares
