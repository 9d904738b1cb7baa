"""What processes exchange by torch.distributed, over gloo on a CPU and NCCL between GPUs: gradients and sums are added
in a team, and weights are sent in pairs."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from whet.learn.base import T, Team

BUCKET = 64 * 2**20  # bytes that are sent at once
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


class Unmet(Exception):
    """An exchange failed: another process is gone, or did not come in time."""


class Ranks(Team):
    """This process among those of `group`, which is formed before; by default all of them."""

    divided: tuple[str, ...] = ("masters", "optimizer")  # what a learner may hold a share of

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def add(self, tensors: Sequence[Tensor]) -> None:
        for bucket in buckets(tensors):
            flat = _flatten_dense_tensors(bucket)
            with exchange():
                dist.all_reduce(flat, group=self.group)
            torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))

    def give(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> None:
        for owner in range(self.size):
            for bucket in buckets(
                [tensor.detach() for name, tensor in tensors.items() if owners[name] == owner]
            ):
                flat = _flatten_dense_tensors(bucket)
                with exchange():
                    dist.broadcast(flat, src=owner, group=self.group)
                if owner != self.rank:  # an owner's own tensors are not written again
                    torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all members, in the main memory of the first; nothing in that of the others."""
        shares = self.gather(
            [
                (name, tensor.shape, tensor.dtype, tensor.device.type)
                for name, tensor in tensors.items()
            ]
        )
        found: dict[str, Tensor] = {}
        for owner, share in enumerate(shares):
            for name, shape, dtype, kind in share:
                mine = (
                    tensors[name].detach()
                    if owner == self.rank
                    else torch.empty(shape, dtype=dtype, device=kind)
                )
                with exchange():
                    dist.broadcast(mine, src=owner, group=self.group)
                if self.rank == 0:
                    found[name] = mine.cpu()
        return found

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with exchange():
            dist.all_gather_object(values, value, group=self.group)
        return values


class ShardedRanks(Ranks):
    """All processes, each of which holds a part of every weight. Gradients are added up within each pass, so all make
    as many passes as the one with the most packs."""

    divided = ("masters", "optimizer", "reference")

    def add(self, tensors: Sequence[Tensor]) -> None:
        pass

    def rounds(self, passes: int) -> int:
        return max(self.gather(passes))

    def norm(self, norm: float) -> float:
        return math.sqrt(sum(part * part for part in self.gather(norm)))

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                found[name] = whole.cpu()
        return found


@contextmanager
def exchange() -> Iterator[None]:
    """What goes on here takes all processes: a failure of torch.distributed is `Unmet`."""
    try:
        yield
    except RuntimeError as error:  # of every backend
        raise Unmet(str(error)) from error


def is_unmet(error: Exception) -> bool:
    """Whether a failure of work in which processes exchange something is one of the exchange."""
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL"))
    return told or isinstance(error, Unmet | dist.DistError)


def buckets(tensors: Sequence[Tensor], size: int = BUCKET) -> list[list[Tensor]]:
    """The tensors in their order, in runs of one dtype and at most `size` bytes; a larger one is alone.

    >>> import torch
    >>> [len(bucket) for bucket in buckets([torch.zeros(2), torch.zeros(1), torch.zeros(3), torch.zeros(9)], 12)]
    [2, 1, 1]
    """
    out: list[list[Tensor]] = []
    held = 0
    for tensor in tensors:
        if not out or out[-1][0].dtype != tensor.dtype or held + tensor.nbytes > size:
            out.append([])
            held = 0
        out[-1].append(tensor)
        held += tensor.nbytes
    return out


# ---- weights from the card of a learner to that of a worker
#
# The two are a group of their own, so that the end of one worker holds up neither the learner nor another worker. They
# exchange beside what both are doing, in threads. Where that fails, `stations.py` sends the weights by Ray's store.


def open_store(host: str) -> tuple[Any, tuple[str, int]]:
    """A store in which pairs find each other, which is to be kept; and its address. It listens on this address only."""
    listener = socket.create_server((host, 0))
    where = host, listener.getsockname()[1]
    return TCPStore(
        *where, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    ), where


class Pair:
    """rank: 0 for the one that sends. name: the same for both and for no other pair of this store. All methods raise
    `Unmet` where the other one does not come, ends, or takes longer than `seconds` for a bucket."""

    def __init__(
        self, where: tuple[str, int], name: str, rank: int, device: torch.device, seconds: float
    ) -> None:
        self._device, self._limit = device, timedelta(seconds=seconds)
        with exchange():
            store = PrefixStore(name, TCPStore(*where, is_master=False, timeout=self._limit))
            store.set(str(rank), "here")
            # NCCL itself would wait without end for one that never comes
            store.wait([str(1 - rank)], self._limit)
            # What is waited for in a stream of its own keeps no work of the engine or the learner.
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            self._group = _group(store, rank, device, self._limit)

    def send(self, data: Tensor) -> None:
        with exchange(), torch.cuda.stream(self._stream):
            for bucket in data.split(BUCKET):
                self._group.send([bucket], 1, 0).wait(self._limit)

    def receive(self, size: int) -> np.ndarray:
        """So many bytes, in main memory: the card has no room for a second copy of the weights."""
        found = torch.empty(size, dtype=torch.uint8)
        with exchange(), torch.cuda.stream(self._stream):
            room = torch.empty(min(size, BUCKET), dtype=torch.uint8, device=self._device)
            for bucket in found.split(BUCKET):
                self._group.recv([room[: len(bucket)]], 0, 0).wait(self._limit)
                bucket.copy_(room[: len(bucket)])
        return found.numpy()

    def close(self) -> None:
        with exchange():
            self._group.abort()


def _group(store: PrefixStore, rank: int, device: torch.device, limit: timedelta) -> Any:
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, 2, limit)
    before = os.environ.get(BLOCKING)
    # read once, here: a failure is raised by `wait`, and does not end the process
    os.environ[BLOCKING] = "1"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    try:
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    finally:
        os.environ.pop(BLOCKING)
        if before is not None:
            os.environ[BLOCKING] = before
