"""Processes that are killed, that hang or that go astray: the run is what it would have been, or ends in a sentence."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_run import assert_like, run

from whet.cluster.crew import Crew

WARM = ("warm_start.steps=4", "warm_start.batch=5")
SETS = ("steps=6", "save.every=2", "curriculum.name=speed", "curriculum.speed.n_init=2")


class Reaper:
    """Kills a process a little after chosen questions of the driver, counted from the beginning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: dict[int, tuple[int, float]]) -> None:
        self.when, self.asked, self.pids, self.names = when, 0, list[int](), list[str]()
        self.timers: list[threading.Timer] = []
        ask, tell, start = Crew._ask, Crew.tell, Crew._start

        def counted(crew: Crew, numbers: Any, name: str, *args: Any, **more: Any) -> Any:
            self.strike(crew, name)
            return ask(crew, numbers, name, *args, **more)

        def told(crew: Crew, number: int, name: str, *args: Any) -> None:
            self.strike(crew, name)
            tell(crew, number, name, *args)

        def started(crew: Crew, number: int) -> Any:
            hand = start(crew, number)
            self.pids.append(hand.process.pid)
            return hand

        for name, changed in (("_ask", counted), ("tell", told), ("_start", started)):
            monkeypatch.setattr(Crew, name, changed)

    def strike(self, crew: Crew, name: str) -> None:
        self.asked += 1
        if (chosen := self.when.pop(self.asked, None)) is not None:
            number, delay = chosen
            pid = crew.hands[number].process.pid
            self.names.append(name)
            self.timers.append(threading.Timer(delay, kill, [pid]))
            self.timers[-1].start()

    def finish(self) -> None:
        for timer in self.timers:
            timer.join()
        assert not [pid for pid in self.pids if alive(pid)], "nothing is left running"


def kill(pid: int) -> None:
    if alive(pid):
        os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, *SETS, *WARM)
    yield folder


def test_a_process_that_is_killed_changes_no_number(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the warm start, where all begin again; while rollouts are written; and in a step."""
    reaper = Reaper(monkeypatch, {5: (1, 0.0), 45: (1, 0.01), 70: (0, 0.005)})
    silent = run(tmp_path / "run", *SETS, *WARM, gpus=2)
    reaper.finish()
    assert len(reaper.names) == 3 and len(reaper.pids) > 4
    assert sum("killed by signal 9; it is started again" in message for message in silent.messages) == 3
    assert_like(whole, tmp_path / "run", counters=False)
