"""The data that flows: prompt -> request -> rollout -> group -> batch -> report.

All records are frozen, slotted and keyword-only. They hold numbers, text and numpy arrays, never a tensor. Curricula
read everything except `Rollout.trace`, so the same curricula can serve trainers whose tokens live elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Self

import numpy as np

Phase = Literal["train", "probe", "screen", "continue", "eval"]
Finish = Literal["stop", "length", "cut"]
Verdict = Literal["right", "wrong", "unjudged"]
Key = tuple[int, int]  # (group_id, index) names one rollout for a whole run


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A problem with an answer: Prompt(id="chain-7", text="3+5*2=", answer="86", task="chain", meta={"level": 2})."""

    # the data's id column, else hash(task, text, answer) + "#k" for the k-th repeat; never a row
    # number
    id: str
    text: str = ""  # the plain problem; empty if and only if `messages` is given
    # chat turns {"role": ..., "content": ...} for the chat template
    messages: tuple[Mapping[str, str], ...] = ()
    answer: str
    task: str  # the name of the task, whose judge decides
    # other columns of the data: level, source, ...
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for n rollouts of a prompt: rollouts first_index .. first_index + n - 1 of a group."""

    prompt_id: str
    group_id: int  # new at each visit of a prompt; the requests of one visit share it
    first_index: int = 0
    n: int
    sampling: Sampling
    phase: Phase = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The tokens of a rollout, as the learner needs them: one entry per generated token, the stop token included."""

    ids: np.ndarray  # int32
    # float32 or the model's float64: log-softmax(logits / temperature) before top-k and top-p
    log_probs: np.ndarray
    versions: np.ndarray  # int32, the policy version that wrote each token
    # bool: came from an accepted draft. For readers; no checkpoint holds it
    guessed: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One generated response and, once it is judged, its verdict and reward."""

    prompt_id: str
    group_id: int
    index: int
    phase: Phase
    sampling: Sampling
    length: int  # generated tokens, the stop token included
    finish: Finish  # ended by the model (stop), by the limit (length) or by a weight update (cut)
    first_version: int
    last_version: int
    verdict: Verdict = "unjudged"
    score: float | None = None  # the judge's number in 0..1; None while unjudged
    reward: float | None = None  # the number that the learner uses; None while unjudged
    final: str = ""  # the final answer as the judge read it, for majority votes; "" for none
    # further rewards by name, before their weights
    terms: Mapping[str, float] = field(default_factory=dict)
    note: str = ""  # why the judge failed: "failed with KeyError: 'nums'"
    drafted: int = 0  # tokens proposed by speculation
    accepted: int = 0  # proposed tokens that were kept
    trace: Trace | None = None

    @property
    def key(self) -> Key:
        return (self.group_id, self.index)

    @classmethod
    def of(cls, request: Request, index: int, **outcome: Any) -> Self:
        """The rollout with this number that answers a request."""
        asked: dict[str, Any] = {
            "prompt_id": request.prompt_id,
            "group_id": request.group_id,
            "index": index,
        }
        return cls(**asked, phase=request.phase, sampling=request.sampling, **outcome)

    @property
    def judged(self) -> bool:
        return self.verdict != "unjudged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one prompt that share a baseline. With one right and one wrong one, pass rate and spread are 0.5."""

    prompt_id: str
    group_id: int
    rollouts: tuple[Rollout, ...]
    weight: float | None = None  # share of the loss; None means 1 / groups in the batch

    @property
    def judged(self) -> tuple[Rollout, ...]:
        """The rollouts that count; unjudged ones are left out of pass rate, baseline and loss."""
        return tuple(r for r in self.rollouts if r.judged)

    @property
    def pass_rate(self) -> float:
        verdicts = [r.verdict for r in self.rollouts]
        judged = len(verdicts) - verdicts.count("unjudged")
        return verdicts.count("right") / judged if judged else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of the verdicts, sqrt(p (1 - p)); exactly 0 when all agree."""
        p = self.pass_rate
        return (p * (1.0 - p)) ** 0.5

    @property
    def tokens(self) -> int:
        return sum(r.length for r in self.rollouts)

    @property
    def oldest_version(self) -> int:
        return min(r.first_version for r in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one update, and the learner's settings for it. None keeps the value of the recipe."""

    groups: tuple[Group, ...]
    stage: int = 0
    kl_coef: float | None = None
    entropy_coef: float | None = None
    minibatches: int | None = None
    reset_reference: bool = False
    reset_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far the run is, as a curriculum sees it."""

    step: int  # updates done
    version: int  # the policy version that generates now
    groups: int  # groups wanted per update
    # Rollouts that the engine could start at once (stream: rollouts return as they finish, and freed slots are filled).
    # None means no limit (barrier: every request finishes before judging goes on).
    free: int | None
    tokens: int  # tokens generated so far
    progress: float  # 0..1 of the run
    # True under stream with rollout.on_update = "cut": each update then ends the running rollouts. Long rollouts would
    # be ended more often, so every group begun before the update is dropped, finished or not, and requested again.
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The learner's results of one update."""

    metrics: Mapping[str, float]
    # Per trained rollout, the signals that the curriculum's `needs` names. "score" is the score function: a float32
    # vector, the gradient of the response's log-prob (`model/head.py`); it is not the judge's `Rollout.score`.
    signals: Mapping[Key, Mapping[str, float | np.ndarray]] = field(default_factory=dict)


def fields_of(record: Any, leave: str = "") -> dict[str, Any]:
    """The fields of a record by name, but one. (`dataclasses.asdict` copies what they hold, ten times as slowly.)"""
    return {name: getattr(record, name) for name in record.__dataclass_fields__ if name != leave}


_READ = attrgetter(*Rollout.__dataclass_fields__)
_WRITERS = [getattr(Rollout, name).__set__ for name in Rollout.__dataclass_fields__]


def changed(rollout: Rollout, **values: Any) -> Rollout:
    """A copy with these values, in half the time of `dataclasses.replace`: a step may copy thousands."""
    copy = object.__new__(Rollout)
    for write, value in zip(_WRITERS, _READ(rollout), strict=True):
        write(copy, value)
    for name, value in values.items():
        object.__setattr__(copy, name, value)
    return copy


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    """Return all fields except the trace, for a state_dict."""
    return fields_of(rollout, "trace") | {
        "sampling": fields_of(rollout.sampling),
        "terms": dict(rollout.terms),
    }


def rollout_from_json(data: Mapping[str, Any]) -> Rollout:
    """
    >>> r = Rollout(prompt_id="a", group_id=1, index=0, phase="train", sampling=Sampling(max_tokens=4),
    ...             length=2, finish="stop", first_version=0, last_version=0)
    >>> rollout_from_json(rollout_to_json(r)) == r
    True
    """
    return Rollout(**{**data, "sampling": sampling_from_json(data["sampling"])})


def sampling_from_json(data: Mapping[str, Any]) -> Sampling:
    """Rebuild a Sampling; JSON has lists where it holds tuples."""
    return Sampling(
        **{**data, "stop_ids": tuple(data["stop_ids"]), "stop_strings": tuple(data["stop_strings"])}
    )
