r"""Data as sheets: named columns of plain Python values; which column is what; and what a cell says.

`text.py` calls all three. Rows come from JSONL, JSON (a list of objects), parquet, a folder of these, a folder saved
by `datasets`, or the hub. A struct is spread into columns with dotted names, and a column is made on demand, so that
a long one costs nothing where it is not needed. Roles are found by the column names of public data (verl, TRL and the
usual benchmarks) or named in the recipe. Null and blank cells become None, for the caller to count; a cell that makes
no sense (a number for a problem, half a Unicode character) is refused with its place. Answers come in many forms:
text, numbers, booleans, lists of equally right ones (also as JSON text), GSM8K's worked text that ends in "#### 72",
a solution with its \boxed answer.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.errors import WhetError
from whet.tasks.base import Problem, did_you_mean
from whet.tasks.final import boxed

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
SMALL_TEXT = 100  # characters; a column with longer texts is no property of a problem
MOST_COLUMNS = 256  # further keys of JSON objects are ignored: they are data of another kind
SPLITS = ("train", "test", "eval", "validation", "val", "dev")
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
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator: "48/2 = <<48/2=24>>24"
_LEVEL = re.compile(r"(?:level\s*)?(\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The rows of a file, by columns.

    >>> sheet = sheet_of_rows([{"a": 1, "b": {"c": 2}}, {"a": 3}], "x.json", [1, 2], "row")
    >>> sheet.names, sheet.column("b.c"), sheet.place(1), dict(sheet.holes)
    (('a', 'b.c'), [2, None], 'row 2', {'b.c': 1})
    """

    origin: str  # the file, folder or hub name, for messages
    rows: int
    names: tuple[str, ...]
    column: Callable[[str], list[Any]]
    small: Callable[[str], bool]  # whether a column holds only numbers, booleans and short texts
    place: Callable[[int], str]  # where a row is: "line 3"
    # Column -> its first row without the key. A null is no hole: JSON objects differ in their keys, tables do not.
    holes: Mapping[str, int] = field(default_factory=dict)


