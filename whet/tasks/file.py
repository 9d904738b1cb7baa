"""Task "text": problems of a file, one JSON object a line, and problems given as Python dicts.

Columns: `prompt` (a string, or a list of chat messages), `answer` (a string or a number), and optionally `id`,
`solution` (for a warm start), `level` and `source` (kept as meta). The file is read once, whole and before any
model is loaded; what is wrong with it is one sentence with the line. A file is one split: training and evaluation
name a file each, and whether the two share problems is for the caller to look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.tasks.match import MATCHERS
from whet.tasks.options import did_you_mean, read_options
from whet.tasks.prompts import Problem, PromptTable
from whet.types import Prompt

META = ("level", "source")
Rows = Iterable[tuple[int, Mapping[str, Any]]]
"""(line, row) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    matcher: str = "match"
    """How a response is compared with the answer."""

    def __post_init__(self) -> None:
        if self.matcher not in MATCHERS:
            raise WhetError(f'Task text knows no matcher "{self.matcher}"{did_you_mean(self.matcher, MATCHERS)}')


class TextTask:
    alphabet = ""

    def __init__(self, path: str = "", name: str = "text", *, rows: Rows | None = None, **options: Any) -> None:
        """The problems of a file, or `rows` where Python has them already."""
        self.name = name
        self.options = read_options(TextOptions, options, "Task text")
        self._origin = str(path) if rows is None else "The given data"
        self._table, self._solutions = read_table(read_jsonl(path) if rows is None else rows, name, self._origin)

    def prompts(self, split: str, seed: int) -> PromptTable:
        """The whole file, whichever the split: an [[eval]] entry names a file of its own."""
        return self._table

    def judge(self, prompt: Prompt, response: str) -> float:
        return MATCHERS[self.options.matcher](prompt, response)

    def solutions(self, rng: np.random.Generator, count: int, **options: Any) -> list[tuple[Prompt, str]]:
        """Rows with a `solution`, shuffled; all of them once before any comes again."""
        read_options(_NoOptions, options, "The worked solutions of task text")
        rows = np.array(list(self._solutions), int)
        if not rows.size:
            raise WhetError(f"{self._origin} has no `solution` column, which a warm start imitates.")
        passes = [rng.permutation(rows) for _ in range(math.ceil(count / rows.size))]
        chosen = np.concatenate(passes)[:count].tolist() if passes else []
        return [(self._table.at(row), self._solutions[row]) for row in chosen]


@dataclass(frozen=True, slots=True)
class _NoOptions:
    pass


def read_jsonl(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of each line that is not blank."""
    if not path:
        raise WhetError('Task text needs data.path, a JSONL file with "prompt" and "answer".')
    line = 0
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    yield line, json.loads(text)
    except FileNotFoundError:
        raise WhetError(f"There is no data file at {path}.") from None
    except json.JSONDecodeError as error:
        raise WhetError(f"{path}, line {line} is not JSON: {error.msg} at column {error.colno}.") from None
    except UnicodeDecodeError:
        raise WhetError(f"{path} is not UTF-8 text after line {line}.") from None
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits, brackets 100,000 deep
        raise WhetError(f"{path}, line {line} cannot be read: {error}.") from None
    except OSError as error:
        raise WhetError(f"The data file {path} cannot be read: {error.strerror or error}.") from None


def read_table(rows: Rows, task: str, origin: str) -> tuple[PromptTable, dict[int, str]]:
    """The problems, and the worked solutions by row."""
    problems: list[Problem] = []
    answers: list[str] = []
    ids: list[str | None] = []
    lines: list[int] = []
    solutions: dict[int, str] = {}
    meta: dict[str, list[Any]] = {key: [] for key in META}
    for line, row in rows:
        where = f"{origin}, line {line}"
        _check_columns(row, where)
        problems.append(_problem(row["prompt"], where))
        answers.append(_scalar(row["answer"], where, "answer"))
        ids.append(None if row.get("id") is None else _scalar(row["id"], where, "id"))
        lines.append(line)
        if row.get("solution") is not None:
            solutions[len(lines) - 1] = _text(row["solution"], where, "solution")
        for key in META:
            meta[key].append(row.get(key))
    used = {key: column for key, column in meta.items() if any(value is not None for value in column)}
    return PromptTable(problems, answers, task, ids=ids, meta=used, origin=origin, lines=lines), solutions


def _check_columns(row: Any, where: str) -> None:
    if not isinstance(row, Mapping):
        raise WhetError(f'{where} is no JSON object; it should read {{"prompt": ..., "answer": ...}}.')
    for column in ("prompt", "answer"):
        if column not in row:
            raise WhetError(f'{where} has no "{column}"; it has {", ".join(map(str, row)) or "nothing"}.')


def _problem(value: Any, where: str) -> Problem:
    if isinstance(value, str):
        return _text(value, where, "prompt")
    if not isinstance(value, list | tuple) or not value:
        raise WhetError(f"{where}: prompt should be a string or a list of chat messages, got {_short(value)}.")
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise WhetError(f'{where}: a chat message is {{"role": ..., "content": ...}}, got {_short(message)}.')
        _text(message["role"], where, "role")
        _text(message["content"], where, "content")
    return tuple(value)


def _scalar(value: Any, where: str, column: str) -> str:
    """A string as it is; a number as it reads."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return _text(value, where, column)


def _text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise WhetError(f"{where}: {column} should be text, got {_short(value)}.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can spell half a character; no tokenizer reads it
            raise WhetError(f"{where}: {column} is not valid Unicode (a lone surrogate).") from None
    return value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
