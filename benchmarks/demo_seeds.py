"""The demo over several seeds: tokens to its target and accuracy at the end, for both of its mixes.

    python benchmarks/demo_seeds.py --seeds 0 1 2 3 4 --runs runs/seeds --out benchmarks/results

All arms of all seeds run in one queue, each as `whet demo` runs it. A run that is there already is not run again.
Writes demo_seeds.json and demo_seeds.md. `--arms few/all` runs a part; a seed is reported for a mix once all of the
mix's arms are there.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from whet.report.arms import read_arms
from whet.report.formats import final_accuracy
from whet.tools.demo import (
    Outcome,
    arm_recipes,
    check_base,
    conclude,
    describe_mix,
    find_outcomes,
    read_demo,
    times,
)
from whet.tools.experiment import circumstances, train_arms

MOST = 0.6  # of uniform's tokens: what the arm shown may take at most, in every seed

SeedFolders = dict[int, list[Path]]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="*", help="Only these, as MIX/ARM.")
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def is_done(folder: Path) -> bool:
    return (folder / "report.html").is_file()


def missing_runs(plans: Mapping[int, Any], wanted: list[str] | None) -> dict[Path, Any]:
    """The runs that are still to be made, with their recipes."""
    missing = {}
    for plan in plans.values():
        for mix, recipes in plan.items():
            for folder, recipe in recipes.items():
                is_wanted = wanted is None or f"{mix}/{folder.name}" in wanted
                if is_wanted and not is_done(folder):
                    missing[folder] = recipe
    return missing


def finished_seeds(plans: Mapping[int, Any], mix: str) -> SeedFolders:
    """The run folders of each seed whose arms are all there."""
    seeds = {}
    for seed, plan in plans.items():
        folders = list(plan[mix])
        if all(map(is_done, folders)):
            seeds[seed] = folders
    return seeds


def named_runs(seeds: SeedFolders) -> dict[str, Path]:
    """Folders under names that `whet.report` groups by arm, such as all-seed3."""
    return {
        f"{folder.name}-seed{seed}": folder for seed, folders in seeds.items() for folder in folders
    }


def curves(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Each run's accuracy at the end, and [step, tokens, seconds, accuracy] of its evaluations."""
    found = {}
    for arm in read_arms(folders):
        for run in arm.runs:
            points = run.points("held_out")
            curve = [[p.step, p.tokens, round(p.seconds, 2), round(p.accuracy, 4)] for p in points]
            found[run.name] = {"accuracy": round(final_accuracy(points), 4), "curve": curve}
    return found


def rule(outcomes: list[Outcome], kept: int) -> str:
    shown = outcomes[0]
    return (
        f"In the first mix {shown.arm} took at most {MOST} of uniform's tokens to {shown.target} and did "
        f"not end lower in {kept} of {len(outcomes)} seeds. "
        "Seconds are those of a shared machine, and not to be compared."
    )


def main() -> None:
    options = read_options()
    tree = read_demo()
    base = check_base(tree["sha256"])
    plans = {
        seed: arm_recipes(tree, options.runs / f"seed{seed}", base, seed) for seed in options.seeds
    }
    if missing := missing_runs(plans, options.arms):
        for folder in missing:
            folder.parent.mkdir(parents=True, exist_ok=True)
        train_arms(missing, Console())

    arms, shares, runs, pages = {}, {}, {}, []
    targets = {mix: settings["target"] for mix, settings in tree["mixes"].items()}
    first_mix: list[Outcome] = []  # of the arm that the demo shows, for each seed
    for mix, target in targets.items():
        seeds = finished_seeds(plans, mix)
        if not seeds:
            continue
        folders = named_runs(seeds)
        arms[mix] = read_arms(folders)
        runs[mix] = curves(folders)
        shares[mix] = {}
        lines = []
        for seed, own in seeds.items():
            outcomes = find_outcomes(read_arms(own), target)
            shares[mix][seed] = {outcome.arm: times(outcome.share) for outcome in outcomes}
            lines += [f"- Seed {seed}, {outcome.arm}: {outcome}." for outcome in outcomes]
            if mix == next(iter(targets)):
                first_mix.append(outcomes[-1])
        description = describe_mix(tree, mix, arms[mix])
        pages.append(f"## Mix {mix}\n\n{description}\n\n" + "\n".join(lines))

    kept = sum(o.share.high <= MOST and o.end_verdict != "lower" for o in first_mix)
    if first_mix:
        pages.insert(0, rule(first_mix, kept))
    if arms:
        pages.append(conclude(arms, targets))
    words = "\n\n".join(pages) + "\n"
    found = {
        "seeds": options.seeds,
        "base": tree["sha256"],
        "kept": kept,
        "share_of_uniform": shares,
        "mixes": runs,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**circumstances(), **found}, indent=1) + "\n"
    (options.out / "demo_seeds.json").write_text(text)
    (options.out / "demo_seeds.md").write_text(words)
    print(words)


if __name__ == "__main__":
    main()
