"""Curricula by name: which gate, over which source, in which wrappers. `whet/resolve.py` builds them here.

A built-in curriculum is one line in the table `CURRICULA`; a curriculum of your own is named "module:Class"
(docs/extend.md). `curriculum.source` puts another source under a gate, and `curriculum.stages` wraps the result.
`all` is every method at once: stages around SPEED, whose prompts CurES draws from the set that ScalingRL keeps moving,
and whose continuations are divided by CurES's rule.
"""

from __future__ import annotations

import difflib
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from whet import config
from whet.curriculum.base import Curriculum, Source
from whet.curriculum.cures import (
    Cures,
    GradientSigmas,
    Scored,
    Sigmas,
    neyman_continuations,
    rate_sigmas,
)
from whet.curriculum.gate import Dapo, Gate, Uniform
from whet.curriculum.measured import MeasuredStages
from whet.curriculum.reset import Reset
from whet.curriculum.rho import CuresSource
from whet.curriculum.scalingrl import ScalingRLSource, numbers
from whet.curriculum.source import Ids, build_source
from whet.curriculum.speed import Speed
from whet.curriculum.stages import Stages, stage_sampling, stage_settings
from whet.errors import WhetError, import_own
from whet.types import Sampling


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a curriculum may know about the prompts, in the order of their ids. Texts are not part of it."""

    ids: Sequence[str]
    # (prompts, weight) of each data entry; empty: one of weight 1
    entries: Sequence[tuple[int, float]] = ()
    levels: Sequence[float | None] | np.ndarray = ()
    characters: Sequence[int] | np.ndarray = ()
    tasks: Sequence[str] | np.ndarray = ()

    def indexed(self) -> Facts:
        """The same with one map of ids and with arrays as columns, so that a part is taken without a loop."""
        characters = np.asarray(self.characters, np.int64)
        tasks = np.asarray(self.tasks, object)
        return replace(
            self,
            ids=Ids.of(self.ids),
            levels=numbers(self.levels),
            characters=characters,
            tasks=tasks,
        )

    def among(self, ids: Sequence[str]) -> Facts:
        """The facts of these ids, which are some of the whole in the same order."""
        if len(ids) == len(self.ids):
            return self
        index = Ids.of(self.ids)
        rows = index.rows(ids)
        sizes = np.diff(
            np.searchsorted(rows, list(accumulate(size for size, _ in self.entries))), prepend=0
        ).tolist()
        columns = {"levels": self.levels, "characters": self.characters, "tasks": self.tasks}
        some: dict[str, Any] = {
            name: np.asarray(c)[rows] if len(c) else c for name, c in columns.items()
        }
        entries = [(size, weight) for size, (_, weight) in zip(sizes, self.entries, strict=True)]
        return replace(self, ids=index.some(rows), entries=entries, **some)


# ---- the tables


@dataclass(frozen=True)
class CurriculumPlan:
    """What a name stands for: a gate over a source, or a class that is a whole curriculum of its own (`own`)."""

    gate: Callable[[config.CurriculumSettings, Source, Sampling, Sigmas | None], Gate] | None = None
    source: str = "uniform"
    staged: bool = False  # in measured stages, where the recipe names none
    own: type | None = None


def common(settings: config.CurriculumSettings, sampling: Sampling) -> dict[str, Any]:
    """The settings that every gate takes."""
    names = ("rollouts", "look_ahead", "starvation", "patience")
    given = {name: getattr(settings, name) for name in names}
    return {"sampling": sampling, **given, "max_age": settings.age_bound}


def plain(gate: type[Gate], **plan: Any) -> CurriculumPlan:
    """The plan of a gate that takes only the common settings."""
    return CurriculumPlan(
        lambda settings, source, sampling, _: gate(source, **common(settings, sampling)), **plan
    )


def _speed(
    settings: config.CurriculumSettings, source: Source, sampling: Sampling, sigmas: Sigmas | None
) -> Gate:
    # what is trained alone needs two to share a baseline
    least = 1 if settings.speed.use_screening else 2
    screened = settings.speed.n_init if settings.speed.use_screening else 0
    allocate = neyman_continuations(sigmas, least, screened) if sigmas is not None else None
    estimates = source.estimates() if isinstance(source, CuresSource) else None
    own = settings.speed.model_dump()
    return Speed(
        source, allocate=allocate, estimates=estimates, **own, **common(settings, sampling)
    )


def _cures(
    settings: config.CurriculumSettings, source: Source, sampling: Sampling, sigmas: Sigmas | None
) -> Gate:
    if not isinstance(source, CuresSource):
        raise WhetError(
            f'The curriculum cures draws its own prompts; it cannot use source = "{settings.source}".'
        )
    own = settings.cures.model_dump(include={"minimum", "probe"})
    return Cures(source, sigmas=sigmas, **own, **common(settings, sampling))


def _without_weights(facts: Facts, source: str) -> Facts:
    """Refuse data weights under a source that would silently ignore them."""
    if len({weight for size, weight in facts.entries if size}) > 1:
        raise WhetError(
            f"The source {source} chooses prompts by their history and knows no data.weight; leave it out."
        )
    return facts


def _cures_source(
    settings: config.CurriculumSettings, facts: Facts, seed: int, pool: Any = None
) -> CuresSource:
    about = {
        "rest": settings.age_bound,
        "entries": facts.entries,
        "pool": pool,
        "levels": facts.levels,
    }
    return CuresSource(facts.ids, seed, **about, **settings.cures.model_dump())


def _scalingrl_source(
    settings: config.CurriculumSettings, facts: Facts, seed: int
) -> ScalingRLSource:
    facts = _without_weights(facts, "scalingrl")
    return ScalingRLSource(facts.ids, seed, levels=facts.levels, **settings.scalingrl.model_dump())


CURRICULA: dict[str, CurriculumPlan] = {
    "uniform": plain(Uniform),
    "dapo": plain(Dapo),
    "speed": CurriculumPlan(_speed),
    "cures": CurriculumPlan(_cures, source="cures"),
    "scalingrl": plain(Uniform, source="scalingrl"),
    "stages": plain(Uniform, staged=True),
    "all": CurriculumPlan(_speed, source="cures over scalingrl", staged=True),
}

SOURCES: Mapping[str, Callable[[config.CurriculumSettings, Facts, int], Source]] = {
    "uniform": lambda settings, facts, seed: build_source(facts.ids, seed, facts.entries),
    "cures": _cures_source,
    "scalingrl": _scalingrl_source,
    "cures over scalingrl": lambda settings, facts, seed: _cures_source(
        settings, facts, seed, pool=_scalingrl_source(settings, facts, seed)
    ),
}


# ---- names


def find_plan(name: str) -> CurriculumPlan:
    """The plan of a built-in name, or of a class named "module:Class": a subclass of `Gate`, or a whole curriculum. An
    unknown name is refused. This is cheap, so it is called before any weight is loaded."""
    if ":" in name:
        kind = import_curriculum(name)
        return plain(kind) if issubclass(kind, Gate) else CurriculumPlan(own=kind)
    if name not in CURRICULA:
        near = difflib.get_close_matches(name.lower(), CURRICULA, n=1)
        hint = (
            f'did you mean "{near[0]}"?' if near else f"known are {', '.join(sorted(CURRICULA))}."
        )
        raise WhetError(f'There is no curriculum "{name}"; {hint}')
    return CURRICULA[name]


def import_curriculum(name: str) -> type:
    """Import "module:Class" and refuse what cannot be a curriculum."""
    module_name, _, class_name = name.partition(":")
    where = f'curriculum.name = "{name}"'
    if not module_name or not class_name:
        raise WhetError(f'{where}: a curriculum of your own is written "module:Class".')
    _, kind = import_own(name, where)
    if not isinstance(kind, type):
        raise WhetError(f'{where}: {module_name} has no class "{class_name}".')
    methods = [
        key
        for key, value in vars(Curriculum).items()
        if inspect.isfunction(value) and key[0] != "_"
    ]
    lacking = [key for key in methods if not callable(getattr(kind, key, None))]
    if lacking := [*lacking, *sorted(getattr(kind, "__abstractmethods__", ()))]:
        raise WhetError(
            f"{where}: {class_name} lacks {', '.join(lacking)}; see whet.curriculum.base.Curriculum."
        )
    args = []
    names = ["facts", "settings", "sampling", "seed"]
    if issubclass(kind, Gate):
        args = ["source"]
        names = [*common(config.CurriculumSettings(), Sampling(max_tokens=1))]
    try:
        inspect.signature(kind).bind(*args, **dict.fromkeys(names))
    except TypeError as error:
        raise WhetError(
            f"{where} is built with ({', '.join(args + names)}), which does not fit: {error}."
        ) from None
    return kind


# ---- building


def build_curriculum(
    settings: config.CurriculumSettings, *, facts: Facts, sampling: Sampling, seed: int
) -> Curriculum:
    """Gate and source with their wrappers, once or for every stage."""
    plan = find_plan(settings.name)
    built = _build(plan, settings, facts.indexed(), sampling, seed)
    # this looks at the columns of a million prompts once: here, and not during the first update
    gc.collect(1)
    return built


def _build(
    plan: CurriculumPlan,
    settings: config.CurriculumSettings,
    facts: Facts,
    sampling: Sampling,
    seed: int,
) -> Curriculum:
    latest: Any = None  # the source of the stage before

    def make(
        settings: config.CurriculumSettings, facts: Facts, sampling: Sampling, first: int
    ) -> Curriculum:
        nonlocal latest
        assert plan.gate is not None
        # each stage its own order
        source = SOURCES[settings.source or plan.source](settings, facts, seed + first)
        if isinstance(source, CuresSource | ScalingRLSource) and latest is not None:
            source.inherit(latest)
        latest = source
        # by which rollouts are divided, over a source that estimates pass rates
        sigmas: Sigmas | None = None
        if isinstance(source, CuresSource):
            sigmas = (
                GradientSigmas(source)
                if settings.cures.sigma == "gradient"
                else rate_sigmas(source)
            )
        gate = plan.gate(settings, source, sampling, sigmas)
        gate.book.next_id = first
        built: Curriculum = gate
        if isinstance(source, CuresSource):
            source.held = gate.prompts_held
            built = Reset(built, subset=source) if source.subsets > 1 else built
        divides = isinstance(gate, Cures | Speed)  # no other gate uses sigmas
        return Scored(built, sigmas) if divides and isinstance(sigmas, GradientSigmas) else built

    def make_stage(stage: config.Stage, ids: Sequence[str], first: int) -> Curriculum:
        return make(
            stage_settings(stage, settings),
            facts.among(ids),
            stage_sampling(stage, sampling),
            first,
        )

    if plan.own is not None:
        return _build_own(plan.own, settings, facts, sampling, seed)
    built: Curriculum
    columns: dict[str, Any] = {
        "ids": facts.ids,
        "characters": facts.characters,
        "tasks": facts.tasks,
    }
    if settings.stages:
        built = Stages(settings.stages, make_stage, max_tokens=sampling.max_tokens, **columns)
    elif measures_stages(settings):
        built = MeasuredStages(make_stage, max_tokens=sampling.max_tokens, **columns)
    else:
        built = make(settings, facts, sampling, 0)
    if isinstance(latest, CuresSource | ScalingRLSource):
        latest.prepare()
    return built


def _build_own(
    kind: type, settings: config.CurriculumSettings, facts: Facts, sampling: Sampling, seed: int
) -> Curriculum:
    """A user's class that is a whole curriculum; settings that only a gate can follow are refused."""
    if unused := [name for name in ("source", "stages") if getattr(settings, name)]:
        cure = "leave it out, or derive the class from whet.curriculum.gate.Gate"
        raise WhetError(
            f"curriculum.{unused[0]} needs a gate, and {settings.name} is a whole curriculum; {cure}."
        )
    built: Curriculum = kind(facts=facts, settings=settings, sampling=sampling, seed=seed)
    if not isinstance(getattr(built, "needs", None), frozenset):
        raise WhetError(
            f'curriculum.name = "{settings.name}": the class needs an attribute needs = frozenset().'
        )
    return built


