r"""Answers for the judging benchmark, made from reference answers by rule.

`equals` keeps the value by construction, `wrongs` changes it by construction; both give (rule, response) pairs and
leave out what a rule cannot be sure of. `hostile` makes responses that are meant to hang, crash or cheat a judge.
Reference answers are read here by rules of this file, not by the matcher that is on trial.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from fractions import Fraction

INTEGER = re.compile(r"-?[0-9]+")
DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+")
FRACTION = re.compile(r"(-?)\\d?frac\{([0-9]+)\}\{([0-9]+)\}")
SCIENTIFIC = re.compile(r"(-?[0-9.]+) \\times 10\^\{?(-?[0-9]+)\}?")
DEGREES = re.compile(r"(-?[0-9.]+)\^(?:\\circ|\{\\circ\})")
UNIT = re.compile(r"(.*[0-9}]) ?\\(?:text|mbox)\{ ([a-z ]+)\}(\^[0-9])?")
WORD = re.compile(r"\\text\{([A-Za-z]+)\}")
CHOICE = re.compile(r"\\text\{\(([A-Z])\)\}")
NUMBERS = re.compile(r"-?[0-9]+(?:, ?-?[0-9]+)+")
PAIR = re.compile(r"([(\[])([^()\[\],]+),([^()\[\],]+)([)\]])")
SCALAR = re.compile(r"(?:[-+0-9a-zA-Z^_{}() ]|\\(?:frac|sqrt|pi|cdot|binom)(?![a-z]))+")


def boxed(answer: str) -> str:
    return f"So the result is $\\boxed{{{answer}}}$."


def value(gold: str) -> Fraction | None:
    if INTEGER.fullmatch(gold) or DECIMAL.fullmatch(gold):
        return Fraction(gold)
    if found := FRACTION.fullmatch(gold):
        return Fraction(int(found[1] + found[2]), int(found[3]))
    return None


def equals(gold: str) -> Iterator[tuple[str, str]]:
    """(rule, response) with the same value in other clothes."""
    yield "dollars", f"It is \\boxed{{${gold}$}}"
    yield "spaces", boxed(f" {gold} ")
    yield "marked", f"Let me see.\n**Final Answer:** ${gold}$"
    yield "thinking", f"<think>Perhaps \\boxed{{12345678}}?</think>\nNo. {boxed(gold)}"
    yield from ((rule, boxed(answer)) for rule, answer in _equal_numbers(gold))
    yield from ((rule, boxed(answer)) for rule, answer in _equal_texts(gold))


def _equal_numbers(gold: str) -> Iterator[tuple[str, str]]:
    number = value(gold)
    if number is not None and number.denominator == 1:
        yield "point zero", f"{number}.0"
        yield "sentence", f"{number}."
        yield "named", f"x = {number}"
        yield "product", f"2 \\cdot {number // 2} + {number % 2}"
        if abs(number) >= 1000:
            yield "thousands", f"{int(number):,}"
            yield "thousands in TeX", f"{int(number):,}".replace(",", "{,}")
        yield "dollar sign", f"\\${number}"
        yield "with a unit", f"{number} \\text{{ dollars}}"
    elif number is not None:
        yield "slash", f"{number.numerator}/{number.denominator}"
        yield "dfrac", f"{'-' if number < 0 else ''}\\dfrac{{{abs(number.numerator)}}}{{{number.denominator}}}"
        yield "not reduced", f"\\frac{{{3 * number.numerator}}}{{{3 * number.denominator}}}"
        if 10**12 % number.denominator == 0:
            yield "decimal", f"{float(number):.12f}".rstrip("0")
        if number > 1 and FRACTION.fullmatch(gold):
            whole, rest = divmod(number, 1)
            yield "mixed", f"{whole}\\frac{{{rest.numerator}}}{{{rest.denominator}}}"
    if found := SCIENTIFIC.fullmatch(gold):
        yield "e notation", f"{found[1]}e{found[2]}"
        yield "cdot", f"{found[1]} \\cdot 10^{{{found[2]}}}"
    if found := DEGREES.fullmatch(gold):
        yield "no degrees", found[1]
        yield "degree word", f"{found[1]} \\text{{ degrees}}"
        yield "degree sign", f"{found[1]}\u00b0"


def _equal_texts(gold: str) -> Iterator[tuple[str, str]]:
    if "\\frac" in gold:
        yield "dfrac inside", gold.replace("\\frac", "\\dfrac")
    if re.search(r"\\frac\{[0-9a-z]\}\{[0-9a-z]\}", gold) and not re.search(
        r"[0-9] ?\\frac|sec|sin|cos|tan|cot|log|ln", gold
    ):
        yield "slash inside", re.sub(r"\\frac\{([0-9a-z])\}\{([0-9a-z])\}", r"(\1/\2)", gold)
    if re.search(r"[0-9)a-z}] ?[+] ?[0-9(a-z\\]", gold):
        yield "spaced plus", re.sub(r" ?\+ ?", " + ", gold)
    if "\\left" in gold:
        yield "no left right", gold.replace("\\left", "").replace("\\right", "")
    elif re.fullmatch(r"[(\[][^()\[\]]*[)\]]", gold):
        yield "left right", f"\\left{gold[:-1]}\\right{gold[-1]}"
        yield "spaced pair", gold.replace(",", " , ")
    if found := UNIT.fullmatch(gold):
        yield "no unit", found[1]
        yield "unit in roman", f"{found[1]}\\,\\mathrm{{{found[2].strip()}}}{found[3] or ''}"
    yield from _equal_words_and_lists(gold)
    if value(gold) is None and _is_scalar(gold):
        yield "doubled and halved", f"\\frac{{2 \\cdot ({gold})}}{{2}}"
        yield "plus zero", f"0 + {gold}" if gold[0] != "-" else f"0 {gold}"


def _equal_words_and_lists(gold: str) -> Iterator[tuple[str, str]]:
    if found := WORD.fullmatch(gold):
        yield "bare word", found[1]
        yield "large word", found[1].upper()
    if found := CHOICE.fullmatch(gold):
        yield "letter", found[1]
        yield "bracketed letter", f"({found[1]})"
    if NUMBERS.fullmatch(gold) and not re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", gold):
        parts = [part.strip() for part in gold.split(",")]
        yield "reversed", ", ".join(reversed(parts))
        yield "with and", " \\text{ and } ".join(parts)
        yield "set", f"\\{{{', '.join(parts)}\\}}"
        yield "named each", " \\text{ or } ".join(f"x = {part}" for part in parts)
    if "\\cup" in gold and "{" not in gold:
        yield "union reversed", " \\cup ".join(part.strip() for part in reversed(gold.split("\\cup")))
    if "%" in gold:
        yield "escaped percent", re.sub(r"\s*\\*%", r"\\%", gold)
    if found := re.fullmatch(r"[a-zA-Z](?:\([a-z]\))? ?= ?([^=,]*)", gold):
        yield "no name", found[1]


def _is_scalar(gold: str) -> bool:
    """A formula that arithmetic may be done with: no list, pair, relation, word, base or mixed number."""
    letters = re.sub(r"\\[a-z]+", " ", gold)
    plain = SCALAR.fullmatch(gold) and not re.search(
        r"[A-Za-z]{3,}|_|[0-9] ?\\frac|[a-zA-Z]\([a-z]\)| or |[0-9] [A-Za-z]+$|\{0\}", gold.replace("\\", " \\")
    )
    return bool(plain) and not re.search(r"[A-Za-z]{3,}", letters)


def wrongs(gold: str, others: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(rule, response) with another value."""
    for rule, answer in _wrong_answers(gold):
        yield rule, boxed(answer)
    number = value(gold)
    if number is not None:
        different = [
            v
            for v in (value(other) for other in rng.sample(others, min(8, len(others))))
            if v is not None and v != number
        ]
        for other in different[:2]:
            yield "another's number", boxed(str(other))
        yield "number after thinking", f"<think>{boxed(gold)}</think> {boxed(str(number + 7))}"
        yield "right only in thought", f"<think>{boxed(gold)}</think> I cannot say."
    yield "still thinking", f"<think>{boxed(gold)}"
    if "boxed" not in gold:
        yield "not closed", f"\\boxed{{{gold}"[:-1] + "?"


