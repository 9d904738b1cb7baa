"""Compares runs: the cost of each accuracy level in each arm and how the runs ended; and the tables of `whet eval`.

`compare(arms)` gives the cells and a sentence of judgement for each arm; the first arm is the baseline of every ratio.
`whet compare` shows them in the terminal (`compare_table`), `page` as HTML, and benchmarks/curricula.py as Markdown.
`eval_table` and `draft_table` show the metrics of `whet eval`; a measure that is not among the metrics gets no line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median
from typing import Any, Self

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from whet.report import formats
from whet.report.arms import (
    Arm,
    Axis,
    Folders,
    Point,
    common_evaluation,
    evaluation_names,
    number,
    read_arms,
    series,
)
from whet.report.draws import Redrawn, middle_95, redraw
from whet.report.formats import (
    LAST,
    Reach,
    final_accuracy,
    median_reach,
    middle,
    pick_levels,
    reach,
    saving,
)
from whet.text import printable

Show = Callable[[float | None], str]

RULE = (
    "A level counts as reached when two evaluations in a row are at or above it. Costs are only as exact as the gaps "
    "between evaluations. Tokens are those generated for training; time leaves evaluation and saving out."
)
AXES: dict[Axis, tuple[str, Show]] = {
    "tokens": ("Tokens to accuracy", formats.count),
    "seconds": ("Time to accuracy", formats.duration),
}
SHARES = {"truncated": "cut at the limit", "unjudged": "unjudged", "no_answer": "no answer"}


@dataclass(frozen=True, slots=True)
class TableCell:
    """One cell: a value and its ratio to the baseline, each with its 95% interval (or "")."""

    value: str
    ratio: str = ""
    range: str = ""
    ratio_range: str = ""
    # than the baseline: 1 if surely cheaper, -1 if surely dearer
    better: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    evaluation: str | None
    levels: list[float]
    arms: list[str]
    seeds: list[int]  # runs per arm
    costs: dict[Axis, list[list[TableCell]]]  # by axis: a row for each arm, a cell for each level
    # for each arm: column -> cell of the table "How the runs ended"
    ends: list[dict[str, TableCell]]
    unfinished: list[str]  # arms that are not at their end, and how far they have come
    verdicts: list[str]  # a sentence for each arm but the first
    comparable: bool  # whether some arm was evaluated on the problems of the first

    @property
    def notes(self) -> list[str]:
        notes = [f"Not at its end: {words}." for words in self.unfinished]
        notes += [RULE, f"Final accuracy is the mean of the last {LAST} evaluations."]
        if self.evaluation is None:
            notes.append("The runs have no evaluation in common by which they could be compared.")
        else:
            below = "Below it: the 95% interval (costs, accuracy) or the range (the rest)."
            notes.append(f"Each value is the median over seeds. {below}")
            if min(self.seeds) == 1:
                notes.append("With one seed the interval ignores chance between seeds.")
        if self.comparable:
            notes.append(f"2× means half of what {self.arms[0]} took, 0.5× twice as much.")
        if any(">" in words or "<" in words or "≥" in words for words in self._shown()):
            notes.append(
                "Where a run ended before the level, > and < are bounds and ≥ is an interval without an end."
            )
        return notes

    def _shown(self) -> Iterator[str]:
        for cell in chain.from_iterable(chain.from_iterable(self.costs.values())):
            yield from (cell.value, cell.ratio, cell.range)

    def tables(self) -> Iterator[tuple[str, list[str], list[list[TableCell]]]]:
        """(title, heads, a row of cells for each arm): how the runs ended, then tokens and time to each level."""
        yield "How the runs ended", [*self.ends[0]], [[*end.values()] for end in self.ends]
        if self.levels:
            for axis, (title, _) in AXES.items():
                yield title, [formats.level(x) for x in self.levels], self.costs[axis]


def compare(arms: Sequence[Arm]) -> Comparison:
    evaluation = common_evaluation(arms)
    points = [tuple(tuple(run.points(evaluation)) for run in arm.runs) for arm in arms]
    drawn = [redraw(runs, seed) for seed, runs in enumerate(points)]
    levels = pick_levels([curve for runs in points for curve in runs])
    measured = {
        axis: [[Cost.of(*arm, x, axis) for x in levels] for arm in zip(points, drawn, strict=True)]
        for axis in AXES
    }
    costs: dict[Axis, list[list[TableCell]]] = {}
    alike = [evaluation is None or arm.has_problems_of(arms[0], evaluation) for arm in arms]
    for axis, (_, show) in AXES.items():
        costs[axis] = []
        for place, row in enumerate(measured[axis]):
            bases = measured[axis][0] if place and alike[place] else [None] * len(row)
            costs[axis].append(
                [cost.cell(base, show) for cost, base in zip(row, bases, strict=True)]
            )
    ends = [
        (middle(map(final_accuracy, runs)), draws.finals())
        for runs, draws in zip(points, drawn, strict=True)
    ]
    verdicts = []
    for arm, row, end, same in zip(
        arms[1:], measured["tokens"][1:], ends[1:], alike[1:], strict=True
    ):
        pairs = [*zip(levels, measured["tokens"][0], row, strict=True)]
        found = f"{arms[0].name} and {arm.name} are not comparable: their problems differ ({evaluation})."
        if same:
            found = _verdict(arms[0], arm, pairs, ends[0], end)
        verdicts += [found] if found else []
    return Comparison(
        evaluation=evaluation,
        levels=levels,
        arms=[arm.name for arm in arms],
        seeds=[len(arm.runs) for arm in arms],
        costs=costs,
        ends=[_ends(arm, *end) for arm, end in zip(arms, ends, strict=True)],
        unfinished=[f"{arm.name} {arm.unfinished}" for arm in arms if arm.unfinished],
        verdicts=verdicts,
        comparable=any(alike[1:]),
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a level cost an arm."""

    seeds: Sequence[Reach]
    draws: np.ndarray  # of the median
    spent: float  # by the run that went furthest

    @classmethod
    def of(cls, runs: Sequence[Sequence[Point]], drawn: Redrawn, level: float, axis: Axis) -> Self:
        spent = max((float(getattr(points[-1], axis)) for points in runs if points), default=0.0)
        return cls(
            seeds=[reach(points, level, axis) for points in runs],
            draws=drawn.costs(level, axis),
            spent=spent,
        )

    @property
    def middle(self) -> Reach:
        return median_reach(self.seeds)

    def saving(self, baseline: Cost) -> Reach:
        """The 95% interval of how many times cheaper than the baseline it is. In a draw in which the baseline does not
        get there, its cost lies between all that it spent and infinity."""
        mine = np.maximum(self.draws, 1e-9)  # a run may begin above the level
        low, _ = middle_95(np.minimum(baseline.draws, baseline.spent) / mine)
        endless = np.full_like(mine, math.inf)
        _, high = middle_95(
            np.divide(baseline.draws, mine, out=endless, where=np.isfinite(baseline.draws))
        )
        return Reach(low, high)

    def cell(self, baseline: Cost | None, show: Show) -> TableCell:
        """Says "never" only if no seed reached the level; a median that a seed could still move is a bound."""
        known = formats.times(saving(baseline.middle, self.middle)) if baseline is not None else ""
        ratio = known if known != formats.MISSING else ""
        if not any(seed.known for seed in self.seeds):
            spent = min(seed.low for seed in self.seeds)
            limit = saving(baseline.middle, self.middle).high if baseline is not None else math.inf
            words = f"spent {show(spent)}" if spent else ""
            return TableCell("never", ratio, words, better=-(limit < 1))
        value = show(self.middle.low) if self.middle.known else f">{show(self.middle.low)}"
        low, high = middle_95(self.draws)
        between = f"{show(low)}–{show(high)}" if math.isfinite(high) else f"≥{show(low)}"
        between = between if show(low) != show(high) and math.isfinite(low) else ""
        if baseline is None:
            return TableCell(value, range=between)
        gain = self.saving(baseline)
        better = (gain.low > 1) - (gain.high < 1)
        spread = formats.times_range(gain)
        return TableCell(value, ratio, between, spread if spread != ratio else "", better)


