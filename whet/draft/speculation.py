"""Speculation as the engine holds it: asks the chooser for an arm, its drafter for guesses, and tells both what came.

The engine calls `choose` and `draft` before a step, `told` after it, `ended` and `updated` as rollouts end and weights
change. It looks at the engine's rows and never changes them: what is written is the target's own draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from whet.draft.base import OFF, Arm, Chooser, Drafter, RowView
from whet.draft.budget import budgets, remaining
from whet.draft.guard import Guard

SEEN, ENOUGH = 512, 16
"""Lengths of ended rollouts that are remembered, and from how many on they tell something."""
EVERY, MOST = 32, 64
"""Steps that budgets serve, and tokens a budget has at most."""


class Flight(Protocol):
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
        self.drafters: dict[str, Guard] = {}
        self.chooser, self.vocab, self.served = chooser, vocab, served
        self.sharing = False
        """Whether rows get budgets. In a step's padded shape a draft that is left out saves no time, and rows that end
        sooner make all later steps smaller; so not, unless it is found to pay (`whet bench draft` has a rung)."""
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
        self.drafters[drafter.name] = Guard(drafter, self.vocab)

    def draft(self, arm: Arm, rows: Columns, most: np.ndarray) -> np.ndarray:
        """Guesses int32 [running, depth], -1 where there is none; at most so many for each row."""
        running = most.size
        views = [self._view(rows, row) for row in range(running)]
        tokens, counts = self.drafters[arm.drafter].propose(views, most)
        drafts = np.full((running, arm.depth), -1, np.int32)
        width = tokens.shape[1]
        drafts[:, :width] = np.where(np.arange(width) < counts[:, None], tokens, -1)
        return drafts

    def told(
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

    def ended(self, flight: Flight, ids: np.ndarray) -> None:
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

    def _asked(self) -> list[Guard]:
        """Drafters that draft here."""
        return [drafter for name, drafter in self.drafters.items() if name not in self.elsewhere]

    def _bytes(self, rows: Columns, running: int) -> float:
        return self.token_bytes * float(rows.length[:running].sum())


def _view(flight: Flight) -> RowView:
    request = flight.request
    return RowView(
        uid=flight.arrival,
        prompt_id=request.prompt_id,
        group_id=request.group_id,
        index=flight.index,
        prompt=flight.prompt,
        ids=np.zeros(0, np.int32),
    )
