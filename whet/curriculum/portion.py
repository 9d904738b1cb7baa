"""Portions of the data: which [[data]] entries share a curriculum, and what share of the groups is theirs.

`build.py` makes a curriculum of each portion and a `Mixture` of several; `whet train --dry-run` says what they are.
What an update has only once (groups, tokens, coefficients, resets) is refused here where a portion wants its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet import config
from whet.errors import WhetError

RUN_WIDE = ("groups", "tokens", "reset_every", "reset_plateau")
"""Settings of [curriculum] that an entry cannot have for itself."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    name: str
    """That of its curriculum, with a number where another portion has the same."""
    settings: config.Curriculum
    entries: tuple[int, ...]
    """Numbers of its [[data]] entries."""
    share: float
    """Of the groups of the run."""


def portions_of(
    settings: config.Curriculum, entries: Sequence[tuple[int, float]], own: Sequence[Mapping[str, Any]]
) -> list[Portion]:
    """`entries`: (prompts, weight) of each, `own`: what it wants other than [curriculum]. Equal wishes, one portion.

    Its share of the groups is that of its prompts, each counted by its weight: a weight means the same with a
    curriculum of its own and without.

    >>> portions = portions_of(config.Curriculum(), [(60, 1.0), (10, 2.0), (20, 1.0)], [{}, {"name": "dapo"}, {}])
    >>> [(p.name, p.entries, p.share) for p in portions]
    [('uniform', (0, 2), 0.8), ('dapo', (1,), 0.2)]
    """
    wishes: list[tuple[config.Curriculum, list[int]]] = []
    for number, ours in enumerate(own):
        wanted = settings.but(ours)
        for name in RUN_WIDE:
            if getattr(wanted, name) != getattr(settings, name):
                raise WhetError(f"data.{number}.curriculum.{name} is of the whole run; set it in [curriculum].")
        if not entries[number][0] and ours:
            raise WhetError(f"data.{number} has a curriculum of its own, but none of its prompts is left to train on.")
        same = next((numbers for other, numbers in wishes if other == wanted), None)
        if same is not None:
            same.append(number)
        elif entries[number][0]:
            wishes.append((wanted, [number]))
    if len(wishes) <= 1:
        wanted = wishes[0][0] if wishes else settings
        return [Portion(name=wanted.name, settings=wanted, entries=tuple(range(len(entries))), share=1.0)]
    total = sum(size * weight for size, weight in entries)
    seen: Counter[str] = Counter()
    portions = []
    for wanted, numbers in wishes:
        refuse_apart(wanted, numbers[0])
        seen[wanted.name] += 1
        name = wanted.name + (f"_{seen[wanted.name]}" if seen[wanted.name] > 1 else "")
        share = sum(entries[number][0] * entries[number][1] for number in numbers) / total
        portions.append(Portion(name=name, settings=patient(wanted, share), entries=tuple(numbers), share=share))
    return portions


def patient(settings: config.Curriculum, share: float) -> config.Curriculum:
    """With a patience that lets a portion ask as many groups in vain as the whole batch could.

    One that is due a group or two would otherwise starve by mere chance.

    >>> patient(config.Curriculum(groups=16, patience=20), 1 / 8).patience
    160
    """
    patience = min(settings.patience * settings.groups, math.ceil(settings.patience / share))
    return settings.model_copy(update={"patience": patience})


def refuse_apart(settings: config.Curriculum, entry: int) -> None:
    """What portions cannot each have for themselves, since it is of a whole update."""
    where = f"Where [[data]] entries have curricula of their own (here data.{entry})"
    if settings.tokens:
        raise WhetError(f"{where}, an update is shared out by groups; leave out curriculum.tokens.")
    for number, stage in enumerate(settings.stages):
        for name, unset in (("groups", 0), ("minibatches", 0), ("kl_coef", None), ("entropy_coef", None)):
            if getattr(stage, name) != unset:
                raise WhetError(f"{where}, a stage cannot change the whole update; leave out stages.{number}.{name}.")
