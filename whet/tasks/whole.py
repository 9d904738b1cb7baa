r"""Long and structured answers, compared whole: a text of more than 300 characters, or a JSON object or list.

`text.py` asks here before it asks the matcher, which reads no answer of more than 300 characters. Two texts are the
same if they differ in white space alone, two JSON values if they are equal once read. Nothing is evaluated, and the
time is linear in the response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from whet.tasks.final import LONGEST, after_thinking
from whet.tasks.matcher import right_answers

_BOX = "\\boxed{"
_MARKER = re.compile(r".*(?:####|answer(?:\s?:|\s?is\b))", re.IGNORECASE | re.DOTALL)
_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def same_whole(response: str, answer: str, where: str) -> bool:
    r"""Whether the response gives the data's answer where the option `answer` looks for it; False for a short answer.

    >>> same_whole('So \\boxed{{"b": [1, 2.0], "a": "x"}}.', '{"a": "x", "b": [1, 2]}', "auto")
    True
    >>> same_whole("42", "42", "whole")
    False
    """
    golds = whole_answers(answer)
    if not golds:
        return False
    text = after_thinking(response)
    return any(_is(gold, text, where) for gold in golds)


@lru_cache(maxsize=4096)
def whole_answers(answer: str) -> tuple[str, ...]:
    r"""Those of the right answers that are compared whole.

    >>> whole_answers('{"a": 1}'), whole_answers("72"), whole_answers('["72", "73"]')
    (('{"a": 1}',), (), ())
    """
    if read_json(answer) is not None:
        return (answer,)
    return tuple(_squeezed(one) for one in right_answers(answer) if len(one) > LONGEST)


def read_json(text: str) -> str | None:
    """A JSON object or list in a form in which equal values read the same; a list of texts means several answers.

    >>> read_json('{"b": 1.0, "a": true}'), read_json('["a", "b"]'), read_json("[0, 1)"), read_json("3")
    ('{"a": true, "b": 1}', None, None, None)
    """
    found = _decoded(_unfenced(text))
    return found[0] if found is not None and not found[1] else None


def _is(gold: str, text: str, where: str) -> bool:
    wanted = read_json(gold)
    if where in ("auto", "boxed") and _BOX in text:
        inside = _squeezed(text.rpartition(_BOX)[2]) if wanted is None else text.rpartition(_BOX)[2]
        if wanted is None:
            return inside.startswith(gold) and inside.removeprefix(gold).lstrip().startswith("}")
        found = _decoded(inside)
        return found is not None and found[0] == wanted and found[1].startswith("}")
    return any(
        _squeezed(found) == gold if wanted is None else read_json(found) == wanted for found in _found(text, where)
    )


def _found(text: str, where: str) -> Iterator[str]:
    """What may be the answer of a response without a box."""
    if where == "tagged":
        _, opened, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
        if opened:
            yield inside
    if where in ("auto", "marked") and (marker := _MARKER.match(text)):
        yield text[marker.end() :]
    if where in ("auto", "whole"):
        yield text
    if where == "auto" and (blocks := _FENCED.findall(text)):
        yield blocks[-1]


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _unfenced(text: str) -> str:
    fenced = _FENCED.fullmatch(text.strip())
    return fenced[1] if fenced else text


def _decoded(text: str) -> tuple[str, str] | None:
    """The JSON object or list that a text begins with, written in one way, and what follows it."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        value, end = _DECODER.raw_decode(text)
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return None
        return json.dumps(value, sort_keys=True), text[end:].lstrip()
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> Any:
    """2.0 is 2."""
    value = float(text)
    return int(value) if value.is_integer() else value


_DECODER = json.JSONDecoder(parse_float=_number)
