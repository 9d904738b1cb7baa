r"""Whether two formulas are equal, by math-verify (sympy), behind guards. Called by the matcher for what text and
numbers do not settle.

sympy can compute for ever on a dozen characters (9^{9^{9}}), and math-verify's own limit, an alarm that rings once
after whole seconds, does not end every case (30 nested fractions outlast it). So what is too large is refused unseen,
and is then simply not equal; what is slow all the same ends after a second as `TooSlow`, raised again and again until
it gets through; and what no signal can interrupt is killed with its worker process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from whet.errors import WhetError
from whet.tasks.match import TOLERANCE, drop_name, folded, read_value, split_unit, strip, undress

PATIENCE_S = 1.0
"""Of computing, for one comparison; not of waiting, so that a busy machine costs no verdict."""
LONGEST = 300
DEEPEST = 8
MOST_DIGITS = 30

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
_PRODUCT = re.compile(r"([0-9]) ?\((?= ?(?:[0-9]+ ?/|\\frac))")
"""math-verify takes 5(1/4) for the mixed number 5 1/4."""
_FACTORIAL = re.compile(r"(.?)\s?!")


class TooSlow(BaseException):
    """Not an Exception: sympy and math-verify go on after those."""


def same_formula(found: str, gold: str) -> bool:
    """Whether math-verify takes them for equal. Raises TooSlow; refuses, as not equal, what could blow up."""
    found, gold = _prepare(found), _prepare(gold)
    if not (tame(found) and tame(gold)) or _bases(found) - _bases(gold) or (found.isalpha() and gold.isalpha()):
        return False
    return _compare(*_told_apart(found, gold))


def tame(text: str) -> bool:
    r"""A formula small enough to be handed to sympy.

    >>> [tame(t) for t in (r"\frac{1}{\sqrt{2}}", "x^2+1", "9^{9^{9}}", "99999999!", r"\sum_{i=1}^{9} i", "east")]
    [True, True, False, False, False, False]
    """
    if not text or len(text) > LONGEST or not text.isascii() or not text.isprintable():
        return False
    commands = _COMMAND.findall(text)
    if not _KNOWN.issuperset(commands) or not _MATRICES.issuperset(_ENVIRONMENT.findall(text)):
        return False
    if _is_words(text) or not 0 <= _depth(text) <= DEEPEST or commands.count("frac") + commands.count("sqrt") > 12:
        return False
    if ":" in text or ("=" in text and not _is_equation(text)):
        return False
    if commands.count("pm") + commands.count("mp") > 2 or _CHAIN.search(text):
        return False  # each sign of many doubles the readings; the parser tries them all
    most_digits = 4 if "binom" in commands else MOST_DIGITS
    if any(len(digits) > most_digits for digits in _DIGITS.findall(text)):
        return False
    return all(map(_tame_power, _EXPONENT.finditer(text))) and all(map(_tame_factorial, _FACTORIAL.finditer(text)))


def load() -> Any:
    """The package, imported once."""
    try:
        import math_verify
    except ImportError:
        raise WhetError(
            'matcher = "math" needs the package math-verify: pip install "whet[train]", or set matcher = "exact".'
        ) from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that we turned its time limits off
    return math_verify


def _prepare(text: str) -> str:
    value, _ = split_unit(text)
    return _PRODUCT.sub(r"\1 \\cdot (", " ".join(undress(value).split()).strip(" .,;:*`$"))


def _told_apart(found: str, gold: str) -> tuple[str, str]:
    """math-verify takes R for r; where both occur, the large one gets a letter that nobody uses."""
    letters = set(_COMMAND.sub(" ", f"{found} {gold}"))
    free = [letter for letter in "abcjklmnopqrstuvwxyz" if not {letter, letter.upper()} & letters]
    for large in sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters):
        if free:
            small = free.pop(0)
            found, gold = _renamed(found, large, small), _renamed(gold, large, small)
    return found, gold


def _renamed(text: str, old: str, new: str) -> str:
    return re.sub(rf"\\[A-Za-z]+|{old}", lambda found: found[0] if found[0][0] == "\\" else new, text)


def _is_words(text: str) -> bool:
    """Letters that spell something: sympy would multiply them, and "east" would equal "seat"."""
    bare = _COMMAND.sub(" ", _ENVIRONMENT.sub(" ", text))
    return _WORD.search(_FUNCTION.sub(" ", bare)) is not None


def _is_equation(text: str) -> bool:
    """With something to solve for; not of tuples, nor of a function at a point, which sympy would multiply out."""
    bare = _COMMAND.sub(" ", text)
    return bool(re.search(r"[A-Za-z]", bare)) and "," not in bare and not re.search(r"[A-Za-z]\(\s*[-0-9.]+\s*\)", bare)


def _depth(text: str) -> int:
    """Of the brackets; -1 where they do not close each other."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
        if depth < 0:
            return -1
    return deepest if depth == 0 else -1