End = tuple[float | None, np.ndarray]  # an arm's final accuracy, and its draws


def _verdict(
    base: Arm, arm: Arm, costs: Sequence[tuple[float, Cost, Cost]], theirs: End, mine: End
) -> str:
    """Which of two arms is better, by their ends and the highest level that both surely reach; "" if unknown."""
    if mine[0] is None or theirs[0] is None:
        return ""
    ratio = Reach(1.0, 1.0)
    words = []
    reached = [
        (x, old, new)
        for x, old, new in costs
        if old.middle.known and new.middle.known and new.middle.low > 0
    ]
    savings = [(x, new.middle.low / old.middle.low, new.saving(old)) for x, old, new in reached]
    closed = [entry for entry in savings if entry[2].low > 0 and math.isfinite(entry[2].high)]
    if savings:
        level, share, ratio = (closed or savings)[-1]
        ends = f"{1 / ratio.high:.2f}–{1 / ratio.low:.2f}" if closed else "not sure"
        words.append(f"reaches {formats.level(level)} with {share:.2f} of the tokens ({ends})")
    gap = middle_95(mine[1] - theirs[1])
    words.append(
        f"ends at {formats.accuracy(mine[0])} against {formats.accuracy(theirs[0])} ({gap[0]:+.3f} to {gap[1]:+.3f})"
    )
    cheaper = (ratio.low > 1) - (ratio.high < 1)
    higher = (gap[0] > 0) - (gap[1] < 0)
    found = f"{arm.name} and {base.name} do not differ clearly: {arm.name}"
    if cheaper * higher < 0:
        kinds = ("cheaper", "lower") if cheaper > 0 else ("dearer", "higher")
        found = f"{arm.name} is {kinds[0]} than {base.name}, but ends {kinds[1]}: it"
    elif cheaper + higher:
        found = (
            f"{arm.name} is {'better' if cheaper + higher > 0 else 'worse'} than {base.name}: it"
        )
    return "So far " * bool(arm.unfinished or base.unfinished) + f"{found} {' and '.join(words)}."


