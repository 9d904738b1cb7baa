r"""Which words may stand beside a number, and what they do to it. Called where answers are found and compared.

Any word is not a unit: "10 million", "10 squared" and "10 or more" are not 10. A word beside a number is
- a unit of UNITS, which may be passed over where the other side has none,
- a scale, which multiplies ("5 million" is 5000000),
- a filler, which says nothing ("about", "a total of"),
- a word of the problem, such as the thing that is counted ("18 apples"), unless it is one of CHANGERS; a scale may
  be what is counted ("7 dozen" where the problem asks how many dozens).
With any other word the answer is not that number.
"""

from __future__ import annotations

import re

_UNIT_NAMES = """
m: meter metre | cm: centimeter centimetre | mm: millimeter millimetre | km: kilometer kilometre kms | in: inch inche
ft: foot feet | yd: yard | mi: mile | s: second sec | h: hour hr | min: minute mins | day: d | week: wk | month:
year: yr | kg: kilogram | g: gram gm | mg: milligram | lb: pound lbs | oz: ounce | ton: tonne | l: liter litre
ml: milliliter | gallon: gal | cup: | quart: | pint: | acre: | hectare: | dollar: usd buck | cent: | euro: eur
pence: penny pennie | yen: | rupee: | j: joule | w: watt | v: volt | n: newton | pa: pascal | hz: hertz | k: kelvin
mol: mole | rad: radian | unit: | am: | pm: | people: person | student: | child: children kid | point: pt | way:
item: | piece: | digit: | time: | solution: | coin: | page: | mb: | gb: | kb: | bit: | byte: | cal: calorie | kcal:
kwh: | rpm: | mih^-1: mph | kmh^-1: kph kmph | rev: revolution | : degree deg
"""
UNITS = {
    name: short.strip()
    for entry in _UNIT_NAMES.replace("\n", "|").split("|")
    if entry.strip()
    for short, _, longs in [entry.partition(":")]
    for name in (short.strip(), *longs.split())
    if name
}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_FILLERS = """about approximately around roughly exactly only just there is are was were be the this that total of in
    it so therefore thus hence equals equal each every final result value altogether answer we get have has per"""
FILLERS = frozenset(_FILLERS.split())
_NUMERALS = "zero one two three four five six seven eight nine ten eleven twelve"
NUMERALS = {word: number for number, word in enumerate(_NUMERALS.split())}
_CHANGERS = """not no never cannot none neither nor or either and but except without anything least most than up to
    over under above below between within half halves third thirds fourth quarter quarters fifth tenth tenths twice
    double triple plus minus negative point pair pairs score gross factorial root power reciprocal inverse squared cubed
    percent basis dozens hundreds thousands millions billions hundredths thousandths"""
CHANGERS = frozenset(_CHANGERS.split()) | NUMERALS.keys() | SCALES.keys()

_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}(?![A-Za-z(={^_])")
_WORD = re.compile(r"[a-z]{3,}")
_FUNCTIONS = "sin cos tan cot sec csc log exp sqrt max min mod gcd lcm arcsin arccos arctan"


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


def harmless(word: str) -> bool:
    return word in FILLERS or unit_name(word) is not None


def without_problem_words(answer: str, problem: str) -> str:
    """An answer without the words that the problem uses and that leave a number alone: those that say what is counted.

    >>> without_problem_words("18 ripe apples or 3 pears", "How many apples and pears or plums are ripe?")
    '18   or 3 '
    """
    if not any(character.isdigit() for character in answer) or not _PLAIN_WORD.search(answer):
        return answer
    asked = {singular(word) for word in _WORD.findall(problem.casefold())} - CHANGERS - set(_FUNCTIONS.split())

    def drop(found: re.Match[str]) -> str:
        word = found[0].casefold()
        if singular(word) in SCALES and re.search(rf"(?:how many|in) {singular(word)}s?\b", problem, re.IGNORECASE):
            return ""
        kept = word in CHANGERS or unit_name(word) is not None or singular(word) not in asked
        return found[0] if kept else ""

    return _PLAIN_WORD.sub(drop, answer)
