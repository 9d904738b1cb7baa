"""One judge process: the code that runs inside it, and the handle by which its parent feeds, watches and kills it.

`judge.py` makes the handles and decides which item goes where and what a failure means for the run. The parent sends
chunks of responses, with each prompt once; the worker answers each item on its own, with the time, so that after a
hang or a crash the parent knows which item caused it. A judge may run hostile text, so nothing that a worker sends is
unpickled or trusted: an answer is a few numbers and short texts, which are checked on arrival, and can hold no more
than a score, a final answer and, as JSON, a few terms.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import math
import multiprocessing
import numbers
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any, NamedTuple

from whet.errors import WhetError
from whet.tasks.base import Judgement
from whet.tasks.formulas import TooSlow
from whet.types import Prompt, Rollout, fields_of

# seconds until a worker picks up a chunk: forking a large process on a busy machine is slow
START_S = 10.0
# most seconds that a full pipe, or a killed process that does not end, holds the parent up
STALL_S = 10
NOTE_CHARACTERS = 300  # longest text of an error; the rest is cut
FINAL_CHARACTERS = 300  # longest final answer; the rest is cut
MOST_TERMS = 32
LARGEST_REPLY = 32768  # bytes
LUMP = 65536  # bytes read at once
ANY = "surrogatepass"  # a judge may return any string
UNREADABLE = (ValueError, TypeError, AttributeError, RecursionError, struct.error)

Judges = Mapping[str, Callable[[Prompt, str], Any]]

_LENGTH = struct.Struct("!i")
# number, kind, score, at, and the bytes of note and final, which follow; then terms
_REPLY = struct.Struct("!qBddHH")
_PR_SET_PDEATHSIG = 1
# The parent's pipe ends of all pools. A worker inherits them and must close them, or it could answer for a sibling.
_PARENT_ENDS: weakref.WeakSet[Connection | Inbox | socket.socket] = weakref.WeakSet()


class Kind(IntEnum):
    STARTED = 0  # the chunk was picked up
    SCORE = 1
    ERROR = 2  # the judge raised, or returned something that is no score
    # the judge ran out of memory; the worker ends itself, since what it holds may be a leak
    FULL = 3
    LATE = 4  # the judge itself noticed that it takes too long


class Reply(NamedTuple):
    number: int
    kind: Kind
    score: float
    at: float  # time.monotonic() in the worker, which is one clock for all processes of a machine
    note: str = ""  # the text of an error
    final: str = ""
    terms: Mapping[str, float] = {}

    def pack(self) -> bytes:
        note, final = (
            text.encode(errors=ANY)
            for text in (self.note[:NOTE_CHARACTERS], self.final[:FINAL_CHARACTERS])
        )
        terms = json.dumps(dict(self.terms)).encode() if self.terms else b""
        return b"".join((_REPLY.pack(*self[:4], len(note), len(final)), note, final, terms))

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Raises one of UNREADABLE for anything that a worker would not write."""
        number, kind, score, at, noted, named = _REPLY.unpack_from(data)
        middle = _REPLY.size + noted
        end = _REPLY.size + noted + named
        note = data[_REPLY.size : middle].decode(errors=ANY)
        final = data[middle:end].decode(errors=ANY)
        terms = json.loads(data[end:]) if len(data) > end else {}
        short = (
            len(note) <= NOTE_CHARACTERS
            and len(final) <= FINAL_CHARACTERS
            and len(terms) <= MOST_TERMS
        )
        finite = all(
            isinstance(value, float) and math.isfinite(value) for value in (at, *terms.values())
        )
        if len(data) >= end and short and finite and 0 <= score <= 1:
            return cls(number, Kind(kind), score, at, _printable(note), _printable(final), terms)
        raise ValueError("no reply")


class Item(NamedTuple):
    """One response to judge."""

    number: int
    rollout: Rollout
    prompt: Prompt
    text: str


# ---- in the parent


