from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, answers, at, mean_rates, sampling_weights

from whet.curriculum.gate import Dapo
from whet.curriculum.rho import CuresSource
from whet.curriculum.scalingrl import ScalingRLSource
from whet.errors import WhetError
from whet.testing.contract import WORLDS as ALL_WORLDS
from whet.testing.contract import check_contract, check_world
from whet.types import Clock, Request, Rollout

IDS = [f"p{i}" for i in range(6)]


def tell(source: CuresSource, verdicts: Mapping[str, str]) -> None:
    for prompt_id, letters in verdicts.items():
        request = Request(prompt_id=prompt_id, group_id=0, n=len(letters), sampling=SAMPLING)
        source.observe(answers(request, letters))


def first_draws(verdicts: Mapping[str, str], runs: int = 4000, **knobs: Any) -> np.ndarray:
    """How often each prompt comes first, over steps in which nothing more is learnt."""
    source = CuresSource(IDS, 0, **knobs)
    source.enter(at())
    tell(source, verdicts)
    counts = Counter(source.pick(1, at(step=step + 1))[0] for step in range(runs))
    return np.array([counts[prompt_id] / runs for prompt_id in IDS])


def test_prompts_come_by_rho() -> None:
    """p = 1/2 unseen, 1/2, 1/6, 5/6, 1/3, 2/3."""
    seen = {"p1": "rw", "p2": "wwww", "p3": "rrrr", "p4": "rwww", "p5": "rrrw"}
    expected = sampling_weights([1 / 2, 1 / 2, 1 / 6, 5 / 6, 1 / 3, 2 / 3], tau=0.1)
    assert expected.max() / expected.min() == pytest.approx(3.57, abs=0.01)
    # three standard deviations
    assert first_draws(seen, tau=0.1) == pytest.approx(expected, abs=0.022)


def test_one_batch_changes_the_next_draw() -> None:
    """The released code's verdicts never reach its sampler, and its temperature makes rho* uniform."""
    assert first_draws({}, runs=1200) == pytest.approx(1 / 6, abs=0.033)
    shares = first_draws(dict.fromkeys(IDS[1:], "w" * 8), runs=300, tau=0.05, prior="even")
    assert shares[0] > 0.9


def test_data_weights_multiply_rho() -> None:
    shares = first_draws({}, runs=2000, entries=[(2, 5.0), (4, 1.0)])
    assert shares == pytest.approx([5 / 14] * 2 + [1 / 14] * 4, abs=0.033)


def test_a_step_draws_no_prompt_twice() -> None:
    source = CuresSource(IDS, 0)
    assert sorted(source.pick(2, at()) + source.pick(3, at()) + source.pick(1, at())) == IDS
    assert len(set(source.pick(6, at(step=1)))) == 6


def test_with_fewer_prompts_than_wanted_all_come_before_any_comes_again() -> None:
    source = CuresSource(IDS, 0)
    first = source.pick(4, at())
    second = source.pick(8, at())
    assert set(first + second[:2]) == set(IDS)
    assert not set(second[:2]) & set(first)
    assert sorted(second[:6]) == IDS
    assert sorted(source.pick(20, at())) == IDS, (
        "each once: a batch of two groups needs no prompt twice"
    )
    assert len(source.pick(20, at(groups=7))) == 20, "with fewer prompts than groups it does"


def test_prompts_that_the_batch_holds_are_not_drawn_again() -> None:
    source = CuresSource(IDS, 0)
    assert sorted(source.pick(6, at())) == IDS
    source.held = lambda: {"p0", "p1", "p2", "not of these"}
    assert sorted(source.pick(6, at())) == ["p3", "p4", "p5"], (
        "those that were turned down are tried again"
    )
    source.held = lambda: set(IDS)
    assert source.pick(6, at()) == []
    assert len(source.pick(6, at(groups=7))) == 6


