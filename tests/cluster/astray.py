"""The program of a process with a fault, by its name: FAULT MARK HANDLE PARENT. Some faults come once: the file MARK is
made when they do."""

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    if sys.argv[1] == "never starts":
        sys.exit("libfabric is missing")
    if sys.argv[1] == "sleeps":
        time.sleep(10**6)

import torch

from whet.cluster.member import FleetMember
from whet.draft.training import AdaptiveDrafter, DrafterTrainer
from whet.processes import serve_member

begin, update, step = FleetMember.begin, FleetMember.update, FleetMember.step
train = DrafterTrainer._update


def once(member: FleetMember) -> bool:
    if member._rank != 1 or mark.exists():
        return False
    mark.touch()
    return True


def other_recipe(self, order):
    settings = json.loads(order["settings"])
    settings["learn"]["lr"] *= 1.0 + order["rank"]
    return begin(self, {**order, "settings": json.dumps(settings)})


def shares_memory(self, order):
    torch.zeros(10**6).share_memory_()
    return begin(self, order)


def maps_memory(self, order):
    """As NCCL does, which finds no space only when it writes."""
    handle = os.open("/dev/shm/mapped", os.O_RDWR | os.O_CREAT)
    os.ftruncate(handle, 10**6)
    mmap.mmap(handle, 10**6).write(bytes(10**6))


def other_weights(self, *args):
    report = step(self, *args)
    if once(self):
        next(iter(self._learner.optimizer.live.values())).data.add_(1e-6)
    return report


def missed_update(self, version, drafter):
    if version == 2 and once(self):
        return self._learner.version, self._checksum(self._learner.optimizer.live.values())
    return update(self, version, drafter)


def hangs(self, *args):
    while once(self):
        time.sleep(10**6)
    return step(self, *args)


def breaks(self, *args):
    if self._rank == 1:
        raise RuntimeError("a kernel went wrong")
    return step(self, *args)


def dies_in_training(self, pairs):
    found = train(self, pairs)
    if self.updates == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def cannot_train(self):
    raise ZeroDivisionError("of a lesson")


if __name__ == "__main__":
    fault, mark = sys.argv[1], Path(sys.argv[2])
    match fault:
        case "other recipe":
            FleetMember.begin = other_recipe
        case "shares memory":
            FleetMember.begin = shares_memory
        case "maps memory":
            FleetMember.begin = maps_memory
        case "other weights":
            FleetMember.step = other_weights
        case "missed update":
            FleetMember.update = missed_update
        case "hangs":
            FleetMember.step = hangs
        case "dies while it trains":
            DrafterTrainer._update = dies_in_training
        case "cannot train":
            AdaptiveDrafter.practise = cannot_train
        case "breaks":
            FleetMember.step = breaks
    serve_member(int(sys.argv[3]), int(sys.argv[4]))
