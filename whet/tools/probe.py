"""Answers "will this pay on my model?": a few rollouts on a few prompts, and what they say about training on them.

`whet probe` calls `run_probe`, `probe_report` and `probe_view` in turn: judged rollouts, one record with all numbers
(probe.json keeps it), and its tables and advice in the terminal. Engine and judge are given, so there is no torch
here; the maths is in `forecast`. The thresholds of the advice are ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.curriculum.build import CURRICULA
from whet.errors import WhetError
from whet.eval import OnProgress, judged_slices, mean_interval
from whet.report import formats
from whet.rollout.base import Engine
from whet.tasks.judge import Judge
from whet.tools.forecast import (
    CUT,
    Estimate,
    Limit,
    ResponseLengths,
    SignalCurve,
    Spending,
    cheapest,
    enough,
    length_rows,
    limit_rows,
    mixed,
    resamples,
    spendings,
)
from whet.types import Prompt, Request, Rollout, Sampling

FINE = 10  # rollouts per prompt up to which each count has its own bar; beyond, pass rates fall into eighths
SIZES = (2, 4, 8, 16, 32, 64)

MOST = 0.7  # share of prompts with signal from which uniform wastes little
WORTH = 1.1  # speed is advised if it is at least so many times cheaper, and surely cheaper at all
NEAR = 1.05  # an N_init within so many times the lowest cost is as good
SCARCE = 0.05  # share of prompts with signal below which every curriculum is expensive
UNJUDGED = 0.05  # share of unjudged responses from which the judge is mentioned
FEW = 100  # prompts below which the ranges are wide
HELP = "easier prompts, a warm start on worked solutions ([[warm_start]]), or a longer limit"

BAR = 40  # columns of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉"
SCREENS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # N_init that get a line, besides the cheapest
HOW = {"counted": "", "fitted": "extrapolated", "at least": "at least; too little to extrapolate from"}


def run_probe(
    prompts: Sequence[Prompt],
    engine: Engine,
    judge: Judge,
    *,
    n: int,
    sampling: Sampling,
    on_progress: OnProgress | None = None,
) -> list[Rollout]:
    """Makes n judged rollouts per prompt, with traces; group_id is the place of the prompt."""
    requests = [
        Request(prompt_id=p.id, group_id=i, n=n, sampling=sampling, phase="probe") for i, p in enumerate(prompts)
    ]
    return [rollout for judged in judged_slices(requests, engine, judge, on_progress) for rollout in judged]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of the histogram of pass rates."""

    label: str
    prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Share of prompts with both right and wrong rollouts among `size`."""

    size: int
    share: Estimate
    how: str  # counted, fitted or at least; see `Extrapolation`


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    prompts: int  # with two judged rollouts or more; the others are left out of all but lengths
    left_out: int
    n: int
    limit: int  # tokens that a response could have
    group: int  # rollouts per group in training
    rollouts: int
    unjudged: float
    truncated: float
    pass_rate: Estimate  # mean over the prompts
    never: Estimate  # share of prompts with no right rollout
    always: Estimate
    signals: tuple[Signal, ...]
    histogram: tuple[Bar, ...]
    lengths: tuple[ResponseLengths, ...]
    limits: tuple[Limit, ...]
    enough: int | None  # the smallest limit that suffices (`forecast.enough`); None if too few responses are right
    spendings: tuple[Spending, ...]
    suggestions: tuple[str, ...] = ()  # sentences
    recipe: str = ""  # TOML to paste; empty if nothing can be advised

    def signal(self, size: int) -> Signal:
        return next(s for s in self.signals if s.size == size)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, where infinite costs (nothing useful was found) become null."""
        tree: dict[str, Any] = _finite(dataclasses.asdict(self))
        return tree


def probe_report(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], *, n: int, limit: int, group: int
) -> ProbeReport:
    """What judged rollouts (`group_id`: the place of the prompt in `prompts`) mean for training."""
    right, judged, lengths = _counts(len(prompts), rollouts)
    told = judged >= 2
    if not told.any():
        raise WhetError(
            f"Of {len(rollouts)} responses hardly one was judged, so the probe has nothing to say; "
            "mend the judge, or raise judge.timeout_s or judge.memory_mb."
        )
    right, judged, lengths = right[told], judged[told], lengths[told]
    curve = SignalCurve(right, judged, resamples(right.size))
    report = ProbeReport(
        prompts=right.size,
        left_out=int((~told).sum()),
        n=n,
        limit=limit,
        group=group,
        rollouts=len(rollouts),
        unjudged=float(np.mean([not r.judged for r in rollouts])),
        truncated=float(np.mean([r.finish == "length" for r in rollouts])),
        pass_rate=_share(right / judged, n),
        never=_share(right == 0),
        always=_share(right == judged),
        signals=tuple(_signal(curve, size) for size in _sizes(curve.n, group)),
        histogram=tuple(histogram(right, judged, n)),
        lengths=tuple(length_rows(rollouts)),
        limits=tuple(limit_rows(rollouts, limit)),
        enough=enough(rollouts, limit),
        spendings=tuple(spendings(curve, lengths, group)),
    )
    return dataclasses.replace(report, suggestions=tuple(suggestions(report)), recipe=recipe_lines(report))


