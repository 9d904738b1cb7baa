"""Speculation as the engine sees it: a chooser picks the arm, its drafter guesses, and both learn what came of it.

`build_speculation` makes it from the recipe's [draft]. The engine calls `choose` and `draft` before a step, reports to
the chooser after it, and calls `ended` and `updated` as rollouts end and weights change. Drafters are called through a
`DraftGuard`, so that one which is wrong or crashes cannot harm the run. The engine's rows are read and never changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from whet import config
from whet.draft.base import OFF, Chooser, DraftArm, Drafter, RowView
from whet.draft.controller import Bandit, Controller
from whet.draft.lookup import NGram, Suffix

# Shapes: B rows.

DEPTHS = (2, 4, 8, 16, 32)  # tokens that a draft may have; all drafters share the graphs that verify so many
MOST_VERIFIED = 512  # tokens that a step verifies at most; beyond about 200 a forward takes longer with each of them
DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NGram, "suffix": Suffix}
PATIENCE = 3  # failures in a row that retire a drafter


class DraftGuard(Drafter):
    """A drafter whose proposals are brought into form and whose failures are counted. PATIENCE failures in a row retire
    it until `forget`. Whether a guess is good is not looked at: it is verified."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab, self.name = drafter, vocab, drafter.name
        self.failures = 0  # in all; `error` has the latest
        self.error = ""
        self._in_a_row = 0

    @property
    def retired(self) -> bool:
        return self._in_a_row >= PATIENCE

    def begin(self, row: RowView) -> None:
        self._try(self.drafter.begin, row)

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        got = self._try(lambda: tidy(*self.drafter.propose(rows, most), most, self.vocab))
        if got is None:
            return super().propose(rows, most)
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
        """Do work in the drafter's place, and return whether it was done. A failure retires the drafter at once: it
        would come again at every step, or is a lack of memory."""
        if self.retired:
            return False
        before = self.failures
        self._try(work, *args)
        if self.failures > before:
            self._in_a_row = PATIENCE
        return not self.retired

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
    """Bring a proposal into form: int32 [B, max(most)], counts [B] at most `most`, cut before the first invalid id."""
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


# ---- budgets: how many tokens to draft for each row
#
# DAS (arXiv 2511.13841) models a batch's time as t = N + TOKEN * (tokens fed), in forwards: all rows share N forwards,
# and a draft token costs only its place in them. Rows that will be the last to end get more drafts, short ones none.

ACCEPT = 0.8  # share of a text that drafts can hit at all
TOKEN = 0.01  # time of one more token in a forward, in forwards
SEEN, ENOUGH = 512, 16  # lengths of ended rollouts that are remembered, and how many make an estimate
EVERY, MOST = 32, 64  # steps for which budgets stand, and tokens of a budget at most


