"""Curricula by name. A new one is a new file and one line in `CURRICULA`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from whet import config
from whet.curriculum.base import Curriculum, Source
from whet.curriculum.dapo import Dapo
from whet.curriculum.gate import Gate
from whet.curriculum.source import build_source
from whet.curriculum.uniform import Uniform
from whet.errors import WhetError
from whet.types import Sampling

Factory = Callable[[config.Curriculum, Source, Sampling], Curriculum]


def over_uniform(gate: type[Gate]) -> Factory:
    """A gate that takes the common knobs alone, over shuffled epochs."""

    def make(settings: config.Curriculum, source: Source, sampling: Sampling) -> Curriculum:
        return gate(
            source,
            sampling=sampling,
            rollouts=settings.rollouts,
            max_age=settings.max_age,
            look_ahead=settings.look_ahead,
            starvation=settings.starvation,
            patience=settings.patience,
        )

    return make


CURRICULA: dict[str, Factory] = {
    "uniform": over_uniform(Uniform),
    "dapo": over_uniform(Dapo),
}


def check_curriculum(name: str) -> None:
    """Refuses an unknown name; cheap, so that it can be asked before any weight is loaded."""
    if name not in CURRICULA:
        near = difflib.get_close_matches(name.lower(), CURRICULA, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(sorted(CURRICULA))}."
        raise WhetError(f'There is no curriculum "{name}"; {hint}')


def build_curriculum(
    settings: config.Curriculum,
    *,
    ids: Sequence[str],
    sampling: Sampling,
    seed: int,
    entries: Sequence[tuple[int, float]] = (),
) -> Curriculum:
    """`entries`: (prompts, weight) of each data entry, in the order of `ids`; none means one of weight 1."""
    check_curriculum(settings.name)
    return CURRICULA[settings.name](settings, build_source(ids, seed, entries), sampling)
