from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from whet.eval import EvalSet, eval_metrics, evaluate, mean_interval
from whet.types import Prompt, Request, Rollout, Sampling, Trace

SAMPLING = Sampling(max_tokens=8)


def rollout(
    group: int, index: int, verdict: str, length: int = 4, finish: str = "stop", final: str = ""
) -> Rollout:
    return Rollout(
        prompt_id=str(group),
        group_id=group,
        index=index,
        phase="eval",
        sampling=SAMPLING,
        length=length,
        finish=finish,
        first_version=0,
        last_version=0,
        verdict=verdict,
        final=final,  # type: ignore[arg-type]
    )


def a_set(prompts: int, n: int, levels: Sequence[object] = ()) -> EvalSet:
    metas = [{"level": level} for level in levels] or [{}] * prompts
    made = tuple(
        Prompt(id=str(i), text="x", answer="1", task="t", meta=metas[i]) for i in range(prompts)
    )
    return EvalSet(name="s", prompts=made, n=n, sampling=SAMPLING, every=1)


def hand_counted() -> tuple[EvalSet, list[Rollout]]:
    verdicts = ["right", "right", "right", "wrong", "wrong", "unjudged", "wrong", "wrong"]
    finals = ["7", "7", "7", "8", "8", "", "", "9"]
    rollouts = [
        rollout(i // 2, i % 2, v, length=i, finish="length" if i == 7 else "stop", final=f)
        for i, (v, f) in enumerate(zip(verdicts, finals, strict=True))
    ]
    return a_set(4, 2, levels=[0, 0, 1, 1]), rollouts


def test_hand_counted_set() -> None:
    metrics = eval_metrics(*hand_counted())
    assert metrics["eval/s/accuracy"] == 3 / 8
    assert metrics["eval/s/pass@2"] == 0.5
    assert metrics["eval/s/maj@2"] == 1.5 / 4  # both say 7; 7 against 8; 8; 9
    assert metrics["eval/s/level/0"] == 0.75 and metrics["eval/s/level/1"] == 0.0
    assert (
        metrics["eval/s/length"] == 3.5
        and metrics["eval/s/truncated"] == 1 / 8
        and metrics["eval/s/unjudged"] == 1 / 8
    )
    rates = [1.0, 0.5, 0.0, 0.0]
    assert metrics["eval/s/accuracy_low"] == mean_interval(rates, 2).low
    could_be = [1.0, 0.5, 0.5, 0.0]  # the sixth response, of the third prompt, has no verdict
    assert (
        metrics["eval/s/accuracy_high"]
        == mean_interval(could_be, 2).high
        > mean_interval(rates, 2).high
    )


def test_a_response_that_was_not_judged_counts_as_wrong() -> None:
    """A model must not look better because its answers cannot be judged: here 1 of 4 is right, not 1 of 2."""
    verdicts = ["right", "unjudged", "unjudged", "wrong"]
    metrics = eval_metrics(
        a_set(2, 2, levels=[1, 2]), [rollout(i // 2, i % 2, v) for i, v in enumerate(verdicts)]
    )
    assert metrics["eval/s/accuracy"] == 1 / 4 and metrics["eval/s/unjudged"] == 1 / 2
    assert (metrics["eval/s/level/1"], metrics["eval/s/level/2"]) == (1 / 2, 0.0)


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_said_of_right_answers_where_most_have_no_verdict(full: bool) -> None:
    """Of all of them, or of a level."""
    none = eval_metrics(
        a_set(2, 2), [rollout(i // 2, i % 2, "unjudged") for i in range(4)], full=full
    )
    always = {"length", "truncated", "unjudged"}
    more = {"length_p50", "length_p90", "length_p99", "prompts", "n", "no_answer"}
    assert {key.removeprefix("eval/s/") for key in none} == (always | more if full else always)
    assert none["eval/s/unjudged"] == 1.0
    verdicts = ["right", "wrong", "unjudged", "unjudged", "wrong", "wrong"]
    rollouts = [rollout(i // 2, i % 2, verdict) for i, verdict in enumerate(verdicts)]
    some = eval_metrics(a_set(3, 2, levels=["a", "b", "c"]), rollouts, full=full)
    assert {key.split("/")[-1] for key in some if "/level/" in key} == {"a", "c"}
    assert some["eval/s/accuracy"] == 1 / 6


def test_a_training_run_records_only_the_short_form() -> None:
    """A curve for each of these is one too many; reports find levels by their prefix."""
    names = {key.removeprefix("eval/s/") for key in eval_metrics(*hand_counted())}
    assert names == {
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "pass@2",
        "maj@2",
        "length",
        "truncated",
        "unjudged",
        "level/0",
        "level/1",
    }


def test_full_form_adds_and_changes_nothing() -> None:
    short, full = eval_metrics(*hand_counted()), eval_metrics(*hand_counted(), full=True)
    assert short.items() <= full.items()
    assert full["eval/s/prompts"] == 4 and full["eval/s/n"] == 2
    assert full["eval/s/pass@1"] == full["eval/s/accuracy"]
    assert full["eval/s/pass@2_low"] == mean_interval([1.0, 1.0, 0.0, 0.0]).low
    assert full["eval/s/pass@2_high"] == mean_interval([1.0, 1.0, 1.0, 0.0]).high
    assert (full["eval/s/maj@2_low"], full["eval/s/maj@2_high"]) == mean_interval(
        [1.0, 0.5, 0.0, 0.0]
    )
    assert full["eval/s/length_right"] == 1.0 and full["eval/s/length_wrong"] == (3 + 4 + 6 + 7) / 4
    assert full["eval/s/length_p50"] == 3.5 and full["eval/s/length_p99"] == pytest.approx(6.93)
    assert full["eval/s/no_answer"] == 1 / 8  # the unjudged one is counted as unjudged
    assert full["eval/s/pass@1_high"] == full["eval/s/accuracy_high"]
    assert full["eval/s/level_low/1"] == mean_interval([0.0, 0.0], 2).low
    assert full["eval/s/level_high/1"] == mean_interval([0.5, 0.0], 2).high, (
        "one of four has no verdict"
    )


def test_a_level_may_be_called_anything() -> None:
    metrics = eval_metrics(
        a_set(2, 1, levels=["x_low", "accuracy"]), [rollout(0, 0, "right"), rollout(1, 0, "wrong")]
    )
    assert metrics["eval/s/level/x_low"] == 1.0 and metrics["eval/s/level/accuracy"] == 0.0
    assert metrics["eval/s/accuracy"] == 0.5


def test_votes_need_a_judge_that_names_answers() -> None:
    eval_set = a_set(1, 2)
    nameless = eval_metrics(eval_set, [rollout(0, 0, "right"), rollout(0, 1, "wrong")], full=True)
    assert "eval/s/maj@2" not in nameless and "eval/s/no_answer" not in nameless
    silent = eval_metrics(eval_set, [rollout(0, 0, "wrong"), rollout(0, 1, "wrong")], full=True)
    assert silent["eval/s/maj@2"] == 0.0 and silent["eval/s/no_answer"] == 1.0


def test_k_goes_up_in_powers_to_n() -> None:
    rollouts = [rollout(0, i, "right" if i < 2 else "wrong", final=str(i < 2)) for i in range(6)]
    full = eval_metrics(a_set(1, 6), rollouts, full=True)
    tried = [
        key.removeprefix("eval/s/")
        for key in full
        if "@" in key and not key.endswith(("_low", "_high"))
    ]
    assert tried == ["pass@1", "pass@2", "pass@4", "pass@6", "maj@2", "maj@4", "maj@6"]


class Scripted:
    """Engine and judge in one: right iff the rollout's index is even. Counts what it is asked at once."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None]
    ) -> list[Rollout]:
        self.asked.append(sum(r.n for r in requests))
        on_progress(self.asked[-1])
        ids = np.arange(4, dtype=np.int32)
        trace = Trace(ids=ids, log_probs=ids.astype(np.float32), versions=ids)
        return [
            replace(rollout(r.group_id, i, "unjudged"), trace=trace)
            for r in requests
            for i in range(r.n)
        ]

    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [replace(r, verdict="wrong" if r.index % 2 else "right") for r in rollouts]


def test_evaluate_goes_in_slices_and_tells() -> None:
    eval_set, world = a_set(2000, 4), Scripted()
    progress: list[tuple[int, int]] = []
    seen: list[Rollout] = []
    metrics = evaluate(
        eval_set,
        world,
        world,
        seen.extend,
        on_progress=lambda *news: progress.append(news),
        full=True,
    )  # type: ignore[arg-type]
    assert world.asked == [2048, 2048, 2048, 1856] and progress == [
        (n, 8000) for n in (2048, 4096, 6144, 8000)
    ]
    assert len(seen) == 8000 and all(r.trace is not None for r in seen)
    assert metrics["eval/s/accuracy"] == 0.5
    quiet = Scripted()
    assert evaluate(eval_set, quiet, quiet).items() <= metrics.items()  # type: ignore[arg-type]
    assert quiet.asked == [2048, 2048, 2048, 1856]
