r"""The built-in reward terms: what a response earns beside the judge's score. A new one is a function and a line.

Text terms read the response and run in the worker processes; rollout terms read length, limit and verdict and run in
the parent. All are pure, and linear in the length of the response. rewards.py weighs and adds them. DAPO's soft
overlong penalty is no term: it belongs to the learner (learn.overlong), which knows the estimator it shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from whet.errors import WhetError
from whet.tasks.final import after_thinking, boxed, tagged
from whet.types import Rollout

MOST_WORDS = 100_000
"""Of a response, for counting repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    pattern: str = ""
    """A regular expression that the whole response must match (dots match newlines)."""
    tags: str = ""
    """Tags in order, as "think answer": each opened and closed once, nothing but space between and around them."""

    def __post_init__(self) -> None:
        if self.pattern and self.tags:
            raise WhetError('The reward "format" takes a pattern or tags, not both.')
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise WhetError(f'The pattern of reward "format" is no regular expression: {error}.') from None
        if bad := [tag for tag in self.tags.split() if not re.fullmatch(r"[\w-]+", tag)]:
            raise WhetError(f'The reward "format" takes tags as plain names ("think answer"), got "{bad[0]}".')


def format_term(response: str, options: FormatOptions) -> float:
    r"""1 if the response has the shape asked for, else 0. Without options: thinking, closed once, and after it an
    answer in \boxed{} or <answer> tags.

    The opening <think> may be missing: many chat templates write it into the prompt.

    >>> format_term(r"<think>2+2</think>It is \boxed{4}.", FormatOptions()), format_term("4", FormatOptions())
    (1.0, 0.0)
    >>> format_term("<think>2+2</think> <answer>4</answer>", FormatOptions(tags="think answer"))
    1.0
    """
    if options.pattern:
        return float(re.fullmatch(options.pattern, response, re.DOTALL) is not None)
    if options.tags:
        return float(_only_tags(response, options.tags.split()))
    closed, opened = response.count("</think>"), response.count("<think>")
    if closed != 1 or opened > 1 or (opened and not response.lstrip().startswith("<think>")):
        return 0.0
    answer = after_thinking(response)
    return float(bool(boxed(answer) or tagged(answer)))


def _only_tags(response: str, tags: list[str]) -> bool:
    rest = response
    for tag in tags:
        before, opened, rest = rest.partition(f"<{tag}>")
        _, closed, rest = rest.partition(f"</{tag}>")
        if before.strip() or not opened or not closed:
            return False
        if response.count(f"<{tag}>") != 1 or response.count(f"</{tag}>") != 1:
            return False
    return not rest.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedOptions:
    pass


def boxed_term(response: str, options: BoxedOptions) -> float:
    r"""1 for exactly one \boxed{...} with something in it after the thinking, else 0.

    >>> boxed_term(r"\boxed{4}", BoxedOptions()), boxed_term(r"\boxed{4} or \boxed{5}", BoxedOptions())
    (1.0, 0.0)
    """
    answer = after_thinking(response)
    return float(answer.count("\\boxed{") == 1 and bool(boxed(answer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionOptions:
    words: int = 20
    """Of a run that counts as repeated."""

    def __post_init__(self) -> None:
        if self.words < 1:
            raise WhetError(f'The reward "repetition" compares runs of 1 word or more, not {self.words}.')


def repetition_term(response: str, options: RepetitionOptions) -> float:
    """-(1 - distinct runs / runs) over all runs of so many words: 0 where none repeats, towards -1 in a loop.

    The n-gram penalty of Yeo et al. 2025 (arXiv 2502.03373, section 4.4) given once a response instead of at the
    repeated tokens, in the normalised form of open-r1. Four words, three runs of two, two of them distinct: -1/3.

    >>> round(repetition_term("so it so it", RepetitionOptions(words=2)), 4)
    -0.3333
    """
    words = response.split(maxsplit=MOST_WORDS)[:MOST_WORDS]
    runs = len(words) - options.words + 1
    if runs < 1:
        return 0.0
    distinct = len({hash(tuple(words[i : i + options.words])) for i in range(runs)})
    return distinct / runs - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    right_short: float = 1.0
    right_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    cut: float = -1.0
    """For a response that the limit ended."""
    limit: int = 0
    """Tokens at which a response is as long as can be; 0 is the rollout's own limit."""


def length_term(rollout: Rollout, options: LengthOptions) -> float:
    r"""A cosine from the value of an empty response to that of one at the limit, right and wrong apart.

        long + (short - long) / 2 * (1 + cos(pi * length / limit))

    The cosine reward of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373),
    section 4.2: right answers earn more when short, wrong ones lose less when long (thinking on is worth it), and
    what exceeds the limit gets a value of its own. The default values are ours. Half-way the value is the mean of
    both: 0.75 of a right response, -0.75 of a wrong one.
    """
    if rollout.finish == "length":
        return options.cut
    limit = options.limit or rollout.sampling.max_tokens
    share = min(1.0, rollout.length / limit)
    right = rollout.verdict == "right"
    short = options.right_short if right else options.wrong_short
    long = options.right_long if right else options.wrong_long
    return long + (short - long) / 2 * (1 + math.cos(math.pi * share))


class Term(NamedTuple):
    of: type
    """What it reads: str (the response) or Rollout."""
    options: type
    value: Callable[[Any, Any], float]


REWARDS: dict[str, Term] = {
    "format": Term(str, FormatOptions, format_term),
    "boxed": Term(str, BoxedOptions, boxed_term),
    "repetition": Term(str, RepetitionOptions, repetition_term),
    "length": Term(Rollout, LengthOptions, length_term),
}
