"""Runs `whet demo`: from a stored base, uniform prompts beside the curricula, on a CPU, on two mixes of difficulty.

It ends with a small table and a sentence for each mix, and the page. Nothing is claimed beforehand: a method that loses
is said to lose, whatever the mix was meant to show. The settings are in demo.toml, `experiment`
runs the arms, and benchmarks/demo_seeds.py calls the sentences on several runs per arm.

The base lies beside this file, so that every machine starts from the same weights: trained anew, it came out at 0.31 on
one kind of processor and at 0.06 on another, by rounding alone. benchmarks/dose.py made it.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import sys
import time
import tomllib
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet import config
from whet.config import merged
from whet.errors import WhetError
from whet.eval import Z95, wilson
from whet.recipe import parse_config
from whet.report import formats
from whet.report.arms import Arm, common_evaluation, number, read_arms
from whet.report.formats import Reach, final_accuracy, median_reach, reach, saving
from whet.report.page import write_chapters
from whet.run import read_rollouts
from whet.tools.experiment import train_arms

BASE = Path(__file__).with_name("base")
# a ratio of tokens between 1/WORTH and WORTH is no difference: evaluations are about that far apart
WORTH = 1.25
SHOWN = (
    "In {arm} (mix {mix}) the share of answers that show their work went from {before:.0%} to {after:.0%} by step "
    "{step}, where accuracy was {accuracy:.2f}."
)
ELICITED = (  # added where the share rises by a third or more
    " The base was taught to think step by step and then to blurt out answers, so this part of the curve elicits a "
    "skill that the base already had."
)


def run_demo(out: Path, seed: int, console: Console) -> None:
    """Trains all arms, prints and writes what they show, and opens the page where there is a display.

    Every seed has the same base, as users have one model: prompts, problems and draws differ.
    """
    begin = time.monotonic()
    tree = read_demo()
    recipes = arm_recipes(tree, out, check_base(tree["sha256"]), seed)
    for mix, settings in tree["mixes"].items():
        console.print(Text(f"Mix {mix}: {settings['about']}"))
    train_arms(
        {folder: settings for mix in recipes.values() for folder, settings in mix.items()}, console
    )
    arms = {mix: read_arms(list(folders)) for mix, folders in recipes.items()}
    notes = {mix: describe_mix(tree, mix, of_mix) for mix, of_mix in arms.items()}
    targets = {mix: settings["target"] for mix, settings in tree["mixes"].items()}
    closing = conclude(arms, targets)
    page = out / "report.html"
    chapters = {f"Mix {mix}": (list(recipes[mix]), notes[mix]) for mix in recipes}
    first = next(iter(arms))
    note = "\n\n".join(filter(None, (closing, describe_elicited(first, arms[first]))))
    write_chapters(page, chapters, title="whet demo: chained arithmetic", note=note)
    for mix, of_mix in arms.items():
        console.print(mix_table(mix, of_mix, targets[mix]))
    console.print(Text(f"\n{closing}\n", style="bold"))
    console.print(f"{time.monotonic() - begin:.0f} s. Curves and rollouts: {page}", highlight=False)
    if console.is_terminal and has_display():
        webbrowser.open(page.resolve().as_uri())


def read_demo() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("demo.toml").read_text())


def check_base(digest: str) -> Path:
    """The folder of the base that is shipped with the package, if its weights are the ones that were tried."""
    weights = BASE / "model.safetensors"
    if not weights.is_file() or hashlib.sha256(weights.read_bytes()).hexdigest() != digest:
        raise WhetError(f"The demo's base in {BASE} is missing or changed; install whet again.")
    return BASE


def has_display() -> bool:
    """Whether a browser could show a window here; never in continuous integration."""
    seen = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return seen and not os.environ.get("CI")


def arm_recipes(
    tree: Mapping[str, Any], out: Path, base: Path, seed: int
) -> dict[str, dict[Path, config.Config]]:
    """By mix: the folder and the settings of each of its arms."""
    own = {"seed": seed, "model": {"name": str(base)}}
    recipes: dict[str, dict[Path, config.Config]] = {}
    for name, mix in tree["mixes"].items():
        common = merged(merged(tree["arm"], mix.get("arm", {})), own)
        arms = {
            arm: with_mix(merged(common, settings), mix["mix"])
            for arm, settings in mix["arms"].items()
        }
        recipes[name] = {out / name / arm: parse_config(recipe) for arm, recipe in arms.items()}
    return recipes


def with_mix(recipe: Mapping[str, Any], mix: Mapping[str, float]) -> dict[str, Any]:
    """The recipe on another mix, which replaces the old one and is not merged with it key by key."""
    (data,) = recipe["data"]
    return {**recipe, "data": [{**data, "options": {**data.get("options", {}), "mix": dict(mix)}}]}


# ---- how many prompts are informative


def is_uniform(arm: Arm) -> bool:
    return arm.runs[0].settings.get("curriculum.name") == "uniform"


def count_informative(arms: Sequence[Arm]) -> tuple[str, str]:
    """The share of prompts with right and wrong answers among all that uniform asked, and a sentence that also has
    those that it asked first; all its seeds together, and "" if there is no such arm."""
    arm = next((arm for arm in arms if is_uniform(arm)), Arm(name="", runs=()))
    asked = 0.0
    hits = 0.0
    shares = list[float]()
    for run in arm.runs:
        rows = [row for row in run.rows if number(row, "curriculum/accepted")]
        found = [number(row, "curriculum/signal_share") or 0.0 for row in rows]
        # uniform accepts every judged group
        first = number(rows[0], "curriculum/accepted") or 0.0 if rows else 0.0
        asked = asked + first
        hits = hits + first * sum(found[:1])
        shares = shares + found
    if not asked:
        return "", ""
    rollouts = int(arm.runs[0].settings.get("curriculum.rollouts", 0))
    over_run = formats.share(statistics.fmean(shares))
    low, high = wilson(hits / asked, round(asked))
    return over_run, (
        f"Informative prompts: of the {asked:.0f} asked first, before any update, {formats.share(hits / asked)} "
        f"got both right and wrong answers among {rollouts} (95% range {formats.share(low)} to "
        f"{formats.share(high)}); over the whole run of uniform, {over_run}."
    )


# ---- what each method gained


@dataclass(frozen=True)
class Outcome:
    """An arm beside uniform: tokens to the target, and where both ended."""

    arm: str
    target: float
    tokens: Reach
    rival_tokens: Reach
    end: float
    rival_end: float
    prompts: int  # per evaluation

    @property
    def share(self) -> Reach:
        """The arm's tokens as a share of uniform's."""
        return saving(self.tokens, self.rival_tokens)

    @property
    def verdict(self) -> str:
        """The verdict on the tokens."""
        if self.share.high <= 1 / WORTH:
            return "cheaper"
        return "costlier" if self.share.low >= WORTH else "no clear difference"

    @property
    def end_verdict(self) -> str:
        """A difference counts from two standard errors on, as if the two arms had separate prompts."""
        variance = sum(p * (1 - p) / max(1, self.prompts) for p in (self.end, self.rival_end))
        if abs(self.end - self.rival_end) <= Z95 * math.sqrt(variance):
            return "no clear difference"
        return "higher" if self.end > self.rival_end else "lower"

    @property
    def paid(self) -> bool:
        """Cheaper or higher, and neither costlier nor lower."""
        verdicts = {self.verdict, self.end_verdict}
        return bool(verdicts & {"cheaper", "higher"}) and not verdicts & {"costlier", "lower"}

    def __str__(self) -> str:
        target = formats.level(self.target)
        ends = f"ended at {self.end:.3f} against {self.rival_end:.3f} ({self.end_verdict})"
        if math.isinf(self.tokens.high) and math.isinf(self.rival_tokens.high):
            return f"neither it nor uniform reached {target}, and it {ends}"
        return (
            f"it took {times(self.share)} of uniform's tokens to {target} ({spent(self.tokens)} against "
            f"{spent(self.rival_tokens)}, {self.verdict}) and {ends}"
        )


def spent(cost: Reach) -> str:
    return formats.count(cost.low) if cost.known else f"more than {formats.count(cost.low)}"


def times(share: Reach) -> str:
    """A share in words: one that is known, or its bound where a run never got there."""
    if share.known:
        return f"{share.low:.2f}"
    return (
        f"less than {share.high:.2f}" if math.isfinite(share.high) else f"more than {share.low:.2f}"
    )


def find_outcomes(arms: Sequence[Arm], target: float) -> list[Outcome]:
    """One for each finished arm that is not uniform, beside the uniform one; none where that did not finish."""
    evaluation = common_evaluation(arms)

    def tokens_to(arm: Arm) -> Reach:
        return median_reach([reach(run.points(evaluation), target, "tokens") for run in arm.runs])

    def end_of(arm: Arm) -> float:
        return statistics.median(final_accuracy(run.points(evaluation)) or 0.0 for run in arm.runs)

    finished = [arm for arm in arms if not arm.unfinished]
    uniform = next((arm for arm in finished if is_uniform(arm)), None)
    if uniform is None:
        return []
    prompts = int(uniform.runs[0].settings.get("eval.0.options.eval_count", 0))
    costs = (tokens_to(uniform), end_of(uniform))
    return [
        Outcome(arm.name, target, tokens_to(arm), costs[0], end_of(arm), costs[1], prompts)
        for arm in finished
        if not is_uniform(arm)
    ]


# ---- what is shown


def describe_mix(tree: Mapping[str, Any], mix: str, arms: Sequence[Arm]) -> str:
    """The mix, its share of informative prompts, and the outcome of each method; unfinished arms are not judged."""
    about = tree["mixes"][mix]["about"]
    target = tree["mixes"][mix]["target"]
    unfinished = [f"{arm.name} {arm.unfinished}" for arm in arms if arm.unfinished]
    parts = [
        f"{about} {count_informative(arms)[1]}".strip(),
        "\n".join(f"{outcome.arm}: {outcome}." for outcome in find_outcomes(arms, target)),
        f"Not judged, since it did not finish: {', '.join(unfinished)}." if unfinished else "",
    ]
    return "\n\n".join(filter(None, parts))


def mix_table(mix: str, arms: Sequence[Arm], target: float) -> Table:
    """A line for each arm: what the target cost, as a share of uniform's tokens too, and where it ended."""
    heads = ("tokens to " + formats.level(target), "of uniform's", "accuracy at the end")
    table = Table(
        title=f"Mix {mix}", title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0)
    )
    table.add_column("arm", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    outcomes = find_outcomes(arms, target)
    if outcomes:
        first = outcomes[0]
        table.add_row("uniform", spent(first.rival_tokens), "", f"{first.rival_end:.3f}")
    for outcome in outcomes:
        table.add_row(
            outcome.arm, spent(outcome.tokens), times(outcome.share), f"{outcome.end:.3f}"
        )
    for arm in arms:
        if arm.unfinished:
            table.add_row(arm.name, arm.unfinished)
    return table


def conclude(arms: Mapping[str, Sequence[Arm]], targets: Mapping[str, float]) -> str:
    """A plain sentence for each mix: what the target cost the last arm, and what it cost plain sampling."""
    said = []
    for mix, of_mix in arms.items():
        outcomes = find_outcomes(of_mix, targets[mix])
        if outcomes:
            where = f" in the mix {mix}" if len(arms) > 1 else ""
            said.append(_verdict(outcomes[-1], where))
    return " ".join(said) if said else "No arm came to its end, so there is nothing to conclude."


def _verdict(found: Outcome, where: str) -> str:
    """By how the arm and uniform came to the target, and where they ended if the costs do not decide."""
    arm = f"`{found.arm}`"
    target = f"{found.target:.0%}"
    rival = spent(found.rival_tokens)
    reached = math.isfinite(found.tokens.high)
    rival_reached = math.isfinite(found.rival_tokens.high)
    end = f"it ended at {found.end:.0%}, plain sampling at {found.rival_end:.0%}"
    if not reached and not rival_reached:
        return f"Neither {arm} nor plain sampling reached {target}{where}; {end}."
    if not reached:
        limit = formats.count(found.tokens.low)
        return f"With {arm} the model did not reach {target}{where} in {limit} tokens; plain sampling needed {rival}."
    words = f"With {arm} the model reached {target}{where} after {spent(found.tokens)} tokens; "
    words += f"plain sampling needed {rival}"
    if found.paid:
        return f"{words}."
    doubts = [] if found.verdict == "cheaper" else ["nothing was saved"]
    doubts += [end] if found.end_verdict != "no clear difference" else []
    return f"{words}: {' and '.join(doubts)}."


def describe_elicited(mix: str, arms: Sequence[Arm]) -> str:
    """What the curve of the best run is made of: an answer shows its work if it holds a running value, "=8"."""
    evaluation = common_evaluation(arms)
    best = max(
        (run for arm in arms for run in arm.runs),
        key=lambda run: final_accuracy(run.points(evaluation)) or 0.0,
    )
    shares: dict[int, list[bool]] = {}
    for row in read_rollouts(best.folder):
        if row["phase"] == "eval":
            shares.setdefault(row["step"], []).append("=" in row["response"])
    thinks = {step: statistics.mean(shown) for step, shown in sorted(shares.items())}
    accuracy = {point.step: point.accuracy for point in best.points(evaluation)}
    if not thinks or not accuracy:
        return ""
    step = next(step for step, share in thinks.items() if share >= 0.95 * max(thinks.values()))
    before = next(iter(thinks.values()))
    after = thinks[step]
    reached = accuracy.get(step, math.nan)
    shown = SHOWN.format(
        arm=best.name, mix=mix, before=before, after=after, step=step, accuracy=reached
    )
    return shown + (ELICITED if after - before >= 1 / 3 else "")
