"""The commands of `whet`. Each imports torch only if it needs it; a WhetError is one sentence and exit code 2."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from whet import __version__, config
from whet.errors import Stopped, WhetError
from whet.recipe import describe, dump_config, load_config, recipes
from whet.terminal import DataFolder, Sets, counting, folder_set, out_console, say, show
from whet.text import printable
from whet.tools.bench import bench_app

# Packages that the extra "train" installs.
TRAIN = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub")
Recipe = (
    typer.Argument(  # a shell offers the names of recipes, and files where there is no such name
        help="A TOML recipe, or its name in whet list.",
        autocompletion=lambda incomplete: [
            name for name in recipes() if name.startswith(incomplete)
        ],
    )
)
DataName = Annotated[
    str, typer.Argument(help="A file, a short name (gsm8k), or a name for datasets.")
]
ModelName = Annotated[
    str, typer.Argument(help="A run, a checkpoint, a Hugging Face or peft folder, or a hub name.")
]
CURRICULUM_HELP = (
    "uniform, dapo, speed, cures, scalingrl, stages, all, or your own as module:Class."
)
PHASE_HELP = "Show only rollouts of this phase: train, probe, screen, continue or eval."
Results = Annotated[
    Path | None, typer.Option(help="Folder for the results; default runs/COMMAND-DATE-TIME.")
]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
data_app = typer.Typer(
    no_args_is_help=True, help="Look at problem sets, and prepare them for training."
)
curriculum_app = typer.Typer(no_args_is_help=True, help="Curricula for trainers other than whet's.")
app.add_typer(bench_app, name="bench")
app.add_typer(curriculum_app, name="curriculum")
app.add_typer(data_app, name="data")


def print_table(columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    out_console.print(table)


@data_app.command("look")
def data_look(
    path: DataName,
    split: Annotated[
        str, typer.Option(help="Split of a named data set: train, test, ...")
    ] = "train",
    subset: Annotated[str, typer.Option(help="Configuration of a datasets name.")] = "",
    data_folder: DataFolder = None,
) -> None:
    """Show how whet reads a problem set.

    That is its columns, repeats, levels and answers, and the first problem.
    """
    from whet.tasks.answer_check import describe_problems

    data = config.Data(path=path, split=split, subset=subset)
    print_table(("what", "found"), describe_problems(data, str(data_folder or "")))


@data_app.command("prepare")
def data_prepare(
    path: DataName,
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.")],
    against: Annotated[
        list[str] | None, typer.Option(help="Leave out the problems of this evaluation set.")
    ] = None,
    pass_rates: Annotated[
        Path | None,
        typer.Option(
            help="responses.jsonl of a probe: leave out problems that are never or always right."
        ),
    ] = None,
    size: Annotated[
        int, typer.Option(min=0, help="Draw this many, evenly over the levels; 0 keeps all.")
    ] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    data_folder: DataFolder = None,
) -> None:
    """Write the problems that are worth training on.

    Repeats, broken answers, evaluation problems and hopeless problems are left out.
    """
    from whet.tools.prepare import prepare_file

    data = config.Data(path=path)
    folder = str(data_folder or "")
    lines = prepare_file(
        data, out, folder=folder, against=against or (), pass_rates=pass_rates, size=size, seed=seed
    )
    print_table(("what", "problems"), lines)


@curriculum_app.command("serve")
def curriculum_serve(
    recipe: Annotated[Path, Recipe],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8377,
    host: Annotated[
        str, typer.Option(help="Another address than loopback needs a token.")
    ] = "127.0.0.1",
    token: Annotated[str, typer.Option(envvar="WHET_TOKEN", help="What a trainer must show.")] = "",
    state: Annotated[
        Path | None, typer.Option(help="Folder of the state; default runs/curriculum-RECIPE.")
    ] = None,
    sets: Sets = None,
    data_folder: DataFolder = None,
) -> None:
    """Serve a recipe's curriculum over HTTP until it is stopped.

    Started again, it goes on where it was.
    """
    from whet.adapters.serve import CurriculumServer, open_service

    settings = load_config(recipe, [*folder_set(data_folder), *(sets or [])])
    folder = state or Path("runs") / f"curriculum-{recipe.stem}"
    with (
        closing(open_service(settings, folder)) as service,
        CurriculumServer(service, host, port, token) as server,
    ):
        show(
            f"The curriculum {settings.curriculum.name} over {len(service.prompts):,} prompts is at {server.url}."
        )
        server.serve_forever(poll_interval=0.5)


def main() -> None:
    """Run a command; print an error that the user can repair as one sentence and exit with code 2."""
    try:
        app()
    except (WhetError, ModuleNotFoundError) as error:
        sentence = str(error)
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").split(".")[0]
            if name not in TRAIN:
                raise
            sentence = f'This needs {name}, which is not installed: pip install "whet[train]".'
        say(f"whet: {sentence}", style="red")
        sys.exit(2)
    except KeyboardInterrupt:
        say("whet: stopped.")
        sys.exit(130)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train language models to reason by reinforcement learning, for a fraction of the tokens."""
    if version:
        out_console.print(f"whet {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[Path | None, Recipe] = None,
    model: Annotated[
        str | None, typer.Option(help='A Hugging Face folder, a hub name, or "tiny".')
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A file, a short name (gsm8k), or a name for datasets.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="Your judge as module:function.")] = None,
    curriculum: Annotated[str | None, typer.Option(help=CURRICULUM_HELP)] = None,
    sets: Sets = None,
    data_folder: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; default runs/DATE-TIME.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan only.")
    ] = False,
    all_settings: Annotated[
        bool, typer.Option("--settings", help="With --dry-run: also print every setting.")
    ] = False,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of this machine to train on.")] = 1,
    log: Annotated[
        list[str] | None, typer.Option(help="wandb, trackio, tensorboard or jsonl. Repeatable.")
    ] = None,
) -> None:
    """Train a model by a recipe."""
    from whet import api
    from whet.report import live, loggers

    loggers.check_loggers(log := log or [])

    if resume:
        if out is None:
            raise WhetError("--resume needs the run folder: whet train --out RUN --resume.")
        if not (out / "config.toml").is_file():
            raise WhetError(f"There is no run to resume in {out}: it holds no config.toml.")
        if recipe or model or data or reward or curriculum:
            rest = "leave the other recipe and its flags out; --set changes a setting."
            raise WhetError(f"--resume goes on with the recipe in {out / 'config.toml'}: {rest}")
        settings = load_config(out / "config.toml", [*folder_set(data_folder), *(sets or [])])
    else:
        if recipe is None and not (model or data or reward or curriculum or sets):
            raise WhetError(
                "Give a recipe (whet train chain) or --model and --data; whet demo needs nothing."
            )
        flags = api.flag_sets(model, data, reward, curriculum, out or Path())
        settings = load_config(recipe, [*flags, *folder_set(data_folder), *(sets or [])])
    if all_settings and not dry_run:
        raise WhetError(
            "--settings goes with --dry-run; a run keeps its settings in RUN/config.toml."
        )
    if dry_run:
        print_plan(settings, gpus, out, whole=all_settings)
        return
    folder = out or api.new_folder()
    try:
        with closing(loggers.LoggedProgress(log, folder) if log else live.RunProgress()) as watcher:
            name = str(recipe or "")
            stopped = api.run_recipe(
                settings, folder, resume=resume, watcher=watcher, gpus=gpus, name=name
            )
    except Stopped as error:
        from whet.run import checkpoint_steps

        steps = checkpoint_steps(folder)
        goes_on = f"goes on from step {steps[-1]}" if steps else "begins again"
        say(f"It stopped at once; whet train --out {folder} --resume {goes_on}.")
        raise typer.Exit(128 + error.number) from None
    tell = say if "jsonl" in log else show  # then standard output is for the rows alone
    tell(f"The run is in {folder}: report.html, metrics.jsonl, checkpoints/.")
    tell(
        f"Next: whet view {folder} shows what the model wrote, whet report {folder} --serve its page in a browser."
    )
    if stopped:
        from whet.report.arms import read_run

        say(
            f"It {read_run(folder.name, folder).unfinished}; whet train --out {folder} --resume goes on from there."
        )
        raise typer.Exit(128 + stopped)


