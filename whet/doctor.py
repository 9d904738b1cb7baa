"""What this machine has, and whether a model can be trained on it: the lines of `whet doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from whet import config
from whet.errors import WhetError

Finding = tuple[str, str, bool]
"""(what, what was found, whether whet can work with it)."""


def examine(model: str | None) -> list[Finding]:
    findings = [
        ("python", platform.python_version(), sys.version_info >= (3, 11)),
        *(_package(name) for name in ("numpy", "pydantic", "torch", "transformers", "safetensors", "math-verify")),
        ("cores", str(os.cpu_count()), True),
        ("free disk here", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB", True),
    ]
    if findings[3][2]:
        findings.append(_device())
    if model is not None:
        findings.append(_model(model))
    return findings


def _package(name: str) -> Finding:
    try:
        return (name, importlib.metadata.version(name), True)
    except importlib.metadata.PackageNotFoundError:
        return (name, 'not installed: pip install "whet[train]"', False)


def _device() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return ("device", f"CPU, {torch.get_num_threads()} threads", True)
    free, total = torch.cuda.mem_get_info()
    return ("device", f"{torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free", True)


def _model(name: str) -> Finding:
    """Builds the network without weights: whether they fit is a matter of their size on disk."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from whet.model.load import check_model
    from whet.model.twin import refuse_unsupported

    try:
        check_model(config.Model(name=name))
        if name == "tiny":
            return ("model", "tiny, built in", True)
        settings = AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            refuse_unsupported(AutoModelForCausalLM.from_config(settings))
    except (WhetError, OSError, ValueError, KeyError) as error:
        return ("model", str(error).splitlines()[0], False)
    size = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
    return ("model", f"{settings.model_type}, {size / 2**30:.2f} GiB of weights", True)
