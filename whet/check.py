"""Everything that can be wrong with a recipe and its data, found before any weight is loaded.

`check` reads the data, looks at the model folder, tokenises every prompt, and fills in what the recipe left to be
derived. `api.py` and `measure.py` call it first; `dry_run` is what `whet train --dry-run` prints of it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from whet import config
from whet.curriculum.build import build_curriculum, check_curriculum, notes_of, stages_of
from whet.curriculum.mixture import portions_of
from whet.errors import WhetError
from whet.estimate import Dims, Workload, budget_lines, rollouts_asked, stage_steps
from whet.problems import JudgeFunction, Problems, load_problems
from whet.tasks import golds
from whet.tasks.text import NAMES, VARIABLE
from whet.text import Codec
from whet.types import Prompt, Sampling

SHOWN = 600
"""Characters of the first prompt that a dry run shows."""
TINY = 10_000_000
"""Parameters; a model up to this size bears the learning rate of adapters."""

ProblemsT = TypeVar("ProblemsT", bound=config.Problems)


@dataclass(frozen=True, kw_only=True)
class Checked:
    settings: config.Config
    """With rollout.context, learn.lr and data_folder filled in, and paths that hold from any folder."""
    problems: Problems
    codec: Codec
    notes: tuple[str, ...]
    """Sentences the user should hear once."""


def check(settings: config.Config, reward: JudgeFunction | None = None, *, training: bool = True) -> Checked:
    """`reward` is a Python callable that judges every prompt. To evaluate takes no training data."""
    if training and not settings.data:
        raise WhetError("There is nothing to train on: name the problems by [[data]] or --data.")
    for curriculum in _curricula(settings):
        check_curriculum(curriculum.name)
    settings = _anchored(settings)
    problems = load_problems(settings, reward)
    for entry in settings.warm_start:
        problems.solutions(np.random.default_rng(0), 1, entry.options)
    from whet.model.load import check_model, eos_of, load_tokenizer
    from whet.model.lora import is_peft_folder

    network = check_model(settings.model)
    if network is not None and "eagle" in settings.draft.drafters:
        from whet.draft.eagle import refuse_undraftable

        refuse_undraftable(network)
    codec = Codec(load_tokenizer(settings.model, problems.alphabet), eos_of(settings.model), settings.text)
    problems, dropped = _without_long(problems, codec, settings.text.max_prompt)
    notes = [*problems.notes, *check_answers(settings, problems)]
    if dropped:
        limit = settings.text.max_prompt
        notes.append(f"{dropped:,} training problems of more than text.max_prompt = {limit} tokens are left out.")
    if training:  # thresholds, budgets and subsets that cannot be met
        sampling = Sampling(max_tokens=settings.rollout.max_tokens, temperature=settings.rollout.temperature)
        facts = problems.facts()
        build_curriculum(settings.curriculum, facts=facts, sampling=sampling, seed=settings.seed)
        notes += notes_of(settings.curriculum, facts)
    positions = getattr(network.config, "max_position_embeddings", None) if network is not None else None
    context, wanted = _context(settings, problems, codec, positions)
    if context < wanted:
        notes.append(
            f"{settings.model.name} has {context} positions, fewer than the {wanted} of the longest prompt with its "
            "response: such responses are cut there; a lower rollout.max_tokens or text.max_prompt avoids it."
        )
    learn = settings.learn
    if training and not learn.lr:
        adapted = settings.model.lora.rank > 0 or is_peft_folder(Path(settings.model.name).expanduser())
        size = sum(p.numel() for p in network.parameters()) if network is not None and not adapted else 0
        learn = learn.model_copy(update={"lr": default_lr(size)})
        trained = f"all {size / 1e6:,.0f}M weights" if size > TINY else "adapters" if adapted else "a tiny model"
        notes.append(f"learn.lr = {learn.lr:g}, chosen for {trained}.")
    rollout = settings.rollout.model_copy(update={"context": context})
    settings = settings.model_copy(update={"rollout": rollout, "learn": learn})
    return Checked(settings=settings, problems=problems, codec=codec, notes=tuple(notes))


def check_answers(settings: config.Config, problems: Problems) -> list[str]:
    """Sentences on answers that the judge cannot match to themselves; refuses a set where most cannot be."""
    train, until = problems.train, time.monotonic() + golds.SECONDS
    ends = np.cumsum([size for size, _ in problems.shares]).tolist()
    sets: list[tuple[str, str, range, Callable[[int], Prompt]]] = [
        (getattr(task, "origin", ""), task.name, range(end - size, end), train.at)
        for task, (size, _), end in zip(problems.tasks, problems.shares, ends, strict=True)
    ]
    own = {entry.name for entry in settings.eval}  # a slice set aside is part of the training data
    sets += [
        (name, prompts[0].task, range(len(prompts)), prompts.__getitem__)
        for name, prompts in problems.evals.items()
        if name in own and prompts
    ]
    notes = []
    for origin, task_name, rows, prompt_at in sets:
        if task_name not in problems.matched or not rows:
            continue
        found = golds.check_golds(
            problems.matched[task_name],
            rows,
            prompt_at,
            sample=golds.SAMPLE,
            seed=settings.seed,
            seconds=until - time.monotonic(),
            memory_mb=settings.judge.memory_mb,
        )
        said = [f"{origin}: {sentence}" for sentence in found.sentences()]
        if found.mostly_wrong:
            raise WhetError(said[0])
        notes += said
    return notes


def dry_run(checked: Checked, response: float | None = None) -> list[str]:
    """What a run would do, in lines: problems, budget, what the model reads, and what ends a response.

    response: tokens of a mean response, where an earlier run tells; else half of the limit is assumed.
    """
    settings, problems, codec = checked.settings, checked.problems, checked.codec
    r = settings.rollout
    lengths = np.array([n for _, n in codec.lengths(problems.train)])
    low, high = np.percentile(lengths, (50, 99))
    stops = ", ".join(f"{number} {token}" for number, token in codec.stop_tokens()) or "none"
    first = codec.render(problems.train.at(0))
    return [
        f"{len(problems.train)} training prompts; "
        + ("; ".join(f"{len(p)} in {name}" for name, p in problems.evals.items()) or "no evaluation set"),
        *_budget_lines(settings, problems),
        *estimate(checked, float(lengths.mean()), response),
        f"prompts of {low:.0f} tokens (median), {high:.0f} (99%), {lengths.max()} (longest); context {r.context}",
        f"a response ends at: {stops}" + "".join(f", {text!r}" for text in r.stop_strings),
        f"the first prompt as the model reads it: {first[:SHOWN]!r}" + (" ..." if len(first) > SHOWN else ""),
        *checked.notes,
    ]


def _curricula(settings: config.Config) -> list[config.Curriculum]:
    """[curriculum], and what it is for the data entries that want it otherwise."""
    own = [entry.curriculum for entry in settings.data if entry.curriculum]
    return [settings.curriculum, *map(settings.curriculum.override, own)]


def _budget_lines(settings: config.Config, problems: Problems) -> list[str]:
    """What a step costs at most; the portions, where data entries have curricula of their own; the stages of each."""
    portions = portions_of(settings.curriculum, problems.shares, problems.curricula)
    groups, rollouts = settings.curriculum.groups, max(portion.settings.rollouts for portion in portions)
    lines = [
        f"{settings.steps} steps of {groups} groups x {rollouts} rollouts ({' + '.join(p.name for p in portions)}), "
        f"at most {groups * rollouts * settings.rollout.max_tokens:,} tokens trained a step"
    ]
    if len(portions) == 1:
        return lines + _stage_lines(settings, portions[0].settings, f"{groups} x ")
    for portion in portions:
        entries = ", ".join(f"data.{number}" for number in portion.entries)
        prompts = sum(problems.shares[number][0] for number in portion.entries)
        mine = portion.share * groups
        often = f"{mine:.1f} a step" if mine >= 1 else f"one every {1 / mine:.1f} steps"
        lines.append(
            f"portion {portion.name}: {prompts} prompts of {entries}, {portion.share:.1%} of the groups ({often}), "
            f"{portion.settings.rollouts} rollouts each"
        )
        lines += ["  " + line for line in _stage_lines(settings, portion.settings, "")]
    return lines


def estimate(checked: Checked, prompt: float, response: float | None) -> list[str]:
    """Roughly, the tokens and seconds of a step, and the hours of the run."""
    from whet.tools.doctor import machine_of, shape_of

    settings, r = checked.settings, checked.settings.rollout
    _, shape, settings = shape_of(settings)
    size = shape.query // shape.heads
    dims = Dims(
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.inner,
        heads=shape.heads,
        kv_heads=max(1, shape.cached // (2 * shape.layers * size)),
        head_dim=size,
        vocab=shape.vocab,
    )
    machine, name, gpu = machine_of(settings)
    works = _works(settings, checked.problems, prompt, response, graphs=r.graphs and gpu)
    why = "half of the limit" if response is None else "as in that run"
    lines = budget_lines(works, dims, machine, why)
    return lines if machine else [*lines, f"no estimate of the time: whet does not know how fast {name} is"]


def _works(
    settings: config.Config, problems: Problems, prompt: float, response: float | None, *, graphs: bool
) -> list[Workload]:
    """A step of each stage; of several portions, as that of the largest does it."""
    r, learn = settings.rollout, settings.learn
    portions = portions_of(settings.curriculum, problems.shares, problems.curricula)
    c = max(portions, key=lambda portion: portion.share).settings
    stages = stages_of(c, r.max_tokens) or (config.Stage(),)
    works = []
    for stage, steps in zip(stages, stage_steps(settings.steps, [s.steps for s in stages]), strict=True):
        groups, rollouts = stage.groups or c.groups, stage.rollouts or c.rollouts
        limit = stage.max_tokens or r.max_tokens
        again = learn.updates * (stage.minibatches or learn.minibatches) > 1  # scored under the policy before them all
        passes = learn.updates * (4 if learn.checkpoint_activations else 3) + again + (learn.kl_coef > 0)
        generated = groups * rollouts_asked(c.name, rollouts, c.speed.n_init)
        works.append(
            Workload(
                steps=steps,
                prompts=generated / rollouts,
                generated=generated,
                trained=groups * rollouts,
                prompt=prompt,
                response=min(limit, response) if response else limit / 2,
                limit=limit,
                slots=r.slots,
                stream=r.mode == "stream",
                graphs=graphs,
                passes=passes,
            )
        )
    return works


def _stage_lines(settings: config.Config, c: config.Curriculum, groups: str) -> list[str]:
    r = settings.rollout
    return [
        f"stage {number}: {stage.subset} prompts, {f'{stage.groups} x ' if stage.groups else groups}"
        f"{stage.rollouts or c.rollouts} rollouts of at most {stage.max_tokens or r.max_tokens} tokens"
        for number, stage in enumerate(stages_of(c, r.max_tokens), 1)
    ]


def _context(settings: config.Config, problems: Problems, codec: Codec, positions: int | None) -> tuple[int, int]:
    """The recipe's, where every prompt leaves room in it; else just enough for the longest prompt of each kind, or all
    positions that the model has. And what would be enough."""
    limits = {entry.name: entry.max_tokens for entry in settings.eval}
    stages = [stage for c in _curricula(settings) for stage in stages_of(c, settings.rollout.max_tokens)]
    longest = max([settings.rollout.max_tokens, *(stage.max_tokens for stage in stages)])
    kinds: list[tuple[Iterable[Prompt], int]] = [(problems.train, longest)]
    kinds += [(prompts, limits.get(name, 0) or settings.rollout.max_tokens) for name, prompts in problems.evals.items()]
    context = wanted = settings.rollout.context
    if not context:
        wanted = max(n + limit for prompts, limit in kinds for _, n in codec.lengths(prompts))
        context = min(wanted, positions or wanted)
    elif positions and context > positions:
        raise WhetError(
            f"rollout.context = {context} is more than the {positions} positions of {settings.model.name}; "
            "lower it, or leave it out."
        )
    for prompts, _ in kinds:
        codec.check_lengths(prompts, context)
    return context, wanted


def default_lr(parameters: int) -> float:
    """2e-4 for adapters (0) and tiny models; for all weights of a larger one 1e-5 up to 0.1 billion, 1e-6 from 1.5 on.

    In between 10^(-5 - ln(N / 0.1e9) / ln(15)), to two digits. 1e-6 at 1.5B is what DeepScaleR, FastCuRL and SPEED
    take (their recipes in recipes/papers); the other end is ours: SmolLM2-135M learns at 5e-6 (recipes/gsm8k.toml).

    >>> [default_lr(n) for n in (0, 223_000, 50_000_000, 135_000_000, 500_000_000, 1_500_000_000, 7_000_000_000)]
    [0.0002, 0.0002, 1e-05, 7.7e-06, 2.5e-06, 1e-06, 1e-06]
    """
    if parameters <= TINY:
        return 2e-4
    place = min(1.0, max(0.0, math.log(parameters / 0.1e9) / math.log(15)))
    return float(f"{10 ** (-5 - place):.1e}")


def _anchored(settings: config.Config) -> config.Config:
    """Files and folders by their whole paths, so that a run can be resumed from any folder; names stay names."""

    def whole(name: str) -> str:
        path = Path(name).expanduser()
        return str(path.absolute()) if name and name not in NAMES and path.exists() else name

    def entries(problems: Iterable[ProblemsT]) -> tuple[ProblemsT, ...]:
        return tuple(entry.model_copy(update={"path": whole(entry.path)}) for entry in problems)

    folder = settings.data_folder or os.environ.get(VARIABLE, "")  # a resumed run may have another environment
    model = settings.model
    if model.name != "tiny":
        model = model.model_copy(update={"name": whole(model.name)})
    update = {
        "model": model,
        "data": entries(settings.data),
        "eval": entries(settings.eval),
        "data_folder": whole(folder),
    }
    return settings.model_copy(update=update)


def _without_long(problems: Problems, codec: Codec, limit: int) -> tuple[Problems, int]:
    if not limit:
        return problems, 0
    keep = np.array([n <= limit for _, n in codec.lengths(problems.train)])
    if not keep.any():
        raise WhetError(f"Every training problem has more than text.max_prompt = {limit} tokens.")
    return problems.keep(keep), int((~keep).sum())
