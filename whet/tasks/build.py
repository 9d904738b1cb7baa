"""From the recipe to tasks, judges and rewards. Every mistake of a user is reported here, before any weight is loaded.

`problems.py` calls `build_task`, `load_judge` and `Rewards`. A new task is one file and one line in TASKS; a new
reward term is one function and one line in REWARDS; a user's judge is "module:function", and the name of its task has
it ("text:module:function"). reward = judge.weight * score + the sum of weight * term over the [[reward]] entries.
Terms that read the response run in the worker processes, the user's own among them; terms that read length and
verdict run in the parent. All built-in terms are pure, and linear in the length of the response. DAPO's soft overlong
penalty is no term: it belongs to the learner (learn.overlong), which has the estimator that it shapes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from whet import config
from whet.config import ProblemSettings
from whet.errors import WhetError, import_own
from whet.tasks.answers import after_thinking, boxed, tagged
from whet.tasks.base import Judgement, Task, check_options, did_you_mean
from whet.tasks.chain import ChainTask
from whet.tasks.gym import GymTask
from whet.tasks.maze import MazeTask
from whet.tasks.operations import OperationsTask
from whet.tasks.text import TextTask
from whet.tasks.worker import as_number, read_judgement
from whet.types import Prompt, Rollout, Verdict

JudgeFunction = Callable[[Prompt, str], float]
Grader = Callable[[Prompt, str], Judgement]

TASKS: dict[str, Callable[..., Task]] = {
    "chain": ChainTask,
    "gym": GymTask,
    "maze": MazeTask,
    "operations": OperationsTask,
    "text": TextTask,
}
# tasks that take the whole entry; the others make their own problems and take its options
READS_DATA = {"text"}
MOST_WORDS = 100_000  # words of a response that are searched for repetition


def build_task(data: ProblemSettings, name: str = "", folder: str = "") -> Task:
    """The task of a [[data]] or [[eval]] entry. name: from `name_task`. folder: where short names are found."""
    if data.kind not in TASKS:
        raise WhetError(f'There is no task "{data.kind}"{did_you_mean(data.kind, TASKS)}')
    if reserved := {"name", "path"} & data.options.keys():
        raise WhetError(
            f'"{min(reserved)}" is no option of task {data.kind}; set it beside `options`, not inside.'
        )
    name = name or name_task(data, {})
    if data.kind in READS_DATA:
        return TASKS[data.kind](data, name=name, folder=folder)
    for field in ("path", "subset", "split", "columns", "where"):
        if getattr(data, field):
            raise WhetError(
                f"Task {data.kind} makes its own problems and reads no data, so it has no use for {field}; "
                'for data set task = "text".'
            )
    return TASKS[data.kind](name=name, **data.options)


def name_task(data: ProblemSettings, taken: dict[str, ProblemSettings]) -> str:
    """One name for each judge of a run, which a prompt carries as the name of its task; `taken` is added to."""
    base = f"{data.kind}:{data.reward}" if data.reward else data.kind
    names = itertools.chain([base], (f"{base}:{number}" for number in itertools.count(2)))
    return next(name for name in names if taken.setdefault(name, data).options == data.options)


# ---- judges


def load_judge(task: Task, data: ProblemSettings) -> JudgeFunction:
    """The user's judge, else the task's own."""
    return import_judge(data.reward) if data.reward else task.judge


def import_judge(spec: str) -> JudgeFunction:
    """Import "module:function" and refuse what cannot be called with (prompt, response)."""
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise WhetError(f'A reward is written "module:function", got "{spec}".')
    module, function = import_own(spec, f'reward = "{spec}"')
    if function is None:
        public = [
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_")
        ]
        taken = getattr(module, "__file__", None) or "built into Python"
        raise WhetError(
            f'reward = "{spec}": {module_name} ({taken}; packages go before the current directory) has no function '
            f'"{function_name}"{did_you_mean(function_name, public)}'
        )
    if not callable(function):
        raise WhetError(
            f'reward = "{spec}" is a {type(function).__name__}, not a function of (prompt, response).'
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # written in C: only a call can tell
    try:
        signature.bind("prompt", "response")
    except TypeError:
        raise WhetError(
            f'reward = "{spec}" is called with (prompt, response), but takes {signature}.'
        ) from None
    return function


# ---- reward terms


def format_term(response: str, *, pattern: str = "", tags: str = "") -> float:
    r"""1 if the response has the wanted form, else 0.

    pattern: a regular expression that the whole response must match (dots match newlines). tags: in order, as
    "think answer", each opened and closed once, with only space between and around them. Without options: thinking,
    closed once, and after it an answer in \boxed{} or <answer> tags. The opening <think> may be missing: many chat
    templates write it into the prompt.
    """
    if pattern and tags:
        raise WhetError('The reward "format" takes a pattern or tags, not both.')
    if pattern:
        try:
            return float(re.fullmatch(pattern, response, re.DOTALL) is not None)
        except re.error as error:
            raise WhetError(
                f'The pattern of reward "format" is no regular expression: {error}.'
            ) from None
    names = tags.split()
    if bad := [name for name in names if not re.fullmatch(r"[\w-]+", name)]:
        raise WhetError(
            f'The reward "format" takes tags as plain names ("think answer"), got "{bad[0]}".'
        )
    if names:
        form = "".join(rf"\s*<{name}>.*</{name}>" for name in names) + r"\s*"
        once = all(
            response.count(f"<{name}>") == response.count(f"</{name}>") == 1 for name in names
        )
        return float(once and re.fullmatch(form, response, re.DOTALL) is not None)
    closed = response.count("</think>")
    opened = response.count("<think>")
    if closed != 1 or opened > 1 or (opened and not response.lstrip().startswith("<think>")):
        return 0.0
    answer = after_thinking(response)
    return float(bool(boxed(answer) or tagged(answer)))


def boxed_term(response: str) -> float:
    r"""1 for exactly one \boxed{...} with something in it after the thinking, else 0."""
    answer = after_thinking(response)
    return float(answer.count("\\boxed{") == 1 and bool(boxed(answer)))


def repetition_term(response: str, *, words: int = 20) -> float:
    """-(1 - distinct runs / runs) over all runs of so many words: 0 where none repeats, towards -1 in a loop.

    The n-gram penalty of Yeo et al. 2025 (arXiv 2502.03373, section 4.4), given once per response instead of at the
    repeated tokens, in the normalised form of open-r1. Four words, three runs of two, two of them distinct: -1/3.

    >>> round(repetition_term("so it so it", words=2), 4)
    -0.3333
    """
    if words < 1:
        raise WhetError(f'The reward "repetition" compares runs of 1 word or more, not {words}.')
    said = response.split(maxsplit=MOST_WORDS)[:MOST_WORDS]
    runs = len(said) - words + 1
    if runs < 1:
        return 0.0
    distinct = len({hash(tuple(said[i : i + words])) for i in range(runs)})
    return distinct / runs - 1.0


def length_term(
    rollout: Rollout,
    *,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    cut: float = -1.0,  # value of a response that was cut at the limit
    limit: int = 0,  # tokens of the longest response; 0 is the rollout's own limit
) -> float:
    r"""A cosine from the value of an empty response to that of one at the limit, with other ends for wrong answers.

        long + (short - long) / 2 * (1 + cos(pi * length / limit))

    The cosine reward of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373),
    section 4.2: right answers earn more when short, wrong ones lose less when long (thinking on is worth it), and
    a response beyond the limit gets a value of its own. The default values are ours. Half-way the value is the mean
    of both ends: 0.75 for a right response, -0.75 for a wrong one.
    """
    if rollout.finish == "length":
        return cut
    share = min(1.0, rollout.length / (limit or rollout.sampling.max_tokens))
    short, long = (
        (right_short, right_long) if rollout.verdict == "right" else (wrong_short, wrong_long)
    )
    return long + (short - long) / 2 * (1 + math.cos(math.pi * share))


# Name -> what the term reads (the response or the rollout), and its function; the keyword arguments are its options.
REWARDS: dict[str, tuple[type, Callable[..., float]]] = {
    "format": (str, format_term),
    "boxed": (str, boxed_term),
    "repetition": (str, repetition_term),
    "length": (Rollout, length_term),
}


class Rewards:
    """The weighted sum of score and terms. A term that raises costs its rollout; the verdict is the judge's alone."""

    def __init__(self, judge_weight: float = 1.0, entries: Sequence[config.Reward] = ()) -> None:
        self._judge_weight = judge_weight
        self._weights: dict[str, float] = {}
        self._of_text: dict[str, Callable[[Prompt, str], Any]] = {}
        self._of_rollout: dict[str, Callable[[Rollout], float]] = {}
        for entry in entries:
            taken = sum(
                name == entry.name or name.rpartition("_")[0] == entry.name
                for name in self._weights
            )
            # the second "format" is "format_2"
            name = f"{entry.name}_{taken + 1}" if taken else entry.name
            self._weights[name] = entry.weight
            if entry.name in REWARDS:
                reads, term = REWARDS[entry.name]
                defaults = inspect.getfullargspec(term).kwonlydefaults or {}
                check_options(defaults, entry.options, f'The reward "{entry.name}"')
                term = functools.partial(term, **entry.options)
                if reads is Rollout:
                    self._of_rollout[name] = term
                else:
                    term("")  # refuses values that make no sense
                    self._of_text[name] = lambda prompt, response, term=term: term(response)  # type: ignore[misc]
            elif ":" not in entry.name:
                near = did_you_mean(entry.name, REWARDS)
                raise WhetError(
                    f'There is no reward "{entry.name}"{near} Your own is written "module:function".'
                )
            elif entry.options:
                raise WhetError(
                    f'The reward "{entry.name}" takes no options; only built-in rewards do.'
                )
            else:
                self._of_text[name] = import_judge(entry.name)
        self.names = tuple(self._weights)  # as the metrics show them: reward/<name>

    def grader(self, judge: JudgeFunction, final: Callable[[str], str] | None = None) -> Grader:
        """A judge for the worker processes that adds the final answer and all terms that read the response."""

        def grade(prompt: Prompt, response: str) -> Judgement:
            said = read_judgement(judge(prompt, response))
            terms = {
                name: as_number(term(prompt, response)) for name, term in self._of_text.items()
            }
            settled = said.final or (final(response) if final is not None else "")
            return Judgement(score=said.score, final=settled, terms={**said.terms, **terms})

        return grade

    def total(
        self, rollout: Rollout, verdict: Verdict, judgement: Judgement
    ) -> tuple[float, dict[str, float]]:
        """Reward and terms (before their weights) of a rollout with this verdict."""
        judged = replace(rollout, verdict=verdict) if self._of_rollout else rollout
        terms = {
            **judgement.terms,
            **{name: term(judged) for name, term in self._of_rollout.items()},
        }
        reward = self._judge_weight * judgement.score
        for name, weight in self._weights.items():
            if name not in terms:
                raise WhetError(f'the judge process said nothing of reward "{name}"')
            reward += weight * terms[name]
        if not math.isfinite(reward):
            raise WhetError(f"the rewards add up to {reward}")
        return reward, terms
