"""Speculation as the engine holds it: asks the chooser for an arm, its drafter for guesses, and tells both what came.

The engine calls `choose` and `draft` before a step, `told` after it, `ended` and `updated` as rollouts end and weights
change. It looks at the engine's rows and never changes them: what is written is the target's own draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from whet import config
from whet.draft.base import OFF, Arm, Chooser, Drafter, RowView
from whet.draft.controller import Bandit, Controller
from whet.draft.lookup import NGram, Suffix

# ---- guard
#
# A guard around a drafter: it may be wrong, slow or crash, and the run stays right.
#
# What it proposes is brought into form; what it raises is counted, and three failures in a row retire it until it is
# told to forget. Where the runner does a drafter's work on the device (`hold`) the first one does. The engine holds
# drafters only through this. It does not look at whether a guess is good: that is verified.


PATIENCE = 3


class DraftGuard:
    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab, self.name = drafter, vocab, drafter.name
        self.failures = 0
        """In all; `error` has the latest."""
        self.error = ""
        self._in_a_row = 0

    @property
    def retired(self) -> bool:
        return self._in_a_row >= PATIENCE

    def begin(self, row: RowView) -> None:
        self._try(self.drafter.begin, row)

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        got = self._try(self._proposed, rows, most)
        if got is None:
            return np.zeros((len(rows), int(most.max(initial=0))), np.int32), np.zeros(len(rows), np.int32)
        self._in_a_row = 0
        return got

    def finish(self, row: RowView) -> None:
        self._try(self.drafter.finish, row)

    def updated(self, version: int) -> None:
        self._try(self.drafter.updated, version)

    def forget(self) -> None:
        self._in_a_row = 0
        self._try(self.drafter.forget)

    def hold(self, work: Callable[..., Any], *args: Any) -> bool:
        """Work that is done in the drafter's stead; whether it was. A failure there comes again at every step, or is
        of memory that lacks: it is not tried again."""
        if self.retired:
            return False
        before = self.failures
        self._try(work, *args)
        if self.failures > before:
            self._in_a_row = PATIENCE
        return not self.retired

    def _proposed(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tidy(*self.drafter.propose(rows, most), most, self.vocab)

    def _try(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.retired:
            return None
        try:
            return call(*args)
        except Exception as error:
            self.failures += 1
            self._in_a_row += 1
            self.error = f"{type(error).__name__}: {error}"
            return None


def tidy(tokens: np.ndarray, counts: np.ndarray, most: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A proposal in the form promised: int32 [B, max(most)], counts at most `most`, cut before the first bad id.

    >>> tidy(np.array([[3, 99, 4], [1, 2, 3]]), np.array([3, 9]), np.array([2, 1]), vocab=10)
    (array([[3, 0],
           [1, 0]], dtype=int32), array([1, 1], dtype=int32))
    """
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    batch, width = most.size, int(most.max(initial=0))
    out = np.zeros((batch, width), np.int32)
    if not batch or not width:
        return out, np.zeros(batch, np.int32)
    shared = min(width, tokens.shape[1])
    given = tokens[:, :shared]
    good = (given >= 0) & (given < vocab) & (np.arange(shared) < np.minimum(counts, most)[:, None])
    good = np.logical_and.accumulate(good, axis=1)
    out[:, :shared] = np.where(good, given, 0)
    return out, good.sum(1).astype(np.int32)


# ---- budget
#
# How many tokens to draft for each row: more for those that will be the last to end, none for short ones.
#
# DAS (arXiv 2511.13841) models a batch's time as t = base * N + token * (tokens fed): all rows share N forwards, a
# draft token costs only its place in them. Pure functions of numbers; the engine asks now and then, not every step.


