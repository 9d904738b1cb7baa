"""What a task is: a table of prompts, a judge, and (for a warm start) worked solutions. numpy only, never torch.

The tasks (chain, gym, maze, operations, text) build on this file, and `problems.py` joins their tables into one; the
curriculum, the engine and the judge name a prompt by its id. A table is kept in columns and makes a Prompt on demand,
so that a million problems cost a handful of lists and one dictionary from id to row. Nothing here reads files or
draws problems.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from zlib import crc32

import numpy as np

from whet.errors import WhetError
from whet.types import Prompt

T = TypeVar("T")
Problem = str | tuple[Mapping[str, str], ...]  # a plain text, or chat messages

_TYPE_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "a table",
}
_MATHS_MARKS = ("\\(", "\\)", "\\[", "\\]")
_BETWEEN_NUMBERS = re.compile(r"(\d)[\s.,]+(?=\d)")
_PUNCTUATION = str.maketrans("", "", "$\\{}_|&~!?;:.,'\"‘’“”` \t\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Everything a judge says about one response."""

    score: float  # 0..1; decides the verdict
    # the final answer, written so that equal answers are equal strings and can be counted
    final: str = ""
    # further rewards by name, before their weights
    terms: Mapping[str, float] = field(default_factory=dict)


class Task(Protocol):
    name: str
    # the characters that a tiny model must know; empty where a real tokenizer is meant
    alphabet: str

    def prompts(self, split: str, seed: int) -> PromptTable:
        """The problems of a split, "train" or "eval"; the two share no problem."""

    def judge(self, prompt: Prompt, response: str) -> float:
        """Score in 0..1. This runs in a worker process, where an error or a hang costs only this rollout."""

    def final(self, response: str) -> str:
        """The final answer of a response, written so that equal answers are equal strings; "" for none."""

    def solutions(
        self, rng: np.random.Generator, count: int, **options: Any
    ) -> list[tuple[Prompt, str]]:
        """Worked solutions to imitate: (prompt, response text without the end token)."""


# ---- prompts


