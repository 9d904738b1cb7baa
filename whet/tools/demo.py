"""Runs `whet demo`: one base, then several curricula from that start, on a CPU, on two mixes of difficulty.

It ends with tables, with sentences about each method made of its numbers, and with one page. Nothing is claimed
beforehand: a method that loses is said to lose, whatever the mix was meant to show. The settings are in demo.toml,
`experiment` runs the arms, and benchmarks/demo_seeds.py calls the sentences on several runs per arm.
"""

from __future__ import annotations

import math
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from whet import config
from whet.config import merged
from whet.eval import Z95, wilson
from whet.recipe import parse_config
from whet.report import formats
from whet.report.arms import Arm, common_evaluation, number, read_arms
from whet.report.compare import compare_table
from whet.report.formats import Reach, final_accuracy, median_reach, pick_levels, reach, saving
from whet.report.page import write_chapters
from whet.run import read_rollouts
from whet.tools.experiment import make_base, train_arms

WORTH = 1.25  # a ratio of tokens between 1/WORTH and WORTH is no difference: evaluations are about that far apart
CLEAR = 0.04  # accuracy above the start from which a level is not reached by chance
SINGLE = "One seed each: benchmarks/demo_seeds.py runs several, and shows how far such ratios vary."
SHOWN = (
    "In {arm} (mix {mix}) the share of greedy answers that show their work went from {before:.0%} to {after:.0%} by "
    "step {step}, where accuracy was {accuracy:.2f}."
)
ELICITED = (  # added where the share rises by half or more
    " That is the steep part of the curves: the base was taught to think step by step and then to blurt out answers, "
    "and the first updates mostly switch thinking back on. It elicits a skill the base already had; only the slower "
    "climb from there on is new."
)


def run_demo(
    out: Path, seed: int, console: Console, *, base: Path | None = None, tree: Mapping[str, Any] | None = None
) -> None:
    """Trains all arms, then prints and writes what they show.

    `base` is the folder of the base, by default in `out`; `tree` replaces demo.toml, in the same layout. Every seed has
    the same base, as users have one model: prompts, problems and draws differ.
    """
    begin = time.monotonic()
    tree = tree or read_demo()
    start = make_base(base or out / "base", tree["base"], console)
    recipes = arm_recipes(tree, out, start, seed)
    train_arms({folder: settings for mix in recipes.values() for folder, settings in mix.items()}, console)
    arms = {mix: read_arms(list(folders)) for mix, folders in recipes.items()}
    notes = {mix: describe_mix(tree["mixes"][mix]["mix"], of_mix) for mix, of_mix in arms.items()}
    closing = conclude(arms)
    chapters = {f"Mix {mix}": (list(recipes[mix]), notes[mix]) for mix in recipes}
    write_chapters(out / "report.html", chapters, title="whet demo: chained arithmetic", note=closing)
    for mix, folders in recipes.items():
        console.print(Text(f"\nMix {mix}", style="bold"))
        console.print(compare_table(list(folders)))
        console.print(Text(f"\n{notes[mix]}"))
    console.print(Text(f"\n{closing}\n"))
    console.print(f"{time.monotonic() - begin:.0f} s. Curves and rollouts: {out / 'report.html'}", highlight=False)


def read_demo() -> dict[str, Any]:
    return tomllib.loads(resources.files("whet.tools").joinpath("demo.toml").read_text())


def arm_recipes(tree: Mapping[str, Any], out: Path, base: Path, seed: int) -> dict[str, dict[Path, config.Config]]:
    """By mix: the folder and the settings of each of its arms."""
    own = {"seed": seed, "model": {"name": str(base)}}
    recipes: dict[str, dict[Path, config.Config]] = {name: {} for name in tree["mixes"]}
    for name, mix in tree["mixes"].items():
        for arm in mix["arms"]:
            recipe = with_mix(merged(merged(tree["arm"], tree["arms"][arm]), own), mix["mix"])
            recipes[name][out / name / arm.replace(" ", "_")] = parse_config(recipe)
    return recipes


def with_mix(recipe: Mapping[str, Any], mix: Mapping[str, float]) -> dict[str, Any]:
    """The recipe on another mix, which replaces the old one and is not merged with it key by key."""
    (data,) = recipe["data"]
    return {**recipe, "data": [{**data, "options": {**data.get("options", {}), "mix": dict(mix)}}]}


# ---- sentences


