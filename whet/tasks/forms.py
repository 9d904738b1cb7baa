r"""How an answer of several parts is put together: lists, sets, tuples, intervals and their unions.

The matcher compares part by part with these. Lists and sets are equal in any order, repeats counted; tuples and
intervals part for part, brackets included. A list without brackets may stand for a tuple and the reverse, then the
order counts. "1 \pm \sqrt2" is a list of two. Knows nothing of what makes two parts equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from whet.tasks.match import drop_name, folded, read_value, strip, undress

MOST_PARTS = 40
"""Of an answer with more, the parts must come in order."""
DEEPEST = 12
"""Brackets in brackets; what is nested deeper is compared as text."""

Equal = Callable[[str, str], bool]

_SEPARATOR = re.compile(r"[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_ONE_NUMBER = re.compile(r"[0-9]{1,2}(?:,[0-9]{3})+|[0-9]{3}(?:,[0-9]{3})*,0[0-9]{2}(?:,[0-9]{3})*")
_OPENING, _CLOSING = "([{", ")]}"


class Form(NamedTuple):
    kind: str
    """"list", "set", "union", or the two brackets of a tuple or interval, as "[)"."""
    parts: tuple[str, ...]


def same_form(found: str, gold: str, equal: Equal) -> bool:
    """Whether two answers, of which at least one has parts, are the same; `equal` decides of two parts.

    The data's 100,200 may be a list or a number; its 1,000 is a number.
    """
    if _ONE_NUMBER.fullmatch(strip(undress(gold))):
        return False
    readings = dict.fromkeys((read_form(found, thousands), read_form(gold, thousands)) for thousands in (True, False))
    for given, wanted in readings:
        if given is None and wanted is None:
            continue
        if _same(given or Form("list", (found,)), wanted or Form("list", (gold,)), equal):
            return True
    return False


def has_parts(text: str) -> bool:
    return read_form(text, False) is not None


def read_form(text: str, thousands: bool = True) -> Form | None:
    r"""None for a single value. `thousands`: whether 100,200 is one number.

    >>> read_form("1, 2 or 3"), read_form("[0, 1)"), read_form("(1,2),(3,4)"), read_form("x+1")
    (Form(kind='list', parts=('1', '2', '3')), Form(kind='[)', parts=('0', '1')), Form(kind='list', parts=('(1,2)', '(3,4)')), None)
    """  # noqa: E501
    text = drop_name(strip(undress(text))).replace("\\lbrace", "{").replace("\\rbrace", "}").strip()
    if not _balanced(text):
        return None
    if thousands:
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    unions = list(_split(text, re.compile(r"\\cup(?![a-z])")))
    if len(unions) > 1:
        return _form("union", unions)
    if (inside := _inside(text)) is not None:
        kind = text[0] + text[-1]
        parts = list(_split(inside, _SEPARATOR))
        if kind == "{}":
            return _form("set", parts)
        return _form(kind, parts) if len(parts) > 1 else None
    parts = list(_split(text, _SEPARATOR))
    form = _form("list", parts)
    return form if form is not None and len(form.parts) > 1 else None


def canonical(text: str, depth: int = 0) -> str:
    r"""A form in which equal answers mostly read the same: what a majority vote counts. Cheap; proves nothing.

    >>> canonical("1,234.0"), canonical(r"\dfrac{1}{2}"), canonical("x = 0.5"), canonical("2, 1"), canonical(r"\{1,2\}")
    ('1234', '1/2', '1/2', '1,2', '1,2')
    """
    form = read_form(text) if depth < DEEPEST else None
    if form is None:
        value = read_value(drop_name(text), True)
        return str(value.number) if value.number is not None else folded(value.text)
    parts = [canonical(part, depth + 1) for part in form.parts]
    if len(form.kind) == 2:
        return f"{form.kind[0]}{','.join(parts)}{form.kind[1]}"
    return ("\\cup" if form.kind == "union" else ",").join(sorted(parts))


def _form(kind: str, parts: list[str]) -> Form | None:
    if kind in ("list", "set"):
        parts = [signed for part in parts for signed in _both_signs(part)]
    return Form(kind, tuple(parts)) if parts else None


def _both_signs(part: str) -> tuple[str, ...]:
    if part.count("\\pm") != 1 or "\\mp" in part:
        return (part,)
    return tuple(part.replace("\\pm", sign).strip().removeprefix("+") for sign in "+-")


def _same(given: Form, wanted: Form, equal: Equal) -> bool:
    if len(given.parts) != len(wanted.parts):
        return False
    kinds = {given.kind, wanted.kind}
    if kinds <= {"list", "set"} or kinds == {"union"}:
        return _same_bag(given.parts, wanted.parts, equal)
    if len(kinds) > 1 and kinds != {"()", "list"}:
        return False
    return all(equal(a, b) for a, b in zip(given.parts, wanted.parts, strict=True))


def _same_bag(given: tuple[str, ...], wanted: tuple[str, ...], equal: Equal) -> bool:
    """In any order; each part of one is used up by a part of the other."""
    if len(wanted) > MOST_PARTS:
        return given == wanted
    left = list(wanted)
    for part in given:
        partner = next((i for i, other in enumerate(left) if equal(part, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _split(text: str, separator: re.Pattern[str]) -> Iterator[str]:
    """At separators outside all brackets; empty parts are left out."""
    start, depths = 0, _depths(text)
    for found in separator.finditer(text):
        if depths[found.start()] == 0:
            if part := text[start : found.start()].strip():
                yield part
            start = found.end()
    if part := text[start:].strip():
        yield part


def _inside(text: str) -> str | None:
    """What one pair of brackets around everything holds."""
    if len(text) < 3 or text[0] not in _OPENING or text[-1] not in _CLOSING:
        return None
    return text[1:-1] if min(_depths(text)[1:-1]) >= 1 else None


def _depths(text: str) -> list[int]:
    """Of each character; a bracket belongs to the outside."""
    depth, depths = 0, []
    for character in text:
        depth -= character in _CLOSING
        depths.append(depth)
        depth += character in _OPENING
    return depths


def _balanced(text: str) -> bool:
    depths = _depths(text)
    return not depths or (min(depths) >= 0 and max(depths) <= DEEPEST)
