"""The demo over several seeds: tokens and seconds to each accuracy level, with their spread.

    python benchmarks/demo_seeds.py --seeds 0 1 2 --runs runs/seeds --out benchmarks/results

Every seed warm-starts its own base. The arms of a seed share it and run as `whet demo` runs them, so the seconds
are those of processes that share the cores; tokens are what to compare. Writes demo_seeds.json and demo_seeds.md.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from whet.bench.circumstances import circumstances
from whet.demo import run_demo
from whet.report.arms import read_arms
from whet.report.compare import to_markdown
from whet.report.levels import final_accuracy
from whet.run import read_metrics

ARMS = ("uniform_16", "uniform_48", "dapo_16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    for seed in args.seeds:
        if not (args.runs / f"seed{seed}" / "report.html").is_file():
            run_demo(args.runs / f"seed{seed}", seed, Console())
    folders = {f"{arm}-seed{s}": args.runs / f"seed{s}" / arm for arm in ARMS for s in args.seeds}
    ends = {
        run.name: {
            "accuracy": final_accuracy(run.points("held_out")),
            "curve": [[p.step, p.tokens, round(p.seconds, 2), p.accuracy] for p in run.points("held_out")],
        }
        for arm in read_arms(folders)
        for run in arm.runs
    }
    starts = {s: read_metrics(args.runs / f"seed{s}" / "base")[0]["eval/held_out/accuracy"] for s in args.seeds}
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"seeds": args.seeds, "accuracy_at_start": starts, "runs": ends, **circumstances()}
    (args.out / "demo_seeds.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "demo_seeds.md").write_text(to_markdown(folders))
    print(to_markdown(folders))


if __name__ == "__main__":
    main()