def read_file(path: Path) -> Sheet:
    try:
        if path.name.endswith(".parquet"):
            return _read_parquet(path)
        opened: Any = gzip.open if path.name.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            if path.name.endswith((".json", ".json.gz")):  # many a .json file holds JSON lines
                first = next((text for line in file if (text := line.strip())), "")
                file.seek(0)
                if first.startswith("["):
                    rows = _parse(file.read(), path)
                    return sheet_of_rows(rows, str(path), range(1, len(rows) + 1), "row")
            return _read_lines(file, path)
    except FileNotFoundError:
        raise WhetError(f"There is no data file at {path}.") from None
    except UnicodeDecodeError:
        raise WhetError(f"{path} is not UTF-8 text.") from None
    except (OSError, EOFError) as error:
        raise WhetError(f"The data file {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def read_folder(folder: Path, splits: Sequence[str]) -> Sheet:
    """The files of the first of `splits` that has any; all files where none is named after a split."""
    if any((folder / name).is_file() for name in SAVED_BY_DATASETS):
        return _read_saved(folder, splits)
    inside = [*folder.iterdir(), *((folder / "data").iterdir() if (folder / "data").is_dir() else ())]
    files = sorted(p for p in inside if p.name.endswith(SUFFIXES) and not p.name.startswith((".", "dataset_info")))
    if not files:
        raise WhetError(f"{folder} holds no {', '.join(SUFFIXES)} file.")
    words = {path: set(re.split(r"[-_.]", path.name.lower())) for path in files}
    chosen = next((some for split in splits if (some := [p for p in files if split in words[p]])), None)
    if chosen is None and any(words[path] & set(SPLITS) for path in files):
        raise WhetError(
            f"{folder} holds no file of the split {' or '.join(splits)}; it holds "
            f"{', '.join(path.name for path in files[:8])}{' ...' if len(files) > 8 else ''}."
        )
    return join_sheets([read_file(path) for path in chosen or files], str(folder))


def read_hub(name: str, subset: str, split: str, splits: Sequence[str]) -> Sheet:
    """Fetch `split` (also "train[:100]"), else the first of `splits` that exists, else the only one."""
    datasets = need("datasets", f"Fetching {name} from the hub")
    try:
        if not split:
            there = datasets.get_dataset_split_names(name, subset or None)
            split = pick_split(there, splits, name)
        table = datasets.load_dataset(name, subset or None, split=split).with_format("arrow")[:]
    except WhetError:
        raise
    except Exception as error:  # whatever the network, the hub and many loaders raise
        raise WhetError(f"{name} could not be fetched: {type(error).__name__}: {_one_line(error)}.") from None
    return sheet_of_arrow(table, name)


def pick_split(there: Sequence[str], splits: Sequence[str], origin: str) -> str:
    """
    >>> pick_split(["train", "validation"], ["test", "eval", "validation"], "x")
    'validation'
    """
    found = next((split for split in splits if split in there), there[0] if len(there) == 1 else None)
    if found is None:
        raise WhetError(f"{origin} has no split {' or '.join(splits)}; it has {', '.join(there)}: set split.")
    return found


def join_sheets(sheets: Sequence[Sheet], origin: str) -> Sheet:
    if len(sheets) == 1:
        return sheets[0]
    ends = list(accumulate(sheet.rows for sheet in sheets))
    names = tuple(dict.fromkeys(name for sheet in sheets for name in sheet.names))

    def column(name: str) -> list[Any]:
        return [v for s in sheets for v in (s.column(name) if name in s.names else [None] * s.rows)]

    def place(row: int) -> str:
        which = bisect_right(ends, row)
        return f"{Path(sheets[which].origin).name}, {sheets[which].place(row - (ends[which] - sheets[which].rows))}"

    holes: dict[str, int] = {}
    for end, sheet in zip(ends, sheets, strict=True):
        for name in names:
            hole = sheet.holes.get(name, None if name in sheet.names else 0)
            if hole is not None and sheet.rows:
                holes.setdefault(name, end - sheet.rows + hole)
    small = lambda name: all(name not in s.names or s.small(name) for s in sheets)  # noqa: E731
    return Sheet(origin=origin, rows=ends[-1], names=names, column=column, small=small, place=place, holes=holes)


def sheet_of_arrow(table: Any, origin: str) -> Sheet:
    types = need("pyarrow", f"Reading {origin}").types
    while any(types.is_struct(column.type) for column in table.schema):
        table = table.flatten()
    where: dict[str, int] = {}
    for i, name in enumerate(table.column_names):
        where.setdefault(name, i)
    return Sheet(
        origin=origin,
        rows=table.num_rows,
        names=tuple(where),
        column=lambda name: table.column(where[name]).to_pylist(),
        small=lambda name: _small_arrow(table.column(where[name])),
        place=lambda row: f"row {row + 1}",
    )


def sheet_of_rows(rows: Iterable[Any], origin: str, lines: Sequence[int], unit: str) -> Sheet:
    """`lines` (the number of each row) may still grow while `rows` is read: both come from one pass over a file."""
    columns: dict[str, list[Any]] = {}
    holes: dict[str, int] = {}
    count = 0
    for row in rows:
        if not isinstance(row, dict):
            raise WhetError(
                f'{origin}, {unit} {lines[count]} is no JSON object; it should read {{"prompt": ..., ...}}.'
            )
        for name, value in _flat(row, ""):
            if (column := columns.get(name)) is None:
                if len(columns) >= MOST_COLUMNS:
                    continue
                column = columns[name] = [None] * count
                if count:
                    holes[name] = 0
            if len(column) == count:  # a name met twice in a row ("a.b" and {"a": {"b": ...}}) keeps its first value
                column.append(value)
        count += 1
        for name, column in columns.items():
            if len(column) < count:
                column.append(None)
                holes.setdefault(name, count - 1)
    return Sheet(
        origin=origin,
        rows=count,
        names=tuple(columns),
        column=columns.__getitem__,
        small=lambda name: all(map(_is_small, columns[name])),
        place=lambda row: f"{unit} {lines[row]}",
        holes=holes,
    )


def need(module: str, why: str) -> ModuleType:
    """Import an optional library, or raise one sentence."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise WhetError(f'{why} needs the package {package}: pip install "whet[data]".') from None


def _read_parquet(path: Path) -> Sheet:
    if not path.is_file():
        raise FileNotFoundError
    parquet = need("pyarrow.parquet", f"Reading {path}")
    try:
        return sheet_of_arrow(parquet.ParquetFile(path).read(), str(path))
    except need("pyarrow", f"Reading {path}").ArrowException as error:
        raise WhetError(f"{path} is no parquet file that can be read: {_one_line(error)}.") from None


def _read_saved(folder: Path, splits: Sequence[str]) -> Sheet:
    datasets = need("datasets", f"Reading {folder}, which was saved by datasets,")
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, dict):
        saved = saved[pick_split(list(saved), splits, str(folder))]
    return sheet_of_arrow(saved.with_format("arrow")[:], str(folder))


def _read_lines(file: Any, path: Path) -> Sheet:
    lines: list[int] = []

    def rows() -> Iterator[Any]:
        for line, text in enumerate(file, 1):
            if text.strip():
                lines.append(line)
                yield _parse(text, path, line)

    return sheet_of_rows(rows(), str(path), lines, "line")


def _parse(text: str, path: Path, line: int = 0) -> Any:
    """Parse one line of a file, or the whole file."""
    where = f"{path}, line {line}" if line else str(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if line else f"line {error.lineno}, column {error.colno}"
        raise WhetError(f"{where} is not JSON: {error.msg} at {place}.") from None
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits, brackets 100,000 deep
        raise WhetError(f"{where} cannot be read: {error}.") from None


def _flat(row: Mapping[str, Any], before: str, depth: int = 4) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict) and depth:
            yield from _flat(value, f"{before}{key}.", depth - 1)
        else:
            yield before + key, value


def _is_small(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= SMALL_TEXT)


def _small_arrow(column: Any) -> bool:
    pa = importlib.import_module("pyarrow")
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        longest = importlib.import_module("pyarrow.compute").max(pa.compute.utf8_length(column)).as_py()
        return (longest or 0) <= SMALL_TEXT
    return any(of(column.type) for of in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 300 else text[:297] + "..."


# ---- columns


def find_columns(sheet: Sheet, given: Mapping[str, str]) -> dict[str, str]:
    """Role -> column, for the roles that have one. A column given as "" means that there is none.

    Without an answer column the solution also holds the answer (TRL's `prompt` and `solution`).
    """
    for role, name in given.items():
        if role not in ROLES:
            raise WhetError(f'columns has no "{role}"{did_you_mean(role, ROLES)}')
        if name and name not in sheet.names:
            raise WhetError(f'{sheet.origin} has no column "{name}"; it has {", ".join(sheet.names)}.')
    found = {role: given.get(role, next((n for n in names if n in sheet.names), "")) for role, names in ROLES.items()}
    if not found["answer"] and "answer" not in given:
        found["answer"] = found["solution"]
    for role in ("prompt", "answer"):
        if not found[role] and (role == "prompt" or role not in given):
            raise WhetError(
                f"{sheet.origin} has no column for the {role} ({', '.join(ROLES[role])}); it has "
                f'{", ".join(sheet.names) or "none"}: name yours by columns = {{ {role} = "..." }}.'
            )
    return {role: name for role, name in found.items() if name}


# ---- cells


def read_problem(value: Any, where: str) -> Problem | None:
    if is_blank(value):
        return None
    if isinstance(value, str):
        return _valid(value, where, "prompt")
    if not isinstance(value, list | tuple) or not value:
        raise WhetError(f"{where}: prompt should be a string or a list of chat messages, got {short(value)}.")
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise WhetError(f'{where}: a chat message is {{"role": ..., "content": ...}}, got {short(message)}.')
        _text(message["role"], where, "role")
        if message["content"] != "":  # an empty system message says nothing, and is common
            _text(message["content"], where, "content")
    return tuple(value)


def read_answers(value: Any, where: str) -> tuple[str, ...]:
    """All right answers, each once; none for a blank cell. A list of lists or objects is one answer, as JSON.

    >>> [read_answers(value, "") for value in (72, ["1/2", "0.5", "1/2"], '["9.6"]', " ", [[0, 1], [1, 0]])]
    [('72',), ('1/2', '0.5'), ('9.6',), (), ('[[0, 1], [1, 0]]',)]
    """
    if is_blank(value):
        return ()
    if isinstance(value, str) and value.startswith('["'):
        with contextlib.suppress(ValueError, RecursionError):  # else it is a text that only begins like a list
            value = json.loads(value)
    if isinstance(value, list | tuple):
        if any(isinstance(one, list | dict) for one in value) and (text := as_json(value)) is not None:
            return (_valid(text, where, "answer"),)
        return tuple(dict.fromkeys(_scalar(v, where, "answer") for v in value if not is_blank(v)))
    return (_scalar(value, where, "answer"),)


def split_worked(text: str) -> tuple[str, str]:
    """(answer, solution) of a text in GSM8K's form; the solution is "" where the text is a plain answer.

    >>> split_worked("48/2 = <<48/2=24>>24 in May.\\n#### 24"), split_worked("24")
    (('24', '48/2 = 24 in May.\\n#### 24'), ('24', ''))
    """
    _, mark, answer = text.rpartition("####")
    return (answer.strip(), _CALCULATOR.sub("", text)) if mark and answer.strip() else (text, "")


def answer_in(solution: str) -> str:
    r"""
    >>> answer_in(r"So it is $\boxed{4}$."), answer_in("2+2\n#### 4"), answer_in("4")
    ('4', '4', '4')
    """
    return boxed(solution) or split_worked(solution)[0].strip()


def read_solution(value: Any, where: str) -> str:
    """One text; several (OlympiadBench) are joined; "" for none."""
    if isinstance(value, list | tuple):
        return "\n".join(_text(part, where, "solution") for part in value if not is_blank(part))
    return "" if is_blank(value) else _text(value, where, "solution")


def read_id(value: Any, where: str) -> str | None:
    return None if is_blank(value) else _scalar(value, where, "id")


def read_levels(values: Sequence[Any]) -> list[Any]:
    """Numbers where every level is one, however it is written; else the values as they are.

    >>> read_levels(["Level 5", "3", "Level ?", None, 2.0]), read_levels(["easy", "3"])
    ([5, 3, None, None, 2], ['easy', '3'])
    """
    known = [None if is_blank(v) or (isinstance(v, str) and v.strip().endswith("?")) else v for v in values]
    numbers = {v: _level(v) for v in set(known) if v is not None}
    if all(number is not None for number in numbers.values()):
        return [None if v is None else numbers[v] for v in known]
    return known


def is_blank(value: Any) -> bool:
    """Null, white space, an empty list, or not a number (how pandas writes a null among numbers)."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value)) or value == []


def as_json(value: Any) -> str | None:
    """None for what JSON cannot hold: dates, bytes, brackets 100,000 deep."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


def short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _level(value: Any) -> int | float | None:
    if isinstance(value, str):
        match = _LEVEL.fullmatch(value.strip())
        value = float(match[1]) if match else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def _scalar(value: Any, where: str, column: str) -> str:
    """A string as it is; a number or boolean as it reads."""
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return _text(value, where, column)


def _text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise WhetError(f"{where}: {column} should be text, got {short(value)}.")
    return _valid(value, where, column)


def _valid(value: str, where: str, column: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can spell half a character; no tokenizer reads it
            raise WhetError(f"{where}: {column} is not valid Unicode (a lone surrogate).") from None
    return value
