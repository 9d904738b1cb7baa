"""A trained model as a clean Hugging Face folder with a model card, ready to serve or to share.

`whet export` calls `export_model` with a run (its best checkpoint), a checkpoint, or any model folder. Files are copied
as they are, so the export is what was trained, to the bit; only merging adapters loads weights. A drafter that was
trained beside the model is exported as `drafter/`, for the serving engine that is named. What a run needs to go
on (state, manifest) and anything that could run code stays behind. The card is `whet.card`'s.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet import config, files
from whet.card import HUB_NAME, Facts, front_matter_value, license_of, model_card
from whet.errors import WhetError
from whet.learn.checkpoint import MANIFEST, verify_checkpoint
from whet.recipe import load_config
from whet.run import CHECKPOINTS, CONFIG, best_checkpoint, read_metrics

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "LICENSE*",
    "NOTICE*",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is exported, and the run it came from, if any."""

    folder: Path
    run: Path | None
    adapter: bool
    base: str
    """What the adapters stand on; empty for a full model."""


def export_model(
    source: Path, out: Path, *, merge: bool = False, drafter: str = "", push: str = "", private: bool = True
) -> Path:
    """Writes `out`, whole or not at all; with `push` ("org/name") uploads it too.

    `drafter`: "vllm" or "sglang", and there must be one; empty is vllm, where there is one.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WhetError(f"{out} is there already and not empty; choose another folder.")
    found = find_source(source)
    if merge and not found.adapter:
        raise WhetError(f"{found.folder} holds full weights and no adapters, so there is nothing to merge.")
    if drafter:
        _check_drafter(found, drafter)
    if push:
        _check_push(push, found, merge)
    tmp = files.temporary(out)
    files.remove_tree(tmp)
    files.make_folder(tmp)
    try:
        if merge:
            _merge(found, tmp)
        else:
            _copy(found.folder, tmp, (*MODEL_FILES, *TOKENIZER_FILES))
        _copy_drafter(found, tmp, drafter or "vllm")
        facts = _facts(found, tmp, title=out.resolve().name, merged=merge, push=push)
        files.write_text(tmp / "README.md", model_card(facts))
        files.publish(tmp, out)
    finally:
        files.remove_tree(tmp)
    if push:
        _push(out, push, private)
    return out


def find_source(path: Path) -> Source:
    """The model folder in question, known to be whole as far as its own files tell."""
    from whet.model.lora import base_name, is_peft_folder

    if (path / CONFIG).is_file():
        best = best_checkpoint(path)
        if best is None:
            raise WhetError(f"The run {path} has no whole checkpoint to export yet.")
        folder, run = best, path
    else:
        folder, run = path, None
        if path.resolve().parent.name == CHECKPOINTS and (path.resolve().parent.parent / CONFIG).is_file():
            run = path.resolve().parent.parent
        if (path / MANIFEST).is_file() and (wrong := verify_checkpoint(path)) is not None:
            raise WhetError(f"The checkpoint {path} is not whole: {wrong}.")
    if not folder.is_dir():
        raise WhetError(f"There is no run, checkpoint or model folder at {path}.")
    adapter = is_peft_folder(folder)
    weights, settings = ("adapter_model", "adapter_config.json") if adapter else ("model", "config.json")
    if not (folder / settings).is_file() or not any(folder.glob(f"{weights}*.safetensors")):
        raise WhetError(f"{folder} is no model folder: it wants {settings} and {weights}.safetensors.")
    return Source(folder=folder, run=run, adapter=adapter, base=base_name(folder) if adapter else "")


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Links are followed inside the folder, and to the blobs of the hub's cache, which is made of them."""

    def fill(folder: Path) -> None:
        for pattern in patterns:
            for path in source.glob(pattern):
                if path.is_file():
                    _refuse_outside(source, path)
                    (folder / path.relative_to(source)).parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, folder / path.relative_to(source))

    files.write_into(target, fill)


def _refuse_outside(source: Path, path: Path) -> None:
    """A model folder of unknown origin must not bring files of this machine into what is shared."""
    folder, target = source.resolve(), path.resolve()
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(target.is_relative_to(home) for home in homes):
        raise WhetError(
            f"{path} is a link to {target}, outside the model folder; nothing is exported: put the file itself there."
        )


