"""Measuring a model without training it: `whet eval` and `whet probe`.

Both need what makes judged rollouts (`assembly.build_actor`), and neither an optimiser nor a curriculum. `MODEL` is a
run (its best checkpoint, else its newest), a checkpoint, a Hugging Face or peft folder, or a hub name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet import config, files
from whet.assembly import Actor, build_actor, check_run, training_sampling
from whet.draft.export import FOLDER, check_layout, read_drafter
from whet.errors import WhetError
from whet.eval import EvalSet, OnProgress, evaluate
from whet.problems import Problems, key_of, load_problems
from whet.recipe import load_config, read_toml
from whet.rollout.engine import LocalEngine
from whet.run import best_checkpoint
from whet.tasks.base import problem_key
from whet.types import Key, Request, Rollout, Sampling

if TYPE_CHECKING:
    from whet.tools.probe import ProbeReport


# ---- drafted
#
# An evaluation done twice, without speculation and with it: what `whet eval --draft` measures.
#
# `measure.py` asks for the drafters and for problems that were never trained on before any weight is loaded, and then
# evaluates each set through `evaluate_twice`. Noise is keyed, so both passes write the same tokens: in full precision
# on a CPU all of them; in half precision on a GPU a draw may fall to the other side of rounding, and its response then
# goes its own way. How many did is counted. Whoever drafts, and when, is decided in `whet.draft`.


MODEL_FREE = ("ngram", "suffix")
"""Who drafts where the recipe names nobody."""


def choose_drafters(settings: config.Config, *, wanted: bool) -> config.Config:
    """The recipe's drafters, and if it has none and some are wanted, all that need no training.

    eagle drafts only where a trained one lies beside the weights: refused if wanted, else left out.
    """
    folder = Path(settings.model.name) / FOLDER
    trained = folder.is_dir()
    drafters: tuple[str, ...] = settings.draft.drafters
    if wanted:
        _refuse_picky(settings.eval)
        drafters = drafters or (*MODEL_FREE, *(("eagle",) if trained else ()))
        if "eagle" in drafters and not trained:
            raise WhetError(
                f"{settings.model.name} holds no {FOLDER}/, so eagle has nothing to draft with; "
                'name others: --set draft.drafters=["ngram","suffix"].'
            )
    elif not trained:
        drafters = tuple(name for name in drafters if name != "eagle")
    if "eagle" in drafters:
        check_layout(folder)
    draft = settings.draft.model_copy(update={"drafters": drafters, "train": 0.0})
    return settings.model_copy(update={"draft": draft})


def unseen(problems: Problems, trained: Problems, say: Callable[[str], None]) -> Problems:
    """`problems` without those evaluation prompts that `trained` trains on: acceptance there would flatter."""
    keys = set(map(problem_key, trained.train.problems))
    evals = {}
    for name, prompts in problems.evals.items():
        evals[name] = tuple(prompt for prompt in prompts if key_of(prompt) not in keys)
        if not evals[name]:
            raise WhetError(f"All problems of {name} were trained on, so they tell nothing about drafts; take others.")
        if left_out := len(prompts) - len(evals[name]):
            say(f"{left_out:,} of the {len(prompts):,} problems of {name} were trained on and are left out.")
    return replace(problems, evals=evals)


def evaluate_twice(
    eval_set: EvalSet, actor: Actor, seen: Callable[[Sequence[Rollout]], None], *, on_progress: OnProgress | None = None
) -> dict[str, float]:
    """`eval_metrics` of the plain pass, whose responses `seen` gets, and eval/NAME/draft/MEASURE:

    plain_tokens_per_s and tokens_per_s (without and with speculation, by the engine's clock), rollouts, differ (how
    many responses are not the same), drafted_accuracy, accept_length (tokens a row writes in a step that speculates; 1
    where none did), saved (tokens that came without a forward of their own), failures (of drafters), share_ARM
    (of the time in steps that fed no prompts).
    """
    engine = actor.engine
    assert isinstance(engine, LocalEngine)
    wrote: dict[Key, np.ndarray] = {}
    differ = 0

    def remember(judged: Sequence[Rollout]) -> None:
        seen(judged)
        wrote.update((rollout.key, _ids(rollout)) for rollout in judged)

    def compare(judged: Sequence[Rollout]) -> None:
        nonlocal differ
        differ += sum(not np.array_equal(wrote[rollout.key], _ids(rollout)) for rollout in judged)

    with _undrafted(engine):
        _warm_up(eval_set, engine)
        metrics, plain = _timed(eval_set, actor, engine, remember, on_progress)
    again, drafted = _timed(eval_set, actor, engine, compare, on_progress)
    found = {
        "plain_tokens_per_s": _rate(plain),
        "tokens_per_s": _rate(drafted),
        "rollouts": float(len(wrote)),
        "differ": float(differ),
        "drafted_accuracy": again[f"eval/{eval_set.name}/accuracy"],
        **{key.removeprefix("draft/"): value for key, value in drafted.items() if key.startswith("draft/")},
    }
    return metrics | {f"eval/{eval_set.name}/draft/{name}": value for name, value in found.items()}


def _timed(
    eval_set: EvalSet,
    actor: Actor,
    engine: LocalEngine,
    seen: Callable[[Sequence[Rollout]], None],
    on_progress: OnProgress | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """(what was evaluated, what the engine counted meanwhile)."""
    engine.stats()
    metrics = evaluate(eval_set, engine, actor.judge, seen, on_progress=on_progress, full=True)
    return metrics, engine.stats()


@contextmanager
def _undrafted(engine: LocalEngine) -> Iterator[None]:
    """The very same engine, plainly. It still keeps the hidden states that eagle would need: a write a token."""
    held, engine.speculation = engine.speculation, None
    try:
        yield
    finally:
        engine.speculation = held


def _warm_up(eval_set: EvalSet, engine: LocalEngine) -> None:
    """One rollout, so that the first pass does not pay for what both use: kernels, and graphs of plain steps."""
    prompt = eval_set.prompts[0].id
    engine.generate([Request(prompt_id=prompt, group_id=0, n=1, sampling=eval_set.sampling, phase="eval")])


def _rate(stats: dict[str, float]) -> float:
    return stats["rollout/tokens"] / max(stats["rollout/seconds"], 1e-9)


def _ids(rollout: Rollout) -> np.ndarray:
    assert rollout.trace is not None
    return rollout.trace.ids


def _refuse_picky(entries: Sequence[config.Eval]) -> None:
    """A draft is checked against the whole distribution; the engine decodes plainly under top-p."""
    for number, entry in enumerate(entries):
        if entry.top_p < 1:
            raise WhetError(
                f"{entry.name} is sampled with top_p = {entry.top_p:g}, which cannot be drafted for; "
                f"set eval.{number}.top_p=1, or leave --draft."
            )


OnStage = Callable[[str, int, int], None]
"""(of what, how many done, of how many)."""


def eval_entries(data: Sequence[str], **common: Any) -> list[dict[str, Any]]:
    """[[eval]] entries as the flags of `whet eval` describe them; what is None is left to its default."""
    given = {key: value for key, value in common.items() if value is not None}
    if given and not data:
        flag = next(iter(given)).replace("_", "-")
        raise WhetError(f"--{flag} goes with --data; the sets of a recipe have their own (--set eval.0.n=8).")
    return [{"path": path, **given} for path in data]


def evaluate_model(
    model: str,
    *,
    recipe: Path | None = None,
    entries: Sequence[Mapping[str, Any]] = (),
    sets: Iterable[str] = (),
    draft: bool = False,
    out: Path | None = None,
    on_progress: OnStage = lambda what, done, total: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, float]:
    """Every set of `entries`, else every [[eval]] set of the recipe. Keeps the responses in `out`.

    `draft`: a second time with speculation, on problems that were never trained on (`whet.tools.measure`).
    """
    plan = check_run(_settings(model, recipe, entries, sets), training=False)
    for note in plan.notes:
        say(note)
    settings, problems = choose_drafters(plan.settings, wanted=draft), plan.problems
    own = not entries and recipe is None  # the problems are those of the run, trained ones and others
    if draft and (trained := problems if own else _trained_on(model, say)):
        problems = unseen(problems, trained, say)
    say(f"Loading {model}.")
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []

    def seen(judged: Sequence[Rollout]) -> None:
        rows.extend(actor.rollout_rows(judged))

    actor = build_actor(replace(plan, settings=settings, problems=problems))
    try:
        actor.judge.on_message = say
        for note in actor.notes:
            say(note)
        if actor.drafter is not None:
            read_drafter(Path(settings.model.name) / FOLDER, actor.drafter.live)
        for eval_set in actor.evals:
            at = partial(on_progress, eval_set.name)
            if draft:
                metrics |= evaluate_twice(eval_set, actor, seen, on_progress=at)
            else:
                metrics |= evaluate(eval_set, actor.engine, actor.judge, seen, on_progress=at, full=True)
    finally:
        actor.close()
    if out is not None:
        _keep(out, "eval.json", {"model": settings.model.name, **metrics}, rows)
    return metrics


def probe_model(
    model: str,
    data: str,
    *,
    n: int,
    prompts: int,
    group: int,
    max_tokens: int,
    temperature: float,
    sets: Iterable[str] = (),
    out: Path | None = None,
    on_progress: OnStage = lambda what, done, total: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> ProbeReport:
    """n rollouts for each of some training prompts, and what they say about training on them."""
    folder, own_recipe = weights_of(model)
    tree = read_toml(own_recipe) if own_recipe is not None else {}
    tree |= {"eval": [], "held_out": {"size": 0}, "warm_start": [], "data": [{"path": data}]}
    limits = [f"rollout.max_tokens={max_tokens}", f"rollout.temperature={temperature}", "rollout.context=0"]
    plan = check_run(load_config(None, [f"model.name={json.dumps(folder)}", *limits, *sets], base=tree))
    for note in plan.notes:
        say(note)
    say(f"Loading {model}.")
    from whet.tools.probe import probe_report, run_probe

    table = plan.problems.train
    count = min(prompts, len(table))
    rows = np.random.default_rng((plan.settings.seed, 104729)).permutation(len(table))[:count]
    chosen = [table.at(int(row)) for row in np.sort(rows)]
    actor = build_actor(plan)
    try:
        actor.judge.on_message = say
        for note in actor.notes:
            say(note)
        sampling: Sampling = training_sampling(plan.settings, plan.codec)
        rollouts: list[Rollout] = run_probe(
            chosen,
            actor.engine,
            actor.judge,
            n=n,
            sampling=sampling,
            on_progress=lambda done, total: on_progress("probe", done, total),
        )
        kept = actor.rollout_rows(rollouts) if out is not None else []
    finally:
        actor.close()
    report = probe_report(chosen, rollouts, n=n, limit=max_tokens, group=group)
    if out is not None:
        _keep(out, "probe.json", {"model": model, "data": data, **report.to_json()}, kept)
    return report


def weights_of(model: str) -> tuple[str, Path | None]:
    """(folder or hub name with weights, the recipe beside it)."""
    folder = Path(model)
    if (folder / "checkpoints").is_dir() or (folder / "config.toml").is_file():
        best = best_checkpoint(folder)
        if best is None:
            raise WhetError(f"The run {folder} has no whole checkpoint yet.")
        return str(best), folder / "config.toml"
    beside = folder.parent.parent / "config.toml"
    return model, beside if folder.is_dir() and beside.is_file() else None


def _trained_on(model: str, say: Callable[[str], None]) -> Problems | None:
    """The problems of the run that a model comes from, as far as they can still be read."""
    recipe = weights_of(model)[1]
    if recipe is None:
        return None
    try:
        return load_problems(load_config(recipe))
    except WhetError as error:
        say(f"Whether the run was trained on these problems is not known: {error}")
        return None


def _settings(
    model: str, recipe: Path | None, entries: Sequence[Mapping[str, Any]], sets: Iterable[str]
) -> config.Config:
    folder, own_recipe = weights_of(model)
    chosen = recipe or own_recipe
    if chosen is None and not entries:
        raise WhetError(f"{model} is no run, so it brings no recipe; name the problems with --data, or a --recipe.")
    tree = read_toml(chosen) if chosen is not None else {}
    if entries:  # other problems than the recipe's: how long prompts may be is found anew
        tree["eval"] = [dict(entry) for entry in entries]
        tree["held_out"] = {"size": 0}
        tree["rollout"] = {**tree.get("rollout", {}), "context": 0}
        tree["data"] = []
    settings = load_config(None, [f"model.name={json.dumps(folder)}", *sets], base=tree)
    if not settings.eval:
        raise WhetError(f"{chosen} holds no [[eval]] section, so there is nothing to evaluate; name it with --data.")
    return settings


def _keep(out: Path, name: str, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    files.make_folder(out)
    files.write_text(out / name, json.dumps(result, indent=2) + "\n")
    files.write_text(out / "responses.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
