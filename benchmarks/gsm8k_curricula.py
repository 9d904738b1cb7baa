"""Curricula and learning rates side by side on a real model and problem set, from one warm start, on one GPU.

    whet data smollm2 models/smollm2
    python benchmarks/gsm8k_curricula.py --model models/smollm2 --data DIR --runs runs/gsm8k --out benchmarks/results

Each arm is recipes/gsm8k.toml with another curriculum and learning rate ("speed@2e-5"), a process of its own; all run
at the same time and share the GPU, so compare tokens, not seconds. What an interrupted arm has done is
kept: the same command goes on. Writes gsm8k_curricula.json; with --report-only, of what is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from whet.run import best_checkpoint, read_metrics
from whet.tools.bench.stand import circumstances

RECIPE = Path(__file__).parent.parent / "recipes" / "gsm8k.toml"
WHET = (sys.executable, "-m", "whet", "train")
KEPT = ("step", "eval/", "time/", "learn/", "length/", "curriculum/", "reward/", "tokens_", "rollouts")
ARMS = ("uniform@5e-6", "uniform@2e-5", "uniform@6e-5", "speed@5e-6", "speed@2e-5", "speed@6e-5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2's folder.")
    parser.add_argument("--data", type=Path, required=True, help="A folder with gsm8k's train and test files.")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=ARMS, help="CURRICULUM@LEARNING_RATE of each.")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="Further settings of every arm.")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if not options.report_only:
        base = warm_start(options)
        processes = {arm: train_arm(arm, base, options) for arm in options.arms}
        if failed := [arm for arm, process in processes.items() if process.wait() != 0]:
            sys.exit(f"Failed: {', '.join(failed)}; their words are in {options.runs}/*.log")
    result = {
        **circumstances(),
        "seed": options.seed,
        "updates": options.updates,
        "settings": options.sets,
        "base": rows(options.runs / "base"),
        "arms": {arm: rows(options.runs / arm) for arm in options.arms},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gsm8k_curricula.json").write_text(json.dumps(result, indent=1) + "\n")


def warm_start(options: argparse.Namespace) -> Path:
    """The checkpoint all arms start from; one that is there is taken."""
    folder = options.runs / "base"
    if not folder.exists() or best_checkpoint(folder) is None:
        own = [f"model.name='{options.model}'", "steps=0", f"seed={options.seed}"]
        subprocess.run([*WHET, *words(folder, own, options)], check=True)
    done = best_checkpoint(folder)
    assert done is not None
    return done


def train_arm(arm: str, base: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    folder = options.runs / arm
    name, lr = arm.split("@")
    own = [f"model.name='{base}'", "warm_start=[]", f"steps={options.updates}", f"seed={options.seed}"]
    own += [f"curriculum.name='{name}'", f"learn.lr={lr}", "eval.0.every=20", "held_out.every=10", "save.every=10"]
    more = ["--resume", f"--out={folder}"] if folder.exists() else words(folder, [*own, *options.sets], options)
    log = folder.with_suffix(folder.suffix + ".log").open("ab")
    return subprocess.Popen([*WHET, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def words(folder: Path, sets: list[str], options: argparse.Namespace) -> list[str]:
    return [str(RECIPE), f"--data-folder={options.data}", f"--out={folder}", *(f"--set={item}" for item in sets)]


def rows(folder: Path) -> list[dict[str, Any]]:
    if not (folder / "metrics.jsonl").is_file():
        return []
    return [{k: round(v, 4) for k, v in row.items() if k.startswith(KEPT)} for row in read_metrics(folder)]


if __name__ == "__main__":
    main()