def _check_drafter(source: Source, engine: str) -> None:
    from whet.draft.export import FOLDER, check_engine

    check_engine(engine)
    if not (source.folder / FOLDER).is_dir():
        raise WhetError(f"{source.folder} holds no {FOLDER}/: it comes from a run that drafts with eagle.")


def _copy_drafter(source: Source, target: Path, engine: str) -> None:
    from whet.draft.export import FOLDER, copy_drafter

    mine = source.folder / FOLDER
    if mine.is_dir():
        for path in (mine, *mine.iterdir()):
            _refuse_outside(source.folder, path)
        files.write_into(target, lambda folder: copy_drafter(mine, folder / FOLDER, engine=engine))


def _merge(source: Source, target: Path) -> None:
    """W + (alpha / rank) B A, summed in fp32 (fp64 for fp64) and written in the adapters' own precision."""
    import torch
    from safetensors import safe_open
    from transformers import GenerationConfig

    from whet.model.load import load_weights, locate_model
    from whet.model.lora import WEIGHTS, load_lora, merge_lora

    place = locate_model(str(source.folder))
    with safe_open(source.folder / WEIGHTS, framework="pt") as file:
        dtype = file.get_tensor(next(iter(file.keys()))).dtype
    model: Any = load_weights(place.folder, torch.promote_types(dtype, torch.float32))
    load_lora(model, source.folder)
    merged = merge_lora(model).to(dtype)
    merged.generation_config = GenerationConfig()  # the base's own is copied, whatever transformers thinks of it
    files.write_into(target, lambda folder: merged.save_pretrained(folder))
    own_tokenizer = (source.folder / "tokenizer_config.json").is_file()
    _copy(place.folder, target, ("generation_config.json", "LICENSE*", "NOTICE*"))
    _copy(source.folder if own_tokenizer else place.folder, target, TOKENIZER_FILES)


def _facts(source: Source, folder: Path, *, title: str, merged: bool, push: str) -> Facts:
    settings, rows = _training(source.run)
    step = _STEP.fullmatch(source.folder.resolve().name)
    base = source.base or (settings.model.name if settings is not None else "")
    on_hub, license_name = _lineage(base, source.folder)
    return Facts(
        title=title,
        adapter=source.adapter and not merged,
        chat=_has_chat_template(folder),
        base=base,
        base_on_hub=on_hub,
        license=license_name,
        settings=settings,
        rows=rows,
        step=int(step[1]) if step and source.run is not None else None,
        repository=push,
    )


def _training(run: Path | None) -> tuple[config.Config | None, list[dict[str, Any]]]:
    """Recipe and metrics; a recipe that this version cannot read is no reason not to export."""
    if run is None:
        return None, []
    try:
        return load_config(run / CONFIG), read_metrics(run)
    except WhetError:
        return None, []


def _lineage(base: str, folder: Path) -> tuple[str, str]:
    """(the base's hub name, its licence) as far as names and the cards in the folders at hand tell."""
    if base == "tiny":
        return "", ""
    local = Path(base).expanduser() if base else folder
    if not local.is_dir():
        return (base.partition("@")[0], "") if HUB_NAME.fullmatch(base) else ("", "")
    try:
        readme = (local / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    told = front_matter_value(readme, "base_model")
    return (told if HUB_NAME.fullmatch(told) else ""), license_of(readme)


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _check_push(name: str, source: Source, merge: bool) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        fine = name.count("/") == 1
    except HFValidationError:
        fine = False
    if not fine:
        raise WhetError(f'"{name}" is no name of a hub repository; give it as org/name.')
    if source.adapter and not merge and Path(source.base).expanduser().is_dir():
        raise WhetError(
            f"The adapters stand on {source.base}, a folder that nobody else has; push them merged, with --merge."
        )


def _push(folder: Path, name: str, private: bool) -> None:
    """A repository that is there already is added to, and stays as public or private as it was."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    kept = f"The model is in {folder}, but was not pushed to {name}"
    try:
        api = HfApi(library_name="whet")
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export from whet")
    except Exception as error:  # the network, the hub and its storage fail in many ways
        response = error.response if isinstance(error, HfHubHTTPError) else None
        status = response.status_code if response is not None else None
        if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
            raise WhetError(f"{kept}: run `hf auth login` with a token that may write there.") from error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WhetError(f"{kept}: {first.rstrip('.')}; `hf upload {name} {folder}` tries again.") from error
