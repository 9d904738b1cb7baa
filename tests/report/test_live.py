from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from whet.recipe import dump_config, parse_config
from whet.report.live import (
    FileTail,
    Pace,
    RunProgress,
    Status,
    follow,
    plain_line,
    sparkline,
    step_line,
    time_split,
)

HUGE = 1e9


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width: int = 80) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=20,
        color_system=None,
        _environ={},
    )


def text(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_pipe_gets_one_plain_line_at_each_evaluation() -> None:
    console = pipe()
    progress = RunProgress(console=console)
    progress.every_s = HUGE
    for step in range(11):
        row = {"step": step, "tokens_generated": 100 * step, "curriculum/signal_share": 0.25}
        progress.update(
            row | ({"eval/held_out/accuracy": step / 20} if step in (0, 4, 8) else {}), step / 10
        )
    progress.close()
    lines = text(console).splitlines()
    assert [line.split(", ")[:2] for line in lines] == [
        ["step 0", "0%"],
        ["step 4", "40%"],
        ["step 8", "80%"],
        ["step 10", "100%"],
    ]
    assert "accuracy 0.400" in lines[2] and "\x1b" not in text(console)


def test_a_pipe_gets_lines_in_between_when_time_has_passed() -> None:
    console = pipe()
    progress = RunProgress(console=console)
    progress.every_s = 0.0
    for step in range(5):
        progress.update({"step": step}, step / 10)
    progress.close()
    assert len(text(console).splitlines()) == 5


def test_long_lines_are_not_broken_in_a_pipe() -> None:
    console = pipe()
    progress = RunProgress(console=console)
    progress.every_s = HUGE
    progress.message("word " * 40)
    progress.update(
        {
            "step": 1,
            "eval/held_out/accuracy": 0.5,
            "tokens_generated": 5,
            "curriculum/signal_share": 0.2,
            **SPLIT,
        },
        0.5,
    )
    progress.close()
    assert len(text(console).splitlines()) == 2


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_gets_a_line_a_step_above_a_footer_that_fits(width: int) -> None:
    console = terminal(width)
    progress = RunProgress(console=console)
    progress.update({"step": 0, "eval/held_out/accuracy": 0.2}, 0.0)
    progress.message("A sentence that stays.")
    row = {
        "step": 5,
        "eval/held_out/accuracy": 0.612,
        "curriculum/signal_share": 0.42,
        "rollout/tokens_per_s": 21_400,
    }
    progress.update({**row, "tokens_generated": 85_000, "reward/mean": 0.5}, 0.57)
    progress.update({"step": 6, "reward/mean": 0.55, "time/total": 2.5}, 0.58)
    progress.close()
    lines = [
        line.split("\x1b[2K")[-1].removeprefix("\x1b[?25l") for line in text(console).split("\n")
    ]
    assert max(map(len, lines)) <= width
    for words in (
        "0 0.200",
        "5 0.612 0.500 42% 85k 21.4k",
        "6 0.550 2.5s",
        "A sentence that stays.",
    ):
        assert [" ".join(line.split()) for line in lines].count(words) == 1, (
            "each stays, and none is drawn again"
        )
    footer = [line for line in lines if "58%" in line][-1]
    for part in ("step 6", "━", "▁█", "accuracy 0.612"):
        assert part in footer
    assert len(footer) <= width - 2, "the ^C that a terminal writes at the cursor has room"
    assert lines[0].split() == [
        "step",
        "accuracy",
        "reward",
        "signal",
        "length",
        "tokens",
        "tok/s",
        "time",
    ]


def test_every_screen_has_the_heads_once() -> None:
    console = terminal()  # 20 lines high
    progress = RunProgress(console=console)
    for step in range(30):
        progress.update({"step": step}, step / 30)
    progress.close()
    assert text(console).count("reward") == 3  # above the steps 0, 14 and 28


SPLIT = {
    "time/generate": 7.0,
    "time/train": 2.0,
    "time/log_probs": 0.5,
    "time/idle": 0.5,
    "time/gpu_idle": 0.08,
}


@pytest.mark.parametrize("width", [64, 120])
def test_where_the_time_went_is_a_line_of_its_own(width: int) -> None:
    console = terminal(width)
    progress = RunProgress(console=console)
    progress.update({"step": 5, "eval/held_out/accuracy": 0.612, **SPLIT, "time/total": 10.0}, 0.5)
    progress.close()
    assert "generate 70%, train 20%, log-probs 5%, idle 5%, GPU idle 8%" in text(console)
    piped = pipe()
    progress = RunProgress(console=piped)
    progress.update({"step": 5, **SPLIT}, 1.0)
    progress.close()
    assert (
        text(piped) == "step 5, 100%; generate 70%, train 20%, log-probs 5%, idle 5%, GPU idle 8%\n"
    )


def test_hostile_names_and_messages_are_plain_text(save_run: Callable[..., Path]) -> None:
    folder = save_run("run", [{"step": 1, "eval/held_out/accuracy": 0.5}], steps=2)
    for console in (pipe(), terminal(160)):
        follow({"\x1b[2J[red]x[/red]": folder}, lambda: False, console=console)
        assert "[red]x[/red]" in text(console)
        progress = RunProgress(console=console)
        progress.message("\x1b]0;title\x07 [bold]b[/bold]")
        progress.close()
        assert (
            "\x1b[2J" not in text(console)
            and "\x07" not in text(console)
            and "[bold]b[/bold]" in text(console)
        )


def test_quiet_is_quiet() -> None:
    console = pipe()
    progress = RunProgress(quiet=True, console=console)
    progress.every_s = 0.0
    progress.message("anything")
    progress.update({"step": 1, "eval/held_out/accuracy": 0.5}, 1.0)
    progress.close()
    assert text(console) == ""


class Writers:
    """Stands for other processes: each look at `alive` lets every run write its next piece."""

    def __init__(self, pieces: dict[Path, Iterator[str]]) -> None:
        self.pieces = pieces

    def alive(self) -> bool:
        left = False
        for path, pieces in self.pieces.items():
            piece = next(pieces, None)
            if piece is not None:
                left = True
                with path.open("a") as file:
                    file.write(piece)
        return left


def rows(steps: range, tokens: int) -> list[str]:
    return [
        json.dumps(
            {
                "step": s,
                "tokens_generated": tokens * s,
                "time/total": 1.0,
                "rollout/tokens_per_s": 900.0,
            }
            | {"curriculum/signal_share": 0.3, "eval/held_out/accuracy": s / 20}
        )
        + "\n"
        for s in steps
    ]


@pytest.fixture
def two_runs(save_run: Callable[..., Path]) -> tuple[dict[str, Path], Writers]:
    """One ends by its steps, the other by its tokens; the first tears a line in two."""
    a, b = save_run("a", [], steps=10), save_run("b", [], steps=1000, token_budget=500)
    torn = "".join(rows(range(11), 7))
    pieces = [torn[i : i + 100] for i in range(0, len(torn), 100)]
    return {"a": a, "b": b}, Writers(
        {a / "metrics.jsonl": iter(pieces), b / "metrics.jsonl": iter(rows(range(6), 100))}
    )


def test_follow_prints_plain_lines_into_a_pipe(two_runs: tuple[dict[str, Path], Writers]) -> None:
    folders, writers = two_runs
    console = pipe()
    follow(folders, writers.alive, console=console, every_s=HUGE, poll_s=0.0)
    lines = text(console).splitlines()
    assert any(
        line.startswith("b: step 2, 40%, 3s left, accuracy 0.100, signal 30%, 900 tokens/s")
        for line in lines
    )
    assert [line for line in lines if "100%" in line] == [
        "b: step 5, 100%, accuracy 0.250, signal 30%, 900 tokens/s, 500 tokens",
        "a: step 10, 100%, accuracy 0.500, signal 30%, 900 tokens/s, 70 tokens",
    ]
    assert [line for line in lines if line.startswith("b")] == sorted(
        line for line in lines if line.startswith("b")
    )
    assert len(set(lines)) == len(lines) and "\x1b" not in text(console)


@pytest.mark.parametrize("width", [80, 120])
def test_follow_draws_a_table_on_a_terminal(
    two_runs: tuple[dict[str, Path], Writers], width: int
) -> None:
    folders, writers = two_runs
    console = terminal(width)
    follow(folders, writers.alive, console=console, poll_s=0.0)
    drawn = [line.split("\x1b[2K")[-1] for line in text(console).split("\n")]
    last = drawn[-5:]
    assert "accuracy" in last[0] and "signal" in last[0] and "tok/s" in last[0]
    assert [line.split()[0] for line in last[1:4]] == ["a", "b", "all"]
    assert all("100%" in line and "done" in line for line in last[1:4])
    assert "0.500" in last[1] and "30%" in last[1] and "0.250" in last[2]


def test_follow_waits_for_runs_that_do_not_exist_yet(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    looks = iter(range(4))

    def alive() -> bool:
        look = next(looks)
        if look == 2:
            folder.mkdir()
            (folder / "config.toml").write_text(dump_config(parse_config({"steps": 2})))
            (folder / "metrics.jsonl").write_text("".join(rows(range(3), 1)))
        return look < 3

    console = terminal()
    follow({"later": folder}, alive, console=console, poll_s=0.0)
    assert text(console).count("waiting") == 2 and "100%" in text(console)


def test_an_evaluation_is_shown_also_when_later_rows_came_with_it(
    save_run: Callable[..., Path],
) -> None:
    folder = save_run("run", [{"step": 0}], steps=10)
    later = [{"step": 1, "eval/held_out/accuracy": 0.5}, {"step": 2}, {"step": 3}]
    first, second, third = (json.dumps(row) + "\n" for row in later)
    writers = Writers({folder / "metrics.jsonl": iter(["", first + second, third])})
    console = pipe()
    follow({"run": folder}, writers.alive, console=console, every_s=HUGE, poll_s=0.0)
    lines = [
        "run: step 0, 0%",
        "run: step 2, 20%, accuracy 0.500",
        "run: step 3, 30%, accuracy 0.500",
    ]
    assert text(console).splitlines() == lines


def test_an_error_in_alive_leaves_the_terminal_usable(
    two_runs: tuple[dict[str, Path], Writers],
) -> None:
    def alive() -> bool:
        raise RuntimeError("the arm failed")

    console = terminal()
    with pytest.raises(RuntimeError, match="the arm failed"):
        follow(two_runs[0], alive, console=console, poll_s=0.0)
    assert text(console).rstrip("\n").endswith("\x1b[?25h")  # the cursor is back


def test_sparkline_stretches_from_lowest_to_highest() -> None:
    assert sparkline([], 4) == ""
    assert sparkline([0.5, 0.5], 4) == "▁▁"
    assert sparkline([0.0, 0.2, 0.9, 1.0], 2) == "▇█"


def test_a_warm_start_is_shown_in_plain_lines_and_to_its_end() -> None:
    out = io.StringIO()
    progress = RunProgress(console=Console(file=out, width=100))
    progress.every_s = 1e9
    for step in range(1, 11):
        progress.warm_start("warm start 1", step, 10, 1.0 / step)
    progress.close()
    lines = out.getvalue().splitlines()
    assert (
        lines[0].startswith("warm start 1: 1/10 updates")
        and lines[-1] == "warm start 1: 10/10 updates, done, loss 0.100"
    )
    assert len(lines) == 2


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
    row = {
        "time/generate": 1.0,
        "time/eval": 98.9,
        "time/save": 0.1,
        "time/warm_start": 50.0,
        "time/total": 100.0,
    }
    assert time_split(row) == "eval 99%, generate 1%", (
        "what is less than half a hundredth is not worth a word"
    )
    status = Status("run", steps=10)
    status.add({"step": 1, **row})
    status.add({"step": 2})
    assert status.split == "eval 99%, generate 1%", "until the next is known"


def test_an_accuracy_without_verdicts_is_none() -> None:
    """In a log and in a terminal; the share of what has no verdict stands beside it."""
    of = "eval/held_out"
    rows = [
        (
            {"step": 0, f"{of}/accuracy": 0.5, f"{of}/unjudged": 0.0},
            "accuracy 0.500",
            "0     0.500",
        ),
        (
            {"step": 1, f"{of}/accuracy": 0.056, f"{of}/unjudged": 0.389},
            "accuracy 0.056 (39% unjudged)",
            None,
        ),
        (
            {"step": 2, f"{of}/unjudged": 1.0},
            "accuracy - (100% unjudged)",
            "    2         - (100% unjudged)",
        ),
    ]
    status = Status("", steps=10)
    for row, said, line in rows:
        assert status.add(row) is True
        assert plain_line(status, None).endswith(said)
        assert line is None or step_line(row, "held_out").endswith(line)
    assert step_line(rows[1][0], "held_out") == "    1     0.056 (39% unjudged)"
    assert status.accuracies == [0.5, 0.056]
    status.add({"step": 3})
    assert plain_line(status, None).endswith("accuracy - (100% unjudged)"), (
        "until the next evaluation"
    )


def test_the_signal_is_that_of_the_step() -> None:
    status = Status("", steps=10)
    row = {"step": 1, "verdict/mixed": 0.25, "curriculum/signal_share": 0.9}
    status.add(row)
    assert "signal 25%" in plain_line(status, None) and "25%" in step_line(row, None)


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
    assert (
        status.add({"step": 1, "curriculum/signal_share": 0.5, "rollout/tokens_per_s": 100.0})
        is False
    )
    assert status.add({"step": 2, "eval/b/accuracy": 0.95}) is True
    assert (status.accuracies[-1], status.signal, status.speed) == (0.1, 0.5, 100.0)


def test_the_plain_line_is_ascii_and_leaves_out_what_is_unknown() -> None:
    status = Status("")
    status.add({"step": 3}, progress=0.999)
    assert plain_line(status, None) == "step 3, 99%"
    status.add({"step": 4, "tokens_generated": 1000}, progress=1.0)
    line = plain_line(status, 0.0)
    assert line == "step 4, 100%, 1k tokens" and line.isascii()


def test_rows_come_once_and_half_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = FileTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"step": 0}\n{"step": 1}\n{"ste')
        assert [row["step"] for row in tail.read()] == [0, 1]
        assert tail.offset == 24
        assert tail.read() == []
        file.write(b'p": 2}')
        assert tail.read() == []
        file.write(b"\n")
        assert tail.read() == [{"step": 2}]
    assert tail.read() == [] and tail.offset == path.stat().st_size


def test_no_byte_is_read_twice(tmp_path: Path) -> None:
    """What was read already may change on the disk without an effect."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n')
    tail = FileTail(path)
    tail.read()
    with path.open("r+b") as file:
        file.write(b"~~~~~~~~~~~\n")
        file.seek(0, os.SEEK_END)
        file.write(b'{"step": 1}\n')
    assert tail.read() == [{"step": 1}]


def test_a_letter_torn_in_two_is_put_together(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = '{"name": "é"}\n'.encode()
    path.write_bytes(line[:11])
    tail = FileTail(path)
    assert tail.read() == []
    path.write_bytes(line)
    assert tail.read() == [{"name": "é"}]


def test_a_file_cut_back_or_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n')
    tail = FileTail(path)
    tail.read()
    os.truncate(path, 12)
    assert tail.read() == [{"step": 0}]
    other = tmp_path / "other"
    other.write_bytes(b'{"step": 5}\n{"step": 6}\n{"step": 7}\n')
    os.replace(other, path)
    assert [row["step"] for row in tail.read()] == [5, 6, 7]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\nnot json\n[1]\n\n\xff\xfe\n{"step": 1}\n')
    tail = FileTail(path)
    assert [row["step"] for row in tail.read()] == [0, 1]
