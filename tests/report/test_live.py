from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from whet.recipe import dump_config, parse_config
from whet.report.live import RunProgress, follow, sparkline

HUGE = 1e9


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=20, color_system=None, _environ={})


def text(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_pipe_gets_one_plain_line_at_each_evaluation() -> None:
    console = pipe()
    progress = RunProgress("speed", console=console, every_s=HUGE)
    progress.start(10)
    for step in range(11):
        row = {"step": step, "tokens_generated": 100 * step, "curriculum/signal_share": 0.25}
        progress.update(row | ({"eval/held_out/accuracy": step / 20} if step in (0, 4, 8) else {}), step / 10)
    progress.close()
    lines = text(console).splitlines()
    assert [line.split(", ")[:2] for line in lines] == [
        ["speed: step 0", "0%"],
        ["speed: step 0", "0%"],
        ["speed: step 4", "40%"],
        ["speed: step 8", "80%"],
        ["speed: step 10", "100%"],
    ]
    assert "accuracy 0.400" in lines[3] and "\x1b" not in text(console)


def test_a_pipe_gets_lines_in_between_when_time_has_passed() -> None:
    console = pipe()
    progress = RunProgress(console=console, every_s=0.0)
    for step in range(5):
        progress.update({"step": step}, step / 10)
    progress.close()
    assert len(text(console).splitlines()) == 5


def test_long_lines_are_not_broken_in_a_pipe() -> None:
    console = pipe()
    progress = RunProgress("n" * 70, console=console, every_s=HUGE)
    progress.message("word " * 40)
    progress.update(
        {"step": 1, "eval/held_out/accuracy": 0.5, "tokens_generated": 5, "curriculum/signal_share": 0.2}, 0.5
    )
    progress.close()
    assert len(text(console).splitlines()) == 2


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_gets_a_line_that_fits(width: int) -> None:
    console = terminal(width)
    progress = RunProgress("speed", console=console)
    progress.update({"step": 0, "eval/held_out/accuracy": 0.2}, 0.0)
    progress.message("A sentence that stays.")
    row = {"step": 5, "eval/held_out/accuracy": 0.612, "curriculum/signal_share": 0.42, "rollout/tokens_per_s": 21_400}
    progress.update({**row, "tokens_generated": 85_000}, 0.57)
    progress.close()
    last = [line for line in text(console).split("\n") if "57%" in line][-1]
    for part in ("speed", "57%", "0.612", "42%", "21.4k", "━"):
        assert part in last
    assert ("▁█" in last) == (width >= 96)
    assert "A sentence that stays." in text(console)


SPLIT = {"time/generate": 7.0, "time/train": 2.0, "time/log_probs": 0.5, "time/idle": 0.5, "time/gpu_idle": 0.08}


@pytest.mark.parametrize("width", [60, 120])
def test_where_the_time_went_is_a_line_of_its_own(width: int) -> None:
    console = terminal(width)
    progress = RunProgress("speed", console=console)
    progress.update({"step": 5, "eval/held_out/accuracy": 0.612, **SPLIT, "time/total": 10.0}, 0.5)
    progress.close()
    assert "generate 70%, train 20%, log-probs 5%, idle 5%, GPU idle 8%" in text(console)
    piped = pipe()
    progress = RunProgress(console=piped)
    progress.update({"step": 5, **SPLIT}, 1.0)
    progress.close()
    assert text(piped) == "step 5, 100%; generate 70%, train 20%, log-probs 5%, idle 5%, GPU idle 8%\n"


def test_hostile_names_and_messages_are_plain_text() -> None:
    for console in (pipe(), terminal()):
        progress = RunProgress("\x1b[2J[red]x[/red]", console=console)
        progress.update({"step": 1, "eval/held_out/accuracy": 0.5}, 0.5)
        progress.message("\x1b]0;title\x07 [bold]b[/bold]")
        progress.close()
        assert "\x1b[2J" not in text(console) and "\x07" not in text(console) and "[bold]b[/bold]" in text(console)


def test_quiet_is_quiet() -> None:
    console = pipe()
    progress = RunProgress(quiet=True, console=console, every_s=0.0)
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
            {"step": s, "tokens_generated": tokens * s, "time/total": 1.0, "rollout/tokens_per_s": 900.0}
            | {"curriculum/signal_share": 0.3, "eval/held_out/accuracy": s / 20}
        )
        + "\n"
        for s in steps
    ]


