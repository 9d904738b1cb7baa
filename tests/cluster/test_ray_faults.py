"""Faults of a cluster: the run is what it would have been, or ends in a sentence within its limit."""

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_run import assert_like, run
from ray_run import MARKS, SPLIT, TEN, cluster, elsewhere, loopback, on_question, strike_down, whole
from small_run import SMALL, Silent, small_config

from whet import api, build, cli, processes
from whet.cluster.crew import Crew
from whet.cluster.member import FleetMember, SentPrompts, open_buffer
from whet.errors import WhetError
from whet.run import checkpoint_steps, read_metrics

pytestmark = MARKS
__all__ = ["cluster", "whole"]


def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sentence: str, *sets: str, gpus: int = 1) -> None:
        with pytest.raises(WhetError, match=sentence):
            api.run_recipe(
                small_config(*SPLIT, *sets), tmp_path / "run", watcher=Silent(), gpus=gpus
            )
        assert not (tmp_path / "run").exists()

    refused("cluster.min_workers = 3 is more than cluster.workers = 2", "cluster.min_workers=3")
    refused(
        '"colocated" trains in each of its 2 workers: leave out --gpus 2',
        "cluster.placement=colocated",
        gpus=2,
    )
    two = 'gpus_per_worker = 2 is more than a worker can use here: only rollout.engine = "vllm" can divide'
    refused(two, "cluster.gpus_per_worker=2")
    refused("gpus_per_worker = 3 is more", "cluster.gpus_per_worker=3", "rollout.engine=vllm")
    refused(two, "cluster.gpus_per_worker=2", "rollout.engine=vllm", "cluster.placement=colocated")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    refused(r"Ray 2.9.0 is installed, and whet runs with 2.60: pip install 'whet\[ray\]'")


def test_a_worker_with_several_gpus_keeps_its_model_in_main_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM gets their number, and its processes the GPUs; there are none here, so that it is not started."""
    asked: dict[str, int] = {}

    def pick(settings: Any) -> torch.device:
        return torch.device("cpu" if settings.device == "cpu" else "cuda")

    def vllm_build(plan: Any, model: Any, room: Any, cards: int = 1) -> None:
        asked[model.device.type] = cards

    monkeypatch.setattr("whet.model.load.pick_device", pick)
    monkeypatch.setattr(build, "build_vllm", vllm_build)
    settings = small_config(*SPLIT, "rollout.engine=vllm", "cluster.gpus_per_worker=4")
    order = {
        "settings": settings.model_dump_json(),
        "alphabet": "0123",
        "weights": "",
        "role": "worker",
        "size": 2,
    }
    processes.build_member({**order, "later": False}, SentPrompts())
    assert asked == {"cpu": 4}


def test_the_command_says_that_there_is_no_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    sets = [f"--set={item}" for item in (*SMALL, *SPLIT)]
    monkeypatch.setattr(sys, "argv", ["whet", "train", *sets, f"--out={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2 and not (tmp_path / "run").exists()
    assert (
        "cluster.workers = 2, but Ray is not installed: pip install 'whet[ray]'."
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("cluster")
def test_a_placement_that_cannot_be_met_says_what_is_missing(tmp_path: Path) -> None:
    few = "The cluster has room for 5 of 9 workers with 1 CPU each beside 1 learners: it has 6 CPUs and 0 GPUs"
    with pytest.raises(WhetError, match=few):
        run(tmp_path / "run", "cluster.workers=9", "cluster.min_workers=9")


class Watched:
    """Sees the crews of a run, and calls `strike` at the nth question of a name to one kind of them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        name: str,
        nth: int,
        strike: Callable[[Any], None],
    ) -> None:
        self.pids: list[set[int]] = []  # of the workers, whenever a question of this name was asked
        self.workers: Any = None
        self.left = nth

        def seen(crew: Crew, asked: str) -> None:
            if type(crew).__name__ == "Workers":
                self.workers = crew
            if asked == name and type(crew).__name__ == kind:
                if self.workers is not None:
                    self.pids.append({hand.dialled.pid for hand in self.workers.hands})
                self.left -= 1
                if not self.left:
                    strike(crew)

        on_question(monkeypatch, seen)


