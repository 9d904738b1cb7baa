"""Death and disk errors on order: stands for `os` and `shutil` inside `whet.files` and fails at the k-th change.

Death is a BaseException, so that no clean-up meant for errors runs, as none runs in a killed process.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("before", "half", "after", "error")
"""Killed before the change, in the midst of it, right after it; or the system refuses it."""


class Killed(BaseException):
    pass


class Faults:
    """Set as `files.os` and `files.shutil`. `at` counts from 0; None never fails."""

    CHANGES = (
        "makedirs",
        "write",
        "fsync",
        "replace",
        "rename",
        "truncate",
        "unlink",
        "chmod",
        "rmtree",
    )

    def __init__(self, kind: str, at: int | None) -> None:
        self.kind, self.at, self.count = kind, at, 0
        self.paths: dict[int, Path] = {}

    @property
    def fired(self) -> bool:
        return self.at is not None and self.count > self.at

    def __getattr__(self, name: str) -> Any:
        if name == "open":
            return self._open
        if name not in self.CHANGES:
            return getattr(os, name)
        real = {"rmtree": shutil.rmtree, "fsync": lambda handle: None}.get(name) or getattr(
            os, name
        )
        return lambda *args, **kwargs: self._change(name, real, args, kwargs)

    def _open(self, path: Path, *args: Any) -> int:
        handle = os.open(path, *args)
        self.paths[handle] = Path(path)
        return handle

    def _change(
        self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.kind == "half" and not self._has_halves(name, args):
            return real(*args, **kwargs)
        self.count += 1
        if self.count - 1 != self.at:
            return real(*args, **kwargs)
        if self.kind == "error":
            raise OSError(errno.EIO, "Input/output error")
        if self.kind == "half":
            self._half(name, args)
        if self.kind == "after":
            real(*args, **kwargs)
        raise Killed(f"{name} number {self.at}")

    def _has_halves(self, name: str, args: tuple[Any, ...]) -> bool:
        return name in ("write", "rmtree") or (name == "fsync" and self.paths[args[0]].is_file())

    def _half(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "write":
            os.write(args[0], args[1][: len(args[1]) // 2])
        elif name == "fsync":  # the machine failed before the data was on the disk
            path = self.paths[args[0]]
            os.truncate(path, path.stat().st_size // 2)
        elif name == "rmtree":
            doomed = sorted(path for path in Path(args[0]).rglob("*") if path.is_file())
            for path in doomed[: (len(doomed) + 1) // 2]:
                path.unlink()
