"""The demo over several seeds: tokens to its target and accuracy at the end, for both of its mixes.

    python benchmarks/demo_seeds.py --seeds 0 1 2 3 4 --runs runs/seeds --out benchmarks/results

All arms of all seeds run in one queue, each as `whet demo` runs it; what is there already is not run again. Writes
demo_seeds.json and demo_seeds.md. `--arms` runs a part, such as few/all, or with no name nothing.
"""

import argparse
import os
from pathlib import Path

from curricula import curves, to_markdown, write_json
from rich.console import Console

from whet.report.arms import read_arms
from whet.tools.demo import arm_recipes, check_base, conclude, describe_mix, find_outcomes, read_demo, times
from whet.tools.experiment import circumstances, train_arms

MOST = 0.6  # of uniform's tokens: what the arm shown may take at most, in every seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="*", help="Only these, as MIX/ARM.")
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    tree = read_demo()
    plans = {
        seed: arm_recipes(tree, options.runs / f"seed{seed}", check_base(tree["sha256"]), seed)
        for seed in options.seeds
    }
    every = [f"{mix}/{arm}" for mix, settings in tree["mixes"].items() for arm in settings["arms"]]
    wanted = every if options.arms is None else options.arms
    missing = {
        folder: settings
        for name in wanted
        for plan in plans.values()
        for folder, settings in plan[name.split("/")[0]].items()
        if folder.name == name.split("/")[1] and not is_done(folder)
    }
    for folder in missing:
        folder.parent.mkdir(parents=True, exist_ok=True)
    if missing:
        train_arms(missing, Console())
        print(f"{os.times().children_user + os.times().children_system:.0f} processor seconds, {len(missing)} runs")
    done = {  # a seed counts in a mix once all its arms are there
        mix: {seed: list(plan[mix]) for seed, plan in plans.items() if all(map(is_done, plan[mix]))}
        for mix in tree["mixes"]
    }
    folders = {
        mix: {
            f"{arm}-seed{seed}": of[i] for i, arm in enumerate(tree["mixes"][mix]["arms"]) for seed, of in each.items()
        }
        for mix, each in done.items()
    }
    targets = {mix: settings["target"] for mix, settings in tree["mixes"].items()}
    arms = {mix: read_arms(of_mix) for mix, of_mix in folders.items()}
    seeds = {
        mix: {seed: {o.arm: o for o in find_outcomes(read_arms(of), targets[mix])} for seed, of in each.items()}
        for mix, each in done.items()
    }
    shown = [list(of_seed.values())[-1] for of_seed in next(iter(seeds.values())).values()]
    kept = sum(outcome.share.high <= MOST and outcome.end_verdict != "lower" for outcome in shown)
    rule = (
        f"In the first mix {shown[0].arm} took at most {MOST} of uniform's tokens to {shown[0].target} and did not end "
        f"lower in {kept} of {len(shown)} seeds. "
        "Seconds are those of a shared machine, and not to be compared."
    )
    pages = [
        f"## Mix {mix}\n\n{describe_mix(tree, mix, arms[mix])}\n\n"
        + "\n".join(f"- Seed {seed}, {arm}: {found}." for seed, of in seeds[mix].items() for arm, found in of.items())
        + f"\n\n{to_markdown(of_mix)}"
        for mix, of_mix in folders.items()
    ]
    words = "\n\n".join([rule, *pages, conclude(arms, targets)]) + "\n"
    shares = {
        mix: {s: {a: times(o.share) for a, o in of.items()} for s, of in each.items()} for mix, each in seeds.items()
    }
    runs = {mix: curves(of_mix) for mix, of_mix in folders.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"seeds": options.seeds, "base": tree["sha256"], "kept": kept, "share_of_uniform": shares, "mixes": runs}
    write_json(options.out / "demo_seeds.json", {**circumstances(), **found})
    (options.out / "demo_seeds.md").write_text(words)
    print(words)


def is_done(folder: Path) -> bool:
    return (folder / "report.html").is_file()


if __name__ == "__main__":
    main()
