r"""The judge of task "text": finds the final answer in a response and compares it with the data's.

Found: the last \boxed{...}; else what follows the last "####", "#" or "answer is"; else the last number. Compared:
as text without its dress (dollars, commas in thousands, case, spaces), then as a number. Responses are hostile:
nothing is evaluated, an answer longer than 300 characters is none, and every pattern runs in linear time. Proving
two formulas equal is not its business; a matcher that can will stand beside it in MATCHERS.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction

from whet.types import Prompt

LONGEST = 300
"""Characters of an answer; what is longer is no answer."""
TOLERANCE = Fraction(1, 1_000_000)
"""Relative to the data's answer, and only where one of the two is not a whole number."""

_BOX = "\\boxed{"
_MARKER = re.compile(r"####|#(?=[^\s#])|answer(?:\s?:|\s?is\b)", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:e[-+]?[0-9]{1,3})?")
_FRACTION = re.compile(r"([-+]?)\\frac(?:\{([^{}]+)\}|([0-9]))(?:\{([^{}]+)\}|([0-9]))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|boxed)\s?\{([^{}]*)\}")
_SAME = {
    "\u2212": "-",  # the minus sign of typographers
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    **dict.fromkeys(
        ("\\left", "\\right", "\\!", "\\,", "\\;", "\\:", "\\ ", "~", "^{\\circ}", "^\\circ", "\\$", "\\%"), ""
    ),
}
_MARGIN = " \t\r\n*`_\"'$%:;!?"
_BRACKETS = (("\\(", "\\)"), ("\\[", "\\]"))


def match(prompt: Prompt, response: str) -> float:
    r"""
    >>> match(Prompt(id="a", text="?", answer="1234.5", task="text"), "That makes \\boxed{1,234.50}.")
    1.0
    """
    gold = boxed(prompt.answer) or prompt.answer.rpartition("####")[2]
    return float(same_answer(extract(response), gold))


MATCHERS: dict[str, Callable[[Prompt, str], float]] = {"match": match}


def extract(response: str) -> str:
    """The final answer as it is written, or ""."""
    return boxed(response) or _marked(response) or _last_number(response)


def same_answer(found: str, gold: str) -> bool:
    """As text, or as numbers, or as the one number between words ("42 apples")."""
    found, gold = found.strip(), gold.strip()
    if not found or not gold or max(len(found), len(gold)) > LONGEST:
        return False
    found, gold = undress(found), undress(gold)
    if "=" in found and "=" not in gold:
        found = found.rpartition("=")[2]
    plain_found, plain_gold = plain(found), plain(gold)
    if plain_found == plain_gold:
        return bool(plain_gold)
    wanted = number(plain_gold)
    if wanted is None:
        return False
    given = number(plain_found)
    if given is None:
        given = _lone_number(found)
    return given is not None and _equal(given, wanted)


def boxed(text: str) -> str:
    r"""What the last \boxed{...} holds, braces balanced; "" where it is not closed.

    >>> boxed(r"so \boxed{\frac{1}{2}}."), boxed(r"so \boxed{1")
    ('\\frac{1}{2}', '')
    """
    start = text.rfind(_BOX)
    if start < 0:
        return ""
    inside = text[start + len(_BOX) : start + len(_BOX) + LONGEST + 1]
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


def undress(text: str) -> str:
    r"""Without what TeX adds for the eye.

    >>> undress(r"\left(5\text{ cm}\right)"), undress(r"\dfrac{1}{2}")
    ('(5 cm)', '\\frac{1}{2}')
    """
    for old, new in _SAME.items():
        text = text.replace(old, new)
    return _WRAPPED.sub(r"\1", text)


def plain(text: str) -> str:
    r"""Without what stands around an answer, spaces and case.

    >>> plain("$New York$."), plain(" **1,000** %")
    ('newyork', '1,000')
    """
    text = _strip(text)
    for left, right in _BRACKETS:
        text = _strip(text.removeprefix(left).removesuffix(right))
    return "".join(text.split()).casefold()


def number(text: str) -> Fraction | None:
    r"""The value of a plain answer that is a number and nothing else.

    >>> number("1,234"), number("-.5"), number("\\frac{3}{4}"), number("3/4"), number("3x")
    (Fraction(1234, 1), Fraction(-1, 2), Fraction(3, 4), Fraction(3, 4), None)
    """
    if latex := _FRACTION.fullmatch(text):
        sign, *parts = latex.groups()
        above, below = (part for part in parts if part is not None)
        text = f"{sign}{above}/{below}" if not (sign and above[:1] in "+-") else ""
    above, slash, below = text.partition("/")
    value = _decimal(above)
    if not slash or value is None:
        return value
    divisor = _decimal(below)
    return value / divisor if divisor else None


def _decimal(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _equal(given: Fraction, wanted: Fraction) -> bool:
    """Whole numbers exactly: a relative tolerance would take 1000001 for 1000000."""
    if given.denominator == wanted.denominator == 1:
        return given == wanted
    return abs(given - wanted) <= TOLERANCE * abs(wanted)


def _lone_number(text: str) -> Fraction | None:
    """42 of "about 42 apples"; None of "2 x", "3 or 4" and "3 \\pi": a number is not their whole value."""
    values = []
    for word in text.split():
        bare = word.strip(_MARGIN + ".,()")
        value = number(plain(word))
        if value is not None:
            values.append(value)
        elif bare and (len(bare) == 1 or not bare.isalpha()):
            return None
    return values[0] if len(values) == 1 else None


def _marked(text: str) -> str:
    """The line after the last marker, to the end of its first sentence."""
    last = _last(_MARKER, text)
    if last is None:
        return ""
    rest = text[last.end() : last.end() + 2 * LONGEST].lstrip(" \t\r\n:*_$").removeprefix("\\[").lstrip()
    line = rest.partition("\n")[0].partition(". ")[0]
    return line.strip() if len(line) <= LONGEST else ""


def _last_number(text: str) -> str:
    last = _last(_NUMBER_IN_TEXT, text)
    return last.group().rstrip(",") if last is not None and len(last.group()) <= LONGEST else ""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _strip(text: str) -> str:
    return text.strip(_MARGIN).rstrip(".," + _MARGIN)
