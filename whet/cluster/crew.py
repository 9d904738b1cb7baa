"""The processes of a fleet, as their driver sees them: started, asked, heard, and started again when one dies.

`fleet.py` (the engine and the learner) asks through a `Crew`; `member.py` is the other side. There are no
threads: messages move whenever one of these functions is called. A process that dies, or does not answer in time, is
started again; all of them form a new group, and it takes over weights and moments from one that lives. So a run loses a
process without a trace, and the tokens that it had written are written again.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet import errors
from whet.cluster.channel import Channel, attend, pack
from whet.cluster.ranks import Unmet
from whet.cluster.scratch import scratch_folder
from whet.errors import Lost, WhetError

START_S = 900.0  # seconds for loading a model and capturing what it runs by
ANSWER_S = 1800.0  # seconds for any other answer
SILENT_S = 300.0  # seconds without a word from a process that decodes: it speaks every few seconds
FORM_S = 60.0  # seconds for forming a group
EXCHANGE_S = 900.0  # seconds that a process waits for the others in an exchange of gradients
GRACE_S = 20.0  # seconds in which a failure may turn out to be the consequence of another's death
LEAVE_S = 5.0  # seconds for leaving in order
# seconds from one look at who is late to the next, at most: so much before a limit one counts as
# late
LOOK_S = 0.4
SPACE = "; df -h /dev/shm shows whether it is full, and a container gets more by --shm-size"
MOST_RESTARTS = 3  # in a row, without an update in between
CODE = "import sys; from whet.processes import serve_member; serve_member(int(sys.argv[1]), int(sys.argv[2]))"
COMMAND = (sys.executable, "-c", CODE)


class Hand:
    """One place in the crew, and the process that has it, wherever that runs."""

    def __init__(self, number: int, name: str, channel: Channel) -> None:
        self.number = number
        self.name = name
        self.channel = channel
        self.replies: dict[int, tuple[Any, ...]] = {}  # by serial number of the question
        self.version: int | None = None  # of the weights that it decodes with
        self.since = time.monotonic()  # the last word from it, or to it where it owes none
        # whether it was decoding at the last look: a question to it is no sign of life
        self.owes = False
        # steps of its engine that it has timed, seconds of one, and the same per row
        self.pace = (0.0, 0.0, 0.0)
        self.lost = ""  # why it is of no use any more
        self.leaving = False  # whether it must go soon

    def lose(self, why: str) -> None:
        if not self.lost:
            self.lost = f"{self.name} {why}"

    def ended(self) -> str:
        """How the process ended, in words."""
        raise NotImplementedError

    def leave(self, seconds: float) -> None:
        """Wait so long at most for a process that was told to leave."""

    def stop(self) -> None:
        """End the process, with all that it started."""
        raise NotImplementedError


class Child(Hand):
    """A process of this machine, at the other end of a pair of sockets."""

    def __init__(self, number: int, name: str, environment: Mapping[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as errors_to:
            self.process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno()), str(os.getpid())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors_to,
                stderr=errors_to,
                start_new_session=True,  # Ctrl-C is the driver's affair, and what it starts ends with it
            )
        self.log = log
        super().__init__(number, name, Channel(ours))

    def ended(self) -> str:
        self.leave(LEAVE_S)
        code = self.process.returncode
        how = (
            "fell silent"
            if code is None
            else f"was killed by signal {-code}"
            if code < 0
            else f"ended ({code})"
        )
        how += ", as happens where /dev/shm is full" if code == -signal.SIGBUS else ""
        lines = (
            self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        )
        return f"{how}, and said: {lines[-1].strip()[:300]}" if lines and (code or 0) > 0 else how

    def leave(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def stop(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.leave(LEAVE_S)


class Crew:
    """deliver: called with the number of a member, tickets and their rollouts, as they come. mended: called with
    the numbers of the members that were started again; what they were asked must be asked again."""

    kind = "Process"  # what a member is called

    def __init__(
        self,
        order: Mapping[str, Any],
        environments: Sequence[Mapping[str, str]],
        backend: str,
        divided: bool = False,
        start: Callable[[int, str], Hand] | None = None,
    ) -> None:
        """order: what members build, and whether they build their learner later, when they are a group. divided:
        masters and moments are shared out, so what a lost member had is in the last checkpoint alone. start: starts the
        member of a number and a name, where it is no process of this machine."""
        self.divided = divided
        self._starter = start
        self.order = order
        self.environments = environments
        self.backend = backend
        self.size = len(environments)
        self.present: Sequence[int] = range(self.size)  # the members that can be asked
        self.version = 0  # of the weights that all decode with
        self.drafter: Any = None  # that all draft with, where it learns; it travels with weights
        self.deliver: Callable[[int, Sequence[int | None], Any], None] = (
            lambda number, tickets, bundle: None
        )
        self.mended: Callable[[set[int]], None] = lambda numbers: None
        # with what a member has given up
        self.handed: Callable[[int, Any], None] = lambda number, state: None
        self.taught: Callable[[int, int, float], None] = lambda number, step, loss: None
        self.owing: Callable[[], Container[int]] = tuple  # members that decode, so must speak
        self.restarts = 0  # in a row
        self.silent_s = SILENT_S
        self.answer_s = ANSWER_S
        # For the user: a process was started again, or warns.
        self.on_message: Callable[[str], None] = lambda sentence: None
        self.folder, lock = scratch_folder()
        self._serial = self._generation = 0
        self._noted: set[str] = set()
        self._awaited = 0  # the question whose answers are waited for
        self.hands: list[Hand] = []
        self._closing = weakref.finalize(
            self, _stop_all, self.hands, self.folder, lock, os.getpid()
        )
        try:
            self.hands.extend(self._start(number) for number in range(self.size))
            self._begin_all()
        except BaseException:
            Crew.close(self)
            raise
        # one that is started again gets its weights from another
        self.order = {**order, "weights": ""}

    # ---- asking

    def call(self, name: str, *args: Any) -> list[Any]:
        """Ask all that are present; their answers. After a death all are asked again, who may be others by then."""
        return self.call_each(name, dict.fromkeys(range(self.size), args))

    def call_each(
        self, name: str, args: Mapping[int, tuple[Any, ...]], again: bool = True
    ) -> list[Any]:
        """Ask those members, each with its own arguments. `again`: after a death all are asked again."""
        while True:
            numbers = [number for number in args if number in self.present]
            answers = self._ask(numbers, name, [args[number] for number in numbers], self.answer_s)
            self.raise_failure(*answers.values())
            if not self.lacking:
                return [answers[number][1] for number in numbers]
            self.mend()
            if not again:
                return [answers[number][1] for number in numbers if number in answers]

    @property
    def lacking(self) -> bool:
        """Whether a member is lost that `mend` has not seen to."""
        return any(self.hands[number].lost for number in self.present)

    def prepare(self) -> None:
        """Called before requests are sent."""

    def refresh(self, version: int) -> list[Any]:
        """The weights of all members have changed; version and checksum of each."""
        return self.call("update", version, self.drafter)

    def first(self, name: str, *args: Any) -> Any:
        """Ask the first member alone."""
        while True:
            answers = self._ask([0], name, [args], ANSWER_S)
            self.raise_failure(*answers.values())
            if 0 in answers:
                return answers[0][1]
            self.mend()

    def together(self, name: str, *args: Any) -> dict[int, Any]:
        """Ask all for what they can only do together; the answers of those that did it. Where one has died, the others
        may have failed: the crew is whole again on return, and `position` tells the caller what was done."""
        answers = self._ask(range(self.size), name, [args] * self.size, ANSWER_S, grace=EXCHANGE_S)
        if not self.lacking:
            self.raise_failure(*answers.values())
        else:
            self.mend()
        return {number: answer[1] for number, answer in answers.items() if answer[0] == "done"}

    def lead(self, name: str, args: tuple[Any, ...], then: Callable[[], None]) -> bool:
        """Ask all for what they can only do together, and `then` send them what it takes. False where one was lost: the
        crew is not whole, and the others may be anywhere in it."""
        answers = self._ask(
            range(self.size), name, [args] * self.size, ANSWER_S, grace=0.1, then=then
        )
        if self.lacking:
            return False
        self.raise_failure(*answers.values())
        return True

    def tell(self, number: int, name: str, *args: Any) -> None:
        """Ask one member for what has no answer."""
        self._serial += 1
        hand = self.hands[number]
        hand.since = hand.since if hand.owes else time.monotonic()
        hand.channel.send(pack((self._serial, name, args)))

    def send_all(self, message: Any) -> None:
        """A message that is part of what all were asked before."""
        packed = pack(message)
        for hand in self.hands:
            hand.since = time.monotonic()
            hand.channel.send(packed)

    def listen(self, timeout: float) -> None:
        """Take what has come, and make the crew whole if one is lost."""
        self._hear(timeout)
        for hand in self.hands:
            hand.owes = hand.number in self.owing()
            if hand.owes and time.monotonic() - hand.since > self.silent_s - LOOK_S:
                hand.lose(f"did not say a word for {self.silent_s:g} s while it decoded")
        if self.lacking:
            self.mend()

    @staticmethod
    def raise_failure(*answers: tuple[Any, ...]) -> None:
        for _, kind, text in [answer for answer in answers if answer[0] == "failed"]:
            found = getattr(errors, kind, None)
            if isinstance(found, type) and issubclass(found, WhetError):
                raise found(text)
            full = SPACE if "/dev/shm" in text or "shared memory" in text else ""
            raise WhetError(f"A process of the fleet failed with {kind}: {shortened(text)}{full}")

    def _ask(
        self,
        numbers: Iterable[int],
        name: str,
        args: Sequence[tuple[Any, ...]],
        limit: float,
        grace: float = 0.0,
        then: Callable[[], None] = lambda: None,
    ) -> dict[int, tuple[Any, ...]]:
        """The answers of those that gave one; the others are lost. grace: members do this together, so where one fails
        or is lost the others cannot end it, and get so many seconds to notice. `then` is called once all are asked."""
        self._hear(0.0)  # so that one that has spoken in time counts as alive
        self._serial += 1
        serial = self._serial
        packed = dict[int, bytes]()
        self._awaited = serial
        waited = [self.hands[number] for number in numbers]
        for hand, own in zip(waited, args, strict=True):
            hand.since = hand.since if hand.owes else time.monotonic()
            if id(own) not in packed:  # what is the same for all is packed once
                packed[id(own)] = pack((serial, name, own))
            hand.channel.send(packed[id(own)])
        del packed
        then()
        # when the first was left alone by another, and when the first was lost
        unmet = gone = math.inf
        while True:
            now = time.monotonic()
            waiting = [hand for hand in waited if serial not in hand.replies and not hand.lost]
            failures = [
                hand.replies[serial][1]
                for hand in waited
                if hand.replies.get(serial, ("",))[0] == "failed"
            ]
            if self.lacking:
                gone = min(gone, now)
            elif any(kind != Unmet.__name__ for kind in failures):
                # the member itself failed: the caller raises that, since the others may never
                # answer
                break
            elif failures:
                unmet = min(unmet, now)  # the death that explains it may be seen a little later
            late = now - unmet > GRACE_S
            if not waiting and (unmet == math.inf or gone < math.inf or late):
                break
            for hand in waiting:
                if now - hand.since > limit - LOOK_S:
                    hand.lose(f"did not answer {name} for {limit:g} s")
                elif late:
                    hand.lose(f"kept the others waiting in {name}")
                elif grace and now - gone > grace:
                    hand.lose(f"did not leave {name} within {grace:g} s of the loss of another")
            self._hear(0.2 if waiting else 0.05)
        self._awaited = 0
        return {hand.number: hand.replies.pop(serial) for hand in waited if serial in hand.replies}

    def _hear(self, timeout: float) -> None:
        """Take all messages that have come, or wait for one."""
        attend([hand.channel for hand in self.hands if not hand.lost], timeout)
        for hand in self.hands:
            while not hand.lost and (message := hand.channel.take()) is not None:
                hand.since = time.monotonic()
                self._sort(hand, *message)
            # that may have been the last of what it had to write
            hand.owes &= hand.number in self.owing()
            if hand.channel.closed and not hand.lost:
                hand.lose(hand.ended())

    def _sort(self, hand: Hand, kind: str, *rest: Any) -> None:
        if kind == "rollouts":
            hand.pace, version, found = rest
            if version != hand.version:  # it missed an update: what it wrote is not used
                hand.lose(
                    f"decoded with version {version} of the weights in place of {hand.version}"
                )
            else:
                self.deliver(hand.number, *found)
        elif kind == "taught":
            self.taught(hand.number, *rest)
        elif kind == "note":
            if rest[0] not in self._noted:  # all members say the same
                self._noted.add(rest[0])
                self.on_message(rest[0])
        elif kind == "alive":
            (hand.pace,) = rest
        elif kind == "leaving":
            hand.leaving = True
        else:
            serial, *answer = rest
            hand.replies[serial] = (kind, *answer)
            # it has heard of the version that was current when it was asked
            hand.version = self.version
            if not self._expects(hand, serial):  # no answer was wanted: it can only be a failure
                self.raise_failure(hand.replies.pop(serial))

    def _expects(self, hand: Hand, serial: int) -> bool:
        return serial == self._awaited

    # ---- starting, and starting again

    def mend(self) -> None:
        """Start lost members again, form a new group, and give them what a living one has."""
        gone: set[int] = set()
        while lost := [hand for hand in self.hands if hand.lost]:
            self.restarts += 1
            why = lost[0].lost
            if self.restarts > MOST_RESTARTS:
                times = f"Processes were lost {self.restarts} times in a row"
                raise WhetError(
                    f"{times}, the last time because {why}; --resume goes on from the last checkpoint."
                )
            gone |= {hand.number for hand in lost}
            if len(gone) == self.size:
                raise Lost(
                    f"No process is left that holds the newest weights, the last one because {why}."
                )
            if self.divided:
                raise Lost(f"{why}, and with it went its share of masters and moments.")
            self._replace(lost, why)
            if not self.lacking:
                self._form()
            if not self.lacking:
                self._share(gone)
        if gone:
            self.mended(gone)

    def renew(self) -> None:
        """Start all members again, as they were at their beginning: nothing of what they have is of use."""
        while True:
            why = next((hand.lost for hand in self.hands if hand.lost), "all begin again")
            self.restarts += 1
            if self.restarts > MOST_RESTARTS:
                raise WhetError(
                    f"Processes were lost {self.restarts} times in a row, the last time because {why}."
                )
            self._replace(list(self.hands), why)
            if not self.lacking:
                self._form()
            if not self.lacking:
                return

    def _replace(self, lost: Sequence[Hand], why: str) -> None:
        self.on_message(f"{why}; it is started again.")
        for hand in lost:
            hand.stop()
        for hand in lost:
            self.hands[hand.number] = self._start(hand.number)
        self._begin(hand.number for hand in lost)

    def _share(self, fresh: set[int]) -> None:
        """Those that are behind, and the fresh ones, take over from the one that is furthest."""
        answers = self._ask(range(self.size), "position", [()] * self.size, ANSWER_S)
        known = {number: answer[1] for number, answer in answers.items() if answer[0] == "done"}
        old = {number: version for number, version in known.items() if number not in fresh}
        if not old or self.lacking:
            return
        source = max(old, key=lambda number: (old[number], -number))
        those = [
            number
            for number in range(self.size)
            if number in fresh or known[number] < known[source]
        ]
        given = (source, those, self.version, self.drafter)
        answers = self._ask(range(self.size), "adopt", [given] * self.size, ANSWER_S, grace=GRACE_S)
        if not self.lacking:
            self.raise_failure(*answers.values())
        for hand in self.hands:
            hand.version = self.version

    def _start(self, number: int) -> Hand:
        name = f"{self.kind} {number} of {self.size}"
        if self._starter is not None:
            return self._starter(number, name)
        return Child(number, name, self.environments[number], self.folder / f"{number}.log")

    def _begin_all(self) -> None:
        self._begin(range(self.size))
        self._raise_lost("while it started")
        self._form()
        self._raise_lost("while the processes met")

    def _raise_lost(self, when: str) -> None:
        if lost := [hand.lost for hand in self.hands if hand.lost]:
            # What runs elsewhere may go, and is tried again. A process of this machine that cannot start at all would
            # not start later either, but one that starts from a checkpoint has started before.
            if self._starter is not None or self.order["weights"]:
                raise Lost(f"{lost[0]} {when}.")
            raise WhetError(f"{lost[0]} {when}; nothing was trained.")

    def _begin(self, numbers: Iterable[int]) -> None:
        numbers = sorted(numbers)
        orders = [({**self.order, "rank": number, "size": self.size},) for number in numbers]
        answers = self._ask(numbers, "begin", orders, START_S)
        self.raise_failure(*answers.values())
        for number in numbers:
            self.hands[number].version = self.version
        if not self.lacking and len(numbers) == self.size:
            self._compare_all(answers)

    def _form(self) -> None:
        self._generation += 1
        meeting = f"file://{self.folder / f'meeting-{self._generation}'}"
        if self._starter is not None:  # members may not see this folder
            meeting = self.first("meeting_place")
        given = (meeting, self.size, self.backend, FORM_S, EXCHANGE_S)
        # Where one dies meanwhile, the others find out by their own limit.
        answers = self._ask(
            range(self.size), "form", [given] * self.size, 2 * FORM_S, grace=1.5 * FORM_S
        )
        if not self.lacking:
            self.raise_failure(*answers.values())
        if self.order["later"] and not self.lacking:
            answers = self._ask(
                range(self.size), "complete", [()] * self.size, START_S, grace=GRACE_S
            )
            if not self.lacking:  # else the others may have failed by that
                self.raise_failure(*answers.values())
                self._compare_all(answers)

    def _compare_all(self, answers: Mapping[int, tuple[Any, ...]]) -> None:
        for place, what in enumerate(("recipe", "weights")):
            self.compare(
                [answers[number][1][place] for number in range(self.size)], "at the start", what
            )

    def compare(self, sums: Sequence[str], when: str, what: str = "weights") -> None:
        """Raise where members do not have the same, and name the one that is alone."""
        if odd := [number for number, own in enumerate(sums) if own != max(sums, key=sums.count)]:
            others = "the other processes" if self.size > 2 else f"process {1 - odd[0]}"
            holds = "holds other weights" if what == "weights" else f"has another {what}"
            raise WhetError(f"Process {odd[0]} of {self.size} {holds} than {others} {when}.")

    def close(self) -> None:
        for hand in self.hands:
            if not hand.lost:
                hand.channel.send(pack((0, "leave", ())))
        until = time.monotonic() + LEAVE_S
        for hand in self.hands:
            hand.leave(max(0.0, until - time.monotonic()))
        self._closing()


def shortened(text: str) -> str:
    """In one line, and of a long text both ends: the cause comes first or last."""
    text = " ".join(text.split())
    return text if len(text) <= 440 else f"{text[:220]} ... {text[-220:]}"


def _stop_all(hands: list[Hand], folder: Path, lock: int, owner: int) -> None:
    """At the end, or when a Crew is collected; never in a forked judge."""
    if os.getpid() == owner:
        for hand in hands:
            hand.stop()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
