"""The ids of all prompts and the row of each: one map from id to row for all who need it, also for those of a part.

A map of a million ids takes a tenth of a second to make and 100 MB to hold. `build.py` makes it once; sources, counts
and stages share it, and a part (the prompts of a stage or of a data entry) is an array of rows into it.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from whet.errors import WhetError


class Ids(Sequence[str]):
    """Ids that differ, in an order that does not change.

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
        """Themselves, if they are such already."""
        return ids if isinstance(ids, Ids) else Ids(ids)

    def some(self, rows: np.ndarray) -> Ids:
        """Those of these rows, which ascend. The map is shared, and no id is looked at."""
        return self if len(rows) == len(self) else Part(self, rows)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Ids: ...
    def __getitem__(self, row: int | slice) -> str | Ids:
        return self.some(np.arange(len(self))[row]) if isinstance(row, slice) else self._names[row]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self._row

    def row(self, prompt_id: str) -> int | None:
        """None for an id that is not among them."""
        return self._row.get(prompt_id)

    def shared(self, other: Ids) -> tuple[np.ndarray, np.ndarray]:
        """Rows here and rows there of the ids that both have, being the whole or parts of it.

        >>> ids = Ids(["a", "b", "c", "d"])
        >>> [rows.tolist() for rows in ids.some(np.array([1, 3])).shared(ids.some(np.array([2, 3])))]
        [[1], [1]]
        """
        mine, theirs = self._places(), other._places()  # both ascend, so what they share comes in one order
        here = np.flatnonzero(np.isin(mine, theirs, assume_unique=True))
        there = np.flatnonzero(np.isin(theirs, mine, assume_unique=True))
        return here, there

    def _places(self) -> np.ndarray:
        """Rows in the whole, of which a part may be a part of a part."""
        return np.arange(len(self))

    @property
    def fingerprint(self) -> str:
        """Of all ids in their order: a row means nothing over other data."""
        if not self._fingerprint:
            self._fingerprint = f"{len(self)}:{hashlib.blake2b(self._content(), digest_size=8).hexdigest()}"
        return self._fingerprint

    def _content(self) -> bytes:
        return "\0".join(self._names).encode()

    def check(self, fingerprint: str) -> None:
        """Refuses a state that was written over other prompts."""
        if fingerprint != self.fingerprint:
            raise WhetError(
                f"The checkpoint was written over other prompts than the {len(self)} given now; "
                "resume with the same data, or start a new run."
            )


class Part(Ids):
    """Some of the ids of another, which keeps them."""

    def __init__(self, of: Ids, rows: np.ndarray):
        self.whole, self.rows = of, np.asarray(rows)
        if len(self.rows) == 0:
            raise WhetError("There are no prompts in this part of the data; check curriculum.stages.")
        self._own = np.full(len(of), -1, np.int32)  # from a row of the whole to a row here
        self._own[self.rows] = np.arange(len(self.rows), dtype=np.int32)
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Ids: ...
    def __getitem__(self, row: int | slice) -> str | Ids:
        return self.some(np.arange(len(self))[row]) if isinstance(row, slice) else self.whole[int(self.rows[row])]

    def __iter__(self) -> Iterator[str]:
        return (self.whole[row] for row in self.rows.tolist())

    def __contains__(self, prompt_id: object) -> bool:
        return isinstance(prompt_id, str) and self.row(prompt_id) is not None

    def _places(self) -> np.ndarray:
        return self.whole._places()[self.rows]

    def row(self, prompt_id: str) -> int | None:
        row = self.whole.row(prompt_id)
        return None if row is None or self._own[row] < 0 else int(self._own[row])

    def _content(self) -> bytes:
        return self.whole.fingerprint.encode() + self.rows.astype("<i8").tobytes()


# ---- history
#
# What rollouts have shown of each prompt so far: pass rates, lengths, visits; arrays with one entry a prompt.
#
# Kept by the ScalingRL pool (`scalingrl.py`), which scores prompts by it (`des.py`). A group's rollouts may come over
# several calls, and nobody says when it is whole, so what it shows is brought up to date with each of them. Knows rows,
# never ids, and decides nothing.


MEMORY = 0.7
"""What a visit leaves of the smoothed length before it."""
WINDOW = 3
"""Groups whose pass rates make the recent one."""

UNSEEN, MIXED, ALL_WRONG, ALL_RIGHT = range(4)
"""`kind`: what the latest group of a prompt was like."""

