r"""Single answers: which number, unit or word a text stands for, and whether two of them are the same.

A number counts in the unit that the question asks for. So a unit that only one side names is passed over, unless the
question cannot mean it; two different units differ. Nothing is evaluated, and every pattern runs in linear time. The
data's answer is trusted: it may have any unit. `clean` is called once, on the whole answer; all else reads its result.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from whet.tasks.formulas import TOLERANCE

# ---- words that may stand beside a number

_UNIT_NAMES = """
m: meter metre | cm: centimeter centimetre | mm: millimeter millimetre | km: kilometer kilometre kms | in: inch inche
ft: foot feet | yd: yard | mi: mile | s: second sec | h: hour hr | min: minute mins | day: d | week: wk | month:
year: yr | kg: kilogram | g: gram gm | mg: milligram | lb: pound lbs | oz: ounce | ton: tonne | l: liter litre
ml: milliliter | gallon: gal | cup: | quart: | pint: | acre: | hectare: | dollar: usd buck | cent: | euro: eur
pence: penny pennie | yen: | rupee: | j: joule | w: watt | v: volt | n: newton | pa: pascal | hz: hertz | k: kelvin
mol: mole | rad: radian | unit: | am: | pm: | people: person | student: | child: children kid | point: pt | way:
item: | piece: | digit: | time: | solution: | coin: | page: | mb: | gb: | kb: | bit: | byte: | cal: calorie | kcal:
kwh: | rpm: | mih^-1: mph | kmh^-1: kph kmph | rev: revolution | deg: degree
"""
UNITS = {  # every name of a unit -> its short form
    name: short.strip()
    for entry in _UNIT_NAMES.strip().replace("\n", "|").split("|")
    for short, _, longs in [entry.partition(":")]
    for name in (short.strip(), *longs.split())
}
_SIGN_UNITS = {
    "%": "%",
    "°": "deg",
    "'": "'",
    "''": "''",
    "$": "dollar",
    "€": "euro",
    "£": "lb",
    "¥": "yen",
}
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SMALL_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen"""
_SMALL = _SMALL_NUMBERS.split()
_WHOLE_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = _WHOLE_TENS.split()
_PARTS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
}
_PARTS |= {"ninth": 9, "tenth": 10, "halve": 2}
_FILLERS = """about approximately around roughly exactly only just there is are was were be the this that total of in
    it so therefore thus hence equals equal each every final result value altogether answer we get have has per"""
FILLERS = frozenset(_FILLERS.split())
# With any of these beside it, the answer is not that number, though the question uses the word.
_CHANGERS = """not no never cannot none neither nor or either and but except without anything least most than up to
    over under above below between within halves thirds quarters tenths twice double triple plus minus negative point
    pair pairs score gross factorial root power reciprocal inverse squared cubed percent basis dozens hundreds thousands
    millions billions hundredths thousandths"""
CHANGERS = frozenset(_CHANGERS.split()) | {*_SMALL, *_TENS, *_PARTS, *SCALES}
_FUNCTION_NAMES = "sin cos tan cot sec csc log exp sqrt max min mod gcd lcm"
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())


def singular(word: str) -> str:
    """
    >>> singular("Apples"), singular("boxes"), singular("cm"), singular("class")
    ('apple', 'box', 'cm', 'class')
    """
    word = word.casefold()
    if len(word) > 4 and word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def unit_name(word: str) -> str | None:
    """The short form of a known unit; None for any other word."""
    word = word.casefold()
    return UNITS[word] if word in UNITS else UNITS.get(singular(word))


@lru_cache(maxsize=64)
def _words_of(question: str) -> frozenset[str]:
    return frozenset(map(singular, re.findall(r"[a-z]{3,}", question.casefold())))


