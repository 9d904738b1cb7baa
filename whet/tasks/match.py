r"""Whether two single answers are the same as text, number or quantity. Nothing is evaluated, all patterns are linear.

The matcher calls `same_value` first, before it compares lists, intervals and formulas. An answer loses what
TeX adds for the eye, then it is read as a value with perhaps a unit or a percent sign. Case matters in formulas, not
in words. Two numbers are equal or not; if one is a decimal and they are not both whole, 1e-6 of the data's value is
allowed. A unit or percent sign that only one side has is ignored (50% is 50, and also 0.5); two different units
differ. Which words are units, and which change a number, is listed in final.py; the data's answer may have any unit.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from whet.tasks.final import CHANGERS, FILLERS, NUMERALS, SCALES, singular, unit_name

TOLERANCE = Fraction(1, 1_000_000)  # relative to the data's answer

_SAME = {  # replaced in this order
    "×": "\\times ", "·": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\leq ", "≥": "\\geq ", "∪": "\\cup ",
    "≈": "\\approx ", "±": "\\pm ", "°": "", "²": "^2", "³": "^3", "÷": "/", "\\div": "/", "{,}": ",", "{:}": ":",
    "\\colon": ":", "\\gt": ">", "\\lt": "<", "<=": "\\leq ", ">=": "\\geq ", "!=": "\\neq ", "\\{": "\\lbrace ",
    "\\}": "\\rbrace ", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\leqslant": "\\leq",
    "\\geqslant": "\\geq", "**": "^",
    **dict.fromkeys(("^{\\circ}", "^\\circ", "\\degree", "\\displaystyle", "\\qquad", "\\quad", "~"), " "),
}  # fmt: skip
_SIGNS = dict(zip("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\u2019\u02bc\u2044", "-------''/", strict=True))
_THIN = re.compile(r"(?<!\\)\\(?:[,;: ()\[\]]|left(?![a-z])|right(?![a-z])|[bB]igg?[lr]?(?![a-z])|\$)")
_NO_SPACE = re.compile(r"(?<!\\)\\!\s*")
_OVER = re.compile(r"\{\s?([0-9]{1,18})\s?\\over\s?([0-9]{1,18})\s?\}")
_ROOT = re.compile(r"(?:\u221a|(?<![\\a-z])sqrt)(?:\(([0-9a-z]{1,18})\)|([0-9a-z]{1,18}))")
_TEXT = r"(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|boldsymbol|boxed|rm)"
_WRAPPED = re.compile(rf"\\{_TEXT}\s?\{{([^{{}}]*)\}}")
_UNIT = re.compile(rf"(?<=[0-9}})\]a-z])(?:\s*\\{_TEXT}\s?\{{[^{{}}]*\}}(?:\^\{{?-?[0-9]\}}?)?)+\s*\.?$")
_POWER_OF_UNIT = r"(?:\^\{?-?[0-9]\}?)?"
_WORDS_AFTER = re.compile(
    rf"(?<=[0-9}})\]%])(?:\s+|(?=(?:[ap]m|[cmk]m|kg|mph)\b)|(?=[AP]M\b))"
    rf"([A-Za-z]+{_POWER_OF_UNIT}(?:[ /]+[A-Za-z]+{_POWER_OF_UNIT})*)\s*\.?$"
)
_LETTER_AFTER = re.compile(r"[0-9)}]\s+[A-Za-z]\.?$")
_UNIT_WORDS = re.compile(r"/|[A-Za-z]+|\^\{?-?[0-9]\}?")
_CURRENCY = re.compile(r"\s*(?:(?:US)?\\\$|USD\b|([\u20ac\u00a3\u00a5]))\s?(?=[0-9.])")
_HALF_OF_DAY = re.compile(r"(?<=[0-9 {])([AaPp])\.\s?([Mm])\.?(?![A-Za-z])")
_LEADING_ZERO = re.compile(r"0([0-9]):([0-9]{2})")
_RATIO = re.compile(r"([0-9]{1,9})\s+to\s+([0-9]{1,9})")
_LISTED = re.compile(r"[0-9],\s+[0-9]")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_POINTED = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3}){2,}")
_SCALED = re.compile(r"(.*[0-9}\)])\s*(hundred|thousand|million|billion|trillion|dozen)", re.IGNORECASE)
_MARGIN = " \t\r\n*`_\"'$:;?\u201c\u201d"
_MIXED_SLASH = re.compile(r"(?<![0-9.])([0-9]{1,9})\s+([0-9]{1,9})\s?/\s?([0-9]{1,9})(?![0-9])")
_THOUSANDS = re.compile(r"(?<![0-9,.])([0-9]{1,3})((?:,[0-9]{3})+|(?:\s[0-9]{3})+|(?:'[0-9]{3})+)(?![0-9]|,[0-9])")
_LONE_BRACES = re.compile(r"([\^_])\{([0-9A-Za-z])\}")
_SPACED_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")

_PLAIN_NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = re.compile(rf"[-+]?{_PLAIN_NUMBER}")
_FRACTION = re.compile(r"([-+]?)([0-9]{0,18})\\frac(?:\{([^{}]+)\}|([0-9]))(?:\{([^{}]+)\}|([0-9]))")
_POWER = re.compile(
    rf"([-+]?{_PLAIN_NUMBER}(?:\\times|\\cdot|\*|x))?([-+]?)10\^(?:\{{([-+]?[0-9]{{1,3}})\}}|([-+]?[0-9]{{1,3}}))"
)
_PERCENT = re.compile(r"\s*(?:\\?%|percent|per cent|pct|percentage)\s*\.?$", re.IGNORECASE)
_INDEX = r"(?:_(?:\{[^{}=]*\}|[A-Za-z0-9]))?"
_NAME = re.compile(
    rf"\s*\{{?(\([A-Za-z0-9_, ]{{1,30}}\)|(?:\\?[A-Za-z]+|\\[a-z]+\s?[A-Za-z ]+){_INDEX}(?:\([A-Za-z, ]{{1,9}}\))?)"
    r"\s*(?:=|\\in(?![a-z]))"
)
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s*)?\(?([A-Ja-j])\)?[).:]?")
_CHOICE_FIRST = re.compile(r"\(?([A-J])[).:]\s*(\S.*)", re.DOTALL)
_SECOND_CHOICE = re.compile(r"(?<![A-Za-z])(?:\(?[A-J][).:]|(?:or|and|not|nor)(?![A-Za-z]))")


class Value(NamedTuple):
    text: str  # without unit, percent sign, TeX marks and spaces
    unit: str
    percent: bool
    number: Fraction | None
    rounded: bool  # written with a point or a power of ten, so that digits may be missing


def same_value(found: str, gold: str) -> bool | None:
    """Whether two answers are the same text, the same number, or the same one number among words ("about 42").

    None where that does not settle it, since formulas or lists may still be equal: two numbers or two different units
    are settled, but not two numbers that both have commas, since 100,200 may be a list.

    >>> same_value("1,234.50 dollars", "1234.5"), same_value("5 m", "5 km"), same_value("0.3333", "1/3")
    (True, False, False)
    >>> same_value("2x", "3"), same_value("100,200", "200,100")
    (None, None)
    """
    given, wanted = read_value(found), read_value(gold, True)
    if given.text and wanted.text and folded(plain(undress(found))) == folded(plain(undress(gold))):
        return True
    if given.unit and wanted.unit and given.unit != wanted.unit:
        return False
    if given.text and wanted.text and _agree(found, given, wanted):
        return True
    numbers = given.number is not None and wanted.number is not None
    return False if numbers and not ("," in found and "," in gold) else None


def _agree(found: str, given: Value, wanted: Value) -> bool:
    """Whether the values are the same, where their units do not differ; `found` is the text of `given`."""
    if given.unit and not wanted.unit and _LETTER_AFTER.search(found.strip(_MARGIN)):
        return False  # 5 m may be five times m
    if folded(given.text) == folded(wanted.text) and given.percent == wanted.percent:
        return True
    if wanted.number is None:
        return _same_choice(found, wanted.text)
    number = given.number if given.number is not None else lone_number(undress(tidy(found)))
    if number is None:
        return False
    tolerance = TOLERANCE if given.rounded or wanted.rounded else Fraction(0)
    scale = Fraction(100) ** (int(wanted.percent) - int(given.percent))
    return _equal(number, wanted.number, tolerance) or _equal(number * scale, wanted.number, tolerance)


@lru_cache(maxsize=4096)
def read_value(text: str, any_unit: bool = False) -> Value:
    """`any_unit`: every word after a number is its unit. That holds for the data, which does not try to cheat."""
    text, unit = split_unit(text, any_unit)
    bare = _PERCENT.sub("", text)
    scaled = _SCALED.fullmatch(_WRAPPED.sub(r"\1", bare).strip(_MARGIN + "."))
    short = plain(undress(scaled[1] if scaled else bare))
    value = None if _LISTED.search(text) else number(short)
    if scaled and value is not None:
        value *= SCALES[scaled[2].lower()]
        short = str(value)
    elif scaled:
        short = plain(undress(bare))
    return Value(short, unit, bare != text, value, "." in short or "e" in short or "10^" in short)


def tidy(text: str) -> str:
    r"""Replace typographic digits, signs, fractions and spaces by their ASCII twins.

    >>> tidy("\uff11\uff12"), tidy("\u20135"), tidy("2\u00bd"), tidy("9:43 a.m.")
    ('12', '-5', '2 1/2 ', '9:43 am')
    """
    if not text.isascii():
        text = "".join(_twin(character) for character in text)
    return _HALF_OF_DAY.sub(r"\1\2", text) if ".m" in text or ".M" in text else text


@lru_cache(maxsize=1024)
def _twin(character: str) -> str:
    """The ASCII form of a character. Superscripts have none (5 squared is not 52), nor digits of other scripts."""
    if character in _SIGNS:
        return _SIGNS[character]
    twin = unicodedata.normalize("NFKC", character)
    if "\u2044" in twin:
        return " " + twin.replace("\u2044", "/") + " "
    return twin if "\uff01" <= character <= "\uff5e" or twin == " " else character


def split_unit(text: str, any_unit: bool = False) -> tuple[str, str]:
    r"""Value and unit. A unit counts if it is known and TeX or a space sets it apart.

    >>> split_unit(r"15\mbox{ cm}^2"), split_unit("42 apples"), split_unit("42 apples", True), split_unit("3 m/s")
    (('15', 'cm^2'), ('42 apples', ''), ('42', 'apple'), ('3', 'ms^-1'))
    >>> split_unit("5 million dollars"), split_unit(r"\$5"), split_unit("8 sq ft"), split_unit("10 or more", True)
    (('5 million', 'dollar'), ('5', 'dollar'), ('8', 'ft^2'), ('10 or more', ''))
    """
    text = _NO_SPACE.sub("", tidy(text))
    text = _THIN.sub(lambda m: m[0] if m[0] == "\\$" else " ", text).strip(_MARGIN)  # a dollar sign is a unit
    currency = ""
    if prefix := _CURRENCY.match(text):
        currency = {"\u20ac": "euro", "\u00a3": "lb", "\u00a5": "yen"}.get(prefix[1], "dollar")
        text = text[prefix.end() :]
    found = _UNIT.search(text) or _WORDS_AFTER.search(text)
    if found is None or not text[: found.start()].strip(_MARGIN):
        return text, currency
    words = _UNIT_WORDS.findall(_WRAPPED.sub(r" \1", found.group()))
    before = text[: found.start()]
    if words and words[0].casefold() in SCALES:
        before += f" {words.pop(0)}"
    unit = _unit(words, any_unit)
    if unit is None or (currency and unit and unit != currency):
        return text, currency
    return before, unit or currency


def _unit(words: list[str], any_unit: bool) -> str | None:
    """The short form of "square feet", "m/s" or "miles per hour"; None where a word is no unit."""
    parts: list[str] = []
    power, below = "", False
    for word in words:
        lower = word.casefold()
        if word[0] == "^":
            last, exponent = parts.pop() if parts else "", word.strip("^{}")
            parts.append(f"{last[:-1]}{exponent}" if last.endswith("^-1") else f"{last}^{exponent}")
        elif lower in ("/", "per", "a", "an", "each") and parts:
            below = True
        elif lower in ("square", "sq", "cubic", "cu"):
            power = "^2" if lower[0] == "s" else "^3"
        elif lower in CHANGERS:
            return None
        elif (name := unit_name(word)) is not None or any_unit:
            parts.append((name if name is not None else singular(word)) + power + ("^-1" if below else ""))
            power, below = "", False
        else:
            return None
    return "".join(parts)


@lru_cache(maxsize=4096)
def undress(text: str) -> str:
    r"""The text without what TeX adds for the eye.

    >>> undress(r"\left(5\text{ cm}\right)"), undress(r"\dfrac{1}{2}"), undress(r"10,\!080")
    ('(5 cm)', '\\frac{1}{2}', '10,080')
    """
    text = _NO_SPACE.sub("", tidy(text)).strip("* ")
    for old, new in _SAME.items():
        if old in text:
            text = text.replace(old, new)
    text = _PI.sub(r"\\pi ", text)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", _OVER.sub(r"\\frac{\1}{\2}", text))
    text = _WRAPPED.sub(r"\1", _THIN.sub("", text)).replace("$", "")
    return text.strip().removeprefix("\\approx")


def plain(text: str) -> str:
    r"""The text without margins and spaces; only spaces between digits stay, since "4 2" is not 42.

    >>> plain("$New York$."), plain(" **1,000** "), plain("1 000"), plain("1 4/5"), plain("4 2")
    ('NewYork', '1,000', '1000', '1\\frac{4}{5}', '4 2')
    """
    text = _MIXED_SLASH.sub(r"\1\\frac{\2}{\3}", strip(text))
    text = _THOUSANDS.sub(lambda m: m[1] + "".join(m[2].replace("'", ",").split()), text)
    if _POINTED.fullmatch(text):
        text = text.replace(".", "")
    if (ratio := _RATIO.fullmatch(text)) or (ratio := _LEADING_ZERO.fullmatch(text)):
        text = ":".join(ratio.groups())
    return _LONE_BRACES.sub(r"\1\2", "".join(_SPACED_DIGITS.sub("\0", text).split()).replace("\0", " "))


def strip(text: str) -> str:
    return text.strip(_MARGIN).rstrip(".," + _MARGIN)


def split_name(text: str) -> tuple[str, str]:
    r"""The name left of the only "=" (or \in), without spaces, and the value right of it; else "" and the text.

    >>> split_name("f(x) = 2x"), split_name(r"x \in [0, 1]"), split_name("x + y = 2")
    (('f(x)', ' 2x'), ('x', ' [0, 1]'), ('', 'x + y = 2'))
    """
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
    if (numeral := NUMERALS.get(text.casefold())) is not None:
        return Fraction(numeral)
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
    """The value of a fraction, or of a mixed number: digits before a proper fraction of whole numbers."""
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
    """Whole numbers are compared exactly: a relative tolerance would take 1000001 for 1000000."""
    if given.denominator == wanted.denominator == 1:
        return given == wanted
    return abs(given - wanted) <= tolerance * abs(wanted)


def lone_number(text: str) -> Fraction | None:
    """The only number among harmless words: 42 for "about 42 meters"; None for "2 x", "3 or 4" and "3 \\pi"."""
    values = []
    for word in text.split():
        bare = word.strip(_MARGIN + "%.,()")
        value = number(plain(word.rstrip("%")))
        if value is not None:
            values.append(value)
        elif bare:
            harmless = bare.casefold() in FILLERS or unit_name(bare) is not None
            if len(bare) == 1 or not bare.isalpha() or not harmless:
                return None
    return values[0] if len(values) == 1 else None


def folded(text: str) -> str:
    """Words lose their case; formulas, where r and R differ, keep it.

    >>> folded("NewYork"), folded("rR/2"), folded("m")
    ('newyork', 'rR/2', 'm')
    """
    return text.casefold() if len(text) > 1 and text.replace("-", "").isalpha() else text


def _same_choice(found: str, wanted: str) -> bool:
    """Whether the answer is the wanted choice: (C), c, C., "option C" and "C) 12" are C; "C) 12 or D) 13" is none."""
    letter = _CHOICE.fullmatch(wanted)
    if letter is None or letter[1].islower():
        return False
    text = strip(undress(found))
    chosen = _CHOICE.fullmatch(text)
    if chosen is None and (first := _CHOICE_FIRST.fullmatch(text)) and not _SECOND_CHOICE.search(first[2]):
        chosen = first
    return chosen is not None and chosen[1].upper() == letter[1]
