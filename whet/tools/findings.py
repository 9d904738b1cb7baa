"""What the arms of one mix show, in sentences made of their numbers: how many prompts carry signal, and what paid.

For `whet demo` and benchmarks/demo_seeds.py, on several runs an arm as well as on one. Nothing is claimed beforehand: a
method that loses is said to lose, whatever the mix was meant to show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whet.eval import Z95, wilson
from whet.report import formats
from whet.report.arms import Arm, common_evaluation
from whet.report.curves import number
from whet.report.formats import Reach, final_accuracy, median_reach, pick_levels, reach, saving
from whet.run import read_rollouts

WORTH = 1.25
"""A ratio of tokens between 1/WORTH and WORTH counts as no difference: evaluations are about that far apart."""

CLEAR = 0.04
"""Of the start; nearer to it a level is reached by chance."""

SHOWN = (
    "In {arm} (mix {mix}) the share of greedy answers that show their work went from {before:.0%} to {after:.0%} by "
    "step {step}, where accuracy was {accuracy:.2f}."
)
ELICITED = (
    " That is the steep part of the curves: the base was taught to think step by step and then to blurt out answers, "
    "and the first updates mostly switch thinking back on. It elicits a skill the base already had; only the slower "
    "climb from there on is new."
)
"""Said where the share rises by half or more."""


@dataclass(frozen=True, kw_only=True)
class Informative:
    """Of the prompts that a uniform arm asked first, and of all it asked, those with right and wrong answers."""

    arm: str
    asked: int
    at_start: float
    over_run: float
    rollouts: int

    def __str__(self) -> str:
        low, high = wilson(self.at_start, self.asked)
        return (
            f"Informative prompts: of the {self.asked} asked first, before any update, {formats.share(self.at_start)} "
            f"got both right and wrong answers among {self.rollouts} (95% range {formats.share(low)} to "
            f"{formats.share(high)}); over the whole run of {self.arm}, {formats.share(self.over_run)}. That is the "
            f"column signal; an arm that screens counts there what its few screening rollouts show."
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An arm beside the uniform ones: tokens to a level against the first of them to reach it, and where they ended.

    The level is that of the median saving: at a single one, the highest say, a lucky evaluation decides.
    """

    arm: str
    level: float
    tokens: Reach
    rival: str
    rival_tokens: Reach
    end: float
    best: str
    """The uniform arm that ended highest."""
    best_end: float
    prompts: int
    """Of an evaluation."""

    @property
    def saving(self) -> Reach:
        return saving(self.rival_tokens, self.tokens)

    @property
    def verdict(self) -> str:
        """On the tokens."""
        if self.saving.low >= WORTH:
            return "cheaper"
        return "dearer" if self.saving.high <= 1 / WORTH else "no clear difference"

    @property
    def end_verdict(self) -> str:
        """A difference counts from two standard errors on, as if the prompts of the two were drawn apart."""
        variance = sum(p * (1 - p) / max(1, self.prompts) for p in (self.end, self.best_end))
        if abs(self.end - self.best_end) <= Z95 * math.sqrt(variance):
            return "no clear difference"
        return "higher" if self.end > self.best_end else "lower"

    @property
    def paid(self) -> bool:
        """Cheaper or higher, and neither dearer nor lower."""
        verdicts = {self.verdict, self.end_verdict}
        return bool(verdicts & {"cheaper", "higher"}) and not verdicts & {"dearer", "lower"}

    def __str__(self) -> str:
        return (
            f"{self.arm}: {_tokens(self.tokens)} tokens to {formats.level(self.level)} against "
            f"{_tokens(self.rival_tokens)} of {self.rival} ({formats.times(self.saving)}, {self.verdict}); ended at "
            f"{self.end:.3f} against {self.best_end:.3f} of {self.best} ({self.end_verdict})."
        )


def _tokens(cost: Reach) -> str:
    return formats.count(cost.low) if cost.known else f">{formats.count(cost.low)}"


def is_uniform(arm: Arm) -> bool:
    return arm.runs[0].settings.get("curriculum.name") == "uniform"


def informative(arms: Sequence[Arm]) -> Informative | None:
    """From the uniform arm that asks most prompts an update, all its seeds together; None where there is none."""
    uniform = [arm for arm in arms if is_uniform(arm)]
    if not uniform:
        return None
    arm = max(uniform, key=lambda arm: arm.runs[0].settings.get("curriculum.groups", 0))
    asked, hits, shares = 0.0, 0.0, []
    for run in arm.runs:
        rows = [row for row in run.rows if number(row, "curriculum/accepted")]
        if rows:
            first = number(rows[0], "curriculum/accepted") or 0.0  # uniform accepts every group that was judged
            asked, hits = asked + first, hits + first * (number(rows[0], "curriculum/signal_share") or 0.0)
            shares += [number(row, "curriculum/signal_share") or 0.0 for row in rows]
    if not asked:
        return None
    rollouts = int(arm.runs[0].settings.get("curriculum.rollouts", 0))
    return Informative(
        arm=arm.name, asked=round(asked), at_start=hits / asked, over_run=statistics.fmean(shares), rollouts=rollouts
    )


