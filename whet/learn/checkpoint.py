"""A checkpoint: a Hugging Face or peft folder, and below it in `state/` everything that a run needs to continue.

    config.json, model.safetensors, tokenizer.json, ...   loads with from_pretrained, or in a serving engine
    (adapter_config.json, adapter_model.safetensors, ...  under LoRA: the same as a peft folder)
    state/NAME.safetensors, NAME.npz, NAME.json           tensors, arrays, states
    drafter/                                              a folder for a serving engine, if the run trains a drafter
    manifest.json                                         written last: size and sha256 of every file above

The state has its own folder because serving engines load every *.safetensors they find beside the weights. Nothing is
ever read by pickle. `run_state.py` decides what goes in, `run.py` where it is written. torch is imported inside the
functions that need tensors, so that reports do not need it.
"""

from __future__ import annotations

import contextlib
import functools
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
_HASH_THREADS = 4  # hashing releases the interpreter lock


class TensorFile(Mapping[str, Any]):
    """Tensors by name, read from the disk at each access: masters and moments are three times the size of a model."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file = safe_open(path, framework="pt")
        self._names = dict.fromkeys(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    folder: Path
    tensors: Mapping[str, Mapping[str, Tensor]]
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
    """Write `folder` as a whole and replace an earlier one; until then, and after any failure, the earlier one stays.
    States are JSON: tuples come back as lists, keys as strings. `beside` writes further files into the folder."""
    with files.preparing(folder) as tmp, files.one_sentence(tmp):
        (tmp / STATE).mkdir()
        write_weights(tmp, model, tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(tmp)
        for name, table in arrays.items():
            assert not any(a.dtype.hasobject for a in table.values()), (
                f"{name}.npz: objects would need pickle"
            )
            np.savez(tmp / STATE / f"{name}.npz", **table)  # type: ignore[arg-type]
        for name, state in states.items():
            (tmp / STATE / f"{name}.json").write_text(json.dumps(state))
        if beside is not None:
            beside(tmp)
        names = sorted(
            file.relative_to(tmp).as_posix() for file in tmp.rglob("*") if file.is_file()
        )
        listed = {
            n: {"size": (tmp / n).stat().st_size, "sha256": sha}
            for n, sha in _hashes(tmp, names).items()
        }
        (tmp / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": listed}, indent=1))


def write_weights(
    folder: Path, model: PreTrainedModel | None, tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """What a checkpoint holds of a model and its learner, into a folder that is being prepared."""
    if model is not None:
        _write_model(model, folder)
    for name, entry in tensors.items():
        _write_tensors(folder / STATE / f"{name}.safetensors", entry)


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    from transformers import GenerationConfig

    from whet.model.load import no_progress_bars
    from whet.model.lora import is_lora, save_lora
    from whet.model.twin import changed

    generation = model.generation_config
    if is_lora(model):
        save_lora(model, folder)
    else:
        # transformers refuses to save generation settings that it calls inconsistent; many published models have such
        # settings, so they are written below as they are.
        plain = GenerationConfig()
        dtype = model.config.dtype
        restored = changed((model, "generation_config", plain), (model.config, "dtype", dtype))
        with restored, no_progress_bars():
            model.save_pretrained(folder)
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    taken = 0
    for name, tensor in sorted(plain.items(), key=lambda item: item[1].data_ptr()):
        # safetensors refuses tensors that share memory, as tied weights do
        if tensor.data_ptr() < taken:
            plain[name] = tensor.to("cpu", copy=True)
        taken = max(taken, tensor.data_ptr() + tensor.nbytes)
    save_file(plain, path)


def _hashes(folder: Path, names: list[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read arrays and states now, tensors on access. The files are trusted: `verify_checkpoint` checks them."""
    tensors = dict[str, TensorFile]()
    arrays = {}
    states = {}
    try:
        for path in (
            folder / name for name in _read_manifest(folder) if Path(name).parent == Path(STATE)
        ):
            if path.suffix == ".safetensors":
                tensors[path.stem] = TensorFile(path)
            elif path.suffix == ".npz":
                arrays[path.stem] = load_arrays(folder, path.stem)
            elif path.suffix == ".json":
                states[path.stem] = json.loads(path.read_text())
        return Checkpoint(folder=folder, tensors=tensors, arrays=arrays, states=states)
    except (OSError, ValueError) as error:
        raise WhetError(f"The checkpoint {folder} cannot be read: {error}.") from error


def load_arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of one name alone; none where the checkpoint has no such file."""
    path = folder / STATE / f"{name}.npz"
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive.items())
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:  # EOFError: an empty .npz
        raise WhetError(f"The checkpoint {folder} cannot be read: {error}.") from error


def verify_checkpoint(folder: Path) -> str | None:
    """None when every file is as it was written, else one sentence that says what is wrong."""
    try:
        pickles = [path.name for path in folder.rglob("*") if path.suffix in PICKLES]
        if pickles:
            return f"it holds {pickles[0]}, and files that run code when read are refused"
        listed = _read_manifest(folder)
        for name, (size, _) in listed.items():  # sizes first: they cost nothing
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


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """(size, sha256) of every file. Raises OSError or ValueError with the reason in words."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{MANIFEST} is missing, so it was never finished")
    version = 0
    listed = None
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
        manifest = json.loads(path.read_bytes())
        version = int(manifest["format"])
        listed = {
            name: (int(entry["size"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
    if version > FORMAT:
        raise ValueError(
            f"it was written by a newer whet (format {version}, this one reads up to {FORMAT})"
        )
    if listed is None:
        raise ValueError(f"{MANIFEST} is unreadable")
    return listed


def load_weights_into(model: PreTrainedModel, folder: Path) -> None:
    """Copy the saved weights into the tensors that the model has, so that everything that shares them stays valid. For
    a model with adapters these are the adapters only: the base below them is frozen and not saved."""
    import torch

    from whet.model.lora import is_lora, load_adapter_weights

    if is_lora(model):
        load_adapter_weights(model, folder)
        return
    live = model.state_dict()  # shares storage with the parameters
    reached = set()
    with torch.no_grad():
        for name, tensor in _read_weights(model, folder):
            if live[name].shape != tensor.shape:
                shapes = f"{name} is {tuple(tensor.shape)} there and {tuple(live[name].shape)} in the model"
                raise WhetError(f"The weights in {folder} are those of another model: {shapes}.")
            live[name].copy_(tensor)
            reached.add(live[name].data_ptr())
    # tied weights are saved once
    missing = [name for name, tensor in live.items() if tensor.data_ptr() not in reached]
    if missing:
        raise WhetError(
            f"The weights in {folder} are those of another model: {missing[0]} is not among them."
        )


def _read_weights(model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, Tensor]]:
    import torch
    from safetensors import safe_open

    from whet.model.load import no_progress_bars

    with contextlib.ExitStack() as stack:
        paths = sorted(folder.glob("model*.safetensors"))
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        if not opened:
            raise WhetError(f"{folder} holds no model.safetensors.")
        names = model.state_dict().keys()
        if all(set(file.keys()) <= names for file in opened):
            for file in opened:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (not a mapping)
            return
    # transformers saves some networks under other names and shapes than it runs them with, and only transformers can
    # undo that: a second model in main memory, in the widest type of the live one, so that every copy is exact.
    widest = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()})
    with no_progress_bars():
        twin = type(model).from_pretrained(
            folder, dtype=widest, use_safetensors=True, local_files_only=True
        )
    if twin.state_dict().keys() != names:
        raise WhetError(f"The weights in {folder} are those of another model: their names differ.")
    yield from twin.state_dict().items()
