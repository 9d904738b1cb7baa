"""What a curriculum is: it decides which prompts, how many rollouts, and which groups train.

The loop calls `plan`, `observe` and `emit` until a batch is there, then `updated`. A `Source`
hands out prompt ids; gates (plain groups, DAPO, SPEED) stand over a source. Nothing here or
below reads `Rollout.trace` or imports torch. `whet.curriculum.contract` tests every line of the
contract for any implementation, also yours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from whet.types import Batch, Clock, Report, Request, Rollout


class Curriculum(Protocol):
    needs: frozenset[str]
    """Signals wanted in `Report.signals`; the learner fills them or refuses at start."""

    def plan(self, clock: Clock) -> list[Request]:
        """Ask. Every request comes back rollout by rollout through `observe`, cut ones too."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Judged rollouts, each delivered once, a group's possibly over several calls and versions."""

    def emit(self, clock: Clock) -> Batch | None:
        """The next batch, its groups in the order of first ask; None while it is not full."""

    def updated(self, clock: Clock, report: Report) -> None:
        """After the optimiser step on the last emitted batch; `clock` is already the next one."""

    def holds(self) -> set[int]:
        """Group ids whose rollouts may still be trained: the traces of all others can be freed."""

    def metrics(self) -> dict[str, float]:
        """Counters since the start and gauges, named "curriculum/..."."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. With it, the sequence of plans goes on as if never interrupted."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Source(Protocol):
    def pick(self, k: int, clock: Clock) -> list[str]:
        """The next k prompt ids; fewer only when nothing more can be had."""

    def give_back(self, ids: Sequence[str]) -> None:
        """Ids that got no verdict (cut, expired): handed out again first, in the order given."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """All judged rollouts, also of groups that will be dropped."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
