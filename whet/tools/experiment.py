"""Runs an experiment: several arms from one start, side by side as processes, each with its recipe.

`whet demo` and the studies in benchmarks/ build on it. An arm is an ordinary `whet train` process,
followed through its run folder; `whet.report` reads and compares the folders afterwards. `circumstances` goes into
every JSON result: a figure without its machine, versions and commit is not a result.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from whet import __version__, config, files
from whet.errors import WhetError
from whet.pictures import installed
from whet.processes import available_cores
from whet.recipe import dump_config
from whet.report.live import follow
from whet.run import CONFIG, has_collapsed, is_in_use

OPTIONAL = ("triton", "vllm")  # packages whose versions are recorded where they are installed
# exit codes of an arm that a signal stopped: the others go on
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def train_arms(arms: Mapping[Path, config.Config], console: Console) -> None:
    """Trains as many arms at a time as there are cores; a failed arm ends them all with its own words."""
    if busy := next(filter(is_in_use, arms), None):  # before one of the others is removed
        raise WhetError(
            f"{busy} is in use by another process: wait for it to end, or choose another --out."
        )
    for folder in arms:
        replace_run(folder)
    queue, running = list(arms), dict[Path, subprocess.Popen[bytes]]()

    def alive() -> bool:
        """Starts what can start and notices what ended; the live view calls it a few times per second."""
        for folder, process in list(running.items()):
            if process.poll() is not None:
                del running[folder]
                if process.returncode not in (0, *STOPPED) and not has_collapsed(folder):
                    raise WhetError(
                        f"The arm {folder.name} failed: {last_words(folder, process.returncode)}"
                    )
        while queue and len(running) < available_cores():
            folder = queue.pop(0)
            running[folder] = start_run(folder, arms[folder])
        return bool(running)

    try:
        follow(name_arms(list(arms)), alive, console=console)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def name_arms(folders: list[Path]) -> dict[str, Path]:
    """Names each folder by its path from the folder that holds them all."""
    top = os.path.commonpath([folder.parent for folder in folders]) if folders else ""
    return {folder.relative_to(top).as_posix(): folder for folder in folders}


def start_run(
    folder: Path, settings: config.Config, threads: int | None = 1
) -> subprocess.Popen[bytes]:
    """Starts the process of a run, or resumes it; without `threads` it takes what the environment says."""
    recipe = folder.with_suffix(".toml")
    files.write_text(recipe, dump_config(settings))
    words = ["--resume"] if (folder / CONFIG).is_file() else [str(recipe)]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    # the process has its own handle; earlier words are kept
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "whet", "train", *words, "--out", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def last_words(folder: Path, code: int) -> str:
    """The last line that the process of a run printed."""
    words = folder.with_suffix(".log").read_text(errors="replace").strip().splitlines()[-1:]
    return " ".join(words).removeprefix("whet: ") or f"code {code}"


def replace_run(folder: Path) -> None:
    """Removes an earlier run and its log; anything else at its place is refused and left alone."""
    if folder.exists():
        if not (folder / CONFIG).is_file():
            raise WhetError(
                f"{folder} is in the way and holds no run; move it, or choose another --out."
            )
        shutil.rmtree(folder)
    folder.with_suffix(".log").unlink(missing_ok=True)


def circumstances() -> dict[str, Any]:
    """Hardware, versions, commit and date."""
    import torch
    import transformers

    cpu = platform.processor() or "unknown"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    hardware: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count()}
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    # eight digits of a number drawn when the system started tell machines of one kind apart
    with suppress(OSError):
        hardware["machine"] = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "whet": __version__,
    }
    # As the installer wrote them: an import may take a GPU's memory.
    versions |= {name: version for name in OPTIONAL if (version := installed(name))}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"hardware": hardware, "versions": versions, "commit": _commit(), "date": date}


def _commit() -> str:
    """The commit, with "-dirty" where tracked files differ from it: the commit alone would then name other code.

    A copy without its history is given the commit as WHET_COMMIT.
    """
    if given := os.environ.get("WHET_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
