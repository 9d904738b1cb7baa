from __future__ import annotations

import json
from dataclasses import replace

import pytest
from scripted import SAMPLING, at, rollout

from whet.curriculum.base import Evidence, Progress, smoothed
from whet.types import Request

ONE = Request(prompt_id="A", group_id=0, n=8, sampling=SAMPLING)


def test_smoothed_over_twenty_updates() -> None:
    assert smoothed(None, 0.8) == 0.8
    assert smoothed(0.8, 0.59) == pytest.approx(0.78)  # 2 / (20 + 1) of the way
    assert smoothed(0.0, 1.0) == pytest.approx(2 / 21)


def test_what_counts_as_truncated_and_as_reward() -> None:
    progress = Progress()
    progress.observe(
        [
            rollout(ONE, 0, "w", finish="length"),
            rollout(ONE, 1, "r"),
            rollout(ONE, 2, "u"),  # answered, not judged
            rollout(ONE, 3, "u", finish="cut"),  # nobody knows how long it would have been
            replace(rollout(ONE, 4, "r"), reward=0.5),  # the reward counts, not the verdict
        ]
    )
    assert progress.truncated is None
    progress.update()
    assert (progress.truncated, progress.reward) == (0.25, 0.5)
    progress.update()  # nothing came
    assert (progress.truncated, progress.reward) == (0.25, 0.5)


def test_where_an_update_cuts_what_is_not_decided_does_not_count() -> None:
    """Group 0 was let go at the last update, 1 is decided, 2 is left over: its long rollouts were cut, this one not."""
    came = [replace(rollout(ONE, 0, "r", version=version), group_id=g) for g, version in ((0, 0), (1, 1), (2, 1))]
    for cut, counts in ((True, [1]), (False, [0, 1, 2])):
        hearing = Evidence(came)
        hearing.emitted(at(step=1, cut=cut))
        assert [r.group_id for r in hearing.updated(at(step=2, cut=cut), held={2})] == counts
        assert hearing.rollouts == []


def test_stalled_once_the_gain_over_so_many_updates_is_small() -> None:
    progress = Progress(keep=3)
    seen = []
    for reward in (0.0, 0.5, 0.5, 0.5, *[0.5] * 40):
        progress.observe([replace(rollout(ONE, 0, "r"), reward=reward)])
        progress.update()
        seen.append(progress.stalled(3))
    # the average nears 0.5 by 19/21 an update: 0.5 (19/21)^k; its gain over three falls below 0.01 at k = 28 -> 31
    gains = [0.5 * ((19 / 21) ** (k - 3) - (19 / 21) ** k) for k in range(3, 44)]
    assert seen == [False] * 3 + [gain < 0.01 for gain in gains]
    assert seen.index(True) == 29
    progress.forget()
    assert not progress.stalled(3)


def test_state() -> None:
    progress, other = Progress(keep=2), Progress(keep=2)
    for _ in range(4):
        progress.observe([rollout(ONE, 0, "r", finish="length"), rollout(ONE, 1, "w")])
        progress.update()
    progress.observe([rollout(ONE, 0, "r")])
    other.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    progress.update()
    other.update()
    assert other.state_dict() == progress.state_dict()
    assert not other.stalled(2) and not progress.stalled(2)  # 1 after 1/2: it gained