def _ends(arm: Arm, accuracy: float | None, draws: np.ndarray) -> dict[str, TableCell]:
    low, high = map(formats.accuracy, middle_95(draws))
    last = [run.rows[-1] if run.rows else {} for run in arm.runs]
    tokens = [number(row, "tokens_generated") for row in last]
    trained = [number(row, "tokens_trained") for row in last]
    used = [
        part / whole if part is not None and whole else None
        for part, whole in zip(trained, tokens, strict=True)
    ]
    signal = [[y for _, y in series(run.rows, "curriculum/signal_share")] for run in arm.runs]
    return {
        "seeds": TableCell(str(len(arm.runs))),
        "accuracy": TableCell(
            formats.accuracy(accuracy), range=f"{low}–{high}" if low != high else ""
        ),
        "steps": _spread([number(row, "step") for row in last], formats.count),
        "tokens": _spread(tokens, formats.count),
        "trained on": _spread(used, formats.share),
        "time": _spread([number(row, "time_s") for row in last], formats.duration),
        "signal": _spread([fmean(values) if values else None for values in signal], formats.share),
    }


def _spread(values: Sequence[float | None], show: Show) -> TableCell:
    """The median of the seeds and their range."""
    known = [value for value in values if value is not None]
    if not known:
        return TableCell(formats.MISSING)
    low = show(min(known))
    high = show(max(known))
    return TableCell(show(median(known)), range=f"{low}–{high}" if low != high else "")


def settings_that_differ(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each arm) where the arms differ; an arm whose own runs differ shows all its values."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.settings)
    table = []
    for key in keys:
        values = [
            list(dict.fromkeys(formats.setting(run.settings.get(key)) for run in arm.runs))
            for arm in arms
        ]
        mixed = any(len(v) > 1 for v in values) and key != "seed"
        if mixed or any(v != values[0] for v in values):
            table.append((key, [", ".join(v) for v in values]))
    return table


# ---- in the terminal


def compare_table(folders: Folders) -> Group:
    arms = read_arms(folders)
    result = compare(arms)
    parts: list[Table | Text] = []
    for title, heads, rows in result.tables():
        table = _plain_table(
            title=Text(title, style="bold"),
            title_justify="left",
            header_style="dim",
            padding=(0, 1, 0, 0),
        )
        # names give way first: a cut number would be another
        table.add_column("", overflow="fold", min_width=8)
        for head in heads:
            table.add_column(Text(head), no_wrap=True, overflow="fold")
        for name, row in zip(result.arms, rows, strict=True):
            table.add_row(Text(printable(name, one_line=True), style="bold"), *map(_rich_cell, row))
        parts += [table, Text("")]
    damage = [f"{run.name}: {run.damage}" for arm in arms for run in arm.runs if run.damage]
    notes = Text(
        " ".join(printable(note, one_line=True) for note in [*damage, *result.notes]), style="dim"
    )
    verdicts = [
        Text(f"\n{printable(words, one_line=True)}", style="bold") for words in result.verdicts
    ]
    return Group(*parts, notes, *verdicts)


