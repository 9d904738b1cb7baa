from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, answers, at

from whet import config
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.gate import Dapo, Gate, Uniform
from whet.curriculum.rho import CuresSource
from whet.curriculum.scalingrl import ScalingRLSource
from whet.curriculum.source import UniformSource
from whet.curriculum.speed import Speed
from whet.curriculum.stages import Stages
from whet.errors import WhetError
from whet.testing.contract import check_contract, check_world, play
from whet.testing.simulator import World
from whet.types import Clock, Rollout

IDS = [f"p{i}" for i in range(100)]


def clock(progress: float = 0.0, groups: int = 4, step: int = 0) -> Clock:
    return replace(at(step=step, groups=groups), progress=progress)


def make(ids: Sequence[str], seed: int, gate: type[Gate] = Uniform, **knobs: Any) -> Gate:
    return gate(ScalingRLSource(ids, seed, **knobs), sampling=SAMPLING, rollouts=3, max_age=1)


def active_ids(source: ScalingRLSource) -> list[str]:
    return [source.all_ids[row] for row in source.active.tolist()]


def judged(prompt_id: str, group: int, letters: str, length: int = 10) -> list[Rollout]:
    return [
        Rollout(
            prompt_id=prompt_id,
            group_id=group,
            index=i,
            phase="train",
            sampling=SAMPLING,
            length=length,
            finish="stop",
            first_version=0,
            last_version=0,
            verdict="right" if letter == "r" else "wrong",
            score=float(letter == "r"),
            reward=float(letter == "r"),
        )
        for i, letter in enumerate(letters)
    ]


def visit_all(source: ScalingRLSource, letters: Sequence[str], first_group: int = 0) -> None:
    """Every prompt is handed out once, over many updates, and gets these verdicts, in turn."""
    hand_out(source, range(len(source.all_ids)))
    for row, prompt_id in enumerate(source.all_ids):
        source.observe(judged(prompt_id, first_group + row, letters[row % len(letters)]))


def hand_out(source: ScalingRLSource, rows: Iterable[int]) -> None:
    """As if these had been handed out in earlier updates; the active set is then used up."""
    for row in rows:
        source.history.handed[row] += 1
        source.distinct += source.history.handed[row] == 1
    source.used = len(source.active)


@pytest.mark.wide
@pytest.mark.parametrize("select", get_args(config.ScalingRL.model_fields["select"].annotation))
def test_the_contract(select: Any) -> None:
    check_contract(
        lambda ids, seed: make(ids, seed, select=select), epochs=False, rollouts=3, max_age=1
    )


@pytest.mark.slow
def test_the_contract_with_adaptive_weights_levels_and_a_gate_that_rejects() -> None:
    def build(ids: Sequence[str], seed: int) -> Gate:
        levels = [None if i % 7 == 0 else i % 5 + 1 for i in range(len(ids))]
        return make(ids, seed, Dapo, adaptive=True, levels=levels)

    check_contract(build, epochs=False, max_age=1)


def test_an_epoch_hands_out_each_of_the_active_set_once() -> None:
    source = ScalingRLSource(IDS, seed=3)
    first = source.pick(18, clock())
    assert (
        source.version == 1
        and sorted(first) == sorted(active_ids(source))
        and len(set(first)) == 18
    )
    second = source.pick(18, clock(step=1))
    assert source.version == 2 and sorted(second) == sorted(active_ids(source))
    assert set(first) != set(second)
    assert source.metrics()["curriculum/epoch"] == 2.0
    assert source.metrics()["curriculum/distinct"] == len({*first, *second})


def test_an_active_set_fills_a_batch_where_it_can() -> None:
    """18 % of 20 prompts are 4; a batch of 16 groups gets 16, one of 30 all there are."""
    assert [
        len(set(ScalingRLSource(IDS[:20], 0).pick(n, clock(groups=n)))) for n in (4, 16, 20)
    ] == [4, 16, 20]
    assert len(ScalingRLSource(IDS[:20], 0).pick(30, clock(groups=30))) == 30


