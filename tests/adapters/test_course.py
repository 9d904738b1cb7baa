"""Groups of any size as rows of TRL's loss, by hand, and the course of a run from its own file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from whet.adapters.course import (
    ADVANTAGES,
    Course,
    parts,
    prompt_ids,
    row_factors,
    rows_of,
    with_reward,
)
from whet.config import CurriculumSettings
from whet.errors import WhetError
from whet.learn.losses import token_weights
from whet.types import Batch, Group, Request, Rollout, Sampling, Trace

SAMPLING = Sampling(max_tokens=4)


def rollout(group: int, index: int, reward: float | None, length: int = 2) -> Rollout:
    trace = Trace(
        ids=np.zeros(length, np.int32),
        log_probs=np.zeros(length, np.float32),
        versions=np.zeros(length, int),
    )
    bare = Rollout(
        prompt_id=f"p{group}",
        group_id=group,
        index=index,
        phase="train",
        sampling=SAMPLING,
        length=length,
        finish="stop",
        first_version=0,
        last_version=0,
        trace=trace,
    )
    return bare if reward is None else with_reward(bare, {"0 score": reward}, reward, pass_at=0.99)


def group(
    number: int, rewards: list[float | None], weight: float | None = None, length: int = 2
) -> Group:
    rollouts = tuple(rollout(number, index, reward, length) for index, reward in enumerate(rewards))
    return Group(prompt_id=f"p{number}", group_id=number, rollouts=rollouts, weight=weight)


RAGGED = [np.array([1.0, 0.0, 0.0, 1.0]), np.array([1.0, 0.0]), np.array([0.5, 0.5, 0.5])]


def test_ragged_advantages_of_grpo_by_hand() -> None:
    # [1, 0, 0, 1]: mean 1/2, deviation sqrt(4 * 1/4 / 3) = 0.57735; [1, 0]: sqrt(1/2) = 0.707107; no spread: 0.
    first, second, third = ADVANTAGES["group"](RAGGED)
    np.testing.assert_allclose(first, [0.865875, -0.865875, -0.865875, 0.865875], atol=1e-5)
    np.testing.assert_allclose(second, [0.707007, -0.707007], atol=1e-5)
    assert third.tolist() == [0.0, 0.0, 0.0]


def test_ragged_advantages_of_dr_grpo_and_by_batch_by_hand() -> None:
    first, second, third = ADVANTAGES["none"](RAGGED)
    assert (
        first.tolist() == [0.5, -0.5, -0.5, 0.5]
        and second.tolist() == [0.5, -0.5]
        and not third.any()
    )
    # All nine rewards: mean 1/2, squares 6 * 1/4 over 8, deviation 0.4330127.
    first, second, third = ADVANTAGES["batch"](RAGGED)
    np.testing.assert_allclose(first[:2], [1.154434, -1.154434], atol=1e-5)
    np.testing.assert_allclose(second, [1.154434, -1.154434], atol=1e-5)
    assert not third.any()


def test_ragged_advantages_of_rloo_by_hand() -> None:
    first, second, third = ADVANTAGES[False](RAGGED)
    np.testing.assert_allclose(first, [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert second.tolist() == [1.0, -1.0] and third.tolist() == [0.0] * 3
    # Squares 4 * 4/9 + 2 = 34/9 over 8: deviation 0.6871843.
    white = ADVANTAGES[True](RAGGED)
    np.testing.assert_allclose(white[1], [1.455002, -1.455002], atol=1e-5)


def test_rows_leave_out_unjudged_rollouts_and_are_filled_up() -> None:
    batch = Batch(groups=(group(0, [1.0, None, 0.0]), group(1, [1.0, 0.0, 0.0])))
    rows = rows_of(batch, 4)
    assert [row.group for row in rows] == [0, 0, 1, 1, 1, -1, -1, -1]
    assert [row.rollout.key for row in rows[:5]] == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len(rows_of(batch, 5)) == 5
    unjudged = rows_of(Batch(groups=(group(0, [None, None]),)), 4)
    assert [row.group for row in unjudged] == [-1] * 4


def test_every_group_has_the_weight_that_the_curriculum_gives_it() -> None:
    groups = [group(0, [1.0, 0.0, None]), group(1, [1.0, 0.0, 0.0, 1.0])]
    # Eight rows, two of them fill: 1/2 * 8 / 2 and 1/2 * 8 / 4, so that the mean over 8 rows is the mean of two means.
    assert row_factors(groups, 8, by_row=True) == [2.0, 1.0]
    assert row_factors(groups, 8, by_row=False) == [1.0, 1.0]
    weighed = [replace(groups[0], weight=0.75), replace(groups[1], weight=0.25)]
    assert row_factors(weighed, 6, by_row=True) == [2.25, 0.375]
    # Tokens 4 and 8: 12 / (0.75 * 4 + 0.25 * 8) = 2.4.
    np.testing.assert_allclose(row_factors(weighed, 6, by_row=False), [1.8, 0.6])


@pytest.mark.parametrize(
    ("aggregate", "by_row"), [("sequence", True), ("constant", True), ("batch_tokens", False)]
)
def test_factors_give_the_token_weights_of_our_own_learner(aggregate: str, by_row: bool) -> None:
    groups = [
        group(0, [1.0, 0.0], 0.3, length=3),
        group(1, [1.0, 0.0, 0.0], 0.7, length=4),
        group(2, [1.0] * 5, 0.4),
    ]
    lengths = [np.array([r.length for r in g.judged]) for g in groups]
    rows, tokens, limit = 12, int(sum(n.sum() for n in lengths)), 9
    ours = token_weights(
        aggregate, lengths, [np.full(n.size, limit) for n in lengths], [g.weight for g in groups]
    )
    theirs = {
        "sequence": lambda n: 1 / (rows * n),
        "constant": lambda n: 1 / (rows * limit),
        "batch_tokens": lambda n: 1 / tokens,
    }
    for factor, n, wanted in zip(row_factors(groups, rows, by_row), lengths, ours, strict=True):
        np.testing.assert_allclose(factor * theirs[aggregate](n), wanted)


def test_ids_are_the_datas_own_or_follow_the_prompt() -> None:
    named = Dataset.from_list([{"id": 7, "prompt": "a"}, {"id": 9, "prompt": "b"}])
    assert prompt_ids(named) == ["7", "9"]
    plain = Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    first, second, again = prompt_ids(plain)
    assert again == f"{first}#1" and prompt_ids(plain.select([1, 0])) == [second, first]
    chat = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": "a"}]},
            {"prompt": [{"role": "user", "content": "c"}]},
        ]
    )
    assert len(set(prompt_ids(chat))) == 2
    with pytest.raises(WhetError, match="Row 1 of the training data has no id"):
        prompt_ids(Dataset.from_list([{"id": "x", "prompt": "a"}, {"id": None, "prompt": "b"}]))
    with pytest.raises(WhetError, match="occurs 2 times"):
        course(Dataset.from_list([{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}]))
    with pytest.raises(WhetError, match='no column "prompt"'):
        prompt_ids(Dataset.from_list([{"text": "a"}]))


def course(data: Dataset, **own: object) -> Course:
    return Course(
        data, CurriculumSettings(name="uniform", rollouts=2, groups=2, **own), SAMPLING, seed=0
    )


def test_a_course_goes_on_from_its_file(tmp_path: Path) -> None:
    data = Dataset.from_list([{"id": f"p{i}", "prompt": str(i)} for i in range(9)])
    one = course(data)

    def step(which: Course) -> list[str]:
        while (batch := which.curriculum.emit(which.clock)) is None:
            asked = which.curriculum.plan(which.clock)
            which.observe(
                [rollout_of(r, r.first_index + k, which.rounds) for r in asked for k in range(r.n)]
            )
        assert all(
            r.trace is not None for g in which.store.attach(batch).groups for r in g.rollouts
        )
        which.updated()
        return [g.prompt_id for g in batch.groups]

    def rollout_of(request: Request, index: int, version: int) -> Rollout:
        written = {
            "prompt_id": request.prompt_id,
            "first_version": version,
            "last_version": version,
        }
        return replace(rollout(request.group_id, index, float(index)), **written)

    step(one)
    one.save(tmp_path)
    other = course(data)
    other.load(tmp_path)
    assert (other.rounds, other.rollouts, other.tokens) == (1, 4, 8)
    assert [step(other) for _ in range(3)] == [step(one) for _ in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whet.json", "whet.npz"]


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    data = Dataset.from_list([{"id": f"p{i}", "prompt": str(i)} for i in range(9)])
    with pytest.raises(WhetError, match=r"whet\.json is missing; a checkpoint of stock TRL"):
        course(data).load(tmp_path)
    course(data).save(tmp_path)
    for wrong in (course(data.select(range(8))), course(data, max_age=1)):
        with pytest.raises(WhetError, match="for other prompts or another curriculum"):
            wrong.load(tmp_path)
    state = json.loads((tmp_path / "whet.json").read_text())
    del state["tokens"]
    (tmp_path / "whet.json").write_text(json.dumps(state))
    with pytest.raises(WhetError, match="without tokens"):
        course(data).load(tmp_path)
    whole = (tmp_path / "whet.npz").read_bytes()
    for broken in (b"no archive", b"", whole[: len(whole) // 2]):
        (tmp_path / "whet.npz").write_bytes(broken)
        with pytest.raises(WhetError, match="cannot be read"):
            course(data).load(tmp_path)
    (tmp_path / "whet.npz").write_bytes(whole)
    (tmp_path / "whet.json").write_text("[]")
    with pytest.raises(WhetError, match="cannot be read"):
        course(data).load(tmp_path)


def test_verdicts() -> None:
    bare = rollout(0, 0, None)
    assert with_reward(bare, {}, 0.0, 0.5) is bare and not bare.judged
    right = with_reward(bare, {"0 a": 1.0, "1 b": 0.5}, 1.25, 0.5)
    assert (right.verdict, right.reward, right.score) == ("right", 1.25, 1.0)
    assert with_reward(bare, {"0 a": -1.0}, -1.0, 0.5).verdict == "wrong"


def test_parts() -> None:
    assert [list(part) for part, _ in parts([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    shares = [[own for _, own in parts([1, 2, 3, 4, 5], 1, rank, 3)] for rank in range(3)]
    assert shares == [[[1], [4]], [[2], [5]], [[3], [5]]]  # every rank has as many
    assert not list(parts([], 2, 0, 2))
