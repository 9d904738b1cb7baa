"""The rules of the house: who may import whom, how long a file may grow, and that every knob is meant."""

import ast
import subprocess
import sys
from pathlib import Path

import whet
from whet.recipe import describe

ROOT = Path(whet.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

ALLOWED = {
    # package or file of whet -> the parts of whet it may import; all others are free (loop, api, cli, ...)
    "errors": set(),
    "types": set(),
    "config": set(),
    "override": {"errors"},
    "recipe": {"config", "errors", "override"},
    "files": {"errors"},
    "tasks": {"tasks", "types", "errors", "config", "text"},
    "curriculum": {"curriculum", "types", "errors", "config"},
    "model": {"model", "types", "errors", "config", "files"},
    "rollout": {"rollout", "draft", "model", "types", "errors", "config"},
    "learn": {"learn", "model", "types", "errors", "config", "files"},
    "draft": {"draft", "model", "types", "errors", "config"},
    "text": {"types", "errors", "config", "spelling"},
    "spelling": set(),
    "metrics": {"types"},
    "advice": set(),
    "intervals": set(),
    "votes": {"types"},
    "probe": {"probe", "types", "errors", "intervals", "eval", "rollout", "curriculum"},
    "report": {"report", "types", "errors", "config", "recipe", "run", "files", "text", "probe"},
}
NO_TORCH = {
    "errors",
    "types",
    "config",
    "override",
    "recipe",
    "files",
    "tasks",
    "curriculum",
    "run",
    "problems",
    "budget",
    "report",
    "metrics",
    "advice",
    "intervals",
    "votes",
    "probe",
    "measure",
    "prepare",
    "spelling",
}
TORCH = {"torch", "transformers", "safetensors", "tokenizers"}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names imported anywhere in the file, TYPE_CHECKING blocks included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            names.add(node.module or "")
            if node.module == "whet":
                names |= {f"whet.{alias.name}" for alias in node.names}
    return names


def test_imports_point_downwards() -> None:
    wrong = {}
    for path in FILES:
        mine = {name.split(".")[1] for name in imports(path) if name.startswith("whet.")}
        if beyond := mine - ALLOWED.get(part_of(path), mine):
            wrong[str(path.relative_to(ROOT))] = beyond
    assert not wrong


def test_no_torch_above_the_model() -> None:
    light = [path for path in FILES if part_of(path) in NO_TORCH]
    assert not [path.name for path in light if {name.split(".")[0] for name in imports(path)} & TORCH]


def test_light_parts_load_without_torch() -> None:
    """Also through what they import: one process, so that nothing was loaded before."""
    code = (
        "import sys, whet, whet.cli, whet.assembly, whet.loop, whet.api, whet.tools.measure, whet.problems, whet.run\n"
        "import whet.curriculum.build, whet.tools.probe, whet.report.page, whet.tasks.golds\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_functions_fit() -> None:
    long = []
    for path in FILES:
        text = path.read_text()
        long += [path.name] * (text.count("\n") > 600)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:
                long.append(f"{path.name}:{node.lineno} {node.name}")
    assert not long


def test_no_file_without_a_noun() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "util", "common", "helpers", "misc"}]


def test_every_knob_is_known() -> None:
    """A new setting is a visible decision: it changes this number, and says what it means."""
    described = describe()
    assert len(described) == 144
    silent = [name for name, _, meaning in described if not meaning]
    assert len(silent) < 30, "most settings carry a sentence; a plain name may go without"
