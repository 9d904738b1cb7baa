"""whet from Python: `whet.train(...)`, and what the commands share.

Order matters here: settings, data, judges, curriculum and model folder are all checked before a run
folder is made, and that before any weight is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import config, files
from whet.check import check
from whet.errors import Collapsed, Stopped, WhetError
from whet.problems import JudgeFunction, Problems
from whet.recipe import dump_config, load_config
from whet.run import Run, read_metrics
from whet.types import Prompt

if TYPE_CHECKING:
    from whet.assembly import Parts
    from whet.loop import Watcher


STOPPING = "Finishing this step and saving; Ctrl-C again stops at once."


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `whet.train` gives back."""

    folder: Path
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""

    @property
    def model(self) -> Path:
        """The newest checkpoint: a Hugging Face folder."""
        return max((self.folder / "checkpoints").glob("step_*"))

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
) -> Result:
    """Train, and come back when done.

    model: a Hugging Face folder, a hub name or "tiny". prompts: a file, a short name (gsm8k) or a name for `datasets`;
    or the problems themselves, as (text, answer) pairs, dicts or Prompts. reward: called with (prompt, response) in
    worker processes, gives a score in 0..1; or "module:function".
    settings: dotted keys as of `--set`, e.g. {"learn.lr": 1e-6}. Anything not given comes from the recipe.
    """
    from whet.report.live import RunProgress

    folder = Path(out) if out else new_folder()
    sets = [f"{key}={_toml_value(value)}" for key, value in (settings or {}).items()]
    if resume:
        chosen = load_config(folder / "config.toml", sets)
    else:
        sets = [*flag_sets(model, prompts, reward, curriculum, folder), *sets]
        chosen = load_config(Path(recipe) if recipe else None, sets)
    function = reward if callable(reward) else None
    in_memory = None if prompts is None or isinstance(prompts, str | Path) else list(prompts)
    watcher = RunProgress(quiet=quiet)
    try:
        run_recipe(chosen, folder, resume=resume, reward=function, prompts=in_memory, watcher=watcher)
    finally:
        watcher.close()
    return Result(folder=folder, metrics=read_metrics(folder))


def run_recipe(
    settings: config.Config,
    folder: Path,
    *,
    watcher: Watcher,
    resume: bool = False,
    reward: JudgeFunction | None = None,
    prompts: list[Any] | None = None,
) -> int:
    """One run from its first or last checkpoint to its end; the signal that stopped it before that, else 0."""
    if prompts is not None and not resume:
        write_prompts(Path(settings.data[0].path), prompts)
    checked = check(settings, reward)
    recipe = dump_config(checked.settings)
    collapsed = None
    with ExitStack() as stack:
        run = stack.enter_context(Run.resume(folder) if resume else Run.create(folder, recipe))
        for note in checked.notes:
            watcher.message(note)
        stack.enter_context(run.stop_signals(lambda: watcher.message(STOPPING)))
        parts = start(run, checked.settings, checked.problems, watcher)
        stack.callback(parts.close)
        from whet import loop

        try:
            loop.train(run, parts, watcher)
        except Collapsed as error:
            collapsed = error
    _write_page(folder)  # not before the folder is free: the page says whether the run still goes on
    if collapsed is not None:
        raise collapsed
    return 0 if parts.done else run.signal


def start(run: Run, settings: config.Config, problems: Problems, watcher: Watcher) -> Parts:
    """The parts where the run left off, or warm-started at its beginning."""
    from whet.assembly import build_parts, restore_parts, run_warm_start
    from whet.learn.checkpoint import load_checkpoint

    folder = run.newest_checkpoint(watcher.message)
    parts = build_parts(settings, problems, weights=folder)
    for note in parts.notes:
        watcher.message(note)
    try:
        if folder is not None:
            restore_parts(parts, load_checkpoint(folder))
            watcher.message(f"Resuming after step {parts.tally.step}.")
            if parts.done:
                watcher.message("The run has come to its end; more steps go on from here: --set steps=N.")
        run.cut_back(parts.tally.step if folder is not None else -1)
        if parts.fresh:
            run_warm_start(parts, _tell_warm_start(run, watcher))
    except BaseException:
        parts.close()
        raise
    return parts


def new_folder(kind: str = "") -> Path:
    return Path("runs") / datetime.now().strftime(f"{kind}%Y%m%d-%H%M%S")


def write_prompts(path: Path, prompts: Iterable[Any]) -> None:
    """Problems given from Python become a file of the run, so that the run can be resumed."""
    lines = []
    for item in prompts:
        if isinstance(item, Prompt):
            row = {"id": item.id, "prompt": item.text or list(item.messages), "answer": item.answer, **item.meta}
        elif isinstance(item, Mapping):
            row = dict(item)
        elif isinstance(item, tuple) and len(item) == 2:
            row = {"prompt": item[0], "answer": item[1]}
        else:
            raise WhetError(f"A prompt is a (text, answer) pair, a dict or a Prompt, got {type(item).__name__}.")
        lines.append(json.dumps(row))
    files.write_text(path, "\n".join(lines) + "\n")


def flag_sets(model: Any, prompts: Any, reward: Any, curriculum: str | None, folder: Path) -> list[str]:
    """Function arguments (or command-line flags) as overrides of the recipe."""
    sets = [f"model.name={json.dumps(str(model))}"] if model is not None else []
    if prompts is not None:
        path = prompts if isinstance(prompts, str | Path) else folder / "prompts.jsonl"
        sets += [f"data.0.path={json.dumps(str(path))}"]
    if isinstance(reward, str):
        sets.append(f"data.0.reward={json.dumps(reward)}")
    if curriculum is not None:
        sets.append(f"curriculum.name={json.dumps(curriculum)}")
    return sets


def _toml_value(value: Any) -> str:
    return json.dumps(value)  # JSON scalars and lists are TOML, too


def _tell_warm_start(run: Run, watcher: Watcher) -> Callable[[str, int, int, float], None]:
    def on_progress(name: str, step: int, steps: int, loss: float) -> None:
        if run.stopping:  # nothing is trained yet: a resumed run begins its warm start again
            raise Stopped(run.signal)
        watcher.warm_start(name, step, steps, loss)

    return on_progress


def _write_page(folder: Path) -> None:
    from whet.report.page import write_page

    write_page(folder / "report.html", [folder], title=folder.name, note="")
