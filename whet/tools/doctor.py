"""What this machine has, and whether a model can be trained on it: the lines of `whet doctor`.

Of a model only its config is read (a hub name costs one small download): the network is built without weights, refused
here if training would refuse it, and its memory counted by `whet.model.memory`. Nothing is loaded or run.
`shape_of` and `room_on` serve the start of a run (`parts.py`) and the dry run too.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import config
from whet.errors import WhetError

if TYPE_CHECKING:
    import torch

    from whet.estimate import Machine
    from whet.model.memory import ModelShape, Room


Finding = tuple[str, str, bool]
"""(what, what was found, whether whet can work with it)."""

CONTEXT = 4096
"""Planned with where no recipe says how long prompt and response are together."""
WORDS = {
    "masters": "fp32 masters",
    "moments": "Adam moments",
    "reference": "reference for KL",
    "cache": "KV cache",
    "graphs": "graphs (estimate)",
    "replays": "graphs of updates (estimate)",
    "activations": "activations (estimate)",
    "logits": "logits (estimate)",
    "decoding": "decoding (estimate)",
}


def examine(model: str | None = None, settings: config.Config | None = None) -> list[Finding]:
    """The machine, and the model where one is named. `settings`: the recipe to plan for, else the defaults."""
    findings = [
        ("python", platform.python_version(), sys.version_info >= (3, 11)),
        *(_package(name) for name in ("numpy", "pydantic", "torch", "transformers", "safetensors", "math-verify")),
        ("cores", str(os.cpu_count()), True),
        ("free disk here", size_of(shutil.disk_usage(Path.cwd()).free), True),
    ]
    if all(fine for name, _, fine in findings if name in ("torch", "transformers", "safetensors")):
        findings.append(_device())
        if model is not None or settings is not None:
            settings = settings or config.Config()
            if model is not None:
                named = settings.model.model_copy(update={"name": model})
                settings = settings.model_copy(update={"model": named})
            findings += _model(settings)
    return findings


def size_of(number: float) -> str:
    """
    >>> size_of(3 * 2**30), size_of(0.5 * 2**20)
    ('3.0 GiB', '0.5 MiB')
    """
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _package(name: str) -> Finding:
    try:
        return (name, importlib.metadata.version(name), True)
    except importlib.metadata.PackageNotFoundError:
        return (name, 'not installed: pip install "whet[train]"', False)


def _device() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return ("device", f"CPU, {torch.get_num_threads()} threads, {_free_words(free_memory())}", True)
    free, total = torch.cuda.mem_get_info()
    return ("device", f"{torch.cuda.get_device_name()}, {size_of(free)} of {size_of(total)} free", True)


def _model(settings: config.Config) -> list[Finding]:
    """What it is, how fast it would train, and whether it fits."""
    from whet.model.load import pick_device

    try:
        network, shape, settings = shape_of(settings)
        device = pick_device(settings.model)
    except WhetError as error:
        return [("model", f"refused: {error}", False)]
    return [
        ("model", _description(network, shape, settings), True),
        ("path", path_of(shape, settings, device), True),
        decoding_of(network, settings, device),
        *_memory(shape, settings, device),
    ]


def shape_of(settings: config.Config) -> tuple[Any, ModelShape, config.Config]:
    """The model without weights, its measures, and the recipe with context, adapters and way to decode filled in."""
    from whet.model.load import pick_device
    from whet.model.memory import measure

    network, settings = _network(settings)
    settings = _with_context(network, settings)
    device = pick_device(settings.model)
    if device.type != "cuda" or _graphs_lack(network, settings, device):
        settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"graphs": False})})
    return network, measure(network, settings.model.lora.targets), settings


def room_on(device: torch.device, settings: config.Config) -> Room:
    """How a training is laid out on this GPU, with what is free on it now: asked before any weight is there."""
    import torch

    _, shape, settings = shape_of(settings)
    free = torch.cuda.mem_get_info(device)[0]
    return room_within(free, shape, settings, flash=_is_fast(shape, settings, device))


def room_within(free: int, shape: ModelShape, settings: config.Config, *, flash: bool) -> Room:
    """Refused where a run could not go on however small it makes its packs, its pool and its waves of prompts."""
    from whet.model.memory import SPARE, lay_out, least

    room = int(free * (1 - SPARE))
    laid = lay_out(shape, settings, room, flash=flash)
    if least(shape, settings, flash=flash) > free:
        lacking = _lacking(shape, settings, laid.total, room, flash, lend=True)
        raise WhetError(f"This training does not fit on the card: it takes {lacking}.")
    return laid


def room_lines(room: Room, settings: config.Config) -> list[str]:
    """What a run says of its memory before it starts."""
    lines = [f"Memory: {size_of(room.total)} at the peak: {_parts(room)}.", *_sharing_lines(room, settings)]
    if room.within is not None and room.total > room.within:
        lines.append(
            f"Memory is tight: that is {_more(room.total, room.within)}. Packs and waves of prompts are made smaller "
            "when the card is full, which takes time; whet doctor MODEL --recipe RECIPE names settings that fit."
        )
    return lines


def _sharing_lines(room: Room, settings: config.Config) -> list[str]:
    lines = []
    if room.release:
        lines.append(
            f"The KV cache ({size_of(room.plan.cache)}) is released for each update and taken back after it: "
            "with what an update needs it would not fit."
        )
    if room.pages != settings.rollout.pages:
        lines.append(
            f"The KV pool is {room.pages} pages, as many as fit; when they are full, the youngest rollouts wait."
        )
    return lines


def machine_of(settings: config.Config) -> tuple[Machine | None, str, bool]:
    """Where a recipe would run, as `whet.estimate` sees it (None: a card it does not know); its name; whether a GPU."""
    import torch

    from whet.estimate import Machine, card_of
    from whet.model.load import pick_device

    device = pick_device(settings.model)
    if device.type != "cuda":
        threads = torch.get_num_threads()
        name = f"a CPU, {threads} thread{'s' * (threads > 1)}"
        return Machine(name=name, threads=threads), name, False
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "the GPU of another machine"
    card = card_of(name)
    return (Machine(name=name, card=card) if card else None), name, True


def _parts(room: Room) -> str:
    return " + ".join(f"{WORDS.get(name, name)} {size_of(size)}" for name, size in room.plan.parts())


def _network(settings: config.Config) -> tuple[Any, config.Config]:
    """The model without its weights, and the recipe with the adapters that a peft folder brings."""
    import torch

    from whet.model.head import head_of
    from whet.model.load import build_skeleton, check_model, tiny_model
    from whet.model.lora import check_lora, is_peft_folder, read_adapter
    from whet.model.twin import refuse_unsupported

    model = settings.model
    if model.name == "tiny":
        check_model(model)
        with torch.device("meta"):
            shape: Any = {"hidden": model.hidden, "layers": model.layers, "heads": model.heads}
            return tiny_model(64, **shape, context=settings.rollout.context or CONTEXT), settings
    local = Path(model.name).expanduser()
    if local.is_dir():
        check_model(model)
        if is_peft_folder(local):
            told = read_adapter(local)
            targets = told["target_modules"]
            lora = model.lora.model_copy(
                update={"rank": told["r"], "targets": () if isinstance(targets, str) else tuple(targets)}
            )
            settings = settings.model_copy(update={"model": model.model_copy(update={"lora": lora})})
    network = build_skeleton(_config_folder(model.name))
    refuse_unsupported(network)
    head_of(network)
    if not is_peft_folder(local) and model.lora.rank:
        check_lora(network, model.lora)
    return network, settings


def _config_folder(name: str) -> Path:
    """A folder with the model's config.json; of a hub name, nothing else is fetched."""
    from whet.model.load import HUB_NAME, locate_model

    hub = None if Path(name).expanduser().is_dir() else HUB_NAME.fullmatch(name)
    if hub is not None:
        from huggingface_hub import snapshot_download

        for cached in (True, False):
            with suppress(Exception):  # whatever it is, the last line meets it again and has a sentence for it
                wanted = {"revision": hub[2], "allow_patterns": ["config.json"], "local_files_only": cached}
                folder = Path(snapshot_download(hub[1], **wanted))
                if (folder / "config.json").is_file():
                    return folder
    return locate_model(name).folder