def test_what_is_given_back_comes_first_even_if_it_is_no_longer_active() -> None:
    source = ScalingRLSource(IDS, seed=1)
    a, b, *_ = source.pick(18, clock())
    source.refresh(clock())
    source.give_back([b, a])
    assert source.pick(2, clock()) == [b, a]


def test_scores_by_hand() -> None:
    """Four prompts, u = 0. Pass rates 1/4, 1/2, 3/4, 1 (mean 5/8, variance 5/64), levels 4, 3, 2, 1 (variance 1.25, of
    the three with signal the mean is 3) and lengths 10, 20, 30, 40 (variance 125, mean of the three 20)."""
    source = ScalingRLSource(IDS[:4], seed=0, levels=[4, 3, 2, 1])
    source.drawn(IDS[:4])
    for row, letters in enumerate(("rwww", "rrww", "rrrw", "rrrr")):
        source.observe(judged(f"p{row}", row, letters, length=10 * (row + 1)))
    parts = source._components_of(u=0.0)
    bell = np.exp([-0.4, 0.0, -0.4, -1.6])
    assert parts[0] == pytest.approx(bell, rel=1e-5)
    assert parts[1] == pytest.approx(bell, rel=1e-5)
    assert parts[2] == pytest.approx([np.exp(-0.9), np.exp(-0.1), np.exp(-0.1), 0.0], rel=1e-5)


def test_a_prompt_without_a_level_is_of_average_difficulty_however_often_it_is_solved() -> None:
    """Levels 2 and 10: mean 6, deviation 4, so exp(-1/2) each; a prompt without one has the average's 1."""
    source = ScalingRLSource(IDS[:3], seed=0, levels=[2, 10, None])
    visit_all(source, ["rrrr", "rrrr", "rwww"])
    parts = source._components_of(u=0.0)
    assert parts[0] == pytest.approx([np.exp(-0.5), np.exp(-0.5), 1.0], rel=1e-5)


def test_where_few_are_solved_the_set_is_of_those_that_are() -> None:
    """A tenth of 1,000 prompts is solved every second time, the others never: after all were seen, most of a set of a
    tenth has signal; those tried again, 90 a set, compete with them."""
    ids = [f"p{i}" for i in range(1000)]
    source = ScalingRLSource(ids, seed=0, share=0.1, new=0.0, old=0.0)
    visit_all(source, ["rwrw", *["wwww"] * 9])
    source.refresh(clock(progress=0.5, step=1))
    solved = sum(int(i[1:]) % 10 == 0 for i in active_ids(source))
    assert len(active_ids(source)) == 100 and solved > 50


def test_prompts_without_signal_leave_and_few_come_back() -> None:
    """A third each mixed, all wrong and all right; of 3,000 prompts 18 % are 540, all of which have signal but those
    tried again: a tenth of the wrong and a hundredth of the right compete with the mixed."""
    ids = [f"p{i}" for i in range(3000)]
    source = ScalingRLSource(ids, seed=0, new=0.0)
    source.refresh(clock())
    visit_all(source, ["rw", "ww", "rr"])
    source.refresh(clock(0.3, step=1))
    kinds = Counter(int(i[1:]) % 3 for i in active_ids(source))
    assert kinds.total() == 540
    assert kinds[0] > 400 and 0 < kinds[1] < 100 and kinds[2] < 15


def test_a_hard_prompt_is_not_forgotten_at_its_first_group_without_spread() -> None:
    """Pass rates like those of SmolLM2 on GSM8K, over 300 updates: of a prompt solved in one response of ten, 43 % of
    the groups have no spread. If one such group excluded it, the set would shrink to a quarter of its 540 prompts."""
    updates, groups, rng = 300, 32, np.random.default_rng(0)
    ids = [f"p{i}" for i in range(3000)]
    rates, lengths = (
        rng.beta(0.146, 3.34, len(ids)),
        rng.lognormal(5.3, 0.5, len(ids)).astype(int) + 1,
    )
    source, mixed = ScalingRLSource(ids, seed=0), list[bool]()
    for step in range(updates):
        for number, prompt_id in enumerate(
            source.pick(groups, clock(step / updates, groups, step))
        ):
            row = int(prompt_id[1:])
            right = int(rng.binomial(8, rates[row]))
            mixed.append(0 < right < 8)
            source.observe(
                judged(
                    prompt_id, groups * step + number, "r" * right + "w" * (8 - right), lengths[row]
                )
            )
    assert len(source.active) > 300
    assert np.mean(mixed[-50 * groups :]) > 0.5


