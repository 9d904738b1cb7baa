r"""The judge of task "text", and of whatever else compares final answers: finds the answer, then asks whether it is
the data's. final.py finds it; match.py compares values, forms.py takes lists and intervals apart, verify.py proves
formulas equal. `judge` runs in a worker process, may raise TooSlow there, and costs that one rollout then.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from whet.errors import WhetError
from whet.tasks import verify
from whet.tasks.base import did_you_mean
from whet.tasks.final import ANSWERS, LONGEST, after_thinking, boxed, without_problem_words
from whet.tasks.match import read_value, same_value, settled, split_name, tidy, undress
from whet.tasks.verify import DEEPEST_FORM, canonical, has_parts, read_form, same_form
from whet.types import Prompt

MATCHERS = ("exact", "math")
_AND_SO_ON = ("...", "\\ldots", "\\dots", "\\cdots")
_RELATIONS = ("<", ">", "\\leq", "\\geq", "\\le ", "\\ge ", "\\neq", "\\ne ")


class Matcher:
    """`answer` says where the answer stands; `matcher` whether formulas are compared, or text and numbers alone."""

    def __init__(self, matcher: str = "math", answer: str = "auto") -> None:
        if matcher not in MATCHERS:
            raise WhetError(f'There is no matcher "{matcher}"{did_you_mean(matcher, MATCHERS)}')
        if answer not in ANSWERS:
            raise WhetError(f'There is no way to find an answer called "{answer}"{did_you_mean(answer, ANSWERS)}')
        self.matcher, self.answer = matcher, answer
        if matcher == "math":
            verify.warm()

    def judge(self, prompt: Prompt, response: str) -> float:
        r"""1.0 if the response's final answer equals the prompt's, else 0.0.

        >>> Matcher("exact").judge(Prompt(id="a", text="?", answer="1234.5", task="text"), "So \\boxed{1,234.50}.")
        1.0
        """
        found, golds = self.extract(response), right_answers(prompt.answer)
        for answer in dict.fromkeys((found, without_problem_words(found, prompt.text))):
            if any(self.same(answer, gold, formulas=False) for gold in golds):
                return 1.0  # before any formula is tried, which may be slow
        return float(self.matcher == "math" and any(self.same(found, gold, formulas=True) for gold in golds))

    def final(self, response: str) -> str:
        """The answer in a form in which equal answers mostly read the same; "" for none."""
        return canonical(self.extract(response))[:LONGEST]

    def extract(self, response: str) -> str:
        """The answer as it is written, or ""."""
        return ANSWERS[self.answer](tidy(after_thinking(response)))

    @staticmethod
    def same(found: str, gold: str, formulas: bool) -> bool:
        found, gold = found.strip(), gold.strip()
        if not found or not gold or max(len(found), len(gold)) > LONGEST:
            return False
        return _same(found, gold, formulas, 0)


def _same(found: str, gold: str, formulas: bool, depth: int) -> bool:
    if any(dots in found and dots not in gold for dots in _AND_SO_ON):
        return False
    if same_value(found, gold):
        return True
    if settled(found, gold):
        return False
    found, gold = _without_name(found, gold)
    if same_value(found, gold):
        return True
    if settled(found, gold):
        return False
    several = has_parts(found) or has_parts(gold)
    if several and depth < DEEPEST_FORM and same_form(found, gold, lambda a, b: _same(a, b, formulas, depth + 1)):
        return True
    if (read_form(found) or read_form(gold)) and not any(sign in undress(found + gold) for sign in _RELATIONS):
        return False
    return formulas and verify.same_formula(found, gold)


@lru_cache(maxsize=4096)
def right_answers(answer: str) -> tuple[str, ...]:
    r"""The data's answer; of a worked solution its end; of a JSON list of texts each, for any of them is right.

    >>> right_answers("48+24=72\n#### 72"), right_answers('["1/3", "0.3333"]')
    (('72',), ('1/3', '0.3333'))
    """
    if answer.startswith('["') and answer.endswith('"]'):
        with contextlib.suppress(ValueError, RecursionError):
            return tuple(str(one) for one in json.loads(answer))
    return (boxed(answer) or answer.rpartition("####")[2].strip(),)


def _without_name(found: str, gold: str) -> tuple[str, str]:
    """Only one side may name what it gives, or both by the same name: "x = 5" is 5, but not y = 5."""
    (found_name, given), (gold_name, wanted) = split_name(undress(found)), split_name(undress(gold))
    if found_name and found_name == gold_name:
        return given, wanted
    if gold_name and "=" not in found and not found_name:
        return found, wanted
    if "=" in found and "=" not in gold and not has_parts(found):
        return (found.rpartition("=")[2] if _agree(found.split("=")) else found), wanted if gold_name else gold
    return (given if "=" not in found else found), (wanted if "=" not in gold else gold)


def _agree(sides: list[str]) -> bool:
    """Of "2 + 3 = 5" the last side is the answer; "18 = 17" is none."""
    numbers = [value.number for value in map(read_value, sides) if value.number is not None]
    return len(set(numbers)) < 2


# ---- whole
#
# Long and structured answers, compared whole: a text of more than 300 characters, or a JSON object or list.
#
# `text.py` asks here before it asks the matcher, which reads no answer of more than 300 characters. Two texts are the
# same if they differ in white space alone, two JSON values if they are equal once read. Nothing is evaluated, and the
# time is linear in the response.


_BOX = "\\boxed{"
_MARKER = re.compile(r".*(?:####|answer(?:\s?:|\s?is\b))", re.IGNORECASE | re.DOTALL)
_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def same_whole(response: str, answer: str, where: str) -> bool:
    r"""Whether the response gives the data's answer where the option `answer` looks for it; False for a short answer.

    >>> same_whole('So \\boxed{{"b": [1, 2.0], "a": "x"}}.', '{"a": "x", "b": [1, 2]}', "auto")
    True
    >>> same_whole("42", "42", "whole")
    False
    """
    golds = whole_answers(answer)
    if not golds:
        return False
    text = after_thinking(response)
    return any(_is(gold, text, where) for gold in golds)


@lru_cache(maxsize=4096)
def whole_answers(answer: str) -> tuple[str, ...]:
    r"""Those of the right answers that are compared whole.

    >>> whole_answers('{"a": 1}'), whole_answers("72"), whole_answers('["72", "73"]')
    (('{"a": 1}',), (), ())
    """
    if read_json(answer) is not None:
        return (answer,)
    return tuple(_squeezed(one) for one in right_answers(answer) if len(one) > LONGEST)


def read_json(text: str) -> str | None:
    """A JSON object or list in a form in which equal values read the same; a list of texts means several answers.

    >>> read_json('{"b": 1.0, "a": true}'), read_json('["a", "b"]'), read_json("[0, 1)"), read_json("3")
    ('{"a": true, "b": 1}', None, None, None)
    """
    found = _decoded(_unfenced(text))
    return found[0] if found is not None and not found[1] else None


def _is(gold: str, text: str, where: str) -> bool:
    wanted = read_json(gold)
    if where in ("auto", "boxed") and _BOX in text:
        inside = _squeezed(text.rpartition(_BOX)[2]) if wanted is None else text.rpartition(_BOX)[2]
        if wanted is None:
            return inside.startswith(gold) and inside.removeprefix(gold).lstrip().startswith("}")
        found = _decoded(inside)
        return found is not None and found[0] == wanted and found[1].startswith("}")
    return any(
        _squeezed(found) == gold if wanted is None else read_json(found) == wanted for found in _found(text, where)
    )


def _found(text: str, where: str) -> Iterator[str]:
    """What may be the answer of a response without a box."""
    if where == "tagged":
        _, opened, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
        if opened:
            yield inside
    if where in ("auto", "marked") and (marker := _MARKER.match(text)):
        yield text[marker.end() :]
    if where in ("auto", "whole"):
        yield text
    if where == "auto" and (blocks := _FENCED.findall(text)):
        yield blocks[-1]


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _unfenced(text: str) -> str:
    fenced = _FENCED.fullmatch(text.strip())
    return fenced[1] if fenced else text


def _decoded(text: str) -> tuple[str, str] | None:
    """The JSON object or list that a text begins with, written in one way, and what follows it."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        value, end = _DECODER.raw_decode(text)
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return None
        return json.dumps(value, sort_keys=True), text[end:].lstrip()
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> Any:
    """2.0 is 2."""
    value = float(text)
    return int(value) if value.is_integer() else value


_DECODER = json.JSONDecoder(parse_float=_number)
