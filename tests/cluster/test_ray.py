"""Workers and learners as Ray actors: real ones, on this machine. A run is the same as by one process."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from fleet_run import assert_like, run, weights_of
from ray_run import MARKS, SPLIT, TEN, Reaper, cluster, elsewhere, on_question, strike_down, whole
from small_run import Stop, model_folder

pytestmark = [*MARKS, pytest.mark.usefixtures("cluster")]
__all__ = ["cluster", "whole"]


def test_two_workers_and_a_learner_train_as_one_process(tmp_path: Path, whole: Path) -> None:
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray")
    assert any("2 actors that decode and 1 that learn" in line for line in said.messages)


GPU = (
    "model.device=cuda",
    "model.dtype=bfloat16",
    "model.hidden=512",
    "model.layers=6",
    "model.heads=8",
)
HALF = "cluster.gpus_per_worker=0.5"


@pytest.mark.parametrize("sets", [(), pytest.param(GPU, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def test_weights_stay_where_they_are_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    """A worker beside the learner reads its memory; on a GPU both have half of the card."""
    from whet.cluster.stations import Stations
    from whet.cluster.workers import Workers

    told, tell = list[Any](), Workers.tell

    def seen(self: Any, number: int, name: str, *args: Any) -> None:
        if name == "publish":
            told.append(args[-1].handle)
        tell(self, number, name, *args)

    monkeypatch.setattr(Workers, "tell", seen)
    monkeypatch.setattr(Stations, "fetch", None)  # no bytes are asked for
    said = run(tmp_path / "ray", "cluster.workers=1", HALF, *sets)
    assert len(told) > 3 and len(set(told)) == 1, "one buffer, used again and again"
    assert not any("started again" in line for line in said.messages), said.messages


def test_weights_go_through_the_store_to_a_worker_elsewhere(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.cluster import stations

    monkeypatch.setattr(stations.Stations, "actor", elsewhere(stations.Station))
    run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray")


def test_weights_go_from_card_to_card(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main memory stands in for two cards, and gloo for NCCL."""
    from whet.cluster import stations

    asked, cross = list[int](), stations.Stations.cross

    def crossed(self: Any, source: Any, worker: Any, *what: Any) -> list[Any]:
        self.cards = True
        asked.append(worker.number)
        return cross(self, source, worker, *what)

    monkeypatch.setattr(stations.Stations, "cross", crossed)
    monkeypatch.setattr(stations.Stations, "fetch", None)  # nothing goes through the store
    monkeypatch.setattr(stations.Stations, "actor", elsewhere(stations.Station))
    run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray")
    assert asked.count(0) == asked.count(1) >= 10


@pytest.mark.slow
def test_adapters_travel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from whet.cluster.member import ALIGN
    from whet.cluster.stations import Station, Stations

    fetch, travelled = Stations.fetch, list[tuple[tuple[str, ...], int]]()

    def fetched(self: Stations, source: Any, seconds: float) -> Any:
        parcel = fetch(self, source, seconds)  # through the store, where it can be weighed
        found = ray.get(parcel)
        travelled.append((found.names, found.data.nbytes))
        return parcel

    monkeypatch.setattr(Stations, "fetch", fetched)
    monkeypatch.setattr(Stations, "actor", elsewhere(Station))
    sets = (
        f"model.name={model_folder(tmp_path / 'base')}",
        "model.lora.rank=2",
        "learn.kl_coef=0.1",
    )
    run(tmp_path / "one", *sets)
    run(tmp_path / "ray", *sets, *SPLIT)
    assert_like(tmp_path / "one", tmp_path / "ray")
    ((names, size),) = set(travelled)
    assert len(travelled) >= 6 and all("lora_" in name for name in names)
    assert size == sum(-(-w.nbytes // ALIGN) * ALIGN for w in weights_of(tmp_path / "ray").values())


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
def test_killed_workers_change_no_number(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    when = {n: (rng.randrange(2), signal.SIGKILL) for n in rng.sample(range(6, 40), 4)}
    reaper = Reaper(monkeypatch, when)
    said = run(tmp_path / "ray", *TEN, *SPLIT)
    assert_like(whole, tmp_path / "ray", counters=False)
    assert reaper.struck == 4
    assert sum("started again" in line for line in said.messages) >= 3  # two may hit one


@pytest.mark.slow
def test_a_checkpoint_asks_those_that_have_come_back(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only worker that is left dies when it is asked for its state; the other one is there again by then."""
    from whet.cluster.workers import Workers

    struck, ready = [], True  # ready: a step was begun since the last blow

    def seen(crew: Any, name: str) -> None:
        nonlocal ready
        ready |= name == "ask"
        if (
            isinstance(crew, Workers)
            and name == "state_dict"
            and ready
            and crew.present == [0, 1][len(struck) :]
        ):
            struck.append(number := crew.present[0])
            ready = False
            strike_down(crew.hands[number].dialled.pid)

    on_question(monkeypatch, seen)
    run(tmp_path / "ray", *TEN, *SPLIT, "save.every=1")
    assert_like(whole, tmp_path / "ray", counters=False)
    assert struck[:2] == [0, 1]


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