def draft_tokens(length: np.ndarray, forwards: float | np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """Draft tokens with which a row of `length` more tokens ends within `forwards` forwards; inf where it cannot.

    A row that is fed p draft tokens gets A(p) = k l (1 - exp(-alpha p / l)) of its l tokens by acceptance, and needs
    A = l - N, so p = -(l / alpha) ln(1 - (1 - N / l) / k), and 0 where l <= N. k is ACCEPT; alpha says how fast more
    draft gets there. (Our derivation from the DAS model.)

    >>> draft_tokens(np.array([100.0, 400.0]), 200).round(2).tolist()  # -400 ln(1 - 0.5 / 0.8)
    [0.0, 392.33]
    """
    length = np.asarray(length, float)
    missing = 1 - np.clip(1 - forwards / np.maximum(length, 1e-9), 0, None) / ACCEPT
    with np.errstate(divide="ignore"):
        drafted = -(length / alpha) * np.log(np.maximum(missing, 0))
    return np.where(length <= forwards, 0.0, drafted)


def makespan(length: np.ndarray, forwards: float | np.ndarray, token: float = TOKEN) -> np.ndarray:
    """t = N + token * sum_i (min(l_i, N) + p_i): each row is fed one token per forward, and its drafts.

    >>> round(float(makespan(np.array([100.0, 400.0]), 200)), 2)  # 200 + 0.01 (100 + 200 + 392.33)
    206.92
    """
    length, forwards = np.asarray(length, float), np.asarray(forwards, float)[..., None]
    fed = np.minimum(length, forwards) + draft_tokens(length, forwards)
    t: np.ndarray = forwards[..., 0] + token * fed.sum(-1)
    return t


def best_forwards(length: np.ndarray, token: float = TOKEN) -> float:
    """The N that ends soonest. t is convex in N between what acceptance allows, (1 - k) max l, and no drafts, max l. A
    search by grids, each within two meshes of the one before: a whole array costs the host as much as one number."""
    low, high = (1 - ACCEPT) * float(np.max(length)), float(np.max(length))
    best, grid = 0, np.array([low])
    for _ in range(5):  # to a millionth of the range
        grid = np.linspace(low, high, 33)
        best = int(np.argmin(makespan(length, grid, token)))
        low, high = grid[max(0, best - 1)], grid[min(32, best + 1)]
    return float(grid[best])


def budgets(length: np.ndarray, most: int, token: float = TOKEN) -> np.ndarray:
    """Draft tokens per step for each row, int32 [B], at most `most`: p_i / N rounded up, 0 where l_i <= N.

    `length` [B] is the expected remaining length.

    >>> budgets(np.array([10, 50, 400]), 8, token=0.3).tolist()  # N = 172.3, p = 497.3
    [0, 0, 3]
    """
    length = np.maximum(np.asarray(length, float), 1.0)
    if not length.size or most <= 0:
        return np.zeros(length.size, np.int32)
    forwards = best_forwards(length, token)
    per_step = draft_tokens(length, forwards) / forwards
    return np.minimum(np.ceil(per_step - 1e-6), most).astype(np.int32)


def remaining(written: np.ndarray, limit: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Tokens still to come in rows that have written so many: the mean over lengths seen that were longer (OURS).

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


Columns = Any  # the engine's rows, `whet.rollout.rows.Rows`: the engine imports this file


class Speculation:
    def __init__(
        self, drafters: Sequence[Drafter], chooser: Chooser, *, vocab: int, served: Sequence[tuple[int, DraftArm]] = ()
    ) -> None:
        """served: rows that a step is padded to, with an arm that may then be chosen; to be made ready beforehand."""
        self.drafters: dict[str, DraftGuard] = {}
        self.chooser, self.vocab, self.served = chooser, vocab, served
        # Whether rows get budgets. In the padded shape of a step a draft that is left out saves no time, and rows that
        # end sooner make all later steps smaller: so not, unless it was found to pay (`draft_bench.py` has a rung).
        self.sharing = False
        for drafter in drafters:
            self.join(drafter)
        # Set by the engine: drafters whose drafts are made on the device, and so are not called here; and the bytes of
        # keys and values per cached token.
        self.elsewhere: Set[str] = frozenset()
        self.token_bytes = 0
        self._views: dict[int, RowView] = {}  # by arrival, of rows that were drafted for
        self._lengths: deque[int] = deque(maxlen=SEEN)  # lengths of rollouts that ended
        self._budgeted = -1  # steps until budgets are made anew

    def join(self, drafter: Drafter) -> None:
        """Add a drafter, for one that needs an engine to be made."""
        self.drafters[drafter.name] = DraftGuard(drafter, self.vocab)

    def choose(self, rows: Columns, running: int) -> DraftArm:
        retired = {name for name, drafter in self.drafters.items() if drafter.retired}
        arm = self.chooser.choose(running, self.kv_bytes(rows, running), retired)
        return OFF if arm.drafter in retired else arm

    def budgets(self, rows: Columns, running: int) -> np.ndarray | None:
        """Drafts that each row wants at most, made anew now and then; None where the last ones stand."""
        self._budgeted -= 1
        if not self.sharing or self._budgeted >= 0 or len(self._lengths) < ENOUGH:
            return None
        self._budgeted = EVERY
        return budgets(remaining(rows.count[:running], rows.limit[:running], np.array(self._lengths)), MOST)

    def draft(self, arm: DraftArm, rows: Columns, most: np.ndarray) -> np.ndarray:
        """Guesses int32 [B, depth], -1 where there is none; at most `most` [B] for each row."""
        tokens, counts = self.drafters[arm.drafter].propose([self._view(rows, i) for i in range(most.size)], most)
        width = tokens.shape[1]
        drafts = np.where(np.arange(width) < counts[:, None], tokens, -1)
        return np.pad(drafts, ((0, 0), (0, arm.depth - width)), constant_values=-1)

    def ended(self, flight: Any) -> None:
        """The flight ended or was cut; its trace has what it wrote."""
        self._lengths.append(flight.trace.ids.size)
        view = self._views.pop(flight.arrival, None) or _view(flight)
        view.ids = flight.trace.ids
        for drafter in self._drafting_here():
            drafter.finish(view)

    def updated(self, version: int) -> None:
        for drafter in self.drafters.values():
            drafter.updated(version)
        self.chooser.updated()

    def metrics(self) -> dict[str, float]:
        failures = sum(drafter.failures for drafter in self.drafters.values())
        return {**self.chooser.metrics(), "draft/failures": float(failures)}

    def _view(self, rows: Columns, row: int) -> RowView:
        flight = rows.flights[row]
        view = self._views.get(flight.arrival)
        if view is None:
            view = self._views[flight.arrival] = _view(flight)
            for drafter in self._drafting_here():
                drafter.begin(view)
        view.ids = rows.ids[row, : rows.count[row]]
        return view

    def _drafting_here(self) -> list[DraftGuard]:
        return [drafter for name, drafter in self.drafters.items() if name not in self.elsewhere]

    def kv_bytes(self, rows: Columns, running: int) -> float:
        return self.token_bytes * float(rows.length[:running].sum())


def _view(flight: Any) -> RowView:
    asked = flight.request
    return RowView(flight.arrival, asked.prompt_id, asked.group_id, flight.index, flight.prompt, flight.trace.ids)


def build_speculation(settings: config.Draft, *, vocab: int, sizes: Sequence[int], seed: int) -> Speculation | None:
    """Make what the recipe's [draft] asks for; None where it names no drafter.

    `sizes`: rows that a step may be padded to, the largest last. suffix looks in a row's own text first, as ngram does,
    and then in others'. Where both are named the controller does without ngram; TLT's bandit has all that are named.
    """
    if not settings.drafters:
        return None
    ours = settings.chooser == "controller"
    spared = {"ngram"} if ours and "suffix" in settings.drafters else set()
    names = [name for name in settings.drafters if name not in spared]
    arms = [DraftArm(name, depth) for name in names for depth in DEPTHS]

    def padded(batch: int) -> int:
        return next((size for size in sizes if size >= batch), batch)

    controller = Controller(arms, serves=serves, bucket=padded, seed=seed)
    chooser = controller if ours else Bandit(arms, serves=serves, seed=seed)
    drafters = [DRAFTERS[name]() for name in names if name in DRAFTERS]  # eagle joins in the engine
    served = [(size, arm) for arm in arms for size in sizes if serves(arm, size)]
    made = Speculation(drafters, chooser, vocab=vocab, served=served)
    made.sharing = settings.budgets
    return made


def serves(arm: DraftArm, batch: int) -> bool:
    """Whether an arm is meant for so many rows."""
    return batch * arm.tokens <= MOST_VERIFIED
