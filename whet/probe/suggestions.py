"""What to do with a probe's numbers, in sentences and as lines of a recipe. Called by `report`; thresholds are OURS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.curriculum.build import CURRICULA
from whet.probe.lengths import CUT
from whet.probe.spending import Estimate, Spending, cheapest

if TYPE_CHECKING:
    from whet.probe.report import ProbeReport

MOST = 0.7
"""From this share of prompts with signal on, uniform wastes little."""
WORTH = 1.1
"""speed is advised when it is at least so many times cheaper, and surely cheaper at all."""
NEAR = 1.05
"""An N_init within so many times the lowest cost is as good."""
SCARCE = 0.05
"""Below this share of prompts with signal every curriculum is dear."""
UNJUDGED = 0.05
FEW = 100
"""Prompts below which the ranges are wide."""

HELP = "easier prompts, a warm start on worked solutions ([[warm_start]]), or a longer limit"


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
    """TOML that a recipe can take as it is; a curriculum that this whet does not list gives way to dapo."""
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
    """Not one group with both right and wrong rollouts."""
    return report.signal(report.group).share.value == 0.0


def choose(report: ProbeReport) -> tuple[str, Spending | None]:
    """The curriculum, and for speed what it would spend.

    speed where it is surely cheaper (and the share of useful groups is known, not only bounded from below), else
    uniform where most prompts carry signal, else dapo.
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
    """Signal that is scarce, and signal that was not counted."""
    signal, group, found = report.signal(report.group), report.group, []
    if signal.share.value < SCARCE:
        found.append(f"So little signal makes every curriculum dear; first try {HELP}.")
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