def _tame_power(power: re.Match[str]) -> bool:
    """Towers over numbers and brackets, long exponents, and large ones over anything that is not a number are wild."""
    exponent, after = _argument(power.string, power.start(2))
    if after.lstrip()[:1] == "^" or re.search(r"[0-9)\]}!]\s?\^", exponent):
        return False
    largest = max((int(digits) for digits in _DIGITS.findall(exponent)), default=0)
    base = power[1]
    return largest <= (9999 if base.isdigit() else 64 if base.isalpha() else 12)


def _tame_factorial(factorial: re.Match[str]) -> bool:
    """Of numbers to 200 and of short brackets with a letter: (n-k)!."""
    before = factorial.string[: factorial.end(1)].rstrip()
    if digits := re.search(r"[0-9]+$", before):
        return int(digits[0][-6:]) <= 200
    if before.endswith(")"):
        inside = before[before.rfind("(") :]
        return bool(re.fullmatch(r"\([-+0-9a-z ]{1,12}\)", inside) and re.search(r"[a-z]", inside))
    return before[-1:].isalpha()


def _argument(text: str, start: int) -> tuple[str, str]:
    """The exponent that begins at `start`, and what follows it."""
    closing = {"{": "}", "(": ")"}.get(text[start])
    if closing is None:
        end = re.compile(r"\\[A-Za-z]+|[0-9]+|.", re.DOTALL).match(text, start)
        return (end[0], text[end.end() :]) if end else ("", "")
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == text[start]) - (text[i] == closing)
        if depth == 0:
            return text[start + 1 : i], text[i + 1 :]
    return text[start + 1 :], ""


def _bases(text: str) -> set[str]:
    """Number bases, as the 8 of 52_8, which math-verify drops: another base than the data's is wrong, none is not."""
    return {base.strip("{}") for base in re.findall(r"[0-9]_(\{[0-9]+\}|[0-9])", text)}


@lru_cache(maxsize=1)
def warm() -> None:
    """The first comparison loads much of sympy, half a second of it: in the parent, so that no rollout waits for it in
    one worker after the other."""
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
        same = math_verify.verify(list(wanted), list(given), allow_set_relation_comp=True, timeout_seconds=None)
        return bool(same or _evaluated(given[0]) == _evaluated(wanted[0])) and not _apart(given[0], wanted[0])


def _evaluated(formula: Any) -> Any:
    """math-verify compares a lone variable by its text, so that 0 + m would not be m."""
    with contextlib.suppress(Exception):
        return formula.doit()
    return formula


def _apart(given: Any, wanted: Any) -> bool:
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


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Any, ...]:
    """sympy's reading. Undefined values are none: a division by zero equals every other one."""
    read = load().parse(f"${text}$", [_reading()], fallback_mode="no_fallback", parsing_timeout=None)
    return tuple(value for value in read if not _undefined(value))


def _undefined(value: Any) -> bool:
    sympy = importlib.import_module("sympy")
    return isinstance(value, str) or (isinstance(value, sympy.Basic) and value.has(sympy.zoo, sympy.nan))


