"""What a recipe calls data, and where it is: a file, a folder, a short name (gsm8k, math500, ...) or a name on the hub.

Short names are looked for in a folder first (`data_folder`, else $WHET_DATA), then fetched by `datasets`. Called by
`text.py`; files are read in `reading.py`. A new short name is one entry in NAMES.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet import config
from whet.errors import WhetError
from whet.tasks.options import did_you_mean
from whet.tasks.reading import SUFFIXES, Sheet, read_file, read_folder, read_hub

VARIABLE = "WHET_DATA"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Where a short name is found."""

    hub: str
    subset: str = ""
    splits: Mapping[str, str]
    """Which of "train" and "test" there are, and what the hub calls them."""
    stems: tuple[str, ...]
    """What its file may be called, the preferred first."""


_BOTH = {"train": "train", "test": "test"}
_TRAIN = {"train": "train"}
_TEST = {"test": "test"}

NAMES: dict[str, Known] = {
    "gsm8k": Known(hub="openai/gsm8k", subset="main", splits=_BOTH, stems=("gsm8k",)),
    "math": Known(hub="DigitalLearningGmbH/MATH-lighteval", splits=_BOTH, stems=("math", "math7500", "math5000")),
    "math500": Known(hub="HuggingFaceH4/MATH-500", splits=_TEST, stems=("math500", "math_500")),
    "aime24": Known(hub="HuggingFaceH4/aime_2024", splits={"test": "train"}, stems=("aime24", "aime2024", "aime_2024")),
    "aime25": Known(hub="math-ai/aime25", splits=_TEST, stems=("aime25", "aime2025", "aime_2025")),
    "amc23": Known(hub="math-ai/amc23", splits=_TEST, stems=("amc23_40", "amc23", "amc2023")),
    "minerva": Known(hub="math-ai/minervamath", splits=_TEST, stems=("minerva", "minervamath", "minerva_math")),
    "olympiad": Known(hub="math-ai/olympiadbench", splits=_TEST, stems=("olympiad", "olympiadbench", "olympiad_bench")),
    "dapo17k": Known(
        hub="open-r1/DAPO-Math-17k-Processed",  # the authors' own set without its hundred repeats of every row
        subset="all",
        splits=_TRAIN,
        stems=("dapo17k", "dapo_math_17k", "dapo-math-17k"),
    ),
    "deepscaler": Known(
        hub="agentica-org/DeepScaleR-Preview-Dataset", splits=_TRAIN, stems=("deepscaler", "deepscaler40k")
    ),
}


def open_data(entry: config.Problems, folder: str = "") -> tuple[Sheet, dict[str, str]]:
    """The rows of an entry, and the columns to take where they do not find themselves."""
    evaluation = isinstance(entry, config.Eval)
    if not entry.path:
        raise WhetError("Task text needs data.path: a file, a short name (gsm8k, ...) or a name for `datasets`.")
    if entry.path in NAMES:
        return _open_known(entry, evaluation, folder)
    path = Path(entry.path).expanduser()
    if path.is_dir():
        return read_folder(path, split_words(entry.split, evaluation)), {}
    if path.is_file() or path.name.endswith(SUFFIXES) or not _HUB_NAME.fullmatch(entry.path):
        if not path.exists() and "/" not in entry.path and not path.suffix:
            near = did_you_mean(entry.path, NAMES)
            raise WhetError(f'There is no file or short name "{entry.path}" (a hub name is owner/name){near}')
        return read_file(path), {}
    return read_hub(entry.path, entry.subset, entry.split, split_words(entry.split, evaluation)), {}


def split_words(split: str, evaluation: bool) -> tuple[str, ...]:
    """What the files of a split may be called.

    >>> split_words("", True), split_words("", False), split_words("validation", False)
    (('test', 'eval', 'validation', 'val', 'dev'), ('train',), ('validation',))
    """
    if not split:
        return ("test", "eval", "validation", "val", "dev") if evaluation else ("train",)
    return {"test": ("test", "eval"), "eval": ("eval", "test")}.get(split, (split,))


def _open_known(entry: config.Problems, evaluation: bool, folder: str) -> tuple[Sheet, dict[str, str]]:
    known, name = NAMES[entry.path], entry.path
    asked = {"eval": "test"}.get(entry.split, entry.split)
    split = asked or ("test" if evaluation else "train")
    if not asked and split not in known.splits:
        (split,) = known.splits
    if split not in known.splits:
        raise WhetError(f"{name} has no split {entry.split}; it has {' and '.join(known.splits)}.")
    words = split_words(split, evaluation)
    folder = folder or os.environ.get(VARIABLE, "")
    if folder:
        if not Path(folder).expanduser().is_dir():
            raise WhetError(f"There is no data folder at {folder} (data_folder, or ${VARIABLE}).")
        for path in _candidates(Path(folder).expanduser(), known.stems, words):
            if path.is_dir():
                return read_folder(path, words), {}
            if path.is_file():
                return read_file(path), {}
    try:
        sheet = read_hub(known.hub, entry.subset or known.subset, known.splits[split], words)
    except WhetError as error:
        file = f"{words[0]}_{known.stems[0]}.parquet (or .jsonl)"
        where = f"{folder} holds no {file}" if folder else f"data_folder (or ${VARIABLE}) names no folder with {file}"
        raise WhetError(f"{name}: {where}, and from the hub: {error}") from None
    return sheet, {"id": ""}  # numbers from 0 on, or none at all: two sets in one recipe would clash


def _candidates(folder: Path, stems: Sequence[str], words: Sequence[str]) -> Iterator[Path]:
    """A file of the split before one that does not say."""
    for stem in stems:
        for word in words:
            for name in (f"{word}_{stem}", f"{stem}_{word}", f"{stem}-{word}"):
                yield from (folder / f"{name}{suffix}" for suffix in SUFFIXES)
    for stem in stems:
        yield from (folder / f"{stem}{suffix}" for suffix in ("", *SUFFIXES))
