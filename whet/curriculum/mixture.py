"""Several curricula side by side, each over prompts of its own: data entries that are mixed in every update.

`build.py` makes a `Mixture` where entries of [[data]] have curriculum settings of their own. A portion is the entries
that share settings; `whet train --dry-run` lists them. Each part gets the calls of a trainer that has only its prompts,
with a clock that wants its share of the groups; a batch is the parts' batches of one step, joined. Group g of part i
of k is group g k + i outside, so an id names one group. What an update has only once (groups, coefficients,
resets) is refused where a portion wants its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whet import config
from whet.curriculum.base import Curriculum, Saved, expect, named, pictures_of, refuse_state
from whet.curriculum.gate import age_metrics
from whet.curriculum.source import furthest_behind
from whet.curriculum.stages import COUNTED, named_in
from whet.errors import Starved, WhetError
from whet.types import Batch, Clock, Report, Request, Rollout

RUN_WIDE = ("groups", "reset_every")  # settings that an entry cannot have for itself
# Metrics whose value for all parts together is the sum over the parts.
SUMMED = (*COUNTED, "border", "late", "ready", "open", "prompts")

# ---- portions


@dataclass(frozen=True, kw_only=True)
class Portion:
    name: str  # that of its curriculum, with a number where another portion has the same
    settings: config.CurriculumSettings
    entries: tuple[int, ...]  # numbers of its [[data]] entries
    share: float  # its part of the groups of the run


def portions_of(
    settings: config.CurriculumSettings, entries: Sequence[tuple[int, float]], own: Sequence[Mapping[str, Any]]
) -> list[Portion]:
    """Join the data entries with equal settings into portions.

    `entries` are (prompts, weight) of each entry, `own` is what it sets other than [curriculum]. The share of a
    portion is that of its prompts, each counted by its weight: a weight means the same with a curriculum of its own
    and without.

    >>> own = [{}, {"name": "dapo"}, {}]
    >>> portions = portions_of(config.CurriculumSettings(), [(60, 1.0), (10, 2.0), (20, 1.0)], own)
    >>> [(p.name, p.entries, p.share) for p in portions]
    [('uniform', (0, 2), 0.8), ('dapo', (1,), 0.2)]
    """
    wishes: list[tuple[config.CurriculumSettings, list[int]]] = []
    for number, ours in enumerate(own):
        wanted = settings.override(ours)
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
        name = wanted.name.rpartition(":")[2]  # a class of the user's own without its module
        seen[name] += 1
        name += f"_{seen[name]}" if seen[name] > 1 else ""
        share = sum(entries[number][0] * entries[number][1] for number in numbers) / total
        # It may request as many groups without result as the whole batch: a share of a group or two would otherwise
        # starve by chance.
        patience = min(wanted.patience * wanted.groups, math.ceil(wanted.patience / share))
        wanted = wanted.model_copy(update={"patience": patience})
        portions.append(Portion(name=name, settings=wanted, entries=tuple(numbers), share=share))
    return portions


def refuse_apart(settings: config.CurriculumSettings, entry: int) -> None:
    """Refuse settings of a whole update, which a portion cannot have for itself."""
    where = f"Where [[data]] entries have curricula of their own (here data.{entry})"
    for number, stage in enumerate(settings.stages):
        for name in named_in(stage, ("groups", "minibatches", "kl_coef", "entropy_coef")):
            raise WhetError(f"{where}, a stage cannot change the whole update; leave out stages.{number}.{name}.")


# ---- the curriculum


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str  # prefix of its metrics
    share: float  # its part of the groups; the shares of all parts sum to 1
    curriculum: Curriculum


def next_groups(shares: Sequence[float], given: Sequence[int], groups: int) -> list[int]:
    """The number of the next `groups` that each part gets, after it got `given` so far.

    Each group goes to the part that is furthest behind its share, so no part is ever a whole group ahead, and a part
    whose share is too small for every update gets a group every so many updates.
    """
    counts = list(given)
    for _ in range(groups):
        counts[furthest_behind(shares, counts)] += 1
    return [count - before for count, before in zip(counts, given, strict=True)]


class Mixture(Saved):
    """Joins the batches of its parts.

    A part that has its groups before the others waits: its batch is emitted in the same step, and it plans nothing
    until then. A part that starves follows its own policy; what it gives less under "partial" is not made up for later,
    since that would starve it more.
    """

    state_names = ("given", "running", "ages", "early", "_wanted")

    def __init__(self, parts: Sequence[Member]):
        self.parts = tuple(parts)
        self.needs = frozenset().union(*(part.curriculum.needs for part in parts))
        self.given = [0] * len(parts)  # groups of each part in all batches so far
        self.running = [0] * len(parts)  # rollouts of each part that are requested and have not come
        self.early: dict[int, Batch] = {}  # by part: batches of this step that wait for the others
        self.ages: list[int] = []  # ages of the groups of the last batch, in versions
        self._wanted: tuple[int, list[int]] = (-1, [])  # for so many groups per update: what each part gets now

    # The protocol

    def plan(self, clock: Clock) -> list[Request]:
        """Give the free capacity to one part after the other, first to the one with the least running for its share. A
        part with nothing running may request one group that does not fit: it queues, so no part is kept out."""
        requests: list[Request] = []
        free = clock.free
        for number in sorted(self._waiting(clock), key=lambda i: (self.running[i] / self.parts[i].share, i)):
            mine = self.parts[number].curriculum.plan(replace(self._clock(number, clock), free=free))
            asked = sum(request.n for request in mine)
            self.running[number] += asked
            free = None if free is None else max(0, free - asked)
            requests += [replace(request, group_id=self._outside(number, request.group_id)) for request in mine]
        return requests

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        mine: list[list[Rollout]] = [[] for _ in self.parts]
        for rollout in rollouts:
            group_id, number = divmod(rollout.group_id, len(self.parts))
            mine[number].append(renumber(rollout, group_id))
        for number, (part, came) in enumerate(zip(self.parts, mine, strict=True)):
            self.running[number] -= len(came)
            if came:
                part.curriculum.observe(came)

    def emit(self, clock: Clock) -> Batch | None:
        for number in self._waiting(clock):
            part = self.parts[number]
            try:
                batch = part.curriculum.emit(self._clock(number, clock))
            except Starved as error:
                raise Starved(f"Of the portion {part.name} of the data: {error}") from None
            if batch is not None:
                groups = ((group, self._outside(number, group.group_id)) for group in batch.groups)
                renumbered = tuple(
                    replace(group, group_id=outside, rollouts=tuple(renumber(r, outside) for r in group.rollouts))
                    for group, outside in groups
                )
                self.early[number] = replace(batch, groups=renumbered)
        if self._waiting(clock):
            return None
        self.given = [count + more for count, more in zip(self.given, self._groups(clock), strict=True)]
        batch = join([self.early[number] for number in sorted(self.early)])
        self.ages = [clock.version - group.oldest_version for group in batch.groups]
        self.early, self._wanted = {}, (-1, [])
        return batch

    def updated(self, clock: Clock, report: Report) -> None:
        """Tell every part, also one that had no group in the update, with the signals of its own rollouts."""
        for number, part in enumerate(self.parts):
            signals = {
                (group_id // len(self.parts), index): values
                for (group_id, index), values in report.signals.items()
                if group_id % len(self.parts) == number
            }
            part.curriculum.updated(self._clock(number, clock), replace(report, signals=signals))

    def holds(self) -> set[int]:
        held = {self._outside(i, g) for i, part in enumerate(self.parts) for g in part.curriculum.holds()}
        return held | {group.group_id for batch in self.early.values() for group in batch.groups}

    def waits(self) -> set[int]:
        return {self._outside(i, g) for i, part in enumerate(self.parts) for g in part.curriculum.waits()}

    def metrics(self) -> dict[str, float]:
        """The metrics of each part under its name, and those of all together under the usual names."""
        each = [
            {key.removeprefix("curriculum/"): value for key, value in part.curriculum.metrics().items()}
            for part in self.parts
        ]
        metrics = totals(each) | age_metrics(self.ages)
        for part, given, mine in zip(self.parts, self.given, each, strict=True):
            metrics |= {f"{part.name}/{key}": value for key, value in mine.items()}
            metrics[f"{part.name}/given"] = float(given)
        return named(metrics)

    def pictures(self) -> dict[str, Any]:
        """Those that only one part has: histograms of several pools cannot be laid over each other."""
        each = [pictures_of(part.curriculum) for part in self.parts]
        names = Counter(name for own in each for name in own)
        return {name: value for own in each for name, value in own.items() if names[name] == 1}

    def state_dict(self) -> dict[str, Any]:
        parts = [[part.name, part.share] for part in self.parts]
        return {"parts": parts, "inner": [part.curriculum.state_dict() for part in self.parts], **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = [[part.name, part.share] for part in self.parts]
        if (saved := state.get("parts")) != mine:
            was, now = (", ".join(f"{name} {share:.4%}" for name, share in parts or ()) for parts in (saved, mine))
            refuse_state(f"over other portions of data ({was or 'none'}) than those given now ({now})")
        expect(state, "inner")
        for part, inner in zip(self.parts, state["inner"], strict=True):
            part.curriculum.load_state_dict(inner)
        super().load_state_dict(state)

    # Shares and ids

    def _groups(self, clock: Clock) -> list[int]:
        """The groups of each part in this update, the same until the batch is emitted."""
        if self._wanted[0] != clock.groups:
            self._wanted = (clock.groups, next_groups([part.share for part in self.parts], self.given, clock.groups))
        return self._wanted[1]

    def _waiting(self, clock: Clock) -> list[int]:
        """Parts that have groups in this update and have not emitted them."""
        return [number for number, count in enumerate(self._groups(clock)) if count and number not in self.early]

    def _clock(self, number: int, clock: Clock) -> Clock:
        return replace(clock, groups=self._groups(clock)[number])

    def _outside(self, number: int, group_id: int) -> int:
        return group_id * len(self.parts) + number


def renumber(rollout: Rollout, group_id: int) -> Rollout:
    """A copy under another group id and without the trace, which no curriculum reads."""
    return replace(rollout, group_id=group_id, trace=None)


def join(batches: Sequence[Batch]) -> Batch:
    """Join batches into one. A weight that a part gave a group is a share of the part's loss, so it is scaled.
    Coefficients belong to the whole update, so the parts must agree on them (`refuse_apart`)."""
    count = sum(len(batch.groups) for batch in batches)
    groups = [
        group if group.weight is None else replace(group, weight=group.weight * len(batch.groups) / count)
        for batch in batches
        for group in batch.groups
    ]
    wanted = {(batch.kl_coef, batch.entropy_coef, batch.minibatches) for batch in batches}
    assert len(wanted) == 1, "the parts of a mixture want different coefficients"
    return replace(
        batches[0],
        groups=tuple(groups),
        stage=max(batch.stage for batch in batches),
        reset_reference=any(batch.reset_reference for batch in batches),
        reset_optimizer=any(batch.reset_optimizer for batch in batches),
    )


def totals(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all parts together: counters are summed, and shares are averaged by what they are shares of.
    `acceptance` and `signal_share` are recent in each part, and weighted by the groups decided since the start."""
    decided = [sum(part.get(name, 0.0) for name in ("accepted", "rejected_easy", "rejected_hard")) for part in each]
    complete = [part.get("unjudged_groups", 0.0) + count for part, count in zip(each, decided, strict=True)]
    prompts = [part.get("prompts", 0.0) for part in each]
    weighed = {"signal_share": decided, "acceptance": complete, "epoch": prompts}
    total = {name: sum(part.get(name, 0.0) for part in each) for name in SUMMED if any(name in part for part in each)}
    for name, weights in weighed.items():
        if all(name in part for part in each):
            pairs = [(part[name], weight) for part, weight in zip(each, weights, strict=True)]
            total[name] = sum(value * weight for value, weight in pairs) / (sum(weights) or 1.0)
    return total
