"""Under what a benchmark was run: hardware, versions, commit, date. A figure without them is not a result."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import whet

OPTIONAL = ("triton", "vllm")
"""Packages whose versions are told where they are installed: a run may do without."""


def circumstances() -> dict[str, Any]:
    return {
        "hardware": {"cpu": _cpu_model(), "cores": os.cpu_count(), **_gpu(), **_machine()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "whet": whet.__version__,
            **installed(OPTIONAL),
        },
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Their versions, read from what the installer wrote: nothing is imported, as that may take a GPU's memory.

    >>> installed(["no-such-package"])
    {}
    """
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _gpu() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _machine() -> dict[str, str]:
    """Eight digits of the number that the system drew when it started: machines of one kind are told apart by it."""
    try:
        return {"machine": Path("/proc/sys/kernel/random/boot_id").read_text()[:8]}
    except OSError:
        return {}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _commit() -> str:
    """With "-dirty" when tracked files differ from it: the commit alone would then name other code. A copy without its
    history is given it as WHET_COMMIT."""
    if given := os.environ.get("WHET_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
