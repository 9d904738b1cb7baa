"""TLT's tuner as published: groups by tokens to verify, medians over a window, an elastic switch that latches."""

import json

import numpy as np
import pytest

from whet import config
from whet.draft.base import OFF, DraftArm, StepReport
from whet.draft.controller import SWITCH, Bandit
from whet.draft.speculation import DEPTHS, build_speculation

SHIPPED = [DraftArm("eagle", tokens - 1) for tokens in (48, 32, 16, 8)]


class On(Bandit):
    """Does not wait until it speculates."""

    patience = 0


def on(arms: list[DraftArm], epsilon: float = 0.1, seed: int = 0) -> Bandit:
    bandit = On(arms, seed=seed)
    bandit.epsilon = epsilon
    return bandit


def test_the_switch_waits_ten_steps_then_latches_until_the_step_ends() -> None:
    bandit = Bandit(SHIPPED)
    assert [bandit.choose(n) for n in (33, *[32] * 9)] == [OFF] * 10
    assert bandit.choose(33) == OFF  # not in a row
    assert [bandit.choose(32) for _ in range(9)] == [OFF] * 9
    assert bandit.choose(32).tokens == 8
    assert bandit.choose(64).tokens == 8  # latched
    bandit.updated()
    assert bandit.choose(1) == OFF


def test_one_arm_a_group_is_a_lookup_table() -> None:
    bandit = on(SHIPPED, epsilon=1.0)
    assert [bandit.choose(n).tokens for n in (1, 2, 4, 5, 20, 21, 32)] == [48, 32, 32, 16, 16, 8, 8]


def built(seed: int = 0) -> Bandit:
    settings = config.Draft(drafters=["ngram", "suffix", "eagle"], chooser="bandit")
    made = build_speculation(settings, vocab=64, sizes=range(1, 33), seed=seed)
    assert made is not None and isinstance(made.chooser, Bandit)
    return made.chooser


def test_every_arm_of_all_three_drafters_has_a_batch_size() -> None:
    bandit = built()
    batches = range(1, SWITCH + 1)
    open_to = {arm for batch in batches for arm in bandit.group(batch) if bandit.serves(arm, batch)}
    assert open_to == {
        DraftArm(name, depth) for name in ("ngram", "suffix", "eagle") for depth in DEPTHS
    }


def test_every_arm_of_a_batch_size_is_chosen_in_some_state() -> None:
    """By its reward, and by chance whatever its reward: at every batch size up to the switch."""
    for batch in range(1, 33):
        for best in built().group(batch):
            bandit = built()
            bandit.calm, bandit.epsilon = bandit.patience, 0.0
            for arm in bandit.group(batch):
                bandit.record(
                    StepReport(
                        arm, batch, 0.1 if arm == best else 0.2, accepted=np.zeros(batch, int)
                    )
                )
            assert bandit.choose(batch) == best
            bandit.epsilon = 1.0
            assert {bandit.choose(batch) for _ in range(200)} == set(bandit.group(batch))


def test_a_size_without_a_threshold_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bandit, "thresholds", (1, 2, 5))
    with pytest.raises(AssertionError, match="a size without a threshold"):
        Bandit(SHIPPED)


def test_what_chance_chose_stands_until_it_was_in_use() -> None:
    """The turn after it may have been launched with another arm before: that one is recorded, and the choice stands."""
    arms = [DraftArm("suffix", 4), DraftArm("eagle", 4)]
    bandit = on(arms, epsilon=0.0)
    for arm, seconds in zip(arms, (0.1, 0.2), strict=True):
        bandit.record(StepReport(arm, 2, seconds, accepted=np.zeros(2, int)))
    bandit.epsilon = 1.0
    while bandit.choose(2) != arms[1]:
        bandit.choose(2)
    bandit.epsilon = 0.0
    bandit.record(StepReport(arms[0], 2, 0.1, accepted=np.zeros(2, int)))
    assert bandit.choose(2) == arms[1]
    bandit.record(StepReport(arms[1], 2, 0.2, accepted=np.zeros(2, int)))
    assert bandit.choose(2) == arms[0]
    bandit.epsilon = 1.0
    while bandit.choose(2) != arms[1]:
        bandit.choose(2)
    bandit.epsilon = 0.0
    bandit.record(StepReport(arms[1], 2, 0.2, accepted=np.zeros(2, int)))  # in use at once
    assert bandit.choose(2) == arms[0]


