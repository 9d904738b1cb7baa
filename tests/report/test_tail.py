from __future__ import annotations

import os
from pathlib import Path

from whet.report.live import FileTail


def test_rows_come_once_and_half_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = FileTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"step": 0}\n{"step": 1}\n{"ste')
        assert [row["step"] for row in tail.read()] == [0, 1]
        assert tail.offset == 24
        assert tail.read() == []
        file.write(b'p": 2}')
        assert tail.read() == []
        file.write(b"\n")
        assert tail.read() == [{"step": 2}]
    assert tail.read() == [] and tail.offset == path.stat().st_size


def test_no_byte_is_read_twice(tmp_path: Path) -> None:
    """What was read already may change on the disk without anyone noticing."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n')
    tail = FileTail(path)
    tail.read()
    with path.open("r+b") as file:
        file.write(b"~~~~~~~~~~~\n")
        file.seek(0, os.SEEK_END)
        file.write(b'{"step": 1}\n')
    assert tail.read() == [{"step": 1}] and tail.bad_lines == 0


def test_a_letter_torn_in_two_is_put_together(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = '{"name": "é"}\n'.encode()
    path.write_bytes(line[:11])
    tail = FileTail(path)
    assert tail.read() == []
    path.write_bytes(line)
    assert tail.read() == [{"name": "é"}]


def test_a_file_cut_back_or_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n')
    tail = FileTail(path)
    tail.read()
    os.truncate(path, 12)
    assert tail.read() == [{"step": 0}]
    other = tmp_path / "other"
    other.write_bytes(b'{"step": 5}\n{"step": 6}\n{"step": 7}\n')
    os.replace(other, path)
    assert [row["step"] for row in tail.read()] == [5, 6, 7]


def test_damage_is_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\nnot json\n[1]\n\n\xff\xfe\n{"step": 1}\n')
    tail = FileTail(path)
    assert [row["step"] for row in tail.read()] == [0, 1]
    assert tail.bad_lines == 3
