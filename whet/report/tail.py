"""Follows a growing JSONL file that another process writes: each byte is read once, half lines wait for their end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO


class Tail:
    """
    A line counts once its newline is there. A file that was replaced or cut back (a resumed run does both)
    is read again from its beginning. Whole lines that are no JSON object are passed over and counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read, up to the last newline."""
        self.bad_lines = 0
        self._inode: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """The objects that came since the last call; none while the file is not there."""
        try:
            with self.path.open("rb") as file:
                return self._parse(self._read_new(file))
        except FileNotFoundError:
            return []

    def _read_new(self, file: BinaryIO) -> bytes:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self.offset:
            self._inode, self.offset = status.st_ino, 0
        file.seek(self.offset)
        data: bytes = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole

    def _parse(self, data: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in data.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif line.strip():
                self.bad_lines += 1
        return rows
