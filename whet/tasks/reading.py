"""Where data is, and its rows as a sheet: named columns of plain Python values.

`text.py` calls `open_data` and `find_columns`. Data is a file, a folder, a short name (gsm8k, math500, ...: looked for
in `data_folder`, else $WHET_DATA, then on the hub) or a name on the hub; files are JSONL, JSON (a list of objects) or
parquet. A struct is spread into columns with dotted names, and a column is made on demand, so that a long one costs
nothing where it is not needed. Columns are found by their names in public data (verl, TRL and the usual benchmarks)
or named in the recipe.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from whet import config
from whet.errors import WhetError
from whet.tasks.base import did_you_mean

VARIABLE = "WHET_DATA"
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
# files that pandas converts, and the argument that it needs
CSV = {".csv": "", ".tsv": ', sep="\\t"'}
MOST_COLUMNS = 256  # further keys of JSON objects are ignored: they are data of another kind
EVAL_SPLITS = ("test", "eval", "validation", "val", "dev")
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")
ROLES: dict[str, tuple[str, ...]] = {  # the first name that exists is taken
    "prompt": ("prompt", "problem", "question", "input", "query", "instruction", "messages"),
    "answer": (
        *("answer", "reward_model.ground_truth", "ground_truth", "final_answer"),
        *("target", "expected_answer", "gold", "label"),
    ),
    "solution": ("solution",),
    "id": ("id",),
    "level": ("level", "difficulty"),
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


# ---- where the data is


class Known(NamedTuple):
    """Where a short name is found."""

    hub: str
    splits: Mapping[str, str]  # "train", "test" or both -> their names on the hub
    stems: tuple[str, ...]  # names that its file may have, the preferred one first
    subset: str = ""


_BOTH = {"train": "train", "test": "test"}
_TRAIN = {"train": "train"}
_TEST = {"test": "test"}
# the authors' own set without its hundred repeats of every row
_DAPO = "open-r1/DAPO-Math-17k-Processed"

NAMES: dict[str, Known] = {
    "gsm8k": Known("openai/gsm8k", _BOTH, ("gsm8k",), subset="main"),
    "math": Known("DigitalLearningGmbH/MATH-lighteval", _BOTH, ("math", "math7500", "math5000")),
    "math500": Known("HuggingFaceH4/MATH-500", _TEST, ("math500", "math_500")),
    "aime24": Known(
        "HuggingFaceH4/aime_2024", {"test": "train"}, ("aime24", "aime2024", "aime_2024")
    ),
    "aime25": Known("math-ai/aime25", _TEST, ("aime25", "aime2025", "aime_2025")),
    "amc23": Known("math-ai/amc23", _TEST, ("amc23_40", "amc23", "amc2023")),
    "minerva": Known("math-ai/minervamath", _TEST, ("minerva", "minervamath", "minerva_math")),
    "olympiad": Known(
        "math-ai/olympiadbench", _TEST, ("olympiad", "olympiadbench", "olympiad_bench")
    ),
    "dapo17k": Known(_DAPO, _TRAIN, ("dapo17k", "dapo_math_17k", "dapo-math-17k"), subset="all"),
    "deepscaler": Known(
        "agentica-org/DeepScaleR-Preview-Dataset", _TRAIN, ("deepscaler", "deepscaler40k")
    ),
}


def open_data(entry: config.ProblemSettings, folder: str = "") -> tuple[Sheet, dict[str, str]]:
    """The rows of an entry, and the roles whose column is not to be found by name."""
    if not entry.path:
        raise WhetError(
            "Task text needs data.path: a file, a short name (gsm8k, ...) or a name for `datasets`."
        )
    if entry.path in NAMES:
        return _open_known(entry, folder)
    path = Path(entry.path).expanduser()
    words = split_words(entry.split, isinstance(entry, config.Eval))
    if (
        path.exists()
        or path.name.endswith((*SUFFIXES, *CSV))
        or not _HUB_NAME.fullmatch(entry.path)
    ):
        if not path.exists() and "/" not in entry.path and not path.suffix:
            near = did_you_mean(entry.path, NAMES)
            raise WhetError(
                f'There is no file or short name "{entry.path}" (a hub name is owner/name){near}'
            )
        return read_path(path, words), {}
    return read_hub(entry.path, entry.subset, entry.split, words), {}


def split_words(split: str, evaluation: bool) -> tuple[str, ...]:
    """Words that name a split in file names.

    >>> split_words("", True), split_words("", False), split_words("validation", False)
    (('test', 'eval', 'validation', 'val', 'dev'), ('train',), ('validation',))
    """
    if not split:
        return EVAL_SPLITS if evaluation else ("train",)
    return {"test": ("test", "eval"), "eval": ("eval", "test")}.get(split, (split,))


def _open_known(entry: config.ProblemSettings, folder: str) -> tuple[Sheet, dict[str, str]]:
    known = NAMES[entry.path]
    evaluation = isinstance(entry, config.Eval)
    split = {"eval": "test"}.get(entry.split, entry.split) or ("test" if evaluation else "train")
    if not entry.split and split not in known.splits:
        (split,) = known.splits
    if split not in known.splits:
        raise WhetError(
            f"{entry.path} has no split {entry.split}; it has {' and '.join(known.splits)}."
        )
    words = split_words(split, evaluation)
    folder = folder or os.environ.get(VARIABLE, "")
    if folder:
        place = Path(folder).expanduser()
        if not place.is_dir():
            raise WhetError(f"There is no data folder at {folder} (data_folder, or ${VARIABLE}).")
        pairs = [(stem, word) for stem in known.stems for word in words]
        names = [name for s, w in pairs for name in (f"{w}_{s}", f"{s}_{w}", f"{s}-{w}")]
        paths = [place / f"{name}{suffix}" for name in names for suffix in SUFFIXES]
        paths += [place / f"{stem}{suffix}" for stem in known.stems for suffix in ("", *SUFFIXES)]
        if path := next(filter(Path.exists, paths), None):
            return read_path(path, words), {}
    try:
        sheet = read_hub(known.hub, entry.subset or known.subset, known.splits[split], words)
    except WhetError as error:
        file = f"{words[0]}_{known.stems[0]}.parquet (or .jsonl)"
        where = (
            f"{folder} holds no {file}"
            if folder
            else f"data_folder (or ${VARIABLE}) names no folder with {file}"
        )
        raise WhetError(f"{entry.path}: {where}, and from the hub: {error}") from None
    # numbers from 0 on, or none at all: two sets in one recipe would clash
    return sheet, {"id": ""}


# ---- its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The rows of a file, by columns."""

    origin: str  # the file, folder or hub name, for messages
    rows: int
    names: tuple[str, ...]
    column: Callable[[str], list[Any]]
    place: Callable[[int], str]  # where a row is: "line 3"
    # Column -> its first row without the key. A null is no hole: JSON objects differ in their keys, tables do not.
    holes: Mapping[str, int] = field(default_factory=dict)


