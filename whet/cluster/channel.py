"""A channel between two processes: messages go both ways over a socket, and neither side waits for the other to read.
Rollouts travel as a `Bundle`.

`crew.py` holds one end of each channel, `member.py` the other. Both sides only trust their own program, so messages are
pickled. Another transport needs what `crew.py` uses of this one: `send`, `take`, `closed`, and `attend` for many.
"""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, repeat, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from whet.rollout.base import PARTS, join_traces
from whet.types import Batch, Rollout, Trace

FIELDS = tuple(name for name in Rollout.__dataclass_fields__ if name != "trace")
LUMP = 2**20  # bytes read at once
LOOK_S = 0.02  # seconds between two looks whether another side can be reached, where none can
_SIZE = struct.Struct("!Q")


def pack(message: Any) -> bytes:
    """A message as it travels; packed once, it can be sent to many."""
    data = pickle.dumps(message, protocol=5)
    return _SIZE.pack(len(data)) + data


class Channel:
    """One end. `closed` is set once the other end is gone; what it sent before can still be taken."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.closed = False
        self.reached = 0.0  # when the other side was, if that is not the beginning
        self._came = bytearray()
        self._going: deque[memoryview] = deque()

    @property
    def pending(self) -> int:
        """Bytes that the other side has not taken yet."""
        return sum(part.nbytes for part in self._going)

    def ready(self) -> bool:
        """Whether the other side can be reached; what is sent before that waits."""
        return True

    def send(self, packed: bytes) -> None:
        """Queue a packed message, and hand over what the socket takes now; `attend` hands over the rest."""
        if not self.closed:  # a closed channel drops it, since no reader is left
            self._going.append(memoryview(packed))
            self.write()

    def take(self) -> Any:
        """The next message that has come as a whole; None where there is none."""
        if len(self._came) < _SIZE.size:
            return None
        end = _SIZE.size + _SIZE.unpack_from(self._came)[0]
        if len(self._came) < end:
            return None
        message = pickle.loads(memoryview(self._came)[_SIZE.size : end])
        del self._came[:end]
        return message

    def write(self) -> None:
        try:
            while self._going and not self.closed:
                sent = self.end.send(self._going[0])
                self._going[0] = self._going[0][sent:]
                if not self._going[0].nbytes:
                    self._going.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._going.clear()  # `read` will find the end, after the last message

    def read(self) -> None:
        try:
            while not self.closed:
                news = self.end.recv(LUMP)
                self._came += news
                self.closed = not news
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def close(self) -> None:
        self.closed = True
        self.end.close()


def attend(channels: Sequence[Channel], timeout: float | None) -> None:
    """Wait until a message, or a part of one, moves on one of the channels; then move all that can be moved."""
    ready = [channel for channel in channels if channel.ready() and not channel.closed]
    if timeout != 0.0:  # a selector takes five times as long as a look at one channel
        with selectors.DefaultSelector() as selector:
            for channel in ready:
                waits = selectors.EVENT_WRITE if channel.pending else 0
                selector.register(channel.end, selectors.EVENT_READ | waits)
            selector.select(timeout if ready else min(timeout or 0.0, LOOK_S))
    for channel in ready:
        channel.write()
        channel.read()


# ---- rollouts: from the members to the driver, and those that train back to the learners


class Bundle(NamedTuple):
    """Rollouts in one lump: pickling each with a trace of its own takes more than twice as long."""

    columns: list[tuple[Any, ...]]  # of each of the FIELDS its values, a rollout each
    sizes: list[int]  # the tokens of each
    tokens: dict[str, np.ndarray]  # of all, end to end
    guessed: list[np.ndarray | None]  # of each trace

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Bundle:
        traces = [rollout.trace for rollout in rollouts if rollout.trace is not None]
        assert len(traces) == len(rollouts), "a rollout has no trace"
        columns = list(zip(*map(attrgetter(*FIELDS), rollouts), strict=True))
        tokens = join_traces(traces, np.dtype(np.float32))
        return cls(
            columns,
            [trace.ids.size for trace in traces],
            tokens,
            [trace.guessed for trace in traces],
        )

    def rollouts(self) -> list[Rollout]:
        """Their traces are views of `tokens`: a copy of each part would cost as much as all the rest."""
        spans = list(starmap(slice, pairwise(accumulate(self.sizes, initial=0))))
        parts = {name: map(self.tokens[name].__getitem__, spans) for name in PARTS}
        traces = _made(Trace, len(spans), {**parts, "guessed": self.guessed})
        return _made(
            Rollout, len(spans), {**dict(zip(FIELDS, self.columns, strict=False)), "trace": traces}
        )


def _made(kind: Any, count: int, columns: Mapping[str, Iterable[Any]]) -> list[Any]:
    """Objects of a frozen class with these values, column by column: their constructor takes four times as long."""
    made = list(map(object.__new__, repeat(kind, count)))
    for name, column in columns.items():
        deque(map(getattr(kind, name).__set__, made, column), maxlen=0)
    return made


def emptied(batch: Batch) -> tuple[Batch, Bundle]:
    """The batch without the rollouts of its groups, and these."""
    bare = replace(batch, groups=tuple(replace(group, rollouts=()) for group in batch.groups))
    return bare, Bundle.of([rollout for group in batch.groups for rollout in group.rollouts])


def filled(bare: Batch, bundle: Bundle) -> Batch:
    """The batch that was `emptied`."""
    found: dict[int, list[Rollout]] = {group.group_id: [] for group in bare.groups}
    for rollout in bundle.rollouts():
        found[rollout.group_id].append(rollout)
    return replace(
        bare, groups=tuple(replace(g, rollouts=tuple(found[g.group_id])) for g in bare.groups)
    )
