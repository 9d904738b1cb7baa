r"""Whether two single answers are the same as text, number or quantity. Lists and intervals are forms.py's business,
formulas verify.py's; the matcher asks all three. Nothing is evaluated, and every pattern runs in linear time.

An answer is undressed (what TeX adds for the eye goes), then read as a value with perhaps a unit or a percent sign.
Case matters in formulas, not in words. Two numbers are equal or not; if one is a decimal and they are not both whole,
1e-6 of the data's value is allowed.
A unit or percent sign that only one side has is passed over (50% is 50, and also 0.5); two different units differ.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

TOLERANCE = Fraction(1, 1_000_000)
"""Relative to the data's answer; only where one of the two is a decimal, and one not a whole number."""

_SAME = {
    "\u2212": "-",  # the minus sign of typographers
    "\u00d7": "\\times ",
    "\u00b7": "\\cdot ",
    "\u03c0": "\\pi ",
    "\u221e": "\\infty ",
    "\u2264": "\\leq ",
    "\u2265": "\\geq ",
    "\u222a": "\\cup ",
    "\u00b0": "",
    "\u00b2": "^2",
    "\u00b3": "^3",
    "\u2248": "\\approx ",
    "{,}": ",",
    "\\{": "\\lbrace ",
    "\\}": "\\rbrace ",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\leqslant": "\\leq",
    "\\geqslant": "\\geq",
    "**": "^",
    **dict.fromkeys(("^{\\circ}", "^\\circ", "\\degree", "\\displaystyle", "\\qquad", "\\quad", "~"), " "),
}
_THIN = re.compile(r"(?<!\\)\\(?:[!,;: ()\[\]]|left(?![a-z])|right(?![a-z])|\$)")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|boxed|rm)\s?\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[0-9})\]a-z])(?:\s*\\(?:text|textrm|textnormal|mbox|mathrm|rm)\s?\{[^{}]*\}(?:\^\{?-?[0-9]\}?)?)+\s*\.?$"
)
_WORDS_AFTER = re.compile(r"(?<=[0-9})\]%])\s+([A-Za-z]{2,}(?:[ /]+[A-Za-z]+)*(?:\^\{?-?[0-9]\}?)?)\s*\.?$")
_MARGIN = " \t\r\n*`_\"'$:;!?"
_MIXED_SLASH = re.compile(r"(?<![0-9.])([0-9]{1,9})\s+([0-9]{1,9})\s?/\s?([0-9]{1,9})(?![0-9])")
_THOUSANDS = re.compile(r"(?<![0-9,.])([0-9]{1,3})((?:,\s?[0-9]{3})+|(?:\s[0-9]{3})+)(?![0-9]|,[0-9])")
_LONE_BRACES = re.compile(r"([\^_])\{([0-9A-Za-z])\}")
_SPACED_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")

_PLAIN_NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = re.compile(rf"[-+]?{_PLAIN_NUMBER}")
_FRACTION = re.compile(r"([-+]?)([0-9]{0,18})\\frac(?:\{([^{}]+)\}|([0-9]))(?:\{([^{}]+)\}|([0-9]))")
_POWER = re.compile(
    rf"([-+]?{_PLAIN_NUMBER}(?:\\times|\\cdot|\*|x))?([-+]?)10\^(?:\{{([-+]?[0-9]{{1,3}})\}}|([-+]?[0-9]{{1,3}}))"
)
_PERCENT = re.compile(r"\s*(?:\\?%|percent)\s*\.?$", re.IGNORECASE)
_INDEX = r"(?:_(?:\{[^{}=]*\}|[A-Za-z0-9]))?"
_NAME = re.compile(
    rf"\s*\{{?(\([A-Za-z0-9_, ]{{1,30}}\)|(?:\\?[A-Za-z]+|\\[a-z]+\s?[A-Za-z ]+){_INDEX}(?:\([A-Za-z, ]{{1,9}}\))?)"
    r"\s*(?:=|\\in(?![a-z]))"
)
_CHOICE = re.compile(r"\(?([A-Z])[).:]?")
_CHOICE_FIRST = re.compile(r"\(?([A-Z])[).:]\s*\S")
_UNIT_NAMES = {
    long: short
    for short, longs in {
        "m": "meter metre",
        "cm": "centimeter centimetre",
        "mm": "millimeter",
        "km": "kilometer kilometre",
        "in": "inch inche",
        "ft": "foot feet",
        "s": "second sec",
        "h": "hour hr",
        "min": "minute",
        "kg": "kilogram",
        "g": "gram",
        "": "degree",
    }.items()
    for long in longs.split()
}


