"""The two protocols of this folder: a curriculum decides which prompts get rollouts, how many, and which groups train.

The training loop calls `plan`, `observe` and `emit` until it has a batch, and `updated` after the optimiser step.
Most curricula are a gate (`gate.py`: which groups train) over a source (`source.py`: which prompts come next), with
wrappers around them. Nothing in this folder reads `Rollout.trace` or imports torch. `whet.testing.check_contract`
tests every line of the contract for any implementation, also for yours.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from whet.errors import WhetError
from whet.types import (
    Batch,
    Clock,
    Group,
    Report,
    Request,
    Rollout,
    rollout_from_json,
    rollout_to_json,
)


class Curriculum(Protocol):
    # signals wanted in `Report.signals`; a learner that cannot compute one is refused at start
    needs: frozenset[str]

    def plan(self, clock: Clock) -> list[Request]:
        """Request rollouts. Each of them comes back once through `observe`, also if a weight update cuts it."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Receive judged rollouts, each exactly once; those of one group may arrive over several calls and versions."""

    def emit(self, clock: Clock) -> Batch | None:
        """Return the next batch, its groups in the order of their first request, or None while it is not full."""

    def updated(self, clock: Clock, report: Report) -> None:
        """Take note of the optimiser step on the last emitted batch; `clock` is already the next one."""

    def holds(self) -> set[int]:
        """Return the ids of groups that may still train; the traces of all others can be freed."""

    def waits(self) -> set[int]:
        """Return the ids of groups whose rollouts all came and that may be asked for more; the others never are."""

    def metrics(self) -> dict[str, float]:
        """Return counters since the start of the run, and gauges, named "curriculum/..."."""

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-able state, from which the sequence of plans continues as if it was never interrupted."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Source(Protocol):
    def pick(self, k: int, clock: Clock) -> list[str]:
        """Return the next k prompt ids; fewer only if no more are available."""

    def give_back(self, ids: Sequence[str]) -> None:
        """Take back ids that got no verdict (cut, expired); they are picked first, in the order given."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Learn from judged rollouts, also from those of groups that will be dropped."""

    def asked_for(self, requests: Sequence[Request]) -> None:
        """Take note of what the gate has made of the picked ids, for `pictures`."""

    def metrics(self) -> dict[str, float]: ...

    def pictures(self) -> dict[str, Any]:
        """As `pictures_of` says."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# ---- state


class Saved:
    """Saves the attributes that `state_names` lists, and loads them with the same types.

    An attribute with a `state_dict` of its own is loaded in place, any other value is replaced.
    """

    state_names: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {name: to_json(getattr(self, name)) for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expect(state, *self.state_names)
        for name in self.state_names:
            if hasattr(value := getattr(self, name), "load_state_dict"):
                value.load_state_dict(state[name])
            else:
                setattr(self, name, from_json(state[name]))


def refuse_state(how: str) -> None:
    raise WhetError(
        f"The checkpoint was written {how}; resume with the same recipe and data, or start a new run."
    )


def expect(state: Mapping[str, Any], *names: str) -> None:
    """Refuse a state that lacks one of these names; what reads a name before `Saved` does calls this first."""
    if missing := [name for name in names if name not in state]:
        refuse_state(f"without {missing[0]}, by another curriculum or an older version")


# dataclasses that a state may contain
RECORDS: dict[str, type] = {kind.__name__: kind for kind in (Batch, Group)}


def to_json(value: Any) -> Any:
    """JSON from which `from_json` makes an equal value of the same type. A dict with one key is a type and its content.

    >>> from_json(to_json([(1, "a"), {2: {3}}, np.array([1.5], np.float32)]))
    [(1, 'a'), {2: {3}}, array([1.5], dtype=float32)]
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple | set):
        return {
            type(value).__name__: [
                to_json(item) for item in (sorted(value) if isinstance(value, set) else value)
            ]
        }
    if isinstance(value, np.ndarray):
        return {"array": [pack(value), value.dtype.name, list(value.shape)]}
    if isinstance(value, Rollout):
        return {"Rollout": rollout_to_json(value)}
    return {
        type(value).__name__: {
            field.name: to_json(getattr(value, field.name)) for field in fields(value)
        }
    }


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        text, dtype, shape = content
        return unpack(text, dtype).reshape(shape)
    if kind == "Rollout":
        return rollout_from_json(content)
    if kind in RECORDS:
        return RECORDS[kind](**{name: from_json(item) for name, item in content.items()})
    return {"dict": dict, "tuple": tuple, "set": set}[kind](from_json(content))


