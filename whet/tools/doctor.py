"""The lines of `whet doctor`: what this machine has, for a bug report, and whether a model can be trained on it.

The command line calls `examine`. What the extras need is read from the installed package. Of a model only its config is
read (for a hub name that is one small download): the network is built without weights and refused here if training
would refuse it. With a recipe whose model is in a folder, data and prompts are checked too (`resolve.check_run`), and
the lines are those of `whet train --dry-run`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import __version__, config
from whet.errors import WhetError
from whet.pictures import installed
from whet.processes import available_cores

if TYPE_CHECKING:
    from whet.model.memory import Finding

PACKAGES = ("numpy", "pydantic", "torch", "transformers", "safetensors", "math-verify")
# What the extras are for. Those of developers and those that have lines of their own are not listed.
EXTRAS = {
    "data": "data files of datasets, and GGUF",
    "lora": "adapters (model.lora)",
    "gym": "problems of reasoning-gym",
    "kernels": "kernels for a GPU",
    "ray": "several machines ([cluster])",
    "trl": "curricula in TRL's trainer",
    "verl": "curricula in verl's trainer",
    "plot": "figures of benchmarks",
}
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RAY_ADDRESS",
)


def examine(model: str | None = None, settings: config.Config | None = None) -> list[Finding]:
    """The machine, and the model where one is named. `settings`: the recipe to plan for, else the defaults."""
    findings: list[Finding] = [
        ("whet", f"{__version__}, in {Path(__file__).parents[1]}", True),
        (
            "python",
            f"{platform.python_version()} ({platform.python_implementation()})",
            sys.version_info >= (3, 11),
        ),
        ("system", platform.platform(), True),
    ]
    for name in PACKAGES:
        version = installed(name)
        findings.append(
            (name, version or 'not installed: pip install "whet[train]"', bool(version))
        )
    findings += _vllm(settings)
    disk = f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB"
    findings += _extras()
    cores = f"{available_cores()} of {os.cpu_count()}, {platform.machine()}"
    said = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    findings += [
        ("cores", cores, True),
        ("free disk here", disk, True),
        ("environment", said or "nothing set", True),
    ]
    if not all(
        fine for name, _, fine in findings if name in ("torch", "transformers", "safetensors")
    ):
        return findings
    findings.append(_device())
    if model is not None or settings is not None:
        chosen = settings or config.Config()
        if model is not None:
            chosen = chosen.model_copy(
                update={"model": chosen.model.model_copy(update={"name": model})}
            )
        findings += _plan(chosen, with_data=settings is not None)
    return findings


def _extras() -> list[Finding]:
    """What is installed of each extra, or what it lacks, which is no fault: no run needs all of them."""
    needed: dict[str, list[str]] = {}
    with suppress(importlib.metadata.PackageNotFoundError):  # a checkout that was never installed
        for line in importlib.metadata.requires("whet") or ():
            if (named := re.search(r"extra == ['\"]([\w-]+)", line)) and named[1] in EXTRAS:
                needed.setdefault(named[1], []).append(re.split(r"[^\w.-]", line)[0])
    findings: list[Finding] = []
    for extra, packages in needed.items():
        found = {name: installed(name) for name in packages}
        lacking = ", ".join(name for name, version in found.items() if not version)
        said = (
            f"lacks {lacking}"
            if lacking
            else ", ".join(f"{name} {version}" for name, version in found.items())
        )
        findings.append((f"whet[{extra}]", f"{said}: {EXTRAS[extra]}", True))
    return findings


def _vllm(settings: config.Config | None) -> list[Finding]:
    """Which vLLM is installed and whether it can serve; where none is, only a recipe that asks for it hears of it."""
    from whet.rollout.vllm_fit import version_of_vllm, vllm_lack

    version = version_of_vllm()
    wanted = settings is not None and settings.rollout.engine == "vllm"
    if lack := vllm_lack(version):
        return [("vllm", lack, False)] if wanted else [("vllm", lack, True)] if version else []
    return [
        (
            "vllm",
            f"{version}: barrier, stream, cut, recompute, keep, drafts on a GPU; no keyed noise",
            True,
        )
    ]


def _device() -> Finding:
    import torch

    from whet.model.memory import bytes_text, free_memory

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} ({capability}, CUDA {torch.version.cuda})"
        return ("device", f"{name}, {bytes_text(free)} of {bytes_text(total)} free", True)
    memory = free_memory(torch.device("cpu"))
    words = (
        "this system does not say how much memory is free"
        if memory is None
        else f"{bytes_text(memory)} free"
    )
    return ("device", f"CPU, {torch.get_num_threads()} threads, {words}", True)


def _plan(settings: config.Config, *, with_data: bool) -> list[Finding]:
    """The plan of a run, with its data where the tokenizer is at hand; else of the model alone."""
    from whet.findings import model_findings, size_up_here
    from whet.resolve import check_run

    try:
        network = skeleton_of(settings)
        footprint = size_up_here(network, settings)
    except WhetError as error:
        return [("model", f"refused: {error}", False)]
    name = settings.model.name
    refused: list[Finding] = []
    if with_data and (
        name == "tiny" or (Path(name).expanduser() / "tokenizer_config.json").is_file()
    ):
        try:
            return check_run(settings).findings()
        except WhetError as error:
            refused = [("recipe", f"refused: {error}", False)]
    return [*refused, *model_findings(network, footprint)]


def skeleton_of(settings: config.Config) -> Any:
    """The model without its weights, for which its config is enough."""
    from whet.model.load import build_skeleton, check_model
    from whet.model.lora import check_lora
    from whet.resolve import tiny_skeleton

    model = settings.model
    if model.name == "tiny" or Path(model.name).expanduser().is_dir():
        return check_model(model) or tiny_skeleton(settings)
    network = build_skeleton(_config_folder(model.name))
    if model.lora.rank:
        check_lora(network, model.lora)
    return network


def _config_folder(name: str) -> Path:
    """A folder with the model's config.json; of a hub name, nothing else is fetched."""
    from huggingface_hub import snapshot_download

    from whet.model.load import locate_model
    from whet.model.names import HUB_NAME

    if (hub := HUB_NAME.fullmatch(name)) is not None:
        for cached in (True, False):
            # whatever it is, the last line meets it again and has a sentence for it
            with suppress(Exception):
                wanted = {
                    "revision": hub[2],
                    "allow_patterns": ["config.json"],
                    "local_files_only": cached,
                }
                folder = Path(snapshot_download(hub[1], **wanted))
                if (folder / "config.json").is_file():
                    return folder
    return locate_model(name).folder
