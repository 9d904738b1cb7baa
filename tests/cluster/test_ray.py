"""Workers and learners as Ray actors: real ones, on this machine. A run is the same as by one process."""

import contextlib
import importlib.util
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_run import assert_like, run
from small_run import Stop

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore:larger groups weigh more"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
WARM = ("warm_start.steps=3", "warm_start.batch=5")
TEN = ("steps=10", *WARM)
SPLIT = ("cluster.workers=2",)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all tests of the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        from whet.cluster.stations import join_cluster

        leave = join_cluster(6)
        yield
        leave()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, *TEN)
    return folder


class Reaper:
    """Sends a signal to a worker a little after chosen questions of the driver to its workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: dict[int, tuple[int, signal.Signals]]) -> None:
        from whet.cluster.crew import Crew
        from whet.cluster.workers import Workers

        self.asked, self.struck = 0, 0
        tell, ask = Crew.tell, Crew._ask

        def strike(crew: Any) -> None:
            self.asked += isinstance(crew, Workers) and len(crew.present) > 0
            if isinstance(crew, Workers) and (chosen := when.pop(self.asked, None)) is not None:
                number, sign = chosen
                pid = crew.hands[crew.present[number % len(crew.present)]].dialled.pid
                self.struck += 1
                threading.Timer(0.02, strike_down, [pid, sign]).start()

        def told(crew: Any, *args: Any) -> None:
            strike(crew)
            tell(crew, *args)

        def asked(crew: Any, *args: Any, **named: Any) -> Any:
            strike(crew)
            return ask(crew, *args, **named)

        monkeypatch.setattr(Crew, "tell", told)
        monkeypatch.setattr(Crew, "_ask", asked)


def strike_down(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # two may hit one
        os.kill(pid, sign)


def test_two_workers_and_a_learner_train_as_one_process(tmp_path: Path, whole: Path) -> None:
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray")
    assert any("2 actors that decode and 1 that learn" in line for line in said.messages)


@pytest.mark.slow
def test_two_workers_that_learn_train_as_one_process(tmp_path: Path, whole: Path) -> None:
    run(tmp_path / "ray", *TEN, *SPLIT, "cluster.placement=colocated")
    assert_like(whole, tmp_path / "ray")


@pytest.mark.slow
def test_two_learners_apart_from_three_workers(tmp_path: Path) -> None:
    sets = ("curriculum.name=speed", "curriculum.speed.n_init=2", "learn.kl_coef=0.1")
    run(tmp_path / "one", *sets)
    run(tmp_path / "ray", *sets, "cluster.workers=3", gpus=2)
    assert_like(tmp_path / "one", tmp_path / "ray")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_workers_change_no_number(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    when = {n: (rng.randrange(2), signal.SIGKILL) for n in rng.sample(range(6, 40), 4)}
    reaper = Reaper(monkeypatch, when)
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray", counters=False)
    assert reaper.struck == 4
    assert sum("started again" in line for line in said.messages) >= 3  # two may hit one


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reaper = Reaper(monkeypatch, {9: (1, signal.SIGSTOP)})
    said = run(tmp_path / "ray", *TEN, *SPLIT, "cluster.timeout_s=12")
    assert_like(whole, tmp_path / "ray", counters=False)
    assert reaper.struck == 1 and any("started again" in line for line in said.messages)


@pytest.mark.slow
def test_a_run_goes_on_with_other_workers(tmp_path: Path, whole: Path) -> None:
    stop = Stop(5)
    run(tmp_path / "ray", *TEN, *SPLIT, silent=stop)
    run(tmp_path / "ray", *TEN, *SPLIT, resume=True)
    assert_like(whole, tmp_path / "ray", counters=False)


def test_nothing_listens_to_the_network() -> None:
    import ray

    assert ray.util.get_node_ip_address() == "127.0.0.1"