def _without_harmless_words(text: str, question: str) -> str:
    """Without the words at both ends that leave a number as it is: fillers, and what the question counts.

    >>> _without_harmless_words("about 18 ripe apples", "How many apples are ripe?")
    '18'
    """

    def harmless(word: str) -> bool:
        bare = word.strip(".,;:!?()").casefold()
        one = singular(bare)
        if one in SCALES and re.search(rf"(?:how many|in) {one}s?\b", question, re.IGNORECASE):
            return True  # "7 dozen", asked how many dozens
        return (
            not bare
            or bare in FILLERS
            or (bare.isalpha() and one in asked and bare not in CHANGERS | FUNCTIONS)
        )

    asked = _words_of(question)
    words = text.replace('"', " ").split()
    while words and harmless(words[0]):
        del words[0]
    while words and harmless(words[-1]):
        del words[-1]
    return " ".join(words)


# ---- text without what is there for the eye

_DASHES = dict(
    zip("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\u2019\u02bc\u2044", "-------''/", strict=True)
)
_HALF_OF_DAY = re.compile(r"(?<=[0-9 {])([AaPp])\.\s?([Mm])\.?(?![A-Za-z])")
_SAME = {  # replaced in this order
    '"': "",
    "\u201c": "",
    "\u201d": "",
    "{,}": ",",
    "{.}": ".",
    "{:}": ":",
    "\\colon": ":",
    "×": "\\times ",
    "·": "\\cdot ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "≤": "\\leq ",
    "≥": "\\geq ",
    "∪": "\\cup ",
    "≈": "\\approx ",
    "±": "\\pm ",
    "²": "^2",
    "³": "^3",
    "÷": "/",
    "\\div": "/",
    "∅": "\\emptyset ",
    "\\varnothing": "\\emptyset ",
    "\\gt": ">",
    "\\lt": "<",
    "<=": "\\leq ",
    ">=": "\\geq ",
    "!=": "\\neq ",
    "\\{": "\\lbrace ",
    "\\}": "\\rbrace ",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\leqslant": "\\leq",
    "\\geqslant": "\\geq",
    "\\langle": "(",
    "\\rangle": ")",
    "**": "^",
    **dict.fromkeys(("^{\\circ}", "^\\circ", "\\degree"), "°"),
    **dict.fromkeys(("\\displaystyle", "\\qquad", "\\quad", "~"), " "),
}
_THIN = re.compile(r"(?<!\\)\\(?:[,;: ()\[\]]|left(?![a-z])|right(?![a-z])|[bB]igg?[lr]?(?![a-z]))")
_NO_SPACE = re.compile(r"(?<!\\)\\!\s*")
_MATH_SIGN = re.compile(r"(?:US)?\\(\$)|\$")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|boldsymbol|rm)\s?\{([^{}]*)\}"
)
_PERCENT = re.compile(r"\\?%|\b(?:percentage|percent|per cent|pct)\b", re.IGNORECASE)
_EMPTY_SET = re.compile(r"\\lbrace\s*\\rbrace")
_OVER = re.compile(r"\{\s?([0-9]{1,18})\s?\\over\s?([0-9]{1,18})\s?\}")
_SHORT_FRACTION = re.compile(r"\\frac\s?(?:([0-9])|\{([0-9]+)\})\s?(?:([0-9])|\{([0-9]+)\})")
_ROOT = re.compile(r"(?:\u221a|(?<![\\a-z])sqrt)(?:\(([0-9a-z]{1,18})\)|([0-9a-z]{1,18}))")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_MARGIN = ' \t\r\n*`_":;?'


def tidy(text: str) -> str:
    r"""Replace typographic digits, signs, fractions and spaces by their ASCII twins.

    >>> tidy("\uff11\uff12"), tidy("\u20135"), tidy("2\u00bd"), tidy("9:43 a.m.")
    ('12', '-5', '2 1/2 ', '9:43 am')
    """
    if not text.isascii():
        text = "".join(map(_twin, text))
    return _HALF_OF_DAY.sub(r"\1\2", text) if ".m" in text or ".M" in text else text


