import dataclasses
import json

from whet.types import Group, Rollout, Sampling
from whet.watch import (
    PASS_RATES,
    PATIENCE,
    SIGNS,
    Advice,
    Guards,
    Stopwatch,
    group_metrics,
    rollout_metrics,
)

BASE = Rollout(
    prompt_id="a",
    group_id=0,
    index=0,
    phase="train",
    sampling=Sampling(max_tokens=8),
    length=4,
    finish="stop",
    first_version=0,
    last_version=0,
    verdict="right",
    score=1.0,
    reward=1.0,
)


def rollout(**changes: object) -> Rollout:
    return dataclasses.replace(BASE, **changes)  # type: ignore[arg-type]


def test_hand_counted_step() -> None:
    metrics = rollout_metrics(
        [
            rollout(),
            rollout(verdict="wrong", score=0.0, reward=0.0, length=8, finish="length"),
            rollout(verdict="wrong", score=0.0, reward=0.0, length=6),
            rollout(verdict="unjudged", score=None, reward=None, length=2),
            rollout(finish="cut", length=100, verdict="unjudged", score=None, reward=None),
        ]
    )
    assert (
        metrics["verdict/right"] == 0.25
        and metrics["verdict/wrong"] == 0.5
        and metrics["verdict/unjudged"] == 0.25
    )
    assert metrics["reward/mean"] == 1 / 3
    assert metrics["verdict/mixed"] == 1.0
    others = [rollout(group_id=1), rollout(group_id=1, verdict="unjudged"), rollout(group_id=2)]
    assert rollout_metrics([rollout(), rollout(verdict="wrong"), *others])["verdict/mixed"] == 1 / 3
    assert (
        metrics["length/mean"] == 5.0
        and metrics["length/max"] == 8.0
        and metrics["length/p50"] == 5.0
    )
    assert metrics["length/truncated"] == 0.25
    assert metrics["length/right"] == 4.0 and metrics["length/wrong"] == 7.0


def test_nothing_finished_says_nothing() -> None:
    assert rollout_metrics([]) == {}
    assert rollout_metrics([rollout(finish="cut")]) == {}


def test_group_numbers() -> None:
    group = Group(
        prompt_id="a",
        group_id=0,
        rollouts=(
            rollout(first_version=3),
            rollout(verdict="wrong", first_version=2),
            rollout(verdict="unjudged", first_version=4),
        ),
    )
    assert group.pass_rate == 0.5 and group.spread == 0.5
    assert group.tokens == 12 and group.oldest_version == 2 and len(group.judged) == 2
    assert Group(prompt_id="a", group_id=0, rollouts=(rollout(),) * 3).spread == 0.0


def test_shares_of_groups_by_pass_rate() -> None:
    """Two of eight right is 25%, still in the class that ends there; a group without a verdict is left out."""

    def group(right: int, wrong: int, unjudged: int = 0) -> Group:
        verdicts = ["right"] * right + ["wrong"] * wrong + ["unjudged"] * unjudged
        return Group(
            prompt_id="a", group_id=0, rollouts=tuple(rollout(verdict=v) for v in verdicts)
        )

    metrics = group_metrics([group(0, 8), group(2, 6), group(7, 1), group(8, 0, 3), group(0, 0, 8)])
    shares = {"0": 0.25, "to_25": 0.25, "to_50": 0.0, "to_75": 0.0, "to_100": 0.25, "100": 0.25}
    assert metrics == {f"pass_rate/{name}": share for name, share in shares.items()}
    assert tuple(shares) == PASS_RATES and group_metrics([group(0, 0, 2)]) == {}


def test_stopwatch_accounts_for_everything() -> None:
    watch = Stopwatch()
    with watch.timing("a"), watch.timing("b"):
        pass
    with watch.timing("a"):
        pass
    metrics = watch.metrics()
    assert set(metrics) == {"time/a", "time/b", "time/total", "time/idle"}
    assert all(value >= 0 for value in metrics.values())