@lru_cache(maxsize=1)
def _reading() -> Any:
    """math-verify's defaults, but units stay: its list of them takes the m of 6m away."""
    normal = load().LatexExtractionConfig().normalization_config
    return load().LatexExtractionConfig(normalization_config=dataclasses.replace(normal, units=False))


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises TooSlow inside, again and again until it gets through; only where nobody else uses that signal."""
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


# ---- forms
#
# How an answer of several parts is put together: lists, sets, tuples, intervals and their unions.
#
# The matcher compares part by part with these. Lists and sets are equal in any order, repeats counted; tuples and
# intervals part for part, brackets included. A list without brackets may stand for a tuple and the reverse, then the
# order counts. "1 \pm \sqrt2" is a list of two. Knows nothing of what makes two parts equal.


MOST_PARTS = 40
"""Of an answer with more, the parts must come in order."""
DEEPEST_FORM = 12
"""Brackets in brackets; what is nested deeper is compared as text."""

Equal = Callable[[str, str], bool]

_SEPARATOR = re.compile(r"[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_ONE_NUMBER = re.compile(r"[0-9]{1,2}(?:,[0-9]{3})+|[0-9]{3}(?:,[0-9]{3})*,0[0-9]{2}(?:,[0-9]{3})*")
_OPENING, _CLOSING = "([{", ")]}"


class Form(NamedTuple):
    kind: str
    """"list", "set", "union", or the two brackets of a tuple or interval, as "[)"."""
    parts: tuple[str, ...]


def same_form(found: str, gold: str, equal: Equal) -> bool:
    """Whether two answers, of which at least one has parts, are the same; `equal` decides of two parts.

    The data's 100,200 may be a list or a number; its 1,000 is a number.
    """
    if _ONE_NUMBER.fullmatch(strip(undress(gold))):
        return False
    readings = dict.fromkeys((read_form(found, thousands), read_form(gold, thousands)) for thousands in (True, False))
    for given, wanted in readings:
        if given is None and wanted is None:
            continue
        if _same(given or Form("list", (found,)), wanted or Form("list", (gold,)), equal):
            return True
    return False


def has_parts(text: str) -> bool:
    return read_form(text, False) is not None


def read_form(text: str, thousands: bool = True) -> Form | None:
    r"""None for a single value. `thousands`: whether 100,200 is one number.

    >>> read_form("1, 2 or 3"), read_form("[0, 1)"), read_form("(1,2),(3,4)"), read_form("x+1")
    (Form(kind='list', parts=('1', '2', '3')), Form(kind='[)', parts=('0', '1')), Form(kind='list', parts=('(1,2)', '(3,4)')), None)
    """  # noqa: E501
    text = drop_name(strip(undress(text))).replace("\\lbrace", "{").replace("\\rbrace", "}").strip()
    if not _balanced(text):
        return None
    if thousands:
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    unions = list(_split(text, re.compile(r"\\cup(?![a-z])")))
    if len(unions) > 1:
        return _form("union", unions)
    if (inside := _inside(text)) is not None:
        kind = text[0] + text[-1]
        parts = list(_split(inside, _SEPARATOR))
        if kind == "{}":
            return _form("set", parts)
        return _form(kind, parts) if len(parts) > 1 else None
    parts = list(_split(text, _SEPARATOR))
    form = _form("list", parts)
    return form if form is not None and len(form.parts) > 1 else None


def canonical(text: str, depth: int = 0) -> str:
    r"""A form in which equal answers mostly read the same: what a majority vote counts. Cheap; proves nothing.

    >>> canonical("1,234.0"), canonical(r"\dfrac{1}{2}"), canonical("x = 0.5"), canonical("2, 1"), canonical(r"\{1,2\}")
    ('1234', '1/2', '1/2', '1,2', '1,2')
    """
    form = read_form(text) if depth < DEEPEST_FORM else None
    if form is None:
        value = read_value(drop_name(text), True)
        return str(value.number) if value.number is not None else folded(value.text)
    parts = [canonical(part, depth + 1) for part in form.parts]
    if len(form.kind) == 2:
        return f"{form.kind[0]}{','.join(parts)}{form.kind[1]}"
    return ("\\cup" if form.kind == "union" else ",").join(sorted(parts))


def _form(kind: str, parts: list[str]) -> Form | None:
    if kind in ("list", "set"):
        parts = [signed for part in parts for signed in _both_signs(part)]
    return Form(kind, tuple(parts)) if parts else None


def _both_signs(part: str) -> tuple[str, ...]:
    if part.count("\\pm") != 1 or "\\mp" in part:
        return (part,)
    return tuple(part.replace("\\pm", sign).strip().removeprefix("+") for sign in "+-")


def _same(given: Form, wanted: Form, equal: Equal) -> bool:
    if len(given.parts) != len(wanted.parts):
        return False
    kinds = {given.kind, wanted.kind}
    if kinds <= {"list", "set"} or kinds == {"union"}:
        return _same_bag(given.parts, wanted.parts, equal)
    if len(kinds) > 1 and kinds != {"()", "list"}:
        return False
    return all(equal(a, b) for a, b in zip(given.parts, wanted.parts, strict=True))


def _same_bag(given: tuple[str, ...], wanted: tuple[str, ...], equal: Equal) -> bool:
    """In any order; each part of one is used up by a part of the other."""
    if len(wanted) > MOST_PARTS:
        return given == wanted
    left = list(wanted)
    for part in given:
        partner = next((i for i, other in enumerate(left) if equal(part, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _split(text: str, separator: re.Pattern[str]) -> Iterator[str]:
    """At separators outside all brackets; empty parts are left out."""
    start, depths = 0, _depths(text)
    for found in separator.finditer(text):
        if depths[found.start()] == 0:
            if part := text[start : found.start()].strip():
                yield part
            start = found.end()
    if part := text[start:].strip():
        yield part


def _inside(text: str) -> str | None:
    """What one pair of brackets around everything holds."""
    if len(text) < 3 or text[0] not in _OPENING or text[-1] not in _CLOSING:
        return None
    return text[1:-1] if min(_depths(text)[1:-1]) >= 1 else None


def _depths(text: str) -> list[int]:
    """Of each character; a bracket belongs to the outside."""
    depth, depths = 0, []
    for character in text:
        depth -= character in _CLOSING
        depths.append(depth)
        depth += character in _OPENING
    return depths


def _balanced(text: str) -> bool:
    depths = _depths(text)
    return not depths or (min(depths) >= 0 and max(depths) <= DEEPEST_FORM)