@lru_cache(maxsize=1024)
def _twin(character: str) -> str:
    """The ASCII form of a character. Superscripts have none (5 squared is not 52), nor digits of other scripts."""
    if character in _DASHES:
        return _DASHES[character]
    twin = unicodedata.normalize("NFKC", character)
    if "\u2044" in twin:
        return " " + twin.replace("\u2044", "/") + " "
    return twin if "\uff01" <= character <= "\uff5e" or twin == " " else character


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    r"""The text without what TeX adds for the eye. Double quotes mark words that stood in \text{...}.

    >>> clean(r"\left(5\text{ cm}\right)"), clean(r"\dfrac12"), clean(r"10,\!080"), clean(r"90^\circ"), clean(r"\$5")
    ('(5" cm" )', '\\frac{1}{2}', '10,080', '90°', '$5')
    """
    text = _NO_SPACE.sub("", tidy(text)).strip("* ")
    for old, new in _SAME.items():
        if old in text:
            text = text.replace(old, new)
    text = _MATH_SIGN.sub(r"\1", text)  # a dollar sign that is left is money
    text = _PERCENT.sub("%", _THIN.sub(" ", text))
    text = _TEXT.sub(r'"\1"', text).strip()
    if text[:1] == text[-1:] == "'":
        text = text[1:-1]
    text = _OVER.sub(r"\\frac{\1}{\2}", _EMPTY_SET.sub(r"\\emptyset", text))
    text = _SHORT_FRACTION.sub(_with_braces, text)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", _PI.sub(r"\\pi ", text))
    return text.strip().removeprefix("\\approx")


def _with_braces(fraction: re.Match[str]) -> str:
    above, below = filter(None, fraction.groups())
    return f"\\frac{{{above}}}{{{below}}}"


def unmarked(text: str) -> str:
    """Cleaned text without the marks of words and units."""
    return re.sub('["°$]', "", text).strip()


# ---- single values

_POWER = r"(?:\^\{?-?[0-9]\}?)?"
_UNIT_IN_TEXT = re.compile(
    rf"(?<=[0-9}})\]a-z])(?:\s*\"[^\"]*\"{_POWER}|\s*(?:[%°$€£¥]|'{{1,2}}))+[\s\".]*$"
)
_UNIT_WORDS = re.compile(
    rf"(?<=[0-9}})\]%])(?:\s+|(?=(?:[ap]m|[cmk]m|kg|mph)\b)|(?=[AP]M\b))"
    rf"([A-Za-z]+{_POWER}(?:[ /]+[A-Za-z]+{_POWER})*)[\s\".]*$"
)
_UNIT_PART = re.compile(r"[%°$€£¥/]|'{1,2}|[A-Za-z]+|\^\{?-?[0-9]\}?")
_CURRENCY = re.compile(r"[\s\"]*(USD\b|[$€£¥])\s?(?=[0-9.])")
_LETTER_AFTER = re.compile(r"[0-9)}]\s+[A-Za-z]\.?$")
_ORDINAL = re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b")
_RATIO = re.compile(r"([0-9]{1,9})\s*(?:\"?\s*to\s*\"?|:)\s*([0-9]{1,9})")
_LEADING_ZERO = re.compile(r"0([0-9]:[0-9]{2})")
_LISTED = re.compile(r"[0-9],\s+[0-9]")
_POINTED = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3}){2,}")
_SCALED = re.compile(rf"(.*[0-9}}\)])[\s\"]*({'|'.join(SCALES)})", re.IGNORECASE)
_MIXED_SLASH = re.compile(r"(?<![0-9.])([0-9]{1,9})\s+([0-9]{1,9})\s?/\s?([0-9]{1,9})(?![0-9])")
_THOUSANDS = re.compile(
    r"(?<![0-9,.])([0-9]{1,3})((?:,[0-9]{3})+|(?:\s[0-9]{3})+|(?:'[0-9]{3})+)(?![0-9]|,[0-9])"
)
_LONE_BRACES = re.compile(r"([\^_])\{([0-9A-Za-z])\}")
_SPACED_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = re.compile(rf"[-+]?{_DECIMAL}")
_FRACTION = re.compile(r"([-+]?)([0-9]{0,18})\\frac\{([^{}]+)\}\{([^{}]+)\}")
_SCIENTIFIC = re.compile(
    rf"([-+]?{_DECIMAL}(?:\\times|\\cdot|\*|x))?([-+]?)10\^(?:\{{([-+]?[0-9]{{1,3}})\}}|([-+]?[0-9]{{1,3}}))"
)
_SPOKEN = re.compile(
    rf"(?:({'|'.join(_TENS)})(?:[\s-]|$))?({'|'.join(_SMALL)}|an?)?"
    rf"(?:[\s-]({'|'.join(SCALES)}))?(?:[\s-]({'|'.join(_PARTS)})s?)?",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s*)?\(?([A-Ja-j])\)?[).:]?")
