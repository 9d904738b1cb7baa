from __future__ import annotations

from whet.report.live import Pace, Status, plain_line, time_split


def test_progress_is_the_larger_share_of_steps_and_tokens() -> None:
    status = Status("run", steps=100, token_budget=1000)
    status.add({"step": 10, "tokens_generated": 50})
    assert status.progress == 0.1
    status.add({"step": 11, "tokens_generated": 500})
    assert status.progress == 0.5
    status.add({"step": 12, "tokens_generated": 1200})
    assert status.progress == 1.0
    no_budget = Status("run", steps=50)
    no_budget.add({"step": 10, "tokens_generated": 10**9})
    assert no_budget.progress == 0.2


def test_pace_follows_the_last_steps() -> None:
    """Ten slow seconds a hundredth, then thirty-two fast ones: only those count."""
    pace = Pace()
    assert pace.left() is None
    now = 0.0
    for i in range(11):
        pace.add(now, i / 100)
        now += 10
    for i in range(11, 43):
        pace.add(now, i / 100)
        now += 1
    left = pace.left()
    assert left is not None and abs(left - 58) < 1e-9  # 0.58 to go at a hundredth a second
    assert pace.left(waited=100) == 0.0


def test_pace_says_nothing_while_nothing_moves() -> None:
    pace = Pace()
    pace.add(0.0, 0.2)
    pace.add(5.0, 0.2)
    assert pace.left() is None
    pace.add(6.0, 1.0)
    assert pace.left() == 0.0


def test_the_run_is_timed_by_its_own_rows() -> None:
    """Rows read all at once, as when an old run is followed: 2 s a step, 5 of 10 steps done."""
    status = Status("run", steps=10)
    for step in range(6):
        status.add({"step": step, "time/total": 2.0})
    assert status.pace.left() == 10.0


def test_shares_of_the_time() -> None:
    assert time_split({"step": 1}) == "" and time_split({"time/gpu_idle": 0.5}) == ""
    row = {"time/generate": 1.0, "time/eval": 98.9, "time/save": 0.1, "time/warm_start": 50.0, "time/total": 100.0}
    assert time_split(row) == "eval 99%, generate 1%", "what is less than half a hundredth is not worth a word"
    status = Status("run", steps=10)
    status.add({"step": 1, **row})
    status.add({"step": 2})
    assert status.split == "eval 99%, generate 1%", "until the next is known"


def test_lessons_of_the_drafter_are_part_of_the_time() -> None:
    assert time_split({"time/generate": 3.0, "time/draft": 1.0}) == "generate 75%, draft 25%"


def test_a_resumed_run_starts_its_account_again() -> None:
    status = Status("run", steps=10)
    for step, accuracy in ((0, 0.1), (1, 0.2), (2, 0.3), (1, 0.25), (2, 0.35)):
        status.add({"step": step, "time/total": 1.0, "eval/held_out/accuracy": accuracy})
    assert status.accuracies == [0.25, 0.35] and status.step == 2


def test_latest_values_stay_until_the_next() -> None:
    status = Status("run", steps=10)
    assert status.add({"step": 0, "eval/a/accuracy": 0.1, "eval/b/accuracy": 0.9}) is True
    assert status.add({"step": 1, "curriculum/signal_share": 0.5, "rollout/tokens_per_s": 100.0}) is False
    assert status.add({"step": 2, "eval/b/accuracy": 0.95}) is True
    assert (status.accuracy, status.signal, status.speed) == (0.1, 0.5, 100.0)


def test_the_plain_line_is_ascii_and_leaves_out_what_is_unknown() -> None:
    status = Status("")
    status.add({"step": 3}, progress=0.999)
    assert plain_line(status, None) == "step 3, 99%"
    status.add({"step": 4, "tokens_generated": 1000}, progress=1.0)
    line = plain_line(status, 0.0)
    assert line == "step 4, 100%, 1k tokens" and line.isascii()