def kill_first(crew: Any) -> None:
    threading.Timer(0.02, strike_down, [crew.hands[0].dialled.pid]).start()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_lost_learner_comes_back_and_workers_stay(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed while it packs weights; in other instants by the test of chaos."""
    watched = Watched(monkeypatch, "Crew", "pack_up", 5, kill_first)
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray", counters=False)
    assert watched.left < 0 and len(set(map(frozenset, watched.pids))) == 1, (
        "the same workers from first to last"
    )
    assert sum("goes on from its last checkpoint" in line for line in said.messages) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_learner_of_two_and_a_worker_are_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that comes back gets weights that the new learner has never packed."""

    def strike(crew: Any) -> None:
        kill_first(crew)
        kill_first(watched.workers)

    run(tmp_path / "one", "save.every=1")
    watched = Watched(monkeypatch, "Crew", "step", 3, strike)
    run(tmp_path / "ray", "save.every=1", *SPLIT, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "ray", counters=False)
    assert watched.left < 0


def told(base: Any) -> Any:
    """Stations to which it is a delivery to be told where weights lie."""

    class Told(base):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            publish = FleetMember.publish

            def published(member: FleetMember, version: int, drafter: Any, where: Any) -> str:
                if where is not None:
                    self.deliver(where)
                return publish(member, version, drafter, None)

            FleetMember.publish = published  # type: ignore[method-assign]

    return Told


def faulty(base: Any, folder: Path, faults: tuple[str, ...]) -> Any:
    """Stations of which the next that gets weights for the second time has the next fault."""

    def due() -> str:
        for fault in faults:
            try:
                (folder / fault).touch(exist_ok=False)
                return fault
            except FileExistsError:
                continue
        return ""

    class Faulty(base):  # type: ignore[misc]
        got = 0

        def deliver(self, parcel: Any) -> None:
            self.got += 1
            fault = due() if self.got == 2 else ""
            if fault == "dies before":
                os._exit(1)
            if fault.startswith("never arrives"):
                time.sleep(3600)
            if fault == "other weights":
                data = open_buffer(parcel.handle, torch.device("cpu")).numpy().copy()
                data[:8] = 7
                parcel = parcel._replace(data=data)
            super().deliver(parcel)
            if fault == "dies after":
                threading.Timer(0.05, os._exit, [1]).start()

    return Faulty


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("shared", [True, False])
def test_a_publish_that_fails_replaces_the_worker(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Weights lie in memory that it can open, or Ray brings them."""
    from whet.cluster import stations

    # Weights never arrive at both: a run may end before one worker that waits for them is given up.
    faults = ("dies before", "other weights", "never arrives", "never arrives, too", "dies after")
    base = told(stations.Station) if shared else elsewhere(stations.Station)
    monkeypatch.setattr(stations.Stations, "actor", faulty(base, tmp_path, faults))
    said = run(tmp_path / "ray", *TEN, *SPLIT, "cluster.timeout_s=12")
    assert all((tmp_path / fault).exists() for fault in faults)
    assert_like(whole, tmp_path / "ray", counters=False)
    text = "\n".join(said.messages)
    for sentence in (
        "was lost",  # seen by Ray or by the channel, whichever is first
        "holds other weights than the learner after version",
        " of the weights within 12 s" if shared else "did not get the weights within 12 s",
    ):
        assert sentence in text, text


def torn(base: Any, folder: Path, faults: tuple[str, ...]) -> Any:
    """Stations of which the next that goes to exchange weights for the third time has the next fault."""

    class Torn(base):  # type: ignore[misc]
        crossed = 0

        def cross(self, *what: Any) -> bool:
            self.crossed += 1
            fault = ""
            for name in faults if self.crossed == 3 else ():
                if not fault and name.startswith("learner") == (self._member._make is not None):
                    with contextlib.suppress(FileExistsError):
                        (folder / name).touch(exist_ok=False)
                        fault = name
            if fault.endswith("dies"):
                os._exit(1)
            if fault.endswith("hangs"):
                time.sleep(3600)
            return not fault.endswith("fails") and super().cross(*what)

    return Torn


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "faults",
    [("worker dies", "worker fails"), ("worker hangs", "learner hangs"), ("learner fails",)],
)
def test_weights_that_do_not_get_from_card_to_card_hold_nobody_up(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...]
) -> None:
    """A worker that dies is replaced; where the exchange fails or hangs, Ray's store carries the weights instead."""
    from whet.cluster import stations

    cross = stations.Stations.cross

    def crossed(self: Any, source: Any, worker: Any, *what: Any) -> list[Any]:
        self.cards = True
        return cross(self, source, worker, *what)

    monkeypatch.setattr(stations.Stations, "cross", crossed)
    monkeypatch.setattr(
        stations.Stations, "actor", torn(elsewhere(stations.Station), tmp_path, faults)
    )
    # all are waited for
    said = run(tmp_path / "ray", *TEN, *SPLIT, "cluster.timeout_s=8", "cluster.min_workers=2")
    assert all((tmp_path / fault).exists() for fault in faults)
    assert_like(whole, tmp_path / "ray", counters=False)
    text = "\n".join(said.messages)
    assert ("it is started again" in text) == ("worker dies" in faults), text
    assert "Weights go through Ray's store, since NCCL did not carry them." in text, text


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_whose_engine_fails_says_why(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; another has its place at once, and not after `timeout_s`."""
    from whet.cluster import stations

    mark = tmp_path / "failed"

    class Failing(stations.Station):
        def __init__(self, secret: bytes, build: Any, environment: Any) -> None:
            def built(order: Any, prompts: Any) -> Any:
                model, engine, *rest = build(order, prompts)
                step, steps = getattr(engine, "step", None), 0

                def failing() -> None:
                    nonlocal steps
                    steps += 1
                    if steps == 20 and not mark.exists():
                        mark.touch()
                        raise ArithmeticError("the engine is broken")
                    step()

                if engine is not None:
                    engine.step = failing
                return model, engine, *rest

            super().__init__(secret, built, environment)

    monkeypatch.setattr(stations.Stations, "actor", Failing)
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray", counters=False)
    (line,) = [text for text in said.messages if "started again" in text]
    assert "was lost: ArithmeticError('the engine is broken'); it is started again." in line


JOIN = """
import os, signal, sys
from whet.cluster.stations import join_cluster
signal.signal(signal.SIGTERM, lambda *given: print("asked to stop"))
try:
    leave = join_cluster(1, sys.argv[1])
except Exception as error:
    sys.exit(str(error))
os.kill(os.getpid(), signal.SIGTERM)
leave()
print("left")
"""


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
def test_a_signal_stays_that_of_the_run_and_no_address_is_waited_for(address: str) -> None:
    with loopback():
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, address], capture_output=True, text=True, timeout=120
        )
    if not address:
        assert joined.stdout.split("\n")[:2] == ["asked to stop", "left"], joined
    else:
        assert joined.returncode == 1 and "Ray does not answer at 127.0.0.1:1: " in joined.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_too_few_workers_end_the_run_after_a_checkpoint(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.cluster import workers

    def strike(crew: Any) -> None:
        monkeypatch.setattr(workers, "START_S", 0.5)  # less than a process takes to start
        kill_first(crew)

    Watched(monkeypatch, "Workers", "publish", 4, strike)
    sets = (*TEN, *SPLIT, "cluster.min_workers=2", "save.every=100")
    few = "cluster.min_workers = 2, and only 1 of 2 workers are left; the run was saved, and --resume goes on"
    with pytest.raises(WhetError, match=few):
        run(tmp_path / "ray", *sets)
    last = int(read_metrics(tmp_path / "ray")[-1]["step"])
    assert 0 < last < 10 and checkpoint_steps(tmp_path / "ray")[-1] == last
    monkeypatch.undo()
    run(tmp_path / "ray", *sets, resume=True)
    assert_like(whole, tmp_path / "ray", counters=False)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_others_go_on_with_what_a_worker_gives_up(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a slow one does. It rests, and comes back."""
    from whet.cluster import workers

    monkeypatch.setattr(workers, "REST", 2)
    listen, given, asked = workers.Workers.listen, list[int](), set[tuple[int, int]]()

    def listened(crew: Any, timeout: float) -> None:
        if crew.version == 3 and crew.owing() and not given:
            crew.hands[0].pace, crew.hands[1].pace = (99.0, 1.0, 1.0), (99.0, 0.1, 0.1)
        listen(crew, timeout)
        given.extend(crew._handing)

    def told(crew: Any, number: int, name: str, *args: Any) -> None:
        if name == "ask":
            asked.add((crew.version, number))
        tell(crew, number, name, *args)

    tell = workers.Workers.tell
    monkeypatch.setattr(workers.Workers, "listen", listened)
    monkeypatch.setattr(workers.Workers, "tell", told)
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert any(
        "takes 10 times as long as the others: the others go on with what it has" in x
        for x in said.messages
    )
    assert (4, 0) not in asked and (9, 0) in asked and set(given) == {0}
    assert_like(whole, tmp_path / "ray", counters=False)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_is_told_to_go_hands_over(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(crew: Any) -> None:
        strike_down(crew.hands[0].dialled.pid, signal.SIGTERM)

    watched = Watched(monkeypatch, "Workers", "publish", 4, strike)
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray", counters=False)
    assert watched.left < 0
    assert "Worker 0 of 2 has to leave: the others go on with what it has." in said.messages


def test_a_kit_tells_model_folders_apart(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(200_000))
    found = [processes.kit(str(tmp_path / "model"), str(tmp_path))]
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(199_999) + b"1")
    found.append(processes.kit(str(tmp_path / "model"), str(tmp_path)))
    (tmp_path / "config.toml").write_text("steps = 3")
    found.append(processes.kit(str(tmp_path / "away"), str(tmp_path)))
    name = f"model folder {tmp_path / 'model'}"
    assert (
        found[0].keys() == found[1].keys() == {"Python", "Ray", "whet", name}
        and found[0][name] != found[1][name]
    )
    assert found[2].keys() == {"Python", "Ray", "whet", f"run folder {tmp_path}"}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_node_with_another_whet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = processes.kit
    monkeypatch.setattr(processes, "kit", lambda *given: {**kit(*given), "whet": "0.0.9"})
    other = r"Node 127.0.0.1: its whet is \S+ \(\w+\), and the driver's is 0.0.9; all nodes need the same"
    with pytest.raises(WhetError, match=other):
        run(tmp_path / "ray", *SPLIT)
    monkeypatch.setattr(
        processes, "kit", lambda *given: {**kit(*given), "model folder /here": "1a"}
    )
    with pytest.raises(
        WhetError,
        match=r"Node 127.0.0.1: its model folder /here is missing, and the driver's is 1a",
    ):
        run(tmp_path / "again", *SPLIT)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_with_another_whet_is_left_out(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(crew: Any) -> None:
        crew.order = {**crew.order, "alike": {"whet": "0.0.9"}}
        kill_first(crew)

    class Patient(Silent):
        def update(self, metrics: dict[str, float], progress: float) -> None:
            super().update(metrics, progress)
            until = time.monotonic() + 600
            while metrics["step"] == 8 and not any("left out" in line for line in self.messages):
                assert time.monotonic() < until
                watched.workers.listen(0.2)

    watched = Watched(monkeypatch, "Workers", "publish", 4, strike)
    said = run(tmp_path / "ray", *TEN, *SPLIT, silent=Patient())
    assert (
        sum("0 of 2 is left out. Node 127.0.0.1: its whet is" in line for line in said.messages)
        == 1
    )
    assert_like(whole, tmp_path / "ray", counters=False)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_stream_goes_on_beside_a_slow_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """One of three workers has a tenth of its time. How long steps take is recorded, not asserted."""
    over, seconds = threading.Event(), dict[str, float]()

    def slow_down(crew: Any) -> None:
        pid = crew.hands[0].dialled.pid

        def work() -> None:
            while not over.wait(0.02):
                strike_down(pid, signal.SIGSTOP)
                over.wait(0.18)
                strike_down(pid, signal.SIGCONT)

        threading.Thread(target=work, daemon=True).start()

    sets = ("steps=12", "rollout.mode=stream", "curriculum.max_age=2", "cluster.workers=3")
    for name, nth in (("alike", 10**9), ("one slow", 1)):
        with monkeypatch.context() as patch:
            Watched(patch, "Workers", "publish", nth, slow_down)
            run(tmp_path / name, *sets)
        over.set()
        rows = read_metrics(tmp_path / name)
        seconds[name] = (rows[-1]["time_s"] - rows[3]["time_s"]) / (len(rows) - 4)
        over.clear()
    assert len(read_metrics(tmp_path / "one slow")) == 13
    record_property("seconds a step", seconds)
