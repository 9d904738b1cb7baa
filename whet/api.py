"""whet from Python: `whet.train(...)`, and `run_recipe`, which the command line and the benchmarks call too.

The order matters: settings, data, judges, curriculum, model folder and memory are all checked (`resolve.check_run`)
before a run folder is made, and the folder is made before any weight is loaded.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import config, files
from whet.errors import Collapsed, Lost, Stopped, WhetError
from whet.problems import JudgeFunction, fingerprint
from whet.recipe import dump_config, load_config
from whet.run import Run, best_checkpoint, checkpoint_steps, read_metrics, refuse_taken
from whet.types import Prompt

if TYPE_CHECKING:
    from whet.build import Parts
    from whet.loop import Watcher
    from whet.processes import Company

PROMPTS = "prompts.jsonl"  # problems that are given from Python
MOST_TRIES = 3  # in a row, without a checkpoint in between


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `whet.train` returns."""

    folder: Path
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl

    @property
    def model(self) -> Path:
        """The best checkpoint by the held-out problems, the newest without any: a Hugging Face folder."""
        best = best_checkpoint(self.folder)
        if best is None:
            raise WhetError(f"The run {self.folder} has no whole checkpoint yet.")
        return best

    def accuracy(self, name: str = "held_out") -> list[float]:
        key = f"eval/{name}/accuracy"
        return [row[key] for row in self.metrics if row.get(key) is not None]


def train(
    model: str | Path | None = None,
    prompts: Iterable[Prompt | Mapping[str, Any] | tuple[str, str]] | str | Path | None = None,
    reward: JudgeFunction | str | None = None,
    curriculum: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    gpus: int = 1,
) -> Result:
    """Train, and return when done. Anything that is not given comes from the recipe.

    - model: a Hugging Face folder, a hub name or "tiny".
    - prompts: a file, a short name (gsm8k) or a name for `datasets`; or the problems themselves, as (text, answer)
      pairs, dicts or Prompts.
    - reward: called with (prompt, response) in worker processes, returns a score in 0..1; or "module:function".
    - settings: dotted keys as for `--set`, e.g. {"learn.lr": 1e-6}.
    - gpus: processes that share the work, with a GPU each.
    """
    from whet.report.live import RunProgress

    folder = Path(out) if out else new_folder()
    sets = [f"{key}={_inline(value)}" for key, value in (settings or {}).items()]
    source = folder / "config.toml" if resume else recipe
    flags = [] if resume else flag_sets(model, prompts, reward, curriculum, folder)
    chosen = load_config(Path(source) if source else None, [*flags, *sets])
    function = reward if callable(reward) else None
    in_memory = None if prompts is None or isinstance(prompts, str | Path) else list(prompts)
    with closing(RunProgress(quiet=quiet)) as watcher:
        given: dict[str, Any] = {
            "reward": function,
            "prompts": in_memory,
            "gpus": gpus,
            "name": str(recipe or ""),
        }
        run_recipe(chosen, folder, resume=resume, watcher=watcher, **given)
    return Result(folder=folder, metrics=read_metrics(folder))


def run_recipe(
    settings: config.Config,
    folder: Path,
    *,
    watcher: Watcher,
    resume: bool = False,
    reward: JudgeFunction | None = None,
    prompts: list[Any] | None = None,
    gpus: int = 1,
    name: str = "",
) -> int:
    """Run a recipe from its first or last checkpoint to its end. Returns the signal that stopped it earlier, else 0.
    name: the recipe's, as the user gave it."""
    if prompts is not None and not resume:
        refuse_taken(folder)
        write_prompts(folder / PROMPTS, prompts)
    from whet.processes import Company, check_gpus

    check_gpus(settings, gpus)
    given: dict[str, Any] = {"watcher": watcher, "reward": reward, "gpus": gpus, "name": name}
    tries = 0
    with closing(Company(watcher.message, folder)) as company:
        while True:
            before = checkpoint_steps(folder)[-1:]
            try:
                return _run_once(settings, folder, company, resume=resume, **given)
            except Lost as lost:  # by all processes that had them: the newest weights
                after = checkpoint_steps(folder)[-1:]
                tries = tries + 1 if after == before else 0
                if tries > MOST_TRIES:  # it would be lost again
                    raise _with_remedy(lost, folder) from lost
                next_try = (
                    "The run goes on from its last checkpoint."
                    if after
                    else "The run begins again."
                )
                watcher.message(f"{lost} {next_try}")
            resume = True


def _with_remedy(lost: Lost, folder: Path) -> WhetError:
    """What ends a run that has lost its newest weights."""
    remedy = " --resume goes on from the last checkpoint." if checkpoint_steps(folder) else ""
    return WhetError(f"{lost}{remedy}")