def rows_to_json(rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The entries of some rows: all others are as in a new object."""
    return {
        "rows": pack(rows.astype(np.int32)),
        **{name: pack(column[rows]) for name, column in columns.items()},
    }


def rows_from_json(state: Mapping[str, str], columns: Mapping[str, np.ndarray]) -> None:
    """Write saved rows into new columns."""
    expect(state, "rows", *columns)
    rows = unpack(state["rows"], np.int32)
    for name, column in columns.items():
        column[rows] = unpack(state[name], column.dtype).reshape(-1, *column.shape[1:])


def pack(array: np.ndarray) -> str:
    """The bytes of an array as base64: exact and compact in JSON, little-endian on every machine."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def unpack(text: str, kind: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.dtype(kind).newbyteorder("<")).astype(kind)


class Wrapper(Saved):
    """A curriculum around another. It passes most calls on; each kind has its own `emit`, `updated` and `metrics`."""

    state_names: tuple[str, ...] = ("inner",)

    def __init__(self, inner: Curriculum):
        self.inner, self.needs = inner, inner.needs

    def plan(self, clock: Clock) -> list[Request]:
        return self.inner.plan(clock)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.inner.observe(rollouts)

    def holds(self) -> set[int]:
        return self.inner.holds()

    def waits(self) -> set[int]:
        return self.inner.waits()

    def pictures(self) -> dict[str, Any]:
        return pictures_of(self.inner)

    def sentences(self) -> list[str]:
        return sentences_of(self.inner)


def sentences_of(part: object) -> list[str]:
    """What a curriculum has decided since the last call, in sentences for the user, if it decides anything."""
    return list(getattr(part, "sentences", list)())


def pictures_of(part: object) -> dict[str, Any]:
    """What a curriculum, a source or an engine shows of itself on a run's page (`whet.pictures`), if it does. Those of
    curricula are histograms of BINS equal bins, of the time since the last call."""
    return dict(getattr(part, "pictures", dict)())


BINS = 20


def binned(values: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """The bin of each value, of BINS equal ones from low to high.

    >>> binned(np.array([0.0, 0.049, 0.05, 0.5, 1.0])).tolist()
    [0, 0, 1, 10, 19]
    """
    return np.clip((values - low) * (BINS / (high - low or 1.0)), 0, BINS - 1).astype(np.int64)


def named(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics under their full names."""
    return {f"curriculum/{name}": float(value) for name, value in values.items()}


# ---- progress of a run, by which stages end

SPAN = 20  # updates that a moving average reaches back
# a smaller gain of the reward is no progress. OURS, like SPAN: FastCuRL gives no exact rule
GAIN = 0.01


def smoothed(before: float | None, value: float) -> float:
    """Exponential moving average m + 2 / (SPAN + 1) * (x - m), which starts with its first value."""
    return value if before is None else before + 2.0 / (SPAN + 1) * (value - before)


class Evidence(Saved):
    """The rollouts since the last update, as far as they may count at the next one.

    All of them count, unless an update cuts what runs (`Clock.cut`): then only those of decided groups do. Among the
    others the short rollouts are finished and the long ones are not, so their mean would be biased.
    """

    state_names = ("rollouts",)

    def __init__(self, rollouts: Sequence[Rollout] = ()) -> None:
        self.rollouts = list(rollouts)

    def emitted(self, clock: Clock) -> None:
        """Drop rollouts of older versions: their groups were let go before this batch."""
        if clock.cut:
            self.rollouts = [
                rollout for rollout in self.rollouts if rollout.first_version >= clock.version
            ]

    def updated(self, clock: Clock, held: Collection[int]) -> list[Rollout]:
        """Return the rollouts that count and start anew; `held` are the groups that are not decided yet."""
        rollouts = self.rollouts
        self.rollouts = []
        return [rollout for rollout in rollouts if not (clock.cut and rollout.group_id in held)]


class Progress(Saved):
    """Reward and share of truncated responses, smoothed over updates, and whether the reward has stalled."""

    state_names = ("reward", "truncated", "_past")

    def __init__(self, plateau: int = 0):
        self.plateau = plateau  # updates that `stalled` looks back; with 0 the reward never stalls
        self.reward: float | None = None
        self.truncated: float | None = None  # None before the first update with responses
        # smoothed rewards of the last `plateau` updates and the one before them
        self._past: list[float] = []

    def update(self, rollouts: Sequence[Rollout]) -> None:
        """Learn from the rollouts of an update; cut ones say nothing, unjudged ones say nothing about the reward."""
        done = [rollout for rollout in rollouts if rollout.finish != "cut"]
        rewards = [
            rollout.reward for rollout in done if rollout.judged and rollout.reward is not None
        ]
        if done:
            self.truncated = smoothed(
                self.truncated, sum(r.finish == "length" for r in done) / len(done)
            )
        if rewards:
            # added one by one
            self.reward = smoothed(self.reward, float(np.cumsum(rewards)[-1]) / len(rewards))
        if self.reward is not None and self.plateau:
            self._past = [*self._past, self.reward][-self.plateau - 1 :]

    @property
    def stalled(self) -> bool:
        """True if the smoothed reward gained less than `GAIN` over the last `plateau` updates."""
        return 0 < self.plateau < len(self._past) and self._past[-1] - self._past[0] < GAIN
