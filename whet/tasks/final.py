r"""Where a response gives its final answer, and which words may stand beside a number in it.

The matcher and the reward terms call this file; it compares nothing. First everything up to the last "</think>" is
dropped; a response that is still thinking has no answer. Then the option `answer` names one of ANSWERS: "auto" is
boxed where there is a box (an unclosed one holds no answer), else marked, else a lone letter, else the last number.
Prose may take an answer back: "5. Wait, it is 6" gives 6, "6, not 5" gives 6, and "not 5" stays, which is no number.
Responses are hostile: an answer longer than 300 characters is none, and every pattern runs in linear time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

LONGEST = 300  # characters of the longest answer

# ---- words. A word beside a number is
# - a unit of UNITS, which is ignored where the other side has no unit,
# - a scale, which multiplies ("5 million" is 5000000),
# - a filler, which says nothing ("about", "a total of"),
# - a word of the problem, such as the thing that is counted ("18 apples"), unless it is one of CHANGERS; a scale may
#   be what is counted ("7 dozen" where the problem asks how many dozens).
# With any other word the answer is not that number: "10 squared" and "10 or more" are not 10.

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
UNITS = {  # every name of a unit -> its short form
    name: short.strip()
    for entry in _UNIT_NAMES.strip().replace("\n", "|").split("|")
    for short, _, longs in [entry.partition(":")]
    for name in (*short.split(), *longs.split())
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
_FUNCTIONS = "sin cos tan cot sec csc log exp sqrt max min mod gcd lcm arcsin arccos arctan"
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}(?![A-Za-z(={^_])")
_WORD = re.compile(r"[a-z]{3,}")


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


def without_problem_words(answer: str, problem: str) -> str:
    """The answer without those words of the problem that say what is counted and leave the number as it is.

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


# ---- where the answer is

_BOX = "\\boxed{"
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_SPACED_BOX = re.compile(r"\\f?boxed ?\{")
_MARKER = re.compile(r"####|#(?=[^\s#])|answer(?:\*\*)?(?:\s?:|\s?is\b)|(?:option|choice)\s?is\b", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")
_CHANGED = re.compile(
    r"\s(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|or (?:more|less|fewer))\b", re.IGNORECASE
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|sorry|hmm|correction|mistake|check again|i meant|should be|no(?=[,:.])|wrong)\b", re.IGNORECASE
)
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|than|least|most|or|nor|but|over|under|twice)|n't)(?:\s+(?:be|a|the))?\s*$", re.I
)
_NOT_BUT = re.compile(r"not\s+\S{1,40}\s+but\s+", re.IGNORECASE)
_NOT_AFTER = re.compile(r",?\s+(?:and\s+)?(?:not|nothing)\b.*", re.IGNORECASE | re.DOTALL)
_CLAUSE = re.compile(r",?\s+(?:as|since|because|which|so|where|and nothing)\s[^0-9=$\\]*$", re.IGNORECASE)
_SENTENCE_IS = re.compile(r"[A-Za-z][^=0-9]*\s(?:is|are|equals)\s+(?=\S)", re.IGNORECASE)
_LONE_LETTER = re.compile(r"(?:[Oo]ption |[Cc]hoice )?\(?[A-Ja-j]\)?[.:)]?|\(?[A-J][.:)]\s[^\n]{1,80}")
_LETTER_IN_TEXT = re.compile(r"\([A-J]\)(?![A-Za-z(])|(?<=\bis )[A-J](?=[.,]?\s*$)")
_WORD_OR_SIGN = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_JOINT = re.compile(r"(?:[\s$,;]|\\[,;:\[\]()]|\\q?quad|\\text\{[ ,]*(?:and|or)[ ,]*\}|\band\b|\bor\b){0,12}")


def after_thinking(response: str) -> str:
    """What follows the last "</think>"; "" for a response that is still thinking."""
    rest = response.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def auto(text: str) -> str:
    if _BOX in text or _SPACED_BOX.search(text):
        return boxed(text)
    return marked(text) or lone_letter(text) or last_claim(text)


def boxed(text: str) -> str:
    r"""What the last \boxed{...} holds, braces balanced; "" where it is not closed. One more box may stand before it.

    >>> boxed(r"so \boxed{\frac{1}{2}}."), boxed(r"so \boxed{1"), boxed(r"\boxed{1} and \boxed{2}")
    ('\\frac{1}{2}', '', '1, 2')
    """
    last = _last_box(text)
    start = text.rfind(_BOX)
    before = text.rfind(_BOX, max(0, start - LONGEST - 40), max(0, start))
    if before < 0 or not last:
        return last
    first = _last_box(text[before:start])
    joint = text[before + len(_BOX) + len(first) : start]
    if not first or first == last or "\n" in joint.strip() or not _JOINT.fullmatch(joint.strip().removeprefix("}")):
        return last
    return _short(f"{first}, {last}")