class Worker:
    """The parent's handle. `chunk` holds the items that are not answered yet; the first one is being judged."""

    def __init__(self, judges: Judges, memory_mb: int) -> None:
        context = multiprocessing.get_context("fork")
        conn, theirs = context.Pipe(duplex=True)
        self._begin(conn)
        self._process = context.Process(
            target=_run, args=(theirs, judges, memory_mb, os.getpid()), daemon=True
        )
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of fork in a process with threads (torch, tokenizers): a lock held by one of them
                # stays locked in the child. The child only runs the judge; if that needs such a lock, it is killed
                # at its deadline and costs one rollout. Spawning instead would refuse a user's closure.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except OSError:
            self._inbox.close()
            self.conn.close()
            raise
        finally:
            theirs.close()
        assert self._process.pid
        self.pid = self._process.pid

    def _begin(self, conn: Connection) -> None:
        self.conn, self._inbox, self._far = conn, Inbox(conn), False
        self.gone: Callable[[], bool] = lambda: False  # whether no item is to blame for its end
        _PARENT_ENDS.update((self.conn, self._inbox))
        self.chunk: deque[Item] = deque()
        self._killed = False
        self.broken = False  # dead, or no longer to be trusted
        self.started = False  # it has picked up its present chunk
        self.proven = False  # it has answered at least once
        self.since = 0.0  # when the present item began, or the chunk was sent

    def give(self, items: Sequence[Item]) -> None:
        """Send a chunk to a worker that has none. A worker that does not take it is broken."""
        assert not self.chunk and not self.broken
        self.chunk.extend(items)
        self.started, self.since = False, time.monotonic()
        try:
            prompts = {item.prompt.id: item.prompt for item in items}
            packed = {name: pickle.dumps(fields_of(prompt)) for name, prompt in prompts.items()}
            self.conn.send_bytes(
                pickle.dumps([(item.number, packed[item.prompt.id], item.text) for item in items])
            )
        except OSError:
            self.broken = True
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise WhetError(
                f"A prompt's messages or meta cannot be sent to a judge process: {error}."
            ) from error

    def read(self) -> list[tuple[Item, Reply, float]]:
        """Items answered since the last call, with the seconds that each took."""
        answered = []
        try:
            while not self.broken and (data := self._inbox.take()) is not None:
                reply = Reply.unpack(data)
                starts = reply.kind == Kind.STARTED
                expected = bool(self.chunk) and reply.number == (
                    -1 if starts else self.chunk[0].number
                )
                if not expected or starts == self.started:
                    raise ValueError(
                        "an answer to no question: a judge forked, or wrote into the pipe"
                    )
                # another machine has another clock
                at = time.monotonic() if self._far else reply.at
                took = max(0.0, at - self.since)
                self.since = min(at, time.monotonic())
                self.started = True
                if not starts:
                    self.proven = True
                    answered.append((self.chunk.popleft(), reply, took))
        except (EOFError, OSError, *UNREADABLE):
            self.broken = True
        return answered

    def deadline(self, timeout_s: float) -> float:
        return self.since + timeout_s + (0.0 if self.started else START_S)

    def kill(self) -> None:
        """Kill at once, with all processes that the judge started. Earlier answers can still be read."""
        if self._killed:
            return  # by now its process id may belong to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # it may not have its own process group yet
        self._process.join(STALL_S)  # not for ever: a dead disk can hold even a killed process
        self._killed = True

    def close(self) -> None:
        self.kill()
        self._inbox.close()
        self.conn.close()
        if not self._far and self._process.exitcode is not None:
            self._process.close()


class FarWorker(Worker):
    """A judge process of another machine; `relay` has the other end. gone: says that it was lost with its machine."""

    def __init__(self, end: socket.socket, gone: Callable[[], bool]) -> None:
        self._begin(Connection(end.detach()))
        self.gone = gone
        self._far = True

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._inbox.end.shutdown(socket.SHUT_WR)  # the other side kills it at the end of file


def relay(judges: Judges, memory_mb: int, end: socket.socket) -> None:
    """Start a judge process for a FarWorker, which ends with the connection, and pass on what both say, in a thread. It
    is called by the thread that accepts: else a process could be forked meanwhile that holds a sibling's connection."""
    _PARENT_ENDS.add(end)
    worker = Worker(judges, memory_mb)
    inner = worker._inbox.end

    def pass_on() -> None:
        with end, contextlib.closing(worker), contextlib.suppress(OSError):
            while data := (source := inner if inner in wait_for([inner, end]) else end).recv(LUMP):
                (end if source is inner else inner).sendall(data)

    threading.Thread(target=pass_on, daemon=True).start()


