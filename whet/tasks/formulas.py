r"""Whether two formulas are equal, by math-verify (sympy), behind guards; the matcher calls `same_formula` last.

sympy can compute for ever on a dozen characters (9^{9^{9}}), and math-verify's own limit, an alarm that rings once
after whole seconds, does not end every case (30 nested fractions outlast it). So a formula that is too large is never
handed to sympy and simply is not equal; one that is slow all the same ends after a second as `TooSlow`, raised again
and again until it gets through; and what no signal can interrupt is killed with its worker process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import re
import signal
import threading
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from whet.errors import WhetError

LONGEST = 300  # characters of the longest answer
# relative to the data's answer, where one of two numbers is a decimal
TOLERANCE = Fraction(1, 1_000_000)
# seconds of computing per comparison; waiting does not count, so that a busy machine costs no
# verdict
PATIENCE_S = 1.0
DEEPEST = 8  # brackets inside brackets
MOST_DIGITS = 30  # digits of one number

_COMMANDS = """frac sqrt pi cdot times div pm mp infty cup cap in notin leq geq le ge lt gt neq ne sin cos tan cot sec
    csc arcsin arccos arctan sinh cosh tanh log ln lg exp binom lfloor rfloor lceil rceil begin end hbar ell
    lbrace rbrace alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma
    tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega mathbb setminus emptyset
    angle overline cdots ldots dots approx equiv max min"""
_KNOWN = set(_COMMANDS.split())
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s?\{([^{}]*)\}")
_MATRICES = {"pmatrix", "bmatrix", "matrix", "vmatrix"}
_FUNCTION = re.compile(r"sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|arc|log|ln|exp|sqrt|max|min|pi")
_WORD = re.compile(r"[A-Za-z]{4,}")
_CHAIN = re.compile(r"[-+*/=^_!]{4}|(?:\(\s*){6}")
_DIGITS = re.compile(r"[0-9]+")
_EXPONENT = re.compile(r"(.?)\s?\^\s?(\{|\(|.)")
_EXPONENT_WITHOUT_BRACKETS = re.compile(r"\\[A-Za-z]+|[0-9]+|.", re.DOTALL)
_FACTORIAL = re.compile(r"(.?)\s?!")
# math-verify takes 5(1/4) for the mixed number 5 1/4
_PRODUCT = re.compile(r"([0-9]) ?\((?= ?(?:[0-9]+ ?/|\\frac))")


class TooSlow(BaseException):
    """Not an Exception, which sympy and math-verify would catch."""


def same_formula(found: str, gold: str) -> bool:
    """Whether math-verify takes them for equal. Raises TooSlow; what could blow up counts as not equal."""
    found, gold = (_PRODUCT.sub(r"\1 \\cdot (", text.strip(" .,;:*`")) for text in (found, gold))
    if (
        not (tame(found) and tame(gold))
        or _bases(found) - _bases(gold)
        or (found.isalpha() and gold.isalpha())
    ):
        return False
    # math-verify takes R for r; where both occur, the capital becomes a letter that is not used otherwise.
    letters = set(_COMMAND.sub(" ", f"{found} {gold}"))
    free = [letter for letter in "abcjklmnopqrstuvwxyz" if not {letter, letter.upper()} & letters]
    capitals = sorted(
        letter for letter in letters if letter.isupper() and letter.lower() in letters
    )
    for old, new in zip(capitals, free, strict=False):
        pattern = re.compile(rf"(\\[A-Za-z]+)|{old}")  # commands stay as they are
        found, gold = (pattern.sub(lambda m: m[1] or new, text) for text in (found, gold))  # noqa: B023
    return _compare(found, gold)


def _bases(text: str) -> set[str]:
    """Number bases, as the 8 of 52_8, which math-verify drops: another base than the data's is wrong, none is not."""
    return {base.strip("{}") for base in re.findall(r"[0-9]_(\{[0-9]+\}|[0-9])", text)}


# ---- guards


def tame(text: str) -> bool:
    r"""Whether a formula is small enough for sympy.

    >>> [tame(t) for t in (r"\frac{1}{\sqrt{2}}", "x^2+1", "9^{9^{9}}", "99999999!", r"\sum_{i=1}^{9} i", "east")]
    [True, True, False, False, False, False]
    """
    if not text or len(text) > LONGEST or not text.isascii() or not text.isprintable():
        return False
    commands = _COMMAND.findall(text)
    if not _KNOWN.issuperset(commands) or not _MATRICES.issuperset(_ENVIRONMENT.findall(text)):
        return False
    depths = list(accumulate((character in "([{") - (character in ")]}") for character in text))
    if min(depths) < 0 or depths[-1] or max(depths) > DEEPEST:
        return False
    letters = _FUNCTION.sub(" ", _COMMAND.sub(" ", _ENVIRONMENT.sub(" ", text)))
    if _WORD.search(letters) or commands.count("frac") + commands.count("sqrt") > 12:
        # letters that spell something: sympy would multiply them, and "east" would equal "seat"
        return False
    if ":" in text or ("=" in text and not _is_equation(text)):
        return False
    if commands.count("pm") + commands.count("mp") > 2 or _CHAIN.search(text):
        return False  # each of many signs doubles the readings, and the parser tries them all
    most_digits = 4 if "binom" in commands else MOST_DIGITS
    if any(len(digits) > most_digits for digits in _DIGITS.findall(text)):
        return False
    return all(map(_tame_power, _EXPONENT.finditer(text))) and all(
        map(_tame_factorial, _FACTORIAL.finditer(text))
    )


