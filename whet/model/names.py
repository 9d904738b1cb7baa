"""What a model's name can mean: a folder, or a name on the hub.

`resolve` asks here before it reads data, and `whet.model.load` when it loads. Nothing here imports torch, so that a
wrong name costs no seconds.
"""

from __future__ import annotations

import re
from pathlib import Path

from whet.errors import WhetError

HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
ADAPTER_CONFIG = "adapter_config.json"  # a folder that holds it is peft's


def find_folder(name: str) -> Path | None:
    """The folder of a model, None for a name on the hub; anything else is refused."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if HUB_NAME.fullmatch(name) is None:
        wanted = 'a Hugging Face folder, a hub name (org/name), or "tiny"'
        raise WhetError(f"There is no model folder at {name}; give {wanted}.")
    return None


def refuse_incomplete(folder: Path) -> None:
    """Refuse a folder that holds no config or no weights."""
    if not (folder / "config.json").is_file():
        raise WhetError(f"{folder} is no Hugging Face folder: it holds no config.json.")
    if not any(folder.glob("*.safetensors")):
        raise WhetError(
            f"{folder} holds no *.safetensors; whet reads no pickled weights, save the model again."
        )


def check_name(name: str) -> None:
    """Refuse a model that cannot be found or used, as far as a look at its folder tells."""
    folder = None if name == "tiny" else find_folder(name)
    if folder is not None and not (folder / ADAPTER_CONFIG).is_file():
        refuse_incomplete(folder)