def read_path(path: Path, splits: Sequence[str]) -> Sheet:
    """A file; or the files of a folder for the first of `splits` that has any, else all if none is named by a split."""
    if not path.is_dir():
        return read_file(path)
    if any((path / name).is_file() for name in SAVED_BY_DATASETS):
        saved = need("datasets", f"Reading {path}, which was saved by datasets,").load_from_disk(
            str(path)
        )
        if isinstance(saved, dict):
            saved = saved[pick_split(list(saved), splits, str(path))]
        return sheet_of_arrow(saved.with_format("arrow")[:], str(path))
    inside = [*path.iterdir(), *((path / "data").iterdir() if (path / "data").is_dir() else ())]
    files = sorted(
        p
        for p in inside
        if p.name.endswith(SUFFIXES) and not p.name.startswith((".", "dataset_info"))
    )
    if not files:
        raise WhetError(f"{path} holds no {', '.join(SUFFIXES)} file.")
    words = {file: set(re.split(r"[-_.]", file.name.lower())) for file in files}
    chosen = next(
        (some for split in splits if (some := [file for file in files if split in words[file]])),
        None,
    )
    if chosen is None and any(words[file] & {"train", *EVAL_SPLITS} for file in files):
        raise WhetError(
            f"{path} holds no file of the split {' or '.join(splits)}; it holds "
            f"{', '.join(file.name for file in files[:8])}{' ...' if len(files) > 8 else ''}."
        )
    return join_sheets([read_file(file) for file in chosen or files], str(path))


