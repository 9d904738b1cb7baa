"""Speculation as the engine sees it: a chooser picks the arm, its drafter guesses, and both learn what came of it.

`build_speculation` makes it from the recipe's [draft]. The engine calls `choose` and `draft` before a step, reports to
the chooser after it, and calls `ended` and `updated` as rollouts end and weights change. Drafters are called through a
`DraftGuard`, so that one which is wrong or crashes cannot harm the run. The engine's rows are read and never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import cache
from typing import Any

import numpy as np

from whet import config
from whet.draft.base import OFF, Chooser, DraftArm, Drafter, RowView
from whet.draft.controller import Bandit, Controller
from whet.draft.lookup import NGram, Suffix

# Shapes: B rows.

# tokens that a draft may have; all drafters share the graphs that verify so many
DEPTHS = (2, 4, 8, 16, 32)
# Tokens that a step verifies at most; beyond about 200 a forward takes longer with each of them. A small model's takes
# as long as its launches: there drafts of up to SHALLOW tokens may verify MOST_SHALLOW, while weights * tokens <= WORK.
MOST_VERIFIED = 512
MOST_SHALLOW = 2560
SHALLOW = 4
WORK = 12_800_000_000
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


def tidy(
    tokens: np.ndarray, counts: np.ndarray, most: np.ndarray, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bring a proposal into form: int32 [B, max(most)], counts [B] at most `most`, cut before the first invalid id."""
    tokens = np.asarray(tokens)
    counts = np.asarray(counts)
    batch = most.size
    width = int(most.max(initial=0))
    out = np.zeros((batch, width), np.int32)
    if not batch or not width:
        return out, np.zeros(batch, np.int32)
    shared = min(width, tokens.shape[1])
    given = tokens[:, :shared]
    good = (given >= 0) & (given < vocab) & (np.arange(shared) < np.minimum(counts, most)[:, None])
    good = np.logical_and.accumulate(good, axis=1)
    out[:, :shared] = np.where(good, given, 0)
    return out, good.sum(1).astype(np.int32)


Columns = Any  # the engine's rows, `whet.rollout.rows.Rows`: the engine imports this file


class Speculation:
    def __init__(
        self,
        drafters: Sequence[Drafter],
        chooser: Chooser,
        *,
        vocab: int,
        served: Sequence[tuple[int, DraftArm]] = (),
    ) -> None:
        """served: rows that a step is padded to, with an arm that may then be chosen; to be made ready beforehand."""
        self.drafters: dict[str, DraftGuard] = {}
        self.chooser = chooser
        self.vocab = vocab
        self.served = served
        for drafter in drafters:
            self.join(drafter)
        # Set by the engine: drafters whose drafts are made on the device, and so are not called here; and the bytes of
        # keys and values per cached token.
        self.elsewhere: Set[str] = frozenset()
        self.token_bytes = 0
        self._views: dict[int, RowView] = {}  # by arrival, of rows that were drafted for

    def join(self, drafter: Drafter) -> None:
        """Add a drafter, for one that needs an engine to be made."""
        self.drafters[drafter.name] = DraftGuard(drafter, self.vocab)

    def choose(self, rows: Columns, running: int) -> DraftArm:
        retired = {name for name, drafter in self.drafters.items() if drafter.retired}
        arm = self.chooser.choose(running, self.kv_bytes(rows, running), retired)
        return OFF if arm.drafter in retired else arm

    def draft(self, arm: DraftArm, rows: Columns, most: np.ndarray) -> np.ndarray:
        """Guesses int32 [B, depth], -1 where there is none; at most `most` [B] for each row."""
        tokens, counts = self.drafters[arm.drafter].propose(
            [self._view(rows, i) for i in range(most.size)], most
        )
        width = tokens.shape[1]
        drafts = np.where(np.arange(width) < counts[:, None], tokens, -1)
        return np.pad(drafts, ((0, 0), (0, arm.depth - width)), constant_values=-1)

    def ended(self, flight: Any) -> None:
        """The flight ended or was cut; its trace has what it wrote."""
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
    return RowView(
        flight.arrival,
        asked.prompt_id,
        asked.group_id,
        flight.index,
        flight.prompt,
        flight.trace.ids,
    )


def build_speculation(
    settings: config.Draft, *, vocab: int, sizes: Sequence[int], seed: int, weights: int = 0
) -> Speculation | None:
    """Make what the recipe's [draft] asks for; None where it names no drafter.

    `sizes`: rows that a step may be padded to, the largest last; `weights`: of the model, 0 where each token of a step
    costs, as on a CPU. suffix looks in a row's own text first, as ngram does, and then in others'. Where both are named
    the controller does without ngram; TLT's bandit has all that are named.
    """
    if not settings.drafters:
        return None
    ours = settings.chooser == "controller"
    spared = {"ngram"} if ours and "suffix" in settings.drafters else set()
    names = [name for name in settings.drafters if name not in spared]
    arms = [DraftArm(name, depth) for name in names for depth in DEPTHS]

    @cache
    def padded(batch: int) -> int:
        return next((size for size in sizes if size >= batch), batch)

    def fits(arm: DraftArm, batch: int) -> bool:
        return serves(arm, padded(batch), weights)

    chooser = (
        Controller(arms, serves=fits, bucket=padded, seed=seed)
        if ours
        else Bandit(arms, serves=fits, seed=seed)
    )
    drafters = [DRAFTERS[name]() for name in names if name in DRAFTERS]  # eagle joins in the engine
    served = [(size, arm) for arm in arms for size in sizes if serves(arm, size, weights)]
    return Speculation(drafters, chooser, vocab=vocab, served=served)


def serves(arm: DraftArm, rows: int, weights: int = 0) -> bool:
    """Whether an arm is meant for steps that are padded to so many rows, of a model of so many weights."""
    most = MOST_VERIFIED
    if weights and arm.depth <= SHALLOW:
        most = max(most, min(MOST_SHALLOW, WORK // weights))
    return rows * arm.tokens <= most
