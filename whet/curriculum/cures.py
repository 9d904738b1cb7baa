"""CurES (arXiv 2510.01037): rollouts go where they teach most. Prompts come by rho* (`rho.py`), and the rollouts of a
batch are divided among its prompts in proportion to the spread of their gradients (Neyman, `allocation.py`), for which
that of their verdicts stands in unless scores are reported (`sigma.py`).

Every group is trained on, with equal weight: eq. 16 takes the mean over a prompt's n_i rollouts. The gate holds back
whom it has drawn until the engine has room, so that a batch is divided as a whole under stream, too (OURS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from whet.curriculum.allocation import Moments, neyman, sigma_gradient, sigma_of
from whet.curriculum.base import Curriculum
from whet.curriculum.gate import Admission, Gate
from whet.curriculum.groups import Visit
from whet.curriculum.rho import CuresSource
from whet.errors import WhetError
from whet.types import Batch, Clock, Group, Key, Phase, Report, Request, Rollout, Verdict

# ---- sigma
#
# CurES's sigma of a prompt, by which rollouts are divided: from its pass rate alone, or from the gradient (eq. 21).
#
# `cures.py` asks for the sigmas of the prompts of a batch. The gradient form needs the scores of responses, which only
# the learner knows: `Scored` wraps the whole curriculum of a run or stage, asks for them (`needs`), remembers which
# rollouts a batch had, and hands what the learner reports to `moments.py`. It changes no request and no batch by
# itself. Which prompts are drawn is decided by sqrt(p (1 - p)) in either form: eq. 11 bounds what a step can gain by
# it, while eq. 21 is about the noise of the estimate.


SCORE = "score"

Sigmas = Callable[[Sequence[str]], np.ndarray]
"""Prompt ids -> their sigmas. Only their ratios matter."""


def rate_sigmas(source: CuresSource) -> Sigmas:
    """sqrt(p (1 - p)): eq. 21 where all scores have norm one and right and wrong the same mean."""
    return lambda prompt_ids: sigma_of(source.spread_rates(source.posterior.rows(prompt_ids)))


class GradientSigmas:
    """Eq. 21, with the pass rate of the posterior and the moments of the scores reported so far.

    A new subset of the source forgets every prompt's moments, as it forgets their verdicts.
    """

    def __init__(self, source: CuresSource):
        self.source = source
        self.moments = Moments(len(source.ids))
        self.turn = source.turn
        self.moved = 0.0
        """Of the last rollouts divided among several prompts, the share that the pass rate alone would give to
        others."""

    def __call__(self, prompt_ids: Sequence[str]) -> np.ndarray:
        self._follow()
        rows = self.source.posterior.rows(prompt_ids)
        rates = self.source.spread_rates(rows)
        sigmas, plain = sigma_gradient(rates, *self.moments.of(rows).T), sigma_of(rates)
        if len(rows) > 1 and sigmas.any():
            self.moved = float(np.abs(sigmas / sigmas.sum() - plain / plain.sum()).sum() / 2)
        return sigmas

    def learn(self, groups: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> None:
        """(prompt id, scores of its right responses, of its wrong ones) of an update's groups."""
        self._follow()
        rows = self.source.posterior.rows([prompt_id for prompt_id, _, _ in groups]).tolist()
        self.moments.update((row, right, wrong) for row, (_, right, wrong) in zip(rows, groups, strict=True))

    def _follow(self) -> None:
        if self.turn != self.source.turn:
            self.turn = self.source.turn
            self.moments.clear()

    def metrics(self) -> dict[str, float]:
        right, wrong, gap = self.moments.usual.tolist()
        return {
            "curriculum/rollouts_moved": self.moved,
            "curriculum/score_right": right,
            "curriculum/score_wrong": wrong,
            "curriculum/score_gap": max(gap, 0.0),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.state_dict(), "turn": self.turn, "moved": self.moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])
        self.turn, self.moved = state["turn"], state["moved"]