def test_when_nothing_has_signal_the_set_still_fills_a_batch() -> None:
    source = ScalingRLSource(IDS[:30], seed=0)
    source.refresh(clock())
    visit_all(source, ["ww"])
    assert len(set(source.pick(4, clock()))) == 4


def test_new_prompts_keep_their_share() -> None:
    """The level alone counts, and one of the five prompts that are new is of a level far off."""
    ids = [f"p{i}" for i in range(200)]
    source = ScalingRLSource(
        ids, 0, new=0.5, old=0.0, share=0.1, weights=(1.0, 0.0, 0.0), levels=[3] * 199 + [9]
    )
    hand_out(source, range(195))
    source.refresh(clock(step=1))
    assert {"p195", "p196", "p197", "p198", "p199"} <= set(active_ids(source))


@pytest.mark.parametrize(
    ("old", "expected"), [(0.0, 0), (0.12, 3), (0.25, 5), (0.5, 10), (1.0, 20)]
)
def test_once_solved_prompts_keep_their_share(old: float, expected: int) -> None:
    """Late in the run the best scores win, and R = 1 of the 100 new prompts is the best: of a set of 20 as many were
    solved before as `old` says, rounded up. Those never solved are as old, and none of them is in the set."""
    ids = [f"p{i}" for i in range(200)]
    source = ScalingRLSource(ids, seed=0, new=0.0, old=old, share=0.1, weights=(0.0, 0.0, 1.0))
    hand_out(source, range(100))
    for row in range(100):
        source.observe(judged(ids[row], row, ("rrrw", "rrrw", "wwww", "wwww")[row % 4]))
    source.refresh(clock(1.0, step=1))
    rows = [int(i[1:]) for i in active_ids(source)]
    assert len(rows) == 20
    assert sum(row < 100 and row % 4 < 2 for row in rows) == expected
    assert sum(row < 100 for row in rows) == expected


def test_the_difficulty_target_stays_where_prompts_have_signal() -> None:
    """Levels 7, 8 and 9, of which 9 is never solved: at the end of the run the printed target, 10.4, would fill the set
    with it. Of the new prompts, too, few are of level 9 then."""
    ids, levels = [f"p{i}" for i in range(3000)], [7.0 + i % 3 for i in range(3000)]
    source = ScalingRLSource(ids, seed=0, levels=levels)
    hand_out(source, range(300))
    for row in range(300):
        source.observe(judged(ids[row], row, ("rrww", "rwww", "wwww")[row % 3]))
    source.refresh(clock(1.0, step=1))
    counts = Counter(levels[int(i[1:])] for i in active_ids(source))
    assert len(active_ids(source)) == 540 and counts[9.0] < 20


def test_levels_that_are_all_alike_rule_out_nothing() -> None:
    source = ScalingRLSource(IDS, seed=0, levels=[4.0] * 100)
    assert source._components_of(u=1.0)[0].tolist() == [1.0] * 100


def test_without_levels_difficulty_has_no_weight() -> None:
    """Weights 0.3 and 0.3 become halves, so that a threshold means the same with levels and without."""
    for levels in ((), [None] * 100, ["hard"] * 100):
        assert ScalingRLSource(IDS, 0, levels=levels).weights == pytest.approx((0.0, 0.5, 0.5))
    assert ScalingRLSource(IDS, 0, levels=[3, *[None] * 99]).weights == pytest.approx(
        (0.4, 0.3, 0.3)
    )
    with pytest.raises(
        WhetError, match="weigh difficulty alone, but no training prompt has a number as its level"
    ):
        ScalingRLSource(IDS, 0, weights=(1.0, 0.0, 0.0))
    assert (
        len(ScalingRLSource(IDS, 0, weights=(1.0, 0.0, 0.0), select="random").pick(18, clock()))
        == 18
    )