def draft_tokens(length: np.ndarray, forwards: float | np.ndarray, alpha: float, accept: float) -> np.ndarray:
    """Draft tokens in all with which a row of `length` more tokens ends within `forwards` forwards; inf: it cannot.

    A row that is fed p draft tokens gets A(p) = k l (1 - exp(-alpha p / l)) of its l tokens by acceptance, and
    needs A = l - N, so p = -(l / alpha) ln(1 - (1 - N / l) / k), and 0 where l <= N. `accept` is k, the share of a
    text that drafts can hit at all; `alpha` how fast more draft gets there. (Our derivation from the DAS model.)

    >>> draft_tokens(np.array([100.0, 400.0]), 200, alpha=1.0, accept=0.8).round(2).tolist()  # -400 ln(1 - 0.5 / 0.8)
    [0.0, 392.33]
    """
    length = np.asarray(length, float)
    missing = 1 - np.clip(1 - forwards / np.maximum(length, 1e-9), 0, None) / accept
    with np.errstate(divide="ignore"):
        drafted = -(length / alpha) * np.log(np.maximum(missing, 0))
    return np.where(length <= forwards, 0.0, drafted)


def makespan(
    length: np.ndarray, forwards: float | np.ndarray, *, alpha: float, accept: float, base: float, token: float
) -> np.ndarray:
    """t = base * N + token * sum_i (min(l_i, N) + p_i): each row is fed one token a forward, and its drafts.

    >>> t = makespan(np.array([100.0, 400.0]), 200, alpha=1.0, accept=0.8, base=1.0, token=0.01)
    >>> round(float(t), 2)  # 200 + 0.01 (100 + 200 + 392.33)
    206.92
    """
    length, forwards = np.asarray(length, float), np.asarray(forwards, float)[..., None]
    fed = np.minimum(length, forwards) + draft_tokens(length, forwards, alpha, accept)
    t: np.ndarray = base * forwards[..., 0] + token * fed.sum(-1)
    return t


def best_forwards(length: np.ndarray, *, alpha: float, accept: float, base: float, token: float) -> float:
    """The N that ends soonest. t is convex in N between what acceptance allows, (1 - k) max l, and max l: no drafts.
    Grids, each within two meshes of the one before: a whole array costs the host what one number does.
    """
    low, high = (1 - accept) * float(np.max(length)), float(np.max(length))
    best, grid = 0, np.array([low])
    for _ in range(5):  # to a millionth of the range
        grid = np.linspace(low, high, 33)
        best = int(np.argmin(makespan(length, grid, alpha=alpha, accept=accept, base=base, token=token)))
        low, high = grid[max(0, best - 1)], grid[min(32, best + 1)]
    return float(grid[best])


def budgets(
    length: np.ndarray, most: int, *, alpha: float = 1.0, accept: float = 0.8, base: float = 1.0, token: float = 0.01
) -> np.ndarray:
    """Draft tokens a step for each row, int32 [B], at most `most`: p_i / N rounded up, 0 where l_i <= N.

    `length` [B] is the expected remaining length; `base` and `token` the time of a forward and of one more token in
    it, of which only the ratio counts.

    >>> budgets(np.array([10, 50, 400]), 8, token=0.3).tolist()  # N = 172.3, p = 497.3
    [0, 0, 3]
    """
    length = np.maximum(np.asarray(length, float), 1.0)
    if not length.size or most <= 0:
        return np.zeros(length.size, np.int32)
    forwards = best_forwards(length, alpha=alpha, accept=accept, base=base, token=token)
    a_step = draft_tokens(length, forwards, alpha, accept) / forwards
    return np.minimum(np.ceil(a_step - 1e-6), most).astype(np.int32)


