"""The rules for the package: which part may import which, how large and dense it may be, what a setting must say."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

from yardstick import Count, count_folder

import whet
from whet.config import EVERYDAY
from whet.recipe import describe

ROOT = Path(whet.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# handed in or built on top of the plain path
APART = {"fast", "tools", "report", "testing", "adapters"}
HANDS_IN = {"build", "findings", "api", "cli"}  # these may, inside functions
ALLOWED = {
    # package or file of whet -> the parts of whet that it may import; the others are free (loop, api, cli, ...)
    "errors": set(),
    "types": set(),
    "config": set(),
    "recipe": {"config", "errors"},
    "files": {"errors"},
    "text": {"types", "errors", "config"},
    "watch": {"types"},
    "tasks": {"tasks", "types", "errors", "config", "text"},
    "curriculum": {"curriculum", "types", "errors", "config"},
    "model": {"model", "types", "errors", "config", "files"},
    "rollout": {"rollout", "draft", "model", "types", "errors", "config"},
    "learn": {"learn", "model", "types", "errors", "config", "files"},
    "draft": {"draft", "model", "types", "errors", "config"},
    "testing": {"testing", "curriculum", "types", "errors", "config"},
    "cluster": {"cluster", "learn", "rollout", "draft", "model", "types", "errors", "config"},
}
NO_TORCH = {
    "tasks",
    "curriculum",
    "testing",
    "report",
    "types",
    "errors",
    "config",
    "recipe",
    "files",
    "run",
    "problems",
    "estimate",
    "watch",
}
TORCH = {"torch", "transformers", "safetensors", "tokenizers"}

# What the package may be at most. A change that makes a figure better lowers its ceiling.
CEILINGS = {
    "tokens": 294_700,
    "tokens_per_line": 8.9,
    "dense_lines": 5.9,  # per 100 code lines
    "comprehensions": 5.4,  # per 100 code lines
    "nested_comprehensions": 73,
    "walrus_in_comprehension": 13,
    "format_skips": 0,
    "files": 148,
    "classes": 349,
    "imports_in_functions": 160,
    "longest_file": 711,
    "longest_function": 132,
}
SETTINGS = 145
EVERYDAY_SETTINGS = 59
TEST_TOKENS = 454_400


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names imported anywhere in the file, TYPE_CHECKING blocks included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which part imports which"
            names.add(node.module or "")
            if node.module == "whet":
                names |= {f"whet.{alias.name}" for alias in node.names}
    return names


def top_level(path: Path) -> set[str]:
    """Modules of whet that are imported when the file is loaded: not those inside functions or for types alone."""
    found: set[str] = set()
    known = {module_of(other) for other in FILES}
    body = list(ast.parse(path.read_text()).body)
    while body:
        node = body.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            body += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            body += node.body
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return found & known


def module_of(path: Path) -> str:
    return ".".join(("whet", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def test_imports_point_downwards() -> None:
    wrong = {}
    for path in FILES:
        mine = {name.split(".")[1] for name in imports(path) if name.startswith("whet.")}
        if beyond := mine - ALLOWED.get(part_of(path), mine):
            wrong[str(path.relative_to(ROOT))] = beyond
    assert not wrong


def test_the_plain_path_imports_nothing_that_is_handed_in() -> None:
    wrong = {}
    for path in FILES:
        part = part_of(path)
        if part in APART | {"__main__", "__init__"}:
            continue
        reach = top_level(path) if part in HANDS_IN else imports(path)
        mine = {name.split(".")[1] for name in reach if name.startswith("whet.")}
        if mine & APART and part != "cli":  # the table of commands needs the sub-commands
            wrong[str(path.relative_to(ROOT))] = mine & APART
    assert not wrong


def test_no_import_circle() -> None:
    graph = {module_of(path): top_level(path) - {module_of(path)} for path in FILES}
    while free := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, "these modules import each other in a circle, or depend on one that does"


def test_no_torch_above_the_model() -> None:
    light = [path for path in FILES if part_of(path) in NO_TORCH]
    assert not [
        path.name for path in light if {name.split(".")[0] for name in imports(path)} & TORCH
    ]


def test_light_parts_load_without_torch() -> None:
    """Also through what they import: one process, so that nothing was loaded before."""
    code = (
        "import sys, whet, whet.cli, whet.problems, whet.run, whet.estimate\n"
        "import whet.curriculum.build, whet.report.page, whet.tasks.answer_check, whet.testing.contract\n"
        "import whet.adapters.desk, whet.adapters.serve, whet.adapters.client\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def figures(count: Count) -> dict[str, float]:
    """The figures that have a ceiling."""
    values: dict[str, float] = dict(vars(count))
    values["tokens_per_line"] = count.tokens_per_line
    for name in ("dense_lines", "comprehensions"):
        values[name] = count.per_hundred(values[name])
    return values


def test_the_package_stays_below_its_ceilings() -> None:
    measured = figures(count_folder(ROOT))
    assert not {name: measured[name] for name, most in CEILINGS.items() if measured[name] > most}


def test_the_tests_stay_below_their_ceiling() -> None:
    assert count_folder(Path(__file__).parent).tokens <= TEST_TOKENS


def test_names_have_one_meaning() -> None:
    """No file without a noun, and no class name that stands for two things."""
    assert not [p for p in FILES if p.stem in {"utils", "util", "common", "helpers", "misc"}]
    classes = Counter(
        n.name
        for path in FILES
        for n in ast.parse(path.read_text()).body
        if isinstance(n, ast.ClassDef)
    )
    assert not [name for name, count in classes.items() if count > 1]


def test_every_setting_is_meant() -> None:
    """There are few settings, and each says in a sentence what it does."""
    described = {name: meaning for name, _, meaning in describe()}
    assert len(described) <= SETTINGS
    assert len(EVERYDAY) <= EVERYDAY_SETTINGS and described.keys() >= EVERYDAY
    assert not [name for name, meaning in described.items() if not meaning.endswith((".", ")"))]
