"""Rollout workers that come and go: a crew without a learner, which gets its weights from the learner's crew.

`fleet.py` asks them as any other crew. A worker that is lost is started again; meanwhile the others write what it was
asked, since tokens depend on key and weights alone. A worker that joins gets the newest weights before its first
request. Weights travel beside the channels (`Post`), once to each machine, while rollouts run on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from whet.cluster.crew import ANSWER_S, START_S, Crew, Hand
from whet.errors import WhetError


class Post(Protocol):
    """Carries weights from a learner to workers."""

    def send(self, source: Hand, workers: Sequence[Hand]) -> None:
        """Begin to carry what `source` has packed to those workers. Does not wait for them."""


class Workers(Crew):
    """`workers` places, of which at least `least` must be taken."""

    def __init__(
        self,
        order: Mapping[str, Any],
        start: Callable[[int, str], Hand],
        learners: Crew,
        post: Post,
        *,
        workers: int,
        least: int,
        silent_s: float,
    ) -> None:
        self.learners, self.post, self.least = learners, post, least
        self._stale = True  # whether the learner's weights may be others than those of the workers
        self._begun: dict[int, int] = {}  # by the number of a worker that joins: the question that it has to answer
        self._sums = ""  # of the weights that were sent last
        super().__init__(order, [{}] * workers, "", start=start)
        self.silent_s = silent_s

    # ---- joining

    def _begin_all(self) -> None:
        """Wait until all are there, or until as many as must be are and the others have had their time."""
        self.present = []
        for number in range(self.size):
            self._invite(number)
        until = time.monotonic() + START_S
        while len(self.present) < self.size:
            self._hear(0.2)
            self._admit()
            late = time.monotonic() > until
            if late and len(self.present) >= self.least:
                break
            failed = [hand.lost for hand in self.hands if hand.lost]
            if failed or late:
                why = failed[0] if failed else f"only {len(self.present)} of them had come after {START_S:g} s"
                raise WhetError(f"The run wants {self.size} workers, but {why}; nothing was trained.")

    def _invite(self, number: int) -> None:
        """Ask a process that has just been started to build its engine. It need not be there yet."""
        self.tell(number, "begin", {**self.order, "rank": number, "size": self.size})
        self._begun[number] = self._serial

    def _admit(self) -> None:
        """Give weights to those that have built their engine, and count them among the present."""
        ready = [n for n, serial in self._begun.items() if serial in self.hands[n].replies]
        for number in ready:
            self.raise_failure(self.hands[number].replies.pop(self._begun.pop(number)))
        if ready and not self._stale:
            self._publish(ready)
        self.present = sorted({*self.present, *(n for n in ready if not self.hands[n].lost)})

    def _expects(self, hand: Hand, serial: int) -> bool:
        return super()._expects(hand, serial) or self._begun.get(hand.number) == serial

    # ---- weights

    def refresh(self, version: int) -> list[Any]:
        self._stale = True
        self.prepare()
        return [(version, self._sums)]

    def prepare(self) -> None:
        """Send the learner's weights where they may have changed."""
        while self._stale:
            self._sums = self.learners.first("pack_up")
            self._stale = False
            self._publish(list(self.present))
            if self.lacking:
                self.mend()

    def _publish(self, numbers: Sequence[int]) -> None:
        """Members that do not get the weights in time, or get others, are lost."""
        hands = [self.hands[number] for number in numbers]
        self.post.send(self.learners.hands[0], hands)
        answers = self._ask(numbers, "publish", [(self.version,)] * len(numbers), ANSWER_S)
        for number, answer in answers.items():
            if answer[0] == "failed":
                self.hands[number].lose(f"did not take version {self.version} of the weights: {answer[2]}")
            elif answer[1] != self._sums:
                self.hands[number].lose(f"holds other weights than the learner after version {self.version}")

    def call_each(self, name: str, args: Mapping[int, tuple[Any, ...]], again: bool = True) -> list[Any]:
        if name == "release":
            return []  # workers have their memory to themselves
        if name == "take_back":
            self._stale = True
            return []
        if name == "load_state":
            self.prepare()
        return super().call_each(name, args, again)

    # ---- leaving

    def listen(self, timeout: float, owing: Any = ()) -> None:
        super().listen(timeout, owing)
        self._admit()

    def mend(self) -> None:
        """Start lost workers again, and let the others go on with what they were asked."""
        while gone := {number for number in self.present if self.hands[number].lost}:
            self.present = [number for number in self.present if number not in gone]
            for number in gone:
                self.on_message(f"{self.hands[number].lost}; it is started again.")
                self.hands[number].stop()
                self.hands[number] = self._start(number)
                self._invite(number)
            self._wait_for_enough()
            self.mended(gone)

    def _wait_for_enough(self) -> None:
        until = time.monotonic() + START_S
        while len(self.present) < self.least:
            self._hear(0.2)
            self._admit()
            if time.monotonic() > until:
                raise WhetError(
                    f"Only {len(self.present)} workers are left, and cluster.min_workers = {self.least}; "
                    "--resume goes on from the last checkpoint."
                )

    def close(self) -> None:
        super().close()
        self.learners.close()
