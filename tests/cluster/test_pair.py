"""Weights from one process to another by a group of two: here two threads, and gloo in place of NCCL."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from whet.cluster import ranks
from whet.cluster.ranks import Pair, Unmet, open_store

CPU = torch.device("cpu")


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(ranks, "BUCKET", 1000)
    store, address = open_store("127.0.0.1")
    yield address
    del store


def both(where: tuple[str, int], name: str, seconds: float = 30.0) -> tuple[Pair, Pair]:
    with ThreadPoolExecutor() as pool:
        first, second = (pool.submit(Pair, where, name, rank, CPU, seconds) for rank in (0, 1))
        return first.result(), second.result()


def test_bytes_arrive_in_buckets_again_and_again(where: tuple[str, int]) -> None:
    pairs = {name: both(where, name) for name in ("a b", "a c")}
    with ThreadPoolExecutor() as pool:
        for size in (1, 1000, 2500, 2500):
            for sender, receiver in pairs.values():
                data = torch.randint(256, (size,), dtype=torch.uint8)
                sent = pool.submit(sender.send, data)
                assert np.array_equal(receiver.receive(size), data.numpy())
                sent.result()


def test_one_that_never_comes_is_waited_for_within_the_limit(where: tuple[str, int]) -> None:
    begun = time.monotonic()
    with pytest.raises(Unmet):
        Pair(where, "alone", 0, CPU, 1.0)
    assert time.monotonic() - begun < 20


def test_one_that_ends_in_the_middle_holds_up_no_other_pair(where: tuple[str, int]) -> None:
    data = torch.arange(250_000).to(torch.uint8)
    (sender, receiver), (other, its) = both(where, "a b"), both(where, "a c")

    def begin_and_end() -> None:
        receiver._group.recv([torch.empty(1000, dtype=torch.uint8)], 0, 0).wait()
        receiver.close()

    with ThreadPoolExecutor() as pool:
        ended, sent, passed = (
            pool.submit(begin_and_end),
            pool.submit(sender.send, data),
            pool.submit(other.send, data),
        )
        assert np.array_equal(its.receive(len(data)), data.numpy())
        passed.result()
        ended.result()
        with pytest.raises(Unmet):
            sent.result()


def test_one_that_falls_silent_is_waited_for_within_the_limit(where: tuple[str, int]) -> None:
    sender, receiver = both(where, "a b", seconds=1.0)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(sender.send, torch.zeros(1500, dtype=torch.uint8))
        with pytest.raises(Unmet):
            receiver.receive(2500)
        sent.result()


def test_the_store_listens_on_its_address_only(where: tuple[str, int]) -> None:
    socket.create_connection(where).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", where[1]), timeout=5)