def test_a_pick_beyond_the_moving_set_goes_on_to_the_next_set() -> None:
    ids = [f"p{i}" for i in range(20)]
    source = CuresSource(ids, 0, pool=ScalingRLSource(ids, 0, share=0.2))
    drawn = source.pick(3, at()) + source.pick(9, at())
    assert len(set(drawn)) == len(drawn) > 4 and source.pool.version == 2, (
        "sets overlap, prompts do not come twice"
    )


def test_rest_keeps_a_prompt_out_longer() -> None:
    source = CuresSource(IDS, 0, rest=1)
    first, second = source.pick(3, at()), source.pick(3, at(step=1))
    assert not set(first) & set(second)
    assert set(source.pick(3, at(step=2))) == set(first)


def test_given_back_comes_first_and_not_twice() -> None:
    source = CuresSource(IDS, 0)
    first = source.pick(3, at())
    source.give_back([first[2], first[0]])
    again = source.pick(6, at(step=1))
    assert again[:2] == [first[2], first[0]]
    assert sorted(again) == IDS


@pytest.mark.parametrize("tau", [1e-6, 1e-4])
def test_the_smallest_temperatures_take_the_best(tau: float) -> None:
    """All weights would be zero in floating point, but for the recentring."""
    source = CuresSource(IDS, 0, tau=tau)
    source.enter(at())
    tell(source, {prompt_id: "r" * (i + 1) for i, prompt_id in enumerate(IDS)})
    assert source.pick(3, at(step=1)) == ["p0", "p1", "p2"]
    assert source.pick(3, at(step=1)) == ["p3", "p4", "p5"]
    tell(source, {"p5": "w" * 6})
    assert source.pick(2, at(step=2)) == ["p5", "p0"]


def test_subsets_are_disjoint_last_their_steps_and_forget() -> None:
    source = CuresSource(IDS, 3, subsets=3, subset_steps=2, prior="even")
    drawn = []
    for step in range(6):
        drawn.append(sorted(source.pick(2, at(step=step))))
        tell(source, dict.fromkeys(IDS, "rr"))
        assert source.metrics()["curriculum/subset"] == step // 2
    assert drawn[0::2] == drawn[1::2]
    assert sorted(drawn[0] + drawn[2] + drawn[4]) == IDS
    # of two steps, not six
    assert mean_rates(source.posterior, drawn[4]) == pytest.approx([5 / 6] * 2)
    assert sorted(source.pick(2, at(step=6))) == drawn[0]  # round again
    assert mean_rates(source.posterior, IDS).tolist() == [0.5] * 6


def test_impossible_subsets_are_refused() -> None:
    with pytest.raises(WhetError, match="subsets = 7 of 6 prompts"):
        CuresSource(IDS, 0, subsets=7)
    with pytest.raises(WhetError, match="a moving set has chosen"):
        CuresSource(IDS, 0, subsets=2, pool=Halves(IDS))
    with pytest.raises(WhetError, match='"a" occurs 2 times'):
        CuresSource(["a", "a"], 0)


def test_metrics_say_how_sharp_and_how_true() -> None:
    source = CuresSource(IDS, 0, tau=0.1, prior="even")
    source.enter(at())
    assert source.metrics()["curriculum/effective_prompts"] == pytest.approx(6.0)
    picked = source.pick(2, at())
    tell(source, {picked[0]: "rrrw", picked[1]: "uu"})
    metrics = source.metrics()
    assert metrics["curriculum/chosen_mean"] == metrics["curriculum/predicted"] == 0.5
    assert metrics["curriculum/observed"] == 0.75
    assert metrics["curriculum/brier"] == 0.25
    assert metrics["curriculum/prompts_visited"] == 1.0
    source.enter(at(step=1))
    w = np.exp((np.sqrt(2 / 9) - 0.5) / 0.1)
    assert source.metrics()["curriculum/effective_prompts"] == pytest.approx(
        (5 + w) ** 2 / (5 + w * w)
    )