class Inbox:
    """The messages that arrived through a pipe. They are read in lumps, since `Connection` needs three system calls
    per message, and a message that is not complete is never waited for."""

    def __init__(self, conn: Connection) -> None:
        self.end = socket.socket(fileno=os.dup(conn.fileno()))
        # A worker that stops reading must not stop its parent for ever. The option holds for `conn` as well.
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALL_S, 0))
        self._buffer = bytearray()

    def take(self) -> bytes | None:
        """The next message; None while there is none. Raises EOFError after the last, ValueError for one too long."""
        while True:
            # `Connection` writes the length, four bytes, then the message
            if len(self._buffer) >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._buffer)
                if not 0 <= size <= LARGEST_REPLY:
                    raise ValueError("no reply is so long")
                end = _LENGTH.size + size
                if len(self._buffer) >= end:
                    message = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    return message
            try:
                news = self.end.recv(LUMP, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not news:
                raise EOFError
            self._buffer += news

    def close(self) -> None:
        self.end.close()


# ---- in the worker


def _run(conn: Connection, judges: Judges, memory_mb: int, parent: int) -> None:
    try:
        conn = _isolate(conn, memory_mb, parent)
        while True:
            while not conn.poll(1.0):
                # another child of it may hold the pipe open: no end of file is seen
                if os.getppid() != parent:
                    return
            chunk: list[tuple[int, bytes, str]] = conn.recv()
            conn.send_bytes(Reply(-1, Kind.STARTED, 0.0, time.monotonic()).pack())
            # what a judge does to a prompt is not seen by the next one
            for number, prompt, text in chunk:
                reply = _judge(judges, number, Prompt(**pickle.loads(prompt)), text)
                conn.send_bytes(reply.pack())
                if reply.kind == Kind.FULL:
                    return
    finally:  # whatever happens: exit handlers, finalizers and half-written files belong to the parent
        os._exit(0)


def _judge(judges: Judges, number: int, prompt: Prompt, text: str) -> Reply:
    try:
        said = read_judgement(judges[prompt.task](prompt, text))
    except MemoryError:
        return Reply(number, Kind.FULL, 0.0, time.monotonic(), "MemoryError")
    except (
        BaseException
    ) as error:  # also SystemExit and KeyboardInterrupt: a judge may not end its worker
        note = type(error).__name__
        with contextlib.suppress(BaseException):  # not every error can say what it is
            note += f": {error}"
        kind = Kind.LATE if isinstance(error, TooSlow) else Kind.ERROR
        return Reply(number, kind, 0.0, time.monotonic(), note)
    return Reply(number, Kind.SCORE, said.score, time.monotonic(), "", said.final, said.terms)


def read_judgement(value: Any) -> Judgement:
    """What a judge returned: a number, or a Judgement. Raises TypeError or ValueError for anything else."""
    said = value if isinstance(value, Judgement) else Judgement(score=value)
    score = as_number(said.score)
    if not 0 <= score <= 1:
        raise ValueError(f"a score is from 0 to 1, not {score}")
    if not isinstance(said.final, str):
        raise TypeError(f"a final answer is a string, not a {type(said.final).__name__}")
    terms = {str(name)[:64]: as_number(term) for name, term in said.terms.items()}
    if len(terms) > MOST_TERMS:
        raise ValueError(f"a judge may return {MOST_TERMS} terms, not {len(terms)}")
    return Judgement(score=score, final=said.final[:FINAL_CHARACTERS], terms=terms)


def as_number(value: Any) -> float:
    if callable(getattr(value, "item", None)):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a judge returns a number, this one a {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a score or a reward is a finite number, not {number}")
    return number


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _isolate(conn: Connection, memory_mb: int, parent: int) -> Connection:
    """Cut the worker off from the terminal and the signals of the run, limit it, and let it end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # a process group that can be killed as a whole, and no terminal to write to
    if sys.platform == "linux":  # elsewhere a worker looks for its parent between chunks
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for end in list(_PARENT_ENDS):
        end.close()
    # The run may have been started without standard streams; then the pipe has one of their numbers.
    safe = Connection(fcntl.fcntl(conn.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # the run may have pointed it at the terminal, where a crash here would look like its own
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS has the limit but does not keep it
        # what the parent had mapped at the fork, which may be gigabytes
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        limit = mapped + memory_mb * 2**20
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.freeze()  # objects of the parent are never collected here, so that their pages stay shared
    return safe
