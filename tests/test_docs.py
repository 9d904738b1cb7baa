"""Every code block of README.md and docs/ says how it is checked, and is checked so.

The word behind the language is the mark. `run`: the block is run here, in a folder of its own, with the blocks before
it on its page. `gpu`, `network`: it needs one, and is parsed. `sketch`: it has names of the reader's, and is parsed.
Parsed means: Python by its grammar, TOML by whet's own reader, commands of whet by the real parser of the command line,
without being run. Blocks of text, diff and math have no mark.
"""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from whet.cli import app
from whet.recipe import describe, find_recipe, load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKS = {"run", "gpu", "network", "sketch"}
CODE, PLAIN = {"bash", "python", "toml", "yaml"}, {"text", "diff", "math"}
YOURS = {"my.toml"}  # recipes of the reader's
SETTINGS = {name for name, _, _ in describe()}
# Trainings that end soon: they show that the words of the page work, not that a model learns.
CHEAP = {"steps": 1, "warm_start.0.steps": 2, "curriculum.groups": 2, "curriculum.rollouts": 4}
CHEAP |= {"rollout.max_tokens": 8, "curriculum.starvation": '"relax"', "held_out.size": 10}
CHEAP_CHAIN = CHEAP | {"warm_start.1.steps": 1, "eval.0.limit": 8, "eval.0.max_tokens": 8}
WHET = """#!{python}
import sys
from whet.cli import main

if sys.argv[1] == "train" and not {{"--dry-run", "--resume"}} & set(sys.argv):
    for key, value in ({chain} if "chain" in sys.argv else {cheap}).items():
        sys.argv += ["--set", f"{{key}}={{value}}"]
main()
"""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    fences = [i for i, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, f"{page} has a code block without an end"
    for start, end in zip(fences[::2], fences[1::2], strict=True):
        language, _, mark = lines[start][3:].partition(" ")
        text = "\n".join(lines[start + 1 : end]) + "\n"
        yield Block(str(page.relative_to(ROOT)), start + 1, language, mark, text)


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNS = {
    b.page: [c for c in BLOCKS if c.page == b.page and c.mark == "run"]
    for b in BLOCKS
    if b.mark == "run"
}


def commands(block: Block) -> list[list[str]]:
    """The words of each command, without what sets the environment of one."""
    found = [
        shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()
    ]
    bare = [
        [w for i, w in enumerate(words) if i or not re.match(r"[A-Z_]+=", w)] for words in found
    ]
    return [words for words in bare if words]


def parse_whet(words: list[str]) -> None:
    """Parse as the command line does, options and their types included, and look up settings and recipes."""
    command: Any = typer.main.get_command(app)
    context, name = command.make_context("whet", words[1:]), "whet"
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)
    if name in {"train", "eval", "probe", "doctor"}:
        keys = [
            re.sub(r"\.\d+", "", item.partition("=")[0])
            for item in context.params.get("sets") or []
        ]
        assert set(keys) <= SETTINGS
    recipe = context.params.get("recipe")
    if recipe is not None and str(recipe) not in YOURS | files_of_pages():
        find_recipe(Path(recipe))


def files_of_pages() -> set[str]:
    return {name for block in BLOCKS if (name := file_name(block))}


def file_name(block: Block) -> str:
    """A block whose first line is a comment with a file's name is that file."""
    found = re.match(r"# (\w+\.(?:py|toml))\n", block.text)
    return found[1] if found else ""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_block_says_how_it_is_checked() -> None:
    code = [b for b in BLOCKS if b.language not in PLAIN]
    assert not [b.place for b in code if b.language not in CODE or b.mark not in MARKS]
    assert not [b.place for b in BLOCKS if b.language in PLAIN and b.mark]


@pytest.mark.parametrize(
    "line", ["whet train --cheap", "whet train chain --set learn.rate=1", "whet trian", "whet eval"]
)
def test_a_wrong_command_does_not_parse(line: str) -> None:
    with pytest.raises((AssertionError, typer.TyperException)):
        parse_whet(shlex.split(line))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in CODE], ids=lambda b: b.place)
def test_it_parses(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.text)
    elif block.language == "toml":
        load_config(base=tomllib.loads(block.text))
    elif block.language == "yaml":
        assert yaml.safe_load(block.text)
    else:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        for words in commands(block):
            if words[0] == "whet":
                parse_whet(words)
            elif words[0] == "python" and words[1] != "-m":
                assert (ROOT / words[1]).is_file()
            elif words[0] == "make":
                assert words[1] in targets
            elif words[:2] == ["pip", "install"]:
                named = [name for word in words for name in re.findall(r"\[([\w,]+)\]", word)]
                assert {name for names in named for name in names.split(",")} <= extras.keys()
            else:
                assert words[0] in (".", "git"), f"{block.place}: what is {words[0]}?"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page, found in RUNS.items() if {b.language for b in found} - {"toml"}]
)
def test_blocks_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    whet = bin_folder / "whet"
    whet.write_text(WHET.format(python=sys.executable, cheap=CHEAP, chain=CHEAP_CHAIN))
    whet.chmod(0o755)
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{folder}",
    }
    for block in RUNS[page]:
        if name := file_name(block):
            (folder / name).write_text(block.text)
        shell = ["bash", "-e", "-c", block.text]
        argv = {"bash": shell, "python": [sys.executable, "-c", block.text]}.get(block.language)
        if argv:
            done = subprocess.run(
                argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
            )
            assert done.returncode == 0, (
                f"{block.place}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            )


def test_pictures_are_those_of_the_stored_results(tmp_path: Path) -> None:
    make = load(ROOT / "docs" / "figures" / "make.py")
    stored = {path.name: path.read_text() for path in make.HERE.glob("*.svg")}
    make.HERE = tmp_path
    make.main()
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn.keys() <= stored.keys()
    assert not [name for name, text in drawn.items() if stored[name] != text]


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [
        str(path.relative_to(ROOT / "docs")) for path in PAGES if path.is_relative_to(ROOT / "docs")
    ]
    assert not [page for page in pages if f": {page}\n" not in menu]


def test_a_site_that_loads_from_a_network_is_refused(tmp_path: Path) -> None:
    hooks = load(ROOT / "docs" / "hooks.py")
    (tmp_path / "a.html").write_text(
        '<a href="https://x.org">read</a><img src="b.svg"><script src="c.js"></script>'
    )
    (tmp_path / "b.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    assert hooks.foreign(tmp_path) == []
    (tmp_path / "a.html").write_text(
        '<script src="//x.org/c.js"></script><link rel="stylesheet" href="https://x.org/f">'
    )
    (tmp_path / "d.css").write_text("@font-face { src: url('https://x.org/font') }")
    assert [found.split(": ")[0] for found in hooks.foreign(tmp_path)] == [
        "a.html",
        "a.html",
        "d.css",
    ]
    with pytest.raises(SystemExit, match="would load from a network"):
        hooks.on_post_build({"site_dir": str(tmp_path)})


def test_links_out_of_the_site_become_paths() -> None:
    hooks = load(ROOT / "docs" / "hooks.py")
    page: Any = type("Page", (), {"file": type("File", (), {"src_uri": "details/speed.md"})})
    text = "```bash run\nls\n```\nSee [the file](../../whet/loop.py), [SPEED](../speed.md) and [it](https://x.org)."
    said = hooks.on_page_markdown(text, page)
    assert (
        said
        == "```bash\nls\n```\nSee the file: `whet/loop.py`, [SPEED](../speed.md) and [it](https://x.org)."
    )
