"""The prompts and judges of a run, read from the recipe's [[data]] and [[eval]] entries.

`resolve` and the tools call `load_problems`; it calls the tasks. A slice of the training problems is set aside to
choose the best checkpoint by, unless the recipe brings its own. Nothing here imports torch, so that a wrong path or a
missing judge is found before any weight is loaded.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import os
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from whet import config
from whet.config import HELD_OUT
from whet.curriculum.build import Facts
from whet.errors import WhetError
from whet.tasks import answer_check
from whet.tasks.base import PromptTable, Task, problem_key
from whet.tasks.build import Grader, Rewards, build_task, load_judge, name_task
from whet.tasks.reading import NAMES, VARIABLE
from whet.tasks.text import TextTask
from whet.text import Codec
from whet.types import Prompt

Evals = Mapping[str, tuple[Prompt, ...]]
JudgeFunction = Callable[[Prompt, str], float]
BATCH = 1024  # prompts tokenised per call, a quarter of the time that they take one by one
FEWEST = 10  # problems: a smaller slice would be all noise
FEW = 50  # problems: with fewer, the best checkpoint is chosen by luck


@dataclass(frozen=True, kw_only=True)
class Problems:
    """What a run trains on and is evaluated on."""

    train: PromptTable
    evals: Evals  # by name; their ids carry the name, so they never equal a training id
    eval_by_id: Mapping[str, Prompt]
    judges: Mapping[str, Grader]  # by `Prompt.task`
    # the tasks that compare answers with the data's, without a judge of the user's
    matched: Mapping[str, TextTask]
    rewards: Rewards  # turns a judgement into a reward
    tasks: tuple[Task, ...]  # one per [[data]] entry
    # (training prompts, weight) of each [[data]] entry, in the order of `train`
    shares: tuple[tuple[int, float], ...]
    notes: tuple[str, ...]  # sentences for the user, each shown once
    # keys of the problems set aside, whose worked solutions are not imitated either
    held_out: frozenset[int]

    @property
    def alphabet(self) -> str:
        """Characters that a tiny model must read and write; "" is any text, where one task wants that."""
        alphabets = [task.alphabet for task in self.tasks]
        return "".join(sorted(set("".join(alphabets)))) if all(alphabets) else ""

    def lookup(self, prompt_id: str) -> Prompt:
        return self.eval_by_id.get(prompt_id) or self.train[prompt_id]

    def keep(self, mask: np.ndarray) -> Problems:
        """The same with only those training prompts for which `mask` is True."""
        ends = np.cumsum([size for size, _ in self.shares])
        # an entry may have no prompts left
        kept = np.diff(np.cumsum([0, *mask])[ends], prepend=0).tolist()
        shares = tuple((size, weight) for size, (_, weight) in zip(kept, self.shares, strict=True))
        return replace(self, train=self.train.select(np.flatnonzero(mask).tolist()), shares=shares)

    def facts(self) -> Facts:
        """What a curriculum may know of the training prompts."""
        table = self.train
        return Facts(
            ids=table.ids,
            entries=self.shares,
            levels=table.meta.get("level", ()),
            characters=[
                sum(len(m["content"]) for m in p) if isinstance(p, tuple) else len(p)
                for p in table.problems
            ],
            tasks=table.tasks,
        )

    @cached_property
    def marks(self) -> np.ndarray:
        """What the training problems and answers are, row by row: a checkpoint holds it."""
        return self.train.marks()

    @property
    def worked(self) -> int:
        """Worked solutions that can be drawn before one comes again; 0 where they are made on demand."""
        counts = [getattr(task, "worked", 0) for task in self.tasks]
        return max(0, min(counts) - len(self.held_out)) * len(counts)

    def solutions(
        self, rng: np.random.Generator, count: int, options: Mapping[str, Any]
    ) -> list[tuple[Prompt, str]]:
        """`count` worked solutions, divided as evenly as possible over the tasks."""
        pairs: list[tuple[Prompt, str]] = []
        for number, task in enumerate(self.tasks):
            share = count // len(self.tasks) + (number < count % len(self.tasks))
            found: list[tuple[Prompt, str]] = []
            for _ in range(100):
                if len(found) >= share:
                    break
                drawn = task.solutions(rng, share - len(found) + len(self.held_out), **options)
                found += [
                    (prompt, text) for prompt, text in drawn if key_of(prompt) not in self.held_out
                ]
            else:
                raise WhetError(
                    f"Task {task.name} has no worked solutions except those of problems that are held out."
                )
            pairs += found[:share]
        return pairs


def load_problems(settings: config.Config, reward: JudgeFunction | None = None) -> Problems:
    """Read the data; without [[data]] there is only something to evaluate on. `reward` judges every prompt."""
    rewards = Rewards(settings.judge.weight, settings.reward)
    names, notes = dict[str, config.ProblemSettings](), list[str]()
    judges, matched = dict[str, Grader](), dict[str, TextTask]()

    def read(entry: config.ProblemSettings, split: str) -> tuple[Task, PromptTable]:
        """The problems of an entry; its judge gets a name of its own."""
        task = build_task(entry, name_task(entry, names), settings.data_folder)
        judges[task.name] = rewards.grader(reward or load_judge(task, entry), task.final)
        notes.extend(getattr(task, "notes", ()))
        if isinstance(task, TextTask) and not (reward or entry.reward):
            if "answer" not in task.columns:
                remedy = 'name the column by columns = { answer = "..." }, or the judge by reward = "module:function".'
                lack = "is read without an answer column, and no judge of yours decides"
                raise WhetError(f"{task.origin} {lack}; {remedy}")
            matched[task.name] = task
        table = task.prompts(split, settings.seed)
        return task, table.select(range(entry.limit)) if 0 < entry.limit < len(table) else table

    parts = [read(entry, "train") for entry in settings.data]
    table = PromptTable.concat([part for _, part in parts])
    evals = {entry.name: under_name(entry.name, read(entry, "eval")[1]) for entry in settings.eval}
    keys = [problem_key(problem) for problem in table.problems]
    wants_slice = HELD_OUT not in evals and settings.held_out.size > 0 and settings.data
    held = choose_held_out(keys, settings.held_out.size) if wants_slice else frozenset()
    kept = [row for row, key in enumerate(keys) if key not in held]
    if held:
        first = {keys[row]: row for row in reversed(range(len(keys))) if keys[row] in held}
        evals[HELD_OUT] = under_name(HELD_OUT, map(table.at, sorted(first.values())))
    elif wants_slice:
        few = f"{len(set(keys)):,} training problems are too few to set some aside"
        notes.append(f"{few}; to judge the best checkpoint, name an [[eval]] entry {HELD_OUT}.")
    train = table.select(kept) if held else table
    by_id = {p.id: p for prompts in evals.values() for p in prompts}
    if (clash := next((i for i in by_id if i in train), None)) is not None:
        raise WhetError(f'The training id "{clash}" is reserved for evaluation; rename it.')
    read_from_files = any(entry.path for entry in settings.data)
    notes += held_out_notes(
        evals.get(HELD_OUT, ()), len(table) - len(train) if held and read_from_files else 0
    )
    notes += overlap_notes(
        [(keys[row], table.answers[row]) for row in kept], evals, read_from_files
    )
    sizes = np.diff(
        np.searchsorted(kept, np.cumsum([len(part) for _, part in parts], dtype=int)), prepend=0
    )
    return Problems(
        train=train,
        evals=evals,
        eval_by_id=by_id,
        judges=judges,
        matched=matched,
        rewards=rewards,
        tasks=tuple(task for task, _ in parts),
        shares=tuple(
            (size, entry.weight) for size, entry in zip(sizes.tolist(), settings.data, strict=True)
        ),
        notes=tuple(notes),
        held_out=held,
    )


def key_of(prompt: Prompt) -> int:
    return problem_key(prompt.text or prompt.messages)


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """A hash of problems and answers in any order, by which `whet compare` knows runs on other problems."""
    lines = sorted(f"{key_of(prompt)} {prompt.answer!r}" for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:16]


def under_name(name: str, prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    return tuple(replace(p, id=f"eval:{name}:{p.id}") for p in prompts)


def choose_held_out(keys: Sequence[int], size: int) -> frozenset[int]:
    """The problems with the smallest keys: `size` of them, at most a tenth; none where that is too few to measure.

    A key is a hash of the problem alone, so the choice is the same for every seed and order of the rows, and as data
    is added a problem leaves the slice only for one with a smaller key.

    >>> sorted(choose_held_out(range(150), 200)) == list(range(15)), choose_held_out(range(50), 200)
    (True, frozenset())
    """
    problems = set(keys)
    count = min(size, len(problems) // 10)
    return (
        frozenset(heapq.nsmallest(count, problems)) if count >= min(size, FEWEST) else frozenset()
    )


def held_out_notes(prompts: Sequence[Prompt], left: int) -> list[str]:
    """Sentences on the set that chooses the best checkpoint; `left`: the rows that left the training data for it."""
    notes = []
    if left > len(prompts):
        rows = f"{left - len(prompts):,} more training rows repeat one of the {len(prompts):,} held-out problems"
        notes.append(f"{rows}, so they are left out of training, too.")
    if 0 < len(prompts) < FEW:
        points = 196 * math.sqrt(0.25 / len(prompts))  # 95%, at an accuracy of one half
        few = f"With {len(prompts)} problems, the accuracy on {HELD_OUT} may be off by {points:.0f} points"
        notes.append(f"{few}; {FEW} or more would choose the best checkpoint better.")
    return notes


def overlap_notes(rows: Sequence[tuple[int, str]], evals: Evals, read: bool) -> list[str]:
    """Sentences on training rows (key, answer) that repeat others or are evaluated on; `read`: they come from files."""
    trained = {key for key, _ in rows}
    total = len(rows)
    repeats = total - len(set(rows)) if read else 0  # generated problems repeat by design
    sentence = f"{repeats:,} of the {total:,} training rows repeat a problem; each counts as a prompt of its own."
    notes = [sentence] if repeats else []
    for name, prompts in evals.items():
        if count := sum(key_of(p) in trained for p in prompts):
            many = f"{count:,} of the {len(prompts):,} problems of {name} are also trained on, so its accuracy flatters"
            notes.append(f"{many}; leave them out of [[data]] by where, or take other data.")
    return notes


def check_answers(settings: config.Config, problems: Problems) -> list[str]:
    """Sentences on answers that the judge cannot match to themselves; a set where most cannot be matched is refused."""
    train = problems.train
    until = time.monotonic() + answer_check.SECONDS
    ends = np.cumsum([size for size, _ in problems.shares]).tolist()
    sets: list[tuple[str, str, range, Callable[[int], Prompt]]] = [
        (getattr(task, "origin", ""), task.name, range(end - size, end), train.at)
        for task, (size, _), end in zip(problems.tasks, problems.shares, ends, strict=True)
    ]
    own = {entry.name for entry in settings.eval}  # a slice set aside is part of the training data
    sets += [
        (name, prompts[0].task, range(len(prompts)), prompts.__getitem__)
        for name, prompts in problems.evals.items()
        if name in own and prompts
    ]
    notes = []
    for origin, task_name, rows, prompt_at in sets:
        if task_name not in problems.matched or not rows:
            continue
        limits = {
            "seed": settings.seed,
            "memory_mb": settings.judge.memory_mb,
            "sample": answer_check.SAMPLE,
        }
        left = until - time.monotonic()
        found = answer_check.check(
            problems.matched[task_name], rows, prompt_at, **limits, seconds=left
        )
        said = [f"{origin}: {sentence}" for sentence in found.sentences()]
        if found.mostly_wrong:
            raise WhetError(said[0])
        notes += said
    return notes


def check_judges(settings: config.Config, problems: Problems, given: bool) -> list[str]:
    """Sentences on judges and reward terms of the user's that fail on one of three responses; one that fails on all of
    them is refused. given: all prompts are judged by a function from Python."""
    if settings.judge.where == "workers":  # it may need what only their machines have
        return []
    first: dict[str, Prompt] = {}
    row = 0
    for task, (size, _) in zip(problems.tasks, problems.shares, strict=True):
        if size:
            first.setdefault(task.name, problems.train.at(row))
        row += size
    for prompts in problems.evals.values():
        if prompts:
            first.setdefault(prompts[0].task, prompts[0])
    every = given or any(":" in name for name in problems.rewards.names)
    notes = []
    for name, prompt in first.items():
        # the name of a task with a judge of the user's holds "module:function"
        if every or name.count(":") > 1:
            notes += answer_check.try_judge(problems.judges[name], prompt, settings.judge)
    return notes


def anchor_paths(settings: config.Config) -> config.Config:
    """Files and folders by their absolute paths, so that a run can be resumed from any folder; names stay names."""

    def whole(name: str) -> str:
        path = Path(name).expanduser()
        return str(path.absolute()) if name and name not in NAMES and path.exists() else name

    # a resumed run may have another environment
    folder = settings.data_folder or os.environ.get(VARIABLE, "")
    model = settings.model
    draft = settings.draft
    update: dict[str, Any] = {
        "draft": draft.model_copy(update={"eagle": whole(draft.eagle)}),
        "model": model
        if model.name == "tiny"
        else model.model_copy(update={"name": whole(model.name)}),
        "data_folder": whole(folder),
    }
    for name in ("data", "eval"):
        entries: tuple[config.ProblemSettings, ...] = getattr(settings, name)
        update[name] = tuple(
            entry.model_copy(update={"path": whole(entry.path)}) for entry in entries
        )
    return settings.model_copy(update=update)


class EncodedPrompts:
    """The tokens of every prompt of a run, each encoded once, when the run is checked."""

    def __init__(self, problems: Problems, codec: Codec) -> None:
        # They lie end to end in one array: as lists of Python's integers, a million prompts would take gigabytes.
        tokens = array("i")
        ends = array("q")
        waiting = chain(problems.train, problems.eval_by_id.values())
        while batch := list(islice(waiting, BATCH)):
            for ids in codec.encode_all(batch):
                tokens.fromlist(ids)
                ends.append(len(tokens))
        self.tokens = np.frombuffer(tokens, np.int32)
        self.ends = np.frombuffer(ends, np.int64)
        self.lengths = np.diff(self.ends, prepend=0)  # training prompts, then those for evaluation
        self._number_rows(problems)

    def _number_rows(self, problems: Problems) -> None:
        self.table = problems.train
        self.eval_rows = {
            prompt_id: row for row, prompt_id in enumerate(problems.eval_by_id, len(self.table))
        }

    def __call__(self, prompt_id: str) -> list[int]:
        row = self.eval_rows.get(prompt_id)
        row = self.table.row(prompt_id) if row is None else row
        end = self.ends[row]
        return self.tokens[end - self.lengths[row] : end].tolist()

    @property
    def train_lengths(self) -> np.ndarray:
        return self.lengths[: len(self.table)]

    def leave_out_long(self, problems: Problems, limit: int) -> tuple[Problems, list[str]]:
        """Leave out training prompts of more than `limit` tokens (0 keeps all); return the problems left and a note."""
        keep = self.train_lengths <= limit
        if not limit or keep.all():
            return problems, []
        if not keep.any():
            raise WhetError(
                f"Every training problem has more than text.max_prompt = {limit} tokens."
            )
        rows = np.concatenate([keep, np.ones(len(self.eval_rows), bool)])
        self.ends, self.lengths = self.ends[rows], self.lengths[rows]
        self._number_rows(problems := problems.keep(keep))
        note = f"{(~keep).sum():,} training problems of more than text.max_prompt = {limit} tokens are left out."
        return problems, [note]

    def refuse_long(self, context: int) -> None:
        """Refuse the first prompt that leaves no room for a token of the response in `context` tokens."""
        if self.lengths.size and self.lengths.max() >= context:
            row = int(np.argmax(self.lengths >= context))
            size = f'The prompt "{[*self.table.ids, *self.eval_rows][row]}" has {self.lengths[row]} tokens'
            limit = f"which with 1 for the response is more than rollout.context = {context}"
            raise WhetError(f"{size}, {limit}; raise rollout.context, or leave this prompt out.")