def _is_equation(text: str) -> bool:
    """With something to solve for; not of tuples, nor of a function at a point, which sympy would multiply out."""
    bare = _COMMAND.sub(" ", text)
    return (
        bool(re.search(r"[A-Za-z]", bare))
        and "," not in bare
        and not re.search(r"[A-Za-z]\(\s*[-0-9.]+\s*\)", bare)
    )


def _tame_power(power: re.Match[str]) -> bool:
    """No towers over numbers and brackets, no long exponents, and large ones only over a number."""
    text = power.string
    start = power.start(2)
    if (closing := {"{": "}", "(": ")"}.get(text[start])) is None:
        token = _EXPONENT_WITHOUT_BRACKETS.match(text, start)
        exponent, after = (token[0], text[token.end() :]) if token else ("", "")
    else:
        depths = accumulate(
            (character == text[start]) - (character == closing) for character in text[start:]
        )
        end = next((i for i, depth in enumerate(depths, start) if depth == 0), len(text))
        exponent = text[start + 1 : end]
        after = text[end + 1 :]
    if after.lstrip()[:1] == "^" or re.search(r"[0-9)\]}!]\s?\^", exponent):
        return False
    largest = max((int(digits) for digits in _DIGITS.findall(exponent)), default=0)
    base = power[1]
    return largest <= (9999 if base.isdigit() else 64 if base.isalpha() else 12)


def _tame_factorial(factorial: re.Match[str]) -> bool:
    """Only factorials of numbers to 200, of letters, and of short brackets with a letter: (n-k)!."""
    before = factorial.string[: factorial.end(1)].rstrip()
    if digits := re.search(r"[0-9]+$", before):
        return int(digits[0][-6:]) <= 200
    if before.endswith(")"):
        inside = before[before.rfind("(") :]
        return bool(re.fullmatch(r"\([-+0-9a-z ]{1,12}\)", inside) and re.search(r"[a-z]", inside))
    return before[-1:].isalpha()


# ---- math-verify


def load() -> Any:
    """Import the package."""
    try:
        import math_verify
    except ImportError:
        raise WhetError(
            'matcher = "math" needs the package math-verify: pip install "whet[train]", or set matcher = "exact".'
        ) from None
    # it warns that we turned its time limits off
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


@lru_cache(maxsize=1)
def warm() -> None:
    """Make one comparison in the parent. It loads much of sympy, which takes half a second: so no worker does."""
    load().verify(list(_parse("2\\pi")), list(_parse("x")), timeout_seconds=None)


@lru_cache(maxsize=4096)
def _compare(found: str, gold: str) -> bool:
    math_verify = load()
    warm()
    with _limited(PATIENCE_S):
        wanted = _parse(gold)
        given = _parse(found)
        if not wanted or not given:
            return False
        # The data's answer goes first; a set may be given as inequalities.
        same = math_verify.verify(
            list(wanted), list(given), allow_set_relation_comp=True, timeout_seconds=None
        )
        return bool(same or _evaluated(given[0]) == _evaluated(wanted[0])) and not _differ(
            given[0], wanted[0]
        )


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Any, ...]:
    """sympy's reading, without undefined values: a division by zero would equal every other one."""
    sympy = importlib.import_module("sympy")
    read = load().parse(
        f"${text}$", [_reading()], fallback_mode="no_fallback", parsing_timeout=None
    )
    undefined = lambda value: isinstance(value, sympy.Basic) and value.has(sympy.zoo, sympy.nan)  # noqa: E731
    return tuple(value for value in read if not isinstance(value, str) and not undefined(value))


@lru_cache(maxsize=1)
def _reading() -> Any:
    """math-verify's defaults, except that units stay: its list of units takes the m of 6m away."""
    normal = load().LatexExtractionConfig().normalization_config
    return load().LatexExtractionConfig(
        normalization_config=dataclasses.replace(normal, units=False)
    )


def _evaluated(formula: Any) -> Any:
    """math-verify compares a lone variable by its text, so that 0 + m would not be m."""
    with contextlib.suppress(Exception):
        return formula.doit()
    return formula


def _differ(given: Any, wanted: Any) -> bool:
    """Two numbers that differ after all: math-verify rounds to 6 places, which makes 1e-7 equal 1e-19."""
    try:
        if not (given.is_number and wanted.is_number):
            return False
        difference = (given - wanted).doit()
        if difference.is_Rational:
            return bool(difference != 0)
        return bool(abs(difference.evalf(20)) > float(TOLERANCE) * abs(wanted.doit().evalf(20)))
    except (AttributeError, TypeError, ValueError):  # sets, matrices, relations
        return False


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow inside, again and again until it gets through, unless the signal has another use already."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGVTALRM) != signal.SIG_DFL:
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise TooSlow(f"math-verify took longer than {seconds:g} s")

    signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