def remaining(written: np.ndarray, limit: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Tokens still to come of rows that have written so many: the mean over lengths seen that were longer (OURS).

    `seen` holds lengths of ended rollouts. Where none was longer: half of what the limit leaves. Never above that rest.

    >>> remaining(np.array([0, 150, 500]), np.array([1000, 1000, 1000]), np.array([100, 200, 300])).tolist()
    [200.0, 100.0, 250.0]
    """
    ordered = np.sort(np.asarray(seen, float))
    above = np.append(np.cumsum(ordered[::-1])[::-1], 0.0)  # sum of the lengths from here up
    first = np.searchsorted(ordered, written, side="right")
    longer = ordered.size - first
    rest = np.asarray(limit, float) - written
    mean = above[first] / np.maximum(longer, 1) - written
    return np.minimum(np.where(longer > 0, mean, rest / 2), rest)


SEEN, ENOUGH = 512, 16
"""Lengths of ended rollouts that are remembered, and from how many on they tell something."""
EVERY, MOST = 32, 64
"""Steps that budgets serve, and tokens a budget has at most."""


class FlightView(Protocol):
    """A rollout in the making, as the engine has it."""

    arrival: int
    index: int
    prompt: np.ndarray
    request: Any


class Columns(Protocol):
    """The engine's rows (`whet.rollout.rows`); a column has an entry for each row."""

    flights: list[Any]
    ids: np.ndarray
    count: np.ndarray
    limit: np.ndarray
    length: np.ndarray


class Speculation:
    def __init__(
        self,
        drafters: Sequence[Drafter],
        chooser: Chooser,
        *,
        vocab: int,
        served: Sequence[tuple[int, Arm]] = (),
    ) -> None:
        """served: rows a step is padded to, and an arm that may then be chosen: what to make ready beforehand."""
        self.drafters: dict[str, DraftGuard] = {}
        self.chooser, self.vocab, self.served = chooser, vocab, served
        self.sharing = False
        """Whether rows get budgets. In a step's padded shape a draft that is left out saves no time, and rows that end
        sooner make all later steps smaller; so not, unless it is found to pay (`draft_bench.py` has a rung)."""
        for drafter in drafters:
            self.join(drafter)
        self.elsewhere: Set[str] = frozenset()
        """Drafters whose drafts are made on the device: what they know is there, so nothing is told to them here. The
        engine's to set."""
        self.token_bytes = 0
        """Of keys and values that a cached token takes; the engine's to set."""
        self._views: dict[int, RowView] = {}
        """By arrival, of rows that were drafted for."""
        self._lengths: deque[int] = deque(maxlen=SEEN)
        """Of rollouts that ended."""
        self._budgeted = -1
        """Steps until budgets are made anew."""

    def choose(self, rows: Columns, running: int) -> Arm:
        retired = {name for name, drafter in self.drafters.items() if drafter.retired}
        arm = self.chooser.choose(running, self._bytes(rows, running), retired)
        return OFF if arm.drafter in retired else arm

    def budgets(self, rows: Columns, running: int) -> np.ndarray | None:
        """Drafts that each row wants at most, made anew now and then, None meanwhile: rows that will end soon gain
        nothing from a draft, as the batch waits for others."""
        self._budgeted -= 1
        if not self.sharing or self._budgeted >= 0 or len(self._lengths) < ENOUGH:
            return None
        self._budgeted = EVERY
        return budgets(remaining(rows.count[:running], rows.limit[:running], np.array(self._lengths)), MOST)

    def join(self, drafter: Drafter) -> None:
        """One more drafter: one that needs an engine to be made."""
        self.drafters[drafter.name] = DraftGuard(drafter, self.vocab)

    def draft(self, arm: Arm, rows: Columns, most: np.ndarray) -> np.ndarray:
        """Guesses int32 [running, depth], -1 where there is none; at most so many for each row."""
        running = most.size
        views = [self._view(rows, row) for row in range(running)]
        tokens, counts = self.drafters[arm.drafter].propose(views, most)
        drafts = np.full((running, arm.depth), -1, np.int32)
        width = tokens.shape[1]
        drafts[:, :width] = np.where(np.arange(width) < counts[:, None], tokens, -1)
        return drafts

    def on_step(
        self,
        arm: Arm,
        rows: Columns,
        running: int,
        seconds: float,
        steps: int = 1,
        accepted: np.ndarray | None = None,
        most: np.ndarray | None = None,
        *,
        typical: bool = True,
    ) -> None:
        """Steps of `running` rows took so long, as such steps do or longer; with drafts, how many came true of each
        row's and step's, of how many wanted."""
        kv = self._bytes(rows, running)
        self.chooser.record(
            arm, running, seconds, steps=steps, accepted=accepted, most=most, kv_bytes=kv, typical=typical
        )

    def ended(self, flight: FlightView, ids: np.ndarray) -> None:
        """The flight wrote `ids` and is done, or was cut."""
        self._lengths.append(ids.size)
        view = self._views.pop(flight.arrival, None)
        if asked := self._asked():
            view = view or _view(flight)
            view.ids = ids
            for drafter in asked:
                drafter.finish(view)

    def updated(self, version: int) -> None:
        for drafter in self.drafters.values():
            drafter.updated(version)
        self.chooser.updated()

    def metrics(self) -> dict[str, float]:
        failures = sum(drafter.failures for drafter in self.drafters.values())
        return {**self.chooser.metrics(), "draft/failures": float(failures)}

    def state_dict(self) -> dict[str, Any]:
        return self.chooser.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.chooser.load_state_dict(state)

    def _view(self, rows: Columns, row: int) -> RowView:
        flight = rows.flights[row]
        view = self._views.get(flight.arrival)
        if view is None:
            view = self._views[flight.arrival] = _view(flight)
            for drafter in self._asked():
                drafter.begin(view)
        view.ids = rows.ids[row, : rows.count[row]]
        return view

    def _asked(self) -> list[DraftGuard]:
        """Drafters that draft here."""
        return [drafter for name, drafter in self.drafters.items() if name not in self.elsewhere]

    def _bytes(self, rows: Columns, running: int) -> float:
        return self.token_bytes * float(rows.length[:running].sum())


def _view(flight: FlightView) -> RowView:
    request = flight.request
    return RowView(
        uid=flight.arrival,
        prompt_id=request.prompt_id,
        group_id=request.group_id,
        index=flight.index,
        prompt=flight.prompt,
        ids=np.zeros(0, np.int32),
    )


# ---- build
#
# From the recipe's [draft] to speculation: which drafters, which arms, who chooses. Called where an engine is made.


DEPTHS = (2, 4, 8, 16, 32)
"""Tokens a draft may have. All drafters share the graphs that verify so many."""
MOST_VERIFIED = 512
"""Tokens that a step verifies at most, all rows together: beyond about 200 a forward takes longer with each of them."""
DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NGram, "suffix": Suffix}


