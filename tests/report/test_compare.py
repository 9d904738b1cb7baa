from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from whet.eval import wilson
from whet.report.arms import Arm, RunLog, evaluation_names, read_arms
from whet.report.compare import TableCell, compare, compare_table, eval_table
from whet.run import Run

Curve = tuple[float, ...]


def rows(*points: tuple[int, float]) -> list[dict[str, float]]:
    """(thousand tokens, accuracy), a second for every ten thousand tokens."""
    return [
        {
            "step": i,
            "tokens_generated": 1000 * k,
            "tokens_trained": 250 * k,
            "time_s": k / 10,
            "eval/held_out/accuracy": a,
        }
        | ({"curriculum/signal_share": 0.2 * i} if i else {})
        for i, (k, a) in enumerate(points)
    ]


def three_arms(save_run: Callable[..., Path]) -> list[Path]:
    return [
        save_run(
            "uniform-seed0", rows((0, 0.2), (100, 0.5), (200, 0.5), (300, 0.6), (400, 0.6)), seed=0
        ),
        save_run(
            "uniform-seed1", rows((0, 0.2), (100, 0.4), (200, 0.5), (300, 0.5), (400, 0.5)), seed=1
        ),
        save_run(
            "speed-seed0", rows((0, 0.2), (50, 0.5), (100, 0.6), (150, 0.6), (200, 0.6)), seed=0
        ),
        save_run(
            "speed-seed1", rows((0, 0.2), (50, 0.5), (110, 0.6), (150, 0.6), (200, 0.6)), seed=1
        ),
        save_run("lazy", rows((0, 0.2), (200, 0.2), (400, 0.2)), seed=0),
    ]


def test_costs_by_hand(save_run: Callable[..., Path]) -> None:
    result = compare(read_arms(three_arms(save_run)))
    assert result.levels == [0.3, 0.4, 0.5, 0.55, 0.6]
    assert (result.arms, result.seeds, result.evaluation) == (
        ["uniform", "speed", "lazy"],
        [2, 2, 1],
        "held_out",
    )
    at_half = [row[2] for row in result.costs["tokens"]]
    assert at_half == [
        TableCell("150k", "", "100k–200k"),  # of two seeds a draw holds either alone or both
        TableCell("50k", "3.0×", "", "2.0–4.0×"),
        TableCell("never", "<0.38×", "spent 400k"),  # 150 / 400 at most
    ]
    at_most = [row[4] for row in result.costs["seconds"]]
    assert at_most == [
        TableCell(">35s", "", "≥30s"),  # the median of 30 and more than 40
        TableCell("10s", ">3.3×", "10s–11s", ">2.7×"),  # 30 / 11
        TableCell("never", "", "spent 40s"),  # neither is known, so no ratio
    ]


def test_a_seed_that_ended_early_is_no_lower_end_of_the_range(
    save_run: Callable[..., Path],
) -> None:
    long = save_run("a-seed0", rows((0, 0.2), (200, 0.4), (300, 0.6), (400, 0.6)))
    short = save_run("a-seed1", rows((0, 0.2), (100, 0.4)))
    result = compare(read_arms([long, short]))
    assert result.levels[-1] == 0.6
    # the median of 300 and more than 100
    assert result.costs["tokens"][0][-1] == TableCell(">200k", "", "≥300k")


def test_ends_by_hand(save_run: Callable[..., Path]) -> None:
    ends = compare(read_arms(three_arms(save_run))).ends[0]
    # (0.5 + 0.6 + 0.6) / 3 and 0.5
    assert ends["accuracy"] == TableCell("0.533", "", "0.500–0.567")
    assert ends["tokens"] == TableCell("400k")
    assert ends["trained on"] == TableCell("25%")
    assert ends["signal"] == TableCell("50%")  # the mean of 0.2, 0.4, 0.6, 0.8


def test_the_terminal_names_a_damaged_line(save_run: Callable[..., Path]) -> None:
    folder = save_run("torn", rows((0, 0.2), (100, 0.5)))
    (folder / "metrics.jsonl").write_text("noise\n" + (folder / "metrics.jsonl").read_text())
    console = Console(file=io.StringIO(), width=80)
    console.print(compare_table([folder]))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "torn: Line 1 of metrics.jsonl is damaged and left out." in shown and "0.350" in shown