_COLUMNS: dict[str, Any] = {
    "handed": np.int32,  # times it was handed out
    "visits": np.int32,  # groups with a verdict
    "epoch": np.int32,  # of the latest verdict
    "kind": np.uint8,
    "solved": np.bool_,  # some rollout was right, ever
    "rate": np.float32,  # mean pass rate of the last WINDOW groups
    "length": np.float32,  # tokens of a response, smoothed
    # the latest group, and what was known before it
    "group": np.int64,
    "right": np.int32,
    "judged": np.int32,
    "tokens": np.int64,
    "rate_1": np.float32,
    "rate_2": np.float32,
    "length_before": np.float32,
}


class History:
    """
    >>> history = History(2)
    >>> history.add(1, group_id=7, right=1, judged=4, tokens=400, epoch=0)
    >>> history.add(1, group_id=9, right=4, judged=4, tokens=800, epoch=1)
    >>> float(history.rate[1]), round(float(history.length[1]), 4)
    (0.625, 130.0)
    >>> int(history.kind[1]) == ALL_RIGHT, history.visits.tolist()
    (True, [0, 2])
    """

    handed: np.ndarray
    visits: np.ndarray
    epoch: np.ndarray
    kind: np.ndarray
    solved: np.ndarray
    rate: np.ndarray
    length: np.ndarray
    group: np.ndarray
    right: np.ndarray
    judged: np.ndarray
    tokens: np.ndarray
    rate_1: np.ndarray
    rate_2: np.ndarray
    length_before: np.ndarray

    def __init__(self, prompts: int):
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.zeros(prompts, kind))
        self.group -= 1

    def add(self, row: int, *, group_id: int, right: int, judged: int, tokens: int, epoch: int) -> None:
        """Judged rollouts of one group. Late ones of an older group count with the prompt's latest."""
        if group_id > self.group[row]:
            self._begin(row, group_id)
        self.right[row] += right
        self.judged[row] += judged
        self.tokens[row] += tokens
        self.epoch[row] = epoch
        self.solved[row] |= right > 0
        self._show(row)

    def inherit(self, older: History, rows: np.ndarray, theirs: np.ndarray) -> None:
        """What `older` has of its rows `theirs`, for the rows here; no verdict of it is of an epoch to come."""
        known = (older.handed[theirs] > 0) | (older.visits[theirs] > 0)
        rows, theirs = rows[known], theirs[known]
        for name in _COLUMNS:
            getattr(self, name)[rows] = getattr(older, name)[theirs]
        self.epoch[rows] = 0

    def _begin(self, row: int, group_id: int) -> None:
        if self.visits[row]:
            self.rate_2[row] = self.rate_1[row]
            self.rate_1[row] = self.right[row] / self.judged[row]
            self.length_before[row] = self.length[row]
        self.group[row] = group_id
        self.visits[row] += 1
        self.right[row] = self.judged[row] = self.tokens[row] = 0

    def _show(self, row: int) -> None:
        right, judged, visits = int(self.right[row]), int(self.judged[row]), int(self.visits[row])
        now, length = right / judged, int(self.tokens[row]) / judged
        recent = [now, float(self.rate_1[row]), float(self.rate_2[row])][: min(visits, WINDOW)]
        old = MEMORY if visits > 1 else 0.0
        self.rate[row] = sum(recent) / len(recent)
        self.length[row] = old * float(self.length_before[row]) + (1.0 - old) * length
        mixed = 0 < right < judged or judged == 1  # one verdict does not tell
        self.kind[row] = MIXED if mixed else ALL_RIGHT if right else ALL_WRONG

    def state_dict(self) -> dict[str, Any]:
        """Of the prompts that were handed out or judged alone; arrays as base64, exact and compact."""
        rows = np.flatnonzero((self.handed > 0) | (self.visits > 0)).astype(np.int32)
        return {"rows": pack(rows), **{name: pack(getattr(self, name)[rows]) for name in _COLUMNS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.__init__(len(self.handed))  # type: ignore[misc]
        rows = unpack(state["rows"], np.int32)
        for name, kind in _COLUMNS.items():
            getattr(self, name)[rows] = unpack(state[name], kind)


def pack(array: np.ndarray) -> str:
    """
    >>> unpack(pack(np.array([1.5, 2.0], np.float32)), np.float32).tolist()
    [1.5, 2.0]
    """
    little = array.astype(array.dtype.newbyteorder("<"))  # a checkpoint may be read on another machine
    return base64.b64encode(little.tobytes()).decode("ascii")


def unpack(text: str, kind: Any) -> np.ndarray:
    little = np.dtype(kind).newbyteorder("<")
    return np.frombuffer(base64.b64decode(text), little).astype(kind)
