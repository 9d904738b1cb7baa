"""The learner of a fleet: every member makes all samples of a batch, runs its share of them, and takes the same step.

The loop uses it as any other learner. The batch goes to all members with its tokens; gradients are added up among them,
so weights are never sent. A step in which a member dies is taken again by all who did not end it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.cluster.bundle import emptied
from whet.cluster.crew import Crew
from whet.learn.base import Lesson
from whet.learn.checkpoint import Checkpoint
from whet.types import Batch, Key, Report

AHEAD = 4  # lessons that are sent before the first is answered


class Lessons(NamedTuple):
    """A part of a warm start: its batches, of which those that were sent are kept."""

    steps: int
    lr: float
    coming: Iterator[Lesson]
    sent: list[Lesson]

    def from_the_first(self) -> Iterator[Lesson]:
        for number in range(self.steps):
            if number == len(self.sent):
                self.sent.extend(itertools.islice(self.coming, 1))
            yield from self.sent[number : number + 1]


class Chorus:
    can_signal = frozenset({"score"})

    def __init__(self, crew: Crew, encode: Callable[[str], Sequence[int]]) -> None:
        self.crew, self.encode = crew, encode
        self.version, self.scored_s = 0, 0.0
        self._lessons: list[Lessons] = []  # of the warm start so far: a death repeats it

    def step(self, batch: Batch, progress: float = 0.0, needs: Set[str] = frozenset()) -> Report:
        self._lessons = []
        prompts = {group.prompt_id: self.encode(group.prompt_id) for group in batch.groups}
        sent = emptied(batch)
        while True:
            done = self.crew.together("step", sent, progress, needs, prompts)
            # After a death all members are where the furthest one is: the step counts if that one has ended it.
            if len(done) == self.crew.size or (done and self.crew.first("position") > self.version):
                self.version += 1
                report, self.scored_s = done[min(done)]
                return report

    def entropies(self, keys: Iterable[Key]) -> dict[Key, np.ndarray]:
        """None: they stay with the processes that found them."""
        return {}

    def warm_start(
        self, batches: Iterable[Lesson], *, steps: int, lr: float, on_step: Callable[[int, float], None]
    ) -> None:
        self._lessons.append(Lessons(steps, lr, iter(batches), []))
        todo = self._lessons[-1:]
        while not all(self._teach(lessons, on_step) for lessons in todo):
            self.crew.renew()  # weights were between two steps of some member: from the beginning
            todo = self._lessons

    def _teach(self, lessons: Lessons, on_step: Callable[[int, float], None]) -> bool:
        """Whether all members made all steps."""
        pairs = lessons.from_the_first()

        def send(count: int = 1) -> None:
            for lesson in itertools.islice(pairs, count):
                self.crew.send_all(lesson)

        def taught(number: int, step: int, loss: float) -> None:
            if number == 0:
                on_step(step, loss)
                send()

        self.crew.taught = taught
        return self.crew.lead("teach", (lessons.steps, lessons.lr), lambda: send(AHEAD))

    def rehearse(self) -> None:
        """Members have done it when they began."""

    def write(self, folder: Path) -> None:
        if self.crew.divided:
            self.crew.together("write_together", str(folder.absolute()))
        else:
            self.crew.first("write", str(folder.absolute()))

    def restore(self, checkpoint: Checkpoint) -> None:
        self.version = self.crew.call("restore", str(checkpoint.folder.absolute()))[0]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.crew.first("learner_state"))