def read_file(path: Path) -> Sheet:
    _refuse_unreadable(path)
    try:
        if path.name.endswith(".parquet"):
            parquet, arrow = (
                need(module, f"Reading {path}") for module in ("pyarrow.parquet", "pyarrow")
            )
            try:
                return sheet_of_arrow(parquet.ParquetFile(path).read(), str(path))
            except arrow.ArrowException as error:
                raise WhetError(
                    f"{path} is no parquet file that can be read: {_one_line(error)}."
                ) from None
        opened: Any = gzip.open if path.name.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            if path.name.endswith((".json", ".json.gz")):  # many a .json file holds JSON lines
                first = next((text for line in file if (text := line.strip())), "")
                file.seek(0)
                if first.startswith("["):
                    return sheet_of_rows(enumerate(_parse(file.read(), path), 1), str(path), "row")
            rows = (
                (line, _parse(text, path, line))
                for line, text in enumerate(file, 1)
                if text.strip()
            )
            return sheet_of_rows(rows, str(path), "line")
    except FileNotFoundError:
        raise WhetError(f"There is no data file at {path}.") from None
    except UnicodeDecodeError:
        raise WhetError(f"{path} is not UTF-8 text.") from None
    except (OSError, EOFError) as error:
        raise WhetError(
            f"The data file {path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None


def _refuse_unreadable(path: Path) -> None:
    """Refuse what has no end or can be read only once, since a resumed run reads its data again; and CSV."""
    if not path.exists():
        return
    if not path.is_file():
        raise WhetError(
            f"{path} is a device or a pipe, not a file; write its content to a file first."
        )
    if path.suffix.lower() in CSV:
        read = f'pandas.read_csv("{path.name}"{CSV[path.suffix.lower()]})'
        convert = f'{read}.to_json("{path.stem}.jsonl", orient="records", lines=True)'
        raise WhetError(
            f"{path} is CSV, but whet reads JSONL, JSON and parquet; in Python, {convert} converts it."
        )


def read_hub(name: str, subset: str, split: str, splits: Sequence[str]) -> Sheet:
    """Fetch `split` (also "train[:100]"), else the first of `splits` that exists, else the only one."""
    datasets = need("datasets", f"Fetching {name} from the hub")
    try:
        split = split or pick_split(
            datasets.get_dataset_split_names(name, subset or None), splits, name
        )
        table = datasets.load_dataset(name, subset or None, split=split).with_format("arrow")[:]
    except WhetError:
        raise
    except Exception as error:  # whatever the network, the hub and many loaders raise
        raise WhetError(
            f"{name} could not be fetched: {type(error).__name__}: {_one_line(error)}."
        ) from None
    return sheet_of_arrow(table, name)


def pick_split(there: Sequence[str], splits: Sequence[str], origin: str) -> str:
    found = next(
        (split for split in splits if split in there), there[0] if len(there) == 1 else None
    )
    if found is None:
        raise WhetError(
            f"{origin} has no split {' or '.join(splits)}; it has {', '.join(there)}: set split."
        )
    return found


def join_sheets(sheets: Sequence[Sheet], origin: str) -> Sheet:
    if len(sheets) == 1:
        return sheets[0]
    starts = [0, *accumulate(sheet.rows for sheet in sheets)]
    names = tuple(dict.fromkeys(name for sheet in sheets for name in sheet.names))

    def column(name: str) -> list[Any]:
        return [v for s in sheets for v in (s.column(name) if name in s.names else [None] * s.rows)]

    def place(row: int) -> str:
        which = bisect_right(starts, row) - 1
        return f"{Path(sheets[which].origin).name}, {sheets[which].place(row - starts[which])}"

    holes: dict[str, int] = {}
    for start, sheet in zip(starts, sheets, strict=False):
        for name in names if sheet.rows else ():
            hole = sheet.holes.get(name, None if name in sheet.names else 0)
            if hole is not None:
                holes.setdefault(name, start + hole)
    return Sheet(
        origin=origin, rows=starts[-1], names=names, column=column, place=place, holes=holes
    )


def sheet_of_arrow(table: Any, origin: str) -> Sheet:
    types = need("pyarrow", f"Reading {origin}").types
    while any(types.is_struct(column.type) for column in table.schema):
        table = table.flatten()
    return Sheet(
        origin=origin,
        rows=table.num_rows,
        names=tuple(dict.fromkeys(table.column_names)),
        column=lambda name: table.column(
            table.column_names.index(name)
        ).to_pylist(),  # the first of two equal names
        place=lambda row: f"row {row + 1}",
    )


def sheet_of_rows(rows: Iterable[tuple[int, Any]], origin: str, unit: str) -> Sheet:
    """`rows`: JSON objects, each after the number of its line (or whatever the `unit` is)."""
    columns: dict[str, list[Any]] = {}
    holes: dict[str, int] = {}
    numbers: list[int] = []

    def fill(name: str, count: int) -> None:
        if len(columns[name]) < count:
            holes.setdefault(name, len(columns[name]))
            columns[name] += [None] * (count - len(columns[name]))

    for count, (number, row) in enumerate(rows):
        if not isinstance(row, dict):
            raise WhetError(
                f'{origin}, {unit} {number} is no JSON object; it should read {{"prompt": ..., ...}}.'
            )
        numbers.append(number)
        for name, value in _flat(row, ""):
            if name not in columns and len(columns) < MOST_COLUMNS:
                columns[name] = []
            if name in columns:
                fill(name, count)
                # a name met twice ("a.b" and {"a": {"b": ...}}) keeps its first value
                if len(columns[name]) == count:
                    columns[name].append(value)
    for name in columns:
        fill(name, len(numbers))
    return Sheet(
        origin=origin,
        rows=len(numbers),
        names=tuple(columns),
        column=columns.__getitem__,
        place=lambda row: f"{unit} {numbers[row]}",
        holes=holes,
    )


def need(module: str, why: str) -> ModuleType:
    """Import an optional library, or raise one sentence."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise WhetError(f'{why} needs the package {package}: pip install "whet[data]".') from None


def _parse(text: str, path: Path, line: int = 0) -> Any:
    """Parse one line of a file, or the whole file."""
    where = f"{path}, line {line}" if line else str(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if line else f"line {error.lineno}, column {error.colno}"
        known = "" if path.name.endswith(SUFFIXES) else "; whet reads JSONL, JSON and parquet"
        raise WhetError(f"{where} is not JSON: {error.msg} at {place}{known}.") from None
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits, brackets 100,000 deep
        raise WhetError(f"{where} cannot be read: {error}.") from None


def _flat(row: Mapping[str, Any], before: str, depth: int = 4) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict) and depth:
            yield from _flat(value, f"{before}{key}.", depth - 1)
        else:
            yield before + key, value


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 300 else text[:297] + "..."


# ---- which column is what


def find_columns(sheet: Sheet, given: Mapping[str, str]) -> dict[str, str]:
    """Role -> column, for the roles that have one. A column given as "" means that there is none.

    Without an answer column the solution also holds the answer (TRL's `prompt` and `solution`).
    """
    for role, name in given.items():
        if role not in ROLES:
            raise WhetError(f'columns has no "{role}"{did_you_mean(role, ROLES)}')
        if name and name not in sheet.names:
            raise WhetError(
                f'{sheet.origin} has no column "{name}"; it has {", ".join(sheet.names)}.'
            )
    found = {
        role: given.get(role, next((n for n in names if n in sheet.names), ""))
        for role, names in ROLES.items()
    }
    if not found["answer"] and "answer" not in given:
        found["answer"] = found["solution"]
    for role in ("prompt", "answer"):
        if not found[role] and (role == "prompt" or role not in given):
            raise WhetError(
                f"{sheet.origin} has no column for the {role} ({', '.join(ROLES[role])}); it has "
                f'{", ".join(sheet.names) or "none"}: name yours by columns = {{ {role} = "..." }}'
                + ('; "" means that there is none.' if role == "answer" else ".")
            )
    return {role: name for role, name in found.items() if name}
