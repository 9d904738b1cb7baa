from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, at

from whet.curriculum import scalingrl
from whet.curriculum.contract import check_contract, check_world, play
from whet.curriculum.dapo import Dapo
from whet.curriculum.des import MODES
from whet.curriculum.gate import Gate
from whet.curriculum.rho import CuresSource
from whet.curriculum.scalingrl import ScalingRLSource
from whet.curriculum.simulator import World
from whet.curriculum.speed import Speed
from whet.curriculum.uniform import Uniform
from whet.errors import WhetError
from whet.types import Clock, Rollout

IDS = [f"p{i}" for i in range(100)]


def clock(progress: float = 0.0, groups: int = 4) -> Clock:
    return replace(at(groups=groups), progress=progress)


def make(ids: Sequence[str], seed: int, gate: type[Gate] = Uniform, **knobs: Any) -> Gate:
    return gate(ScalingRLSource(ids, seed, **knobs), sampling=SAMPLING, rollouts=3, max_age=1)


def told(prompt_id: str, group: int, letters: str, length: int = 10) -> list[Rollout]:
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
    """Every prompt is handed out once and gets these verdicts, in turn."""
    source.drawn(source.all_ids)
    for row, prompt_id in enumerate(source.all_ids):
        source.observe(told(prompt_id, first_group + row, letters[row % len(letters)]))


@pytest.mark.parametrize("select", MODES)
def test_the_contract(select: Any) -> None:
    check_contract(lambda ids, seed: make(ids, seed, select=select), epochs=False, rollouts=3, max_age=1)


def test_the_contract_with_adaptive_weights_levels_and_a_gate_that_rejects() -> None:
    def build(ids: Sequence[str], seed: int) -> Gate:
        levels = [None if i % 7 == 0 else i % 5 + 1 for i in range(len(ids))]
        return make(ids, seed, Dapo, adaptive=True, levels=levels)

    check_contract(build, epochs=False, max_age=1)


def test_an_epoch_hands_out_each_of_the_active_set_once() -> None:
    source = ScalingRLSource(IDS, seed=3)
    first = source.pick(18, clock())
    assert source.version == 1 and sorted(first) == sorted(source.ids()) and len(set(first)) == 18
    second = source.pick(18, clock())
    assert source.version == 2 and sorted(second) == sorted(source.ids())
    assert set(first) != set(second)
    assert source.metrics()["curriculum/epoch"] == 2.0
    assert source.metrics()["curriculum/distinct"] == len({*first, *second})


def test_an_active_set_fills_a_batch_where_it_can() -> None:
    """18 % of 20 prompts are 4; a batch of 16 groups gets 16, one of 30 all there are."""
    assert [len(set(ScalingRLSource(IDS[:20], 0).pick(n, clock(groups=n)))) for n in (4, 16, 20)] == [4, 16, 20]
    assert len(ScalingRLSource(IDS[:20], 0).pick(30, clock(groups=30))) == 30


def test_what_is_given_back_comes_first_even_if_it_is_no_longer_active() -> None:
    source = ScalingRLSource(IDS, seed=1)
    a, b, *_ = source.pick(18, clock())
    source.refresh(clock())
    source.give_back([b, a])
    assert source.pick(2, clock()) == [b, a]


def test_scores_by_hand() -> None:
    """Four prompts, u = 0. Pass rates 1/4, 1/2, 3/4, 1 (mean 5/8, variance 5/64), levels 4, 3, 2, 1 (mean 2.5,
    variance 1.25) and lengths 10, 20, 30, 40 (mean 25, variance 125)."""
    source = ScalingRLSource(IDS[:4], seed=0, levels=[4, 3, 2, 1])
    source.drawn(IDS[:4])
    for row, letters in enumerate(("rwww", "rrww", "rrrw", "rrrr")):
        source.observe(told(f"p{row}", row, letters, length=10 * (row + 1)))
    parts = source._components_of(source.history, source._given, source._has_level, u=0.0)
    bell = np.exp([-0.9, -0.1, -0.1, -0.9])
    assert parts[0] == pytest.approx(bell, rel=1e-5)
    assert parts[1] == pytest.approx(bell, rel=1e-5)
    assert parts[2] == pytest.approx([np.exp(-0.9), np.exp(-0.1), np.exp(-0.1), 0.0], rel=1e-5)


def test_a_prompt_without_a_level_is_of_average_difficulty_however_often_it_is_solved() -> None:
    """Levels 2 and 10: mean 6, deviation 4, so exp(-1/2) each; who brings none has the average's 1."""
    source = ScalingRLSource(IDS[:3], seed=0, levels=[2, 10, None])
    visit_all(source, ["rrrr", "rrrr", "rwww"])
    parts = source._components_of(source.history, source._given, source._has_level, u=0.0)
    assert parts[0] == pytest.approx([np.exp(-0.5), np.exp(-0.5), 1.0], rel=1e-5)