def _last_box(text: str) -> str:
    start = text.rfind(_BOX)
    end = start + len(_BOX)
    if start < 0:
        last = _last(_SPACED_BOX, text)
        if last is None:
            return ""
        end = last.end()
    inside = text[end : end + LONGEST + 1]
    depth = 1
    for brace in _BRACE.finditer(inside):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return inside[: brace.start()].strip()
    return ""


def tagged(text: str) -> str:
    return _short(in_tags(text))


def in_tags(text: str) -> str:
    """What the last pair of answer tags holds, however long; "" for none."""
    _, opened, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
    return inside if opened else ""


def marked(text: str) -> str:
    """The line after the last marker, to the end of its first sentence, unless the text takes it back.

    >>> marked("The answer is 5. Wait, it is 6."), marked("The answer is not 5 but 6"), marked("The answer is not 5")
    ('6', '6', 'not 5')
    """
    last = _last(_MARKER, text)
    if last is None:
        return ""
    rest = text[last.end() : last.end() + 2 * LONGEST].lstrip(" \t\r\n:*_$").removeprefix("\\[").lstrip()
    again = _last(_TAKEN_BACK, rest)
    then = rest[again.end() :] if again is not None and again.start() else ""
    if second := lone_letter(then) or last_claim(then):
        return second
    sentence = re.split(r"\n|(?<!\\)[.?!] ", rest, maxsplit=1)[0].rstrip(" *_")
    if not sentence.endswith("$"):
        sentence = sentence.rstrip("!").removesuffix("**.").rstrip(" *_")
    sentence = sentence.removesuffix("$.")
    sentence = _CLAUSE.sub("", _NOT_BUT.sub("", sentence, count=1))
    if (shorter := _NOT_AFTER.sub("", sentence)).strip():
        sentence = shorter
    if (verb := _SENTENCE_IS.match(sentence)) is not None and not _DENIED.search(verb[0]):
        sentence = sentence[verb.end() :]
    words = _WORD_OR_SIGN.findall(sentence)
    if len(words) > 4 and sentence[0].isalpha() and not CHANGERS.intersection(map(str.casefold, words)):
        return last_claim(sentence)  # a whole sentence in words, which holds the answer somewhere
    return _short(sentence)


def lone_letter(text: str) -> str:
    """A choice where the response is nothing else, or where it gives no number but ends with one.

    >>> lone_letter("**B**"), lone_letter("C) 12"), lone_letter("So it is (A)."), lone_letter("A farmer has 12 apples.")
    ('B', 'C) 12', '(A)', '')
    """
    short = text[-LONGEST:].strip(" *_\r\n\t,")
    if len(text) <= LONGEST and _LONE_LETTER.fullmatch(short):
        return short
    last = _last(_LETTER_IN_TEXT, short.rpartition("\n")[2])
    if last is None or _NUMBER_IN_TEXT.search(short) or _DENIED.search(short[: last.start()]):
        return ""
    return last.group()


def last_number(text: str) -> str:
    last = _last(_NUMBER_IN_TEXT, text)
    return _short(last.group().rstrip(",")) if last is not None else ""


def last_claim(text: str) -> str:
    """The last number with the word before it that denies it, and the word after it that changes it, if any.

    >>> last_claim("we get 3, then 1,234.5"), last_claim("It is not 5."), last_claim("some 5 million")
    ('1,234.5', 'not 5', '5 million')
    """
    last = _last(_NUMBER_IN_TEXT, text)
    if last is None:
        return ""
    before = re.split(r"\n|[.?!:] ", text[max(0, last.start() - 40) : last.start()])[-1]
    denied, changed = _DENIED.search(before), _CHANGED.match(text, last.end())
    number = last.group().rstrip(",")
    return _short(f"{denied[0].lstrip() if denied else ''}{number}{changed[0] if changed else ''}")


def _short(text: str) -> str:
    return text.strip() if len(text) <= LONGEST else ""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match. The end is searched first: the last match of a long response is mostly there."""
    for start in dict.fromkeys((max(0, len(text) - 4000), 0)):
        if found := deque(pattern.finditer(text, start), maxlen=1):
            return found[0]
    return None


ANSWERS: dict[str, Callable[[str], str]] = {
    "auto": auto,
    "boxed": boxed,  # the last \boxed{...}
    "tagged": tagged,  # the last <answer>...</answer>
    "marked": marked,  # what follows the last "####", "#" or "answer is"
    "last_number": last_number,
    "whole": _short,  # all of it
}
