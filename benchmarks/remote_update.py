"""Seconds that one update of a curriculum takes over HTTP: python benchmarks/remote_update.py [--out FILE]

64 groups of 16 rollouts, 100,000 prompts; server and client are two processes on one core. An update is emit, plan,
observe (1,024 rollouts), emit and updated, by `RemoteCurriculum`; generation takes no time. The aim is 0.2 seconds.
`cpu_s` is the processor time of both processes per update (Linux), which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from whet import config
from whet.adapters.client import RemoteCurriculum
from whet.adapters.serve import CurriculumServer, Service
from whet.curriculum.build import Facts, build_curriculum
from whet.testing.simulator import Simulator, World
from whet.types import Clock, Report, Sampling

WORLD = World(prompts=100_000, pass_rates=(0.3, 0.5, 0.7), groups=64)


def serve(name: str, folder: str, port: multiprocessing.Queue) -> None:
    count = WORLD.prompts
    facts = Facts(ids=WORLD.ids, characters=range(count), tasks=["t"] * count, levels=[1.0] * count)
    settings = config.CurriculumSettings(name=name, rollouts=16, groups=64)

    def make() -> object:
        return build_curriculum(settings, facts=facts, sampling=Sampling(max_tokens=1024), seed=0)

    server = CurriculumServer(Service(make, Path(folder)))
    port.put(server.url)
    server.serve_forever()


def cpu_of(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, updates: int) -> dict[str, float | int]:
    """Wall-clock seconds of each update, of which the simulator's are left out."""
    queue: multiprocessing.Queue = multiprocessing.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.Process(target=serve, args=(name, folder, queue))
        process.start()
        remote, simulator, seconds = RemoteCurriculum(queue.get()), Simulator(WORLD, sealed=False), []
        cpu = -cpu_of(process.pid or 0)
        for step in range(updates):
            spent, rollouts = 0.0, []

            def clock(step: int) -> Clock:
                return Clock(step=step, version=step, groups=64, free=None, tokens=0, progress=0.0)

            while True:
                began, used = time.perf_counter(), time.process_time()
                if rollouts:
                    remote.observe(rollouts)
                batch = remote.emit(clock(step))
                requests = remote.plan(clock(step)) if batch is None else []
                if batch is not None:
                    remote.updated(clock(step + 1), Report(metrics={}))
                spent, cpu = spent + time.perf_counter() - began, cpu + time.process_time() - used
                if batch is not None:
                    break
                simulator.submit(requests)
                rollouts = []
                while simulator._running:
                    rollouts += simulator.collect()
            simulator.update(step + 1)
            seconds.append(spent)
        remote.close()
        cpu += cpu_of(process.pid or 0)
        process.terminate()
        process.join()
    wall = {"median_s": round(statistics.median(seconds), 4), "slowest_s": round(max(seconds), 4)}
    return {"updates": updates, **wall, "cpu_s": round(cpu / updates, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/remote_update.json"))
    parser.add_argument("--updates", type=int, default=20)
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core for both processes
    found = {name: measure(name, given.updates) for name in ("uniform", "speed", "cures")}
    about = {"prompts": 100_000, "groups": 64, "rollouts": 16, "cores": 1, "machine": platform.machine()}
    result = {**about, "python": platform.python_version(), "curricula": found}
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
