"""Runs side by side: what each accuracy level cost each arm, and where it ended. For `whet compare RUN...`.

`compare(arms)` is the table in numbers; it is shown in a terminal (`compare_table`), as Markdown
(`to_markdown`) and by `page` in HTML, all from the same cells. The first arm is the baseline of every ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from whet.report import formats
from whet.report.arms import Arm, Folders, common_evaluation, read_arms
from whet.report.curves import Axis, number, series
from whet.report.formats import LAST, Reach, final_accuracy, median_reach, pick_levels, reach, saving
from whet.text import printable

RULE = (
    "A level is reached at the first of two consecutive evaluations at or above it, so no cost is known finer than the "
    "evaluations are apart. Tokens are those generated for training; time leaves evaluation and saving out."
)
AXES: dict[Axis, tuple[str, Callable[[float | None], str]]] = {
    "tokens": ("Tokens to accuracy", formats.count),
    "seconds": ("Time to accuracy", formats.duration),
}


@dataclass(frozen=True, slots=True)
class TableCell:
    """What stands in one field: a value, its ratio to the baseline, its range over the seeds (or "")."""

    value: str
    ratio: str = ""
    range: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    evaluation: str | None
    levels: list[float]
    arms: list[str]
    seeds: list[int]
    """Runs of each arm."""
    costs: dict[Axis, list[list[TableCell]]]
    """By axis: a row for each arm, a cell for each level."""
    ends: list[dict[str, TableCell]]
    """For each arm: column -> cell of the table of how the runs ended."""
    unfinished: list[str]
    """Arms whose numbers are those of a part, and where they stand."""

    @property
    def notes(self) -> list[str]:
        notes = [f"Not at its end: {words}." for words in self.unfinished]
        notes += [RULE, f"Final accuracy is the mean of the last {LAST} evaluations."]
        if max(self.seeds) > 1:
            notes.append("With several seeds: the median, and below it the range.")
        if len(self.arms) > 1:
            notes.append(f"2× means half of what {self.arms[0]} took; > and < where a run ended before the level.")
        return notes


def compare(arms: Sequence[Arm], evaluation: str | None = None) -> Comparison:
    evaluation = common_evaluation(arms, evaluation)
    levels = pick_levels([run.points(evaluation) for arm in arms for run in arm.runs])
    return Comparison(
        evaluation=evaluation,
        levels=levels,
        arms=[arm.name for arm in arms],
        seeds=[len(arm.runs) for arm in arms],
        costs={axis: _cost_rows(arms, evaluation, levels, axis) for axis in AXES},
        ends=[_ends(arm, evaluation) for arm in arms],
        unfinished=[f"{arm.name} {arm.unfinished}" for arm in arms if arm.unfinished],
    )


def compare_table(folders: Folders, evaluation: str | None = None) -> Group:
    """How the runs ended, tokens to each level, time to each level."""
    result = compare(read_arms(folders), evaluation)
    tables = [_rich_table("How the runs ended", result, [[*end.values()] for end in result.ends], [*result.ends[0]])]
    if result.levels:
        heads = [formats.level(x) for x in result.levels]
        tables += [_rich_table(title, result, result.costs[axis], heads) for axis, (title, _) in AXES.items()]
    notes = Text(" ".join(printable(note) for note in result.notes), style="dim")
    return Group(*(part for table in tables for part in (table, Text(""))), notes)


def to_markdown(folders: Folders, evaluation: str | None = None) -> str:
    """The same tables, for a README or an issue."""
    result = compare(read_arms(folders), evaluation)
    parts = [_markdown_table("arm", result, [[*end.values()] for end in result.ends], [*result.ends[0]])]
    if result.levels:
        heads = [formats.level(x) for x in result.levels]
        parts += [_markdown_table(title, result, result.costs[axis], heads) for axis, (title, _) in AXES.items()]
    return "\n\n".join([*parts, " ".join(_markdown_text(note) for note in result.notes)]) + "\n"


def _cost_rows(
    arms: Sequence[Arm], evaluation: str | None, levels: Sequence[float], axis: Axis
) -> list[list[TableCell]]:
    _, show = AXES[axis]
    reached = [[[reach(run.points(evaluation), x, axis) for run in arm.runs] for x in levels] for arm in arms]
    baseline = [median_reach(seeds) for seeds in reached[0]]
    return [
        [_cost(seeds, None if i == 0 else base, show) for seeds, base in zip(row, baseline, strict=True)]
        for i, row in enumerate(reached)
    ]


def _cost(seeds: Sequence[Reach], baseline: Reach | None, show: Callable[[float | None], str]) -> TableCell:
    """Never is said only when no seed got there; a median that some unfinished seed could move is a bound."""
    middle = median_reach(seeds)
    ratio = formats.times(saving(baseline, middle)) if baseline is not None else ""
    if not any(seed.known for seed in seeds):
        all_below = min(seed.low for seed in seeds)
        return TableCell(
            "never", ratio if ratio != formats.MISSING else "", f"by {show(all_below)}" if all_below else ""
        )
    value = show(middle.low) if middle.known else f">{show(middle.low)}"
    if len(seeds) == 1:
        return TableCell(value, ratio)
    low = min(seed.low for seed in seeds if seed.known)
    high = max(seed.high for seed in seeds)
    return TableCell(value, ratio, f"{show(low)}–{show(high) if math.isfinite(high) else 'never'}")


def _ends(arm: Arm, evaluation: str | None) -> dict[str, TableCell]:
    last = [run.rows[-1] if run.rows else {} for run in arm.runs]
    signal = [[y for _, y in series(run.rows, "curriculum/signal_share")] for run in arm.runs]
    trained = [_quotient(number(row, "tokens_trained"), number(row, "tokens_generated")) for row in last]
    return {
        "seeds": TableCell(str(len(arm.runs))),
        "accuracy": _spread([final_accuracy(run.points(evaluation)) for run in arm.runs], formats.accuracy),
        "steps": _spread([number(row, "step") for row in last], formats.count),
        "tokens": _spread([number(row, "tokens_generated") for row in last], formats.count),
        "trained on": _spread(trained, formats.share),
        "time": _spread([number(row, "time_s") for row in last], formats.duration),
        "signal": _spread([fmean(values) if values else None for values in signal], formats.share),
    }


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _spread(values: Sequence[float | None], show: Callable[[float | None], str]) -> TableCell:
    known = [value for value in values if value is not None]
    if not known:
        return TableCell(formats.MISSING)
    low, high = show(min(known)), show(max(known))
    return TableCell(show(median(known)), range=f"{low}–{high}" if low != high else "")


def _rich_table(title: str, result: Comparison, rows: Sequence[Sequence[TableCell]], heads: Sequence[str]) -> Table:
    heading = Text(title, style="bold")
    table = Table(
        title=heading, title_justify="left", header_style="dim", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    table.add_column("", no_wrap=True, overflow="ellipsis", min_width=8)
    for head in heads:
        table.add_column(Text(head), no_wrap=True)
    for name, row in zip(result.arms, rows, strict=True):
        table.add_row(Text(printable(name, one_line=True), style="bold"), *(_rich_cell(cell) for cell in row))
    return table


def _rich_cell(cell: TableCell) -> Text:
    text = Text(cell.value)
    if cell.ratio:
        text.append(f" {cell.ratio}", style="cyan")
    if cell.range:
        text.append(f"\n{cell.range}", style="dim")
    return text


def _markdown_table(title: str, result: Comparison, rows: Sequence[Sequence[TableCell]], heads: Sequence[str]) -> str:
    lines = ["| " + " | ".join([title, *heads]) + " |", "|---|" + "---:|" * len(heads)]
    for name, row in zip(result.arms, rows, strict=True):
        cells = [_markdown_text(name), *(_markdown_cell(cell) for cell in row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _markdown_cell(cell: TableCell) -> str:
    ratio = f" **{cell.ratio}**" if cell.ratio else ""
    return f"{cell.value}{ratio}" + (f" ({cell.range})" if cell.range else "")


def _markdown_text(text: str) -> str:
    """A name must not end the table or start markup."""
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, f"\\{mark}")
    return printable(text, one_line=True)


# ---- evaluation
#
# What an evaluation measured, as a table: a line for each set and measure, with its 95% range. For `whet eval`.
#
# Reads the metrics of `eval.eval_metrics`, whole or lean; what is not there gets no line.


SHARES = {"truncated": "cut at the limit", "unjudged": "unjudged", "no_answer": "no answer"}


def eval_table(metrics: Mapping[str, float]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("set", overflow="fold", max_width=24)
    table.add_column("measure", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95% range")
    for name in set_names(metrics):
        lines = [
            *_lines({key.removeprefix(f"eval/{name}/"): value for key, value in metrics.items() if _of(key, name)})
        ]
        heads = [Text(printable(name, one_line=True), style="bold"), Text(_size(metrics, name), style="dim")]
        for at, (measure, value, spread) in enumerate(lines):
            head = heads[at] if at < len(heads) else Text("")
            last = at == len(lines) - 1
            table.add_row(
                head, Text(printable(measure, one_line=True)), value, Text(spread, style="dim"), end_section=last
            )
    return table


def set_names(metrics: Mapping[str, float]) -> list[str]:
    """
    >>> set_names({"eval/a/accuracy": 0.5, "eval/a/level/accuracy": 0.5, "eval/b c/accuracy": 0.1})
    ['a', 'b c']
    """
    ends = "/accuracy"
    found = [key[len("eval/") : -len(ends)] for key in metrics if key.startswith("eval/") and key.endswith(ends)]
    return [name for name in found if not name.endswith("/level")]


def _of(key: str, name: str) -> bool:
    return key.startswith(f"eval/{name}/")


def _size(metrics: Mapping[str, float], name: str) -> str:
    prompts, n = metrics.get(f"eval/{name}/prompts"), metrics.get(f"eval/{name}/n")
    return f"{prompts:.0f} prompts × {n:.0f}" if prompts is not None and n is not None else ""


def _lines(mine: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """(measure, value, range), in reading order."""
    yield "accuracy", formats.accuracy(mine["accuracy"]), _eval_spread(mine, "accuracy")
    for key in mine:
        tried = key.startswith(("pass@", "maj@")) and not key.endswith(("_low", "_high"))
        if tried and key != "pass@1":  # which is the accuracy
            yield key, formats.accuracy(mine[key]), _eval_spread(mine, key)
    if "length" in mine:
        spread = ", ".join(f"{p} {mine[f'length_{p}']:,.0f}" for p in ("p50", "p90", "p99") if f"length_{p}" in mine)
        yield "length", f"{mine['length']:,.0f}", spread
    for verdict in ("right", "wrong"):
        if f"length_{verdict}" in mine:
            yield f"length of {verdict} ones", f"{mine[f'length_{verdict}']:,.0f}", ""
    for key, label in SHARES.items():
        if key in mine:
            yield label, formats.share(mine[key]), ""
    for key in mine:
        if key.startswith("level/"):
            level = key.removeprefix("level/")
            low, high = mine.get(f"level_low/{level}"), mine.get(f"level_high/{level}")
            yield f"level {level}", formats.accuracy(mine[key]), _between(low, high)


def _eval_spread(mine: Mapping[str, float], key: str) -> str:
    return _between(mine.get(f"{key}_low"), mine.get(f"{key}_high"))


def _between(low: float | None, high: float | None) -> str:
    return f"{formats.accuracy(low)}–{formats.accuracy(high)}" if low is not None and high is not None else ""


# ---- drafting
#
# What speculation brought in an evaluation, as a table: for `whet eval --draft`.
#
# Reads the eval/NAME/draft/MEASURE of `whet.tools.measure.evaluate_twice`.


def draft_table(metrics: Mapping[str, float]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("set", overflow="fold", max_width=24)
    table.add_column("drafts", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for name in set_names(metrics):
        start = f"eval/{name}/draft/"
        mine = {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}
        lines = list(_drafting_lines(mine)) if mine else []
        for at, (measure, value) in enumerate(lines):
            head = Text("" if at else printable(name, one_line=True), style="bold")
            table.add_row(head, Text(measure), value, end_section=at == len(lines) - 1)
    return table


def _drafting_lines(mine: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    plain, drafted = mine["plain_tokens_per_s"], mine["tokens_per_s"]
    yield "tokens a second, plain", formats.count(plain)
    yield "tokens a second, drafted", f"{formats.count(drafted)} ({drafted / plain:.2f}x)"
    length = mine.get("accept_length")
    yield "accept length", formats.MISSING if length is None else f"{length:.2f}"
    yield "responses that differ", f"{mine['differ']:.0f} of {mine['rollouts']:.0f}"
    if mine.get("failures"):
        yield "drafts that failed", formats.count(mine["failures"])
    shares = {key.removeprefix("share_"): value for key, value in mine.items() if key.startswith("share_")}
    for arm, share in sorted(shares.items(), key=lambda item: -item[1]):
        yield f"time in {arm}", formats.share(share)
