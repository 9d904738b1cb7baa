"""Rollout workers without Ray and without processes: what they are told is noted, and answered at once."""

import pickle
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_run import small_config

from whet import processes
from whet.cluster import crew
from whet.cluster.crew import Hand
from whet.cluster.fleet import Fleet
from whet.cluster.workers import Workers
from whet.rollout.flights import FlightEngine
from whet.rollout.scheduler import Queue
from whet.rollout.vllm import VllmEngine
from whet.types import Request, Sampling

ORDER = {"later": False, "weights": ""}
FLIGHTS: dict[str, Any] = {
    "encode": list,
    "decode": str,
    "seed": 0,
    "slots": 4,
    "context": 8,
    "dtype": np.dtype(np.float32),
}


class Line:
    """The channel of a worker that gives the answers it was made with. A value of None is not answered."""

    reached = 0.0

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers, self.closed = answers, False
        self.asked: list[str] = []
        self.came: deque[Any] = deque()

    def send(self, packed: bytes) -> None:
        serial, name, _ = pickle.loads(packed[8:])
        self.asked.append(name)
        if (value := self.answers.get(name)) is not None:
            self.came.append(("done", serial, value))

    def ready(self) -> bool:
        return True

    def take(self) -> Any:
        return self.came.popleft() if self.came else None

    def close(self) -> None:
        self.closed = True


class Worker(Hand):
    channel: Any

    def ended(self) -> str:
        return "was killed"

    def stop(self) -> None:
        self.channel.close()


STATE = {
    "version": 0,
    "arrivals": 0,
    "begun": np.zeros(0, np.int64),
    "flights": [],
    "done": [],
    "draft": None,
    "ids": np.zeros(0, np.int32),
    "log_probs": np.zeros(0, np.float32),
    "versions": np.zeros(0, np.int32),
    "length_sums": np.zeros(2),
    "length_prompts": [],
    "length_means": np.zeros(0),
}
ANSWERS = {
    "begin": ("", ""),
    "publish": "sums",
    "can": frozenset({"stream"}),
    "state_dict": STATE,
    "hand_over": STATE,
    "load_state": True,
    "drop": True,
}


class Carrier:
    """Starts such workers, none of which shares the learner's memory. `delay`: by the number of a worker, how often it
    is looked for weights before they are there."""

    def __init__(self) -> None:
        self.apart: set[int] = set(range(9))
        self.delay: dict[int, int] = {}
        self.answers: dict[str, Any] = dict(ANSWERS)

    def start(self, number: int, name: str) -> Hand:
        return Worker(number, name, Line(self.answers))  # type: ignore[arg-type]

    def places(self, most: int) -> int:
        return most

    def fetch(self, source: Hand, seconds: float) -> Any:
        return "parcel"

    def cross(self, source: Hand, worker: Hand, *what: Any) -> list[Any]:
        return []

    def send(self, parcel: Any, worker: Hand) -> Any:
        return [self.delay.get(worker.number, 0)]

    def look(self, workers: Sequence[Hand]) -> None:
        pass

    def arrived(self, sending: Any, source: Hand, worker: Hand) -> bool:
        sending[0] -= 1
        return sending[0] < 0


class Learners:
    """A crew of one learner, which is there."""

    def __init__(self) -> None:
        self.hands = [Hand(0, "Process 0 of 1", SimpleNamespace())]  # type: ignore[arg-type]
        self.packed = 0

    def first(self, name: str, *args: Any) -> tuple[str, str]:
        assert name == "pack_up"
        self.packed += 1
        return "sums", "where"

    def close(self) -> None:
        pass


@pytest.fixture
def carrier(monkeypatch: pytest.MonkeyPatch) -> Carrier:
    monkeypatch.setattr(crew, "attend", lambda channels, timeout: None)
    monkeypatch.setattr(crew, "LEAVE_S", 0.0)
    return Carrier()


def workers(carrier: Carrier, count: int, least: int = 1) -> Workers:
    learners: Any = Learners()
    return Workers(ORDER, carrier, learners, workers=count, least=least, timeout_s=60.0)


def fleet(made: Workers) -> Fleet:
    return Fleet(made, lambda prompt: [1, 2], slots=4, mode="stream")


