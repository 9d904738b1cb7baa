"""Answers "will this pay on my model?": a few rollouts on a few prompts, and what they say about training on them.

`measure.probe_model` makes the rollouts; `probe_report` makes one record of them with all numbers (probe.json keeps
it), and `probe_view` shows its tables and advice in the terminal. The maths is in `forecast`; the thresholds of the
advice are ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.bar import Bar as Blocks
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from whet.errors import WhetError
from whet.eval import mean_interval
from whet.report import formats
from whet.tools import forecast
from whet.tools.forecast import CUT, Estimate, Spending
from whet.types import Prompt, Request, Rollout, Sampling

# rollouts per prompt up to which each count has its own bar; beyond, pass rates fall into eighths
FINE = 10
SIZES = (2, 4, 8, 16, 32, 64)

MOST = 0.7  # share of prompts with signal from which uniform wastes little
WORTH = 1.1  # speed is advised if it is at least so many times cheaper, and surely cheaper at all
NEAR = 1.05  # an N_init within so many times the lowest cost is as good
SCARCE = 0.05  # share of prompts with signal below which every curriculum is expensive
UNJUDGED = 0.05  # share of unjudged responses from which the judge is mentioned
FEW = 100  # prompts below which the ranges are wide
MEND = "mend the judge, or raise judge.timeout_s or judge.memory_mb"
HELP = "easier prompts, a warm start on worked solutions ([[warm_start]]), or a longer limit"

BAR = 40  # columns of the longest bar
SCREENS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # N_init that get a line, besides the cheapest
HOW = {
    "counted": "",
    "fitted": "extrapolated",
    "at least": "at least; too little to extrapolate from",
}


def probe_requests(prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Request]:
    """Asks for n rollouts per prompt; group_id is the place of the prompt."""
    return [
        Request(prompt_id=p.id, group_id=i, n=n, sampling=sampling, phase="probe")
        for i, p in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    prompts: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Share of prompts with both right and wrong rollouts among `size`."""

    size: int
    share: Estimate
    how: str  # counted, fitted or at least; see `SignalCurve.at`


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
    lengths: tuple[forecast.ResponseLengths, ...]
    limits: tuple[forecast.Limit, ...]
    # the smallest limit that suffices (`forecast.enough`); None if too few responses are right
    enough: int | None
    spendings: tuple[Spending, ...]
    suggestions: tuple[str, ...] = ()  # sentences
    recipe: str = ""  # TOML to paste; empty if nothing can be advised

    def signal(self, size: int) -> Signal:
        return next(s for s in self.signals if s.size == size)

    def spending(self, curriculum: str) -> Spending:
        return next(s for s in self.spendings if s.curriculum == curriculum)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, where infinite costs (nothing useful was found) become null."""
        return {name: _finite(value) for name, value in dataclasses.asdict(self).items()}


def probe_report(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], *, n: int, limit: int, group: int
) -> ProbeReport:
    """What judged rollouts (`group_id`: the place of the prompt in `prompts`) mean for training."""
    # By prompt: rollouts that are right, judged, and all of them with their tokens.
    counted = [(r.group_id, r.verdict == "right", r.judged, 1, r.length) for r in rollouts]
    places, *columns = np.array(counted, dtype=np.int64).reshape(-1, 5).T
    right, judged, seen, tokens = (
        np.bincount(places, column, len(prompts)).astype(int) for column in columns
    )
    lengths = tokens / np.maximum(seen, 1)
    known = judged >= 2
    if not known.any():
        raise WhetError(
            f"Of {len(rollouts)} responses hardly one was judged, so the probe has nothing to say; {MEND}."
        )
    right = right[known]
    judged = judged[known]
    lengths = lengths[known]
    curve = forecast.SignalCurve(right, judged, forecast.resamples(right.size))
    # Beyond twice what was counted no fit can be trusted, except that the wanted group is always shown.
    sizes = sorted({size for size in SIZES if size <= max(2 * curve.n, group)} | {curve.n, group})
    prices = forecast.spendings(curve, lengths, group)
    prices.append(forecast.cures_spending(right, judged, lengths, prices[0], group))
    report = ProbeReport(
        prompts=right.size,
        left_out=int((~known).sum()),
        n=n,
        limit=limit,
        group=group,
        rollouts=len(rollouts),
        unjudged=float(np.mean([not r.judged for r in rollouts])),
        truncated=float(np.mean([r.finish == "length" for r in rollouts])),
        pass_rate=_share(right / judged, n),
        never=_share(right == 0),
        always=_share(right == judged),
        signals=tuple(_signal(curve, size) for size in sizes),
        histogram=tuple(histogram(right, judged, n)),
        lengths=tuple(forecast.length_rows(rollouts)),
        limits=tuple(forecast.limit_rows(rollouts, limit)),
        enough=forecast.enough(rollouts, limit),
        spendings=tuple(prices),
    )
    sentences, recipe = advise(report)
    return dataclasses.replace(report, suggestions=tuple(sentences), recipe=recipe)


def histogram(right: np.ndarray, judged: np.ndarray, n: int) -> list[Bar]:
    """Never, always, and between them bars by count, or by eighths of the pass rate if n is large."""
    rate = right / judged
    if n <= FINE:
        between = [f"{k} of {n}" for k in range(1, n)]
        place = np.clip(np.rint(rate * n), 1, n - 1)
    else:
        between = [*(f"up to {k / 8:.3g}" for k in range(1, 8)), "below 1"]
        place = np.clip(np.ceil(rate * 8 - 1e-9), 1, 8)
    labels = ["never", *between, "always"]
    place = np.where(right == 0, 0, np.where(right == judged, len(labels) - 1, place)).astype(int)
    counts = np.bincount(place, minlength=len(labels))
    return [Bar(label, int(count)) for label, count in zip(labels, counts, strict=True)]


def _signal(curve: forecast.SignalCurve, size: int) -> Signal:
    samples, how = curve.at(size)
    if how == "fitted":
        return Signal(size, Estimate.of(samples), how)
    counted = min(size, curve.n)
    values = forecast.mixed(curve.right, curve.judged, counted)
    # A bootstrap of zeros would have no width.
    return Signal(size, _share(values[np.isfinite(values)], curve.judged.max() / counted), how)


def _share(values: np.ndarray, draws: float = 1.0) -> Estimate:
    return Estimate(float(values.mean()), *mean_interval(values, draws))


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# ---- advice


def advise(report: ProbeReport) -> tuple[list[str], str]:
    """Sentences, and TOML to paste into a recipe."""
    signal = report.signal(report.group)
    best = forecast.cheapest(report.spendings)
    hopeless = signal.share.value == 0.0  # no group has both right and wrong rollouts
    # speed only if it is surely cheaper, and the share of useful groups is known, not only bounded from below.
    if (
        best is None
        or signal.how == "at least"
        or best.saving.low <= 1.0
        or best.saving.value < WORTH
    ):
        best = None
    found = [_why_hopeless(report)]
    if not hopeless:
        screening = [_about_screening(report, best)] if best is not None else []
        found = [_about_curriculum(report, best), *screening, *_about_trust(report)]
    if not hopeless or report.truncated > CUT:
        found.append(_about_limit(report))
    if report.unjudged > UNJUDGED:
        found.append(f"{report.unjudged:.0%} of the responses were not judged; {MEND}.")
    if report.prompts < FEW:
        found.append(
            f"{report.prompts} prompts are few: read the ranges, or probe with more --prompts."
        )
    if hopeless:
        return found, ""
    name = "speed" if best is not None else "uniform" if signal.share.value >= MOST else "dapo"
    lines = ["[curriculum]", f'name = "{name}"', f"rollouts = {report.group}"]
    if best is not None:
        lines += ["", "[curriculum.speed]", f"n_init = {best.screen}"]
    if report.truncated <= CUT and report.enough is not None:
        lines += ["", "[rollout]", f"max_tokens = {report.enough}"]
    return found, "\n".join(lines) + "\n"


def _why_hopeless(report: ProbeReport) -> str:
    if report.pass_rate.value == 0.0:
        return (
            f"Not one of {report.rollouts} responses was right, so no group would teach anything, whatever the "
            f"curriculum. What helps is {HELP}. Look at what the model wrote first (responses.jsonl): the judge may "
            "not see its answers."
        )
    if report.always.value == 1.0:
        return (
            "Every judged response was right: there is nothing to learn here; take harder prompts."
        )
    return (
        "No prompt had both right and wrong responses: each is always or never solved. Take prompts in between, or "
        "probe with a larger --n."
    )


def _about_curriculum(report: ProbeReport, best: Spending | None) -> str:
    signal = report.signal(report.group)
    share = f"{'at least ' * (signal.how == 'at least')}{_range(signal.share, '{:.0%}'.format, ' to ')} of the prompts"
    share += f" carry signal at {report.group} rollouts"
    if best is not None:
        return (
            f"Use speed: {share}, and screening saves part of what the others cost. Under uniform or dapo a useful "
            f"group takes {best.saving.value:.1f} times ({best.saving.low:.1f} to {best.saving.high:.1f}) the tokens."
        )
    if signal.share.value >= MOST:
        return f"Use uniform: {share}, so little is wasted."
    return (
        f"Use dapo: {share}. It generates as much as uniform for a useful group "
        f"({report.spending('dapo').rollouts.value:,.0f} rollouts) and trains on {report.group} of them, so that every "
        "batch is full of signal. Screening (speed) would not surely be cheaper."
    )


def _about_screening(report: ProbeReport, best: Spending) -> str:
    dapo = report.spending("dapo")
    speeds = [s for s in report.spendings if s.curriculum == "speed"]
    near = [s.screen for s in speeds if s.tokens.value <= NEAR * best.tokens.value]
    alike = f" ({min(near)} to {max(near)} cost within {NEAR - 1:.0%})" if len(near) > 1 else ""
    missed = 1.0 - dapo.prompts.value / best.prompts.value
    return (
        f"Screen with N_init = {best.screen}{alike}. That takes {best.prompts.value:.1f} prompts for a useful group, "
        f"dapo {dapo.prompts.value:.1f}: screening drops {missed:.0%} of the groups that would be mixed over all "
        f"{report.group}, mostly of prompts seldom or nearly always solved. A larger N_init drops fewer."
    )


def _about_trust(report: ProbeReport) -> list[str]:
    """Warns of scarce signal, and of signal that was not counted."""
    signal = report.signal(report.group)
    group = report.group
    found = []
    if signal.share.value < SCARCE:
        found.append(f"So little signal makes every curriculum expensive; first try {HELP}.")
    if signal.how == "at least":
        found.append(
            f"More may carry signal at {group} rollouts, but {report.n} do not tell; probe with --n {group}."
        )
    elif signal.how == "fitted" and group > 2 * report.n:
        found.append(
            f"{group} rollouts are far from the {report.n} tried; to count, not extrapolate, use --n {group}."
        )
    return found


def _about_limit(report: ProbeReport) -> str:
    cut = report.truncated
    limit = report.limit
    enough = report.enough
    if cut > CUT:
        sentence = (
            f"Raise --max-tokens: {cut:.0%} of the responses were cut at {limit}; "
            "what they were up to is unknown."
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


# ---- in the terminal, within 80 columns


def probe_view(report: ProbeReport, console: Console) -> None:
    left_out = (
        f" ({report.left_out} more were hardly judged and are left out)" if report.left_out else ""
    )
    pass_rate, never, always = (
        _range(x, formats.share) for x in (report.pass_rate, report.never, report.always)
    )
    heading = (
        f"{report.prompts} prompts{left_out}, {report.n} rollouts each, at most {report.limit} tokens.\n"
        f"Pass rate {pass_rate}, never right {never}, always {always}.\n"
        f"Cut at the limit {formats.share(report.truncated)}, unjudged {formats.share(report.unjudged)}. "
        "In brackets: 95% ranges over the prompts."
    )
    console.print(Text(heading))
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


def _tables(report: ProbeReport) -> Iterator[tuple[str, Table]]:
    bars = Table.grid(padding=(0, 2))
    for _ in range(2):
        bars.add_column(justify="right")
    most = max(bar.prompts for bar in report.histogram)
    for bar in report.histogram:
        style = "dim" if bar.label in ("never", "always") else "green"
        # one prompt is visible, if by an eighth
        share = max(bar.prompts / most, (bar.prompts > 0) / (8 * BAR))
        bars.add_row(bar.label, str(bar.prompts), Styled(Blocks(1.0, 0.0, share, width=BAR), style))
    yield "Prompts by rollouts that were right", bars
    signals = _table("rollouts", "<share", "<")
    for signal in report.signals:
        style = "bold" if signal.size == report.group else ""
        signals.add_row(
            str(signal.size), _range(signal.share, formats.share), HOW[signal.how], style=style
        )
    yield "Prompts with both right and wrong among so many rollouts", signals
    lengths = _table("", "responses", "mean", "p50", "p90", "p99", "longest")
    for row in report.lengths:
        of, *numbers = dataclasses.astuple(row)
        lengths.add_row(of, *(f"{x:,.0f}" for x in numbers))
    yield "Tokens per response", lengths
    limits = _table("limit", "cut", "right lost", "tokens left")
    for limit in report.limits:
        limits.add_row(
            str(limit.limit), *map(formats.share, (limit.cut, limit.right_lost, limit.tokens))
        )
    yield "Had the limit been lower", limits
    if not math.isfinite(min(row.tokens.value for row in report.spendings)):
        return

    def number(value: float) -> str:
        return formats.count(value) if math.isfinite(value) else "∞"

    def of_uniform(saving: float) -> str:
        """The tokens as a share of uniform's: below 1 is cheaper."""
        return f"{1 / saving:.2f}" if saving > 0 else "∞"

    prices = _table("<", "prompts", "rollouts", "trained", "tokens", "of uniform's")
    best = forecast.cheapest(report.spendings)
    for price in report.spendings:
        if not price.screen or price is best or price.screen in SCREENS:
            name = f"speed {price.screen}" if price.screen else price.curriculum
            # Tokens and saving have ranges; the other columns follow from the same shares.
            cells = [number(x.value) for x in (price.prompts, price.rollouts, price.trained)]
            cells.append(_range(price.tokens, number))
            if (price.screen or price.curriculum == "cures") and math.isfinite(price.tokens.value):
                cells.append(
                    f"{of_uniform(price.saving.value)} ({of_uniform(price.saving.high)}–{of_uniform(price.saving.low)})"
                )
            prices.add_row(name, *cells, style="bold" if price is best else "")
    yield (
        f"What a mixed group of {report.group} takes (speed by N_init, cures in two passes)",
        prices,
    )


def _table(*heads: str) -> Table:
    """Columns are aligned on the right, those whose head begins with "<" on the left."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(
            head.lstrip("<"), justify="left" if head.startswith("<") else "right", no_wrap=True
        )
    return table


def _range(found: Estimate, show: Callable[[float], str], to: str = "–") -> str:
    return f"{show(found.value)} ({show(found.low)}{to}{show(found.high)})"