_CHOICE_FIRST = re.compile(r"\(?([A-J])[).:]\s*(\S.*)", re.DOTALL)
_SECOND_CHOICE = re.compile(r"(?<![A-Za-z])(?:\(?[A-J][).:]|(?:or|and|not|nor)(?![A-Za-z]))")
_ASKS_FOR_PERCENT = re.compile(r"(?:^|[^0-9$}%\s])[\s]*\bpercent", re.IGNORECASE)


class Value(NamedTuple):
    text: str  # without unit, TeX marks and spaces
    unit: str  # in its short form; "" for none
    number: Fraction | None
    rounded: bool  # written with a point or a power of ten, so that digits may be missing


@lru_cache(maxsize=4096)
def read_value(text: str, trusted: bool = False) -> Value:
    """Read a cleaned text. `trusted`: every word after a number is its unit, as in the data, which does not cheat."""
    text, unit = split_unit(text, trusted)
    scaled = _SCALED.fullmatch(text.strip(_MARGIN + "."))
    short = plain(scaled[1] if scaled else text)
    value = None if _LISTED.search(text) else number(short)
    if scaled and value is not None:
        value *= SCALES[scaled[2].lower()]
        short = str(value)
    elif scaled:
        short = plain(text)
    if value is None:
        value = spoken(unmarked(text).strip(_MARGIN + "."))
    return Value(short, unit, value, "." in short or "e" in short or "10^" in short)


def split_unit(text: str, trusted: bool = False) -> tuple[str, str]:
    r"""Value and unit of a cleaned text. A unit counts if it is known and a sign, \text or a space sets it apart.

    >>> split_unit('15" cm"^2'), split_unit("42 apples"), split_unit("42 apples", True), split_unit("3 m/s")
    (('15', 'cm^2'), ('42 apples', ''), ('42', 'apple'), ('3', 'ms^-1'))
    >>> split_unit("5 million dollars"), split_unit("$5"), split_unit("8 sq ft"), split_unit("10 or more", True)
    (('5 million', 'dollar'), ('5', 'dollar'), ('8', 'ft^2'), ('10 or more', ''))
    """
    text = text.strip(" \t\r\n*`_:;?")
    currency = ""
    if prefix := _CURRENCY.match(text):
        currency = _SIGN_UNITS.get(prefix[1], "dollar")
        text = text[prefix.end() :]
    found = _UNIT_IN_TEXT.search(text) or _UNIT_WORDS.search(text)
    if found is None:
        return text, currency
    words = _UNIT_PART.findall(found.group())
    before = text[: found.start()]
    if words and words[0].casefold() in SCALES:
        before += f" {words.pop(0)}"
    unit = _unit(words, trusted)
    if unit is None or (currency and unit and unit != currency):
        return text, currency
    return before, unit or currency


def _unit(words: list[str], trusted: bool) -> str | None:
    """The short form of "square feet", "m/s" or "miles per hour"; None where a word is no unit."""
    parts: list[str] = []
    power = below = ""
    for word in words:
        lower = word.casefold()
        name = _SIGN_UNITS.get(word) or unit_name(word)
        if word[0] == "^":
            last = parts.pop() if parts else ""
            exponent = word.strip("^{}")
            parts.append(f"{last[:-1]}{exponent}" if last.endswith("^-1") else f"{last}^{exponent}")
        elif lower in ("/", "per", "a", "an", "each") and parts:
            below = "^-1"
        elif lower in ("square", "sq", "cubic", "cu"):
            power = "^2" if lower[0] == "s" else "^3"
        elif lower in CHANGERS or (name is None and not trusted):
            return None
        else:
            parts.append((name or singular(word)) + power + below)
            power = below = ""
    return "".join(parts)


