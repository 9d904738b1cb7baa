import numpy as np
import pytest
from likeness import (
    GRID,
    Fit,
    Twin,
    class_chances,
    fit_exam,
    groups_seen,
    least,
    mixture,
    quantiles,
    uniform_path,
)
from toy import play

from whet import config
from whet.errors import WhetError
from whet.watch import PASS_RATES


def at(logit: float) -> np.ndarray:
    """All prompts at one logit."""
    return np.where(logit == GRID, 1.0, 0.0)


def flat(length: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([0.0, 1.0]), np.array([length, length])


FIT = Fit(start=at(-1.0), end=at(2.0), rate=0.05, lengths={"right": flat(10.0), "wrong": flat(20.0)})


def test_chances_of_two_rollouts_at_one_half() -> None:
    """None, one or two right with 1/4, 1/2, 1/4; one of two is in the class up to 50%."""
    chances = dict(zip(PASS_RATES, class_chances(2, np.array([0.0]))[:, 0], strict=True))
    assert chances == pytest.approx({"0": 0.25, "to_25": 0, "to_50": 0.5, "to_75": 0, "to_100": 0, "100": 0.25})
    assert class_chances(16, GRID).sum(axis=0) == pytest.approx(np.ones(len(GRID)))


def test_one_round_of_the_mixture_by_hand() -> None:
    """3/4 of the groups in the first class, 9 to 1 for the first logit; 1/4 the other way: 0.675 + 0.025."""
    chances = np.array([[0.9, 0.1], [0.1, 0.9]])
    assert mixture(np.array([3.0, 1.0]), chances, rounds=1) == pytest.approx([0.7, 0.3])
    assert np.isfinite(mixture(np.ones(len(PASS_RATES)), class_chances(2, GRID))).all()


def test_the_mixture_finds_where_prompts_are() -> None:
    """Half nearly hopeless, half at one half: groups of 16 tell them apart."""
    true = 0.5 * at(-4.0) + 0.5 * at(0.0)
    found = mixture(1000 * class_chances(16, GRID) @ true, class_chances(16, GRID))
    assert found[np.abs(GRID) <= 1].sum() == pytest.approx(0.5, abs=0.02)
    assert found[GRID <= -1.5].sum() == pytest.approx(0.5, abs=0.02)


def test_least() -> None:
    assert least(lambda x: (x - 3) ** 2, 0.1, 100, points=9) == pytest.approx(3, rel=0.02)


def test_quantiles_spread_a_share_around_its_logit() -> None:
    assert quantiles(at(1.0), np.array([0.01, 0.5, 0.99])) == pytest.approx([0.755, 1.0, 1.245])
    assert quantiles(0.5 * at(-2.0) + 0.5 * at(3.0), np.array([0.25, 0.75])) == pytest.approx([-2.0, 3.0])


def test_groups_are_counted_until_enough() -> None:
    row = {"batch/groups": 4.0, **{f"pass_rate/{name}": 0.0 for name in PASS_RATES}}
    rows = [
        row | {"pass_rate/0": 1.0},
        row | {"pass_rate/to_25": 0.5, "pass_rate/100": 0.5},
        row | {"pass_rate/0": 1.0},
    ]
    assert groups_seen(rows, 8).tolist() == [4, 2, 0, 0, 0, 2]
    assert groups_seen(rows[::-1], 4).tolist() == [4, 0, 0, 0, 0, 0]
    with pytest.raises(WhetError, match="pass_rate"):
        groups_seen([{"batch/groups": 4.0}], 8)


def test_the_exam_is_found_again() -> None:
    skills = np.linspace(0, 3, 30)
    accuracies = 1 / (1 + np.exp(1 - 2 * skills))
    assert fit_exam(skills.tolist(), accuracies.tolist()) == pytest.approx((-1.0, 2.0, 1.0), rel=0.01)
    start, slope, top = fit_exam(skills.tolist(), (0.5 * accuracies).tolist())
    assert (start, slope, top) == pytest.approx((-1.0, 2.0, 0.5), rel=0.03)
    assert fit_exam([0.0, 0.5, 1.0], [0.0, 0.5, 1.0])[0] == pytest.approx(np.log(0.005 / 0.995))


def test_adam_by_hand() -> None:
    """First step: rate along the gradient, however long it is. Then the opposite gradient: m = -0.01 g, over 0.19."""
    toy = Twin("", 0, 10, fit=FIT)
    gradient = np.array([3.0, 4.0] + [0.0] * 6)
    assert toy.move(gradient)[:2] == pytest.approx([0.05 * 0.6, 0.05 * 0.8])
    assert toy.move(-gradient)[0] == pytest.approx(-0.05 * 0.6 * 0.01 / 0.19)


def test_steps_warm_up_and_end_at_the_ceiling() -> None:
    gradient = np.array([1.0] + [0.0] * 7)
    toy = Twin("", 0, 10, fit=Fit(start=at(0.0), end=at(1.0), rate=0.1, ceiling=2.0), warmup=4, lr=2.0)
    assert toy.move(gradient)[0] == pytest.approx(0.1 * 2 / 4)
    toy.theta[0] = 1.0
    assert toy.move(gradient)[0] == pytest.approx(0.1 * 2 * 2 / 4 * 0.5)
    toy.theta[0] = 3.0
    assert toy.move(gradient)[0] == 0.0
    assert not Twin("", 0, 10, fit=FIT).move(np.zeros(8)).any()


def test_a_prompt_keeps_its_rank() -> None:
    """Hopeless ones stay, the others go from 0 to 3: so does the skill carry them."""
    toy = Twin("", 0, 400, fit=Fit(start=0.5 * at(-6.0) + 0.5 * at(0.0), end=0.5 * at(-6.0) + 0.5 * at(3.0)))
    hopeless = toy.offsets < -3
    assert 150 < hopeless.sum() < 250
    assert toy.facing[hopeless, 0] == pytest.approx(0.0) and toy.facing[~hopeless, 0] == pytest.approx(3.0)


def test_the_short_cut_is_what_play_does() -> None:
    settings = config.Config(curriculum=config.CurriculumSettings(groups=8, rollouts=8), learn=config.Learn(warmup=0))
    skill, passed = uniform_path(FIT, settings, prompts=200, updates=20)
    ends = []
    for seed in range(5):
        toy = Twin("", seed, 200, fit=FIT)
        rows, _ = play(settings.curriculum, toy, lambda toy=toy: toy.rollouts / (20 * 64))  # type: ignore[misc]
        assert len(rows) == 21
        ends.append(rows[-1]["skill"])
    assert skill[0] == 0 and skill[-1] == pytest.approx(np.mean(ends), rel=0.1)
    assert passed[0] == pytest.approx(0.27, abs=0.01) and passed[-1] > passed[0] + 0.1


def test_lengths_are_those_of_the_verdict() -> None:
    toy = Twin("", 0, 10, fit=FIT)
    lengths = toy.lengths(np.array([True, False] * 2000))
    assert lengths[::2].mean() == pytest.approx(10.5, rel=0.02) and lengths[1::2].mean() == pytest.approx(
        20.5, rel=0.02
    )
    assert Twin("", 0, 10, fit=FIT, longest=7).lengths(np.array([True, False])).max() <= 7