def requests(*groups: int) -> list[Request]:
    sampling = Sampling(max_tokens=4)
    return [
        Request(prompt_id=f"p{group}", group_id=group, n=2, sampling=sampling) for group in groups
    ]


def asked(made: Workers) -> list[list[str]]:
    return [hand.channel.asked for hand in made.hands]  # type: ignore[attr-defined]


def test_the_only_worker_comes_back_however_long_its_weights_take(carrier: Carrier) -> None:
    made, said = workers(carrier, 1), list[str]()
    made.prepare()
    made.on_short = said.append
    carrier.delay[0] = 2_000
    made.hands[0].channel.close()
    made.listen(0.0)
    assert made.present == [0] and asked(made) == [["begin", "publish"]]
    assert not said, "the run goes on"


def test_requests_wait_where_all_workers_have_to_leave(carrier: Carrier) -> None:
    made = workers(carrier, 1)
    engine = fleet(made)
    made.hands[0].leaving = True
    made.listen(0.0)
    assert made.present == []
    engine.submit(requests(0))
    assert made.present == [0] and asked(made)[0] == ["begin", "publish", "take_on", "ask"], (
        "another has its place"
    )
    made.hands[0].leaving = True
    made.listen(0.0)
    assert engine.state_dict()["flights"][0]["prompt_id"] == "p0"


def test_a_checkpoint_is_divided_among_those_that_have_the_weights(carrier: Carrier) -> None:
    """One that is slow to get them is not present any more when the state is handed out."""
    made = workers(carrier, 3)
    engine = fleet(made)
    row = {
        "prompt_id": "p",
        "phase": "train",
        "index": 0,
        "tokens": 0,
        "sampling": vars_of(Sampling(max_tokens=4)),
    }
    flights = [{**row, "group_id": group, "arrival": group} for group in range(3)]
    carrier.delay[1] = 10**9
    engine.load_state_dict({**STATE, "flights": flights})
    assert made.present == [0, 2]
    assert {number for number, _ in engine._open.values()} == {0, 2}
    assert ["load_state" in told for told in asked(made)] == [True, False, True]


def vars_of(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}


def test_nothing_is_carried_to_a_worker_that_shares_the_memory(carrier: Carrier) -> None:
    carrier.apart = {1}
    carried, send = list[int](), carrier.send
    carrier.send = lambda parcel, worker: carried.append(worker.number) or send(parcel, worker)  # type: ignore[method-assign]
    made = workers(carrier, 3)
    made.prepare()
    assert asked(made) == [["begin", "publish"]] * 3 and carried == [1]


def test_weights_are_carried_to_a_worker_that_cannot_open_the_memory(carrier: Carrier) -> None:
    carrier.apart = set()
    carrier.answers["publish"] = ""
    send = carrier.send

    def sent(parcel: Any, worker: Hand) -> Any:
        carrier.answers["publish"] = "sums"
        return send(parcel, worker)

    carrier.send = sent  # type: ignore[method-assign]
    made = workers(carrier, 1)
    made.prepare()
    assert (
        asked(made) == [["begin", "publish", "publish"]]
        and carrier.apart == {0}
        and made.present == [0]
    )


def test_a_learner_that_cannot_hand_out_its_weights_is_asked_for_them_again(
    carrier: Carrier,
) -> None:
    """It is lost while a worker that has come waits for them, and another has its place."""
    made = workers(carrier, 1)
    made.prepare()
    first, fetch = made.learners.hands[0], carrier.fetch

    def fetched(source: Hand, seconds: float) -> Any:
        if source is first:
            source.lose("did not hand out its weights")
        return fetch(source, seconds)

    def mend() -> None:
        made.learners.hands[0] = Hand(0, "Process 0 of 1", SimpleNamespace())  # type: ignore[arg-type]

    carrier.fetch, made.learners.mend = fetched, mend  # type: ignore[method-assign]
    made._stale = True
    made.prepare()
    assert made.learners.packed == 3 and made.present == [0]  # type: ignore[attr-defined]
    assert asked(made) == [["begin", "publish", "publish"]]