def plain(text: str) -> str:
    r"""Cleaned text without margins and spaces; only spaces between digits stay, since "4 2" is not 42.

    >>> plain("New York."), plain(" **1,000** "), plain("1 000"), plain("1 4/5"), plain("4 2"), plain("July 4th")
    ('NewYork', '1,000', '1000', '1\\frac{4}{5}', '4 2', 'July4')
    """
    text = _ORDINAL.sub("", _MIXED_SLASH.sub(r"\1\\frac{\2}{\3}", strip(text.replace('"', ""))))
    text = _THOUSANDS.sub(lambda m: m[1] + "".join(m[2].replace("'", ",").split()), text)
    if _POINTED.fullmatch(text):
        text = text.replace(".", "")
    if ratio := _RATIO.fullmatch(text):
        text = ":".join(ratio.groups())
    text = _LEADING_ZERO.sub(r"\1", text) if text[:1] == "0" else text
    return _LONE_BRACES.sub(
        r"\1\2", "".join(_SPACED_DIGITS.sub("\0", text).split()).replace("\0", " ")
    )


def strip(text: str) -> str:
    return text.strip(_MARGIN).rstrip(".," + _MARGIN)


def number(text: str) -> Fraction | None:
    r"""The value of a plain text that is a number and nothing else.

    >>> number("1,234"), number("-.5"), number("\\frac{3}{4}"), number("3/4"), number("3x")
    (Fraction(1234, 1), Fraction(-1, 2), Fraction(3, 4), Fraction(3, 4), None)
    >>> number("1\\frac{4}{5}"), number("4.5\\times10^{3}"), number("10^{-2}")
    (Fraction(9, 5), Fraction(4500, 1), Fraction(1, 100))
    """
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if fraction := _FRACTION.fullmatch(text):
        return _fraction(*fraction.groups())
    if power := _SCIENTIFIC.fullmatch(text):
        return _scientific(*power.groups())
    above, slash, below = text.partition("/")
    value = _decimal(above)
    if not slash or value is None:
        return value
    divisor = _decimal(below)
    return value / divisor if divisor else None


def _fraction(sign: str, whole: str, numerator: str, denominator: str) -> Fraction | None:
    """The value of a fraction, or of a mixed number: digits before a proper fraction of whole numbers."""
    above = _decimal(numerator)
    below = _decimal(denominator)
    if above is None or not below or (sign and above < 0):
        return None
    if whole and not (above.denominator == below.denominator == 1 and 0 < above < below):
        return None
    value = int(whole or 0) + above / below
    return -value if sign == "-" else value


def _scientific(mantissa: str | None, sign: str, *exponents: str | None) -> Fraction | None:
    value = _decimal(mantissa.rstrip("\\timescdo*x")) if mantissa else Fraction(1)
    if value is None or (mantissa and sign):
        return None
    (exponent,) = (int(e) for e in exponents if e is not None)
    return (-value if sign == "-" else value) * Fraction(10) ** exponent


def _decimal(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "").rstrip(".")) if _NUMBER.fullmatch(text) else None


def spoken(text: str) -> Fraction | None:
    """
    >>> spoken("twenty-one"), spoken("Two thirds"), spoken("a dozen"), spoken("third"), spoken("one and a half")
    (Fraction(21, 1), Fraction(2, 3), Fraction(12, 1), None, None)
    """
    found = _SPOKEN.fullmatch(text)
    if found is None or not (found[1] or found[2]) or text.casefold() in ("a", "an"):
        return None
    tens, small, scale, part = (group and group.casefold() for group in found.groups())
    value = 10 * (_TENS.index(tens) + 2) if tens else 0
    if small:
        value += _SMALL.index(small) if small in _SMALL else 1
    return Fraction(value * SCALES.get(scale, 1), _PARTS.get(part, 1))


