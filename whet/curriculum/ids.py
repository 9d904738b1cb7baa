"""The ids of all prompts with the row of each, shared by everything that keeps arrays with one entry per prompt.

A map of a million ids takes a tenth of a second to build and 100 MB to hold. `build.py` builds it once; sources,
posteriors and stages share it, and a part (the prompts of a stage or of a data entry) is an array of rows into it.
`pack` and `unpack` write arrays into checkpoints.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from whet.errors import WhetError


class Ids(Sequence[str]):
    """Distinct ids in a fixed order.

    >>> ids = Ids(["a", "b", "c", "d"])
    >>> part = ids.some(np.array([1, 3]))
    >>> list(part), part[1], part.row("d"), part.row("a"), ids.row("d")
    (['b', 'd'], 'd', 1, None, 3)
    """

    def __init__(self, ids: Sequence[str]):
        if len(ids) == 0:
            raise WhetError("There are no prompts to train on; check data.path and the task's options.")
        self._names = ids
        self._row = {prompt_id: row for row, prompt_id in enumerate(ids)}
        if len(self._row) < len(ids):
            twice, count = Counter(ids).most_common(1)[0]
            raise WhetError(f'The prompt id "{twice}" occurs {count} times; every prompt needs an id of its own.')
        self._fingerprint = ""

    @staticmethod
    def of(ids: Sequence[str]) -> Ids:
        """Return `ids` as `Ids`, without a new map if they are that already."""
        return ids if isinstance(ids, Ids) else Ids(ids)

    def some(self, rows: np.ndarray) -> Ids:
        """The ids of these rows, which ascend. The part shares the map of the whole."""
        return self if len(rows) == len(self) else Part(self, rows)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Ids: ...
    def __getitem__(self, row: int | slice) -> str | Ids:
        return self.some(np.arange(len(self))[row]) if isinstance(row, slice) else self._name(row)

    def _name(self, row: int) -> str:
        return self._names[row]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, prompt_id: object) -> bool:
        return isinstance(prompt_id, str) and self.row(prompt_id) is not None

    def row(self, prompt_id: str) -> int | None:
        """The row of an id; None for an id that is not among these."""
        return self._row.get(prompt_id)

    def shared(self, other: Ids) -> tuple[np.ndarray, np.ndarray]:
        """Rows here and rows there of the ids that both have; both are the same whole or parts of it.

        >>> ids = Ids(["a", "b", "c", "d"])
        >>> [rows.tolist() for rows in ids.some(np.array([1, 3])).shared(ids.some(np.array([2, 3])))]
        [[1], [1]]
        """
        mine, theirs = self._places(), other._places()  # both ascend, so the shared ids come in the same order
        here = np.flatnonzero(np.isin(mine, theirs, assume_unique=True))
        there = np.flatnonzero(np.isin(theirs, mine, assume_unique=True))
        return here, there

    def _places(self) -> np.ndarray:
        """Rows in the whole; a part may be a part of a part."""
        return np.arange(len(self))

    @property
    def fingerprint(self) -> str:
        """A hash of all ids in their order: saved rows mean nothing over other data."""
        if not self._fingerprint:
            self._fingerprint = f"{len(self)}:{hashlib.blake2b(self._content(), digest_size=8).hexdigest()}"
        return self._fingerprint

    def _content(self) -> bytes:
        return "\0".join(self._names).encode()

    def check(self, fingerprint: str) -> None:
        """Refuse a state that was written over other prompts."""
        if fingerprint != self.fingerprint:
            raise WhetError(
                f"The checkpoint was written over other prompts than the {len(self)} given now; "
                "resume with the same data, or start a new run."
            )


class Part(Ids):
    """Some of the ids of another, which keeps the names and the map."""

    def __init__(self, whole: Ids, rows: np.ndarray):
        self.whole, self.rows = whole, np.asarray(rows)
        if len(self.rows) == 0:
            raise WhetError("There are no prompts in this part of the data; check curriculum.stages.")
        self._own = np.full(len(whole), -1, np.int32)  # from a row of the whole to a row here
        self._own[self.rows] = np.arange(len(self.rows), dtype=np.int32)
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self.rows)

    def _name(self, row: int) -> str:
        return self.whole[int(self.rows[row])]

    def __iter__(self) -> Iterator[str]:
        return (self.whole[row] for row in self.rows.tolist())

    def _places(self) -> np.ndarray:
        return self.whole._places()[self.rows]

    def row(self, prompt_id: str) -> int | None:
        row = self.whole.row(prompt_id)
        return None if row is None or self._own[row] < 0 else int(self._own[row])

    def _content(self) -> bytes:
        return self.whole.fingerprint.encode() + self.rows.astype("<i8").tobytes()


def pack(array: np.ndarray) -> str:
    """The bytes of an array as base64: exact and compact in JSON, little-endian on every machine.

    >>> unpack(pack(np.array([1.5, 2.0], np.float32)), np.float32).tolist()
    [1.5, 2.0]
    """
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def unpack(text: str, kind: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.dtype(kind).newbyteorder("<")).astype(kind)