def _wrong_answers(gold: str) -> Iterator[tuple[str, str]]:
    number = value(gold)
    if number is not None:
        yield "plus one", str(number + 1)
        if number:
            yield "sign", str(-number)
            yield "tenfold", str(number * 10)
            yield "a thousandth off", f"{float(number) * 1.001 + 0.0001:.6f}"
            yield "times pi", f"{gold}\\pi"
            yield "a variable", f"{gold}x"
        yield "two answers", f"{gold} \\text{{ or }} {number + 1}"
        yield "as interval", f"[{gold}, {number + 1}]"
    elif _is_scalar(gold):
        yield "formula sign", f"-({gold})"
        yield "formula plus one", f"{gold} + 1"
        yield "formula doubled", f"2 \\cdot ({gold})"
    if bumped := _bumped(gold):
        yield "first digit", bumped
    if found := PAIR.fullmatch(gold.replace("\\left", "").replace("\\right", "").replace(" ", "")):
        left, first, second, right = found.groups()
        if first != second:
            yield "pair reversed", f"{left}{second},{first}{right}"
        yield "other bracket", f"{'[' if left == '(' else '('}{first},{second}{right}"
        yield "half a pair", first
    if NUMBERS.fullmatch(gold) and not re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", gold):
        parts = [part.strip() for part in gold.split(",")]
        yield "one left out", ", ".join(parts[1:])
        yield "one too many", ", ".join([*parts, "987654"])
    if found := WORD.fullmatch(gold):
        yield "letters reversed", found[1][::-1] + "x"
    if found := CHOICE.fullmatch(gold):
        yield "next letter", f"({chr(ord(found[1]) + 1)})"
    if found := SCIENTIFIC.fullmatch(gold):
        yield "another power", f"{found[1]} \\times 10^{{{int(found[2]) + 1}}}"
    if (found := UNIT.fullmatch(gold)) and "degree" not in found[2]:
        yield "another unit", f"{found[1]} \\text{{ furlongs}}"


