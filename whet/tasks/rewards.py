"""What a rollout is worth: judge.weight * score + the sum of weight * term over the [[reward]] entries.

`grader` wraps a task's judge for the worker processes, where the terms that read the response are computed too, the
user's "module:function" among them; `total` adds up in the parent, with the terms that read length and verdict. A term
that raises costs its rollout, as a judge that raises does. The verdict is the judge's alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from whet import config
from whet.errors import WhetError
from whet.tasks.base import Judgement
from whet.tasks.options import did_you_mean, read_options
from whet.tasks.terms import REWARDS
from whet.tasks.worker import as_number, read_judgement
from whet.types import Prompt, Rollout

JudgeFunction = Callable[[Prompt, str], Any]
"""Returns a number or a Judgement."""
Grader = Callable[[Prompt, str], Judgement]


class Rewards:
    """
    >>> rewards = Rewards(1.0, [config.Reward(name="boxed", weight=0.1)])
    >>> rewards.names
    ('boxed',)
    """

    def __init__(self, judge_weight: float = 1.0, entries: Sequence[config.Reward] = ()) -> None:
        self._judge_weight = judge_weight
        self._weights: dict[str, float] = {}
        self._of_text: dict[str, Callable[[Prompt, str], Any]] = {}
        self._of_rollout: dict[str, Callable[[Rollout], float]] = {}
        for entry in entries:
            self._add(entry)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the terms, as metrics show them: reward/<name>."""
        return tuple(self._weights)

    def grader(self, judge: JudgeFunction, final: Callable[[str], str] | None = None) -> Grader:
        """The judge's score, the final answer and all terms that read the response, for one task's worker."""

        def grade(prompt: Prompt, response: str) -> Judgement:
            said = read_judgement(judge(prompt, response))
            terms = {name: as_number(term(prompt, response)) for name, term in self._of_text.items()}
            settled = said.final or (final(response) if final is not None else "")
            return Judgement(score=said.score, final=settled, terms={**said.terms, **terms})

        return grade

    def total(self, rollout: Rollout, judgement: Judgement) -> tuple[float, dict[str, float]]:
        """Reward and terms (before their weights) of a rollout that has its verdict."""
        terms = {**judgement.terms, **{name: term(rollout) for name, term in self._of_rollout.items()}}
        reward = self._judge_weight * judgement.score
        for name, weight in self._weights.items():
            if name not in terms:
                raise WhetError(f'the judge process said nothing of reward "{name}"')
            reward += weight * terms[name]
        if not math.isfinite(reward):
            raise WhetError(f"the rewards add up to {reward}")
        return reward, terms

    def _add(self, entry: config.Reward) -> None:
        name = self._free_name(entry.name)
        if entry.name in REWARDS:
            term = REWARDS[entry.name]
            options: Any = read_options(term.options, entry.options, f'The reward "{entry.name}"')
            if term.of is Rollout:
                self._of_rollout[name] = lambda rollout: term.value(rollout, options)
            else:
                self._of_text[name] = lambda prompt, response: term.value(response, options)
        elif ":" in entry.name:
            from whet.tasks.build import import_judge  # it builds tasks, which know nothing of rewards

            if entry.options:
                raise WhetError(f'The reward "{entry.name}" takes no options; only built-in rewards do.')
            self._of_text[name] = import_judge(entry.name)
        else:
            raise WhetError(
                f'There is no reward "{entry.name}"{did_you_mean(entry.name, REWARDS)}'
                ' Your own is written "module:function".'
            )
        self._weights[name] = entry.weight

    def _free_name(self, name: str) -> str:
        """The second "format" is "format_2"."""
        taken = sum(other == name or other.rpartition("_")[0] == name for other in self._weights)
        return f"{name}_{taken + 1}" if taken else name
