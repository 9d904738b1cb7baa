"""Measuring a model without training it: `whet eval` and `whet probe`.

Both need what makes judged rollouts (`parts.build_actor`), and neither an optimiser nor a curriculum. `MODEL` is a run
(its best checkpoint, else its newest), a checkpoint, a Hugging Face or peft folder, or a hub name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet import config, files
from whet.check import check
from whet.errors import WhetError
from whet.problems import Problems, load_problems
from whet.recipe import load_config, read_toml
from whet.run import best_checkpoint
from whet.types import Rollout, Sampling

if TYPE_CHECKING:
    from whet.probe import ProbeReport

Told = Callable[[str, int, int], None]
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
    told: Told = lambda what, done, total: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, float]:
    """Every set of `entries`, else every [[eval]] set of the recipe. Keeps the responses in `out`.

    `draft`: a second time with speculation, on problems that were never trained on (`whet.drafted`).
    """
    checked = check(_settings(model, recipe, entries, sets), training=False)
    for note in checked.notes:
        say(note)
    from whet.drafted import choose_drafters, evaluate_twice, unseen
    from whet.eval import evaluate
    from whet.parts import build_actor, load_drafter

    settings, problems = choose_drafters(checked.settings, wanted=draft), checked.problems
    own = not entries and recipe is None  # the problems are those of the run, trained ones and others
    if draft and (trained := problems if own else _trained_on(model, say)):
        problems = unseen(problems, trained, say)
    say(f"Loading {model}.")
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []

    def seen(judged: Sequence[Rollout]) -> None:
        rows.extend(actor.rollout_rows(judged))

    actor = build_actor(settings, problems)
    try:
        actor.judge.told = say
        for note in actor.notes:
            say(note)
        load_drafter(actor, Path(settings.model.name))
        for eval_set in actor.evals:
            at = partial(told, eval_set.name)
            if draft:
                metrics |= evaluate_twice(eval_set, actor, seen, told=at)
            else:
                metrics |= evaluate(eval_set, actor.engine, actor.judge, seen, told=at, full=True)
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
    told: Told = lambda what, done, total: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> ProbeReport:
    """n rollouts for each of some training prompts, and what they say about training on them."""
    folder, own_recipe = weights_of(model)
    tree = read_toml(own_recipe) if own_recipe is not None else {}
    tree |= {"eval": [], "held_out": {"size": 0}, "warm_start": [], "data": [{"path": data}]}
    limits = [f"rollout.max_tokens={max_tokens}", f"rollout.temperature={temperature}", "rollout.context=0"]
    checked = check(load_config(None, [f"model.name={json.dumps(folder)}", *limits, *sets], base=tree))
    for note in checked.notes:
        say(note)
    say(f"Loading {model}.")
    from whet.parts import build_actor, training_sampling
    from whet.probe import probe_report, run_probe

    table = checked.problems.train
    count = min(prompts, len(table))
    rows = np.random.default_rng((checked.settings.seed, 104729)).permutation(len(table))[:count]
    chosen = [table.at(int(row)) for row in np.sort(rows)]
    actor = build_actor(checked.settings, checked.problems)
    try:
        actor.judge.told = say
        for note in actor.notes:
            say(note)
        sampling: Sampling = training_sampling(checked.settings, actor.codec)
        rollouts: list[Rollout] = run_probe(
            chosen,
            actor.engine,
            actor.judge,
            n=n,
            sampling=sampling,
            told=lambda done, total: told("probe", done, total),
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
