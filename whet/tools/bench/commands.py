"""The commands of `whet bench`: what is measured on this machine, written as JSON and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from whet.errors import WhetError
from whet.terminal import DataFolder, Sets, folder_set, out_console
from whet.text import printable

bench_app = typer.Typer(no_args_is_help=True, help="Measure whet against its peers on this machine.")

Out = Annotated[Path, typer.Option(help="Folder for the JSON result.")]
RESULTS = Path("benchmarks/results")


@bench_app.command("rollout")
def bench_rollout(
    out: Out = RESULTS,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="135m and 1.5b on a GPU; tiny to try the grid.")] = None,
    cells: Annotated[str, typer.Option(help="Of the grid, with commas between; all if not given.")] = "",
    peers: Annotated[str, typer.Option(help="Of whet, vllm, generate, static, generate_batch; all.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 3,
    seconds: Annotated[float, typer.Option(help="After these, cells that are left are skipped.")] = float("inf"),
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """The engine against its peers: on a GPU a grid of batches and contexts, on a CPU transformers' generate."""
    import torch

    if device not in ("auto", "cuda", "cpu"):
        raise WhetError(f'There is no device "{device}"; there are auto, cuda and cpu.')
    if device == "cuda" and not torch.cuda.is_available():
        raise WhetError("There is no CUDA device here; --device cpu measures the CPU.")
    device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    if device == "cpu" and not shape:
        from whet.tools.bench.rollout import rollout_bench

        result = rollout_bench(out, repeats=repeats, seed=seed)
        out_console.print(json.dumps(result, indent=2), markup=False, highlight=False)
        return
    from whet.tools.bench.peers import PEERS
    from whet.tools.bench.rollout import decode_bench

    result = decode_bench(
        out,
        device=device,
        shapes=shape or ("135m", "1.5b"),
        cells=names(cells),
        peers=names(peers) or tuple(PEERS),
        repeats=repeats,
        seconds=seconds,
        seed=seed,
        on_progress=lambda line: out_console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    show_grid(result)


def names(listed: str) -> list[str]:
    """
    >>> names("b64_p128, tail,")
    ['b64_p128', 'tail']
    """
    return [name.strip() for name in listed.split(",") if name.strip()]


def show_grid(result: Mapping[str, Any]) -> None:
    """Tokens a second of each peer in each cell, and how many times as fast ours is."""
    from whet.tools.bench.rollout import main_rate

    for shape, found in result["shapes"].items():
        peers = list(dict.fromkeys(name for cell in found["cells"].values() for name in cell["peers"]))
        table = Table("cell", *peers, "of attainable", "idle", "GiB", title=f"{shape}, tokens/s (ours / theirs)")
        for name, cell in found["cells"].items():
            ours = cell["peers"].get("whet", {})
            rate = "decode_tokens_per_second" if cell["decode_only"] else "tokens_per_second"
            row = []
            for peer in peers:
                figures = cell["peers"].get(peer)
                if figures is None or "failed" in figures:
                    row.append("" if figures is None else "failed")
                    continue
                ratio = cell["ratios"].get(peer, {}).get(rate)
                times = f" ({ratio['median']:.1f}x)" if ratio else ""
                row.append(f"{main_rate(figures, cell['decode_only']):,.0f}{times}")
            shares = [ours.get("share_of_attainable", {}).get("paper"), ours.get("idle_share"), ours.get("peak_gib")]
            table.add_row(name, *row, *("" if value is None else f"{value:.2f}" for value in shares))
        out_console.print(table)
        if gap := found.get("log_probs"):
            told = (
                f"Log-probs against the plain model: max {gap['max']:.2g}, mean {gap['mean']:.2g}, KL {gap['kl']:.2g}."
            )
            out_console.print(told, markup=False, highlight=False)


@bench_app.command("draft")
def bench_draft(
    model: Annotated[Path | None, typer.Option(help="A model folder, with prompts.jsonl or --prompts.")] = None,
    shape: Annotated[str, typer.Option(help="Instead: random weights of 135m, 1.5b or tiny, lengths given.")] = "",
    prompts: Annotated[Path | None, typer.Option(help='One {"text": ...} or {"question": ...} a line.')] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16: the default on a GPU.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Rollouts, all begun at once.")] = 128,
    siblings: Annotated[int, typer.Option(min=1, help="Rollouts of a prompt.")] = 8,
    cap: Annotated[int, typer.Option(min=2, help="Tokens of a response at most.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 3,
    drafter: Annotated[Path | None, typer.Option(help="A folder with a trained EAGLE drafter.")] = None,
    train: Annotated[int, typer.Option(min=0, help="Or: rounds to train one here, on the other prompts.")] = 0,
    lessons: Annotated[bool, typer.Option(help="Also a copy of the drafter that goes on learning.")] = True,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="That one from random weights.")] = False,
    fixed: Annotated[bool, typer.Option(help="Also every arm on its own, to find the best.")] = True,
    naive: Annotated[bool, typer.Option("--naive", help="Also graph memory, against a graph for each arm.")] = False,
    out: Out = RESULTS,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """A long-tailed batch with ever more speculation, rung by rung, the same tokens in all of them."""
    from draft_bench import draft_bench
    from draft_lessons import CandidateAsked, lessons_for, prepared

    asked = CandidateAsked(
        model=model,
        shape=shape,
        prompts=prompts,
        device=device,
        dtype=dtype,
        rollouts=requests,
        siblings=siblings,
        cap=cap,
        drafter=drafter,
        train=train,
        lessons=lessons,
        from_scratch=from_scratch,
        naive=naive,
        seed=seed,
    )
    loaded, work, head, notes = prepared(asked, out, tell)
    how: dict[str, Any] = {"repeats": repeats, "fixed": fixed, "naive": naive, "seed": seed}
    how["lessons"] = lessons_for(asked, loaded, work, head, tell)
    result = draft_bench(out, loaded, work, head=head, **how, notes=notes, on_progress=tell)
    show_ladder(result)


def tell(line: str) -> None:
    out_console.print(printable(line, one_line=True), markup=False, highlight=False, soft_wrap=True)


def show_ladder(result: Mapping[str, Any]) -> None:
    """Makespan and speed-up of each rung, what its drafts were worth, and the controller against the best arm."""
    table = Table(title=f"{result['work']['requests']} requests, {result['work']['tokens']:,} tokens")
    for name in ("rung", "seconds", "range", "speed", "tokens/s", "accept", "draft", "same"):
        table.add_column(name, no_wrap=True)
    for name, rung in result["rungs"].items():
        span, times, length = rung["makespan"], rung["speed_up"], rung["accept_length"]
        drafting = rung["split"]["draft"]
        table.add_row(
            name,
            f"{span['median']:.3f}",
            f"{span['min']:.3f}-{span['max']:.3f}",
            f"{times['median']:.2f}x",
            f"{rung['tokens_per_second']:,.0f}",
            "" if length is None else f"{length:.2f}",
            "-" if drafting is None else f"{drafting / span['median']:.0%}",
            f"{rung['same_rollouts']:.0%}",
        )
    out_console.print(table)
    found = result["verdict"]
    told = f"{found['controller']}: {found['controller_of_off']:.3f} of OFF's speed"
    if "best_fixed" in found:
        told += f", {found['controller_of_best_fixed']:.3f} of the best arm's ({found['best_fixed']})"
    told += f"; OFF against OFF differs by up to {found['off_against_off']:.1%}."
    told += f" By half as many at once, OFF writes {result['same_in_half_batches']:.0%} of the rollouts alike."
    if plan := naive_plan(result["graphs"]["plan"]):
        told += " " + plan
    tell(told)
    for lesson in result["rungs"].get("training", {}).get("lessons", ()):
        tell(lesson_line(lesson))
    for name, why in result.get("split_missing", {}).items():
        tell(f"{name}: how long its drafts took is not known. {why}")


def lesson_line(lesson: Mapping[str, Any]) -> str:
    """
    >>> lesson_line({"round": 2, "seconds": 0.03, "share": 0.05, "loss": 0.8, "eagle_accept_length": 2.25})
    "Round 2: a lesson of 0.030 s, 5.0% of the round, loss 0.80; EAGLE's accept length after it 2.25."
    """
    loss, length = ("-" if lesson[k] is None else f"{lesson[k]:.2f}" for k in ("loss", "eagle_accept_length"))
    spent = f"{lesson['seconds']:.3f} s, {lesson['share']:.1%} of the round"
    return f"Round {lesson['round']}: a lesson of {spent}, loss {loss}; EAGLE's accept length after it {length}."


@bench_app.command("draft-steps")
def bench_draft_steps(
    recipe: Annotated[Path, typer.Argument(help="What is trained; drafts are EAGLE's alone.")],
    steps: Annotated[int, typer.Option(min=1, help="Updates of each run.")] = 40,
    freeze: Annotated[int, typer.Option(min=0, help="Updates after which the second drafter stops learning.")] = 10,
    depth: Annotated[int, typer.Option(min=1, help="Tokens of a draft.")] = 4,
    sets: Sets = None,
    data_folder: DataFolder = None,
    out: Out = RESULTS,
) -> None:
    """Accept length over RL updates: a drafter that goes on learning, beside one that is frozen."""
    from draft_steps import steps_bench

    from whet.recipe import load_config

    settings = load_config(recipe, [*folder_set(data_folder), *(sets or []), f"steps={steps}"])
    show_steps(steps_bench(settings, freeze=freeze, depth=depth, out=out, on_progress=tell))


def show_steps(result: Mapping[str, Any], lines: int = 12) -> None:
    """Accept length at some of the updates, and the mean of the last quarter."""
    arms = {name: {row["step"]: row for row in rows} for name, rows in result["arms"].items()}
    steps = [step for step, row in arms["trained"].items() if "accept_length" in row]
    table = Table("update", *arms)
    for step in steps[:: max(1, -(-len(steps) // lines))]:
        found = [rows.get(step, {}).get("accept_length") for rows in arms.values()]
        table.add_row(f"{step:.0f}", *("-" if length is None else f"{length:.2f}" for length in found))
    table.add_row("last quarter", *(f"{result['last_quarter'].get(name, 1.0):.2f}" for name in arms))
    out_console.print(table)
    tell(f"Accept length with drafts of {result['depth']}; the lessons of the frozen one end at {result['freeze']}.")


def naive_plan(plan: Mapping[str, int]) -> str:
    """What shared graphs take of what one for each arm would; "" where it was not measured."""
    if not plan.get("bytes_naive"):
        return ""
    ours, naive = (plan[f"bytes{kind}"] + plan[f"driver_bytes{kind}"] for kind in ("", "_naive"))
    of_pool = plan["bytes"] / plan["bytes_naive"]
    return (
        f"Graphs that verify take {plan['bytes'] / 2**20:,.0f} MiB, {of_pool:.2f} of those of the naive plan "
        f"({ours / naive:.2f} with what the driver takes)."
    )


@bench_app.command("train")
def bench_train(
    matrix: Annotated[Path, typer.Argument(help="A TOML matrix: recipe, seeds, start, arms.")],
    runs: Annotated[Path, typer.Option(help="Folder for the runs, one a cell.")] = Path("runs/matrix"),
    out: Out = RESULTS,
    arms: Annotated[str, typer.Option(help="Only these, with commas between.")] = "",
    seeds: Annotated[str, typer.Option(help="Only these, with commas between.")] = "",
    seconds: Annotated[float, typer.Option(help="Begins no cell that would end later.")] = float("inf"),
    beside: Annotated[int, typer.Option(min=1, help="Cells at a time; only one alone tells seconds.")] = 1,
    sets: Sets = None,
    data_folder: DataFolder = None,
    commit: Annotated[str, typer.Option(help="Of the code, where it cannot be found out.")] = "",
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run, and leave.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing: tables and figures of what is there.")
    ] = False,
    docs: Annotated[Path, typer.Option(help="For results.md and figures/, with --report-only.")] = Path("docs"),
    readme: Annotated[Path, typer.Option(help="Filled in, too, where it has the marks.")] = Path("README.md"),
) -> None:
    """Arms and seeds from the same weights, each cell a run; what is done is kept, so it may take several goes."""
    from whet.tools.bench.matrix import read_plan
    from whet.tools.bench.train import CellWork, Places, planned

    def on_progress(line: str) -> None:
        out_console.print(printable(line, one_line=True), markup=False, highlight=False, soft_wrap=True)

    chosen = [*folder_set(data_folder), *(sets or [])]
    whole = read_plan(matrix, chosen, names(arms), numbers(seeds))
    if report_only:
        from whet.tools.bench.document import write_report

        for path in write_report(whole, out, docs, readme):
            on_progress(f"Written: {path}")
        return
    places = Places(plan=whole, runs=runs, out=out)
    lines = planned(places)
    table = Table("cell", "state", "minutes")
    for line in lines:
        table.add_row(line.cell.name, line.state, f"{line.seconds / 60:.1f}")
    left = sum(line.seconds for line in lines if line.state != "done") / 60
    table.add_row("", "to do", f"{left:.1f}" + (f", {beside} at a time" if beside > 1 else ""))
    out_console.print(table)
    if plan or all(line.state == "done" for line in lines):
        return
    from whet.tools.bench.stand import circumstances
    from whet.tools.bench.start import make_start

    about = circumstances() | ({"commit": commit} if commit else {})
    work = CellWork(
        places=places, start=make_start(whole, runs, on_progress), beside=beside, on_progress=on_progress, about=about
    )
    if left := work.run(seconds):
        on_progress(f"{left} cells are left for another time; the same command goes on.")


def numbers(listed: str) -> list[int]:
    """
    >>> numbers("0, 2")
    [0, 2]
    """
    try:
        return [int(one) for one in names(listed)]
    except ValueError:
        raise WhetError(f'Seeds are whole numbers with commas between, got "{listed}".') from None


@bench_app.command("curriculum")
def bench_curriculum(
    runs: Annotated[list[Path] | None, typer.Argument(help="More runs for --like.")] = None,
    like: Annotated[
        list[Path] | None,
        typer.Option(
            help="Finished runs from one start on one data set: fit the toy to the uniform one, foretell all."
        ),
    ] = None,
    out: Out = RESULTS,
    mix: Annotated[
        str | None,
        typer.Option(help="few (the default) or many prompts with signal at the start; with --like, a name."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    budget: Annotated[int, typer.Option(min=1000, help="Rollouts a run.")] = 30_000,
) -> None:
    """Every curriculum on make-believe problems, or real runs beside a toy that is fitted to one of them."""
    from curriculum_bench import MIXES, curriculum_bench, likeness_bench

    if like or runs:
        show_likeness(likeness_bench(out, [*(like or []), *(runs or [])], mix or ""))
        return
    mix = mix or "few"
    if mix not in MIXES:
        raise WhetError(f'There is no mix "{mix}"; there are {", ".join(MIXES)}.')
    result = curriculum_bench(out, mix=mix, seeds=seeds, budget=budget)
    measures = list(next(iter(result["curricula"].values())))
    table = Table("curriculum", *(name.replace("_", " ") for name in measures))
    for name, found in result["curricula"].items():
        cells = [[f"{v:,.4g}" if v is not None else "never" for v in found[measure]] for measure in measures]
        table.add_row(name, *(f"{middle}\n{least} to {most}" for middle, least, most in cells))
    out_console.print(table)


def show_likeness(result: Mapping[str, Any]) -> None:
    """Measured, simulated, and how many times too large the second is, for each quantity and run."""
    fitted = result["fitted"]
    runs = {name: printable(name, one_line=True) for name in result["runs"]}
    table = Table("quantity")
    for name, shown in runs.items():
        table.add_column(Text(f"{shown} (fitted)" if name == fitted else shown))
    for quantity in next(iter(result["runs"].values())):
        cells = [found[quantity] for found in result["runs"].values()]
        table.add_row(quantity.replace("_", " "), *map(likeness_cell, cells))
    out_console.print(table)
    told = f"Measured, then simulated (times the measured). The toy was fitted to {fitted} alone."
    for sentence in (told, *result["where_off"]):
        out_console.print(printable(sentence, one_line=True), markup=False, highlight=False, soft_wrap=True)


def likeness_cell(values: Mapping[str, float | None]) -> str:
    """
    >>> likeness_cell({"measured": 250000.0, "simulated": 200000.0, "off": 0.8})
    '250,000, 200,000 (0.80x)'
    """
    measured, simulated = (
        "never" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        for value in (values["measured"], values["simulated"])
    )
    return f"{measured}, {simulated}" + (f" ({values['off']:.2f}x)" if values["off"] is not None else "")
