"""What an engine is: requests in, rollouts with traces out. Our own, later vLLM, serve the same loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from whet.types import Request, Rollout


class Engine(Protocol):
    can: frozenset[str]
    """Of keyed_noise, token_versions, stream, cut, recompute, keep, draft. A recipe that needs more is refused."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue. Which of them start first is the engine's choice; rollouts of one request start in order."""

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        """Finished rollouts, unjudged, with traces, in the order they finished.

        `early` is called at the start, now and then, and at the end with those that are new (maybe none): in the end it
        has had all that is returned, in that order.

        barrier: runs until all is finished. stream: runs until at least one rollout finished.
        Never waits when idle. Evaluation rollouts are handed out by `generate` alone.
        """

    def generate(self, requests: Sequence[Request], told: Callable[[int], None] | None = None) -> list[Rollout]:
        """These requests to their end, in request order; what else runs goes on and is collected later.

        `told` hears how many are finished, whenever that changes.
        """

    @property
    def idle(self) -> bool:
        """Nothing queued, running or waiting to be collected."""

    @property
    def free(self) -> int | None:
        """Rollouts that could start at once beyond what is queued; None under barrier."""

    def update(self, version: int) -> None:
        """The weights are now those of `version`; running rollouts are cut, recomputed or kept."""

    def release(self) -> None:
        """The learner's step comes next: what memory it can do without until `take_back` may go back to the card."""

    def take_back(self) -> None: ...

    def stats(self) -> dict[str, float]:
        """Counters since the last call, named "rollout/..."."""

    def state_dict(self) -> dict[str, Any]:
        """Queued and running rollouts: JSON-able values, and numpy arrays at the top level."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