def _with_context(network: Any, settings: config.Config) -> config.Config:
    known = getattr(network.config, "max_position_embeddings", None) or CONTEXT
    context = settings.rollout.context or min(CONTEXT, known)
    if context > known:
        raise WhetError(f"rollout.context = {context} is more than the {known} positions of {settings.model.name}.")
    return settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"context": context})})


def _description(network: Any, shape: ModelShape, settings: config.Config) -> str:
    adapters = settings.model.lora.rank * shape.adapted
    trained = f", {adapters / 1e6:,.2f}M more in adapters of rank {settings.model.lora.rank}" if adapters else ""
    return f"{type(network).__name__}, {shape.parameters / 1e6:,.2f}M parameters{trained}, in {settings.model.dtype}"


def path_of(shape: ModelShape, settings: config.Config, device: torch.device) -> str:
    """How updates attend. Rollouts run on whet's engine either way."""
    if _is_fast(shape, settings, device):
        return "fast path: updates run on flash attention over packed sequences"
    if device.type == "cpu":
        why = "on a CPU, good for small models and for trying things out"
    elif shape.softcap:
        why = "soft-capped attention has no flash kernel, so sequences are padded and their scores kept"
    elif not shape.flash:
        why = "its heads have a size that the flash kernel does not take, so sequences are padded"
    elif settings.model.dtype != "bfloat16":
        why = f'sequences are padded in {settings.model.dtype}; the fast path takes model.dtype = "bfloat16"'
    else:
        why = "this GPU is older than the flash kernel (compute capability 8.0), so sequences are padded"
    return f"slow path: {why}"


