"""SPEED (arXiv 2506.09016, since withdrawn): screen a prompt with a few rollouts; generate more only if it has signal.

A group is first asked for `n_init` rollouts. If low < pass rate < high among them, it is continued up to `rollouts` and
trained on, whatever the continuation brings; else it is dropped. Continuations come before new screenings, and both
share a plan: this is the authors' pre-fetch, one engine call per update. OURS, where the paper's code requests a fixed
number of prompts per call and continues all survivors at once: as many prompts are screened as should fill the batch
and the `look_ahead` (`Speed._ahead`), and a survivor is continued when its batch can be foreseen (`Speed._due`). OURS,
too: over a source with a posterior, a prompt for which a screening would not pay is asked for its whole group at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from whet.curriculum.base import Saved, Source, named
from whet.curriculum.gate import LEAST, PRIOR, WEIGHT, Admission, Gate
from whet.curriculum.groups import MEMORY, Share, Visit
from whet.errors import WhetError
from whet.types import Batch, Clock, Group, Phase, Request, Sampling

# ---- what screening does to the objective
#
# A prompt with pass rate p is screened with n rollouts and continued with c more (N = n + c). The acceptance follows
# from the algorithm; the implicit weight is DERIVED here, for RLOO with verdicts as rewards and on-policy rollouts.
# docs/speed.md has the objective whose gradient it is, and what an accepted group costs.


def accept_probability(p: float, n: int, low: float = 0.0, high: float = 1.0) -> float:
    """P(low < K / n < high) with K ~ Binomial(n, p): the chance to pass a screening of n rollouts.

    With the thresholds 0 and 1 it is a(p) = 1 - p^n - (1 - p)^n, which is also the share of groups that DAPO keeps.

    >>> accept_probability(0.5, 4), round(accept_probability(0.1, 4), 4)
    (0.875, 0.3438)
    """
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in _between(n, low, high))


def implicit_weight(
    p: float, n_init: int, n_cont: int, low: float = 0.0, high: float = 1.0
) -> float:
    """w(p): the expected gradient of a screened prompt is w(p) times the gradient of its pass rate.

    Derived. E[grad log pi(y) | r] = (r - p) / (p (1 - p)) grad p, and under RLOO sum_i A_i (r_i - p) =
    K (N - K) / (N - 1) with K right answers of N, so w(p) = E[1(accepted) K (N - K)] / (N (N - 1) p (1 - p)).
    Computed as a sum over the right answers of the screening, which has no 0 / 0 at either end. With the
    thresholds 0 and 1 it is 1 - c / (N (N - 1)) {q^(n-1) [n + (c - 1) q] + p^(n-1) [n + (c - 1) p]}, q = 1 - p:
    n / N at both ends, largest at 1/2; and 1 everywhere for c = 0, since DAPO drops what has no gradient anyway.

    >>> round(implicit_weight(0.5, 4, 20), 6), round(implicit_weight(0.0, 4, 20), 6)
    (0.877717, 0.166667)
    """
    total = n_init + n_cont
    weight = 0.0
    for k in _between(n_init, low, high):
        chance = math.comb(n_init, k) * p ** (k - 1) * (1 - p) ** (n_init - k - 1)  # over p (1 - p)
        # E[(k + J)(N - k - J)] less k (N - k)
        more = n_cont * p * ((total - 2 * k) - (1 - p) - n_cont * p)
        weight += chance * (k * (total - k) + more)
    return weight / (total * (total - 1))


def predicted_acceptance(
    first: float, second: float, n: int, low: float = 0.0, high: float = 1.0
) -> float:
    """The share of prompts with E[p] = first and E[p^2] = second that a screening of n rollouts would accept.

    OURS: pass rates follow the Beta distribution with these two moments, so K is Beta-binomial. From k right of m
    judged rollouts, k / m and k (k - 1) / (m (m - 1)) estimate the moments without bias. Prompts that do not differ
    (within noise) count as one pass rate; prompts that are all hopeless or all solved are never accepted.
    """
    variance = second - first**2
    if variance <= 1e-12:
        return accept_probability(first, n, low, high)
    strength = (first - second) / variance
    return (
        beta_acceptance(first * strength, (1 - first) * strength, n, low, high)
        if strength > 1e-12
        else 0.0
    )


# prompts that were not seen have one estimate, and each is looked at several times
@lru_cache(4096)
def beta_acceptance(a: float, b: float, n: int, low: float = 0.0, high: float = 1.0) -> float:
    """The chance to pass a screening of n rollouts if the pass rate follows Beta(a, b), so that K is Beta-binomial.

    >>> round(beta_acceptance(1.0, 1.0, 4), 6)
    0.6
    """
    whole = _log_beta(a, b)
    return sum(
        math.comb(n, k) * math.exp(_log_beta(k + a, n - k + b) - whole)
        for k in _between(n, low, high)
    )


def screening_pays(
    a: float, b: float, n: int, size: int, low: float = 0.0, high: float = 1.0
) -> bool:
    """Whether a screening of n rollouts makes an accepted group of `size` cheaper. The pass rate follows Beta(a, b).

    OURS. With a_n the chance to be accepted, a group costs n / a_n + size - n rollouts with the screening, and
    size / a_size without. Where the pass rate is known, a screening never pays: it also drops prompts that the whole
    group would keep. It pays where a prompt may well be hopeless or solved, as an unseen one of a hard set.

    >>> screening_pays(0.1, 0.15, 4, 16), screening_pays(1.1, 3.15, 4, 16)  # unseen; then 1 right of 4
    (True, False)
    """
    few = beta_acceptance(a, b, n, low, high)
    whole = beta_acceptance(a, b, size, low, high)
    return min(few, whole) <= 0.0 or n / few + size - n < size / whole


def _between(n: int, low: float, high: float) -> list[int]:
    return [k for k in range(n + 1) if low < k / n < high]


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class Screenings(Saved):
    """The results of screenings: totals, and recently the share that qualified and two moments of the pass rate."""

    state_names = ("screened", "qualified", "share", "moments")

    def __init__(self) -> None:
        self.screened = self.qualified = 0
        self.share = Share()
        self.moments = [0.0, 0.0, 0.0]  # sums of k / m and of k (k - 1) / (m (m - 1)), and how many

    def add(self, group: Group, qualified: bool, screened: bool = True) -> None:
        """screened: false for a group that was asked for as a whole."""
        self.screened += screened
        self.qualified += screened and qualified
        self.share.add(qualified)
        m = len(group.rollouts)
        if m >= 2:
            k = sum(rollout.verdict == "right" for rollout in group.rollouts)
            found = (k / m, k * (k - 1) / (m * (m - 1)), 1.0)
            self.moments = [old + new for old, new in zip(self.moments, found, strict=True)]

    def fade(self) -> None:
        self.share.fade()
        self.moments = [MEMORY * value for value in self.moments]

    def predict(self, n: int, low: float = 0.0, high: float = 1.0) -> float:
        """The share of such prompts that a screening of n rollouts would accept; 0 before any evidence."""
        first, second, seen = self.moments
        return predicted_acceptance(first / seen, second / seen, n, low, high) if seen else 0.0


# ---- the gate

# prompt ids, rollouts -> what the continuation of each gets
Allocate = Callable[[Sequence[str], int], list[int]]
# prompt ids -> a, b of their Beta posteriors
Estimates = Callable[[Sequence[str]], Sequence[tuple[float, float]]]


class Speed(Gate):
    state_names = (*Gate.state_names, "seen", "saved", "weight")
    phase = "screen"
    knob = "raise curriculum.speed.n_init"

    def __init__(
        self,
        source: Source,
        *,
        sampling: Sampling,
        rollouts: int,
        n_init: int,
        low: float = 0.0,
        high: float = 1.0,
        use_screening: bool = True,
        allocate: Allocate | None = None,
        estimates: Estimates | None = None,
        **knobs: Any,
    ):
        """See `config.SpeedSettings`. `allocate` divides rollouts - n_init per group; None divides evenly. With
        `estimates` only those prompts are screened for which it pays; None screens all."""
        super().__init__(source, sampling=sampling, rollouts=rollouts, **knobs)
        self.n_init = n_init
        self.low = low
        self.high = high
        self.n_cont = rollouts - n_init
        self.use_screening = use_screening
        self.allocate = allocate
        # else a screening is paid for whatever is known
        self.estimates = estimates if use_screening else None
        self.least = 1 if use_screening else 2  # rollouts of a continuation: two share a baseline
        self.seen = Screenings()
        self.saved = 0.0  # rollouts saved, compared with DAPO
        # mean implicit weight of the last batch: a metric, the loss is not reweighted
        self.weight = 0.0
        self._picked = set[str]()  # prompts that this plan has picked so far and not requested yet
        # in this plan a group should have been continued, and there was no room
        self._held_up = False
        if self.n_init < 2:
            raise WhetError(
                f"curriculum.speed.n_init = {self.n_init} shows no difference; screen with 2 or more."
            )
        if self.n_cont < self.least:
            cure = f"a continuation needs {self.least}; raise curriculum.rollouts or lower curriculum.speed.n_init"
            left = f"{self.n_cont} after a screening of {n_init}"
            raise WhetError(f"curriculum.rollouts = {rollouts} leaves {left}, and {cure}.")
        if not _between(self.n_init, self.low, self.high):
            cure = "so no prompt would ever train; widen them or raise curriculum.speed.n_init"
            between = f"curriculum.speed.low = {low} and high = {high}"
            raise WhetError(f"No pass rate of {n_init} rollouts lies between {between}, {cure}.")
        if low > 0.0 or high < 1.0:
            self.knob += ", widen curriculum.speed.low and high"

    # What makes a gate

    def admit(self, group: Group) -> Admission:
        if group.group_id in self.book.continued:
            return "keep"
        if not self._qualifies(group):
            return "drop"
        return "more" if group.rollouts[0].phase == "screen" else "keep"

    def groups_to_ask(self, clock: Clock) -> int:
        if self.estimates is not None:
            return math.ceil(self._lacking(clock) / LEAST)  # at most; `_pick` knows better
        lacking = clock.groups + self._ahead(clock) - self.book.certain
        return math.ceil(lacking / self.acceptance) - (len(self.book) - self.book.certain)

    def sizes(self, prompt_ids: Sequence[str]) -> list[int]:
        whole = [i for i, (screens, _) in enumerate(self._expect(prompt_ids)) if not screens]
        sizes = [self.n_init] * len(prompt_ids)
        for i, more in zip(whole, self._divide([prompt_ids[i] for i in whole]), strict=True):
            sizes[i] += more
        return sizes

    def phase_of(self, n: int) -> Phase:
        return self.phase if n == self.n_init else "train"

    def continuations(self, clock: Clock) -> list[Request]:
        due = groups = self._due(clock)
        if clock.free is not None:
            idle = all(visit.complete for visit in self.book.in_line())
            # one larger than the engine queues
            groups = groups[: max(clock.free // self.n_cont, int(idle))]
        self._held_up = len(groups) < len(due)
        sizes = self._divide([group.prompt_id for group in groups])
        # then the continuation trains without the screening's rollouts
        fresh = not self.use_screening
        return [
            self.book.ask_more(group.group_id, n, self.sampling, "continue", fresh)
            for group, n in zip(groups, sizes, strict=True)
        ]

    def _divide(self, prompt_ids: Sequence[str]) -> list[int]:
        """Rollouts beyond the screening for these prompts, `n_cont` on average."""
        total = self.n_cont * len(prompt_ids)
        if self.allocate is None or not prompt_ids:
            return [self.n_cont] * len(prompt_ids)
        sizes = self.allocate(prompt_ids, total)
        exact = len(sizes) == len(prompt_ids) and sum(sizes) == total and min(sizes) >= self.least
        assert exact, (
            f"{total} rollouts for {len(prompt_ids)} groups, each {self.least} or more, became {sizes}"
        )
        return sizes

    # The protocol, where screening changes it

    def emit(self, clock: Clock) -> Batch | None:
        for group in self.book.waiting():
            if self._age(group, clock) > self.max_age:
                self._give_back(self.book.remove(group.group_id), "cut")
        return super().emit(clock)

    def metrics(self) -> dict[str, float]:
        own = {
            "screened": self.seen.screened,
            "qualified": self.seen.qualified,
            "qualified_share": self.seen.share.value(),
            "predicted_share": self.seen.predict(self.n_init, self.low, self.high),
            "step_scale": 1 / self.acceptance,
            "implicit_weight": self.weight,
            "rollouts_saved": self.saved,
        }
        return super().metrics() | named(own)

    # Requesting

    def _expect(self, prompt_ids: Sequence[str]) -> list[tuple[bool, float]]:
        """Whether each prompt is screened, and its chance to be accepted; nothing without `estimates`."""
        pairs = self.estimates(prompt_ids) if self.estimates is not None else ()
        found = dict[Any, tuple[bool, float]]()
        for a, b in set(pairs):  # prompts that were not seen have one estimate
            screens = screening_pays(a, b, self.n_init, self.rollouts, self.low, self.high)
            n = self.n_init if screens else self.rollouts
            found[a, b] = (screens, beta_acceptance(a, b, n, self.low, self.high))
        return [found[pair] for pair in pairs]

    def _lacking(self, clock: Clock, whole: float = 0.0) -> float:
        """Groups that are wanted beyond those that are certain and those expected of requests that still run."""
        running = len(self.book) - self.book.certain
        return (
            clock.groups + self._ahead(clock, whole) - self.book.certain - running * self.acceptance
        )

    def _pick(self, count: int, clock: Clock) -> tuple[list[str], list[int | None]]:
        """With `estimates`, pick until as many groups are expected as are lacking. The source gives its best prompts
        first, so their chances are no guide to those that come after.

        Of the new ones, prompts that are asked for whole groups come first in line: those may fill this batch, while
        a screening before them would make it wait for a continuation, and so for another engine call.
        """
        if self.estimates is None:
            return super()._pick(count, clock)
        ids = list[str]()
        places = list[int | None]()
        # groups to train, and those among them that come without a screening
        expected = whole = 0.0
        while len(ids) < count:
            lacking = self._lacking(clock, whole / expected if expected else 0.0) - expected
            some, where = super()._pick(min(max(0, math.ceil(lacking)), count - len(ids)), clock)
            if not some:
                break
            ids = ids + some
            places = places + where
            self._picked = set(ids)
            for screens, chance in self._expect(some):
                expected += chance
                whole += 0.0 if screens else chance
        self._picked = set()
        return self._whole_first(ids, places)

    def prompts_held(self) -> set[str]:
        return super().prompts_held() | self._picked

    def _whole_first(
        self, ids: list[str], places: list[int | None]
    ) -> tuple[list[str], list[int | None]]:
        """The same in another order: those that are requested again, then whole groups, then screenings."""
        screens = [screens for screens, _ in self._expect(ids)]

        def rank(i: int) -> int:
            if places[i] is not None:
                return 0
            return 2 if screens[i] else 1

        order = sorted(range(len(ids)), key=rank)
        return [ids[i] for i in order], [places[i] for i in order]

    @property
    def acceptance(self) -> float:
        """The recent share of accepted screenings, E[a]. Dropped prompts do not dilute the batch, so the expected
        gradient is 1 / E[a] times that of uniform sampling."""
        return max(LEAST, self.seen.share.value(PRIOR, WEIGHT))

    def _ahead(self, clock: Clock, whole: float = 0.0) -> int:
        """Groups wanted beyond the batch. Under barrier they are what keeps a second engine call for the same update
        rare: survivors wait for the next call, and a share of `whole` comes complete in the call that asks for it.

        Where nothing is continued in this call, the next batch has a call of its own, so only the rest is wanted.
        With `max_age` = 0 there are none, except under barrier with `use_screening` = false: a screening that only
        decides may be older than what trains, and the age bound then applies to the continuation alone.
        """
        barrier = clock.free is None
        if clock.cut or (self.max_age == 0 and not barrier):
            return 0
        if not barrier:
            reach = self.look_ahead
        elif self.book.certain == self.book.ready:  # no group waits or is being continued
            reach = self.look_ahead - 1.0
        else:
            reach = self.look_ahead - whole
        reach = min(reach, self.max_age) if self.use_screening else reach
        return max(0, int(reach * clock.groups))

    def _room(self, clock: Clock, taken: int) -> int:
        want = min(self.groups_to_ask(clock), self._budget(clock))
        if clock.free is not None:
            fits = max(0, clock.free - taken) // (
                self.n_init if self.estimates is None else self.rollouts
            )
            if self.book.open == 0:
                fits = max(fits, 1)
            # free capacity is kept for groups that wait to go on
            want = min(want, 0 if self._held_up else fits)
        return max(0, want)

    def _due(self, clock: Clock) -> list[Group]:
        """Waiting groups to continue now: those that a batch is expected to take while they are young enough. If a
        screening grows too old meanwhile, it is cut, and its prompt is screened again before all others."""
        waiting = {group.group_id: group for group in self.book.waiting()}
        due: list[Group] = []
        # Walk the line and add up how many groups are expected to train before each one: that says how many updates
        # away its batch is. Under barrier only groups of the next batch are continued.
        before = 0.0
        chance = self.acceptance
        for visit in self.book.in_line():
            if not waiting:
                break
            updates = int(before / clock.groups)  # until its batch
            if clock.free is None and updates > 0:
                break
            group = waiting.pop(visit.group_id, None)
            if group and self._age(group, clock) + updates <= self.max_age:
                due.append(group)
            sure = (
                group or visit.group_id in self.book.continued or self.book.is_ready(visit.group_id)
            )
            before += 1.0 if sure else chance
        return due

    def _age(self, group: Group, clock: Clock) -> int:
        """The age of a waiting group, as far as its screening trains."""
        return clock.version - group.oldest_version if self.use_screening else 0

    # Deciding and emitting

    def _qualifies(self, group: Group) -> bool:
        return len(group.rollouts) >= 2 and self.low < group.pass_rate < self.high

    def _decide(self, visit: Visit) -> None:
        if visit.group_id not in self.book.continued:
            group = visit.group
            self.seen.add(group, self._qualifies(group), visit.asked == self.n_init)
        super()._decide(visit)

    def _take(self, groups: Sequence[Group], clock: Clock) -> Batch:
        self.weight = sum(map(self._weight, groups)) / len(groups)
        size = self.rollouts if self.use_screening else self.n_cont
        # what DAPO would have requested for as many
        plain = len(groups) * size / max(LEAST, self.seen.predict(size))
        self.saved += plain - self.counts.since("rollouts")
        self.seen.fade()
        return super()._take(groups, clock)

    def _weight(self, group: Group) -> float:
        """w(p) at the group's pass rate and with its own sizes; a group that was asked for as a whole has no screening,
        and is weighed as DAPO weighs it."""
        rate = group.pass_rate
        bounds = (self.low, self.high)
        if not self.use_screening:
            return accept_probability(rate, self.n_init, *bounds)
        screened = sum(rollout.phase == self.phase for rollout in group.rollouts)
        first = screened or len(group.rollouts)
        return implicit_weight(rate, first, len(group.rollouts) - first, *bounds)
