"""ScalingRL's moving pool: a small set of prompts, chosen anew each epoch by how effective they are to train on now.

`ScalingRLSource` is a source like any other: gates (`gate.py`) pick from it, and another source may draw inside its
active set (`refresh`, `version`, `ids` or `active`, then `drawn`). An epoch ends when the active set was handed out
once; then all prompts are scored (`des.py`) by what their rollouts have shown (`history.py`), and the next set is
chosen. The paper's reference traces are not needed: levels come with the data, lengths from own rollouts. Without
levels difficulty has no weight (`build.notes_of` says so once).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from whet.curriculum import des
from whet.curriculum.ids import ALL_RIGHT, ALL_WRONG, MIXED, History, Ids, pack, unpack
from whet.errors import WhetError
from whet.types import Clock, Rollout

Select = Literal["gumbel_topk", "des_threshold", "rel_threshold", "random", "fixed"]

AGAIN_HARD, AGAIN_EASY = 0.10, 0.01
"""Chance an epoch that a prompt whose latest group was all wrong, or all right, is tried again (Nemotron-Cascade's)."""


class ScalingRLSource:
    """The active set in a shuffled order, then the next one.

    >>> source = ScalingRLSource([f"p{i}" for i in range(100)], seed=0)
    >>> clock = Clock(step=0, version=0, groups=4, free=None, tokens=0, progress=0.0)
    >>> len(set(source.pick(18, clock))), source.version, len(source.ids())
    (18, 1, 18)
    >>> source.pick(1, clock)[0] in source.ids(), source.version
    (True, 2)
    """

    def __init__(
        self,
        ids: Sequence[str],
        seed: int,
        *,
        levels: Sequence[float | None] | np.ndarray = (),
        weights: tuple[float, float, float] = (0.4, 0.3, 0.3),
        adaptive: bool = False,
        select: Select = "gumbel_topk",
        share: float = 0.18,
        threshold: float = 0.6,
        floor: float = 0.4,
        new: float = 0.2,
        old: float = 0.1,
        target: Literal["moving", "fixed"] = "moving",
    ):
        """`levels`: one an id, None where the data has none. The others are `config.ScalingRL`'s; `target` = "fixed"
        looks for pass rates of 0.5 throughout."""
        des.check_weights(weights)
        if select not in des.MODES:
            raise WhetError(f'There is no selection "{select}"; scalingrl.select is one of {", ".join(des.MODES)}.')
        if new + old > 1:
            raise WhetError(
                f"scalingrl.new = {new} and scalingrl.old = {old} are shares of one set: at most 1 together."
            )
        self.all_ids, self.seed = Ids.of(ids), seed
        self.adaptive, self.select, self.target = adaptive, select, target
        self.share, self.new, self.old = share, new, old
        self.cut = floor if select == "gumbel_topk" else threshold
        self._given, self._has_level = _read_levels(levels, len(ids))
        known = self._given[self._has_level]
        self._scale = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        blind = select in ("random", "fixed")  # nothing is chosen by the score
        self.base_weights = weights if len(known) or blind else des.without_difficulty(weights)
        self.history = History(len(ids))
        self.version = 0
        """Sets chosen so far: who draws inside the active set looks again when it changes."""
        self.active = np.zeros(0, np.int32)
        """Its rows, in the order they are handed out."""
        self.used = 0  # of the active set
        self.step = 0
        self.recent: list[int] = []  # rows handed out for the update of this step
        self.asked = 0  # the most prompts that one update took since the active set was chosen
        self.returned: list[str] = []
        self.shift = [0.0, 0.0, 0.0]
        self.distinct = 0
        self._components = np.zeros((3, 0), np.float32)  # of the active set, when it was chosen
        self._gauges: dict[str, float] = {}

    # A source

    def pick(self, k: int, clock: Clock) -> list[str]:
        """What was given back first, then on through the active set and, if need be, the next ones."""
        self._enter(clock)
        picked, self.returned = self.returned[:k], self.returned[k:]
        self.recent += [row for row in map(self.all_ids.row, picked) if row is not None]
        while len(picked) < k:
            self.refresh(clock, k - len(picked))
            rows = self.active[self.used : self.used + k - len(picked)]
            ids = [self.all_ids[row] for row in rows.tolist()]
            self.drawn(ids)
            picked += ids
        return picked

    def give_back(self, ids: Sequence[str]) -> None:
        self.returned = [*ids, *self.returned]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        tallies: dict[int, tuple[str, list[int]]] = {}
        for rollout in rollouts:
            if rollout.judged:
                _, tally = tallies.setdefault(rollout.group_id, (rollout.prompt_id, [0, 0, 0]))
                tally[0] += rollout.verdict == "right"
                tally[1] += 1
                tally[2] += rollout.length
        for group_id, (prompt_id, (right, judged, tokens)) in tallies.items():
            row = self.all_ids.row(prompt_id)
            if row is None:  # of another part of the data
                continue
            self.history.add(row, group_id=group_id, right=right, judged=judged, tokens=tokens, epoch=self.version)

    # The pool, for who draws inside it

    def ids(self) -> list[str]:
        """The active set; all prompts before the first was chosen."""
        return [self.all_ids[row] for row in self.active.tolist()] if self.version else list(self.all_ids)

    @property
    def left(self) -> int:
        """Of the active set, not handed out yet."""
        return len(self.active) - self.used

    def prepare(self) -> None:
        """Chooses the first set before an update has to wait for it: among a million prompts that takes a while."""
        self._next_set(0.0, least=1)

    def refresh(self, clock: Clock, wanted: int = 0) -> None:
        """Chooses the next set if this one was handed out once; `wanted` are to be drawn now."""
        self._enter(clock)
        least = max(clock.groups, self.asked, len(self.recent) + wanted)
        if self.left <= 0 or (not self.used and len(self.active) < least):  # also a prepared set that is too small
            self._next_set(clock.progress, least)
            self.asked = len(self.recent)

    def _enter(self, clock: Clock) -> None:
        if clock.step != self.step:
            self.step, self.recent = clock.step, []

    def drawn(self, ids: Sequence[str]) -> None:
        """These were handed out, by `pick` or by a source that draws inside the active set."""
        for prompt_id in ids:
            row = self.all_ids.row(prompt_id)
            assert row is not None, f"{prompt_id} is not of these prompts"
            self.distinct += not self.history.handed[row]
            self.history.handed[row] += 1
            self.recent.append(row)
        self.used += len(ids)
        self.asked = max(self.asked, len(self.recent))

    def inherit(self, older: ScalingRLSource) -> None:
        """What an earlier source knew of the prompts that are here, too. Its sets are over."""
        self.history.inherit(older.history, *self.all_ids.shared(older.all_ids))

    # Choosing

    def _next_set(self, progress: float, least: int) -> None:
        """`least`: what one update asks for, since a gate may turn down most of it. OURS: an update should need no
        prompt twice, so what it was handed already ranks last."""
        if self.adaptive and self._components.shape[1] == len(self.active):
            self.shift = des.shifted(self.shift, *self._gains())
        rng = np.random.default_rng((self.seed, self.version))
        history = self.history
        eligible = (history.kind <= MIXED) | _again(history.kind, rng)
        eligible[self.recent] = False
        components = self._components_of(progress)
        scores = des.score(components, self.weights)
        if self.select == "fixed" and self.version:
            rows = np.sort(self.active)
        else:
            keys, size = des.rank(scores, eligible, self.select, progress, rng, share=self.share, cut=self.cut)
            keys[self.recent] -= np.float32(1e6)
            size = min(max(size, least), len(keys))
            rows = des.choose(keys, size, self._mix(history, eligible, size))
        self._gauges = self._describe(rows, scores[rows], self._given[rows][self._has_level[rows]])
        rows = rng.permutation(rows)
        rows = rows[np.argsort(np.isin(rows, self.recent), kind="stable")]
        self._components = components[:, rows] if self.adaptive else self._components
        self.active = rows.astype(np.int32)
        self.version, self.used = self.version + 1, 0

    def _components_of(self, u: float) -> np.ndarray:
        """D, C and R of every prompt. A level is the data's or unknown: how often a prompt was solved is R's matter,
        and where few are, a bell around the average level would rule out just those that are solved sometimes."""
        history = self.history
        seen, mixed = history.visits > 0, history.kind == MIXED
        flat, new = history.kind >= ALL_WRONG, history.handed == 0
        return np.stack(
            [
                des.nearness(self._given, self._has_level, mixed, u),
                des.nearness(history.length, seen, mixed, u),
                des.adaptability(history.rate, seen, flat, new, u, fixed=self.target == "fixed"),
            ]
        )

    def _mix(self, history: History, eligible: np.ndarray, size: int) -> list[tuple[np.ndarray, int]]:
        """Never handed out, and once solved: at least their shares, whatever they score."""
        if self.select in ("random", "fixed"):
            return []
        new = history.handed == 0
        return [(new, math.ceil(self.new * size)), (history.solved & eligible & ~new, math.ceil(self.old * size))]

    @property
    def weights(self) -> tuple[float, ...]:
        """Of difficulty, complexity and adaptability, summing to 1."""
        return des.softmax_weights(self.base_weights, self.shift)

    def _gains(self) -> tuple[np.ndarray, np.ndarray]:
        """The components of this epoch's prompts as they were chosen, and their mean |advantage| since."""
        visited = self._visited()
        rows = self.active[visited]
        rates = self.history.right[rows] / self.history.judged[rows]
        return self._components[:, visited], 2.0 * rates * (1.0 - rates)

    def _visited(self) -> np.ndarray:
        """Which of the active set got a verdict since it was chosen."""
        return (self.history.epoch[self.active] == self.version) & (self.history.visits[self.active] > 0)

    # Telling

    def metrics(self) -> dict[str, float]:
        """`epoch` counts active sets, fractionally; the other gauges are of the moment the active set was chosen."""
        done = self.used / len(self.active) if self.version else 0.0
        named = zip(("difficulty", "complexity", "adaptability"), self.weights, strict=True)
        values = {
            "epoch": max(self.version - 1, 0) + done,
            "prompts": float(len(self.all_ids)),
            "active": float(len(self.active)),
            "distinct": float(self.distinct),
            **self._gauges,
            **({f"weight_{name}": weight for name, weight in named} if self.adaptive else {}),
        }
        return {f"curriculum/{name}": value for name, value in values.items()}

    def _describe(self, rows: np.ndarray, scores: np.ndarray, levels: np.ndarray) -> dict[str, float]:
        """Of the set to come, and `zero_variance` of the one before."""
        kinds = self.history.kind[self.active[self._visited()]]
        low, high = self._scale
        last = np.zeros(len(self.all_ids), bool)
        last[self.active] = True
        return {
            "des_mean": _mean(scores),
            "new_share": _mean(self.history.handed[rows] == 0),
            "overlap": _mean(last[rows]),
            "zero_variance": _mean(kinds >= ALL_WRONG),
            "level_mean": _mean(levels),
            "level_easy": _mean(levels < low + (high - low) / 3),
            "level_hard": _mean(levels > high - (high - low) / 3),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.all_ids.fingerprint,
            "version": self.version,
            "active": pack(self.active),
            "used": self.used,
            "step": self.step,
            "recent": list(self.recent),
            "asked": self.asked,
            "returned": list(self.returned),
            "shift": list(self.shift),
            "distinct": self.distinct,
            "components": pack(self._components),
            "gauges": dict(self._gauges),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.all_ids.check(state["prompts"])
        self.version, self.used = state["version"], state["used"]
        self.active = unpack(state["active"], np.int32)
        self.step, self.asked = state.get("step", 0), state.get("asked", 0)  # older checkpoints lack them
        self.recent = list(state.get("recent", ()))
        self.returned = list(state["returned"])
        self.shift = list(state["shift"])
        self.distinct = state["distinct"]
        self._components = unpack(state["components"], np.float32).reshape(3, -1)
        self._gauges = dict(state["gauges"])
        self.history.load_state_dict(state["history"])


def _read_levels(levels: Sequence[float | None] | np.ndarray, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Values (0 where there is none, or a word), and which there are."""
    assert len(levels) in (0, prompts), "one level an id"
    values = numbers(levels) if len(levels) else np.full(prompts, np.nan, np.float32)
    known = np.isfinite(values)
    return np.where(known, values, np.float32(0.0)), known


def numbers(levels: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """As an array, NaN where there is none or a word.

    >>> numbers([3, None, 1.5]).tolist()
    [3.0, nan, 1.5]
    """
    if isinstance(levels, np.ndarray):
        return levels.astype(np.float32)
    return np.array([level if isinstance(level, int | float) else np.nan for level in levels], np.float32)


def _again(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Prompts without signal that may be tried once more, if there are none with more to say."""
    again = np.zeros(len(kinds), bool)
    for kind, chance in ((ALL_WRONG, AGAIN_HARD), (ALL_RIGHT, AGAIN_EASY)):
        rows = np.flatnonzero(kinds == kind)
        again[rows[rng.random(len(rows)) < chance]] = True
    return again


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0
