"""An evaluation done twice, without speculation and with it: what `whet eval --draft` measures.

`measure.py` asks for the drafters and for problems that were never trained on before any weight is loaded, and then
evaluates each set through `evaluate_twice`. Noise is keyed, so both passes write the same tokens: in full precision on
a CPU all of them; in half precision on a GPU a draw may fall to the other side of rounding, and its response then goes
its own way. How many did is counted. Whoever drafts, and when, is decided in `whet.draft`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from whet import config
from whet.draft.export import FOLDER, check_layout
from whet.errors import WhetError
from whet.eval import EvalSet, Told, evaluate
from whet.parts import Actor
from whet.problems import Problems, key_of
from whet.rollout.engine import LocalEngine
from whet.tasks.prompts import problem_key
from whet.types import Key, Request, Rollout

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
    eval_set: EvalSet, actor: Actor, seen: Callable[[Sequence[Rollout]], None], *, told: Told | None = None
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
        metrics, plain = _timed(eval_set, actor, engine, remember, told)
    again, drafted = _timed(eval_set, actor, engine, compare, told)
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
    told: Told | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """(what was evaluated, what the engine counted meanwhile)."""
    engine.stats()
    metrics = evaluate(eval_set, engine, actor.judge, seen, told=told, full=True)
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