LEVELS = {
    "even": ({1: 0.2, 2: 0.2, 3: 0.2, 4: 0.2, 5: 0.2}, {1: 0.5, 2: 0.15, 3: 0.03, 4: 0.0, 5: 0.0}),
    "mostly easy": (
        {1: 0.45, 2: 0.35, 3: 0.12, 4: 0.05, 5: 0.03},
        {1: 0.4, 2: 0.1, 3: 0.0, 4: 0.0, 5: 0.0},
    ),
    "narrow and hard": ({7: 0.4, 8: 0.35, 9: 0.25}, {7: 0.5, 8: 0.15, 9: 0.0}),
}
"""Share and pass rate of each level."""


def mixed_share(source: Any, rates: np.ndarray, levels: np.ndarray, seed: int) -> float:
    """Counts the mixed groups in 40 updates of 16 groups of 8 rollouts; hard prompts take more tokens."""
    rng, mixed, updates = np.random.default_rng(seed), 0, 40
    for step in range(updates):
        for number, prompt_id in enumerate(
            source.pick(16, clock(step / updates, groups=16, step=step))
        ):
            row = int(prompt_id[1:])
            letters = "".join("r" if right else "w" for right in rng.random(8) < rates[row])
            mixed += len(set(letters)) == 2
            source.observe(
                judged(prompt_id, 16 * step + number, letters, length=int(60 * levels[row]))
            )
    return mixed / (16 * updates)


@pytest.mark.parametrize("name", LEVELS)
def test_no_fewer_groups_are_mixed_than_of_plain_epochs(name: str) -> None:
    """1,500 prompts, most of which an epoch has not met: the choice must not run into levels that are never solved."""
    shares, passed = LEVELS[name]
    ids, gains = [f"p{i}" for i in range(1500)], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        levels = rng.choice(list(shares), len(ids), p=list(shares.values()))
        rates = np.array([passed[level] for level in levels])
        uniform = mixed_share(UniformSource(ids, seed), rates, levels, seed)
        gains.append(
            mixed_share(ScalingRLSource(ids, seed, levels=levels), rates, levels, seed) - uniform
        )
    assert np.mean(gains) > 0.0


def test_the_pool_moves_to_harder_prompts() -> None:
    levels = [float(i % 5 + 1) for i in range(1000)]
    ids = [f"p{i}" for i in range(1000)]

    def mean_level(progress: float) -> float:
        source = ScalingRLSource(ids, seed=0, levels=levels)
        source.refresh(clock(progress))
        assert source.metrics()["curriculum/level_mean"] == pytest.approx(
            np.mean([levels[int(i[1:])] for i in active_ids(source)])
        )
        return source.metrics()["curriculum/level_mean"]

    assert mean_level(0.0) == pytest.approx(3.0, abs=0.2) and mean_level(1.0) > 3.7


def test_controls_ignore_the_score() -> None:
    ids = [f"p{i}" for i in range(1000)]
    fixed, random = (
        ScalingRLSource(ids, 0, select=mode, levels=[1] * 900 + [9] * 100)
        for mode in ("fixed", "random")
    )
    for source in (fixed, random):
        first = source.pick(180, clock(1.0))
        assert 5 < sum(int(i[1:]) >= 900 for i in first) < 32  # a tenth of 180, give or take
        second = source.pick(180, clock(1.0))
        assert first != second and (set(first) == set(second)) == (source is fixed)
    assert fixed.metrics()["curriculum/overlap"] == 1.0
    assert fixed.metrics()["curriculum/distinct"] == 180


def test_adaptive_weights_move_towards_what_paid_and_plain_ones_stay() -> None:
    """Levels near the average are mixed, those far off are not: difficulty predicts the gain."""
    ids = [f"p{i}" for i in range(50)]
    levels = [float(i % 5 + 1) for i in range(50)]
    for adaptive in (True, False):
        source = ScalingRLSource(
            ids, 0, adaptive=adaptive, levels=levels, select="des_threshold", threshold=0.01
        )
        source.refresh(clock())
        visit_all(source, ["wwww", "rwww", "rrww", "rrrw", "rrrr"])
        source.refresh(clock())
        assert (source.weights[0] > 0.41) == adaptive
        assert sum(source.weights) == pytest.approx(1.0)
        assert ("curriculum/weight_difficulty" in source.metrics()) == adaptive