def outcomes(arms: Sequence[Arm]) -> list[Outcome]:
    """Of each arm that is not uniform; one that never got clear of the start, beside as little, has none."""
    evaluation = common_evaluation(arms) if arms else None
    uniform = [arm for arm in arms if is_uniform(arm)]
    curves = [points for arm in arms for run in arm.runs if (points := run.points(evaluation))]
    start = max((points[0].accuracy for points in curves), default=1.0)
    levels = [level for level in pick_levels(curves) if level >= start + CLEAR]  # those of the table
    found = [beside(arm, uniform, levels, evaluation) for arm in arms if not is_uniform(arm) and uniform]
    return [outcome for outcome in found if outcome is not None]


def beside(arm: Arm, uniform: Sequence[Arm], levels: Sequence[float], evaluation: str | None) -> Outcome | None:
    """At the level of the median saving among those the arm and a uniform one reached; else the highest either did."""
    mine = {level: tokens_to(arm, level, evaluation) for level in levels}
    first = {level: _first(uniform, level, evaluation) for level in levels}
    reached = {level for level in levels if mine[level].known or first[level][0].known}
    both = {level: saving(first[level][0], mine[level]).low for level in reached if mine[level].known}
    both = {level: ratio for level, ratio in both.items() if first[level][0].known}
    if not reached:
        return None
    middle = statistics.median_low(both.values()) if both else None
    level = max(level for level in (both or reached) if middle is None or both[level] == middle)
    rival_tokens, rival = first[level]
    best = max(uniform, key=lambda other: _end(other, evaluation))
    return Outcome(
        arm=arm.name,
        level=level,
        tokens=mine[level],
        rival=rival.name,
        rival_tokens=rival_tokens,
        end=_end(arm, evaluation),
        best=best.name,
        best_end=_end(best, evaluation),
        prompts=int(arm.runs[0].settings.get("eval.0.limit", 0)),
    )


def _first(uniform: Sequence[Arm], level: float, evaluation: str | None) -> tuple[Reach, Arm]:
    """The uniform arm that reached a level first, and when."""
    spent = [tokens_to(arm, level, evaluation) for arm in uniform]
    return min(zip(spent, uniform, strict=True), key=lambda pair: (pair[0].high, -pair[0].low))


def tokens_to(arm: Arm, level: float, evaluation: str | None) -> Reach:
    """Median over the seeds."""
    return median_reach([reach(run.points(evaluation), level, "tokens") for run in arm.runs])


def _end(arm: Arm, evaluation: str | None) -> float:
    return statistics.median(final_accuracy(run.points(evaluation)) or 0.0 for run in arm.runs)


def across(name: str, found: Mapping[str, tuple[Informative | None, Sequence[Outcome]]]) -> str:
    """What the arm `name` did in each mix, beside the share of informative prompts; "" where nothing is to be said."""
    known = [(mix, share, outcome) for mix, (share, of_mix) in found.items() if share for outcome in of_mix]
    each = [
        f"{'paid' if outcome.paid else 'did not pay'} in the mix {mix}, where {formats.share(share.at_start)} were "
        f"informative at the start (tokens: {outcome.verdict}, {formats.times(outcome.saving)}; end: "
        f"{outcome.end_verdict})"
        for mix, share, outcome in known
        if outcome.arm == name
    ]
    return f"{name} {'; it '.join(each)}." if each else ""


def elicited(mix: str, arms: Sequence[Arm]) -> str:
    """What the best arm's curve shows, in numbers: an answer shows its work if it holds a running value, "=8"."""
    evaluation = common_evaluation(arms)
    runs = {run.name: run for arm in arms for run in arm.runs}
    ends = {name: final_accuracy(run.points(evaluation)) or 0.0 for name, run in runs.items()}
    best = runs[max(ends, key=lambda name: ends[name])]
    shares: dict[int, list[bool]] = {}
    for row in read_rollouts(best.folder):
        if row["phase"] == "eval":
            shares.setdefault(row["step"], []).append("=" in row["response"])
    thinks = {step: statistics.mean(shown) for step, shown in sorted(shares.items())}
    accuracy = {point.step: point.accuracy for point in best.points(evaluation)}
    if not thinks or not accuracy:
        return ""
    step = next(step for step, share in thinks.items() if share >= 0.95 * max(thinks.values()))
    before, after = next(iter(thinks.values())), thinks[step]
    shown = SHOWN.format(
        arm=best.name, mix=mix, before=before, after=after, step=step, accuracy=accuracy.get(step, math.nan)
    )
    return shown + (ELICITED if after - before >= 0.5 else "")
