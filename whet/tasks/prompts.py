"""The prompts of a run: a table kept in columns, which makes a Prompt when it is asked for one.

A million problems cost a handful of lists and one dictionary from id to row. Tasks build tables; `problems.py`
joins them, and the curriculum, the engine and the judge know their rows by id. Nothing here reads files, draws
problems or splits train from eval.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.types import Prompt

Problem = str | tuple[Mapping[str, str], ...]
"""A plain text, or chat messages."""

_MATHS_MARKS = ("\\(", "\\)", "\\[", "\\]")
_BETWEEN_NUMBERS = re.compile(r"(\d)[\s.,]+(?=\d)")
_DRESS = str.maketrans("", "", "$\\{}_|&~!?;:.,'\"‘’“”` \t\r\n")


class PromptTable:
    """Problems, answers and what else the data says, one entry a row.

    An id is the data's own, or the hash of (task, problem, answer); a hash met again gets "#1", "#2", ...
    so that it names the same problem in every run, whatever else stands in the file.

    >>> table = PromptTable(["1+1=", "2+2=", "1+1="], ["2", "4", "2"], "text", meta={"level": [1, 2, 1]})
    >>> table.ids[2] == table.ids[0] + "#1", table[table.ids[1]].answer, table.at(1).meta
    (True, '4', {'level': 2})
    """

    __slots__ = ("_derived", "_rows", "answers", "ids", "meta", "problems", "tasks")

    def __init__(
        self,
        problems: Sequence[Problem],
        answers: Sequence[str],
        task: str | Sequence[str],
        *,
        ids: Sequence[str | None] | None = None,
        meta: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        origin: str = "The data",
        place: Callable[[int], str] = lambda row: f"row {row + 1}",
    ) -> None:
        """`origin` and `place` (where in it a row stands) are for the sentences of errors alone."""
        n = len(problems)
        if not n:
            raise WhetError(f"{origin} holds no problems.")
        tasks = repeat(task, n) if isinstance(task, str) else task
        given = repeat(None, n) if ids is None else ids
        derived = np.array([name is None for name in given], bool) if ids is not None else np.ones(n, bool)

        def refuse(name: str, first: int, second: int) -> WhetError:
            return WhetError(
                f'{origin} has the id "{name}" twice, in {place(first)} and {place(second)}; ids must differ: '
                'mend them, or do without by columns = { id = "" }.'
            )

        names = (
            name if name is not None else problem_hash(which, problem, answer)
            for name, which, problem, answer in zip(given, tasks, problems, answers, strict=True)
        )
        columns = {
            key: column.tolist() if isinstance(column, np.ndarray) else column for key, column in (meta or {}).items()
        }
        assert all(len(column) == n for column in columns.values())
        self._fill(_index(names, derived, refuse), derived, problems, answers, task, columns)

    def _fill(
        self,
        rows: dict[str, int],
        derived: np.ndarray,
        problems: Sequence[Problem],
        answers: Sequence[str],
        tasks: str | Sequence[str],
        meta: Mapping[str, Sequence[Any]],
    ) -> None:
        self.ids: Sequence[str] = list(rows)
        self.problems, self.answers, self.tasks, self.meta = problems, answers, tasks, meta
        self._rows, self._derived = rows, derived

    @classmethod
    def concat(cls, tables: Sequence[PromptTable]) -> PromptTable:
        """One table of all, in order. A problem met again is a further repeat; an id of the data again is refused.

        None make an empty table: nothing to train on, as when a model is only evaluated.
        """
        if len(tables) == 1:
            return tables[0]
        ends = np.cumsum([len(table) for table in tables])
        derived = np.concatenate([np.zeros(0, bool), *(table._derived for table in tables)])

        def refuse(name: str, first: int, second: int) -> WhetError:
            a, b = (int(np.searchsorted(ends, row, side="right")) for row in (first, second))
            return WhetError(
                f'The prompt id "{name}" is in data entry {a} and in data entry {b}; ids must differ: '
                'rename them, or do without by columns = { id = "" }.'
            )

        names = (
            name.partition("#")[0] if own else name
            for table in tables
            for name, own in zip(table.ids, table._derived.tolist(), strict=True)
        )
        keys = dict.fromkeys(key for table in tables for key in table.meta)
        joined = cls.__new__(cls)
        joined._fill(
            _index(names, derived, refuse),
            derived,
            list(chain.from_iterable(table.problems for table in tables)),
            list(chain.from_iterable(table.answers for table in tables)),
            list(chain.from_iterable(table._each_task() for table in tables)),
            {key: list(chain.from_iterable(t.meta.get(key, repeat(None, len(t))) for t in tables)) for key in keys},
        )
        return joined

    def select(self, rows: Sequence[int]) -> PromptTable:
        """Some rows, under their own ids: a held-out slice, or the first so many."""
        part = PromptTable.__new__(PromptTable)
        part._fill(
            {self.ids[row]: i for i, row in enumerate(rows)},
            self._derived[np.asarray(rows, int)],
            [self.problems[row] for row in rows],
            [self.answers[row] for row in rows],
            self.tasks if isinstance(self.tasks, str) else [self.tasks[row] for row in rows],
            {key: [column[row] for row in rows] for key, column in self.meta.items()},
        )
        return part

    def at(self, row: int) -> Prompt:
        problem = self.problems[row]
        text, messages = (problem, ()) if isinstance(problem, str) else ("", problem)
        return Prompt(
            id=self.ids[row],
            text=text,
            messages=messages,
            answer=self.answers[row],
            task=self.tasks if isinstance(self.tasks, str) else self.tasks[row],
            meta={key: column[row] for key, column in self.meta.items() if column[row] is not None},
        )

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, prompt_id: str) -> int:
        return self._rows[prompt_id]

    def __getitem__(self, prompt_id: str) -> Prompt:
        return self.at(self._rows[prompt_id])

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self._rows

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.at, range(len(self)))

    def _each_task(self) -> Iterable[str]:
        return repeat(self.tasks, len(self)) if isinstance(self.tasks, str) else self.tasks


def problem_hash(task: str, problem: Problem, answer: str) -> str:
    """16 hex digits. A task's own judge or a user's ("text:module:function") makes no other problem of it."""
    text = problem if isinstance(problem, str) else json.dumps(problem, sort_keys=True, ensure_ascii=False)
    kind = task.partition(":")[0]
    record = f"{len(kind)}:{len(text)}:{kind}{text}{answer}"  # lengths first: no two records read the same
    return hashlib.blake2b(record.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def problem_key(problem: Problem) -> int:
    """The same for problems that differ in case, spacing, punctuation and TeX's dress alone: what makes an overlap.

    Signs, brackets and what separates numbers stay, for in arithmetic they are the problem.

    >>> chat = ({"role": "user", "content": "find x_1, if x_1 + 1 = 2"},)
    >>> problem_key("Find $x_{1}$ if $x_1+1=2$.") == problem_key(chat), problem_key("1+2=") == problem_key("1-2=")
    (True, False)
    """
    text = problem if isinstance(problem, str) else " ".join(message["content"] for message in problem)
    if "\\" in text:
        for mark in _MATHS_MARKS:
            text = text.replace(mark, "")
    plain = _BETWEEN_NUMBERS.sub(r"\1#", text).translate(_DRESS).lower()
    return int.from_bytes(hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _index(names: Iterable[str], derived: np.ndarray, refuse: Callable[[str, int, int], WhetError]) -> dict[str, int]:
    """id -> row, in row order; a derived name met again is numbered, a given one refused."""
    rows: dict[str, int] = {}
    repeats: dict[str, int] = {}
    for row, (name, own) in enumerate(zip(names, derived.tolist(), strict=True)):
        if name in rows:
            if not own:
                raise refuse(name, rows[name], row)
            name = _next_repeat(name, rows, repeats)
        rows[name] = row
    return rows


def _next_repeat(name: str, rows: Mapping[str, int], repeats: dict[str, int]) -> str:
    k = repeats.get(name, 0) + 1
    while (candidate := f"{name}#{k}") in rows:  # a data set that kept our ids in its id column
        k += 1
    repeats[name] = k
    return candidate