def test_the_terminal_shows_all_arms_at_80_columns(save_run: Callable[..., Path]) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(compare_table(three_arms(save_run)))
    shown = console.file.getvalue()
    for word in (
        "uniform",
        "speed",
        "lazy",
        "0.55",
        "3.0×",
        "never",
        "spent 400k",
        "two evaluations in",
    ):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


@pytest.mark.parametrize("seconds", [1, 777])
def test_no_number_is_cut_at_80_columns(save_run: Callable[..., Path], seconds: int) -> None:
    """Long names and ten-digit costs: a number without its end would be another number."""
    levels = [(k, round(0.31 + 0.05 * k, 2)) for k in range(8)]
    folders = []
    for name, pace, seeds in (
        ("a-rather-long-name-of-an-arm", 13_371, 3),
        ("another-name-that-is-long", 17_777, 3),
    ):
        for seed in range(seeds):
            log = rows(*[(k * (pace + 913 * seed), a) for k, a in [*levels, (8, 0.66)]])
            stretched = [{**row, "time_s": row["time_s"] * seconds} for row in log]
            folders.append(save_run(f"{name}-seed{seed}", stretched, seed=seed))
    result = compare(read_arms(folders))
    console = Console(file=io.StringIO(), width=80)
    console.print(compare_table(folders))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for _, _, cells in result.tables():
        for cell in (cell for row in cells for cell in row):
            for words in (cell.value, cell.ratio, cell.range, cell.ratio_range):
                assert words in shown
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80


def test_only_a_sure_gain_is_green() -> None:
    """A bound such as ">0.11x" tells nothing: the arm may be cheaper or dearer."""
    slow, fast, late = (
        measured(name, *c, size=100_000) for name, c in (("s", SLOW), ("f", FAST), ("l", FELL))
    )
    assert [c.better for c in compare([slow, fast]).costs["tokens"][1]][-1] == 1
    assert [c.better for c in compare([fast, slow]).costs["tokens"][1]][-1] == -1
    assert {c.better for c in compare([fast, late]).costs["tokens"][1]} == {0}
    short = measured("short", *FAST[:2], size=100_000)
    bounds = [c for c in compare([short, slow]).costs["tokens"][1] if c.ratio.startswith(">")]
    assert bounds and not any(c.better for c in bounds)


def test_a_name_cannot_break_out(save_run: Callable[..., Path]) -> None:
    folder = save_run("plain", rows((0, 0.2), (100, 0.5), (200, 0.5)))
    hostile = {"a|b\n<img>\x1b[2J [red]*": folder}
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    console.print(compare_table(hostile))
    shown = console.file.getvalue()
    assert "\x1b[2J" not in shown and "[red]" in shown
    worse = save_run("worse", rows((0, 0.2), (100, 0.2), (200, 0.2)), steps=9)
    console.print(compare_table({"plain": folder, "\x1b]0;x\x07\u202e\ud800[bold]\n": worse}))
    shown = console.file.getvalue()
    assert not set(shown) & set("\x07\u202e") and "\x1b]" not in shown
    assert r"So far \x1b]0;x\x07\u202e\ud800[bold]\n is worse than plain" in " ".join(shown.split())
    shown.encode()


def measured(name: str, *curve: float, seeds: int = 1, size: int = 400, **settings: Any) -> Arm:
    """Runs with an evaluation of `size` problems every 100 thousand tokens."""
    key = "eval/held_out/accuracy"
    log = [
        {"step": i, "tokens_generated": 100_000 * i, "time_s": i, key: p}
        | ({f"{key}_low": wilson(p, size).low, f"{key}_high": wilson(p, size).high} if size else {})
        for i, p in enumerate(curve)
    ]
    run = RunLog(name=name, folder=Path(name), settings=settings, rows=log)
    return Arm(name=name, runs=(run,) * seeds)


SLOW, FAST = (0.22, 0.32, 0.42, 0.52, *[0.62] * 4), (0.22, 0.42, *[0.62] * 6)
FELL = (*FAST[:5], 0.52, 0.52, 0.52)


