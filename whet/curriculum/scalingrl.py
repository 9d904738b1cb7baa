"""ScalingRL's moving pool ("Scale Down to Speed Up", EMNLP Findings 2025): a small set of prompts, chosen each epoch.

`ScalingRLSource` is a source for any gate, and CurES's source can draw inside its active set (`refresh`, `version`,
`active`, then `drawn`). An epoch ends when the active set was handed out once; then all prompts are scored by what
their rollouts have shown (`History`), and the next set is chosen. The paper's reference traces are not needed: levels
come with the data, lengths from own rollouts. Without levels, difficulty has no weight (`build.notes_of` tells the user
once). Equations are the paper's, with u = 1 - w_t the progress of the run, 0..1; OURS marks what it leaves open or
contradicts, and docs/scalingrl.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet import config
from whet.curriculum.base import BINS, binned, named, rows_from_json, rows_to_json
from whet.curriculum.source import Ids, Returns
from whet.errors import WhetError
from whet.types import Clock, Rollout

# ---- what rollouts have shown

MEMORY = 0.7  # share of the smoothed length that remains after a visit
WINDOW = 3  # groups whose pass rates make the recent one
# `kind`: what the last WINDOW groups of a prompt were like
UNSEEN, MIXED, ALL_WRONG, ALL_RIGHT = range(4)


class History:
    """Pass rates, lengths and visits: arrays with one entry per prompt, by row.

    A group's rollouts may come over several calls, and nothing marks the last one, so every call brings the values of
    its group up to date.
    """

    def __init__(self, prompts: int):
        self.handed = np.zeros(prompts, np.int32)  # times it was handed out
        self.visits = np.zeros(prompts, np.int32)  # groups with a verdict
        self.epoch = np.zeros(prompts, np.int32)  # epoch of the latest verdict
        self.kind = np.zeros(prompts, np.uint8)
        self.solved = np.zeros(prompts, np.bool_)  # some rollout was right, ever
        self.rate = np.zeros(prompts, np.float32)  # mean pass rate of the last WINDOW groups
        self.length = np.zeros(prompts, np.float32)  # tokens of a response, smoothed
        # The latest group, and the values before it:
        self.group = np.full(prompts, -1, np.int64)
        self.right, self.judged = np.zeros((2, prompts), np.int32)
        self.tokens = np.zeros(prompts, np.int64)
        self.rate_1, self.rate_2, self.length_before = np.zeros((3, prompts), np.float32)

    def add(self, rows: np.ndarray, *counts: np.ndarray, epoch: int) -> None:
        """Add judged rollouts by group: rows, and ids of groups, right ones, all, tokens. Late ones of an older group
        count with the prompt's latest group."""
        left = [rows, *counts]
        # each prompt once; if it has more groups, they come after that, in their order
        while len(left[0]):
            now = np.unique(left[0], return_index=True)[1]
            self._add(epoch, *(of[now] for of in left))
            left = [np.delete(of, now) for of in left]

    def _add(
        self, epoch: int, rows: Any, groups: Any, right: Any, judged: Any, tokens: Any
    ) -> None:
        """Add groups of different prompts."""
        begins = groups > self.group[rows]
        new = rows[begins]
        again = new[self.visits[new] > 0]
        self.rate_2[again], self.rate_1[again] = (
            self.rate_1[again],
            self.right[again] / self.judged[again],
        )
        self.length_before[again] = self.length[again]
        self.group[new], self.visits[new] = groups[begins], self.visits[new] + 1
        self.right[new] = self.judged[new] = self.tokens[new] = 0
        for column, more in ((self.right, right), (self.judged, judged), (self.tokens, tokens)):
            column[rows] += more.astype(column.dtype)
        self.epoch[rows], self.solved[rows] = epoch, self.solved[rows] | (right > 0)
        right = self.right[rows]
        judged = self.judged[rows]
        visits = self.visits[rows]
        before = [
            np.where(visits > k, rate[rows], 0.0)
            for k, rate in ((1, self.rate_1), (2, self.rate_2))
        ]
        old = np.where(visits > 1, MEMORY, 0.0)
        self.rate[rows] = (right / judged + before[0] + before[1]) / np.minimum(visits, WINDOW)
        self.length[rows] = old * self.length_before[rows] + (1.0 - old) * (
            self.tokens[rows] / judged
        )
        rates = self.rate[rows]
        mixed = ((rates > 0) & (rates < 1)) | (judged == 1)  # a single verdict does not tell
        self.kind[rows] = np.where(mixed, MIXED, np.where(rates > 0, ALL_RIGHT, ALL_WRONG))

    def flat(self, rows: np.ndarray) -> np.ndarray:
        """A mask: rows whose latest group was all right or all wrong, so that it had no part in a gradient."""
        right = self.right[rows]
        judged = self.judged[rows]
        return ((right == 0) | (right == judged)) & (judged > 1)

    def inherit(self, older: History, rows: np.ndarray, theirs: np.ndarray) -> None:
        """Take over the values of the rows `theirs` of `older`; none of its verdicts is of an epoch to come."""
        known = np.isin(theirs, older.known)
        rows = rows[known]
        theirs = theirs[known]
        for name, column in vars(self).items():
            column[rows] = getattr(older, name)[theirs]
        self.epoch[rows] = 0

    @property
    def known(self) -> np.ndarray:
        """Rows that were handed out or judged."""
        return np.flatnonzero((self.handed > 0) | (self.visits > 0))

    def state_dict(self) -> dict[str, Any]:
        return rows_to_json(self.known, vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.__init__(len(self.handed))  # type: ignore[misc]
        rows_from_json(state, vars(self))


# ---- the score: how much each prompt is worth training on now. Arrays have one entry per prompt, unless said otherwise

# alpha, beta, gamma of eqs. 3-5: how far the targets end above the average. OURS: not given
GROWTH = 0.3
LEAST_SD = 1e-3  # a set without spread would make the bells infinitely narrow. OURS
# Least width of R's bell. Where few prompts are solved, their rates hardly differ, and a bell as narrow as that around
# a target of 0.1 would exclude those solved every second time, which teach the most. OURS.
LEAST_RATE_SD = 0.25
# temperatures. OURS: the paper's T_0 is not given, and its last one, 0, cannot divide
HOTTEST, COLDEST = 0.3, 0.02
ETA, FARTHEST = 0.1, 2.0  # adaptive weights: the size of a step, and how far a logit may move. OURS
# between ranks that no score may cross: a key is at most 1 / COLDEST plus Gumbel noise
_TIER = np.float32(128.0)


def bell(values: np.ndarray, target: float, sd: float) -> np.ndarray:
    """exp(-(x - target)^2 / (2 sd^2)), the form of eqs. 3-5."""
    scale = -0.5 / max(sd, LEAST_SD) ** 2
    distance = values - values.dtype.type(target)
    return np.exp(distance * distance * values.dtype.type(scale))


def moments(values: np.ndarray, known: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the known values, or (0, 0) if there are none. Unknown ones must hold 0."""
    count = int(np.count_nonzero(known))
    if not count:
        return 0.0, 0.0
    mean = float(values.sum(dtype=np.float64)) / count
    distance = (values - values.dtype.type(mean)) * known
    return mean, math.sqrt(float((distance * distance).sum(dtype=np.float64)) / count)


def nearness(values: np.ndarray, known: np.ndarray, signal: np.ndarray, u: float) -> np.ndarray:
    """D and C (eqs. 3 and 4): a bell around the target level (or length), as wide as the values' standard deviation. A
    value that is not known yet counts as the average one (OURS)."""
    mean, sd = moments(values, known)
    target = target_value(values, known, signal, u)
    near = bell(values, target, sd)
    near[~known] = bell(np.array([mean], values.dtype), target, sd)[0]
    return near


def target_value(values: np.ndarray, known: np.ndarray, signal: np.ndarray, u: float) -> float:
    """avg (1 + 0.3 u) of eqs. 3 and 4: the target slides from the average to above it.

    OURS: the average is over prompts with `signal` (over all, while none has any), as the paper's is over candidates
    that are neither always nor never solved. The target stays within one standard deviation of that average, and
    within the values: on a scale from 7 to 9 the printed one is 10.4, beyond the hardest prompt that is ever solved.
    """
    useful = known & signal
    if not useful.any():
        useful = known
    if not useful.any():
        return 0.0
    mean, sd = moments(values * useful, useful)
    low = float(values.min(where=known, initial=np.inf))
    high = float(values.max(where=known, initial=-np.inf))
    return min(max(mean * (1.0 + GROWTH * u), mean - sd, low), mean + sd, high)


def adaptability(
    rates: np.ndarray, known: np.ndarray, flat: np.ndarray, new: np.ndarray, u: float
) -> np.ndarray:
    """R: eq. 5 on pass rates, 0..1, instead of rewards (OURS), so that the target does not flip with their sign.

    0 where the mean over the recent groups is at an end (`flat`: all right or all wrong, so that a group baseline had
    nothing to learn from any of them), 1 for a `new` prompt (OURS: optimistic, so that it is tried), else a bell
    around p* = clip(p_avg (1 + 0.3 u), 0.1, 0.9), at least 0.25 wide. A prompt that was handed out but not judged
    counts as average (OURS).
    """
    mean, sd = moments(rates, known)
    sd = max(sd, LEAST_RATE_SD)
    target = target_rate(mean, u)
    near = bell(rates, target, sd)
    near[~known] = bell(np.array([mean], rates.dtype), target, sd)[0] if known.any() else 1.0
    near[new] = 1.0
    near[flat] = 0.0
    return near


def target_rate(mean: float, u: float) -> float:
    """p* of eq. 5.

    >>> target_rate(0.5, 1.0), target_rate(0.02, 0.0), target_rate(0.8, 1.0)
    (0.65, 0.1, 0.9)
    """
    return min(max(mean * (1.0 + GROWTH * u), 0.1), 0.9)


def score(components: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """DES = sum of weight_i component_i (eq. 1); components is [3, prompts]: D, C, R."""
    total = components[0] * components.dtype.type(weights[0])
    for component, weight in zip(components[1:], weights[1:], strict=True):
        total += component * components.dtype.type(weight)
    return total


# ---- weights of the components


def softmax_weights(weights: Sequence[float], shift: Sequence[float]) -> tuple[float, ...]:
    """softmax(log weight_i + shift_i) (eq. 2): the weights themselves, made to sum to 1, where nothing was shifted."""
    parts = [weight * math.exp(by) for weight, by in zip(weights, shift, strict=True)]
    return tuple(part / sum(parts) for part in parts)


def shifted(shift: Sequence[float], components: np.ndarray, gain: np.ndarray) -> list[float]:
    """The step of the adaptive weights. OURS: the paper calls them learnable, but a discrete choice has no gradient.

    shift_i += 0.1 corr(component_i, gain) over the prompts of the last epoch, kept within +-2. The gain of a prompt
    is its mean |advantage|, 2 p (1 - p).
    """
    steps = [ETA * correlation(component, gain) for component in components]
    return [min(max(by + step, -FARTHEST), FARTHEST) for by, step in zip(shift, steps, strict=True)]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; 0 where one of the two has no spread."""
    if len(a) < 2:
        return 0.0
    x, y = (values.astype(np.float64) - float(values.mean(dtype=np.float64)) for values in (a, b))
    spread = math.sqrt(float(x @ x) * float(y @ y))
    return min(max(float(x @ y) / spread, -1.0), 1.0) if spread > 1e-12 else 0.0


# ---- choosing


def temperature(u: float) -> float:
    """T = max(0.02, 0.3 (1 - u)): eq. 7 with a floor."""
    return max(COLDEST, HOTTEST * (1.0 - u))


def rank(
    scores: np.ndarray,
    eligible: np.ndarray,
    mode: str,
    u: float,
    rng: np.random.Generator,
    *,
    share: float,
    cut: float,
) -> tuple[np.ndarray, int]:
    """Keys, of which the largest are to be chosen, and how many to choose.

    gumbel_topk     share x prompts, drawn without replacement with logits DES / T, of those that reach `cut`
    des_threshold   all with DES >= cut
    rel_threshold   all with P / P_max = exp((DES - DES_max) / T) >= cut, that is DES >= DES_max + T log(cut)
    random, fixed   share x prompts, whatever they score: the baselines of a choice

    Eq. 8 as printed, P >= 0.6, is met by no prompt of thousands; the published counts fit DES >= 0.6. Prompts below
    the cut rank behind all that reach it, and those that are not eligible last, so a set can be filled in that order.
    """
    most = max(1, round(share * len(scores)))
    if mode in ("random", "fixed"):
        return rng.random(len(scores), dtype=np.float32), most
    best = float(np.max(scores, where=eligible, initial=0.0))
    level = best + temperature(u) * math.log(cut) if mode == "rel_threshold" else cut
    good = (scores >= scores.dtype.type(level - 1e-6)) & eligible
    size = int(np.count_nonzero(good))
    keys = scores.astype(np.float32)
    if mode == "gumbel_topk":
        size = min(size, most)
        keys *= np.float32(1.0 / temperature(u))
        keys -= np.log(
            np.maximum(rng.standard_exponential(len(scores), dtype=np.float32), np.float32(1e-30))
        )
    keys -= _TIER * (~good).astype(np.float32)
    keys -= _TIER * (~eligible).astype(np.float32)
    return keys, size


def choose(keys: np.ndarray, size: int, parts: Sequence[tuple[np.ndarray, int]] = ()) -> np.ndarray:
    """Rows of the `size` largest keys, ascending; of each part (a mask) at least so many, as far as it has them."""
    rows = _largest(keys, size)
    parts = [(part, min(least, int(np.count_nonzero(part)))) for part, least in parts]
    if all(np.count_nonzero(part[rows]) >= least for part, least in parts):
        return np.sort(rows)
    keys = keys.copy()
    for part, least in parts:
        inside = np.flatnonzero(part)
        keys[inside[_largest(keys[inside], least)]] = np.inf
    return np.sort(_largest(keys, size))


def _largest(keys: np.ndarray, count: int) -> np.ndarray:
    if count >= len(keys):
        return np.arange(len(keys))
    return (
        np.argpartition(keys, len(keys) - count)[len(keys) - count :]
        if count > 0
        else np.zeros(0, np.int64)
    )


# ---- the pool

# gumbel_topk takes no lower score. OURS: with the paper's weights, at most one of the components
# fits it
FLOOR = 0.4
# Chance per epoch that a prompt whose recent groups were all wrong, or all right, is tried again (Nemotron-Cascade's).
AGAIN_HARD = 0.10
AGAIN_EASY = 0.01


class ScalingRLSource(Returns):
    """The active set in a shuffled order, then the next one."""

    state_names = (
        *(
            "all_ids",
            "version",
            "active",
            "used",
            "step",
            "recent",
            "asked",
            "returned",
            "shift",
            "distinct",
        ),
        *("_components", "_gauges", "history"),
    )

    def __init__(
        self,
        ids: Sequence[str],
        seed: int,
        *,
        levels: Sequence[float | None] | np.ndarray = (),
        **settings: Any,
    ):
        """`levels`: one per id, None where the data has none; `settings` are those of `config.ScalingRL`."""
        super().__init__()
        self.settings = config.ScalingRL(**settings)
        weights, select, new, old = (
            getattr(self.settings, name) for name in ("weights", "select", "new", "old")
        )
        if min(weights) < 0 or not 0 < sum(weights) < math.inf:
            components = "difficulty, complexity and adaptability"
            raise WhetError(
                f"scalingrl.weights = {list(weights)} must be 0 or more, not all 0: {components}."
            )
        if new + old > 1:
            both = f"scalingrl.new = {new} and scalingrl.old = {old}"
            raise WhetError(f"{both} are shares of one set, at most 1 together.")
        assert len(levels) in (0, len(ids)), "one level per id"
        self.all_ids = Ids.of(ids)
        self.seed = seed
        self.cut = FLOOR if select == "gumbel_topk" else self.settings.threshold
        self.blind = select in ("random", "fixed")  # nothing is chosen by the score
        values = numbers(levels) if len(levels) else np.full(len(ids), np.nan, np.float32)
        self._has_level = np.isfinite(values)
        self._levels = np.where(self._has_level, values, np.float32(0.0))
        known = self._levels[self._has_level]
        self._scale = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        if not len(known) and not self.blind:  # the other two weights keep their proportion (OURS)
            if not sum(weights[1:]):
                cure = "add a level column to the data, or weigh complexity or adaptability"
                without = f"but no training prompt has a number as its level; {cure}"
                raise WhetError(
                    f"scalingrl.weights = {list(weights)} weigh difficulty alone, {without}."
                )
            weights = (0.0, weights[1], weights[2])
        self.base_weights = weights
        self.history = History(len(ids))
        self.version = 0  # sets chosen so far; a source that draws inside the active set watches it
        # rows of the active set, in the order they are handed out
        self.active = np.zeros(0, np.int32)
        self.used = 0  # rows of the active set that were handed out
        self.step = 0
        self.recent: list[int] = []  # rows handed out for the update of this step
        self.asked = 0  # the most prompts that one update took since the active set was chosen
        self.shift = [0.0, 0.0, 0.0]  # shift of the adaptive weights
        self.distinct = 0  # different prompts handed out so far
        # D, C and R of the active set when it was chosen
        self._components = np.zeros((3, 0), np.float32)
        self._gauges: dict[str, float] = {}
        # scores of all prompts when a set was chosen, until they were shown
        self._scores: dict[str, Any] = {}

    # A source

    def pick(self, k: int, clock: Clock) -> list[str]:
        self._enter(clock)
        picked = self.take_back(k)
        self.recent += [row for row in self.all_ids.rows(picked).tolist() if row >= 0]
        while len(picked) < k:
            self.refresh(clock, k - len(picked))
            ids = [
                self.all_ids[row]
                for row in self.active[self.used : self.used + k - len(picked)].tolist()
            ]
            self.drawn(ids)
            picked += ids
        return picked

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        judged = [rollout for rollout in rollouts if rollout.judged]
        counts = np.array(
            [(r.group_id, r.verdict == "right", 1, r.length) for r in judged], np.int64
        ).reshape(-1, 4)
        _, first, of = np.unique(counts[:, 0], return_index=True, return_inverse=True)
        rows = self.all_ids.rows([judged[i].prompt_id for i in first.tolist()])
        order = np.argsort(first)  # as they came
        order = order[rows[order] >= 0]  # the others are of another part of the data
        sums = [
            np.bincount(of, column, len(first)).astype(np.int64)[order]
            for column in counts[:, 1:].T
        ]
        self.history.add(rows[order], counts[first[order], 0], *sums, epoch=self.version)

    # The pool, for a source that draws inside it

    @property
    def left(self) -> int:
        """Draws before the active set is used up."""
        return len(self.active) - self.used

    def prepare(self) -> None:
        """Choose the first set, so that the first update does not have to wait for it."""
        self._next_set(0.0, least=1)

    def refresh(self, clock: Clock, wanted: int = 0) -> None:
        """Choose the next set if this one was handed out once; `wanted` are to be drawn now."""
        self._enter(clock)
        least = max(clock.groups, self.asked, len(self.recent) + wanted)
        # also a prepared set that is too small
        if self.left <= 0 or (not self.used and len(self.active) < least):
            self._next_set(clock.progress, least)
            self.asked = len(self.recent)

    def _enter(self, clock: Clock) -> None:
        if clock.step != self.step:
            self.step = clock.step
            self.recent = []

    def drawn(self, ids: Sequence[str]) -> None:
        """Note that these were handed out, by `pick` or by a source that draws inside the active set."""
        rows = self.all_ids.rows(ids)
        assert (rows >= 0).all(), f"some of {ids} are not of these prompts"
        self.distinct += int(np.count_nonzero(self.history.handed[np.unique(rows)] == 0))
        np.add.at(self.history.handed, rows, 1)
        self.recent += rows.tolist()
        self.used += len(ids)
        self.asked = max(self.asked, len(self.recent))

    def inherit(self, older: ScalingRLSource) -> None:
        """Take over the history of shared prompts from the pool of an earlier stage. Its sets are over."""
        self.history.inherit(older.history, *self.all_ids.shared(older.all_ids))

    # Choosing

    def _next_set(self, progress: float, least: int) -> None:
        """Choose a set of at least `least` prompts, the number that one update requests. OURS: an update should need no
        prompt twice, so prompts that it was handed already rank last."""
        if self.settings.adaptive and self._components.shape[1] == len(self.active):
            visited = self._visited()
            rates = (
                self.history.right[self.active[visited]] / self.history.judged[self.active[visited]]
            )
            gain = 2.0 * rates * (1.0 - rates)  # mean |advantage| since the components were taken
            self.shift = shifted(self.shift, self._components[:, visited], gain)
        rng = np.random.default_rng((self.seed, self.version))
        eligible = (self.history.kind <= MIXED) | _again(self.history.kind, rng)
        eligible[self.recent] = False
        components = self._components_of(progress)
        scores = score(components, self.weights)
        if self.settings.select == "fixed" and self.version:
            rows = np.sort(self.active)
        else:
            share = self.settings.share
            select = self.settings.select
            keys, size = rank(scores, eligible, select, progress, rng, share=share, cut=self.cut)
            keys[self.recent] -= np.float32(1e6)
            size = min(max(size, least), len(keys))
            # Prompts never handed out, and prompts once solved, get at least their shares, whatever they score.
            new = self.history.handed == 0
            solved = self.history.solved & eligible
            shares = [
                (new, math.ceil(self.settings.new * size)),
                (solved & ~new, math.ceil(self.settings.old * size)),
            ]
            rows = choose(keys, size, shares if not self.blind else ())
        self._gauges = self._describe(rows, scores[rows], self._levels[rows][self._has_level[rows]])
        low = float(scores.min())
        high = float(scores.max())
        bins = binned(scores, low, high)
        counts, active = (np.bincount(of, minlength=BINS).tolist() for of in (bins, bins[rows]))
        self._scores = {
            "low": round(low, 4),
            "high": round(high, 4),
            "counts": counts,
            "active": active,
        }
        rows = rng.permutation(rows)
        rows = rows[np.argsort(np.isin(rows, self.recent), kind="stable")]
        self._components = components[:, rows] if self.settings.adaptive else self._components
        self.active = rows.astype(np.int32)
        self.version = self.version + 1
        self.used = 0

    def _components_of(self, u: float) -> np.ndarray:
        """D, C and R of every prompt. Levels come from the data only: how often a prompt was solved enters through R,
        and where few are, a bell around the average level would exclude just those that are solved sometimes."""
        history = self.history
        seen = history.visits > 0
        mixed = history.kind == MIXED
        levels = nearness(self._levels, self._has_level, mixed, u)
        lengths = nearness(history.length, seen, mixed, u)
        rates = adaptability(history.rate, seen, history.kind >= ALL_WRONG, history.handed == 0, u)
        return np.stack([levels, lengths, rates])

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of difficulty, complexity and adaptability; they sum to 1."""
        return softmax_weights(self.base_weights, self.shift)

    def _visited(self) -> np.ndarray:
        """A mask over the active set: which got a verdict since it was chosen."""
        return (self.history.epoch[self.active] == self.version) & (
            self.history.visits[self.active] > 0
        )

    # Metrics and state

    def metrics(self) -> dict[str, float]:
        """`epoch` counts active sets, fractionally; the other gauges are of the moment the active set was chosen."""
        done = self.used / len(self.active) if self.version else 0.0
        weights = zip(
            ("weight_difficulty", "weight_complexity", "weight_adaptability"),
            self.weights,
            strict=True,
        )
        values = {
            "epoch": max(self.version - 1, 0) + done,
            "prompts": len(self.all_ids),
            "active": len(self.active),
            "distinct": self.distinct,
            **self._gauges,
            **(dict(weights) if self.settings.adaptive else {}),
        }
        return named(values)

    def pictures(self) -> dict[str, Any]:
        """Prompts by score, and those of the active set among them, where a set was chosen since the last call."""
        shown = self._scores
        self._scores = {}
        return {"scores": shown} if shown else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._scores = {}  # a set that was chosen before the checkpoint was shown

    def _describe(
        self, rows: np.ndarray, scores: np.ndarray, levels: np.ndarray
    ) -> dict[str, float]:
        """Gauges of the set to come, and `zero_variance` of the one before."""
        low, high = self._scale
        last = np.zeros(len(self.all_ids), bool)
        last[self.active] = True
        return {
            "des_mean": _mean(scores),
            "new_share": _mean(self.history.handed[rows] == 0),
            "overlap": _mean(last[rows]),
            "zero_variance": _mean(self.history.flat(self.active[self._visited()])),
            "level_mean": _mean(levels),
            "level_easy": _mean(levels < low + (high - low) / 3),
            "level_hard": _mean(levels > high - (high - low) / 3),
        }


def numbers(levels: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Levels as an array, NaN where there is none or a word."""
    if isinstance(levels, np.ndarray):
        return levels.astype(np.float32)
    return np.array(
        [level if isinstance(level, int | float) else np.nan for level in levels], np.float32
    )


def _again(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A mask: prompts without signal that may be tried once more, if there are none with more to teach."""
    again = np.zeros(len(kinds), bool)
    for kind, chance in ((ALL_WRONG, AGAIN_HARD), (ALL_RIGHT, AGAIN_EASY)):
        rows = np.flatnonzero(kinds == kind)
        again[rows[rng.random(len(rows)) < chance]] = True
    return again


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0
