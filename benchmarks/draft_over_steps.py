"""Does a drafter have to keep learning? Accept length over the updates of a run, trained on against frozen.

    python benchmarks/draft_over_steps.py --recipe recipes/gsm8k.toml --steps 40 --freeze 10 --out benchmarks/results

The same run twice, drafting with EAGLE alone at one depth: the drafter learns after every update, or only after the
first few (TLT's question). Tokens do not depend on drafts, so both policies are the same but for rounding, and so is
what is drafted for. Writes draft_over_steps.json after every update.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from whet import loop
from whet.api import start
from whet.bench.circumstances import circumstances
from whet.bench.watch import Fixed, Watch
from whet.check import check
from whet.config import Config
from whet.draft.base import Arm
from whet.parts import Parts
from whet.recipe import dump_config, load_config
from whet.rollout.engine import LocalEngine
from whet.run import Run


class Follower:
    """Watches a run: writes down each step's accept length, and stops the drafter's lessons when they are over."""

    def __init__(self, name: str, lessons: int, found: dict[str, Any], out: Path) -> None:
        self.name, self.lessons, self.found, self.out = name, lessons, found, out
        self.rows: list[dict[str, float]] = found["arms"].setdefault(name, [])
        self.parts: Parts | None = None

    def attach(self, parts: Parts, depth: int) -> None:
        assert isinstance(parts.engine, LocalEngine) and parts.engine.speculation is not None
        self.parts, self.watch = parts, Watch(Fixed(Arm("eagle", depth)))
        parts.engine.speculation.chooser = self.watch

    def update(self, metrics: dict[str, float], progress: float) -> None:
        steps, self.watch.steps = self.watch.steps, []
        accepted = [count for step in steps if step.accepted is not None for count in step.accepted.tolist()]
        row = {"step": metrics["step"], "rows_drafted": float(len(accepted))}
        if accepted:
            row["accept_length"] = 1 + sum(accepted) / len(accepted)
        kept = ("draft/loss", "draft/agreement", "draft/tokens_trained", "reward/mean", "length/mean", "time/draft")
        self.rows.append(row | {name: metrics[name] for name in kept if name in metrics})
        (self.out / "draft_over_steps.json").write_text(json.dumps(self.found, indent=1) + "\n")
        length = f"{row['accept_length']:.2f}" if accepted else "-"
        print(f"{self.name}: step {metrics['step']:.0f}, accept length {length}", flush=True)
        if metrics["step"] >= self.lessons and self.parts is not None and self.parts.drafter is not None:
            self.parts.drafter.share = 0.0

    def message(self, text: str) -> None:
        print(text, flush=True)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def run_arm(settings: Config, follower: Follower, depth: int, reward: Any = None) -> None:
    checked = check(settings, reward)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = stack.enter_context(Run.create(Path(folder) / "run", dump_config(checked.settings)))
        parts = start(run, checked.settings, checked.problems, follower)
        stack.callback(parts.close)
        follower.attach(parts, depth)
        loop.train(run, parts, follower)


def compare(sets: list[str], recipe: Path | None, *, freeze: int, depth: int, out: Path, reward: Any = None) -> dict:
    """Both arms of the recipe; what was found."""
    settings = load_config(recipe, sets=[*sets, 'draft.drafters=["eagle"]'])
    found: dict[str, Any] = {**circumstances(), "settings": sets, "depth": depth, "freeze": freeze, "arms": {}}
    out.mkdir(parents=True, exist_ok=True)
    for name, lessons in (("trained", settings.steps), ("frozen", freeze)):
        run_arm(settings, Follower(name, lessons, found, out), depth, reward)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--freeze", type=int, default=10, help="Updates after which the other arm stops learning.")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="Further settings of both arms.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sets = [*options.sets, f"steps={options.steps}"]
    compare(sets, options.recipe, freeze=options.freeze, depth=options.depth, out=options.out)


if __name__ == "__main__":
    main()