def test_noise_of_evaluations_gives_an_interval_to_a_single_run() -> None:
    few, many = (compare([measured("a", *SLOW, size=size)]) for size in (50, 1_000_000))
    assert few.levels[2] == 0.5
    assert few.costs["tokens"][0][2].range.startswith("200k–"), "fifty problems do not fix a level"
    assert many.costs["tokens"][0][2] == TableCell("300k"), "a million do"
    low, high = map(float, few.ends[0]["accuracy"].range.split("–"))
    # 0.08 for 150 answers
    assert few.ends[0]["accuracy"].value == "0.620" and 0.52 < low < 0.57 and 0.67 < high < 0.72
    assert compare([measured("a", *SLOW, size=50)]).costs == few.costs, "the same every time"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            SLOW,
            FAST,
            "new is better than old: it reaches 0.60 with 0.50 of the tokens (0.50–0.50) and ends at 0.620",
        ),
        (
            FAST,
            SLOW,
            "new is worse than old: it reaches 0.60 with 2.00 of the tokens (2.00–2.00) and ends at 0.620",
        ),
        (
            FAST,
            FAST,
            "new and old do not differ clearly: new reaches 0.60 with 1.00 of the tokens (1.00–1.00) and",
        ),
        (
            (0.2, 0.2, 0.3, 0.3),
            (0.2, 0.2, 0.2, 0.2),
            "new is worse than old: it ends at 0.200 against 0.267 (-0.0",
        ),
        (SLOW, FELL, "new is cheaper than old, but ends lower: it reaches 0.60 with 0.50 of"),
        (FELL, SLOW, "new is dearer than old, but ends higher: it reaches 0.60 with 2.00 of"),
    ],
)
def test_one_sentence_says_which_is_better(old: Curve, new: Curve, words: str) -> None:
    arms = [measured("old", *old, size=100_000), measured("new", *new, size=100_000)]
    (verdict,) = compare(arms).verdicts
    assert verdict.startswith(words) and verdict.endswith(").")


def test_a_verdict_waits_for_the_end_and_for_evidence() -> None:
    slow, fast = measured("slow", *SLOW, size=20), measured("fast", *FAST[:4], size=20, steps=9)
    (verdict,) = compare([slow, fast]).verdicts
    assert verdict.startswith("So far fast and slow do not differ clearly"), (
        "twenty problems prove nothing"
    )
    assert compare([slow, measured("bare")]).verdicts == [] and compare([slow]).verdicts == []


def test_seeds_that_differ_widen_the_interval() -> None:
    early, late = measured("a", *FAST, size=0).runs, measured("a", *SLOW, size=0).runs
    result = compare([Arm(name="a", runs=early + late), measured("b", *FAST, size=0)])
    assert result.costs["tokens"][0][2] == TableCell("250k", "", "200k–300k")  # at 0.5
    assert result.costs["tokens"][1][2] == TableCell("200k", "1.2×", "", "1.0–1.5×")
    assert result.verdicts[0].startswith(
        "b and a do not differ clearly: b reaches 0.60 with 0.67 of the tokens (0.50–1"
    )


def on(prompts: str, *curve: float, **settings: Any) -> RunLog:
    """A run with a hash of its held-out problems, or none if that is empty."""
    (run,) = measured("run", *curve, **settings).runs
    return replace(run, prompts={"held_out": prompts} if prompts else {})


OWN = {"data.0.path": "/my/data.jsonl", "held_out.size": 200}


