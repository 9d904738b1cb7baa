"""Errors that whet raises on purpose. The command line prints their sentence and exits with code 2."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

IMPORT_S = 120.0  # seconds that importing a module of the user's may take; one may load a model


class WhetError(Exception):
    """A fault that the user can repair (a wrong key, a missing file, a full disk), in one clear sentence."""


class WrongArgument(WhetError, ValueError):
    """A fault in what another trainer's user gave to an adapter: also the kind of error that such trainers raise."""


class Starved(WhetError):
    """A curriculum cannot fill a batch, and its starvation policy is to stop rather than to wait for ever."""


class Mastered(Starved):
    """No batch can be filled since nearly all prompts are solved: a training ends well by it."""


class Collapsed(WhetError):
    """Evaluations fell far below their best. The run is saved, and so are its best weights."""


class Stopped(KeyboardInterrupt):
    """A signal ends the run at once: a second one, or where there is nothing to save. Its number sets the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Lost(WhetError):
    """No process holds the newest weights any more. The last checkpoint is untouched."""


class Diverged(WhetError):
    """Losses are not finite, or the engine has other weights than the learner; the last checkpoint is untouched."""


def import_own(spec: str, where: str) -> tuple[ModuleType, Any]:
    """The module of "module:name", also from the current directory, and what it has by that name, None for nothing.
    where: the setting, with which the sentence of an error begins."""
    module_name, _, name = spec.partition(":")
    here = os.getcwd()
    # the `whet` command, unlike `python -m`, does not search the current directory
    if here not in sys.path:
        # last: a file there must not replace a package or the standard library
        sys.path.append(here)
        importlib.invalidate_caches()
    try:
        with _alarm(IMPORT_S):
            module = importlib.import_module(module_name)
    except _TooLong:
        cure = "leave what takes so long to the first call, or mend what it waits for"
        raise WhetError(
            f"{where}: importing {module_name} took longer than {IMPORT_S:g} s; {cure}."
        ) from None
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            why = f'there is no module "{module_name}" in {here} or among the installed packages'
        else:
            why = f'{module_name} needs the module "{error.name}", which is not installed'
        raise WhetError(f"{where}: {why}.") from None
    except Exception as error:
        raise WhetError(
            f"{where}: importing {module_name} failed with {type(error).__name__}: {error}."
        ) from error
    return module, getattr(module, name, None)


class _TooLong(BaseException):
    """Not an Exception, which a module under import may catch."""


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in the main thread after so many seconds. Other threads get no signals, so there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