def print_plan(settings: config.Config, gpus: int, out: Path | None, *, whole: bool) -> None:
    """Print what a run would do, with `whole` after all its settings; one that does not fit ends with code 2."""
    from whet.processes import check_gpus
    from whet.resolve import check_run
    from whet.run import mean_response

    check_gpus(settings, gpus)
    plan = check_run(settings)
    plan.processes = gpus
    response = mean_response(out) if out else None  # an earlier run has measured its responses
    lines = plan.describe(response)
    if gpus > 1:
        lines.append(f"memory is that of each of the {gpus} GPUs, times are those of one GPU alone")
    if whole:
        out_console.print(dump_config(plan.settings), markup=False, highlight=False, end="")
    mark = "# " if whole else ""  # then the whole output is a recipe with comments
    for line in lines:
        show(mark + printable(line, one_line=True))
    if not all(fine for *_, fine in plan.findings(response)):
        raise typer.Exit(2)


@app.command("eval")
def eval_command(
    model: ModelName,
    data: Annotated[
        list[str] | None, typer.Option(help="A file or name to evaluate on. Repeatable.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe with the [[eval]] sets; default: the run's own.")
    ] = None,
    n: Annotated[int | None, typer.Option(help="Rollouts per prompt (with --data).")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature (with --data); 0 is greedy.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Response limit (with --data).")] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most this many prompts of each set (with --data).")
    ] = None,
    draft: Annotated[
        bool, typer.Option("--draft", help="Repeat with speculation, and compare.")
    ] = False,
    sets: Sets = None,
    data_folder: DataFolder = None,
    out: Results = None,
) -> None:
    """Evaluate a run, a checkpoint or any model.

    The table shows accuracy, pass@k, maj@k and lengths, by level, with 95% intervals.
    """
    from whet.api import new_folder
    from whet.report.compare import draft_table, eval_table
    from whet.tools.measure import eval_entries, evaluate_model

    folder = out or new_folder("eval-")
    entries = eval_entries(
        data or [], n=n, temperature=temperature, max_tokens=max_tokens, limit=limit
    )
    sets = [*folder_set(data_folder), *(sets or [])]
    with counting() as on_progress:
        metrics = evaluate_model(
            model,
            recipe=recipe,
            entries=entries,
            sets=sets,
            draft=draft,
            out=folder,
            on_progress=on_progress,
            say=say,
        )
    out_console.print(eval_table(metrics))
    if draft:
        out_console.print(draft_table(metrics))
    say(f"The responses are in {folder}.")


