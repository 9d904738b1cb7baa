"""The demo over several seeds: tokens and seconds to each accuracy level, with their spread, for both of its mixes.

    python benchmarks/demo_seeds.py --seeds 0 1 2 --runs runs/seeds --out benchmarks/results

All seeds start from one base and run as `whet demo` runs them, so the seconds are those of processes that share the
cores; tokens are what to compare. A seed that is there already is not run
again. Writes demo_seeds.json and demo_seeds.md.
"""

import argparse
from pathlib import Path

from curricula import curves, to_markdown, write_json
from rich.console import Console

from whet.report.arms import read_arms
from whet.run import read_metrics
from whet.tools.demo import conclude, describe_mix, read_demo, run_demo
from whet.tools.experiment import circumstances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    homes = {seed: options.runs / f"seed{seed}" for seed in options.seeds}
    for seed, home in homes.items():
        if not (home / "report.html").is_file():
            run_demo(home, seed, Console(), base=options.runs / "base")
    tree = read_demo()
    folders = {
        name: {
            f"{arm.replace(' ', '_')}-seed{seed}": home / name / arm.replace(" ", "_")
            for arm in mix["arms"]
            for seed, home in homes.items()
        }
        for name, mix in tree["mixes"].items()
    }
    arms = {name: read_arms(of_mix) for name, of_mix in folders.items()}
    pages = [
        f"## Mix {name}\n\n{describe_mix(tree['mixes'][name]['mix'], arms[name])}\n\n{to_markdown(of_mix)}"
        for name, of_mix in folders.items()
    ]
    words = "\n\n".join([*pages, conclude(arms)]) + "\n"
    start = read_metrics(options.runs / "base")[0]["eval/held_out/accuracy"]
    result = {"seeds": options.seeds, "accuracy_at_start": start}
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {name: curves(of_mix) for name, of_mix in folders.items()}
    write_json(options.out / "demo_seeds.json", {**circumstances(), **result, "mixes": runs})
    (options.out / "demo_seeds.md").write_text(words)
    print(words)


if __name__ == "__main__":
    main()
