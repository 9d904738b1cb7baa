"""The stages of a recipe that names none: a short one, if measured lengths speak for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from barrier_run import GROUPS, LIMIT, hard_pool, play
from scripted import SAMPLING, at, rollout

from whet.config import CurriculumSettings, Stage
from whet.curriculum.base import sentences_of
from whet.curriculum.build import Facts, build_curriculum
from whet.curriculum.gate import Dapo, Gate, Uniform
from whet.curriculum.groups import GroupBook
from whet.curriculum.measured import MeasuredStages, SettledLengths, saving, shortest_limit
from whet.curriculum.source import UniformSource
from whet.curriculum.speed import Speed
from whet.curriculum.stages import stage_sampling
from whet.errors import WhetError
from whet.testing.contract import check_contract, check_world
from whet.testing.contract import play as played
from whet.testing.simulator import World
from whet.types import Batch, Group, Report, Request, Sampling

WIDE = Sampling(max_tokens=100)
DONE = Report(metrics={})
LETTERS = [f"p{i}" for i in range(8)]  # four of them short


def measured(
    ids: Sequence[str] = LETTERS,
    seed: int = 0,
    gate: Any = Uniform,
    sampling: Sampling = WIDE,
    **knobs: Any,
) -> MeasuredStages:
    own = {name: knobs.pop(name) for name in ("enough", "saved") if name in knobs}

    def make(stage: Stage, chosen: Sequence[str], first: int) -> Gate:
        source = UniformSource(chosen, seed + first)
        inner = gate(source, sampling=stage_sampling(stage, sampling), **{"rollouts": 4, **knobs})
        inner.book = GroupBook(next_id=first)
        return inner

    columns = {"ids": ids, "characters": [10 + 30 * (i % 2) for i in range(len(ids))]}
    return MeasuredStages(make, max_tokens=sampling.max_tokens, **columns, **own)


def step(curriculum: Any, number: int, right: Sequence[int], wrong: Sequence[int]) -> list[Request]:
    """One update of two groups; of each four rollouts two are right, two wrong, with lengths in turn from the lists."""
    asked: list[Request] = []
    turns = {"r": iter(range(10**6)), "w": iter(range(10**6))}
    clock = at(step=number)
    while curriculum.emit(clock) is None:
        requests = curriculum.plan(clock)
        asked += requests
        for request in requests:
            for i in range(request.n):
                letter, lengths = ("r", right) if i % 2 == 0 else ("w", wrong)
                length = lengths[next(turns[letter]) % len(lengths)]
                limit = request.sampling.max_tokens
                kind: dict[str, Any] = {
                    "length": min(length, limit),
                    "finish": "stop" if length <= limit else "length",
                }
                verdict = letter if length <= limit else "w"
                curriculum.observe(
                    [rollout(request, request.first_index + i, verdict, version=number, **kind)]
                )
    curriculum.updated(at(step=number + 1), DONE)
    return asked


# The rule


def test_the_limit_loses_fewer_than_a_twentieth_of_the_right_ones() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 400).tolist()
    limit = shortest_limit(lengths)
    assert (
        sum(n > limit for n in lengths) / 400
        < 0.05
        <= sum(n > limit - 1 for n in lengths) / 400 + 0.0025
    )
    assert shortest_limit([5] * 30) == 5
    assert saving([50] * 9 + [500], 50) == pytest.approx(450 / 950)


def test_a_short_stage_begins_once_enough_right_responses_are_measured() -> None:
    """Four right responses an update; right ones have up to 40 tokens, wrong ones 100."""
    curriculum = measured(enough=8)
    for number in range(2):
        assert curriculum.number == 0 and {
            r.sampling.max_tokens for r in step(curriculum, number, [30, 40], [100])
        } == {100}
    assert curriculum.number == 1 and curriculum.limit == 40
    (sentence,) = sentences_of(curriculum)
    assert sentence == (
        "Stage 1 begins, of the shorter prompts: a limit of 40 tokens, which loses under 5% of the right responses, "
        "would save 44% of all tokens."
    )
    assert sentences_of(curriculum) == []
    requests = step(curriculum, 2, [30, 40], [100])
    assert {r.sampling.max_tokens for r in requests} == {40}
    assert {int(r.prompt_id[1:]) % 2 for r in requests} == {0}, "the short prompts"
    assert min(r.group_id for r in requests) >= 4, "ids go on"


def test_the_short_stage_ends_by_signal() -> None:
    """Half of its responses are truncated, then none: the smoothed share takes a while to fall to a tenth."""
    curriculum, number = measured(ids=[f"p{i}" for i in range(400)], enough=4), 0
    while curriculum.number == 0:
        step(curriculum, number := number + 1, [30], [100])
    first = number
    while curriculum.number == 1 and number < first + 90:
        step(curriculum, number := number + 1, [20], [25])
    assert curriculum.number == 2 and number < first + 90
    assert {r.sampling.max_tokens for r in step(curriculum, number + 1, [30], [100])} == {100}
    stalls, number = measured(ids=[f"p{i}" for i in range(4000)], enough=4), 0
    while stalls.number < 2 and number < 60:
        step(stalls, number := number + 1, [30], [100])  # the reward is the same all the time
    assert stalls.number == 2 and 20 < number < 30


def test_it_is_left_out_where_it_saves_little() -> None:
    """Right responses are about as long as wrong ones: half of the limit would lose half of the right ones."""
    curriculum = measured(enough=8)
    for number in range(30):
        step(curriculum, number, [40, 90], [40, 95])
    assert curriculum.number == 0 and not curriculum.measuring
    (sentence,) = sentences_of(curriculum)
    assert sentence.startswith(
        "No short stage: a limit of 90 tokens, which loses under 5% of the right responses, would"
    )


def test_it_is_left_out_where_right_answers_are_too_rare_to_tell() -> None:
    curriculum = measured(enough=1000)
    for number in range(22):
        step(curriculum, number, [30], [100])
    assert curriculum.number == 0 and not curriculum.measuring
    assert sentences_of(curriculum) == [
        "No short stage: 80 right responses in 20 updates do not tell its limit."
    ]


def test_short_responses_do_not_count_before_the_long_ones_of_their_batch() -> None:
    """Groups that were asked later and are complete already wait; what an update drops never counts."""
    lengths, requests = (
        SettledLengths(),
        [Request(prompt_id="a", group_id=i, n=1, sampling=WIDE) for i in range(3)],
    )
    lengths.observe(
        [rollout(requests[2], 0, "r", length=1), rollout(requests[0], 0, "r", length=9)]
    )
    lengths.observe(
        [
            rollout(requests[1], 0, "w", length=50),
            rollout(requests[2], 1, "r", length=2, finish="cut"),
        ]
    )
    batch = Batch(groups=tuple(measured_group(request) for request in requests[:2]))
    lengths.emitted(batch, at())
    assert (lengths.right, sorted(lengths.every)) == ([9], [9, 50])
    copy = SettledLengths()
    copy.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    lengths.emitted(Batch(groups=(measured_group(requests[2]),)), at(cut=True))
    assert lengths.right == [9, 1]
    copy.emitted(replace(batch), at(cut=True))
    copy.emitted(Batch(groups=(measured_group(requests[2]),)), at())
    assert copy.right == [9], "the update dropped the third group"


def measured_group(request: Request) -> Group:
    return Group(
        prompt_id=request.prompt_id, group_id=request.group_id, rollouts=(rollout(request, 0, "r"),)
    )


# In a run


def test_of_a_model_whose_right_answers_are_long_none_is_lost() -> None:
    """The limit is measured on the run's own lengths, here independent of the verdict but for the limit itself."""
    found = play({"name": "all"}, hard_pool(0), updates=12)
    assert found.metrics is not None and found.metrics["curriculum/stage"] in (0.0, 1.0)
    facts = Facts(ids=[f"p{i}" for i in range(64)], characters=list(range(64)))
    for name in ("stages", "all"):
        settings = CurriculumSettings.model_validate({"name": name, "groups": GROUPS})
        built = build_curriculum(settings, facts=facts, sampling=Sampling(max_tokens=LIMIT), seed=0)
        assert isinstance(built, MeasuredStages)
    settings = CurriculumSettings.model_validate(
        {"name": "all", "stages": [{"steps": 3, "max_tokens": 64}, {}]}
    )
    built = build_curriculum(settings, facts=facts, sampling=Sampling(max_tokens=LIMIT), seed=0)
    assert not isinstance(built, MeasuredStages) and built.limits == [64, LIMIT]  # type: ignore[attr-defined]