@app.command()
def probe(
    model: ModelName,
    data: DataName,
    n: Annotated[int, typer.Option(min=2, help="Rollouts per prompt.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts, drawn at random.")] = 200,
    group: Annotated[
        int, typer.Option(min=2, help="Rollouts per group in the training you plan.")
    ] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Response limit.")] = 1024,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="Temperature of the rollouts.")
    ] = 1.0,
    sets: Sets = None,
    data_folder: DataFolder = None,
    out: Results = None,
) -> None:
    """Measure how hard the data is for a model.

    The report shows pass rates, signal and lengths, and which curriculum would save tokens.
    """
    from whet.api import new_folder
    from whet.tools.measure import probe_model
    from whet.tools.probe import probe_view

    folder = out or new_folder("probe-")
    with counting() as on_progress:
        report = probe_model(
            model,
            data,
            n=n,
            prompts=prompts,
            group=group,
            max_tokens=max_tokens,
            temperature=temperature,
            sets=[*folder_set(data_folder), *(sets or [])],
            out=folder,
            on_progress=on_progress,
            say=say,
        )
    probe_view(report, out_console)
    say(f"The responses are in {folder}.")


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(help="A run (its best checkpoint), a checkpoint, or a model folder.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Fold LoRA adapters into the weights.")
    ] = False,
    drafter: Annotated[
        str, typer.Option(help="Engine of OUT/drafter: vllm (default) or sglang.")
    ] = "",
    push: Annotated[
        str, typer.Option(help="Also upload to this hub repository (org/name), private.")
    ] = "",
) -> None:
    """Write a Hugging Face folder, ready to serve or to share.

    It has a model card, and the drafter if there is one.
    """
    from whet.tools.export import export_model

    folder = export_model(source, out, merge=merge, drafter=drafter, push=push)
    show(f"The model is in {folder}.")
    if (folder / "drafter").is_dir():
        show(
            f"Its drafter is in {folder / 'drafter'}, for {drafter or 'vllm'}: an EAGLE drafter of this model."
        )


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is the baseline.")],
    page: Annotated[
        Path | None, typer.Option(help="Also write a static page with the curves.")
    ] = None,
) -> None:
    """Compare runs: tokens and seconds to each accuracy level."""
    from whet.report.compare import compare_table
    from whet.report.page import write_page

    out_console.print(compare_table(runs))
    if page is not None:
        write_page(page, runs, title="whet compare", note="")
        show(f"Page: {page}")


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[
        int | None, typer.Option(help="Show only rollouts of this step; default: the newest first.")
    ] = None,
    verdict: Annotated[
        str | None, typer.Option(help="Show only right, wrong or unjudged rollouts.")
    ] = None,
    phase: Annotated[str | None, typer.Option(help=PHASE_HELP)] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many rollouts.")] = 20,
) -> None:
    """Show in the terminal what the model wrote."""
    from whet.report.view import view_run

    view_run(run, step=step, verdict=verdict, phase=phase, limit=limit, console=out_console)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, also of runs that go on or failed.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="One page for all runs; default RUN/report.html of each.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve one live page for all runs until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --serve; 0 takes a free one.")
    ] = 8378,
    host: Annotated[
        str, typer.Option(help="With --serve; another than loopback gets a token.")
    ] = "127.0.0.1",
) -> None:
    """Write the page of runs so far, or serve it live.

    It shows curves, where the rollouts went, and what the model wrote.
    """
    from whet.report.arms import read_run
    from whet.report.page import write_page

    for run in runs:  # all of them, before one page is written
        if damage := read_run(run.name, run).damage:
            say(f"{run}: {damage}")
    title = ", ".join(run.absolute().name for run in runs[:3]) + ", ..." * (len(runs) > 3)
    if serve:
        from whet.report.data import PageData
        from whet.report.server import PageServer

        if out is not None:
            raise WhetError("--serve writes no file: leave --out out.")
        with PageServer(PageData(runs, title=title), host, port) as server:
            show(f"The page is at {server.url} until you press Ctrl-C.")
            server.serve_forever(poll_interval=0.5)
        return
    for page, of_page in (
        {out: runs}.items() if out else {run / "report.html": [run] for run in runs}.items()
    ):
        write_page(page, of_page, title=title if out else of_page[0].absolute().name)
        show(f"Page: {page}")


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model to check: a folder or a hub name.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Plan the memory of this recipe.")] = None,
    sets: Sets = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, as for a bug report.")
    ] = False,
) -> None:
    """Check this machine, and whether a model can train on it.

    It says how fast and in how much memory, without loading a weight.
    """
    from whet.tools.doctor import examine

    settings = load_config(recipe, sets or []) if recipe or sets else None
    table = Table("what", "found", "verdict")
    findings = examine(model, settings)
    for what, found, fine in findings:
        word = "slow" if found.startswith("slow") else "-" if found.startswith("lacks") else "ok"
        table.add_row(
            Text(what), Text(printable(found)), Text(word) if fine else Text("no", style="red")
        )
    if as_json:
        out_console.print_json(
            data=[{"what": what, "found": found, "fine": fine} for what, found, fine in findings]
        )
    else:
        out_console.print(table)
    raise typer.Exit(0 if all(fine for *_, fine in findings) else 1)


