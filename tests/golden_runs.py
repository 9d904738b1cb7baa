"""Digests of twelve tiny trainings, to show that a change of the code changes no number.

    python tests/golden_runs.py TREE OUT.json      # runs the package in the checkout TREE
    python tests/golden_runs.py TREE OUT.json --against BEFORE.json

Each training runs in a process of its own on one thread. Its digest covers the final weights, what the model wrote,
and a few metrics of every step. Digests are equal on one machine only, since processors round differently.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
METRICS = (
    "step",
    "reward/mean",
    "tokens_generated",
    "tokens_trained",
    "learn/loss",
    "learn/grad_norm",
)
RUNS = {
    "uniform": ["curriculum.name=uniform"],
    "dapo": ["curriculum.name=dapo"],
    "speed": ["curriculum.name=speed", "curriculum.speed.n_init=2", "curriculum.max_age=0"],
    "speed-age-2": ["curriculum.name=speed", "curriculum.speed.n_init=2", "curriculum.max_age=2"],
    "cures": ["curriculum.name=cures", 'curriculum.cures.prior="level"'],
    "cures-gradient": ["curriculum.name=cures", "curriculum.cures.sigma=gradient"],
    "scalingrl": ["curriculum.name=scalingrl", "curriculum.scalingrl.share=0.5"],
    "stages": ["curriculum.name=stages"],
    "all": ["curriculum.name=all", "curriculum.speed.n_init=2", "curriculum.max_age=1"],
    "uniform-stream": ["rollout.mode=stream", "rollout.on_update=keep", "curriculum.max_age=1"],
    "speed-recompute": [
        "curriculum.name=speed",
        "curriculum.speed.n_init=2",
        "rollout.mode=stream",
        "rollout.on_update=recompute",
        "curriculum.max_age=2",
    ],
    "kl-warm-start": [
        "learn.kl_coef=0.01",
        "learn.updates=2",
        "learn.minibatches=2",
        "warm_start.0.steps=3",
        "learn.estimator=dapo",
    ],
}


def train(tree: Path, name: str, folder: Path) -> Path:
    sys.path.insert(0, str(TESTS))
    from small_run import SMALL

    command = [
        sys.executable,
        "-m",
        "whet",
        "train",
        str(folder / "recipe.toml"),
        "--out",
        str(folder / name),
    ]
    sets = [
        *SMALL,
        "data.0.reward=small_run:even_digits",
        'curriculum.starvation="relax"',
        *RUNS[name],
    ]
    for item in sets:
        command += ["--set", item]
    (folder / "recipe.toml").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{TESTS}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
    return folder / name


def digest(run: Path) -> str:
    found = hashlib.sha256()
    newest = max((run / "checkpoints").glob("step_*"))
    found.update((newest / "model.safetensors").read_bytes())
    for path in sorted((run / "rollouts").iterdir()):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.update(json.dumps([row["prompt"], row["response"], row["reward"]]).encode())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.update(json.dumps([row.get(key) for key in METRICS]).encode())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    found = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digest(train(options.tree.resolve(), name, Path(folder)))
        same = "" if name not in before else "same" if before[name] == found[name] else "DIFFERS"
        print(f"{name:18} {found[name]} {same}", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