class Halves:
    """A pool: one half of the prompts, then the other, each handed out once."""

    def __init__(self, ids: Sequence[str]):
        self.all = np.arange(len(ids))
        self.version, self.used, self.seen = 0, 0, 0

    @property
    def active(self) -> np.ndarray:
        rows = self.all[self.version % 2 :: 2]
        return rows if len(rows) else self.all

    @property
    def left(self) -> int:
        return len(self.active) - self.used

    def refresh(self, clock: Clock, wanted: int = 0) -> None:
        if self.left <= 0:
            self.version, self.used = self.version + 1, 0

    def drawn(self, ids: Sequence[str]) -> None:
        self.used += len(ids)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.seen += len(rollouts)

    def metrics(self) -> dict[str, float]:
        return {"curriculum/halves": float(self.version)}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "used": self.used, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version, self.used, self.seen = state["version"], state["used"], state["seen"]


def test_a_pool_says_what_may_be_drawn_and_the_counts_stay() -> None:
    source = CuresSource(IDS, 0, pool=Halves(IDS), prior="even")
    assert sorted(source.pick(2, at()) + source.pick(1, at())) == IDS[0::2]
    tell(source, {"p0": "rr"})
    assert sorted(source.pick(3, at())) == IDS[1::2]
    assert sorted(source.pick(3, at(step=1))) == IDS[0::2]
    assert mean_rates(source.posterior, ["p0"]) == pytest.approx([0.75])
    assert source.metrics()["curriculum/halves"] == 2.0


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fading": {"memory": 0.8, "rest": 1},
    "subsets": {"subsets": 3, "subset_steps": 2},
    "sharp": {"tau": 1e-4},
    "pooled": {"prior": "pool"},
    "pooled, fading": {"prior": "pool", "memory": 0.8, "rest": 1},
}


@pytest.mark.wide
@pytest.mark.parametrize("name", [*PARTS, "pool"])
def test_any_gate_keeps_the_contract_over_it(name: str) -> None:
    def make(ids: Sequence[str], seed: int) -> Dapo:
        knobs = {"pool": Halves(ids)} if name == "pool" else PARTS[name]
        return Dapo(CuresSource(ids, seed, **knobs), sampling=SAMPLING, rollouts=4, max_age=1)

    if name == "plain":
        check_contract(make, epochs=False, rollouts=4, max_age=1)
    for world in ALL_WORLDS[1::2]:
        check_world(make, world, epochs=False, rollouts=4, max_age=1)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*PARTS, "pool"]),
    script=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 1), st.text("rwu", min_size=1, max_size=4)),
        max_size=12,
    ),
    saves=st.integers(0, 2**12),
)
def test_saved_at_any_point_it_goes_on_alike(
    name: str, script: list[tuple[int, int, str]], saves: int
) -> None:
    def make() -> CuresSource:
        return CuresSource(IDS, 5, **({"pool": Halves(IDS)} if name == "pool" else PARTS[name]))

    first, other, step = make(), make(), 0
    for number, (k, passes, letters) in enumerate(script):
        step += passes
        picked = first.pick(k, at(step=step))
        assert other.pick(k, at(step=step)) == picked
        assert len(set(picked)) == len(picked) <= k and bool(picked) == bool(k)
        for source in (first, other):
            tell(source, dict.fromkeys(picked[:2], letters))
            source.give_back(picked[2:3])
        assert first.metrics() == other.metrics()
        if saves >> number & 1:
            text = json.dumps(other.state_dict())
            other = make()
            other.load_state_dict(json.loads(text))


