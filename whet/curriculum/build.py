"""Curricula by name: which gate, over which source, in stages or not. A new one is a new file and one line in a table.

A gate says which groups train, a source which prompts come next; `curriculum.source` puts another source under a gate,
`curriculum.stages` wraps whatever comes of it. `all` is every method at once: stages around SPEED, whose prompts CurES
draws from the set that ScalingRL keeps moving, and whose continuations are divided by CurES's rule.
"""

from __future__ import annotations

import difflib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from whet import config
from whet.curriculum.base import Curriculum, Hearing, Progress, Source
from whet.curriculum.cures import Cures, GradientSigmas, Scored, Sigmas, neyman_continuations, rate_sigmas
from whet.curriculum.gate import Dapo, Gate, TokenBudget, Uniform
from whet.curriculum.ids import Ids, Part
from whet.curriculum.mixture import Member, Mixture, portions_of
from whet.curriculum.rho import CuresSource
from whet.curriculum.scalingrl import ScalingRLSource, numbers
from whet.curriculum.source import KimiSource, Unsolved, build_source
from whet.curriculum.speed import Speed
from whet.curriculum.stages import Stages, default_stages, stage_sampling, stage_settings
from whet.errors import WhetError
from whet.types import Batch, Clock, Report, Request, Rollout, Sampling

# ---- reset
#
# Resets: reference and optimiser start anew every so many updates, on a plateau (ProRL, arXiv 2505.24864), or with
# each subset of CurES (arXiv 2510.01037), whose subsets are runs of their own from the weights of the one before.
#
# Under a KL term the reference holds the policy back once it has moved; making the policy of today the reference lets
# it go on. Wraps any curriculum and marks a batch now and then; which groups are in it is the inner one's affair. ProRL
# resets by hand when a validation score stalls; the plateau of the smoothed training reward is OURS.


class Subsets(Protocol):
    @property
    def turn(self) -> int:
        """Subsets begun, less one."""


