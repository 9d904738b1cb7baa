"""What a recipe's [[data]] and [[eval]] come to: prompts to train on, prompts to be judged by, and the judges.

Imports no torch, so that a wrong path or a missing judge is found before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from whet import config
from whet.errors import WhetError
from whet.tasks.base import Task
from whet.tasks.build import build_task, load_judge
from whet.tasks.prompts import PromptTable
from whet.types import Prompt

JudgeFunction = Callable[[Prompt, str], float]


@dataclass(frozen=True, kw_only=True)
class Problems:
    train: PromptTable
    evals: Mapping[str, tuple[Prompt, ...]]
    """By name. Their ids carry the name in front, so that they meet no training id."""
    eval_by_id: Mapping[str, Prompt]
    judges: Mapping[str, JudgeFunction]
    """By `Prompt.task`."""
    tasks: tuple[Task, ...]
    """One a [[data]] entry."""
    overlap: int
    """Evaluation prompts whose text is also trained on."""

    @property
    def alphabet(self) -> str:
        return "".join(sorted(set("".join(task.alphabet for task in self.tasks))))

    def lookup(self, prompt_id: str) -> Prompt:
        return self.eval_by_id.get(prompt_id) or self.train[prompt_id]

    def solutions(self, rng: np.random.Generator, count: int, options: Mapping[str, Any]) -> list[tuple[Prompt, str]]:
        """Worked solutions, as evenly as possible over the tasks."""
        shares = [count // len(self.tasks) + (i < count % len(self.tasks)) for i in range(len(self.tasks))]
        pairs = [task.solutions(rng, k, **options) for task, k in zip(self.tasks, shares, strict=True) if k]
        return [pair for some in pairs for pair in some]


def load_problems(settings: config.Config, reward: JudgeFunction | None = None) -> Problems:
    """Reads the data. `reward` is a Python callable that judges every prompt, training and evaluation."""
    judges: dict[str, JudgeFunction] = {}
    tasks, tables = [], []
    for data in settings.data:
        task = build_task(data)
        judges[task.name] = reward or load_judge(task, data)
        tasks.append(task)
        tables.append(task.prompts("train", settings.seed))
    train = PromptTable.concat(tables)
    evals: dict[str, tuple[Prompt, ...]] = {}
    for entry in settings.eval:
        task = build_task(entry)
        judges[task.name] = reward or load_judge(task, entry)
        first = islice(task.prompts("eval", settings.seed), entry.limit)
        evals[entry.name] = tuple(replace(p, id=f"eval:{entry.name}:{p.id}") for p in first)
    by_id = {p.id: p for prompts in evals.values() for p in prompts}
    clash = next((i for i in by_id if i in train), None)
    if clash is not None:
        raise WhetError(f'The training id "{clash}" is reserved for evaluation; rename it.')
    trained = set(map(str, train.problems)) if by_id else set()
    overlap = sum(str(p.text or p.messages) in trained for p in by_id.values())
    return Problems(train=train, evals=evals, eval_by_id=by_id, judges=judges, tasks=tuple(tasks), overlap=overlap)
