r"""The judge of task "text": find the final answer of a response, then decide whether it is the data's answer.

final.py finds the answer, match.py compares single values, this file takes lists, sets, tuples and intervals apart and
compares them part by part, and verify.py compares formulas. Answers that are texts of more than 300 characters, or
JSON, are compared whole. `Matcher.judge` runs in a worker process; it may raise TooSlow, which costs that one rollout.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from whet.errors import WhetError
from whet.tasks import verify
from whet.tasks.base import did_you_mean, problem_text
from whet.tasks.final import ANSWERS, LONGEST, after_thinking, boxed, in_tags, without_problem_words
from whet.tasks.match import folded, read_value, same_value, split_name, strip, tidy, undress
from whet.types import Prompt

MATCHERS = ("exact", "math")
_AND_SO_ON = ("...", "\\ldots", "\\dots", "\\cdots")
_RELATIONS = ("<", ">", "\\leq", "\\geq", "\\le ", "\\ge ", "\\neq", "\\ne ")


class Matcher:
    """`answer` says where the answer is; `matcher` whether formulas are compared, or only text and numbers."""

    def __init__(self, matcher: str = "math", answer: str = "auto") -> None:
        if matcher not in MATCHERS:
            raise WhetError(f'There is no matcher "{matcher}"{did_you_mean(matcher, MATCHERS)}')
        if answer not in ANSWERS:
            raise WhetError(f'There is no way to find an answer called "{answer}"{did_you_mean(answer, ANSWERS)}')
        self.matcher, self.answer = matcher, answer
        if matcher == "math":
            verify.warm()

    def judge(self, prompt: Prompt, response: str) -> float:
        r"""1.0 if the response's final answer equals the prompt's, else 0.0."""
        found, golds = self.extract(response), right_answers(prompt.answer)
        problem = problem_text(prompt.text or prompt.messages)
        for answer in dict.fromkeys((found, without_problem_words(found, problem))):
            if any(same_answer(answer, gold, formulas=False) for gold in golds):
                return 1.0  # before any formula is tried, which may be slow
        return float(self.matcher == "math" and any(same_answer(found, gold, formulas=True) for gold in golds))

    def final(self, response: str) -> str:
        """The answer in a form in which equal answers mostly read the same; "" for none."""
        return canonical(self.extract(response))[:LONGEST]

    def extract(self, response: str) -> str:
        """The answer as it is written, or ""."""
        return ANSWERS[self.answer](tidy(after_thinking(response)))


@lru_cache(maxsize=4096)
def right_answers(answer: str) -> tuple[str, ...]:
    r"""The data's answer, the end of a worked solution, or each text of a JSON list: any of these is right."""
    if answer.startswith('["') and answer.endswith('"]'):
        with contextlib.suppress(ValueError, RecursionError):
            return tuple(str(one) for one in json.loads(answer))
    return (boxed(answer) or answer.rpartition("####")[2].strip(),)


def same_answer(found: str, gold: str, formulas: bool, depth: int = 0) -> bool:
    found, gold = found.strip(), gold.strip()
    if not found or not gold or (max(len(found), len(gold)) > LONGEST and not depth):
        return False
    if any(dots in found and dots not in gold for dots in _AND_SO_ON):
        return False
    if (same := same_value(found, gold)) is not None:
        return same
    found, gold = _without_name(found, gold)
    if (same := same_value(found, gold)) is not None:
        return same
    several = has_parts(found) or has_parts(gold)
    if several and depth < DEEPEST_FORM and same_form(found, gold, lambda a, b: same_answer(a, b, formulas, depth + 1)):
        return True
    if (read_form(found) or read_form(gold)) and not any(sign in undress(found + gold) for sign in _RELATIONS):
        return False
    return formulas and verify.same_formula(found, gold)


def _without_name(found: str, gold: str) -> tuple[str, str]:
    """Only one side may name its value, or both by the same name: "x = 5" is 5, but not y = 5."""
    (found_name, given), (gold_name, wanted) = split_name(undress(found)), split_name(undress(gold))
    if found_name and found_name == gold_name:
        return given, wanted
    if gold_name and "=" not in found and not found_name:
        return found, wanted
    if "=" in found and "=" not in gold and not has_parts(found):
        # The last side of "2 + 3 = 5" is the answer, unless the numbers contradict each other, as in "18 = 17".
        sides = found.split("=")
        numbers = {value.number for value in map(read_value, sides) if value.number is not None}
        return (sides[-1] if len(numbers) < 2 else found), wanted if gold_name else gold
    return (given if "=" not in found else found), (wanted if "=" not in gold else gold)


