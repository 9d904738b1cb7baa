"""What a task is: prompts, a judge, and (for a warm start) worked solutions. numpy only, never torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from whet.errors import WhetError
from whet.tasks.prompts import PromptTable
from whet.types import Prompt

# ---- options
#
# Options of a task: a table in the recipe becomes a frozen dataclass, or one sentence that says what is wrong.
#
# Called by the tasks for their own keyword arguments and for those of their worked solutions. It looks at names and
# types only; whether a value makes sense is for the dataclass to say.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All that is said of one response, in a judge process.

    >>> Judgement(score=1.0, final="42", terms={"format": 1.0}).score
    1.0
    """

    score: float
    """0..1: decides the verdict."""
    final: str = ""
    """The answer the response settled on; equal answers read the same, so that they can be counted."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Further rewards by name, before their weights."""


class Task(Protocol):
    name: str
    alphabet: str
    """Characters a tiny model must know; empty where a real tokenizer is meant."""

    def prompts(self, split: str, seed: int) -> PromptTable:
        """split "train" or "eval"; the two share no problem."""

    def judge(self, prompt: Prompt, response: str) -> float:
        """Score in 0..1. Runs in a worker process; may raise or hang, and costs only this rollout then."""

    def final(self, response: str) -> str:
        """The answer a response settled on, in a form in which equal answers are equal strings; "" for none."""

    def solutions(self, rng: np.random.Generator, count: int, **options: Any) -> list[tuple[Prompt, str]]:
        """Worked solutions to imitate: (prompt, response text without the end token)."""