def test_reward_and_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bandit, "window", 3)
    arms = [DraftArm("ngram", 4), DraftArm("eagle", 4)]
    bandit = on(arms, epsilon=0.0)
    for seconds in (0.1, 0.2, 0.4):
        # a = 3: rewards 120, 60, 30
        bandit.record(StepReport(arms[0], 4, seconds, accepted=np.array([4, 2, 0, 2])))
    assert bandit.score(arms[0]) == 60
    assert bandit.score(arms[1]) == float("inf") and bandit.choose(1) == arms[1]
    bandit.record(StepReport(arms[1], 4, 0.1, accepted=np.zeros(4, int)))  # 40
    assert bandit.choose(1) == arms[0]
    for _ in range(2):
        # 10: the window is 30, 10, 10
        bandit.record(StepReport(arms[0], 4, 1.2, accepted=np.array([4, 2, 0, 2])))
    assert bandit.choose(1) == arms[1]


def test_finds_the_better_arm_and_explores() -> None:
    arms = [DraftArm("ngram", 4), DraftArm("suffix", 4), DraftArm("eagle", 4)]
    bandit, rng = on(arms, epsilon=0.1, seed=0), np.random.default_rng(0)
    picks = []
    for _ in range(1000):
        arm = bandit.choose(2)
        picks.append(arms.index(arm))
        accepted = rng.binomial(4, (0.2, 0.7, 0.5)[picks[-1]], 2)
        bandit.record(StepReport(arm, 2, 0.01, accepted=accepted))
    assert picks.count(1) > 850 and min(picks.count(0), picks.count(2)) > 10


def test_no_arm_without_graphs_and_none_at_all() -> None:
    assert On(SHIPPED, serves=lambda arm, batch: arm.tokens < 16).choose(1) == OFF
    assert On([]).choose(1) == OFF


def test_saved_as_json() -> None:
    bandit = on(SHIPPED, seed=4)
    bandit.record(StepReport(SHIPPED[0], 1, 0.5, accepted=np.array([3])))
    other = on(SHIPPED, seed=5)
    other.load_state_dict(json.loads(json.dumps(bandit.state_dict())))
    assert other.state_dict() == bandit.state_dict()
    assert bandit.metrics() == {
        "draft/share_eagle_47_1_48": 1.0,
        "draft/accept_length": 4.0,
        "draft/saved": 3.0,
    }
    assert bandit.metrics() == {"draft/accept_length": 1.0, "draft/saved": 0.0}


def test_pictures_of_drafts() -> None:
    """Drafts of 2, 0, 3 and 3 tokens, of which 1, 0, 3 and 0 came true: by place, and by rows (9 and 8 are one bin)."""
    bandit = Bandit([DraftArm("suffix", 4)])
    assert bandit.pictures() == {}
    arm = DraftArm("suffix", 4)
    bandit.record(StepReport(arm, 2, 1.0, accepted=np.array([1, 0]), had=np.array([2, 0])))
    bandit.record(StepReport(arm, 9, 1.0, accepted=np.array([3]), had=np.array([3])))
    bandit.record(StepReport(arm, 8, 1.0, accepted=np.array([0]), most=np.array([3])))
    bandit.record(StepReport(OFF, 8, 1.0))
    seen = {"position": [[3, 2], [3, 1], [2, 1]], "rows": [[2, 2, 1], [8, 2, 3]]}
    assert bandit.pictures() == bandit.pictures() == {"accepts": seen}
    bandit.metrics()
    assert bandit.pictures() == {}


def test_not_among_those_that_are_retired() -> None:
    bandit = on([DraftArm("ngram", 4), DraftArm("suffix", 4)], epsilon=0.5)
    assert {bandit.choose(1, 0.0, {"ngram"}) for _ in range(50)} == {DraftArm("suffix", 4)}
    assert bandit.choose(1, 0.0, {"ngram", "suffix"}) == OFF


def test_where_nothing_was_drafted() -> None:
    bandit = Bandit([DraftArm("ngram", 4)])
    bandit.record(StepReport(OFF, 4, 1.0))
    assert bandit.metrics() == {
        "draft/share_off": 1.0,
        "draft/accept_length": 1.0,
        "draft/saved": 0.0,
    }
