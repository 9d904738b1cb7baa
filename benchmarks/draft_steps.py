"""Does a drafter have to keep learning? Accept length over the updates of a run.

    python benchmarks/draft_steps.py RECIPE --steps 40 --freeze 10

The same run twice, drafting with EAGLE alone at one depth: the drafter learns after every update, or only after the
first few (TLT's question). Tokens do not depend on drafts, so both policies are the same but for rounding, and so is
what is drafted for. Nothing is evaluated: that tells nothing of the drafts of training. Writes draft_over_steps.json
after every update.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import RESULTS, Out, run_script, tell
from draft_watch import Fixed, Watch, accept_length
from rich.table import Table

from whet import config, files, loop
from whet.api import prepare_parts
from whet.build import Parts, build_parts
from whet.draft.base import DraftArm
from whet.errors import WhetError
from whet.problems import JudgeFunction
from whet.recipe import dump_config, load_config
from whet.resolve import check_run
from whet.rollout.engine import LocalEngine
from whet.run import Run
from whet.terminal import DataFolder, Sets, folder_set, out_console
from whet.tools.experiment import circumstances

app = typer.Typer()
FILE = "draft_over_steps.json"
KEPT = (
    "draft/loss",
    "draft/agreement",
    "draft/tokens_trained",
    "reward/mean",
    "length/mean",
    "time/draft",
)
"""The metrics of an update that are kept."""

OnLine = Callable[[str], None]


class Follower:
    """Watches a run: writes down each update's accept length, and stops the drafter's lessons when they are over."""

    def __init__(
        self, name: str, lessons: int, found: dict[str, Any], out: Path, on_progress: OnLine
    ) -> None:
        """lessons: updates after which the drafter learns."""
        self.name, self.lessons, self.found, self.out, self.on_progress = (
            name,
            lessons,
            found,
            out,
            on_progress,
        )
        self.rows: list[dict[str, float]] = found["arms"].setdefault(name, [])
        self.parts: Parts | None = None

    def attach(self, parts: Parts, depth: int) -> None:
        assert isinstance(parts.engine, LocalEngine) and parts.engine.speculation is not None
        self.parts, self.watch = parts, Watch(Fixed(DraftArm("eagle", depth)))
        parts.engine.speculation.chooser = self.watch

    def update(self, metrics: dict[str, float], progress: float) -> None:
        steps = self.watch.take()
        drafted = sum(step.accepted.size for step in steps if step.accepted is not None)
        row = {"step": metrics["step"], "rows_drafted": float(drafted)}
        if (length := accept_length(steps)) is not None:
            row["accept_length"] = length
        self.rows.append(row | {name: metrics[name] for name in KEPT if name in metrics})
        self.found["last_quarter"] = last_quarter(self.found["arms"])
        files.write_text(self.out / FILE, json.dumps(self.found, indent=1) + "\n")
        shown = "-" if length is None else f"{length:.2f}"
        self.on_progress(f"{self.name}: step {metrics['step']:.0f}, accept length {shown}")
        if (
            metrics["step"] >= self.lessons
            and self.parts is not None
            and self.parts.drafter is not None
        ):
            self.parts.drafter.end()

    def message(self, text: str) -> None:
        self.on_progress(text)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def steps_bench(
    settings: config.Config,
    *,
    freeze: int,
    depth: int,
    out: Path,
    reward: JudgeFunction | None = None,
    on_progress: OnLine = lambda line: None,
) -> dict[str, Any]:
    """Both arms of the recipe; what was found. freeze: updates after which the second stops learning."""
    if not 0 <= freeze < settings.steps:
        raise WhetError(
            f"A drafter frozen after {freeze} updates is no other one in a run of {settings.steps}."
        )
    draft = settings.draft.model_copy(update={"drafters": ("eagle",)})
    without = {"draft": draft, "eval": (), "held_out": config.HeldOut(size=0)}
    settings = settings.model_copy(update=without)
    about = {
        "depth": depth,
        "freeze": freeze,
        "steps": settings.steps,
        "recipe": dump_config(settings),
    }
    found: dict[str, Any] = {**circumstances(), **about, "arms": {}}
    files.make_folder(out)
    for name, lessons in (("trained", settings.steps), ("frozen", freeze)):
        follower = Follower(name, lessons, found, out, on_progress)
        train_followed(settings, follower, partial(follower.attach, depth=depth), reward)
    return found


def train_followed(
    settings: config.Config,
    follower: loop.Watcher,
    attach: Callable[[Parts], None],
    reward: JudgeFunction | None = None,
) -> None:
    """A run in a folder that is thrown away; `attach` may change its parts before the first update."""
    plan = check_run(settings, reward)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = stack.enter_context(Run.create(Path(folder) / "run", dump_config(plan.settings)))
        parts = build_parts(plan)
        stack.callback(parts.close)
        prepare_parts(parts, run, None, follower)
        attach(parts)
        # as `whet train` does: a look through all that was imported takes up to half a second
        gc.freeze()
        stack.callback(gc.unfreeze)
        loop.train(parts, loop.Log(run, parts, follower))


def last_quarter(arms: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """For each arm, the mean accept length of its last quarter of updates, by what was drafted.

    >>> rows = [{"rows_drafted": 9.0, "accept_length": 1.0}] * 6
    >>> rows += [{"rows_drafted": 30.0, "accept_length": 1.5}, {"rows_drafted": 10.0, "accept_length": 2.5}]
    >>> last_quarter({"trained": rows, "frozen": []})
    {'trained': 1.75}
    """
    found = {}
    for name, rows in arms.items():
        drafted = [row for row in rows if "accept_length" in row]
        last = drafted[len(drafted) - max(1, len(drafted) // 4) :] if drafted else []
        if count := sum(row["rows_drafted"] for row in last):
            found[name] = sum(row["accept_length"] * row["rows_drafted"] for row in last) / count
    return found


# ---- the command line


@app.command()
def main(
    recipe: Annotated[Path, typer.Argument(help="What is trained; drafts are EAGLE's alone.")],
    steps: Annotated[int, typer.Option(min=1, help="Updates of each run.")] = 40,
    freeze: Annotated[
        int, typer.Option(min=0, help="Updates after which the second drafter stops learning.")
    ] = 10,
    depth: Annotated[int, typer.Option(min=1, help="Tokens of a draft.")] = 4,
    sets: Sets = None,
    data_folder: DataFolder = None,
    out: Out = RESULTS,
) -> None:
    """Accept length over RL updates: a drafter that goes on learning, beside one that is frozen."""
    settings = load_config(recipe, [*folder_set(data_folder), *(sets or []), f"steps={steps}"])
    show_steps(steps_bench(settings, freeze=freeze, depth=depth, out=out, on_progress=tell))


def show_steps(result: Mapping[str, Any], lines: int = 12) -> None:
    """Accept length at some of the updates, and the mean of the last quarter."""
    arms = {name: {row["step"]: row for row in rows} for name, rows in result["arms"].items()}
    steps = [step for step, row in arms["trained"].items() if "accept_length" in row]
    table = Table("update", *arms)
    for step in steps[:: max(1, -(-len(steps) // lines))]:
        found = [rows.get(step, {}).get("accept_length") for rows in arms.values()]
        table.add_row(
            f"{step:.0f}", *("-" if length is None else f"{length:.2f}" for length in found)
        )
    table.add_row(
        "last quarter", *(f"{result['last_quarter'].get(name, 1.0):.2f}" for name in arms)
    )
    out_console.print(table)
    tell(
        f"Accept length with drafts of {result['depth']}; the lessons of the frozen one end at {result['freeze']}."
    )


if __name__ == "__main__":
    run_script(app)
