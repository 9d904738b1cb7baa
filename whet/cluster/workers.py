"""Rollout workers that come and go: a crew without a learner, which gets its weights from the learner's crew.

`fleet.py` asks them as any other crew. A worker that is lost is started again; meanwhile the others write what it was
asked, since tokens depend on key and weights alone. A worker that joins gets the newest weights before its first
request. Weights travel beside the channels (`Post`), once to each machine, while rollouts run on. Workers outlive a
learner: where no learner is left, they wait for the one that goes on from the last checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from whet.cluster.crew import MOST_RESTARTS, START_S, Crew, Hand
from whet.errors import WhetError

Need = Mapping[str, float]  # of a node, by the names of Ray: CPU, GPU


class Post(Protocol):
    """Starts workers, and carries weights from a learner to them."""

    def start(self, number: int, name: str) -> Hand: ...

    def places(self, most: int) -> int:
        """How many workers, of `most`, the cluster has room for."""

    def send(self, source: Hand, workers: Sequence[Hand], seconds: float) -> None:
        """Carry what `source` has packed to those workers. Hands that fail, or take longer, are lost."""


class Workers(Crew):
    """`workers` places, of which at least `least` must be taken. timeout_s: for a word from a worker that decodes, for
    an answer, and for weights to arrive."""

    kind = "Worker"

    def __init__(
        self, order: Mapping[str, Any], post: Post, learners: Crew, *, workers: int, least: int, timeout_s: float
    ) -> None:
        self.learners, self.post, self.least = learners, post, least
        # Called where there are too few for good, and the step can still be ended by those that are left.
        self.on_short: Callable[[str], None] = lambda sentence: None
        self._stale = True  # whether the learner's weights may be others than those of the workers
        self._begun: dict[int, int] = {}  # by the number of a worker that joins: the question that it has to answer
        self._losses: Counter[int] = Counter()  # of each place, since the last update
        self._short = False
        self._sums = ""  # of the weights that were sent last
        self._source: Hand | None = None  # the learner that has packed them
        self._timeout_s = timeout_s
        super().__init__(order, [{}] * workers, "", start=post.start)
        self.silent_s = self.answer_s = timeout_s

    # ---- joining

    def _begin_all(self) -> None:
        """Wait until all are there for whom there is room, at least as many as must be. The others join later."""
        self.present = []
        for number in range(self.size):
            self._invite(number)
        until = time.monotonic() + START_S
        while self._begun and len(self.present) < max(self.least, self.post.places(self.size)):
            self._hear(0.2)
            self._admit(first=True)
            if time.monotonic() > until:
                break
        if len(self.present) < self.least:
            why = next((hand.lost for hand in self.hands if hand.lost), f"no more had come after {START_S:g} s")
            there = f"only {len(self.present)} of the {self.least} workers that the run needs are there"
            raise WhetError(f"{why}, and {there}; nothing was trained.")

    def _invite(self, number: int) -> None:
        """Ask a process that has just been started to build its engine. It need not be there yet."""
        self.tell(number, "begin", {**self.order, "rank": number, "size": self.size})
        self._begun[number] = self._serial

    def _admit(self, first: bool = False) -> None:
        """Give weights to those that have built their engine, and count them among the present. first: one that cannot
        build it ends the run, as all may."""
        ready = []
        for number, serial in list(self._begun.items()):
            hand = self.hands[number]
            if (answer := hand.replies.pop(serial, None)) is not None:
                del self._begun[number]
                if first:
                    self.raise_failure(answer)
                if answer[0] == "failed":
                    hand.lose(f"could not start: {answer[2]}")
                else:
                    ready.append(number)
            if hand.lost:
                self._again(number)
        late = not self._stale
        if ready and late:
            self._publish(ready)
        for number in ready:
            if self.hands[number].lost:
                self._again(number)
        self.present = sorted({*self.present, *(n for n in ready if n not in self._begun and not self.hands[n].lost)})
        if late:
            self.prepare()  # where another learner has to pack the weights first

    def _again(self, number: int) -> None:
        """Start a lost worker again, or wait with that for the next update where it is lost again and again."""
        hand = self.hands[number]
        hand.stop()
        self._begun.pop(number, None)
        self._losses[number] += 1
        if self._losses[number] > MOST_RESTARTS:
            times = f"which makes {self._losses[number]} losses in one step"
            self.on_message(f"{hand.lost}, {times}; it is left out until the next update.")
            return
        self.on_message(f"{hand.lost}; it is started again.")
        self.hands[number] = self._start(number)
        self._invite(number)

    def _expects(self, hand: Hand, serial: int) -> bool:
        return super()._expects(hand, serial) or self._begun.get(hand.number) == serial

    # ---- weights

    def refresh(self, version: int) -> list[Any]:
        self._stale = True
        self.prepare()
        for number in [number for number, times in self._losses.items() if times > MOST_RESTARTS]:
            self.hands[number] = self._start(number)
            self._invite(number)
        self._losses.clear()
        return [(version, self._sums)]

    def prepare(self) -> None:
        """Send the learner's weights where they may have changed."""
        while self._stale:
            self._sums = self.learners.first("pack_up")
            self._source, self._stale = self.learners.hands[0], False
            self._publish(list(self.present))
            if self.lacking:
                self.mend()

    def _publish(self, numbers: Sequence[int]) -> None:
        """Members that do not get the weights in time, or get others, are lost."""
        source = self.learners.hands[0]
        if source is not self._source:  # it was replaced, and has packed nothing
            self._stale = True
            return
        self.post.send(source, [self.hands[number] for number in numbers], self._timeout_s)
        if source.lost:
            self.learners.mend()  # which ends the run, or makes another hold the same weights
            self._stale = True
            return
        there = [number for number in numbers if not self.hands[number].lost]
        answers = self._ask(there, "publish", [(self.version,)] * len(there), self._timeout_s)
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

    def follow(self, learners: Crew) -> None:
        """Work for other learners, which go on from an earlier checkpoint."""
        self.deliver, self.mended = lambda number, found: None, lambda numbers: None
        self.call("drop")
        self.learners, self.version, self._stale = learners, 0, True
        self._losses.clear()

    # ---- leaving

    def listen(self, timeout: float, owing: Any = ()) -> None:
        super().listen(timeout, owing)
        self._admit()

    def mend(self) -> None:
        """Start lost workers again, and let the others go on with what they were asked."""
        while gone := {number for number in self.present if self.hands[number].lost}:
            self.present = [number for number in self.present if number not in gone]
            for number in gone:
                self._again(number)
            self._wait_for_enough()
            self.mended(gone)

    def _wait_for_enough(self) -> None:
        """Wait for those that are started again. Where they do not come, the rest ends the step, and the run is saved;
        without any left it is over at once."""
        few = f"cluster.min_workers = {self.least}, and only {len(self.present)} of {self.size} workers are left"
        if len(self.present) < self.least and not self._short:
            self.on_message(f"{few}: the run waits for others, {START_S:g} s at most.")
        until = time.monotonic() + START_S
        while len(self.present) < (1 if self._short else self.least):
            self._hear(0.2)
            self._admit()
            if time.monotonic() < until and self._begun:
                continue
            if not self.present:
                raise WhetError(f"{few}; --resume goes on from the last checkpoint.")
            self._short = True
            self.on_short(f"{few}; the run was saved, and --resume goes on.")

    def close(self) -> None:
        """Let the learners go; `end` ends the workers, which others may `follow` before."""
        self.learners.close()

    def end(self) -> None:
        super().close()


def places(nodes: Sequence[Need], need: Need, most: int, beside: Sequence[Need] = ()) -> int:
    """How many, of `most`, find what they need on these nodes, beside others.

    >>> places([{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}], {"CPU": 1, "GPU": 0.5}, 9)
    2
    >>> places([{"CPU": 4.0}, {"CPU": 1.0}], {"CPU": 2}, 9, beside=[{"CPU": 1}])
    1
    """
    left = [dict(node) for node in nodes]

    def place(need: Need) -> bool:
        fits = (node for node in left if all(node.get(kind, 0) >= number for kind, number in need.items()))
        if (node := next(fits, None)) is not None:
            node.update({kind: node[kind] - number for kind, number in need.items()})
        return node is not None

    for other in beside:
        place(other)
    return next((count for count in range(most) if not place(need)), most)
