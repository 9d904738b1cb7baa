"""The package outside its checkout: what the wheel holds, that it runs in an empty folder, and that it loads fast."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from small_run import SMALL

import whet

ROOT = Path(__file__).parents[1]
HEAVY = {"numpy", "pydantic", "typer", "rich", "torch", "transformers"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="whet[dev] has it")
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the sdist, so that it shows that the sdist holds all that a wheel needs."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, with an environment beside it that holds the wheel, over the packages of this one."""
    folder = tmp_path_factory.mktemp("place")
    environment = folder.with_name("environment")
    run([sys.executable, "-m", "venv", "--without-pip", environment], folder)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "over.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        environment / "bin/python",
        "install",
        "--quiet",
    ]
    run([*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel], folder)
    return folder


def build(source: Path, target: str, out: Path) -> Path:
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out], source)
    (built,) = out.iterdir()
    return built


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    """What the command prints, run where nothing points to the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(place: Path, *arguments: str) -> str:
    return run([place.with_name("environment") / "bin/whet", *arguments], place, COLUMNS="200")


def test_import_whet_loads_nothing_heavy() -> None:
    loaded = run([sys.executable, "-c", "import sys, whet; print(*sys.modules)"], ROOT).split()
    assert not HEAVY & set(loaded) and {name for name in loaded if name.startswith("whet")} == {
        "whet"
    }


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("whet tr", "train"),
        ("whet train gs", "gsm8k"),
        ("whet train papers/speed-r", "papers/speed-rloo"),
    ],
)
def test_a_shell_completes_commands_and_recipes(words: str, offered: str) -> None:
    asked = {
        "_WHET_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['whet']; from whet.cli import main; main()",
    ]
    assert run([*command], ROOT, **asked).split() == [offered]


def test_the_wheel_holds_every_file_of_the_package_and_the_recipes(
    wheel: Path, sdist: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        path for part in ("whet", "recipes") for path in (ROOT / part).rglob("*") if path.is_file()
    }
    names = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert held == {f"whet/{name}" if name.startswith("recipes/") else name for name in names}
    assert "whet/py.typed" in held and "whet/recipes/gsm8k.toml" in held
    assert wheel.name == f"whet-{whet.__version__}-py3-none-any.whl"
    assert sdist.stat().st_size < 5e6  # the laboratory's files stay at home


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(place: Path) -> None:
    """The commands find recipes, page and demo inside the package, not in a checkout."""
    assert installed(place, "--version") == f"whet {whet.__version__}\n"
    where = run(
        [place.with_name("environment") / "bin/python", "-c", "import whet; print(whet.__file__)"],
        place,
    )
    assert Path(where.strip()).is_relative_to(place.with_name("environment"))
    listed = installed(place, "list")
    assert "gsm8k" in listed and "papers/speed-rloo" in listed
    assert "24 steps" in installed(place, "train", "chain", "--dry-run")
    # as in a checkout
    assert "24 steps" in installed(place, "train", "recipes/chain.toml", "--dry-run")
    (place / "sums.jsonl").write_text(
        "".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(64))
    )
    mine = ("--model", "tiny", "--data", "sums.jsonl", "--set", "eval=[]", "--set", "warm_start=[]")
    (place / "gsm8k").mkdir()  # a folder of data
    planned = installed(place, "train", "gsm8k", *mine, "--dry-run", "--settings")
    assert "steps = 100" in planned and "sums.jsonl" in planned


@pytest.mark.slow
def test_a_run_of_the_wheel_has_its_page(place: Path) -> None:
    sets = (*SMALL, "steps=2", "warm_start=[]", "curriculum.name=uniform")
    small = [word for setting in sets for word in ("--set", setting)]
    installed(place, "train", "chain", *small, "--out", "run")
    (place / "run/report.html").unlink()  # the run wrote one, too
    installed(place, "report", "run")
    page = (place / "run/report.html").read_text()
    assert (
        "</html>" in page
        and "<style" in page
        and (place / "run/checkpoints/step_00000002").is_dir()
    )