@pytest.mark.parametrize(
    ("old", "new", "alike"),
    [
        (on("a1", *SLOW), on("a1", *FAST), True),
        (on("a1", *SLOW), on("b2", *FAST), False),
        (
            on("a1", *SLOW, seed=1),
            on("b2", *FAST, seed=2),
            True,
        ),  # problems that were made with another seed
        (on("a1", *SLOW, seed=1), on("b2", *FAST, seed=2, **OWN), False),
        (on("a1", *SLOW), on("a1", *FAST, **OWN), True),  # the same problems from another file
        (
            on("", *SLOW),
            on("", *FAST),
            True,
        ),  # runs of an older version tell by their settings alone
        (on("", *SLOW, **{"data.0.task": "chain"}), on("", *FAST, **OWN), False),
        (on("", *SLOW, **{"data.0.weight": 2}), on("", *FAST, **{"data.0.weight": 1}), True),
    ],
)
def test_runs_on_other_problems_are_not_compared(old: RunLog, new: RunLog, alike: bool) -> None:
    arms = [Arm(name="old", runs=(old,)), Arm(name="new", runs=(new,))]
    result = compare(arms)
    cells = [cell for rows in result.costs.values() for cell in rows[1]]
    assert cells and all(
        bool(cell.ratio) == alike and (alike or not cell.ratio_range) for cell in cells
    )
    assert [end["accuracy"].value for end in result.ends] == ["0.620", "0.620"], "both are shown"
    assert any("2×" in note for note in result.notes) == alike
    if not alike:
        assert result.verdicts == [
            "old and new are not comparable: their problems differ (held_out)."
        ]
    else:
        assert result.verdicts[0].startswith(
            ("new is better than old", "new and old do not differ")
        )


def test_a_benchmark_is_compared_by_its_own_settings() -> None:
    """What the runs train on may differ where both are evaluated on the same problems."""
    bench = {
        "eval.0.name": "held_out",
        "eval.0.path": "gsm8k",
        "eval.0.limit": 400,
        "data.0.path": "a",
    }
    for change, alike in (
        ({"data.0.path": "b"}, True),
        ({"eval.0.every": 5}, True),
        ({"eval.0.limit": 50}, False),
    ):
        arms = [
            Arm(name=n, runs=(on("", *SLOW, **s),))
            for n, s in (("a", bench), ("b", bench | change))
        ]
        assert arms[1].has_problems_of(arms[0], "held_out") == alike


def test_runs_without_evaluation_still_compare(save_run: Callable[..., Path]) -> None:
    result = compare(
        read_arms([save_run("bare", [{"step": 3, "tokens_generated": 10}]), save_run("empty", [])])
    )
    assert (
        result.levels == []
        and result.ends[0]["accuracy"] == TableCell("–")
        and result.ends[1]["steps"] == TableCell("–")
    )


def test_a_run_that_was_stopped_is_marked(save_run: Callable[..., Path]) -> None:
    whole = save_run("whole", rows((0, 0.2), (100, 0.4), (200, 0.6)), steps=2)
    part = save_run("part-seed0", rows((0, 0.2), (100, 0.4)), steps=2)
    spent = save_run("part-seed1", rows((0, 0.2), (100, 0.4)), steps=2, token_budget=90_000)
    result = compare(read_arms([whole, part, spent]))
    assert result.unfinished == ["part seed0 stopped at step 1 of 2"]
    assert "Not at its end: part stopped at step 1 of 2." in " ".join(
        compare(read_arms([part])).notes
    )
    assert compare(read_arms([whole, spent])).unfinished == []


def test_a_run_without_a_row_does_not_hide_the_others(save_run: Callable[..., Path]) -> None:
    whole, empty = (
        save_run("whole", rows((0, 0.2), (100, 0.4)), steps=1),
        save_run("empty", [], steps=3),
    )
    result = compare(read_arms([empty, whole]))
    assert (result.evaluation, result.unfinished) == ("held_out", ["empty stopped at step 0 of 3"])
    both = compare(read_arms({"a-seed0": whole, "a-seed1": empty})).ends[0]
    assert (both["seeds"], both["accuracy"]) == (TableCell("2"), TableCell("0.300"))


def test_a_run_that_goes_on_or_collapsed_did_not_stop(save_run: Callable[..., Path]) -> None:
    going = save_run("going", rows((0, 0.2), (100, 0.4)), steps=2)
    fell = save_run("fell", [*rows((0, 0.5)), {"step": 1, "collapsed": 1.0}], steps=9)
    with Run.resume(going):
        assert read_arms([going])[0].unfinished == "is at step 1 of 2"
    assert read_arms([going])[0].unfinished == "stopped at step 1 of 2"
    assert read_arms([fell])[0].unfinished == ""


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
    assert (
        evaluation_names([FULL]) == ["gsm8k"]
        and evaluation_names([{"eval/a/level/accuracy": 1.0}]) == []
    )
    assert evaluation_names([{"eval/math/hard/accuracy": 0.1}]) == ["math/hard"]