def _bumped(gold: str) -> str:
    """The first whole number in the text plus one; not an index, a unit's power, or what a zero hides."""
    found = re.search(r"(?<![_{.0-9])[0-9]+(?![0-9.])", re.sub(r"_\{[^}]*\}", lambda m: "#" * len(m[0]), gold))
    if found is None or "\\text" in gold[: found.start()] or "\\mbox" in gold[: found.start()]:
        return ""
    return f"{gold[: found.start()]}{int(found[0]) + 1}{gold[found.end() :]}"


BOMBS = [
    "9**9**9", "9^9^9", "9^{9^{9}}", "10^{10^{10}}", "99999999!", "(9!)!", "((9!)!)!", "2^{99999999999}",
    "\\sum_{i=1}^{10000000} i^i", "\\prod_{n=1}^{\\infty} n!", "\\int_0^{1} x^{x^{x}} dx", "\\binom{99999999}{4999999}",
    "(x+1)^{9999}", "(x+y+z)^{500}", "\\sqrt[99999]{2^{99999}}", "x^{x^{x^{x^{x}}}}", "1/(1-1)", "\\frac{0}{0}",
    "\\lim_{n\\to\\infty} (1+1/n)^n", "10^{-99999999}", "1e999999999", "0x" + "f" * 200, "\\log_{0}{0}",
    "\\gcd(9^{9999}, 8^{9999})", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}^{99999}", "nan", "inf", "-inf",
    "\\infty", "NaN", "None", "True", "\\tan(\\tan(\\tan(\\tan(10^{30}))))", "\\sin(10^{99999})", "7^{7^{7}}-7^{7^{7}}",
    "__import__('os').system('touch hacked')", "exec('raise SystemExit')", "().__class__.__bases__[0].__subclasses__()",
    "lambda: 1", "open('/etc/passwd').read()", "{{7*7}}", "${jndi:ldap://x}", "'; DROP TABLE prompts; --",
    "\\input{/etc/passwd}", "\\write18{true}", "\\def\\x{\\x\\x}\\x", "\\csname boxed\\endcsname",
    "\\left(" * 60 + "\\right)" * 60, "[" * 140 + "]" * 140, "{" * 149 + "}" * 149, "-" * 290, "+" * 250 + "7",
    "1," * 140, "x=" * 140, "\\pm " * 60, "1\\pm" * 50, "\\cup" * 60, "!" * 280, "_" * 280, "^" * 280, "\\" * 299,
    "\x00", "4\x002", "\u202e24\u202c", "\u200b", "\ud800", "\udfff\ud800", "\U0001f600" * 50, "\u0663\u0664", "\u00bd",
    "\uff14\uff12", "e\u0301" * 100, "\u0000" * 200, "\t\r\n\v\f", "\x1b[31m42\x1b[0m", "<script>alert(1)</script>",
]  # fmt: skip


def hostile(count: int, rng: random.Random) -> list[str]:
    """Responses none of which is right, whatever the reference: boxed bombs, and whole responses of every bad shape."""
    nested = ["\\frac{1}{1+" * n + "x" + "}" * n for n in (3, 8, 14, 20, 30, 300)]
    rooted = ["\\sqrt{1+" * n + "x" + "}" * n for n in (8, 14, 30)]
    million = 1_000_000
    large = [
        "(" * 100_000, "[" * 100_000 + "]" * 100_000, "\\boxed{" * 20_000, "{" * million, "x" * million,
        "\x00" * million, "\\boxed{" + "9" * million + "}", "answer is " * 100_000, "#### " * 200_000,
        "answer" + " " * million,
        "<think>" * 100_000, "</think>" * 100_000, "<answer>" * 50_000 + "</answer>" * 50_000, "= " * 300_000,
        "\U0001f600" * 250_000, "\\boxed{\\frac{" * 20_000, "\ud800" * 100_000, "\\left( " * 100_000,
    ]  # fmt: skip
    shapes = [boxed(b) for b in [*BOMBS, *nested, *rooted]]
    shapes += [f"The answer is {b}" for b in BOMBS] + [f"<answer>{b}</answer> #### {b}" for b in BOMBS]
    shapes += [
        "",
        " ",
        "\\boxed{}",
        "\\boxed{ }",
        "\\boxed",
        "\\boxed{",
        "answer:",
        "####",
        "I do not know.",
        "</think>",
    ]
    while len(shapes) + len(large) < count:
        picked = rng.sample(BOMBS, 2)
        joined = rng.choice(
            ["{} + {}", "\\frac{{{}}}{{{}}}", "({}, {})", "{} = {}", "{} \\cup {}", "{}^{{{}}}", "{}, {}"]
        )
        shapes.append(boxed(joined.format(*picked)))
    picked = large + shapes[: count - len(large)]
    rng.shuffle(picked)
    return picked