def build_speculation(settings: config.Draft, *, vocab: int, sizes: Sequence[int], seed: int) -> Speculation | None:
    """None where the recipe wants none. `sizes`: rows that a step may be padded to, the largest last.

    suffix looks in a row's own text first, as ngram does, and then in others': where both are named the controller does
    without ngram, which it would try in vain. TLT's bandit has all that are named.
    """
    if not settings.drafters:
        return None
    spared = {"ngram"} if settings.chooser == "controller" and "suffix" in settings.drafters else set()
    names = [name for name in settings.drafters if name not in spared]
    arms = [Arm(name, depth) for name in names for depth in DEPTHS]
    drafters = [DRAFTERS[name]() for name in names if name in DRAFTERS]  # eagle joins in the engine
    served = [(size, arm) for arm in arms for size in sizes if serves(arm, size)]
    made = Speculation(drafters, _chooser(settings, arms, sizes, seed), vocab=vocab, served=served)
    made.sharing = settings.budgets
    return made


def serves(arm: Arm, batch: int) -> bool:
    """Whether an arm is for so many rows."""
    return batch * arm.tokens <= MOST_VERIFIED


def _chooser(settings: config.Draft, arms: Sequence[Arm], sizes: Sequence[int], seed: int) -> Chooser:
    if settings.chooser == "bandit":
        return Bandit(arms, serves=serves, seed=seed)

    def padded(batch: int) -> int:
        return next((size for size in sizes if size >= batch), batch)

    return Controller(arms, serves=serves, bucket=padded, seed=seed)
