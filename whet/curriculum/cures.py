"""CurES's gate (arXiv 2510.01037): the rollouts of a batch are divided among its prompts by what they teach.

Prompts are drawn by rho* (`rho.py`), and their rollouts divided in proportion to sigma, the spread of their gradients
(Neyman's rule, `allocation.py`). sigma follows from the pass rate alone, unless the learner reports scores (eq. 21). In
both forms sqrt(p (1 - p)) decides which prompts are drawn: eq. 11 bounds the gain of a step by it, while eq. 21 is
about the noise of the gradient. Every group trains with equal weight: eq. 16 is the mean over a prompt's n_i rollouts.
OURS: drawn prompts are held back until the engine has room, so that a batch is divided as a whole under stream, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from whet.curriculum.allocation import Moments, largest_remainder, sigma_gradient, sigma_of
from whet.curriculum.base import RECORDS, Curriculum, Saved, Wrapper, named
from whet.curriculum.gate import Admission, Gate
from whet.curriculum.groups import Visit
from whet.curriculum.rho import CuresSource
from whet.curriculum.speed import Allocate
from whet.errors import WhetError
from whet.types import Batch, Clock, Group, Phase, Report, Request

# ---- sigma of a prompt

SCORE = "score"  # the signal that the gradient form needs of the learner
# prompt ids -> their sigmas, of which only the ratios matter
Sigmas = Callable[[Sequence[str]], np.ndarray]


def rate_sigmas(source: CuresSource) -> Sigmas:
    """sqrt(p (1 - p)): eq. 21 if all scores have norm one, and right and wrong responses have the same mean."""
    return lambda prompt_ids: sigma_of(source.spread_rates(source.ids.rows(prompt_ids)))


class GradientSigmas(Saved):
    """Eq. 21, with the pass rate of the posterior and the moments of the scores reported so far.

    A new subset of the source forgets the moments of every prompt, as it forgets their verdicts.
    """

    state_names = ("moments", "turn", "moved")

    def __init__(self, source: CuresSource):
        self.source, self.turn = source, source.turn
        self.moments = Moments(len(source.ids))
        # share of the last rollouts that the pass rate alone would have given to other prompts
        self.moved = 0.0

    def __call__(self, prompt_ids: Sequence[str]) -> np.ndarray:
        self._follow()
        rows = self.source.ids.rows(prompt_ids)
        rates = self.source.spread_rates(rows)
        sigmas = sigma_gradient(rates, *self.moments.of(rows).T)
        plain = sigma_of(rates)
        if len(rows) > 1 and sigmas.any():
            self.moved = float(np.abs(sigmas / sigmas.sum() - plain / plain.sum()).sum() / 2)
        return sigmas

    def learn(self, groups: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> None:
        """Learn from an update's groups: (prompt id, scores of its right responses, of its wrong ones)."""
        self._follow()
        rows = self.source.ids.rows([prompt_id for prompt_id, _, _ in groups]).tolist()
        self.moments.update(
            (row, right, wrong) for row, (_, right, wrong) in zip(rows, groups, strict=True)
        )

    def _follow(self) -> None:
        if self.turn != self.source.turn:
            self.turn = self.source.turn
            self.moments.clear()

    def metrics(self) -> dict[str, float]:
        right, wrong, gap = self.moments.usual.tolist()
        own = {
            "rollouts_moved": self.moved,
            "score_right": right,
            "score_wrong": wrong,
            "score_gap": max(gap, 0.0),
        }
        return named(own)


