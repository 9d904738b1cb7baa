"""Messages arrive whole and in order, however large they are, and an end is noticed after the last of them."""

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from whet.cluster.channel import Channel, attend, pack


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def receive(channel: Channel, *all_of: Channel) -> object:
    while (message := channel.take()) is None:
        assert not channel.closed
        attend(all_of or [channel], 60)
    return message


def test_both_sides_may_send_more_than_the_socket_holds(pair: tuple[Channel, Channel]) -> None:
    """If either waited for the other to read, both would wait for ever."""
    one, other = pair
    large = np.arange(4_000_000)
    for number in range(3):
        one.send(pack((number, large)))
        other.send(pack((number, -large)))
    assert one.pending and other.pending
    for number in range(3):
        for end, sign in ((one, -1), (other, 1)):
            got, array = receive(end, one, other)
            assert got == number and np.array_equal(array, sign * large)
    assert not one.pending and not other.pending and one.take() is None


def test_what_was_sent_before_the_end_is_received(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    for number in range(5):
        one.send(pack(number))
    one.close()
    assert [receive(other) for _ in range(5)] == list(range(5))
    while not other.closed:
        attend([other], 60)
    assert other.take() is None
    other.send(pack("nobody reads this"))
    assert not other.pending


def test_without_news_nothing_is_waited_for_longer_than_asked(
    pair: tuple[Channel, Channel],
) -> None:
    one, other = pair
    attend([one, other], 0.0)
    assert one.take() is None and not one.closed
    attend([], None)  # no channel, nothing to wait for


class Unplaced(Channel):
    """Its other side cannot be reached yet."""

    def ready(self) -> bool:
        return False


def test_what_cannot_be_reached_does_not_keep_others_waiting(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    away = Unplaced(socket.socket())
    one.send(pack("here"))
    attend([away, other, away], 60)
    assert other.take() == "here"
    pauses: list[float] = []
    monkeypatch.setattr(
        "selectors.DefaultSelector.select", lambda selector, pause: pauses.append(pause) or []
    )
    attend([away, away], 60)
    assert 0 < pauses[0] < 1, "none is there: looks are made often, but not without a pause"
    away.close()
