r"""Whether two answers say the same. values.py compares single ones; this file takes lists, sets, tuples and intervals
apart and compares them part by part; formulas.py asks math-verify about what is left.

Lists and sets are equal in any order, tuples in order, and parts with names (x = 1, y = 2) by their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from whet.tasks.formulas import LONGEST, same_formula
from whet.tasks.values import clean, folded, read_value, same_value, split_unit, strip, unmarked

MOST_PARTS = 40  # the parts of a longer list must come in order
DEEPEST = 12  # brackets inside brackets; what is nested deeper is compared as text

_INDEX = r"(?:_(?:\{[^{}=]*\}|[A-Za-z0-9]))?"
_NAME = re.compile(
    rf"\s*\{{?(\([A-Za-z0-9_, ]{{1,30}}\)|(?:\\?[A-Za-z]+|\\[a-z]+\s?[A-Za-z ]+){_INDEX}(?:\([A-Za-z, ]{{1,9}}\))?)"
    r"\s*(?:=|\\in(?![a-z]))"
)
_COLUMN = re.compile(r"\\begin\{([pb]matrix)\}((?:[^&{}]|\{[^&{}]*\})*?)\\end\{\1\}")
_SEPARATOR = re.compile(r"[,;]|\"\s*,?\s*(?:and|or)\s*\"|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_NUMBER_WITH_COMMAS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_ONE_NUMBER = re.compile(r"[0-9]{1,2}(?:,[0-9]{3})+|[0-9]{3}(?:,[0-9]{3})*,0[0-9]{2}(?:,[0-9]{3})*")
_OPENING = "([{"
_CLOSING = ")]}"
_AND_SO_ON = ("...", "\\ldots", "\\dots", "\\cdots")
_RELATIONS = ("<", ">", "\\leq", "\\geq", "\\le ", "\\ge ", "\\neq", "\\ne ")


class Form(NamedTuple):
    kind: str  # "list", "set", or the two brackets of a tuple or interval, as "[)"
    parts: tuple[str, ...]


def same_answer(found: str, gold: str, question: str = "", formulas: bool = True) -> bool:
    """Whether an answer is the data's; `question` says what is counted. Formulas may raise TooSlow."""
    if max(len(found), len(gold)) > LONGEST:
        return False
    return _same(clean(found), clean(gold), question, formulas, 0)


def _same(found: str, gold: str, question: str, formulas: bool, depth: int) -> bool:
    found = found.strip()
    gold = gold.strip()
    if not found or not gold or any(dots in found and dots not in gold for dots in _AND_SO_ON):
        return False
    if (same := same_value(found, gold, question)) is not None:
        return same
    found, gold = _without_name(found, gold)
    if (same := same_value(found, gold, question)) is not None:
        return same
    several = read_form(found) or read_form(gold)
    parts = lambda a, b: _same(a, b, question, formulas, depth + 1)  # noqa: E731
    if depth < DEEPEST and same_form(found, gold, parts, question):
        return True
    if not formulas or (several and not any(sign in found + gold for sign in _RELATIONS)):
        return False
    return same_formula(*(" ".join(unmarked(split_unit(one)[0]).split()) for one in (found, gold)))


def split_name(text: str) -> tuple[str, str]:
    r"""The name left of the only "=" (or \in), without spaces, and the value right of it; else "" and the text.

    >>> split_name("f(x) = 2x"), split_name(r"x \in [0, 1]"), split_name("x + y = 2")
    (('f(x)', ' 2x'), ('x', ' [0, 1]'), ('', 'x + y = 2'))
    """
    name = _NAME.match(text)
    if name is None or "=" in text[name.end() :]:
        return "", text
    return "".join(name[1].split()), text[name.end() :]


def _without_name(found: str, gold: str) -> tuple[str, str]:
    """Only one side may name its value, or both by the same name: "x = 5" is 5, but not y = 5."""
    (found_name, given), (gold_name, wanted) = split_name(found), split_name(gold)
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


def has_parts(text: str) -> bool:
    return read_form(text, thousands=False) is not None