def test_stopwatch_moves_and_leaves_out() -> None:
    watch = Stopwatch()
    watch.start -= 10.0
    watch.seconds = {"train": 4.0, "save": 3.0}
    watch.move("train", "log_probs", 1.5)
    watch.move("train", "nothing", 0.0)
    assert watch.seconds == {"train": 2.5, "save": 3.0, "log_probs": 1.5}
    assert 7.0 <= watch.without("save", "never") < 8.0
    assert 3.0 <= watch.metrics()["time/idle"] < 4.0


def test_advice_is_given_once_and_only_for_a_streak() -> None:
    advice, bad, good = Advice(), {"length/truncated": 0.9}, {"length/truncated": 0.1}
    said = [advice.check(m) for m in [bad] * (PATIENCE - 1) + [good] + [bad] * 3 * PATIENCE]
    assert [len(s) for s in said].count(1) == 1
    assert said[2 * PATIENCE - 1] == [SIGNS["truncated"][1]]


def test_what_guards_remember_goes_on_in_another_process() -> None:
    """A streak of four, a warning that was given, an evaluation far below the best, and the last sound mismatch."""
    one, bad = Guards(), {"length/truncated": 0.9}
    for _ in range(PATIENCE):
        one.advice.check({"learn/mismatch": 0.2})
    for _ in range(PATIENCE - 1):
        one.advice.check(bad)
    fine, worse = (
        {"eval/a/accuracy": p, "eval/a/accuracy_low": p, "eval/a/accuracy_high": p}
        for p in (0.5, 0.1)
    )
    assert not one.collapse.check(0, fine) and not one.collapse.check(2, worse)
    one.sound = 1e-6
    other = Guards()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.advice.check(bad | {"learn/mismatch": 0.2}) == [SIGNS["truncated"][1]]
    assert (
        other.collapse.check(4, worse) == "The accuracy on a fell from 0.500 after step 0 to 0.100"
    )
    assert other.sound == 1e-6
    assert not Guards().collapse.check(4, worse), "one that remembers nothing does not see it"


def test_the_judge_may_complain() -> None:
    advice = Advice()
    said = [
        advice.check({"judge/unjudged": 5.0, "judge/wrong": 5.0}, "the judge ran out of memory")
        for _ in range(PATIENCE)
    ]
    assert said[-1][0].endswith("The last one: the judge ran out of memory.")


def test_every_sign_can_show_and_stays_silent_on_a_healthy_step() -> None:
    healthy = {
        "length/truncated": 0.1,
        "verdict/right": 0.4,
        "judge/unjudged": 0.0,
        "judge/wrong": 9.0,
        "learn/signal_share": 0.4,
        "learn/entropy": 0.5,
        "learn/mismatch": 1e-4,
        "curriculum/signal_share": 0.01,  # screening turns down the hopeless, what trains has signal
        "rollout/occupied": 0.1,  # on a CPU, which decodes row by row
    }
    sick = {
        "length/truncated": 0.9,
        "verdict/right": 0.0,
        "judge/unjudged": 9.0,
        "learn/signal_share": 0.01,
        "learn/entropy": 0.001,
        "learn/mismatch": 0.5,
        "rollout/occupied": 0.24,
        "rollout/gpu_seconds": 0.4,
    }
    assert not any(shows(healthy) for shows, _ in SIGNS.values())
    silent = sick | {"learn/signal_share": 0.0}
    assert all(shows(silent if name == "no_signal" else sick) for name, (shows, _) in SIGNS.items())


def test_no_signal_for_three_updates_is_said_once_with_what_to_do() -> None:
    """And nothing else is said of it: not that no response was right, nor that signal is scarce."""
    advice, silent = Advice(), {"learn/signal_share": 0.0, "verdict/right": 0.0}
    said = [advice.check(m) for m in [silent] * 2 + [{"learn/signal_share": 0.3}] + [silent] * 20]
    assert [len(sentences) for sentences in said] == [0] * 5 + [1] + [0] * 17
    (sentence,) = said[5]
    assert sentence.startswith("Nothing was learned in 3 updates: ")
    assert all(
        part in sentence
        for part in ("warm start", "easier prompts", "rollout.max_tokens", "whet probe")
    )