class Scored(Wrapper):
    """Wraps the curriculum of a run or stage whose gate divides by `sigmas`, and passes the learner's scores to them.

    It asks the learner for scores (`needs`) and remembers which rollouts a batch had; it changes no request or batch.
    """

    state_names = ("inner", "sigmas", "trained")

    def __init__(self, inner: Curriculum, sigmas: GradientSigmas):
        super().__init__(inner)
        self.sigmas, self.needs = sigmas, inner.needs | {SCORE}
        self.trained: list[Group] = []  # the batch that trains now

    def emit(self, clock: Clock) -> Batch | None:
        batch = self.inner.emit(clock)
        if batch is not None:
            self.trained = list(batch.groups)
        return batch

    def updated(self, clock: Clock, report: Report) -> None:
        groups = []
        for group in self.trained:
            # A rollout without advantage never went through the model and has no score.
            found = [(r.verdict, report.signals.get(r.key, {}).get(SCORE)) for r in group.rollouts]
            right = [score for verdict, score in found if verdict == "right" and score is not None]
            wrong = [score for verdict, score in found if verdict == "wrong" and score is not None]
            if right or wrong:
                groups.append((group.prompt_id, np.array(right), np.array(wrong)))
        self.sigmas.learn(groups)
        self.trained = []
        self.inner.updated(clock, report)

    def metrics(self) -> dict[str, float]:
        return {**self.inner.metrics(), **self.sigmas.metrics()}


# ---- the gate


@dataclass(frozen=True, slots=True)
class Seat:
    """A group that will be requested once there is room."""

    prompt_id: str
    n: int
    phase: Phase = "train"
    place: int | None = None  # in line, if it is requested again


RECORDS["Seat"] = Seat