def read_form(text: str, thousands: bool = True) -> Form | None:
    r"""The parts of a cleaned answer; None for a single value. `thousands`: whether 100,200 is one number.

    >>> read_form("1, 2 or 3"), read_form("x+1"), read_form(r"1 \pm x")
    (Form(kind='list', parts=('1', '2', '3')), None, Form(kind='list', parts=('1 + x', '1 - x')))
    >>> read_form("[0, 1)"), read_form("(1,2),(3,4)"), read_form(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}")
    (Form(kind='[)', parts=('0', '1')), Form(kind='list', parts=('(1,2)', '(3,4)')), Form(kind='()', parts=('1', '2')))
    """
    name, text = split_name(strip(text))
    text = text.replace("\\lbrace", "{").replace("\\rbrace", "}").strip()
    if column := _COLUMN.fullmatch(text):
        text = "(" + column[2].replace("\\\\", ",") + ")"
    depths = _depths(text)
    if not text or min(depths) < 0 or max(depths) > DEEPEST:
        return None
    if thousands:
        text = _NUMBER_WITH_COMMAS.sub(lambda found: found[0].replace(",", ""), text)
    kind = "list"
    parts = _split(text)
    if (
        len(text) > 2
        and text[0] in _OPENING
        and text[-1] in _CLOSING
        and min(_depths(text)[1:-1]) >= 1
    ):
        kind = text[0] + text[-1]
        parts = _split(text[1:-1])
    names = name.strip("()").split(",")
    if len(names) == len(parts) > 1:
        parts = [f"{one}={part}" for one, part in zip(names, parts, strict=True)]  # (x, y) = (1, 2)
    if kind == "{}" and parts != ["\\emptyset"]:  # the set of the empty set is not the empty set
        kind = "set"
    if kind in ("list", "set"):
        parts = [signed for part in parts for signed in _both_signs(part)]
    return Form(kind, tuple(parts)) if len(parts) > 1 or (parts and kind in ("set", "{}")) else None


def same_form(found: str, gold: str, equal: Callable[[str, str], bool], question: str = "") -> bool:
    """Whether two answers, at least one of which has parts, are the same; `equal` compares two parts.

    Lists and sets are equal in any order, repeats counted; tuples and intervals part for part, brackets included. A
    list without brackets may stand for a tuple and the reverse, then the order counts.
    """
    if _ONE_NUMBER.fullmatch(strip(gold)):
        return False  # the data's 1,000 is a number; its 100,200 may be a list or a number
    readings = dict.fromkeys(
        (read_form(found, thousands), read_form(gold, thousands)) for thousands in (True, False)
    )
    for given, wanted in readings:
        if given is None and wanted is None:
            continue
        given = given or Form("list", (found,))
        wanted = wanted or Form("list", (gold,))
        if _same_parts(_by_name(given, question), _by_name(wanted, question), equal):
            return True
    return False


def _by_name(form: Form, question: str) -> Form:
    """Parts that different names tell apart, as the tuple that the question asks for, else in alphabetical order."""
    named = dict(map(split_name, form.parts))
    letters = {name[:1] for name in named}
    if "" in named or len(named) < len(form.parts) or len(letters) == 1:
        return form  # x_1 and x_2 are two values of x, in any order
    order = sorted(named)
    for asked in re.findall(r"\(([^()]{3,40})\)", clean(question)):
        names = "".join(asked.split()).split(",")
        if sorted(names) == order:
            order = names
    return Form("()", tuple(named[name] for name in order))


def _same_parts(given: Form, wanted: Form, equal: Callable[[str, str], bool]) -> bool:
    if len(given.parts) != len(wanted.parts):
        return False
    kinds = {given.kind, wanted.kind}
    if not kinds <= {"list", "set"}:
        in_order = len(kinds) == 1 or kinds == {"()", "list"}
        return in_order and all(map(equal, given.parts, wanted.parts))
    if len(wanted.parts) > MOST_PARTS:
        return given.parts == wanted.parts
    left = list(wanted.parts)  # each part of one uses up a part of the other
    for part in given.parts:
        partner = next((i for i, other in enumerate(left) if equal(part, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def canonical(text: str) -> str:
    r"""A form in which equal answers mostly read the same, for counting votes. It is cheap and proves nothing.

    >>> canonical("1,234.0"), canonical(r"\dfrac{1}{2}"), canonical("x = 0.5"), canonical("2, 1"), canonical(r"\{1,2\}")
    ('1234', '1/2', '1/2', '1,2', '1,2')
    """
    return _canonical(clean(text), 0)


def _canonical(text: str, depth: int) -> str:
    form = read_form(text) if depth < DEEPEST else None
    if form is None:
        value = read_value(split_name(text)[1], True)
        return str(value.number) if value.number is not None else folded(value.text)
    parts = [_canonical(part, depth + 1) for part in form.parts]
    if len(form.kind) == 2:
        return f"{form.kind[0]}{','.join(parts)}{form.kind[1]}"
    return ",".join(sorted(parts))


def _both_signs(part: str) -> tuple[str, ...]:
    if part.count("\\pm") != 1 or "\\mp" in part:
        return (part,)
    return tuple(part.replace("\\pm", sign).strip().removeprefix("+") for sign in "+-")


def _split(text: str) -> list[str]:
    """Split at separators outside all brackets, and leave out empty parts."""
    depths = _depths(text)
    parts = []
    start = 0
    for found in _SEPARATOR.finditer(text):
        if depths[found.start()] == 0:
            parts.append(text[start : found.start()])
            start = found.end()
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _depths(text: str) -> list[int]:
    """How many brackets are open at each character; a bracket itself belongs to the outside."""
    depths = accumulate((character in _OPENING) - (character in _CLOSING) for character in text)
    return [depth - (character in _OPENING) for character, depth in zip(text, depths, strict=True)]
