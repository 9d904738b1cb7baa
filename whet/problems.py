"""What a recipe's [[data]] and [[eval]] come to: prompts to train on, prompts to be judged by, and the judges.

A slice of the training problems is set aside to judge `best` by, unless the recipe brings its own. What the user
should know of the data (rows left out, repeats, training problems in an evaluation set) is written as sentences,
`notes`. Imports no torch, so that a wrong path or a missing judge is found before any weight is loaded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from whet import config
from whet.config import HELD_OUT
from whet.curriculum.build import Facts
from whet.errors import WhetError
from whet.tasks.base import PromptTable, Task, problem_key
from whet.tasks.build import Grader, Rewards, TaskNames, build_task, load_judge
from whet.tasks.text import TextTask
from whet.types import Prompt

JudgeFunction = Callable[[Prompt, str], float]
FEWEST = 10
"""A smaller slice tells nothing."""


@dataclass(frozen=True, kw_only=True)
class Problems:
    train: PromptTable
    evals: Mapping[str, tuple[Prompt, ...]]
    """By name, "held_out" among them where a slice was set aside. Ids carry the name, and so meet no training id."""
    eval_by_id: Mapping[str, Prompt]
    judges: Mapping[str, Grader]
    """By `Prompt.task`."""
    matched: Mapping[str, TextTask]
    """Of those, the tasks that compare the data's answers: no judge of the user's decides."""
    rewards: Rewards
    """What a judgement is worth."""
    tasks: tuple[Task, ...]
    """One a [[data]] entry."""
    shares: tuple[tuple[int, float], ...]
    """(training prompts, weight) of each [[data]] entry, in the order of `train`."""
    curricula: tuple[Mapping[str, Any], ...]
    """What each [[data]] entry wants other than [curriculum] says."""
    repeats: int
    """Training rows whose problem and answer stood there before."""
    overlap: Mapping[str, int]
    """Prompts of each evaluation set whose problem is also trained on."""
    notes: tuple[str, ...]
    """Sentences for the user, to be said once."""
    held_out: frozenset[int]
    """Keys of the problems set aside: no worked solution of theirs is imitated either."""

    @property
    def alphabet(self) -> str:
        """What a tiny model must know; "" is any text, where one task wants that."""
        alphabets = [task.alphabet for task in self.tasks]
        return "".join(sorted(set("".join(alphabets)))) if all(alphabets) else ""

    def lookup(self, prompt_id: str) -> Prompt:
        return self.eval_by_id.get(prompt_id) or self.train[prompt_id]

    def keep(self, mask: np.ndarray) -> Problems:
        """The same with only some of the training prompts: one True or False each."""
        ends = np.cumsum([size for size, _ in self.shares])
        kept = np.diff(np.cumsum(mask)[ends - 1], prepend=0).tolist()
        shares = tuple((size, weight) for size, (_, weight) in zip(kept, self.shares, strict=True))
        return replace(self, train=self.train.select(np.flatnonzero(mask).tolist()), shares=shares)

    def facts(self) -> Facts:
        """What a curriculum may know of the training prompts."""
        table = self.train
        return Facts(
            ids=table.ids,
            entries=self.shares,
            settings=self.curricula,
            levels=table.meta.get("level", ()),
            characters=[sum(len(m["content"]) for m in p) if isinstance(p, tuple) else len(p) for p in table.problems],
            tasks=table.tasks,
        )

    def solutions(self, rng: np.random.Generator, count: int, options: Mapping[str, Any]) -> list[tuple[Prompt, str]]:
        """Worked solutions, as evenly as possible over the tasks."""
        shares = [count // len(self.tasks) + (i < count % len(self.tasks)) for i in range(len(self.tasks))]
        pairs = [self._solutions_of(task, rng, k, options) for task, k in zip(self.tasks, shares, strict=True) if k]
        return [pair for some in pairs for pair in some]

    @property
    def worked(self) -> int:
        """Worked solutions that can be drawn before one comes again; 0 where they are made as they are asked for."""
        counts = [getattr(task, "worked", 0) for task in self.tasks]
        return max(0, min(counts) - len(self.held_out)) * len(counts)

    def _solutions_of(
        self, task: Task, rng: np.random.Generator, count: int, options: Mapping[str, Any]
    ) -> list[tuple[Prompt, str]]:
        pairs: list[tuple[Prompt, str]] = []
        for _ in range(100):
            drawn = task.solutions(rng, count - len(pairs) + len(self.held_out), **options)
            pairs += [(prompt, text) for prompt, text in drawn if key_of(prompt) not in self.held_out]
            if len(pairs) >= count:
                return pairs[:count]
        raise WhetError(f"Task {task.name} has no worked solutions but those of problems that are held out.")


def load_problems(settings: config.Config, reward: JudgeFunction | None = None) -> Problems:
    """Reads the data; without [[data]] there is nothing to train on, only to evaluate.

    `reward` is a Python callable that judges every prompt, training and evaluation.
    """
    loader = Loader(settings, reward)
    tasks = tuple(loader.task(entry) for entry in settings.data)
    tables = [loader.table(task, entry) for task, entry in zip(tasks, settings.data, strict=True)]
    table = PromptTable.concat(tables)
    evals = {entry.name: loader.eval_prompts(entry) for entry in settings.eval}
    keys = [problem_key(problem) for problem in table.problems]
    wants_slice = HELD_OUT not in evals and settings.held_out.size > 0 and settings.data
    held = choose_held_out(keys, settings.held_out.size) if wants_slice else frozenset()
    kept = [row for row, key in enumerate(keys) if key not in held]
    if held:
        first = {keys[row]: row for row in reversed(range(len(keys))) if keys[row] in held}
        evals[HELD_OUT] = under_name(HELD_OUT, map(table.at, sorted(first.values())))
    elif wants_slice:
        loader.notes.append(too_few(len(set(keys))))
    train = table.select(kept) if held else table
    by_id = {p.id: p for prompts in evals.values() for p in prompts}
    if (clash := next((i for i in by_id if i in train), None)) is not None:
        raise WhetError(f'The training id "{clash}" is reserved for evaluation; rename it.')
    trained = {keys[row] for row in kept}
    overlap = {name: sum(key_of(p) in trained for p in prompts) for name, prompts in evals.items()}
    repeats = len(kept) - len({(keys[row], table.answers[row]) for row in kept})
    sizes = np.diff(np.searchsorted(kept, np.cumsum([len(part) for part in tables], dtype=int)), prepend=0)
    return Problems(
        train=train,
        evals=evals,
        eval_by_id=by_id,
        judges=loader.judges,
        matched=loader.matched,
        rewards=loader.rewards,
        tasks=tasks,
        shares=tuple((size, entry.weight) for size, entry in zip(sizes.tolist(), settings.data, strict=True)),
        curricula=tuple(entry.curriculum for entry in settings.data),
        repeats=repeats,
        overlap=overlap,
        notes=(*loader.notes, *data_notes(settings, len(kept), repeats, overlap, evals)),
        held_out=held,
    )


class Loader:
    """Builds the tasks of all entries, each under a name of its own judge."""

    def __init__(self, settings: config.Config, reward: JudgeFunction | None) -> None:
        self.settings, self.reward = settings, reward
        self.names = TaskNames()
        self.rewards = Rewards(settings.judge.weight, settings.reward)
        self.judges: dict[str, Grader] = {}
        self.matched: dict[str, TextTask] = {}
        self.notes: list[str] = []

    def task(self, entry: config.Problems) -> Task:
        task = build_task(entry, self.names.of(entry), self.settings.data_folder)
        self.judges[task.name] = self.rewards.grader(self.reward or load_judge(task, entry), task.final)
        self.notes += getattr(task, "notes", ())
        if isinstance(task, TextTask) and not (self.reward or entry.reward):
            if "answer" not in task.columns:
                raise WhetError(
                    f"{task.origin} is read without an answer column, and no judge of yours decides; name the column "
                    'by columns = { answer = "..." }, or the judge by reward = "module:function".'
                )
            self.matched[task.name] = task
        return task

    def table(self, task: Task, entry: config.Data) -> PromptTable:
        table = task.prompts("train", self.settings.seed)
        return table.select(range(entry.limit)) if 0 < entry.limit < len(table) else table

    def eval_prompts(self, entry: config.Eval) -> tuple[Prompt, ...]:
        prompts = self.task(entry).prompts("eval", self.settings.seed)
        return under_name(entry.name, islice(prompts, entry.limit or None))


def key_of(prompt: Prompt) -> int:
    return problem_key(prompt.text or prompt.messages)


def under_name(name: str, prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    return tuple(replace(p, id=f"eval:{name}:{p.id}") for p in prompts)


def choose_held_out(keys: Sequence[int], size: int) -> frozenset[int]:
    """The problems with the smallest keys: `size` of them, at most a tenth; none where that is too few to tell.

    A key is a hash of the problem alone, so the choice is the same for every seed and order of the rows, and as data
    is added a problem leaves the slice only for one with a smaller key.

    >>> sorted(choose_held_out(range(150), 200)) == list(range(15)), choose_held_out(range(50), 200)
    (True, frozenset())
    """
    problems = set(keys)
    count = min(size, len(problems) // 10)
    return frozenset(heapq.nsmallest(count, problems)) if count >= min(size, FEWEST) else frozenset()


def too_few(problems: int) -> str:
    return (
        f"{problems:,} training problems are too few to set some aside; to judge the best checkpoint, name an "
        f"[[eval]] entry {HELD_OUT}."
    )


def data_notes(
    settings: config.Config,
    rows: int,
    repeats: int,
    overlap: Mapping[str, int],
    evals: Mapping[str, Sequence[Prompt]],
) -> list[str]:
    notes = []
    if repeats and any(entry.path for entry in settings.data):  # generated problems repeat by design
        notes.append(f"{repeats:,} of the {rows:,} training rows repeat a problem; each counts as a prompt of its own.")
    notes += [
        f"{count:,} of the {len(evals[name]):,} problems of {name} are also trained on, so its accuracy flatters; "
        "leave them out of [[data]] by where, or take other data."
        for name, count in overlap.items()
        if count
    ]
    return notes
