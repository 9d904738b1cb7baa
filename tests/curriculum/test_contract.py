"""The contract holds for our gates in any world, and the suite catches a curriculum that breaks any line of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, Screening, held_tokens

from whet.curriculum.gate import Admission, Dapo, Gate, Uniform
from whet.curriculum.groups import GroupBook, Visit
from whet.curriculum.source import UniformSource
from whet.testing.contract import check_contract, check_cost, check_world, measure_update, play
from whet.testing.simulator import World
from whet.types import Batch, Clock, Group, Report, Request, Rollout

GATES: dict[str, Any] = {
    "uniform": Uniform,
    "dapo": Dapo,
    "screening": lambda *args, rollouts, **knobs: Screening(
        *args, rollouts=rollouts, more=rollouts + 1, **knobs
    ),
}

WORLDS = st.builds(
    World,
    prompts=st.integers(1, 30),
    pass_rates=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=6).map(
        tuple
    ),
    groups=st.integers(1, 5),
    updates=st.integers(1, 5),
    slots=st.none() | st.integers(1, 40),
    unjudged=st.sampled_from([0.0, 0.2, 0.8]),
    cut=st.sampled_from([0.0, 0.3, 1.0]),
    order=st.sampled_from(["random", "shortest"]),
    seed=st.integers(0, 1000),
)
KNOBS = st.fixed_dictionaries(
    {
        "rollouts": st.integers(2, 4),
        "max_age": st.integers(0, 3),
        "look_ahead": st.sampled_from([0.0, 0.5, 1.0, 2.5]),
        "starvation": st.sampled_from(["raise", "relax", "partial"]),
        "patience": st.integers(1, 6),
    }
)


@pytest.mark.wide
@pytest.mark.parametrize("name", GATES)
@settings(max_examples=30, deadline=None)
@given(world=WORLDS, knobs=KNOBS, share=st.sampled_from([0.1, 0.5, 1.0]))
def test_the_contract_holds_in_any_world(
    name: str, world: World, knobs: dict[str, Any], share: float
) -> None:
    def make(ids: Sequence[str], seed: int) -> Gate:
        return GATES[name](UniformSource(ids, seed), sampling=SAMPLING, **knobs)

    fixed = None if name == "screening" else knobs["rollouts"]
    check_world(
        make,
        world,
        save_share=share,
        max_age=knobs["max_age"],
        rollouts=fixed,
        patience=knobs["patience"],
    )


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(GATES)),
    world=WORLDS,
    knobs=KNOBS,
    save_share=st.sampled_from([0.0, 0.5]),
)
def test_the_books_balance(
    name: str, world: World, knobs: dict[str, Any], save_share: float
) -> None:
    def make(ids: Sequence[str], seed: int) -> Gate:
        return GATES[name](UniformSource(ids, seed), sampling=SAMPLING, **knobs)

    run = play(make, world, save_share=save_share, sealed=False)
    m = {key.removeprefix("curriculum/"): value for key, value in run.curriculum.metrics().items()}
    rejected = m["rejected_easy"] + m["rejected_hard"]
    assert m["asked"] == m["accepted"] + rejected + m["unjudged_groups"] + m["cut"] + m["open"]
    assert m["accepted"] == m["trained"] - m["relaxed"] + m["expired"] + m["ready"]
    assert m["reasked"] == m["cut"] + m["expired"]
    held = held_tokens(run.curriculum)  # type: ignore[arg-type]
    assert m["tokens_kept"] + m["tokens_dropped"] + held == run.simulator.tokens


@pytest.mark.slow
def test_screening_keeps_the_contract() -> None:
    check_contract(
        lambda ids, seed: Screening(
            UniformSource(ids, seed), sampling=SAMPLING, rollouts=2, more=4, max_age=1
        ),
        max_age=1,
    )


def test_work_does_not_grow_with_the_number_of_prompts() -> None:
    for gate in (Uniform, Dapo):
        check_cost(
            lambda ids, seed: gate(UniformSource(ids, seed), sampling=SAMPLING, rollouts=4),  # noqa: B023
            1_000,
            100_000,
        )


def test_an_update_can_be_timed() -> None:
    assert measure_update(honest, prompts=2_000, updates=2) > 0


# Curricula that break a line each. The suite must name it.


def knobs(**given: Any) -> dict[str, Any]:
    return {"sampling": SAMPLING, "rollouts": 3, "max_age": 1, **given}


def honest(ids: Sequence[str], seed: int) -> Gate:
    return Dapo(UniformSource(ids, seed), **knobs())


class Forgetful(Dapo):
    """1: what it learnt of acceptance is not saved."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.counts.acceptance.hits = self.counts.acceptance.seen = 0.0