def histogram(right: np.ndarray, judged: np.ndarray, n: int) -> list[Bar]:
    """Never, always, and between them bars by count, or by eighths of the pass rate if n is large.

    >>> [(bar.label, bar.prompts) for bar in histogram(np.array([0, 0, 1, 4]), np.array([4, 4, 4, 4]), 4)]
    [('never', 2), ('1 of 4', 1), ('2 of 4', 0), ('3 of 4', 0), ('always', 1)]
    """
    inner = n if n <= FINE else 8
    rate = right / judged
    place = np.clip(np.ceil(rate * inner - 1e-9), 1, inner) if n > FINE else np.clip(np.rint(rate * n), 1, n - 1)
    place = np.where(right == 0, 0, np.where(right == judged, inner + 1, place)).astype(int)
    if n <= FINE:
        between = [(f"{k} of {n}", k) for k in range(1, n)]
    else:
        between = [(f"up to {k / inner:.3g}" if k < inner else "below 1", k) for k in range(1, inner + 1)]
    bars = [("never", 0), *between, ("always", inner + 1)]
    return [Bar(label=label, prompts=int((place == k).sum())) for label, k in bars]


def _counts(prompts: int, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each prompt: right and judged rollouts, and the mean length of a response."""
    right, judged, seen, tokens = (np.zeros(prompts, dtype=np.int64) for _ in range(4))
    for rollout in rollouts:
        right[rollout.group_id] += rollout.verdict == "right"
        judged[rollout.group_id] += rollout.judged
        seen[rollout.group_id] += 1
        tokens[rollout.group_id] += rollout.length
    return right, judged, tokens / np.maximum(seen, 1)


def _sizes(counted: int, group: int) -> list[int]:
    """The counted size, the wanted group, and sizes up to twice what was counted: beyond, no fit can be trusted."""
    return sorted({size for size in SIZES if size <= max(2 * counted, group)} | {counted, group})


def _signal(curve: SignalCurve, size: int) -> Signal:
    found = curve.at(size)
    if found.how == "fitted":
        return Signal(size=size, share=Estimate.of(found.share), how=found.how)
    counted = min(size, curve.n)
    values = mixed(curve.right, curve.judged, counted)
    share = _share(values[np.isfinite(values)], curve.judged.max() / counted)  # a bootstrap of zeros has no width
    return Signal(size=size, share=share, how=found.how)


def _share(values: np.ndarray, draws: float = 1.0) -> Estimate:
    return Estimate(float(values.mean()), *mean_interval(values, draws))


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# ---- advice


def suggestions(report: ProbeReport) -> list[str]:
    if hopeless(report):
        found = [_why_hopeless(report)]
    else:
        found = [_about_curriculum(report), *_about_screening(report), *_about_trust(report)]
    if not hopeless(report) or report.truncated > CUT:
        found.append(_about_limit(report))
    if report.unjudged > UNJUDGED:
        found.append(
            f"{report.unjudged:.0%} of the responses were not judged; mend the judge, or raise judge.timeout_s or "
            "judge.memory_mb."
        )
    if report.prompts < FEW:
        found.append(f"{report.prompts} prompts are few: read the ranges, or probe with more --prompts.")
    return found


def recipe_lines(report: ProbeReport) -> str:
    """TOML to paste into a recipe; dapo replaces a curriculum that this version does not list."""
    if hopeless(report):
        return ""
    chosen, screen = choose(report)
    lines = ["[curriculum]", f'name = "{chosen if chosen in CURRICULA else "dapo"}"', f"rollouts = {report.group}"]
    if screen is not None and chosen in CURRICULA:
        lines += ["", "[curriculum.speed]", f"n_init = {screen.screen}"]
    if report.truncated <= CUT and report.enough is not None:
        lines += ["", "[rollout]", f"max_tokens = {report.enough}"]
    return "\n".join(lines) + "\n"


def hopeless(report: ProbeReport) -> bool:
    """Whether no group has both right and wrong rollouts."""
    return report.signal(report.group).share.value == 0.0


def choose(report: ProbeReport) -> tuple[str, Spending | None]:
    """The curriculum to advise, and for speed what it would spend.

    speed if it is surely cheaper (and the share of useful groups is known, not only bounded from below), else
    uniform if most prompts carry signal, else dapo.
    """
    signal, best = report.signal(report.group), cheapest(report.spendings)
    if best is not None and signal.how != "at least" and best.saving.low > 1.0 and best.saving.value >= WORTH:
        return "speed", best
    return ("uniform" if signal.share.value >= MOST else "dapo"), None


def _why_hopeless(report: ProbeReport) -> str:
    if report.pass_rate.value == 0.0:
        return (
            f"Not one of {report.rollouts} responses was right, so no group would teach anything, whatever the "
            f"curriculum. What helps is {HELP}. Look at what the model wrote first (--out keeps it): the judge may not "
            "see its answers."
        )
    if report.always.value == 1.0:
        return "Every judged response was right: there is nothing to learn here; take harder prompts."
    return (
        "No prompt had both right and wrong responses: each is always or never solved. Take prompts in between, or "
        "probe with a larger --n."
    )


def _about_curriculum(report: ProbeReport) -> str:
    signal, group = report.signal(report.group), report.group
    share = f"{'at least ' * (signal.how == 'at least')}{_percent(signal.share)} of the prompts"
    chosen, screen = choose(report)
    if screen is not None:
        sentence = (
            f"Use speed: {share} carry signal at {group} rollouts, and screening saves part of what the others cost. "
            f"Under uniform or dapo a useful group takes {_times(screen.saving)} the tokens."
        )
        if chosen not in CURRICULA:
            sentence += ' This whet does not list "speed" yet (whet list); until it does, use dapo, at that price.'
        return sentence
    if chosen == "uniform":
        return f"Use uniform: {share} carry signal at {group} rollouts, so little is wasted."
    dapo = _of(report, "dapo")
    return (
        f"Use dapo: {share} carry signal at {group} rollouts. It generates as much as uniform for a useful group "
        f"({dapo.rollouts.value:,.0f} rollouts) and trains on {group} of them, so that every batch is full of signal. "
        "Screening (speed) would not surely be cheaper."
    )


def _about_trust(report: ProbeReport) -> list[str]:
    """Warns of scarce signal, and of signal that was not counted."""
    signal, group, found = report.signal(report.group), report.group, []
    if signal.share.value < SCARCE:
        found.append(f"So little signal makes every curriculum expensive; first try {HELP}.")
    if signal.how == "at least":
        found.append(f"More may carry signal at {group} rollouts, but {report.n} do not tell; probe with --n {group}.")
    elif signal.how == "fitted" and group > 2 * report.n:
        found.append(f"{group} rollouts are far from the {report.n} tried; to count, not extrapolate, use --n {group}.")
    return found


def _of(report: ProbeReport, curriculum: str) -> Spending:
    return next(s for s in report.spendings if s.curriculum == curriculum)


def _about_screening(report: ProbeReport) -> list[str]:
    best = choose(report)[1]
    if best is None:
        return []
    dapo, speeds = _of(report, "dapo"), [s for s in report.spendings if s.curriculum == "speed"]
    near = [s.screen for s in speeds if s.tokens.value <= NEAR * best.tokens.value]
    alike = f" ({min(near)} to {max(near)} cost within {NEAR - 1:.0%})" if len(near) > 1 else ""
    missed = 1.0 - dapo.prompts.value / best.prompts.value
    return [
        f"Screen with N_init = {best.screen}{alike}. That takes {best.prompts.value:.1f} prompts for a useful group, "
        f"dapo {dapo.prompts.value:.1f}: screening drops {missed:.0%} of the groups that would be mixed over all "
        f"{report.group}, mostly of prompts seldom or nearly always solved. A larger N_init drops fewer."
    ]


def _about_limit(report: ProbeReport) -> str:
    cut, limit, enough = report.truncated, report.limit, report.enough
    if cut > CUT:
        sentence = (
            f"Raise --max-tokens: {cut:.0%} of the responses were cut at {limit}; what they were up to is unknown."
        )
        early = next((row.p99 for row in report.lengths if row.of == "right"), limit)
        if enough is not None and early <= limit / 2:
            sentence += f" The right ones end early, though (99% by {early:.0f}): the others may only ramble."
        return sentence
    if enough is None:
        return f"Too few responses were right to say how long they must be; {cut:.1%} were cut at {limit}."
    if enough <= 0.75 * limit:
        return (
            f"A limit of {enough} tokens loses under 2% of the right responses and cuts at most {CUT:.0%} of all; "
            f"{limit} is more than this model needs now. Responses often grow in training: watch length/truncated."
        )
    return f"The limit of {limit} fits: {cut:.1%} of the responses were cut. Below {enough}, right ones are lost."


def _percent(share: Estimate) -> str:
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})"


def _times(ratio: Estimate) -> str:
    return f"{ratio.value:.1f} times ({ratio.low:.1f} to {ratio.high:.1f})"


# ---- in the terminal, within 80 columns


def probe_view(report: ProbeReport, console: Console) -> None:
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
    yield "Tokens per response", _lengths(report)
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
    """Tokens and saving have ranges; the other columns follow from the same shares."""
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
    """A count, or the sign of infinity.

    >>> number(3.127), number(17_100), number(math.inf)
    ('3.13', '17.1k', '∞')
    """
    return formats.count(value) if math.isfinite(value) else "∞"


def blocks(share: float, width: int = BAR) -> str:
    """A bar in eighths of a column; anything above zero is visible.

    >>> blocks(0.5, 4), blocks(0.001, 4), blocks(0.0, 4)
    ('██', '▏', '')
    """
    eighths = max(round(8 * width * share), share > 0)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