def test_metrics_tell_of_the_set() -> None:
    source = ScalingRLSource(IDS, seed=0)
    assert source.metrics()["curriculum/active"] == 0
    source.refresh(clock())
    visit_all(source, ["rw", "ww"])
    source.refresh(clock())
    metrics = source.metrics()
    assert metrics["curriculum/active"] == len(active_ids(source))
    assert metrics["curriculum/new_share"] == 0 and metrics["curriculum/distinct"] == 100
    assert 0 < metrics["curriculum/zero_variance"] < 1 and 0 < metrics["curriculum/des_mean"] <= 1


def test_scores_are_shown_once_for_each_set() -> None:
    source = ScalingRLSource(IDS, 0, share=0.1)
    assert source.pictures() == {}
    source.pick(4, clock())
    shown = source.pictures()["scores"]
    assert shown["low"] == shown["high"] and shown["counts"][0] == 100, "all are alike"
    assert shown["active"] == [10, *[0] * 19]
    source.pick(3, clock())
    assert source.pictures() == {}, "the same set"
    visit_all(source, ["rrww", "wwww"])
    source.pick(10, clock(step=1))
    shown = source.pictures()["scores"]
    assert shown["counts"][0] == 50 and shown["counts"][-1] == 50 and shown["low"] < shown["high"]
    mixed = sum(row % 2 == 0 for row in source.active.tolist())
    assert (shown["active"][0], shown["active"][-1]) == (len(source.active) - mixed, mixed)
    fresh, saved = (ScalingRLSource(IDS, 0, share=0.1) for _ in range(2))
    for each in (fresh, saved):
        each.prepare()
    fresh.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert fresh.pictures() == {} and "scores" in saved.pictures()


def test_unjudged_prompts_do_not_stay_new() -> None:
    source = ScalingRLSource(IDS[:10], seed=0, new=1.0, old=0.0, share=0.5)
    first = source.pick(5, clock())
    assert set(source.pick(5, clock())).isdisjoint(first)


def test_rollouts_of_other_prompts_and_levels_that_are_words_do_no_harm() -> None:
    source = ScalingRLSource(IDS, seed=0, levels=["hard", 2, *[None] * 98])  # type: ignore[list-item]
    source.observe(judged("another", 0, "rw"))
    assert source._has_level[:3].tolist() == [False, True, False]
    assert source.version == 0 and len(source.pick(18, clock())) == 18


def test_adaptive_weights_may_be_switched_on_at_a_resume() -> None:
    plain, adaptive = ScalingRLSource(IDS, 0), ScalingRLSource(IDS, 0, adaptive=True)
    plain.observe(judged(plain.pick(18, clock())[0], 0, "rw"))
    adaptive.load_state_dict(json.loads(json.dumps(plain.state_dict())))
    assert len(adaptive.pick(40, clock())) == 40


@pytest.mark.parametrize("select", ["gumbel_topk", "random", "fixed"])
def test_the_share_is_of_all_prompts_however_many_there_are(select: Any) -> None:
    """18 % of 200,000, from all over the data; a set of an eighth of them would be a set of an eighth of the share."""
    source = ScalingRLSource([f"p{i}" for i in range(200_000)], seed=0, select=select)
    source.refresh(clock())
    assert len(source.active) == 36_000
    quarters = np.bincount(source.active % 4, minlength=4)
    assert quarters.min() > 8_000  # 9,000 each, give or take


