"""README.md: short, true to the code it quotes, and without dead links."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_loop_is_quoted_verbatim_from_loop_py() -> None:
    source = (ROOT / "whet" / "loop.py").read_text()
    train = next(
        n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "train"
    )
    quoted = "\n".join(source.splitlines()[train.lineno - 1 : train.end_lineno])
    assert f"```python sketch\n{quoted}\n```" in README


def test_it_is_short() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.S)
    assert len(README.splitlines()) <= 115
    assert len(prose.split()) <= 500
    assert len(re.findall(r"(?<![\w.-])\d+(?:\.\d+)?%?(?![\w.])", prose)) <= 12, "few numbers"


def test_links_of_the_readme_and_the_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    dead = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not dead


def test_files_to_read_first_exist() -> None:
    section = README.partition("## Read the code")[2].partition("\n\n[")[0]
    assert len(re.findall(r"\(whet/[\w/]+\.py\)", section)) == 8