def test_of_many_prompts_fading_weights_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six prompts, two a turn, memory 1/2, all judged "rrrr" at step 0. A weight is that of its last turn, whatever
    was skipped or saved since; the estimates that divide rollouts are of now."""
    monkeypatch.setattr("whet.curriculum.rho.TURN", 2)

    def make() -> CuresSource:
        return CuresSource(IDS, 0, memory=0.5, prior="even")

    source = make()
    source.enter(at())
    tell(source, dict.fromkeys(IDS, "rrrr"))
    for step, last in (
        (1, (0, 1, 0)),
        (2, (0, 1, 2)),
        (3, (3, 1, 2)),
        (8, (6, 7, 8)),
        (9, (9, 7, 8)),
    ):
        source.enter(at(step=step))
        means = np.repeat([(1 + 4 / 2**turn) / (2 + 4 / 2**turn) for turn in last], 2)
        weights = source._tree.weights
        assert weights / weights.sum() == pytest.approx(sampling_weights(means, 0.1))
        again = make()
        again.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert again._tree.weights.tolist() == weights.tolist()
        assert mean_rates(again.posterior, ["p3"]) == pytest.approx(
            [(1 + 4 / 2**step) / (2 + 4 / 2**step)]
        )
    tell(source, {"p0": "wwww"})  # a verdict is seen at once
    assert (
        mean_rates(source.posterior, ["p0"])[0] < 0.2
        and source._tree.weights[0] < source._tree.weights[1]
    )


def test_where_few_are_solved_one_that_was_comes_before_those_never_met() -> None:
    """40 prompts, 20 met: one right of 4, the others none. m = (1 + 0.25) / 22 = 0.057, so sigma is 0.23 for those
    never met, 0.39 for the one (1.114 / 6 = 0.186) and 0.14 for the hopeless (0.114 / 6 = 0.019); the paper's prior
    gives 0.5, 0.47 and 0.37."""
    ids = [f"p{i}" for i in range(40)]
    verdicts = {f"p{i}": "rwww" if i == 7 else "wwww" for i in range(20)}
    draws = {}
    for prior in ("even", "pool"):
        source = CuresSource(ids, 0, tau=0.005, prior=prior)
        tell(source, verdicts)
        draws[prior] = source.pick(10, at(step=1))
    assert "p7" not in draws["even"] and draws["pool"][0] == "p7"
    assert all(int(i[1:]) >= 20 for i in [*draws["even"], *draws["pool"][1:]]), (
        "the hopeless come last in both"
    )


def test_by_default_an_unseen_prompt_counts_as_those_of_its_level_or_of_all() -> None:
    """p0 was solved, p1 not. m = (1 + 1) / (2 + 2) of all; of a level (m + its rates) / (1 + its prompts seen)."""

    def unseen(**knobs: Any) -> list[float]:
        source = CuresSource(IDS, 0, **knobs)
        source.enter(at())
        tell(source, {"p0": "rr", "p1": "ww", "p2": "ww", "p3": "ww"})
        source.enter(at(step=1))
        return mean_rates(source.posterior, ["p4", "p5"]).tolist()

    assert (
        unseen() == unseen(prior="pool") == unseen(levels=[None] * 6) == pytest.approx([2 / 6] * 2)
    )
    levels = [1, 2, None, 2, 1, 2]
    # a verdict fades to 0.9
    assert unseen(levels=levels) == pytest.approx([(1 / 3 + 0.9) / 1.9, (1 / 3) / 2.8])
    assert unseen(levels=levels, prior="pool") == pytest.approx([1 / 3] * 2)
    assert unseen(levels=levels, prior="even") == [0.5, 0.5]


@pytest.mark.parametrize("memory", [0.8, 1.0])
def test_the_contract_where_turns_are_short(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    monkeypatch.setattr("whet.curriculum.rho.TURN", 4)

    def make(ids: Sequence[str], seed: int) -> Dapo:
        return Dapo(CuresSource(ids, seed, memory=memory), sampling=SAMPLING, rollouts=4, max_age=1)

    for world in ALL_WORLDS[:5:2]:
        check_world(make, world, save_share=0.5, epochs=False, rollouts=4, max_age=1)


def test_another_shape_of_state_is_refused() -> None:
    with pytest.raises(WhetError, match="other subsets"):
        CuresSource(IDS, 0).load_state_dict(CuresSource(IDS, 0, subsets=2).state_dict())


def test_the_state_stays_small() -> None:
    source = CuresSource([f"p{i}" for i in range(20_000)], 0)
    source.pick(16, at())
    assert len(json.dumps(source.state_dict())) < 2_000