@app.command("list")
def list_command(
    every: Annotated[
        bool, typer.Option("--all", help="Also show the settings that few users need.")
    ] = False,
) -> None:
    """List recipes, tasks, curricula, and settings with defaults."""
    from whet.curriculum.build import CURRICULA
    from whet.tasks.build import REWARDS, TASKS
    from whet.tasks.reading import NAMES

    estimators = config.Learn.model_fields["estimator"].annotation
    kinds: dict[str, Iterable[str]] = {
        "recipes": recipes(),
        "tasks": TASKS,
        "data": NAMES,
        "rewards": REWARDS,
    }
    kinds |= {"curricula": CURRICULA, "estimators": estimators.__args__ if estimators else ()}
    print_table(("kind", "names"), ((kind, ", ".join(names)) for kind, names in kinds.items()))
    settings = describe()
    shown = [row for row in settings if every or row[0] in config.EVERYDAY]
    print_table(("setting", "default", "meaning"), shown)
    if not every:
        say(f"{len(settings) - len(shown)} more settings are for experts: whet list --all.")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demo's runs and page.")] = Path(
        "runs/demo"
    ),
    seed: Annotated[
        int, typer.Option(help="Seed of all arms; the base model is the same for every seed.")
    ] = 0,
) -> None:
    """Train a small reasoner on a CPU, with and without curricula.

    It does so on two mixes of difficulty, and compares the runs.
    """
    from whet.tools.demo import run_demo

    def stop(number: int, _: object) -> None:
        raise Stopped(number)  # the arms must be stopped as well

    signal.signal(signal.SIGTERM, stop)
    try:
        run_demo(out, seed, out_console)
    except Stopped as error:
        say(f"The demo stopped; the runs so far are in {out}.")
        raise typer.Exit(128 + error.number) from None
