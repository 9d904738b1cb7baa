"""A data entry in a few lines, for `whet data look`: what was read, which column is what, and how answers look."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from whet import config
from whet.tasks.build import build_task
from whet.tasks.golds import check_golds
from whet.tasks.prompts import Problem, PromptTable, problem_key
from whet.tasks.text import MOST_META, TextTask

_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(?:/\d+)?|[-+]?\\[dt]?frac\{?\d+\}?\{?\d+\}?")


def describe_problems(entry: config.Problems, folder: str = "") -> list[tuple[str, str]]:
    """(what, value) pairs. `folder`: where short names are looked for first."""
    task = build_task(entry, folder=folder)
    table = task.prompts("eval" if isinstance(entry, config.Eval) else "train", 0)
    lines = _of_file(task) if isinstance(task, TextTask) else [("task", task.name)]
    lengths = [len(_text(problem)) for problem in table.problems]
    lines += [
        ("problems", f"{len(table):,}, {_repeats(table):,} of them repeats"),
        ("length", f"{median(lengths):,.0f} characters in the middle, {max(lengths):,} at most"),
        ("answers", _shares(map(answer_kind, table.answers))),
    ]
    if isinstance(task, TextTask) and "answer" in task.columns and not entry.reward:
        lines += [("judged", line) for line in _judged(task, table)]
    if "level" in table.meta:
        lines.append(("levels", _levels(table.meta["level"])))
    if further := [name for name in table.meta if name != "level"]:
        lines.append(("kept as meta", ", ".join(further)))
    if not_kept := getattr(task, "not_kept", ()):
        lines.append(("not kept", f"{', '.join(not_kept)} (long texts, or beyond {MOST_META} columns)"))
    return [*lines, ("first problem", _cut(_text(table.problems[0]), 300)), ("its answer", _cut(table.answers[0], 100))]


def answer_kind(answer: str) -> str:
    r"""
    >>> [answer_kind(a) for a in ("-72", "1,200", "0.5", r"\frac{1}{2}", '["1", "2"]', r"2\pi", "x+1", "Evelyn")]
    ['whole number', 'whole number', 'number', 'number', 'several', 'formula', 'formula', 'text']
    """
    if answer.startswith('["'):
        return "several"
    bare = answer.strip("$ ")
    if bare.replace(",", "").lstrip("+-").isdigit():
        return "whole number"
    if _NUMBER.fullmatch(bare):
        return "number"
    return "text" if bare.replace(" ", "").isalpha() and len(bare) > 1 else "formula" if bare else "none"


def _of_file(task: TextTask) -> list[tuple[str, str]]:
    columns = ", ".join(f"{role} = {name}" for role, name in task.columns.items())
    lines = [("from", task.origin), ("rows", f"{task.rows:,}"), ("columns", columns)]
    lines += [("note", note) for note in task.notes]
    return [*lines, ("worked solutions", f"{task.worked:,}")]


def _judged(task: TextTask, table: PromptTable) -> list[str]:
    found = check_golds(task, range(len(table)), table.at, workers=os.cpu_count() or 1)
    said = found.sentences() or [f"all {found.checked:,} answers can be matched by this judge"]
    return [*said, "a run refuses answers of which more than half cannot be matched"] if found.mostly_wrong else said


def _repeats(table: PromptTable) -> int:
    return len(table) - len({(problem_key(p), a) for p, a in zip(table.problems, table.answers, strict=True)})


def _shares(kinds: Iterable[str]) -> str:
    counts = Counter(kinds)
    return ", ".join(f"{kind} {count / counts.total():.0%}" for kind, count in counts.most_common())


def _levels(levels: Sequence[Any]) -> str:
    counts = Counter("none" if level is None else level for level in levels)
    known = sorted(counts.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    shown = ", ".join(f"{level}: {count:,}" for level, count in known[:20])
    return shown + (f" and {len(known) - 20} more" if len(known) > 20 else "")


def _text(problem: Problem) -> str:
    return problem if isinstance(problem, str) else " ".join(message["content"] for message in problem)


def _cut(text: str, most: int) -> str:
    """One line that a terminal shows as it is."""
    line = "".join(character if character.isprintable() else " " for character in " ".join(text[:most].split()))
    return line + " ..." if len(text) > most else line
