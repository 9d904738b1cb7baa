"""Several curricula side by side: shares, ids, which part waits, and the contract for mixtures of all kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SAMPLING, Listed, Once, answers, asks, at, metric

from whet import config
from whet.curriculum.base import Curriculum, from_json, to_json
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.gate import Dapo, Gate, Uniform
from whet.curriculum.mixture import Member, Mixture, join, next_groups
from whet.curriculum.neighbours import Reset
from whet.curriculum.speed import Speed
from whet.curriculum.stages import Stages
from whet.errors import Starved, WhetError
from whet.testing.contract import WORLDS as CONTRACT_WORLDS
from whet.testing.contract import check_contract, check_world, play
from whet.testing.simulator import World
from whet.types import Batch, Group, Report, Request

DONE = Report(metrics={})


def mixture(*gates: Gate, shares: Sequence[float] = ()) -> Mixture:
    shares = shares or [1 / len(gates)] * len(gates)
    return Mixture(
        [Member(name=f"m{i}", share=s, curriculum=g) for i, (g, s) in enumerate(zip(gates, shares, strict=True))]
    )


def uniform(letters: str, **knobs: Any) -> Uniform:
    return Uniform(Listed(list(letters)), sampling=SAMPLING, **{"rollouts": 2, **knobs})


def dapo(letters: str, source: Any = Listed, **knobs: Any) -> Dapo:
    return Dapo(source(list(letters)), sampling=SAMPLING, **{"rollouts": 2, **knobs})


def built(ids: Sequence[str], seed: int, own: Sequence[Mapping[str, Any]], **common: Any) -> Curriculum:
    """Prompts divided evenly among entries with these settings."""
    cuts = [len(ids) * i // len(own) for i in range(len(own) + 1)]
    facts = Facts(
        ids=ids,
        entries=[(b - a, 1.0) for a, b in pairwise(cuts)],
        settings=own,
        characters=[i % 7 for i in range(len(ids))],
        levels=[i % 5 for i in range(len(ids))],
        tasks=["t"] * len(ids),
    )
    base = config.CurriculumSettings.model_validate({"rollouts": 6, "groups": 4, **common})
    return build_curriculum(base, facts=facts, sampling=SAMPLING, seed=seed)


# Shares


def test_shares_of_one_and_five_sixths_over_updates_of_three() -> None:
    given_, history = [0, 0], []
    for _ in range(6):
        now = next_groups([1 / 6, 5 / 6], given_, 3)
        history.append(now)
        given_ = [a + b for a, b in zip(given_, now, strict=True)]
    assert given_ == [3, 15] and history == [[1, 2], [0, 3]] * 3


@settings(max_examples=200)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    groups=st.lists(st.integers(1, 40), min_size=1, max_size=40),
)
def test_no_part_is_a_group_ahead_and_all_is_given(weights: list[int], groups: list[int]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    given_ = [0] * len(shares)
    for count in groups:
        now = next_groups(shares, given_, count)
        assert sum(now) == count and min(now) >= 0
        given_ = [a + b for a, b in zip(given_, now, strict=True)]
        ahead = [got - share * sum(given_) for got, share in zip(given_, shares, strict=True)]
        assert max(ahead) < 1 and min(ahead) > -max(1, len(shares) - 1)


@settings(max_examples=20, deadline=None)
@given(first=st.integers(1, 20), second=st.integers(1, 20), groups=st.integers(1, 5), stream=st.booleans())
def test_a_run_trains_on_the_shares(first: int, second: int, groups: int, stream: bool) -> None:
    ids_of = [f"p{i}" for i in range(first)], [f"p{first + i}" for i in range(second)]
    shares = [first / (first + second), second / (first + second)]

    def make(ids: Sequence[str], seed: int) -> Mixture:
        return mixture(
            Uniform(Listed(ids_of[0]), sampling=SAMPLING, rollouts=2),
            Uniform(Listed(ids_of[1]), sampling=SAMPLING, rollouts=2),
            shares=shares,
        )

    world = World(prompts=first + second, groups=groups, updates=8, slots=7 if stream else None)
    metrics = play(make, world, parts=("m0", "m1"), epochs=False).curriculum.metrics()
    trained = [metrics[f"curriculum/m{i}/trained"] for i in range(2)]
    assert sum(trained) == metrics["curriculum/trained"] == 8 * groups
    assert abs(trained[0] - shares[0] * 8 * groups) < 1


# Calls


def test_ids_are_namespaced_and_routed() -> None:
    mixed = mixture(uniform("AB"), uniform("CD"))
    requests = mixed.plan(at(groups=4))
    assert [(r.prompt_id, r.group_id) for r in requests] == [("A", 0), ("B", 2), ("C", 1), ("D", 3)]
    for request in requests:
        mixed.observe(answers(request, "rw"))
    batch = mixed.emit(at(groups=4))
    assert batch is not None
    assert [(g.prompt_id, g.group_id) for g in batch.groups] == [("A", 0), ("B", 2), ("C", 1), ("D", 3)]
    assert all(r.group_id == g.group_id for g in batch.groups for r in g.rollouts)
    assert all(g.weight is None for g in batch.groups)


def test_an_early_part_waits_and_is_not_lost() -> None:
    def make() -> Mixture:
        return mixture(uniform("AB"), dapo("CDEFGHIJKLMN"))

    mixed = make()
    first = mixed.plan(at(groups=2))
    assert asks(first) == [("A", 2), ("C", 2), ("D", 2)]
    for request in first:
        mixed.observe(answers(request, "ww"))
    assert mixed.emit(at(groups=2)) is None
    assert mixed.holds() == {0} and metric(mixed, "trained") == 1  # type: ignore[arg-type]
    other = make()
    other.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    for each in (mixed, other):
        again = each.plan(at(groups=2))
        assert asks(again) and all(r.prompt_id in "EFGHIJKLMN" for r in again), (
            "nothing more is asked of the early part"
        )
        each.observe([r for request in again for r in answers(request, "rw")])
        batch = each.emit(at(groups=2))
        assert batch is not None and [g.prompt_id for g in batch.groups] == ["A", "E"]
        each.updated(at(step=1, groups=2), DONE)
        assert each.given == [1, 1]


def test_the_least_served_part_is_asked_first_and_none_is_kept_out() -> None:
    mixed = mixture(uniform("ABCD", max_age=1), uniform("EFGH", max_age=1))
    first = mixed.plan(at(groups=4, free=4))
    assert asks(first) == [("A", 2), ("B", 2), ("E", 2)], "the second has nothing running: one group queues"
    mixed.observe(answers(first[2], "rw"))
    assert asks(mixed.plan(at(groups=4, free=2))) == [("F", 2)], "two of the first run, none of the second"


def test_a_part_without_a_group_in_an_update_is_not_asked() -> None:
    mixed = mixture(uniform("AB"), uniform("CD"))
    for step, letter in enumerate("ACBD"):
        (request,) = mixed.plan(at(step, groups=1))
        assert request.prompt_id == letter
        mixed.observe(answers(request, "rw", version=step))
        batch = mixed.emit(at(step, groups=1))
        assert batch is not None and len(batch.groups) == 1
        mixed.updated(at(step + 1, groups=1), DONE)


def test_starvation_is_the_part_s_own_and_says_which() -> None:
    def run(policy: str) -> Batch | None:
        mixed = mixture(uniform("ABC"), dapo("DE", source=Once, starvation=policy))
        for _ in range(4):
            if (batch := mixed.emit(at(groups=4))) is not None:
                return batch
            for request in mixed.plan(at(groups=4)):
                mixed.observe(answers(request, "rw" if request.prompt_id != "E" else "rr"))
        return None

    batch = run("partial")
    assert batch is not None and [g.prompt_id for g in batch.groups] == ["A", "B", "D"]
    with pytest.raises(Starved, match=r"Of the portion m1 of the data: Step 0: only 1 of the 2 groups"):
        run("raise")


def test_signals_go_to_their_part() -> None:
    seen: list[dict[Any, Any]] = []

    class Listens(Uniform):
        needs = frozenset({"score"})

        def updated(self, clock: Any, report: Report) -> None:
            seen.append(dict(report.signals))

    parts = [Listens(Listed(list(letters)), sampling=SAMPLING, rollouts=2) for letters in ("AB", "CD")]
    mixed = mixture(uniform("EF"), *parts)
    assert mixed.needs == {"score"}
    mixed.updated(at(step=1, groups=3), Report(metrics={}, signals={(7, 0): {"score": 1.0}, (5, 1): {"score": 2.0}}))
    assert seen == [{(2, 0): {"score": 1.0}}, {(1, 1): {"score": 2.0}}]


def test_join_rescales_weights_and_keeps_flags() -> None:
    group = Group(prompt_id="a", group_id=1, rollouts=())
    weighed = [Group(prompt_id=p, group_id=2, rollouts=(), weight=w) for p, w in (("b", 0.25), ("c", 0.75))]
    batch = join([Batch(groups=(group, group), stage=1), Batch(groups=tuple(weighed), reset_reference=True)])
    assert [g.weight for g in batch.groups] == [None, None, 0.125, 0.375]
    assert batch.reset_reference and not batch.reset_optimizer and batch.stage == 1
    assert from_json(json.loads(json.dumps(to_json(batch)))) == batch
    with pytest.raises(AssertionError, match="different coefficients"):
        join([Batch(groups=(), kl_coef=0.1), Batch(groups=())])


def test_other_data_or_weights_are_refused() -> None:
    state = mixture(uniform("AB"), uniform("CD"), shares=(0.25, 0.75)).state_dict()
    with pytest.raises(WhetError, match=r"other portions of data \(m0 25.0000%, m1 75.0000%\) than those given now"):
        mixture(uniform("AB"), uniform("CD")).load_state_dict(state)
    with pytest.raises(WhetError, match="written over other prompts"):
        mixture(uniform("AB"), uniform("CX"), shares=(0.25, 0.75)).load_state_dict(state)
    with pytest.raises(WhetError, match=r"other portions of data \(none\)"):
        mixture(uniform("AB"), uniform("CD")).load_state_dict(uniform("AB").state_dict())


# Built from settings

SPEED = {"name": "speed", "speed": {"n_init": 2}}
KINDS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "uniform and speed": ([{}, SPEED], ("uniform", "speed")),
    "cures and scalingrl": ([{"name": "cures"}, {"name": "scalingrl"}], ("cures", "scalingrl")),
    "dapo and staged speed": (
        [{"name": "dapo"}, {**SPEED, "stages": [{"subset": "short", "steps": 3, "max_tokens": 9}, {}]}],
        ("dapo", "speed"),
    ),
    "three": ([SPEED, {"name": "dapo"}, {**SPEED, "rollouts": 5}], ("speed", "dapo", "speed_2")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "max_age"), [("uniform and speed", 0), ("cures and scalingrl", 1), ("dapo and staged speed", 1)]
)
def test_the_contract_holds_for_mixtures(kind: str, max_age: int) -> None:
    own, names = KINDS[kind]
    check_contract(
        lambda ids, seed: built(ids, seed, own, max_age=max_age),
        worlds=CONTRACT_WORLDS[:-1],  # the last is long, and no other for a mixture
        epochs=False,
        max_age=max_age,
        patience=20 * 2 * len(own),
        parts=names,
    )


WORLDS = st.builds(
    World,
    prompts=st.integers(8, 30),
    pass_rates=st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), min_size=1, max_size=6).map(tuple),
    groups=st.integers(1, 5),
    updates=st.integers(1, 5),
    slots=st.none() | st.integers(1, 40),
    unjudged=st.sampled_from([0.0, 0.2]),
    cut=st.sampled_from([0.0, 0.3, 1.0]),
    order=st.sampled_from(["random", "shortest"]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    world=WORLDS,
    max_age=st.integers(0, 2),
    starvation=st.sampled_from(["raise", "relax", "partial"]),
    share=st.sampled_from([0.1, 0.5]),
)
def test_the_contract_holds_in_any_world(kind: str, world: World, max_age: int, starvation: str, share: float) -> None:
    own, names = KINDS[kind]

    def make(ids: Sequence[str], seed: int) -> Curriculum:
        return built(ids, seed, own, max_age=max_age, starvation=starvation, patience=4, groups=world.groups)

    check_world(make, world, save_share=share, epochs=False, max_age=max_age, patience=4 * 6 * len(own), parts=names)


def test_totals_are_those_of_all_parts() -> None:
    own, names = KINDS["three"]
    run = play(lambda ids, seed: built(ids, seed, own), World(updates=6), epochs=False, parts=names, patience=200)
    m = {key.removeprefix("curriculum/"): value for key, value in run.curriculum.metrics().items()}
    for name in ("asked", "trained", "tokens_kept", "tokens_dropped", "reasked", "prompts"):
        assert m[name] == sum(m[f"{part}/{name}"] for part in names)
    assert m["trained"] == 24 and m["prompts"] == 24
    assert m["screened"] == m["speed/screened"] + m["speed_2/screened"] > 0
    assert min(m[f"{p}/signal_share"] for p in names) <= m["signal_share"] <= max(m[f"{p}/signal_share"] for p in names)
    assert "stage" not in m and "qualified_share" not in m  # these belong to one part only


def test_equal_wishes_share_a_curriculum() -> None:
    ids = [f"p{i}" for i in range(40)]
    mixed = built(ids, 0, [{}, {"name": "speed"}, {"speed": {"n_init": 4}}, {"name": "speed"}])
    assert isinstance(mixed, Mixture)
    assert [(m.name, m.share) for m in mixed.parts] == [("uniform", 0.5), ("speed", 0.5)]
    speed = mixed.parts[1].curriculum
    assert isinstance(speed, Speed) and set(speed.source.ids) == set(ids[10:20] + ids[30:])  # type: ignore[attr-defined]
    assert isinstance(built(ids, 0, [{}, {}]), Uniform)
    assert isinstance(built(ids, 0, [{"name": "dapo"}, {"name": "dapo"}]), Dapo)
    assert isinstance(built(ids, 0, [{"name": "dapo"}, {}], reset_every=5), Reset)
    staged = built(ids, 0, [{"name": "dapo"}, {"stages": [{"steps": 2}, {}]}])
    assert isinstance(staged, Mixture) and isinstance(staged.parts[1].curriculum, Stages)


def test_a_weight_means_the_same_with_a_curriculum_of_its_own() -> None:
    facts = Facts(ids=list("ABCDEF"), entries=[(4, 1.0), (2, 3.0)], settings=[{}, {"name": "dapo"}])
    mixed = build_curriculum(config.CurriculumSettings(), facts=facts, sampling=SAMPLING, seed=0)
    assert isinstance(mixed, Mixture) and [m.share for m in mixed.parts] == [0.4, 0.6]
    assert mixed.parts[0].curriculum.source.seed != mixed.parts[1].curriculum.source.seed  # type: ignore[attr-defined]


def test_what_an_update_has_once_is_refused() -> None:
    ids = [f"p{i}" for i in range(8)]
    for own, word in (
        ({"groups": 5}, r"data\.1\.curriculum\.groups is of the whole run; set it in \[curriculum\]"),
        ({"reset_every": 5}, r"data\.1\.curriculum\.reset_every is of the whole run"),
        ({"stages": [{"minibatches": 2, "steps": 1}, {}]}, r"here data\.1\).*leave out stages\.0\.minibatches"),
        ({"stages": [{"kl_coef": 0.0, "steps": 1}, {}]}, r"here data\.1\).*leave out stages\.0\.kl_coef"),
        ({"stages": [{"steps": 1}, {"entropy_coef": 0.1}]}, r"leave out stages\.1\.entropy_coef"),
        ({"stages": [{"groups": 2}]}, r"leave out stages\.0\.groups"),
        ({"name": "sped"}, 'no curriculum "sped"; did you mean "speed"'),
    ):
        with pytest.raises(WhetError, match=word):
            built(ids, 0, [{}, own])
    facts = Facts(ids=ids, entries=[(8, 1.0), (0, 1.0)], settings=[{}, {"name": "dapo"}])
    with pytest.raises(WhetError, match=r"data\.1 has a curriculum of its own, but none of its prompts is left"):
        build_curriculum(config.CurriculumSettings(), facts=facts, sampling=SAMPLING, seed=0)


def test_requests_keep_what_they_ask() -> None:
    mixed = mixture(uniform("AB"), uniform("CD"))
    (request, _) = mixed.plan(at(groups=2))
    assert request == Request(prompt_id="A", group_id=0, n=2, sampling=SAMPLING)