def describe_mix(mix: Mapping[str, float], arms: Sequence[Arm]) -> str:
    """The mix, its share of informative prompts, and the outcome of each method; unfinished arms are not judged."""
    shares = ", ".join(f"{share:.0%} of {levels}" for levels, share in mix.items())
    unfinished = [f"{arm.name} {arm.unfinished}" for arm in arms if arm.unfinished]
    finished = [arm for arm in arms if not arm.unfinished]
    outcomes = "\n".join(map(str, find_outcomes(finished)))
    parts = [
        f"Prompts by number of operations: {shares}. {count_informative(finished) or ''}".strip(),
        outcomes or "No level was reached by which a curriculum could be compared.",
        f"Not judged, since it did not finish: {', '.join(unfinished)}." if unfinished else "",
    ]
    return "\n\n".join(filter(None, parts))


def conclude(arms: Mapping[str, Sequence[Arm]]) -> str:
    """What SPEED did in each mix, and what the curves are made of; from the arms that finished."""
    whole = {mix: [arm for arm in of_mix if not arm.unfinished] for mix, of_mix in arms.items()}
    finished = {mix: of_mix for mix, of_mix in whole.items() if of_mix}
    if not finished:
        return "No arm came to its end, so there is nothing to conclude."
    found = {mix: (count_informative(of_mix), find_outcomes(of_mix)) for mix, of_mix in finished.items()}
    speed = compare_mixes("speed_16", found)
    mix, first = next(iter(finished.items()))
    seeds = f" {SINGLE}" if speed and len(first[0].runs) == 1 else ""
    return "\n\n".join(part for part in (speed + seeds, describe_elicited(mix, first)) if part)


# ---- how many prompts are informative


@dataclass(frozen=True)
class Informative:
    """The share of prompts with right and wrong answers, among those a uniform arm asked first and all it asked."""

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


def is_uniform(arm: Arm) -> bool:
    return arm.runs[0].settings.get("curriculum.name") == "uniform"


def count_informative(arms: Sequence[Arm]) -> Informative | None:
    """From the uniform arm with most prompts per update, all its seeds together; None if there is none."""
    uniform = [arm for arm in arms if is_uniform(arm)]
    if not uniform:
        return None
    arm = max(uniform, key=lambda arm: arm.runs[0].settings.get("curriculum.groups", 0))
    asked, hits, shares = 0.0, 0.0, list[float]()
    for run in arm.runs:
        rows = [row for row in run.rows if number(row, "curriculum/accepted")]
        found = [number(row, "curriculum/signal_share") or 0.0 for row in rows]
        first = number(rows[0], "curriculum/accepted") or 0.0 if rows else 0.0  # uniform accepts every judged group
        asked, hits, shares = asked + first, hits + first * sum(found[:1]), shares + found
    if not asked:
        return None
    rollouts = int(arm.runs[0].settings.get("curriculum.rollouts", 0))
    return Informative(arm.name, round(asked), hits / asked, statistics.fmean(shares), rollouts)


# ---- what each method gained


@dataclass(frozen=True)
class Outcome:
    """An arm beside the uniform ones: tokens to a level against the first of them to reach it, and where they ended.

    The level is that of the median saving: at a single level, such as the highest, a lucky evaluation decides.
    """

    arm: str
    level: float
    tokens: Reach
    rival: str
    rival_tokens: Reach
    end: float
    best: str  # the uniform arm that ended highest
    best_end: float
    prompts: int  # per evaluation

    @property
    def saving(self) -> Reach:
        return saving(self.rival_tokens, self.tokens)

    @property
    def verdict(self) -> str:
        """The verdict on the tokens."""
        if self.saving.low >= WORTH:
            return "cheaper"
        return "costlier" if self.saving.high <= 1 / WORTH else "no clear difference"

    @property
    def end_verdict(self) -> str:
        """A difference counts from two standard errors on, as if the two arms had separate prompts."""
        variance = sum(p * (1 - p) / max(1, self.prompts) for p in (self.end, self.best_end))
        if abs(self.end - self.best_end) <= Z95 * math.sqrt(variance):
            return "no clear difference"
        return "higher" if self.end > self.best_end else "lower"

    @property
    def paid(self) -> bool:
        """Cheaper or higher, and neither costlier nor lower."""
        verdicts = {self.verdict, self.end_verdict}
        return bool(verdicts & {"cheaper", "higher"}) and not verdicts & {"costlier", "lower"}

    def __str__(self) -> str:
        def tokens(cost: Reach) -> str:
            return formats.count(cost.low) if cost.known else f">{formats.count(cost.low)}"

        return (
            f"{self.arm}: {tokens(self.tokens)} tokens to {formats.level(self.level)} against "
            f"{tokens(self.rival_tokens)} of {self.rival} ({formats.times(self.saving)}, {self.verdict}); ended at "
            f"{self.end:.3f} against {self.best_end:.3f} of {self.best} ({self.end_verdict})."
        )


