"""The desk gives the batches of the plain protocol, tells each group's fate truly, and refuses what does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import SAMPLING, OrderlySimulator, batch_keys, build, play_plain

from whet.adapters.desk import Answer, Desk, Finished, Order
from whet.curriculum.gate import Uniform
from whet.curriculum.source import UniformSource
from whet.errors import Starved, WhetError
from whet.testing.simulator import World
from whet.types import Phase, Request, Rollout

WORLDS = {
    "barrier": World(),
    "stream": World(slots=12, seed=2),
    "one slot": World(slots=1, seed=5, updates=4),
    "unjudged": World(slots=40, unjudged=0.2, seed=4),
    "shortest": World(slots=64, order="shortest", seed=8),
    "cut": World(slots=40, cut=1.0, seed=3),
    "some are cut": World(slots=24, cut=0.4, seed=9),
}


def request_of(order: Order, phase: Phase = "train") -> Request:
    first = order.indices[0]
    assert (
        order.indices == tuple(range(first, first + order.n)) and order.limit <= SAMPLING.max_tokens
    )
    sampling = type(SAMPLING)(max_tokens=order.limit, temperature=order.temperature)
    return Request(
        prompt_id=order.prompt_id,
        group_id=order.group_id,
        first_index=first,
        n=order.n,
        sampling=sampling,
        phase=phase,
    )


def outcome(uid: str, rollout: Rollout) -> Finished:
    return Finished(
        uid=uid,
        index=rollout.index,
        length=rollout.length,
        verdict=rollout.verdict,
        finish=rollout.finish,
        first_version=rollout.first_version,
        last_version=rollout.last_version,
    )


class Trainer:
    """An asynchronous trainer over a desk, in a simulated world. It may report rollouts one by one, and be saved."""

    def __init__(
        self, name: str, world: World, *, one_by_one: bool = False, save_share: float = 0.0
    ):
        self.name, self.world, self.one_by_one, self.save_share = (
            name,
            world,
            one_by_one,
            save_share,
        )
        self.simulator, self.desk, self.rng = (
            OrderlySimulator(world),
            self.new_desk(),
            np.random.default_rng(0),
        )
        self.log: list[Any] = []
        self.uids: dict[int, str] = {}  # of all groups
        self.answers: dict[str, Answer] = {}
        self.fates: dict[str, list[str]] = {}

    def new_desk(self) -> Desk:
        world = self.world
        curriculum = build(self.name, world.ids, world.seed)
        return Desk(
            curriculum,
            groups=world.groups,
            slots=world.slots,
            steps=world.updates,
            cut=world.cut == 1,
        )

    def run(self) -> list[Any]:
        for step in range(self.world.updates):
            while (groups := self.desk.take()) is None:
                self.generate()
                rollouts = self.simulator.collect()
                self.report(rollouts)
                self.maybe_save()
            assert self.desk.batch is not None
            self.log.append(batch_keys(self.desk.batch))
            assert [self.uids[group.group_id] for group in groups.values()] == list(groups)
            for uid in groups:  # one that was told to wait asks again
                fate = self.fates[uid][-1]
                assert fate == "over" or self.tell(uid, self.desk.ask(uid)).what == "over", (
                    "a group trains too early"
                )
            assert set(groups) <= self.desk.holds()
            self.simulator.update(step + 1)
            self.desk.updated()
        return self.log

    def generate(self) -> None:
        wanted = self.desk.wanted()
        orders = [answer.order for answer in self.answers.values() if answer.order is not None]
        for uid in [uid for uid, fates in self.fates.items() if fates[-1] == "wait"]:
            if (answer := self.tell(uid, self.desk.ask(uid))).order is not None:
                orders.append(answer.order)
        self.answers = {}
        for _ in range(wanted):
            uid = f"uid-{len(self.uids)}"
            order = self.desk.begin(uid)
            self.uids[order.group_id] = uid
            orders.append(order)
        requests = [request_of(order) for order in orders]
        self.log.append(
            sorted(
                (r.group_id, r.prompt_id, r.first_index, r.n, r.sampling.max_tokens)
                for r in requests
            )
        )
        self.simulator.submit(requests)

    def report(self, rollouts: list[Rollout]) -> None:
        outcomes = [outcome(self.uids[rollout.group_id], rollout) for rollout in rollouts]
        for some in [[one] for one in outcomes] if self.one_by_one else [outcomes]:
            for uid, answer in self.desk.report(some).items():
                self.answers[uid] = self.tell(uid, answer)

    def tell(self, uid: str, answer: Answer) -> Answer:
        fates = self.fates.setdefault(uid, [])
        assert "over" not in fates, "over is final"
        assert (answer.order is not None) == (answer.what == "more")
        fates.append(answer.what)
        return answer

    def maybe_save(self) -> None:
        if self.rng.random() < self.save_share:
            state = json.loads(json.dumps(self.desk.state_dict()))
            self.desk = self.new_desk()
            self.desk.load_state_dict(state)


@pytest.mark.wide
@pytest.mark.parametrize("world", WORLDS.values(), ids=list(WORLDS))
@pytest.mark.parametrize(
    "name", ["uniform", "dapo", "speed", "cures", "scalingrl", "stages", "all"]
)
def test_the_desk_gives_the_batches_of_the_plain_protocol(name: str, world: World) -> None:
    try:
        expected = play_plain(build(name, world.ids, world.seed), world)
    except Starved as error:
        with pytest.raises(Starved, match=str(error)[:20]):
            Trainer(name, world).run()
        return
    assert Trainer(name, world).run() == expected
    assert Trainer(name, world, save_share=0.3).run() == expected


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["uniform", "dapo", "speed", "cures", "all"]),
    slots=st.integers(5, 60),
    cut=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_rollouts_may_be_reported_one_by_one(name: str, slots: int, cut: float, seed: int) -> None:
    world = World(slots=slots, cut=cut, seed=seed, updates=4, pass_rates=(0.5, 0.3, 0.7))
    trainer = Trainer(name, world, one_by_one=True)
    batches = [entry for entry in trainer.run() if entry and isinstance(entry[0][1], list)]
    assert [len(batch) for batch in batches] == [world.groups] * world.updates
    trained = [key for batch in batches for _, keys in batch for key in keys]
    assert len(trained) == len(set(trained))
    running = sum(len(errand.left) for errand in trainer.desk.errands.values())
    # not submitted yet
    ordered = sum(answer.order.n for answer in trainer.answers.values() if answer.order)
    assert running == ordered + len(trainer.simulator._running) + len(trainer.simulator._cut)


def plain_desk(**given: Any) -> Desk:
    gate = Uniform(UniformSource(["a", "b", "c"], 0), sampling=SAMPLING, rollouts=2, max_age=1)
    return Desk(gate, **{"groups": 1, **given})


def finish(desk: Desk, order: Order, verdict: Any = "right") -> dict[str, Answer]:
    return desk.report(
        [Finished(uid=order.uid, index=i, length=3, verdict=verdict) for i in order.indices]
    )


def test_one_update_by_hand() -> None:
    desk = plain_desk()
    assert desk.take() is None and desk.wanted() == 1
    order = desk.begin("x")
    assert (order.indices, order.n, order.limit, order.version) == ((0, 1), 2, 32, 0)
    assert desk.wanted() == 0 and desk.metrics()["desk/running"] == 2.0
    first = desk.report([Finished(uid="x", index=1, length=3, verdict="right")])
    assert first["x"].what == "wait" and desk.take() is None
    last = desk.report([Finished(uid="x", index=0, length=5, verdict="wrong", reward=0.25)])
    assert last["x"].what == "over"
    taken = desk.take()
    assert taken is not None and list(taken) == ["x"] and desk.holds() == {"x"}
    rollouts = taken["x"].rollouts
    assert [(r.verdict, r.reward, r.length) for r in rollouts] == [
        ("wrong", 0.25, 5),
        ("right", 1.0, 3),
    ]
    assert desk.wanted() == 0, "nothing is wanted before the update"
    desk.updated()
    assert desk.holds() == set() and not desk.errands and desk.wanted() == 1
    assert desk.begin("x").version == 1, "a uid that is over may be used again"


def test_a_trainer_that_lost_its_rollouts_gets_their_orders_again() -> None:
    desk = plain_desk(groups=2)
    desk.wanted()
    first, second = desk.begin("x"), desk.begin("y")
    desk.report([Finished(uid="x", index=0, length=3, verdict="right")])
    again = plain_desk(groups=2)
    again.load_state_dict(json.loads(json.dumps(desk.state_dict())))
    orders = [again.resume(uid).order for uid in ("x", "y")]
    found = [(order.uid, order.prompt_id, order.indices) for order in orders if order is not None]
    assert found == [("x", first.prompt_id, (1,)), ("y", second.prompt_id, (0, 1))]
    again.report([Finished(uid="x", index=1, length=3, verdict="wrong")])
    assert again.take() is None
    with pytest.raises(WhetError, match='no group "z" in work'):
        again.resume("z")


def test_a_group_that_is_dropped_before_it_is_begun_comes_back_as_cut() -> None:
    gate = Uniform(
        UniformSource(["a", "b", "c"], 0), sampling=SAMPLING, rollouts=2, max_age=0, look_ahead=1.0
    )
    desk = Desk(gate, groups=1, slots=2, cut=True)
    desk.wanted()
    finish(desk, desk.begin("x"))
    gate.book.ask("b", 2, SAMPLING, "train")  # as if more had been planned than the batch took
    desk.queue.append(Request(prompt_id="b", group_id=1, n=2, sampling=SAMPLING))
    assert desk.take() is not None
    desk.updated()
    assert desk.wanted() == 1 and [request.group_id for request in desk.queue] == [2]
    assert gate.metrics()["curriculum/cut"] == 1.0


def test_starvation_is_told_at_take() -> None:
    world = World(pass_rates=(0.0,))
    desk = Desk(build("dapo", world.ids, 0, patience=1), groups=2)
    count = 0
    while desk.wanted():
        for answer in finish(desk, desk.begin(f"{(count := count + 1)}"), "wrong").values():
            assert answer.what == "over"
    with pytest.raises(Starved, match="none found useful, 2 are needed"):
        desk.take()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    desk = plain_desk()
    with pytest.raises(WhetError, match="No prompt is wanted"):
        desk.begin("x")
    with pytest.raises(WhetError, match="no batch in training"):
        desk.updated()
    with pytest.raises(WhetError, match="groups = 0"):
        plain_desk(groups=0)
    desk.wanted()
    order = desk.begin("x")
    before = desk.state_dict()
    with pytest.raises(WhetError, match='The uid "x" names a group in work'):
        desk.begin("x")
    good = {"uid": "x", "index": 0, "length": 3, "verdict": "right"}
    for bad, sentence in (
        ({"uid": "y"}, 'no group "y" in work'),
        ({"index": 2}, "was not ordered"),
        ({"length": -1}, "cannot have length = -1"),
        ({"verdict": "maybe"}, "verdict = 'maybe'"),
        ({"finish": "tired"}, "finish = 'tired'"),
        ({"reward": float("nan")}, "has the reward nan"),
    ):
        with pytest.raises(WhetError, match=sentence):
            desk.report([Finished(**(good | {"index": 1})), Finished(**(good | bad))])  # type: ignore[arg-type]
    with pytest.raises(WhetError, match="reported twice"):
        desk.report([Finished(**good), Finished(**good)])  # type: ignore[arg-type]
    assert desk.state_dict() == before
    finish(desk, order)
    desk.take()
    with pytest.raises(WhetError, match="in training"):
        desk.take()


def test_a_bare_install_suffices() -> None:
    """Desk, client and server need no extra: none of what the extras bring is imported."""
    extras = (
        "torch",
        "transformers",
        "safetensors",
        "math_verify",
        "datasets",
        "pyarrow",
        "peft",
        "gguf",
        "ray",
    )
    code = (
        f"import sys\nfor name in {extras}:\n    sys.modules[name] = None\n"
        "import whet.adapters.client, whet.adapters.serve\n"
        "from whet import config\n"
        "from whet.adapters.desk import Desk\n"
        "from whet.curriculum.build import Facts, build_curriculum\n"
        "from whet.types import Sampling\n"
        "asked = config.CurriculumSettings(name='speed', rollouts=8)\n"
        "facts, sampling = Facts(ids=['a', 'b']), Sampling(max_tokens=8)\n"
        "curriculum = build_curriculum(asked, facts=facts, sampling=sampling, seed=0)\n"
        "print(Desk(curriculum, groups=1).wanted())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr
