"""Messages of a pipe, read in lumps: each once, in order, and never waited for."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from whet.tasks.worker import LARGEST_REPLY, LUMP, Inbox


@pytest.fixture
def ends() -> Iterator[tuple[Inbox, Connection, socket.socket]]:
    """The inbox, what writes to it, and the same without `Connection`'s manners."""
    mine, theirs = multiprocessing.Pipe(duplex=True)
    with mine, theirs, socket.socket(fileno=os.dup(theirs.fileno())) as raw:
        inbox = Inbox(mine)
        yield inbox, theirs, raw
        inbox.close()


def test_messages_come_whole_and_in_order(ends: tuple[Inbox, Connection, socket.socket]) -> None:
    inbox, theirs, _ = ends
    assert inbox.take() is None
    sent = [os.urandom(size) for size in (1, 0, 5000, 300, 30_000, 2)]
    for message in sent:
        theirs.send_bytes(message)
    assert [inbox.take() for _ in sent] == sent and inbox.take() is None
    assert sum(map(len, sent)) < LUMP, "all of them in one look"


def test_half_a_message_is_none(ends: tuple[Inbox, Connection, socket.socket]) -> None:
    inbox, _, raw = ends
    for piece in (b"\0\0", b"\0\3a", b"b"):
        raw.sendall(piece)
        assert inbox.take() is None
    raw.sendall(b"c\0\0\0\1d")
    assert inbox.take() == b"abc" and inbox.take() == b"d" and inbox.take() is None


def test_what_was_sent_before_the_end_is_read(
    ends: tuple[Inbox, Connection, socket.socket],
) -> None:
    inbox, theirs, raw = ends
    theirs.send_bytes(b"last")
    raw.sendall(b"\0\0\0\7hal")
    theirs.close()
    raw.close()
    assert inbox.take() == b"last"
    with pytest.raises(EOFError):
        inbox.take()


@pytest.mark.parametrize("head", [b"\0\0\x80\1", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
def test_no_message_is_longer_than_a_reply(
    ends: tuple[Inbox, Connection, socket.socket], head: bytes
) -> None:
    """Nor waited for: a hostile judge may write any length. -1 announces a length of eight bytes."""
    inbox, theirs, raw = ends
    theirs.send_bytes(bytes(LARGEST_REPLY))
    raw.sendall(head)
    assert inbox.take() == bytes(LARGEST_REPLY)
    with pytest.raises(ValueError, match="so long"):
        inbox.take()