@pytest.mark.parametrize("gate", [Uniform, Dapo])
@pytest.mark.parametrize("select", ["gumbel_topk", "des_threshold", "rel_threshold", "random"])
def test_an_update_gets_no_prompt_twice_while_there_are_others(
    gate: type[Gate], select: Any
) -> None:
    """One prompt in six has signal, so that DAPO asks for up to eight times a batch. The set is as large as what an
    update asks for, and one that begins within an update leaves out what that update has."""
    ids = [f"p{i}" for i in range(400)]
    source = ScalingRLSource(
        ids, 0, select=select, share=0.01, threshold=0.95, levels=[i % 5 for i in range(400)]
    )
    curriculum = gate(source, sampling=SAMPLING, rollouts=4)
    version = before = 0
    for step in range(12):
        now, asked = clock(step / 12, groups=8, step=step), []
        while curriculum.emit(now) is None:
            for request in curriculum.plan(now):
                asked.append(request.prompt_id)
                letters = "rrww" if int(request.prompt_id[1:]) % 6 == 0 else "wwww"
                curriculum.observe(answers(request, letters, version=step))
        assert len(asked) == len(set(asked)), f"step {step} asked for a prompt twice"
        assert source.version == version or len(source.active) >= before, (
            "a set is less than an update asked for"
        )
        version, before = source.version, len(asked)


@pytest.mark.slow
def test_a_pool_spends_more_on_prompts_with_signal() -> None:
    """Six of ten prompts are always or never solved; plain epochs give them six of ten groups for ever."""
    world = World(
        prompts=200,
        pass_rates=(0.0, 1.0, 0.5, 0.0, 1.0, 0.4, 0.0, 0.6, 1.0, 0.5),
        groups=10,
        updates=60,
    )

    def late_signal(select: Any) -> float:
        def build(ids: Sequence[str], seed: int) -> Gate:
            source = ScalingRLSource(ids, seed, select=select)
            return Uniform(source, sampling=SAMPLING, rollouts=8)

        return play(build, world, epochs=False).curriculum.metrics()["curriculum/signal_share"]

    pools = [late_signal(select) for select in ("gumbel_topk", "des_threshold", "rel_threshold")]
    assert late_signal("random") < 0.5 and min(pools) > 0.65


def test_cures_draws_inside_the_pool() -> None:
    """The active set moves on once as many prompts were drawn inside it as it holds, whatever draws them."""
    source = CuresSource(IDS, seed=0, tau=0.1, pool=(pool := ScalingRLSource(IDS, seed=0)))
    for version in (1, 2, 3):
        for update in range(6):
            picked = source.pick(3, clock(step=6 * version + update))
            assert pool.version == version and set(picked) <= set(active_ids(pool))


def test_cures_draws_no_prompt_twice_for_an_update_while_there_are_others() -> None:
    """A set of a hundredth of 400 prompts, updates of 8 groups, for which 5 to 40 prompts are asked in two draws."""
    ids = [f"p{i}" for i in range(400)]
    source = CuresSource(
        ids, seed=0, tau=0.1, pool=(pool := ScalingRLSource(ids, seed=0, share=0.01))
    )
    asks = [8, 40, 5, 33, 16, 8, 40, 21]
    for step, k in enumerate(asks):
        version, now = pool.version, clock(groups=8, step=step)
        picked = [*source.pick(k, now), *source.pick(3, now)]
        assert len(set(picked)) == k + 3
        assert pool.version == version or step == 0 or len(pool.active) >= asks[step - 1] + 3


@pytest.mark.slow
def test_the_contract_of_speed_and_cures_over_the_pool() -> None:
    def over_cures(ids: Sequence[str], seed: int) -> Gate:
        source = CuresSource(ids, seed, tau=0.1, pool=ScalingRLSource(ids, seed))
        return Speed(source, sampling=SAMPLING, rollouts=6, n_init=3, max_age=1)

    def over_pool(ids: Sequence[str], seed: int) -> Gate:
        return Speed(ScalingRLSource(ids, seed), sampling=SAMPLING, rollouts=6, n_init=3, max_age=1)

    for build in (over_pool, over_cures):
        check_contract(build, epochs=False, max_age=1)


knobs = st.fixed_dictionaries(
    {
        "select": st.sampled_from(get_args(config.ScalingRL.model_fields["select"].annotation)),
        "adaptive": st.booleans(),
        "share": st.floats(0.01, 1.0),
        "threshold": st.floats(0.01, 0.99),
        "new": st.floats(0.0, 0.5),
        "old": st.floats(0.0, 0.5),
    }
)
worlds = st.builds(
    World,
    prompts=st.integers(1, 40),
    pass_rates=st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=1, max_size=4).map(tuple),
    groups=st.integers(1, 5),
    updates=st.integers(1, 8),
    slots=st.one_of(st.none(), st.integers(1, 40)),
    unjudged=st.sampled_from([0.0, 0.4]),
    cut=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)


