"""What a probe found, in the terminal: pass rates, signal, lengths, prices and advice. For `whet probe`.

All numbers come from `ProbeReport`; nothing is computed here but widths. Fits 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.probe.report import ProbeReport
from whet.probe.spending import Estimate, Spending, cheapest
from whet.report import formats

BAR = 40
"""Columns of the longest bar."""
EIGHTHS = " ▏▎▍▌▋▊▉"
SCREENS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""N_init that get a line, besides the cheapest."""
HOW = {"counted": "", "fitted": "extrapolated", "at least": "at least; too little to extrapolate from"}


def probe_view(report: ProbeReport, console: Console | None = None) -> None:
    console = console or Console()
    console.print(_heading(report))
    for title, table in _tables(report):
        console.print(Text(f"\n{title}", style="bold"))
        console.print(table)
    console.print(Text("\nAdvice", style="bold"))
    advice = Table.grid(padding=(0, 1))
    for sentence in report.suggestions:
        advice.add_row("•", Text(sentence))
    console.print(advice)
    if report.recipe:
        console.print(Text("\nFor the recipe", style="bold"))
        console.print(Text(report.recipe.rstrip()))


def _heading(report: ProbeReport) -> Text:
    left_out = f" ({report.left_out} more were hardly judged and are left out)" if report.left_out else ""
    lines = [
        f"{report.prompts} prompts{left_out}, {report.n} rollouts each, at most {report.limit} tokens.",
        f"Pass rate {estimate(report.pass_rate)}, never right {estimate(report.never)}, always "
        f"{estimate(report.always)}.",
        f"Cut at the limit {formats.share(report.truncated)}, unjudged {formats.share(report.unjudged)}. "
        "In brackets: 95% ranges over the prompts.",
    ]
    return Text("\n".join(lines))


def _tables(report: ProbeReport) -> Iterator[tuple[str, Table]]:
    yield "Prompts by rollouts that were right", _histogram(report)
    yield "Prompts with both right and wrong among so many rollouts", _signals(report)
    yield "Tokens a response", _lengths(report)
    yield "Had the limit been lower", _limits(report)
    if math.isfinite(min(row.tokens.value for row in report.spendings)):
        yield f"What a group of {report.group} with both right and wrong takes (speed: by N_init)", _spendings(report)


def _histogram(report: ProbeReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    most = max(bar.prompts for bar in report.histogram)
    for number, bar in enumerate(report.histogram):
        style = "dim" if number in (0, len(report.histogram) - 1) else "green"
        table.add_row(bar.label, str(bar.prompts), Text(blocks(bar.prompts / most), style=style))
    return table


def _signals(report: ProbeReport) -> Table:
    table = _table("rollouts", "share", "")
    for signal in report.signals:
        style = "bold" if signal.size == report.group else ""
        table.add_row(str(signal.size), estimate(signal.share), HOW[signal.how], style=style)
    table.columns[1].justify = table.columns[2].justify = "left"
    return table


def _lengths(report: ProbeReport) -> Table:
    table = _table("", "responses", "mean", "p50", "p90", "p99", "longest")
    for row in report.lengths:
        numbers = (row.count, row.mean, row.p50, row.p90, row.p99, row.longest)
        table.add_row(row.of, *(f"{x:,.0f}" for x in numbers))
    return table


def _limits(report: ProbeReport) -> Table:
    table = _table("limit", "cut", "right lost", "tokens left")
    for row in report.limits:
        table.add_row(str(row.limit), *(formats.share(x) for x in (row.cut, row.right_lost, row.tokens)))
    return table


def _spendings(report: ProbeReport) -> Table:
    table = _table("", "prompts", "rollouts", "trained", "tokens", "cheaper by")
    best = cheapest(report.spendings)
    for row in report.spendings:
        if not row.screen or row is best or row.screen in SCREENS:
            name = f"speed {row.screen}" if row.screen else row.curriculum
            table.add_row(name, *_prices(row), style="bold" if row is best else "")
    table.columns[0].justify = "left"
    return table


def _prices(row: Spending) -> list[str]:
    """Tokens and saving with their ranges; the other columns follow from the same shares."""
    prices = [number(row.prompts.value), number(row.rollouts.value), number(row.trained.value), _range(row.tokens)]
    if row.screen and math.isfinite(row.tokens.value):
        prices.append(f"{row.saving.value:.2f}× ({row.saving.low:.2f}–{row.saving.high:.2f})")
    return prices


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def estimate(share: Estimate) -> str:
    return f"{formats.share(share.value)} ({formats.share(share.low)}–{formats.share(share.high)})"


def _range(value: Estimate) -> str:
    return f"{number(value.value)} ({number(value.low)}–{number(value.high)})"


def number(value: float) -> str:
    """
    >>> number(3.127), number(17_100), number(math.inf)
    ('3.13', '17.1k', '∞')
    """
    return formats.count(value) if math.isfinite(value) else "∞"


def blocks(share: float, width: int = BAR) -> str:
    """A bar in eighths of a column; anything above nothing shows.

    >>> blocks(0.5, 4), blocks(0.001, 4), blocks(0.0, 4)
    ('██', '▏', '')
    """
    eighths = max(round(8 * width * share), share > 0)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