class Losing(Uniform):
    """1: prompts that must be asked again are not saved."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "returned": []}


class Whimsical(Uniform):
    """1: draws from an unseeded generator."""

    def groups_to_ask(self, clock: Clock) -> int:
        return super().groups_to_ask(clock) + random.randint(0, 1)


class Stuttering(Uniform):
    """2: trains on a batch again."""

    last: Batch | None = None

    def emit(self, clock: Clock) -> Batch | None:
        if self.last is not None and clock.step % 2:
            return self.last
        self.last = super().emit(clock)
        return self.last


class Careless(Uniform):
    """2: a cut prompt is never asked again."""

    def _give_back(self, visit: Visit, why: Any) -> None:
        super()._give_back(visit, why)
        self.returned.clear()


class Impolite(Uniform):
    """2: a cut prompt is asked again, but last."""

    def _give_back(self, visit: Visit, why: Any) -> None:
        super()._give_back(visit, why)
        self.returned.sort(reverse=True)


class Silent(Dapo):
    """2: drops without counting."""

    def _reject(self, group: Group) -> None:
        self._drop(group)


class Hoarding(Dapo):
    """2: what it rejects is held for ever: neither trained nor dropped."""

    def _reject(self, group: Group) -> None:
        self.book.set_aside(group.group_id)

    def _release_spare(self, keep: int) -> None:
        pass


class WithReplacement(UniformSource):
    """2: some prompts of an epoch are never asked."""

    def pick(self, k: int, clock: Clock) -> list[str]:
        self.cursor = self.cursor // 2
        return super().pick(k, clock)


class Unjudging(Uniform):
    """2: trains on groups with a single verdict."""

    def _decide(self, visit: Visit) -> None:
        if len(visit.group.rollouts) != 1:
            super()._decide(visit)
            return
        self.counts.add("accepted")
        self.book.keep(visit.group_id)


class Atomic(Uniform):
    """3: takes what the first call brings of a group for the whole of it."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        super().observe([r for r in rollouts if r.group_id not in self.book._ready])
        for visit in list(self.book._visits.values()):
            if len(visit.came) >= 2 and visit.group_id not in self.book._ready:
                self._decide(visit)


class EagerBook(GroupBook):
    def first_ready(self, count: int) -> list[Group]:
        return [self._visits[group_id].group for group_id in list(self._ready)[:count]]


class Eager(Uniform):
    """3: takes groups as they complete."""

    def __init__(self, *args: Any, **given: Any):
        super().__init__(*args, **given)
        self.book = EagerBook()


class Shuffling(Uniform):
    """3: its batches are not in the order of ask."""

    def emit(self, clock: Clock) -> Batch | None:
        batch = super().emit(clock)
        return batch and Batch(groups=batch.groups[::-1])


class Ageless(Uniform):
    """3: trains on tokens of any age."""

    def __init__(self, *args: Any, **given: Any):
        super().__init__(*args, **{**given, "max_age": 99})


class Rounding(Uniform):
    """4: shares rounded one by one, so the budget is missed."""

    def sizes(self, prompt_ids: Sequence[str]) -> list[int]:
        shares = np.array([1.0 + i % 3 for i in range(len(prompt_ids))])
        return [max(2, int(n)) for n in np.round(shares / shares.sum() * 3 * len(prompt_ids))]


class Floating(Uniform):
    """4: budgets are not whole numbers."""

    def sizes(self, prompt_ids: Sequence[str]) -> list[int]:
        return [np.int64(3) for _ in prompt_ids]  # type: ignore[misc]


class Gapped(Uniform):
    """4: rollouts are numbered with a gap."""

    def plan(self, clock: Clock) -> list[Request]:
        return [
            Request(
                prompt_id=r.prompt_id,
                group_id=r.group_id,
                first_index=1,
                n=r.n - 1,
                sampling=r.sampling,
            )
            for r in super().plan(clock)
        ]


