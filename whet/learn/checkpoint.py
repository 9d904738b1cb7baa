"""A checkpoint: a Hugging Face or peft folder, and below it in `state/` all that a run needs to go on.

    config.json, model.safetensors, tokenizer.json, ...   loads with from_pretrained, or in a serving engine
    (adapter_config.json, adapter_model.safetensors, ...  under LoRA: the same of a peft folder)
    state/NAME.safetensors, NAME.npz, NAME.json           tensors, arrays, states
    drafter/                                              of a run that trains one: a folder for a serving engine
    manifest.json                                         written last: size and sha256 of every file above

The state has its own folder because serving engines load every *.safetensors they find beside the
weights. Nothing is ever read by pickle, and a folder that holds one is refused. The loop decides what
goes in and `whet.run` where; torch is imported only by those who need tensors, so that reports need none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet import files
from whet.errors import WhetError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
HASH_THREADS = 4


class TensorFiles(Mapping[str, "dict[str, Tensor]"]):
    """Name to tensors, read from the disk at each access: masters and moments are three times a model."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self._paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    folder: Path
    tensors: Mapping[str, dict[str, Tensor]]
    arrays: Mapping[str, dict[str, np.ndarray]]
    states: Mapping[str, Any]


def save_checkpoint(
    folder: Path,
    *,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Mapping[str, Mapping[str, Tensor]],
    arrays: Mapping[str, Mapping[str, np.ndarray]],
    states: Mapping[str, Any],
    beside: Callable[[Path], object] | None = None,
) -> None:
    """`folder` appears whole, and replaces an earlier one; until then, and after any failure, that one stands.

    States are JSON: tuples come back as lists, keys as strings. `beside` writes what else belongs into the folder.
    """
    tmp = files.temporary(folder)
    files.remove_tree(tmp)
    files.make_folder(tmp / STATE)

    def fill(path: Path) -> None:
        if model is not None:
            _write_model(model, path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        for name, entry in tensors.items():
            _write_tensors(path / STATE / f"{name}.safetensors", entry)
        for name, table in arrays.items():
            _write_arrays(path / STATE / f"{name}.npz", table)
        for name, state in states.items():
            (path / STATE / f"{name}.json").write_text(json.dumps(state))
        if beside is not None:
            beside(path)
        (path / MANIFEST).write_text(json.dumps(_manifest(path), indent=1))

    try:
        files.write_into(tmp, fill)
        files.publish(tmp, folder)
    except Exception:
        with contextlib.suppress(WhetError):
            files.remove_tree(tmp)  # a full disk needs the space back
        raise


def load_checkpoint(folder: Path) -> Checkpoint:
    """Arrays and states are read, tensors when asked for. Believes the files: `verify_checkpoint` is the judge."""
    try:
        listed = [Path(name) for name in _read_manifest(folder)]

        def state_files(suffix: str) -> dict[str, Path]:
            return {p.stem: folder / p for p in listed if p.parent == Path(STATE) and p.suffix == suffix}

        return Checkpoint(
            folder=folder,
            tensors=TensorFiles(state_files(".safetensors")),
            arrays={name: _read_arrays(path) for name, path in state_files(".npz").items()},
            states={name: json.loads(path.read_text()) for name, path in state_files(".json").items()},
        )
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise WhetError(f"The checkpoint {folder} cannot be read: {error}.") from error


def verify_checkpoint(folder: Path) -> str | None:
    """None when every file is as it was written, else one sentence that says what is wrong."""
    try:
        pickles = [path.name for path in folder.rglob("*") if path.suffix in PICKLES]
        if pickles:
            return f"it holds {pickles[0]}, and files that run code when read are refused"
        listed = _read_manifest(folder)
        for name, (size, _) in listed.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        for name, digest in _hashes(folder, list(listed)).items():
            if digest != listed[name][1]:
                return f"{name} was changed or damaged (its hash is wrong)"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def load_weights_into(model: PreTrainedModel, folder: Path) -> None:
    """The saved weights, copied into the very tensors the model has, so that whatever shares them stays valid.

    Of a model with adapters these alone: what they stand on is frozen, and not saved.
    """
    import torch

    from whet.model.lora import is_lora, load_adapter_weights

    if is_lora(model):
        load_adapter_weights(model, folder)
        return
    live = model.state_dict()  # shares storage with the parameters
    reached = set()
    with torch.no_grad():
        for name, tensor in _read_weights(model, folder, set(live)):
            if live[name].shape != tensor.shape:
                shapes = f"{name} is {tuple(tensor.shape)} there and {tuple(live[name].shape)} in the model"
                raise WhetError(f"The weights in {folder} are those of another model: {shapes}.")
            live[name].copy_(tensor)
            reached.add(live[name].data_ptr())
    missing = [name for name, tensor in live.items() if tensor.data_ptr() not in reached]  # tied weights are saved once
    if missing:
        raise WhetError(f"The weights in {folder} are those of another model: {missing[0]} is not among them.")


def _read_weights(model: PreTrainedModel, folder: Path, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise WhetError(f"{folder} holds no model.safetensors.")
    names: set[str] = set()
    for path in paths:
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    if not names <= wanted:  # transformers saves some networks under other names and shapes than it runs them with
        yield from _converted_weights(model, folder)
        return
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a file is no mapping)
                yield name, file.get_tensor(name)


def _converted_weights(model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """A second model in main memory: dear, but only transformers knows how to undo its own renaming.

    It is read in the widest type of the live one, from which every narrower copy is exact.
    """
    import functools

    import torch

    widest = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()})
    with _quiet_transformers():
        twin = type(model).from_pretrained(folder, dtype=widest, use_safetensors=True, local_files_only=True)
    if twin.state_dict().keys() != model.state_dict().keys():
        raise WhetError(f"The weights in {folder} are those of another model: their names differ.")
    yield from twin.state_dict().items()


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    from whet.model.lora import is_lora, save_lora

    if is_lora(model):
        save_lora(model, folder)
    else:
        _write_plain(model, folder)
    if model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")