def find_outcomes(arms: Sequence[Arm]) -> list[Outcome]:
    """One for each arm that is not uniform, unless neither it nor a uniform arm got clear of the start."""
    evaluation = common_evaluation(arms)
    uniform = [arm for arm in arms if is_uniform(arm)]
    curves = [points for arm in arms for run in arm.runs if (points := run.points(evaluation))]
    start = max((points[0].accuracy for points in curves), default=1.0)
    levels = [level for level in pick_levels(curves) if level >= start + CLEAR]  # those of the table
    found = [_compare_arm(arm, uniform, levels, evaluation) for arm in arms if not is_uniform(arm) and uniform]
    return [outcome for outcome in found if outcome is not None]


def _compare_arm(arm: Arm, uniform: Sequence[Arm], levels: Sequence[float], evaluation: str | None) -> Outcome | None:
    """At the level of the median saving among those that the arm and a uniform one reached; else the highest."""

    def tokens_to(arm: Arm, level: float) -> Reach:
        return median_reach([reach(run.points(evaluation), level, "tokens") for run in arm.runs])

    def end_of(arm: Arm) -> float:
        return statistics.median(final_accuracy(run.points(evaluation)) or 0.0 for run in arm.runs)

    mine = {level: tokens_to(arm, level) for level in levels}
    spent = {level: [(tokens_to(other, level), other) for other in uniform] for level in levels}
    # The uniform arm that reached a level first; of those that never did, the one known to need most.
    first = {level: min(costs, key=lambda pair: (pair[0].high, -pair[0].low)) for level, costs in spent.items()}
    known = {level: mine[level].known + first[level][0].known for level in levels}  # how many of the two reached it
    if not any(known.values()):
        return None
    ratios = {level: saving(first[level][0], mine[level]).low for level in levels if known[level] == 2}
    middle = statistics.median_low(ratios.values()) if ratios else None
    level = max(level for level in levels if (ratios.get(level) == middle if ratios else known[level]))
    best, (rival_tokens, rival) = max(uniform, key=end_of), first[level]
    prompts = int(arm.runs[0].settings.get("eval.0.limit", 0))
    ends = (end_of(arm), best.name, end_of(best))
    return Outcome(arm.name, level, mine[level], rival.name, rival_tokens, *ends, prompts)


def compare_mixes(name: str, found: Mapping[str, tuple[Informative | None, Sequence[Outcome]]]) -> str:
    """What the arm `name` did in each mix, beside the share of informative prompts; "" if nothing is known."""
    known = [(mix, share, outcome) for mix, (share, of_mix) in found.items() if share for outcome in of_mix]
    each = [
        f"{'paid' if outcome.paid else 'did not pay'} in the mix {mix}, where {formats.share(share.at_start)} were "
        f"informative at the start (tokens: {outcome.verdict}, {formats.times(outcome.saving)}; end: "
        f"{outcome.end_verdict})"
        for mix, share, outcome in known
        if outcome.arm == name
    ]
    return f"{name} {'; it '.join(each)}." if each else ""


def describe_elicited(mix: str, arms: Sequence[Arm]) -> str:
    """What the curve of the best run is made of: an answer shows its work if it holds a running value, "=8"."""
    evaluation = common_evaluation(arms)
    best = max((run for arm in arms for run in arm.runs), key=lambda run: final_accuracy(run.points(evaluation)) or 0.0)
    shares: dict[int, list[bool]] = {}
    for row in read_rollouts(best.folder):
        if row["phase"] == "eval":
            shares.setdefault(row["step"], []).append("=" in row["response"])
    thinks = {step: statistics.mean(shown) for step, shown in sorted(shares.items())}
    accuracy = {point.step: point.accuracy for point in best.points(evaluation)}
    if not thinks or not accuracy:
        return ""
    step = next(step for step, share in thinks.items() if share >= 0.95 * max(thinks.values()))
    before, after, reached = next(iter(thinks.values())), thinks[step], accuracy.get(step, math.nan)
    shown = SHOWN.format(arm=best.name, mix=mix, before=before, after=after, step=step, accuracy=reached)
    return shown + (ELICITED if after - before >= 0.5 else "")
