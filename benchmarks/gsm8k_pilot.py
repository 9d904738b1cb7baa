"""A small real model on a real problem set, end to end: warm start, evaluation, probe, a few updates, stop and resume.

    whet data smollm2 models/smollm2
    python benchmarks/gsm8k_pilot.py --model models/smollm2 --data DIR --out benchmarks/results [--updates 5]

Runs recipes/gsm8k.toml as a user would, through the `whet` command: the first process is asked to stop (SIGTERM) in the
middle, a second one resumes and goes to the end. Then `whet probe` on the warm-started model. Writes gsm8k_pilot.json:
accuracy before and after, seconds of each step by phase, the probe, and the memory plan beside the memory used.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whet import config
from whet.recipe import load_config
from whet.run import read_metrics
from whet.tools.bench.stand import circumstances
from whet.tools.doctor import examine

RECIPE = Path(__file__).parent.parent / "recipes" / "gsm8k.toml"
WHET = (sys.executable, "-m", "whet")
KEPT = ("step", "eval/", "time/", "learn/", "length/", "verdict/", "curriculum/", "rollout/tokens", "tokens_", "judge/")
PLANNED = ("device", "model", "path", "memory", "fits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2's folder.")
    parser.add_argument("--data", type=Path, required=True, help="A folder with gsm8k's train and test files.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="Further settings of the recipe.")
    options = parser.parse_args()
    cadence = [f"eval.0.every={options.updates}", f"held_out.every={options.updates}", "save.every=1", "save.keep=100"]
    sets = [
        f"model.name='{options.model}'",
        f"steps={options.updates}",
        f"seed={options.seed}",
        *cadence,
        *options.sets,
    ]
    flags = [f"--set={item}" for item in sets]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        first_s = train(run, [str(RECIPE), f"--data-folder={options.data}", *flags], stop_after=options.updates // 2)
        stopped_after = read_metrics(run)[-1]["step"]
        second_s = train(run, ["--resume"])
        metrics = read_metrics(run)
        settings = load_config(run / "config.toml")
        plan = [(what, found) for what, found, _ in examine(str(options.model), settings) if what in PLANNED]
        probe = whet_probe(run / "checkpoints" / "step_00000000", options.data, Path(folder) / "probe", settings)
    result = {
        **circumstances(),
        "seed": options.seed,
        "settings": sets[1:],
        "processes_s": [first_s, second_s],
        "stopped_after_step": stopped_after,
        "warm_start_s": round(metrics[0]["time/warm_start"], 1),
        "steps": [{k: round(v, 4) for k, v in row.items() if k.startswith(KEPT)} for row in metrics],
        "probe": probe,
        "memory_plan": plan,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gsm8k_pilot.json").write_text(json.dumps(result, indent=1) + "\n")


def train(run: Path, words: list[str], stop_after: int | None = None) -> float:
    """One process, its seconds. With `stop_after`, it is asked to stop once so many updates are recorded."""
    begun = time.monotonic()
    process = subprocess.Popen([*WHET, "train", *words, f"--out={run}"])
    while process.poll() is None:
        time.sleep(0.5)
        if stop_after is not None and (run / "metrics.jsonl").is_file() and len(read_metrics(run)) > stop_after:
            process.send_signal(signal.SIGTERM)
            stop_after = None
    if process.returncode != 0:
        sys.exit(f"whet train ended with code {process.returncode}")
    return round(time.monotonic() - begun, 1)


def whet_probe(base: Path, data: Path, out: Path, settings: config.Config) -> dict[str, Any]:
    limit = settings.rollout.max_tokens
    words = ["probe", str(base), "gsm8k", "--n=8", "--prompts=200", f"--max-tokens={limit}", f"--out={out}"]
    subprocess.run([*WHET, *words, f"--data-folder={data}"], check=True)
    report = json.loads((out / "probe.json").read_text())
    return {key: value for key, value in report.items() if key not in ("model", "data")}


if __name__ == "__main__":
    main()
