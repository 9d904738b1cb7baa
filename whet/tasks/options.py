"""Options of a task: a table in the recipe becomes a frozen dataclass, or one sentence that says what is wrong.

Called by the tasks for their own keyword arguments and for those of their worked solutions. It looks at names and
types only; whether a value makes sense is for the dataclass to say.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from whet.errors import WhetError

T = TypeVar("T")

_WORDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a string", dict: "a table"}


def read_options(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """`kind` is a dataclass whose defaults show the type of each option; `where` opens the sentence of an error."""
    defaults = dataclasses.asdict(kind())  # type: ignore[call-overload]
    for key, value in given.items():
        if key not in defaults:
            raise WhetError(f'{where} has no option "{key}"{did_you_mean(key, defaults)}')
        expected = type(defaults[key])
        if not _fits(value, expected):
            raise WhetError(f"{where}: {key} = {value!r} is wrong: it should be {_WORDS[expected]}.")
    return kind(**given)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name.

    >>> did_you_mean("chian", ["chain", "text"]), did_you_mean("zzz", ["text", "chain"])
    ('; did you mean "chain"?', '; there are chain, text.')
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f'; did you mean "{near[0]}"?'
    return f"; there are {', '.join(names)}." if names else "; it takes none."


def _fits(value: Any, expected: type) -> bool:
    if isinstance(value, bool):  # True is an int to Python, never to a reader of recipes
        return expected is bool
    if expected is float:
        return isinstance(value, int | float)
    return isinstance(value, Mapping if expected is dict else expected)
