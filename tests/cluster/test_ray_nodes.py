"""Nodes that come and go: a real cluster whose second raylet runs on this machine, too."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet_run import assert_like, run
from ray_run import MARKS, TEN, loopback, whole
from small_run import Silent

from whet.cluster.member import Parcel
from whet.errors import WhetError

pytestmark = [*MARKS, pytest.mark.slow]
__all__ = ["whole"]


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A cluster with room for a learner and one worker."""
    with loopback():
        import ray
        from ray.cluster_utils import Cluster

        quiet = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
        there = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "node_ip_address": "127.0.0.1", **quiet},
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", there.address)
            yield there
        ray.shutdown()
        there.shutdown()


class Guest(Silent):
    """Adds a node after the second step, waits until its worker is there, and takes it away after the sixth. drain: as
    `ray drain-node` does, and waits until it is gone."""

    workers: Any = None
    node: Any = None

    def __init__(self, nodes: Any, drain: bool = False) -> None:
        super().__init__()
        self.nodes, self.drain = nodes, drain

    def update(self, metrics: dict[str, float], progress: float) -> None:
        super().update(metrics, progress)
        if metrics["step"] == 2:
            self.node = self.nodes.add_node(num_cpus=1, node_ip_address="127.0.0.1")
            self.listen_until(lambda: len(self.workers.present) == 2)
        if metrics["step"] == 6 and not self.drain:
            self.nodes.remove_node(self.node, allow_graceful=False)
            # its process ends a while after the node
            self.listen_until(lambda: self.workers.present == [0])
        elif metrics["step"] == 6:
            import ray
            from ray.core.generated import autoscaler_pb2

            reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            client = ray._raylet.GcsClient(address=self.nodes.address)
            assert client.drain_node(self.node.node_id, reason, "spot", 0)[0]
            self.listen_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)

    def listen_until(self, come: Callable[[], bool]) -> None:
        until = time.monotonic() + 600
        while not come():
            assert time.monotonic() < until
            self.workers.listen(0.2)


def test_a_node_that_joins_is_used_and_may_leave(
    tmp_path: Path, whole: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.cluster.workers import Workers

    asked: dict[int, set[int]] = {}  # by the number of workers present, those that got requests
    tell, guest = Workers.tell, Guest(nodes)

    def told(crew: Any, number: int, name: str, *args: Any) -> None:
        guest.workers = crew
        if name == "ask":
            asked.setdefault(len(crew.present), set()).add(number)
        tell(crew, number, name, *args)

    monkeypatch.setattr(Workers, "tell", told)
    said = run(tmp_path / "ray", *TEN, "cluster.workers=2", silent=guest)
    assert asked == {1: {0}, 2: {0, 1}}, "it is used as soon as it is there"
    assert any("1 actors that decode" in line for line in said.messages), (
        "the run does not wait for it"
    )
    assert any("Worker 1 of 2" in line and "it is started again" in line for line in said.messages)
    assert_like(whole, tmp_path / "ray", counters=False)


def test_a_drained_node_is_let_go(
    tmp_path: Path, whole: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lets a node go once no actor is left on it; the run gives others what its worker has."""
    from whet.cluster.workers import Workers

    guest, admit = Guest(nodes, drain=True), Workers._admit

    def admitted(crew: Any, *args: Any, **named: Any) -> None:
        guest.workers = crew
        admit(crew, *args, **named)

    monkeypatch.setattr(Workers, "_admit", admitted)
    said = run(tmp_path / "ray", *TEN, "cluster.workers=2", silent=guest)
    assert "Worker 1 of 2 has to leave: the others go on with what it has." in said.messages
    assert not any("started again" in line for line in said.messages)
    assert_like(whole, tmp_path / "ray", counters=False)


def test_judges_run_on_another_node_and_outlive_it(
    tmp_path: Path, whole: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.cluster import stations

    strategy, chosen = stations.NodeAffinitySchedulingStrategy, list[str]()

    def noted(node: str, soft: bool) -> Any:
        chosen.append(node)
        return strategy(node, soft=soft)

    monkeypatch.setattr(stations, "NodeAffinitySchedulingStrategy", noted)
    guest = Guest(nodes)
    guest.node = nodes.add_node(num_cpus=1, node_ip_address="127.0.0.1")
    guest.workers = SimpleNamespace(present=range(2))  # none is waited for
    monkeypatch.setattr(nodes, "add_node", lambda **how: guest.node)
    run(tmp_path / "ray", *TEN, "cluster.workers=2", "judge.where=workers", silent=guest)
    assert chosen == [guest.node.node_id]
    assert_like(whole, tmp_path / "ray", counters=False)


def test_room_is_waited_for_within_a_limit(tmp_path: Path, nodes: Any) -> None:
    silent = Silent()
    with pytest.raises(
        WhetError, match="room for 1 of 2 workers with 1 CPU each beside 1 learners: it has 2 CPUs"
    ):
        run(
            tmp_path / "ray",
            "cluster.workers=2",
            "cluster.min_workers=2",
            "cluster.timeout_s=2",
            silent=silent,
        )
    assert any("The run waits for more, 2 s at most" in line for line in silent.messages)


def test_a_full_object_store_ends_in_a_sentence() -> None:
    """A store of 80 MiB, a disk that counts as full, and weights of 200 MiB."""
    with loopback():
        import ray

        from whet.cluster.stations import ActorHand, Station, Stations

        class Laden(Station):
            def __init__(self) -> None:
                parcel = Parcel(("weight",), "", None, torch.zeros(200 * 2**20, dtype=torch.uint8))
                self._member = SimpleNamespace(parcel=parcel)  # type: ignore[assignment]

            def where(self) -> Any:
                return "127.0.0.1", 0, 0, ""

        ray.init(
            num_cpus=1,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=80 * 2**20,
            _system_config={"local_fs_capacity_threshold": 0.0001},
            log_to_driver=False,
        )
        try:
            hand = ActorHand(0, "Process 0 of 1", ray.remote(Laden).remote(), b"")
            with pytest.raises(
                WhetError, match=r"has no room for the weights, nor has its disk.*--resume goes on"
            ):
                post = Stations(None, {}, {"CPU": 1.0})  # type: ignore[arg-type]
                post.apart = {0}
                post.send(post.fetch(hand, 60.0), hand)
            hand.stop()
        finally:
            ray.shutdown()


def test_the_launcher_file_is_one_that_ray_takes() -> None:
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    path = Path(__file__).parents[2] / "docs" / "cluster" / "launcher.yaml"
    validate_config(prepare_config(yaml.safe_load(path.read_text())))


def test_the_kuberay_file_is_one_that_rays_autoscaler_reads() -> None:
    """What the operator hands to Ray. Ray's wheel does not hold the schema of the rest."""
    import yaml
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )
    from ray.autoscaler._private.util import prepare_config, validate_config

    path = Path(__file__).parents[2] / "docs" / "cluster" / "kuberay.yaml"
    resource = yaml.safe_load(path.read_text())
    resource["metadata"]["namespace"] = "default"  # as Kubernetes does
    found = _derive_autoscaling_config_from_ray_cr(resource)
    validate_config(prepare_config(found))
    assert {
        name: kind["resources"]["GPU"] for name, kind in found["available_node_types"].items()
    } == {
        found["head_node_type"]: 1,
        "rollouts": 1,
    }


def test_the_slurm_file_is_one_that_bash_reads() -> None:
    path = Path(__file__).parents[2] / "docs" / "cluster" / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
