r"""The judge of task "text", and of whatever else compares final answers: finds the answer, then asks whether it is
the data's. final.py finds it; match.py compares values, forms.py takes lists and intervals apart, verify.py proves
formulas equal. `judge` runs in a worker process, may raise TooSlow there, and costs that one rollout then.
"""

from __future__ import annotations

import contextlib
import json
from functools import lru_cache

from whet.errors import WhetError
from whet.tasks import verify
from whet.tasks.final import ANSWERS, LONGEST, after_thinking, boxed
from whet.tasks.forms import DEEPEST, canonical, has_parts, read_form, same_form
from whet.tasks.match import read_value, same_value, settled, split_name, tidy, undress
from whet.tasks.options import did_you_mean
from whet.tasks.wording import without_problem_words
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
    if several and depth < DEEPEST and same_form(found, gold, lambda a, b: _same(a, b, formulas, depth + 1)):
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
