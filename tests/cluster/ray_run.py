"""What the tests of Ray share: a cluster of this machine, a run to compare with, and faults at chosen questions."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_run import run

MARKS = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-ray"
    ),
    pytest.mark.filterwarnings("ignore:larger groups weigh more"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TEN = ("steps=10", "warm_start.steps=3", "warm_start.batch=5")
SPLIT = ("cluster.workers=2",)


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Ray as whet starts it, which nothing but this machine can reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One cluster for all tests of a file."""
    with loopback():
        from whet.cluster.stations import join_cluster

        leave = join_cluster(6)
        yield
        leave()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, *TEN)
    return folder


def on_question(monkeypatch: pytest.MonkeyPatch, seen: Callable[[Any, str], None]) -> None:
    """Calls `seen` with the crew and the name of each question of a driver, before it is asked."""
    from whet.cluster.crew import Crew

    tell, ask = Crew.tell, Crew._ask

    def told(crew: Any, number: int, name: str, *args: Any) -> None:
        seen(crew, name)
        tell(crew, number, name, *args)

    def asked(crew: Any, numbers: Any, name: str, *args: Any, **named: Any) -> Any:
        seen(crew, name)
        return ask(crew, numbers, name, *args, **named)

    monkeypatch.setattr(Crew, "tell", told)
    monkeypatch.setattr(Crew, "_ask", asked)


def elsewhere(base: Any) -> Any:
    """Stations each of which takes itself for another machine."""

    class Elsewhere(base):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            from whet.cluster import member

            super().__init__(*given)
            member.place_of = lambda device: str(os.getpid())

    return Elsewhere


class Reaper:
    """Sends a signal to a worker a little after chosen questions of the driver to its workers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, when: dict[int, tuple[int, signal.Signals]]
    ) -> None:
        from whet.cluster.workers import Workers

        self.asked, self.struck = 0, 0

        def seen(crew: Any, name: str) -> None:
            self.asked += isinstance(crew, Workers) and len(crew.present) > 0
            if isinstance(crew, Workers) and (chosen := when.pop(self.asked, None)) is not None:
                number, sign = chosen
                pid = crew.hands[crew.present[number % len(crew.present)]].dialled.pid
                self.struck += 1
                threading.Timer(0.02, strike_down, [pid, sign]).start()

        on_question(monkeypatch, seen)


def strike_down(pid: int, sign: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):  # two may hit one
        os.kill(pid, sign)