class PromptTable:
    """Problems, answers and what else the data says, one entry per row.

    An id is the data's own, or the hash of (task, problem, answer); a hash that occurs again gets "#1", "#2", ...
    So an id names the same problem in every run, whatever else is in the file.
    """

    __slots__ = ("_hashed", "_rows", "answers", "ids", "meta", "problems", "tasks")

    def __init__(
        self,
        problems: Sequence[Problem],
        answers: Sequence[str],
        task: str | Sequence[str],
        *,
        ids: Sequence[str | None] | None = None,
        hashed: np.ndarray | None = None,
        meta: Mapping[str, Sequence[Any]] | None = None,
        origin: str = "The data",
        place: Callable[[int], str] = lambda row: f"row {row + 1}",
    ) -> None:
        """An id of None is replaced by the hash; `hashed` says which of `ids` are hashes already. `origin` and `place`
        (of a row) only serve the error messages."""
        n = len(problems)
        if not n and hashed is None:
            raise WhetError(f"{origin} holds no problems.")
        self.problems, self.answers, self.meta = problems, answers, meta or {}
        self.tasks = [task] * n if isinstance(task, str) else task
        assert all(len(column) == n for column in (answers, self.tasks, *self.meta.values()))
        given = [None] * n if ids is None else ids
        self._hashed = (
            np.array([name is None for name in given], bool) if hashed is None else hashed
        )
        self._rows: dict[str, int] = {}
        repeats: Counter[str] = Counter()
        for row, (name, is_hash) in enumerate(zip(given, self._hashed.tolist(), strict=True)):
            unique = name = (
                problem_hash(self.tasks[row], problems[row], answers[row]) if name is None else name
            )
            if name in self._rows and not is_hash:
                raise WhetError(
                    f'{origin} has the id "{name}" twice, in {place(self._rows[name])} and {place(row)}; ids must '
                    'differ: mend them, or do without by columns = { id = "" }.'
                )
            # more than once where a data set kept our ids in its id column
            while unique in self._rows:
                repeats[name] += 1
                unique = f"{name}#{repeats[name]}"
            self._rows[unique] = row
        self.ids: Sequence[str] = list(self._rows)

    @classmethod
    def concat(cls, tables: Sequence[PromptTable]) -> PromptTable:
        """One table of all rows, in order. A problem that occurs again is a further repeat; an id of the data that
        occurs again is refused. No tables make an empty one: a model that is only evaluated trains on nothing."""
        if len(tables) == 1:
            return tables[0]
        ends = np.cumsum([len(table) for table in tables])
        keys = dict.fromkeys(key for table in tables for key in table.meta)
        return cls(
            [problem for table in tables for problem in table.problems],
            [answer for table in tables for answer in table.answers],
            [task for table in tables for task in table.tasks],
            ids=[  # a hash loses its "#k": repeats are counted anew over all tables
                name.partition("#")[0] if is_hash else name
                for table in tables
                for name, is_hash in zip(table.ids, table._hashed.tolist(), strict=True)
            ],
            hashed=np.concatenate([np.zeros(0, bool), *(table._hashed for table in tables)]),
            meta={
                key: [v for t in tables for v in t.meta.get(key, [None] * len(t))] for key in keys
            },
            origin="The recipe",
            place=lambda row: f"data entry {np.searchsorted(ends, row, side='right')}",
        )

    def select(self, rows: Sequence[int]) -> PromptTable:
        """A table of some rows, under their own ids."""
        return PromptTable(
            [self.problems[row] for row in rows],
            [self.answers[row] for row in rows],
            [self.tasks[row] for row in rows],
            ids=[self.ids[row] for row in rows],
            hashed=self._hashed[np.asarray(rows, int)],
            meta={key: [column[row] for row in rows] for key, column in self.meta.items()},
        )

    def marks(self) -> np.ndarray:
        """A number per row that tells whether its problem or answer was changed, also under an id of the data's own."""
        rows = zip(self.problems, self.answers, strict=True)
        return np.fromiter(
            (_mark(problem, answer) for problem, answer in rows), np.uint32, len(self)
        )

    def at(self, row: int) -> Prompt:
        problem = self.problems[row]
        text, messages = (problem, ()) if isinstance(problem, str) else ("", problem)
        return Prompt(
            id=self.ids[row],
            text=text,
            messages=messages,
            answer=self.answers[row],
            task=self.tasks[row],
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


def problem_hash(task: str, problem: Problem, answer: str) -> str:
    """16 hex digits, the same whichever judge a task has: of "text:module:function" only "text" counts."""
    text = (
        problem
        if isinstance(problem, str)
        else json.dumps(problem, sort_keys=True, ensure_ascii=False)
    )
    kind = task.partition(":")[0]
    # lengths first: no two records read the same
    record = f"{len(kind)}:{len(text)}:{kind}{text}{answer}"
    return hashlib.blake2b(record.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _mark(problem: Problem, answer: str) -> int:
    """A million plain problems take about a second, chats two to five."""
    parts = (
        [problem]
        if isinstance(problem, str)
        else [str(v) for message in problem for v in message.values()]
    )
    return crc32("\0".join([answer, *parts]).encode("utf-8", "surrogatepass"))


def problem_key(problem: Problem) -> int:
    """A number that is equal for problems which differ only in case, spacing, punctuation and TeX marks.

    Signs, brackets and separators between numbers count, since they change an arithmetic problem.

    >>> chat = ({"role": "user", "content": "find x_1, if x_1 + 1 = 2"},)
    >>> problem_key("Find $x_{1}$ if $x_1+1=2$.") == problem_key(chat), problem_key("1+2=") == problem_key("1-2=")
    (True, False)
    """
    text = problem_text(problem)
    if "\\" in text:
        for mark in _MATHS_MARKS:
            text = text.replace(mark, "")
    plain = _BETWEEN_NUMBERS.sub(r"\1#", text).translate(_PUNCTUATION).lower()
    return int.from_bytes(
        hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def problem_text(problem: Problem) -> str:
    return (
        problem if isinstance(problem, str) else " ".join(message["content"] for message in problem)
    )


# ---- options


def read_options(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """Make a dataclass of a table in the recipe; whether a value makes sense is checked by `kind` itself."""
    check_options(dataclasses.asdict(kind()), given, where)  # type: ignore[call-overload]
    return kind(**given)


def check_options(defaults: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Raise one sentence, opened by `where`, about an unknown option or one of another type than its default."""
    for key, value in given.items():
        if key not in defaults:
            raise WhetError(f'{where} has no option "{key}"{did_you_mean(key, defaults)}')
        expected = type(defaults[key])
        accepted = {float: int | float, dict: Mapping}.get(expected, expected)
        # True is no number here
        if isinstance(value, bool) != (expected is bool) or not isinstance(value, accepted):
            raise WhetError(
                f"{where}: {key} = {value!r} is wrong: it should be {_TYPE_NAMES[expected]}."
            )


def is_held_out(text: str) -> bool:
    """One problem in eight, by a hash of its text: eval draws only from these, train and the worked solutions never do,
    whatever their seeds."""
    return crc32(text.encode()) % 8 == 0


def check_range(where: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise WhetError(f"{where}: {name} = {value} is wrong: it should be from {low} to {high}.")


def parse_range(where: str, text: str, lowest: int, highest: int) -> tuple[int, int]:
    first, dash, last = str(text).partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else True):
        low = int(first)
        high = int(last or first)
        if lowest <= low <= high <= highest:
            return low, high
    raise WhetError(
        f'{where}: "{text}" is no range of levels; write "3-7" or "5", within {lowest} to {highest}.'
    )


def spread_levels(
    where: str, mix: Mapping[str, float], count: int, lowest: int, highest: int
) -> np.ndarray:
    """`count` levels in the shares of the mix, exact by largest remainder (the lower level first among equals).

    The mix gives each range of levels its share; inside a range the levels get equal shares.
    """
    ranges = []
    for text, share in mix.items():
        ranges.append(parse_range(where, text, lowest, highest))
        if isinstance(share, bool) or not isinstance(share, int | float) or not share >= 0:
            raise WhetError(
                f'{where}: mix."{text}" = {share!r} is wrong: a share is a number from 0 to 1.'
            )
    total = sum(mix.values())
    shares = np.zeros(highest + 1)
    if abs(total - 1) > 1e-6:
        raise WhetError(f"{where}: the shares of mix must add up to 1, not to {total:g}.")
    for (low, high), share in zip(ranges, mix.values(), strict=True):
        shares[low : high + 1] += share / total / (high - low + 1)
    exact = shares * count
    whole = np.floor(exact + 1e-9).astype(int)  # 0.48 / 4 * 100 is 12, not 11.999...
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[: count - whole.sum()]] += 1
    return np.repeat(np.arange(highest + 1), whole)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name.

    >>> did_you_mean("chian", ["chain", "text"]), did_you_mean("zzz", ["text", "chain"])
    ('; did you mean "chain"?', '; there are chain, text.')
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f'; did you mean "{near[0]}"?'
    return f"; there are {', '.join(names)}." if names else "; it takes none."
