"""A simulated engine and judge: prompts with known pass rates, without a model and without time.

`contract.py` plays curricula against it. The length and verdict of a rollout depend only on (seed, group id, index), so
they are the same in whatever order it is delivered; the order, and what an update cuts, follow from the world's seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from whet.types import Batch, Key, Request, Rollout, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The settings of a simulated run."""

    prompts: int = 24
    # Pass rate of prompt i: number i modulo their count. Empty: every second rollout of a group is right.
    pass_rates: tuple[float, ...] = (0.5, 0.0, 0.3, 0.9, 1.0, 0.7)
    lengths: tuple[int, ...] = ()  # length for prompt i, likewise; empty draws one for each rollout
    skew: int = 1  # drawn lengths are a share u^skew of the limit: 1 is even, 3 has a long tail
    groups: int = 4  # per update
    updates: int = 8
    slots: int | None = None  # rollouts that run at once (stream); None is barrier
    unjudged: float = 0.0  # share of rollouts without a verdict
    # share of running rollouts that an update cuts; the others run on into the next version
    cut: float = 0.0
    # what finishes first: anything, or what has fewest tokens left
    order: Literal["random", "shortest"] = "random"
    seed: int = 0

    @property
    def ids(self) -> list[str]:
        return [f"p{i}" for i in range(self.prompts)]


class SealedRollout(Rollout):
    """A rollout that refuses to show its trace."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name == "trace":
            raise AssertionError(
                "Contract line 7 (no traces): the curriculum looked at Rollout.trace"
            )
        return object.__getattribute__(self, name)


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    request: Request
    index: int
    began: int  # the version that wrote its first token
    ends: int  # decode steps of the engine until it is complete, from the start of the run
    length: int
    verdict: Verdict


class Simulator:
    """Engine and judge in one: requests in, judged rollouts out."""

    def __init__(self, world: World, *, sealed: bool):
        self.world, self.kind = world, SealedRollout if sealed else Rollout
        self.version = self.tokens = 0
        # by group: lengths as shares of the limit, had nothing been cut
        self.written: dict[int, list[float]] = {}
        self._now = 0  # decode steps so far
        self._rng = np.random.default_rng((world.seed, 7))
        self._running: list[SimulatedJob] = []
        self._cut: list[Rollout] = []

    @property
    def free(self) -> int | None:
        return None if self.world.slots is None else max(0, self.world.slots - len(self._running))

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for index in range(request.first_index, request.first_index + request.n):
                length, verdict = self._draw(request, index)
                self._running.append(
                    SimulatedJob(request, index, self.version, self._now + length, length, verdict)
                )
                self.written.setdefault(request.group_id, []).append(
                    length / request.sampling.max_tokens
                )

    def collect(self) -> list[Rollout]:
        """Return all that was cut, and some of what runs: a random part of it, or what is complete next."""
        done = self._cut
        self._cut = []
        if self._running:
            if self.world.order == "random":
                self._running = [
                    self._running[i] for i in self._rng.permutation(len(self._running))
                ]
                count = int(self._rng.integers(1, len(self._running) + 1))
                finished = self._running[:count]
                self._running = self._running[count:]
            else:
                self._now = min(job.ends for job in self._running)
                finished = [job for job in self._running if job.ends == self._now]
                self._running = [job for job in self._running if job.ends > self._now]
            done += [self._finish(job) for job in finished]
        self.tokens += sum(rollout.length for rollout in done)
        return done

    def update(self, version: int) -> None:
        """Publish new weights, which cut some of what runs."""
        fates = (self._rng.random(len(self._running)) < self.world.cut).tolist()
        self._cut += [
            self._finish(job, cut=True)
            for job, cut in zip(self._running, fates, strict=True)
            if cut
        ]
        self._running = [job for job, cut in zip(self._running, fates, strict=True) if not cut]
        self.version = version

    def scores(self, batch: Batch) -> dict[Key, dict[str, float | np.ndarray]]:
        """The score of each trained rollout, for curricula that need it: a small vector, from the rollout's key alone.
        Groups whose verdicts all agree have no gradient and no score."""
        keys = [
            rollout.key
            for group in batch.groups
            if group.spread
            for rollout in group.rollouts
            if rollout.judged
        ]
        draws = (np.random.default_rng((self.world.seed, *key, 1)).normal(size=4) for key in keys)
        return {
            key: {"score": draw.astype(np.float32)} for key, draw in zip(keys, draws, strict=True)
        }

    def _draw(self, request: Request, index: int) -> tuple[int, Verdict]:
        """Draw length and verdict from the rollout's key alone."""
        world = self.world
        number = int(request.prompt_id[1:])
        long, passed, judged = np.random.default_rng((world.seed, request.group_id, index)).random(
            3
        )
        length = 1 + int(long**world.skew * request.sampling.max_tokens)
        if world.lengths:
            length = world.lengths[number % len(world.lengths)]
        if judged < world.unjudged:
            return length, "unjudged"
        rate = (
            world.pass_rates[number % len(world.pass_rates)]
            if world.pass_rates
            else float(index % 2 == 0)
        )
        return length, "right" if passed < rate else "wrong"

    def _finish(self, job: SimulatedJob, cut: bool = False) -> Rollout:
        verdict: Verdict = "unjudged" if cut else job.verdict
        score = None if verdict == "unjudged" else float(verdict == "right")
        return self.kind.of(
            job.request,
            job.index,
            length=job.length,
            finish="cut"
            if cut
            else "length"
            if job.length >= job.request.sampling.max_tokens
            else "stop",
            first_version=job.began,
            last_version=self.version,
            verdict=verdict,
            score=score,
            reward=score,
        )
