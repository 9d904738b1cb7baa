"""`whet demo`: one base, then several curricula from that start, side by side, on a CPU, on two mixes of difficulty.

The base is warm-started on worked solutions and kept, so a second demo starts at once. Ends with tables, with what the
numbers say of each method, good or bad, and with one page. The settings are in demo.toml; `experiment` runs them, and
`findings` finds the words.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from whet import config
from whet.recipe import parse_config
from whet.report.arms import Arm, read_arms
from whet.report.compare import compare_table
from whet.report.page import Chapter, write_chapters
from whet.tools import findings
from whet.tools.experiment import make_base, merge, train_arms

SINGLE = "One seed each: benchmarks/demo_seeds.py runs several, and shows how far such ratios vary."
"""Said unless the arms hold several."""


def run_demo(
    out: Path, seed: int, console: Console, *, base: Path | None = None, tree: Mapping[str, Any] | None = None
) -> None:
    """base: where it is kept, by default in `out`. tree: other settings than those of demo.toml, in the same layout.

    Every seed has the same base, as users have one model: what differs are prompts, problems and draws.
    """
    begin = time.monotonic()
    tree = tree or read_demo()
    start = make_base(base or out / "base", tree["base"], console)
    recipes = arm_recipes(tree, out, start, seed)
    train_arms({folder: settings for mix in recipes.values() for folder, settings in mix.items()}, console)
    arms = {mix: read_arms(list(folders)) for mix, folders in recipes.items()}
    notes = {mix: describe_mix(tree["mixes"][mix]["mix"], of_mix) for mix, of_mix in arms.items()}
    closing = conclude(arms)
    chapters = [Chapter(title=f"Mix {mix}", folders=list(recipes[mix]), note=notes[mix]) for mix in recipes]
    write_chapters(out / "report.html", chapters, title="whet demo: chained arithmetic", note=closing)
    for mix, folders in recipes.items():
        console.print(Text(f"\nMix {mix}", style="bold"))
        console.print(compare_table(list(folders)))
        console.print(Text(f"\n{notes[mix]}"))
    console.print(Text(f"\n{closing}\n"))
    console.print(f"{time.monotonic() - begin:.0f} s. Curves and rollouts: {out / 'report.html'}", highlight=False)


def read_demo() -> dict[str, Any]:
    return tomllib.loads(resources.files("whet").joinpath("demo.toml").read_text())


def arm_recipes(tree: Mapping[str, Any], out: Path, base: Path, seed: int) -> dict[str, dict[Path, config.Config]]:
    """By mix: the folder and the settings of each of its arms."""
    own = {"seed": seed, "model": {"name": str(base)}}
    return {
        name: {
            out / name / arm.replace(" ", "_"): parse_config(
                with_mix(merge(merge(tree["arm"], tree["arms"][arm]), own), mix["mix"])
            )
            for arm in mix["arms"]
        }
        for name, mix in tree["mixes"].items()
    }


def with_mix(recipe: Mapping[str, Any], mix: Mapping[str, float]) -> dict[str, Any]:
    """A mix is one thing: it takes the place of another, and is not merged with it key by key."""
    (data,) = recipe["data"]
    return {**recipe, "data": [{**data, "options": {**data.get("options", {}), "mix": dict(mix)}}]}


def describe_mix(mix: Mapping[str, float], arms: list[Arm]) -> str:
    """The mix, how much of it is informative, and what each method made of it; without arms that did not finish."""
    shares = ", ".join(f"{share:.0%} of {levels}" for levels, share in mix.items())
    left_out = [f"{arm.name} {arm.unfinished}" for arm in arms if arm.unfinished]
    arms = finished(arms)
    informative = findings.informative(arms)
    parts = [
        f"Prompts by number of operations: {shares}. {informative or ''}".strip(),
        "\n".join(map(str, findings.outcomes(arms))) or "No level was reached by which a curriculum could be compared.",
        f"Not judged, since it did not finish: {', '.join(left_out)}." if left_out else "",
    ]
    return "\n\n".join(filter(None, parts))


def finished(arms: list[Arm]) -> list[Arm]:
    return [arm for arm in arms if not arm.unfinished]


def conclude(arms: Mapping[str, list[Arm]]) -> str:
    """What SPEED did in each mix, and what the curves are made of; of the arms that came to their end."""
    arms = {mix: ended for mix, of_mix in arms.items() if (ended := finished(of_mix))}
    if not arms:
        return "No arm came to its end, so there is nothing to conclude."
    found = {mix: (findings.informative(of_mix), findings.outcomes(of_mix)) for mix, of_mix in arms.items()}
    speed = findings.across("speed_16", found)
    mix, first = next(iter(arms.items()))
    seeds = f" {SINGLE}" if speed and len(first[0].runs) == 1 else ""
    return "\n\n".join(part for part in (speed + seeds, findings.elicited(mix, first)) if part)