class Value(NamedTuple):
    text: str
    """Without unit and percent sign, undressed, no spaces."""
    unit: str
    percent: bool
    number: Fraction | None
    rounded: bool
    """Written with a point or a power of ten, so that digits may be missing."""


def same_value(found: str, gold: str) -> bool:
    """As text, as numbers, or as the one number between words ("about 42 apples").

    >>> same_value("1,234.50 dollars", "1234.5"), same_value("5 m", "5 km"), same_value("0.3333", "1/3")
    (True, False, False)
    """
    given, wanted = read_value(found), read_value(gold)
    if not given.text or not wanted.text:
        return False
    if given.unit and wanted.unit and given.unit != wanted.unit:
        return False
    if _same_text(given.text, wanted.text) and given.percent == wanted.percent:
        return True
    if wanted.number is None:
        return _same_choice(found, wanted.text)
    number = given.number if given.number is not None else lone_number(undress(found))
    if number is None:
        return False
    tolerance = TOLERANCE if given.rounded or wanted.rounded else Fraction(0)
    if _equal(number, wanted.number, tolerance):
        return True
    scale = int(wanted.percent) - int(given.percent)
    return scale != 0 and _equal(number * Fraction(100) ** scale, wanted.number, tolerance)


def settled(found: str, gold: str) -> bool:
    """Two numbers or two different units: what same_value says of them is the last word.

    Not so where both have commas: 100,200 may be a list.
    """
    given, wanted = read_value(found), read_value(gold)
    if given.unit and wanted.unit and given.unit != wanted.unit:
        return True
    return given.number is not None and wanted.number is not None and not ("," in found and "," in gold)


@lru_cache(maxsize=4096)
def read_value(text: str) -> Value:
    text, unit = split_unit(text)
    bare = _PERCENT.sub("", text)
    short = plain(undress(bare))
    return Value(short, unit, bare != text, number(short), "." in short or "e" in short or "10^" in short)


def split_unit(text: str) -> tuple[str, str]:
    r"""Value and unit, as far as TeX or a space sets the unit apart.

    >>> split_unit(r"15\mbox{ cm}^2"), split_unit("42 apples"), split_unit(r"\text{even}"), split_unit("2 pi")
    (('15', 'cm^2'), ('42', 'apple'), ('\\text{even}', ''), ('2', 'pi'))
    """
    text = _THIN.sub(" ", text).strip(_MARGIN)
    found = _UNIT.search(text) or _WORDS_AFTER.search(text)
    if found is None or not text[: found.start()].strip(_MARGIN):
        return text, ""
    words = [_unit_name(word) for word in re.findall(r"[A-Za-z]+|\^\{?-?[0-9]\}?", _WRAPPED.sub(r" \1", found.group()))]
    return text[: found.start()], "".join(words)


def _unit_name(word: str) -> str:
    if word[0] == "^":
        return word.replace("{", "").replace("}", "")
    word = word.lower()
    single = word.removesuffix("s") if len(word) > 2 else word
    return _UNIT_NAMES.get(single, single)


def undress(text: str) -> str:
    r"""Without what TeX adds for the eye.

    >>> undress(r"\left(5\text{ cm}\right)"), undress(r"\dfrac{1}{2}"), undress(r"10,\!080")
    ('(5 cm)', '\\frac{1}{2}', '10,080')
    """
    for old, new in _SAME.items():
        if old in text:
            text = text.replace(old, new)
    return _WRAPPED.sub(r"\1", _THIN.sub("", text)).replace("$", "")


def plain(text: str) -> str:
    r"""Without what stands around an answer, and spaces; only those between digits stay, for "4 2" is not 42.

    >>> plain("$New York$."), plain(" **1,000** "), plain("1 000"), plain("1 4/5"), plain("4 2")
    ('NewYork', '1,000', '1000', '1\\frac{4}{5}', '4 2')
    """
    text = _MIXED_SLASH.sub(r"\1\\frac{\2}{\3}", strip(text))
    text = _THOUSANDS.sub(lambda m: m[1] + "".join(m[2].split()), text)
    return _LONE_BRACES.sub(r"\1\2", "".join(_SPACED_DIGITS.sub("\0", text).split()).replace("\0", " "))


