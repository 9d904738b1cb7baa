"""The controller finds the best arm, loses little by looking, lets go of a drafter that fails, saves what it knows."""

import json

import numpy as np
import pytest
from simulated import Fixed, Stepped, World, lengths, write

from whet.draft import controller
from whet.draft.base import MOST_TOLD, OFF, DraftArm, StepReport
from whet.draft.controller import Acceptance, Controller

ARMS = [DraftArm(d, k) for d in ("ngram", "suffix") for k in (1, 2, 4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accept", "token"),
    [
        ({"ngram": 0.4, "suffix": 0.8}, 4e-6),  # long drafts pay
        ({"ngram": 0.5, "suffix": 0.45}, 2e-5),  # short ones, in the tail
        ({"ngram": 0.05, "suffix": 0.1}, 4e-5),  # none
        ({"ngram": 0.9, "suffix": 0.2}, 1e-6),
    ],
)
@pytest.mark.parametrize(("kind", "seed"), [(World, 0), (Stepped, 1)])
def test_as_good_as_the_best_fixed_arm_and_off(
    accept: dict[str, float], token: float, kind: type[World], seed: int
) -> None:
    """Over four batches with a tail and an update after each, trials and the first tries of all arms included."""
    batches = [lengths(seed=seed * 10 + i) for i in range(4)]
    fixed = {
        arm.name: sum(
            write(Fixed(arm), kind(accept, token=token, seed=seed), b)[0] for b in batches
        )
        for arm in (OFF, *ARMS)
    }
    ours, world = Controller(ARMS, seed=seed), kind(accept, token=token, seed=seed)
    took = 0.0
    for batch in batches:
        took += write(ours, world, batch)[0]
        ours.updated()
    assert took * 0.97 <= min(fixed.values()), (took, fixed)


def test_converges_within_two_hundred_steps() -> None:
    world = World({"ngram": 0.3, "suffix": 0.8}, token=1e-6)
    ours = Controller(ARMS, seed=1)
    for step in range(400):
        arm = ours.choose(8)
        ours.record(StepReport(arm, 8, world.seconds(arm, 8), accepted=world.accepted(arm, 8)))
        if step == 200:
            assert ours.current == DraftArm("suffix", 8)
    assert ours.metrics()["draft/share_suffix_8_1_9"] > 0.6


def test_switches_off_when_acceptance_collapses_and_on_when_it_returns() -> None:
    world, ours = World({"suffix": 0.9}, token=1e-5), Controller([DraftArm("suffix", 4)], seed=0)

    def play(steps: int) -> float:
        ours.metrics()
        for _ in range(steps):
            arm = ours.choose(32)
            ours.record(
                StepReport(arm, 32, world.seconds(arm, 32), accepted=world.accepted(arm, 32))
            )
        return ours.metrics().get("draft/share_off", 0.0)

    play(200)
    assert play(200) < 0.1
    world.accept["suffix"] = 0.02
    play(200)
    assert ours.current == OFF and play(500) > 0.95
    world.accept["suffix"] = 0.9
    for _ in range(8):  # a few updates without a trial that could tell
        ours.updated()
    play(200)
    assert play(200) < 0.1


@pytest.mark.parametrize("typical", [False, True])
def test_a_first_step_that_takes_long_misleads_if_it_is_taken_for_typical(typical: bool) -> None:
    """Drafts do not pay. A lone plain step takes twice as long as those in bursts; whether that is typical decides."""
    share = []
    for seed in range(5):
        world, ours = (
            World({"ngram": 0.2, "suffix": 0.2}, token=8e-6, seed=seed),
            Controller(ARMS, seed=seed),
        )
        ours.record(StepReport(OFF, 64, 2 * world.seconds(OFF, 64), typical=typical))
        for _ in range(100):
            arm = ours.choose(64)
            accepted = np.concatenate([world.accepted(arm, 64) for _ in range(4)])
            ours.record(StepReport(arm, 64, 4 * world.seconds(arm, 64), steps=4, accepted=accepted))
        share.append(ours.metrics()["draft/share_off"])
    assert np.mean(share) > 0.8 if not typical else np.mean(share) < 0.6, share


def test_never_an_arm_without_graphs() -> None:
    def serves(arm: DraftArm, batch: int) -> bool:
        return arm.tokens * batch <= 40

    world, ours = World({"ngram": 0.9, "suffix": 0.9}), Controller(ARMS, serves=serves)
    ours.epsilon, ours.spend = 0.5, 1.0
    rng = np.random.default_rng(0)
    chosen = set()
    for _ in range(3000):
        batch = int(rng.integers(1, 64))
        arm = ours.choose(batch)
        assert arm == OFF or serves(arm, batch)
        chosen.add(arm)
        ours.record(
            StepReport(arm, batch, world.seconds(arm, batch), accepted=world.accepted(arm, batch))
        )
    assert len(chosen) > 5


def test_trials_stay_within_what_they_may_lose() -> None:
    """Half of all steps would begin a trial of an arm ten times as slow."""
    ours = Controller([DraftArm("ngram", 1)])
    ours.epsilon, ours.spend = 0.5, 0.01
    lost = total = 0.0
    for _ in range(5000):
        arm = ours.choose(4)
        seconds = 0.001 if arm == OFF else 0.01
        ours.record(StepReport(arm, 4, seconds, accepted=np.zeros(4, int)))
        total += seconds
        lost += seconds - 0.001
    assert 0 < lost < 0.02 * total


def test_acceptance_by_position() -> None:
    a = Acceptance(3)
    a.record(np.array([3, 2, 0, 1]), np.array([3, 3, 3, 1]))
    # the last row was asked for one token alone
    assert (a.hits / a.tries).tolist() == [3 / 4, 2 / 2, 1 / 2]
    assert a.lengths[3] == pytest.approx(1 + 0.75 + 0.75 + 0.375)
    shallow = Acceptance(3)
    shallow.record(np.array([1, 0]), np.array([1, 1]))
    # places not tried go like the last
    assert shallow.lengths[3] == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_old_acceptance_fades() -> None:
    a = Acceptance(1)
    for _ in range(300):
        a.record(np.ones(8, int), np.ones(8, int))
    for _ in range(150):
        a.record(np.zeros(8, int), np.ones(8, int))
    assert a.lengths[1] < 1.06


def test_what_is_known_is_saved_as_json() -> None:
    world, ours = World({"ngram": 0.5, "suffix": 0.7}), Controller(ARMS, seed=3)
    write(ours, world, lengths(32))
    state = json.loads(json.dumps(ours.state_dict()))
    other = Controller(ARMS, seed=99)
    other.load_state_dict(state)
    assert other.state_dict() == ours.state_dict()
    known = [ours.rate(a, 8, (8, 0)) for a in ARMS]
    # guesses are made anew
    assert [other.rate(a, 8, (8, 0)) for a in ARMS] == pytest.approx(known, rel=0.02)
    fewer = Controller(ARMS[:2], seed=99)
    fewer.load_state_dict(state)  # a recipe that has changed keeps what it can
    assert fewer.latency.times == {
        name: ours.latency.times[name] for name in ("off", "ngram_1_1_2", "ngram_2_1_3")
    }
    (age,) = ours.acceptance["ngram"].at  # rows of this world do not grow
    assert fewer.acceptance["ngram"].lengths(age) == ours.acceptance["ngram"].lengths(age)[:3]


def test_no_draft_is_lost_though_turns_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the acceptance, which takes FOLDED turns at once, the first of an age and trials at once, and by the metrics,
    which keep MOST_TOLD reports."""
    monkeypatch.setattr(controller, "MEMORY", 1.0)
    ours, arm, turns = Controller([DraftArm("suffix", 2)]), DraftArm("suffix", 2), MOST_TOLD + 3
    tries = []
    for turn in range(turns):
        ours.record(
            StepReport(
                arm, 4, 1.0, accepted=np.array([0, 1, 2, 2]), kv_bytes=4096.0 * (1 + turn % 2)
            )
        )
        tries.append(sum(a.tries[0] for a in ours.acceptance["suffix"].at.values()))
    assert tries[:9] == [4, *[12] * 7, 40]  # the second age leans on four tries of the first
    assert (
        sum(tried[0] for _, _, tried in ours.state_dict()["acceptance"]["suffix"]) == 4 * turns + 4
    )
    assert ours.pictures()["accepts"] == {
        "position": [[4 * turns, 3 * turns], [4 * turns, 2 * turns]],
        "rows": [[4, 4 * turns, 5 * turns]],
    }
    told = ours.metrics()
    assert told["draft/accept_length"] == 1 + 5 / 4 and told["draft/saved"] == 5 * turns


def test_a_choice_that_stands_asks_about_its_own_arm_alone() -> None:
    asked: list[DraftArm] = []
    ours = Controller(ARMS, serves=lambda arm, batch: bool(asked.append(arm)) or True)
    ours.record(StepReport(OFF, 4, 1.0))
    first = ours.choose(4)
    asked.clear()
    assert first != OFF and ours.choose(4) == first and asked == [first]
