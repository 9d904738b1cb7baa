from __future__ import annotations

import json

import pytest

from whet.curriculum.groups import Counts, Share


def test_a_share_fades_and_takes_a_prior() -> None:
    share = Share()
    assert share.value() == 0.0 and share.value(prior=0.5, weight=2) == 0.5
    for hit in (True, True, True, False):
        share.add(hit)
    assert share.value() == 0.75 and share.value(0.5, 2) == pytest.approx(4 / 6)
    share.fade()  # 2.7 of 3.6
    assert share.value() == pytest.approx(0.75)
    share.add(False)
    assert share.value() == pytest.approx(2.7 / 4.6)


def test_counts_since_the_last_batch_survive_a_save() -> None:
    counts = Counts()
    counts.add("asked", 7)
    counts.acceptance.add(True)
    counts.batch()
    counts.add("asked", 2)
    counts.signal.add(False)
    copy = Counts()
    copy.load_state_dict(json.loads(json.dumps(counts.state_dict())))
    assert (copy.since("asked"), copy.total["asked"]) == (2, 9)
    assert copy.metrics() == counts.metrics()
    assert copy.metrics()["curriculum/acceptance"] == 1.0


def test_the_sentence_names_counts_pass_rate_and_the_knob_that_fits() -> None:
    def sentence(dry: bool = False, **numbers: int) -> str:
        counts = Counts()
        for name, number in numbers.items():
            counts.add(name, number)
        return counts.why_starved(1, 2, dry, "raise curriculum.rollouts")

    hard = sentence(
        asked=40, rejected_hard=30, rejected_easy=8, unjudged_groups=1, cut=1, judged=304, right=76
    )
    assert hard.startswith(
        "too few prompts are sometimes solved and sometimes not (mean pass rate 0.25): 40 were tried"
    )
    assert (
        "only 1 found useful, 2 are needed (30 too hard, 8 too easy, 1 unjudged, 1 cut); take easier"
        in hard
    )
    assert (
        "easier prompts" in hard and "curriculum.rollouts" in hard and "curriculum.patience" in hard
    )
    assert "harder prompts" in sentence(rejected_easy=2, rejected_hard=1, judged=6, right=4)
    blind = sentence(asked=4, unjudged_groups=4)
    assert "none judged" in blind and "judge.timeout_s" in blind
    assert "no more prompts" in sentence(dry=True)
    counts = Counts()
    assert "take easier prompts, turn it up or raise curriculum.patience" in counts.why_starved(
        0, 2, False, "turn it up"
    )


def test_a_pool_that_is_solved_is_mastered_and_a_mixed_one_is_not() -> None:
    def counted(easy: int, hard: int, unjudged: int = 0) -> Counts:
        counts = Counts()
        for name, number in {
            "rejected_easy": easy,
            "rejected_hard": hard,
            "unjudged_groups": unjudged,
        }.items():
            counts.add(name, number)
        return counts

    assert counted(294, 12).mastered and counted(4, 1).mastered
    assert (
        not counted(0, 0).mastered and not counted(3, 1).mastered and not counted(8, 1, 2).mastered
    )
    said = counted(294, 12).why_starved(14, 16, False, "raise curriculum.rollouts")
    assert (
        said.startswith("almost all prompts are solved (")
        and "only 14 found useful, 16 are needed" in said
    )
    assert counted(1, 9).why_starved(0, 4, False, "").startswith("almost no prompt is ever solved")