@pytest.fixture
def two_runs(save_run: Callable[..., Path]) -> tuple[list[Path], Writers]:
    """One ends by its steps, the other by its tokens; the first tears a line in two."""
    a, b = save_run("a", [], steps=10), save_run("b", [], steps=1000, token_budget=500)
    torn = "".join(rows(range(11), 7))
    pieces = [torn[i : i + 100] for i in range(0, len(torn), 100)]
    return [a, b], Writers({a / "metrics.jsonl": iter(pieces), b / "metrics.jsonl": iter(rows(range(6), 100))})


def test_follow_prints_plain_lines_into_a_pipe(two_runs: tuple[list[Path], Writers]) -> None:
    folders, writers = two_runs
    console = pipe()
    follow(folders, writers.alive, console=console, every_s=HUGE, poll_s=0.0)
    lines = text(console).splitlines()
    assert any(line.startswith("b: step 2, 40%, 3s left, accuracy 0.100, signal 30%, 900 tokens/s") for line in lines)
    assert [line for line in lines if "100%" in line] == [
        "b: step 5, 100%, accuracy 0.250, signal 30%, 900 tokens/s, 500 tokens",
        "a: step 10, 100%, accuracy 0.500, signal 30%, 900 tokens/s, 70 tokens",
    ]
    assert [line for line in lines if line.startswith("b")] == sorted(line for line in lines if line.startswith("b"))
    assert len(set(lines)) == len(lines) and "\x1b" not in text(console)


@pytest.mark.parametrize("width", [80, 120])
def test_follow_draws_a_table_on_a_terminal(two_runs: tuple[list[Path], Writers], width: int) -> None:
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
    follow([folder], alive, console=console, poll_s=0.0)
    assert text(console).count("waiting") == 2 and "100%" in text(console)


def test_an_evaluation_is_told_also_when_later_rows_came_with_it(save_run: Callable[..., Path]) -> None:
    folder = save_run("run", [{"step": 0}], steps=10)
    later = [{"step": 1, "eval/held_out/accuracy": 0.5}, {"step": 2}, {"step": 3}]
    first, second, third = (json.dumps(row) + "\n" for row in later)
    writers = Writers({folder / "metrics.jsonl": iter(["", first + second, third])})
    console = pipe()
    follow([folder], writers.alive, console=console, every_s=HUGE, poll_s=0.0)
    lines = ["run: step 0, 0%", "run: step 2, 20%, accuracy 0.500", "run: step 3, 30%, accuracy 0.500"]
    assert text(console).splitlines() == lines


def test_totals_stand_in_for_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(rows(range(3), 1)))
    console = pipe()
    follow({"x": tmp_path}, lambda: False, totals={"x": (8, 0)}, console=console)
    assert text(console).startswith("x: step 2, 25%")


def test_an_error_in_alive_leaves_the_terminal_usable(two_runs: tuple[list[Path], Writers]) -> None:
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


def test_a_warm_start_is_told_in_plain_lines_and_to_its_end() -> None:
    out = io.StringIO()
    progress = RunProgress(console=Console(file=out, width=100), every_s=1e9)
    for step in range(1, 11):
        progress.warm_start("warm start 1", step, 10, 1.0 / step)
    progress.close()
    lines = out.getvalue().splitlines()
    assert (
        lines[0].startswith("warm start 1: 1/10 updates")
        and lines[-1] == "warm start 1: 10/10 updates, done, loss 0.100"
    )
    assert len(lines) == 2