class Scored:
    """A curriculum whose gate divides by `sigmas`, and the way of the learner's scores to them."""

    def __init__(self, inner: Curriculum, sigmas: GradientSigmas):
        self.inner, self.sigmas = inner, sigmas
        self.needs = inner.needs | {SCORE}
        self.trained: list[tuple[int, str, list[int], list[int]]] = []
        """Group id, prompt id, and which of its rollouts were right and wrong, of the batch that trains now."""

    def plan(self, clock: Clock) -> list[Request]:
        return self.inner.plan(clock)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.inner.observe(rollouts)

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(clock)
        if batch is not None:
            self.trained = [
                (group.group_id, group.prompt_id, _indexes(group, "right"), _indexes(group, "wrong"))
                for group in batch.groups
            ]
        return batch

    def updated(self, clock: Clock, report: Report) -> None:
        groups = [
            (prompt_id, _scores(report, group_id, right), _scores(report, group_id, wrong))
            for group_id, prompt_id, right, wrong in self.trained
        ]
        self.sigmas.learn([(name, right, wrong) for name, right, wrong in groups if len(right) or len(wrong)])
        self.trained = []
        self.inner.updated(clock, report)

    def holds(self) -> set[int]:
        return self.inner.holds()

    def metrics(self) -> dict[str, float]:
        return {**self.inner.metrics(), **self.sigmas.metrics()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "sigmas": self.sigmas.state_dict(),
            "trained": [list(group) for group in self.trained],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.sigmas.load_state_dict(state["sigmas"])
        self.trained = [(group_id, prompt_id, right, wrong) for group_id, prompt_id, right, wrong in state["trained"]]


def _indexes(group: Group, verdict: Verdict) -> list[int]:
    return [rollout.index for rollout in group.rollouts if rollout.verdict == verdict]


def _scores(report: Report, group_id: int, indexes: Sequence[int]) -> np.ndarray:
    """Of those that have one: a rollout without advantage never went through the model."""
    keys: list[Key] = [(group_id, index) for index in indexes]
    return np.array([report.signals[key][SCORE] for key in keys if SCORE in report.signals.get(key, ())])


class Seat(NamedTuple):
    """A group that will be asked for once there is room."""

    prompt_id: str
    n: int
    phase: Phase = "train"
    place: int | None = None
    """In the order of first ask, if it is asked again."""


class Cures(Gate):
    source: CuresSource

    def __init__(
        self,
        source: CuresSource,
        *,
        rollouts: int,
        minimum: int = 2,
        probe: int = 0,
        sigmas: Sigmas | None = None,
        **knobs: Any,
    ):
        """rollouts: a prompt's on average; `minimum` of them at least. sigmas: by what they are divided; None is by
        the pass rate.

        probe: every prompt of a subset gets so many before any is trained on (the paper's N'); they count, but do not
        train. 0 learns from the rollouts that train alone: without any evidence all prompts are alike (OURS).
        """
        super().__init__(source, rollouts=rollouts, **knobs)
        if rollouts < minimum:
            raise WhetError(
                f"curriculum.rollouts = {rollouts} on average cannot give every prompt curriculum.cures.minimum = "
                f"{minimum}; raise the one or lower the other."
            )
        if probe and source.pool is not None:
            raise WhetError("curriculum.cures.probe would probe a set that moves on meanwhile; set it to 0.")
        self.minimum = minimum
        self.probe = probe
        self.sigmas = sigmas or rate_sigmas(source)
        self.drawn: list[Seat] = []
        self.again: dict[int, tuple[int, Phase]] = {}  # place -> rollouts and phase of who must be asked again
        self.probing = False
        self.probe_from = 0  # of the subset's prompts, the first that was not probed yet
        self.probes: set[int] = set()  # groups that are open
        self.probed = 0
        self.allocation = (0, 0)  # fewest and most rollouts in the last batch

    def admit(self, group: Group) -> Admission:
        return "keep"

    def sizes(self, prompt_ids: Sequence[str]) -> list[int]:
        """What the budget leaves them, divided by Neyman: all that is held has `rollouts` on average then.

        So a batch gets exactly its budget, also if a group was dropped and another takes its place. Only where
        stream asks beyond the batch, the sum holds for all that is asked together.
        """
        held = len(self.book) + len(self.again) + len(self.drawn)
        spent = sum(visit.asked for visit in self.book.in_line()) + sum(n for n, _ in self.again.values())
        spent += sum(seat.n for seat in self.drawn)
        total = self.rollouts * (held + len(prompt_ids)) - spent
        return neyman(self.sigmas(prompt_ids).tolist(), max(total, self.minimum * len(prompt_ids)), self.minimum)

    def plan(self, clock: Clock) -> list[Request]:
        if self.source.enter(clock):  # of the last subset's prompts only those that were asked go on
            self.drawn, self.probing, self.probe_from = [], self.probe > 0, 0
        self._seat_probes(clock)
        self._seat_prompts(clock)
        back = [Seat(prompt_id, *self.again[place], place) for place, prompt_id in self.returned]
        seats = self._fitting([*back, *self.drawn], clock)
        del self.drawn[: max(0, len(seats) - len(back))]
        del self.returned[: len(seats)]
        requests = [self._ask(seat) for seat in seats]
        self.counts.add("asked", sum(seat.phase != "probe" for seat in seats))
        self.counts.add("rollouts", sum(seat.n for seat in seats))
        return requests

    # Seats

    def _seat_probes(self, clock: Clock) -> None:
        """The next prompts to probe; together no more rollouts than an update's are open."""
        if not self.probing:
            return
        again = sum(phase == "probe" for _, phase in self.again.values())
        room = max(1, self.rollouts * clock.groups // self.probe) - len(self.probes) - again - len(self.drawn)
        rows = self.source.members[self.probe_from : self.probe_from + max(0, room)]
        self.drawn += [Seat(self.source.ids[row], self.probe, "probe") for row in rows.tolist()]
        self.probe_from += len(rows)
        self.probing = bool(self.drawn or self.probes or again)

    def _seat_prompts(self, clock: Clock) -> None:
        """Draws what the batch lacks, under stream what the window lacks, once nothing is left to probe."""
        if self.probing:
            return
        lacking = clock.groups + self._ahead(clock) - len(self.book)
        want = min(lacking, self._budget(clock)) - len(self.returned) - len(self.drawn)
        ids = self.source.pick(want, clock) if want > 0 else []
        self.drawn += [Seat(prompt_id, n) for prompt_id, n in zip(ids, self.sizes(ids), strict=True)] if ids else []
        self.dry = want > 0 and not ids and self.book.open == 0 and not self.returned and not self.drawn

    def _fitting(self, seats: Sequence[Seat], clock: Clock) -> list[Seat]:
        """The first of them that patience and free capacity allow; one group may be larger than the engine."""
        free, budget, fitting = clock.free, self._budget(clock), list[Seat]()
        for seat in seats:
            budget -= seat.phase != "probe"
            alone = not fitting and self.book.open == 0
            if (budget < 0 and seat.phase != "probe") or (free is not None and seat.n > free and not alone):
                break
            free = None if free is None else free - seat.n
            fitting.append(seat)
        return fitting

    def _ask(self, seat: Seat) -> Request:
        request = self.book.ask(seat.prompt_id, seat.n, self.sampling, seat.phase, seat.place)
        if seat.phase == "probe":
            self.probes.add(request.group_id)
        if seat.place is not None:
            del self.again[seat.place]
        return request

    def prompts_held(self) -> set[str]:
        return super().prompts_held() | {seat.prompt_id for seat in self.drawn}

    # What came of them

    def _decide(self, visit: Visit) -> None:
        if visit.group_id not in self.probes:
            super()._decide(visit)
            return
        self.probes.remove(visit.group_id)
        self.probed += 1
        self._drop(visit.group)

    def _give_back(self, visit: Visit, why: Literal["cut", "expired"]) -> None:
        super()._give_back(visit, why)
        self.again[visit.place] = (visit.asked, "probe" if visit.group_id in self.probes else "train")
        self.probes.discard(visit.group_id)

    def _take(self, groups: Sequence[Group], clock: Clock) -> Batch:
        sizes = [len(group.rollouts) for group in groups]
        self.allocation = (min(sizes), max(sizes))
        return super()._take(groups, clock)

    def metrics(self) -> dict[str, float]:
        """`probed` counts groups; `allocation_*` are judged rollouts of a group of the last batch."""
        return {
            **super().metrics(),
            "curriculum/probed": float(self.probed),
            "curriculum/allocation_min": float(self.allocation[0]),
            "curriculum/allocation_max": float(self.allocation[1]),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "drawn": [list(seat) for seat in self.drawn],
            "again": [[place, *rest] for place, rest in self.again.items()],
            "probing": self.probing,
            "probe_from": self.probe_from,
            "probes": sorted(self.probes),
            "probed": self.probed,
            "allocation": list(self.allocation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.drawn = [Seat(*seat) for seat in state["drawn"]]
        self.again = {place: (n, phase) for place, n, phase in state["again"]}
        self.probing, self.probe_from = state["probing"], state["probe_from"]
        self.probes, self.probed = set(state["probes"]), state["probed"]
        self.allocation = (state["allocation"][0], state["allocation"][1])


def neyman_continuations(
    sigmas: Sigmas, minimum: int = 1, screened: int = 0
) -> Callable[[Sequence[Group], int], list[int]]:
    """For SPEED over `CuresSource`: divides the rollouts of all continuations, given in total, among their groups.

    By sigmas in whose pass rates the screening has been counted by then. What varies by 1 / n_i is the mean over all
    n_i rollouts that train, so Neyman's rule is for those: `screened` of each group are spent, and what it is due
    beyond them, `minimum` at least, is its continuation.
    """

    def divide(groups: Sequence[Group], total: int) -> list[int]:
        every = sigmas([group.prompt_id for group in groups]).tolist()
        whole = neyman(every, total + screened * len(groups), screened + minimum)
        return [n - screened for n in whole]

    return divide