def folded(text: str) -> str:
    """Words lose their case; formulas, where r and R differ, keep it.

    >>> folded("NewYork"), folded("rR/2"), folded("m")
    ('newyork', 'rR/2', 'm')
    """
    return text.casefold() if len(text) > 1 and text.replace("-", "").isalpha() else text


def same_value(found: str, gold: str, question: str = "") -> bool | None:
    """Whether two cleaned answers are the same text, number or quantity; None where that does not settle it.

    Formulas and lists are not settled, and two numbers with commas are not, since 100,200 may be a list.

    >>> same_value("1,234.50 dollars", "1234.5"), same_value("5 m", "5 km"), same_value("0.3333", "1/3")
    (True, False, False)
    >>> same_value("2x", "3"), same_value("100,200", "200,100")
    (None, None)
    """
    given = _given_value(found, question)
    wanted = read_value(gold, True)
    if not given.text or not wanted.text:
        return None
    if folded(plain(found)) == folded(plain(gold)):
        return True
    factors = _factors(given, wanted, question)
    if not factors or (
        given.unit and not wanted.unit and _LETTER_AFTER.search(found.strip(_MARGIN))
    ):
        return False  # another unit; and 5 m may be five times m
    if given.number is None or wanted.number is None:
        same_text = 1 in factors and folded(given.text) == folded(wanted.text)
        return same_text or _same_ratio(given, wanted) or _same_choice(found, wanted.text) or None
    tolerance = TOLERANCE if given.rounded or wanted.rounded else Fraction(0)
    if any(_equal(given.number * factor, wanted.number, tolerance) for factor in factors):
        return True
    return None if "," in found and "," in gold else False


def _given_value(found: str, question: str) -> Value:
    """The value of an answer, with or without the words at its ends that leave a number as it is."""
    given = read_value(found)
    if given.number is None:
        shorter = read_value(_without_harmless_words(found, question))
        if shorter.number is not None:
            return shorter
    return given


def _factors(given: Value, wanted: Value, question: str) -> tuple[Fraction | int, ...]:
    """What the given number may be multiplied by to be in the unit of the wanted one; none if their units differ."""
    if given.unit == wanted.unit:
        return (1,)
    if wanted.unit == "%" and not given.unit:
        return (1, 100)
    if given.unit == "%" and not wanted.unit:
        # A bare number below 1 is a share. A larger one is in percent if the question asks for that.
        if wanted.number is not None and abs(wanted.number) < 1:
            return (Fraction(1, 100),)
        return (1,) if _ASKS_FOR_PERCENT.search(question) else ()
    if given.unit and wanted.unit:
        return ()
    # A bare number is in the unit that the question names. Only angles are written in several.
    asked = set(map(unit_name, re.findall("[A-Za-z]+", question)))
    for sign, name in (("'", "min"), ("''", "s"), ("rad", "rad")):
        if given.unit == sign and name not in asked:
            return ()
    return () if given.unit == "deg" and "rad" in asked else (1,)


def _equal(given: Fraction, wanted: Fraction, tolerance: Fraction) -> bool:
    """Whole numbers are compared exactly: a relative tolerance would take 1000001 for 1000000."""
    if given.denominator == wanted.denominator == 1:
        return given == wanted
    return abs(given - wanted) <= tolerance * abs(wanted)


def _same_ratio(given: Value, wanted: Value) -> bool:
    """3/4 is 3:4, in the same terms."""
    fraction = re.fullmatch(r"\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+)", given.text)
    return fraction is not None and wanted.text == ":".join(filter(None, fraction.groups()))


def _same_choice(found: str, wanted: str) -> bool:
    """Whether the answer is the wanted choice: (C), c, C., "option C" and "C) 12" are C; "C) 12 or D) 13" is none."""
    letter = _CHOICE.fullmatch(wanted)
    if letter is None or letter[1].islower():
        return False
    text = strip(unmarked(found))
    chosen = _CHOICE.fullmatch(text)
    if (
        chosen is None
        and (first := _CHOICE_FIRST.fullmatch(text))
        and not _SECOND_CHOICE.search(first[2])
    ):
        chosen = first
    return chosen is not None and chosen[1].upper() == letter[1]
