"""Task "text": problems with answers from files or the hub, judged by comparing the final answer.

`build.py` makes the task; `reading.py` reads the data, and the matcher compares. The data is read once, completely and
before any model is loaded; a mistake in it is one sentence with the line. It is a file, a folder, a short name (gsm8k,
math500, ...: looked for in `data_folder`, else $WHET_DATA, then on the hub) or a name on the hub. A row without a
problem or an answer is left out and counted, since public data has such rows. Every small column is kept as meta, for
curricula and reports, and so are lists and structs, for judges.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet import config
from whet.errors import WhetError
from whet.tasks.base import Problem, PromptTable, did_you_mean, read_options
from whet.tasks.matcher import Matcher, right_answers, same_whole
from whet.tasks.reading import (
    SUFFIXES,
    Sheet,
    answer_in,
    as_json,
    find_columns,
    is_blank,
    read_answers,
    read_file,
    read_folder,
    read_hub,
    read_id,
    read_levels,
    read_problem,
    read_solution,
    split_worked,
)
from whet.types import Prompt

VARIABLE = "WHET_DATA"
MOST_META = 32  # columns kept as meta
META_BYTES = 65_536  # of lists and structs per prompt, as JSON: they are sent to a judge process with every response
# How a response gives an answer, by the option `answer`; otherwise the answer is the whole response.
WRITTEN = {"boxed": "\\boxed{%s}", "tagged": "<answer>%s</answer>", "marked": "#### %s", "auto": "\\boxed{%s}"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


# ---- where the data is


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Where a short name is found."""

    hub: str
    subset: str = ""
    splits: Mapping[str, str]  # "train", "test" or both -> their names on the hub
    stems: tuple[str, ...]  # names that its file may have, the preferred one first


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
    """The rows of an entry, and the roles whose column is not to be found by name."""
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
    """Words that name a split in file names.

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
    """Paths to try: files that name the split first."""
    for stem in stems:
        for word in words:
            for name in (f"{word}_{stem}", f"{stem}_{word}", f"{stem}-{word}"):
                yield from (folder / f"{name}{suffix}" for suffix in SUFFIXES)
    for stem in stems:
        yield from (folder / f"{stem}{suffix}" for suffix in ("", *SUFFIXES))


# ---- the task


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    matcher: str = "math"  # how a response's answer is compared with the data's
    answer: str = "auto"  # where the answer is in a response


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSolutions:
    end: str = ""  # added to a worked solution that does not end so; {answer} stands for the answer


class TextTask:
    alphabet = ""

    def __init__(self, entry: config.Problems, name: str = "text", folder: str = "") -> None:
        """folder: where short names are looked for first."""
        self.name = name
        options = read_options(TextOptions, entry.options, "Task text")
        self._matcher = Matcher(matcher=options.matcher, answer=options.answer)
        sheet, columns = open_data(entry, folder)
        if not sheet.rows:
            raise WhetError(f"{sheet.origin} holds no problems.")
        self.origin, self.rows = sheet.origin, sheet.rows
        self.columns = find_columns(sheet, {**columns, **entry.columns})  # role -> column
        read = read_table(sheet, self.columns, name, entry.where, entry.limit)
        self._table, self._solutions, self.not_kept = read.table, read.solutions, read.not_kept
        self._worked_rows = np.array(list(self._solutions), int)
        self.notes: tuple[str, ...] = ()
        if read.skipped:
            blank = f"{read.skipped:,} of the {self.rows:,} rows of {self.origin}"
            self.notes += (f"{blank} have no problem or no answer: left out.",)
        if read.too_large:
            cells = ", ".join(f"{count:,} of {column}" for column, count in read.too_large.items())
            self.notes += (
                f"{self.origin}: these cells are left out of prompt.meta, since they are no JSON or take a prompt "
                f"beyond {META_BYTES:,} bytes: {cells}.",
            )

    @property
    def worked(self) -> int:
        """Number of rows with a worked solution."""
        return len(self._solutions)

    def prompts(self, split: str, seed: int) -> PromptTable:
        """All rows, whatever the split: an entry names its own."""
        return self._table

    def judge(self, prompt: Prompt, response: str) -> float:
        if same_whole(response, prompt.answer, self._matcher.answer):
            return 1.0
        return self._matcher.judge(prompt, response)

    def written(self, answer: str) -> str:
        """The shortest response that gives an answer."""
        return WRITTEN.get(self._matcher.answer, "%s") % answer

    def final(self, response: str) -> str:
        return self._matcher.final(response)

    def solutions(self, rng: np.random.Generator, count: int, **options: Any) -> list[tuple[Prompt, str]]:
        """Rows with a worked solution, shuffled; each of them comes once before any comes again."""
        end = read_options(TextSolutions, options, "The worked solutions of task text").end
        rows = self._worked_rows
        if not rows.size:
            raise WhetError(f"{self.origin} has no `solution` column, which a warm start imitates.")
        passes = [rng.permutation(rows) for _ in range(math.ceil(count / rows.size))]
        chosen = np.concatenate(passes)[:count].tolist() if passes else []
        return [
            (prompt := self._table.at(row), with_end(self._solutions[row], end, right_answers(prompt.answer)[0]))
            for row in chosen
        ]


def with_end(solution: str, end: str, answer: str) -> str:
    r"""
    >>> with_end("1+1 = 2", "\n#### {answer}", "2"), with_end("1+1 = 2\n#### 2", "\n#### {answer}", "2")
    ('1+1 = 2\n#### 2', '1+1 = 2\n#### 2')
    """
    ending = end.replace("{answer}", answer)
    return solution if solution.rstrip().endswith(ending.strip()) else solution + ending


# ---- reading the rows


class Row(NamedTuple):
    problem: Problem
    answers: tuple[str, ...]  # each of them is right
    solution: str


class Read(NamedTuple):
    table: PromptTable
    solutions: dict[int, str]  # by row of the table
    skipped: int  # rows left out for blanks
    not_kept: tuple[str, ...]  # columns of long texts, and those beyond MOST_META
    too_large: dict[str, int]  # number of cells left out, by column


def read_table(sheet: Sheet, columns: Mapping[str, str], task: str, where: Mapping[str, Any], limit: int) -> Read:
    _refuse_holes(sheet, columns)
    kept, rows, skipped = _read_rows(sheet, columns, _select_rows(sheet, columns, where), limit)
    if not kept and skipped:
        raise WhetError(f"{sheet.origin} holds no problem with an answer: {skipped:,} rows are blank.")
    ids = None
    if "id" in columns:
        cells = sheet.column(columns["id"])
        ids = [read_id(cells[row], f"{sheet.origin}, {sheet.place(row)}") for row in kept]
    meta, not_kept, too_large = _read_meta(sheet, columns, kept)
    table = PromptTable(
        [row.problem for row in rows],
        # Several right answers become a JSON list, which the matcher reads.
        [row.answers[0] if len(row.answers) == 1 else json.dumps(row.answers, ensure_ascii=False) for row in rows],
        task,
        ids=ids,
        meta=meta,
        origin=sheet.origin,
        place=lambda i: sheet.place(kept[i]),
    )
    solutions = {i: row.solution for i, row in enumerate(rows) if row.solution}
    return Read(table, solutions, skipped, not_kept, too_large)


def _read_rows(
    sheet: Sheet, columns: Mapping[str, str], wanted: Sequence[int], limit: int
) -> tuple[list[int], list[Row], int]:
    """The numbers of the rows that were read, the rows, and how many were blank."""
    blank: list[Any] = [None] * sheet.rows
    prompts, answers, worked = (
        sheet.column(columns[role]) if role in columns else blank for role in ("prompt", "answer", "solution")
    )
    kept: list[int] = []
    rows: list[Row] = []
    skipped = 0
    for i in wanted:
        row = _read_row(columns, prompts[i], answers[i], worked[i], f"{sheet.origin}, {sheet.place(i)}")
        if row is None:
            skipped += 1
        else:
            kept.append(i)
            rows.append(row)
        if len(kept) == limit > 0:
            break
    return kept, rows, skipped


def _read_row(columns: Mapping[str, str], prompt: Any, answer: Any, worked: Any, place: str) -> Row | None:
    """None where the problem or the answer is blank."""
    problem, solution = read_problem(prompt, place), read_solution(worked, place)
    if "answer" not in columns:  # the recipe says that there is none: the user's judge decides
        answers: tuple[str, ...] = ("",)
    elif columns["answer"] == columns.get("solution"):
        answers = (answer_in(solution),) if solution else ()
    else:
        answers = read_answers(answer, place)
        if len(answers) == 1 and "####" in answers[0]:
            final, text = split_worked(answers[0])
            answers, solution = (final,), solution or text
    return Row(problem, answers, solution) if problem is not None and answers else None


def _refuse_holes(sheet: Sheet, columns: Mapping[str, str]) -> None:
    """Refuse a JSON row without the key of a needed column; a null is only a blank."""
    needed = [columns[role] for role in ("prompt", "answer") if role in columns]
    holes = [(sheet.holes[name], name) for name in needed if name in sheet.holes]
    if holes:
        row, name = min(holes)
        there = [other for other in sheet.names if sheet.column(other)[row] is not None]
        raise WhetError(f'{sheet.origin}, {sheet.place(row)} has no "{name}"; it has {", ".join(there) or "nothing"}.')


def _select_rows(sheet: Sheet, columns: Mapping[str, str], where: Mapping[str, Any]) -> Sequence[int]:
    """The rows that have one of the wanted values in every column that `where` names."""
    rows: Sequence[int] = range(sheet.rows)
    for name, wanted in where.items():
        if name == "level" and name in columns and sheet.small(columns[name]):
            values = read_levels(sheet.column(columns[name]))
        elif name in sheet.names:
            values = sheet.column(name)
        else:
            raise WhetError(f'where: {sheet.origin} has no column "{name}"{did_you_mean(name, sheet.names)}')
        keys = {_key(value) for value in (wanted if isinstance(wanted, list | tuple) else [wanted])}
        rows = [row for row in rows if _key(values[row]) in keys]
    if sheet.rows and not rows:
        asked = " and ".join(f"{name} = {wanted!r}" for name, wanted in where.items())
        raise WhetError(f"where: none of the {sheet.rows:,} rows of {sheet.origin} has {asked}.")
    return rows


def _read_meta(
    sheet: Sheet, columns: Mapping[str, str], kept: Sequence[int]
) -> tuple[dict[str, list[Any]], tuple[str, ...], dict[str, int]]:
    """The level, every other small column, and columns of lists and structs; then what is not kept, as in `Read`."""
    meta: dict[str, list[Any]] = {}
    not_kept: list[str] = []
    too_large: dict[str, int] = {}
    room = [META_BYTES] * len(kept)
    if "level" in columns and sheet.small(columns["level"]):
        levels = sheet.column(columns["level"])
        meta["level"] = read_levels([levels[row] for row in kept])
    for name in sheet.names:
        if name in columns.values() or name in meta:
            continue
        if len(meta) >= MOST_META:
            not_kept.append(name)
            continue
        whole = sheet.column(name)
        values = [whole[row] for row in kept]
        if sheet.small(name):
            meta[name] = [None if is_blank(value) else value for value in values]
        elif not any(isinstance(value, list | dict) for value in values):
            not_kept.append(name)
        else:
            meta[name] = [value if _fits(value, room, i) else None for i, value in enumerate(values)]
            if lost := sum(a is not None and b is None for a, b in zip(values, meta[name], strict=True)):
                too_large[name] = lost
    known = {name: values for name, values in meta.items() if any(value is not None for value in values)}
    return known, tuple(not_kept), too_large


def _fits(value: Any, room: list[int], row: int) -> bool:
    """Whether the value fits into the bytes that the row has left, which it then takes."""
    text = as_json(value)
    size = len(text.encode("utf-8", "surrogatepass")) if text is not None else META_BYTES + 1
    if size > room[row]:
        return False
    room[row] -= size
    return True


def _key(value: Any) -> Any:
    """A key that is equal for 5, 5.0 and "5"; false is not 0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value.strip()
    return value if isinstance(value, int | float) else None
