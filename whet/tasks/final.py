r"""Where a response gives its final answer. Called by the matcher and the reward terms; compares nothing.

First everything up to the last "</think>" is dropped; a response still thinking has no answer. Then, by `answer`:
"boxed" (the last \boxed{...}), "tagged" (the last <answer>...</answer>), "marked" (what follows the last "####",
"#" or "answer is"), "last_number", "whole" (all of it), or "auto": boxed where there is a box (one that is not
closed holds no answer), else marked, else the last number.
Responses are hostile: an answer longer than 300 characters is none, and every pattern runs in linear time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

LONGEST = 300
"""Characters of an answer; what is longer is no answer."""

_BOX = "\\boxed{"
_SPACED_BOX = re.compile(r"\\f?boxed ?\{")
_MARKER = re.compile(r"####|#(?=[^\s#])|answer(?:\s?:|\s?is\b)", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def after_thinking(response: str) -> str:
    """
    >>> after_thinking("<think>2+2</think>4"), after_thinking("<think>2+2"), after_thinking("4")
    ('4', '', '4')
    """
    rest = response.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def auto(text: str) -> str:
    if _BOX in text or _SPACED_BOX.search(text):
        return boxed(text)
    return marked(text) or last_number(text)


def boxed(text: str) -> str:
    r"""What the last \boxed{...} holds, braces balanced; "" where it is not closed.

    >>> boxed(r"so \boxed{\frac{1}{2}}."), boxed(r"so \boxed{1")
    ('\\frac{1}{2}', '')
    """
    start = text.rfind(_BOX)
    end = start + len(_BOX)
    if start < 0:
        last = _last(_SPACED_BOX, text)
        if last is None:
            return ""
        end = last.end()
    inside = text[end : end + LONGEST + 1]
    depth, escaped = 1, False
    for i, character in enumerate(inside):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        else:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return inside[:i].strip()
    return ""


def tagged(text: str) -> str:
    """
    >>> tagged("<answer>3</answer> no, <answer> 4 </answer>")
    '4'
    """
    _, opened, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
    return _short(inside) if opened else ""


def marked(text: str) -> str:
    """The line after the last marker, to the end of its first sentence."""
    last = _last(_MARKER, text)
    if last is None:
        return ""
    rest = text[last.end() : last.end() + 2 * LONGEST].lstrip(" \t\r\n:*_$").removeprefix("\\[").lstrip()
    return _short(rest.partition("\n")[0].partition(". ")[0])


def last_number(text: str) -> str:
    last = _last(_NUMBER_IN_TEXT, text)
    return _short(last.group().rstrip(",")) if last is not None else ""


def whole(text: str) -> str:
    return _short(text)


ANSWERS: dict[str, Callable[[str], str]] = {
    "auto": auto,
    "boxed": boxed,
    "tagged": tagged,
    "marked": marked,
    "last_number": last_number,
    "whole": whole,
}


def _short(text: str) -> str:
    return text.strip() if len(text) <= LONGEST else ""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)