def decoding_of(network: Any, settings: config.Config, device: torch.device) -> Finding:
    """How rollouts are decoded, and why not faster."""
    from whet.fast.fused import unfusable

    plain = "plain calls of the model's own layers"
    if device.type == "cpu":
        return ("rollouts", plain, True)
    if why := _graphs_lack(network, settings, device):
        return ("rollouts", f"{plain}, since {why}", True)
    if not settings.rollout.graphs:
        return ("rollouts", f"{plain}; rollout.graphs = true captures them as graphs over kernels", True)
    why = "adapters are not merged" if settings.model.lora.rank else unfusable(network)
    return ("rollouts", "graphs over kernels, " + (f"its own layers: {why}" if why else "fused layers"), True)


def _graphs_lack(network: Any, settings: config.Config, device: torch.device) -> str | None:
    """Why rollouts cannot run by graphs, in a few words: what the engine will find."""
    import torch

    from whet.fast.fused import graphs_lack
    from whet.model.memory import cache_shapes

    return graphs_lack(cache_shapes(network), device, getattr(torch, settings.model.dtype))


def _is_fast(shape: ModelShape, settings: config.Config, device: torch.device) -> bool:
    """As `whet.model.packing` decides for each layer."""
    import torch

    if device.type != "cuda" or settings.model.dtype != "bfloat16" or not shape.flash:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _memory(shape: ModelShape, settings: config.Config, device: torch.device) -> list[Finding]:
    import torch

    from whet.model.memory import SPARE, Room, lay_out, plan

    flash = _is_fast(shape, settings, device)
    r = settings.rollout
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if device.type == "cuda" and free is not None:
        room = lay_out(shape, settings, int(free * (1 - SPARE)), flash=flash)
    else:
        room = Room(plan=plan(shape, settings, flash=flash), pages=r.pages, release=False)
    for_what = f"{r.slots} rollouts of {r.context} tokens, packs of {settings.learn.pack_tokens}"
    return [
        ("memory", f"{size_of(room.total)} for {for_what}: {_parts(room)}", True),
        *(("memory", line, True) for line in _sharing_lines(room, settings)),
        _fit(shape, settings, room.total, free, flash, lend=device.type == "cuda"),
    ]


def _fit(
    shape: ModelShape, settings: config.Config, wanted: int, free: int | None, flash: bool, *, lend: bool
) -> Finding:
    from whet.model.memory import SPARE

    if free is None:
        return ("fits", f"unknown: {_free_words(free)}", True)
    room = int(free * (1 - SPARE))
    if wanted <= room:
        return ("fits", f"yes: {size_of(wanted)} of {size_of(free)} free", True)
    return ("fits", f"no: {_lacking(shape, settings, wanted, room, flash, lend=lend)}", False)


def _lacking(shape: ModelShape, settings: config.Config, wanted: int, room: int, flash: bool, *, lend: bool) -> str:
    """How much is missing, and the settings that would mend it."""
    from whet.model.memory import ways_to_fit

    lacking = _more(wanted, room)
    ways = ways_to_fit(shape, settings, room, flash=flash, lend=lend)
    if ways and ways[0][1] <= room:
        return f"{lacking}; enough would be {' or '.join(text for text, _ in ways)}"
    if not ways:
        return f"{lacking}; no setting makes it smaller, so take a smaller model or a larger card"
    helpful = ", ".join(f"{text} (to {size_of(left)})" for text, left in ways[:4])
    return f"{lacking}; no one setting is enough, these help most: {helpful}"


def _more(wanted: int, room: int) -> str:
    return f"{size_of(wanted - room)} more than the {size_of(room)} to be had (a tenth is left free)"


def free_memory() -> int | None:
    """Bytes of main memory to be had, of the machine or left to this container; None where it cannot be told."""
    free = _proc_available()
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        left = max(0, limit - used + _reclaimable())
        free = left if free is None else min(free, left)
    return free


def _proc_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # "max" stands for no limit
        return None


def _reclaimable() -> int:
    """Files that the system keeps in memory while nothing else wants it."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return 0


def _free_words(free: int | None) -> str:
    return "this system does not say how much memory is free" if free is None else f"{size_of(free)} free"
