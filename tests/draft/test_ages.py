"""A drafter that looks texts up is poor on young rows and good on old ones: what the controller makes of it."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from whet.draft.base import OFF, DraftArm, StepReport
from whet.draft.controller import Ages, Controller, age_of
from whet.draft.speculation import DEPTHS, serves

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
ARMS = [DraftArm(drafter, depth) for drafter in ("suffix", "eagle") for depth in DEPTHS]
BURST = 4
KV = 16 * 1024
"""Bytes of a token."""


def padded(batch: int) -> int:
    return next(size for size in SIZES if size >= batch)


class Growing:
    """Times like those of a 17M model on an H200; suffix is accepted the more often the longer the rows are."""

    def __init__(self, suffix: Callable[[float], float], eagle: float, seed: int) -> None:
        self.suffix, self.eagle = suffix, eagle
        self.rng = np.random.default_rng(seed)

    def seconds(self, arm: DraftArm, batch: int) -> float:
        drafting = {"": 0.0, "suffix": 2e-5, "eagle": 9e-5 + 5e-5 * arm.depth}[arm.drafter]
        step = 4.4e-4 + 5.5e-7 * max(0, padded(batch) * arm.tokens - 64) + drafting
        return step * float(self.rng.uniform(0.96, 1.04))

    def accepted(self, arm: DraftArm, batch: int, written: float) -> np.ndarray:
        chance = self.suffix(min(1.0, written / 400)) if arm.drafter == "suffix" else self.eagle
        hit = self.rng.random((batch, arm.depth)) < chance * 0.95 ** np.arange(arm.depth)
        return np.logical_and.accumulate(hit, axis=1).sum(1)


def write(chooser: Controller | None, world: Growing, fixed: DraftArm = OFF) -> float:
    """Seconds until 128 rows with a long tail are written, by a chooser or by one arm where it serves."""
    left = (
        np.minimum(np.random.default_rng(0).lognormal(math.log(332), 1.0, 128), 2048).astype(int)
        + 1
    )
    total, written = 0.0, 0.0
    while left.size:
        batch, kv = left.size, left.size * (100 + written) * KV
        arm = chooser.choose(batch, kv) if chooser else fixed if serves(fixed, batch) else OFF
        accepted = [world.accepted(arm, batch, written) for _ in range(BURST)] if arm.depth else []
        seconds = sum(world.seconds(arm, batch) for _ in range(BURST))
        if chooser:
            found = np.concatenate(accepted) if accepted else None
            chooser.record(
                StepReport(arm, batch, seconds, steps=BURST, accepted=found, kv_bytes=kv)
            )
        gained = BURST + np.sum(accepted, 0)
        total, written, left = total + seconds, written + float(np.mean(gained)), left - gained
        left = left[left > 0]
    return total


@pytest.mark.wide
@pytest.mark.parametrize(
    ("suffix", "eagle"),
    [
        pytest.param(lambda grown: 0.3 + 0.5 * grown, 0.62, id="grows"),
        pytest.param(lambda grown: 0.1 + 0.6 * (grown > 0.8), 0.12, id="is good late"),
        pytest.param(lambda grown: 0.1, 0.62, id="stays poor"),
        pytest.param(lambda grown: 0.75, 0.62, id="is good at once"),
        pytest.param(lambda grown: 0.1, 0.12, id="none is any good"),
    ],
)
def test_the_controller_keeps_up_with_the_best_arm(
    suffix: Callable[[float], float], eagle: float
) -> None:
    """Batch after batch, as in a run; from the second on, when it has seen all lengths once."""
    best = min(write(None, Growing(suffix, eagle, 1), arm) for arm in (OFF, *ARMS))
    for seed in range(4):
        controller = Controller(ARMS, serves=serves, bucket=padded, seed=seed)
        seconds = []
        for visit in range(4):
            seconds.append(write(controller, Growing(suffix, eagle, 10 * seed + visit)))
            controller.updated()
        assert best / np.mean(seconds[1:]) > 0.97
        assert best / seconds[0] > 0.9, "first tries are cheap"


def test_what_is_known_of_one_age_is_lent_to_another_lightly() -> None:
    ages = Ages(1)
    ages.record(6, np.ones(100, int), np.ones(100, int))
    assert ages.lengths(9) == [1.0, 2.0] and 9 not in ages.at
    # eight tries are lent, of which 0.98 is left
    ages.record(9, np.zeros(24, int), np.ones(24, int))
    assert 9 in ages.at and ages.lengths(9)[1] == pytest.approx(1 + 7.84 / 31.84)
    assert ages.lengths(6) == [1.0, 2.0]


def test_the_age_of_rows_is_in_doublings() -> None:
    assert [age_of(2, 2 * 100 * 2**i * KV) - age_of(2, 2 * 100 * KV) for i in range(5)] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert age_of(1, 0.0) == age_of(0, 5.0) == 0


def test_ages_are_saved_and_loaded() -> None:
    controller = Controller(ARMS, serves=serves, bucket=padded)
    write(controller, Growing(lambda grown: 0.3 + 0.5 * grown, 0.62, 0))
    other = Controller(ARMS, serves=serves, bucket=padded)
    other.load_state_dict(controller.state_dict())
    assert other.state_dict() == controller.state_dict()
    for name, ages in controller.acceptance.items():
        assert {age: a.lengths for age, a in ages.at.items()} == {
            age: a.lengths for age, a in other.acceptance[name].at.items()
        }
    assert len(controller.acceptance["suffix"].at) > 3
