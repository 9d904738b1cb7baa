"""The RL step with and without speculation, end to end, on the long-tail model.

    python benchmarks/tail_model.py --out runs/tail
    python benchmarks/draft_rl.py --model runs/tail/model --out benchmarks/results

Runs of one recipe, through `whet train`'s own loop: problems of tail_model.py and its judge, 16 prompts x 8 rollouts of
up to 2,048 tokens, uniform, no evaluation; plain, with model-free drafts, and with an EAGLE drafter that starts from
random weights and learns beside the policy. Drafts change no token, so the runs train on the same rollouts but for
rounding, which is reported; update by update their seconds are compared. The first two updates of a run warm it up.
Writes draft_rl.json after every update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tail_model import is_right, problem, question

from whet import api
from whet.recipe import load_config
from whet.tools.experiment import circumstances
from whet.types import Prompt

ARMS: dict[str, tuple[str, ...]] = {"plain": (), "model_free": ("suffix",), "eagle": ("suffix", "eagle")}
WARM = 2
KEPT = ("step", "time/", "draft/", "reward/mean", "length/mean", "rollout/steps", "rollout/tail_share", "learn/tokens")


def judge(prompt: Prompt, response: str) -> float:
    return float(is_right(prompt.text, response))


class Follower:
    """Keeps what the tables need of each update."""

    def __init__(self, name: str, result: dict[str, Any], out: Path) -> None:
        self.name, self.result, self.out = name, result, out
        self.rows: list[dict[str, float]] = result["arms"].setdefault(name, [])

    def update(self, metrics: dict[str, float], progress: float) -> None:
        if metrics["step"] == 0:
            return
        self.rows.append({key: value for key, value in metrics.items() if key.startswith(KEPT)})
        self.result["summary"] = summary(self.result["arms"])
        (self.out / "draft_rl.json").write_text(json.dumps(self.result, indent=1) + "\n")
        length = metrics.get("draft/accept_length", 1.0)
        print(f"{self.name}: step {metrics['step']:.0f}, {metrics['time/total']:.2f} s, accept length {length:.2f}")

    def message(self, text: str) -> None:
        print(text, flush=True)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def summary(arms: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """For each arm: seconds of an update and of its generation, and how many times as fast as plain, update by update;
    the share of its time that generation takes; tokens against plain. Medians, but for the share of the drafter's
    lessons: not every update has one, so it is their seconds of all seconds."""
    found = {}
    for name, rows in arms.items():
        pairs = [(ours, plain) for ours, plain in zip(rows, arms["plain"], strict=False) if ours["step"] > WARM]
        if not pairs:
            continue
        found[name] = {
            "seconds": median(ours["time/total"] for ours, _ in pairs),
            "generate_share": median(ours["time/generate"] / ours["time/total"] for ours, _ in pairs),
            "lessons_share": sum(ours.get("time/draft", 0.0) for ours, _ in pairs)
            / sum(ours["time/total"] for ours, _ in pairs),
            "faster": median(plain["time/total"] / ours["time/total"] for ours, plain in pairs),
            "faster_generating": median(plain["time/generate"] / ours["time/generate"] for ours, plain in pairs),
            "accept_length": median(ours.get("draft/accept_length", 1.0) for ours, _ in pairs),
            "mean_length_apart": max(abs(ours["length/mean"] - plain["length/mean"]) for ours, plain in pairs),
        }
    return found


def median(values: Any) -> float:
    return float(statistics.median(values))


def problems(path: Path, count: int, seed: int) -> str:
    """Each with one of its solutions, though any is right."""
    rng = np.random.default_rng((seed, 3))
    asked = dict.fromkeys(problem(rng) for _ in range(4 * count))
    rows = [
        {"prompt": question(a, m, r), "answer": str(next(x for x in range(10, 100) if a * x % m == r))}
        for a, m, r in list(asked)[:count]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**circumstances(), "settings": settings_of(options), "arms": {}, "summary": {}}
    with tempfile.TemporaryDirectory() as folder:
        data = problems(Path(folder) / "problems.jsonl", options.problems, options.seed)
        for name in options.arms:
            drafters = json.dumps(list(ARMS[name]))
            sets = [f"model.name='{options.model}'", f"data.0.path='{data}'", f"draft.drafters={drafters}"]
            recipe = load_config(None, [*result["settings"], *sets, *options.sets])
            follower = Follower(name, result, options.out)
            api.run_recipe(recipe, Path(folder) / name, watcher=follower, reward=judge)
    return result


def settings_of(options: argparse.Namespace) -> list[str]:
    return [
        f"seed={options.seed}",
        f"steps={options.steps}",
        f"model.device='{options.device}'",
        f"model.dtype='{'bfloat16' if options.device == 'cuda' else 'float32'}'",
        f"rollout.slots={options.prompts * options.rollouts}",
        f"rollout.max_tokens={options.cap}",
        f"rollout.context={options.cap + 64}",
        "curriculum.name='uniform'",
        f"curriculum.groups={options.prompts}",
        f"curriculum.rollouts={options.rollouts}",
        "learn.lr=1e-6",
        "learn.pack_tokens=16384",
        "held_out.size=0",
        "save.every=100000",
        "save.rollouts=0",
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--model", type=Path, required=True, help="the folder that tail_model.py wrote")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--prompts", type=int, default=16)
    made.add_argument("--rollouts", type=int, default=8)
    made.add_argument("--problems", type=int, default=200, help="to train on, none of them twice")
    made.add_argument("--cap", type=int, default=2048, help="tokens of a response at most")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--set", dest="sets", action="append", default=[], help="further settings of all arms")
    return made


if __name__ == "__main__":
    print(json.dumps(compare(parser().parse_args())["summary"], indent=1))
