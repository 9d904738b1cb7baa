"""Curricula side by side on chained arithmetic, from the same start, over several seeds, in two mixes of difficulty.

    python benchmarks/curricula.py --mix few --seeds 0 1 2 3 4 --arms uniform_16 uniform_48 dapo_16 speed_16 \
        --runs runs/curricula --out benchmarks/results

few: 40% of the prompts trivial, 12% of middling difficulty, 48% hopeless for the base: few groups carry signal.
many: 45%, 25% and 30%. Every seed warm-starts its own base, as `whet demo` does. Arms get the same tokens; evaluated
about as often by tokens. What is there already is not run again. Writes curricula_MIX.json and curricula_MIX.md.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from whet.bench.circumstances import circumstances
from whet.demo import make_base, merge, train_arms
from whet.recipe import parse_config
from whet.report.arms import read_arms
from whet.report.compare import to_markdown
from whet.report.levels import final_accuracy
from whet.run import read_metrics

MIXES = {
    "few": {"1": 0.40, "3-7": 0.12, "9-12": 0.48},
    "many": {"1-2": 0.45, "3-7": 0.25, "8-12": 0.30},
}
ARMS: dict[str, dict[str, Any]] = {
    "uniform_16": {"curriculum": {"name": "uniform", "groups": 16}},
    "uniform_48": {"curriculum": {"name": "uniform", "groups": 48}, "learn": {"lr": 2e-4}, "eval": {"every": 2}},
    "dapo_16": {"curriculum": {"name": "dapo", "groups": 16}, "eval": {"every": 2}},
    "speed_16": {"curriculum": {"name": "speed", "groups": 16}, "eval": {"every": 2}},
    "speed_16_age_1": {"curriculum": {"name": "speed", "groups": 16, "max_age": 1}, "eval": {"every": 2}},
    "speed_2_16": {"curriculum": {"name": "speed", "groups": 16, "speed": {"n_init": 2}}, "eval": {"every": 2}},
    "speed_8_16": {"curriculum": {"name": "speed", "groups": 16, "speed": {"n_init": 8}}, "eval": {"every": 2}},
    "cures_16": {"curriculum": {"name": "cures", "groups": 16}},
    "cures_sampling_16": {"curriculum": {"name": "uniform", "source": "cures", "groups": 16}},
    "scalingrl_16": {"curriculum": {"name": "scalingrl", "groups": 16}},
    "random_set_16": {"curriculum": {"name": "scalingrl", "groups": 16, "scalingrl": {"select": "fixed"}}},
    "stages_16": {"curriculum": {"name": "stages", "groups": 16}},
    "all_16": {"curriculum": {"name": "all", "groups": 16, "max_age": 1, "starvation": "partial"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=MIXES, default="few")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--runs", type=Path, default=Path("runs/curricula"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for seed in options.seeds:
        run_seed(options.runs / options.mix / f"seed{seed}", seed, options)
    folders = {
        f"{arm}-seed{seed}": options.runs / options.mix / f"seed{seed}" / arm
        for arm in options.arms
        for seed in options.seeds
    }
    curves = {
        run.name: {
            "accuracy": final_accuracy(run.points("held_out")),
            "curve": [[p.step, p.tokens, round(p.seconds, 2), p.accuracy] for p in run.points("held_out")],
        }
        for arm in read_arms(folders)
        for run in arm.runs
    }
    bases = {s: options.runs / options.mix / f"seed{s}" / "base" for s in options.seeds}
    starts = {seed: read_metrics(base)[0]["eval/held_out/accuracy"] for seed, base in bases.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"mix": MIXES[options.mix], "seeds": options.seeds, "tokens": options.tokens, "accuracy_at_start": starts}
    name = f"curricula_{options.mix}"
    (options.out / f"{name}.json").write_text(
        json.dumps({**result, "runs": curves, **circumstances()}, indent=1) + "\n"
    )
    (options.out / f"{name}.md").write_text(to_markdown(folders))
    print(to_markdown(folders))


def run_seed(folder: Path, seed: int, options: argparse.Namespace) -> None:
    """The base of a seed, and those of its arms that have not been run."""
    tree = tomllib.loads(resources.files("whet").joinpath("demo.toml").read_text())
    own = {"seed": seed, "token_budget": options.tokens, "data": {"options": {"mix": MIXES[options.mix]}}}
    arm = merge(tree["arm"], own)
    arm["data"][0]["options"]["mix"] = MIXES[options.mix]  # a mix is one thing, not merged key by key
    shared = {key: arm[key] for key in ("seed", "data", "rollout", "eval")}
    console = Console()
    base = make_base(folder / "base", merge(shared, tree["base"]), console)
    missing = [name for name in options.arms if not (folder / name / "report.html").is_file()]
    recipes = {
        folder / name: parse_config(merge(merge(arm, ARMS[name]), {"model": {"name": str(base)}})) for name in missing
    }
    if recipes:
        train_arms(recipes, console)


if __name__ == "__main__":
    main()
