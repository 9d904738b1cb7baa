import contextlib
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from faults import KINDS, Faults, Killed

from whet import files
from whet.errors import WhetError


def install(monkeypatch, kind="before", at=None) -> Faults:
    faults = Faults(kind, at)
    monkeypatch.setattr(files, "os", faults)
    monkeypatch.setattr(files, "shutil", faults)
    return faults


def sweep(monkeypatch, tmp_path, kind, prepare, act, check):
    """`act` with a fault at its first, second, ... change, each time from a folder made by `prepare`."""
    for at in range(1000):
        folder = tmp_path / str(at)
        folder.mkdir()
        prepare(folder)
        faults = install(monkeypatch, kind, at)
        with contextlib.suppress(Killed, WhetError):
            act(folder)
        monkeypatch.undo()
        check(folder, f"{kind} at {at}")
        if not faults.fired:
            assert at > 0
            return
    raise AssertionError("the faults never ended")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_old_or_the_new_one(monkeypatch, tmp_path, kind):
    old, new = b"o" * 100, b"n" * 300

    def check(folder: Path, where: str) -> None:
        assert (folder / "a").read_bytes() in (old, new), where
        if kind == "error":
            assert not files.temporary(folder / "a").exists(), "an error gives the space back"
        files.recover(folder)
        assert [p.name for p in folder.iterdir()] == ["a"], where

    sweep(
        monkeypatch,
        tmp_path,
        kind,
        prepare=lambda folder: files.write_bytes(folder / "a", old),
        act=lambda folder: files.write_bytes(folder / "a", new),
        check=check,
    )


def fill(folder: Path, text: str) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text(text)
    (folder / "sub" / "b").write_text(text)


def content(folder: Path) -> list[str]:
    return [(folder / "a").read_text(), (folder / "sub" / "b").read_text()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_folder_is_the_old_or_the_new_one(monkeypatch, tmp_path, kind):
    def prepare(folder: Path) -> None:
        fill(folder / "final", "old " * 10)
        fill(files.temporary(folder / "final"), "new " * 10)

    def check(folder: Path, where: str) -> None:
        files.recover(folder)
        assert content(folder / "final") in (["old " * 10] * 2, ["new " * 10] * 2), where
        assert [p.name for p in folder.iterdir()] == ["final"], where

    sweep(
        monkeypatch,
        tmp_path,
        kind,
        prepare=prepare,
        act=lambda folder: files.publish(files.temporary(folder / "final"), folder / "final"),
        check=check,
    )
    assert (
        content(sorted(tmp_path.iterdir(), key=lambda p: int(p.name))[-1] / "final")
        == ["new " * 10] * 2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_folder_is_there_or_gone(monkeypatch, tmp_path, kind):
    def check(folder: Path, where: str) -> None:
        files.recover(folder)
        left = [p.name for p in folder.iterdir()]
        assert left == [] or (left == ["final"] and content(folder / "final") == ["text"] * 2), (
            where
        )

    sweep(
        monkeypatch,
        tmp_path,
        kind,
        prepare=lambda folder: fill(folder / "final", "text"),
        act=lambda folder: files.remove_tree(folder / "final"),
        check=check,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_recovery_itself_may_be_killed(monkeypatch, tmp_path, kind):
    def prepare(folder: Path) -> None:
        fill(folder / f"{files.OLD}final", "old")
        fill(folder / f"{files.TMP}final", "half")
        fill(folder / "other", "new")
        fill(folder / f"{files.OLD}other", "old")
        (folder / f"{files.TMP}file").write_text("half")

    def check(folder: Path, where: str) -> None:
        files.recover(folder)
        assert sorted(p.name for p in folder.iterdir()) == ["final", "other"], where
        assert (
            content(folder / "final") == ["old"] * 2 and content(folder / "other") == ["new"] * 2
        ), where

    sweep(monkeypatch, tmp_path, kind, prepare=prepare, act=files.recover, check=check)


def test_recovery_touches_nothing_of_the_users(tmp_path):
    for name in ("notes.txt", ".tmp-mine", ".whet", "whet-tmp-mine"):
        (tmp_path / name).write_text("mine")
    files.recover(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_published_files_are_as_readable_as_their_folder(tmp_path):
    tmp = tmp_path / "t"
    fill(tmp, "text")
    tmp.chmod(0o750)
    (tmp / "a").chmod(0o600)
    files.publish(tmp, tmp_path / "final")
    assert (tmp_path / "final" / "a").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "final" / "sub" / "b").stat().st_mode & 0o777 == 0o640


def test_lines_are_appended_and_cut(tmp_path):
    path = tmp_path / "log"
    for line in ("one", "two", "zwölf"):
        files.append_line(path, line)
    assert path.read_text() == "one\ntwo\nzwölf\n"
    with path.open("a") as file:
        file.write("torn")
    files.keep_lines(path, lambda line: line in ("one", "zwölf"))
    assert path.read_text() == "one\nzwölf\n"


def test_a_file_whose_lines_all_stay_is_not_written(monkeypatch, tmp_path):
    (tmp_path / "log").write_text("one\ntwo\n")
    faults = install(monkeypatch)
    files.keep_lines(tmp_path / "log", lambda line: True)
    assert faults.count == 0


def test_a_line_the_disk_could_not_hold_leaves_no_half(monkeypatch, tmp_path):
    path = tmp_path / "log"
    files.append_line(path, "one")
    real = os.write
    written = []

    def full(handle, data):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(real(handle, data[:3]))
        return written[0]

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(WhetError, match=r"no space left to write .*log: .*untouched\.$"):
        files.append_line(path, "two and more")
    monkeypatch.undo()
    assert written == [3]
    files.append_line(path, "three")
    assert path.read_text() == "one\nthree\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EACCES, "no permission"),
        (errno.EPERM, "no permission"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(monkeypatch, tmp_path, code, words):
    path = tmp_path / "file.json"
    files.write_text(path, "old")

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "write", refuse)
    with pytest.raises(WhetError) as caught:
        files.write_text(path, "new")
    sentence = str(caught.value)
    assert (
        words in sentence
        and str(path) in sentence
        and "everything saved before is untouched" in sentence
        and "\n" not in sentence
    )
    assert path.read_text() == "old"


def test_a_path_below_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    for act in (
        lambda: files.make_folder(tmp_path / "file" / "run"),
        lambda: files.make_folder(tmp_path / "file"),
        lambda: files.write_text(tmp_path / "file" / "a", ""),
    ):
        with pytest.raises(WhetError, match="a part of that path is a file"):
            act()


def test_errors_told_from_rust_are_understood(tmp_path):
    class SafetensorError(Exception):
        pass

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    with pytest.raises(WhetError, match="no space left"):
        files.write_with(tmp_path / "x.safetensors", full)
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_the_writer_stays_what_it_is(tmp_path):
    with pytest.raises(ZeroDivisionError):
        files.write_with(tmp_path / "x", lambda path: 1 / 0)
    assert list(tmp_path.iterdir()) == []


def test_writers_that_mind_the_suffix(tmp_path):
    files.write_with(tmp_path / "x.npz", lambda path: np.savez(path, a=np.arange(3)))
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_a_file_system_that_cannot_sync_is_no_error(monkeypatch, tmp_path):
    def cannot(handle):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(files.os, "fsync", cannot)
    files.write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
