"""Make-believe problems with a policy that is really trained, in seconds: what `curriculum_bench.py` plays.

Prompt i is solved with probability p_i = sigmoid(b_i + x_i . theta): b_i is its difficulty, x_i its features, the
first of which all prompts share. A group moves theta by RLOO, sum_j A_j (r_j - p_i) x_i / n, the exact policy
gradient here. What is skipped: text, lengths that grow, off-policy corrections, an optimiser. So it tells how a
curriculum spends rollouts and what it costs to run, not which one to use. `likeness.py` holds it against real runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from whet import config
from whet.curriculum.build import Facts, build_curriculum
from whet.errors import Starved
from whet.types import Batch, Clock, Report, Request, Rollout, Sampling

SAMPLING = Sampling(max_tokens=400)
RATE = 1.0
"""Step of the learner, in units of the logit."""
MIXES = {
    "few": ((0.40, 4.0), (0.12, 0.0), (0.48, -6.0)),
    "many": ((0.25, 3.0), (0.50, 0.0), (0.25, -4.0)),
}
"""(share, mean logit at the start) of each kind of prompt: few or many groups carry signal."""
T = TypeVar("T")


@dataclass
class Toy:
    """Prompts, the policy that answers them, and its training."""

    mix: str
    seed: int
    prompts: int = 4000
    features: int = 8
    theta: np.ndarray = field(init=False)
    tokens: int = 0
    rollouts: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng((self.seed, 1))
        self.theta = np.zeros(self.features)
        self.offsets, self.facing = self._draw(rng, self.prompts)
        self.held_out = self._draw(rng, 1000)
        self._rng = np.random.default_rng((self.seed, 2))

    # What a toy made after a real run has of its own

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts: logits at the start, and features."""
        shares, means = zip(*MIXES[self.mix], strict=True)
        kinds = rng.choice(len(shares), size=count, p=shares)
        facing = rng.normal(size=(count, self.features)) * 0.3
        facing[:, 0] = 1.0
        return np.array(means)[kinds] + rng.normal(size=count), facing

    def lengths(self, right: np.ndarray) -> np.ndarray:
        """Tokens of responses that are right and wrong."""
        return np.minimum(400, self._rng.lognormal(4.5, 0.5, len(right)) * np.where(right, 1.0, 1.3))

    def move(self, gradient: np.ndarray) -> np.ndarray:
        """What an update adds to theta."""
        return RATE * gradient

    # What every toy does

    @property
    def ids(self) -> list[str]:
        return [str(i) for i in range(self.prompts)]

    def chance(self, rows: np.ndarray) -> np.ndarray:
        return _sigmoid(self.offsets[rows] + self.facing[rows] @ self.theta)

    @property
    def accuracy(self) -> float:
        """On problems that are not trained on; exact, without drawing."""
        offsets, facing = self.held_out
        return float(_sigmoid(offsets + facing @ self.theta).mean())

    def row(self, step: int) -> dict[str, float]:
        """Where it stands, in the words of metrics.jsonl."""
        spent = {"rollouts": self.rollouts, "tokens_generated": self.tokens}
        return {"step": step, **spent, "accuracy": self.accuracy, "skill": float(self.theta[0])}

    def answer(self, requests: Sequence[Request], version: int) -> list[Rollout]:
        done = []
        for request in requests:
            p = float(self.chance(np.array([int(request.prompt_id)]))[0])
            right = self._rng.random(request.n) < p
            lengths = np.maximum(1, self.lengths(right).astype(int))
            for k, (good, length) in enumerate(zip(right.tolist(), lengths.tolist(), strict=True)):
                done.append(make_rollout(request, request.first_index + k, good, length, version))
        self.rollouts += len(done)
        self.tokens += sum(r.length for r in done)
        return done

    def learn(self, batch: Batch) -> float:
        """One step on a batch; the share of its groups that had signal."""
        gradient = np.zeros(self.features)
        for group in batch.groups:
            row = int(group.prompt_id)
            rewards = np.array([r.reward for r in group.rollouts], float)
            n = len(rewards)
            advantages = (rewards - rewards.mean()) * n / (n - 1)
            p = float(self.chance(np.array([row]))[0])
            gradient += (advantages * (rewards - p)).mean() * self.facing[row]
        self.theta += self.move(gradient / len(batch.groups))
        return sum(group.spread > 0 for group in batch.groups) / len(batch.groups)


def play(
    settings: config.CurriculumSettings, toy: Toy, progress: Callable[[], float], sampling: Sampling = SAMPLING
) -> tuple[list[dict[str, float]], float]:
    """One run until its progress is 1 or the curriculum starves: a row before the first update and one after each,
    named as in metrics.jsonl, the last with the curriculum's own metrics; and the seconds the curriculum took."""
    characters = (100 - 10 * toy.offsets).astype(int).tolist()  # harder problems are longer here
    facts = Facts(ids=toy.ids, characters=characters)
    curriculum = build_curriculum(settings, facts=facts, sampling=sampling, seed=toy.seed)
    spent, rows = 0.0, [toy.row(0)]

    def timed(call: Callable[[], T]) -> T:
        nonlocal spent
        begun = time.perf_counter()
        result = call()
        spent += time.perf_counter() - begun
        return result

    def clock() -> Clock:
        done, share = len(rows) - 1, min(1.0, progress())
        return Clock(step=done, version=done, groups=settings.groups, free=None, tokens=toy.tokens, progress=share)

    try:
        while progress() < 1:
            while (batch := timed(lambda: curriculum.emit(clock()))) is None:
                answered = toy.answer(timed(lambda: curriculum.plan(clock())), len(rows) - 1)
                timed(lambda answered=answered: curriculum.observe(answered))  # type: ignore[misc]
            signal = toy.learn(batch)
            rows.append({**toy.row(len(rows)), "learn/signal_share": signal})
            timed(lambda: curriculum.updated(clock(), Report(metrics={})))
    except Starved:
        pass
    rows[-1] |= curriculum.metrics()
    return rows, spent


def make_rollout(request: Request, index: int, right: bool, length: int, version: int) -> Rollout:
    return Rollout(
        prompt_id=request.prompt_id,
        group_id=request.group_id,
        index=index,
        phase=request.phase,
        sampling=request.sampling,
        length=length,
        finish="stop" if length < request.sampling.max_tokens else "length",
        first_version=version,
        last_version=version,
        verdict="right" if right else "wrong",
        score=float(right),
        reward=float(right),
    )


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))