def test_where_few_are_solved_the_set_is_of_those_that_are() -> None:
    """Of 1,000 prompts a tenth is solved every second time, the others never: after all were seen, most of a set of a
    tenth has signal; those tried again, 90 a set, compete with them."""
    ids = [f"p{i}" for i in range(1000)]
    source = ScalingRLSource(ids, seed=0, share=0.1, new=0.0, old=0.0)
    source.drawn(ids)
    visit_all(source, ["rwrw", *["wwww"] * 9])
    source.refresh(clock(progress=0.5))
    solved = sum(int(i[1:]) % 10 == 0 for i in source.ids())
    assert len(source.ids()) == 100 and solved > 50


def test_prompts_without_signal_leave_and_few_come_back() -> None:
    """A third each mixed, all wrong and all right; of 3,000 prompts 18 % are 540, all of which have signal but those
    tried again: a tenth of the wrong and a hundredth of the right compete with the mixed."""
    ids = [f"p{i}" for i in range(3000)]
    source = ScalingRLSource(ids, seed=0, new=0.0)
    source.refresh(clock())
    visit_all(source, ["rw", "ww", "rr"])
    source.refresh(clock(0.3))
    kinds = Counter(int(i[1:]) % 3 for i in source.ids())
    assert kinds.total() == 540
    assert kinds[0] > 400 and 0 < kinds[1] < 100 and kinds[2] < 15


def test_when_nothing_has_signal_the_set_still_fills_a_batch() -> None:
    source = ScalingRLSource(IDS[:30], seed=0)
    source.refresh(clock())
    visit_all(source, ["ww"])
    assert len(set(source.pick(4, clock()))) == 4


def test_new_and_once_solved_prompts_keep_their_shares() -> None:
    """Half was seen and is mixed; late in the run the best scores alone would win."""
    ids = [f"p{i}" for i in range(200)]
    source = ScalingRLSource(ids, seed=0, new=0.2, old=0.5, share=0.1, weights=(0.0, 0.0, 1.0))
    source.refresh(clock())
    source.drawn(ids[:100])
    for row in range(100):
        source.observe(told(ids[row], row, "rwww" if row % 2 else "rrrw"))
    source.used = len(source.active)
    source.refresh(clock(1.0))
    seen = sum(int(i[1:]) < 100 for i in source.ids())
    assert len(source.ids()) == 20 and seen == 10  # without the share new prompts (R = 1) would take all
    starved = ScalingRLSource(ids, seed=0, new=0.5, old=0.0, share=0.1, weights=(1.0, 0.0, 0.0), levels=[3] * 199 + [9])
    starved.refresh(clock())
    starved.drawn(ids[:195])
    starved.refresh(clock())
    assert {"p195", "p196", "p197", "p198", "p199"} <= set(
        starved.ids()
    )  # all five that are new, though p199 is far off


def test_the_pool_moves_to_harder_prompts() -> None:
    levels = [float(i % 5 + 1) for i in range(1000)]
    ids = [f"p{i}" for i in range(1000)]

    def mean_level(progress: float) -> float:
        source = ScalingRLSource(ids, seed=0, levels=levels)
        source.refresh(clock(progress))
        assert source.metrics()["curriculum/level_mean"] == pytest.approx(
            np.mean([levels[int(i[1:])] for i in source.ids()])
        )
        return source.metrics()["curriculum/level_mean"]

    assert mean_level(0.0) == pytest.approx(3.0, abs=0.2) and mean_level(1.0) > 3.7


def test_controls_ignore_the_score() -> None:
    ids = [f"p{i}" for i in range(1000)]
    fixed, random = (ScalingRLSource(ids, 0, select=mode, levels=[1] * 900 + [9] * 100) for mode in ("fixed", "random"))
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
        source = ScalingRLSource(ids, 0, adaptive=adaptive, levels=levels, select="des_threshold", threshold=0.01)
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
    assert metrics["curriculum/active"] == len(source.ids())
    assert metrics["curriculum/new_share"] == 0 and metrics["curriculum/distinct"] == 100
    assert 0 < metrics["curriculum/zero_variance"] < 1 and 0 < metrics["curriculum/des_mean"] <= 1


def test_unjudged_prompts_do_not_stay_new() -> None:
    source = ScalingRLSource(IDS[:10], seed=0, new=1.0, old=0.0, share=0.5)
    first = source.pick(5, clock())
    assert set(source.pick(5, clock())).isdisjoint(first)