def _write_plain(model: PreTrainedModel, folder: Path) -> None:
    from transformers import GenerationConfig

    dtype, generation = model.config.dtype, model.generation_config
    try:
        # transformers refuses to save generation settings it calls inconsistent, which many published models have.
        model.generation_config = GenerationConfig()
        with _quiet_transformers():
            model.save_pretrained(folder)
    finally:
        model.config.dtype, model.generation_config = dtype, generation


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars: they would tear the run's own display."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    taken = 0
    for name, tensor in sorted(plain.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < taken:  # safetensors knows no aliases, and tied weights are some
            plain[name] = tensor.to("cpu", copy=True)
        taken = max(taken, tensor.data_ptr() + tensor.nbytes)
    save_file(plain, path)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    assert not any(array.dtype.hasobject for array in arrays.values()), f"{path.name}: objects would need pickle"
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _manifest(folder: Path) -> dict[str, Any]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    digests = _hashes(folder, names)
    return {
        "format": FORMAT,
        "files": {name: {"size": (folder / name).stat().st_size, "sha256": digests[name]} for name in names},
    }


def _hashes(folder: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # hashing frees the interpreter
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """(size, sha256) of every file. Raises OSError or ValueError with the reason in words."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{MANIFEST} is missing, so it was never finished")
    broken = ValueError(f"{MANIFEST} is unreadable")
    try:
        manifest = json.loads(path.read_bytes())
        version = int(manifest["format"])
    except (ValueError, KeyError, TypeError, OverflowError):
        raise broken from None
    if version > FORMAT:
        raise ValueError(f"it was written by a newer whet (format {version}, this one reads up to {FORMAT})")
    try:
        return {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise broken from None