def strip(text: str) -> str:
    return text.strip(_MARGIN).rstrip(".," + _MARGIN)


def drop_name(text: str) -> str:
    r"""What stands right of "x =", "f(x) =" or "x \in".

    >>> drop_name("f(x) = 2x"), drop_name(r"x \in [0, 1]"), drop_name("x + y = 2")
    (' 2x', ' [0, 1]', 'x + y = 2')
    """
    return split_name(text)[1]


def split_name(text: str) -> tuple[str, str]:
    """What is named, without spaces, and its value; "" and the text where it is not just that."""
    name = _NAME.match(text)
    if name is None or "=" in text[name.end() :]:
        return "", text
    return "".join(name[1].split()), text[name.end() :]


def number(text: str) -> Fraction | None:
    r"""The value of a plain answer that is a number and nothing else.

    >>> number("1,234"), number("-.5"), number("\\frac{3}{4}"), number("3/4"), number("3x")
    (Fraction(1234, 1), Fraction(-1, 2), Fraction(3, 4), Fraction(3, 4), None)
    >>> number("1\\frac{4}{5}"), number("4.5\\times10^{3}"), number("10^{-2}")
    (Fraction(9, 5), Fraction(4500, 1), Fraction(1, 100))
    """
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if latex := _FRACTION.fullmatch(text):
        return _fraction(*latex.groups())
    if power := _POWER.fullmatch(text):
        return _power(*power.groups())
    above, slash, below = text.partition("/")
    value = _decimal(above)
    if not slash or value is None:
        return value
    divisor = _decimal(below)
    return value / divisor if divisor else None


def _fraction(sign: str, whole: str, *parts: str | None) -> Fraction | None:
    """Also a mixed number: digits before a proper fraction of whole numbers."""
    above, below = (_decimal(part) for part in parts if part is not None)
    if above is None or not below or (sign and above < 0):
        return None
    if whole and not (above.denominator == below.denominator == 1 and 0 < above < below):
        return None
    value = int(whole or 0) + above / below
    return -value if sign == "-" else value


def _power(mantissa: str | None, sign: str, *exponents: str | None) -> Fraction | None:
    value = _decimal(mantissa.rstrip("\\timescdo*x")) if mantissa else Fraction(1)
    if value is None or (mantissa and sign):
        return None
    (exponent,) = (int(e) for e in exponents if e is not None)
    return (-value if sign == "-" else value) * Fraction(10) ** exponent


def _decimal(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "").rstrip(".")) if _NUMBER.fullmatch(text) else None


def _equal(given: Fraction, wanted: Fraction, tolerance: Fraction) -> bool:
    """Whole numbers exactly: a relative tolerance would take 1000001 for 1000000."""
    if given.denominator == wanted.denominator == 1:
        return given == wanted
    return abs(given - wanted) <= tolerance * abs(wanted)


def lone_number(text: str) -> Fraction | None:
    """42 of "about 42 apples"; None of "2 x", "3 or 4" and "3 \\pi": a number is not their whole value."""
    values = []
    for word in text.split():
        bare = word.strip(_MARGIN + "%.,()")
        value = number(plain(word.rstrip("%")))
        if value is not None:
            values.append(value)
        elif bare and (len(bare) == 1 or not bare.isalpha()):
            return None
    return values[0] if len(values) == 1 else None


def folded(text: str) -> str:
    """Words lose their case; formulas, where r and R differ, keep it.

    >>> folded("NewYork"), folded("rR/2"), folded("m")
    ('newyork', 'rR/2', 'm')
    """
    return text.casefold() if len(text) > 1 and text.replace("-", "").isalpha() else text


def _same_text(given: str, wanted: str) -> bool:
    return given == wanted or folded(given) == folded(wanted)


def _same_choice(found: str, wanted: str) -> bool:
    """(C), C. and "C) 12" are all choice C."""
    letter = _CHOICE.fullmatch(wanted)
    if letter is None:
        return False
    text = strip(undress(found))
    chosen = _CHOICE.fullmatch(text) or _CHOICE_FIRST.match(text)
    return chosen is not None and chosen[1] == letter[1]