def _run_once(
    settings: config.Config,
    folder: Path,
    company: Company,
    *,
    watcher: Watcher,
    resume: bool,
    reward: JudgeFunction | None,
    gpus: int,
    name: str,
) -> int:
    from whet.build import build_parts
    from whet.findings import machine_of
    from whet.pictures import machine
    from whet.processes import build_fleet_parts
    from whet.resolve import check_run
    from whet.run_state import refuse_other_prompts

    plan = check_run(settings, reward)
    plan.processes = gpus
    _ = plan.room  # a training that cannot fit is refused here, before there is a folder
    recipe = dump_config(plan.settings)
    collapsed: Collapsed | None = None
    with ExitStack() as stack:
        run = stack.enter_context(Run.resume(folder) if resume else Run.create(folder, recipe))
        device = plan.footprint.device
        prompts = {name: fingerprint(of_set) for name, of_set in plan.problems.evals.items()}
        about = machine(machine_of(device).name if device.type == "cuda" else "", gpus, name)
        run.describe({**about, "prompts": prompts})
        for note in plan.notes:
            watcher.message(note)
        stopping = "Finishing this step and saving; Ctrl-C again stops at once."
        stack.enter_context(run.stop_signals(lambda: watcher.message(stopping)))
        if newest := run.newest_checkpoint(watcher.message):
            refuse_other_prompts(plan, newest)
        several = gpus > 1 or settings.cluster.workers > 0 or settings.learn.shard == "full"
        try:
            parts = (
                build_fleet_parts(plan, gpus, company, newest)
                if several
                else build_parts(plan, weights=newest)
            )
            stack.callback(parts.close)
            if company.workers is not None:
                company.workers.on_short = run.stop
            prepare_parts(parts, run, newest, watcher)
            from whet.loop import Log, train

            # modules and tables: to look through them, every few steps, takes up to half a second
            gc.freeze()
            stack.callback(gc.unfreeze)
            train(parts, Log(run, parts, watcher))
        except Collapsed as error:
            collapsed = error
        except Lost as error:
            if run.stopping:  # it was asked to stop, so it is not begun again
                raise _with_remedy(error, folder) from error
            raise
    from whet.report.page import write_page

    # Not before the folder is free: the page says whether the run still goes on.
    write_page(folder / "report.html", [folder], title=folder.name, note="")
    if collapsed is not None:
        raise collapsed
    if run.why and not parts.done:
        raise WhetError(run.why)
    return 0 if parts.done else run.signal


def prepare_parts(parts: Parts, run: Run, checkpoint: Path | None, watcher: Watcher) -> None:
    """Restore the parts where the run left off, or warm-start them at its beginning."""
    from whet.learn.checkpoint import load_checkpoint
    from whet.loop import warm_start_parts
    from whet.run_state import restore_parts

    for note in parts.notes:
        watcher.message(note)
    if parts.crew is not None:
        parts.crew.on_message = watcher.message

    def on_progress(name: str, step: int, steps: int, loss: float) -> None:
        if run.stopping:  # nothing is trained yet: a resumed run begins its warm start again
            raise Stopped(run.signal)
        watcher.warm_start(name, step, steps, loss)

    if checkpoint is not None:
        restore_parts(parts, load_checkpoint(checkpoint))
        watcher.message(f"Resuming after step {parts.tally.step}.")
        if parts.done:
            watcher.message(
                "The run has come to its end; more steps go on from here: --set steps=N."
            )
    run.cut_back(parts.tally.step if checkpoint is not None else -1)
    if parts.fresh:
        warm_start_parts(parts, on_progress)


def new_folder(kind: str = "") -> Path:
    return Path("runs") / datetime.now().strftime(f"{kind}%Y%m%d-%H%M%S")


def write_prompts(path: Path, prompts: Iterable[Any]) -> None:
    """Problems given from Python become a file of the run, so that the run can be resumed."""
    lines = []
    for item in prompts:
        if isinstance(item, Prompt):
            row = {
                "id": item.id,
                "prompt": item.text or list(item.messages),
                "answer": item.answer,
                **item.meta,
            }
        elif isinstance(item, Mapping):
            row = dict(item)
        elif isinstance(item, tuple) and len(item) == 2:
            row = {"prompt": item[0], "answer": item[1]}
        else:
            raise WhetError(
                f"A prompt is a (text, answer) pair, a dict or a Prompt, got {type(item).__name__}."
            )
        try:
            lines.append(json.dumps(row))
        except TypeError as error:
            raise WhetError(
                f"Prompt {len(lines) + 1} cannot be written to the run's folder: {error}."
            ) from None
    files.write_text(path, "\n".join(lines) + "\n")


def _inline(value: Any) -> str:
    """A value as TOML in one line, which is JSON but for tables.

    >>> _inline([{"steps": 3, "subset": "short"}, {}])
    '[{"steps" = 3, "subset" = "short"}, {}]'
    """
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {_inline(item)}" for key, item in value.items())
            + "}"
        )
    return (
        "[" + ", ".join(map(_inline, value)) + "]"
        if isinstance(value, list | tuple)
        else json.dumps(value)
    )


def flag_sets(
    model: Any, prompts: Any, reward: Any, curriculum: str | None, folder: Path
) -> list[str]:
    """Function arguments (or command-line flags) as overrides of the recipe."""
    path = prompts if prompts is None or isinstance(prompts, str | Path) else folder / PROMPTS
    judge = reward if isinstance(reward, str) else None
    given = {
        "model.name": model,
        "data.0.path": path,
        "data.0.reward": judge,
        "curriculum.name": curriculum,
    }
    return [f"{key}={json.dumps(str(value))}" for key, value in given.items() if value is not None]
