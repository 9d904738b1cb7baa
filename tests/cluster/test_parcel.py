"""Weights that lie in memory which another process opens by a handle: those of 20 million weights, on each device."""

import multiprocessing as mp
import socket
from functools import partial
from typing import Any

import pytest
import torch
from learner_batches import encode, exact_model

from whet.cluster.channel import Channel
from whet.cluster.member import FleetMember, _cut, _room, make_buffer, open_buffer, place_of
from whet.config import Learn
from whet.learn.learner import Learner

SHAPES = ((4_000, 2_500), (3,), (5_000, 2_000), (7, 11))
KINDS = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64)


def tensors(device: torch.device) -> list[torch.Tensor]:
    return [
        torch.zeros(shape, dtype=kind, device=device)
        for shape, kind in zip(SHAPES, KINDS, strict=True)
    ]


def read(pipe: Any, name: str) -> None:
    """The other process: it opens the buffer once, and takes over what is in it whenever it is told to."""
    device = torch.device(name)
    mine = tensors(device)
    pipe.send(place_of(device))
    buffer = open_buffer(pipe.recv(), device)
    while pipe.recv():
        torch._foreach_copy_(mine, _cut(buffer, mine))
        pipe.send(FleetMember._checksum(mine))


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_reads_what_is_packed(name: str) -> None:
    device = torch.device(name)
    live = tensors(device)
    buffer, handle = make_buffer(sum(map(_room, live)), device)
    here, there = mp.Pipe()
    other = mp.get_context("spawn").Process(target=read, args=(there, name), daemon=True)
    other.start()
    there.close()  # so that its death ends `recv`
    try:
        assert here.recv() == place_of(device) != ""
        here.send(handle)
        sums = set()
        for seed in range(3):
            torch.manual_seed(seed)
            for tensor in live:
                tensor.normal_()
            torch._foreach_copy_(_cut(buffer, live), live)
            mine = FleetMember._checksum(live)
            here.send(True)
            assert here.recv() == mine
            sums.add(mine)
        assert len(sums) == 3
        here.send(False)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_one_bit_changes_the_checksum(kind: torch.dtype, size: int) -> None:
    room = torch.zeros(2 * size + 1, dtype=kind)
    # at an odd place, with gaps
    for weights in (room[:size], room[1 : size + 1], room[::2][:size]):
        weights.copy_(torch.arange(size))
        before = FleetMember._checksum([weights])
        assert FleetMember._checksum([weights.clone()]) == before
        weights[-1] = torch.nextafter(weights[-1], torch.full((), 100.0, dtype=kind))
        assert FleetMember._checksum([weights]) != before


def test_weights_that_a_worker_reads_are_not_overwritten() -> None:
    model = exact_model()
    here, there = socket.socketpair()
    with here, there:
        learner = partial(Learner, model, Learn(), encode=encode)
        member = FleetMember(Channel(here), lambda order, prompts: (model, None, learner, None))
        member.begin({"rank": 0, "later": False})
        kept: dict[int, torch.Tensor] = {}

        def pack(issue: int, used: set[int]) -> torch.Tensor:
            with torch.no_grad():
                next(model.parameters()).fill_(issue)
            member.pack_up(issue, used)
            assert member.parcel is not None
            kept[issue] = member.parcel.data.clone()
            return member.parcel.data

        first = pack(1, set())
        second = pack(2, {1})  # a worker is slow
        assert (
            torch.equal(first, kept[1])
            and torch.equal(second, kept[2])
            and not torch.equal(first, second)
        )
        assert pack(3, {1}).data_ptr() == second.data_ptr() and torch.equal(first, kept[1])
        assert pack(4, {3}).data_ptr() == first.data_ptr(), "it has read them"


def test_a_place_is_a_machine_and_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards of one machine, and a card that has another number for another process."""

    def card(name: str) -> str:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: type("Card", (), {"uuid": name})
        )
        return place_of(torch.device("cuda", 0))

    assert card("GPU-a") == card("GPU-a") != card("GPU-b")
    assert place_of(torch.device("cpu")) not in (card("GPU-a"), "")