def test_rollouts_of_other_prompts_and_levels_that_are_words_do_no_harm() -> None:
    source = ScalingRLSource(IDS, seed=0, levels=["hard", 2, *[None] * 98])  # type: ignore[list-item]
    source.observe(told("another", 0, "rw"))
    assert source._has_level[:3].tolist() == [False, True, False]
    assert source.ids() == IDS and len(source.pick(18, clock())) == 18


def test_adaptive_weights_may_be_switched_on_at_a_resume() -> None:
    plain, adaptive = ScalingRLSource(IDS, 0), ScalingRLSource(IDS, 0, adaptive=True)
    plain.observe(told(plain.pick(18, clock())[0], 0, "rw"))
    adaptive.load_state_dict(json.loads(json.dumps(plain.state_dict())))
    assert len(adaptive.pick(40, clock())) == 40


def test_beyond_the_most_candidates_prompts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalingrl, "MOST_CANDIDATES", 30)
    for select in ("gumbel_topk", "fixed"):
        source = ScalingRLSource(IDS, seed=0, select=select, share=0.2)
        sets = []
        for _ in range(4):
            source.refresh(clock())
            sets.append({int(i[1:]) for i in source.ids()})
            source.drawn(source.ids())
        assert [len(some) for some in sets] == [5] * 4
        turns = [{row % 4 for row in some} for some in sets]
        assert turns == ([{0}, {1}, {2}, {3}] if select == "gumbel_topk" else [{0}] * 4)
    check_world(lambda ids, seed: make(ids, seed, adaptive=True), World(prompts=120), epochs=False, max_age=1)


def test_a_pool_spends_more_on_prompts_with_signal() -> None:
    """Six of ten prompts are always or never solved; plain epochs give them six of ten groups for ever."""
    world = World(prompts=200, pass_rates=(0.0, 1.0, 0.5, 0.0, 1.0, 0.4, 0.0, 0.6, 1.0, 0.5), groups=10, updates=60)

    def late_signal(select: Any) -> float:
        def build(ids: Sequence[str], seed: int) -> Gate:
            source = ScalingRLSource(ids, seed, select=select)
            return Uniform(source, sampling=SAMPLING, rollouts=8)

        return play(build, world, epochs=False).curriculum.metrics()["curriculum/signal_share"]

    pools = [late_signal(select) for select in ("gumbel_topk", "des_threshold", "rel_threshold")]
    assert late_signal("random") < 0.5 and min(pools) > 0.65


def test_cures_draws_inside_the_pool() -> None:
    """The active set moves on once as many prompts were drawn inside it as it holds, whoever draws them."""
    source = CuresSource(IDS, seed=0, tau=0.1, pool=(pool := ScalingRLSource(IDS, seed=0)))
    for version in (1, 2, 3):
        for _ in range(6):
            picked = source.pick(3, clock())
            assert pool.version == version and set(picked) <= set(pool.ids())


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
        "select": st.sampled_from(MODES),
        "adaptive": st.booleans(),
        "share": st.floats(0.01, 1.0),
        "threshold": st.floats(0.01, 0.99),
        "floor": st.floats(0.0, 0.99),
        "new": st.floats(0.0, 0.5),
        "old": st.floats(0.0, 0.5),
        "target": st.sampled_from(["moving", "fixed"]),
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
def test_a_saved_source_goes_on_as_if_never_interrupted(picks: list[int], save_at: int, adaptive: bool) -> None:
    def run(saving: bool) -> list[Any]:
        source, log = ScalingRLSource(IDS, seed=5, adaptive=adaptive), []
        for number, k in enumerate(picks):
            picked = source.pick(k, clock(number / 10))
            for i, prompt_id in enumerate(picked):
                source.observe(told(prompt_id, 100 * number + i, "rwr" if int(prompt_id[1:]) % 3 else "www"))
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
    source.observe([r for i, p in enumerate(source.pick(10, clock())) for r in told(p, i, "rw")])
    assert len(json.dumps(source.state_dict())) < 110_000  # 18,000 rows of four bytes, and ten prompts


def test_bad_settings_and_other_data_are_refused() -> None:
    with pytest.raises(WhetError, match=r"new = 0.7 and scalingrl.old = 0.5"):
        ScalingRLSource(IDS, 0, new=0.7, old=0.5)
    with pytest.raises(WhetError, match=r"scalingrl\.weights"):
        ScalingRLSource(IDS, 0, weights=(0.0, 0.0, 0.0))
    with pytest.raises(WhetError, match='no selection "best"'):
        ScalingRLSource(IDS, 0, select="best")  # type: ignore[arg-type]
    with pytest.raises(WhetError, match="no prompts"):
        ScalingRLSource([], 0)
    with pytest.raises(WhetError, match="other prompts"):
        ScalingRLSource(IDS[::-1], 0).load_state_dict(ScalingRLSource(IDS, 0).state_dict())
