"""CurES's source (arXiv 2510.01037): prompts are drawn in proportion to rho*, by what their pass rate promises.

    rho*(x) = exp(sqrt(p (1 - p)) / tau) / sum of that over all prompts        (eq. 14)

maximises E[sigma] + tau H: a large tau is uniform, a small one takes the prompts nearest to half solved. p is the mean
of a Beta posterior (eqs. 22 to 24). OURS: draws within a step are without replacement (the paper draws with, its code
without within a batch), so a prompt is one group of a batch; and every draw uses all verdicts so far (in the released
code they never reach rho*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from whet import config
from whet.curriculum.allocation import sigma_of
from whet.curriculum.base import (
    BINS,
    Saved,
    binned,
    expect,
    named,
    refuse_state,
    rows_from_json,
    rows_to_json,
)
from whet.curriculum.groups import MEMORY
from whet.curriculum.scalingrl import ScalingRLSource, numbers
from whet.curriculum.source import Ids, Returns, WeightedRows
from whet.errors import WhetError
from whet.types import Clock, Request, Rollout

# ---- pass rates

# Share of the evidence of an earlier stage that is kept: its limit gave other pass rates, yet closer than 1/2. OURS.
INHERITED = 0.5


class Posterior(Saved):
    """Right and wrong verdicts of each prompt, by row: its index among `ids`.

    The paper forgets nothing within a subset and everything between subsets. `memory` below 1 (the decay of MoPPS,
    arXiv 2507.04632) is for a policy that drifts: with every update alpha <- memory alpha + (1 - memory) 1, and beta
    likewise, so the evidence beyond the prior shrinks by `memory`. It is applied when a prompt is read.

    The paper's prior is Beta(1, 1): an unseen prompt counts as half solved, the best there is. With `pooled`
    (empirical Bayes, OURS) it is Beta(2 m, 2 (1 - m)), m being the mean rate of the prompts seen so far: where few
    can be solved, an unseen prompt is worth less than one that was solved once, and is not drawn first. With `levels`,
    the level of each row counted from 0, m is the recent mean rate of the prompts of its level (OURS): so prompts that
    are seen only once are told apart, too.
    """

    state_names = ("ids", "now", "prior", "priors", "fitted")

    def __init__(
        self,
        ids: Sequence[str],
        memory: float = 1.0,
        pooled: bool = False,
        levels: np.ndarray | None = None,
    ):
        self.ids = Ids.of(ids)
        self.memory = memory
        self.pooled = pooled
        self.levels = np.zeros(len(self.ids), np.int32) if levels is None else levels
        self.by_level = levels is not None
        self.now = 0  # the present update
        self.fits = False  # `betas` is used
        self.clear()

    def clear(self) -> None:
        """Return to the prior."""
        self._right, self._wrong = np.zeros(len(self.ids)), np.zeros(len(self.ids))
        self._seen = np.full(len(self.ids), -1, np.int32)  # the update of the last verdict
        self._columns: dict[str, np.ndarray] = {
            "right": self._right,
            "wrong": self._wrong,
            "seen": self._seen,
        }
        count = 1 + int(self.levels.max(initial=0))
        self.prior = 0.5  # its mean, m, over all prompts
        self.priors = np.full(count, 0.5)  # the same of each level
        # a and b of a prior for each level by `fit_priors`, if `fits`
        self.fitted = np.full((count, 2), 0.5)

    def settle(self) -> None:
        """Follow what was seen: if `pooled`, m = (1 + sum of the rates) / (2 + prompts seen). Fading does not change a
        rate. A level's own m counts one prompt of rate m besides those seen, which fade by `MEMORY` per update."""
        if self.pooled:
            right = self._right[self.visited]
            wrong = self._wrong[self.visited]
            rates = right / (right + wrong)
            self.prior = float((1.0 + rates.sum()) / (2.0 + len(rates)))
            self.priors = np.full(len(self.priors), self.prior)
            if self.by_level:
                sums, seen = self._by_level(self.visited, rates)
                self.priors = (self.prior + sums) / (1.0 + seen)
        if self.fits:
            self.fitted = self.fit_priors()

    def _by_level(self, rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[levels], [levels]: sums of the values of these visited rows and of their weights, which fade."""
        weights = MEMORY ** (self.now - self._seen[rows])
        levels = self.levels[rows]
        count = len(self.priors)
        return np.bincount(levels, weights * values, count), np.bincount(levels, weights, count)

    @property
    def visited(self) -> np.ndarray:
        """Rows with a verdict."""
        return np.flatnonzero(self._seen >= 0)

    def seen(self, rows: np.ndarray) -> np.ndarray:
        """A mask: which of the rows have a verdict."""
        return self._seen[rows] >= 0

    def count(self, rollouts: Iterable[Rollout]) -> np.ndarray:
        """Add verdicts and return their rows. Rollouts of prompts that are not among `ids` are passed over."""
        judged = [rollout for rollout in rollouts if rollout.judged]
        found = self.ids.rows([rollout.prompt_id for rollout in judged])
        rows, of = np.unique(found[found >= 0], return_inverse=True)
        wrong = np.array([rollout.verdict == "wrong" for rollout in judged], bool)[found >= 0]
        self.add(rows, np.bincount(of, ~wrong, len(rows)), np.bincount(of, wrong, len(rows)))
        return rows

    def add(
        self,
        rows: np.ndarray,
        right: Sequence[float] | np.ndarray,
        wrong: Sequence[float] | np.ndarray,
    ) -> None:
        """Add counts of different rows."""
        fade = self._fade(rows)
        self._right[rows] = self._right[rows] * fade + right
        self._wrong[rows] = self._wrong[rows] * fade + wrong
        self._seen[rows] = self.now

    def mean(self, rows: np.ndarray, at: np.ndarray | int | None = None) -> np.ndarray:
        """alpha / (alpha + beta) = (2 m + right) / (2 + right + wrong), at the present update or at update `at`."""
        fade = self._fade(rows, at)
        right = self._right[rows] * fade
        wrong = self._wrong[rows] * fade
        return (2.0 * self.priors[self.levels[rows]] + right) / (2.0 + right + wrong)

    def histogram(self) -> list[int]:
        """Prompts by mean, in BINS; those without a verdict are at the prior of their level."""
        rows = self.visited
        count = len(self.priors)
        unseen = np.bincount(self.levels, minlength=count) - np.bincount(
            self.levels[rows], minlength=count
        )
        seen = np.bincount(binned(self.mean(rows)), minlength=BINS)
        return (seen + np.bincount(binned(self.priors), unseen, BINS).astype(np.int64)).tolist()

    def betas(self, rows: np.ndarray) -> list[tuple[float, float]]:
        """a and b of each prompt's posterior, for `speed.screening_pays`: its counts over the prior `fitted`."""
        fade = self._fade(rows)
        counts = np.stack([self._right[rows] * fade, self._wrong[rows] * fade], axis=1)
        return [(a, b) for a, b in (counts + self.fitted[self.levels[rows]]).tolist()]

    def fit_priors(self) -> np.ndarray:
        """[levels, 2]: a and b of the Beta distribution with the mean and the spread of the rates seen in a level.

        From k right of m verdicts, k / m and k (k - 1) / (m (m - 1)) estimate E[p] and E[p^2]. Each level counts one
        prompt with the moments of all prompts besides those seen, and they count one of Beta(1/2, 1/2): so a and b are
        above zero. a + b is at most 100, where prompts do not differ.
        """
        rows = self.visited[self._right[self.visited] + self._wrong[self.visited] >= 2]
        k = self._right[rows]
        m = self._right[rows] + self._wrong[rows]
        first, seen = self._by_level(rows, k / m)
        second, _ = self._by_level(rows, np.maximum(k * (k - 1), 0.0) / (m * (m - 1)))
        mean = (0.5 + first.sum()) / (1 + seen.sum())
        square = (0.375 + second.sum()) / (1 + seen.sum())
        if self.by_level:
            first = (mean + first) / (1 + seen)
            second = (square + second) / (1 + seen)
        else:
            first = np.array([mean])
            second = np.array([square])
        strength = (first - second) / np.maximum(second - first**2, 0.01 * (first - second))
        return np.stack([first, 1.0 - first], axis=1) * strength[:, None]

    def inherit(self, older: Posterior) -> None:
        """Take over the counts of shared prompts, at `INHERITED` of their weight."""
        rows, theirs = self.ids.shared(older.ids)
        self.now, self._seen[rows] = older.now, older._seen[theirs]
        self._right[rows], self._wrong[rows] = (
            INHERITED * older._right[theirs],
            INHERITED * older._wrong[theirs],
        )
        self.settle()

    def _fade(self, rows: np.ndarray, at: np.ndarray | int | None = None) -> np.ndarray | float:
        if self.memory == 1.0:
            return 1.0
        passed = np.maximum((self.now if at is None else at) - self._seen[rows], 0)
        # each power once
        return np.power(self.memory, np.arange(passed.max(initial=0) + 1.0))[passed]

    def state_dict(self) -> dict[str, Any]:
        """The counts of visited prompts, about 32 bytes each."""
        return {**super().state_dict(), **rows_to_json(self.visited, self._columns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        super().load_state_dict(state)
        rows_from_json(state, self._columns)


# ---- the source

# exponents are clipped here: a sum of a million e^640 is still finite, and e^-640 is not zero
LARGEST = 640.0
TOO_SMALL, TOO_LARGE = 1e-250, 1e250  # a sum of weights outside this range may contain clipped ones

# Prompts whose weights are recomputed per update where evidence fades. With more prompts they take turns: at a million
# a weight is up to 15 updates behind, unless its prompt was judged since. OURS; estimates and divisions never lag.
TURN = 1 << 16


class CuresSource(Returns):
    """Draws prompt x in proportion to exp(sqrt(p (1 - p)) / tau), where p is the mean of its posterior.

    See `config.CuresSettings`; between subsets, which are split at random, the counts are forgotten.
    rest: further steps for which a drawn prompt is not drawn again, for gates that request ahead. entries: (prompts,
    weight) of each data entry, in the order of `ids`; the weight multiplies rho*. pool: draw only from its moving set
    of prompts; the counts stay. levels: of the prompts, for prior = "level".
    """

    state_names = (
        "posterior",
        "probed",
        "pool",
        "turn",
        "began",
        "draws",
        "returned",
        "out",
        "fit",
        "_reference",
    )

    def __init__(
        self,
        ids: Sequence[str],
        seed: int,
        *,
        rest: int = 0,
        entries: Sequence[tuple[int, float]] = (),
        pool: ScalingRLSource | None = None,
        levels: Sequence[float | None] | np.ndarray = (),
        **settings: Any,
    ):
        super().__init__()
        self.settings = config.CuresSettings(**settings)
        subsets = self.settings.subsets
        if subsets > len(ids):
            raise WhetError(
                f"curriculum.cures.subsets = {subsets} of {len(ids)} prompts leave some empty; take fewer."
            )
        if subsets > 1 and pool is not None:
            why = "would split what a moving set has chosen; set it to 1"
            raise WhetError(f"curriculum.cures.subsets = {subsets} {why}.")
        self.ids = Ids.of(ids)
        self.seed = seed
        self.subsets = subsets
        self.rest = rest
        self.pool = pool
        prior = self.settings.prior
        known = numbers(levels)
        # else by the pool; those without are a level
        by_level = prior == "level" and bool(np.isfinite(known).any())
        found = np.unique(known, return_inverse=True)[1] if by_level else None  # counted from 0
        self.posterior = Posterior(self.ids, self.settings.memory, prior != "even", found)
        # verdicts of the probe of this subset, for sigma; None without a probe
        self.probed: Posterior | None = None
        # prompts of groups that wait for the coming batch; the gate sets it
        self.held: Callable[[], set[str]] = set
        # the weight of every prompt's data entry, where they differ
        self._entry: np.ndarray | None = None
        if len({weight for size, weight in entries if size}) > 1:
            assert sum(size for size, _ in entries) == len(ids), (
                "the entries are parts of the ids, in order"
            )
            self._entry = np.repeat(
                [weight for _, weight in entries], [size for size, _ in entries]
            )
        self.turn = -1  # subsets begun, less one
        self.began = 0  # the step at which the present subset began
        self.draws = 0
        # rows not to be drawn: step and estimate when they were drawn
        self.out: dict[int, tuple[int, float]] = {}
        # recent rollouts; their sums of estimates, right verdicts, squared errors
        self.fit = np.zeros(4)
        self.members = np.empty(0, np.int64)  # rows that may be drawn, if they are not out
        self._member = np.zeros(len(ids), bool)  # the same as a mask
        self._turns = -(-len(ids) // TURN)
        order = (
            np.random.default_rng((seed, subsets)).permutation(len(ids))
            if subsets > 1
            else np.arange(len(ids))
        )
        self._parts = [
            np.sort(part) if subsets > 1 else part for part in np.array_split(order, subsets)
        ]
        self._reference = 0.5  # sigma whose weight is 1
        self._pool_version: int | None = None
        # requests since the last picture, and their rollouts, by the prompt's rate
        self._asked = np.zeros((2, BINS))
        self._tree = WeightedRows(len(ids))
        if pool is None:
            self._choose_members()

    # The protocol

    def pick(self, k: int, clock: Clock) -> list[str]:
        """Pick by rho*; a prompt comes twice in a step only if all others came too, and twice into a batch only if
        there are fewer prompts than groups. Otherwise fewer than k may come."""
        self.enter(clock, k)
        picked = self.take_back(k)
        self._take_out(back := self.ids.rows(picked))
        self._tree.put(back, 0.0)
        while (lacking := k - len(picked)) > 0:
            if self.pool is not None:
                self.enter(clock, lacking)  # the next set, if this one is used up
                lacking = min(lacking, self.pool.left)
            drawn = [self.ids[row] for row in self._draw(lacking, clock.groups, picked)]
            if not drawn:
                break
            picked += drawn
            if self.pool is not None:
                self.pool.drawn(drawn)
        return picked

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Count every verdict, of any phase, also of groups that are dropped."""
        rows = self.ids.rows([rollout.prompt_id for rollout in rollouts]).tolist()
        fits = []
        for row, rollout in zip(rows, rollouts, strict=True):
            if rollout.judged and row in self.out:  # else it came late, and the estimate is gone
                estimate = self.out[row][1]
                right = float(rollout.verdict == "right")
                fits.append((1.0, estimate, right, (estimate - right) ** 2))
        self.fit += np.array(fits).reshape(-1, 4).sum(axis=0)
        self._weigh(self.posterior.count(rollouts))
        if probes := [rollout for rollout in rollouts if rollout.phase == "probe"]:
            self.probed = self.probed or Posterior(self.ids)
            self.probed.count(probes)
        if self.pool is not None:
            self.pool.observe(rollouts)

    def metrics(self) -> dict[str, float]:
        """How sharp rho* is, and whether its estimates are true.

        `effective_prompts` is (sum w)^2 / sum w^2 of the prompts that may be drawn now: all of them if rho* is
        uniform. `predicted` and `observed` are the recent pass rate as estimated at the draw and as it came; `brier`
        is the mean squared error, 0.25 for a coin. `chosen_mean` is the mean estimate of the prompts out now.
        """
        count, predicted, right, squares = self.fit.tolist()
        chosen = [estimate for _, estimate in self.out.values()]
        own = {
            "prompts": len(self.ids),
            "prompts_visited": len(self.posterior.visited),
            "subset": max(self.turn, 0) % self.subsets,
            "effective_prompts": effective(
                self._tree.weights[slice(None) if self.pool is None else self.members]
            ),
            "chosen_mean": sum(chosen) / len(chosen) if chosen else 0.0,
            "predicted": predicted / count if count else 0.0,
            "observed": right / count if count else 0.0,
            "brier": squares / count if count else 0.0,
        }
        return (self.pool.metrics() if self.pool is not None else {}) | named(own)

    def asked_for(self, requests: Sequence[Request]) -> None:
        rates = self.posterior.mean(self.ids.rows([request.prompt_id for request in requests]))
        sizes = [request.n for request in requests]
        self._asked += [np.bincount(binned(rates), weights, BINS) for weights in (None, sizes)]

    def pictures(self) -> dict[str, Any]:
        """Prompts by their mean pass rate now, and the mean rollouts of a request, by the rate when it was made."""
        asked, rollouts = self._asked.tolist()
        self._asked[:] = 0.0
        means = [
            round(total / count, 3) if count else None
            for count, total in zip(asked, rollouts, strict=True)
        ]
        own = {"posterior": {"counts": self.posterior.histogram(), "rollouts": means}}
        return own | (self.pool.pictures() if self.pool is not None else {})

    def state_dict(self) -> dict[str, Any]:
        return {"subsets": self.subsets, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expect(state, "subsets", "pool", "probed")
        if state["subsets"] != self.subsets or (state["pool"] is None) != (self.pool is None):
            refuse_state("with other subsets or without the moving set")
        self.probed = None if state["probed"] is None else Posterior(self.ids)
        super().load_state_dict(state)
        if self.turn >= 0 or self.pool is None:
            self._choose_members()

    def inherit(self, older: CuresSource) -> None:
        """Take over what an earlier source counted of shared prompts, before this one has drawn."""
        self.posterior.inherit(older.posterior)
        if self.pool is None:
            self._fill_tree()
        elif older.pool is not None:
            self.pool.inherit(older.pool)

    def estimates(self) -> Callable[[Sequence[str]], list[tuple[float, float]]]:
        """Give each prompt's a and b by its id, for `Speed`; from now on the prior is fitted with every update."""
        self.posterior.fits = True
        return lambda prompt_ids: self.posterior.betas(self.ids.rows(prompt_ids))

    def prepare(self) -> None:
        """Choose the first moving set, so that the first update does not have to wait for it."""
        if self.pool is not None:
            self.pool.prepare()
            self._choose_members()

    # Time

    def enter(self, clock: Clock, wanted: int = 0) -> bool:
        """Move to the time of the clock, at which `wanted` are to be drawn. True if a subset begins, also the first."""
        if self.pool is not None:
            self.pool.refresh(clock, wanted)
        begins = self.turn < 0 or (
            self.subsets > 1 and clock.step - self.began >= self.settings.subset_steps
        )
        if begins:
            if self.turn >= 0:
                self.posterior.clear()
                self.out.clear()
                self.probed = None
            self.turn, self.began = self.turn + 1, clock.step
        before = self.posterior.now
        moved = clock.step > self.posterior.now
        back = []
        if moved:
            self.posterior.now = clock.step
            self.posterior.settle()
            self.fit *= MEMORY
            back = [row for row, (step, _) in self.out.items() if step < clock.step - self.rest]
            for row in back:
                del self.out[row]
        if (begins and self.turn > 0) or (
            self.pool is not None and self.pool.version != self._pool_version
        ):
            self._choose_members()
        elif moved:
            self._weigh(np.array(back, np.int64))
            if self.posterior.pooled:  # the prior has moved, and with it every weight
                self._fill_tree()
            elif self.posterior.memory < 1.0:  # all evidence has faded
                for step in range(max(before, clock.step - self._turns) + 1, clock.step + 1):
                    self._fill_tree(step % self._turns * TURN, TURN)
        return begins

    def _choose_members(self) -> None:
        if self.pool is not None:
            self._pool_version = self.pool.version
            self.members = np.sort(self.pool.active).astype(np.int64)
        else:
            self.members = self._parts[max(self.turn, 0) % self.subsets]
        self._member[:] = False
        self._member[self.members] = True
        self._fill_tree()

    # Drawing

    def spread_rates(self, rows: np.ndarray) -> np.ndarray:
        """Pass rates for sigma: those of the probe, as in the paper, where it has a verdict; else the present ones."""
        rates = self.posterior.mean(rows)
        return (
            rates
            if self.probed is None
            else np.where(self.probed.seen(rows), self.probed.mean(rows), rates)
        )

    def _draw(self, k: int, groups: int, picked: Sequence[str]) -> list[int]:
        """Draw up to k rows. Resting prompts are called back once no other is left; those that the coming batch may
        already hold, or that came in this pick, only where there are fewer prompts than groups."""
        rng = np.random.default_rng((self.seed, self.subsets, self.draws))
        self.draws += 1
        drawn: list[int] = []
        while len(drawn) < k and len(self.members):
            if not self._tree.total:
                now = {*drawn, *self.ids.rows([*picked, *self.held()]).tolist()} - {-1}
                if now.issuperset(self.members.tolist()):
                    if len(self.members) >= groups:
                        break
                    now = set(drawn) if len(set(drawn)) < len(self.members) else set()
                self.out = {row: rested for row, rested in self.out.items() if row in now}
                self._fill_tree()
            elif not TOO_SMALL < self._tree.total < TOO_LARGE:
                # With a small tau all weights may be too small, or too large, to tell apart: the best one becomes 1.
                rows = np.flatnonzero(self._tree.weights)
                self._reference = float(sigma_of(self.posterior.mean(rows)).max())
                self._fill_tree()
            rows = self._tree.draw(k - len(drawn), rng, TOO_SMALL)
            self._take_out(rows)
            drawn += rows.tolist()
        return drawn

    def _take_out(self, rows: np.ndarray) -> None:
        for row, estimate in zip(rows.tolist(), self.posterior.mean(rows).tolist(), strict=True):
            self.out[row] = (self.posterior.now, estimate)

    def _weigh(self, rows: np.ndarray) -> None:
        """Recompute the weights of these rows, except those that are out."""
        free = sorted({row for row in rows[self._member[rows]].tolist() if row not in self.out})
        if free:
            self._tree.put(np.array(free), self._weights(np.array(free)))

    def _fill_tree(self, first: int = 0, count: int = 0) -> None:
        """Recompute all weights, or those of `count` rows from row `first` on, whose turn it is."""
        part = slice(first, min(first + count, len(self.ids)) if count else None)
        weights = self._tree.weights
        # of each level: a million prompts have few of them
        unseen = self._rho(self.posterior.priors)
        if self.posterior.by_level:
            unseen = unseen[self.posterior.levels[part]]
        np.multiply(unseen, self._member[part], out=weights[part])
        if self._entry is not None:
            weights[part] *= self._entry[part]
        rows = np.arange(len(self.ids))[part] if count or self.pool is None else self.members
        visited = rows[self.posterior.seen(rows)]
        visited = visited[self._member[visited]]
        weights[visited] = self._weights(visited)
        weights[list(self.out)] = 0.0
        self._tree.add_up(first, count if count < len(self.ids) else 0)

    def _weights(self, rows: np.ndarray) -> np.ndarray:
        """Weights from the posterior; where evidence fades, as of the last turn of each row."""
        now = self.posterior.now
        return self._scaled(
            self.posterior.mean(rows, now - (now - rows // TURN) % self._turns), rows
        )

    def _scaled(self, means: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """rho* of these rows up to a common factor, times the weights of their data entries."""
        weights = self._rho(means)
        return weights if self._entry is None else weights * self._entry[rows]

    def _rho(self, means: np.ndarray) -> np.ndarray:
        exponents = (sigma_of(means) - self._reference) / self.settings.tau
        return np.exp(np.clip(exponents, -LARGEST, LARGEST))


def effective(weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2, for weights of any size.

    >>> effective(np.array([2.0, 2.0, 0.0])), effective(np.array([1e300, 1e300])), effective(np.zeros(2))
    (2.0, 2.0, 0.0)
    """
    largest = float(weights.max(initial=0.0))
    if largest and not 1e-100 < largest < 1e100:
        weights = weights / largest
    return float(weights.sum()) ** 2 / float(weights @ weights) if largest else 0.0