def rest(made: Workers, number: int) -> None:
    """A worker is found slow."""
    for hand in made.hands:
        hand.pace = (99.0, 0.1, 0.1)
    made.hands[number].pace = (99.0, 1.0, 1.0)
    made.listen(0.0)
    assert number not in made.present


def test_a_worker_that_rests_is_not_asked_for_more_of_its_group(carrier: Carrier) -> None:
    carrier.answers["hand_over"] = None
    made = workers(carrier, 2)
    engine = fleet(made)
    engine.submit(requests(0, 1))
    assert engine._owing() == [0, 1]
    rest(made, 0)
    engine.submit(
        [Request(prompt_id="p0", group_id=0, first_index=2, n=1, sampling=Sampling(max_tokens=4))]
    )
    assert asked(made)[0].count("ask") == 1 and asked(made)[1].count("ask") == 2


def test_a_worker_that_rests_is_woken_where_no_other_is_left(carrier: Carrier) -> None:
    made = workers(carrier, 2)
    engine = fleet(made)
    made.prepare()
    rest(made, 0)
    made.listen(0.0)
    carrier.answers["begin"] = None  # no other can be started
    made.hands[1].channel.close()
    engine.submit(requests(0))
    made.listen(0.0)
    assert made.present == [0] and asked(made)[0][-1] == "ask"


def test_weights_of_a_learner_that_was_replaced_are_sent_again(carrier: Carrier) -> None:
    """They are lost with it, which says nothing of the learner that has its place."""

    def arrived(issue: Any, source: Hand, worker: Hand) -> bool:
        if (worker.number, issue) != (1, 1):
            return True
        if replaced := made.learners.hands[0] is not first:
            source.lose("was lost while it handed out its weights")
        return replaced

    made = workers(carrier, 3)
    first = made.learners.hands[0]
    carrier.send = lambda parcel, worker: made._issue  # type: ignore[method-assign]
    carrier.arrived = arrived  # type: ignore[method-assign]
    made.prepare()
    assert made.present == [0, 2]
    fresh = made.learners.hands[0] = Hand(0, "Process 0 of 2", SimpleNamespace())  # type: ignore[arg-type]
    made.listen(0.0)
    assert not fresh.lost and first.lost and made.learners.packed == 2  # type: ignore[attr-defined]
    assert made.present == [0, 1, 2]


