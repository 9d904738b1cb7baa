"""What the tests of the curricula share: a clock, rollouts with given verdicts, a source that does not shuffle, and a
gate that screens before it continues, which shows that a group may be asked for in several requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from whet.curriculum.allocation import sigma_of
from whet.curriculum.gate import Admission, Gate
from whet.curriculum.rho import Posterior
from whet.curriculum.source import UniformSource
from whet.types import Batch, Clock, Finish, Group, Request, Rollout, Sampling

SAMPLING = Sampling(max_tokens=32, stop_ids=(1,))
LETTERS = {"r": "right", "w": "wrong", "u": "unjudged"}


def at(
    step: int = 0,
    groups: int = 2,
    free: int | None = None,
    version: int | None = None,
    cut: bool = False,
) -> Clock:
    version = step if version is None else version
    return Clock(
        step=step, version=version, groups=groups, free=free, tokens=0, progress=0.0, cut=cut
    )


def rollout(
    request: Request,
    index: int,
    letter: str,
    *,
    version: int = 0,
    length: int = 10,
    finish: Finish = "stop",
) -> Rollout:
    score = None if letter == "u" else float(letter == "r")
    return Rollout(
        prompt_id=request.prompt_id,
        group_id=request.group_id,
        index=index,
        phase=request.phase,
        sampling=request.sampling,
        length=length,
        finish=finish,
        first_version=version,
        last_version=version,
        verdict=LETTERS[letter],  # type: ignore[arg-type]
        score=score,
        reward=score,
    )


def answers(request: Request, letters: str, version: int = 0) -> list[Rollout]:
    """All rollouts of a request: "rw" is right, then wrong."""
    assert len(letters) == request.n
    return [
        rollout(request, request.first_index + i, letter, version=version)
        for i, letter in enumerate(letters)
    ]


def cut(request: Request, index: int, version: int = 0) -> Rollout:
    return rollout(request, index, "u", version=version, length=3, finish="cut")


def answer_all(
    gate: Gate, requests: Iterable[Request], verdicts: Sequence[str], version: int = 0
) -> None:
    for request, letters in zip(requests, verdicts, strict=True):
        gate.observe(answers(request, letters, version))


def asks(requests: Iterable[Request]) -> list[tuple[str, int]]:
    return [(request.prompt_id, request.n) for request in requests]


def trained(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [group.prompt_id for group in batch.groups]


def metric(gate: Gate, name: str) -> float:
    return gate.metrics()[f"curriculum/{name}"]


def held_tokens(gate: Gate) -> int:
    """Tokens of all rollouts that the gate still holds."""
    held = [*gate.book._visits.values(), *gate.book._spare.values()]
    return sum(visit.tokens for visit in held)


def mean_rates(posterior: Posterior, prompt_ids: Sequence[str]) -> np.ndarray:
    return posterior.mean(posterior.ids.rows(prompt_ids))


class Listed(UniformSource):
    """In the order given, epoch after epoch: what a test can write down."""

    def __init__(self, ids: Sequence[str]):
        super().__init__(ids, seed=0)

    def _draw_order(self) -> np.ndarray:
        return np.arange(len(self.ids))


class Once(Listed):
    """One epoch, then nothing."""

    def pick(self, k: int, clock: Clock) -> list[str]:
        return super().pick(min(k, len(self.returned) + len(self.ids) - self.cursor), clock)


class Screening(Gate):
    """A few rollouts first; only a prompt that was sometimes right gets `more`."""

    phase = "screen"

    def __init__(self, *args: Any, more: int, screens: int | None = None, **knobs: Any):
        super().__init__(*args, **knobs)
        self.more = more
        self.screens = screens

    def admit(self, group: Group) -> Admission:
        if any(r.phase == "continue" for r in group.rollouts):
            return "keep"
        return "more" if 0.0 < group.pass_rate < 1.0 else "drop"

    def groups_to_ask(self, clock: Clock) -> int:
        if self.screens is None:
            return super().groups_to_ask(clock)
        return self.screens if self.book.ready < clock.groups else 0

    def continuations(self, clock: Clock) -> list[Request]:
        groups = self.book.waiting()
        if clock.free is not None:
            running = self.book.open > len(groups)
            groups = groups[: max(clock.free // self.more, 0 if running else 1)]
        return [
            self.book.ask_more(g.group_id, self.more, self.sampling, "continue") for g in groups
        ]


def sampling_weights(p: Any, tau: float) -> np.ndarray:
    """rho*(x) = exp(sigma(p_x) / tau) / sum of that over all prompts (eq. 14), as it is printed."""
    sigma = sigma_of(p)
    weights = np.exp((sigma - sigma.max(initial=0.0)) / tau)
    return weights / weights.sum()