def _plain_table(**options: Any) -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, **options)


def _rich_cell(cell: TableCell) -> Text:
    colour = ("", "green", "red")[cell.better]
    lines = [
        (cell.value, ""),
        (cell.range, "dim"),
        (cell.ratio, colour),
        (cell.ratio_range, f"dim {colour}".strip()),
    ]
    return Text("\n").join(Text(words, style=style) for words, style in lines if words)


# ---- one evaluation


def eval_table(metrics: Mapping[str, float]) -> Table:
    """A line for each set and measure of `eval.eval_metrics`, with its 95% range."""
    table = _set_table("measure", "95% range")
    for name in evaluation_names([metrics]):
        mine = _under(f"eval/{name}/", metrics)
        size = (
            f"{mine['prompts']:.0f} prompts × {mine['n']:.0f}"
            if {"prompts", "n"} <= mine.keys()
            else ""
        )
        _add_set(table, name, size, list(_eval_lines(mine)))
    return table


def draft_table(metrics: Mapping[str, float]) -> Table:
    """What speculation gained, from the eval/NAME/draft/MEASURE of `whet.tools.measure.evaluate_twice`."""
    table = _set_table("drafts")
    for name in evaluation_names([metrics]):
        mine = _under(f"eval/{name}/draft/", metrics)
        if not mine:
            continue
        plain = mine["plain_tokens_per_s"]
        drafted = mine["tokens_per_s"]
        length = mine.get("accept_length")
        lines = [
            ("tokens per second, plain", formats.count(plain)),
            ("tokens per second, drafted", f"{formats.count(drafted)} ({drafted / plain:.2f}x)"),
            ("accept length", formats.MISSING if length is None else f"{length:.2f}"),
            ("responses that differ", f"{mine['differ']:.0f} of {mine['rollouts']:.0f}"),
        ]
        if mine.get("failures"):
            lines.append(("drafts that failed", formats.count(mine["failures"])))
        shares = sorted(_under("share_", mine).items(), key=lambda item: -item[1])
        _add_set(
            table,
            name,
            "",
            [*lines, *((f"time in {arm}", formats.share(share)) for arm, share in shares)],
        )
    return table


def _set_table(what: str, *more: str) -> Table:
    table = _plain_table(padding=(0, 1, 0, 0))
    table.add_column("set", overflow="fold", max_width=24)
    table.add_column(what, overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for head in more:
        table.add_column(head)
    return table


def _add_set(table: Table, name: str, size: str, lines: Sequence[tuple[str, ...]]) -> None:
    """Name and size of a set stand in front of its first two lines."""
    heads = [Text(printable(name, one_line=True), style="bold"), Text(size, style="dim")]
    for at, (measure, value, *spread) in enumerate(lines):
        cells: list[Text | str] = [Text(printable(measure, one_line=True)), value]
        cells += [Text(ends, style="dim") for ends in spread]
        table.add_row(
            heads[at] if at < len(heads) else "", *cells, end_section=at == len(lines) - 1
        )


def _under(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)
    }


def _eval_lines(mine: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """(measure, value, range), in reading order."""

    def measure(label: str, key: str, low: str, high: str) -> tuple[str, str, str]:
        ends = [formats.accuracy(mine[end]) for end in (low, high) if end in mine]
        return label, formats.accuracy(mine.get(key)), "–".join(ends) if len(ends) == 2 else ""

    tried = [
        key
        for key in mine
        if key.startswith(("pass@", "maj@")) and not key.endswith(("_low", "_high"))
    ]
    for key in ("accuracy", *tried):
        if key != "pass@1":  # it is the accuracy
            yield measure(key, key, f"{key}_low", f"{key}_high")
    if "length" in mine:
        spread = ", ".join(
            f"{p} {mine[f'length_{p}']:,.0f}"
            for p in ("p50", "p90", "p99")
            if f"length_{p}" in mine
        )
        yield "length", f"{mine['length']:,.0f}", spread
    for verdict in ("right", "wrong"):
        if f"length_{verdict}" in mine:
            yield f"length of {verdict} ones", f"{mine[f'length_{verdict}']:,.0f}", ""
    for key, label in SHARES.items():
        if key in mine:
            yield label, formats.share(mine[key]), ""
    for level in _under("level/", mine):
        yield measure(
            f"level {level}", f"level/{level}", f"level_low/{level}", f"level_high/{level}"
        )
