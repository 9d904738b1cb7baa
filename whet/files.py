"""Atomic writes: a file of a run changes whole or not at all, even if the process is killed at any instant.

Data is written to a temporary neighbour (TMP), synced to the disk and renamed; a folder that is replaced is OLD until
then. Callers hold the run's lock. A full disk or a missing permission becomes a WhetError of one sentence.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from errno import (
    EACCES,
    EDQUOT,
    EEXIST,
    EINVAL,
    EIO,
    ENOSPC,
    ENOSYS,
    ENOTDIR,
    ENOTSUP,
    EPERM,
    EROFS,
)
from pathlib import Path

from whet.errors import WhetError

TMP = ".whet-tmp-"
OLD = ".whet-old-"
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_REASONS = {
    (ENOSPC, EDQUOT): "There is no space left to write {path}: free some and go on with --resume",
    (
        EACCES,
        EPERM,
    ): "There is no permission to write {path}: choose another folder or change its owner or mode",
    (EROFS,): "{path} cannot be written, it lies on a read-only file system: choose another folder",
    (
        ENOTDIR,
        EEXIST,
    ): "{path} cannot be made, a part of that path is a file: choose another folder",
}


def temporary(path: Path) -> Path:
    """Return the neighbour in which `path` is prepared."""
    return path.with_name(TMP + path.name)


@contextlib.contextmanager
def one_sentence(path: Path) -> Iterator[None]:
    """Turn an error of the operating system at `path` into a WhetError that says what to do."""
    try:
        yield
    except WhetError:
        raise
    except Exception as error:
        # safetensors writes from Rust and gives the code in words only
        rust = _RUST_OS_ERROR.search(str(error))
        code = (
            (error.errno or EIO) if isinstance(error, OSError) else int(rust[1]) if rust else None
        )
        if code is None:
            raise
        reason = next((words for codes, words in _REASONS.items() if code in codes), None)
        reason = reason or f"{{path}} cannot be written ({os.strerror(code)})"
        raise WhetError(
            f"{reason.format(path=path)}; everything saved before is untouched."
        ) from error


def make_folder(path: Path) -> None:
    with one_sentence(path):
        os.makedirs(path, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    write_with(path, lambda tmp: _write(tmp, data, os.O_TRUNC))


def write_with(path: Path, writer: Callable[[Path], object]) -> None:
    """Write `path` by a function that makes the file at the path it receives, which has the same suffix."""
    tmp = temporary(path)
    make_folder(path.parent)
    with one_sentence(path):
        try:
            writer(tmp)
            sync(tmp)
            os.replace(tmp, path)
        except Exception:
            with contextlib.suppress(OSError):
                os.unlink(tmp)  # a full disk needs the space back
            raise
        sync(path.parent)


def write_into(folder: Path, writer: Callable[[Path], object]) -> None:
    """Let `writer` write files of its own into a folder. Not atomic: call `publish` for the folder afterwards."""
    with one_sentence(folder):
        writer(folder)


def append_line(path: Path, line: str) -> None:
    """Append in one write without sync: a killed process loses nothing, a failing machine the lines since `sync`."""
    assert "\n" not in line, "a line holds no line break"
    with one_sentence(path):
        size = path.stat().st_size if path.exists() else 0
        try:
            _write(path, line.encode() + b"\n", os.O_APPEND)
        except Exception:
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # the next line must not continue half a line
            raise


def keep_lines(path: Path, keep: Callable[[str], bool]) -> None:
    """Drop the lines that `keep` refuses; a file without such lines is not written again."""
    with one_sentence(path):
        before = path.read_bytes()
    lines = before.decode(errors="replace").split("\n")
    after = "".join(line + "\n" for line in lines if line and keep(line)).encode()
    if after != before:
        write_bytes(path, after)


def publish(tmp: Path, final: Path) -> None:
    """Rename the folder `tmp` to `final` once all of it is on the disk; replace an earlier `final`."""
    old = final.with_name(OLD + final.name)
    with one_sentence(final):
        # Some writers (safetensors) make private files; the folder's own mode says what the user's umask allows.
        mode = tmp.stat().st_mode & 0o666
        for path in sorted(tmp.rglob("*"), reverse=True):
            if path.is_file():
                os.chmod(path, mode)
            sync(path)
        sync(tmp)
        if final.exists():
            remove_tree(old)
            os.rename(final, old)
        os.rename(tmp, final)
        sync(final.parent)
    remove_tree(old)


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[Path]:
    """Give a neighbour to write into; it is published as `folder` at the end, and removed after an error."""
    tmp = temporary(folder)
    remove_tree(tmp)
    make_folder(tmp)
    try:
        yield tmp
        publish(tmp, folder)
    finally:
        remove_tree(tmp)


def remove_file(path: Path) -> None:
    """Remove a file if it exists."""
    with one_sentence(path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder if it exists; its name goes first, so that a kill leaves no half folder under it."""
    with one_sentence(path):
        if path.exists() and not path.name.startswith(TMP):
            remove_tree(temporary(path))
            path = path.rename(temporary(path))
        if path.exists():
            shutil.rmtree(path)


def recover(folder: Path) -> None:
    """After a kill, restore the folders that were about to be replaced and remove what was half written."""
    with one_sentence(folder):
        for old in sorted(folder.glob(OLD + "*")):
            final = folder / old.name.removeprefix(OLD)
            if final.exists():
                remove_tree(old)
            else:
                os.rename(old, final)
        for tmp in sorted(folder.glob(TMP + "*")):
            if tmp.is_dir() and not tmp.is_symlink():
                remove_tree(tmp)
            else:
                os.unlink(tmp)


def _write(path: Path, data: bytes, flag: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (EINVAL, ENOSYS, ENOTSUP):  # some network file systems cannot sync
            raise
    finally:
        os.close(handle)