# The contract, where the short stage always begins


def with_border(gate: Any, **knobs: Any) -> Any:
    return lambda ids, seed: measured(
        ids, seed, **{"gate": gate, "sampling": SAMPLING, "enough": 20, "saved": 0.0, **knobs}
    )


def screening(source: Any, **knobs: Any) -> Speed:
    return Speed(source, n_init=2, **knobs)


@pytest.mark.parametrize("gate", [Uniform, pytest.param(Dapo, marks=pytest.mark.slow), screening])
@pytest.mark.parametrize("max_age", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_contract(gate: Any, max_age: int) -> None:
    check_contract(with_border(gate, max_age=max_age), epochs=False, max_age=max_age, rollouts=4)


@pytest.mark.parametrize("slots", [None, 24])
@pytest.mark.parametrize("cut", [0.0, 1.0])
def test_saved_at_any_point_it_goes_on_alike_over_the_border(slots: int | None, cut: float) -> None:
    make, world = (
        with_border(screening, max_age=1),
        World(prompts=60, groups=4, updates=8, slots=slots, cut=cut),
    )
    assert played(make, world, epochs=False).curriculum.metrics()["curriculum/stage"] >= 1.0
    for save_share in (0.3, 1.0):
        check_world(make, world, save_share=save_share, epochs=False, max_age=1, rollouts=4)


def test_another_shape_of_state_is_refused() -> None:
    other = build_curriculum(
        CurriculumSettings.model_validate({"name": "stages", "stages": [{"steps": 3}, {}]}),
        facts=Facts(ids=LETTERS, characters=[1] * 8),
        sampling=WIDE,
        seed=0,
    )
    with pytest.raises(WhetError, match="resume with the same recipe"):
        measured().load_state_dict(other.state_dict())
