"""Rollout workers that come and go: a crew without a learner, which gets its weights from the learner's crew.

`fleet.py` asks them as any other crew. A worker that is lost is started again; meanwhile the others write what it was
asked, since tokens depend on key and weights alone. A worker that joins gets the newest weights before its first
request. One that shares the learner's memory is told where they lie; `Stations` bring them to others, while rollouts
run on. Workers outlive a learner: if none is left, they wait for the one that goes on from the last checkpoint.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Any

from whet.cluster.crew import LOOK_S, MOST_RESTARTS, START_S, Crew, Hand
from whet.errors import WhetError

if TYPE_CHECKING:
    from whet.cluster.stations import Stations

# how long to wait for the slower half of the workers: times that of the faster, at least
HURRY, HURRY_S = 3.0, 0.1
SLOW = 4.0  # times as long as the others a slow worker takes, for a step and for a row of it
# more steps than that tell a pace; that of a worker which was slow before is told sooner
PACED, AGAIN = 10, 3
REST = 16  # updates for which a slow worker is not asked; each time twice as many
Need = Mapping[str, float]  # of a node, by the names of Ray: CPU, GPU


@dataclass(slots=True)
class Delivery:
    """Weights on their way to one worker: first they arrive, then it takes them over."""

    issue: int  # which weights: a number that rises with each publish
    version: int  # of these weights
    source: Hand  # the learner that has packed them
    since: float
    before: int | None  # the version that the worker has
    sending: Any = None  # where they are carried
    asked: int = 0  # the question whether it has taken them over; 0: they have not arrived


class Workers(Crew):
    """`workers` places, of which at least `least` must be taken. timeout_s: for a word from a worker that decodes, for
    an answer, and for weights to arrive."""

    kind = "Worker"

    def __init__(
        self,
        order: Mapping[str, Any],
        post: Stations,
        learners: Crew,
        *,
        workers: int,
        least: int,
        timeout_s: float,
    ) -> None:
        self.learners = learners
        self.post = post
        self.least = least
        # Called where there are too few for good, and the step can still be ended by those that are left.
        self.on_short: Callable[[str], None] = lambda sentence: None
        self._stale = True  # whether the learner's weights may be others than those of the workers
        # by the number of a worker that joins: the question that it has to answer
        self._begun: dict[int, int] = {}
        self._losses: Counter[int] = Counter()  # of each place, since the last update
        self._short = False
        self._sums = ""  # of the weights that were sent last
        self._source = learners.hands[0]  # the learner that has packed them
        # the newest weights: number, place, what can be sent
        self._issue, self._where, self._parcel = 0, None, None
        self._due: dict[int, Delivery] = {}  # by the number of the worker
        self._behind: set[int] = set()  # those that the others do not wait for
        # by the number of a worker: the question to give up what it has
        self._handing: dict[int, int] = {}
        # by the number of a slow worker: from which version on it is asked again
        self._resting: dict[int, int] = {}
        self._rests: Counter[int] = Counter()  # how often each was slow
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
            why = next(
                (hand.lost for hand in self.hands if hand.lost),
                f"no more had come after {START_S:g} s",
            )
            there = (
                f"only {len(self.present)} of the {self.least} workers that the run needs are there"
            )
            raise WhetError(f"{why}, and {there}; nothing was trained.")

    def _invite(self, number: int) -> None:
        """Ask a process that has just been started to build its engine. It need not be there yet."""
        self.tell(number, "begin", {**self.order, "rank": number, "size": self.size})
        self._begun[number] = self._serial
        self._rests[number] = 0

    def _admit(self, first: bool = False) -> None:
        """Give weights to those that have come, and count those that have them among the present. first: one that
        cannot build its engine ends the run, as all may."""
        # it may wait for others, so it comes before any of them is noted here alone
        self._take_from()
        come = [*self._built(first), *self._rested()]
        sent = not self._stale  # else `prepare` sends the weights to all
        if come and sent:
            self._publish(come, wait=False)
        self._take_over()
        caught = {number for number in self._behind if number not in self._due}
        self._behind -= caught
        gone = {number for number in caught.union(come) if self.hands[number].lost}
        for number in gone:
            self._again(number)
        self.present = sorted({*self.present, *caught, *come} - gone - self._behind)
        if gone & caught:
            self._wait_for_enough()
            self.mended(gone & caught)
        if sent:
            self._send_weights()  # where another learner has to pack them first

    def _built(self, first: bool) -> list[int]:
        """Those that have built their engine since the last look. One that was lost meanwhile is started again."""
        ready = []
        for number, serial in list(self._begun.items()):
            hand = self.hands[number]
            answer = hand.replies.pop(serial, None)
            late = time.monotonic() > START_S + max(hand.since, hand.channel.reached)
            # it does not wait for room in the cluster
            if answer is None and late and hand.channel.ready():
                hand.lose(f"was not ready within {START_S:g} s")
            if answer is not None and answer[0] == "failed":
                if first:
                    self.raise_failure(answer)
                hand.lose(f"could not start: {answer[2]}")
                if answer[1] == WhetError.__name__:  # it would fail again
                    del self._begun[number]
                    hand.stop()
                    self.on_message(f"{hand.name} is left out. {answer[2]}")
                    continue
            if hand.lost:
                self._again(number)
            elif answer is not None:
                del self._begun[number]
                ready.append(number)
        return ready

    def _rested(self) -> list[int]:
        """Slow ones that are asked again, since their time is over or too few others are left."""
        few = len(self.present) < self.least
        over = [
            n
            for n, until in self._resting.items()
            if (few or until <= self.version) and n not in self._handing
        ]
        for number in over:
            del self._resting[number]
        return over

    def _again(self, number: int) -> None:
        """Start a lost worker again, or wait with that for the next update where it is lost again and again."""
        hand = self.hands[number]
        self._begun.pop(number, None)
        self._losses[number] += 1
        over = self._losses[number] > MOST_RESTARTS
        often = f", which makes {self._losses[number]} losses in one step; it is left out until the next update."
        self.on_message(hand.lost + (often if over else "; it is started again."))
        hand.stop()
        if not over:
            self.hands[number] = self._start(number)
            self._invite(number)

    def _expects(self, hand: Hand, serial: int) -> bool:
        due = self._due.get(hand.number)
        if due is not None and due.asked == serial:
            # There may be a newer one by now; or it has taken none.
            hand.version = due.before if hand.replies[serial] == ("done", "") else due.version
            return True
        own = (self._begun.get(hand.number), self._handing.get(hand.number))
        return serial in own or super()._expects(hand, serial)

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
        """Send the learner's weights where they may have changed, and see that there is a worker to be asked."""
        self._send_weights()
        if not self.present:
            self._wait_for_enough()

    def _send_weights(self) -> None:
        """Send the learner's weights to all until none are lost on the way, if they may have changed."""
        while self._stale:
            self._issue += 1
            used = frozenset(due.issue for due in self._due.values())
            self._sums, self._where = self.learners.first("pack_up", self._issue, used)
            self._source = self.learners.hands[0]
            self._parcel = None
            self._stale = False
            # One that is behind gets them after those that it waits for, if there are any.
            self._publish(
                [number for number in (*self.present, *self._behind) if number not in self._due]
            )
            if self.lacking:
                self.mend()

    def _publish(self, numbers: Sequence[int], wait: bool = True) -> None:
        """Send the newest weights, and wait until most workers have them. Those that take far longer than the others
        are not asked for anything until they have them, too (`_admit`); those that never do are lost."""
        source = self.learners.hands[0]
        if source is not self._source:  # it was replaced, and has packed nothing
            self._stale = True
            return
        begun = time.monotonic()
        for number in numbers:
            if not source.lost:
                self._deliver(number)
        patience = math.inf if wait else 0.0
        while (late := sum(number in self._due for number in numbers)) and not source.lost:
            spent = time.monotonic() - begun
            if spent > patience:
                break
            if 2 * late <= len(numbers):
                patience = min(patience, max(HURRY_S, HURRY * spent))
            self._hear(0.002)
            self._take_over()
        self._behind.update(self._due)
        self.present = [number for number in self.present if number not in self._due]
        if source.lost:
            self._due = {number: due for number, due in self._due.items() if due.asked}
            self.learners.mend()  # which ends the run, or makes another hold the same weights
            self._stale = True

    def _deliver(self, number: int) -> None:
        hand = self.hands[number]
        due = self._due[number] = Delivery(
            self._issue, self.version, self._source, time.monotonic(), hand.version
        )
        if number not in self.post.apart:
            self.tell(number, "publish", due.version, self.drafter, self._where)
            due.asked = self._serial
            return
        # Half of the time, so that there is some left for another way.
        due.sending = self.post.cross(
            self._source, hand, self._issue, self._where, self._timeout_s / 2
        )
        if not due.sending and self._parcel is None:  # the first worker that needs it
            self._parcel = self.post.fetch(self._source, self._timeout_s)
        if not due.sending and not self._source.lost:
            due.sending = self.post.send(self._parcel, hand)

    def _take_over(self) -> None:
        """Lead deliveries on. They end where a worker has the newest weights, or is lost."""
        for number, due in list(self._due.items()):
            if self._lead_on(number, due):
                del self._due[number]

    def _lead_on(self, number: int, due: Delivery) -> bool:
        """Lead one delivery on. Returns whether it has ended."""
        hand = self.hands[number]
        if (
            not due.asked
            and not hand.lost
            and (due.source.lost or self.post.arrived(due.sending, due.source, hand))
        ):
            if due.source.lost:  # and the weights with it: another learner packs them again
                self._stale = True
                return True
            self.tell(number, "publish", due.version, self.drafter, None)
            due.asked, due.since = self._serial, time.monotonic()
        answer = hand.replies.pop(due.asked, None)
        if answer is None:
            if time.monotonic() - due.since > self._timeout_s - LOOK_S:
                what = (
                    f"take version {due.version} of the weights" if due.asked else "get the weights"
                )
                hand.lose(f"did not {what} within {self._timeout_s:g} s")
        elif answer[0] == "failed":
            hand.lose(f"did not take version {due.version} of the weights: {answer[2]}")
        elif due.issue != self._issue:  # there are newer ones
            self._deliver(number)
            return False
        elif not answer[1]:  # it cannot reach them
            if due.source.lost:
                self._stale = True
                return True
            self.post.apart.add(number)
            self._deliver(number)
            return False
        elif answer[1] != self._sums:
            hand.lose(f"holds other weights than the learner after version {due.version}")
        else:
            return True
        return bool(hand.lost)

    def call_each(
        self, name: str, args: Mapping[int, tuple[Any, ...]], again: bool = True
    ) -> list[Any]:
        if name == "release":
            return []  # workers have their memory to themselves
        if name == "take_back":
            self._stale = True
            return []
        if not self.present:  # all are about to leave
            self._wait_for_enough()
        return super().call_each(name, args, again)

    def follow(self, learners: Crew) -> None:
        """Work for other learners, which go on from an earlier checkpoint."""
        self.deliver, self.mended = lambda number, tickets, bundle: None, lambda numbers: None
        self.handed = lambda number, state: None
        self.owing = tuple
        self.learners = learners
        self.version = 0
        self._stale = True
        for number in (*self._due, *self._handing):
            self.hands[number].lose("waited for a learner that was lost")
        self._admit()
        self.call("drop")
        self._losses.clear()
        self.post.apart.clear()

    # ---- leaving

    def listen(self, timeout: float) -> None:
        super().listen(timeout)
        self._admit()
        self.post.look(self.hands)
        for number in [
            n
            for n in {*self.present, *self._resting} - self._handing.keys()
            if self.hands[n].leaving
        ]:
            self._send_away(number, "has to leave")
        known = {
            n: p[1:]
            for n in self.present
            if (p := self.hands[n].pace)[0] > (AGAIN if self._rests[n] else PACED)
        }
        usual = [median_low(kind) for kind in zip(*known.values(), strict=True)]
        for number, pace in known.items():
            times = min(own / other for own, other in zip(pace, usual, strict=True))
            if times > SLOW and len(self.present) > self.least:
                self._rests[number] += 1
                self._resting[number] = self.version + REST * 2 ** (self._rests[number] - 1)
                self._send_away(number, f"takes {times:.0f} times as long as the others")

    def _send_away(self, number: int, why: str) -> None:
        """Let the others go on with what a worker has, and ask it for nothing more."""
        self.on_message(f"{self.hands[number].name} {why}: the others go on with what it has.")
        self.present = [n for n in self.present if n != number]
        self.tell(number, "hand_over")
        self._handing[number] = self._serial

    def _take_from(self) -> None:
        """Give to others what workers have given up."""
        for number, serial in list(self._handing.items()):
            if number not in self._handing:  # it was seen to while others were waited for
                continue
            hand = self.hands[number]
            if time.monotonic() - hand.since > self._timeout_s - LOOK_S:
                hand.lose(f"did not hand over what it had within {self._timeout_s:g} s")
            if (answer := hand.replies.pop(serial, None)) is not None and answer[0] == "failed":
                hand.lose(f"did not hand over what it had: {answer[2]}")
            if answer is None and not hand.lost:
                continue
            del self._handing[number]
            hand.pace = (0.0, 0.0, 0.0)
            if hand.lost or hand.leaving:
                self._resting.pop(number, None)  # another takes its place
            if hand.lost:
                self._again(number)
            elif hand.leaving:
                hand.stop()
                self.hands[number] = self._start(number)
                self._invite(number)
            self._wait_for_enough()
            if hand.lost:
                self.mended({number})
            elif answer is not None:
                self.handed(number, answer[1])

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
            there = len(self.present) >= self.least
            if there or (
                time.monotonic() < until and (self._begun or self._behind or self._handing)
            ):
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
        fits = (
            node
            for node in left
            if all(node.get(kind, 0) >= number for kind, number in need.items())
        )
        if (node := next(fits, None)) is not None:
            node.update({kind: node[kind] - number for kind, number in need.items()})
        return node is not None

    for other in beside:
        place(other)
    return next((count for count in range(most) if not place(need)), most)