class Greedy(Uniform):
    """4: asks for more than fits."""

    def plan(self, clock: Clock) -> list[Request]:
        return super().plan(
            Clock(**{**{f: getattr(clock, f) for f in Clock.__slots__}, "free": 1000})
        )


class Stubborn(Dapo):
    """5: asks for ever."""

    def _budget(self, clock: Clock) -> int:
        return 10**9


class Sulking(Dapo):
    """5: asks for nothing and says nothing."""

    def _starve(self, clock: Clock) -> list[Group]:
        raise LookupError

    def emit(self, clock: Clock) -> Batch | None:
        try:
            return super().emit(clock)
        except LookupError:
            return None


class Meagre(Uniform):
    """5: emits what is there and does not say that it is less."""

    def emit(self, clock: Clock) -> Batch | None:
        groups = self.book.first_ready(clock.groups)
        return self._take(groups, clock) if groups else super().emit(clock)


class Scanning(Uniform):
    """6: looks at every prompt at every plan."""

    def plan(self, clock: Clock) -> list[Request]:
        longest = max(len(prompt_id) for prompt_id in self.source.ids)  # type: ignore[attr-defined]
        return super().plan(clock) if longest else []


class Curious(Uniform):
    """7: looks at the trace."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        super().observe([r for r in rollouts if r.trace is None])


class Hasty(Uniform):
    """8: asks ahead and keeps what was short enough, although an update cuts the rest."""

    def plan(self, clock: Clock) -> list[Request]:
        return super().plan(replace(clock, cut=False))

    def emit(self, clock: Clock) -> Batch | None:
        return super().emit(replace(clock, cut=False))


class Mute(Screening):
    """9: does not say that a group waits for more."""

    def __init__(self, *args: Any, **given: Any):
        super().__init__(*args, more=4, **given)

    def waits(self) -> set[int]:
        return set()


class Clinging(Uniform):
    """9: a group that is ready is said to wait for more."""

    def waits(self) -> set[int]:
        return {visit.group_id for visit in self.book.in_line() if visit.complete}


BROKEN: list[tuple[int, Any]] = [
    (1, Forgetful),
    (1, Losing),
    (1, Whimsical),
    (2, Stuttering),
    (2, Careless),
    (2, Impolite),
    (2, Silent),
    (2, Hoarding),
    (2, Unjudging),
    (3, Atomic),
    (3, Eager),
    (3, Shuffling),
    (3, Ageless),
    (4, Rounding),
    (4, Floating),
    (4, Gapped),
    (4, Greedy),
    (5, Stubborn),
    (5, Sulking),
    (5, Meagre),
    (6, Scanning),
    (7, Curious),
    (8, Hasty),
    (9, Mute),
    (9, Clinging),
]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("line", "gate"), BROKEN, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_the_suite_catches(line: int, gate: type[Gate]) -> None:
    with pytest.raises(AssertionError, match=f"^Contract line {line} "):
        check_contract(
            lambda ids, seed: gate(UniformSource(ids, seed), **knobs()),
            max_age=0 if gate is Ageless else 1,
            rollouts=3,
        )


def test_the_suite_catches_a_source_that_repeats_itself() -> None:
    with pytest.raises(AssertionError, match=r"^Contract line 2 "):
        check_contract(lambda ids, seed: Uniform(WithReplacement(ids, seed), **knobs()))
    check_contract(lambda ids, seed: Uniform(WithReplacement(ids, seed), **knobs()), epochs=False)


def test_the_suite_catches_a_curriculum_that_never_trains() -> None:
    class Refusing(Dapo):
        def admit(self, group: Group) -> Admission:
            return "drop"

    with pytest.raises(AssertionError, match="no batch came"):
        check_contract(lambda ids, seed: Refusing(UniformSource(ids, seed), **knobs()))


def test_the_suite_catches_a_reset_in_updated() -> None:
    class Resetting(Uniform):
        """Groups vanish at an update, uncounted."""

        def updated(self, clock: Clock, report: Report) -> None:
            for group_id in list(itertools.islice(self.book.holds(), 1)):
                self.book.remove(group_id)

    with pytest.raises(AssertionError, match=r"^Contract line 2 "):
        check_contract(lambda ids, seed: Resetting(UniformSource(ids, seed), **knobs()))


def test_every_line_has_its_breaker() -> None:
    assert {line for line, _ in BROKEN} == set(range(1, 10))
