"""The pages say what the stored cells say: each table is made again from its JSON and compared with the page."""

import re
from pathlib import Path

import pytest

from whet.bench.document import document, marks, read_arms, short_table, write_report
from whet.bench.matrix import Plan, read_plan
from whet.bench.results import Arms, target_level

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MATRICES = ("gsm8k_matrix", "stack_matrix")


def stored(matrix: str) -> tuple[Plan, Arms]:
    plan = read_plan(ROOT / "benchmarks" / f"{matrix}.toml")
    return plan, read_arms(RESULTS / "train" / matrix, [arm.name for arm in plan.matrix.arm])


@pytest.mark.parametrize("matrix", MATRICES)
def test_pages_and_figures_are_what_the_command_writes(matrix: str, tmp_path: Path) -> None:
    """`whet bench train MATRIX --report-only` on copies of the pages changes no byte of them."""
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/results.md"):
        (tmp_path / page).write_text((ROOT / page).read_text())
    plan, _ = stored(matrix)
    written = write_report(plan, RESULTS, tmp_path / "docs", tmp_path / "README.md")
    assert tmp_path / "docs" / "results.md" in written and any(path.suffix == ".svg" for path in written)
    for path in written:
        name = path.relative_to(tmp_path)
        assert path.read_text() == (ROOT / name).read_text(), f"{name} is not what the stored cells say"


def test_every_table_between_marks_is_of_a_matrix_that_is_checked() -> None:
    for page in ("README.md", "docs/results.md"):
        found = re.findall(r"<!-- results: (\w+) -->", (ROOT / page).read_text())
        assert found and set(found) <= set(MATRICES)


def cells_of(table: str, arm: str) -> list[str]:
    """The row of an arm in a Markdown table, without its name."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {arm} |"))
    return [text.strip() for text in line.strip("|").split(" | ")][1:]


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
    for page in ("README.md", "docs/results.md"):
        prose = (ROOT / page).read_text().replace(marks("stack_matrix")[0], "\0").partition("\0")[0]
        assert [claim for claim in claims if claim not in " ".join(prose.split())] == [], page


def spelt(share: str) -> str:
    """A range as it stands in a sentence."""
    return share.replace("–", " to ")
