"""From the recipe to tasks and judges. Everything a user can get wrong here is said before any weight is loaded.

A new task is one file and one line in TASKS. A judge of the user is "module:function", found also in the current
directory, after the installed packages; a task carries it in its name ("text:module:function"), so that entries with
different judges can stand in one run.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from itertools import count
from types import ModuleType
from typing import Any

from whet.config import Problems
from whet.errors import WhetError
from whet.tasks.base import Task
from whet.tasks.chain import ChainTask
from whet.tasks.gym import GymTask
from whet.tasks.options import did_you_mean
from whet.tasks.text import TextTask
from whet.types import Prompt

JudgeFunction = Callable[[Prompt, str], float]

TASKS: dict[str, Callable[..., Task]] = {"chain": ChainTask, "gym": GymTask, "text": TextTask}
READS_DATA = {"text"}
"""Built on the whole entry; the others make their own problems and are built on its options."""


def build_task(data: Problems, name: str = "", folder: str = "") -> Task:
    """The task of a [[data]] or [[eval]] entry, under a name of `TaskNames`. `folder`: where short names are found."""
    if data.kind not in TASKS:
        raise WhetError(f'There is no task "{data.kind}"{did_you_mean(data.kind, TASKS)}')
    if reserved := {"name", "path"} & data.options.keys():
        raise WhetError(f'"{min(reserved)}" is no option of task {data.kind}; set it beside `options`, not inside.')
    name = name or task_name(data)
    if data.kind in READS_DATA:
        return TASKS[data.kind](data, name=name, folder=folder)
    for field in ("path", "subset", "split", "columns", "where"):
        if getattr(data, field):
            raise WhetError(
                f"Task {data.kind} makes its own problems and reads no data, so it has no use for {field}; "
                'for data set task = "text".'
            )
    return TASKS[data.kind](name=name, **data.options)


def task_name(data: Problems) -> str:
    """
    >>> task_name(Problems(path="gsm8k")), task_name(Problems(reward="my:judge"))
    ('text', 'chain:my:judge')
    """
    return f"{data.kind}:{data.reward}" if data.reward else data.kind


class TaskNames:
    """One name for each judge of a run: a prompt carries its task's name, and by it the judge is found.

    >>> names = TaskNames()
    >>> entries = [Problems(path="a"), Problems(path="b", options={"answer": "boxed"}), Problems(path="c")]
    >>> [names.of(entry) for entry in entries]
    ['text', 'text:2', 'text']
    """

    def __init__(self) -> None:
        self._taken: dict[str, Problems] = {}

    def of(self, data: Problems) -> str:
        base = task_name(data)
        for number in count(1):
            name = base if number == 1 else f"{base}:{number}"
            if self._taken.setdefault(name, data).options == data.options:
                return name
        raise AssertionError


def load_judge(task: Task, data: Problems) -> JudgeFunction:
    """The user's judge, else the task's own."""
    return import_judge(data.reward) if data.reward else task.judge


def import_judge(spec: str) -> JudgeFunction:
    module_name, colon, function_name = spec.partition(":")
    if not colon or not module_name or not function_name:
        raise WhetError(f'A reward is written "module:function", got "{spec}".')
    module = _import(module_name, spec)
    function = getattr(module, function_name, None)
    if function is None:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        taken = getattr(module, "__file__", None) or "built into Python"
        raise WhetError(
            f'reward = "{spec}": {module_name} ({taken}; packages go before the current directory) has no function '
            f'"{function_name}"{did_you_mean(function_name, public)}'
        )
    return check_judge(function, spec)


def check_judge(function: Any, name: str) -> JudgeFunction:
    """Refuses what cannot be called with (prompt, response)."""
    if not callable(function):
        raise WhetError(f'reward = "{name}" is a {type(function).__name__}, not a function of (prompt, response).')
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # written in C: only a call can tell
    try:
        signature.bind("prompt", "response")
    except TypeError:
        raise WhetError(f'reward = "{name}" is called with (prompt, response), but takes {signature}.') from None
    return function


def _import(name: str, spec: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:  # the `whet` command, unlike `python -m`, does not look where the user stands
        sys.path.append(here)  # last: a file there must not stand in for the standard library or a package
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise WhetError(
                f'reward = "{spec}": there is no module "{name}" in {here} or among the installed packages.'
            ) from None
        raise WhetError(f'reward = "{spec}": {name} needs the module "{error.name}", which is not installed.') from None
    except Exception as error:
        raise WhetError(f'reward = "{spec}": importing {name} failed with {type(error).__name__}: {error}.') from error
