"""The commands. torch is imported only by those that need it; a WhetError is one sentence and exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet import __version__, config
from whet.errors import WhetError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
bench_app = typer.Typer(no_args_is_help=True, help="Measure whet against its peers on this machine.")
app.add_typer(bench_app, name="bench")
out_console = Console()
err_console = Console(stderr=True)

Sets = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: --set learn.lr=1e-5. Repeatable.")]


def main() -> None:
    """Entry point: prints what a user can mend as one sentence, and leaves with code 2."""
    try:
        app()
    except WhetError as error:
        err_console.print(f"whet: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err_console.print("whet: stopped.", markup=False)
        sys.exit(130)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Trains language models to reason by reinforcement learning, for a fraction of the tokens."""
    if version:
        out_console.print(f"whet {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A TOML recipe; without one, the flags make it.")] = None,
    model: Annotated[str | None, typer.Option(help='A Hugging Face folder, or "tiny".')] = None,
    data: Annotated[str | None, typer.Option(help="Problems as JSONL with prompt and answer.")] = None,
    reward: Annotated[str | None, typer.Option(help="Your judge as module:function.")] = None,
    curriculum: Annotated[str | None, typer.Option(help="See whet list.")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; default runs/DATE-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all, print the resolved recipe, train nothing.")
    ] = False,
) -> None:
    """Train a model on a recipe."""
    from whet import api

    if resume:
        if out is None:
            raise WhetError("--resume needs the run folder: whet train --out RUN --resume.")
        if not (out / "config.toml").is_file():
            raise WhetError(f"There is no run to resume in {out}: it holds no config.toml.")
        settings = config.load_config(out / "config.toml", sets or [])
    else:
        if recipe is None and not (model or data or reward or curriculum or sets):
            raise WhetError(
                "Give a recipe (whet train recipes/chain.toml) or --model and --data; whet demo needs nothing."
            )
        flags = api.flag_sets(model, data, reward, curriculum, out or Path())
        settings = config.load_config(recipe, [*flags, *(sets or [])])
    if dry_run:
        show_dry_run(settings)
        return
    folder = out or api.new_folder()
    from whet.report.live import RunProgress

    watcher = RunProgress()
    try:
        api.run_recipe(settings, folder, resume=resume, watcher=watcher)
    finally:
        watcher.close()
    out_console.print(
        f"The run is in {folder}: report.html, metrics.jsonl, checkpoints/.", markup=False, highlight=False
    )


def show_dry_run(settings: config.Config) -> None:
    from whet import api

    problems = api.check(settings)
    out_console.print(config.dump_config(settings), markup=False, highlight=False, end="")
    c = settings.curriculum
    lines = [
        f"{len(problems.train)} training prompts; "
        + ("; ".join(f"{len(p)} in {name}" for name, p in problems.evals.items()) or "no evaluation set"),
        f"{settings.steps} steps of {c.groups} groups x {c.rollouts} rollouts ({c.name}), "
        f"at most {c.groups * c.rollouts * settings.rollout.max_tokens:,} tokens trained a step",
    ]
    if problems.overlap:
        lines.append(f"{problems.overlap} evaluation prompts are also trained on")
    for line in lines:
        out_console.print(f"# {line}", markup=False, highlight=False, soft_wrap=True)


@app.command("eval")
def eval_command(
    model: Annotated[Path, typer.Argument(help="A run, a checkpoint, or a Hugging Face folder.")],
    recipe: Annotated[
        Path | None, typer.Option(help="Where the [[eval]] sets are; default: the run's own recipe.")
    ] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Write eval.json and responses.jsonl into this folder.")] = None,
) -> None:
    """Evaluate a checkpoint or any model on the [[eval]] sets of a recipe."""
    from whet.api import evaluate_model

    metrics = evaluate_model(model, recipe, sets or [], out)
    table = Table("measure", "value")
    for name, value in metrics.items():
        table.add_row(name.removeprefix("eval/"), f"{value:.4g}")
    out_console.print(table)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is the baseline.")],
    page: Annotated[Path | None, typer.Option(help="Also write a static page with the curves.")] = None,
) -> None:
    """Tokens and seconds to each accuracy level, side by side."""
    from whet.report.compare import compare_table
    from whet.report.page import write_page

    need_runs(runs)
    out_console.print(compare_table(runs))
    if page is not None:
        write_page(page, runs, title="whet compare", note="")
        out_console.print(f"Page: {page}", markup=False, highlight=False)


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    verdict: Annotated[str | None, typer.Option(help="right, wrong or unjudged.")] = None,
    phase: Annotated[str | None, typer.Option(help="train, eval, screen, ...")] = None,
    limit: Annotated[int, typer.Option(help="At most so many rollouts.")] = 20,
) -> None:
    """What the model wrote, in the terminal."""
    from whet.report.view import view_run

    need_runs([run])
    view_run(run, step=step, verdict=verdict, phase=phase, limit=limit, console=out_console)


def need_runs(runs: list[Path]) -> None:
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise WhetError(f"There is no run in {run}: it holds no metrics.jsonl.")


@app.command()
def doctor(model: Annotated[str | None, typer.Argument(help="A model to check.")] = None) -> None:
    """What this machine has, and whether whet can train the model on it."""
    from whet.doctor import examine

    table = Table("what", "found", "verdict")
    healthy = True
    for what, found, fine in examine(model):
        healthy &= fine
        table.add_row(what, Text(found), Text("ok") if fine else Text("missing", style="red"))
    out_console.print(table)
    raise typer.Exit(0 if healthy else 1)


@app.command("list")
def list_command() -> None:
    """Tasks, curricula and estimators, and every setting with its default."""
    from whet.curriculum.build import CURRICULA
    from whet.tasks.build import TASKS

    table = Table("kind", "names")
    table.add_row("tasks", ", ".join(TASKS))
    table.add_row("curricula", ", ".join(CURRICULA))
    estimators = config.Learn.model_fields["estimator"].annotation
    table.add_row("estimators", ", ".join(estimators.__args__ if estimators else ()))
    out_console.print(table)
    settings = Table("setting", "default", "meaning")
    for name, default, meaning in config.describe():
        settings.add_row(name, Text(default), Text(meaning))
    out_console.print(settings)


@bench_app.command("rollout")
def bench_rollout(
    out: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = Path("benchmarks/results"),
    repeats: Annotated[int, typer.Option(help="Interleaved repeats.")] = 3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """The engine against transformers' generate, on this machine."""
    from whet.bench.rollout import rollout_bench

    show_bench(rollout_bench(out, repeats=repeats, seed=seed))


def show_bench(result: dict[str, Any]) -> None:
    out_console.print(json.dumps(result, indent=2), markup=False, highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demo's runs and page.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the base and of all arms.")] = 0,
) -> None:
    """Train a small reasoner on a CPU, three ways from the same start, and compare."""
    from whet.demo import run_demo

    run_demo(out, seed, out_console)