# ---- answers of several parts: lists, sets, tuples, intervals and unions

MOST_PARTS = 40  # the parts of a longer list must come in order
DEEPEST_FORM = 12  # brackets inside brackets; what is nested deeper is compared as text
Equal = Callable[[str, str], bool]

_SEPARATOR = re.compile(r"[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_UNION = re.compile(r"\\cup(?![a-z])")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_ONE_NUMBER = re.compile(r"[0-9]{1,2}(?:,[0-9]{3})+|[0-9]{3}(?:,[0-9]{3})*,0[0-9]{2}(?:,[0-9]{3})*")
_OPENING, _CLOSING = "([{", ")]}"


class Form(NamedTuple):
    kind: str  # "list", "set", "union", or the two brackets of a tuple or interval, as "[)"
    parts: tuple[str, ...]


def has_parts(text: str) -> bool:
    return read_form(text, False) is not None


def read_form(text: str, thousands: bool = True) -> Form | None:
    r"""The parts of an answer; None for a single value. `thousands`: whether 100,200 is one number.

    >>> read_form("1, 2 or 3"), read_form("x+1"), read_form(r"1 \pm x")
    (Form(kind='list', parts=('1', '2', '3')), None, Form(kind='list', parts=('1 + x', '1 - x')))
    >>> read_form("[0, 1)"), read_form("(1,2),(3,4)")
    (Form(kind='[)', parts=('0', '1')), Form(kind='list', parts=('(1,2)', '(3,4)')))
    """
    text = split_name(strip(undress(text)))[1].replace("\\lbrace", "{").replace("\\rbrace", "}").strip()
    depths = _depths(text)
    if not text or min(depths) < 0 or max(depths) > DEEPEST_FORM:
        return None
    if thousands:
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    if len(unions := _split(text, _UNION)) > 1:
        return Form("union", tuple(unions))
    kind, parts = "list", _split(text, _SEPARATOR)
    if len(text) > 2 and text[0] in _OPENING and text[-1] in _CLOSING and min(_depths(text)[1:-1]) >= 1:
        kind, parts = text[0] + text[-1], _split(text[1:-1], _SEPARATOR)
    if kind == "{}":
        kind = "set"
    if kind in ("list", "set"):
        parts = [signed for part in parts for signed in _both_signs(part)]
    return Form(kind, tuple(parts)) if len(parts) > 1 or (parts and kind == "set") else None


def same_form(found: str, gold: str, equal: Equal) -> bool:
    """Whether two answers, at least one of which has parts, are the same; `equal` compares two parts.

    Lists and sets are equal in any order, repeats counted; tuples and intervals part for part, brackets included. A
    list without brackets may stand for a tuple and the reverse, then the order counts.
    """
    if _ONE_NUMBER.fullmatch(strip(undress(gold))):
        return False  # the data's 1,000 is a number; its 100,200 may be a list or a number
    readings = dict.fromkeys((read_form(found, thousands), read_form(gold, thousands)) for thousands in (True, False))
    return any(
        _same_parts(given or Form("list", (found,)), wanted or Form("list", (gold,)), equal)
        for given, wanted in readings
        if given is not None or wanted is not None
    )


def _same_parts(given: Form, wanted: Form, equal: Equal) -> bool:
    if len(given.parts) != len(wanted.parts):
        return False
    kinds = {given.kind, wanted.kind}
    if not (kinds <= {"list", "set"} or kinds == {"union"}):
        in_order = len(kinds) == 1 or kinds == {"()", "list"}
        return in_order and all(equal(a, b) for a, b in zip(given.parts, wanted.parts, strict=True))
    if len(wanted.parts) > MOST_PARTS:
        return given.parts == wanted.parts
    left = list(wanted.parts)  # each part of one uses up a part of the other
    for part in given.parts:
        partner = next((i for i, other in enumerate(left) if equal(part, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def canonical(text: str, depth: int = 0) -> str:
    r"""A form in which equal answers mostly read the same, for counting votes. It is cheap and proves nothing.

    >>> canonical("1,234.0"), canonical(r"\dfrac{1}{2}"), canonical("x = 0.5"), canonical("2, 1"), canonical(r"\{1,2\}")
    ('1234', '1/2', '1/2', '1,2', '1,2')
    """
    form = read_form(text) if depth < DEEPEST_FORM else None
    if form is None:
        value = read_value(split_name(text)[1], True)
        return str(value.number) if value.number is not None else folded(value.text)
    parts = [canonical(part, depth + 1) for part in form.parts]
    if len(form.kind) == 2:
        return f"{form.kind[0]}{','.join(parts)}{form.kind[1]}"
    return ("\\cup" if form.kind == "union" else ",").join(sorted(parts))


def _both_signs(part: str) -> tuple[str, ...]:
    if part.count("\\pm") != 1 or "\\mp" in part:
        return (part,)
    return tuple(part.replace("\\pm", sign).strip().removeprefix("+") for sign in "+-")


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at separators outside all brackets, and leave out empty parts."""
    depths = _depths(text)
    cuts = [found.span() for found in separator.finditer(text) if depths[found.start()] == 0]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return [part for start, end in zip(starts, ends, strict=True) if (part := text[start:end].strip())]


def _depths(text: str) -> list[int]:
    """How many brackets are open at each character; a bracket itself belongs to the outside."""
    depths = accumulate((character in _OPENING) - (character in _CLOSING) for character in text)
    return [depth - (character in _OPENING) for character, depth in zip(text, depths, strict=True)]


# ---- long and structured answers, compared whole, in a time linear in the response

_BOX = "\\boxed{"
_MARKER = re.compile(r".*(?:####|answer(?:\s?:|\s?is\b))", re.IGNORECASE | re.DOTALL)
_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_DECODER = json.JSONDecoder(parse_float=lambda text: int(x) if (x := float(text)).is_integer() else x)  # 2.0 is 2


def same_whole(response: str, answer: str, where: str) -> bool | None:
    r"""Whether the response gives a long or structured answer of the data where the option `answer` looks for it.

    Two texts are the same if they differ only in white space, two JSON values if they are equal once read; of several
    JSON values the last is the answer. None where the matcher decides: for a short answer of the data, and for a
    response without a JSON value, or with another text, where the answer is looked for.
    """
    golds = whole_answers(answer)
    text = after_thinking(response) if golds else ""
    found = {_gives(text, gold, where) for gold in golds}
    return True in found or (False if False in found else None)


@lru_cache(maxsize=4096)
def whole_answers(answer: str) -> tuple[str, ...]:
    r"""The right answers that are compared whole.

    >>> whole_answers('{"a": 1}'), whole_answers("72"), whole_answers('["72", "73"]')
    (('{"a": 1}',), (), ())
    """
    if read_json(answer) is not None:
        return (answer,)
    return tuple(_squeeze(one) for one in right_answers(answer) if len(one) > LONGEST)


def read_json(text: str) -> str | None:
    """A JSON object or list, written so that equal values read the same. A list of texts means several answers.

    >>> read_json('{"b": 1.0, "a": true}'), read_json('["a", "b"]'), read_json("[0, 1)"), read_json("3")
    ('{"a": true, "b": 1}', None, None, None)
    """
    fenced = _FENCED.fullmatch(text.strip())
    found = _decode(fenced[1] if fenced else text)
    return found[0] if found is not None and not found[1] else None


def _gives(text: str, gold: str, where: str) -> bool | None:
    wanted = read_json(gold)
    if where in ("auto", "boxed") and _BOX in text:
        inside = text.rpartition(_BOX)[2]
        if wanted is None:
            inside = _squeeze(inside)
            return (inside.startswith(gold) and inside.removeprefix(gold).lstrip().startswith("}")) or None
        found = _decode(inside)
        return None if found is None else found[0] == wanted and found[1].startswith("}")
    may_be = {"tagged": [in_tags(text)], "whole": [text], "auto": [text, *_FENCED.findall(text)[-1:]]}.get(where, [])
    if where in ("auto", "marked") and (marker := _MARKER.match(text)):
        may_be.append(text[marker.end() :])
    if wanted is None:
        return any(_squeeze(found) == gold for found in may_be) or None
    read = [*filter(None, map(read_json, may_be))]
    return read[-1] == wanted if read else None


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _decode(text: str) -> tuple[str, str] | None:
    """The JSON object or list that a text begins with, written in one way, and the text after it."""
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
