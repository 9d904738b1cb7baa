r"""Task "text": problems with answers from files or the hub, judged by comparing the final answer.

`build.py` makes the task; `reading.py` finds and opens the data, and the matcher compares. The data is read once,
completely and before any model is loaded. A row without a problem or an answer is left out and counted, since public
data has such rows; a cell that makes no sense (a number for a problem, half a Unicode character) is refused with its
place. Answers come in many forms: text, numbers, booleans, lists of equally right ones (also as JSON text), GSM8K's
worked text that ends in "#### 72", a solution with its \boxed answer. Every small column is kept as meta, for
curricula and reports, and so are lists and structs, for judges.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet import config
from whet.errors import WhetError
from whet.tasks.answers import Matcher, boxed, right_answers, same_whole
from whet.tasks.base import Problem, PromptTable, check_options, did_you_mean
from whet.tasks.reading import Sheet, find_columns, open_data
from whet.types import Prompt

SMALL_TEXT = 100  # characters; a column with longer texts is no property of a problem
MOST_META = 32  # columns kept as meta
# bytes of lists and structs per prompt, as JSON: they go to a judge process with every response
META_BYTES = 65_536
# How a response gives an answer, by the option `answer`; otherwise the answer is the whole response.
WRITTEN = {
    "boxed": "\\boxed{%s}",
    "tagged": "<answer>%s</answer>",
    "marked": "#### %s",
    "auto": "\\boxed{%s}",
}
OPTIONS = {
    "matcher": "math",  # how a response's answer is compared with the data's
    "answer": "auto",  # where the answer is in a response
}
# added to a worked solution that does not end so; {answer} stands for the answer
SOLUTIONS = {"end": ""}
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator: "48/2 = <<48/2=24>>24"
_LEVEL = re.compile(r"(?:level\s*)?(\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE)


class TextTask:
    alphabet = ""

    def __init__(self, entry: config.ProblemSettings, name: str = "text", folder: str = "") -> None:
        """folder: where short names are looked for first."""
        check_options(OPTIONS, entry.options, "Task text")
        sheet, columns = open_data(entry, folder)
        # after the data: its library takes a second to import
        self._matcher = Matcher(**OPTIONS | entry.options)
        if not sheet.rows:
            raise WhetError(f"{sheet.origin} holds no problems.")
        self.name, self.origin, self.rows = name, sheet.origin, sheet.rows
        self.columns = find_columns(sheet, {**columns, **entry.columns})  # role -> column
        needed = [self.columns[role] for role in ("prompt", "answer") if role in self.columns]
        if holes := [(sheet.holes[column], column) for column in needed if column in sheet.holes]:
            row, column = min(holes)  # a JSON row without the key; a null is only a blank
            there = [other for other in sheet.names if sheet.column(other)[row] is not None]
            raise WhetError(
                f'{_place(sheet, row)} has no "{column}"; it has {", ".join(there) or "nothing"}.'
            )
        rows, skipped = _read_rows(
            sheet, self.columns, _select_rows(sheet, self.columns, entry.where), entry.limit
        )
        if not rows and skipped:
            raise WhetError(
                f"{sheet.origin} holds no problem with an answer: {skipped:,} rows are blank."
            )
        kept = list(rows)
        ids = None
        if "id" in self.columns:
            cells = sheet.column(self.columns["id"])
            ids = [
                None
                if is_blank(cells[i])
                else _text(cells[i], _place(sheet, i), "id", numbers=True)
                for i in kept
            ]
        meta, self.not_kept, too_large = _read_meta(sheet, self.columns, kept)
        self._table = PromptTable(
            [problem for problem, _, _ in rows.values()],
            [answer for _, answer, _ in rows.values()],
            name,
            ids=ids,
            meta=meta,
            origin=sheet.origin,
            place=lambda i: sheet.place(kept[i]),
        )
        # by row of the table
        self._solutions = {i: text for i, (_, _, text) in enumerate(rows.values()) if text}
        self._worked_rows = np.array(list(self._solutions), int)
        self.worked = len(self._solutions)
        self.notes: tuple[str, ...] = ()
        if skipped:
            blank = f"{skipped:,} of the {self.rows:,} rows of {self.origin}"
            self.notes += (f"{blank} have no problem or no answer (empty, null or NaN): left out.",)
        if too_large:
            cut = ", ".join(f"{count:,} of {column}" for column, count in too_large.items())
            self.notes += (
                f"{self.origin}: these cells are left out of prompt.meta, since they are no JSON or take a prompt "
                f"beyond {META_BYTES:,} bytes: {cut}.",
            )

    def prompts(self, split: str, seed: int) -> PromptTable:
        """All rows, whatever the split: an entry names its own."""
        return self._table

    def judge(self, prompt: Prompt, response: str) -> float:
        whole = same_whole(response, prompt.answer, self._matcher.answer)
        return self._matcher.judge(prompt, response) if whole is None else float(whole)

    def written(self, answer: str) -> str:
        """The shortest response that gives an answer."""
        return WRITTEN.get(self._matcher.answer, "%s") % answer

    def final(self, response: str) -> str:
        return self._matcher.final(response)

    def solutions(
        self, rng: np.random.Generator, count: int, **options: Any
    ) -> list[tuple[Prompt, str]]:
        """Rows with a worked solution, shuffled; each of them comes once before any comes again."""
        check_options(SOLUTIONS, options, "The worked solutions of task text")
        if not self.worked:
            raise WhetError(f"{self.origin} has no `solution` column, which a warm start imitates.")
        passes = [rng.permutation(self._worked_rows) for _ in range(math.ceil(count / self.worked))]
        pairs = []
        for row in np.concatenate(passes)[:count].tolist() if passes else []:
            prompt = self._table.at(row)
            solution = self._solutions[row]
            ending = options.get("end", "").replace("{answer}", right_answers(prompt.answer)[0])
            pairs.append(
                (
                    prompt,
                    solution if solution.rstrip().endswith(ending.strip()) else solution + ending,
                )
            )
        return pairs


# ---- rows


def _place(sheet: Sheet, row: int) -> str:
    return f"{sheet.origin}, {sheet.place(row)}"


def _select_rows(
    sheet: Sheet, columns: Mapping[str, str], where: Mapping[str, Any]
) -> Sequence[int]:
    """The rows that have one of the wanted values in every column that `where` names."""
    rows: Sequence[int] = range(sheet.rows)
    for name, wanted in where.items():
        if name == "level" and name in columns and is_small(levels := sheet.column(columns[name])):
            values = read_levels(levels)
        elif name in sheet.names:
            values = sheet.column(name)
        else:
            raise WhetError(
                f'where: {sheet.origin} has no column "{name}"{did_you_mean(name, sheet.names)}'
            )
        keys = {_key(value) for value in (wanted if isinstance(wanted, list | tuple) else [wanted])}
        rows = [row for row in rows if _key(values[row]) in keys]
    if sheet.rows and not rows:
        asked = " and ".join(f"{name} = {wanted!r}" for name, wanted in where.items())
        raise WhetError(f"where: none of the {sheet.rows:,} rows of {sheet.origin} has {asked}.")
    return rows


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


def _read_rows(
    sheet: Sheet, columns: Mapping[str, str], wanted: Sequence[int], limit: int
) -> tuple[dict[int, tuple[Problem, str, str]], int]:
    """Row -> problem, answer and worked solution, for rows that have the first two; and the number of the others."""
    cells = {
        role: sheet.column(columns[role])
        for role in ("prompt", "answer", "solution")
        if role in columns
    }
    rows: dict[int, tuple[Problem, str, str]] = {}
    skipped = 0
    for i in wanted:
        if len(rows) == limit > 0:
            break
        place = _place(sheet, i)
        problem = read_problem(cells["prompt"][i], place)
        # several (OlympiadBench) are joined
        texts = cells["solution"][i] if "solution" in cells else None
        texts = texts if isinstance(texts, list | tuple) else [texts]
        solution = "\n".join(_text(text, place, "solution") for text in texts if not is_blank(text))
        if "answer" not in cells:  # the recipe says that there is none: the user's judge decides
            answers: tuple[str, ...] = ("",)
        elif columns["answer"] == columns.get("solution"):
            answers = (boxed(solution) or split_worked(solution)[0].strip(),) if solution else ()
        else:
            answers = read_answers(cells["answer"][i], place)
            if len(answers) == 1 and "####" in answers[0]:
                final, text = split_worked(answers[0])
                answers = (final,)
                solution = solution or text
        if problem is None or not answers:
            skipped += 1
        else:  # several right answers become a JSON list, which the matcher reads
            answer = answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)
            rows[i] = (problem, answer, solution)
    return rows, skipped


def _read_meta(
    sheet: Sheet, columns: Mapping[str, str], kept: Sequence[int]
) -> tuple[dict[str, list[Any]], tuple[str, ...], dict[str, int]]:
    """The level, every other small column, and columns of lists and structs. Then what is not kept: columns of long
    texts and those beyond MOST_META; and by column, the number of cells that are too large."""
    meta: dict[str, list[Any]] = {}
    not_kept: list[str] = []
    too_large: dict[str, int] = {}
    room = [META_BYTES] * len(kept)
    if "level" in columns and is_small(levels := sheet.column(columns["level"])):
        meta["level"] = read_levels([levels[row] for row in kept])
    for name in sheet.names:
        if name in columns.values() or name in meta:
            continue
        if len(meta) >= MOST_META:
            not_kept.append(name)
            continue
        whole = sheet.column(name)
        values = [whole[row] for row in kept]
        if is_small(whole):
            meta[name] = [None if is_blank(value) else value for value in values]
        elif not any(isinstance(value, list | dict) for value in values):
            not_kept.append(name)
        else:
            for i, value in enumerate(values):
                text = as_json(value)
                size = (
                    len(text.encode("utf-8", "surrogatepass"))
                    if text is not None
                    else META_BYTES + 1
                )
                if size <= room[i]:
                    room[i] -= size
                elif value is not None:
                    values[i], too_large[name] = None, too_large.get(name, 0) + 1
            meta[name] = values
    known = {
        name: values for name, values in meta.items() if any(value is not None for value in values)
    }
    return known, tuple(not_kept), too_large


# ---- cells


def read_problem(value: Any, where: str) -> Problem | None:
    if is_blank(value):
        return None
    if isinstance(value, str):
        return _text(value, where, "prompt")
    if not isinstance(value, list | tuple) or not value:
        raise WhetError(
            f"{where}: prompt should be a string or a list of chat messages, got {short(value)}."
        )
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise WhetError(
                f'{where}: a chat message is {{"role": ..., "content": ...}}, got {short(message)}.'
            )
        _text(message["role"], where, "role")
        if message["content"] != "":  # an empty system message says nothing, and is common
            _text(message["content"], where, "content")
    return tuple(value)


def read_answers(value: Any, where: str) -> tuple[str, ...]:
    """All right answers, each once; none for a blank cell. A list of lists or objects is one answer, as JSON."""
    if is_blank(value):
        return ()
    if isinstance(value, str) and value.startswith('["'):
        # else it is a text that only begins like a list
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, list | tuple):
        if (
            any(isinstance(one, list | dict) for one in value)
            and (text := as_json(value)) is not None
        ):
            return (_text(text, where, "answer"),)
        return tuple(
            dict.fromkeys(_text(v, where, "answer", numbers=True) for v in value if not is_blank(v))
        )
    return (_text(value, where, "answer", numbers=True),)


def split_worked(text: str) -> tuple[str, str]:
    """(answer, solution) of a text in GSM8K's form; the solution is "" where the text is a plain answer."""
    _, mark, answer = text.rpartition("####")
    return (answer.strip(), _CALCULATOR.sub("", text)) if mark and answer.strip() else (text, "")


