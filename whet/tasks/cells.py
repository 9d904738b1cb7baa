r"""What a cell says: a problem, its right answers, a worked solution, a level. Called by `text.py`, a row at a time.

Null and blank cells are None here and for the caller to count; what cannot be meant (a number for a problem, half a
Unicode character) is refused with the place. Answers come in many forms: text, numbers, booleans, lists of equally
right ones (also as JSON text), GSM8K's worked text that ends in "#### 72", a solution with its \boxed answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from whet.errors import WhetError
from whet.tasks.final import boxed
from whet.tasks.prompts import Problem

_CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's notes for a calculator: "48/2 = <<48/2=24>>24"."""
_LEVEL = re.compile(r"(?:level\s*)?(\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE)


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
    """All equally right answers, each once; none for a blank cell. A list of lists or objects is one answer, as JSON.

    >>> [read_answers(value, "") for value in (72, ["1/2", "0.5", "1/2"], '["9.6"]', " ", [[0, 1], [1, 0]])]
    [('72',), ('1/2', '0.5'), ('9.6',), (), ('[[0, 1], [1, 0]]',)]
    """
    if is_blank(value):
        return ()
    if isinstance(value, str) and value.startswith('["'):
        value = _json_list(value)
    if isinstance(value, list | tuple):
        if any(isinstance(one, list | dict) for one in value) and (text := as_json(value)) is not None:
            return (_valid(text, where, "answer"),)
        return tuple(dict.fromkeys(_scalar(v, where, "answer") for v in value if not is_blank(v)))
    return (_scalar(value, where, "answer"),)


def split_worked(text: str) -> tuple[str, str]:
    """(answer, solution) of GSM8K's form; the solution is "" where the text is a plain answer.

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
    """Numbers where every level is one, in whatever dress; else as they are.

    >>> read_levels(["Level 5", "3", "Level ?", None, 2.0]), read_levels(["easy", "3"])
    ([5, 3, None, None, 2], ['easy', '3'])
    """
    known = [None if is_blank(v) or (isinstance(v, str) and v.strip().endswith("?")) else v for v in values]
    numbers = {v: _level(v) for v in set(known) if v is not None}
    if all(number is not None for number in numbers.values()):
        return [None if v is None else numbers[v] for v in known]
    return known


def is_blank(value: Any) -> bool:
    """Null, white space, nothing in a list, or not a number (how pandas writes a null among numbers)."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value)) or value == []


def as_json(value: Any) -> str | None:
    """None for what JSON cannot say: dates, bytes, brackets 100,000 deep."""
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


def _json_list(text: str) -> Any:
    """A list written as JSON text, or the text where it is something else that begins so."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list) else text


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