def test_one_that_is_ready_counts_while_another_is_waited_for(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are seen at once: one has built its engine, the other has died while it handed over what it had."""
    made = workers(carrier, 2)
    made.prepare()
    carrier.answers["begin"] = carrier.answers["hand_over"] = None
    rest(made, 0)
    made._again(1)
    made.present = []
    made.hands[1].channel.came.append(("done", made._begun[1], ("", "")))  # type: ignore[attr-defined]
    made.hands[0].channel.close()
    monkeypatch.setattr("whet.cluster.workers.START_S", 2.0)
    made.listen(0.0)
    assert made.present == [1]


def test_a_worker_that_hangs_while_it_starts_is_started_again(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for which the cluster has no room is waited for."""
    made = workers(carrier, 2)
    made.prepare()
    carrier.answers["begin"] = None
    made._again(1)
    made.present = [0]
    hand: Any = made.hands[1]
    monkeypatch.setattr("whet.cluster.workers.START_S", 2.0)
    hand.channel.ready = lambda: False
    hand.since -= 3
    made.listen(0.0)
    assert not hand.lost and made.hands[1] is hand
    # while the driver was busy elsewhere
    hand.channel.ready, hand.channel.reached = lambda: True, time.monotonic()
    made.listen(0.0)
    assert not hand.lost
    hand.channel.reached -= 3
    made.listen(0.0)
    assert hand.lost == "Worker 1 of 2 was not ready within 2 s" and made.hands[1] is not hand


def test_a_long_update_of_the_learner_is_not_held_against_a_worker(carrier: Carrier) -> None:
    """Its weights have come meanwhile, and it has not been asked yet to take them."""
    carrier.delay[1] = 10**9
    made = workers(carrier, 2)
    made.prepare()
    assert made.present == [0]
    (due,) = made._due.values()
    due.since, due.sending[0] = due.since - 61, 0
    carrier.answers["publish"] = None
    made.listen(0.0)
    assert due.asked and not made.hands[1].lost


def test_one_that_has_written_all_may_be_silent(carrier: Carrier) -> None:
    """Also where its last rollouts came while the driver waited for something else, and looks again much later."""
    made = workers(carrier, 2)
    engine = fleet(made)
    engine.submit(requests(0, 1))
    made.listen(0.0)
    made.hands[0].since = made.hands[1].since = before = made.hands[0].since - 50
    engine._load[0] = 0
    made._hear(0.0)
    for number in (0, 1):
        made.tell(number, "take_back")
    assert made.hands[0].since > before and made.hands[1].since == before, (
        "a question is a new beginning for one alone"
    )


def test_a_worker_that_was_slow_is_found_sooner(carrier: Carrier) -> None:
    made = workers(carrier, 2)
    made.prepare()
    for times in range(2):
        for hand in made.hands:
            hand.pace = (99.0, 0.1, 0.1)
        made.hands[0].pace = (4.0, 1.0, 1.0)
        made.listen(0.0)
        assert made.present == [[0, 1], [1]][times]
        made.hands[0].pace = (11.0, 1.0, 1.0)
        made.listen(0.0)
        made.listen(0.0)
        assert made.present == [1]
        made._resting.clear()
        made.present = [0, 1]


def test_a_worker_that_rests_can_leave(carrier: Carrier) -> None:
    made = workers(carrier, 2)
    made.prepare()
    rest(made, 0)
    made.listen(0.0)
    resting = made.hands[0]
    resting.leaving = True
    made.listen(0.0)
    made.listen(0.0)
    assert made.hands[0] is not resting and resting.channel.closed


def test_vllm_tells_its_pace() -> None:
    """Else a worker with a slow one would never be found."""
    engine = object.__new__(VllmEngine)
    FlightEngine.__init__(engine, SimpleNamespace(config=None), **FLIGHTS)  # type: ignore[arg-type]
    engine.stale, engine.scheduler, engine.running = False, Queue(), {"a": None}  # type: ignore[dict-item]
    engine.model = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    engine.core = SimpleNamespace(step=list)
    assert engine.pace == (0.0, 0.0, 0.0)
    for _ in range(20):
        engine.step()
    assert engine.pace[0] > 10 and min(engine.pace) > 0


class Placed:
    """Stands for the actors of a cluster: what each was given of the environment is noted."""

    given: ClassVar[list[Mapping[str, str]]] = []

    def __init__(
        self, build: Any, environment: Mapping[str, str], need: Any, beside: Any = ()
    ) -> None:
        self.given.append(environment)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


@pytest.mark.parametrize("address", ["elsewhere", "local"])
def test_a_cluster_may_have_more_learners_than_the_driver_has_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    joined: list[str] = []
    stations = SimpleNamespace(
        Stations=Placed,
        join_cluster=lambda cores, address: joined.append(address) or (lambda: None),
    )
    monkeypatch.setitem(sys.modules, "whet.cluster.stations", stations)
    monkeypatch.setattr(processes, "kit", lambda *given: {})
    monkeypatch.setattr(processes, "available_cores", lambda: 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    made: list[Any] = []
    end = SimpleNamespace(close=lambda: None, end=lambda: None, present=[0])
    for name in ("crew.Crew", "workers.Workers"):
        monkeypatch.setattr(
            f"whet.cluster.{name}", lambda *given, **named: made.append((given, named)) or end
        )
    device = SimpleNamespace(device=torch.device("cuda"))
    plan: Any = SimpleNamespace(settings=small_config("cluster.workers=4"), footprint=device)
    company = processes.Company(print, tmp_path)
    with ExitStack() as stack:
        *_, what = processes.build_crews(plan, 2, ORDER, stack, company)
    assert what == "1 actors that decode and 2 that learn"
    assert joined == [address.removesuffix("local")], (
        "a cluster of its own, which only this machine can reach"
    )
    (_, environments, backend), _ = made[0]
    assert len(environments) == 2 and backend == "nccl"
    assert {given["OMP_NUM_THREADS"] for given in Placed.given} == {"2"}, (
        "six processes divide the cores"
    )