def measures_stages(settings: config.CurriculumSettings) -> bool:
    """Whether a short stage is begun during the run, if measured lengths speak for it."""
    return not settings.stages and find_plan(settings.name).staged


def resets_of(settings: config.CurriculumSettings) -> list[tuple[str, bool]]:
    """The settings that reset the reference during a run, each with whether it resets the optimiser, too. A trainer
    that can do neither refuses them before the first step."""
    found = []
    if (
        settings.cures.subsets > 1
        and (settings.source or find_plan(settings.name).source) == "cures"
    ):
        found.append(("cures.subsets", True))
    later = settings.stages[1:]  # nothing is reset where the first one begins
    return found + [
        ("stages", s.reset_optimizer) for s in later if s.reset_reference or s.reset_optimizer
    ]


def notes_of(settings: config.CurriculumSettings, facts: Facts) -> list[str]:
    """What the user should know about a curriculum over these prompts before it starts."""
    is_scored = "scalingrl" in (settings.source or find_plan(settings.name).source)
    by_difficulty = (
        settings.scalingrl.select not in ("random", "fixed") and settings.scalingrl.weights[0] > 0
    )
    if not is_scored or not by_difficulty or np.isfinite(numbers(facts.levels)).any():
        return []
    return [
        "No training prompt has a number as its level, so ScalingRL leaves difficulty out of its score; add a "
        "level column to the data to weigh it."
    ]
