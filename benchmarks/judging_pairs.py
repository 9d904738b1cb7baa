r"""Pairs of a reference answer and a response for the judging benchmark, made from values by rules of meaning.

A family draws values and writes each of them in several ways which a careful person takes for right, and in several
near misses which that person takes for wrong. No rule here was taken from the matcher. A hash of the pair says
whether it is held out (30 %): the matcher is mended by the open pairs, and the others say how much of that is luck.

What is a matter of taste is left out: "3,14" for 3.14, other scales of a unit (50 mm for 5 cm), 4:6 for 2:3.
What docs/judges.md lays down is kept to: a unit that only one side has is passed over, 50 % is 50 and also 0.5.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from judging_forms import FORMS, Made
from judging_prose import PROSE

HELD_OUT = 0.3
ROUNDS = 6
"""Draws of each family."""


class Pair(NamedTuple):
    family: str
    gold: str
    response: str
    right: bool
    question: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(f"{self.gold}\0{self.response}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def pairs(seed: int = 0) -> list[Pair]:
    """All pairs, each once; a pair that two families call right and wrong is a mistake of this file."""
    rng = random.Random(seed)
    found: dict[tuple[str, str], Pair] = {}

    def add(pair: Pair) -> None:
        if found.setdefault((pair.gold, pair.response), pair).right != pair.right:
            raise AssertionError(f"Two rules disagree about {pair}.")

    for family, (question, make) in FAMILIES.items():
        for _ in range(ROUNDS):
            for gold, right, answers in make(rng):
                for answer in answers:
                    add(Pair(family, gold, dressed(answer, rng), right, question))
    for family, (question, tell) in PROSE.items():
        for _ in range(ROUNDS):
            for gold, right, responses in tell(rng):
                for response in responses:
                    add(Pair(family, gold, response, right, question))
    return list(found.values())


def dressed(answer: str, rng: random.Random) -> str:
    """A response around an answer: a box three times out of four."""
    shapes = (
        ["\\boxed{@}"] * 3 + ["So we get $\\boxed{@}$."] * 3 + ["<think>Let me see: 987.</think>\n\\[\\boxed{@}\\]"]
    )
    shapes += ["The answer is $@$.", "**Final answer:** @"]
    return rng.choice(shapes).replace("@", answer)


def full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in text)


def scientific(n: int) -> tuple[str, int]:
    digits = str(n)
    rest = digits[1:].rstrip("0")
    return f"{digits[0]}{'.' + rest if rest else ''}", len(digits) - 1


def integers(rng: random.Random) -> Made:
    n, m = rng.randint(12, 9999), rng.randint(3, 11)
    right = [f"{n}", f"{n}.0", f"{n}.00", f"+{n}", f"({n})", f"\\mathbf{{{n}}}", f"\\text{{{n}}}", f"x = {n}", f"{n}."]
    right += [full_width(str(n)), f"\\,{n}\\,", f"\\displaystyle {n}", f"\\boldsymbol{{{n}}}", f"\\({n}\\)"]
    right += [f"{n - m} + {m} = {n}", f"\\textbf{{{n}}}", f"approximately {n}", f"\\approx {n}", f"{m}\\cdot {n} / {m}"]
    yield str(n), True, right
    wrong = [f"{n + 1}", f"-{n}", f"{n}0", f"{n // 10}", f"{n}!", f"{n}^2", f"\\sqrt{{{n}}}", f"{n}/{m}", f"1/{n}"]
    wrong += [f"{n}.{m}", f"{n} {m}", f"{n}, {m}", f"{m}{n}", f"{n + m} = {n}", f"{n}x", f"{n} \\pi", f"{n} + {m}"]
    wrong += [f"{n}\\frac{{1}}{{2}}", f"[{n}, {n + 1}]", f"\\pm {n}", f"> {n}", f"x > {n}", f"{n}e{m}", f"{n} - {m}"]
    wrong += [f"\\neq {n}", f"{n}_{{{m}}}^{{2}}", f"|{n}| + {m}", f"{n}:{m:02}", f"{n}i", f"\\log {n}"]
    yield str(n), False, wrong


def negatives(rng: random.Random) -> Made:
    n = rng.randint(2, 999)
    right = [f"{sign}{n}" for sign in ("-", "\u2212", "\u2013", "\uff0d", "- ", "\\text{-}")]
    yield f"-{n}", True, [*right, f"(-{n})", f"-{n}.0", f"\u2212{full_width(str(n))}", f"x = -{n}", f"-{{{n}}}"]
    yield f"-{n}", False, [f"{n}", f"--{n}", f"-{n + 1}", f"1-{n}", f"-1/{n}", f"\\pm {n}", f"{n}-", f"-{n}-{n}"]


def large(rng: random.Random) -> Made:
    n = rng.randint(10_000, 99_999_999)
    grouped = f"{n:,}"
    marks = [",", "{,}", "\\,", ",\\!", "\u202f", "\u00a0", "\u2009", " ", "'", "\u2019"]
    right = [grouped.replace(",", mark) for mark in marks]
    if n > 10**6:
        right.append(grouped.replace(",", "."))
    lead, power = scientific(n)
    right += [f"{n}", f"{grouped}.00", f"{lead} \\times 10^{{{power}}}", f"{lead}e{power}", f"{lead} \\cdot 10^{power}"]
    for gold in (str(n), grouped):
        yield gold, True, right
    first, *rest = grouped.split(",")
    wrong = [f"{n + 1}", f"{first}, {int(rest[0]) + 1}", ", ".join([*rest, f"1{first}"]), f"{n}0"]
    wrong += [f"{first},{rest[0][:2]}", f"{lead} \\times 10^{{{power + 1}}}", f"{lead} \\times {power}^{{10}}", first]
    for gold in (str(n), grouped):
        yield gold, False, wrong
    round_one = rng.randint(1, 9) * 1000
    yield f"{round_one:,}", False, [f"{round_one // 1000}, 0", f"{round_one // 1000},0", f"0, {round_one // 1000}"]


def decimals(rng: random.Random) -> Made:
    places = rng.randint(1, 4)
    n = rng.randint(1, 999) * 10 + rng.randint(1, 9)
    d = f"{n / 10**places:.{places}f}"
    f = Fraction(d)
    right = [d, d + "0", d + "00", f"{f.numerator}/{f.denominator}", f"\\frac{{{f.numerator}}}{{{f.denominator}}}"]
    right += [full_width(d), f"+{d}", f"{n} \\times 10^{{-{places}}}", f"x = {d}", f"\\text{{{d}}}", f"\\approx {d}"]
    if d.startswith("0."):
        right.append(d[1:])
    yield d, True, right
    wrong = [f"-{d}", d.replace(".", ""), f"{d}1", f"{f * 10}", f"1{d}", f"{d}\\pi", f"{d}^2", f"{d}x", f"{d} or {n}"]
    wrong += [f"{round(float(d))}", f"{f.denominator}/{f.numerator}", d.replace(".", ":"), f"{d} \\times 10^3"]
    yield d, False, wrong


VULGAR = {"1/2": "\u00bd", "1/3": "\u2153", "2/3": "\u2154", "1/4": "\u00bc", "3/4": "\u00be", "1/5": "\u2155"}
VULGAR |= {"2/5": "\u2156", "1/6": "\u2159", "5/6": "\u215a", "1/8": "\u215b", "3/8": "\u215c", "7/8": "\u215e"}


def fractions(rng: random.Random) -> Made:
    b = rng.randint(3, 29)
    a = rng.choice([x for x in range(1, 3 * b) if Fraction(x, b).denominator == b])
    k = rng.randint(2, 9)
    rounded = [f"{a / b:.2f}"] if Fraction(f"{a / b:.2f}") != Fraction(a, b) else []
    right = [f"{a}/{b}", f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}", f"\\tfrac{{{a}}}{{{b}}}", f"{a} / {b}"]
    right += [f"\\frac{{{a * k}}}{{{b * k}}}", f"{a * k}/{b * k}", f"x = \\frac{{{a}}}{{{b}}}", f"({a}/{b})"]
    right += [f"{a}\u2044{b}", f"{a} \\div {b}", f"\\left(\\frac{{{a}}}{{{b}}}\\right)", f"{{{a} \\over {b}}}"]
    right += [f"\\frac{{-{a}}}{{-{b}}}", f"{a}\u00f7{b}", f"\\frac {{{a}}} {{{b}}}", f"{float(Fraction(a, b)):.12f}"]
    if a > b:
        whole, rest = divmod(a, b)
        right += [f"{whole}\\frac{{{rest}}}{{{b}}}", f"{whole} {rest}/{b}", f"{whole} + \\frac{{{rest}}}{{{b}}}"]
    for gold in (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}"):
        yield gold, True, right
        wrong = [
            f"{b}/{a}",
            f"\\frac{{{b}}}{{{a}}}",
            f"-{a}/{b}",
            f"{a + 1}/{b}",
            f"{a}/{b + 1}",
            f"{a}.{b}",
            f"{a}{b}",
        ]
        wrong += [*rounded, f"{a}, {b}", f"\\frac{{{a}}}{{{b}}}\\pi", f"\\sqrt{{\\frac{{{a}}}{{{b}}}}}", f"{a}"]
        wrong += [f"({a}, {b})", f"\\frac{{{a}}}{{{b}}}x", f"{k}\\frac{{{a}}}{{{b}}}", f"1 - \\frac{{{a}}}{{{b}}}"]
        wrong += [f"\\frac{{{a}}}{{{b}}} \\text{{ or }} \\frac{{{b}}}{{{a}}}", f"\\binom{{{a}}}{{{b}}}"]
        yield gold, False, wrong
    text, sign = rng.choice(sorted(VULGAR.items()))
    half = Fraction(text)
    yield text, True, [sign, f"x = {sign}", f"{half.numerator * 5}/{half.denominator * 5}"]
    yield str(k + half), True, [f"{k}{sign}", f"{k} {sign}", f"{k}\\frac{{{half.numerator}}}{{{half.denominator}}}"]
    yield str(k + half), False, [sign, f"{k}", f"-{k}{sign}", f"{k + 1}{sign}", f"{k}({sign})"]
    yield f"-{text}", True, [f"-{sign}", f"\\frac{{-{half.numerator}}}{{{half.denominator}}}", f"-{text}", f"-({text})"]


def percents(rng: random.Random) -> Made:
    p = rng.choice([rng.randint(1, 49), rng.randint(1, 499) / 10])
    right = [f"{p}%", f"{p}\\%", f"{p} %", f"{p} \\%", f"{p} percent", f"{p}\\text{{ percent}}", f"{p} per cent"]
    right += [f"{p}\\,\\%", f"{p}\uff05", f"{Fraction(str(p)) / 100}", f"\\text{{{p}\\%}}", f"{p} pct", f"{p}"]
    yield f"{p}\\%", True, right
    yield f"{p}%", True, right
    wrong = [f"{p + 1}\\%", f"{p * 10}%", f"-{p}%", f"{p / 10}%", f"{p}\u2030", f"{p} basis points", f"0.{p}% or {p}%"]
    wrong += [f"{p}% to {p + 5}%", f"at least {p}%", f"less than {p}%", f"{110 - p}\\%", f"{p}\\% + 1", f"{p}\\%x"]
    yield f"{p}\\%", False, wrong
    share = Fraction(str(p)) / 100
    yield f"{float(share):g}", False, [f"{p}", f"{p * 10}%"]
    yield f"{float(share):g}", True, [f"{p}%", f"{float(share):g}", f"{share.numerator}/{share.denominator}"]


def money(rng: random.Random) -> Made:
    n, cents = rng.randint(2, 4999), rng.choice([0, 0, 5, 50, 99, 25])
    d = f"{n}.{cents:02}" if cents else str(n)
    right = [f"\\${d}", f"${d}", f"{d} dollars", f"\\text{{\\${d}}}", f"USD {d}", f"{d} USD", f"\\$ {d}", f"{d}"]
    right += [
        f"\\${n:,}.{cents:02}",
        f"{n:,}.{cents:02} dollars",
        f"US\\${d}",
        f"\\${d} \\text{{ dollars}}",
        f"\\${d}.",
    ]
    wrong = [f"\\${n + 1}.{cents:02}", f"\\${d} million", f"-\\${d}", f"\\${d} thousand", f"\\${d}k", f"{d}\\% "]
    wrong += [f"more than \\${d}", f"\\${d} or \\${n + 1}", f"{n}{cents:02}0", f"\\${d} and 30 cents", f"under \\${d}"]
    for gold in (d, f"\\${d}"):
        yield gold, True, right
        yield gold, False, [w for w in wrong if not (w.endswith("% "))]
    yield f"\\${d}", False, [f"{d} cents", f"\u20ac{d}", f"{d} euros", f"\u00a3{d}", f"{d} yen", f"{d} apples"]


UNITS = {
    "cm": ("centimeters", "centimetres", "m", "kg"), "m": ("meters", "metres", "km", "s"),
    "km": ("kilometers", "kilometres", "miles", "hours"), "kg": ("kilograms", "kilogram", "g", "lb"),
    "hours": ("hrs", "h", "minutes", "days"), "minutes": ("min", "mins", "hours", "meters"),
    "seconds": ("s", "sec", "minutes", "years"), "miles": ("mi", "mile", "km", "miles per hour"),
    "feet": ("ft", "foot", "inches", "yards"), "inches": ("in", "inch", "feet", "square inches"),
    "liters": ("L", "litres", "ml", "gallons"), "degrees": ("deg", "\u00b0", "radians", "percent"),
    "m/s": ("meters per second", "m s^{-1}", "km/h", "m/s^2"), "mph": ("miles per hour", "mi/h", "km/h", "miles"),
    "days": ("day", "d", "weeks", "hours"), "years": ("yr", "yrs", "months", "days"),
}  # fmt: skip


def units(rng: random.Random) -> Made:
    unit = rng.choice(sorted(UNITS))
    n = rng.choice([rng.randint(2, 500), rng.randint(11, 999) / 10])
    one, other, *bad = UNITS[unit]
    right = [f"{n} {unit}", f"{n}\\text{{ {unit}}}", f"{n}", f"{n} \\text{{ {one}}}", f"{n} {other}", f"x = {n} {unit}"]
    right += [f"{n}\\,\\mathrm{{{unit}}}", f"{n}~\\text{{{unit}}}", f"\\text{{{n} {unit}}}", f"{n}\\ \\text{{{unit}}}"]
    yield f"{n}\\text{{ {unit}}}", True, right
    yield f"{n} {unit}", True, right
    wrong = [f"{n + 1} {unit}", f"{n} {bad[0]}", f"{n}\\text{{ {bad[1]}}}", f"{n} thousand {unit}", f"-{n} {unit}"]
    wrong += [f"{n} {unit} or {n + 2} {unit}", f"at least {n} {unit}", f"{n} {unit} and 7 {unit}", f"{n}^2 {unit}"]
    wrong += [f"{n} and a half {unit}", f"half of {n} {unit}", f"{n}/2 {unit}", f"{n} \\times 2 {unit}", unit]
    yield f"{n}\\text{{ {unit}}}", False, wrong
    yield f"{n}", True, [f"{n} {unit}", f"{n}\\text{{ {unit}}}", f"{n}\\,\\text{{{one}}}"]
    yield f"{n}", False, [f"{n + 1} {unit}", f"{n} hundred {unit}", f"{n} {unit} squared minus 1", f"over {n} {unit}"]
    length = rng.choice(["cm", "m", "km"])
    area = [
        f"{n}\\text{{ {length}}}^2",
        f"{n} {length}^2",
        f"{n} square {UNITS[length][0]}",
        f"{n}",
        f"{n} {length}\u00b2",
    ]
    yield f"{n}\\text{{ {length}}}^2", True, [*area, f"{n}\\,\\text{{{length}}}^{{2}}", f"{n} \\text{{ sq {length}}}"]
    yield f"{n}\\text{{ {length}}}^2", False, [f"{n}\\text{{ {length}}}^3", f"{n} {length}", f"{n} cubic {length}"]


def counted(rng: random.Random) -> Made:
    """The question asks how many apples are left in the baskets of the farmers."""
    n = rng.randint(3, 400)
    right = [
        f"{n} apples",
        f"{n} \\text{{ apples}}",
        f"\\text{{{n} apples}}",
        f"{n}",
        f"{n} apples left",
        f"{n} Apples",
    ]
    right += [
        f"{n}\\,\\text{{apples}}",
        f"{n} apples are left",
        f"There are {n} apples left",
        f"{n} apples in the baskets",
    ]
    yield f"{n}", True, right
    yield f"{n} apples", True, right[:4]
    words = [
        "million",
        "thousand",
        "hundred",
        "dozen",
        "billion",
        "squared",
        "cubed",
        "or more",
        "or less",
        "factorial",
    ]
    words += ["and a half", "pairs", "or fewer", "plus 2", "minus one", "halves", "thirds", "tenths"]
    words += [
        "or so many more",
        "dozens",
        "score",
        "gross",
        "trillion",
        "to the fourth",
        "point five",
        "over two",
        "of 100",
    ]
    some = rng.sample(words, 9)
    yield f"{n}", False, [f"{n} {w}" for w in some] + [f"{n} \\text{{ {w}}}" for w in some[:5]]
    yield f"{n}", False, [f"{n} {w} apples" for w in ("hundred", "dozen", "million", "and a half", "thousand")]
    before = [
        "not",
        "at least",
        "at most",
        "more than",
        "less than",
        "fewer than",
        "up to",
        "half of",
        "twice",
        "minus",
    ]
    before += [
        "over",
        "under",
        "no more than",
        "anything but",
        "a third of",
        "double",
        "never",
        "square root of",
        "one of",
    ]
    some = rng.sample(before, 8)
    yield f"{n}", False, [f"{w} {n}" for w in some] + [f"\\text{{{w} {n} apples}}" for w in some[:3]]
    yield (
        f"{n}",
        False,
        [f"{n} apples and {n + 1} pears", f"{n} or {n + 2} apples", f"{n - 1} apples", f"{n} to {n + 3}"],
    )
    yield f"{n}", False, [f"between {n} and {n + 9}", f"{n} apples or {n + 1} apples", "apples", f"no apples, not {n}"]


NUMERALS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def scales(rng: random.Random) -> Made:
    n = rng.choice([rng.randint(2, 99), rng.randint(11, 99) / 10])
    word, power = rng.choice([("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12)])
    full = int(Fraction(str(n)) * 10**power)
    right = [
        f"{full}",
        f"{full:,}",
        f"{n} {word}",
        f"{n} \\text{{ {word}}}",
        f"{n} \\times 10^{{{power}}}",
        f"{n}e{power}",
    ]
    right += [f"{n} {word.title()}", f"\\text{{{n} {word}}}", f"{full:,}".replace(",", "\\,")]
    right += [f"{n}0 {word}" if isinstance(n, float) else f"{n}.0 {word}"]
    wrong = [f"{n}", f"{n} hundred", f"{full // 10}", f"{n} \\times 10^{{{power + 1}}}", f"{full + 1}", f"-{n} {word}"]
    wrong += [f"{n} {other}" for other in ("thousand", "million", "billion") if other != word] + [f"over {n} {word}"]
    wrong += [f"{n} or {n + 1} {word}", f"{n} {word} and one"]
    for gold in (f"{n} {word}", f"{full}", f"{n} \\text{{ {word}}}"):
        yield gold, True, right
        yield gold, False, wrong
    small = rng.randint(0, 12)
    yield str(small), True, [NUMERALS[small], f"\\text{{{NUMERALS[small]}}}"]
    yield str(small), False, [NUMERALS[(small + 1) % 13], f"minus {NUMERALS[small + 0]}" if small else "one"]


APPLES = "A farmer fills baskets with apples. How many apples are left in the baskets?"
FAMILIES: dict[str, tuple[str, Callable[[random.Random], Made]]] = {
    "integers": ("What is x?", integers),
    "negatives": ("What is x?", negatives),
    "large": ("How large is the number?", large),
    "decimals": ("What is x?", decimals),
    "fractions": ("What is x?", fractions),
    "percents": ("By what percentage did it change?", percents),
    "money": ("How many dollars does it cost?", money),
    "units": ("How much is it?", units),
    "counted": (APPLES, counted),
    "scales": ("How many are there?", scales),
    **FORMS,
}