@settings(deadline=None, max_examples=40)
@given(knobs, worlds)
def test_no_setting_starves_loops_or_gives_nan(chosen: dict[str, Any], world: World) -> None:
    def build(ids: Sequence[str], seed: int) -> Gate:
        return make(ids, seed, **chosen)

    check_world(build, world, epochs=False, max_age=1)
    run = play(build, world, epochs=False)
    assert run.batches == world.updates or world.unjudged > 0
    assert np.isfinite(list(run.curriculum.metrics().values())).all()


@given(st.lists(st.integers(0, 30), max_size=10), st.integers(0, 10), st.booleans())
def test_a_saved_source_goes_on_as_if_never_interrupted(
    picks: list[int], save_at: int, adaptive: bool
) -> None:
    def run(saving: bool) -> list[Any]:
        source, log = ScalingRLSource(IDS, seed=5, adaptive=adaptive), []
        for number, k in enumerate(picks):
            picked = source.pick(k, clock(number / 10))
            for i, prompt_id in enumerate(picked):
                source.observe(
                    judged(prompt_id, 100 * number + i, "rwr" if int(prompt_id[1:]) % 3 else "www")
                )
            source.give_back(picked[::5])
            log.append((picked, source.metrics()))
            if saving and number == save_at:
                state = json.loads(json.dumps(source.state_dict()))
                source = ScalingRLSource(IDS, seed=5, adaptive=adaptive)
                source.load_state_dict(state)
        return [*log, source.state_dict()]

    assert run(True) == run(False)


def test_the_state_is_small() -> None:
    source = ScalingRLSource([f"id-{i}" for i in range(100_000)], seed=0)
    source.observe([r for i, p in enumerate(source.pick(10, clock())) for r in judged(p, i, "rw")])
    # 18,000 rows of four bytes, and ten prompts
    assert len(json.dumps(source.state_dict())) < 110_000


def test_bad_settings_and_other_data_are_refused() -> None:
    with pytest.raises(WhetError, match=r"new = 0.7 and scalingrl.old = 0.5"):
        ScalingRLSource(IDS, 0, new=0.7, old=0.5)
    for wrong in ((0.0, 0.0, 0.0), (0.4, -0.1, 0.7)):
        with pytest.raises(WhetError, match=r"scalingrl\.weights"):
            ScalingRLSource(IDS, 0, weights=wrong)
    with pytest.raises(WhetError, match="no prompts"):
        ScalingRLSource([], 0)
    with pytest.raises(WhetError, match="other prompts"):
        ScalingRLSource(IDS[::-1], 0).load_state_dict(ScalingRLSource(IDS, 0).state_dict())


def test_a_prepared_set_serves_the_first_update_and_grows_where_it_is_too_small() -> None:
    ids = [f"p{i}" for i in range(50)]
    plain, prepared = ScalingRLSource(ids, 3, share=0.2), ScalingRLSource(ids, 3, share=0.2)
    prepared.prepare()
    assert prepared.pick(10, at()) == plain.pick(10, at()) and prepared.version == 1
    small = ScalingRLSource(ids, 3, share=0.02)
    small.prepare()
    assert len(small.active) == 1
    assert len(set(small.pick(12, at()))) == 12 == len(small.active)


def test_the_first_set_of_a_curriculum_is_chosen_before_its_first_update() -> None:
    ids = [f"p{i}" for i in range(100)]
    facts = Facts(ids=ids, characters=[50 + i for i in range(100)])
    for name in ("scalingrl", "all"):
        wanted = config.CurriculumSettings(name=name, groups=4, rollouts=8)
        made = build_curriculum(wanted, facts=facts, sampling=SAMPLING, seed=0)
        stage = made.inner if isinstance(made, Stages) else made
        pool = getattr(stage.source, "pool", stage.source)
        assert pool.version == 1 and len(made.plan(at())) > 0 and pool.version == 1
