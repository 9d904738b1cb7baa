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
    assert progress.truncated is None
    progress.update(
        [
            rollout(ONE, 0, "w", finish="length"),
            rollout(ONE, 1, "r"),
            rollout(ONE, 2, "u"),  # answered, not judged
            rollout(ONE, 3, "u", finish="cut"),  # its length without the cut is not known
            replace(rollout(ONE, 4, "r"), reward=0.5),  # the reward counts, not the verdict
        ]
    )
    assert (progress.truncated, progress.reward) == (0.25, 0.5)
    progress.update([])
    assert (progress.truncated, progress.reward) == (0.25, 0.5)


def test_where_an_update_cuts_what_is_not_decided_does_not_count() -> None:
    """Group 0 was let go at the last update, 1 is decided, 2 is left over: its long rollouts were cut, this one not."""
    came = [
        replace(rollout(ONE, 0, "r", version=version), group_id=g)
        for g, version in ((0, 0), (1, 1), (2, 1))
    ]
    for cut, counts in ((True, [1]), (False, [0, 1, 2])):
        evidence = Evidence(came)
        evidence.emitted(at(step=1, cut=cut))
        assert [r.group_id for r in evidence.updated(at(step=2, cut=cut), held={2})] == counts
        assert evidence.rollouts == []


def test_stalled_once_the_gain_over_so_many_updates_is_small() -> None:
    progress = Progress(plateau=3)
    seen = []
    for reward in (0.0, 0.5, 0.5, 0.5, *[0.5] * 40):
        progress.update([replace(rollout(ONE, 0, "r"), reward=reward)])
        seen.append(progress.stalled)
    # the average nears 0.5 by 19/21 an update: 0.5 (19/21)^k; its gain over three falls below 0.01 at k = 28 -> 31
    gains = [0.5 * ((19 / 21) ** (k - 3) - (19 / 21) ** k) for k in range(3, 44)]
    assert seen == [False] * 3 + [gain < 0.01 for gain in gains]
    assert seen.index(True) == 29
    assert not Progress(plateau=3).stalled


def test_state() -> None:
    progress, other = Progress(plateau=2), Progress(plateau=2)
    for _ in range(4):
        progress.update([rollout(ONE, 0, "r", finish="length"), rollout(ONE, 1, "w")])
    other.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert progress.stalled and other.stalled
    for each in (progress, other):
        each.update([rollout(ONE, 0, "r")])
    assert other.state_dict() == progress.state_dict()
    assert not other.stalled and not progress.stalled  # 1 after 1/2: it gained
