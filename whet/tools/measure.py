"""Measures a model without training it: `whet eval` calls `evaluate_model`, `whet probe` calls `probe_model`.

Both need only what makes judged rollouts (`build.build_actor`): neither an optimiser nor a curriculum. MODEL is a
run (its best checkpoint, else its newest), a checkpoint, a Hugging Face or peft folder, or a hub name. Nothing here
imports torch before flags and recipe are checked.

`whet eval --draft` evaluates twice, without speculation and with it. Noise is keyed, so both passes write the same
tokens, except where a draw in half precision falls to the other side of rounding; such responses are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from whet import config, files
from whet.build import Actor, build_actor
from whet.errors import WhetError
from whet.eval import EvalSet, OnProgress, evaluate, judged_slices
from whet.problems import Problems, key_of, load_problems
from whet.recipe import find_recipe, load_config, read_toml
from whet.resolve import RunPlan, check_run, training_sampling
from whet.rollout.vllm_fit import drafter_of
from whet.run import best_weights
from whet.tasks.base import problem_key
from whet.tools.probe import ProbeReport, probe_report, probe_requests
from whet.types import Key, Request, Rollout

MODEL_FREE = ("ngram", "suffix")  # the drafters where the recipe names none

OnStage = Callable[[str, int, int], None]  # (what is measured, how many are done, of how many)
Say = Callable[[str], None]
Seen = Callable[[Sequence[Rollout]], None]


def eval_entries(data: Sequence[str], **common: Any) -> list[dict[str, Any]]:
    """The flags of `whet eval` as [[eval]] entries; a flag that is None keeps its default."""
    given = {key: value for key, value in common.items() if value is not None}
    if given and not data:
        flag = next(iter(given)).replace("_", "-")
        raise WhetError(
            f"--{flag} goes with --data; the sets of a recipe have their own (--set eval.0.n=8)."
        )
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
    say: Say = lambda sentence: None,
) -> dict[str, float]:
    """Evaluates every set of `entries`, else every [[eval]] set of the recipe, and keeps the responses in `out`.

    `draft`: a second time with speculation, on problems that were never trained on.
    """
    folder, own_recipe = weights_of(model)
    source = recipe or own_recipe
    changes = dict[str, Any]()
    # other problems than those of the recipe, so the context is derived from their prompts
    if entries:
        changes = {"eval": [dict(entry) for entry in entries], "held_out": {"size": 0}, "data": []}
        sets = ["rollout.context=0", *sets]
    elif source is None:
        raise WhetError(
            f"{model} is no run, so it brings no recipe; name the problems with --data, or a --recipe."
        )
    settings = _settings(folder, source, changes, sets)
    if not settings.eval:
        raise WhetError(
            f"{source} holds no [[eval]] section, so there is nothing to evaluate; name it with --data."
        )
    plan = check_run(settings, training=False)
    settings = choose_drafters(plan.settings, wanted=draft)
    problems = plan.problems
    if draft:
        # the problems are those of the run, trained ones and others
        own = not entries and recipe is None
        problems = leave_out_trained(problems, None if own else model, say)
    metrics = dict[str, float]()
    rows = list[dict[str, Any]]()

    def seen(judged: Sequence[Rollout]) -> None:
        rows.extend(actor.rollout_rows(judged))

    with _loaded(model, replace(plan, settings=settings, problems=problems), say) as actor:
        if actor.drafter is not None:
            from whet.draft.eagle import read_drafter

            read_drafter(drafter_of(settings), actor.drafter.live)
        for eval_set in actor.evals:
            at = partial(on_progress, eval_set.name)
            if draft:
                metrics |= evaluate_twice(eval_set, actor, seen, on_progress=at)
            else:
                metrics |= evaluate(
                    eval_set, actor.engine, actor.judge, seen, on_progress=at, full=True
                )
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
    say: Say = lambda sentence: None,
) -> ProbeReport:
    """Makes n rollouts for each of some training prompts, and reports what they mean for training on them."""
    folder, own_recipe = weights_of(model)
    changes = {"eval": [], "held_out": {"size": 0}, "warm_start": [], "data": [{"path": data}]}
    limits = [
        f"rollout.max_tokens={max_tokens}",
        f"rollout.temperature={temperature}",
        "rollout.context=0",
    ]
    plan = check_run(_settings(folder, own_recipe, changes, [*limits, *sets]))
    table = plan.problems.train
    rows = np.random.default_rng((plan.settings.seed, 104729)).permutation(len(table))[:prompts]
    chosen = [table.at(int(row)) for row in np.sort(rows)]
    with _loaded(model, plan, say) as actor:
        requests = probe_requests(chosen, n, training_sampling(plan.settings, plan.codec))
        judged = judged_slices(requests, actor.engine, actor.judge, partial(on_progress, "probe"))
        rollouts = [rollout for some in judged for rollout in some]
        kept = actor.rollout_rows(rollouts) if out is not None else []
    report = probe_report(chosen, rollouts, n=n, limit=max_tokens, group=group)
    if out is not None:
        _keep(out, "probe.json", {"model": model, "data": data, **report.to_json()}, kept)
    return report


def weights_of(model: str) -> tuple[str, Path | None]:
    """(folder or hub name with weights, the recipe beside it)."""
    folder = Path(model)
    if (folder / "checkpoints").is_dir() or (folder / "config.toml").is_file():
        return str(best_weights(folder)), folder / "config.toml"
    beside = folder.parent.parent / "config.toml"
    return model, beside if folder.is_dir() and beside.is_file() else None


def _settings(
    folder: str, source: Path | None, changes: Mapping[str, Any], sets: Iterable[str]
) -> config.Config:
    """The recipe with other tables, on the weights of a folder, and with the drafter that lies beside them."""
    tree = {**(read_toml(find_recipe(source)) if source else {}), **changes}
    return load_config(
        None, [f"model.name={json.dumps(folder)}", 'draft.eagle=""', *sets], base=tree
    )


@contextmanager
def _loaded(model: str, plan: RunPlan, say: Say) -> Iterator[Actor]:
    for note in plan.notes:
        say(note)
    say(f"Loading {model}.")
    with closing(build_actor(plan)) as actor:
        actor.judge.on_message = say
        for note in actor.notes:
            say(note)
        yield actor


def _keep(
    out: Path, name: str, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    files.write_text(out / name, json.dumps(result, indent=2) + "\n")
    files.write_text(out / "responses.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


# ---- with speculation


def choose_drafters(settings: config.Config, *, wanted: bool) -> config.Config:
    """The drafters of the recipe; if it has none and some are wanted, all that need no training.

    eagle drafts only if a trained head lies beside the weights: otherwise it is refused if wanted, else left out.
    """
    from whet.draft.eagle import FOLDER, check_layout

    folder = drafter_of(settings)
    trained = folder.is_dir()
    drafters: tuple[str, ...] = settings.draft.drafters
    if wanted:
        if settings.rollout.engine != "native":
            raise WhetError(
                '--draft measures the native engine; add --set rollout.engine="native", or leave --draft.'
            )
        for number, entry in enumerate(settings.eval):
            # a draft is checked against the whole distribution, which top-p cuts
            if entry.top_p < 1:
                raise WhetError(
                    f"{entry.name} is sampled with top_p = {entry.top_p:g}, which cannot be drafted for; "
                    f"set eval.{number}.top_p=1, or leave --draft."
                )
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


def leave_out_trained(problems: Problems, model: str | None, say: Say) -> Problems:
    """`problems` without the evaluation prompts that the model was trained on, where drafts are accepted too easily.

    None: they are the problems of its own run. Those of another run are left out if they can still be read.
    """
    trained = problems
    if model is not None:
        recipe = weights_of(model)[1]
        if recipe is None:
            return problems
        try:
            trained = load_problems(load_config(recipe))
        except WhetError as error:
            say(f"Whether the run was trained on these problems is not known: {error}")
            return problems
    keys = set(map(problem_key, trained.train.problems))
    evals = {}
    for name, prompts in problems.evals.items():
        evals[name] = tuple(prompt for prompt in prompts if key_of(prompt) not in keys)
        if not evals[name]:
            raise WhetError(
                f"All problems of {name} were trained on, so they tell nothing about drafts; take others."
            )
        if left_out := len(prompts) - len(evals[name]):
            say(
                f"{left_out:,} of the {len(prompts):,} problems of {name} were trained on and are left out."
            )
    return replace(problems, evals=evals)


def evaluate_twice(
    eval_set: EvalSet,
    actor: Actor,
    seen: Seen,
    *,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, float]:
    """`eval_metrics` of the plain pass, whose responses go to `seen`, and eval/NAME/draft/MEASURE:

    plain_tokens_per_s and tokens_per_s (without and with speculation, by the engine's clock), rollouts, differ (the
    number of responses that are not the same), drafted_accuracy, accept_length (tokens per row in a step that
    speculates; 1 where none did), saved (tokens that needed no forward of their own), failures (of drafters),
    share_ARM (of the time in steps that fed no prompts).
    """
    from whet.rollout.engine import LocalEngine

    engine = actor.engine
    assert isinstance(engine, LocalEngine)

    def measure(
        show: Seen,
    ) -> tuple[dict[str, float], dict[str, float], float, dict[Key, np.ndarray]]:
        """(what was evaluated, what the engine counted meanwhile, tokens per second, what was written)."""
        wrote: dict[Key, np.ndarray] = {}

        def watch(judged: Sequence[Rollout]) -> None:
            show(judged)
            wrote.update(
                (rollout.key, rollout.trace.ids) for rollout in judged if rollout.trace is not None
            )

        engine.stats()  # resets the counts
        metrics = evaluate(eval_set, engine, actor.judge, watch, on_progress=on_progress, full=True)
        stats = engine.stats()
        return metrics, stats, stats["rollout/tokens"] / max(stats["rollout/seconds"], 1e-9), wrote

    # The same engine without speculation. It still keeps the hidden states that eagle needs: one write per token.
    held = engine.speculation
    engine.speculation = None
    try:
        # One rollout first, so that the plain pass does not pay for what both passes use: kernels and graphs.
        prompt = eval_set.prompts[0].id
        engine.generate(
            [Request(prompt_id=prompt, group_id=0, n=1, sampling=eval_set.sampling, phase="eval")]
        )
        metrics, _, plain_rate, plain = measure(seen)
    finally:
        engine.speculation = held
    again, stats, drafted_rate, drafted = measure(lambda judged: None)
    found = {
        "plain_tokens_per_s": plain_rate,
        "tokens_per_s": drafted_rate,
        "rollouts": float(len(plain)),
        "differ": float(sum(not np.array_equal(ids, drafted[key]) for key, ids in plain.items())),
        **{
            key.removeprefix("draft/"): value
            for key, value in stats.items()
            if key.startswith("draft/")
        },
    }
    # it is left out where most responses have no verdict
    if (key := f"eval/{eval_set.name}/accuracy") in again:
        found["drafted_accuracy"] = again[key]
    return metrics | {f"eval/{eval_set.name}/draft/{name}": value for name, value in found.items()}