class Cures(Gate):
    source: CuresSource
    state_names = (
        *Gate.state_names,
        "drawn",
        "again",
        "probing",
        "probe_from",
        "probes",
        "probed",
        "allocation",
    )

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
        """A prompt gets `rollouts` on average and at least `minimum`, divided by `sigmas` (None: by the pass rate).

        probe: every prompt of a subset gets so many rollouts before any prompt trains (the paper's N'); they count as
        evidence but do not train. 0 learns from the rollouts that train: at first all prompts are then alike (OURS).
        """
        super().__init__(source, rollouts=rollouts, **knobs)
        if rollouts < minimum:
            least = f"curriculum.cures.minimum = {minimum}; raise the one or lower the other"
            raise WhetError(
                f"curriculum.rollouts = {rollouts} on average cannot give every prompt {least}."
            )
        if probe and source.pool is not None:
            raise WhetError(
                "curriculum.cures.probe would probe a set that moves on meanwhile; set it to 0."
            )
        self.minimum = minimum
        self.probe = probe
        self.sigmas = sigmas or rate_sigmas(source)
        self.drawn: list[Seat] = []
        # place -> size and phase of a group to be requested again
        self.again: dict[int, tuple[int, Phase]] = {}
        self.probing = False
        self.probe_from = 0  # the first prompt of the subset that was not probed yet
        self.probes: set[int] = set()  # open groups that probe
        self.probed = 0
        self.allocation = (0, 0)  # fewest and most rollouts of a group in the last batch

    def admit(self, group: Group) -> Admission:
        return "keep"

    def sizes(self, prompt_ids: Sequence[str]) -> list[int]:
        """Divide by Neyman's rule what the budget leaves, so that all held groups have `rollouts` on average.

        A batch then gets exactly its budget, also if a group was dropped and another takes its place. Where stream
        requests beyond the batch, the sum holds for all that is requested together.
        """
        held = len(self.book) + len(self.again) + len(self.drawn)
        spent = sum(visit.asked for visit in self.book.in_line()) + sum(
            n for n, _ in self.again.values()
        )
        spent += sum(seat.n for seat in self.drawn)
        total = max(
            self.rollouts * (held + len(prompt_ids)) - spent, self.minimum * len(prompt_ids)
        )
        return largest_remainder(self.sigmas(prompt_ids).tolist(), total, self.minimum)

    def plan(self, clock: Clock) -> list[Request]:
        # a new subset: prompts of the last one that were drawn but not requested go
        if self.source.enter(clock):
            self.drawn, self.probing, self.probe_from = [], self.probe > 0, 0
        self._draw_seats(clock)
        back = [Seat(prompt_id, *self.again[place], place) for place, prompt_id in self.returned]
        seats = self._fitting([*back, *self.drawn], clock)
        del self.drawn[: max(0, len(seats) - len(back))]
        del self.returned[: len(seats)]
        requests = [self._ask(seat) for seat in seats]
        self.counts.add("asked", sum(seat.phase != "probe" for seat in seats))
        self.counts.add("rollouts", sum(seat.n for seat in seats))
        self.source.asked_for([request for request in requests if request.phase != "probe"])
        return requests

    # Seats

    def _draw_seats(self, clock: Clock) -> None:
        """Draw the next prompts to probe, then what the batch (under stream: the window) lacks."""
        if self.probing:  # open probes have together no more rollouts than an update
            again = sum(phase == "probe" for _, phase in self.again.values())
            room = (
                max(1, self.rollouts * clock.groups // self.probe)
                - len(self.probes)
                - again
                - len(self.drawn)
            )
            rows = self.source.members[self.probe_from : self.probe_from + max(0, room)]
            self.drawn += [Seat(self.source.ids[row], self.probe, "probe") for row in rows.tolist()]
            self.probe_from += len(rows)
            self.probing = bool(self.drawn or self.probes or again)
        if self.probing:
            return
        lacking = clock.groups + self._ahead(clock) - len(self.book)
        want = min(lacking, self._budget(clock)) - len(self.returned) - len(self.drawn)
        ids = self.source.pick(want, clock) if want > 0 else []
        self.drawn += (
            [Seat(prompt_id, n) for prompt_id, n in zip(ids, self.sizes(ids), strict=True)]
            if ids
            else []
        )
        self.dry = (
            want > 0 and not ids and self.book.open == 0 and not self.returned and not self.drawn
        )

    def _fitting(self, seats: Sequence[Seat], clock: Clock) -> list[Seat]:
        """The first seats that patience and free capacity allow; a single group may be larger than the engine."""
        free = clock.free
        budget = self._budget(clock)
        fitting = list[Seat]()
        for seat in seats:
            budget -= seat.phase != "probe"
            alone = not fitting and self.book.open == 0
            if (budget < 0 and seat.phase != "probe") or (
                free is not None and seat.n > free and not alone
            ):
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

    # Deciding and emitting

    def _decide(self, visit: Visit) -> None:
        if visit.group_id not in self.probes:
            super()._decide(visit)
            return
        self.probes.remove(visit.group_id)
        self.probed += 1
        self._drop(visit.group)

    def _give_back(self, visit: Visit, why: Literal["cut", "expired"]) -> None:
        super()._give_back(visit, why)
        self.again[visit.place] = (
            visit.asked,
            "probe" if visit.group_id in self.probes else "train",
        )
        self.probes.discard(visit.group_id)

    def _take(self, groups: Sequence[Group], clock: Clock) -> Batch:
        sizes = [len(group.rollouts) for group in groups]
        self.allocation = (min(sizes), max(sizes))
        return super()._take(groups, clock)

    def metrics(self) -> dict[str, float]:
        """`probed` counts groups; `allocation_*` are judged rollouts of a group of the last batch."""
        fewest, most = self.allocation
        return super().metrics() | named(
            {"probed": self.probed, "allocation_min": fewest, "allocation_max": most}
        )


def neyman_continuations(sigmas: Sigmas, minimum: int = 1, screened: int = 0) -> Allocate:
    """For SPEED over `CuresSource`: a function that divides the rollouts of all continuations among their groups.

    The screening is already counted in the pass rates of `sigmas`. What varies by 1 / n_i is the mean over all n_i
    rollouts that train, so Neyman's rule is applied to those: `screened` of each group are spent, and the rest of its
    share, at least `minimum`, is its continuation.
    """

    def divide(prompt_ids: Sequence[str], total: int) -> list[int]:
        whole = largest_remainder(
            sigmas(prompt_ids).tolist(), total + screened * len(prompt_ids), screened + minimum
        )
        return [n - screened for n in whole]

    return divide
