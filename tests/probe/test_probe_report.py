import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from probed import probed, report_of

from whet.errors import WhetError
from whet.tools.probe import histogram, probe_report, run_probe
from whet.types import Request, Rollout, Sampling


def test_shares_by_hand() -> None:
    report = report_of([0, 0, 1, 4], 4, group=4)
    assert report.pass_rate.value == 5 / 16 and report.never.value == 0.5 and report.always.value == 0.25
    assert report.signal(4).share.value == 0.25 and report.signal(2).share.value == pytest.approx(0.5 / 4)
    assert [bar.prompts for bar in report.histogram] == [2, 1, 0, 0, 1]
    assert (report.prompts, report.left_out, report.rollouts, report.n) == (4, 0, 16, 4)


def test_every_prompt_has_one_bar() -> None:
    rng = np.random.default_rng(0)
    for n in (2, 3, 8, 10, 11, 64):
        judged = rng.integers(2, n + 1, size=300)
        right = rng.binomial(judged, rng.beta(0.4, 0.4, size=300))
        bars = histogram(right, judged, n)
        assert sum(bar.prompts for bar in bars) == 300
        assert bars[0].prompts == (right == 0).sum() and bars[-1].prompts == (right == judged).sum()


def test_many_rollouts_fall_into_eighths() -> None:
    bars = histogram(np.array([0, 2, 3, 15, 16]), np.full(5, 16), 16)
    assert [(bar.label, bar.prompts) for bar in bars if bar.prompts] == [
        ("never", 1), ("up to 0.125", 1), ("up to 0.25", 1), ("below 1", 1), ("always", 1),
    ]  # fmt: skip


def test_unjudged_rollouts_count_for_nothing() -> None:
    """Three right of three judged is always, not three of four."""
    prompts, rollouts = probed([3, 2, 0, 0], 4, unjudged=[0])
    report = probe_report(prompts, rollouts, n=4, limit=512, group=4)
    assert report.always.value == 0.25 and report.unjudged == 1 / 16
    assert report.signal(4).share.value == pytest.approx(1 / 3)  # of those with four judged


def test_a_prompt_with_one_judged_rollout_is_left_out() -> None:
    prompts, rollouts = probed([1, 1], 2, unjudged=[0])
    report = probe_report(prompts, rollouts, n=2, limit=512, group=4)
    assert (report.prompts, report.left_out) == (1, 1)
    none = [replace(r, verdict="unjudged") for r in rollouts]
    with pytest.raises(WhetError, match="hardly one was judged"):
        probe_report(prompts, none, n=2, limit=512, group=4)


@pytest.mark.parametrize("right", [[0] * 6, [4] * 6, [0, 1, 2, 3, 4, 4]])
def test_json_holds_no_infinities(right: list[int]) -> None:
    tree = json.loads(json.dumps(report_of(right, 4, group=8).to_json(), allow_nan=False))
    assert tree["prompts"] == 6 and tree["suggestions"]
    assert (tree["spendings"][0]["tokens"]["value"] is None) == (len(set(right)) == 1)


def test_the_same_probe_says_the_same() -> None:
    assert report_of([0, 1, 2, 3, 4, 0, 0], 4, group=8) == report_of([0, 1, 2, 3, 4, 0, 0], 4, group=8)


class Echo:
    """Engine and judge in one; keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request], on_progress: Callable[[int], None]) -> list[Rollout]:
        self.requests += requests
        on_progress(sum(r.n for r in requests))
        return [
            Rollout(
                prompt_id=r.prompt_id, group_id=r.group_id, index=i, phase=r.phase, sampling=r.sampling, length=3,
                finish="stop", first_version=0, last_version=0,
            )
            for r in requests
            for i in range(r.n)
        ]  # fmt: skip

    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [replace(r, verdict="right" if r.index == 0 else "wrong") for r in rollouts]


def test_run_probe_asks_n_of_every_prompt() -> None:
    prompts, _ = probed([0] * 100, 4)
    world, told = Echo(), list[tuple[int, int]]()
    sampling = Sampling(max_tokens=512)
    rollouts = run_probe(prompts, world, world, n=4, sampling=sampling, on_progress=lambda *news: told.append(news))  # type: ignore[arg-type]
    assert [(r.prompt_id, r.group_id, r.n, r.phase) for r in world.requests[:2]] == [
        ("p0", 0, 4, "probe"),
        ("p1", 1, 4, "probe"),
    ]
    assert told == [(400, 400)]
    report = probe_report(prompts, rollouts, n=4, limit=512, group=4)
    assert report.pass_rate.value == 0.25 and report.signal(4).share.value == 1.0
