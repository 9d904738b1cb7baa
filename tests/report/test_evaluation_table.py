import io
from collections.abc import Mapping

from rich.console import Console

from whet.report.compare import eval_table, set_names

FULL = {
    "eval/gsm8k/accuracy": 0.4375,
    "eval/gsm8k/accuracy_low": 0.39,
    "eval/gsm8k/accuracy_high": 0.48,
    "eval/gsm8k/pass@1": 0.4375,
    "eval/gsm8k/pass@1_low": 0.39,
    "eval/gsm8k/pass@1_high": 0.48,
    "eval/gsm8k/pass@4": 0.682,
    "eval/gsm8k/pass@4_low": 0.634,
    "eval/gsm8k/pass@4_high": 0.727,
    "eval/gsm8k/maj@4": 0.533,
    "eval/gsm8k/maj@4_low": 0.485,
    "eval/gsm8k/maj@4_high": 0.58,
    "eval/gsm8k/length": 1267.4,
    "eval/gsm8k/length_p50": 1000.0,
    "eval/gsm8k/length_p90": 2000.0,
    "eval/gsm8k/length_p99": 3000.0,
    "eval/gsm8k/length_right": 900.0,
    "eval/gsm8k/truncated": 0.031,
    "eval/gsm8k/unjudged": 0.0,
    "eval/gsm8k/no_answer": 0.15,
    "eval/gsm8k/prompts": 300.0,
    "eval/gsm8k/n": 4.0,
    "eval/gsm8k/level/easy_low": 0.9,
    "eval/gsm8k/level_low/easy_low": 0.8,
    "eval/gsm8k/level_high/easy_low": 0.95,
}


def lines(metrics: Mapping[str, float], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(eval_table(metrics))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_line_for_each_measure() -> None:
    shown = lines(FULL)
    for line in (
        "gsm8k accuracy 0.438 0.390–0.480",
        "300 prompts × 4 pass@4 0.682 0.634–0.727",
        "maj@4 0.533 0.485–0.580",
        "length 1,267 p50 1,000, p90 2,000, p99 3,000",
        "length of right ones 900",
        "cut at the limit 3%",
        "unjudged 0%",
        "no answer 15%",
        "level easy_low 0.900 0.800–0.950",
    ):
        assert line in shown
    assert not any("pass@1" in line or "_high" in line for line in shown)


def test_the_short_form_of_a_training_run() -> None:
    assert lines({"eval/a/accuracy": 0.5, "eval/b/accuracy": 0.25, "eval/b/level/2": 0.25})[2:] == [
        "a accuracy 0.500",
        "",
        "b accuracy 0.250",
        "level 2 0.250",
    ]


def test_names_are_text_never_markup() -> None:
    hostile = "[red]x\x1b[31m"
    shown = "\n".join(lines({f"eval/{hostile}/accuracy": 0.5, f"eval/{hostile}/level/[bold]": 0.5}))
    assert "[red]x\\x1b[31m" in shown and "level [bold]" in shown and "\x1b" not in shown


def test_sets_are_found_by_their_accuracy() -> None:
    assert set_names(FULL) == ["gsm8k"] and set_names({"eval/a/level/accuracy": 1.0}) == []