class Reset:
    """every: updates between resets. plateau: updates over which a smoothed reward that gains less than 0.01 makes
    one. 0 turns either off. Both count from the last reset. subset: the first batch after each but its first makes
    one, too."""

    def __init__(
        self,
        inner: Curriculum,
        *,
        every: int = 0,
        plateau: int = 0,
        optimizer: bool = True,
        subset: Subsets | None = None,
    ):
        self.inner, self.needs = inner, inner.needs
        self.every, self.plateau, self.optimizer = every, plateau, optimizer
        self.progress = Progress(keep=plateau)
        self.hearing = Hearing()
        self.since = self.resets = 0
        self.due = False
        self.subset, self.turn = subset, 0  # of the last batch

    def plan(self, clock: Clock) -> list[Request]:
        return self.inner.plan(clock)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.hearing.rollouts += rollouts
        self.inner.observe(rollouts)

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(clock)
        if batch is not None:
            self.hearing.emitted(clock)
        if batch is not None and self.subset is not None:
            self.due, self.turn = self.due or self.subset.turn > self.turn, max(self.subset.turn, 0)
        if batch is None or not self.due:
            return batch
        self.due = False
        self.resets += 1
        return replace(batch, reset_reference=True, reset_optimizer=batch.reset_optimizer or self.optimizer)

    def updated(self, clock: Clock, report: Report) -> None:
        self.inner.updated(clock, report)
        self.progress.observe(self.hearing.updated(clock, self.inner.holds()))
        self.progress.update()
        self.since += 1
        if 0 < self.every <= self.since or self.progress.stalled(self.plateau):
            self.due, self.since = True, 0
            self.progress.forget()

    def holds(self) -> set[int]:
        return self.inner.holds()

    def metrics(self) -> dict[str, float]:
        metrics = self.inner.metrics()
        return {**metrics, "curriculum/resets": metrics.get("curriculum/resets", 0.0) + self.resets}

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "progress": self.progress.state_dict(),
            "hearing": self.hearing.state_dict(),
            "since": self.since,
            "resets": self.resets,
            "due": self.due,
            "turn": self.turn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.progress.load_state_dict(state["progress"])
        self.hearing.load_state_dict(state.get("hearing", ()))
        self.since, self.resets, self.due = state["since"], state["resets"], state["due"]
        self.turn = state.get("turn", 0)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a curriculum may know of the prompts, in the order of their ids; texts are none of it."""

    ids: Sequence[str]
    entries: Sequence[tuple[int, float]] = ()
    """(prompts, weight) of each data entry; none means one of weight 1."""
    settings: Sequence[Mapping[str, Any]] = ()
    """What each data entry wants other than [curriculum] says; none means nothing."""
    levels: Sequence[float | None] | np.ndarray = ()
    characters: Sequence[int] | np.ndarray = ()
    tasks: Sequence[str] | np.ndarray = ()

    def indexed(self) -> Facts:
        """With one map of ids and columns as arrays: what is known of a part is then had without a loop."""
        return replace(
            self,
            ids=Ids.of(self.ids),
            levels=numbers(self.levels),
            characters=np.asarray(self.characters, np.int64),
            tasks=np.asarray(self.tasks, object),
        )

    def of_entries(self, numbers: Sequence[int]) -> Facts:
        """Of the prompts of these data entries alone."""
        ends = list(accumulate(size for size, _ in self.entries))
        rows = np.concatenate([np.arange(ends[number] - self.entries[number][0], ends[number]) for number in numbers])
        return self.among(Ids.of(self.ids).some(rows))

    def among(self, ids: Sequence[str]) -> Facts:
        """Of these alone, which are some of them in the same order."""
        if len(ids) == len(self.ids):
            return self
        index = Ids.of(self.ids)
        if not (isinstance(ids, Part) and ids.whole is index):
            ids = Part(index, np.array([index.row(prompt_id) for prompt_id in ids]))
        rows = ids.rows
        ends = np.searchsorted(rows, list(accumulate(size for size, _ in self.entries)))
        sizes = np.diff(ends, prepend=0).tolist()

        def some(column: Sequence[Any] | np.ndarray) -> Sequence[Any] | np.ndarray:
            return np.asarray(column)[rows] if len(column) else column

        return replace(
            self,
            ids=ids,
            entries=[(size, weight) for size, (_, weight) in zip(sizes, self.entries, strict=True)],
            levels=some(self.levels),
            characters=some(self.characters),
            tasks=some(self.tasks),
        )


_NEXT_SEED = 7_368_787
"""Between the portions of a mixture, so that those of one size are not shuffled alike."""

MakeGate = Callable[[config.Curriculum, Source, Sampling, Sigmas | None], Gate]
MakeSource = Callable[[config.Curriculum, Facts, int], Source]


@dataclass(frozen=True)
class CurriculumPlan:
    """What a name stands for."""

    gate: MakeGate
    source: str = "uniform"
    staged: bool = False
    """In default stages, where the recipe names none."""


def common(settings: config.Curriculum, sampling: Sampling) -> dict[str, Any]:
    """The knobs every gate takes."""
    names = ("rollouts", "max_age", "look_ahead", "starvation", "patience")
    return {"sampling": sampling, **{name: getattr(settings, name) for name in names}}


def over_uniform(gate: type[Gate]) -> CurriculumPlan:
    """A gate that takes the common knobs alone, over shuffled epochs."""
    return CurriculumPlan(lambda settings, source, sampling, _: gate(source, **common(settings, sampling)))


def _speed(settings: config.Curriculum, source: Source, sampling: Sampling, sigmas: Sigmas | None) -> Gate:
    least = 1 if settings.speed.use_screening else 2  # what is trained alone needs two to share a baseline
    screened = settings.speed.n_init if settings.speed.use_screening else 0
    allocate = neyman_continuations(sigmas, least, screened) if sigmas is not None else None
    return Speed(source, allocate=allocate, **settings.speed.model_dump(), **common(settings, sampling))


def _cures(settings: config.Curriculum, source: Source, sampling: Sampling, sigmas: Sigmas | None) -> Gate:
    if not isinstance(source, CuresSource):
        raise WhetError(f'The curriculum cures draws its own prompts; it cannot use source = "{settings.source}".')
    own = settings.cures.model_dump(include={"minimum", "probe"})
    return Cures(source, sigmas=sigmas, **own, **common(settings, sampling))


def _sigmas(settings: config.Curriculum, source: Source) -> Sigmas | None:
    """By what rollouts are divided, over a source that knows pass rates."""
    if not isinstance(source, CuresSource):
        return None
    return GradientSigmas(source) if settings.cures.sigma == "gradient" else rate_sigmas(source)


def refuse_weights(facts: Facts, source: str) -> None:
    """A source that chooses by its own lights would pass over the weights of the data without a word."""
    if len({weight for size, weight in facts.entries if size}) > 1:
        raise WhetError(f"The source {source} chooses prompts by their history and knows no data.weight; leave it out.")


def _kimi_source(settings: config.Curriculum, facts: Facts, seed: int) -> KimiSource:
    refuse_weights(facts, "kimi")
    return KimiSource(facts.ids, seed)


def _cures_source(settings: config.Curriculum, facts: Facts, seed: int, pool: Any = None) -> CuresSource:
    own = settings.cures.model_dump(include={"tau", "memory", "prior", "subsets", "subset_steps"})
    return CuresSource(facts.ids, seed, rest=settings.max_age, entries=facts.entries, pool=pool, **own)


def _scalingrl_source(settings: config.Curriculum, facts: Facts, seed: int) -> ScalingRLSource:
    refuse_weights(facts, "scalingrl")
    return ScalingRLSource(facts.ids, seed, levels=facts.levels, **settings.scalingrl.model_dump())


CURRICULA: dict[str, CurriculumPlan] = {
    "uniform": over_uniform(Uniform),
    "dapo": over_uniform(Dapo),
    "speed": CurriculumPlan(_speed),
    "cures": CurriculumPlan(_cures, source="cures"),
    "scalingrl": replace(over_uniform(Uniform), source="scalingrl"),
    "stages": replace(over_uniform(Uniform), staged=True),
    "all": CurriculumPlan(_speed, source="cures over scalingrl", staged=True),
}

SOURCES: Mapping[str, MakeSource] = {
    "uniform": lambda settings, facts, seed: build_source(facts.ids, seed, facts.entries),
    "kimi": _kimi_source,
    "cures": _cures_source,
    "scalingrl": _scalingrl_source,
    "cures over scalingrl": lambda settings, facts, seed: _cures_source(
        settings, facts, seed, pool=_scalingrl_source(settings, facts, seed)
    ),
}


def check_curriculum(name: str) -> None:
    """Refuses an unknown name; cheap, so that it can be asked before any weight is loaded."""
    if name not in CURRICULA:
        near = difflib.get_close_matches(name.lower(), CURRICULA, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(sorted(CURRICULA))}."
        raise WhetError(f'There is no curriculum "{name}"; {hint}')


def build_curriculum(settings: config.Curriculum, *, facts: Facts, sampling: Sampling, seed: int) -> Curriculum:
    """One curriculum, or a mixture where data entries want different ones; with resets, if the recipe wants them."""
    check_curriculum(settings.name)
    portions, facts = portions_of(settings, facts.entries, facts.settings), facts.indexed()
    members = []
    for number, portion in enumerate(portions):
        check_curriculum(portion.settings.name)
        some = facts.of_entries(portion.entries) if len(portions) > 1 else facts
        built = build_one(portion.settings, some, sampling, seed + number * _NEXT_SEED)
        members.append(Member(name=portion.name, share=portion.share, curriculum=built))
    whole = Mixture(members) if len(members) > 1 else members[0].curriculum
    gc.collect(1)  # looks at the columns of a million prompts once: here, and not in the midst of the first update
    if settings.reset_every or settings.reset_plateau:
        return Reset(whole, every=settings.reset_every, plateau=settings.reset_plateau)
    return whole


def notes_of(settings: config.Curriculum, facts: Facts) -> list[str]:
    """What the user should know of a curriculum over these prompts before it begins."""
    facts = facts.indexed()
    for portion in portions_of(settings, facts.entries, facts.settings):
        wanted = portion.settings
        scored = "scalingrl" in (wanted.source or CURRICULA[wanted.name].source)
        scored &= wanted.scalingrl.select not in ("random", "fixed") and wanted.scalingrl.weights[0] > 0
        levels = facts.of_entries(portion.entries).levels if facts.entries else facts.levels
        if scored and not np.isfinite(numbers(levels)).any():
            return [
                "No training prompt has a number as its level, so ScalingRL leaves difficulty out of its score; add a "
                "level column to the data to weigh it."
            ]
    return []


def build_one(settings: config.Curriculum, facts: Facts, sampling: Sampling, seed: int) -> Curriculum:
    plan = CURRICULA[settings.name]
    latest: Any = None  # source, of the stage before

    def make(settings: config.Curriculum, facts: Facts, sampling: Sampling, first: int) -> Curriculum:
        nonlocal latest
        source = SOURCES[settings.source or plan.source](settings, facts, seed + first)  # each stage its own order
        if isinstance(source, CuresSource | ScalingRLSource) and latest is not None:
            source.inherit(latest)
        latest = source
        sigmas = _sigmas(settings, source)
        gate = plan.gate(settings, unsolved(settings, source, len(facts.ids)), sampling, sigmas)
        gate.book.next_id = first
        built: Curriculum = TokenBudget(gate, tokens=settings.tokens) if settings.tokens else gate
        if isinstance(source, CuresSource):
            source.held = gate.prompts_held
            built = Reset(built, subset=source) if source.subsets > 1 else built
        divides = isinstance(gate, Cures | Speed)  # no other gate asks for sigmas
        return Scored(built, sigmas) if divides and isinstance(sigmas, GradientSigmas) else built

    def make_stage(stage: config.Stage, ids: Sequence[str], first: int) -> Curriculum:
        return make(stage_settings(stage, settings), facts.among(ids), stage_sampling(stage, sampling), first)

    built: Curriculum
    if stages := stages_of(settings, sampling.max_tokens):
        built = Stages(
            stages,
            make_stage,
            ids=facts.ids,
            characters=facts.characters,
            tasks=facts.tasks,
            max_tokens=sampling.max_tokens,
        )
    else:
        built = make(settings, facts, sampling, 0)
    if isinstance(latest, CuresSource | ScalingRLSource):
        latest.prepare()
    return built


def unsolved(settings: config.Curriculum, source: Source, prompts: int) -> Source:
    """The source without what is solved, if the recipe wants that."""
    if not settings.solved:
        return source
    if isinstance(source, CuresSource):
        raise WhetError("curriculum.solved has no use with cures, which draws solved prompts seldom by itself.")
    return Unsolved(source, prompts=prompts, solved=settings.solved)


def stages_of(settings: config.Curriculum, max_tokens: int) -> tuple[config.Stage, ...]:
    """Those of the recipe, else the default ones of a curriculum that has stages."""
    if settings.stages or not CURRICULA[settings.name].staged:
        return settings.stages
    return default_stages(max_tokens)