def read_levels(values: Sequence[Any]) -> list[Any]:
    """Numbers where every level is one, however it is written; else the values as they are.

    >>> read_levels(["Level 5", "3", "Level ?", None, 2.0]), read_levels(["easy", "3"])
    ([5, 3, None, None, 2], ['easy', '3'])
    """
    known = [
        None if is_blank(v) or (isinstance(v, str) and v.strip().endswith("?")) else v
        for v in values
    ]
    numbers: dict[Any, int | float | None] = {None: None}
    for value in set(known) - {None}:
        found = _LEVEL.fullmatch(value.strip()) if isinstance(value, str) else None
        number = float(found[1]) if found else value
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not math.isfinite(number)
        ):
            return known
        numbers[value] = int(number) if number == int(number) else number
    return [numbers[value] for value in known]


def is_small(values: Sequence[Any]) -> bool:
    """Whether a column holds only numbers, booleans and short texts."""
    return all(
        v is None or isinstance(v, int | float) or (isinstance(v, str) and len(v) <= SMALL_TEXT)
        for v in values
    )


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


def _text(value: Any, where: str, column: str, numbers: bool = False) -> str:
    """A string as it is; where `numbers` are allowed, a number or boolean as it reads."""
    if numbers and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise WhetError(f"{where}: {column} should be text, got {short(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a character; no tokenizer reads it
        raise WhetError(f"{where}: {column} is not valid Unicode (a lone surrogate).") from None
    return value
