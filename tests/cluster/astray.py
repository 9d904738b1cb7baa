"""The program of a process with a fault, by its name: FAULT MARK HANDLE PARENT. Some faults come once: the file MARK is
made when they do."""

import sys
import time
from pathlib import Path

from whet.cluster.member import FleetMember
from whet.processes import serve_member

update, step = FleetMember.update, FleetMember.step


def once(member: FleetMember) -> bool:
    if member._rank != 1 or mark.exists():
        return False
    mark.touch()
    return True


def other_weights(self, *args):
    report = step(self, *args)
    if once(self):
        next(iter(self._learner.optimizer.live.values())).data.add_(1e-6)
    return report


def missed_update(self, version):
    if version == 2 and once(self):
        return self._learner.version, self._checksum(self._learner.optimizer.live.values())
    return update(self, version)


def hangs(self, *args):
    while once(self):
        time.sleep(10**6)
    return step(self, *args)


def breaks(self, *args):
    if self._rank == 1:
        raise RuntimeError("a kernel went wrong")
    return step(self, *args)


if __name__ == "__main__":
    fault, mark = sys.argv[1], Path(sys.argv[2])
    match fault:
        case "never starts":
            sys.exit("libfabric is missing")
        case "sleeps":
            time.sleep(10**6)
        case "other weights":
            FleetMember.step = other_weights
        case "missed update":
            FleetMember.update = missed_update
        case "hangs":
            FleetMember.step = hangs
        case "breaks":
            FleetMember.step = breaks
    serve_member(int(sys.argv[3]), int(sys.argv[4]))
